"""A GAN on many GPUs: two models, two optimizers, an average of the generator, and a resume.

$ torchrun --standalone --nproc-per-node=2 minimal/gan.py
"""

import gc
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler

EPOCHS = 30
BATCH_SIZE = 48  # images in a step, over all processes: a multiple of world_size
NOISE = 16  # numbers that an image is made of


def build_generator():  # takes noise, float32 [n, NOISE]; gives images, [n, 1, 8, 8], from 0 to 1
    hidden = [nn.Linear(NOISE, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(256, 64), nn.Sigmoid(), nn.Unflatten(1, (1, 8, 8)))


def build_discriminator():  # takes images; gives scores, [n]: positive for what it takes for real
    hidden = [nn.Linear(64, 256), nn.LeakyReLU(0.2), nn.Linear(256, 256), nn.LeakyReLU(0.2)]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(256, 1), nn.Flatten(0))


def loss_of(scores, label):  # a mean over the images: DDP needs no more
    return binary_cross_entropy_with_logits(scores, torch.full_like(scores, label))


def moments(images):  # [65, 65]: the count, the sums of the pixels, and those of their products
    rows = nn.functional.pad(images.flatten(1), (1, 0), value=1).double()
    return rows.T @ rows


def distance(sums, other):  # Fréchet's, as in FID, but of pixels: by their means and covariances
    means = [s[0, 1:] / s[0, 0] for s in (sums, other)]
    covs = [s[1:, 1:] / s[0, 0] - m.outer(m) for s, m in zip((sums, other), means, strict=True)]
    roots = torch.linalg.eigvals(covs[0] @ covs[1]).real.clamp(min=0).sqrt()
    return (means[0] - means[1]).square().sum() + sum(covs).trace() - 2 * roots.sum()


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

    def noise(count):  # all draw the same, and each takes its part: as one process would
        return torch.randn(count, NOISE)[rank::world_size].to(device)

    images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 16
    if len(images) < BATCH_SIZE:
        raise SystemExit(f"{len(images)} images, BATCH_SIZE {BATCH_SIZE}: no step in an epoch")
    sampler = DistributedSampler(images, num_replicas=world_size, rank=rank, drop_last=True)
    loader = DataLoader(images, BATCH_SIZE // world_size, sampler=sampler, drop_last=True)
    real_moments = moments(images)

    torch.manual_seed(0)
    generator, discriminator = build_generator().to(device), build_discriminator().to(device)
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=0.002, betas=(0.5, 0.99))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=0.002, betas=(0.5, 0.99))
    average = AveragedModel(generator, multi_avg_fn=get_ema_multi_avg_fn(0.99))  # the same in all
    parts = {"generator": generator, "discriminator": discriminator, "average": average}
    parts |= {"optimizer_g": optimizer_g, "optimizer_d": optimizer_d}
    start = 0
    if os.path.exists("gan.pth"):  # all processes read it, not only rank 0
        state = torch.load("gan.pth", weights_only=True, map_location=device)
        start = state["epoch"]
    starts = [None] * world_size
    dist.all_gather_object(starts, start)
    if len({*starts}) > 1:
        raise SystemExit(f"the processes differ in the epochs in gan.pth (copy it): {starts}")
    if start:
        for name, part in parts.items():
            part.load_state_dict(state[name])
        if rank == 0:
            print(f"gan.pth: goes on after {start} of {EPOCHS} epochs")
    model_g = DistributedDataParallel(generator)  # each averages its gradients in backward()
    model_d = DistributedDataParallel(discriminator)

    for epoch in range(start, EPOCHS):
        sampler.set_epoch(epoch)  # else every epoch would have the same order
        torch.manual_seed(epoch)  # the noise is then the same after a resume
        for real in loader:
            with torch.no_grad():  # the plain one: this step is not the generator's
                fake = generator(noise(BATCH_SIZE))
            loss_d = loss_of(model_d(real.to(device)), 1.0) + loss_of(model_d(fake), 0.0)
            optimizer_d.zero_grad()  # also of what the generator's step has left in it
            loss_d.backward()  # one for both calls
            optimizer_d.step()

            # The plain discriminator: its gradients are not used here, so nobody averages them.
            loss_g = loss_of(discriminator(model_g(noise(BATCH_SIZE))), 1.0)
            optimizer_g.zero_grad()
            loss_g.backward()
            optimizer_g.step()
            average.update_parameters(generator)

        torch.manual_seed(0)
        with torch.no_grad():
            sums = moments(average(noise(len(images))))
        dist.all_reduce(sums)  # over all processes: of sums, never of distances
        if rank == 0:
            print(f"epoch {epoch}: distance {distance(sums.cpu(), real_moments).item():.2f}")
            state = {name: part.state_dict() for name, part in parts.items()}
            torch.save(state | {"epoch": epoch + 1}, "gan.tmp")
            os.replace("gan.tmp", "gan.pth")  # if killed before, the old one is whole
    del model_g, model_d
    gc.collect()  # ends their threads: else gloo may abort when Python ends
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
