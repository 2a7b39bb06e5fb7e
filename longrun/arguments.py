"""The command line: flags with their limits."""

import argparse
import math
import os
import signal
import sys


class ArgumentParser(argparse.ArgumentParser):
    """Adds each default to --help. Raises ValueError for what is wrong, an empty value too.

    description: a docstring, of which the first line is shown; None, as python -OO makes it.

    argparse itself would print its usage, once per process, and exit. From parse_args() on, Ctrl-C
    ends the process at once, without a traceback: there is nothing to save before StopRequest.
    """

    def __init__(self, description=None):
        super().__init__(description=(description or "").partition("\n")[0])

    def add_argument(self, *names, **more):
        action = super().add_argument(*names, **more)
        # 0 is shown, though it equals False.
        if not any(action.default is x for x in (None, False, argparse.SUPPRESS)):
            action.help = f"{action.help or ''} (default: %(default)s)"
        return action

    def parse_args(self, *given):
        if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        for name in ("stdout", "stderr"):  # else the next file would take a closed one's number
            if getattr(sys, name) is None:
                setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        args = super().parse_args(*given)
        for name, value in vars(args).items():
            if value == "":  # --resume "$CKPT" would start afresh
                self.error(f"--{name.replace('_', '-')} is empty: is a variable not set?")
        return args

    def error(self, message):
        raise ValueError(f"{message} (see --help)")


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
