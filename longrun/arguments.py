"""The command line: flags with their defaults and limits, and errors that a user can cause."""

import argparse
import contextlib
import json
import math
import os
import sys
import time

# Defaults for --data, and for the built-in digits.
IMAGENET = {"arch": "resnet50", "epochs": 90, "batch_size": 256, "lr": 0.1}
IMAGENET |= {"warmup_epochs": 5.0, "image_size": 224}
DIGITS = {"arch": "resnet18", "epochs": 4, "batch_size": 64, "lr": 0.1}
DIGITS |= {"warmup_epochs": 1.0, "image_size": 64}


class ArgumentParser(argparse.ArgumentParser):
    """Adds each default to --help. Raises ValueError for what is wrong, an empty value too.

    argparse itself would print its usage, once per process, and exit.
    """

    def add_argument(self, *names, **more):
        action = super().add_argument(*names, **more)
        default = action.default
        if default is None and action.dest in IMAGENET:
            default = f"{IMAGENET[action.dest]}; for the digits: {DIGITS[action.dest]}"
        if default is not None and default is not False and default != argparse.SUPPRESS:
            action.help = f"{action.help or ''} (default: {default})"
        return action

    def parse_args(self, *given):
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):  # not where it is closed, or replaced
                # A path that the terminal's encoding does not have is printed with escapes.
                stream.reconfigure(errors="backslashreplace")
        args = super().parse_args(*given)
        for name, value in vars(args).items():
            if value == "":
                self.error(f"--{name.replace('_', '-')} is empty: is a variable not set?")
        return args

    def error(self, message):
        raise ValueError(f"{message} (see --help)")


def complete(args, saved):
    """A new Namespace: `args`, with a value for each flag that is None and has a default.

    saved: a dict, the args of a checkpoint, or {}. Arch and image_size come from it where they are
    not given, for another image size gives another accuracy. The rest depends on --data.
    """
    known = {name: value for name, value in vars(args).items() if value is not None}
    saved = {name: saved[name] for name in ("arch", "image_size") if name in saved}
    defaults = IMAGENET if "data" in known else DIGITS
    return argparse.Namespace(**vars(args) | defaults | saved | known)


def bounded(kind, lowest, highest=math.inf):
    """A `type` for add_argument: a finite int or float (`kind`) from `lowest` to `highest`."""

    def number(text):
        value = kind(text)
        if not lowest <= value <= highest or value == math.inf:  # NaN is not between them either
            limit = f"between {lowest} and {highest}" if highest < math.inf else f"{lowest} or more"
            raise argparse.ArgumentTypeError(f"must be {limit}, not {text}")
        return value

    number.__name__ = kind.__name__  # argparse names it in its messages
    return number


@contextlib.contextmanager
def user_errors(rank, stop=None, remedy=None):
    """Turn a ValueError or an OSError into one line on stderr and exit code 2.

    Of processes that meet the same error rank 0 reports it. The others wait for the launcher to
    stop them: if one exited first, it might stop rank 0 before that has written its line. rank: the
    local rank where nodes can fail differently, for a line from each node; else the rank. stop: the
    StopRequest of this process, if there is one already; a signal ends the block at once, for
    nothing is trained yet. With `remedy`, a text, an ImportError is reported the same way.
    """
    kinds = (ValueError, OSError, ImportError) if remedy else (ValueError, OSError)
    try:
        try:
            if stop:
                stop.at_once = True
            yield
        finally:
            if stop:
                stop.at_once = False
    except kinds as error:
        if rank:
            # If rank 0 has not exited after 30 s, only this process has the error: report it.
            stopped = stop.requested.wait(30) if stop else time.sleep(30)
            if stopped:
                os._exit(2)
        say(f"error: {first_line(error)}{f': {remedy}' if remedy else ''}")
        os._exit(2)


def first_line(error):
    """What an exception says, without the lines that follow; its type where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


COLOURS = {"bold": 1, "red": 31, "green": 32, "yellow": 33}


def is_terminal(stream):
    """Whether `stream`, None where it is closed, takes colours and moves of the cursor."""
    return bool(stream and stream.isatty() and os.environ.get("TERM", "dumb") != "dumb")


def paint(text, colour, stream=None):
    """The text in a colour, if `stream` (stdout) is a terminal and NO_COLOR is not set."""
    if os.environ.get("NO_COLOR") or not is_terminal(stream or sys.stdout):
        return text
    return f"\033[{COLOURS[colour]}m{text}\033[0m"


def tell(*lines):
    """Print lines to stdout. If nobody reads it any more, go on without it.

    Ctrl-C also ends the `tee` that a run is piped into, and the run is still to be saved.
    """
    try:
        print(*lines, sep="\n", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(text):
    """Write a text about an error to stderr, after all that was printed so far.

    Its last line, the reason, is red at a terminal, and torchrun repeats it at the end of its own
    report.
    """
    stderr = sys.__stderr__  # a process group lets the hook for errors print elsewhere
    first, newline, reason = text.rpartition("\n")
    over_bar = "\r\033[K" if is_terminal(stderr) else ""
    text = f"{over_bar}{first}{newline}{paint(reason, 'red', stderr)}\n"
    for stream, part in ((sys.stdout, ""), (stderr, text)):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it; closed by close()
            print(part, end="", file=stream, flush=True)
    tell_torchrun(reason)


def tell_torchrun(reason):
    """Why this process ends, for the report that torchrun prints after its end."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with contextlib.suppress(OSError), open(path, "w") as file:
            more = {"py_callstack": reason, "timestamp": str(int(time.time()))}
            json.dump({"message": {"message": reason, "extraInfo": more}}, file)
