"""The journal of a run: what was there before, written down before the run touches it.

Each run has a folder of its own in the user's state folder:

    lock                one for all runs: who keeps or puts back holds it
    <run>/journal       lines of JSON, on the disk before a file is touched
    <run>/alive-...     locked by a doctor as long as it lives
    <run>/heartbeat     its time of change: when the doctor was last seen alive
    <run>/kept/         hard links to the files that were there before, or copies

Names are bytes here and latin-1 in the journal: any name survives, in any locale.
"""

import contextlib
import fcntl
import json
import os
import stat

from .opened import Opened
from .paths import inside, parents

HIDDEN = b".training-doctor-"  # a folder of kept files, where the state folder is no place


# What was at a path before the run touched it. A line's "do" is one of these, or one of the others:
#   anew     the run has made a folder again that was there
#   write    a process may have the file open for writing, in this inode, or in one that was not
#            there yet: null; state: closed, and looks so now
#   open     an inode of the run's own has lost a name while it may be open
#   meta     mode, owner or time before they were changed
#   store    a folder of kept files; program, large, many, note: for the report
#   run      the first line; met: another run began beside it; done: all is put back
WHAT_WAS_THERE = (
    "keep",  # a file or link, which is kept
    "new",  # nothing
    "folder",  # a folder: its mode and time
    "shared",  # what another run has made or kept: one of the two puts it back
)


class NotKept(PermissionError):
    """What was there could not be kept: better the script fails than a file is lost."""


