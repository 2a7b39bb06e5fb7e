"""Steps of optimizers, and what belongs to them: clipping, scaling, schedules, random states."""

import hashlib
import sys
import weakref

from ..events import checksum, is_plain, note
from . import look_safely, wrap
from .models import NAMES, ORDERS, validated

OPTIMIZERS = []  # weak references, in the order in which they were made
stepping = set()  # optimizers in their step, which may call that of their parent class
zeroed = {}  # id of an optimizer: calls of zero_grad() since its last step
# id of an optimizer: (the weights of DDP's models that it has, their versions after its last step)
versions = {}
scaled = []  # the GradScaler whose scale() was called since the last unscale_(), if it is on
# What gradient_of() knows until the next backward(): "at", {address of a gradient: whose}, and
# "whole", how many numbers all gradients have
gradients = {}


def install(torch):
    from torch.optim import optimizer as optimizers

    optimizers.register_optimizer_step_pre_hook(lambda *args: look_safely(step, torch, *args))
    optimizers.register_optimizer_step_post_hook(lambda *args: look_safely(leave_step, *args))
    wrap(torch.optim.Optimizer, "__init__", after=made)
    wrap(torch.optim.Optimizer, "zero_grad", before=zero)
    wrap(torch.nn.Module, "zero_grad", before=zero_of_model)
    wrap(torch.distributed, "destroy_process_group", before=leave_group)
    wrap(torch.autograd, "backward", before=lambda *_, **__: gradients.clear())
    wrap(torch.nn.utils, "clip_grad_norm_", before=clip)
    wrap(torch.nn.utils, "clip_grad_value_", before=lambda *_, **__: clip())
    wrap_scaler(torch.amp.GradScaler)
    wrap_schedules(torch.optim.lr_scheduler)
    wrap(torch, "manual_seed", before=lambda seed: note("seed", seed=int(seed)))


def step(torch, optimizer, *_):
    """Weights before a step: after it, some optimizers have still to send them."""
    if optimizer in stepping:
        return
    stepping.add(optimizer)
    optimizer.doctors_steps = getattr(optimizer, "doctors_steps", 0) + 1
    looks = is_looked_at(optimizer.doctors_steps)
    if looks:
        validated.clear()  # each is noted anew: this step may have changed it
    weights = [w for group in optimizer.param_groups for w in group["params"]]
    wrapped = wrapped_by(optimizer)
    own = [(i, w) for i, w in enumerate(weights) if id(w) not in NAMES and is_plain(w)]
    divided = [(i, w) for i, w in enumerate(weights) if not is_plain(w)]
    models = {model for model, *_ in wrapped}
    note(
        "step",
        optimizer=register(optimizer),
        weights={f"{model}.{name}": checksum(w) for model, name, w in wrapped if looks},
        own={f"{i} {[*w.shape]}": checksum(w) for i, w in own if looks},
        parts={f"{i} {part_of(w)}": checksum(w.to_local()) for i, w in divided if looks},
        ours=len(own),
        order={str(model): ORDERS.pop(model, []) for model in models},
        lr=[rate_of(group) for group in optimizer.param_groups],
        random=random_states(torch),
        zeroed=zeroed.get(id(optimizer), 0),
        squares=squares(torch, weights) if optimizer.doctors_steps <= 3 else None,
    )
    zeroed[id(optimizer)] = 0
    gradients.clear()


def rate_of(group):
    """None where an optimizer has no rate, or finds it itself, as Adafactor does."""
    return None if group.get("lr") is None else float(group["lr"])


def is_looked_at(step):
    """Sums of all weights take time: they are made at first in each step, then more rarely."""
    return step <= 20 or step % (5 if step <= 50 else 50) == 0


def squares(torch, weights):
    """The sum of all squared gradients: [of plain weights, of what lies here of divided ones]."""
    sums = [0.0, 0.0]
    for weight in weights:
        if weight.grad is not None and weight.grad.layout is torch.strided:
            mine = weight.grad.detach()
            mine = mine if is_plain(mine) else mine.to_local()
            sums[not is_plain(weight)] += mine.abs().double().square().sum().item()
    return sums


def clip(parameters=None, max_norm=None, *args, **kwargs):
    note("clip", scaled=bool(scaled), norm=None if max_norm is None else float(max_norm))


def part_of(weight):
    """Which part of a divided weight this process has: the same words for the same part."""
    mesh, size = weight.device_mesh, [*weight.shape]
    names = mesh.mesh_dim_names or range(mesh.ndim)
    axes = zip(names, mesh.shape, mesh.get_coordinate() or (), weight.placements, strict=False)
    return f"{size} {[(name, at) for name, n, at, p in axes if n > 1 and not p.is_replicate()]}"


def leave_step(optimizer, *_):
    stepping.discard(optimizer)
    if wrapped := wrapped_by(optimizer):
        versions[id(optimizer)] = wrapped, versions_of(wrapped)


