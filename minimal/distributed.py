"""DistributedDataParallel: a process per GPU, started by torchrun.

$ torchrun --standalone --nproc-per-node=2 minimal/distributed.py
"""

import gc
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

EPOCHS = 5
BATCH_SIZE = 64  # images in a step, over all processes: a multiple of world_size


def build_net():  # takes images, float32 [n, 1, 8, 8]; gives a score for each digit, [n, 10]
    conv = nn.Sequential(nn.Conv2d(1, 64, kernel_size=3), nn.BatchNorm2d(64), nn.ReLU())
    return nn.Sequential(conv, nn.Flatten(), nn.Linear(64 * 6 * 6, 10))


def main():
    rank = int(os.environ["RANK"])  # my number among all processes
    local_rank = int(os.environ["LOCAL_RANK"])  # my number on this machine: it chooses the GPU
    world_size = int(os.environ["WORLD_SIZE"])  # how many processes there are
    if BATCH_SIZE % world_size:
        raise SystemExit(f"BATCH_SIZE {BATCH_SIZE} must be a multiple of {world_size} (processes)")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(local_rank)  # "cuda" is now this process's own GPU
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    torch.manual_seed(rank)  # else all processes would draw the same random numbers

    digits = load_digits()  # 1797 images, values from 0 to 16; every fifth is for validation
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    dataset = TensorDataset(images, torch.tensor(digits.target))
    train_set = Subset(dataset, [i for i in range(1797) if i % 5 < 4])
    val_set = Subset(dataset, range(4, 1797, 5))
    if len(train_set) < BATCH_SIZE:
        raise SystemExit(f"{len(train_set)} images, BATCH_SIZE {BATCH_SIZE}: no step in an epoch")
    sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank, drop_last=True)
    train_loader = DataLoader(train_set, BATCH_SIZE // world_size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(val_set, BATCH_SIZE, sampler=range(rank, len(val_set), world_size))

    net = build_net().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    model = DistributedDataParallel(net)  # averages the gradients in backward()

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # else every epoch would have the same order
        net.train()
        for images, target in train_loader:
            output = model(images.to(device))
            loss = nn.functional.cross_entropy(output, target.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        for buffer in net.buffers():
            data = buffer.flatten().clone()  # a copy in one piece: others are sent wrongly
            dist.broadcast(data, src=0)  # rank 0's BatchNorm statistics are the ones saved
            buffer.copy_(data.view_as(buffer))
        net.eval()
        correct = torch.zeros(1, device=device)
        with torch.no_grad():
            for images, target in val_loader:
                output = net(images.to(device))
                correct += (output.argmax(dim=1) == target.to(device)).sum()
        dist.all_reduce(correct)  # the sum over all processes
        if rank == 0:
            print(f"epoch {epoch}: {100 * correct.item() / len(val_set):.1f} % correct")
            torch.save(net.state_dict(), "digits.pth")
    del model
    gc.collect()  # ends its threads: else gloo may abort when Python ends
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
