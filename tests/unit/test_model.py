"""The model of --arch is built, and what cannot be trained is said in one line.

Each of torchvision's: tests/run/test_models.py.
"""

import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torchvision import models

from common.model import build_model
from tests import nets

CPU = torch.device("cpu")


def arguments(arch, image_size=64, pretrained=False, evaluate=False):
    known = {"arch": arch, "image_size": image_size, "pretrained": pretrained}
    return SimpleNamespace(**known, evaluate=evaluate, resume=None)


def tried(arch):
    return build_model(arguments(arch, 24), 10, CPU, torch.zeros(2, 3, 24, 24))


def test_what_is_tried_changes_nothing(tmp_path, monkeypatch):
    """Statistics of BatchNorm above all, also of one that stands in two places; random numbers."""
    (tmp_path / "shared.py").write_text(
        "from tests import nets\n"
        "def net(num_classes):\n"
        "    net = nets.normed(num_classes)\n"
        "    net.insert(2, net[1])\n"
        "    return net\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    torch.manual_seed(1)
    before, drawn = nets.normed(10).state_dict(), torch.rand(1)
    torch.manual_seed(1)
    net = tried("shared:net")
    assert torch.rand(1) == drawn
    assert net.training and net[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert all(value.equal(net.state_dict()[name]) for name, value in before.items() if name < "2")


WRONG = {  # of a module `mine`: its text, and what is said of mine:net
    "def net(:": "cannot build mine:net for 10 .*: SyntaxError: .*mine.py, line 1",
    "import sys\nsys.exit(3)": "cannot build mine:net for 10 .*: SystemExit: 3",
    "": "cannot build mine:net for 10 .*: AttributeError: module 'mine' has no attribute 'net'",
    "def net(num_classes):\n    raise RuntimeError('CUDA out of memory.\\nfurther lines')": (
        "cannot build mine:net for 10 .*: RuntimeError: CUDA out of memory.$"
    ),
}


@pytest.mark.parametrize("text", WRONG)
def test_a_module_of_ones_own_that_is_wrong(text, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    with pytest.raises(ValueError, match=f"^{WRONG[text]}") as error:
        tried("mine:net")
    assert "\n" not in str(error.value)


# Pretrained weights.


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The folder where torchvision looks for weights before it downloads any."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    folder = tmp_path / "hub/checkpoints"
    folder.mkdir(parents=True)
    return folder


def file_of(arch):
    return models.get_model_weights(arch).DEFAULT.url.rsplit("/")[-1]


@pytest.mark.parametrize("num_classes", [1000, 7])
def test_all_weights_but_a_head_of_other_classes_are_those_of_the_file(hub, num_classes):
    """Under the names that torchvision's own files have, some of which are old."""
    source = models.densenet121().state_dict()
    numbered = re.compile(r"(denselayer\d+\.(?:norm|conv))(\d)")
    old = {numbered.sub(r"\1.\2", key): value for key, value in source.items()}
    old = {key: value for key, value in old.items() if "num_batches_tracked" not in key}
    assert "features.denseblock1.denselayer1.norm.1.weight" in old
    torch.save(old, hub / file_of("densenet121"))
    net = build_model(arguments("densenet121", pretrained=True), num_classes, CPU).state_dict()
    head = [] if num_classes == 1000 else ["classifier.weight", "classifier.bias"]
    assert [key for key in source if not source[key].equal(net[key])] == head


def test_weights_of_other_classes_are_not_evaluated():
    """Their head would be one that nobody has trained."""
    with pytest.raises(ValueError, match=r"is of 1000 classes, not 7: train it first$"):
        build_model(arguments("resnet18", pretrained=True, evaluate=True), 7, CPU)
    with pytest.raises(ValueError, match=r"^nothing to evaluate: give --resume PATH or --pretr"):
        build_model(arguments("resnet18", evaluate=True), 1000, CPU)


def test_batch_norm_over_one_value_is_known_before_training(tmp_path, monkeypatch):
    """Which is none where it is evaluated only."""
    (tmp_path / "pooled.py").write_text(
        "from torch import nn\n"
        "def net(num_classes):\n"
        "    pooled = nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(3), nn.Flatten()\n"
        "    return nn.Sequential(*pooled, nn.Linear(3, num_classes))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    one, two = torch.zeros(1, 3, 24, 24), torch.zeros(2, 3, 24, 24)
    build_model(arguments("pooled:net", 24), 10, CPU, two)
    build_model(arguments("pooled:net", 24, evaluate=True), 10, CPU, one)
    message = r"^pooled:net cannot be trained with so small .* Expected more than 1 value per"
    with pytest.raises(ValueError, match=message) as error:
        build_model(arguments("pooled:net", 24), 10, CPU, one)
    assert "\n" not in str(error.value)


def test_weights_for_another_image_size(hub, monkeypatch):
    # Without its layers, all alike, it is small.
    monkeypatch.setattr(models.vision_transformer, "EncoderBlock", lambda *_: torch.nn.Identity())
    torch.save(models.vit_b_32().state_dict(), hub / file_of("vit_b_32"))
    with pytest.raises(ValueError, match=r"^the weights of vit_b_32 are for --image-size 224$"):
        build_model(arguments("vit_b_32", 64, pretrained=True), 7, CPU)


def test_weights_are_downloaded_once_a_node(hub, monkeypatch):
    """Three threads instead of processes: the lock is one between open files."""
    downloads = []

    def download(url, path, *_, **__):
        downloads.append(url)
        time.sleep(0.3)  # else the others would find it
        torch.save(models.squeezenet1_1().state_dict(), path)

    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    args = arguments("squeezenet1_1", pretrained=True)
    with ThreadPoolExecutor(3) as pool:
        nets = list(pool.map(lambda _: build_model(args, 7, CPU), range(3)))
    assert len(nets) == 3 and len(downloads) == 1


def test_an_example_may_lie_on_another_device():
    """As a collate_fn makes it: in host memory, and the model is on a GPU."""
    example = torch.zeros(2, 3, 24, 24)
    build_model(arguments("resnet18", 24), 10, torch.device("meta"), example)
