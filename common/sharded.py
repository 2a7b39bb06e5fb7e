"""What fully_shard divides among the processes, and the whole of it, to be saved and loaded."""

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor


def make_mesh(device, world_size, local_world_size):
    """Which processes divide the model among them: all, or those of each node. All call this.

    Several nodes of several processes have a copy each. What then travels between nodes, where it
    takes longer, is only gradients; each process keeps 1 / local_world_size instead of
    1 / world_size. Raises ValueError where nodes have different numbers of processes.
    """
    if not 1 < local_world_size < world_size:
        return init_device_mesh(device.type, [world_size])
    if world_size % local_world_size:
        raise ValueError(
            f"{local_world_size} of {world_size} processes on a node: start as many on each"
        )
    sizes = [world_size // local_world_size, local_world_size]
    return init_device_mesh(device.type, sizes, mesh_dim_names=["node", "process"])


def blocks(module):
    """The blocks of a model: what its outermost plain nn.Sequentials hold, if it has weights.

    In torchvision's models these are the blocks of a ResNet or the layers of a vision transformer.
    What lies in no such Sequential, as most of googlenet, is divided too, but gathered all at once.
    """
    for child in module.children():
        if type(module) is not nn.Sequential or type(child) is nn.Sequential:
            yield from blocks(child)
        elif any(True for _ in child.parameters()):
            yield child


def precision_policy(net, dtype):
    """Weights are gathered in `dtype`, half of the traffic for bf16; gradients averaged in float32.

    Not if the model has a BatchNorm, which takes float32 weights only. Then all weights are
    gathered in float32, and autocast alone computes in dtype.
    """
    has_batch_norm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in net.modules())
    return MixedPrecisionPolicy(None if has_batch_norm else dtype, reduce_dtype=torch.float32)


class Parts:
    """A model that fully_shard has divided, and the whole of it in host memory.

    net: the whole model, on the CPU; optimizer: its optimizer, which is saved and loaded and never
    makes a step; model: a copy of net, divided. `self.optimizer` has the same groups and trains the
    parts. Every process has a whole copy of weights and optimizer state in host memory, as it has
    of a checkpoint that it reads.
    """

    def __init__(self, net, optimizer, model):
        self.net, self.whole_optimizer, self.model = net, optimizer, model
        part_of = dict(zip(net.parameters(), model.parameters(), strict=True))
        self.pairs = list(part_of.items())
        groups = [group.copy() for group in optimizer.param_groups]
        for group in groups:
            group["params"] = [part_of[weight] for weight in group["params"]]
            group |= {"fused": None, "foreach": True}  # SGD's fused kernel takes no parts
        self.optimizer = type(optimizer)(groups)

    @torch.no_grad()
    def scatter(self):
        """Fill the parts of all processes from rank 0's whole. All processes call it."""
        for weight, part in self.pairs:
            part.copy_(_divide(weight, part))
            for key, value in self.whole_optimizer.state[weight].items():
                divided = value.shape == weight.shape  # not a number of steps
                self.optimizer.state[part][key] = _divide(value, part) if divided else value.clone()
        for buffer, ours in zip(self.net.buffers(), self.model.buffers(), strict=True):
            ours.copy_(buffer)
        groups = self.whole_optimizer.param_groups, self.optimizer.param_groups
        for whole, divided in zip(*groups, strict=True):
            divided["lr"] = whole["lr"]  # for the row of an epoch that only lacks its validation

    @torch.no_grad()
    def gather(self):
        """Bring the whole up to date. All processes call it: each sends its parts to the others.

        Buffers stay this process's own.
        """
        for weight, part in self.pairs:
            weight.copy_(part.full_tensor())
            for key, value in self.optimizer.state[part].items():
                value = value.full_tensor() if isinstance(value, DTensor) else value
                self.whole_optimizer.state[weight][key] = value.cpu()
        for buffer, ours in zip(self.net.buffers(), self.model.buffers(), strict=True):
            buffer.copy_(ours)
        groups = self.whole_optimizer.param_groups, self.optimizer.param_groups
        for whole, divided in zip(*groups, strict=True):
            whole["lr"] = divided["lr"]


def _divide(whole, like):
    """The parts of rank 0's tensor, moved to the device and divided as `like` is."""
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements)
