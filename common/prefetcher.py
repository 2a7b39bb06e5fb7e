"""From batches in host memory to batches on the device, images normalised."""

import math
import time

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels, in 0..1


class Prefetcher:
    """Iterate over the batches of a loader, on `device`, with images normalised.

    A batch is a tensor, or a tuple, list or dict of them, to any depth, in host memory. Images,
    uint8 [n, 3, h, w], become float32 in channels_last; everything else is only moved. So is all
    but the first item of a tuple or list: the first is the input, the others are targets, such as
    masks. This is the only place where images are normalised. On a GPU both run on a side stream,
    while the GPU still computes the step before: they cost no time as long as they are shorter than
    a step. A new iteration ends the one before (RuntimeError): workers read one epoch at a time.
    """

    def __init__(self, loader, device):
        self.loader, self.device = loader, torch.device(device)
        self.waits = []  # for each batch: when the device had nothing to do, and when it came
        # One stream for all epochs: the allocator reuses memory only within a stream.
        self.stream = torch.cuda.Stream(device) if self.device.type == "cuda" else None
        # Of a byte x: x / (255 * std) - mean / std.
        self.scale = torch.tensor([1 / (255 * std) for std in STD], device=device)
        self.shift = torch.tensor([-m / s for m, s in zip(MEAN, STD, strict=True)], device=device)

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        self.waits = waits = []
        batches, end = iter(self.loader), object()
        while self.waits is waits:
            asked = self._now()
            batch = next(batches, end)
            if batch is end:
                return
            waits.append((asked, self._now()))
            with torch.cuda.stream(self.stream):  # of None: does nothing
                batch = self._load(batch)
            if self.stream is not None:
                current = torch.cuda.current_stream(self.device)
                current.wait_stream(self.stream)
                # Their memory is the side stream's; it must outlive its use on this one.
                for tensor in filter(torch.is_tensor, tree_leaves(batch)):
                    tensor.record_stream(current)
            yield batch
        raise RuntimeError("a new iteration began before this one ended: make a loader for each")

    def _load(self, batch):
        leaves, form = tree_flatten(batch)
        inputs = len(tree_leaves(batch[0])) if isinstance(batch, (tuple, list)) else len(leaves)
        loaded = [self.load(x) for x in leaves[:inputs]] + [self._move(x) for x in leaves[inputs:]]
        return tree_unflatten(loaded, form)

    def _now(self):
        """On a GPU, which lags behind the host: the moment when it has done all that was asked."""
        if self.stream is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def waited(self):
        """Seconds in which the device had nothing to do but wait for images, in the last epoch."""
        if self.stream is None:
            return math.fsum(end - start for start, end in self.waits)
        torch.cuda.current_stream(self.device).synchronize()
        return math.fsum(start.elapsed_time(end) for start, end in self.waits) / 1000

    def _move(self, x):
        return x.to(self.device, non_blocking=True) if torch.is_tensor(x) else x

    def load(self, tensor):
        """A tensor on the device, normalised if it is images; what is no tensor stays as it is."""
        tensor = self._move(tensor)
        if not torch.is_tensor(tensor) or tensor.dtype != torch.uint8:
            return tensor
        if tensor.ndim != 4 or tensor.shape[1] != 3:
            return tensor
        # As rows of width * 3 numbers: with an inner loop over 3 channels a CPU is 3 times slower.
        rows, width = tensor.permute(0, 2, 3, 1).flatten(2), tensor.shape[3]
        out = rows.float()
        torch.addcmul(self.shift.repeat(width), out, self.scale.repeat(width), out=out)
        return out.unflatten(2, (width, 3)).permute(0, 3, 1, 2)
