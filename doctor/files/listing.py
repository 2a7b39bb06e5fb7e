"""Hides our folders of kept files from the script: it would take one for a class, or remove it."""

import os

from .journal import HIDDEN


def install():
    names, entries = os.listdir, os.scandir

    def listdir(path=None):
        return [name for name in names(path) if not hidden(name)]

    def scandir(path=None):
        return Entries(entries(path))

    for name, new in (("listdir", listdir), ("scandir", scandir)):
        new.__doc__ = getattr(os, name).__doc__
        for places in (os.supports_fd, os.supports_dir_fd):  # shutil asks there
            if getattr(os, name) in places:
                places.add(new)
        setattr(os, name, new)


def hidden(name):
    return name.startswith(HIDDEN if isinstance(name, bytes) else HIDDEN.decode())


class Entries:
    """What os.scandir() returns, without ours."""

    def __init__(self, entries):
        self.entries = entries

    def __iter__(self):
        return self

    def __next__(self):
        entry = next(self.entries)
        while hidden(entry.name):
            entry = next(self.entries)
        return entry

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def close(self):
        self.entries.close()
