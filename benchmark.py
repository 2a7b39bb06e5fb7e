"""Measures the loader, a training step, the start with a million files, and all strategies.

$ python benchmark.py loader
$ python benchmark.py step
$ python benchmark.py scale
$ python benchmark.py strategies

Each prints a table and writes results/NAME.json. Contestants take turns, round after round: when
the machine becomes slower, it does so for all. A figure is the median, with the lowest and highest.
"""

import argparse
import collections
import contextlib
import datetime
import fcntl
import functools
import importlib.metadata
import importlib.util
import itertools
import json
import multiprocessing
import os
import platform
import random
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median

import common.data
import numpy as np
import torch
from common.data import ImageFolder, Seeded, TrainSampler, make_loader, random_crop
from PIL import Image, ImageEnhance
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from torch.utils.flop_counter import flop_registry
from torchvision import datasets, transforms

from common.model import build_model
from common.prefetcher import MEAN, STD, Prefetcher
from common.process import keep_memory, own_cores

ROOT = Path(__file__).resolve().parent
EPOCH = 1281167  # images of ImageNet
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
CORES = own_cores(1)
GPUS = torch.cuda.device_count()


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = parser.add_subparsers(required=True)

    def command(function, rounds, batch_size):
        how = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter}
        part = parts.add_parser(function.__name__, help=function.__doc__, **how)
        part.set_defaults(function=function)
        part.add_argument("--out", type=Path, default=Path("results"), help="folder")
        part.add_argument("--rounds", type=int, default=rounds, help="turns of each")
        part.add_argument("-b", "--batch-size", type=int, default=batch_size, help="images")
        return part.add_argument

    def photos(add):
        add("--data", metavar="DIR", help="train/ and val/ (None: photographs, made at first use)")
        add("--images", type=int, default=2048, help="to make")

    def model(add):
        add("-a", "--arch", default="resnet50" if GPU else "resnet18", help="torchvision's")
        add("--image-size", type=int, default=224 if GPU else 64, help="pixels")

    photos(add := command(loader, 7, 64))
    add("-j", "--workers", type=int, default=CORES, help="loader processes")
    add("--image-size", type=int, default=224, help="pixels")
    add("--seconds", type=float, default=10, help="of a round at least; it is whole epochs")

    model(add := command(step, 60, 256 if GPU else 64))
    add("--precision", choices=DTYPES, default="bf16" if GPU else "fp32", help="but of plain")
    add("--compile", action="store_true", help="but not plain")
    add("--steps", type=int, default=3, help="of a turn")

    add = command(scale, 3, 256)
    add("--files", type=int, nargs="+", default=[10_000, 100_000, 1_280_000], help="how many")
    add("--classes", type=int, default=1000, help="folders for them")
    add("-j", "--workers", type=int, default=CORES, help="loader processes")

    photos(add := command(strategies, 3, 256))
    model(add)
    some = [2**i for i in range((GPUS or CORES).bit_length())]
    add("--processes", type=int, nargs="+", default=some, help="how many")
    add("--only", nargs="+", choices=LAUNCH, default=[*LAUNCH], help="of those that can run here")
    add("--bounds", nargs="+", choices=["loader", "compute"], default=["loader", "compute"])
    add("--loader-arch", default="benchmark:tiny", help="the model where loading is the bound")
    add("--epochs", type=int, default=4, help="the first does not count")
    return parser.parse_args()


# What all of them need.


