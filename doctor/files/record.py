"""Notes when this process has closed a file that it wrote, and ends it if the doctor is gone.

Whose a file is at the end, ours or somebody else's, is told by its state when we closed it. No
event tells that: a small thread looks what is still open.
"""

import atexit
import os
import signal
import threading
import time

from .journal import doctor_lives
from .keep import inside

TICK = 0.5
OPENS = 1.0  # an open that was announced so long ago has happened


class Recorder:
    def __init__(self, process, inherited=()):
        self.process = process
        self.written = dict.fromkeys(inherited, time.monotonic())  # path: when its open was seen
        self.thread = None

    def begin(self):
        atexit.register(lambda: self.process.recorder.last())
        self.watch()

    def watch(self):
        """Start the thread: a fork leaves it behind."""
        if not self.thread:
            self.thread = threading.Thread(target=self.run, name="doctor", daemon=True)
            self.thread.start()

    def run(self):
        self.process.look_away()
        while self.process.recorder is self:
            time.sleep(TICK)
            if not doctor_lives(self.process.folder):
                os.kill(os.getpid(), signal.SIGKILL)
            self.note([*self.written], OPENS)

    def writes(self, path):
        self.written[path] = time.monotonic()

    def moves(self, old, new):
        """A file or folder gets another name: what is closed is noted before."""
        here = [path for path in self.written if inside(path, old)]
        self.note(here)
        for path in here:
            if self.written.pop(path, None):  # still open
                self.writes(new + path[len(old) :])

    def again(self, path):
        """Its time of change is set: its state is another."""
        if path in self.process.keeper.journal.wrote:
            self.writes(path)

    def last(self):
        """At the end of the process. What is still open then is not noted as closed."""
        self.note([*self.written])

    def note(self, paths, age=0.0):
        if not paths or (held := held_open()) is None:
            return

        def closed(keeper):
            before = time.monotonic() - age
            done = [p for p in paths if p not in held and self.written.get(p, before) <= before]
            for path in done:
                self.written.pop(path, None)
            keeper.closed(done, os.getpid())

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
