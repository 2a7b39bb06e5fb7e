"""How long a training step would take at best on this device."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks.harness import DEVICE, GPU, clock


class OperationCounter(TorchDispatchMode):
    """Lists (operations, bytes read and written) of each convolution and matrix product."""

    def __init__(self):
        super().__init__()
        self.counts = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        count_flops = flop_registry.get(function._overloadpacket)
        if count_flops:
            tensors = [x for x in tree_leaves((args, result)) if torch.is_tensor(x)]
            flops = count_flops(*args, **kwargs, out_val=result)
            self.counts.append((flops, sum(tensor.nbytes for tensor in tensors)))
        return result


def roofline(train_step, dtype):
    """How long a step would take at best, if all but convolutions and matrix products were free.

    Each of these takes as long as its arithmetic or its memory traffic, whichever is longer, at
    the rates that the device reaches here in a large matrix product and a large copy.
    """
    n, size = (8192, 2**30) if GPU else (2048, 2**28)
    if not GPU and dtype != torch.float32:
        n = 256  # many CPUs have no such arithmetic: it takes a hundred times as long
    flops_per_second = 2 * n**3 / fastest(matrix_product(dtype, n))
    bytes_per_second = 2 * size / fastest(copy(size, DEVICE, DEVICE))
    with OperationCounter() as counter:
        train_step()
    seconds = [max(f / flops_per_second, b / bytes_per_second) for f, b in counter.counts]
    return {
        "ms": 1000 * sum(seconds),
        "gflop": sum(flops for flops, _ in counter.counts) / 1e9,
        "gb": sum(traffic for _, traffic in counter.counts) / 1e9,
        "tflop_per_second": flops_per_second / 1e12,
        "gb_per_second": bytes_per_second / 1e9,
    }


def matrix_product(dtype, n):
    """A function that multiplies two random n x n matrices: 2 * n**3 operations."""
    torch.backends.cuda.matmul.allow_tf32 = True  # torch allows it for convolutions
    a, b = (torch.randn(n, n, device=DEVICE).to(dtype) for _ in range(2))
    return lambda: a @ b


def copy(size, source, target, pinned=False):
    """A function that copies so many bytes from a device to a device, perhaps the same.

    pinned: whether what lies on the CPU does so in memory that cannot be swapped.
    """
    ends = [torch.ones(size, dtype=torch.uint8, device=device) for device in (source, target)]
    if pinned:
        ends = [end.pin_memory() if end.device.type == "cpu" else end for end in ends]
    return lambda: ends[1].copy_(ends[0], non_blocking=True)


def fastest(function):
    """Seconds of the fastest of twenty calls, or of those that end within a second."""
    times = []
    while len(times) < 20 and sum(times) < 1:
        start = clock()
        function()
        times.append(clock() - start)
    return min(times)
