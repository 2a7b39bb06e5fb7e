"""How a process ends that fails or hangs: at once, and with the place where it was."""

import contextlib
import faulthandler
import math
import os
import sys
import threading
import time
import traceback

import torch

from .errors import say


class Watch:
    """Makes an error or a hang end this process, with its rank, its place and who is missing.

    An error is an uncaught exception: exit code 1, after its traceback; for a FloatingPointError
    exit code 2, after one line of rank 0. A hang is a `with watch:` block that takes longer than
    `seconds`, None for no limit. Code outside of such blocks has no limit.

    run: anything with a method place(), a text such as "epoch 3 step 40". store: of the process
    group, by which the ranks tell each other that they have failed. An orderly exit could hang:
    loader workers ignore SIGTERM, and destroying the group waits for processes that may wait for
    this one.
    """

    def __init__(self, rank, world_size, run, store=None, seconds=None):
        self.rank, self.world_size, self.run, self.store = rank, world_size, run, store
        # NCCL's own watch would come first by a little, and aborts without place and rank.
        self.seconds = seconds and seconds * (0.9 if torch.cuda.is_available() else 1)
        self.deadline = math.inf
        self.ending = threading.Lock()
        # Not sys.excepthook() later: init_process_group() wraps the one that it finds.
        sys.excepthook = self._on_error
        if seconds:
            threading.Thread(target=self._on_hang, daemon=True).start()

    def __enter__(self):
        if self.seconds:
            self.deadline = time.monotonic() + self.seconds

    def __exit__(self, *error):
        self.deadline = math.inf

    def _on_error(self, kind, error, trace):
        self.ending.acquire()  # the main thread and the watching one may come at the same time
        if kind is FloatingPointError:
            time.sleep(3 * (self.rank > 0))  # the launcher may end all once one has exited
            if self.rank == 0:
                say(f"error: {error} ({self.run.place()}): a lower --lr may help")
            os._exit(2)
        lines = traceback.format_exception(kind, error, trace)
        reason = (str(error).strip() or kind.__name__).splitlines()[-1]
        collective = "gloo" in reason.lower() or "nccl" in reason.lower()
        self._end(lines, reason, collective)

    def _on_hang(self):
        while time.monotonic() < self.deadline:
            # Should native code keep this thread from running: a thread in C ends the process.
            with contextlib.suppress(RuntimeError, ValueError):  # stderr is closed
                faulthandler.dump_traceback_later(self._left() + 60, exit=True)
            time.sleep(1)
        self.ending.acquire()
        frame = sys._current_frames()[threading.main_thread().ident]
        reason = f"no progress for {self.seconds:g} s; it waits as above"
        self._end(traceback.format_stack(frame), reason, True)

    def _left(self):
        return min(self.deadline - time.monotonic(), 1e6)

    def _end(self, lines, reason, others_too):
        if others_too and self.store:
            reason += self._missing()
        say("".join([*lines, f"rank {self.rank} failed at {self.run.place()}: {reason}"]))
        os._exit(1)

    def _missing(self):
        """Which ranks have not failed too, as far as the store can tell: they are stuck or gone."""
        silent = []

        def ask():
            self.store.set(f"failed {self.rank}", "")
            time.sleep(2)  # the others notice at nearly the same time
            ranks = range(self.world_size)
            silent.extend(str(r) for r in ranks if not self.store.check([f"failed {r}"]))

        thread = threading.Thread(target=ask, daemon=True)  # the store may be out of reach
        thread.start()
        thread.join(5)
        return f"; no sign of rank {', '.join(silent)}" if silent else ""
