"""Notes when this process has closed a file that it wrote, and ends the run if its doctor is gone.

Whose a file is at the end, ours or somebody else's, is told by its state when we closed it. No
event tells that: a small thread looks what is still open.
"""

import atexit
import contextlib
import os
import threading
import time

from . import threads
from .doctors import elsewhere, lives
from .ends import end_run
from .hosts import who
from .keep import Keeper
from .paths import inside, parents, seen

TICK = 0.5
SILENT = 300.0  # a shared file system may show the heartbeat of another machine a minute late
OPENS = 1.0  # what was announced so long ago has happened
MANY = 10_000


class Recorder:
    def __init__(self, process, inherited=()):
        self.process = process
        # path: {thread that has announced to open it: when}
        self.written = {path: {threading.get_ident(): time.monotonic()} for path in inherited}
        self.gone = {}  # path that was moved or removed: {thread: when}
        self.thread = False  # whether it was started
        self.beat = None, time.monotonic()  # of a doctor on another machine: the last, when seen

    def begin(self):
        atexit.register(lambda: self.process.recorder.last())
        self.watch()

    def watch(self):
        """Start the thread: a fork leaves it behind."""
        if not self.thread:
            self.thread = True
            with contextlib.suppress(RuntimeError):  # a sub-interpreter has no such threads
                threads.start(self.run)

    def run(self):
        while self.process.recorder is self:
            time.sleep(TICK)
            # A full disk, or too many open files: it tries again at the next tick.
            with contextlib.suppress(OSError), self.process.own_work():
                if not self.doctor_lives():
                    end_run(self.process.alive)
                self.note([*self.written])

    def doctor_lives(self):
        """Of one on another machine the lock may not be seen, but its heart is: on this clock."""
        alive, now = self.process.alive, time.monotonic()
        if elsewhere(alive):
            info = seen(os.path.join(self.process.folder, b"heartbeat"))
            if info and info.st_mtime_ns != self.beat[0]:
                self.beat = info.st_mtime_ns, now
            if now - self.beat[1] > SILENT:
                return False
        return lives(alive)

    def writes(self, path):
        self.written.setdefault(path, {})[threading.get_ident()] = time.monotonic()

    def moves(self, old, new):
        """A file or folder gets another name: what is closed is noted before."""
        self.goes(old)
        here = [path for path in [*self.written] if inside(path, old)]
        self.note(here)
        self.loses(new)
        mine = threading.get_ident()
        for path in here:
            announced = self.written.pop(path, None)
            if announced:  # still open
                self.written.setdefault(new + path[len(old) :], {}).update(announced)
                others = {thread: at for thread, at in announced.items() if thread != mine}
                if others:  # they may be about to open it by the old name
                    self.written[path] = others

    def loses(self, path):
        """A file or folder is removed: what is closed is noted before, it may have other names."""
        self.goes(path)
        self.note([one for one in [*self.written] if inside(one, path)])

    def goes(self, path):
        """Another thread that has announced to open it finds another there, or makes it anew."""
        mine, now = threading.get_ident(), time.monotonic()
        if len(self.gone) > MANY:
            self.gone = {
                one: at for one, at in [*self.gone.items()] if max(at.values()) > now - OPENS
            }
        self.gone.setdefault(path, {})[mine] = now
        for one, announced in [*self.written.items()]:
            if inside(one, path) and {*announced} - {mine}:
                self.process.do(Keeper.writes, one, who())

    def may_go(self, path):
        """Whether another thread is about to move or remove it, or a folder above it."""
        mine, late = threading.get_ident(), time.monotonic() - OPENS
        by = [item for one in (path, *parents(path)) for item in [*self.gone.get(one, {}).items()]]
        return any(thread != mine and at > late for thread, at in by)

    def last(self):
        """At the end of the process. What is still open then is not noted as closed."""
        self.note([*self.written], all_are_opened=True)

    def opened(self, path):
        """Whether what was announced is done: another thread may be about to open it."""
        mine, late = threading.get_ident(), time.monotonic() - OPENS
        announced = [*self.written.get(path, {}).items()]
        return all(thread == mine or at < late for thread, at in announced)

    def note(self, paths, all_are_opened=False):
        """Note those that are closed by now."""
        if not paths or (held := held_open()) is None:
            return

        def closed(keeper):
            done = [p for p in paths if p not in held and (all_are_opened or self.opened(p))]
            for path in done:
                self.written.pop(path, None)
            keeper.closed(done, who())

        self.process.do(closed)


def held_open():
    """The files that this process has open or mapped; None where that cannot be seen."""
    try:
        numbers = os.listdir(b"/proc/self/fd")
    except OSError:
        return None
    held = set()
    for number in numbers:
        try:
            held.add(os.readlink(b"/proc/self/fd/" + number))
        except OSError:
            continue
    with open("/proc/self/maps", "rb") as file:
        held.update(line.split(None, 5)[5].rstrip() for line in file if b" rw-s " in line)
    return held
