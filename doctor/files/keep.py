"""Keeps what was there before the run touches it.

The rule: the run does not write into an inode that was there before. A file that will be written is
kept by a hard link, and its name gets a fresh inode, in one step: a file of any size that is
opened with "w" costs nothing. What is removed or renamed is kept by a link alone. Where no link
can be made, or the folder may not be written, the bytes are copied, and put back in place.

Paths are absolute bytes whose folders are no links. All of it is called with the lock of all runs.
"""

import contextlib
import errno
import os
import stat
import time

from . import opened
from .disk import copy, copy_facts, on, up, walk, writable
from .journal import HIDDEN, INO, NotKept, facts, state
from .paths import below, inside, parents, seen, there
from .whose import Others


class Keeper:
    """One run's journal, seen from a process of the run, and those of the other runs."""

    def __init__(self, journal):
        self.journal = journal
        self.others = Others(journal)
        self.places = {}  # folder of a file: where its links can lie
        self.count = 0

    def refresh(self):
        """Read what was added to the journals. Call it first."""
        self.journal.refresh()
        self.others.refresh()

    # ---- what the run is about to do

    def will_write(self, path, cuts, by):
        """cuts: it is emptied first, so that its bytes need not be copied. by: the process."""
        info = seen(path)
        if info and not stat.S_ISREG(info.st_mode):
            return
        if not info:
            self.will_make(path, opened.entry(path, by))
            return
        if not writable(path) and (by != opened.PROGRAM or not writable(up(path))):
            return  # it cannot be opened so; a program may put another in its place
        breaks = self.others.is_protected(info)
        if self.keep(path, info, writes=True):
            breaks = True
        if breaks:
            self.break_off(path, info, cuts, by)
        else:
            self.writes(path, by, info)

    def writes(self, path, by, info=None):
        """info: the file that will be written. None: also one that is put in its place."""
        entry = opened.entry(path, by, info)
        if not self.journal.opened.knows(entry):
            self.journal.append(entry)

    def will_make(self, path, *more):
        """A name that is not there yet: a file, a folder, a link."""
        if not seen(path):
            self.journal.append(*self.entries_for_new(path), *more)

    def entries_for_new(self, path):
        """Entries of a name that is not there."""
        known = self.journal.known(path)
        if not known:
            yield from self.of_folder(up(path))
            yield self.others.shared(path) or {"do": "new", "path": path}
        elif known["do"] == "folder" and path not in self.journal.anew:
            yield {"do": "anew", "path": path}

    def will_link(self, old, new):
        """A second name: the inode must not be written by either."""
        self.will_remove(old)
        info = seen(old)
        if info:
            self.will_make(new, *self.moved(old, new, info))

    def will_symlink(self, path):
        """A link has no state of its own that could be noted."""
        if not seen(path):  # else it will fail
            self.will_make(path)
            self.writes(path, "link")

    def will_remove(self, path):
        info = seen(path)
        if info and stat.S_ISDIR(info.st_mode):
            self.journal.append(*self.of_folder(path), *self.of_folder(up(path)))
        elif info:
            self.journal.append(*self.other_names(path, info))
            self.keep(path, info)

    def will_remove_tree(self, path, found=None):
        """found: only these of a walk through it. All at once: one wait for the disk."""
        entries = [*self.of_each(found or walk(path))]
        self.journal.append(*self.of_folder(up(path)), *entries, sync=True)

    def will_rename(self, old, new):
        info, is_there = seen(old), seen(new)
        if not info:
            return
        self.refuse_if_store_inside(old)
        self.will_remove(new)
        entries = [] if is_there else [*self.entries_for_new(new)]
        if not stat.S_ISDIR(info.st_mode):
            self.will_remove(old)
            self.journal.append(*entries, *self.moved(old, new, info))
            return
        for path, below_it in walk(old):
            target = new + path[len(old) :]
            if seen(target) and path != old:
                return  # a folder that is not empty: it will fail
            if path != old and not self.journal.known(target):
                entries.append({"do": "new", "path": target})
            if not stat.S_ISDIR(below_it.st_mode):
                entries += self.moved(path, target, below_it)
        of_old = [*self.of_folder(up(old)), *self.of_each(walk(old))]
        self.journal.append(*of_old, *entries, sync=True)

    def refuse_if_store_inside(self, folder):
        """What is kept would go with it."""
        for store in (store for one in [self.journal, *self.others.all()] for store in one.stores):
            if below(store, folder):
                raise NotKept(f"the doctor keeps files in this folder: {os.fsdecode(store)}")

    def will_change_facts(self, path, by):
        """Its mode, owner or time: they are noted, its bytes are not touched."""
        info = seen(path)
        if info and stat.S_ISDIR(info.st_mode):
            self.journal.append(*self.of_folder(path), sync=True)
        elif info:
            own = self.own(path, info)
            if own:
                self.writes(path, by, info)  # its state will be another
            noted = (info.st_dev, info.st_ino) in self.journal.changed_facts
            if not noted and (not own or self.is_in_place(path, info)):
                self.journal.append({"do": "meta", "path": path, "facts": facts(info)}, sync=True)

    def own(self, path, info):
        return bool(self.journal.known(path)) and not self.others.is_protected(info)

    def closed(self, paths, by):
        """Note the state of files that a process of the run has written and closed."""
        entries = []
        for path in paths:
            info = there(path)
            written = path in self.journal.opened.ever and self.journal.known(path)
            if not written or (info and self.others.is_protected(info)):
                continue  # no bytes of ours: its mode was changed, or it was moved here
            if info and not self.journal.opened.had(path, info):
                info = None  # somebody else has put another in its place
            now = [info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns] if info else None
            entries.append({"do": "state", "path": path, "state": now, "by": by})
        self.journal.append(*entries)

    # ---- how it is kept

    def keep(self, path, info, writes=False):
        """Keep a file or link, unless it is the run's own. Returns whether it was kept."""
        entry = self.entry_for(path, info, writes)
        if entry:
            keeps = entry["do"] == "keep"
            self.journal.append(*self.of_folder(up(path)), entry, sync=keeps)
            return keeps
        return False

    def entry_for(self, path, info, writes=False):
        """What is noted of a file or link before it is touched; None if the run has made it."""
        if self.journal.known(path) and not self.others.have_changed(path, info):
            return None
        entry, protected = self.journal.first.get(path), self.others.is_protected(info)
        if not entry and state(info) in self.journal.states and not protected:
            return {"do": "new", "path": path}  # the run wrote it, and a program moved it here
        shared = None if entry else self.others.shared(path)
        return shared or self.link_or_copy(path, info, writes)

    def link_or_copy(self, path, info, writes=False):
        """An entry of it; its bytes are safe when this returns."""
        entry = {"do": "keep", "path": path, "facts": facts(info)}
        folder = up(path)
        if not (writes and not writable(folder)):
            for place in self.places_for(folder, info.st_dev):
                kept = os.path.join(place, self.new_name())
                with contextlib.suppress(OSError, NotImplementedError):
                    os.link(path, kept, follow_symlinks=False)
                    self.places[folder] = place
                    return entry | {"kept": kept, "how": "link"}
        return entry | {"kept": self.copied(path, info), "how": "copy"}

    def copied(self, path, info):
        kept = os.path.join(self.journal.folder, b"kept", self.new_name())
        if stat.S_ISLNK(info.st_mode):
            os.symlink(os.readlink(path), kept)
        elif stat.S_ISREG(info.st_mode):
            copy(path, kept)
            with open(kept, "rb") as file:
                os.fsync(file.fileno())
        return kept

    def break_off(self, path, info, cuts, by):
        """Give the name a fresh inode, which will be written: the old one stays as it is."""
        if self.is_in_place(path, info):
            self.writes(path, by, info)
            return
        why = None
        for place in self.places_for(up(path), info.st_dev):
            fresh = os.path.join(place, self.new_name())
            try:
                if cuts:
                    os.close(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
                else:
                    copy(path, fresh)
                copy_facts(path, fresh, info)
                self.writes(path, by, os.lstat(fresh))
                os.replace(fresh, path)
                return
            except OSError as error:  # such as EXDEV: one disk, mounted at two places
                why = error
                with contextlib.suppress(OSError):
                    os.unlink(fresh)
                if error.errno == errno.ENOSPC:
                    raise
        if self.is_another_name(path, info):
            raise why or NotKept(path)
        self.writes(path, by, info)
        entry = {"do": "keep", "path": path, "facts": facts(info), "how": "copy", "again": True}
        self.journal.append(entry | {"kept": self.copied(path, info)}, sync=True)

    def is_in_place(self, path, info):
        """The run writes the file that was there: its folder may not be written. A copy is kept."""
        entry = self.journal.first.get(path, {})
        return entry.get("how") == "copy" and entry["facts"][INO] == info.st_ino

    def is_another_name(self, path, info):
        """The name is new, its inode is not: what is kept of a new name is not put back."""
        return (self.journal.known(path) or {"do": "keep"})["do"] == "new"

    def of_each(self, found):
        """Entries of the files and folders of a walk."""
        for path, info in found:
            if HIDDEN in path or inside(path, self.journal.root):
                continue  # our own
            if stat.S_ISDIR(info.st_mode):
                yield from self.of_folder(path)
                continue
            yield from self.other_names(path, info)
            entry = self.entry_for(path, info)
            if entry:
                yield entry

    def other_names(self, path, info):
        """Of a file of the run, perhaps still open, that loses this name: by others it is ours."""
        if info.st_nlink > 1 and self.own(path, info) and self.journal.opened.may_write(path, info):
            yield {"do": "open", "inode": [info.st_dev, info.st_ino]}

    def moved(self, old, new, info):
        """What is known of the run's own file goes with it to its new name."""
        is_open = self.journal.opened
        if is_open.may_write(old, info):
            yield from (opened.entry(new, by, info) for by in is_open.by_whom(old))
            now = [info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns]
            yield {"do": "state", "path": new, "state": now}

    def of_folder(self, path):
        """An entry of a folder's mode and time, before something in it changes."""
        info = seen(path)
        if info and stat.S_ISDIR(info.st_mode) and not self.journal.known(path):
            earlier = self.others.folder(path) or self.others.shared(path)
            yield earlier or {"do": "folder", "path": path, "facts": facts(info)}

    # ---- where links lie

    def new_name(self):
        self.count += 1
        return b"%x-%d-%d" % (time.time_ns(), os.getpid(), self.count)

    def places_for(self, folder, device):
        """Folders on its file system, the best first; a hidden one is made where it is needed."""
        if folder in self.places:
            yield self.places[folder]
        own = os.path.join(self.journal.folder, b"kept")
        yield from (p for p in [own, *self.journal.stores] if on(p, device))
        # The highest first: the run may remove the lower ones.
        for high in reversed([folder, *parents(folder)]):
            if on(high, device) and writable(high):
                hidden = os.path.join(high, HIDDEN + os.path.basename(self.journal.folder))
                if hidden not in self.journal.stores:
                    entries = [*self.of_folder(high), {"do": "store", "path": hidden}]
                    self.journal.append(*entries, sync=True)
                with contextlib.suppress(OSError):
                    os.makedirs(hidden, mode=0o700, exist_ok=True)
                    yield hidden
