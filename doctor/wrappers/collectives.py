"""Collectives and messages: each call, its backward(), whether a result is read too early."""

import inspect
import sys

import torch.distributed as dist

from ..events import HERE, MESSAGES, RECORD, is_users, note, sum_as_text, users_line
from . import wrap
from .groups import note_part
from .optimizers import gradient_of
from .sets import loop_over_a_set

COLLECTIVES = """all_reduce reduce broadcast barrier all_gather all_gather_into_tensor gather
scatter reduce_scatter reduce_scatter_tensor all_to_all all_to_all_single all_gather_object
gather_object broadcast_object_list scatter_object_list monitored_barrier""".split()
IN_PLACE = "all_reduce reduce broadcast".split()
# What is called instead of wait(): for a future, or that a GPU's later work waits.
WAIT_TOO = "get_future get_future_result synchronize block_current_stream".split()
SMALL = 64  # elements: the sum of such a tensor is noted
READ = {}  # the small tensors that were read: {tensor: (version, line)}
SUMMED = {}  # those that were read and then added up, and not read since: {tensor: line}
PENDING = {}  # address of a tensor: (line, Work), of async_op=True, until wait() is called


def install(torch):
    from torch.utils.weak import WeakTensorKeyDictionary

    global READ, SUMMED
    READ, SUMMED = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()
    for name in COLLECTIVES:
        wrap_collective(torch, name)
    for name in MESSAGES:
        if hasattr(dist, name):
            wrap_message(name)
    for name in ("isend", "irecv"):  # P2POp compares with these
        setattr(dist.distributed_c10d, name, getattr(dist, name))
    wrap(dist.Work, "wait", before=waited, waits="wait()")
    wrap(dist.Work, "is_completed", after=lambda yes, work: waited(work) if yes else None)
    for name in WAIT_TOO:
        if hasattr(dist.Work, name):
            wrap(dist.Work, name, before=waited)
    wrap(torch.cuda, "synchronize", before=lambda *_, **__: PENDING.clear())
    for name in ("item", "tolist", "numpy", "__float__"):
        wrap(torch.Tensor, name, before=read)


def wrap_collective(torch, name):
    signature = inspect.signature(getattr(dist, name))

    def before(*args, **kwargs):
        tensor = next((x for x in [*args, *kwargs.values()] if torch.is_tensor(x)), None)
        group = kwargs.get("group") or next((x for x in args if is_group(x)), None)
        note_part(dist, group)
        gradients, optimizers = (None, []) if tensor is None else gradient_of(tensor)
        note(
            "collective",
            name=name,
            shape=None if tensor is None else [str(tensor.dtype), *tensor.shape],
            number=sum_of_small(torch, tensor),
            changes=None if tensor is None or tensor.is_inference() else tensor._version,
            gradients=gradients,
            optimizers=optimizers,
            whole=group is None or group == dist.group.WORLD,
            known=note_summed(tensor) if name in ("all_reduce", "reduce") else None,
            set=loop_over_a_set(2),
        )

    def after(work, *args, **kwargs):
        tensor = next((x for x in [*args, *kwargs.values()] if torch.is_tensor(x)), None)
        if tensor is None:
            return
        line = users_line()
        given = signature.bind(*args, **kwargs).arguments
        if given.get("async_op") and work is not None and len(PENDING) < 1000 and is_users_call():
            PENDING.update({one.data_ptr(): (line, work) for one in written(name, given)})
        # Its graph does not know of it. An autograd.Function, where that is off, has its own way.
        in_place = name in IN_PLACE and getattr(tensor, "grad_fn", None) is not None
        if in_place and torch.is_grad_enabled():
            tensor.register_hook(lambda gradient: arrived(gradient, line))

    wrap(dist, name, before, after, waits=name)


def wrap_message(name):
    """batch_isend_irecv() calls the others."""
    sends, batch = "send" in name, name.startswith("batch")
    signature, peer = inspect.signature(getattr(dist, name)), "dst" if sends else "src"

    def noted(*args, **kwargs):
        given = signature.bind(*args, **kwargs).arguments
        rank, group = given.get(peer), given.get("group")
        if rank is None and given.get(f"group_{peer}") is not None:
            rank = dist.get_global_rank(group or dist.group.WORLD, given[f"group_{peer}"])
        note("sends" if sends else "receives", peer=rank)

    before = noted if sends and not batch else None
    after = None if sends or batch else lambda _, *args, **kwargs: noted(*args, **kwargs)
    wrap(dist, name, before, after, waits=name)


def written(name, given):
    """The tensors that a call writes in this process; those that it sends may be read meanwhile."""
    if name in ("broadcast", "reduce"):
        peer = "src" if name == "broadcast" else "dst"
        of_all = given.get(peer) is not None
        rank = given[peer] if of_all else given.get(f"group_{peer}", 0)
        ours = dist.get_rank() if of_all else dist.get_rank(given.get("group"))
        if (rank == ours) == (name == "broadcast"):
            return []
    out = given.get("gather_list") if name == "gather" else next(iter(given.values()))
    return out if isinstance(out, (list, tuple)) else [out] if out is not None else []


def is_users_call():
    """Whether the user's code has called, not a library, which may wait in ways of its own."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(HERE):
        frame = frame.f_back
    return is_users(frame.f_code.co_filename)


def is_group(x):
    return isinstance(x, dist.ProcessGroup)


def sum_of_small(torch, tensor):
    """What it adds up to: of counts and means, never of what a gradient goes through."""
    if tensor is None or tensor.requires_grad or not 0 < tensor.numel() <= SMALL:
        return None
    return None if tensor.dtype == torch.bool else float(sum_as_text(tensor))


def note_summed(tensor):
    """The line that has read what a small tensor holds, if one has."""
    version, line = READ.get(tensor, (None, None)) if tensor is not None else (None, None)
    if line is None or version != tensor._version:
        return None
    SUMMED[tensor] = users_line()
    return line


def arrived(gradient, line):
    one = gradient.numel() == 1
    if not one or gradient.item() != 1:  # else it is that of each process's own part
        note("gradient", line=line, one=one)


def waited(work, *_, **__):
    for address in [key for key, (_, pending) in PENDING.items() if pending is work]:
        del PENDING[address]


def read(tensor, *_, **__):
    if PENDING and tensor.data_ptr() in PENDING:
        line, _ = PENDING.pop(tensor.data_ptr())
        note("unwaited", line=line, read=True)
    if RECORD.pid and 0 < tensor.numel() <= SMALL and not tensor.is_inference():
        if tensor in SUMMED:
            note("sum read", line=SUMMED.pop(tensor))
        READ[tensor] = tensor._version, users_line()


def note_unwaited():
    """At the end of a process."""
    for line, _ in {id(work): (line, work) for line, work in PENDING.values()}.values():
        note("unwaited", line=line, read=False)
    PENDING.clear()
