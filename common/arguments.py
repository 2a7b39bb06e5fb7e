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
        text, default = action.help or "", action.default
        if action.dest in IMAGENET:
            default = f"{IMAGENET[action.dest]}; for the digits: {DIGITS[action.dest]}"
        unset = default is None or default is False or default is argparse.SUPPRESS
        if not unset and "(default: " not in text:
            action.help = f"{text} (default: {default})"
        return action

    def parse_args(self, *given):
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):  # it is None where it is closed
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

    saved: a dict, the args of a checkpoint; {} where there is none. Its arch and image_size are
    the defaults: another image size than that of the training gives another accuracy. The other
    defaults are those of the data.
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

    Several processes meet the same error, and only the one with rank 0 reports it. rank: the local
    rank where each node can have an error of its own, the rank where all processes have the same.
    The others wait until the launcher stops them: if one of them exited first, the launcher could
    stop rank 0 before it has written its line. stop: the StopRequest of this process, if there is
    one already; a signal ends the block at once, for nothing is trained yet. With `remedy`, a text,
    an ImportError is reported the same way.
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


def paint(text, colour, stream=None):
    """The text in a colour, if `stream` (stdout) is a terminal and NO_COLOR is not set."""
    stream, env = stream or sys.stdout, os.environ
    if env.get("NO_COLOR") or env.get("TERM", "dumb") == "dumb" or not (stream and stream.isatty()):
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
    report. Nothing is written where stdout and stderr are closed.
    """
    first, newline, reason = text.rpartition("\n")
    words = f"{first}{newline}{paint(reason, 'red', sys.__stderr__)}\n"
    if sys.__stderr__ and sys.__stderr__.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        words = f"\r\033[K{words}"  # in place of a progress bar
    for stream, part in ((sys.stdout, ""), (sys.__stderr__, words)):
        # Nobody reads it any more; it is None; it was closed by close().
        with contextlib.suppress(OSError, AttributeError, ValueError):
            stream.write(part)
            stream.flush()
    tell_torchrun(reason)


def tell_torchrun(reason):
    """Why this process ends, for the report that torchrun prints after its end."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with contextlib.suppress(OSError), open(path, "w") as file:
            more = {"py_callstack": reason, "timestamp": str(int(time.time()))}
            json.dump({"message": {"message": reason, "extraInfo": more}}, file)
