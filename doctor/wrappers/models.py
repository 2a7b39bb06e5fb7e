"""Models: those that DDP has wrapped, and the plain ones; in which order they are called."""

import collections
import gc
import itertools
import sys
import weakref

from ..events import FORWARD, checksum, is_plain, note
from . import wrap
from .groups import note_part

MODELS = []  # those that DDP has wrapped
NAMES = {}  # id of a parameter: (number of its model, its name)
ORDERS = collections.defaultdict(list)  # model: what was done since its last step, (letter, line)

inside = []  # models whose wrapped forward pass has begun, and not yet the plain one
validated = set()  # plain models that were validated since the last step, and in this pass
running, kinds = set(), set()  # plain models whose forward pass runs; classes that are wrapped
watched = weakref.WeakSet()  # plain models: of DDP, and those that train() or eval() was called on
passes = itertools.count()  # of training
changing = []  # the model whose train() runs: it calls that of its parts


def install(torch):
    import torch.optim.swa_utils
    from torch.nn.parallel import DistributedDataParallel as Wrapper

    grads = torch.is_grad_enabled

    def watch(module):
        watched.add(module)
        kind = type(module)
        if kind not in kinds and not isinstance(module, torch.jit.ScriptModule):
            kinds.add(kind)  # of the class: an attribute of the model would be saved with it
            wrap(kind, "forward", before=plain_forward, after=leave_forward)

    def wrapped(_, self, *args, **kwargs):
        number = len(MODELS)
        MODELS.append(self)
        weights = self.module.named_parameters()
        if note_part(torch.distributed, self.process_group):
            weights = ()  # those of others may differ
        alike = {id(w): (number, n) for n, w in weights if n not in self.parameters_to_ignore}
        NAMES.update(alike)
        note("wrap", frozen=frozen())
        watch(self.module)

    def forward(self, *args, **kwargs):
        inside.append(self)
        letter = "F" if self.require_backward_grad_sync else "f"
        note_forward(self, letter, (args, kwargs))

    def note_forward(model, letter, inputs):
        module = model.module
        event = note(
            "forward",
            trains=module.training and grads(),
            training=module.training,
            wrapped=True,
            modes=modes(module),
            sends=letter != "p" and model.will_sync_module_buffers(),
            synced={"F": True, "f": False}.get(letter),
            given=sums_of(inputs) if module.training and grads() else None,
        )
        if module.training and grads():
            ORDERS[MODELS.index(model)].append((letter, event["line"]))

    def plain_forward(module, *args, **kwargs):
        if running or module not in watched:  # running: a part, or of a class that calls its parent
            return
        running.add(module)
        model = next((model for model in MODELS if model.module is module), None)
        if model in inside:
            inside.remove(model)
        elif model:
            note_forward(model, "p", (args, kwargs))
        elif grads():
            trains, mode = module.training, module.training
            facts = {"wrapped": False, "modes": modes(module), "sends": False, "synced": None}
            given = sums_of((args, kwargs)) if trains else None
            note("forward", trains=trains, training=mode, given=given, **facts)
        if grads() and module.training:
            validated.discard(module)
        elif not grads() and module not in validated:
            validated.add(module)
            note_validation(module, wrapped=model is not None)

    def leave_forward(_, module, *args, **kwargs):
        running.discard(module)

    def mode_set(self, *args, **kwargs):
        if not changing:
            changing.append(self)
            if not isinstance(self, Wrapper):
                watch(self)

    def mode_was_set(_, self, *args, **kwargs):
        if changing == [self]:
            changing.clear()

    def backward(*args, **kwargs):
        event = note("backward")
        for number in range(len(MODELS)):
            ORDERS[number].append(("B", event["line"]))

    def leave(*_):  # a DDP that outlives its group may abort
        MODELS.clear()
        validated.clear()
        gc.collect()

    averages = torch.optim.swa_utils.AveragedModel
    wrap(averages, "__init__", after=lambda _, self, *args, **kwargs: watch(self.module))
    wrap(torch.distributed, "destroy_process_group", before=leave)
    wrap(Wrapper, "__init__", after=wrapped, waits="the constructor of DDP")
    wrap(Wrapper, "forward", before=forward, waits=FORWARD)
    wrap(torch.autograd, "backward", before=backward, waits="backward")
    wrap(torch.nn.Module, "train", before=mode_set, after=mode_was_set)  # eval() calls it


def sums_of(inputs):
    """The bits of each tensor that a model is given; None after the first passes: it takes time."""
    if next(passes) >= 8:
        return None
    torch = sys.modules["torch"]
    leaves = torch.utils._pytree.tree_leaves(inputs)
    return [checksum(one) for one in leaves if torch.is_tensor(one) and is_plain(one)]


def note_validation(module, wrapped):
    """The model that is validated, as sums of its tensors. A part of one on several is left out."""
    weights = {name: checksum(w) for name, w in module.named_parameters() if is_plain(w)}
    buffers = {name: checksum(x) for name, x in module.named_buffers() if is_plain(x)}
    mode = module.training
    facts = {"wrapped": wrapped, "modes": modes(module)}
    note("validates", training=mode, weights=weights, buffers=buffers, **facts)


def modes(module):
    """Whether a part of it is known to compute otherwise in training mode."""
    layers = sys.modules["torch"].nn.modules
    norms, dropouts = layers.batchnorm._BatchNorm, layers.dropout._DropoutNd
    return any(isinstance(p, norms) or (isinstance(p, dropouts) and p.p) for p in module.modules())


def frozen():
    """The names of the weights of wrapped models that get no gradient."""
    models = [dict(model.module.named_parameters()) for model in MODELS]
    return [n for named in models for n, weight in named.items() if not weight.requires_grad]
