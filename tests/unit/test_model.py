"""The model of --arch is built, and what cannot be trained is said in one line.

Each of torchvision's: tests/run/test_models.py.
"""

import sys
from types import SimpleNamespace

import pytest
import torch

from longrun.model import build_model
from tests import nets

CPU = torch.device("cpu")


def arguments(arch, image_size=64, evaluate=False):
    return SimpleNamespace(arch=arch, image_size=image_size, evaluate=evaluate)


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


def test_buffers_can_be_written_to():
    """Also one that is expanded, which the try and every resume could not restore; as on a GPU."""
    net = tried("tests.nets:odd_buffers")
    assert net[0].expanded.equal(torch.zeros(3, 4)) and net[0].strided.is_contiguous()
    net[0].expanded[0, 0] = 1
    assert net[0].expanded.sum() == 1
    assert net[0].image.is_contiguous(memory_format=torch.channels_last)
    assert net.state_dict().keys() == nets.odd_buffers(10).state_dict().keys()


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


def test_an_example_may_lie_on_another_device():
    """As a collate_fn makes it: in host memory, and the model is on a GPU."""
    example = torch.zeros(2, 3, 24, 24)
    build_model(arguments("resnet18", 24), 10, torch.device("meta"), example)
