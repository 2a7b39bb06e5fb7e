"""What the benchmarks share: their common flags, their processes, their clock and their report."""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import multiprocessing
import os
import platform
import shlex
import signal
import sys
import time
from pathlib import Path
from statistics import median

import torch

from common.loader import die_with_parent
from longrun.device import own_cores
from longrun.messages import exit_on_user_error

ROOT = Path(__file__).resolve().parent.parent
IMAGENET_IMAGES = 1281167
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
CORES = own_cores(1)


def make_parser(name, description, rounds, batch_size=None):
    """A parser with the flags of all benchmarks; rounds and batch_size are their defaults.

    Without batch_size there is no such flag.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--out", metavar="DIR", type=Path, default=Path("results"), help="for the results")
    add("--rounds", type=int, default=rounds, help="measurements of each contestant")
    if batch_size:
        add("-b", "--batch-size", type=int, default=batch_size, help="images")
    return parser


def add_photograph_flags(parser):
    add = parser.add_argument
    add("--data", metavar="DIR", help="holds train/ and val/; None: photographs made at first use")
    add("--images", type=int, default=2048, help="how many photographs to make")


def add_model_flags(parser):
    add = parser.add_argument
    add("-a", "--arch", default="resnet50" if GPU else "resnet18", help="as for the scripts")
    add("--image-size", type=int, default=224 if GPU else 64, help="pixels")


def clean_up_on_sigterm():
    """Let SIGTERM raise SystemExit, so that processes and temporary folders are removed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


class Contestant:
    """A process that measures when it is asked to, and waits in between.

    It calls function(connection, *args), which receives requests from the connection, and sends an
    answer to each. At the end of its `with` block it is killed.
    """

    def __init__(self, function, *args):
        context = multiprocessing.get_context("spawn")  # a forked process could not use a GPU
        self.connection, other_end = context.Pipe()
        self.process = context.Process(target=_run, args=(function, other_end, *args))
        self.process.start()
        other_end.close()  # else answer() would not notice that the process has ended

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.join()

    def ask(self, request):
        """Send a request; returns the answer."""
        with contextlib.suppress(OSError):  # the process has ended: answer() says so
            self.connection.send(request)
        return self.answer()

    def answer(self):
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            sys.exit("error: a contestant has ended, see above")


def _run(function, *args):
    multiprocessing.set_start_method(None, force=True)  # else its own children are spawned too
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: it kills this process
    with exit_on_user_error(rank=0):
        function(*args)


def alternate(contestants, round_number):
    """The contestants as a list, in reverse order in every second round.

    What one leaves behind in caches and clock rates then favours no other.
    """
    contestants = list(contestants)
    return contestants[::-1] if round_number % 2 else contestants


def clock():
    """The time in seconds, once the device has finished all its work."""
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def spread(values):
    return {"median": median(values), "low": min(values), "high": max(values), "all": values}


def report(name, args, runs, columns, **settings):
    """Print the runs as a table, and write them to args.out/NAME.json.

    runs: a list of dicts. columns: {heading: key of a run}. settings: what the file is to hold
    beside the flags.
    """
    _print_table(runs, columns)
    flags = {key: value for key, value in vars(args).items() if key not in ("out", "data")}
    results = {
        "command": shlex.join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]]),
        "date": str(datetime.date.today()),
        "hardware": hardware(),
        "versions": versions(),
        "settings": flags | settings,
        "runs": runs,
    }
    # Five digits: more are noise.
    results = json.loads(json.dumps(results), parse_float=lambda text: float(f"{float(text):.5g}"))
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{name}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{hardware()}, torch {torch.__version__}; written to {path}", flush=True)


def _print_table(runs, columns):
    rows = [list(columns)]
    rows += [[_cell(run[key]) for key in columns.values()] for run in runs]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        print(first.ljust(widths[0]), *cells, sep="  ")


def _cell(value):
    if value is None:  # it was not measured
        return "-"
    if isinstance(value, dict):  # of spread()
        return f"{_cell(value['median'])} ({_cell(value['low'])} to {_cell(value['high'])})"
    if isinstance(value, float):  # with three digits at least
        decimals = max(0, 3 - len(str(int(value))))
        return f"{value:.{decimals}f}"
    return str(value)


def hardware():
    """One line: which GPUs, or which CPU and how much memory, and how many cores are ours."""
    if GPU:
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, {CORES} cores"
    model = platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(": ")[1] for line in lines if line.startswith("model name"))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{CORES} cores of {model}, {memory:.0f} GiB, no GPU"


def versions():
    """{package: version} of those that are installed and matter to what is measured."""
    found = {"python": platform.python_version()}
    for package in (
        "torch",
        "torchvision",
        "nvidia-nvimgcodec-cu13",
        "pillow",
        "horovod",
        "timm",
        "nvidia-dali-cuda130",
        "spdl",
    ):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
