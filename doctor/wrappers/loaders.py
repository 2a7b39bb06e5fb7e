"""Loaders of data: each pass over one, and the items of its batches.

Methods only are wrapped: the iterator that a script gets is the one that torch made.
"""

import collections
import functools
import itertools
import os

from ..events import RECORD, checksums, note, note_in_worker, sum_as_text, users_line
from . import wrap
from .models import validated
from .optimizers import random_states

numbers = itertools.count()  # of passes over a loader
loaders = itertools.count()
bases = {}  # id of a data set below all Subsets: (its number, itself: no other gets its id)
drawn = {"batches": 0, "libraries": set()}  # in a worker of a loader: which libraries drew


def install(torch):
    data = torch.utils.data
    iterator = data.dataloader._BaseDataLoaderIter
    fetcher = data._utils.fetch._MapDatasetFetcher
    wrap(data.DataLoader, "__init__", after=made_loader)
    wrap(data.DistributedSampler, "__init__", after=made)
    wrap(data.DistributedSampler, "set_epoch", before=told)
    wrap(data.DataLoader, "__iter__", forget, begin)
    wrap(iterator, "_next_index", after=asked)
    wrap(iterator, "__next__", before=given_out, after=lambda *args: got(torch, *args))
    note_ends(iterator)
    states = []

    def before_items(*_):
        if os.getpid() != RECORD.pid and RECORD.pid and drawn["batches"] < 20:
            states[:] = [random_states(torch)]

    def after_items(*_):
        if states:
            drawn["batches"] += 1
            note_drawn(states.pop(), random_states(torch))

    wrap(fetcher, "fetch", before_items, after_items)


def note_ends(iterator):
    real = iterator.__next__

    @functools.wraps(real)
    def call(self):
        try:
            return real(self)
        except StopIteration:
            note("over", number=getattr(self, "doctors_pass", -1))
            raise

    iterator.__next__ = iterator.next = call


def note_drawn(before, after):
    for library in before:
        if before[library] != after[library] and library not in drawn["libraries"]:
            drawn["libraries"].add(library)
            note_in_worker("drew", of=library)


def made(_, self, *args, **kwargs):
    self.doctors_line = users_line()


def told(self, epoch):
    self.doctors_told = True


def made_loader(_, self, *args, **kwargs):
    self.doctors_line, self.doctors_number = users_line(), next(loaders)


def length(of):
    try:
        return len(of)
    except TypeError:  # of a stream
        return None


def forget(self):
    if self._iterator is not None:  # workers that persist have read ahead
        for name in ("doctors_queue", "doctors_count"):
            self._iterator.__dict__.pop(name, None)


def begin(iterator, self):
    import torch

    sampler = getattr(self.batch_sampler, "sampler", None) or self.sampler
    size = length(self.dataset)
    theirs = isinstance(sampler, torch.utils.data.DistributedSampler)
    own = hasattr(sampler, "set_epoch") and not theirs
    iterator.doctors_pass = next(numbers)
    validated.clear()  # a model may have been loaded or averaged since the pass before
    note(
        "pass",
        number=iterator.doctors_pass,
        loader=self.doctors_number,
        made=self.doctors_line,
        batches=length(self),
        workers=self.num_workers,
        size=size,
        base=length(below_subsets(torch.utils.data, self.dataset)[0]),
        stream=isinstance(self.dataset, torch.utils.data.IterableDataset),
        classes=classes_of(self.dataset),
        sampler=getattr(sampler, "doctors_line", self.doctors_line),
        length=length(sampler),
        drops=bool(self.drop_last or getattr(self.batch_sampler, "drop_last", False)),
        # What a DistributedSampler has.
        seed=getattr(sampler, "seed", None),
        epoch=getattr(sampler, "epoch", None),
        rank=getattr(sampler, "rank", None),
        num_replicas=getattr(sampler, "num_replicas", None),
        shuffle=getattr(sampler, "shuffle", None),
        told=None if own else getattr(sampler, "doctors_told", False),
        padding=(getattr(sampler, "total_size", 0) or 0) - (size or 0),
        trims=any(  # in gather_for_metrics
            type(one).__module__.startswith("accelerate") for one in (self, self.batch_sampler)
        ),
    )
    if theirs:
        sampler.doctors_told = False


def classes_of(dataset):
    """The names of its classes by their numbers, as an ImageFolder has them; or None."""
    while hasattr(dataset, "dataset"):  # of a Subset
        dataset = dataset.dataset
    numbers = getattr(dataset, "class_to_idx", None)
    return sorted(numbers, key=numbers.get) if isinstance(numbers, dict) else None


def asked(index, self):
    self.__dict__.setdefault("doctors_queue", collections.deque()).append(index)


def given_out(self):
    self.doctors_count = getattr(self, "doctors_count", 0) + 1
    if RECORD.steps and self.doctors_count > RECORD.steps:
        note("cut", number=getattr(self, "doctors_pass", -1))
        raise StopIteration


def got(torch, batch, self):
    """Each item is (name, sum of its label, of its image): a name may be of other data."""
    from torch.utils._pytree import tree_leaves

    index = self.doctors_queue.popleft()
    index = [*index] if self._auto_collation else [index]  # a sampler may give arrays, too
    tensors = [x for x in tree_leaves(batch) if hasattr(x, "is_complex") and x.ndim]
    if isinstance(self._dataset, torch.utils.data.IterableDataset):  # its items have no numbers
        items = [(" ".join(map(sum_as_text, tensors)), 0, 0)]
    else:
        sums = [x for x in tensors if len(x) == len(index)]
        sums.sort(key=lambda x: x.numel())
        # The smallest is taken for the labels, whose values are read; the largest for the images.
        labels = [*map(sum_as_text, sums[0])] if sums else index
        images = checksums(sums[-1]) if len(sums) > 1 else labels
        names = [name_of(torch, self._dataset, i) for i in index]
        items = [*zip(names, labels, images, strict=True)]
    grad = torch.is_grad_enabled()
    note("batch", number=getattr(self, "doctors_pass", -1), items=items, grad=grad)


def name_of(torch, dataset, index):
    """The name of an item: its data set's number, its index there."""
    dataset, index = below_subsets(torch.utils.data, dataset, index)
    number, _ = bases.setdefault(id(dataset), (len(bases), dataset))
    return f"{number}:{index}"


def below_subsets(data, dataset, index=None):
    """(the data set below all Subsets, the index of an item there)"""
    while isinstance(dataset, data.Subset):
        dataset, index = dataset.dataset, index if index is None else dataset.indices[index]
    return dataset, index
