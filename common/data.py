"""Images from folders as uint8 tensors, and the order in which training takes them."""

import atexit
import fcntl
import functools
import math
import os
import random
import shutil
import signal
import sys
import weakref

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms.v2 import functional as F

from .process import SIGNALS, die_with_parent, position_seed

# What a script falls back to for flags that are not given: with --data, and without.
FLAGS = ("arch", "epochs", "batch_size", "lr", "warmup_epochs", "image_size")
IMAGENET = dict(zip(FLAGS, ("resnet50", 90, 256, 0.1, 5, 224), strict=True))
DIGITS = dict(zip(FLAGS, ("resnet18", 4, 64, 0.1, 1, 64), strict=True))
PREFETCH = 2  # batches that each worker is asked for ahead of their use


def image_folders(data, image_size):
    """(train_set, val_set) of `data`/train and `data`/val; of the built-in digits if it is None.

    Raises ValueError where the folders are not what training needs, with the remedy.
    """
    if data is None:
        data, augment = digits_folder(), functools.partial(random_crop, scale=(0.5, 1.0), flip=0)
    else:
        augment = random_crop  # digits must not be mirrored
    train_set = ImageFolder(f"{data}/train", functools.partial(augment, size=image_size))
    val_set = ImageFolder(f"{data}/val", functools.partial(centre_crop, size=image_size))
    odd = sorted({*train_set.classes} ^ {*val_set.classes})
    if odd:
        raise ValueError(f"{data}: classes in only one of train/ and val/: {' '.join(odd[:9])}")
    counts = np.bincount(train_set.targets, minlength=len(train_set.classes))
    if not counts.all():
        raise ValueError(f"no images in {data}/train/{train_set.classes[counts.argmin()]}")
    return train_set, val_set


class ImageFolder(Dataset):
    """The images below `root`, which holds a folder per class.

    An item is (transform(image), target): image uint8 [3, height, width], target the index of its
    class in `classes`. Raises ValueError, with the path, for what cannot be decoded.
    """

    def __init__(self, root, transform):
        self.root, self.transform = root, transform
        if not os.path.isdir(root):
            raise ValueError(f"no folder {root}: --data needs train/ and val/ in it")
        folders = [e.name for e in os.scandir(root) if e.is_dir() and not e.name.startswith(".")]
        self.classes = sorted(folders)
        if not self.classes:
            raise ValueError(f"no class folders in {root}: put its images into {root}/CLASS/")
        names, targets = [], []
        for target, name in enumerate(self.classes):
            for folder, subfolders, files in os.walk(os.path.join(root, name), followlinks=True):
                subfolders.sort()
                files = sorted(f for f in files if f.lower().endswith(IMG_EXTENSIONS))
                folder = os.path.relpath(folder, root)  # once: it costs as much as a file's stat
                names += [os.fsencode(f"{folder}{os.sep}{f}") for f in files]
                targets += [target] * len(files)
        if not names:
            raise ValueError(f"no images ({' '.join(IMG_EXTENSIONS)}) in the folders of {root}")
        # A million small objects would be copied into every worker as their reference counts are
        # written to: one string of all names, and where each of them ends.
        self.targets = np.array(targets)
        self.names, self.ends = b"".join(names), np.cumsum([len(name) for name in names])

    def __len__(self):
        return len(self.targets)

    def path(self, index):
        start = self.ends[index - 1] if index else 0
        return os.path.join(self.root, os.fsdecode(self.names[start : self.ends[index]]))

    def __getitem__(self, index):
        return self.transform(read_image(self.path(index))), int(self.targets[index])


def read_image(path):
    """The image of a file as uint8 RGB [3, height, width]. Raises ValueError with the path."""
    try:
        try:
            with open(path, "rb") as file:  # torchvision's read_file maps it: that takes longer
                data = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
            image = decode_image(data, mode=ImageReadMode.RGB)
        except RuntimeError:  # PIL reads more formats, and is four times slower
            with Image.open(path) as file:
                image = torch.from_numpy(np.array(file.convert("RGB"))).permute(2, 0, 1)
        # Of 16 bits keep the upper 8.
        return image if image.dtype == torch.uint8 else (image.int() >> 8).to(torch.uint8)
    except Exception as error:
        raise ValueError(f"cannot read image {path}: {error}") from None


def random_crop(image, size, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3), flip=0.5):
    """A random part of the image, resized to [3, size, size], mirrored with probability `flip`.

    `scale` bounds the part's share of the area, `ratio` its width / height. This is the crop of
    "Going Deeper with Convolutions" (Szegedy et al., 2014) as torchvision's RandomResizedCrop.
    """
    height, width = image.shape[-2:]
    for share, aspect in torch.rand(10, 2).tolist():
        area = height * width * (scale[0] + share * (scale[1] - scale[0]))
        aspect = math.exp(math.log(ratio[0]) + aspect * math.log(ratio[1] / ratio[0]))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            break
    else:  # a very long or high image: its middle
        w, h = min(width, round(height * ratio[1])), min(height, round(width / ratio[0]))
    y, x, mirror = torch.rand(3).tolist()
    top, left = int(y * (height - h + 1)), int(x * (width - w + 1))
    part = image[None, :, top : top + h, left : left + w]
    # Dense and as r g b r g b: torch then resizes bytes in half the time, and the batch that the
    # worker stacks of such images takes an eighth.
    part = part.contiguous(memory_format=torch.channels_last)
    part = interpolate(part, (size, size), mode="bilinear", antialias=True)[0]
    return part.flip(-1) if mirror < flip else part


