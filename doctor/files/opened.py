"""Which files the processes of a run may have open for writing, and in which inodes.

A file that somebody else has put in the place of such a one is another inode: it is not the run's.
"""

from .paths import parents, there

PROGRAM = "program"  # in place of a process: what it does with a file is not seen


def entry(path, by, info=None):
    """What the journal notes before a process opens a file to write.

    by: the process. info: of the file that is there; None where there is none yet.
    """
    inode = [info.st_dev, info.st_ino] if info and by != PROGRAM else None
    return {"do": "write", "path": path, "by": by, "inode": inode}


class Opened:
    def __init__(self):
        self.now = {}  # path: {process: its inodes; None is any}
        self.ever = {}  # path: the inodes in which it was ever opened

    def take(self, noted):
        path, inode = noted["path"], inode_of(noted)
        self.now.setdefault(path, {}).setdefault(noted["by"], set()).add(inode)
        self.ever.setdefault(path, set()).add(inode)

    def closes(self, path, by):
        self.now.get(path, {}).pop(by, None)

    def knows(self, noted):
        return inode_of(noted) in self.now.get(noted["path"], {}).get(noted["by"], ())

    def inherited(self, paths, by):
        """What the journal notes of a process that may have them open as another has."""
        for path in paths:
            for inode in set().union(*self.now.get(path, {}).values()):
                yield {"do": "write", "path": path, "by": by, "inode": inode}

    def by_whom(self, path):
        return [*self.now.get(path, ())] or [PROGRAM]

    def may_write(self, path, info):
        """Whether a process of the run may be writing this file, or a program in its folders."""
        if is_one(info, set().union(*self.now.get(path, {}).values())):
            return True
        return any(PROGRAM in self.now.get(folder, ()) for folder in parents(path))

    def had(self, path, info):
        """Whether it may be a file that a process of the run has had open."""
        return is_one(info, self.ever.get(path, ()))

    def inodes(self):
        """Of all files that are open."""
        found = set()
        for path, by in self.now.items():
            inodes = set().union(*by.values())
            info = there(path) if None in inodes else None
            found |= inodes | ({(info.st_dev, info.st_ino)} if info else set())
        return found - {None}


def inode_of(noted):
    inode = noted.get("inode")  # journals of older doctors have none
    return tuple(inode) if inode else None


def is_one(info, inodes):
    return None in inodes or (info.st_dev, info.st_ino) in inodes
