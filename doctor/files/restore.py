"""Puts back what was there before a run, removes what it made, and says what was done.

It looks at what is there now, not at what was done in which order: so it may be killed at any
moment and done again. A file that somebody else has written since is never touched.
"""

import contextlib
import errno
import filecmp
import os
import stat

from ..words import say
from .disk import make_writable, put, up, walk
from .doctors import all_doctors_of, doctors_of, sweep
from .journal import ATIME, DEV, GID, INO, MODE, MTIME, SIZE, UID, locked, runs, state
from .paths import below, inside, seen, there
from .whose import Whose


class Restore:
    """limit: nothing that was written later (seconds) is the run's; None: it has just ended."""

    def __init__(self, journal, keep_new=False, limit=None):
        self.journal = journal.refresh()
        self.others = [other for other in runs(journal.root) if other.folder != journal.folder]
        self.whose = Whose(journal, self.others, limit)
        self.keep_new = keep_new
        self.put, self.removed, self.kept_new, self.cached = set(), [], [], []
        self.left = []  # (path, why, where the older one lies or None)
        self.handed = set()  # paths that another run will put back
        self.outlived = []  # processes of the run that could not be ended

    def do(self):
        first = self.journal.first
        self.open_folders()
        for folder in self.journal.anew:  # what is in it by now, and was not before
            for path, _ in walk(folder):
                first.setdefault(path, {"do": "new", "path": path})
        self.whose.look_at_names()
        for path in [*first]:
            self.safely(self.hand_over, path)
        entries = {path: entry for path, entry in first.items() if path not in self.handed}
        for path in sorted((p for p, e in entries.items() if e["do"] == "new"), key=depth):
            self.safely(self.remove_new, path)
        for path in sorted(p for p, e in entries.items() if e["do"] == "folder"):
            self.safely(self.make_folder, path)
        for path, entry in entries.items():
            if entry["do"] == "keep":
                self.safely(self.put_back, path, entry)
        for entry in self.journal.older:
            if seen(entry["kept"]):
                why = say("somebody else wrote it during the run; before the run it was another")
                self.left.append((entry["path"], why, entry["kept"]))
        for path, facts in self.journal.meta.items():
            info = there(path)
            if info and info.st_ino == facts[INO]:
                self.safely(self.set_facts, path, facts, info)
        self.tidy(entries)
        return self

    def safely(self, work, path, *args):
        """What cannot be put back is told, and the rest goes on."""
        try:
            work(path, *args)
        except OSError as error:
            entry = self.journal.first.get(path, {})
            why = say("could not be put back: {error}", error=error.strerror)
            self.left.append((path, why, entry.get("kept")))

    def open_folders(self):
        """The run may have taken away the permission to look into a folder, or to write."""
        for path, entry in sorted(self.journal.first.items()):
            if self.keep_new and entry["do"] == "new":
                continue
            whole = entry["do"] in ("new", "keep") or path in self.journal.anew
            with contextlib.suppress(OSError):
                for folder, info in walk(path) if there(path) else ():
                    if stat.S_ISDIR(info.st_mode):
                        make_writable(folder, info)
                    if not whole:  # of what was there, each is in the journal
                        break

    # ---- what another run puts back

    def hand_over(self, path):
        """Another run has touched it too: that one puts it back, and is told what of it is ours."""
        entry = self.journal.first[path]
        states = [*self.whose.states_of(path)] if self.others else []
        if entry["do"] == "shared":
            for other in (other for other in self.others if other.known(path)):
                self.handed.add(path)
                other.append(*states)
            return
        if entry["do"] == "folder":
            return
        for other in self.others:
            theirs = other.first.get(path, {}).get("do") == "shared"
            inside = entry["do"] == "new" and any(below(one, path) for one in other.first)
            if theirs or inside:
                entry = entry if theirs else {"do": "new", "path": path}
                other.append(entry, *states, sync=True)
                self.handed.add(path)
                return

    # ---- what is new

    def remove_new(self, path):
        info = there(path)
        if not info:
            return
        if self.in_cache(path):
            self.cached.append(path)
        elif self.keep_new:
            self.kept_new.append(path)
        elif self.clear(path, info):
            self.removed.append(path)

    def in_cache(self, path):
        caches = [cache.encode("latin-1") for cache in self.journal.header.get("caches", [])]
        return any(inside(path, cache) for cache in caches)

    def clear(self, path, info):
        """Remove what is the run's of a file or a whole folder; whether nothing is left of it."""
        if not stat.S_ISDIR(info.st_mode):
            return self.clear_file(path, info)
        for inner, facts in reversed([*walk(path)]):
            if not stat.S_ISDIR(facts.st_mode):
                self.clear_file(inner, facts)
        for inner, facts in sorted(walk(path), key=lambda one: -len(one[0])):
            if stat.S_ISDIR(facts.st_mode):
                try:
                    os.rmdir(inner)
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        self.not_removed(inner, error)
        return not seen(path)

    def clear_file(self, path, info):
        if path in self.handed or self.journal.first.get(path, {}).get("do") == "keep":
            return False
        if self.in_cache(path):  # in a folder that is new
            self.cached.append(path)
            return False
        try:
            if self.whose.ours(path, info):
                os.unlink(path)
                return True
            self.left.append((path, say("the doctor did not see the run write it"), None))
        except OSError as error:
            self.not_removed(path, error)
        return False

    def not_removed(self, path, error):
        why = say("could not be removed: {error}", error=error.strerror)
        self.left.append((path, why, None))

    # ---- what was there

    def make_folder(self, path):
        info = seen(path)
        if info and not stat.S_ISDIR(info.st_mode) and self.whose.ours(path, info):
            os.unlink(path)
        os.makedirs(path, exist_ok=True)

    def put_back(self, path, entry):
        kept, facts, info = entry["kept"], entry["facts"], there(path)
        now = seen(kept)
        if not now:  # it was put back, and then the doctor was killed
            if not info or (info.st_size, info.st_mtime_ns) != (facts[SIZE], facts[MTIME]):
                self.left.append((path, say("what was kept of it is gone"), None))
            return None
        timed = (facts[DEV], facts[INO]) in self.journal.changed_facts  # by os.utime
        whole = now.st_size == facts[SIZE] and (timed or now.st_mtime_ns == facts[MTIME])
        if info and not stat.S_ISDIR(info.st_mode):
            if entry["how"] == "link" and os.path.samestat(info, now):
                os.unlink(kept)
                if not whole:
                    self.left.append(
                        (path, say("something wrote into it that cannot be seen"), None)
                    )
                return self.set_facts(path, facts, info)
            same = (info.st_ino, info.st_size, info.st_mtime_ns)
            same = same == (facts[INO], facts[SIZE], facts[MTIME])
            if entry["how"] == "copy" and same and (not timed or same_bytes(kept, path)):
                return os.unlink(kept)
            if not self.whose.ours(path, info):
                self.left.append((path, self.not_ours(), kept))
                return None
        os.makedirs(up(path), exist_ok=True)
        if os.path.realpath(up(path)) != up(path):
            self.left.append((path, say("its folder is a link now"), kept))
            return None
        if info and stat.S_ISDIR(info.st_mode) and not self.clear(path, info):
            self.left.append((path, say("it is a folder now, and not empty"), kept))
            return None
        put(kept, path, entry)
        if not info or state(info)[2:] != (facts[SIZE], facts[MTIME]):  # else a copy of it
            self.put.add(path)
        self.set_facts(path, facts, seen(path))
        with contextlib.suppress(FileNotFoundError):  # it was moved
            os.unlink(kept)
        if not whole and entry["how"] == "link":
            self.left.append((path, say("something wrote into it that cannot be seen"), None))

    def not_ours(self):
        if self.journal.programs:
            return say("somebody else wrote it since, or a program that did not say so")
        return say("somebody else wrote it since")

    def set_facts(self, path, facts, info, times=True):
        """Mode, owner, and the time if it is not somebody's who wrote into it."""
        link, folder = stat.S_ISLNK(info.st_mode), stat.S_ISDIR(info.st_mode)
        if folder and os.geteuid() not in (0, info.st_uid):
            return  # such as /tmp: nobody else may set its time
        refused = None
        if (info.st_uid, info.st_gid) != (facts[UID], facts[GID]):
            try:
                os.chown(path, facts[UID], facts[GID], follow_symlinks=False)
            except OSError as error:  # a copy of root's file, to which no link may be made
                refused = error
        if info.st_mode != facts[MODE] and not link:
            os.chmod(path, stat.S_IMODE(facts[MODE]))
        known = (info.st_dev, info.st_ino) in self.journal.changed_facts or path in self.put
        if times and info.st_mtime_ns != facts[MTIME] and (known or folder):
            os.utime(path, ns=(facts[ATIME], facts[MTIME]), follow_symlinks=False)
        if refused:
            raise refused

    # ---- the end

    def tidy(self, entries):
        """Remove what is ours alone; then the times of folders, which all this has changed."""
        journal = self.journal
        self.remove_strays()
        for store in journal.stores:
            with contextlib.suppress(OSError):  # not empty: it holds what is left
                os.rmdir(store)
        others = {up(path) for path, *_ in self.left} | {up(path) for path in self.kept_new}
        folders = {p: e["facts"] for p, e in entries.items() if e["do"] == "folder"}
        for path in sorted(folders, key=depth):
            info = there(path)
            if info and stat.S_ISDIR(info.st_mode):
                self.safely(self.set_facts, path, folders[path], info, path not in others)
        journal.end()
        sweep(journal.root)

    def remove_strays(self):
        """Links and copies that nobody needs: a process was killed before it noted them."""
        needed = {kept for *_, kept in self.left}
        needed |= {self.journal.first[path].get("kept") for path in self.handed}
        for place in [os.path.join(self.journal.folder, b"kept"), *self.journal.stores]:
            with contextlib.suppress(FileNotFoundError):
                for path in (os.path.join(place, name) for name in os.listdir(place)):
                    if path not in needed:
                        os.unlink(path)


def same_bytes(one, other):
    return not os.path.islink(one) and filecmp.cmp(one, other, shallow=False)


def depth(path):
    """To sort by: the deepest first."""
    return -path.count(b"/"), path


def put_back(journal, end_processes, keep_new=False, limit=None):
    """A Restore that was done, or None: another has done it, or the last doctor will do it.

    end_processes: it ends those of these doctors' runs, and returns those that do not die. Nobody
    may write any more, also not for a doctor that was killed just now.
    """
    with locked(journal.root):
        if not os.path.exists(journal.folder) or journal.refresh().done:
            return None
        if doctors_of(journal.folder):
            return None
        outlived = end_processes(all_doctors_of(journal.folder))
        done = Restore(journal, keep_new, limit).do()
        done.outlived = outlived
        return done
