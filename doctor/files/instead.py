"""Puts a function in the place of a built-in one: callers that copy or pickle it get the same.

pathlib copies os.listdir into a class: there a Python function would become a method.
"""

import functools
import os


class Instead:
    """An object: no method as a class's attribute."""

    def __init__(self, real, call, module):
        functools.update_wrapper(self, real)
        self.__module__, self.call = module, call

    def __call__(self, *args, **kwargs):
        return self.call(*args, **kwargs)

    def __reduce__(self):
        return self.__name__


def put_instead(module, name, call):
    real = getattr(module, name)
    new = Instead(real, call, module.__name__)
    # shutil asks there what a function can do.
    for able in (os.supports_fd, os.supports_dir_fd, os.supports_follow_symlinks):
        if real in able:
            able.add(new)
    setattr(module, name, new)
