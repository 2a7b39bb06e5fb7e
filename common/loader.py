"""TrainSampler, start_loader, the seeds; and how a process ends when its parent does."""

import atexit
import ctypes
import hashlib
import multiprocessing
import os
import random
import resource
import signal
import weakref

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from .batches import SharedBatches, collate

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)  # ask a run to stop


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
    that does not divide among the processes.
    """

    def __init__(self, length, batch_size, rank, world_size, seed):
        if batch_size % world_size:
            larger = batch_size + world_size - batch_size % world_size
            problem = f"a batch of {batch_size} does not divide by {world_size} processes"
            raise ValueError(f"{problem}: try {larger}")
        self.length, self.batch_size, self.seed = length, batch_size, seed
        self.rank, self.world_size = rank, world_size
        self.steps_per_epoch = length // batch_size
        self.set_epoch(0)

    def set_epoch(self, epoch, steps=None):
        """From now on yield the keys of these steps of this epoch: a range, by default all."""
        self.epoch, self.steps = epoch, range(self.steps_per_epoch) if steps is None else steps

    def __len__(self):
        return len(self.steps) * self.batch_size // self.world_size

    def __iter__(self):
        if not self.steps_per_epoch:  # else a loop runs through all epochs and trains nothing
            raise ValueError(f"{self.length} images do not fill one batch of {self.batch_size}")
        generator = torch.Generator().manual_seed(position_seed(self.seed, self.epoch))
        order = torch.randperm(self.length, generator=generator)
        part = order[self.steps.start * self.batch_size : self.steps.stop * self.batch_size]
        return ((self.epoch, index) for index in part[self.rank :: self.world_size].tolist())


def start_loader(dataset, sampler, local_batch_size, workers, device, seed=None, collate_fn=None):
    """A DataLoader whose workers are forked here, and live as long as it and this thread do.

    What is changed in the data set later does not reach them. sampler: yields the keys of
    `dataset` that this process reads; None: all, in their order. With a TrainSampler, give the
    `seed` of each item's random numbers (see Seeded). local_batch_size: this process's images in a
    step. workers: processes that read; with 0 this one does. collate_fn: makes a batch of a list of
    items, such as sequences of unlike length; default: collate(), which it may call too. Raises
    ValueError for a data set without items, OSError where so many workers cannot be started.
    """
    if hasattr(dataset, "__len__") and len(dataset) == 0:  # a stream has none
        raise ValueError("a data set, for training or validation, has no items")
    keep_memory()  # each image is a new block of half a megabyte
    loader = DataLoader(
        dataset if seed is None else Seeded(dataset, seed),
        batch_size=local_batch_size,
        sampler=sampler,
        num_workers=workers,
        pin_memory=torch.device(device).type == "cuda",
        persistent_workers=workers > 0,
        worker_init_fn=_start_worker,
        collate_fn=SharedBatches(workers, collate_fn) if workers else collate_fn or collate,
        # Spawned, as they would be below mp.spawn, each takes seconds to import torch.
        multiprocessing_context="fork" if workers else None,
    )
    if workers:
        # Each takes four of our open files: 1024 are common, and more for whoever asks.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        sampler = loader.batch_sampler.sampler
        loader.batch_sampler.sampler = ()  # nothing to read yet: the epoch is not known
        try:
            iterator = iter(loader)
        except OSError as error:  # too many files or processes, or too little /dev/shm
            reason = f"{error.strerror} (of processes, open files or /dev/shm)"
            raise OSError(f"{workers} workers: {reason}: give fewer, or 0") from None
        loader.batch_sampler.sampler = sampler
        # It runs before multiprocessing sends SIGTERM, which they ignore, and waits for ever.
        atexit.register(_kill, weakref.WeakSet(iterator._workers))  # they go with their loader
    return loader


def _start_worker(worker):
    die_with_parent()
    for number in SIGNALS:  # a stop is the training process's to handle; it still needs images
        signal.signal(number, signal.SIG_IGN)


def _kill(workers):
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise an error
    for worker in workers:
        worker.kill()


def keep_memory():
    """Let this process, and those it forks, keep what they free for what comes next.

    By default glibc's malloc() gives large blocks back to the kernel, and gets them anew, zeroed,
    by a page fault for every 4 KB: a tenth of a worker's time, and on a CPU four fifths of the time
    in which a batch is normalised.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(-4, 0)  # M_MMAP_MAX: no block outside of the heap,
    libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: which never shrinks


def die_with_parent():
    """Let the kernel, Linux, kill this process when the one that started it is gone.

    A launcher that is killed by SIGKILL cannot stop its workers: they would train on, and write
    to the folder that the next run uses.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    # The parent may have died before that line, during our imports.
    parent = multiprocessing.parent_process()  # None below a launcher of another kind
    if parent and parent.pid != os.getppid():
        os._exit(1)
