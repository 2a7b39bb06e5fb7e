"""What people take out of here works in a program of their own, without traps."""

import threading
from types import SimpleNamespace

import pytest
import torch
from conftest import PYTHON, ROOT, load, run, same_state
from torch import nn

import dataparallel
from common.metrics import AverageMeter, accuracy
from common.model import build_model, try_model
from common.prefetcher import Prefetcher
from tests import nets
from tests.runs import read

CPU = torch.device("cpu")


class Several(nn.Module):
    """A model of a dict of tensors and tuples."""

    def __init__(self, num_classes):
        super().__init__()
        self.head = nn.Linear(5, num_classes)

    def forward(self, batch):
        return self.head(batch["a"] + batch["b"][0])


class Videos(nn.Sequential):
    """Weights of five dimensions have no channels_last of images."""

    def __init__(self, num_classes):
        layers = nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, num_classes)
        super().__init__(nn.Conv3d(3, 4, 3), *layers)


@pytest.mark.parametrize(
    "model, example",
    [
        (Several, {"a": torch.ones(1, 5), "b": (torch.ones(1, 5),)}),
        (Videos, torch.zeros(1, 3, 5, 8, 8)),
    ],
    ids=["several", "videos"],
)
def test_a_model_of_what_is_no_image(model, example, monkeypatch):
    """It is tried on a batch of one of what it takes, and comes ready to be trained."""
    monkeypatch.setattr(nets, "plain", model)
    args = SimpleNamespace(arch="tests.nets:plain", image_size=24, pretrained=False)
    net = build_model(args, 3, CPU)
    try_model(net, example, 3, 1, args)
    assert net.training and net(example).shape == (1, 3)


WATCHED = """
import time, torch
from common.prefetcher import Prefetcher
from common.watch import Watch

class Place:
    def place(self):
        return "epoch 3 step 40"

watch = Watch(0, 1, Place(), seconds=2)
for batch in Prefetcher([torch.ones(2)] * 3, torch.device("cpu"), watch):
    print("batch", flush=True)
for batch in Prefetcher([torch.ones(2)] * 3, torch.device("cpu"), watch):
    break
with watch:
    pass
time.sleep(4)
print("a loop of one's own", flush=True)
with watch:
    with watch:
        pass
    time.sleep(100)
"""


@pytest.mark.full
def test_a_watch_ends_only_its_own_blocks(tmp_path):
    """Code before, between and after them takes as long as it takes."""
    output = run([PYTHON, "-c", WATCHED], tmp_path, env={"PYTHONPATH": str(ROOT)}, code=1)
    assert output.startswith("batch\n" * 3 + "a loop of one's own\n")
    last = output.splitlines()[-1]
    assert last == "rank 0 failed at epoch 3 step 40: no progress for 2 s; see the stack above"


IMPORTS = """
import os, sys, torch
import common.metrics
assert not {"torchvision", "PIL", "sklearn"} & sys.modules.keys()
del sys.modules["common.metrics"]
import torchvision, torchvision.transforms.v2
for name in sys.argv[1:]:
    if os.fork() == 0:
        __import__(f"common.{name}")
        os._exit(0)
    assert os.wait()[1] == 0, name
"""


def test_each_module_can_be_imported_alone(tmp_path):
    """Whatever was imported before; and numbers need no library for images."""
    names = sorted(path.stem for path in (ROOT / "common").glob("[a-z]*.py"))
    assert len(names) > 14
    run([PYTHON, "-c", IMPORTS, *names], tmp_path, env={"PYTHONPATH": str(ROOT)})


@pytest.mark.parametrize("classes", [4, 5, 30])
def test_soft_targets_count_by_their_most_probable_class(classes):
    torch.manual_seed(0)
    output, hard = torch.randn(64, classes), torch.randint(classes, (64,))
    soft = 0.7 * nn.functional.one_hot(hard, classes) + 0.3 / classes
    top1, top5 = accuracy(output, soft)
    ranks = output.argsort(dim=1, descending=True)
    assert top1 == (ranks[:, 0] == hard).double().mean() * 100
    assert top5 == (ranks[:, :5] == hard[:, None]).any(1).double().mean() * 100
    assert [top1, top5] == accuracy(output, hard)