def photographs(count):
    """A folder with `count` JPEGs of 500 x 375 to train and 64 to validate, made at first use.

    Parts of scikit-learn's two photographs in several scales and colours, with the grain of a
    sensor: 90 KB each, about what those of ImageNet have.
    """
    root = Path("data", f"photographs-{count}")
    root.parent.mkdir(exist_ok=True)
    with open(root.parent / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if root.exists():
            return str(root)
        from sklearn.datasets import load_sample_images

        print(f"making {count} photographs in {root}", flush=True)
        partial = root.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
        sources = [Image.fromarray(image) for image in load_sample_images().images]
        draw, grain = random.Random(0), np.random.default_rng(0).normal(0, 4, (500, 700, 3))
        for i in range(count + 64):
            width = draw.uniform(300, 560)
            x, y = draw.uniform(0, 640 - width), draw.uniform(0, 427 - width * 3 / 4)
            box = (x, y, x + width, y + width * 3 / 4)
            image = sources[i % 2].resize((500, 375), Image.Resampling.LANCZOS, box)
            for enhance in (ImageEnhance.Color, ImageEnhance.Contrast, ImageEnhance.Brightness):
                image = enhance(image).enhance(draw.uniform(0.7, 1.3))
            top, left = draw.randrange(125), draw.randrange(200)
            pixels = np.asarray(image) + grain[top : top + 375, left : left + 500]
            pixels = pixels.clip(0, 255).astype(np.uint8)[:, :: draw.choice([1, -1])]
            path = partial / ("train" if i < count else "val") / str(i % 8) / f"{i:05d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path, quality=95)
        partial.rename(root)
    return str(root)


def hardware():
    if GPU:
        return f"{GPUS} x {torch.cuda.get_device_name()}, {CORES} cores"
    model = platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(": ")[1] for line in lines if line.startswith("model name"))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{CORES} cores of {model}, {memory:.0f} GiB, no GPU"


def spread(values):
    return {"median": median(values), "low": min(values), "high": max(values), "all": values}


