"""Errors that a user can cause: one line on stderr, and exit code 2."""

import contextlib
import os
import sys
import threading
import time
import traceback


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextlib.contextmanager
def user_errors(rank, stop=None, remedy=None):
    """Turn a ValueError or an OSError into one line on stderr and exit code 2.

    Several processes meet the same error, and only the one with rank 0 reports it. rank: the local
    rank where each node can have an error of its own, the rank where all processes have the same.
    The others wait until the launcher stops them: if one of them exited first, the launcher could
    stop rank 0 before it has written its line. stop: the Stop of this process, where there is one
    already; a signal ends the block at once, for nothing is trained yet. With `remedy`, a text, an
    ImportError is reported the same way.
    """
    try:
        try:
            if stop:
                stop.at_once = True
            yield
        finally:
            if stop:
                stop.at_once = False
    except (ValueError, OSError, ImportError) as error:
        if isinstance(error, ImportError) and not remedy:
            raise
        if rank:
            # If rank 0 has not exited after 30 s, the error is this process's own: report it.
            stopped = stop.requested.wait(30) if stop else time.sleep(30)
            if stopped:
                os._exit(2)
        say(f"error: {first_line(error)}{f': {remedy}' if remedy else ''}")
        os._exit(2)


@contextlib.contextmanager
def time_limit(seconds, reason):
    """End this process with `reason` on stderr, and exit code 2, if the block takes longer."""
    frames, thread = sys._current_frames, threading.get_ident()

    def end():
        say("".join([*traceback.format_stack(frames()[thread]), f"error: {reason}"]))
        os._exit(2)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def say(text):
    """Write a text to stderr, after all that was printed so far; nothing where both are closed."""
    for stream, words in ((sys.stdout, ""), (sys.__stderr__, f"{text}\n")):
        with contextlib.suppress(OSError, AttributeError):  # nobody reads it any more; it is None
            stream.write(words)
            stream.flush()
