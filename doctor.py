"""Runs a training script on two processes and names the mistakes of docs/bugs.md that it makes.

$ python doctor.py minimal/distributed.py

Four parts: what is wrapped (functions of torch and os), what is recorded (events, a line of JSON
each, a file for each process), what is judged (a small function for each mistake, over the events
of all processes), what is told. It sends nothing between processes and changes no number. One
file that needs nothing but torch.
"""

import argparse
import atexit
import builtins
import collections
import contextlib
import fcntl
import functools
import gc
import hashlib
import importlib.util
import inspect
import itertools
import json
import multiprocessing.process
import multiprocessing.spawn
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

# ---- 1. What is wrapped, in each process, before the script begins


def wrap(owner, name, before=None, after=None, waits=None):
    """Call before(*args) ahead of owner.name, and after(result, *args) behind it.

    Their arguments have torch's names: a script may give them by name.
    waits: what it is, in words, if the call may wait there for other processes.
    """
    real = getattr(owner, name)

    @functools.wraps(real)
    def call(*args, **kwargs):
        words = waits  # noqa: F841 - main_thread() reads it from the stack
        if before:
            guarded(before, *args, **kwargs)
        result = real(*args, **kwargs)
        if after:
            guarded(after, result, *args, **kwargs)
        return result

    setattr(owner, name, call)


def guarded(look, *args, **kwargs):
    """A fault of this file must not end the script: it is noted."""
    try:
        return look(*args, **kwargs)
    except StopIteration:  # --steps ends a pass so
        raise
    except Exception as error:
        note("fault", error=f"{type(error).__name__}: {error} ({look.__qualname__})")


def install():
    """Wrap what is looked at, in this process."""
    import torch

    if not torch.cuda.is_available():
        use_cpus_for_gpus(torch, Path(RECORD.script).read_text(errors="replace"))
    wrap_processes()
    wrap_collectives(torch)
    wrap_models(torch)
    wrap_training(torch)
    wrap_loaders(torch.utils.data)
    wrap_files(torch)
    wrap(builtins, "print", before=percent)


WITHOUT_GPUS = """set_device empty_cache synchronize current_device memory_allocated
max_memory_allocated max_memory_reserved reset_peak_memory_stats""".split()


