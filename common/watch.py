"""Ends a process that fails or hangs, and says where it was."""

import contextlib
import faulthandler
import math
import os
import sys
import threading
import time
import traceback
import weakref

import torch

from .errors import say


class Watch:
    """Ends this process when it fails or hangs, with a line that names its rank, epoch and step.

    A failure is an uncaught exception: its traceback is printed, and the exit code is 1. For a
    FloatingPointError, a loss that is no number, rank 0 prints one line, and the exit code is 2. A
    hang is a `with watch:` block that takes longer than `seconds`; None is no limit. Code outside
    of such blocks has no limit. The end is os._exit(): an orderly exit could hang, because loader
    workers ignore SIGTERM, and to destroy the process group is to wait for the other processes.

    run: an object whose place() says where it is, such as "epoch 3 step 40". store: that of the
    process group; through it the ranks tell each other that they have failed, and a rank that does
    not is named.
    """

    def __init__(self, rank, world_size, run, store=None, seconds=None):
        self.rank, self.world_size, self.run = rank, world_size, run
        # Weak: sys.excepthook keeps this object, and a FileStore's file ends with its last user.
        self.store = weakref.ref(store) if store is not None else lambda: None
        # NCCL aborts at the group's time limit, and names no epoch and step: be a little earlier.
        self.seconds = seconds and seconds * (0.9 if torch.cuda.is_available() else 1)
        self.deadlines = [math.inf]  # of the blocks that we are in
        self.ending = threading.Lock()
        sys.excepthook = self._on_error
        if seconds:
            threading.Thread(target=self._on_hang, daemon=True).start()

    def __enter__(self):
        self.deadlines.append(time.monotonic() + (self.seconds or math.inf))

    def __exit__(self, *error):
        self.deadlines.pop()

    def _on_error(self, kind, error, trace):
        self.ending.acquire()  # the main thread and the watching one may come at the same time
        if kind is FloatingPointError:
            if self.rank > 0:
                time.sleep(3)  # once one has exited the launcher may end all: rank 0 speaks first
            else:
                say(f"error: {error} ({self.run.place()}): a lower --lr may help")
            os._exit(2)
        lines = traceback.format_exception(kind, error, trace)
        reason = (str(error).strip() or kind.__name__).splitlines()[-1]
        collective = "gloo" in reason.lower() or "nccl" in reason.lower()
        self._end(lines, reason, collective)

    def _on_hang(self):
        while time.monotonic() < min(self.deadlines):
            # Native code that holds the interpreter's lock stops this thread too. Then the thread
            # of faulthandler, which is C, ends the process.
            with contextlib.suppress(RuntimeError, ValueError):  # stderr is closed
                faulthandler.dump_traceback_later(self._left() + 60, exit=True)
            time.sleep(1)
        self.ending.acquire()
        frame = sys._current_frames()[threading.main_thread().ident]
        reason = f"no progress for {self.seconds:g} s; it waits as above"
        self._end(traceback.format_stack(frame), reason, True)

    def _left(self):
        return min(*self.deadlines, time.monotonic() + 1e6) - time.monotonic()

    def _end(self, lines, reason, others_too):
        if others_too and self.store():
            reason += self._missing()
        say("".join([*lines, f"rank {self.rank} failed at {self.run.place()}: {reason}"]))
        os._exit(1)

    def _missing(self):
        """A text that names the ranks that have not failed too: they are stuck or gone."""
        silent = []

        def ask():
            store = self.store()
            store.set(f"failed {self.rank}", "")
            time.sleep(2)  # the others notice at nearly the same time
            ranks = range(self.world_size)
            silent.extend(str(r) for r in ranks if not store.check([f"failed {r}"]))

        thread = threading.Thread(target=ask, daemon=True)  # the store may be out of reach
        thread.start()
        thread.join(5)
        return f"; no sign of rank {', '.join(silent)}" if silent else ""
