"""A process of the script, seen from inside: its journal, the lock, what must not come in between.

While a file is kept, this thread holds the lock of all runs, and nothing that it does is looked at.
So a handler of a signal waits until that is done: it may save a checkpoint. Garbage is not
collected meanwhile either, for a finalizer may save, too.
"""

import contextlib
import gc
import os
import signal
import threading

from . import record
from .hosts import who
from .instead import put_instead
from .journal import HIDDEN, Journal, NotKept, locked
from .keep import Keeper
from .paths import below

NO_FILES = (b"/dev/", b"/proc/", b"/sys/")
FILES = b"/dev/shm/"


class Here(threading.local):
    """What this thread is doing."""

    waits = False  # handlers of signals wait
    busy = False  # our own work: it is not looked at
    keeps = False  # it holds the lock
    opens = None, -1  # name and dir_fd of the os.open that is called: its event has no dir_fd


HERE = Here()


class Garbage:
    """Is collected when no thread is at our own work."""

    def __init__(self):
        self.lock = threading.RLock()  # a finalizer may come in between
        self.threads, self.collects = 0, False

    @contextlib.contextmanager
    def left(self):
        with self.lock:
            if not self.threads:
                self.collects = gc.isenabled()
                gc.disable()
            self.threads += 1
        try:
            yield
        finally:
            with self.lock:
                self.threads -= 1
                if self.collects and not self.threads:
                    gc.enable()

    def forked(self):
        """The other threads, and what they were at, are not here."""
        if self.threads and self.collects:
            gc.enable()
        self.lock, self.threads = threading.RLock(), 0


GARBAGE = Garbage()


@contextlib.contextmanager
def own_work():
    """What this thread does in it is not looked at, and is not interrupted."""
    if HERE.busy:
        yield
        return
    was, HERE.waits = HERE.waits, True
    try:
        with GARBAGE.left():  # not busy yet: it may run finalizers, which are looked at
            HERE.busy = True
            try:
                yield
            finally:
                HERE.busy = False
    finally:
        HERE.waits = was


class Process:
    def __init__(self, alive):
        self.alive = alive
        self.folder = folder = os.path.dirname(alive)
        self.root = os.path.dirname(folder)
        self.keeper = Keeper(Journal(folder))
        self.recorder = record.Recorder(self)
        self.told = []  # functions that are told the path of each file that is written anew
        self.own_work = own_work

    def forked(self):
        """In a forked process: a journal that was being read is read anew."""
        inherited = [*self.recorder.written]
        self.keeper = Keeper(Journal(self.folder))
        self.recorder = record.Recorder(self, inherited)
        HERE.waits = HERE.busy = HERE.keeps = False
        INTERRUPTS.waiting.clear()
        GARBAGE.forked()
        if inherited:  # they may be open here too
            self.do(note_inherited, inherited)

    def do(self, work, *args):
        """Under the lock of all runs, with journals that are read to their end."""
        if HERE.keeps:  # by something that came in between
            return work(self.keeper, *args)
        try:
            with own_work(), locked(self.root):
                # Else what the run wrote would be taken for known, and what it touches for gone.
                if not os.path.isdir(self.folder):
                    raise NotKept(f"the doctor's journal is gone: {os.fsdecode(self.folder)}")
                HERE.keeps = True
                self.keeper.refresh()
                return work(self.keeper, *args)
        finally:
            HERE.keeps = False
            if not HERE.waits:
                INTERRUPTS.go_on()

    def skips(self, path):
        no_file = path.startswith(NO_FILES) and not path.startswith(FILES)
        return no_file or below(path, self.root) or b"/" + HIDDEN in path

    # ---- what the handlers and the wrapped functions call

    def will_write(self, path, cuts=False, replaces=False):
        """replaces: it is C or Rust, which may put another file in its place."""
        path = real(path)
        if self.skips(path):
            return
        self.recorder.watch()
        self.recorder.writes(path)  # before: another thread may note just now what it has closed
        self.do(Keeper.will_write, path, cuts, who())
        if replaces or self.recorder.may_go(path):  # then it may open another than is there now
            self.do(Keeper.writes, path, who())
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
        if any(b"/" + HIDDEN in path for path in paths):
            raise NotKept("the doctor keeps files there")
        if not any(self.skips(path) for path in paths):
            self.do(work, *paths)


class Interrupts:
    """The handlers of signals that came while this process was keeping files."""

    def __init__(self):
        self.waiting = []  # (handler, number, frame)

    def install(self):
        set_, get = signal.signal, signal.getsignal

        def theirs(handler):
            return handler.handler if isinstance(handler, Handler) else handler

        def signal_(signalnum, handler):
            given = callable(handler) and handler is not signal.default_int_handler
            return theirs(set_(signalnum, Handler(handler) if given else handler))

        def getsignal(signalnum):
            return theirs(get(signalnum))

        put_instead(signal, "signal", signal_)
        put_instead(signal, "getsignal", getsignal)

    def go_on(self):
        """Call those that waited. What they raise goes to the script."""
        while self.waiting and threading.get_ident() == threading.main_thread().ident:
            try:
                handler, number, frame = self.waiting.pop(0)
            except IndexError:  # another that came just now has called it
                return
            handler(number, frame)


INTERRUPTS = Interrupts()


class Handler:
    def __init__(self, handler):
        self.handler = handler

    def __call__(self, number, frame):
        if HERE.waits:
            INTERRUPTS.waiting.append((self.handler, number, frame))
        else:
            self.handler(number, frame)


def real(path):
    """Where a file would be opened: absolute, no links."""
    return os.path.realpath(text(path))


def text(path):
    path = os.fsencode(path)
    if b"\0" in path:  # the call will say so
        raise FileNotFoundError(2, path)
    return path


def note_inherited(keeper, paths):
    journal = keeper.journal
    journal.append(*journal.opened.inherited(paths, who()))
