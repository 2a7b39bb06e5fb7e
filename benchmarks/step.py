"""Milliseconds of a training step of distributed.py, of bare loops, and of the device at best.

$ python -m benchmarks.step
"""

import contextlib
import functools
import itertools
import os
import resource
import runpy
import sys
import tempfile
from statistics import median

import torch
from torch.autograd import DeviceType
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

import common.loader
from benchmarks.harness import (
    DEVICE,
    GPU,
    ROOT,
    Contestant,
    add_model_flags,
    alternate,
    clean_up_on_sigterm,
    clock,
    make_parser,
    report,
    spread,
)
from benchmarks.resident import ResidentLoader
from benchmarks.roofline import roofline
from common.loader import keep_memory
from longrun.device import set_threads
from longrun.model import build_model

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
A_DAY = 86400  # seconds
PROFILED = ProfilerActivity.CUDA if GPU else ProfilerActivity.CPU
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler is silent


def parse_args():
    parser = make_parser("step", __doc__, rounds=60, batch_size=256 if GPU else 64)
    add_model_flags(parser)
    add = parser.add_argument
    default = "bf16" if GPU else "fp32"
    add("--precision", choices=DTYPES, default=default, help="of all but plain, which is fp32")
    add("--compile", action="store_true", help="torch.compile the model of all but plain")
    add("--steps", type=int, default=3, help="of a round")
    return parser.parse_args()


def main():
    args = parse_args()
    clean_up_on_sigterm()
    names = ["script", "bare", "plain"]
    times = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        calls = {
            "script": (run_script, args, folder),
            "bare": (bare_loop, args),
            "plain": (plain_loop, args),
        }
        contestants = {name: stack.enter_context(Contestant(*calls[name])) for name in names}
        for contestant in contestants.values():
            contestant.ask(args.steps)  # to warm up
        for round_number in range(args.rounds):
            for name, contestant in alternate(contestants.items(), round_number):
                times[name].append(1000 * contestant.ask(args.steps) / args.steps)
        memory = {name: contestants[name].ask("memory") for name in names}
        device = {name: contestants[name].ask("device") for name in names}
        rooflines = {name: contestants[name].ask("roofline") for name in ["bare", "plain"]}
    rooflines["script"] = rooflines["bare"]  # it does the same arithmetic

    runs = []
    for name, values in times.items():
        to_bare = [a / b for a, b in zip(values, times["bare"], strict=True)]
        run = {
            "name": name,
            "ms": spread(values),
            "peak_memory_mb": memory[name],
            "images_per_second": 1000 * args.batch_size / median(values),
            "time_to_bare": median(to_bare),
            "speed_to_plain": median(times["plain"]) / median(values),
            "device_ms": device[name],
            "busy": device[name] and device[name] / median(values),
            "of_roofline": rooflines[name]["ms"] / median(values),
            "roofline": rooflines[name],
        }
        runs.append(run)
    columns = {
        "": "name",
        "ms": "ms",
        "images/s": "images_per_second",
        "x bare": "time_to_bare",
        "speed / plain": "speed_to_plain",
        "busy": "busy",
        "of roofline": "of_roofline",
        "peak MB": "peak_memory_mb",
    }
    report("step", args, runs, columns)


def run_script(connection, args, folder):
    """A contestant: distributed.py as it is, but with GuidedLoader for its loader."""
    common.loader.start_loader = functools.partial(GuidedLoader, connection=connection)
    keep_memory()  # as start_loader does
    flags = {
        "--arch": args.arch,
        "--batch-size": args.batch_size,
        "--image-size": args.image_size,
        "--precision": args.precision,
        "--checkpoint-dir": folder,
        "--dist-timeout": A_DAY,  # it also waits while the other contestants are measured
    }
    sys.argv[1:] = [str(word) for flag in flags.items() for word in flag]
    if args.compile:
        sys.argv.append("--compile")
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        runpy.run_path(str(ROOT / "distributed.py"), run_name="__main__")


class GuidedLoader(ResidentLoader):
    """Yields its batch once for each step that the parent process asks for, in an endless epoch."""

    def __init__(self, dataset, sampler, batch_size, workers, device, connection, seed=None):
        super().__init__(dataset, sampler, batch_size, workers, device, seed)
        self.connection = connection

    def __len__(self):
        return sys.maxsize  # so the epoch never ends, and no checkpoint is saved in a step

    def __iter__(self):
        batches = itertools.cycle(super().__iter__())
        for _ in requested_steps(self.connection):
            yield next(batches)


def bare_loop(connection, args):
    """A contestant: no more than forward, backward and optimizer, with the script's settings."""
    dtype = DTYPES[args.precision]
    measure_loop(connection, args, dtype, torch.channels_last, compiled=args.compile)


def plain_loop(connection, args):
    """A contestant: the same loop with torch's defaults."""
    layout = torch.contiguous_format
    measure_loop(connection, args, torch.float32, layout, compiled=False)


def measure_loop(connection, args, dtype, layout, compiled):
    """Train on one batch, which is on the device already, for as many steps as are asked for."""
    args.evaluate = False  # build_model() reads it
    set_threads(1)
    torch.backends.cudnn.benchmark = True
    net = build_model(args, 10, DEVICE).to(memory_format=layout)
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=DEVICE)
    images = images.contiguous(memory_format=layout)
    target = torch.arange(args.batch_size, device=DEVICE) % 10
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler(DEVICE.type, enabled=dtype == torch.float16)
    model = torch.compile(net) if compiled else net

    def train_step(model):
        with torch.autocast(DEVICE.type, dtype, dtype != torch.float32):
            loss = cross_entropy(model(images), target)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    # A compiled model hides its operations from the roofline.
    for _ in requested_steps(connection, lambda: roofline(lambda: train_step(net), dtype)):
        train_step(model)


def requested_steps(connection, measure_roofline=None):
    """Yield once for each step that the parent process asks for.

    A request is a number of steps, or "memory", "device" or "roofline". The answer is the seconds
    that the steps took, the peak of memory in MB, what device_milliseconds() returns of one step,
    or what measure_roofline() returns.
    """
    while True:
        request = connection.recv()
        if request == "memory":
            connection.send(peak_memory())
        elif request == "device":
            yield  # not measured, as below
            with profile(activities=[PROFILED]) as profiler:
                yield
                clock()
            connection.send(device_milliseconds(profiler))
        elif request == "roofline":
            connection.send(measure_roofline())
        else:
            yield  # not measured: the cores and their caches were another's
            start = clock()
            for _ in range(request):
                yield
            connection.send(clock() - start)


def device_milliseconds(profiler):
    """How long the GPU worked, without the gaps in which it waited for the CPU.

    None on a CPU, and where the profiler sees nothing of the GPU.
    """
    events = [event for event in profiler.events() if not event.is_user_annotation]
    events = [event for event in events if event.device_type == DeviceType.CUDA]
    return sum(event.time_range.elapsed_us() for event in events) / 1000 or None


def peak_memory():
    if GPU:
        return torch.cuda.max_memory_allocated() / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


if __name__ == "__main__":
    main()
