"""Hides our folders of kept files from the script: it would take one for a class, or remove it."""

import os

from .instead import put_instead
from .journal import HIDDEN


def install():
    names, entries = os.listdir, os.scandir

    def listdir(path=None):
        return [name for name in names(path) if not hidden(name)]

    def scandir(path=None):
        return Entries(entries(path))

    put_instead(os, "listdir", listdir)
    put_instead(os, "scandir", scandir)


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
