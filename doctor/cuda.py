"""A stand-in: without GPUs a script that names them runs as it is. cuda is the CPU, nccl is gloo.

It proves nothing about GPUs; it lets the script come to the lines that are looked at.
"""

import atexit
import functools
import inspect
import os
import re
import sys
from pathlib import Path

from .events import RECORD, is_users, note

DO_NOTHING = """set_device empty_cache synchronize current_device memory_allocated
max_memory_allocated max_memory_reserved reset_peak_memory_stats""".split()


def use_cpus_for_gpus(torch):
    mode = on_cpu(torch)
    mode.__enter__()
    atexit.register(mode.__exit__, None, None, None)
    for name in DO_NOTHING:
        setattr(torch.cuda, name, lambda *args, **kwargs: 0)
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")  # else Accelerate would train alone
    torch.accelerator.set_device_index = torch.cuda.set_device
    torch.cuda.is_available = noted(torch.cuda.is_available)
    torch.cuda.device_count = device_count
    dist = torch.distributed
    always(dist, "init_process_group", backend="gloo", device_id=None, pg_options=None)
    always(dist, "new_group", backend="gloo", device_id=None, pg_options=None)
    wrapper = torch.nn.parallel.DistributedDataParallel
    always(wrapper, "__init__", device_ids=None, output_device=None)
    always(torch, "load", map_location="cpu")
    always(torch.nn.Module, "cuda", device=None)
    torch.nn.SyncBatchNorm.convert_sync_batchnorm = keep_batchnorm


def on_cpu(torch):
    """A mode that sees each call of torch before it is done."""

    def cpu(x):
        number = type(x) is int
        return "cpu" if number or (not torch.is_tensor(x) and str(x).startswith("cuda")) else x

    class OnCPU(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, called, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            if called in (torch.Tensor.cuda, torch.Tensor.pin_memory):
                return args[0]
            if called is torch.Tensor.to:
                args = (args[0], *map(cpu, args[1:]))
            if kwargs.get("device") is not None:
                kwargs = kwargs | {"device": cpu(kwargs["device"])}
            return called(*args, **kwargs)

    return OnCPU()


def device_count():
    """As many GPUs as processes to code that cannot do without them; else none."""
    asks = sys._getframe(1).f_code.co_filename  # libraries ask too, and would look for a driver
    if noted.asked or not is_users(asks) or any(map(does_without, (RECORD.script, asks))):
        return 0
    return int(os.environ.get("LOCAL_WORLD_SIZE", 2))


@functools.cache
def does_without(path):
    """A file that asks whether there is a GPU; or asks Ray for some, which would wait for them."""
    text = Path(path).read_text(errors="replace") if os.path.isfile(path) else ""
    return re.search(r"is_available|^(import|from) ray\b", text, re.M) is not None


def noted(is_available):
    """A script that asks may train alone without a GPU: the line that asks is told then."""

    @functools.wraps(is_available)
    def asks():
        if is_users(sys._getframe(1).f_code.co_filename) and RECORD.pid:
            noted.asked = True  # it was told that there is none: device_count() says no other
            note("asks")
        return is_available()

    noted.asked = False
    return asks


def always(owner, name, **changed):
    """Call it with these arguments, whatever was given."""
    real = getattr(owner, name)
    takes = inspect.signature(real)

    @functools.wraps(real)
    def call(*args, **kwargs):
        given = takes.bind(*args, **kwargs)
        given.arguments.update(changed)
        return real(*given.args, **given.kwargs)

    setattr(owner, name, call)


def keep_batchnorm(module, process_group=None):  # SyncBatchNorm needs GPUs
    note("synced")
    return module
