"""Images per second of the scripts' loader, of the usual recipe, of others, and of decoding alone.

$ python -m benchmarks.loader
"""

import contextlib
import itertools
import os
import tarfile
from statistics import mean, median

import torch
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from benchmarks.harness import (
    CORES,
    DEVICE,
    GPU,
    Contestant,
    add_photograph_flags,
    alternate,
    clean_up_on_sigterm,
    clock,
    make_parser,
    report,
    spread,
)
from benchmarks.others import installed
from benchmarks.photographs import photographs
from common.images import ImageFolder, RandomCrop
from common.loader import Seeded, TrainSampler, start_loader
from common.prefetcher import MEAN, STD, Prefetcher
from recipes.archives import ImageArchive

NAMES = {
    "usual": "usual recipe: PIL, normalised floats from the workers",
    "bytes": "ours: bytes from the workers",
    "archive": "ours, out of an archive: bytes from the workers",
    "floats": "ours, as training has it: normalised floats on the device",
    "decoded": "decoding whole images alone",
}
OTHERS = installed()


def parse_args():
    parser = make_parser("loader", __doc__, rounds=7, batch_size=64)
    add_photograph_flags(parser)
    add = parser.add_argument
    add("-j", "--workers", type=int, default=CORES, help="loader processes")
    add("--image-size", type=int, default=224, help="pixels")
    add("--seconds", type=float, default=10, help="of a round at least; it takes whole epochs")
    return parser.parse_args()


def main():
    args = parse_args()
    clean_up_on_sigterm()
    root = os.path.abspath(os.path.join(args.data or photographs(args.images), "train"))
    if not args.data:
        pack(root)
    names = [name for name in NAMES if name != "archive" or os.path.exists(f"{root}.tar")]
    names += OTHERS
    speeds = {name: [] for name in names}
    first_batches = {name: [] for name in names}
    with contextlib.ExitStack() as stack:
        contestants = {
            name: stack.enter_context(Contestant(measure, name, root, args)) for name in names
        }
        for contestant in contestants.values():
            contestant.ask(0)  # one epoch to warm up
        for round_number in range(args.rounds):
            for name, contestant in alternate(contestants.items(), round_number):
                speed, milliseconds = contestant.ask(args.seconds)
                speeds[name].append(speed)
                first_batches[name] += milliseconds

    runs = []
    for name, values in speeds.items():
        to_usual = [a / b for a, b in zip(values, speeds["usual"], strict=True)]
        run = {
            "name": NAMES.get(name, name),
            "images_per_second": spread(values),
            "to_usual": spread(to_usual),
            "first_batch_ms": spread(first_batches[name]),
        }
        runs.append(run)
    columns = {
        "": "name",
        "images/s": "images_per_second",
        "x usual": "to_usual",
        "first batch (ms)": "first_batch_ms",
    }
    dataset = ImageFolder(root, one_pixel)
    times = decode_batches(dataset, args.batch_size)
    size = mean(os.path.getsize(dataset.path(index)) for index in range(len(dataset)))
    settings = {"files": len(dataset), "bytes_per_file": size, "decode_batch_ms": spread(times)}
    report("loader", args, runs, columns, **settings)
    print(f"one process decodes a batch in {median(times):.0f} ms; {size / 1000:.0f} KB a file")


def pack(root):
    """Make root.tar of the folder `root`, if it is not there."""
    if not os.path.exists(f"{root}.tar"):
        with tarfile.open(f"{root}.partial", "w") as archive:
            archive.add(root, ".")
        os.rename(f"{root}.partial", f"{root}.tar")


def measure(connection, name, root, args):
    """A contestant: when asked, load whole epochs for some seconds at least.

    Answers with the images per second, and the milliseconds to the first batch of each epoch.
    """
    torch.set_num_threads(1)  # the cores are the workers'; a second thread here would spin on one
    epochs = OTHERS[name](root, args, DEVICE) if name in OTHERS else our_epochs(name, root, args)
    while True:
        seconds = connection.recv()
        images, first_batches, start = 0, [], clock()
        while not first_batches or clock() - start < seconds:
            epoch_start, first = clock(), None
            for _, target in next(epochs):
                if first is None:
                    first = clock() - epoch_start
                images += len(target)
            first_batches.append(1000 * first)
        connection.send((images / (clock() - start), first_batches))


def our_epochs(name, root, args):
    """Epochs without end, of the usual recipe or as the scripts load them: iterables of batches."""
    if name == "usual":
        recipe = [
            transforms.RandomResizedCrop(args.image_size),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
        dataset = datasets.ImageFolder(root, transforms.Compose(recipe))
        yield from itertools.repeat(usual_loader(dataset, args))
    crop = RandomCrop(args.image_size)
    if name == "archive":
        dataset = ImageArchive([f"{root}.tar"], "train", crop)
    else:
        dataset = ImageFolder(root, one_pixel if name == "decoded" else crop)
    batches, sampler = our_loader(dataset, args)
    if name == "floats":
        batches = Prefetcher(batches, DEVICE)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield batches


def our_loader(dataset, args):
    """(loader, its sampler) as the scripts make them."""
    sampler = TrainSampler(len(dataset), args.batch_size, rank=0, world_size=1, seed=0)
    loader = start_loader(Seeded(dataset, 0), sampler, args.batch_size, args.workers, DEVICE)
    return loader, sampler


def usual_loader(dataset, args):
    """The loader of most training scripts, which starts new workers in every epoch."""
    return DataLoader(
        dataset,
        args.batch_size,
        shuffle=True,
        num_workers=args.workers,
        pin_memory=GPU,
        drop_last=True,
    )


def one_pixel(image):
    """Instead of a crop: it takes no time, so decoding is what is measured."""
    return image[:, :1, :1]


def decode_batches(dataset, batch_size):
    """The milliseconds in which this process alone decodes a batch, for ten batches at most."""
    times = []
    for first in range(0, min(10 * batch_size, len(dataset)), batch_size):
        start = clock()
        for index in range(first, min(first + batch_size, len(dataset))):
            dataset[index]
        times.append(1000 * (clock() - start))
    return times


if __name__ == "__main__":
    main()
