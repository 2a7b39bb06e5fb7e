"""Small models for the tests, named as --arch tests.nets:NAME."""

import os
import time

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
