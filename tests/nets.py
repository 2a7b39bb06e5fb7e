"""Small models for the tests, named as --arch tests.nets:NAME."""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torchvision.models import VisionTransformer


def plain(num_classes):
    """No BatchNorm: what it computes for an image does not depend on the rest of the batch."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 5, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(128, num_classes),
    )


def slowed(net):
    """Time for a test to act, however fast the machine is.

    A step takes STEP_SECONDS more, or a second while the file BRAKE is there.
    """

    def wait(net, _):
        if net.training:
            braked = os.path.exists(os.environ.get("BRAKE", ""))
            time.sleep(1 if braked else float(os.environ.get("STEP_SECONDS", 0)))

    if {"BRAKE", "STEP_SECONDS"} & os.environ.keys():
        net.register_forward_pre_hook(wait)
    return net


def smooth(num_classes):
    """plain() without a ReLU, which rounding can turn on or off.

    Where one process became two at the 11th of 250 steps, plain()'s weights differed by 7e-4 at the
    end; these by 3e-7.
    """
    net = plain(num_classes)
    net[1] = nn.Tanh()
    return slowed(net)


def normed(num_classes):
    """BatchNorm, and dropout: state beside the weights, and random numbers in every step."""
    layers = list(plain(num_classes))
    layers.insert(1, nn.BatchNorm2d(8))
    layers.insert(-1, nn.Dropout(0.2))
    return slowed(nn.Sequential(*layers))


def transformer(num_classes):
    """Two blocks, dropout, no BatchNorm; for --image-size 24."""
    return VisionTransformer(24, 8, 2, 2, 32, 64, dropout=0.1, num_classes=num_classes)


def two_outputs(num_classes):
    class Net(nn.Module):
        def forward(self, images):
            return images, images

    return Net()


def wrong_head(num_classes):
    return plain(num_classes + 1)


def odd_buffers(num_classes):
    """Buffers of many kinds, in which each process writes its own numbers while it trains.

    Where it is evaluated they must be those of rank 0.
    """
    net, table = plain(num_classes), torch.zeros(4, 2)
    buffers = {
        "strided": table[:, 0],
        "turned": torch.zeros(2, 3).t(),
        "expanded": torch.zeros(4).expand(3, -1),
        "image": torch.zeros(1, 3, 4, 4).to(memory_format=torch.channels_last),
        "grey": torch.zeros(3, 1, 4, 4).to(memory_format=torch.channels_last),  # two layouts in one
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(0.0),
    }
    for name in "bool int8 int16 uint16 int64 float16 bfloat16 float64 complex64".split():
        buffers[f"of_{name}"] = torch.zeros(4, dtype=getattr(torch, name))
    for name, buffer in buffers.items():
        net[0].register_buffer(name, buffer, persistent=name != "turned")
    net[0].register_buffer("nothing", torch.full((2,), float("nan")))  # a constant

    def look(layer, _):
        rank = dist.get_rank() if dist.is_initialized() else int(os.getenv("HOROVOD_RANK", 0))
        if layer.training:
            for name in buffers:
                getattr(layer, name).fill_(1 - rank)
            layer.trained = True
        wrong = [name for name in buffers if not (getattr(layer, name) == 1).all()]
        if wrong and not layer.training and hasattr(layer, "trained"):
            raise RuntimeError(f"not rank 0's: {wrong}")

    net[0].register_forward_pre_hook(look)
    return net
