"""Every classification model of torchvision trains a step, or is refused in one clear line."""

from types import SimpleNamespace

import pytest
import torch
from torchvision import models

from common.model import build_model
from tests import nets

CPU = torch.device("cpu")
# What does not take 64 pixels, and the size that it does take.
SIZES = {"inception_v3": 299, "maxvit_t": 224, "vit_h_14": 56}
RANDOM = "kaiming_uniform_ kaiming_normal_ xavier_uniform_ trunc_normal_ normal_ uniform_".split()


def arguments(arch, image_size=64, pretrained=False):
    return SimpleNamespace(arch=arch, image_size=image_size, pretrained=pretrained)


def train_a_step(arch, image_size):
    net = build_model(arguments(arch, image_size), 7, CPU).train()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, 0.9, fused=True)
    output = net(torch.randn(2, 3, image_size, image_size))
    assert output.shape == (2, 7)
    torch.nn.functional.cross_entropy(output, torch.tensor([1, 2])).backward()
    optimizer.step()
    assert all(p.grad is not None for p in net.parameters() if p.requires_grad), arch


def sizes(arch):
    """At 64 pixels, and at its own size if that is another: sizes are tried where they differ."""
    return [64, SIZES[arch]] if arch in SIZES else [64]


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_every_model_of_torchvision(monkeypatch):
    for name in RANDOM:  # to draw billions of numbers takes half the time
        monkeypatch.setattr(torch.nn.init, name, lambda tensor, *_, **__: torch.zero_(tensor.data))
    trained, refused = [], []
    for arch in models.list_models(module=models):
        for image_size in sizes(arch):
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


@pytest.mark.parametrize(
    "arch, image_size", [("resnet18", 64), ("googlenet", 64), ("vit_b_16", 48), ("maxvit_t", 224)]
)
def test_a_few_models(arch, image_size):
    train_a_step(arch, image_size)


def test_a_gpu_that_fails_is_not_put_down_to_the_image_size(monkeypatch):
    def fail(num_classes):
        raise RuntimeError("CUDA out of memory. Tried to allocate\nfurther lines")

    monkeypatch.setattr(nets, "plain", fail)
    expected = "^cpu cannot run tests.nets:plain: CUDA out of memory. Tried to allocate$"
    with pytest.raises(ValueError, match=expected):
        build_model(arguments("tests.nets:plain"), 10, CPU)


def test_pretrained_weights_but_for_another_head(tmp_path, monkeypatch):
    """From a file as torchvision caches it: a test downloads nothing."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    (tmp_path / "hub/checkpoints").mkdir(parents=True)
    weights = models.get_model_weights("resnet18").DEFAULT
    torch.manual_seed(1)
    source = models.resnet18()
    torch.save(source.state_dict(), tmp_path / "hub/checkpoints" / weights.url.rsplit("/")[-1])
    for num_classes in (1000, 7):
        net = build_model(arguments("resnet18", 64, pretrained=True), num_classes, CPU)
        assert net.layer4[1].conv2.weight.equal(source.layer4[1].conv2.weight)
        assert net.fc.weight.shape == (num_classes, 512)
        assert (num_classes == 1000) == net.fc.weight[:7].equal(source.fc.weight[:7])
    with pytest.raises(ValueError, match="the weights of googlenet expect pixels"):
        build_model(arguments("googlenet", 64, pretrained=True), 7, CPU)
