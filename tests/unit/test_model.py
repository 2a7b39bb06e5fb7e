"""The model of --arch is built, and what cannot be trained is said in one line."""

import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from torchvision import models

from common.model import build_model, try_model
from tests import nets

CPU = torch.device("cpu")


def arguments(arch, image_size=64, pretrained=False):
    return SimpleNamespace(arch=arch, image_size=image_size, pretrained=pretrained)


def tried(arch, image_size=24, num_classes=10, local_batch_size=2):
    args = arguments(arch, image_size)
    net = build_model(args, num_classes, CPU)
    example = torch.zeros(1, 3, image_size, image_size)
    try_model(net, example, num_classes, local_batch_size, args)
    return net


@pytest.mark.parametrize(
    "arch, image_size", [("resnet18", 64), ("googlenet", 64), ("vit_b_32", 32)]
)
def test_models_of_torchvision(arch, image_size):
    net = tried(arch, image_size, 7)
    assert net.training and net(torch.randn(2, 3, image_size, image_size)).shape == (2, 7)
    kernels = [weight for weight in net.parameters() if weight.ndim == 4]
    assert all(weight.is_contiguous(memory_format=torch.channels_last) for weight in kernels)


def test_what_is_tried_changes_nothing():
    """The statistics of BatchNorm above all: they would differ from those of a resumed run."""
    torch.manual_seed(1)
    before = {name: value.clone() for name, value in nets.normed(10).state_dict().items()}
    torch.manual_seed(1)
    benchmark = torch.backends.cudnn.benchmark
    after = tried("tests.nets:normed", local_batch_size=1).state_dict()
    assert all(value.equal(after[name]) for name, value in before.items())
    assert torch.backends.cudnn.benchmark == benchmark


def test_an_example_that_is_no_image():
    args = arguments("tests.nets:text")
    net = build_model(args, 4, CPU)
    try_model(net, torch.zeros(1, 9, dtype=torch.int64), 4, 2, args)
    with pytest.raises(ValueError, match=r"^tests.nets:text cannot take the example: \w"):
        try_model(net, torch.full((1, 9), 100), 4, 2, args)


WRONG = {  # of a module `mine`, its text, and what is said of mine:net
    "syntax": ("def net(:", "cannot import --arch mine:net: SyntaxError: .*mine.py, line 1"),
    "name": ("import os\nprint(oss)", "cannot import --arch mine:net: NameError: name 'oss' is"),
    "exit": ("import sys\nsys.exit(3)", "cannot import --arch mine:net: SystemExit: 3"),
    "nothing": ("", "cannot import --arch mine:net: module 'mine' has no attribute 'net'"),
    "exit in it": ("def net(num_classes):\n    exit(3)", "mine:net cannot take .*: SystemExit: 3"),
    "GPU": (
        "def net(num_classes):\n    raise RuntimeError('CUDA out of memory.\\nfurther lines')",
        "the model does not run on this GPU: CUDA out of memory.$",
    ),
    "int16": (
        "import torch\nfrom tests.nets import plain\ndef net(num_classes):\n    n = plain(10)\n"
        "    n.register_buffer('ids', torch.zeros(3, dtype=torch.int16))\n    return n",
        "ids of mine:net is torch.int16, which processes cannot send to each other: make it torch",
    ),
    "expanded": (
        "import torch\nfrom tests.nets import plain\ndef net(num_classes):\n    n = plain(10)\n"
        "    n.register_buffer('mask', torch.zeros(1, 1).expand(1, 3))\n    return n",
        r"mask of mine:net is made by expand\(\), so it cannot be written to: add .clone\(\)",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_module_of_ones_own_that_is_wrong(case, tmp_path, monkeypatch):
    text, message = WRONG[case]
    (tmp_path / "mine.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    with pytest.raises(ValueError, match=f"^{message}") as error:
        tried("mine:net")
    assert "\n" not in str(error.value)


def test_an_expanded_dimension_of_one_is_no_expanded_tensor(monkeypatch):
    """As the position_ids of many language models."""
    make = nets.plain

    def plain(num_classes):
        net = make(num_classes)
        net.register_buffer("position_ids", torch.arange(5).expand(1, -1))
        return net

    monkeypatch.setattr(nets, "plain", plain)
    tried("tests.nets:plain")


HANGS = """
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
import torch
from common.model import try_model

class Net(torch.nn.Module):
    def parameters(self):
        return iter([SimpleNamespace(device=torch.device("cuda"))])

    def forward(self, example):
        time.sleep(60)

try_model(Net(), (), 10, 2, SimpleNamespace(arch="a", dist_timeout=1))
"""


def test_a_gpu_that_does_not_answer_ends_the_process():
    """The GPU is made up; the time limit is real."""
    start = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", HANGS], cwd=ROOT, stderr=-1, text=True)
    assert ended.returncode == 1 and time.monotonic() - start < 30
    assert "Timeout (0:00:01)!" in ended.stderr and "in try_model" in ended.stderr


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The folder where torchvision looks for weights before it downloads any."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    folder = tmp_path / "hub/checkpoints"
    folder.mkdir(parents=True)
    return folder


def file_of(arch):
    return models.get_model_weights(arch).DEFAULT.url.rsplit("/")[-1]


def test_pretrained_weights_but_for_another_head(hub):
    torch.manual_seed(1)
    source = models.resnet18()
    torch.save(source.state_dict(), hub / file_of("resnet18"))
    for num_classes in (1000, 7):
        net = build_model(arguments("resnet18", pretrained=True), num_classes, CPU)
        assert net.layer4[1].conv2.weight.equal(source.layer4[1].conv2.weight)
        assert net.fc.weight.shape == (num_classes, 512)
        assert (num_classes == 1000) == net.fc.weight[:7].equal(source.fc.weight[:7])
    with pytest.raises(ValueError, match="the weights of googlenet expect pixels"):
        build_model(arguments("googlenet", pretrained=True), 7, CPU)


def test_pretrained_weights_under_the_names_that_torchvisions_files_have(hub):
    source = models.densenet121().state_dict()
    numbered = re.compile(r"(denselayer\d+\.(?:norm|conv))(\d)")
    old = {numbered.sub(r"\1.\2", key): value for key, value in source.items()}
    old = {key: value for key, value in old.items() if "num_batches_tracked" not in key}
    assert "features.denseblock1.denselayer1.norm.1.weight" in old
    torch.save(old, hub / file_of("densenet121"))
    net = build_model(arguments("densenet121", pretrained=True), 7, CPU).state_dict()
    head = ("classifier.weight", "classifier.bias")
    assert [key for key in source if not source[key].equal(net[key])] == list(head)


def test_pretrained_weights_for_another_image_size(hub, monkeypatch):
    # Without its layers, all alike, it is small.
    monkeypatch.setattr(models.vision_transformer, "EncoderBlock", lambda *_: torch.nn.Identity())
    torch.save(models.vit_b_32().state_dict(), hub / file_of("vit_b_32"))
    with pytest.raises(ValueError, match=r"^the weights of vit_b_32 are for --image-size 224$"):
        build_model(arguments("vit_b_32", 64, pretrained=True), 7, CPU)


def test_pretrained_weights_are_downloaded_once_a_node(hub, monkeypatch):
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


def test_pretrained_weights_that_cannot_be_written(hub):
    hub.rmdir()
    hub.write_text("")
    expected = (
        "^cannot download the weights of resnet18: .*: without internet, put https://.* into "
    )
    with pytest.raises(ValueError, match=expected):
        build_model(arguments("resnet18", pretrained=True), 7, CPU)
