"""Sees what a process of the run is about to do with files, before it is done.

Python's audit hook is told of open, rename, remove and their like by the standard library itself,
whoever calls them: pickle, json, numpy, shutil. What writes in C++ or Rust is in writers.py,
programs that the script starts are in programs.py.
"""

import contextlib
import errno
import os
import sys
import threading
import urllib.parse

from . import programs, pythons, record, writers
from .journal import NOTHING_THERE, RUN, Journal, below, locked
from .keep import Keeper

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
NO_FILES = (b"/dev/", b"/proc/", b"/sys/")


class Here(threading.local):
    """What this thread is doing: our own work is not looked at."""

    busy = False
    dir_fd = -1  # of the os.open that is called: its event does not tell


HERE = Here()


class Process:
    """This process of the run."""

    def __init__(self, alive):
        self.alive = alive
        self.folder = folder = os.path.dirname(alive)
        self.root = os.path.dirname(folder)
        self.keeper = Keeper(Journal(folder))
        self.recorder = record.Recorder(self)
        self.told = []  # functions that are told the path of each file that is written anew

    def forked(self):
        """In a forked process: a journal that was being read is read anew."""
        inherited = [*self.recorder.written]
        self.keeper = Keeper(Journal(self.folder))
        self.recorder = record.Recorder(self, inherited)
        HERE.busy = False
        if inherited:  # they may be open here too
            self.do(Keeper.writes, inherited, os.getpid())

    def look_away(self):
        """What this thread does is our own."""
        HERE.busy = True

    def do(self, work, *args):
        """Under the lock of all runs, with journals that are read to their end."""
        was, HERE.busy = HERE.busy, True
        try:
            with locked(self.root):
                self.keeper.refresh()
                return work(self.keeper, *args)
        finally:
            HERE.busy = was

    def skips(self, path):
        return path.startswith(NO_FILES) or below(path, self.root) or b"/.training-doctor-" in path

    # ---- what the handlers and the wrapped functions call

    def will_write(self, path, cuts=False):
        path = real(path)
        if self.skips(path):
            return
        self.recorder.watch()
        self.do(Keeper.will_write, path, cuts, os.getpid())
        self.recorder.writes(path)

    def tell(self, path):
        """After it was kept: what these functions do is not worth a file."""
        with contextlib.suppress(Exception):
            path = real(path)
            for function in [] if self.skips(path) else self.told:
                function(path)

    def has_written(self, *paths):
        """By functions that have closed it when they return."""
        self.recorder.note([real(path) for path in paths])

    def on(self, work, *paths):
        if not any(self.skips(path) for path in paths):
            self.do(work, *paths)


def real(path):
    """Where a file would be opened: absolute, no links."""
    return os.path.realpath(text(path))


def text(path):
    path = os.fsencode(path)
    if b"\0" in path:  # the call will say so
        raise FileNotFoundError(errno.ENOENT, path)
    return path


def named(path, dir_fd=-1):
    """The name itself, which may be a link; its folder has no links."""
    if isinstance(path, int):
        return os.readlink(b"/proc/self/fd/%d" % path)
    path = text(path)
    if dir_fd >= 0:
        path = os.path.join(os.readlink(b"/proc/self/fd/%d" % dir_fd), path)
    folder, name = os.path.split(path.rstrip(b"/") or b"/")
    if name in (b"", b".", b".."):
        return os.path.realpath(path)
    return os.path.join(os.path.realpath(folder or b"."), name)


# ---- one function for each event: it has the event's arguments


def on_open(process, path, mode, flags):
    if not flags & WRITES or isinstance(path, int):
        return
    path = text(path)
    if HERE.dir_fd >= 0:
        path = os.path.join(os.readlink(b"/proc/self/fd/%d" % HERE.dir_fd), path)
    if flags & os.O_EXCL and os.path.lexists(path):
        return  # it will fail
    process.will_write(path, cuts=bool(flags & os.O_TRUNC))
    if flags & os.O_TRUNC:
        process.tell(path)


def on_write(process, path, cuts):
    """By a function that is wrapped."""
    process.will_write(path, cuts)
    process.tell(path)


def on_truncate(process, path, length):
    if not isinstance(path, int):  # else it was opened for writing
        process.will_write(path, cuts=length == 0)


def on_rename(process, old, new, old_fd=-1, new_fd=-1):
    old, new = named(old, old_fd), named(new, new_fd)
    process.recorder.moves(old, new)
    process.on(Keeper.will_rename, old, new)


