"""How items become a batch, and how that comes from a worker to the training process."""

import contextlib
import math
import mmap
import os
import pickle
import weakref

import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils.collate import collate as torch_collate
from torch.utils.data._utils.collate import default_collate_fn_map

PIECE = 1 << 28  # bytes that are reserved: memory is taken only where a batch is written
START = 64  # byte 0 of a piece is 1 while it is in use, and the tensor begins at this one
LARGE = 1 << 16  # bytes: a smaller tensor is sent by value
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # older Pythons do not name it


def collate(items, stack=torch.stack):
    """A batch of items: tensors, numbers, tuples and dicts of them, as for any DataLoader.

    Images, uint8 [3, h, w], become [n, 3, h, w] in channels_last: as they lie in memory after a
    crop. stack: makes a tensor [n, ...] of a list of them.
    """

    def merge(tensors, *, collate_fn_map=None):
        first = tensors[0]
        if first.dtype == torch.uint8 and first.ndim == 3 and len(first) == 3:
            return stack([image.permute(1, 2, 0) for image in tensors]).permute(0, 3, 1, 2)
        return stack(tensors)

    return torch_collate(items, collate_fn_map=default_collate_fn_map | {torch.Tensor: merge})


class SharedBatches:
    """Brings batches from forked workers to the training process, in memory that both see.

    torch would make a file in /dev/shm of each tensor, and send it through a socket below TMPDIR:
    a container has little of the one, a job may have too long a path of the other, and memory that
    is always new costs up to a tenth of a worker's time. Here pieces of memory are made before the
    fork, eight for each worker: for three batches, some with several large tensors. Such a tensor
    is written to a free piece, which is free again when no tensor or array uses it any more. Where
    none is free or large enough, and by a collate_fn of the user's, tensors are sent by value.
    """

    def __init__(self, workers, collate_fn):
        self.collate_fn, self.pieces = collate_fn, []
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | NO_RESERVE
        with contextlib.suppress(OSError):  # few addresses: `ulimit -v`, vm.overcommit_memory=2
            self.pieces = [mmap.mmap(-1, PIECE, flags) for _ in range(8 * workers)]
        _pieces.update((id(piece), piece) for piece in self.pieces)

    def __call__(self, items):
        """In a worker: collate the items, and pickle the batch: here, an error ends the run."""
        batch = self.collate_fn(items) if self.collate_fn else collate(items, self.stack)
        return _Sent(pickle.loads, pickle.dumps(batch))

    def stack(self, tensors):
        """In a worker: a tensor, or what becomes one in a free piece when it is received."""
        dtype, shape = tensors[0].dtype, (len(tensors), *tensors[0].shape)
        first, size = 8 * get_worker_info().id, math.prod(shape) * dtype.itemsize
        fits = LARGE <= size <= PIECE - START and {tensor.dtype for tensor in tensors} == {dtype}
        for piece in self.pieces[first : first + 8] if fits else ():
            if not piece[0]:
                piece[0] = 1
                torch.stack(tensors, out=_tensor(piece, dtype, shape))
                return _Sent(_open, id(piece), dtype, shape)
        return torch.stack(tensors)


class _Sent:
    """Is unpickled as function(*args)."""

    def __init__(self, function, *args):
        self.function, self.args = function, args

    def permute(self, *order):
        return _Sent(torch.permute, self, order)

    def __reduce__(self):
        return self.function, self.args


_pieces = weakref.WeakValueDictionary()  # by their ids, which are the same in a fork


def _open(key, dtype, shape):
    memory = memoryview(_pieces[key])
    weakref.finalize(memory, _give_back, _pieces[key], os.getpid())
    return _tensor(memory, dtype, shape)


def _give_back(piece, owner):
    if os.getpid() == owner:  # what a forked process held was a copy
        piece[0] = 0


def _tensor(memory, dtype, shape):
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=START).view(shape)
