"""Ends a process that fails or hangs, and says where it was."""

import faulthandler
import math
import os
import signal
import sys
import threading
import time
import traceback

import torch

from .messages import first_line, print_error

NATIVE = 30  # seconds more for a hang in native code that lets no Python run


class Watch:
    """Ends this process when it fails or hangs, with a line that names its rank, epoch and step.

    A failure is an uncaught exception: a traceback is printed, and the exit code is 1. For a
    FloatingPointError, a loss or weights that are not finite, it is one line, and the exit code is
    2. A hang is a time of more than `seconds` after beat(), without another beat() or rest(). On
    GPUs it is a minute more, for NCCL has a limit of its own, and names the collective. The end is
    os._exit(): an orderly exit could hang, because loader workers ignore SIGTERM, and to destroy
    the process group is to wait for the other processes.

    progress: what str() makes a text of that says where it is, such as "epoch 3 step 40".
    """

    def __init__(self, rank, progress, seconds):
        self.rank, self.progress = rank, progress
        self.seconds = seconds + (60 if torch.cuda.is_available() else 0)
        self.since = math.inf  # the time of the last beat()
        self.armed = -math.inf  # when the thread in C was started
        self.ending = threading.Lock()
        sys.excepthook = self._on_error  # init_process_group wraps it, and calls it
        faulthandler.enable(2)  # where Python was when native code crashed, or NCCL aborted
        # A forked process lacks the thread in C, and would wait for its end.
        os.register_at_fork(before=self._disarm)
        threading.Thread(target=self._look, daemon=True).start()

    def beat(self):
        """What follows may take so many seconds: call it before a loop and in each turn."""
        self.since = time.monotonic()
        # Native code that keeps the interpreter's lock stops _look() too. This starts a thread in
        # C, which then prints all stacks and ends the process. It costs up to 0.2 ms.
        if self.since > self.armed + 1:
            self.armed = self.since
            faulthandler.dump_traceback_later(self.seconds + NATIVE, exit=True, file=2)

    def rest(self):
        """What follows may take as long as it likes."""
        self.since = math.inf
        self._disarm()

    def _disarm(self):
        self.armed = -math.inf
        faulthandler.cancel_dump_traceback_later()

    def _on_error(self, kind, error, trace):
        # A loader's worker that was killed causes two errors. The second, from torch's handler of
        # this signal, would be raised in here.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        reason = first_line(error)
        if kind is FloatingPointError and not reason.startswith("Caught "):
            # Once one process has exited the launcher may end all: rank 0 speaks first.
            time.sleep(10 if self.rank > 0 else 0)
            print_error(f"error: {reason} ({self.progress}): a lower --lr may help")
            os._exit(2)
        if reason.startswith("Caught "):  # in a loader's worker: below its stack, which is indented
            below = str(error).rpartition("Traceback (most recent call last):\n")[2].splitlines()
            reason = next((line for line in below if line[:1] not in ("", " ")), reason)
        self._end(traceback.format_exception(kind, error, trace), reason)

    def _look(self):
        while time.monotonic() - self.since < self.seconds:
            time.sleep(1)
        stack = traceback.format_stack(sys._current_frames()[threading.main_thread().ident])
        self._end(stack, f"no progress for {self.seconds:g} s; see the stack above")

    def _end(self, trace, reason):
        self.ending.acquire()  # the main thread and the watching one may come at the same time
        print_error(f"rank {self.rank} failed at {self.progress}: {reason}", "".join(trace))
        os._exit(1)
