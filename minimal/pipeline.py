"""Pipeline parallel: each process has some layers, and parts of a batch go through them in turn.

$ torchrun --standalone --nproc-per-node=2 minimal/pipeline.py
"""

import gc
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
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import DataLoader, DistributedSampler

EPOCHS = 2
BATCH_SIZE = 24  # windows of text in a step: a multiple of PARTS
PARTS = 8  # of a batch: a process waits for W - 1 of the PARTS + W - 1 turns, of W processes
LENGTH, WIDTH, HEADS, BLOCKS = 64, 64, 4, 2  # a window has LENGTH bytes
FILES = sorted(Path(__file__).parents[1].glob("docs/*[a-z].md"))  # the text: any files
SAVED = Path("transformer.pth")  # on several nodes where all of them see it


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


class Stage(nn.Module):
    def __init__(self, mine):  # numbers: 0 is the embedding, BLOCKS + 1 the head
        super().__init__()
        self.byte, self.place = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        blocks = [Block() for _ in range(BLOCKS)]  # all, for the weights that one process has
        self.blocks = nn.ModuleDict({f"{i}": blocks[i] for i in range(BLOCKS) if i + 1 in mine})
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))
        if 0 not in mine:
            self.byte = self.place = None
        if BLOCKS + 1 not in mine:
            self.head = None

    def forward(self, x):  # text, int64 [n, length], or what the stage before gives
        if self.byte is not None:
            x = self.byte(x) + self.place(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)  # scores, [n, length, 256]


def mean_loss(output, target):  # of a part; the schedule divides its gradients by PARTS
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def main():
    rank = int(os.environ["RANK"])  # my number among all processes: that of my stage
    local_rank = int(os.environ["LOCAL_RANK"])  # my number on this machine: it chooses the GPU
    world_size = int(os.environ["WORLD_SIZE"])  # how many processes there are
    if BATCH_SIZE % PARTS:  # parts of unlike size would count alike
        raise SystemExit(f"BATCH_SIZE {BATCH_SIZE} must be a multiple of PARTS {PARTS}")
    if world_size > min(PARTS, BLOCKS + 2):
        raise SystemExit(f"{world_size} processes: more than PARTS {PARTS} or than BLOCKS + 2")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(local_rank)  # "cuda" is now this process's own GPU
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    torch.manual_seed(0)  # else the weights would depend on the number of stages

    text = torch.tensor(list(b"".join(file.read_bytes() for file in FILES)))
    if len(text) <= BATCH_SIZE * LENGTH:
        raise SystemExit(f"{len(text)} bytes in FILES: no step in an epoch")
    windows = text.unfold(0, LENGTH + 1, LENGTH)  # [n, LENGTH + 1]
    # All read the same windows in the same order: the first stage needs them, the last one what
    # follows each byte. So the sampler does not divide them.
    sampler = DistributedSampler(windows, num_replicas=1, rank=0, drop_last=True)
    loader = DataLoader(windows, BATCH_SIZE, sampler=sampler, drop_last=True)

    mine = torch.arange(BLOCKS + 2).tensor_split(world_size)[rank].tolist()  # neighbours
    net = Stage(mine).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    saved = torch.load(SAVED) if SAVED.exists() else {"epoch": 0}
    found = [None] * world_size
    dist.all_gather_object(found, (len(text), saved["epoch"]))
    if len({*found}) > 1:
        raise SystemExit(f"the processes differ in (bytes in FILES, epochs in SAVED): {found}")
    if saved["epoch"]:  # by any number of processes
        weights = {name: saved["net"][name] for name in net.state_dict()}
        moments = saved["optimizer"]
        set_state_dict(net, optimizer, model_state_dict=weights, optim_state_dict=moments)
        if rank == 0:
            print(f"{SAVED}: goes on after {saved['epoch']} of {EPOCHS} epochs")
    stage = PipelineStage(net, rank, world_size, torch.device(device))
    # 1F1B: backward() of a part as soon as it has come back, so that few parts are kept.
    schedule = Schedule1F1B(stage, n_microbatches=PARTS, loss_fn=mean_loss)

    for epoch in range(saved["epoch"], EPOCHS):
        sampler.set_epoch(epoch)  # else every epoch would have the same order
        torch.manual_seed(epoch * world_size + rank)  # for dropout: the same after a resume
        total = torch.zeros(1, device=device)  # of the losses: in the last stage
        for text in loader:
            inputs = [text[:, :-1].to(device)] if rank == 0 else []  # others wait for theirs
            losses = []
            optimizer.zero_grad()
            schedule.step(*inputs, target=text[:, 1:].to(device), losses=losses)
            total += sum(loss.detach() for loss in losses) / PARTS
            # Not clip_grad_norm_: it would see this stage's own gradients, and each stage would
            # be scaled by another factor.
            square = sum(weight.grad.square().sum() for weight in net.parameters())
            dist.all_reduce(square)
            for weight in net.parameters():
                weight.grad *= (1.0 / (square.sqrt() + 1e-6)).clamp(max=1.0)
            optimizer.step()

        dist.all_reduce(total)  # only the last stage has added to it
        parts = [None] * world_size if rank == 0 else None
        on_cpu = StateDictOptions(cpu_offload=True)
        dist.gather_object(get_state_dict(net, optimizer, options=on_cpu), parts)  # to rank 0
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / len(loader):.4f}")
            weights, moments = parts[0]
            for more, more_moments in parts[1:]:
                weights |= more
                moments["state"] |= more_moments["state"]
                moments["param_groups"][0]["params"] += more_moments["param_groups"][0]["params"]
            state = {"epoch": epoch + 1, "net": weights, "optimizer": moments}
            torch.save(state, f"{SAVED}.unfinished")
            os.replace(f"{SAVED}.unfinished", SAVED)  # whole, or not there
    del net, optimizer, stage, schedule
    gc.collect()  # ends its threads: else gloo may abort when Python ends
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
