"""How a process is asked to stop, and ends with the process that started it."""

import math
import os
import signal
import sys
import threading
import time

from common.device import SIGNALS, end_with_parent


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
        # Where one is closed, the pipe below would get its number, and what native code prints.
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:
                setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        self.signals = list(SIGNALS)
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
            self.signals.remove(signal.SIGHUP)  # by nohup: the run outlives its terminal
        self._handle(lambda *_: None)
        os.register_at_fork(after_in_child=self.restore_defaults)  # a child is not asked to stop
        # Python runs handlers in the main thread, which may be stuck in C++. So the numbers of all
        # signals go to a pipe at once, and a thread reads it.
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write)
        threading.Thread(target=self._read, args=[read], daemon=True).start()

    def _handle(self, handler):
        for number in self.signals:
            signal.signal(number, handler)

    def _read(self, pipe):
        first = math.inf
        while True:
            number = os.read(pipe, 1)[0]
            if number in self.signals:
                first = min(first, time.monotonic())
                if self.at_once or time.monotonic() - first > 2:
                    os._exit(128 + number)
                self.requested.set()

    def ignore(self):
        """Let these signals do nothing from here on."""
        self._handle(signal.SIG_IGN)

    def restore_defaults(self):
        """Let these signals end the process at once from here on."""
        signal.set_wakeup_fd(-1)
        self._handle(signal.SIG_DFL)
