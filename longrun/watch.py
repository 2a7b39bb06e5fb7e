"""Ends a process that fails or hangs, and says where it was."""

import contextlib
import faulthandler
import math
import os
import signal
import sys
import threading
import time
import traceback

import torch
import torch.distributed as dist

from .arguments import say

NATIVE = 30  # seconds more for a hang in native code that lets no Python run


class Watch:
    """Ends this process when it fails or hangs, with a line that names its rank, epoch and step.

    A failure is an uncaught exception: a traceback is printed, and the exit code is 1. For a
    FloatingPointError, a loss that is not finite, rank 0 prints one line, and the exit code is 2. A
    hang is a `with watch:` block that takes longer than `seconds`. Code outside of blocks has no
    limit. Where blocks nest, as in a validation in the middle of an epoch, the rest of the outer
    one has none either. The end is os._exit(): an orderly exit could hang, because loader workers
    ignore SIGTERM, and to destroy the process group is to wait for the other processes.

    run: an object whose place() says where it is, such as "epoch 3 step 40".
    """

    def __init__(self, rank, run, seconds):
        self.rank, self.run = rank, run
        # NCCL aborts at the group's time limit, and names no epoch and step: be a little earlier.
        self.seconds = seconds * (0.9 if torch.cuda.is_available() else 1)
        self.since = math.inf  # when the block began that we are in
        self.ending = threading.Lock()
        sys.excepthook = self._on_error  # init_process_group wraps it, and calls it
        faulthandler.enable(2)  # where Python was when native code crashed, or NCCL aborted
        # A forked process lacks the C thread of __enter__(), and would wait for its end.
        os.register_at_fork(before=faulthandler.cancel_dump_traceback_later)
        threading.Thread(target=self._look, daemon=True).start()

    def __enter__(self):
        self.since = time.monotonic()
        # Native code that keeps the interpreter's lock stops _look() too. This starts a thread in
        # C, which then prints all stacks and ends the process.
        faulthandler.dump_traceback_later(self.seconds + NATIVE, exit=True, file=2)

    def __exit__(self, *error):
        self.since = math.inf
        faulthandler.cancel_dump_traceback_later()

    def _on_error(self, kind, error, trace):
        # A loader's worker that was killed causes two errors. The second, from torch's handler of
        # this signal, would be raised in here.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if kind is FloatingPointError:
            if self.rank > 0:
                time.sleep(3)  # once one has exited the launcher may end all: rank 0 speaks first
            else:
                say(f"error: {error} ({self.run.place()}): a lower --lr may help")
            os._exit(2)
        said = (str(error).strip() or kind.__name__).splitlines()
        # An error of a loader's worker ends with its cause; below one of CUDA's there is advice.
        reason = next((line for line in said if "CUDA error" in line), said[-1])
        collective = "gloo" in reason.lower() or "nccl" in reason.lower()
        self._end(traceback.format_exception(kind, error, trace), reason, collective)

    def _look(self):
        while time.monotonic() - self.since < self.seconds:
            time.sleep(1)
        stack = traceback.format_stack(sys._current_frames()[threading.main_thread().ident])
        self._end(stack, f"no progress for {self.seconds:g} s; see the stack above", True)

    def _end(self, lines, reason, collective):
        self.ending.acquire()  # the main thread and the watching one may come at the same time
        silent = self._silent_ranks() if collective else []
        if silent:
            reason += f"; rank {', '.join(silent)} did not respond"
        say("".join([*lines, f"rank {self.rank} failed at {self.run.place()}: {reason}"]))
        os._exit(1)

    def _silent_ranks(self):
        """Tell the other ranks that this one fails; which of them do not say so, as texts."""
        silent = []

        def ask():
            with contextlib.suppress(Exception):  # there may be no group, or the store is gone
                store = dist.distributed_c10d._get_default_store()
                store.set(f"failed {self.rank}", "")
                time.sleep(2)  # the others notice at nearly the same time
                ranks = range(dist.get_world_size())
                silent.extend(str(r) for r in ranks if not store.check([f"failed {r}"]))

        thread = threading.Thread(target=ask, daemon=True)  # the store may be out of reach
        thread.start()
        thread.join(5)
        return silent
