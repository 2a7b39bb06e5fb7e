"""How processes are asked to stop, end with the process that started them, and are waited for."""

import ctypes
import logging
import math
import multiprocessing
import os
import signal
import sys
import threading
import time

import torch.multiprocessing as mp

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class StopRequest:
    """`requested` is set once this process was asked to stop: SIGTERM, SIGINT, SIGUSR1, SIGHUP.

    The training loop looks at it where all processes can stop together, and sets `agreed` once they
    do. A launcher passes on what the terminal has sent to every process already, so signals within
    two seconds are one request. A later signal ends this process with exit code 128 + its number,
    and so does the first while `at_once` is True: where there is nothing to save.

    die_with_parent: whether the kernel is to kill this process when its launcher is gone.
    """

    def __init__(self, die_with_parent):
        self.requested = threading.Event()
        self.agreed = self.at_once = False
        if die_with_parent:
            end_with_parent()
        # Where one is closed, the next file would get its number, and what native code prints.
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:
                setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        self.signals = list(SIGNALS)
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
            self.signals.remove(signal.SIGHUP)  # by nohup: the run outlives its terminal
        for number in self.signals:
            signal.signal(number, lambda *_: None)
        os.register_at_fork(after_in_child=self.restore_defaults)  # a child is not asked to stop
        # Python runs handlers in the main thread, which may be stuck in C++. So the numbers of all
        # signals go to a pipe at once, and a thread reads it.
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write)
        threading.Thread(target=self._read, args=[read], daemon=True).start()

    def _read(self, pipe):
        first = math.inf
        while True:
            number = os.read(pipe, 1)[0]
            if number not in self.signals:
                continue
            if self.at_once or time.monotonic() - first > 2:
                os._exit(128 + number)
            if not self.requested.is_set():
                first = time.monotonic()
                self.requested.set()

    def ignore(self):
        """Let these signals do nothing from here on."""
        for number in self.signals:
            signal.signal(number, signal.SIG_IGN)

    def restore_defaults(self):
        """Let these signals end the process at once from here on."""
        signal.set_wakeup_fd(-1)
        for number in self.signals:
            signal.signal(number, signal.SIG_DFL)


def end_with_parent():
    """Let the kernel kill this process when the one that started it is gone (Linux).

    A launcher that is killed by SIGKILL cannot stop its workers: they would train on, and write
    to the folder that the next run uses.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    # The parent may have died before that line, during our imports.
    parent = multiprocessing.parent_process()  # None below a launcher of another kind
    if parent and parent.pid != os.getppid():
        os._exit(1)


def run_child(index, main, *args):
    """What mp.spawn starts: run main(index, *args) and exit with what it returns."""
    try:
        code = main(index, *args)
    except Exception:  # mp.spawn would keep it to itself until all processes have ended
        try:
            sys.excepthook(*sys.exc_info())
        finally:  # an orderly exit would wait for loader workers, which ignore SIGTERM
            os._exit(1)
    sys.exit(code)


def supervise(context, rank=0):
    """Wait for all children, pass signals on to them; returns the exit code of the first to fail.

    When one fails the others have three seconds to end by themselves. `rank`: the first child's.
    """

    def pass_on(number, frame):  # each stops by itself, where all can
        for process in context.processes:
            if process.is_alive():
                os.kill(process.pid, number)

    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN or number != signal.SIGHUP:
            signal.signal(number, pass_on)
    logging.getLogger(mp.spawn.__module__).setLevel("ERROR")  # it would announce its every kill
    try:
        while not context.join(grace_period=3):
            pass
    except mp.ProcessExitedException as error:
        if error.exit_code < 0:
            print(f"rank {rank + error.error_index} failed: {error}", file=sys.stderr, flush=True)
        return max(error.exit_code, 1)
    return 0
