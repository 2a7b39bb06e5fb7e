"""A transformer that learns bytes of text, by FSDP; its checkpoints are in parts too.

$ torchrun --standalone --nproc-per-node=2 minimal/transformer.py
"""

import gc
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler

EPOCHS = 4
BATCH_SIZE = 24  # windows of text in a step, over all processes: a multiple of world_size
LENGTH, WIDTH, HEADS, BLOCKS = 64, 64, 4, 2  # a window has LENGTH bytes
FILES = sorted(Path(__file__).parents[1].glob("docs/*[a-z].md"))  # the text: any files
FOLDER = Path("transformer")  # of checkpoints; on several nodes one that all of them see


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
            x = checkpoint(block, x, use_reentrant=False)  # keeps x; backward() computes the rest
        return self.head(x).float().log_softmax(dim=2)


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
    torch.manual_seed(0)  # all processes start with the same weights

    text = torch.tensor(list(b"".join(file.read_bytes() for file in FILES)))
    train_text, val_text = text.tensor_split([len(text) * 9 // 10])
    if len(train_text) <= BATCH_SIZE * LENGTH:
        raise SystemExit(f"{len(text)} bytes in FILES: no step in an epoch")
    missing = -(len(val_text) - 1) % (LENGTH * world_size)  # for as many windows in each process
    val_text = nn.functional.pad(val_text, (0, missing), value=-100)  # -100: no target
    # Windows [n, LENGTH + 1]. Each begins with the last byte of the one before.
    train_set, val_set = (text.unfold(0, LENGTH + 1, LENGTH) for text in (train_text, val_text))
    sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank, drop_last=True)
    train_loader = DataLoader(train_set, BATCH_SIZE // world_size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(val_set, BATCH_SIZE, sampler=range(rank, len(val_set), world_size))

    net = Net()  # on the CPU: no GPU ever has to hold it whole
    dtype = torch.bfloat16 if device == "cuda" else None  # a CPU computes in float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in [*net.blocks, net]:  # net last, for what is left
        fully_shard(block, mp_policy=policy)  # float32 in parts, gathered in bf16
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)

    if rank == 0:
        shutil.rmtree(FOLDER / "unfinished", ignore_errors=True)  # of a run that was killed
    saved = [int(path.name) for path in FOLDER.glob("[0-9]*")]  # epochs
    found = [None] * world_size
    dist.all_gather_object(found, (len(text), max(saved, default=0)))
    if len({*found}) > 1:
        raise SystemExit(f"the processes differ in (bytes in FILES, epochs in FOLDER): {found}")
    if saved:  # by any number of processes
        weights, moments = get_state_dict(net, optimizer)  # my parts, to be filled
        dcp.load({"net": weights, "optimizer": moments}, checkpoint_id=FOLDER / str(max(saved)))
        set_state_dict(net, optimizer, model_state_dict=weights, optim_state_dict=moments)
        if rank == 0:
            print(f"{FOLDER}: goes on after {max(saved)} of {EPOCHS} epochs")

    for epoch in range(max(saved, default=0), EPOCHS):
        sampler.set_epoch(epoch)  # else every epoch would have the same order
        torch.manual_seed(epoch * world_size + rank)  # for dropout: the same after a resume
        net.train()
        for text in train_loader:
            output = net(text[:, :-1].to(device))
            loss = nn.functional.nll_loss(output.flatten(0, 1), text[:, 1:].flatten().to(device))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)  # the norm of all parts together
            optimizer.step()

        net.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=device)  # of the loss; of its bytes
        with torch.no_grad():
            for text in val_loader:
                output = net(text[:, :-1].clamp(min=0).to(device))
                target = text[:, 1:].flatten().to(device)
                loss = nn.functional.nll_loss(output.flatten(0, 1), target, reduction="sum")
                sums += torch.stack([loss, (target != -100).sum()])
        dist.all_reduce(sums)  # the sums over all processes
        weights, moments = get_state_dict(net, optimizer)
        dcp.save({"net": weights, "optimizer": moments}, checkpoint_id=FOLDER / "unfinished")
        if rank == 0:
            os.rename(FOLDER / "unfinished", FOLDER / str(epoch + 1))  # whole, or not there
            shutil.rmtree(FOLDER / str(epoch - 1), ignore_errors=True)  # two are kept
            print(f"epoch {epoch}: loss {sums[0] / sums[1]:.4f}")

    torch.manual_seed(0)  # all processes draw the same bytes
    text = torch.tensor([list(b"What goes wrong: ")], device=device)
    with torch.no_grad():
        for _ in range(300):  # in all processes: each gives its parts to the others
            output = net(text[:, -LENGTH:])[:, -1]
            text = torch.cat([text, output.exp().multinomial(1)], dim=1)
    if rank == 0:
        print(bytes(text[0].tolist()).decode(errors="replace"))
    del net, optimizer
    gc.collect()  # ends its threads: else gloo may abort when Python ends
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
