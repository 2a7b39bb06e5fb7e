"""In which order images are read, by which processes, with which random numbers."""

import atexit
import functools
import random
import signal
import sys
import weakref

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from .device import tune_malloc
from .handover import Pool, init_worker, stack
from .process import SIGNALS, die_with_parent
from .seeds import position_seed


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
            less = batch_size - batch_size % world_size
            which = f"{less} and {less + world_size} are" if less else f"{world_size} is"
            problem = f"--batch-size {batch_size} is no multiple of {world_size} processes"
            raise ValueError(f"{problem}: {which}")
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


def make_loader(dataset, sampler, local_batch_size, workers, device):
    """A DataLoader whose workers live as long as it does, or an iterator of it.

    Items may be tensors, numbers, tuples and dicts of them, as for any DataLoader. Images, uint8
    [3, h, w], become batches uint8 [n, 3, h, w] in channels_last. local_batch_size: the images of
    this process in a step. The workers are forked here: what is changed in the data set later does
    not reach them.
    """
    fork = workers > 0 and sys.platform == "linux"
    # Each worker has two batches under way, and the training process holds one or two.
    pool = Pool(2 * workers + 2) if fork else None
    loader = DataLoader(
        dataset,
        batch_size=local_batch_size,
        sampler=sampler,
        num_workers=workers,
        prefetch_factor=2 if workers else None,
        pin_memory=device.type == "cuda",
        persistent_workers=workers > 0,
        worker_init_fn=functools.partial(_init_worker, pool),
        collate_fn=_collate,
        # Spawned, as they would be below mp.spawn, each takes seconds to import torch.
        multiprocessing_context="fork" if fork else None,
    )
    if workers:
        # Forked now, with nothing to fetch yet, and before the first collective: later, a thread of
        # gloo's may hold a lock that the child waits for without end (python/cpython#112275).
        loader.batch_sampler.sampler = ()
        iterator = iter(loader)
        loader.batch_sampler.sampler = sampler
        # They ignore SIGTERM, with which multiprocessing would try to end them at the interpreter's
        # exit, and then wait for ever. This runs before.
        workers = weakref.ref(iterator)
        atexit.register(lambda: workers() and workers()._shutdown_workers())
    return loader


def _init_worker(pool, worker):
    die_with_parent()
    tune_malloc()  # each image is a new block of half a megabyte
    for number in SIGNALS:  # a stop is the training process's to handle; it still needs images
        signal.signal(number, signal.SIG_IGN)
    if pool:
        init_worker(pool)


def _collate(items):
    return collate(items, collate_fn_map=default_collate_fn_map | {torch.Tensor: stack})
