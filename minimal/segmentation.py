"""Segmentation on many GPUs: Dice over the global batch, IoU over the whole validation set.

$ torchrun --standalone --nproc-per-node=2 minimal/segmentation.py
"""

import gc
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy, interpolate, one_hot, pad
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

EPOCHS = 5
BATCH_SIZE = 48  # images in a step, over all processes: a multiple of world_size
CLASSES = 2  # of pixels: background and digit


def make_pairs():  # a digit on noise and its mask, two channels for each: [1797, 2, 40, 40]
    digits = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 16
    generator = torch.Generator().manual_seed(0)  # the same images in all processes
    pairs = []
    for digit in interpolate(digits, scale_factor=2, mode="bilinear"):
        top, left = torch.randint(4, 21, (2,), generator=generator).tolist()
        digit = pad(digit, (left, 24 - left, top, 24 - top))
        noise = 0.6 * torch.rand(1, 40, 40, generator=generator)
        pairs.append(torch.cat([digit.maximum(noise), digit > 0.4]))
    return torch.stack(pairs)


class Crops:  # of such pairs: an image, float32 [1, 32, 32], and its mask, int64 [32, 32]
    def __init__(self, pairs, augment):
        self.pairs, self.augment = pairs, augment

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, i):
        top, left, flip = 4, 4, False
        if self.augment:
            top, left, flip = *torch.randint(9, (2,)).tolist(), torch.rand(1) < 0.5
        pair = self.pairs[i, :, top : top + 32, left : left + 32]  # one crop, of image and mask
        pair = pair.flip(2) if flip else pair
        return pair[:1], pair[1].long()


def convs(inputs, outputs):  # GroupNorm looks at one image at a time: few of them will do
    conv = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1)
    return nn.Sequential(conv, nn.GroupNorm(4, outputs), nn.ReLU())


class UNet(nn.Module):  # takes images, [n, 1, h, w]; gives scores of pixels, [n, CLASSES, h, w]
    def __init__(self):
        super().__init__()
        self.fine = nn.Sequential(convs(1, 16), convs(16, 16))
        self.coarse = nn.Sequential(
            nn.MaxPool2d(2), convs(16, 32), convs(32, 32), nn.Upsample(scale_factor=2)
        )
        self.both = nn.Sequential(convs(16 + 32, 16), nn.Conv2d(16, CLASSES, kernel_size=1))

    def forward(self, images):
        fine = self.fine(images)
        return self.both(torch.cat([fine, self.coarse(fine)], dim=1))


def sum_of_all(part):  # over all processes, with a gradient, which all_reduce alone would lose
    total = part.detach().clone()
    dist.all_reduce(total)  # is now the value; the difference below is 0, and has the gradient
    return total + dist.get_world_size() * (part - part.detach())  # DDP divides by world_size


def dice_loss(output, target):  # 1 - Dice: for each class a ratio of sums over the global batch
    scores, truth = output.softmax(dim=1), one_hot(target, CLASSES).movedim(3, 1)
    both, either = (scores * truth).sum(dim=(0, 2, 3)), (scores + truth).sum(dim=(0, 2, 3))
    both, either = sum_of_all(torch.stack([both, either]))
    return 1 - ((2 * both + 1) / (either + 1)).mean()  # + 1: a class may be in no image


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

    pairs = make_pairs()  # every fifth is for validation
    train_set = Crops(pairs[torch.arange(1797) % 5 < 4], augment=True)
    val_set = Crops(pairs[4::5], augment=False)
    if len(train_set) < BATCH_SIZE:
        raise SystemExit(f"{len(train_set)} images, BATCH_SIZE {BATCH_SIZE}: no step in an epoch")
    sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank, drop_last=True)
    train_loader = DataLoader(train_set, BATCH_SIZE // world_size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(val_set, BATCH_SIZE, sampler=range(rank, len(val_set), world_size))

    net = UNet().to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    model = DistributedDataParallel(net)  # averages the gradients in backward()

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # else every epoch would have the same order
        net.train()
        for images, target in train_loader:
            output, target = model(images.to(device)), target.to(device)
            loss = cross_entropy(output, target) + dice_loss(output, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        net.eval()
        matrix = torch.zeros(CLASSES, CLASSES, dtype=torch.long, device=device)
        with torch.no_grad():
            for images, target in val_loader:
                prediction = net(images.to(device)).argmax(dim=1)
                cells = (CLASSES * target.to(device) + prediction).flatten()
                matrix += cells.bincount(minlength=CLASSES**2).view(CLASSES, CLASSES)
        dist.all_reduce(matrix)  # the sum over all processes: of pixels, never of IoU
        both, either = matrix.diag(), matrix.sum(dim=0) + matrix.sum(dim=1)
        iou = both / (either - both).clamp(min=1)  # of each class
        if rank == 0:
            print(f"epoch {epoch}: mIoU {100 * iou.mean().item():.1f} %")
            torch.save(net.state_dict(), "segmentation.pth")
    del model
    gc.collect()  # ends its threads: else gloo may abort when Python ends
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