def on_remove(process, path, dir_fd=-1):
    path = named(path, dir_fd)
    process.recorder.loses(path)
    process.on(Keeper.will_remove, path)


def on_rmtree(process, path, dir_fd=None):
    path = named(path, -1 if dir_fd is None else dir_fd)
    if os.path.isdir(path) and not os.path.islink(path):
        process.recorder.loses(path)
        process.on(Keeper.will_remove_tree, path)


def on_mkdir(process, path, mode=0, dir_fd=-1):
    process.on(Keeper.will_make, named(path, dir_fd))


def on_link(process, old, new, old_fd=-1, new_fd=-1):
    process.on(Keeper.will_link, named(old, old_fd), named(new, new_fd))


def on_symlink(process, old, new, dir_fd=-1):
    process.on(Keeper.will_symlink, named(new, dir_fd))


def on_facts(process, path, *args):
    dir_fd = args[-1] if args and isinstance(args[-1], int) else -1
    path = named(path, dir_fd)
    for one in {path, real(path)}:  # it may be a link that is followed
        if not process.skips(one):
            process.do(Keeper.will_change_facts, one, os.getpid())
            process.recorder.writes(one)


def on_attribute(process, path, *args):
    path = named(path)
    if os.path.isfile(path):
        process.will_write(path)


def on_sqlite(process, database):
    name = os.fsdecode(database)
    if name.startswith("file:"):
        name, _, query = name[5:].partition("?")
        if "mode=memory" in query or "immutable=1" in query:
            return
        name = urllib.parse.unquote(name)
    if name in ("", ":memory:"):
        return
    for more in ("", "-journal", "-wal", "-shm"):
        process.will_write(name + more)


HANDLERS = {
    "open": on_open,
    "os.truncate": on_truncate,
    "os.rename": on_rename,
    "os.remove": on_remove,
    "os.rmdir": on_remove,
    "shutil.rmtree": on_rmtree,
    "os.mkdir": on_mkdir,
    "os.link": on_link,
    "os.symlink": on_symlink,
    "os.chmod": on_facts,
    "os.chown": on_facts,
    "os.utime": on_facts,
    "os.setxattr": on_attribute,
    "os.removexattr": on_attribute,
    "sqlite3.connect": on_sqlite,
    "subprocess.Popen": programs.on_popen,
    "os.system": programs.on_system,
    "os.posix_spawn": programs.on_exec,
    "os.exec": programs.on_exec,
}


LOSES = {on_open, on_write, on_truncate, on_rename, on_remove, on_rmtree, on_attribute, on_sqlite}


class NotKept(PermissionError):
    """What was there could not be kept: better the script fails than a file is lost."""


def guarded(process, handler, *args):
    """A fault of ours is noted. It ends the script's call only where a file would be lost."""
    try:
        handler(process, *args)
    except Exception as error:
        if getattr(error, "errno", None) in NOTHING_THERE:
            return  # it was removed meanwhile, or the call will fail in the same way
        said = f"{type(error).__name__}: {error} ({handler.__name__})"
        with contextlib.suppress(Exception):
            process.do(lambda keeper: keeper.journal.append({"do": "note", "text": said}))
        if handler in LOSES:
            raise NotKept(f"the doctor could not keep what is there: {said}") from error


PROCESS = None


def install():
    """Look at this process, if it belongs to a run. Again: nothing happens."""
    global PROCESS
    alive = os.environb.get(RUN.encode())
    if PROCESS or not alive or getattr(sys, "doctor_files", None):
        return
    process = PROCESS = Process(alive)
    sys.doctor_files = process  # this package may be there a second time, by another name
    handlers = HANDLERS.get

    def hook(event, args):
        handler = handlers(event)
        if handler is not None and not HERE.busy:
            guarded(process, handler, *args)

    real_open, real_exit = os.open, os._exit

    def open_(path, flags, mode=0o777, *, dir_fd=None):
        HERE.dir_fd = -1 if dir_fd is None else dir_fd
        try:
            return real_open(path, flags, mode, dir_fd=dir_fd)
        finally:
            HERE.dir_fd = -1

    def exit_(status):  # how a forked process of multiprocessing ends
        process.recorder.last()
        real_exit(status)

    for name, new in (("open", open_), ("_exit", exit_)):
        new.__name__, new.__doc__ = name, getattr(os, name).__doc__
        setattr(os, name, new)
    os.supports_dir_fd.add(os.open)  # shutil asks there
    os.register_at_fork(after_in_child=process.forked)
    pythons.install()
    sys.addaudithook(hook)
    writers.install(process)
    process.recorder.begin()