def test_targets_that_are_no_classes_are_refused():
    """Else the numbers would mean nothing."""
    with pytest.raises(AssertionError):
        accuracy(torch.rand(4, 3), torch.zeros(4, 3, dtype=torch.int64))  # several classes at once
    with pytest.raises(AssertionError):
        accuracy(torch.rand(4, 3, 8, 8), torch.zeros(4, dtype=torch.int64))


def test_a_meter_takes_means_as_everywhere():
    meter = AverageMeter("loss")
    meter.update(torch.tensor(2.0), n=3)
    meter.update(4.0)
    assert (meter.val, meter.avg, meter.count) == (4.0, 2.5, 4)
    assert type(meter.avg) is float


def test_none_among_the_batches_is_not_their_end():
    batches = [(None, torch.ones(2)), None, torch.zeros(1)]
    first, second, third = Prefetcher(batches, CPU)
    assert first[0] is None and second is None and third.equal(torch.zeros(1))


def fine_tuning(folder, resume=None):
    """A run that trains the head alone: its weight a tenth as fast as its bias."""
    flags = {"checkpoint_freq": 0, "print_freq": 6, "lr": 3.2, "warmup_epochs": 1.0, "epochs": 2}
    run = read(folder, resume, **flags)
    torch.manual_seed(1)
    net = nets.normed(10)
    net[:-1].requires_grad_(False)
    weight, bias = (parameter for parameter in net.parameters() if parameter.requires_grad)
    groups = [{"params": [weight], "scale": 0.1}, {"params": [bias], "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, 0.1, 0.9, weight_decay=1e-4, fused=True)
    meters = {name: AverageMeter(name) for name in ("loss", "acc@1", "acc@5")}
    run.attach(net, optimizer, torch.amp.GradScaler("cpu", enabled=False), meters)
    run.tidy_folder()
    return run


def train(run, stopped=False):
    """The rest of an epoch of ten steps, in the script's own loop; stopped: at its first line."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (10, 8, 3, 24, 24), dtype=torch.uint8, generator=generator)
    target = torch.rand(10, 8, 10, generator=generator).softmax(dim=-1)  # as mixup makes them
    batches = Prefetcher(list(zip(images, target, strict=True))[run.step :], CPU)
    stop = SimpleNamespace(requested=threading.Event(), agreed=False)
    if stopped:
        stop.requested.set()
    dataparallel.train(batches, run.net, nn.CrossEntropyLoss(), run, stop, 0, 1, run.args)


def test_fine_tuning_is_saved_and_resumed(tmp_path):
    """Frozen layers, groups with rates of their own, soft targets: nothing of them is lost."""
    whole = fine_tuning(tmp_path / "whole")
    before = {name: value.clone() for name, value in whole.net.state_dict().items()}
    train(whole)
    train(fine_tuning(tmp_path / "parts"), stopped=True)
    assert load(tmp_path / "parts")["step"] == 6
    resumed = fine_tuning(tmp_path / "parts", "auto")
    rates = [group["lr"] for group in load(tmp_path / "parts")["optimizer"]["param_groups"]]
    assert [group["lr"] for group in resumed.optimizer.param_groups] == rates
    train(resumed)
    assert whole.step == resumed.step == 10
    a, b = load(tmp_path / "whole"), load(tmp_path / "parts")
    assert same_state(a, b) and a["meters"]["loss"][1] == 10
    assert len(a["optimizer"]["state"]) == 2
    changed = {name for name in before if not before[name].equal(a["state_dict"][name])}
    buffers = {f"1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert changed == {"6.weight", "6.bias"} | buffers
    for checkpoint in (a, b):
        slow, fast = checkpoint["optimizer"]["param_groups"]
        assert fast["lr"] > 0 and slow["lr"] == pytest.approx(fast["lr"] * 0.1)
        assert (slow["weight_decay"], fast["weight_decay"]) == (1e-4, 0.0)
