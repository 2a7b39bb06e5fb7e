"""Training runs in the process of a test: a small model, and no images at all."""

from argparse import Namespace

import torch

from common.metrics import AverageMeter
from longrun.checkpoint import Checkpoints
from tests import nets

STEPS = 10  # of an epoch


class Images(list):
    """What Checkpoints ask of a data set."""

    def __init__(self, length=80, classes="0123456789"):
        super().__init__(range(length))
        self.classes = list(classes)


def arguments(folder, resume="auto", **more):
    """The flags that Checkpoints look at."""
    known = {"arch": "a", "image_size": 24, "batch_size": 8, "seed": 0, "data": None, "lr": 0.1}
    known |= {"epochs": 9999, "max_steps": None, "evaluate": False}
    known |= {"warmup_epochs": 0, "precision": "fp32", "workers": 1}
    return Namespace(**known | {"checkpoint_dir": str(folder), "resume": resume} | more)


def read(folder, resume="auto", images=None, world_size=1, **more):
    """Checkpoints of a run that has the lock, has read its own, and done nothing else."""
    run = Checkpoints(arguments(folder, resume, **more), 0, world_size)
    run.start_progress(images or Images(), STEPS)
    return run


def parts():
    """What a run restores and saves: (net, optimizer, scaler, meters)."""
    torch.manual_seed(0)
    net = nets.plain(10)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, 0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return net, optimizer, scaler, {"loss": AverageMeter("loss")}


def two_groups(optimizer_type, **more):
    """parts() with another optimizer, which has two groups of weights with rates of their own."""
    net, _, scaler, meters = parts()
    groups = [{"params": net[0].parameters(), "lr": 0.01}, {"params": net[4].parameters()}]
    return net, optimizer_type(groups, lr=0.1, **more), scaler, meters


def opened(folder, resume="auto", images=None, **more):
    """A run that may write to its folder, with the state of its checkpoint."""
    run = read(folder, resume, images, **more)
    run.attach(*parts())
    run.restore()
    run.discard_leftovers()
    return run


def train_a_step(run):
    run.optimizer.zero_grad()
    run.net(torch.rand(2, 3, 24, 24)).sum().backward()
    run.optimizer.step()


def write(folder, count, **more):
    """Save `count` checkpoints, of epochs 1, 2, ..., each the best so far; returns their run."""
    run = opened(folder, **more)
    train_a_step(run)
    for epoch in range(1, count + 1):
        save(run, epoch)
    return run


def save(run, epoch, acc1=None):
    """As at the end of an epoch; without acc1 it is the best so far."""
    run.progress.epoch, run.progress.step = epoch - 1, STEPS
    run.progress.end_epoch()
    is_best = run.progress.record_score(50.0 + epoch if acc1 is None else acc1)
    run.save({"epoch": epoch, "step": 0}, is_best)
