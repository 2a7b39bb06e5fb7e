"""The classification models of torchvision train a step, or are refused in one clear line."""

from types import SimpleNamespace

import pytest
import torch
from torchvision import models

from longrun.model import build_model

# What does not take 64 pixels, and the size that it does take.
SIZES = {"inception_v3": 299, "maxvit_t": 224, "vit_h_14": 56}
RANDOM = "kaiming_uniform_ kaiming_normal_ xavier_uniform_ trunc_normal_ normal_ uniform_".split()


def train_a_step(arch, image_size):
    args = SimpleNamespace(arch=arch, image_size=image_size, evaluate=False)
    example = torch.zeros(2, 3, image_size, image_size)
    net = build_model(args, 7, torch.device("cpu"), example)
    output = net(torch.randn(2, 3, image_size, image_size))
    assert output.shape == (2, 7)
    torch.nn.functional.cross_entropy(output, torch.tensor([1, 2])).backward()
    torch.optim.SGD(net.parameters(), 0.1, 0.9).step()
    assert all(p.grad is not None for p in net.parameters() if p.requires_grad), arch


# BatchNorm, patches, a second output, pictures that may be too small, no layer called fc.
KINDS = "resnet18 vit_b_32 inception_v3 squeezenet1_1 mobilenet_v3_small convnext_tiny".split()


@pytest.mark.full
@pytest.mark.parametrize("archs", [KINDS, pytest.param(None, marks=pytest.mark.soak)])
@pytest.mark.timeout(1800)
def test_models_of_torchvision(archs, monkeypatch):
    for name in RANDOM:  # to draw billions of numbers takes half the time
        monkeypatch.setattr(torch.nn.init, name, lambda tensor, *_, **__: torch.zero_(tensor.data))
    for arch in archs or models.list_models(module=models):
        if arch in SIZES:
            refused = f"^(cannot build )?{arch} .*--image-size 64: .*\\Z"  # in one line
            with pytest.raises(ValueError, match=refused):
                train_a_step(arch, 64)
        train_a_step(arch, SIZES.get(arch, 64))
