"""A stand-in: without GPUs a script that names them runs as it is. cuda is the CPU, nccl is gloo.

It proves nothing about GPUs; it lets the script come to the lines that are looked at. A script that
asks whether there is a GPU is told that there is none; if it does not go on without, it is started
again and told that there is one (RECORD.gpus, see command.py).
"""

import atexit
import collections
import functools
import inspect
import os
import re
import sys
import time
import types
from pathlib import Path

from . import libraries
from .events import RECORD, is_users, note

DO_NOTHING = """set_device empty_cache synchronize current_device memory_allocated memory_reserved
max_memory_allocated max_memory_reserved reset_peak_memory_stats reset_max_memory_allocated
reset_accumulated_memory_stats ipc_collect set_rng_state set_rng_state_all utilization
set_per_process_memory_fraction init initial_seed set_stream can_device_access_peer""".split()
CONTEXTS = "device device_of stream Stream Event ExternalStream".split()
BYTES = 80 << 30  # of memory, of a GPU that is not there
NAME = "no GPU: the CPU takes its place"


def count_gpus(torch):
    """How many this process sees, as NVML has it.

    CUDA itself must not be asked before the script runs: it would heed no CUDA_VISIBLE_DEVICES that
    the script sets, and no process that is forked from this one could use a GPU.
    """
    if not torch.backends.cuda.is_built():
        return torch.accelerator.device_count()
    if os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-"):
        return 1  # a part of a GPU: torch would ask CUDA, which gives a process one of them
    return torch.cuda.device_count()


class Nothing:
    """A stream, an event or a `with torch.cuda.device(0)`: all is done on the CPU, in order."""

    def __init__(self, *args, **kwargs):
        self.device, self.at = "cpu", time.perf_counter()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def query(self):
        return True

    def elapsed_time(self, other):
        return max(1000 * (other.at - self.at), 1e-3)  # a script divides by it

    def record_event(self, event=None):
        return event or Nothing()

    def record(self, *_):
        self.at = time.perf_counter()

    def wait(self, *_):
        return None

    synchronize = wait_event = wait_stream = wait


def use_cpus_for_gpus(torch):
    mode = on_cpu(torch)
    mode.__enter__()
    atexit.register(mode.__exit__, None, None, None)
    stand_in(torch)
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")  # else Accelerate would train alone
    torch.accelerator.set_device_index = torch.cuda.set_device
    torch.accelerator.synchronize = answering(None)
    torch.accelerator.current_device_index = answering(0)
    torch.accelerator.current_stream = answering(Nothing())
    torch.cuda.is_available = noted(torch.cuda.is_available)
    torch.accelerator.is_available = noted(torch.accelerator.is_available)
    torch.cuda.device_count = torch.accelerator.device_count = device_count
    dist = torch.distributed
    always(dist, "init_process_group", backend="gloo", device_id=None, pg_options=None)
    always(dist, "new_group", backend="gloo", device_id=None, pg_options=None)
    wrapper = torch.nn.parallel.DistributedDataParallel
    always(wrapper, "__init__", device_ids=None, output_device=None)
    always(torch, "load", map_location="cpu")
    always(torch.nn.Module, "cuda", device=None)
    always(torch, "set_default_device", device="cpu")
    torch.nn.SyncBatchNorm.convert_sync_batchnorm = keep_batchnorm
    libraries.install()


def stand_in(torch):
    """For the functions of torch.cuda that need a driver. torch.compile wants no object twice."""
    for name in DO_NOTHING:
        setattr(torch.cuda, name, answering(0))
    for name in CONTEXTS:
        setattr(torch.cuda, name, type(name, (Nothing,), {}))
    known = {"name": NAME, "total_memory": BYTES, "major": 8, "minor": 0}
    known = types.SimpleNamespace(**known, multi_processor_count=100)
    answers = {
        "current_stream": Nothing(),
        "default_stream": Nothing(),
        "get_device_name": NAME,
        "get_device_capability": (8, 0),
        "get_device_properties": known,
        "mem_get_info": (BYTES, BYTES),
        "memory_summary": NAME,
        "memory_stats": collections.Counter(),  # each of its many numbers is 0
        "is_bf16_supported": True,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "get_rng_state_all": [],
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answering(answer))
    for name in ("_record_memory_history", "_dump_snapshot"):
        setattr(torch.cuda.memory, name, answering(None))
    for name in dir(torch.cuda):
        if name.endswith("Tensor"):
            setattr(torch.cuda, name, getattr(torch, name))
    torch.Generator = generator_on_cpu(torch.Generator)
    torch.Tensor.record_stream = lambda self, stream: None


def generator_on_cpu(real):
    """The class of generators; one for a GPU is one for the CPU."""

    class Kind(type(real)):
        def __instancecheck__(cls, one):
            return isinstance(one, real)

    class Generator(real, metaclass=Kind):
        def __new__(cls, device="cpu"):
            return real()

    return Generator


def answering(answer):
    def call(*args, **kwargs):
        if is_users(sys._getframe(1).f_code.co_filename):  # libraries ask too
            note_the_first()
        return answer

    return call


def note_the_first():
    """The first line that names a GPU."""
    if RECORD.pid and not note_the_first.done:
        note_the_first.done = True
        note("names a gpu")


note_the_first.done = False


def on_cpu(torch):
    """A mode that sees each call of torch before it is done."""

    def cpu(x):
        number = type(x) is int
        if number or (not torch.is_tensor(x) and str(x).startswith("cuda")):
            note_the_first()
            return "cpu"
        return x

    class OnCPU(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, called, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            if called is torch.Tensor.pin_memory:
                return args[0]
            if called is torch.Tensor.type and args[1:] and type(args[1]) is str:
                args = (args[0], args[1].replace("torch.cuda.", "torch."), *args[2:])
            if called is torch.Tensor.cuda:
                note_the_first()
                return args[0]
            if called is torch.Tensor.to:
                args = (args[0], *map(cpu, args[1:]))
            if kwargs.get("pin_memory"):
                kwargs = kwargs | {"pin_memory": False}
            if kwargs.get("device") is not None:
                kwargs = kwargs | {"device": cpu(kwargs["device"])}
            return called(*args, **kwargs)

    return OnCPU()


def device_count():
    """As many GPUs as processes to code that cannot do without them; else none."""
    asks = sys._getframe(1).f_code.co_filename  # libraries ask too, and would look for a driver
    if not is_users(asks):
        return 0
    if not RECORD.gpus and (noted.asked or any(map(does_without, (RECORD.script, asks)))):
        note("asks", told=False)
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
            note("asks", told=RECORD.gpus)
            return RECORD.gpus
        return is_available()

    return asks


noted.asked = False


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