def report(args, runs, columns, **more):
    """Print the runs as a table, columns: {heading: key}; write them, and where they were taken."""

    def cell(x):
        if isinstance(x, dict):
            return f"{cell(x['median'])} ({cell(x['low'])} to {cell(x['high'])})"
        return f"{x:.{max(0, 3 - len(str(int(x))))}f}" if isinstance(x, float) else str(x)

    rows = [[*columns]] + [[cell(run[key]) for key in columns.values()] for run in runs]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *row in rows:
        cells = [x.rjust(width) for x, width in zip(row, widths[1:], strict=True)]
        print(first.ljust(widths[0]), *cells, sep="  ")

    name, versions = args.function.__name__, {"python": platform.python_version()}
    for package in ("torch", "torchvision", "pillow", "horovod"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    settings = {k: v for k, v in vars(args).items() if k not in ("function", "out", "data")}
    found = {"command": shlex.join(["python", "benchmark.py", *sys.argv[1:]])}
    found |= {"date": f"{datetime.date.today()}", "hardware": hardware(), "versions": versions}
    found |= {"settings": settings | more, "runs": runs}
    found = json.loads(json.dumps(found), parse_float=lambda text: float(f"{float(text):.5g}"))
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{name}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{hardware()}, torch {torch.__version__}; written to {path}", flush=True)


def now():
    """Seconds, when the device has done what it was asked for."""
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def in_turn(contestants, number):
    """Forwards and backwards: what one leaves of caches and clock rates must not favour another."""
    return [*contestants.items()][:: -1 if number % 2 else 1]


def child(code, told, folder=ROOT):
    """Start a call of a function of this file, which reads `told`."""
    env = {**os.environ, "BENCHMARK": json.dumps(told, default=str)}
    how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": env}
    return subprocess.Popen([sys.executable, "-c", f"import benchmark; {code}"], cwd=folder, **how)


def told():
    return argparse.Namespace(**json.loads(os.environ["BENCHMARK"]))


def our_loader(dataset, args):
    """(loader, its sampler) as the scripts make them."""
    sampler = TrainSampler(len(dataset), args.batch_size, 0, 1, seed=0)
    return make_loader(Seeded(dataset, 0), sampler, args.batch_size, args.workers, DEVICE), sampler


def usual_loader(dataset, args):
    """As in most training scripts: new workers in every epoch."""
    how = {"num_workers": args.workers, "shuffle": True, "drop_last": True, "pin_memory": GPU}
    return DataLoader(dataset, args.batch_size, **how)


# 1. The loader.


def loader(args):
    """images/s of our loader, of the usual recipe and of decoding alone"""
    root = os.path.abspath(os.path.join(args.data or photographs(args.images), "train"))
    names = {
        "usual": "usual recipe: PIL, normalised floats from the workers",
        "bytes": "ours: bytes from the workers",
        "floats": "ours, as training has it: normalised floats on the device",
        "decoded": "decoding alone",
    }
    speeds, firsts = {name: [] for name in names}, {name: [] for name in names}
    with contextlib.ExitStack() as stack:
        how = {**vars(args), "root": root}
        children = {name: child("benchmark.load()", how | {"name": name}) for name in names}
        for process in children.values():
            stack.callback(process.kill)
        for number in range(-1, args.rounds):  # the first warms up
            for name, process in in_turn(children, number):
                found = turn(process, number + 1)
                if number >= 0:
                    speeds[name].append(found["speed"])
                    firsts[name] += found["first_ms"]

    dataset, times = ImageFolder(root, corner), []  # a batch in this process
    for first in range(0, min(10 * args.batch_size, len(dataset)), args.batch_size):
        start = now()
        for i in range(first, min(first + args.batch_size, len(dataset))):
            dataset[i]
        times.append(1000 * (now() - start))
    runs = []
    for name, values in speeds.items():
        run = {"name": names[name], "images_per_second": spread(values)}
        run["to_usual"] = spread([a / b for a, b in zip(values, speeds["usual"], strict=True)])
        runs.append(run | {"first_batch_ms": spread(firsts[name])})
    columns = {"": "name", "images/s": "images_per_second", "x usual": "to_usual"}
    size = mean(os.path.getsize(dataset.path(i)) for i in range(len(dataset)))
    more = {"files": len(dataset), "bytes_per_file": size, "decode_batch_ms": spread(times)}
    report(args, runs, columns | {"first batch (ms)": "first_batch_ms"}, **more)
    print(f"one process decodes a batch in {median(times):.0f} ms; {size / 1000:.0f} KB a file")


def load():
    """One contestant: whole epochs, when the parent process says."""
    args = told()
    torch.set_num_threads(1)  # the cores are the workers'; a second thread here would spin on one
    if args.name == "usual":
        steps = [transforms.RandomResizedCrop(args.image_size), transforms.RandomHorizontalFlip()]
        steps += [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
        batches = usual_loader(datasets.ImageFolder(args.root, transforms.Compose(steps)), args)
        sampler = None
    else:
        keep_memory()
        crop = functools.partial(random_crop, size=args.image_size)
        dataset = ImageFolder(args.root, corner if args.name == "decoded" else crop)
        batches, sampler = our_loader(dataset, args)
    if args.name == "floats":
        batches = Prefetcher(batches, DEVICE)
    for line in sys.stdin:
        images, firsts, start = 0, [], now()
        while not firsts or now() - start < args.seconds * (int(line) > 0):
            if sampler:
                sampler.set_epoch(1000 * int(line) + len(firsts))
            asked, first = now(), None
            for _, target in batches:
                first = first or now() - asked
                images += len(target)
            firsts.append(1000 * first)
        found = {"speed": images / (now() - start), "first_ms": firsts}
        print("turn", json.dumps(found), flush=True)


def corner(image):
    return image[:, :1, :1]


# 2. A training step. Each contestant is a process of its own, and waits while others have a turn.


def step(args):
    """ms of a step of distributed.py, of bare loops, and of what the device could do"""
    flags = ["--arch", args.arch, "--batch-size", args.batch_size, "--image-size", args.image_size]
    flags = ["--precision", args.precision, *map(str, flags), *["--compile"] * args.compile]
    script = f"import runpy, sys; sys.argv[1:] = {flags}; runpy.run_path('distributed.py', {{}}, "
    script += "'__main__')"
    calls = {"script": script, "bare": "benchmark.bare_loop(False)"}
    calls["plain"] = "benchmark.bare_loop(True)"  # fp32 in torch's default layout, nothing fused
    times = {name: [] for name in calls}
    with copy_of_scripts("guided_loader") as folder, contextlib.ExitStack() as stack:
        children = {name: child(code, vars(args), folder) for name, code in calls.items()}
        for process in children.values():
            stack.callback(process.kill)
        for number in range(-1, args.rounds):
            for name, process in in_turn(children, number):
                seconds = turn(process, args.steps)["seconds"]
                times[name] += [1000 * seconds / args.steps] * (number >= 0)
        ends = {name: turn(process, 0) for name, process in children.items()}

    runs = []
    for name, values in times.items():
        roofline = ends["plain" if name == "plain" else "bare"]["roofline"]
        run = {"name": name, "ms": spread(values), "peak_memory_mb": ends[name]["memory_mb"]}
        run["images_per_second"] = 1000 * args.batch_size / median(values)
        run["time_to_bare"] = median(a / b for a, b in zip(values, times["bare"], strict=True))
        run["speed_to_plain"] = median(times["plain"]) / median(values)
        runs.append(run | {"of_roofline": roofline["ms"] / median(values), "roofline": roofline})
    columns = {"": "name", "ms": "ms", "images/s": "images_per_second", "x bare": "time_to_bare"}
    columns |= {"speed / plain": "speed_to_plain", "of roofline": "of_roofline"}
    report(args, runs, columns | {"peak MB": "peak_memory_mb"})


def turn(process, steps):
    """Let it take so many steps; returns what it tells."""
    with contextlib.suppress(BrokenPipeError):
        print(steps, file=process.stdin, flush=True)
    for line in process.stdout:
        if line.startswith("turn "):
            return json.loads(line[5:])
    sys.exit("error: a contestant has ended, see above")


def turns(train_step=None, dtype=None):
    """Yield once for every step that the parent asks for, and tell it how long they took."""
    for line in sys.stdin:
        if steps := int(line):
            yield  # not counted: the cores and their caches were another's
            start = now()
            for _ in range(steps):
                yield
            found = {"seconds": now() - start}
        else:
            found = {"memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000}
            if GPU:
                found["memory_mb"] = torch.cuda.max_memory_allocated() / 1e6
            if train_step:
                found["roofline"] = roofline(train_step, dtype)
        print("turn", json.dumps(found), flush=True)


def bare_loop(plain):
    """Forward, backward, optimizer, on a batch that is there: no more than that."""
    args = told()
    args.pretrained = False
    torch.set_num_threads(CORES)
    if not plain:
        keep_memory()
    torch.backends.cudnn.benchmark = True
    dtype = DTYPES["fp32" if plain else args.precision]
    net = build_model(args, 10, DEVICE).train()
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=DEVICE)
    target = torch.arange(args.batch_size, device=DEVICE) % 10
    layout = torch.contiguous_format if plain else torch.channels_last
    net, images = net.to(memory_format=layout), images.contiguous(memory_format=layout)
    hyper = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}
    optimizer = torch.optim.SGD(net.parameters(), **hyper, fused=not plain or None)
    scaler = torch.amp.GradScaler(DEVICE.type, enabled=dtype == torch.float16)
    model = torch.compile(net) if args.compile and not plain else net

    def train_step(model=net):
        with torch.autocast(DEVICE.type, dtype, dtype != torch.float32):
            loss = cross_entropy(model(images), target)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    for _ in turns(train_step, dtype):
        train_step(model)


class Count(TorchDispatchMode):
    """Collects (operations, bytes read and written) of each convolution and matrix product."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if count := flop_registry.get(function._overloadpacket):
            tensors = [x for x in tree_leaves((args, result)) if torch.is_tensor(x)]
            flops = count(*args, **(kwargs or {}), out_val=result)
            self.found.append((flops, sum(x.nbytes for x in tensors)))
        return result


def roofline(train_step, dtype):
    """The ms of a step if all but its convolutions and matrix products were free.

    Each takes as long as its arithmetic or as its bytes, whichever is more, at the rates that the
    device reaches here in a large product and a large copy.
    """
    torch.backends.cuda.matmul.allow_tf32 = True  # convolutions may use it as things are
    n, size = (8192, 2**30) if GPU else (2048, 2**28)
    a, b = (torch.randn(n, n, device=DEVICE).to(dtype) for _ in range(2))
    source = torch.ones(size, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    rates = []
    for work, function in ((2 * n**3, lambda: a @ b), (2 * size, lambda: target.copy_(source))):
        times = []
        for _ in range(20):
            start = now()
            function()
            times.append(now() - start)
        rates.append(work / min(times))
    with Count() as count:
        train_step()
    seconds = sum(max(f / rates[0], size / rates[1]) for f, size in count.found)
    gflop, gb = (sum(column) / 1e9 for column in zip(*count.found, strict=True))
    found = {"ms": 1000 * seconds, "gflop": gflop, "gb": gb}
    return found | {"tflop_per_second": rates[0] / 1e12, "gb_per_second": rates[1] / 1e9}


def tiny(num_classes):
    """A model of next to no time: what is measured with it is the rest."""
    body = [nn.Conv2d(3, 16, 16, 16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(16, num_classes))


# In copies of the scripts these take the place of make_loader().


class resident_loader:
    """One batch that is on the device already, as often as the sampler has keys for it."""

    def __init__(self, dataset, sampler, batch_size, workers, device):
        self.dataset, self.sampler, self.batch_size = dataset, sampler, batch_size
        shape = dataset[next(iter(sampler))][0].permute(1, 2, 0).shape
        images = torch.randint(256, (batch_size, *shape), dtype=torch.uint8, device=device)
        self.batch = images.permute(0, 3, 1, 2), torch.arange(batch_size, device=device) % 8

    def __iter__(self):
        keys = iter(self.sampler)
        while got := len(list(itertools.islice(keys, self.batch_size))):
            yield tuple(x[:got] for x in self.batch)


class guided_loader(resident_loader):
    """The same, but when and as often as the parent process says."""

    def __iter__(self):
        keys = itertools.cycle(self.sampler)
        for _ in turns():
            list(itertools.islice(keys, self.batch_size))
            yield self.batch


@contextlib.contextmanager
def copy_of_scripts(name=None):
    """A folder with the scripts as they are, in which make_loader() is another, if it is named."""
    Path("data").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for path in ROOT.glob("*.py"):
            shutil.copy(path, folder)
        shutil.copytree(ROOT / "common", Path(folder, "common"))
        os.symlink(Path("data").resolve(), Path(folder, "data"))
        if name:
            with open(Path(folder, "common", "data.py"), "a") as file:
                file.write("\n\ndef make_loader(*how):\n    import benchmark\n\n")
                file.write(f"    return benchmark.{name}(*how)\n")
        yield folder


# 3. Many files.


def scale(args):
    """start-up, memory and time per image with up to 1.28 million files"""
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for files in args.files:
            make_files(Path(folder), files, args.classes)
            found = {"usual recipe": [], "ours": []}
            for name in [*found] * args.rounds:
                how = {**vars(args), "root": f"{folder}/train", "ours": name == "ours"}
                output, _ = child("benchmark.index_all()", how).communicate()
                found[name].append(json.loads(output))
            for name, answers in found.items():
                spreads = {key: spread([answer[key] for answer in answers]) for key in answers[0]}
                runs.append({"name": name, "files": files} | spreads)
    columns = {"": "name", "files": "files", "start (s)": "start_s", "us / image": "us_per_image"}
    report(args, runs, columns | {"MB of a worker's own": "worker_private_mb"})


def make_files(folder, files, classes):
    """train/CLASS/NAME.JPEG, as many in all: further names of a few tiny images."""
    for number in range(classes):
        path = folder / "train" / f"n{number:08d}"
        path.mkdir(parents=True, exist_ok=True)
        source = folder / f"{number // 20}.jpg"  # of a file that may have 65000 names
        if not source.exists():
            Image.new("RGB", (8, 8)).save(source)
        for i in range(len(os.listdir(path)), files // classes):
            os.link(source, f"{path}/{path.name}_{i}.JPEG")


def index_all():
    """One contestant: each path and class once, by way of workers; no image is read."""
    args, image = told(), torch.zeros(3, 1, 1)
    common.data.read_image = lambda path: image
    start = now()
    if args.ours:
        dataset = ImageFolder(args.root, corner)
    else:
        dataset = datasets.ImageFolder(args.root, corner, loader=lambda path: image)
    found, sums = {"start_s": now() - start}, collections.Counter()
    batches = our_loader(dataset, args)[0] if args.ours else usual_loader(dataset, args)
    start = now()
    for number, _ in enumerate(batches, 1):
        if number == len(dataset) // args.batch_size:  # the last: workers of the usual recipe end
            found["us_per_image"] = 1e6 * (now() - start) / len(dataset)
            for process in multiprocessing.active_children():
                lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()[1:]
                for key, kilobytes, _ in map(str.split, lines):
                    sums[key] += int(kilobytes) * 1.024 / 1000 / args.workers
    found["worker_private_mb"] = sums["Private_Clean:"] + sums["Private_Dirty:"]
    print(json.dumps(found | {"worker_pss_mb": sums["Pss:"]}))


# 4. The strategies.

TORCHRUN = "torchrun --standalone --nproc-per-node={1} {0}"
LAUNCH = {  # by its name for start.sh: script, launcher, command
    "dataparallel": ("dataparallel.py", "python", "python {0}"),
    "distributed": ("distributed.py", "torchrun", TORCHRUN),
    "multiprocessing": ("multiprocessing_distributed.py", "mp.spawn", "python {0} --nprocs={1}"),
    "slurm": (
        "distributed_slurm_main.py",
        "srun",
        "srun -K -N1 --gres gpu:{1} python {0} --nprocs={1}",
    ),
    "horovod": ("horovod_distributed.py", "horovodrun", "horovodrun -np {1} python {0}"),
    "apex": ("apex_distributed.py", "torchrun", TORCHRUN),
}


def strategies(args):
    """seconds per epoch of every script that can run here, and a picture"""
    pyplot = import_pyplot()
    names = [name for name in args.only if can_run(name)]
    cases = itertools.product(args.bounds, args.processes, names)
    speeds = {case: [] for case in cases if case[1] == 1 or case[2] != "dataparallel"}
    data = Path(args.data or photographs(args.images)).resolve()
    flags = {
        "loader": ["--data", data, "--arch", args.loader_arch, "--image-size", 224],
        "compute": ["--arch", args.arch, "--image-size", args.image_size],
    }
    both = ["-b", args.batch_size, "--epochs", args.epochs, "--checkpoint-dir", "run"]
    with contextlib.ExitStack() as stack:
        copies = {"loader": copy_of_scripts(), "compute": copy_of_scripts("resident_loader")}
        copies = {bound: stack.enter_context(copy) for bound, copy in copies.items()}
        env = {**os.environ, **stack.enter_context(slurm("slurm" in names))}
        env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
        order = [turn for number in range(args.rounds) for turn in in_turn(speeds, number)]
        for number, (case, found) in enumerate(order):
            bound, processes, name = case
            command = LAUNCH[name][2].format(LAUNCH[name][0], processes).split()
            command += map(str, [*flags[bound], *both])
            shutil.rmtree(f"{copies[bound]}/run", ignore_errors=True)
            how = {"cwd": copies[bound], "env": env, "capture_output": True, "text": True}
            done = subprocess.run(command, **how)
            if done.returncode:
                sys.exit(
                    f"error: {shlex.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
                )
            with open(f"{copies[bound]}/run/metrics.jsonl") as file:
                speed = median([json.loads(row)["images_per_second"] for row in file][1:])
            found.append(round(speed, 1))  # now: the picture and the tables show the same
            print(f"{number + 1}/{len(order)}", *case, f"{found[-1]:.0f} images/s", flush=True)

    runs = []
    for (bound, processes, name), found in speeds.items():
        run = {"strategy": name, "script": LAUNCH[name][0], "launcher": LAUNCH[name][1]}
        run |= {"processes": processes, "bound": bound, "images_per_second": median(found)}
        runs.append(run | {"seconds_per_epoch": EPOCH / median(found), "all": found})
        runs[-1]["spread"] = f"{min(found):.0f} to {max(found):.0f}"
    columns = {"": "strategy", "processes": "processes", "bound by": "bound"}
    columns |= {"images/s": "images_per_second", "lowest, highest": "spread"}
    more = {bound: shlex.join(map(str, flags[bound])) for bound in args.bounds}
    more = {bound: text.replace(str(data), "DIR") for bound, text in more.items()}
    report(args, runs, columns | {"s / epoch": "seconds_per_epoch"}, epoch_images=EPOCH, **more)
    draw(pyplot, runs, args.out / "strategies.png")


def can_run(name):
    if name == "apex":
        return GPU and importlib.util.find_spec("amp_C") is not None
    if name == "slurm" and "SLURM_CONF" not in os.environ:
        return os.getuid() == 0 and shutil.which("slurmctld", path="/usr/sbin:/sbin")
    return name != "horovod" or importlib.util.find_spec("horovod") is not None


@contextlib.contextmanager
def slurm(needed):
    """What srun needs in its environment: of the cluster here, or of one that is started."""
    if not needed or "SLURM_CONF" in os.environ:
        yield {}
        return
    with tempfile.TemporaryDirectory() as folder:
        cluster = [ROOT / "tests/slurm/cluster.sh", "start", f"{folder}/two"]
        subprocess.run(cluster, check=True, stdout=subprocess.DEVNULL)
        try:
            yield {"SLURM_CONF": f"{folder}/two/slurm.conf"}
        finally:
            cluster[1] = "stop"
            subprocess.run(cluster, check=True)


def import_pyplot():
    try:
        import matplotlib
    except ImportError:
        sys.exit("error: the picture needs matplotlib: pip install -r requirements-dev.txt")
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


# Okabe and Ito's colours, which everybody can tell apart: one for each number of processes.
COLOURS = ["#56B4E9", "#E69F00", "#009E73", "#CC79A7"]
PANELS = {"loader": "loading JPEG files is the bound", "compute": "images are on the device"}


def draw(pyplot, runs, path):
    """Seconds of an epoch: a panel for what bounds the speed, a bar for each run."""
    bounds = list(dict.fromkeys(run["bound"] for run in runs))
    counts = sorted({run["processes"] for run in runs})
    height = 1.2 + 0.36 * len(runs) / len(bounds)
    figure, axes = pyplot.subplots(1, len(bounds), figsize=(9, height), squeeze=False)
    for bound, axis in zip(bounds, axes[0], strict=True):
        shown = [run for run in runs if run["bound"] == bound]
        for place, run in enumerate(shown):
            seconds, colour = run["seconds_per_epoch"], COLOURS[counts.index(run["processes"]) % 4]
            errors = [[seconds - EPOCH / max(run["all"])], [EPOCH / min(run["all"]) - seconds]]
            axis.barh(place, seconds, 0.8, color=colour, xerr=errors, ecolor="#444444")
            label = f" {seconds:.0f} s, {run['images_per_second']:.0f} images/s"
            axis.text(0, place, label, va="center", fontsize=10)
        names = {"python": "DataParallel"}
        names = [
            f"{names.get(run['launcher'], run['launcher'])} {run['processes']}" for run in shown
        ]
        axis.set_yticks(range(len(shown)), names if axis is axes[0][0] else [])
        axis.set_title(PANELS[bound], fontsize=11)
        axis.set_xlabel("seconds per epoch of 1.28 million images")
        axis.locator_params(axis="x", nbins=5)  # a number at the edge would be cut off
        axis.spines[["top", "right"]].set_visible(False)
        axis.invert_yaxis()
    axes[0][0].set_ylabel("launcher and processes")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    arguments = parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave nothing behind
    arguments.function(arguments)