def state_folder():
    """The folder of all runs: bytes. DOCTOR_STATE moves it."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    places = [os.path.join(home, "training-doctor"), f"/var/tmp/training-doctor-{os.getuid()}"]
    if "DOCTOR_STATE" in os.environ:
        places = [os.environ["DOCTOR_STATE"]]
    for place in places:
        with contextlib.suppress(OSError):
            os.makedirs(place, mode=0o700, exist_ok=True)
            mine = os.lstat(place).st_uid == os.geteuid()  # in /var/tmp anybody may have made it
            if mine and stat.S_ISDIR(os.lstat(place).st_mode):
                with locked(os.fsencode(place)):
                    return os.path.realpath(os.fsencode(place))
    raise SystemExit(f"no folder for the doctor's journal: {places[-1]} (DOCTOR_STATE names one)")


@contextlib.contextmanager
def locked(root):
    """One at a time, among all processes of all runs."""
    try:
        file = os.open(os.path.join(root, b"lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError as error:  # not the script's file, which may be gone
        raise NotKept(f"the doctor's folder is gone: {os.fsdecode(root)}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)  # not by close alone: a fork may have a copy of it
        os.close(file)


def facts(info):
    """What the journal notes of an os.stat_result."""
    fields = "st_mode st_uid st_gid st_size st_mtime_ns st_atime_ns st_dev st_ino".split()
    return [getattr(info, field) for field in fields]


MODE, UID, GID, SIZE, MTIME, ATIME, DEV, INO = range(8)


def state(info):
    """It is the same file with the same bytes if this is the same."""
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns


class Journal:
    """What the journal of one run says: read as far as it is written, written by appending.

    No file stays open: a forked process has nothing of its parent's to close.
    """

    def __init__(self, folder):
        self.folder = folder
        self.root = os.path.dirname(folder)
        self.read_to = 0
        self.header = {}
        self.first = {}  # path: the first of its entries of WHAT_WAS_THERE
        self.anew = set()  # folders that were there, were gone, and are made again
        self.inodes = set()  # (device, inode) of the run's files that lost a name while open
        self.older = []  # entries of kept files, of which somebody else wrote a newer one
        self.protected = set()  # (device, inode) of all files that are kept by a link
        self.facts = {}  # (device, inode): the facts of a file that was there
        self.meta = {}  # path: facts before its mode or time was changed
        self.changed_facts = set()  # (device, inode) of those
        self.states = set()  # of all files that the run has written and closed
        self.wrote = {}  # path: its states
        self.opened = Opened()
        self.stores = []  # hidden folders of kept files
        self.programs = set()
        self.many = set()  # folders with more files than are kept for a program
        self.large = set()  # paths that a program may write, too large to be copied
        self.notes = set()
        self.met = False  # whether another run began or went on beside it
        self.done = False

    # ---- reading

    def refresh(self):
        """Read what other processes have added. A last line that was cut is none yet."""
        try:
            with open(os.path.join(self.folder, b"journal"), "rb") as file:
                if os.fstat(file.fileno()).st_size == self.read_to:
                    return self
                file.seek(self.read_to)
                text = file.read()
        except FileNotFoundError:
            return self
        whole = text.rfind(b"\n") + 1
        self.read_to += whole
        for line in text[:whole].splitlines():
            with contextlib.suppress(ValueError):  # cut by a full disk, then others went on
                self.take(unpacked(json.loads(line)))
        return self

    def take(self, entry):
        do, path = entry["do"], entry.get("path")
        if do in ("keep", "meta"):  # one inode by several names: the facts noted first are old
            inode = (entry["facts"][DEV], entry["facts"][INO])
            entry["facts"] = self.facts.setdefault(inode, entry["facts"])
        if do == "keep":
            old = self.first.get(path)
            again = entry.get("again")  # no link could be made use of: a copy takes its place
            if old and old["do"] == "keep" and entry["kept"] != old["kept"] and not again:
                self.older.append(old)
            self.first[path] = entry
            if entry["how"] == "link":
                self.protected.add((entry["facts"][DEV], entry["facts"][INO]))
        elif do in WHAT_WAS_THERE:
            if self.first.get(path, {"do": "shared"})["do"] == "shared":
                self.first[path] = entry
        elif do == "anew":
            self.anew.add(path)
        elif do == "open":
            self.inodes.add(tuple(entry["inode"]))
        elif do == "write":
            self.opened.take(entry)
        elif do == "state":
            self.opened.closes(path, entry.get("by"))
            if entry["state"]:
                self.states.add(tuple(entry["state"]))
                self.wrote.setdefault(path, set()).add(tuple(entry["state"]))
        elif do == "meta":
            self.meta.setdefault(path, entry["facts"])
            self.changed_facts.add((entry["facts"][DEV], entry["facts"][INO]))
        elif do == "store":
            self.stores.append(path)
        elif do == "program":
            self.programs.add(entry["name"])
        elif do == "many":
            self.many.add(path)
        elif do == "large":
            self.large.add(path)
        elif do == "note":
            self.notes.add(entry["text"])
        elif do == "run":
            self.header = entry
        elif do == "met":
            self.met = True
        elif do == "done":
            self.done = True

    def known(self, path):
        """The entry of a path; "new" where it lies in a folder that the run has made."""
        if path in self.first:
            return self.first[path]
        for folder in parents(path):
            do = self.first.get(folder, {}).get("do")
            if do in ("new", "keep") or folder in self.anew:  # keep: it was a file
                return {"do": "new", "path": folder}
            if do == "shared":
                return None
        return None

    def ours(self, path, info):
        if state(info) in self.states or self.opened.may_write(path, info):
            return True
        return self.open_elsewhere(info)

    def open_elsewhere(self, info):
        """Whether a process of the run may be writing it by another of its names."""
        inode = (info.st_dev, info.st_ino)
        return inode in self.inodes or (info.st_nlink > 1 and inode in self.opened.inodes())

    def beside(self, work):
        """Whether the run began in this folder, one in it, or one above it."""
        began = self.header.get("path", b"\0")
        return inside(began, work) or inside(work, began)

    # ---- writing

    def append(self, *entries, sync=False):
        """Add lines; with sync they are on the disk before it returns. Call it locked."""
        if not entries:
            return
        self.refresh()
        text = b"".join(json.dumps(packed(entry)).encode() + b"\n" for entry in entries)
        name = os.path.join(self.folder, b"journal")
        file = os.open(name, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(file).st_size
            if size > self.read_to:  # somebody was killed in the middle of a line
                text = b"\n" + text
            while text:
                text = text[os.write(file, text) :]
            if sync:
                os.fdatasync(file) if hasattr(os, "fdatasync") else os.fsync(file)
        finally:
            os.close(file)
        self.refresh()

    def end(self):
        """It has been put back: nothing is left to do."""
        self.append({"do": "done"}, sync=True)


BYTES = ("path", "kept")


def packed(entry):
    return {k: v.decode("latin-1") if k in BYTES else v for k, v in entry.items()}


def unpacked(entry):
    return {k: v.encode("latin-1") if k in BYTES else v for k, v in entry.items()}


def runs(root):
    """The journals of all runs that are not put back yet."""
    for name in sorted(os.listdir(root)):
        folder = os.path.join(root, name)
        if os.path.exists(os.path.join(folder, b"journal")):
            journal = Journal(folder).refresh()
            if not journal.done:
                yield journal
