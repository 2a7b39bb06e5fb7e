"""Process groups: when a process joins one, whether some use one of their own; their stores."""

import collections
import os
import threading

from ..events import RECORD, note
from . import processes, wrap

# Methods of a Store, through which a process tells others something, or waits for it.
TELLS = "set add append compare_set multi_set queue_push barrier".split()
HEARS = "get wait multi_get queue_pop check".split()
BOTH = "add compare_set barrier".split()
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
        if self.ndim > 1:
            note("part")

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


def note_part(dist, group):
    """Whether a collective, or DDP, is given a group of some of the processes alone; noted."""
    part = group is not None and 0 < dist.get_world_size(group) < dist.get_world_size()
    if part:
        note("part")
    return part
