"""Tensor parallel, TENSOR processes to a layer; with FSDP over the groups if there are more.

$ torchrun --standalone --nproc-per-node=2 minimal/tensor_parallel.py
"""

import gc
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, DistributedSampler

TENSOR = 2  # processes that share each layer: GPUs of one machine, for they send much
EPOCHS = 2
BATCH_SIZE = 24  # windows of text in a step, over all groups of TENSOR: a multiple of their number
LENGTH, WIDTH, HEADS, BLOCKS = 64, 64, 4, 2  # HEADS is a multiple of TENSOR
FILES = sorted(Path(__file__).parents[1].glob("docs/*[a-z].md"))  # the text: any files
SAVED = Path("transformer.pth")  # on several nodes where all of them see it


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, wide = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), wide, nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):  # float [n, length, WIDTH], and gives the same
        # q, k and v of a head side by side, so that a part of the rows is whole heads: -1 of them
        qkv = self.qkv(self.norm(x)).unflatten(2, (-1, 3, WIDTH // HEADS)).permute(3, 0, 2, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)  # no later bytes
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.byte, self.place = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, text):  # int64 [n, length]; gives scores of each next byte, [n, length, 256]
        x = self.byte(text) + self.place(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x).float()


def reordered(state, *order, name=""):  # rows of qkv, by heads here; plain: by q, k and v
    if isinstance(state, dict):
        return {key: reordered(x, *order, name=f"{name} {key}") for key, x in state.items()}
    if ".qkv." not in name or not state.dim():  # 0-d: AdamW's count of steps
        return state
    return state.unflatten(0, (*order, -1)).transpose(0, 1).flatten(0, 2)


def divide(net, mesh, policy):
    # Each process has some of a layer's outputs (by columns), then what the next one makes of
    # these (by rows): a sum over the group, one for the attention and one for the MLP.
    columns, rows = ColwiseParallel, RowwiseParallel
    plan = {"qkv": columns(), "out": rows(), "mlp.1": columns(), "mlp.3": rows()}
    for block in net.blocks:
        parallelize_module(block, mesh["tensor"], plan)
    scores = columns(output_layouts=Shard(-1), use_local_output=False)  # of some of the 256 bytes
    parallelize_module(net, mesh["tensor"], {"head.1": scores})
    for block in [*net.blocks, net]:  # then FSDP, over the other dimension
        fully_shard(block, mesh=mesh["data"], mp_policy=policy)


def share_of_square(grad):  # of a gradient's norm: the sum over all processes is the square
    sizes = zip(grad.device_mesh.shape, grad.placements, strict=True)
    parts = math.prod(size for size, placement in sizes if not placement.is_replicate())
    return grad.to_local().square().sum() * parts / dist.get_world_size()  # copies count once


def main():
    rank = int(os.environ["RANK"])  # my number among all processes
    local_rank = int(os.environ["LOCAL_RANK"])  # my number on this machine: it chooses the GPU
    world_size = int(os.environ["WORLD_SIZE"])  # how many processes there are
    groups = world_size // TENSOR  # each reads a part of the data, and has all of the model
    if world_size % TENSOR:
        raise SystemExit(f"{world_size} processes must be a multiple of TENSOR {TENSOR}")
    if HEADS % TENSOR or 256 % TENSOR:
        raise SystemExit(f"HEADS {HEADS} and 256 must be multiples of TENSOR {TENSOR}")
    if BATCH_SIZE % groups:
        raise SystemExit(f"BATCH_SIZE {BATCH_SIZE} must be a multiple of {groups} (groups)")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(local_rank)  # "cuda" is now this process's own GPU
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    # Neighbours are a tensor group: ranks 0 and 1, 2 and 3 ...
    mesh = dist.init_device_mesh(device, (groups, TENSOR), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)  # all processes start with the same weights

    text = torch.tensor(list(b"".join(file.read_bytes() for file in FILES)))
    if len(text) <= BATCH_SIZE * LENGTH:
        raise SystemExit(f"{len(text)} bytes in FILES: no step in an epoch")
    windows = text.unfold(0, LENGTH + 1, LENGTH)  # [n, LENGTH + 1]
    group = mesh["data"].get_local_rank()  # not rank: a tensor group reads the same windows
    sampler = DistributedSampler(windows, num_replicas=groups, rank=group, drop_last=True)
    loader = DataLoader(windows, BATCH_SIZE // groups, sampler=sampler, drop_last=True)

    net = Net()  # on the CPU: no GPU ever has to hold it whole
    dtype = torch.bfloat16 if device == "cuda" else None  # a CPU computes in float32
    divide(net, mesh, MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    saved = torch.load(SAVED) if SAVED.exists() else {"epoch": 0}
    found = [None] * world_size
    dist.all_gather_object(found, (len(text), saved["epoch"]))
    if len({*found}) > 1:
        raise SystemExit(f"the processes differ in (bytes in FILES, epochs in SAVED): {found}")
    if saved["epoch"]:
        saved = reordered(saved, 3, HEADS)
        set_state_dict(
            net,
            optimizer,
            model_state_dict=saved["net"],
            optim_state_dict=saved["optimizer"],
            options=whole,
        )
        if rank == 0:
            print(f"{SAVED}: goes on after {saved['epoch']} of {EPOCHS} epochs")

    for epoch in range(saved["epoch"], EPOCHS):
        sampler.set_epoch(epoch)  # else every epoch would have the same order
        torch.manual_seed(epoch * groups + group)  # for dropout: a tensor group draws the same
        total = torch.zeros(1, device=device)  # of the losses
        for text in loader:
            text = text.to(device)
            output = net(text[:, :-1])
            with loss_parallel():  # of scores that stay in parts; backward() too
                loss = nn.functional.cross_entropy(output.flatten(0, 1), text[:, 1:].flatten())
                optimizer.zero_grad()
                loss.backward()
            total += loss.detach().full_tensor()
            # Not clip_grad_norm_: it takes gradients of one mesh only, and LayerNorm's are divided
            # over "data" alone.
            square = sum(share_of_square(weight.grad) for weight in net.parameters())
            dist.all_reduce(square)
            for weight in net.parameters():
                weight.grad *= (1.0 / (square.sqrt() + 1e-6)).clamp(max=1.0)
            optimizer.step()

        dist.all_reduce(total)  # the sum over all processes
        weights, moments = get_state_dict(net, optimizer, options=whole)  # all send their parts
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / len(loader) / world_size:.4f}")
            state = {"epoch": epoch + 1, "net": weights, "optimizer": moments}
            torch.save(reordered(state, HEADS, 3), f"{SAVED}.unfinished")
            os.replace(f"{SAVED}.unfinished", SAVED)  # whole, or not there
    del net, optimizer
    gc.collect()  # ends its threads: else gloo may abort when Python ends
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
