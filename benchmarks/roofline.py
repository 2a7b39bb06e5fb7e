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
    torch.backends.cuda.matmul.allow_tf32 = True  # torch allows it for convolutions
    n, size = (8192, 2**30) if GPU else (2048, 2**28)
    a, b = (torch.randn(n, n, device=DEVICE).to(dtype) for _ in range(2))
    source = torch.ones(size, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    flops_per_second = 2 * n**3 / fastest(lambda: a @ b)
    bytes_per_second = 2 * size / fastest(lambda: target.copy_(source))
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


def fastest(function):
    """Seconds of the fastest of twenty calls."""
    times = []
    for _ in range(20):
        start = clock()
        function()
        times.append(clock() - start)
    return min(times)
