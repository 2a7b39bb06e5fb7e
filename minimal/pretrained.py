"""Trains on from pretrained weights by FSDP: each process reads its own part of the file, no more.

$ torchrun --standalone --nproc-per-node=2 minimal/pretrained.py
"""

import gc
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from safetensors import safe_open
from safetensors.torch import save_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler

LORA = 4  # columns of what is added to each layer of a block; 0: all weights are trained
EPOCHS = 2
BATCH_SIZE = 24  # windows of text in a step, over all processes: a multiple of world_size
LENGTH, WIDTH, HEADS, BLOCKS = 64, 64, 4, 2  # a window has LENGTH bytes
FILES = sorted(Path(__file__).parents[1].glob("docs/*[a-z].md"))  # the text: any files
WEIGHTS = Path("pretrained.safetensors")  # what you have; on several nodes where all see it
NEW = ["head."]  # these names begin anew: a head for another task is not in the file
FOLDER = Path("pretrained")  # of checkpoints; on several nodes one that all of them see


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, wide = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), wide, nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):  # float [n, length, WIDTH], and gives the same
        qkv = self.qkv(self.norm(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)  # no later bytes
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.byte, self.place = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, text):  # int64 [n, length]; log-probabilities of each next, [n, length, 256]
        x = self.byte(text) + self.place(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().log_softmax(dim=2)


class Adapted(nn.Module):  # a layer that stays as it is, and a small change that is trained
    def __init__(self, layer):
        super().__init__()
        self.layer, kind = layer, {"bias": False, "device": layer.weight.device}
        self.down = nn.Linear(layer.in_features, LORA, **kind)
        self.up = nn.Linear(LORA, layer.out_features, **kind)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


def adapt(net):
    for name, weight in net.named_parameters():
        weight.requires_grad = name.startswith(tuple(NEW))
    for block in net.blocks:
        for module in [block, block.mlp]:
            for name, layer in [*module.named_children()]:
                if isinstance(layer, nn.Linear):
                    setattr(module, name, Adapted(layer))


def begin(name, shape, seed):  # a weight that the file does not have
    if ".up." in name:
        return torch.zeros(shape)  # so that the change begins with nothing
    if len(shape) == 1:
        return torch.ones(shape) if "0.weight" in name else torch.zeros(shape)  # LayerNorm, biases
    # The seed is that of the weight: every process draws the same, then takes its rows.
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return drawn / shape[1] ** 0.5


def fill(net, rank, world_size):
    """Read my rows of each weight: of the others' no process reads a byte."""
    with safe_open(WEIGHTS, "pt") as file, torch.no_grad():
        there, wrong = {*file.keys()}, []
        for seed, (name, weight) in enumerate(net.named_parameters()):
            rows = -(-weight.shape[0] // world_size)  # fully_shard's parts: the last has the rest
            mine = slice(min(rank * rows, len(weight)), min(rank * rows + rows, len(weight)))
            name = name.replace(".layer.", ".")  # as it was before adapt()
            if name.startswith(tuple(NEW)) or ".down." in name or ".up." in name:
                weight.to_local().copy_(begin(name, weight.shape, seed)[mine])
            elif name not in there or file.get_slice(name).get_shape() != [*weight.shape]:
                wrong.append(f"{name} {[*weight.shape]}")
            else:  # copy_() takes any dtype: bf16 in the file, float32 here
                weight.to_local().copy_(file.get_slice(name)[mine])
            there.discard(name)
    left = sorted(name for name in there if not name.startswith(tuple(NEW)))
    if wrong or left:
        raise SystemExit(f"{WEIGHTS} has no, or another, {wrong}; the net has no {left}")


def main():
    rank = int(os.environ["RANK"])  # my number among all processes
    local_rank = int(os.environ["LOCAL_RANK"])  # my number on this machine: it chooses the GPU
    world_size = int(os.environ["WORLD_SIZE"])  # how many processes there are
    if BATCH_SIZE % world_size:
        raise SystemExit(f"BATCH_SIZE {BATCH_SIZE} must be a multiple of {world_size} (processes)")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(local_rank)  # "cuda" is now this process's own GPU
    elif not hasattr(torch.cpu.Stream, "record_event"):
        raise SystemExit("without GPUs fully_shard needs torch 2.7 or newer")
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    # What is saved while it trains needs a group of its own: in one group the calls of the two
    # threads would meet one another.
    writers = dist.new_group(backend="gloo")

    text = torch.tensor(list(b"".join(file.read_bytes() for file in FILES)))
    if len(text) <= BATCH_SIZE * LENGTH:
        raise SystemExit(f"{len(text)} bytes in FILES: no step in an epoch")
    windows = text.unfold(0, LENGTH + 1, LENGTH)  # [n, LENGTH + 1]
    sampler = DistributedSampler(windows, num_replicas=world_size, rank=rank, drop_last=True)
    loader = DataLoader(windows, BATCH_SIZE // world_size, sampler=sampler, drop_last=True)

    if rank == 0 and not WEIGHTS.exists():  # in place of a download
        torch.manual_seed(0)
        save_model(Net(), f"{WEIGHTS}.unfinished")  # a weight with two names is saved once
        os.replace(f"{WEIGHTS}.unfinished", WEIGHTS)
    dist.barrier()  # the others wait for the file
    with torch.device("meta"):  # shapes, no memory
        net = Net()
    if LORA:
        adapt(net)  # before fully_shard, which then keeps no gradients of what is not trained
    dtype = torch.bfloat16 if device == "cuda" else None  # a CPU computes in float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in [*net.blocks, net]:  # net last, for what is left
        fully_shard(block, mp_policy=policy)
    net.to_empty(device=device)  # memory for my parts; their values are left from before
    fill(net, rank, world_size)
    trained = [weight for weight in net.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    # With LORA checkpoints have the adapters and the head: WEIGHTS has the rest.
    options = StateDictOptions(ignore_frozen_params=True, strict=not LORA)

    if rank == 0:
        shutil.rmtree(FOLDER / "unfinished", ignore_errors=True)  # of a run that was killed
    saved = [int(path.name) for path in FOLDER.glob("[0-9]*")]  # epochs
    found = [None] * world_size
    dist.all_gather_object(found, (len(text), max(saved, default=0)))
    if len({*found}) > 1:
        raise SystemExit(f"the processes differ in (bytes in FILES, epochs in FOLDER): {found}")
    if saved:  # by any number of processes
        weights, moments = get_state_dict(net, optimizer, options=options)  # my parts, to be filled
        dcp.load({"net": weights, "optimizer": moments}, checkpoint_id=FOLDER / str(max(saved)))
        set_state_dict(
            net,
            optimizer,
            model_state_dict=weights,
            optim_state_dict=moments,
            options=options,
        )
        if rank == 0:
            print(f"{FOLDER}: goes on after {max(saved)} of {EPOCHS} epochs")

    def finish(saving, epoch):  # wait until all is written, then give it its name
        saving.result()  # an error of the disk is raised here, or nobody sees it
        dist.barrier()
        if rank == 0:
            os.rename(FOLDER / "unfinished", FOLDER / str(epoch + 1))  # whole, or not there
            shutil.rmtree(FOLDER / str(epoch - 1), ignore_errors=True)  # two are kept

    saving = None
    for epoch in range(max(saved, default=0), EPOCHS):
        sampler.set_epoch(epoch)  # else every epoch would have the same order
        torch.manual_seed(epoch * world_size + rank)  # for dropout: the same after a resume
        total = torch.zeros(1, device=device)  # of the losses
        for text in loader:
            output = net(text[:, :-1].to(device))
            target = text[:, 1:].flatten().to(device)
            loss = nn.functional.nll_loss(output.flatten(0, 1), target)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 1.0)  # the norm of all parts together
            optimizer.step()
            total += loss.detach()

        dist.all_reduce(total)  # the sum over all processes
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / len(loader) / world_size:.4f}")
        if saving:
            finish(saving, epoch - 1)  # it was written while this epoch trained
        weights, moments = get_state_dict(net, optimizer, options=options)
        state, path = {"net": weights, "optimizer": moments}, FOLDER / "unfinished"
        saving = dcp.async_save(state, checkpoint_id=path, process_group=writers)
    if saving:
        finish(saving, EPOCHS - 1)  # else the process would end before its file is whole
    del net, optimizer
    gc.collect()  # ends its threads: else gloo may abort when Python ends
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
