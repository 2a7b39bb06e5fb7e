"""What a user gets wrong, in one line; and what goes wrong later, with its place."""

import argparse
import contextlib
import os
import signal
import sys
import time
import traceback

from .process import SIGNALS


class ArgumentParser(argparse.ArgumentParser):
    """Raises ValueError where argparse would print its usage, once per process, and exit."""

    def error(self, message):
        raise ValueError(f"{message} (see --help)")


def at_least(minimum, kind=int):
    """A `type` for add_argument: a number of this kind, not below the minimum."""

    def number(text):
        if not kind(text) >= minimum:  # NaN is not either
            raise argparse.ArgumentTypeError(f"{text} is less than {minimum}")
        return kind(text)

    number.__name__ = kind.__name__  # argparse names it in its messages
    return number


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextlib.contextmanager
def user_errors(local_rank):
    """Turn a ValueError or OSError into one line on stderr and exit code 2.

    Every process of a node meets the same error. Local rank 0 says it and exits, which makes the
    launcher end the others; they wait for that, or the line could be lost in the race.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        if local_rank != 0:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            time.sleep(30)  # reached only where local rank 0 did not fail: then it is said here
        sys.stdout.flush()
        sys.stderr.write(f"error: {first_line(error)}\n")
        sys.stderr.flush()
        os._exit(2)


def end_on_error(rank):
    """Make an uncaught exception end this process at once, with its rank, epoch and step.

    Call it after init_process_group, which puts its own sys.excepthook around the present one.
    An orderly exit could hang: loader workers ignore SIGTERM (see Stop), and destroying the group
    waits for processes that may wait for this one.
    """

    def hook(kind, error, trace):
        lines = traceback.format_exception(kind, error, trace)
        where = ""
        for frame, _ in traceback.walk_tb(trace):
            if {"epoch", "step"} <= frame.f_locals.keys():
                where = " at epoch {epoch} step {step}".format(**frame.f_locals)
        reason = (str(error).strip() or kind.__name__).splitlines()[-1]
        lines.append(f"rank {rank} failed{where}: {reason}\n")
        sys.stdout.flush()
        sys.stderr.write("".join(lines))
        sys.stderr.flush()
        os._exit(1)

    sys.excepthook = hook
