"""How a batch gets from a loader's worker to the training process: in memory that both see."""

import ctypes
import math
import mmap
import os
import weakref
from multiprocessing.queues import Queue
from multiprocessing.reduction import ForkingPickler

import torch

from .errors import first_line, say

LARGE = 1 << 16  # bytes: a smaller tensor is sent by value, through the worker's pipe
_pools = weakref.WeakValueDictionary()  # by id, which a forked worker's copy has too
_own_pool = None  # of this process, if it is a worker


class Pool:
    """Pieces of memory that a loader's process shares with the workers that it forks (Linux).

    A worker stacks a large tensor in a free piece and sends the piece's number. The training
    process gets a tensor on that memory, and the piece is free again when no tensor or array uses
    it any more: a batch stays what it is for as long as somebody holds it. While somebody holds all
    pieces, tensors are sent by value.

    torch would make new memory for each tensor, which the kernel clears first: a twentieth of a
    worker's time. It takes that from /dev/shm, which is small in a container, and sends it through
    a socket below TMPDIR, whose path may have no more than 107 bytes.
    """

    def __init__(self, pieces):
        # Some builds of Python lack os.memfd_create; the C library has it.
        libc = ctypes.CDLL(None, use_errno=True)
        self.files = [libc.memfd_create(b"batch", 1) for _ in range(pieces)]  # 1: close on exec
        if -1 in self.files:
            raise OSError(f"no memory for batches: {os.strerror(ctypes.get_errno())}")
        self.maps = [b""] * pieces
        self.owner = os.getpid()
        self.free, self.given_back = os.pipe()  # numbers of free pieces, of two bytes
        os.set_blocking(self.free, False)
        for number in range(pieces):
            self._give_back(number)
        _pools[id(self)] = self
        opened = [*self.files, self.free, self.given_back]
        weakref.finalize(self, lambda: [os.close(file) for file in opened]).atexit = False

    def take(self):
        """The number of a free piece, which is then the caller's; None where there is none."""
        try:
            return int.from_bytes(os.read(self.free, 2), "big")
        except BlockingIOError:
            return None

    def memory(self, number, size):
        """The memory of a piece, made larger where it has less than `size` bytes."""
        if len(self.maps[number]) < size:
            if os.fstat(self.files[number]).st_size < size:
                os.ftruncate(self.files[number], size)
            self.maps[number] = mmap.mmap(self.files[number], size)
        return memoryview(self.maps[number])[:size]

    def open(self, number, size):
        """The same for the training process: it is free again when this object is gone."""
        memory = self.memory(number, size)
        weakref.finalize(memory, self._give_back, number).atexit = False
        return memory

    def _give_back(self, number):
        if os.getpid() == self.owner:  # another one is forked, and has a copy of what is held here
            os.write(self.given_back, number.to_bytes(2, "big"))


def init_worker(pool):
    """Let this process, a worker, send its batches by `pool`."""
    global _own_pool
    _own_pool = pool
    ForkingPickler.register(torch.Tensor, _reduce)
    Queue._on_queue_feeder_error = staticmethod(_end_worker)


def stack(tensors, *, collate_fn_map=None):
    """Stack tensors, as collate() calls it: in a worker's pool, if the result is large.

    Images, uint8 [3, h, w], become [n, 3, h, w] in channels_last: as they lie in memory after a
    crop.
    """
    first = tensors[0]
    is_image = first.dtype == torch.uint8 and first.ndim == 3 and len(first) == 3
    if is_image:
        tensors = [image.permute(1, 2, 0) for image in tensors]
    shape = (len(tensors), *tensors[0].shape)
    size = math.prod(shape) * first.dtype.itemsize
    number = _own_pool.take() if _own_pool and size >= LARGE else None
    out = None
    if number is not None:
        out = torch.frombuffer(_own_pool.memory(number, size), dtype=first.dtype).view(shape)
    batch = torch.stack(tensors, out=out)
    if is_image:
        batch = batch.permute(0, 3, 1, 2)
    batch.piece = number
    return batch


def _reduce(tensor):
    """How a worker sends a tensor: as (function, arguments) that make it on the other side."""
    storage = tensor.untyped_storage()
    how = tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
    if (number := getattr(tensor, "piece", None)) is not None:
        return _open, (id(_own_pool), number, storage.nbytes(), *how)
    return _rebuild, (torch.tensor([], dtype=torch.uint8).set_(storage).numpy(), *how)


def _open(pool, number, size, *how):
    return _rebuild(_pools[pool].open(number, size), *how)


def _rebuild(memory, dtype, shape, stride, offset):
    if not len(memory):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, stride, offset)


def _end_worker(error, batch):
    """A batch cannot be sent. Without this, the training process would wait for it for ever."""
    say(f"error: a loader's worker cannot send its batch: {first_line(error)}")
    os._exit(1)
