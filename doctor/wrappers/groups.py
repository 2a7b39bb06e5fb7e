"""Process groups: when a process joins one, whether some use one of their own; their stores."""

import collections
import os
import re
import threading

from ..events import RECORD, note
from . import processes, wrap

# Methods of a Store, through which a process tells others something, or waits for it.
TELLS = "set add append compare_set multi_set queue_push barrier".split()
HEARS = "get wait multi_get queue_pop check".split()
BOTH = "add compare_set barrier".split()
# Names of an axis of a mesh along which processes compute one model, and read the same items.
OF_A_MODEL = re.compile("([tpcse]p|.*(tensor|model|pipe|stage|context|sequence|expert).*)", re.I)
told = collections.Counter()  # {(method, whether it only hears, keys): calls}


def install(torch):
    dist = torch.distributed

    def joins(backend=None, init_method=None, timeout=None, world_size=-1, rank=-1, *_, **__):
        processes.joins()
        if RECORD.launched and rank >= 0:
            note("joins", rank=rank, number=int(os.environ.get("RANK", rank)))

    def joined(*args, **kwargs):
        rank, size = dist.get_rank(), dist.get_world_size()
        note("group", rank=rank, local=os.environ.get("LOCAL_RANK"), world_size=size)

    def mesh(_, self, *args, **kwargs):
        if size := parts_of(self.shape, self.mesh_dim_names):
            note("part", size=size)

    wrap(dist, "init_process_group", joins, joined, waits="init_process_group")
    wrap(dist, "new_group", waits="new_group")
    wrap(dist.device_mesh.DeviceMesh, "__init__", after=mesh, waits="the constructor of DeviceMesh")
    joins_uneven = dist.algorithms.join.Join
    wrap(joins_uneven, "__enter__", before=lambda self: note("join"))
    wrap(joins_uneven, "__exit__", after=lambda *_: note("joined"))
    for name in [*TELLS, *HEARS]:
        if hasattr(dist.Store, name):
            wrap_store(dist.Store, name)


def wrap_store(store, name):
    def noted(*args, key=None, keys=(), amount=None, **_):
        key, *more = [key or keys, amount] if key or keys else args
        hears = name in HEARS or (name == "add" and 0 in more[:1])
        keys = (key,) if isinstance(key, str) else tuple(key)
        if threading.current_thread() is not threading.main_thread():
            return
        told[name, hears, keys] += 1
        # In a loop that waits so, or says that it lives, it stands still all the same.
        if told[name, hears, keys] <= (1 if hears else 100):
            note("store", keys=keys, tells=not hears, hears=hears or name in BOTH)

    def before(self, *args, **kwargs):
        noted(*args, **kwargs)

    def after(result, self, *args, **kwargs):
        if result is not False:  # of check()
            noted(*args, **kwargs)

    wrap(store, name, *((None, after) if name in HEARS else (before, None)))


def parts_of(shape, names):
    """How many processes the smallest axis of a mesh has, if it divides them; else None.

    An axis with all of them is the world: it does not, unless it is named after a model's parts.
    """
    axes = [(name, n) for name, n in zip(names or [""] * len(shape), shape, strict=True) if n > 1]
    divides = len(axes) > 1 or any(OF_A_MODEL.fullmatch(name) for name, _ in axes)
    return min(n for _, n in axes) if divides else None


def note_part(dist, group):
    """Whether a collective, or DDP, is given a group of some of the processes alone; noted."""
    size = 0 if group is None else dist.get_world_size(group)
    part = 0 < size < dist.get_world_size()
    if part:
        note("part", size=size)
    return part
