"""Every classification model of torchvision trains a step, or is refused in one clear line."""

from types import SimpleNamespace

import pytest
import torch
from torchvision import models

from common.model import build_model, try_model

CPU = torch.device("cpu")
# What does not take 64 pixels, and the size that it does take.
SIZES = {"inception_v3": 299, "maxvit_t": 224, "vit_h_14": 56}
RANDOM = "kaiming_uniform_ kaiming_normal_ xavier_uniform_ trunc_normal_ normal_ uniform_".split()


def train_a_step(arch, image_size):
    args = SimpleNamespace(arch=arch, image_size=image_size, pretrained=False)
    net = build_model(args, 7, CPU)
    try_model(net, torch.zeros(1, 3, image_size, image_size), 7, 2, args)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, 0.9, fused=True)
    output = net(torch.randn(2, 3, image_size, image_size))
    assert output.shape == (2, 7)
    torch.nn.functional.cross_entropy(output, torch.tensor([1, 2])).backward()
    optimizer.step()
    assert all(p.grad is not None for p in net.parameters() if p.requires_grad), arch


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_every_model_of_torchvision(monkeypatch):
    for name in RANDOM:  # to draw billions of numbers takes half the time
        monkeypatch.setattr(torch.nn.init, name, lambda tensor, *_, **__: torch.zero_(tensor.data))
    trained, refused = [], []
    for arch in models.list_models(module=models):
        for image_size in [64, SIZES[arch]] if arch in SIZES else [64]:
            try:
                train_a_step(arch, image_size)
                trained.append(arch)
            except ValueError as error:
                message = str(error)
                assert message.startswith(f"{arch} cannot take --image-size {image_size}: ")
                assert "\n" not in message
                refused.append((arch, image_size))
    assert refused == [(arch, 64) for arch in SIZES]
    assert sorted({*trained}) == models.list_models(module=models)  # at one size or the other