def leave_group(group=None):
    if group is None:  # of all processes
        look_last()


def wrapped_by(optimizer):
    """[(number of its model, name, weight)], of the weights that DDP has wrapped."""
    weights = (w for group in optimizer.param_groups for w in group["params"])
    return [(*NAMES[id(w)], w) for w in weights if id(w) in NAMES]


def versions_of(wrapped):
    """How often these weights were changed in place."""
    return sum(w._version for *_, w in wrapped)


def look_last():
    """Weights after the last step: no step comes in which they would be looked at.

    A process may have loaded others into its own since: these are left out.
    """
    weights = {}
    for wrapped, version in versions.values():
        if version == versions_of(wrapped):
            weights |= {f"{model}.{name}": checksum(w) for model, name, w in wrapped}
    versions.clear()
    if weights:
        note("last", weights=weights, order={})


def register(optimizer):
    """Its number among the optimizers of this process."""
    known = [reference() for reference in OPTIMIZERS]
    if optimizer not in known:
        known.append(optimizer)
        OPTIMIZERS.append(weakref.ref(optimizer))
    return known.index(optimizer)


def made(_, self, *args, **kwargs):
    zeroed[id(self)] = 0
    register(self)


def zero(self, *args, **kwargs):
    zeroed[id(self)] = zeroed.get(id(self), 0) + 1


def zero_of_model(self, *args, **kwargs):
    """It counts for the optimizers of its weights: another model may be one rank's alone."""
    mine = {id(weight) for weight in self.parameters()}
    for optimizer in filter(None, (reference() for reference in OPTIMIZERS)):
        if any(id(w) in mine for group in optimizer.param_groups for w in group["params"]):
            zero(optimizer)


def random_states(torch):
    """{library: a short name of the state of its random numbers}"""
    states = {"torch": torch.get_rng_state().numpy().tobytes()}
    if "random" in sys.modules:
        _, numbers, other = sys.modules["random"].getstate()  # other: None or a float
        states["random"] = f"{hash(numbers)} {other}".encode()  # None's hash is each process's own
    if "numpy" in sys.modules:
        state = sys.modules["numpy"].random.get_state(legacy=False)["state"]
        states["numpy"] = state["key"].tobytes() + str(state["pos"]).encode()
    return {name: hashlib.md5(state).hexdigest() for name, state in states.items()}


def gradient_of(tensor):
    """(kind, numbers of optimizers): whether it is the gradient of a weight that they have.

    "wrapped" if DDP knows the weight and has averaged the gradient already, "own" if not, else
    (None, []). What is as long as all gradients is taken for them, flattened: "own", of all.
    """
    if not gradients:
        weights = {}  # several may have one: an optimizer may call another one
        for number, ref in enumerate(OPTIMIZERS):
            for group in optimizer.param_groups if (optimizer := ref()) else ():
                for w in group["params"]:
                    weights.setdefault(id(w), (w, []))[1].append(number)
        gradients["at"] = {
            w.grad.data_ptr(): ("wrapped" if id(w) in NAMES else "own", numbers)
            for w, numbers in weights.values()
            if w.grad is not None and is_plain(w.grad)
        }
        gradients["whole"] = sum(w.numel() for w, _ in weights.values())
    if not gradients["at"]:
        return None, []
    whole = tensor.numel() == gradients["whole"] and tensor.numel() > 1
    of_all = ("own", [*range(len(OPTIMIZERS))]) if whole else (None, [])
    return gradients["at"].get(tensor.data_ptr(), of_all)


def wrap_scaler(scaler):
    def new(_, self, *args, enabled=True, **kwargs):
        self.doctors_enabled = enabled  # as it was meant: without a GPU torch turns it off

    def scale(self, outputs):
        scaled[:] = [self] if self.doctors_enabled else []

    wrap(scaler, "__init__", after=new)
    wrap(scaler, "scale", before=scale)
    wrap(scaler, "unscale_", before=lambda *_: scaled.clear())
    wrap(scaler, "update", before=lambda *_: scaled.clear())


def wrap_schedules(rates):
    schedules = []

    def new(_, self, *args, **kwargs):
        length = getattr(self, "T_max", None) or getattr(self, "total_steps", None)
        schedules.append(self)
        if length:
            note("schedule", number=len(schedules) - 1, length=length)

    def rate(_, self, *args, **kwargs):
        if self in schedules:
            note("rate", number=schedules.index(self), done=self.last_epoch)

    def plateau(self, metrics, *args, **kwargs):
        note("plateau", value=str(float(metrics)))

    wrap(rates.LRScheduler, "__init__", after=new)
    wrap(rates.LRScheduler, "step", after=rate)
    wrap(rates.ReduceLROnPlateau, "step", before=plateau)
