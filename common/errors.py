"""What a user gets wrong, in one line; and what goes wrong later, with its place."""

import argparse
import contextlib
import os
import sys
import threading
import time
import traceback

import torch
import torch.distributed as dist

from .prefetcher import Prefetcher
from .process import Stop, kill_timer


class ArgumentParser(argparse.ArgumentParser):
    """Raises ValueError where argparse would print its usage, once per process, and exit."""

    def __init__(self, **how):
        defaults = "in brackets: the default, or with --data and without it"
        super().__init__(usage="%(prog)s [flags]", formatter_class=_Help, epilog=defaults, **how)

    def error(self, message):
        raise ValueError(f"{message} (see --help)")


class _Help(argparse.HelpFormatter):
    """A line for each flag, in 80 columns, with its default."""

    def __init__(self, prog):
        super().__init__(prog, max_help_position=27, width=80)

    def _format_action_invocation(self, action):
        number = {"int": " N", "float": " X"}.get(getattr(action.type, "__name__", ""), " NAME")
        value = f" {action.metavar}" if action.metavar else number
        return ", ".join(action.option_strings) + value * (action.nargs != 0)

    def add_argument(self, action):
        words = [" or ".join(action.choices)] if action.choices else []
        words += [action.help] if action.help else []
        told = "(" in str(action.help) or action.default in (None, argparse.SUPPRESS)
        if action.nargs != 0 and not told:
            words.append(f"({action.default})")
        action.help = " ".join(words)
        super().add_argument(action)


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
def user_errors(local_rank, remedy=None):
    """Turn a ValueError or OSError into one line on stderr and exit code 2.

    So also an ImportError, where there is a remedy to say.
    Every process of a node meets the same error. Local rank 0 says it and exits, which makes the
    launcher end the others; they wait for that, or the line could be lost in the race.
    """
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        if isinstance(error, ImportError) and not remedy:
            raise
        for _ in range(300 if local_rank else 0):  # then local rank 0 did not fail: it is said here
            if Stop.requested:
                os._exit(2)
            time.sleep(0.1)
        sys.stdout.flush()
        sys.stderr.write(f"error: {first_line(error)}{f': {remedy}' if remedy else ''}\n")
        sys.stderr.flush()
        os._exit(2)


def end_on_error(rank, world_size, args):
    """Make an error end this process at once, with its rank, epoch, step and who is missing.

    An error is an uncaught exception, or no batch taken in for args.dist_timeout seconds, where
    the script has that flag: whatever the main thread waits for, it does not wait for ever. Call
    it before init_process_group, in which NCCL can wait without a limit. An orderly exit could
    hang: loader workers ignore SIGTERM (see Stop), and destroying the group waits for processes
    that may wait for this one.
    """
    first = threading.Lock()
    Prefetcher.step_done = time.monotonic()  # nothing yet, but from now on there is a limit

    def end(frames, lines, reason):
        first.acquire()  # the main thread and the watch may come at the same time
        try:
            known = [f.f_locals for f in frames if {"epoch", "step"} <= set(f.f_locals)]
            where = "".join(" at epoch {epoch} step {step}".format(**names) for names in known[:1])
            if "gloo" in reason or "nccl" in reason.lower() or "no batch" in reason:
                reason += _missing(rank, world_size)
            with contextlib.suppress(OSError):
                sys.stdout.flush()
            # Not sys.stderr: torch's hook around this one keeps that until it returns.
            sys.__stderr__.write("".join([*lines, f"rank {rank} failed{where}: {reason}\n"]))
            sys.__stderr__.flush()
        finally:
            os._exit(1)  # also when nobody reads what is written: a closed pipe is an error

    def hook(kind, error, trace):
        lines = traceback.format_exception(kind, error, trace)
        reason = (str(error).strip() or kind.__name__).splitlines()[-1]
        end([frame for frame, _ in traceback.walk_tb(trace)], lines, reason)

    def watch():
        end_in = kill_timer()
        # NCCL's own watch would be first by a little, and aborts without epoch, step and rank.
        limit = timeout * 0.9 if torch.cuda.is_available() else timeout
        while time.monotonic() - Prefetcher.step_done < limit:
            end_in(timeout + 30)  # more than it takes to say why: that is for the code below
            time.sleep(1)
        frame = sys._current_frames()[threading.main_thread().ident]
        frames = [frame for frame, _ in traceback.walk_stack(frame)]
        end(frames, traceback.format_stack(frame), f"no batch for {limit:g} s; it waits as above")

    sys.excepthook = hook
    if timeout := vars(args).get("dist_timeout"):
        threading.Thread(target=watch, daemon=True).start()


def _missing(rank, world_size):
    """Which ranks do not notice an error of the group, as far as its store can tell; a string."""
    silent = []

    def ask():
        store = dist.distributed_c10d._get_default_store()
        store.set(f"failed {rank}", "")
        time.sleep(2)  # the others notice at nearly the same time
        silent.extend(str(r) for r in range(world_size) if not store.check([f"failed {r}"]))

    if dist.is_initialized():
        thread = threading.Thread(target=ask, daemon=True)  # the store may be out of reach
        thread.start()
        thread.join(5)
    return f"; no sign of rank {', '.join(silent)}" if silent else ""
