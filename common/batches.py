"""How items become a batch, and how that comes from a worker to the training process."""

import copyreg
import io
import math
import mmap
import os
import pickle
import weakref

import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils.collate import collate as torch_collate
from torch.utils.data._utils.collate import default_collate_fn_map

PIECE = 1 << 28  # bytes of addresses: memory is taken only where a batch is written
LARGE = 1 << 16  # bytes: a smaller tensor is sent by value
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # older Pythons do not name it


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
