"""The command line: a parser that says its errors in one line, and types for its flags."""

import argparse
import math
import os

# Defaults for --data, and for the built-in digits.
IMAGENET = {"arch": "resnet50", "epochs": 90, "batch_size": 256, "lr": 0.1}
IMAGENET |= {"warmup_epochs": 5.0, "image_size": 224}
DIGITS = {"arch": "resnet18", "epochs": 4, "batch_size": 64, "lr": 0.1}
DIGITS |= {"warmup_epochs": 1.0, "image_size": 64}


class ArgumentParser(argparse.ArgumentParser):
    """Raises ValueError where argparse would print its usage, once per process, and exit.

    Flags of IMAGENET and DIGITS that are None take the default of the data that is trained on. An
    empty value is an error.
    """

    def parse_args(self, *given):
        args = super().parse_args(*given)
        for name, value in (IMAGENET if args.data else DIGITS).items():
            if getattr(args, name, value) is None:
                setattr(args, name, value)
        for name, value in vars(args).items():
            if value == "":
                self.error(f"--{name.replace('_', '-')} is empty: is a variable not set?")
        return args

    def error(self, message):
        raise ValueError(f"{message} (see --help)")


def bounded(kind, lowest, highest=math.inf):
    """A `type` for add_argument: a finite int or float (`kind`) from `lowest` to `highest`."""

    def number(text):
        value = kind(text)
        if not lowest <= value <= highest or value == math.inf:  # NaN is never between bounds
            limit = f" to {highest}" if highest < math.inf else ""
            raise argparse.ArgumentTypeError(f"{text} is not a number from {lowest}{limit}")
        return value

    number.__name__ = kind.__name__  # argparse names it in its messages
    return number


def output_file(text):
    """A `type` for add_argument: where a file can be written, behind any symbolic link.

    What is there already must be a regular file: a device or a pipe would be replaced by a file.
    """
    target = os.path.realpath(text)
    if os.path.exists(target) and not os.path.isfile(target):
        raise argparse.ArgumentTypeError(f"{text} is not a regular file")
    if not os.access(os.path.dirname(target), os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {text}")
    return target
