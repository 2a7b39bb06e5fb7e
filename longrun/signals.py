"""Signals that ask a run to stop."""

import os
import signal
import threading
import time

from common.loader import SIGNALS


class StopRequest:
    """`requested` is set once this process was asked to stop: SIGTERM, SIGINT, SIGUSR1, SIGHUP.

    The training loop looks at it where all processes can stop together. Ask with is_set(): a wait()
    in the main thread, where Python handles signals, may never end. A launcher passes on what the
    terminal has sent to every process already, so signals within two seconds are one request. A
    later one ends this process with exit code 128 + its number. Create it when there is something
    to save: until then a signal ends the process.
    """

    def __init__(self):
        self.requested, self.patience = threading.Event(), 0
        self.signals = list(SIGNALS)
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
            self.signals.remove(signal.SIGHUP)  # by nohup: the run outlives its terminal
        self._handle(self._on_signal)
        # A process that is forked later is not asked to stop: it ends as it would anywhere.
        os.register_at_fork(after_in_child=lambda: self._handle(signal.SIG_DFL))

    def _handle(self, handler):
        for number in self.signals:
            signal.signal(number, handler)

    def _on_signal(self, number, frame):
        if not self.patience:  # before set(), for another signal may come inside of it
            self.patience = time.monotonic() + 2
            self.requested.set()
        elif time.monotonic() > self.patience:
            os._exit(128 + number)

    def ignore(self):
        """Let these signals do nothing from here on: they could only hide the exit code."""
        self._handle(signal.SIG_IGN)
