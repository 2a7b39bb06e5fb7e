"""Puts a function in the place of a built-in one: callers that copy or pickle it get the same.

pathlib copies os.listdir into a class: there a Python function would become a method.
"""

import ctypes
import functools
import gc
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


def put_into_class(owner, name, call):
    """In the place of a method. A class of Cython takes no attribute, only its dict does."""
    functools.update_wrapper(call, getattr(owner, name))
    try:
        setattr(owner, name, call)
    except TypeError:
        (names,) = gc.get_referents(vars(owner))  # the dict, of which vars() shows a view
        names[name] = call
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(owner))  # else the old one is cached


def put_subclass(module, name, before):
    """In the place of a class in C: before(*args, **kwargs) is called before one is made."""
    real = getattr(module, name)

    def new(cls, *args, **kwargs):
        before(*args, **kwargs)
        return real.__new__(cls, *args, **kwargs)

    named = {"__new__": new, "__module__": real.__module__, "__doc__": real.__doc__}
    setattr(module, name, type(real)(real.__name__, (real,), named))
