"""Threads of the doctor's in a process of the script."""

import _thread
import signal


def start(function, *args):
    """A daemon that threading.enumerate() does not name, for the script may wait for all of these.

    It takes no signal: one that the script's threads have blocked would end the process here.
    Raises RuntimeError where no thread can be started, as in some sub-interpreters.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        _thread.start_new_thread(function, args)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
