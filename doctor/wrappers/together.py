"""Models that several processes compute together: layers in parts, or the stages of a pipeline."""

import sys

from ..events import note
from . import wrap


def install(torch):
    dist = torch.distributed
    from torch.distributed.tensor import parallel

    noted = set()

    def layers(module, device_mesh=None, *args, **kwargs):
        if device_mesh is not None and device_mesh.size() > 1:
            note("together", of="layer", ranks=device_mesh.mesh.flatten().tolist())

    def messages(p2p_op_list):
        # Of a pipeline's stages, if its module is there: to import it takes half a second.
        group = p2p_op_list[0].group if p2p_op_list else None
        ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        if ranks not in noted and "torch.distributed.pipelining.stage" in sys.modules:
            noted.add(ranks)
            note("together", of="pipeline", ranks=ranks)

    wrap(parallel, "parallelize_module", before=layers)
    wrap(dist, "batch_isend_irecv", before=messages)
