"""From uint8 batches in host memory to normalised float batches on the device."""

import functools
import math
import time

import torch

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels, in 0..1


@functools.cache
def side_stream(device):
    """The one for copies: memory that a stream has used is kept for that stream."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


class Prefetcher:
    """Iterate over a loader of (uint8 [n, 3, h, w], int64 [n]) as (float32, int64) on `device`.

    This is the only place that normalises. On a GPU the copy and the arithmetic run on a side
    stream: the host asks for the next batch while the GPU still computes the step before, so the
    copy costs no time as long as it is shorter than a step.
    """

    step_done = math.inf  # when this process last asked for another batch, by time.monotonic()

    def __init__(self, loader, device):
        self.loader, self.device = loader, device
        self.pauses = []  # of the device: how they began, and how they ended
        # Of a byte x: x / (255 * std) - mean / std.
        self.scale = torch.tensor([1 / (255 * std) for std in STD], device=device)
        self.shift = torch.tensor([-m / s for m, s in zip(MEAN, STD, strict=True)], device=device)

    def __iter__(self):
        Prefetcher.step_done = time.monotonic()
        batches, stream = iter(self.loader), side_stream(self.device)
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self.device))  # it made scale and shift
        while True:
            asked = self._now()
            batch = next(batches, None)
            self.pauses.append((asked, self._now()))
            if batch is None:
                return
            with torch.cuda.stream(stream):  # of None: does nothing
                images, target = self._load(*batch)
            if stream is not None:
                current = torch.cuda.current_stream(self.device)
                current.wait_stream(stream)
                # Their memory belongs to the side stream; it must outlive its use on this one.
                images.record_stream(current)
                target.record_stream(current)
            yield images, target
            Prefetcher.step_done = time.monotonic()

    def _now(self):
        """On a GPU, which is behind the host: the moment when it has done all it was asked for."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def waited(self):
        """The seconds in which the device had nothing to do but wait for images, so far."""
        if self.device.type != "cuda":
            return sum(end - start for start, end in self.pauses)
        torch.cuda.current_stream(self.device).synchronize()
        return sum(start.elapsed_time(end) for start, end in self.pauses) / 1000

    def _load(self, images, target):
        images = images.to(self.device, non_blocking=True)
        target = target.to(self.device, non_blocking=True)
        # As rows of width * 3 numbers: with an inner loop over 3 channels a CPU is 3 times slower.
        rows, width = images.permute(0, 2, 3, 1).flatten(2), images.shape[3]
        out = rows.float()
        torch.addcmul(self.shift.repeat(width), out, self.scale.repeat(width), out=out)
        return out.unflatten(2, (width, 3)).permute(0, 3, 1, 2), target
