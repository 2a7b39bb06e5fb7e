"""In which order images are read, by which processes, with which random numbers."""

import atexit
import copyreg
import hashlib
import io
import math
import mmap
import os
import pickle
import random
import resource
import signal
import sys
import weakref

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data._utils.collate import collate as torch_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from .process import SIGNALS, end_with_parent

PIECE = 1 << 28  # bytes of addresses: memory is taken only where a batch is written
LARGE = 1 << 16  # bytes: a smaller tensor is sent by value
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # older Pythons do not name it


def position_seed(*position):
    """A 63-bit seed from a few integers, such as (seed, epoch, step, rank)."""
    text = " ".join(map(str, position)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def seed_step(seed, epoch, step, rank):
    """Make the random numbers of a step (dropout) a function of its position alone."""
    value = position_seed(seed, epoch, step, rank)
    torch.default_generator.manual_seed(value)  # torch.manual_seed is 30 times slower without GPU
    for i, generator in enumerate(torch.cuda.default_generators):  # one for each visible GPU
        generator.manual_seed(value + i - torch.cuda.current_device())


class Seeded(Dataset):
    """Any map-style data set, indexed by (epoch, index): the keys that TrainSampler yields.

    The random numbers that the data set draws, from torch, numpy or random, are a function of
    (seed, epoch, index): not of the worker, nor of the process, nor of what was drawn before. That
    holds for their global generators; one of your own, such as default_rng(), seed by the index.
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
    that do not fill a last batch are left out of that epoch. Raises ValueError for a batch_size
    that does not divide among the processes, or is more than `length`.
    """

    def __init__(self, length, batch_size, rank, world_size, seed):
        if batch_size % world_size:
            larger = batch_size + world_size - batch_size % world_size
            problem = f"--batch-size {batch_size} does not divide by {world_size} processes"
            raise ValueError(f"{problem}: try {larger}")
        if length < batch_size:
            raise ValueError(f"{length} images to train do not fill one --batch-size {batch_size}")
        self.length, self.batch_size, self.seed = length, batch_size, seed
        self.rank, self.world_size = rank, world_size
        self.steps_per_epoch = length // batch_size
        self.set_epoch(0)

    def set_epoch(self, epoch, first=0, end=None):
        """Yield the keys of this epoch's steps from `first` on, up to but not with `end`."""
        self.epoch, self.first = epoch, first
        self.end = self.steps_per_epoch if end is None else end

    def __len__(self):
        return (self.end - self.first) * self.batch_size // self.world_size

    def __iter__(self):
        generator = torch.Generator().manual_seed(position_seed(self.seed, self.epoch))
        order = torch.randperm(self.length, generator=generator)
        part = order[self.first * self.batch_size : self.end * self.batch_size]
        return ((self.epoch, index) for index in part[self.rank :: self.world_size].tolist())


def start_loader(dataset, sampler, local_batch_size, workers, device, collate_fn=None):
    """A DataLoader whose workers are forked here, and live as long as it does.

    What is changed in the data set later does not reach them. sampler: yields the keys of
    `dataset` that this process reads. local_batch_size: the images of this process in a step.
    workers: how many processes read; with 0 this one does. collate_fn: makes a batch of a list of
    items, as for any DataLoader, for example of sequences of unlike length; default: collate(),
    which it may call too. Raises OSError where so many workers cannot be started.
    """
    fork = workers > 0 and sys.platform == "linux"
    loader = DataLoader(
        dataset,
        batch_size=local_batch_size,
        sampler=sampler,
        num_workers=workers,
        prefetch_factor=2 if workers else None,
        pin_memory=device.type == "cuda",
        persistent_workers=workers > 0,
        worker_init_fn=_start_worker,
        collate_fn=SharedBatches(workers, collate_fn) if fork else collate_fn or collate,
        # Spawned, as they would be below mp.spawn, each takes seconds to import torch.
        multiprocessing_context="fork" if fork else None,
    )
    if workers:
        if fork:  # each takes four of our open files: 1024 are common, and more for whoever asks
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        loader.batch_sampler.sampler = ()  # nothing to read yet: the epoch is not known
        try:
            iterator = iter(loader)
        except OSError as error:
            remedy = "give fewer, or 0, or raise `ulimit -n`, `ulimit -u` or the size of /dev/shm"
            raise OSError(f"--workers {workers}: {error.strerror}: {remedy}") from None
        loader.batch_sampler.sampler = sampler
        # They ignore SIGTERM, with which multiprocessing would end them at the interpreter's exit,
        # and then wait for ever. This runs before.
        atexit.register(_kill, iterator._workers)
    return loader


def _start_worker(worker):
    end_with_parent()
    for number in SIGNALS:  # a stop is the training process's to handle; it still needs images
        signal.signal(number, signal.SIG_IGN)


def _kill(workers):
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise an error
    for worker in workers:
        worker.kill()


def collate(items, empty=None):
    """A batch of items: tensors, numbers, tuples and dicts of them, as for any DataLoader.

    Images, uint8 [3, h, w], become [n, 3, h, w] in channels_last: as they lie in memory after a
    crop. empty(shape, dtype): makes the tensors for the result.
    """

    def stack(tensors, *, collate_fn_map=None):
        first = tensors[0]
        is_image = first.dtype == torch.uint8 and first.ndim == 3 and len(first) == 3
        if is_image:
            tensors = [image.permute(1, 2, 0) for image in tensors]
        out = empty and empty((len(tensors), *tensors[0].shape), first.dtype)
        batch = torch.stack(tensors, out=out)
        return batch.permute(0, 3, 1, 2) if is_image else batch

    return torch_collate(items, collate_fn_map=default_collate_fn_map | {torch.Tensor: stack})


class SharedBatches:
    """Brings batches from forked workers to the training process, in memory that both see.

    torch would make a file in /dev/shm of each tensor, and send it through a socket below TMPDIR:
    a container has little of the one, a job may have too long a path of the other, and memory that
    is always new costs up to a tenth of a worker's time. Here pieces of memory are made before the
    fork, eight for each worker: for three batches, some with several large tensors. Such a tensor
    is written to a free piece, which is free again when no tensor or array uses it any more. While
    somebody holds all of them, and by a collate_fn of the user's, tensors are sent by value.
    """

    def __init__(self, workers, collate_fn):
        self.collate_fn, self.owner = collate_fn, os.getpid()
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | NO_RESERVE
        try:
            self.pieces = [mmap.mmap(-1, PIECE, flags) for _ in range(8 * workers)]
        except OSError:  # addresses are scarce: `ulimit -v`, or vm.overcommit_memory=2
            self.pieces = []
        tensors = [torch.frombuffer(piece, dtype=torch.uint8) for piece in self.pieces]
        self.numbers = {tensor.data_ptr(): number for number, tensor in enumerate(tensors)}
        self.in_use = mmap.mmap(-1, 8 * workers)  # a byte for each piece, which is 0 or 1
        _by_id[id(self)] = self

    def __call__(self, items):
        """In a worker: collate the items, and pickle the batch: here, an error ends the run."""
        if self.collate_fn:
            return _Pickled(pickle.dumps(self.collate_fn(items)))
        file = io.BytesIO()
        pickler = pickle.Pickler(file)
        pickler.dispatch_table = copyreg.dispatch_table | {torch.Tensor: self.reduce}
        pickler.dump(collate(items, self.empty))
        return _Pickled(file.getvalue())

    def empty(self, shape, dtype):
        """In a worker: a new tensor, in a free piece if it is large."""
        first, count = 8 * get_worker_info().id, math.prod(shape)
        free = [n for n in range(len(self.pieces))[first : first + 8] if not self.in_use[n]]
        if not free or not LARGE <= count * dtype.itemsize <= PIECE:
            return torch.empty(shape, dtype=dtype)
        self.in_use[free[0]] = 1
        return torch.frombuffer(self.pieces[free[0]], dtype=dtype, count=count).view(shape)

    def reduce(self, tensor):
        """In a worker: how a tensor is pickled, as (function, arguments) that make it again."""
        number = self.numbers.get(tensor.data_ptr())
        if number is None:
            return tensor.__reduce_ex__(4)
        return _open, (id(self), number, tensor.dtype, tensor.shape, tensor.stride())

    def give_back(self, number):
        if os.getpid() == self.owner:  # what a forked process held was a copy
            self.in_use[number] = 0


_by_id = weakref.WeakValueDictionary()  # SharedBatches: an object has the same id in a fork


def _open(shared, number, dtype, shape, stride):
    """In the training process: a tensor in a piece."""
    shared = _by_id[shared]
    memory = memoryview(shared.pieces[number])
    weakref.finalize(memory, shared.give_back, number)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).as_strided(shape, stride)


class _Pickled(bytes):
    """A pickle. Where it is received, it becomes its object."""

    def __reduce__(self):
        return pickle.loads, (bytes(self),)