def centre_crop(image, size):
    """The middle [3, size, size] of the image, after its shorter side became size * 256 / 224."""
    return F.center_crop(F.resize(image, [size * 256 // 224], antialias=True), [size, size])


class Seeded(Dataset):
    """Any map-style data set, indexed by (epoch, index): the keys that TrainSampler yields.

    The random numbers that the data set draws, from torch, numpy or random, are a function of
    (seed, epoch, index): not of the worker, nor of the process, nor of what was drawn before.
    """

    def __init__(self, dataset, seed):
        self.dataset, self.seed = dataset, seed

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, key):
        epoch, index = key
        seed = position_seed(self.seed, epoch, index)
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        return self.dataset[index]


class TrainSampler:
    """The (epoch, index) keys of this rank's images, shuffled anew in each epoch.

    A step takes `batch_size` images over all processes, and which ones does not depend on
    world_size: rank r takes every world_size-th of the permutation, from the r-th on. The images
    that do not fill a last batch are left out of that epoch.
    """

    def __init__(self, length, batch_size, rank, world_size, seed):
        if batch_size % world_size:
            raise ValueError(f"--batch-size {batch_size} is no multiple of {world_size} processes")
        if length < batch_size:
            raise ValueError(f"{length} images to train do not fill one --batch-size {batch_size}")
        self.length, self.batch_size, self.seed = length, batch_size, seed
        self.rank, self.world_size = rank, world_size
        self.steps = length // batch_size  # of an epoch
        self.set_epoch(0)

    def set_epoch(self, epoch, first=0, last=None):
        """Yield the steps first..last of this epoch; all of them by default."""
        self.epoch, self.first, self.last = epoch, first, self.steps if last is None else last

    def __len__(self):
        return (self.last - self.first) * self.batch_size // self.world_size

    def __iter__(self):
        generator = torch.Generator().manual_seed(position_seed(self.seed, self.epoch))
        order = torch.randperm(self.length, generator=generator)
        part = order[self.first * self.batch_size : self.last * self.batch_size]
        return ((self.epoch, index) for index in part[self.rank :: self.world_size].tolist())


def make_loader(dataset, sampler, batch_size, workers, device):
    """A DataLoader of (uint8 [n, 3, h, w], int64 [n]) whose workers live as long as it does.

    A batch is good until the next one is taken: then its memory may be used again.
    """
    loader = DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        persistent_workers=workers > 0,
        prefetch_factor=PREFETCH if workers else None,
        worker_init_fn=_init_worker,
        collate_fn=_Stack(PREFETCH + (device.type != "cuda")),  # a GPU's batch is a pinned copy
        # Spawned, as they would be below mp.spawn, each takes seconds to import torch.
        multiprocessing_context="fork" if workers and sys.platform == "linux" else None,
    )
    if workers:
        # Forked now, with nothing to fetch yet, and before the first collective: later, a thread of
        # gloo's may hold a lock that the child waits for without end (python/cpython#112275).
        loader.batch_sampler.sampler = ()
        iterator = iter(loader)
        loader.batch_sampler.sampler = sampler
        # They ignore SIGTERM, so what ends them at the interpreter's exit would wait without end.
        atexit.register(weakref.finalize(loader, iterator._shutdown_workers))
    return loader


def _init_worker(worker):
    die_with_parent()
    for number in SIGNALS:  # a stop is the training process's to handle; it still needs images
        signal.signal(number, signal.SIG_IGN)


class _Stack:
    """Makes of (image, target) items a batch: [n, h, w, 3] in memory, seen as [n, 3, h, w].

    A worker keeps the memory, which it shares with the training process, of `count` batches, as
    many as can be under way, and takes them in turn. New memory costs a page fault for every 4 KB:
    for a batch of 256 at 224 pixels 9400, which was an eighth of the worker's time.
    """

    def __init__(self, count):
        self.buffers, self.turn = [None] * count, 0

    def __call__(self, items):
        images, targets = zip(*items, strict=True)
        images = [image.permute(1, 2, 0) for image in images]
        out = self._buffer(len(images), images[0]) if get_worker_info() else None
        return torch.stack(images, out=out).permute(0, 3, 1, 2), torch.tensor(targets)

    def _buffer(self, n, image):
        self.turn = (self.turn + 1) % len(self.buffers)
        buffer, kind = self.buffers[self.turn], (image.shape, image.dtype)
        if buffer is None or len(buffer) < n or (buffer.shape[1:], buffer.dtype) != kind:
            buffer = torch.empty(n, *image.shape, dtype=image.dtype).share_memory_()
            self.buffers[self.turn] = buffer
        return buffer[:n]


def digits_folder(parent="data"):
    """scikit-learn's 1797 handwritten digits as an image folder of 64 x 64 PNGs; returns its path.

    Written at first use, whole or not at all, by one of the processes that ask at the same time.
    """
    root = os.path.join(parent, "digits")
    os.makedirs(parent, exist_ok=True)
    with open(os.path.join(parent, ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.isdir(root):
            try:
                from sklearn.datasets import load_digits
            except ImportError:
                raise ValueError("no --data: the digits need pip install scikit-learn") from None
            partial = root + ".partial"
            shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
            digits = load_digits()
            for i, (pixels, target) in enumerate(zip(digits.images, digits.target, strict=True)):
                folder = os.path.join(partial, "train" if i % 5 else "val", str(target))
                os.makedirs(folder, exist_ok=True)
                image = Image.fromarray((pixels * 15.9375).astype(np.uint8))
                image = image.resize((64, 64), Image.Resampling.BICUBIC)
                image.save(os.path.join(folder, f"{i:04d}.png"))
            os.rename(partial, root)
    return root
