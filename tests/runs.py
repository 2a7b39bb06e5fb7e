"""Training runs in the process of a test: a small model, and no images at all."""

from types import SimpleNamespace

import torch

from common.checkpoint import Run
from common.metrics import AverageMeter
from tests import nets

STEPS = 10  # of an epoch


class Images(list):
    """What a Run asks of a data set."""

    def __init__(self, length=80, classes="0123456789"):
        super().__init__(range(length))
        self.classes = list(classes)


def arguments(folder, resume="auto", **more):
    """The flags that a Run looks at."""
    known = {"arch": "a", "batch_size": 8, "seed": 0, "evaluate": False, "tensorboard": False}
    known |= {"epochs": 9999, "max_steps": None}
    return SimpleNamespace(**known | {"checkpoint_dir": str(folder), "resume": resume} | more)


def read(folder, resume="auto", images=None, **more):
    """A run that has read its checkpoint, and done nothing else."""
    return Run(arguments(folder, resume, **more), images or Images(), STEPS, world_size=1)


def opened(folder, resume="auto", images=None, **more):
    """A run that may write to its folder."""
    run = read(folder, resume, images, **more)
    run.open_folder()
    return run


def parts():
    """What a run restores and saves."""
    torch.manual_seed(0)
    net = nets.plain(10)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, 0.9, weight_decay=1e-4, fused=True)
    return net, optimizer, torch.amp.GradScaler("cpu", enabled=False), [AverageMeter("loss")]


def train_a_step(run):
    run.optimizer.zero_grad()
    run.net(torch.rand(2, 3, 24, 24)).sum().backward()
    run.optimizer.step()


def write(folder, count):
    """Save `count` checkpoints, of epochs 1, 2, ..., each the best so far; returns their run."""
    run = opened(folder)
    run.restore(*parts())
    train_a_step(run)
    for epoch in range(1, count + 1):
        save(run, epoch)
    return run


def save(run, epoch, acc1=None):
    """As at the end of an epoch; without acc1 it is the best so far."""
    run.epoch = epoch
    run.save({"epoch": epoch, "step": 0}, 50.0 + epoch if acc1 is None else acc1)
