"""For FSDP: which blocks fully_shard gets, and copies between its shards and a whole model."""

import copy

import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor


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


def check_shapes(net):
    """Raise ValueError for a parameter that fully_shard cannot divide: it would say so later."""
    for name, weight in net.named_parameters():
        if weight.ndim == 0 or weight.numel() == 0:
            shape = "a scalar: make it one of shape [1]" if weight.ndim == 0 else "empty: remove it"
            raise ValueError(f"fully_shard cannot divide {name}, which is {shape}")


def precision_policy(net, dtype):
    """Weights are gathered in `dtype`, half of the traffic for bf16; gradients averaged in float32.

    Not if the model has a BatchNorm, which takes float32 weights only. Then all weights are
    gathered in float32, and autocast alone computes in dtype.
    """
    has_batch_norm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in net.modules())
    return MixedPrecisionPolicy(None if has_batch_norm else dtype, reduce_dtype=torch.float32)


class Shards:
    """A model that fully_shard has divided, and the whole of it in host memory.

    net: the whole model, on the CPU; optimizer: its optimizer, which is saved and loaded and never
    makes a step; model: a copy of net, divided. `self.optimizer` has the same groups and trains the
    shards. Every process keeps the whole of weights and optimizer state in host memory, beside its
    shards of both on the device.
    """

    def __init__(self, net, optimizer, model):
        self.net, self.saved_optimizer, self.model = net, optimizer, model
        self.pairs = list(zip(net.parameters(), model.parameters(), strict=True))
        shard_of = dict(self.pairs)
        groups = [group.copy() for group in optimizer.param_groups]
        for group in groups:
            group["params"] = [shard_of[weight] for weight in group["params"]]
        self.optimizer = type(optimizer)(groups)

    @torch.no_grad()
    def scatter(self):
        """Fill the shards of all processes from rank 0's whole. All processes call it.

        Buffers are copied from this process's own model.
        """
        for weight, shard in self.pairs:
            shard.copy_(_divide(weight, shard))
            if weight in self.saved_optimizer.state:
                state = self.saved_optimizer.state[weight].items()
                self.optimizer.state[shard] = {key: _divide(value, shard) for key, value in state}
        for buffer, ours in zip(self.net.buffers(), self.model.buffers(), strict=True):
            ours.copy_(buffer)
        _copy_settings(self.saved_optimizer, self.optimizer)

    @torch.no_grad()
    def gather(self):
        """Bring the whole up to date. All processes call it: each sends its shards to the others.

        Buffers stay this process's own.
        """
        for weight, shard in self.pairs:
            weight.copy_(_gather(shard))
            if shard in self.optimizer.state:
                state = self.optimizer.state[shard].items()
                self.saved_optimizer.state[weight] = {key: _gather(value) for key, value in state}
        for buffer, ours in zip(self.net.buffers(), self.model.buffers(), strict=True):
            buffer.copy_(ours)
        _copy_settings(self.optimizer, self.saved_optimizer)


def _divide(value, like):
    """Rank 0's tensor, divided as `like` is. What has another shape is the same on all ranks."""
    if not torch.is_tensor(value) or value.shape != like.shape:
        return copy.deepcopy(value)  # such as a number of steps
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)


def _gather(value):
    return value.full_tensor().cpu() if isinstance(value, DTensor) else copy.deepcopy(value)


def _copy_settings(source, target):
    """Copy learning rates and what else a scheduler may change from optimizer to optimizer."""
    for new, group in zip(source.param_groups, target.param_groups, strict=True):
        group |= new | {"params": group["params"]}
