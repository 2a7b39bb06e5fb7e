"""Whose a file is that is there: this run's, another run's, or somebody else's.

Others is asked while the run goes on, Whose when its files are put back.
"""

import os
import stat

from .disk import walk
from .journal import Journal, state
from .paths import there


class Others:
    """The journals of other runs that are not put back, seen from a process of a run."""

    def __init__(self, journal):
        self.journal = journal
        self.by_folder = {}

    def refresh(self):
        """Read what was added to them."""
        found, root = self.by_folder, self.journal.root
        names = {os.path.join(root, name) for name in os.listdir(root)}
        for gone in found.keys() - names:
            del found[gone]
        for folder in names - found.keys() - {self.journal.folder}:
            if os.path.exists(os.path.join(folder, b"journal")):
                found[folder] = Journal(folder)
        for other in found.values():
            other.refresh()

    def all(self):
        return [other for other in self.by_folder.values() if not other.done]

    def shared(self, path):
        """Another run has touched it: what is there now is that run's, and no original."""
        for other in self.all():
            known = other.known(path)
            if known and known["do"] in ("keep", "new", "shared"):
                return {"do": "shared", "path": path}
        return None

    def folder(self, path):
        """What another run has noted of a folder before it changed something in it, or None."""
        noted = [other.first.get(path) for other in self.all()]
        return next((one for one in noted if one and one["do"] == "folder"), None)

    def is_protected(self, info):
        """Whether it is an inode that was there before this run or another."""
        inode = (info.st_dev, info.st_ino)
        return any(inode in journal.protected for journal in [self.journal, *self.all()])

    def have_changed(self, path, info):
        """This run has written it and closed it, and now it is another: somebody else's."""
        entry = self.journal.first.get(path)
        if not entry or entry["do"] == "shared" or self.is_protected(info):
            return False
        wrote = path in self.journal.wrote or path in self.journal.opened.ever
        theirs = any(other.ours(path, info) for other in self.by_folder.values())
        return wrote and not theirs and not self.journal.ours(path, info)


class Whose:
    """What is the run's when it is put back.

    limit: nothing that was written later (seconds) is the run's; None: it has just ended.
    """

    def __init__(self, journal, others, limit=None):
        self.journal, self.others, self.limit = journal, others, limit
        self.inodes = set()  # of files with several names, one of which says that they are ours

    def look_at_names(self):
        """Of hard links perhaps one alone was noted: all are looked at before the first is gone."""
        for top, entry in self.journal.first.items():
            looks = entry["do"] in ("keep", "new") and there(top)
            for path, info in walk(top) if looks else ():
                several = info.st_nlink > 1 and not stat.S_ISDIR(info.st_mode)
                if several and self.ours(path, info):
                    self.inodes.add((info.st_dev, info.st_ino))

    def ours(self, path, info):
        """Whether the run has written what is there now."""
        inode, journals = (info.st_dev, info.st_ino), [self.journal, *self.others]
        if inode in self.inodes or any(inode in journal.protected for journal in journals):
            return True
        if stat.S_ISSOCK(info.st_mode) or stat.S_ISFIFO(info.st_mode):
            return True  # no bytes are lost
        if any(state(info) in journal.states for journal in journals):
            return True
        if not self.journal.ours(path, info):
            return False
        return self.limit is None or max(info.st_mtime, info.st_ctime) <= self.limit

    def states_of(self, path):
        """Entries for another run's journal: what of it is ours."""
        for inner, info in walk(path) if there(path) else ():
            if not stat.S_ISDIR(info.st_mode) and self.ours(inner, info):
                yield {"do": "state", "path": inner, "state": state(info)}
