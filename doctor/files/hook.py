"""Sees what a process of the run is about to do with files, before it is done.

Python's audit hook is told of open, rename, remove and their like by the standard library itself,
whoever calls them: pickle, json, numpy, shutil. What writes in C++ or Rust is in writers.py,
programs that the script starts are in programs.py.
"""

import contextlib
import os
import sys
import urllib.parse

from . import arrow, listing, programs, pythons, writers
from .disk import without_links
from .ends import RUN
from .hosts import who
from .instead import put_instead
from .journal import NotKept
from .keep import Keeper
from .paths import NOTHING_THERE
from .process import HERE, INTERRUPTS, Process, own_work, real, text

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def absolute(path, dir_fd=-1):
    """A name of the script's as an absolute one: see without_links()."""
    if isinstance(path, int):
        return os.readlink(b"/proc/self/fd/%d" % path)
    path = text(path)
    if dir_fd >= 0:
        path = os.path.join(os.readlink(b"/proc/self/fd/%d" % dir_fd), path)
    return without_links(path)


# ---- one function for each event: it has the event's arguments


def on_open(process, path, mode, flags):
    if not flags & WRITES or isinstance(path, int):
        return
    given, dir_fd = HERE.opens
    below = dir_fd if path is given else -1
    path = text(path)
    if below >= 0:
        path = os.path.join(os.readlink(b"/proc/self/fd/%d" % below), path)
    if flags & os.O_EXCL and os.path.lexists(path):
        return  # it will fail
    process.will_write(path, cuts=bool(flags & os.O_TRUNC))
    if flags & os.O_TRUNC:
        process.tell(path)


def on_write(process, path, cuts, replaces):
    """By a function that is wrapped."""
    process.will_write(path, cuts, replaces)
    process.tell(path)


def on_truncate(process, path, length):
    if not isinstance(path, int):  # else it was opened for writing
        process.will_write(path, cuts=length == 0)


def on_rename(process, old, new, old_fd=-1, new_fd=-1):
    old, new = absolute(old, old_fd), absolute(new, new_fd)
    process.recorder.moves(old, new)
    process.on(Keeper.will_rename, old, new)


def on_remove(process, path, dir_fd=-1):
    path = absolute(path, dir_fd)
    process.recorder.loses(path)
    process.on(Keeper.will_remove, path)


def on_rmtree(process, path, dir_fd=None):
    path = absolute(path, -1 if dir_fd is None else dir_fd)
    if os.path.isdir(path) and not os.path.islink(path):
        process.recorder.loses(path)
        process.on(Keeper.will_remove_tree, path)


def on_mkdir(process, path, mode=0, dir_fd=-1):
    process.on(Keeper.will_make, absolute(path, dir_fd))


def on_bind(process, socket, address):
    if isinstance(address, (str, bytes)) and address:  # a socket that is a file
        process.on(Keeper.will_make, absolute(address))


def on_link(process, old, new, old_fd=-1, new_fd=-1):
    process.on(Keeper.will_link, absolute(old, old_fd), absolute(new, new_fd))


def on_symlink(process, old, new, dir_fd=-1):
    process.on(Keeper.will_symlink, absolute(new, dir_fd))


def on_facts(process, path, *args):
    dir_fd = args[-1] if args and isinstance(args[-1], int) else -1
    path = absolute(path, dir_fd)
    for one in {path, real(path)}:  # it may be a link that is followed
        if not process.skips(one):
            process.do(Keeper.will_change_facts, one, who())
            process.recorder.writes(one)


def on_attribute(process, path, *args):
    path = absolute(path)
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
    for more in ("", "-journal", "-wal", "-shm"):  # beside the file to which a link leads
        process.will_write(os.path.realpath(name) + more, replaces=True)


HANDLERS = {
    "open": on_open,
    "os.truncate": on_truncate,
    "os.rename": on_rename,
    "os.remove": on_remove,
    "os.rmdir": on_remove,
    "shutil.rmtree": on_rmtree,
    "os.mkdir": on_mkdir,
    "socket.bind": on_bind,
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


# If one of these cannot keep what is there, the script's call fails: a file would be lost.
LOSES = {on_open, on_write, on_truncate, on_rename, on_remove, on_rmtree, on_attribute, on_sqlite}
LOSES |= {arrow.on_many}


def handle(process, handler, *args):
    """A fault of ours is noted. It ends the script's call only where a file would be lost."""
    was, HERE.waits = HERE.waits, True
    try:
        keep_or_raise(process, handler, args)
    finally:
        HERE.waits = was
        if not was:
            INTERRUPTS.go_on()


def keep_or_raise(process, handler, args):
    try:
        with own_work():
            handler(process, *args)
    except NotKept:
        raise
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
            handle(process, handler, *args)

    real_open, real_exit = os.open, os._exit

    def open_(path, flags, mode=0o777, *, dir_fd=None):
        if dir_fd is None:
            return real_open(path, flags, mode)
        path = os.fspath(path)  # the event has this very object
        was, HERE.opens = HERE.opens, (path, dir_fd)
        try:
            return real_open(path, flags, mode, dir_fd=dir_fd)
        finally:
            HERE.opens = was

    def exit_(status):  # how a forked process of multiprocessing ends
        try:
            process.recorder.last()
        finally:
            real_exit(status)

    def making(real):
        def make(path, *args, dir_fd=None, **kwargs):
            handle(process, on_symlink, None, path, -1 if dir_fd is None else dir_fd)
            real(path, *args, dir_fd=dir_fd, **kwargs)

        return make

    put_instead(os, "open", open_)
    put_instead(os, "_exit", exit_)
    for name in ("mkfifo", "mknod"):
        put_instead(os, name, making(getattr(os, name)))
    listing.install()
    INTERRUPTS.install()
    os.register_at_fork(after_in_child=process.forked)
    pythons.install()
    sys.addaudithook(hook)
    writers.install(process)
    process.recorder.begin()