def use_cpus_for_gpus(torch, text):
    """Without GPUs a script that names them runs as it is: cuda is the CPU, nccl is gloo."""

    def cpu(x):
        number = type(x) is int
        return "cpu" if number or (not torch.is_tensor(x) and str(x).startswith("cuda")) else x

    class OnCPU(torch.overrides.TorchFunctionMode):
        """Sees each call of torch before it is done."""

        def __torch_function__(self, called, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            if called in (torch.Tensor.cuda, torch.Tensor.pin_memory):
                return args[0]
            if called is torch.Tensor.to:
                args = (args[0], *map(cpu, args[1:]))
            if kwargs.get("device") is not None:
                kwargs = kwargs | {"device": cpu(kwargs["device"])}
            return called(*args, **kwargs)

    def device_count():  # libraries ask too, and would look for a driver
        asks = sys._getframe(1).f_code.co_filename
        return int(os.environ.get("LOCAL_WORLD_SIZE", 2)) if is_users(asks) else 0

    def without_gpus(owner, name, **changed):
        """Call it with other arguments, where they are given or must not be."""
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

    mode = OnCPU()
    mode.__enter__()
    atexit.register(mode.__exit__, None, None, None)
    for name in WITHOUT_GPUS:
        setattr(torch.cuda, name, lambda *args, **kwargs: 0)
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")  # else Accelerate would train alone
    torch.accelerator.set_device_index = torch.cuda.set_device
    # Else it can do without, or would ask Ray for them, which waits until some are there.
    if not re.search(r"is_available|^(import|from) ray\b", text, re.M):
        torch.cuda.device_count = device_count
    dist = torch.distributed
    without_gpus(dist, "init_process_group", backend="gloo", device_id=None, pg_options=None)
    without_gpus(dist, "new_group", backend="gloo", device_id=None, pg_options=None)
    ddp = torch.nn.parallel.DistributedDataParallel
    without_gpus(ddp, "__init__", device_ids=None, output_device=None)
    without_gpus(torch, "load", map_location="cpu")
    without_gpus(torch.nn.Module, "cuda", device=None)
    torch.nn.SyncBatchNorm.convert_sync_batchnorm = keep_batchnorm


class Early:
    """Wraps in a process that starts anew, before it reads the script (unpickling calls exec)."""

    def __reduce__(self):
        here = os.path.dirname(os.path.abspath(__file__))
        return exec, (f"import sys; sys.path.append({here!r}); import doctor; doctor.install()",)


class Inside:
    """What a process calls that the script starts by mp.spawn or Process(target=...)."""

    def __init__(self, target):
        self.target = target

    def __call__(self, *args, **kwargs):
        RECORD.open()
        with noted_end():
            return self.target(*args, **kwargs)


def wrap_processes():
    base = multiprocessing.process.BaseProcess
    real, prepared = base.__init__, multiprocessing.spawn.get_preparation_data

    def begin(self, group=None, target=None, *args, **kwargs):
        worker = getattr(target, "__module__", "").startswith("torch.utils.data")
        real(self, group, Inside(target) if target and not worker else target, *args, **kwargs)

    base.__init__ = begin
    multiprocessing.spawn.get_preparation_data = lambda name: {"doctor": Early(), **prepared(name)}


COLLECTIVES = """all_reduce reduce broadcast barrier all_gather all_gather_into_tensor gather
scatter reduce_scatter reduce_scatter_tensor all_to_all all_to_all_single all_gather_object
gather_object broadcast_object_list scatter_object_list monitored_barrier""".split()


def wrap_collectives(torch):
    dist = torch.distributed

    def sent_in_place(_, tensor, *args, **kwargs):
        line = users_line(sys._getframe(1))
        # Its graph does not know of it. An autograd.Function, where that is off, has its own way.
        if getattr(tensor, "grad_fn", None) is not None and torch.is_grad_enabled():
            tensor.register_hook(lambda gradient: arrived(gradient, line))

    def arrived(gradient, line):
        one = gradient.numel() == 1
        if not one or gradient.item() != 1:  # else it is that of each process's own part
            note("gradient", line=line, one=one)

    def joined(*args, **kwargs):
        note("group", rank=dist.get_rank(), local=os.environ.get("LOCAL_RANK"))

    def new_group(_, ranks=None, *args, **kwargs):
        if ranks is not None and len(ranks) < dist.get_world_size():
            note("part")

    def mesh(_, self, *args, **kwargs):
        if self.ndim > 1:
            note("part")

    def wrap_collective(name):
        def before(*args, **kwargs):
            note("collective", name=name)

        in_place = name in ("all_reduce", "reduce", "broadcast")
        wrap(dist, name, before, sent_in_place if in_place else None, waits=name)

    for name in COLLECTIVES:
        wrap_collective(name)
    wrap(dist, "init_process_group", after=joined, waits="init_process_group")
    wrap(dist, "new_group", after=new_group)
    wrap(dist.device_mesh.DeviceMesh, "__init__", after=mesh)
    wrap(dist.algorithms.join.Join, "__enter__", before=lambda self: note("join"))


MODELS = []  # those that DDP has wrapped
NAMES = {}  # id of a parameter: (number of its model, its name)
ORDERS = collections.defaultdict(list)  # model: what was done since its last step, (letter, line)
FORWARD = "the forward pass of DDP"


def wrap_models(torch):
    ddp = torch.nn.parallel.DistributedDataParallel
    inside = []  # models whose wrapped forward pass has begun, and not yet the plain one
    validated = set()  # models that were validated since they were trained
    running, kinds = set(), set()  # plain models whose forward pass runs; their classes

    def wrapped(_, self, *args, **kwargs):
        number = len(MODELS)
        MODELS.append(self)
        weights = self.module.named_parameters()
        alike = {id(w): (number, n) for n, w in weights if n not in self.parameters_to_ignore}
        NAMES.update(alike)
        note("wrap", frozen=frozen())
        kind = type(self.module)
        if kind not in kinds and not isinstance(self.module, torch.jit.ScriptModule):
            kinds.add(kind)  # of the class: an attribute of the model would be saved with it
            wrap(kind, "forward", before=plain_forward, after=leave_forward)

    def forward(self, *args, **kwargs):
        inside.append(self)
        note_forward(self, "F" if self.require_backward_grad_sync else "f")

    def note_forward(model, letter):
        trains = model.module.training and torch.is_grad_enabled()
        event = note("forward", trains=trains)
        if trains:
            ORDERS[MODELS.index(model)].append((letter, event["line"]))

    def plain_forward(module, *args, **kwargs):
        model = next((model for model in MODELS if model.module is module), None)
        if model is None or module in running:  # running: of a class that calls its parent's
            return
        running.add(module)
        if model in inside:
            inside.remove(model)
        else:
            note_forward(model, "p")
        if module.training:
            validated.discard(model)
        elif model not in validated:
            validated.add(model)
            note("buffers", sums={name: total(buffer) for name, buffer in module.named_buffers()})

    def leave_forward(_, module, *args, **kwargs):
        running.discard(module)

    def backward(*args, **kwargs):
        event = note("backward")
        for number in range(len(MODELS)):
            ORDERS[number].append(("B", event["line"]))

    def leave(*_):  # a DDP that outlives its group may abort
        MODELS.clear()
        validated.clear()
        gc.collect()

    wrap(torch.distributed, "destroy_process_group", before=leave)
    wrap(ddp, "__init__", after=wrapped, waits="the constructor of DDP")
    wrap(ddp, "forward", before=forward, waits=FORWARD)
    wrap(torch.autograd, "backward", before=backward, waits="backward")


def frozen():
    """The names of the weights of wrapped models that get no gradient."""
    models = [dict(model.module.named_parameters()) for model in MODELS]
    return [n for named in models for n, weight in named.items() if not weight.requires_grad]


def total(tensor):
    """The same for the same bits."""
    torch = sys.modules["torch"]
    tensor = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return str(tensor.sum(dtype=torch.float64).item())


def wrap_training(torch):
    from torch.optim import optimizer as optimizers

    rates, scaler = torch.optim.lr_scheduler, torch.amp.GradScaler
    schedules, scaled = [], []
    stepping = set()  # optimizers in their step, which may call that of their parent class

    def step(optimizer, *_):
        """Weights before a step: after it, some optimizers have still to send them."""
        if optimizer in stepping:
            return
        stepping.add(optimizer)
        optimizer.doctors_steps = getattr(optimizer, "doctors_steps", 0) + 1
        looks = optimizer.doctors_steps <= 50 or optimizer.doctors_steps % 50 == 0  # it takes time
        weights = [w for group in optimizer.param_groups for w in group["params"]]
        wrapped = [(*NAMES[id(w)], w) for w in weights if id(w) in NAMES]
        models = {model for model, *_ in wrapped}
        note(
            "step",
            weights={f"{model}.{name}": total(w) for model, name, w in wrapped if looks},
            order={str(model): ORDERS.pop(model, []) for model in models},
            lr=[float(group["lr"]) for group in optimizer.param_groups],
            random=hashlib.md5(torch.get_rng_state().numpy().tobytes()).hexdigest(),
        )

    def loss(
        input,
        target,
        weight=None,
        size_average=None,
        ignore_index=-100,
        reduce=None,
        reduction="mean",
        label_smoothing=0.0,
    ):
        labels = not target.is_floating_point()
        if labels and reduction == "mean" and torch.is_grad_enabled():
            kept = target[target != ignore_index]
            counted = kept.numel() if weight is None else weight[kept].sum().item()
            note("mean", counted=counted)

    def mean_of_own(input, *dims, **more):
        """Of a loss by hand, or of what a mask has left of a prediction."""
        whole = not dims and more.get("reduction", "mean") == "mean" and "dim" not in more
        if whole and not torch.compiler.is_compiling() and input.requires_grad:
            note("mean", counted=input.numel())

    def loss_of_own(input, target, *_, **more):
        mean_of_own(input, **more)

    def new_schedule(_, self, *args, **kwargs):
        length = getattr(self, "T_max", None) or getattr(self, "total_steps", None)
        if length:
            schedules.append(self)
            note("schedule", number=len(schedules) - 1, length=length)

    def rate(_, self, *args, **kwargs):
        if self in schedules:
            note("rate", number=schedules.index(self), done=self.last_epoch)

    def plateau(self, metrics, *args, **kwargs):
        note("plateau", value=str(float(metrics)))

    def new_scaler(_, self, *args, enabled=True, **kwargs):
        self.doctors_enabled = enabled  # as it was meant: without a GPU torch turns it off

    def scale(self, outputs):
        scaled[:] = [self] if self.doctors_enabled else []

    def leave_step(optimizer, *_):
        stepping.discard(optimizer)

    optimizers.register_optimizer_step_pre_hook(step)
    optimizers.register_optimizer_step_post_hook(leave_step)
    for name in ("cross_entropy", "nll_loss"):
        wrap(torch.nn.functional, name, before=loss)
    for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"):
        wrap(torch.nn.functional, name, before=loss_of_own)
    for owner in (torch, torch.Tensor):
        wrap(owner, "mean", before=mean_of_own)
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        wrap(torch.nn.utils, name, lambda *_, **__: note("clip", scaled=bool(scaled)))
    wrap(scaler, "__init__", after=new_scaler)
    wrap(scaler, "scale", before=scale)
    wrap(scaler, "unscale_", before=lambda *_: scaled.clear())
    wrap(scaler, "update", before=lambda *_: scaled.clear())
    wrap(rates.LRScheduler, "__init__", after=new_schedule)
    wrap(rates.LRScheduler, "step", after=rate)
    wrap(rates.ReduceLROnPlateau, "step", before=plateau)
    wrap(torch, "manual_seed", before=lambda seed: note("seed", seed=int(seed)))


def wrap_loaders(data):
    """Methods only: the iterator that a script gets is the one that torch made."""
    from torch.utils._pytree import tree_leaves

    iterator = data.dataloader._BaseDataLoaderIter
    bases = {}  # id of a data set below all Subsets: (its number, itself: no other gets its id)
    numbers = itertools.count()  # of passes over a loader

    def made(_, self, *args, **kwargs):
        self.doctors_line = users_line(sys._getframe(1))

    def item(dataset, index):
        """The name of an item: its data set's number, its index there."""
        while isinstance(dataset, data.Subset):
            dataset, index = dataset.dataset, dataset.indices[index]
        number, _ = bases.setdefault(id(dataset), (len(bases), dataset))
        return f"{number}:{index}"

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
        sampler = getattr(self.batch_sampler, "sampler", None) or self.sampler
        size = length(self.dataset)
        iterator.doctors_pass = next(numbers)
        note(
            "pass",
            number=iterator.doctors_pass,
            made=self.doctors_line,
            batches=length(self),
            workers=self.num_workers,
            size=size,
            sampler=getattr(sampler, "doctors_line", self.doctors_line),
            length=length(sampler),
            # What a DistributedSampler has.
            seed=getattr(sampler, "seed", None),
            rank=getattr(sampler, "rank", None),
            num_replicas=getattr(sampler, "num_replicas", None),
            shuffle=getattr(sampler, "shuffle", None),
            padding=(getattr(sampler, "total_size", 0) or 0) - (size or 0),
            trims=type(self).__module__.startswith("accelerate"),  # in gather_for_metrics
        )

    def asked(index, self):
        self.__dict__.setdefault("doctors_queue", collections.deque()).append(index)

    def given_out(self):
        self.doctors_count = getattr(self, "doctors_count", 0) + 1
        if RECORD.steps and self.doctors_count > RECORD.steps:
            note("cut", number=getattr(self, "doctors_pass", -1))
            raise StopIteration

    def got(batch, self):
        """Each item is (name, sum of its label, of its image): a name may be of other data."""
        index = self.doctors_queue.popleft()
        index = index if type(index) is list else [index]
        tensors = [x for x in tree_leaves(batch) if hasattr(x, "is_complex") and x.ndim]
        if isinstance(self._dataset, data.IterableDataset):  # its items have no numbers
            items = [(" ".join(map(total, tensors)), 0, 0)]
        else:
            sums = [x for x in tensors if len(x) == len(index)]
            sums = [[*map(total, x)] for x in sorted(sums, key=lambda x: x.numel())] or [index]
            names = [item(self._dataset, i) for i in index]
            items = [(name, *(of[i] for of in (sums[0], sums[-1]))) for i, name in enumerate(names)]
        grad = sys.modules["torch"].is_grad_enabled()
        note("batch", number=getattr(self, "doctors_pass", -1), items=items, grad=grad)

    wrap(data.DataLoader, "__init__", after=made)
    wrap(data.DistributedSampler, "__init__", after=made)
    wrap(data.DataLoader, "__iter__", forget, begin)
    wrap(iterator, "_next_index", after=asked)
    wrap(iterator, "__next__", before=given_out, after=got)


def wrap_files(torch):
    def path(file):
        name = getattr(file, "name", file)
        return os.path.abspath(name) if isinstance(name, (str, os.PathLike)) else None

    def save(obj, f, *args, **kwargs):
        inner = obj.values() if isinstance(obj, dict) else []
        dicts = [some for some in (obj, *inner) if isinstance(some, dict) and some]
        of_wrapped = any(all(str(key).startswith("module.") for key in some) for some in dicts)
        note("save", path=path(f), of_wrapped=of_wrapped)
        if isinstance(f, (str, os.PathLike)):
            put_aside(path(f))
        else:  # the script has opened it: an old file there is gone already
            SAVED.add(path(f))

    def was_there(file):
        file = path(file)
        return file and os.path.isfile(file) and os.path.getmtime(file) < RECORD.began

    def remove(file, *args, **kwargs):
        if was_there(file):
            put_aside(path(file), os.link)

    def move(src, dst, *args, **kwargs):
        if path(src) in SAVED or was_there(src):
            remove(src)
            put_aside(path(dst))

    def load(f, *args, **kwargs):
        note("load", path=path(f))

    wrap(torch, "save", before=save)
    wrap(torch, "load", before=load)
    wrap(os, "rename", before=move)
    wrap(os, "replace", before=move)
    wrap(os, "remove", before=remove)
    wrap(os, "unlink", before=remove)


def percent(*words, **_):
    """Note a printed accuracy that no part of all can have."""
    said = " ".join(word for word in words if isinstance(word, str))
    if any(float(number) > 100 for number in re.findall(r"(\d+\.?\d*) ?%", said)):
        note("above 100 %")


MOVE, ASIDE = os.replace, ".before-the-doctor"
SAVED = set()  # files that this process has saved


def put_aside(path, by=MOVE):
    """Keep a file that the run overwrites, renames or removes: it must not take its place."""
    if path is None or path in SAVED:
        return
    SAVED.add(path)
    with open(f"{RECORD.folder}/../saved", "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # another process may save it now
        file.seek(0)
        if path + "\n" not in file:
            if os.path.isfile(path) and not os.path.exists(path + ASIDE):
                by(path, path + ASIDE)
            file.write(path + "\n")


def put_back(folder):
    """Make the files that the runs have saved as they were before, or gone; returns their names."""
    saved = Path(f"{folder}/saved")
    paths = saved.read_text().splitlines() if saved.exists() else []
    paths = [path for path in paths if os.path.isfile(path) or os.path.exists(path + ASIDE)]
    for path in paths:
        if os.path.exists(path + ASIDE):
            MOVE(path + ASIDE, path)
        else:
            os.remove(path)
    return sorted(map(os.path.basename, paths))


# ---- 2. What is recorded: the events of a process, in their order


class Record:
    """A file of events, each written at once: what was seen outlives a crash."""

    pid = None

    def __init__(self):  # folder, script, began, nodes, patience, steps: see examine()
        self.__dict__ |= json.loads(os.environ.get("DOCTOR", "{}"))

    def open(self):
        self.pid, self.count = os.getpid(), 0
        self.file = open(f"{self.folder}/{self.pid}.jsonl", "a", buffering=1)  # noqa: SIM115
        self.ended = threading.Event()
        threading.Thread(target=watch, args=(self.ended,), daemon=True).start()


RECORD = Record()
LIBRARIES = ("<", os.path.dirname(os.__file__), os.path.abspath(__file__))


def note(kind, **facts):
    """Write an event, with the line of the user's code in which it is; returns it."""
    event = {"kind": kind, "line": users_line(sys._getframe(1))} | facts
    if os.getpid() == RECORD.pid:  # not in the workers of a loader
        RECORD.count += 1
        RECORD.file.write(json.dumps(event) + "\n")
    return event


@functools.cache
def is_users(file):
    return not file.startswith(LIBRARIES) and "site-packages" not in file


@functools.cache
def short(file):
    return os.path.relpath(file, os.path.dirname(RECORD.script))


def users_line(frame):
    """The innermost line of the user's own code, as "train.py:48"."""
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{short(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else "?"


def watch(ended):
    """A thread: where nothing has happened for a while, note where the process stands."""
    torch = sys.modules["torch"]
    seen, cpu, since = -1, 0.0, time.monotonic()
    while not ended.wait(1):
        # A busy machine may give a step little time; with GPUs, waiting takes time as well.
        computes = time.process_time() - cpu > 0.5 and not torch.cuda.is_initialized()
        if RECORD.count != seen or computes:
            seen, cpu, since = RECORD.count, time.process_time(), time.monotonic()
        if time.monotonic() - since > RECORD.patience:
            line, waits, reads = main_thread()
            if reads:  # its workers may compute
                continue
            note("stands", line=line, waits=waits, outside=not waits and outside())
            seen, since = RECORD.count, time.monotonic()


def outside():
    """Not in a group: mp.spawn's parent, one that has not begun, or has left: none waits for it."""
    return not sys.modules["torch"].distributed.is_initialized()


def main_thread():
    """(its line in the user's code, what it waits in, whether it waits for a loader's workers).

    No frame is kept, nor what it holds.
    """
    frame = sys._current_frames()[threading.main_thread().ident]
    line, waits, reads, inner = users_line(frame), None, False, True
    while frame is not None:
        file = frame.f_code.co_filename
        reads |= file.endswith("torch/utils/data/dataloader.py")
        if inner and file == __file__:
            waits = waits or frame.f_locals.get("words")  # of wrap()
        inner &= not is_users(file)  # a model's own code, called by DDP, waits for nobody
        frame = frame.f_back
    return line, waits, reads


class noted_end:
    """Around a script: note how it ends."""

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        good = error is None or (kind is SystemExit and not error.code)
        if kind is SystemExit and error.__context__:  # mp.spawn ends a failed process so
            error = error.__context__
            kind, trace = type(error), error.__traceback__
        line = "?"
        while trace is not None:
            file = trace.tb_frame.f_code.co_filename
            line = f"{short(file)}:{trace.tb_lineno}" if is_users(file) else line
            trace = trace.tb_next
        RECORD.ended.set()
        note(
            "end",
            outside=outside(),
            line=line,
            error="" if good else f"{kind.__name__}: {error}",
            frozen=frozen(),
        )


def of(events, *kinds):
    return [event for event in events if event["kind"] in kinds]


def read(folder):
    """The groups of processes: [[{"events": [...], "passes": [...]}, one for each rank]].

    A script may call mp.spawn more than once: the second process that is rank 0 is of a new group.
    """
    groups, others = [], []
    for path in sorted(Path(folder).glob("*.jsonl"), key=lambda path: path.stat().st_mtime):
        lines = path.read_text().splitlines()
        events = [json.loads(line) for line in lines if line.endswith("}")]  # the last may be cut
        events = [event | {"place": place} for place, event in enumerate(events)]
        process = {"events": events, "passes": passes_of(events)}
        others.append(process)
        for rank in {group["rank"] for group in of(events, "group")}:
            group = next((group for group in groups if rank not in group), None)
            if group is None:
                groups.append(group := {})
            group[rank] = process
    return [[group[rank] for rank in sorted(group)] for group in groups] or [others]


def passes_of(events):
    """Each pass over a loader: its items, and what was done with them."""
    passes, now = {}, None
    for event in events:
        if event["kind"] == "pass":
            new = {"items": [], "read": 0, "trained": False, "validated": False, "cut": False}
            passes[event["number"]] = event | new
        elif event["kind"] == "cut" and event["number"] in passes:
            passes[event["number"]]["cut"] = True
        elif event["kind"] == "batch" and event["number"] in passes:
            now = passes[event["number"]]
            now["items"] += map(tuple, event["items"])
            now["read"] += 1
            now["last"] = event["place"]
            now["validated"] |= not event["grad"]
        elif now:
            now["trained"] |= event["kind"] == "backward"
            now["validated"] |= event["kind"] == "forward" and not event["trains"]
    for one in passes.values():
        one["validated"] &= not one["trained"]
        one["whole"] = one["read"] == one["batches"]
    return [one for one in passes.values() if one["read"]]


# ---- 3. What is judged. A judge is asked about a row, the same event or pass in each process by
# rank, or about all processes. It returns (line, text), or nothing. Its docstring names the
# mistake's place in docs/bugs.md, and says when it is certain, or why it is a hint.


def rows(run, kind):
    """The n-th events of a kind in all processes, side by side."""
    return zip(*(of(process["events"], kind) for process in run), strict=False)


def rounds(run, what):
    """The same pass over a loader in all processes, side by side."""
    tables = []
    for process in run:
        tables.append({})
        for one in process["passes"]:
            count = sum(line == one["line"] for line, _ in tables[-1])
            tables[-1][one["line"], count] = one
    found = [[table.get(key) for table in tables] for key in tables[0]]
    return [row for row in found if all(one and one[what] for one in row)]


def apart(run):
    """The step before the first at which a weight of a wrapped model differs, with its name.

    Nothing if the weights are the same again at the end: they may part for some steps on purpose.
    """
    before = {}
    steps = [row for row in rows(run, "step") if row[0]["weights"]]
    if not steps or not differ(steps[-1], "weights"):
        return None
    for row in steps:
        for name, value in row[0]["weights"].items():
            model, _, name_there = name.partition(".")
            if any(event["weights"].get(name, value) != value for event in row):
                cause = before.get(model, row)
                return [e | {"name": name_there, "order": e["order"][model]} for e in cause]
        before |= dict.fromkeys(row[0]["order"], row)


def differ(row, fact):
    return any(event[fact] != row[0][fact] for event in row)


def noted(run, kind):
    return any(of(process["events"], kind) for process in run)


def each(row, fact):
    """ "719 and 718" """
    return " and ".join(f"{event[fact]}" for event in row)


# Asked about a pass in which a model was trained or validated.


def same_rank(row, run):
    ranks = {one["rank"] for one in row if one["num_replicas"] == len(run)}
    return bool(ranks) and len(ranks) < len(row)


def names(one, parts=1):
    """The names of a pass's items; 2 parts: with labels."""
    return [item[:parts] for item in one["items"]]


def reads_all(row, run):
    """every-process-reads-all-images: a hint, for a small set may be meant to be read whole"""
    sets = [{*names(one, parts=2)} for one in row]
    alike = len(set.intersection(*sets)) > 0.9 * len(set.union(*sets))
    if alike and row[0]["whole"] and row[0]["length"] and not same_rank(row, run):
        return row[0]["made"], f"each process reads all {len(sets[0])} items: there is no sampler"


def reads_the_stream(row, run):
    """every-process-reads-the-whole-stream: certain where its batches are not all alike"""
    several = len({*names(row[0])}) > 1
    if several and row[0]["length"] is None and not differ(row, "items"):
        return row[0]["made"], "each process reads the whole stream: __iter__ must give it a part"


def rank_in_sampler(row, run):
    """local-rank-in-the-sampler: certain where samplers for all processes share a rank"""
    if same_rank(row, run):
        return row[0]["sampler"], f"the processes' samplers have rank {each(row, 'rank')}"


def same_order(row, run):
    """set_epoch-is-forgotten: certain where a shuffled order of 8 items or more comes again"""
    passes = [p for p in run[0]["passes"] if p["line"] == row[0]["line"] and p["trained"]]
    before = passes[passes.index(row[0]) - 1] if row[0] != passes[0] else None
    few = len(row[0]["items"]) < 8  # their order may be the same by chance
    if before and row[0]["shuffle"] and not few and names(row[0]) == names(before):
        text = "the order is that of the epoch before: call set_epoch(epoch) of its sampler"
        return row[0]["line"], text


def sampler_without_seed(row, run):
    """the-sampler-does-not-get-the-seed: a hint, for a single run needs no other seed"""
    seeds = [event["seed"] for process in run for event in of(process["events"], "seed")]
    if row[0]["shuffle"] and row[0]["seed"] == 0 and seeds and min(seeds) >= len(run):
        return row[0]["sampler"], f"the seed is {min(seeds)}, that of the sampler is always 0"


def all_cores(row, run):
    """all-cores-for-each-process: a hint, for such workers may have little to do"""
    if all(one["workers"] >= os.cpu_count() > 1 for one in row):
        workers = sum(one["workers"] for one in row)
        return row[0]["made"], f"{workers} workers for one loader, and {os.cpu_count()} cores"


def uneven_parts(row, run):
    """one-process-has-one-step-more: a hint, for a loop may end before; certain in hang()"""
    if row[0]["length"] and differ(row, "length") and not noted(run, "join"):
        text = f"the processes have {each(row, 'length')} items, {each(row, 'batches')} batches"
        return row[0]["made"], f"{text}: one with a batch more waits for the others in vain"


def own_split(row, run):
    """each-process-makes-its-own-split: certain, for in one process no item is in both parts"""
    trained, validated = ([items_of(p, what) for p in run] for what in ("trained", "validated"))
    both = set.union(*trained) & set.union(*validated)
    if both and not any(a & b for a, b in zip(trained, validated, strict=True)):
        return row[0]["made"], f"{len(both)} items that one process validates, another trains with"


def items_of(process, what):
    return {item for one in process["passes"] if one[what] for item in one["items"]}


def padding(row, also=""):
    items = [name for one in row for name in names(one)]
    twice, padding, size = len(items) - len({*items}), row[0]["padding"], row[0]["size"]
    known = all(one["cut"] or (one["whole"] and twice == padding) for one in row)
    if known and padding > 0 and not row[0]["trims"]:
        text = f"the sampler repeats {padding} of {size} items, for equal parts"
        return row[0]["sampler"], text + also


def padded(row, run):
    """padded-validation: certain where no items are gathered, so that none can be cut off"""
    return None if gathered(row[0], run[0]) else padding(row)


def padded_and_gathered(row, run):
    """padded-validation: a hint, for items are gathered, and may be cut to the right number"""
    return padding(row, ", unless they are cut off again") if gathered(row[0], run[0]) else None


REDUCING = {"all_reduce", "reduce", "gather", "all_gather", "all_gather_into_tensor"}
REDUCING |= {"all_gather_object", "gather_object"}


def called(one, process):
    """The names of the collectives of a validation and after it, until the next step."""
    events = process["events"]
    steps = (event["place"] for event in of(events[one["last"] :], "step"))
    until = next(steps, len(events))
    return {event["name"] for event in of(events[one["place"] : until], "collective")}


def added_up(one, process):
    """Whether numbers of all processes came together."""
    return bool(called(one, process) & REDUCING)


def gathered(one, process):
    return any("gather" in name for name in called(one, process))


def one_part(row, run):
    """only-one-part-is-counted: a hint, for rank 0's part may be meant as a sample"""
    whole = all(one["whole"] for one in row) and all(of(p["events"], "end") for p in run)
    overlap = len(set.intersection(*[{*names(one)} for one in row]))
    if whole and overlap <= max(0, row[0]["padding"]) and not added_up(row[0], run[0]):
        return row[0]["line"], "each process validates a part, and nothing is added up"


def counted_twice(row, run):
    """every-process-validates-all-images: certain where the script prints more than 100 %"""
    return all_validated(row, run) if noted(run, "above 100 %") else None


def all_validated(row, run):
    """every-process-validates-all-images: else a hint, for a mean of the same numbers is right"""
    if row[0]["whole"] and not differ(row, "items") and added_up(row[0], run[0]):
        text = f"each process validates all {len(row[0]['items'])} items: a sum counts them"
        return row[0]["made"], f"{text} {len(run)} times"


# Asked about a step, or about the step before the first at which a wrapped model's weights differ.


def same_seed(row, run):
    """the-same-seed-everywhere: a hint, for what is drawn may be meant to be the same"""
    if not differ(row, "random"):
        seeds = of(run[0]["events"], "seed") or row
        return seeds[-1]["line"], "all processes draw the same random numbers"


# In the order of a step's calls: F and f are forward passes of DDP, f those in no_sync(); p is one
# of the plain model, B a backward. The line is that of the letter in brackets.
WRONG_ORDERS = {
    "(p)": ("the-plain-model-is-trained", "DDP's model is not called: nothing is averaged"),
    "^[^F]*(f)[^F]*$": ("no_sync-is-one-off", "all parts of a step are in no_sync()"),
    "F[^F]*(f)[^F]*$": ("no_sync-around-backward-alone", "the last forward pass is in no_sync()"),
    "FFB(B)": ("two-forwards-then-two-backwards", "this second backward's gradients stay local"),
}


def wrong_order(row, run):
    """training: the place that WRONG_ORDERS names; certain, for the weights differ afterwards"""
    letters, lines = zip(*row[0]["order"], strict=True) if row[0]["order"] else ("", "")
    for pattern, (place, text) in WRONG_ORDERS.items():
        if found := re.search(pattern, "".join(letters)):
            return lines[found.start(1)], text, place


def one_resumes(row, run):
    """only-rank-0-resumes: certain, for the weights differ, and processes load more than others"""
    loads = [of(process["events"], "load") for process in run]
    if len({*map(len, loads)}) > 1:
        rank = min(range(len(run)), key=lambda rank: len(loads[rank]))
        return max(loads, key=len)[-1]["line"], f"rank {rank} does not load it"


def unfrozen(row, run):
    """unfrozen-after-wrapping: certain, for the weight that differs was frozen then"""
    for wrap in of(run[0]["events"], "wrap"):
        if row[0]["name"] in wrap["frozen"]:
            text = f"{row[0]['name']} was frozen when DDP wrapped it: its gradients"
            return wrap["line"], f"{text} are not averaged"


def own_decision(row, run):
    """each-process-lowers-its-own-learning-rate: certain where their numbers differ"""
    if differ(row, "value"):
        return row[0]["line"], f"each process decides by its own number: {each(row, 'value')}"


def read_too_early(run):
    """read-before-rank-0-has-saved: certain where nothing that waits is between the two"""

    def calls(events, event):  # in which it has met the others
        meets = ("group", "wrap", "collective", "backward")
        return len(of(events[: event["place"]], *meets))

    records = [process["events"] for process in run]
    pairs = [(a, b) for a in records for b in records if a is not b]
    for writer, reader, save in ((a, b, save) for a, b in pairs for save in of(a, "save")):
        for load in of(reader, "load"):
            same = save["path"] and load["path"] == save["path"]
            if same and calls(writer, save) == calls(reader, load):
                text = f"it may be read before another process has saved it ({save['line']})"
                return load["line"], f"{text}: no barrier() is between"


def weights_differ(row, run):
    """the-plain-model-is-trained: certain, for the weights differ; the cause is not known"""
    others = any(judge(row, run) for judge in CAUSES) or noted(run, "gradient")
    late = read_too_early(run) or any(differ(r, "lr") for r in rows(run, "step"))
    if not others and not late:
        return row[0]["line"], f"from here on {row[0]['name']} differs between the processes"


CAUSES = [wrong_order, one_resumes, unfrozen]

# Asked about single events.


def reduced_loss(row, run):
    """the-loss-is-reduced-before-backward: or all_reduce-of-a-ratios-sums, of several numbers.

    Certain where the gradient of what was reduced is not 1: that of each process's own part is.
    """
    text = "backward() goes through what was reduced here, as if it had not been"
    place = [] if row[0]["one"] else ["all_reduce-of-a-ratios-sums"]
    return row[0]["line"], text, *place


def own_count(means, run):
    """a-mean-over-what-each-process-counts: where most differ; a last batch may be shorter"""
    others = [row for row in means if differ(row, "counted")]
    if len(others) > len(means) / 2:
        text = f"the means of the loss are over {each(others[0], 'counted')} items"
        return others[0][0]["line"], text


def clipped_scaled(row, run):
    """clipped-before-unscale_: certain between scale() and unscale_() of a scaler that is on"""
    if row[0]["scaled"]:
        return row[0]["line"], "the gradients are still scaled: call scaler.unscale_() first"


def own_schedule(row, run):
    """a-schedule-counted-in-one-processs-images: a hint, for such a length may be meant"""
    rates = of(run[0]["events"], "rate")
    done = max([e["done"] for e in rates if e["number"] == row[0]["number"]], default=0)
    length, ended = row[0]["length"], [event["error"] for event in of(run[0]["events"], "end")]
    if done > 9 and ended == [""] and abs(length / done / len(run) - 1) < 0.05:
        return row[0]["line"], f"the schedule has {length} steps, and {done} were done"


def own_batchnorm(row, run):
    """batchnorm-statistics-of-ones-own: a hint, for rank 0's may be the only ones that count"""
    if differ(row, "sums") and not noted(run, "synced"):
        name = next(k for k in row[0]["sums"] if len({str(e["sums"].get(k)) for e in row}) > 1)
        return row[0]["line"], f"{name} differs between the processes when they validate"


def wrapped_saved(row, run):
    """the-wrapped-model-is-saved: a hint, for what loads it may be wrapped too"""
    if row[0]["of_wrapped"]:
        return row[0]["line"], 'the keys begin with "module.": save the plain model'


# Asked about the whole run.


def all_save(run):
    """every-process-saves: or local-rank-0-is-taken-for-rank-0; certain, for it is one path"""
    writers = collections.defaultdict(dict)
    for process in run:
        local = of(process["events"], "group")[0]["local"]
        for save in of(process["events"], "save"):
            writers[save["path"]][id(process)] = (local, save["line"])
    for path, by in writers.items():
        locals_, lines = zip(*by.values(), strict=True)
        text = f"{len(by)} processes write {os.path.basename(path)}" if path else ""
        if path and len(by) > 1 and {*locals_} == {"0"}:
            return lines[0], f"{text}, as local rank 0", "local-rank-0-is-taken-for-rank-0"
        if path and len(by) > 1:
            return lines[0], text


def ends(run):
    return [(of(process["events"], "end") or [{"error": None}])[-1] for process in run]


def stops_early(run):
    """rank-0-stops-early: certain where one failed for want of another, which has ended well"""
    good = [rank for rank, end in enumerate(ends(run)) if end["error"] == ""]
    for end in ends(run):
        if good and re.search("closed by peer|reset by peer", end["error"] or ""):
            return end["line"], f"it waits here for rank {good[0]}, which has ended its training"


def frozen_late(run):
    """frozen-after-wrapping: certain, for DDP's own error says so, and weights were frozen"""
    for end in ends(run):
        if "finished reduction in the prior" in (end["error"] or ""):
            wrap = of(run[0]["events"], "wrap")[-1]
            late = {*end["frozen"]} - {*wrap["frozen"]}
            return late and (wrap["line"], f"frozen after the wrapping: {', '.join(sorted(late))}")


def standing(run):
    """(the last event of each, those that wait for others, all in words)"""
    last, said = [process["events"][-1] for process in run], []
    waiting = [event for event in last if event["kind"] == "stands" and event["waits"]]
    for rank, event in enumerate(last):
        doing = f"waits in {event['waits']}" if event in waiting else "is"
        ended = event["kind"] == "end"
        said.append(f"rank {rank} " + ("has ended" if ended else f"{doing} at {event['line']}"))
    return last, waiting, ", ".join(said)


def one_prepares(run):
    """rank-0-prepares-for-longer-than-the-timeout: a hint, for it may be done in time"""
    last, waiting, said = standing(run)
    if waiting and any(event["kind"] == "stands" and event not in waiting for event in last):
        return waiting[0]["line"], f"{said}: will the timeout be longer?"


def hang(run):
    """it-hangs-or-fails-late: or the place of a mistake that explains it.

    Certain where all that have not ended wait for others, at several places.
    """
    last, waiting, said = standing(run)
    if not waiting or one_prepares(run) or any(end["error"] for end in ends(run)):
        return None
    waiting.sort(key=lambda event: event["waits"] not in COLLECTIVES)
    forwards = [of(process["events"], "forward")[-1:] for process in run]
    alone = [e for e, f in zip(last, forwards, strict=True) if f and not f[0]["trains"]]
    alone = [event for event in alone if event.get("waits") == FORWARD]
    if alone:
        return alone[0]["line"], said, "the-wrapped-model-on-rank-0-alone"
    if any(uneven_parts(row, run) for row in rounds(run, "trained")):
        return waiting[0]["line"], said, "one-process-has-one-step-more"
    if "backward" in {event["waits"] for event in waiting}:
        return waiting[0]["line"], said, "a-branch-that-depends-on-a-processs-own-data"
    return waiting[0]["line"], said, "all_reduce-on-rank-0-alone"


# Asked about the whole run, and another one.


def batch_per_process(run, alone):
    """the-batch-size-is-per-process: a hint, for the learning rate may be chosen for it"""
    for row, (one, *_) in zip(rounds(run, "trained"), rounds(alone, "trained"), strict=False):
        step, single = (len(p["items"]) // p["read"] for p in (row[0], one))
        if step * len(run) > 1.5 * single:
            text = f"a step takes {step * len(run)} items; with one process {single}"
            return row[0]["made"], text


def epoch_repeated(run, again):
    """the-resumed-run-repeats-an-epoch: certain where the last order of items comes again"""
    before = [names(one) for one in run[0]["passes"] if one["trained"]]
    after = [one for one in again[0]["passes"] if one["trained"]]
    if after and before[1:] and before[0] != names(after[0]) == before[-1]:
        return after[0]["line"], "the run that resumes begins with the epoch that was done"


# What each judge is asked about: passes in which a model was trained or validated, the step of
# apart(), all means of a line, the n-th event of a kind in all processes, an event of rank 0, or
# the whole run.
MISTAKES = {
    "trained": [reads_the_stream, rank_in_sampler, same_order],
    "validated": [own_split, padded, counted_twice],
    "apart": [*CAUSES, weights_differ],
    "plateau": [own_decision],
    "rank 0: gradient": [reduced_loss],
    "rank 0: clip": [clipped_scaled],
    "run": [read_too_early, all_save, stops_early, frozen_late, hang],
}
HINTS = {  # often wrong, and may be meant
    "run": [one_prepares],
    "trained": [reads_all, sampler_without_seed, all_cores, uneven_parts],
    "validated": [padded_and_gathered, one_part, all_validated],
    "step": [same_seed],
    "mean": [own_count],
    "buffers": [own_batchnorm],
    "rank 0: schedule": [own_schedule],
    "rank 0: save": [wrapped_saved],
}


def asked(run, about):
    if about in ("trained", "validated"):
        return rounds(run, about)
    if about == "apart":
        return filter(None, [apart(run)])
    if about.startswith("rank 0: "):
        return [[event] for event in of(run[0]["events"], about.removeprefix("rank 0: "))]
    if about == "mean":
        lines = collections.defaultdict(list)
        for row in rows(run, about):
            lines[row[0]["line"]].append(row)
        return lines.values()
    return rows(run, about)


def answers(run, table):
    """What the judges of a table say of a run: (judge, line, text, and a place of its own)."""
    for about, judges in table.items():
        if noted(run, "part") and about != "run" and "rank 0" not in about:
            continue  # some processes may differ on purpose, others read the same
        for judge in judges:
            asks = [(run,)] if about == "run" else [(row, run) for row in asked(run, about)]
            for answer in filter(None, (judge(*what) for what in asks)):
                yield judge, *answer


def findings(groups, alone=None, again=None):
    """[(certain, line, text, place in docs/bugs.md)], each once, mistakes first."""
    said = []
    for certain, table in ((True, MISTAKES), (False, HINTS)):
        for run in (run for run in groups if len(run) > 1 and noted(run, "group")):
            said += [(certain, *answer) for answer in answers(run, table)]
    for certain, judge, other in ((False, batch_per_process, alone), (True, epoch_repeated, again)):
        answer = other and judge(groups[0], other[0])
        said += [(certain, judge, *answer)] if answer else []
    once = {}
    for certain, judge, line, text, *place in said:
        place = f"docs/bugs.md#{place[0] if place else judge.__doc__.partition(':')[0]}"
        once.setdefault((place, line), (certain, line, text, place))
    return sorted(once.values(), key=lambda finding: not finding[0])


# ---- 4. What is told


def tell(groups, found, code, seconds, compared=(), file=None):
    """Print the report, and write it to a file as JSON; returns the exit code.

    It is 1 for a mistake or a script that fails, 2 where there was nothing to look at. code: the
    launcher's; compared: what other runs have shown.
    """
    run = groups[0]
    print()
    failed = []
    for rank, end in ((rank, end) for group in groups for rank, end in enumerate(ends(group))):
        if end["error"]:
            failed.append(f"{end['line']}  rank {rank} failed: {end['error'].splitlines()[0][:99]}")
            print("", failed[-1])
    # gloo may abort while Python ends: that is not the script's.
    well = not code or (
        bool(run) and all(end["error"] == "" for group in groups for end in ends(group))
    )
    if not well:
        print(f" it ended with exit code {code}: what it did not come to was not looked at")
    unseen = not_seen(run)
    if unseen:
        print(f" {unseen}")
    mistakes = [one for one in found if one[0]]
    print(f" mistakes: {len(mistakes)}, hints: {len(found) - len(mistakes)}")
    for certain, line, text, place in found:
        print(f" {line}  {'' if certain else 'hint: '}{text}  → {place}")
    if found:
        print(" in the diffs of that page - is right, + is the mistake")
    faults = {
        event["error"] for group in groups for one in group for event in of(one["events"], "fault")
    }
    for fault in sorted(faults):
        print(f" the doctor failed, and may have missed something: {fault}")
    if run:
        steps, calls = (len(of(run[0]["events"], kind)) for kind in ("step", "collective"))
        seen = f"{steps} steps, {len(run[0]['passes'])} passes over loaders, {calls} collectives"
        print(f" looked at {len(run)} processes, each: {seen}; {seconds:.0f} s")
        for line in compared:
            print(f" {line}")
        if steps and len(rounds(run, "trained")) == 1:
            print(" one epoch was seen: give two, and the orders of their items are compared")
    if file:
        keys = ("certain", "line", "text", "place")
        report = {"found": [dict(zip(keys, one, strict=True)) for one in found], "failed": failed}
        Path(file).write_text(json.dumps(report, indent=1) + "\n")
    return 1 if mistakes or not well else 2 if unseen else 0


def not_seen(run):
    """Why a run shows nothing of a training, or of a validation alone; or nothing."""
    if not run:
        return "no process of the script began to run: there is nothing to compare"
    if not noted(run, "group"):
        return "the script joins no process group of torch: there is nothing to compare"
    if noted(run, "step"):
        return None
    for event in of(run[0]["events"], "pass"):
        if event["batches"] == 0:
            return f"{event['made']}  this loader gives no batch: has it fewer items than a batch?"
    if not any(one["validated"] for one in run[0]["passes"]):
        return "no step of an optimizer was seen: does a checkpoint leave nothing to train?"
    return None


def other_runs(args, run, again, alone):
    """A line about each other run, which may have nothing to find."""
    if args.nodes > 1:
        yield f"played {args.nodes} machines: the local ranks began at 0 on each"
    if alone:
        steps = [len(of(one[0]["events"], "step")) for one in (run, alone[0])]
        yield "compared with one process: {} steps here, {} there".format(*steps)
    if again:
        loads = any(of(process["events"], "load") for process in again[0])
        began = "it loaded a file" if loads else "torch.load() was not called: it began anew"
        yield f"started again: {began}"


def examine(args, processes, folder):
    """(groups, exit code): the script once on so many processes, to its end or until it hangs."""
    os.mkdir(folder)
    settings = {"folder": folder, "script": os.path.abspath(args.script)}
    settings |= {
        "began": args.began,
        "nodes": args.nodes,
        "patience": args.patience,
        "steps": args.steps,
    }
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += [f"--nproc-per-node={processes}"]
    if args.by:
        launcher = shlex.split(args.by)
    elif "spawn(" in Path(args.script).read_text(errors="replace"):  # it starts them itself
        launcher = [sys.executable]
    command = [*launcher, os.path.abspath(__file__), os.path.abspath(args.script), *args.flags]
    job = subprocess.Popen(command, env=os.environ | {"DOCTOR": json.dumps(settings)})
    try:
        while job.poll() is None:
            time.sleep(0.5)
            last = [e for e in last_events(folder).values() if not e.get("outside")]
            still = all(event["kind"] in ("stands", "end") for event in last)
            places = {event["line"] for event in last}  # one place: it may be slow there
            if still and len(places) > 1 and any(event.get("waits") for event in last):
                stop(folder)
    finally:
        stop(folder)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(60)
        job.kill()
    return read(folder), job.wait()


def last_events(folder):
    """{process id: its last event}"""
    found = {}
    for path in Path(folder).glob("*.jsonl"):
        if not path.stat().st_size:
            continue
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 20_000))
            line = file.read().splitlines()[-1]
        whole = line.startswith(b"{") and line.endswith(b"}")  # a step's may be longer
        found[int(path.stem)] = json.loads(line) if whole else {"kind": "?", "line": "?"}
    return found


def stop(folder):
    for pid, event in last_events(folder).items():
        if event["kind"] != "end":
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def be_examined():
    """In a process of the script: wrap, then run it as if it was started alone."""
    sys.argv = sys.argv[1:]
    if RECORD.nodes > 1:  # play machines: on each of them the numbers begin at 0
        size = int(os.environ["WORLD_SIZE"]) // RECORD.nodes
        local = {"LOCAL_WORLD_SIZE": size, "LOCAL_RANK": int(os.environ["RANK"]) % size}
        os.environ |= {name: str(number) for name, number in local.items()}
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    install()
    RECORD.open()
    with noted_end():
        runpy.run_path(sys.argv[0], run_name="__main__")


def main():
    about = "Run a training script on two processes, and name the mistakes that it makes."
    more = "Give the script little data and two epochs, and a folder without its checkpoints."
    more += f" The mistakes: {Path(__file__).parent / 'docs/bugs.md'}; more: docs/doctor.md."
    parser = argparse.ArgumentParser(description=about, epilog=more)
    add = parser.add_argument
    add("-n", type=int, default=2, metavar="N", help="how many processes (default: 2)")
    add("--nodes", type=int, default=1, metavar="N", help="play so many machines with them")
    add("--against-one", action="store_true", help="run it with one process too, and compare")
    add("--twice", action="store_true", help="start it again when it has ended: does it resume?")
    add("--steps", type=int, metavar="N", help="end each pass over a loader after N batches")
    add("--patience", type=int, default=15, metavar="S", help="a hang stands still so long (15)")
    add("--keep", action="store_true", help="leave the files that the script saves with torch.save")
    add("--json", metavar="FILE", help="write what was found into a file, too")
    add("--by", metavar="COMMAND", help="start it by another launcher, such as 'srun -n2 python'")
    add("script", help="your script")
    add("flags", nargs=argparse.REMAINDER, help="the script's own flags, after the doctor's")
    args = parser.parse_args()
    if not os.path.isfile(args.script):
        parser.error(f"{args.script} is no file")
    text = Path(args.script).read_text(errors="replace")
    for flag in "--nodes --against-one --twice --steps --patience --json --by".split():
        if flag in args.flags and not re.search(flag[2:].replace("-", "[-_]") + r"\b", text):
            parser.error(f"put {flag} before {args.script}: it is a flag of the doctor")
    if not args.by and not importlib.util.find_spec("torch"):  # --by may start another Python
        parser.exit(2, f"doctor.py: {sys.executable} has no torch: use the Python of your script\n")
    began, args.began = time.monotonic(), time.time()
    with tempfile.TemporaryDirectory() as folder:
        groups, code = examine(args, args.n, f"{folder}/run")
        again, _ = examine(args, args.n, f"{folder}/again") if args.twice else (None, 0)
        alone, _ = examine(args, 1, f"{folder}/alone") if args.against_one else (None, 0)
        saved = [] if args.keep else put_back(folder)
    found = findings(groups, alone, again)
    compared = [*other_runs(args, groups[0], again, alone)]
    if saved:
        compared.append(f"put back, or removed if new: {', '.join(saved)} (--keep leaves them)")
    sys.exit(tell(groups, found, code, time.monotonic() - began, compared, args.json))


if __name__ == "__main__":
    if "DOCTOR" in os.environ:
        import doctor  # by this name: processes that the script starts look for it there

        doctor.be_examined()
    else:
        main()
