"""Process groups: when a process joins one, and whether some processes use one of their own."""

import os

from ..events import RECORD, note
from . import processes, wrap


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
    wrap(dist.algorithms.join.Join, "__enter__", before=lambda self: note("join"))


def is_part(dist, group):
    """Whether a collective, or DDP, is given a group of some of the processes alone; noted."""
    part = group is not None and 0 < dist.get_world_size(group) < dist.get_world_size()
    if part:
        note("part")
    return part
