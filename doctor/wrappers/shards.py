"""Models that FSDP divides: what they were before, in each process."""

from ..events import checksum, is_plain, note
from . import wrap


def install(torch):
    from torch.distributed import fsdp

    def shards(module, *args, **kwargs):
        modules = module if isinstance(module, (list, tuple)) else [module]
        named = [pair for one in modules for pair in one.named_parameters()]
        weights = {name: checksum(w) for name, w in named if is_plain(w) and not w.is_meta}
        note("shards", weights=weights)

    if hasattr(fsdp, "fully_shard"):  # since torch 2.6
        wrap(fsdp, "fully_shard", before=shards)
