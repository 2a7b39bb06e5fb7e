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
import weakref

import torch
import torch.distributed as dist

from .errors import say

NATIVE = 60  # seconds that a hang may last longer where no Python can run
QUIET = 15  # seconds without a batch after which a process that was asked to stop says so


class Watch:
    """Ends this process when it fails or hangs, with a line that names its rank, epoch and step.

    A failure is an uncaught exception, or an error of NCCL's network: a traceback is printed, and
    the exit code is 1. For a FloatingPointError, a loss that is no number, rank 0 prints one line,
    and the exit code is 2. A hang is a `with watch:` block that takes longer than `seconds`; None
    is no limit. Code outside of such blocks has no limit. The end is os._exit(): an orderly exit
    could hang, because loader workers ignore SIGTERM, and to destroy the process group is to wait
    for the other processes. With a limit, SIGALRM and its timer are the watch's own.

    run: an object whose place() says where it is, such as "epoch 3 step 40". store: that of the
    process group; through it the ranks tell each other that they have failed, and a rank that does
    not is named. stop: the Stop of this process. Where it is requested while a step hangs, that is
    said: the launcher may soon kill this process.
    """

    def __init__(self, rank, world_size, run, store=None, seconds=None, stop=None):
        self.rank, self.world_size, self.run, self.stop = rank, world_size, run, stop
        # Weak: sys.excepthook keeps this object, and a FileStore's file ends with its last user.
        self.store = weakref.ref(store) if store is not None else lambda: None
        # NCCL aborts at the group's time limit, and names no epoch and step: be a little earlier.
        self.seconds = seconds and seconds * (0.9 if torch.cuda.is_available() else 1)
        self.deadlines = [math.inf]  # of the blocks that we are in
        self.blocks = 0  # that were entered so far
        self.ending = threading.Lock()
        sys.excepthook = self._on_error
        if seconds:
            # Native code that holds the interpreter's lock stops our thread too. Then the kernel's
            # timer ends the process, and a handler in C says where it was.
            with contextlib.suppress(RuntimeError, ValueError):  # stderr is closed
                faulthandler.enable()  # for an abort of NCCL's that _look() is not told of
                faulthandler.register(signal.SIGALRM, chain=True)
            threading.Thread(target=self._look, daemon=True).start()

    def __enter__(self):
        self.blocks += 1
        self.deadlines.append(time.monotonic() + (self.seconds or math.inf))
        self._set_timer()

    def __exit__(self, *error):
        self.deadlines.pop()
        self._set_timer()

    def _set_timer(self):
        if self.seconds:  # the thread may not run again before a hang: so here, for a microsecond
            left = min(self.deadlines) - time.monotonic() + NATIVE
            signal.setitimer(signal.ITIMER_REAL, max(left, 1e-3) if left < math.inf else 0)

    def _on_error(self, kind, error, trace):
        # A loader's worker that was killed is an error twice: what it sent cannot be read, and then
        # torch's handler of this signal raises another, which would get lost in here.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.ending.acquire()  # the main thread and the watching one may come at the same time
        if kind is FloatingPointError:
            if self.rank > 0:
                time.sleep(3)  # once one has exited the launcher may end all: rank 0 speaks first
            else:
                say(f"error: {error} ({self.run.place()}): a lower --lr may help")
            os._exit(2)
        lines = traceback.format_exception(kind, error, trace)
        said = (str(error).strip() or kind.__name__).splitlines()
        # An error of a loader's worker ends with its cause; below one of CUDA's there is advice.
        reason = next((line for line in said if "CUDA error" in line), said[-1])
        collective = "gloo" in reason.lower() or "nccl" in reason.lower()
        self._end(lines, reason, collective)

    def _look(self):
        quiet, blocks = 0, 0
        while time.monotonic() < min(self.deadlines):
            if broken := network_error():
                self._on_hang(f"NCCL reports {broken}; it waits as above")
            stopping = self.stop is not None and self.stop.requested.is_set()
            quiet = quiet + 1 if stopping and blocks == self.blocks else 0
            blocks = self.blocks
            if quiet == QUIET:  # not ended: it may be a slow save
                text = f"rank {self.rank} is to stop, and waits at {self.run.place()}"
                say(f"{text} for {QUIET} s{self._missing('waits')}")
            time.sleep(1)
        self._on_hang(f"no progress for {self.seconds:g} s; it waits as above")

    def _on_hang(self, reason):
        self.ending.acquire()
        frame = sys._current_frames()[threading.main_thread().ident]
        self._end(traceback.format_stack(frame), reason, True)

    def _end(self, lines, reason, others_too):
        if others_too:
            reason += self._missing("failed")
        say("".join([*lines, f"rank {self.rank} failed at {self.run.place()}: {reason}"]))
        os._exit(1)

    def _missing(self, sign):
        """Say `sign` to the other ranks; returns a text that names those that have not said it."""
        silent = []

        def ask():
            store = self.store()
            store.set(f"{sign} {self.rank}", "")
            time.sleep(2)  # the others notice at nearly the same time
            ranks = range(self.world_size)
            silent.extend(str(r) for r in ranks if not store.check([f"{sign} {r}"]))

        if self.store() is None:
            return ""
        thread = threading.Thread(target=ask, daemon=True)  # the store may be out of reach
        thread.start()
        thread.join(5)
        return f"; no sign of rank {', '.join(silent)}" if silent else ""


def network_error():
    """What NCCL says is wrong with the group's network, such as REMOTE_ERROR, or None.

    NCCL would abort the process 15 s later, and would name no rank, epoch and step.
    """
    with contextlib.suppress(ValueError, RuntimeError, AttributeError):  # no group; torch 2.6
        if dist.get_backend() == "nccl":
            error = dist.group.WORLD._get_backend(torch.device("cuda")).get_error().name
            return None if error == "SUCCESS" else error
    return None
