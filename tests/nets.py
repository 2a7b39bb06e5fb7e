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


def smooth(num_classes):
    """plain() without a ReLU, which rounding can turn on or off.

    Where one process became two at the 11th of 250 steps, plain()'s weights differed by 7e-4 at the
    end; these by 3e-7.
    """
    net = plain(num_classes)
    net[1] = nn.Tanh()
    return net


def braked(num_classes):
    """smooth() whose steps take a second each while the file BRAKE is there: time to act."""
    net = smooth(num_classes)
    net.register_forward_pre_hook(wait)
    return net


def wait(net, _):
    if net.training and os.path.exists(os.environ.get("BRAKE", "")):
        time.sleep(1)


def normed(num_classes):
    """BatchNorm, and dropout: state beside the weights, and random numbers in every step.

    A step takes STEP_SECONDS more, where a test must act before a fast machine is through.
    """
    net = nn.Sequential(
        nn.Conv2d(3, 8, 5, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(128, num_classes),
    )
    if seconds := float(os.environ.get("STEP_SECONDS", 0)):
        net.register_forward_pre_hook(lambda net, _: time.sleep(seconds * net.training))
    return net


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


def text(num_classes):
    """For token ids [n, length] below 100."""
    return nn.Sequential(nn.EmbeddingBag(100, 8), nn.Linear(8, num_classes))
