"""What people take out of here works in a program of their own, without traps."""

import os
import threading
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
from conftest import PYTHON, ROOT, last_result, load, run, same_state
from torch import nn
from torchvision import models

import dataparallel
from common.loader import Seeded, TrainSampler, make_loader
from common.metrics import AverageMeter, accuracy
from common.model import build_model
from common.prefetcher import Prefetcher
from common.progress import print_banner
from tests import nets
from tests.runs import opened, read, write

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "image label")


class Items(torch.utils.data.Dataset):
    """What make(i) gives for i = 0, 1, ..., 39."""

    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return self.make(index)


def picture(index, height=4, width=6):
    return torch.full((3, height, width), index, dtype=torch.uint8)


def large(index):
    """Items whose batches have memory that workers and process share."""
    return picture(index, 160, 160), index


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_batch_stays_what_it_is(workers):
    """However long somebody holds it, and however far ahead the workers are."""
    sampler = TrainSampler(40, 2, 0, 1, 0)
    loader = make_loader(Seeded(Items(large), 0), sampler, 2, workers, CPU)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        held = list(loader)
        assert len(held) == 20
        shown = [index for _, index in sampler]
        assert torch.cat([target for _, target in held]).tolist() == shown
        assert torch.cat([images[:, 0, 0, 0] for images, _ in held]).tolist() == shown
        prefetched = [images for images, _ in Prefetcher(loader, CPU)]
        expected = Prefetcher([images for images, _ in held], CPU)
        assert all(a.equal(b) for a, b in zip(prefetched, expected, strict=True))


def test_memory_of_batches_is_used_again():
    """And all of it, also after an epoch that ended early; held batches take new memory."""
    loader, places = make_loader(Items(large), range(40), 2, 2, CPU), []
    for last in (3, 19, 19):
        for number, (images, target) in enumerate(loader):
            assert images[:, 0, 0, 0].tolist() == target.tolist() == [2 * number, 2 * number + 1]
            assert images.is_contiguous(memory_format=torch.channels_last)
            places.append(images.data_ptr())
            if number == last:
                break
    assert len(set(places)) == 6  # two under way in each worker, and two here
    del images
    held = [images.numpy()[:, 0] for images, _ in loader]  # not the tensors themselves
    assert [part[:, 0, 0].tolist() for part in held] == [[i, i + 1] for i in range(0, 40, 2)]
    del held
    assert {images.data_ptr() for images, _ in loader} == set(places)


def test_a_forked_process_gives_back_nothing():
    """Another loader's worker, for example: what it has is a copy."""
    loader = make_loader(Items(large), range(40), 2, 2, CPU)
    batches = iter(loader)
    held = [next(batches)[0] for _ in range(3)]
    if (child := os.fork()) == 0:
        held.clear()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(batches)) == 17
    assert [images[:, 0, 0, 0].tolist() for images in held] == [[0, 1], [2, 3], [4, 5]]


def test_a_loader_that_only_a_loop_holds():
    assert sum(len(target) for _, target in make_loader(Items(large), range(40), 8, 2, CPU)) == 40


def test_a_batch_that_cannot_be_sent_ends_the_loader(capfd):
    """multiprocessing itself would print an error, and the process would wait for ever."""
    pair = namedtuple("Local", "image label")  # a class that no other process can import
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        list(make_loader(Items(lambda i: pair(*large(i))), range(40), 2, 1, CPU))
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error:")]
    assert line.startswith("error: a loader's worker cannot send its batch: ") and "Local" in line


LONG = """
import torch
from common.loader import make_loader
items = [(torch.full((3, 160, 160), i, dtype=torch.uint8), torch.tensor(i), 1.5) for i in range(40)]
batches = list(make_loader(items, range(40), 2, 2, torch.device("cpu")))
print(sum(images.sum(dtype=torch.int64) for images, _, _ in batches) // 76800)
print(sum(number.sum() for _, number, _ in batches))
"""


def test_a_long_path_of_temporary_files(tmp_path):
    """A socket there, as torch makes it to send a tensor, would have too long a name."""
    folder = tmp_path / ("a" * 100)
    folder.mkdir()
    env = {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    assert run([PYTHON, "-c", LONG], tmp_path, env=env) == "tensor(780)\ntensor(780)\n"


def example(index):
    """An item of everything that a data set may have."""
    return {
        "image": picture(index),
        "tokens": torch.arange(index, index + 5),
        "pair": Pair(torch.full((3, 4, 6), index / 2), index),
        "grey": picture(index)[:1],
        "bytes": torch.tensor([index, 255], dtype=torch.uint8),
        "name": f"number {index}",
        "more": [index * 0.5, (torch.tensor(index > 20), torch.tensor([]))],
    }


@pytest.mark.parametrize("workers", [0, 2])
def test_items_of_any_kind_reach_the_device(workers):
    """Images are normalised, and all else is what the data set gave, in the same containers."""
    loader = make_loader(Items(example), range(40), 8, workers, CPU)
    for number, batch in enumerate(Prefetcher(loader, CPU)):
        numbers = torch.arange(number * 8, number * 8 + 8)
        assert list(batch) == list(example(0))
        grey = torch.stack([picture(i) for i in numbers]) / 255
        mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
        std = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
        torch.testing.assert_close(batch["image"], (grey - mean) / std, atol=1e-5, rtol=1e-5)
        assert batch["image"].is_contiguous(memory_format=torch.channels_last)
        assert batch["tokens"].equal(numbers[:, None] + torch.arange(5))
        assert type(batch["pair"]) is Pair and batch["pair"].label.equal(numbers)
        assert batch["pair"].image.equal((numbers / 2)[:, None, None, None].expand(8, 3, 4, 6))
        assert batch["grey"].dtype == torch.uint8 and batch["grey"].shape == (8, 1, 4, 6)
        assert batch["bytes"].dtype == torch.uint8
        assert batch["bytes"].equal(torch.stack([numbers, 255 + 0 * numbers], 1).to(torch.uint8))
        assert batch["name"] == [f"number {i}" for i in numbers]
        half, (late, empty) = batch["more"]
        assert half.dtype == torch.float64 and half.equal(numbers * 0.5)
        assert late.equal(numbers > 20) and empty.shape == (8, 0)
    assert number == 4


@pytest.mark.parametrize("make", [float, lambda i: torch.tensor([i, i])], ids=["number", "tensor"])
def test_items_that_are_one_thing(make):
    loader = make_loader(Items(make), range(40), 40, 1, CPU)
    (batch,) = Prefetcher(loader, CPU)
    assert batch.equal(torch.stack([torch.as_tensor(make(i)) for i in range(40)]))


def test_a_model_for_text():
    """Without images anywhere: what --arch names is tried on what it takes."""
    args = SimpleNamespace(arch="tests.nets:text", image_size=24, pretrained=False)
    tokens = torch.zeros(1, 7, dtype=torch.int64)
    net = build_model(args, 3, CPU, local_batch_size=1, example=tokens)
    assert net(torch.arange(14).view(2, 7)).shape == (2, 3)
    with pytest.raises(ValueError, match=r"tests.nets:text ") as error:
        build_model(args, 3, CPU, example=tokens + 1000)  # outside of its vocabulary
    assert "--image-size" not in str(error.value)


def test_a_model_of_several_inputs(monkeypatch):
    """It is tried on a batch as the loader makes them; a model comes ready to be trained."""

    class Net(nn.Module):
        def __init__(self, num_classes):
            super().__init__()
            self.head = nn.Linear(5, num_classes)

        def forward(self, batch):
            return self.head(batch["a"] + batch["b"][0])

    monkeypatch.setattr(nets, "plain", Net)
    args = SimpleNamespace(arch="tests.nets:plain", image_size=24, pretrained=False)
    inputs = {"a": torch.ones(1, 5), "b": (torch.ones(1, 5),)}
    assert build_model(args, 3, CPU, example=inputs).training


def test_a_model_for_videos(monkeypatch):
    """Weights of five dimensions have no channels_last of images."""

    def make(num_classes):
        layers = (
            nn.Conv3d(3, 4, 3),
            nn.AdaptiveAvgPool3d(1),
            nn.Flatten(),
            nn.Linear(4, num_classes),
        )
        return nn.Sequential(*layers)

    monkeypatch.setattr(nets, "plain", make)
    args = SimpleNamespace(arch="tests.nets:plain", image_size=24, pretrained=False)
    example = torch.zeros(1, 3, 5, 8, 8)
    assert build_model(args, 3, CPU, example=example)(example).shape == (1, 3)


WATCHED = """
import time, torch
from common.prefetcher import Prefetcher
from common.watch import Watch

class Place:
    def place(self):
        return "epoch 3 step 40"

watch = Watch(0, 1, Place(), seconds=4)
for batch in Prefetcher([torch.ones(2)] * 3, torch.device("cpu"), watch):
    print("batch", flush=True)
for batch in Prefetcher([torch.ones(2)] * 3, torch.device("cpu"), watch):
    break
with watch:
    pass
time.sleep(8)
print("a loop of one's own", flush=True)
with watch:
    with watch:
        pass
    time.sleep(100)
"""


def test_a_watch_ends_only_its_own_blocks(tmp_path):
    """Code before, between and after them takes as long as it takes."""
    output = run([PYTHON, "-c", WATCHED], tmp_path, env={"PYTHONPATH": str(ROOT)}, code=1)
    assert output.startswith("batch\n" * 3 + "a loop of one's own\n")
    last = output.splitlines()[-1]
    assert last == "rank 0 failed at epoch 3 step 40: no progress for 4 s; it waits as above"


IMPORTS = """
import os, sys, torch
for name in sys.argv[1:]:
    if os.fork() == 0:
        __import__(f"common.{name}")
        print(name, *sorted({"torchvision", "PIL", "sklearn"} & sys.modules.keys()), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, name
"""


def test_each_module_can_be_imported_alone(tmp_path):
    """Each in a process that has nothing but torch; and no numbers need a library for images."""
    names = sorted(path.stem for path in (ROOT / "common").glob("[a-z]*.py"))
    assert len(names) > 15
    command = [PYTHON, "-c", IMPORTS, *names]
    output = run(command, tmp_path, env={"PYTHONPATH": str(ROOT)})
    loaded = {line.split()[0]: line.split()[1:] for line in output.splitlines()}
    assert list(loaded) == names
    assert "torchvision" in loaded["images"] and loaded["metrics"] == []


def test_the_metrics_load_no_library_for_images(tmp_path):
    code = "import sys; from common.metrics import AverageMeter, accuracy, reduce_mean; "
    code += "print(*sorted({'torch', 'torchvision', 'PIL'} & sys.modules.keys()))"
    assert run([PYTHON, "-c", code], tmp_path, env={"PYTHONPATH": str(ROOT)}) == "torch\n"


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
    run = opened(folder, resume)
    torch.manual_seed(1)
    net = nets.normed(10)
    net[:-1].requires_grad_(False)
    weight, bias = (parameter for parameter in net.parameters() if parameter.requires_grad)
    groups = [{"params": [weight], "scale": 0.1}, {"params": [bias], "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, 0.1, 0.9, weight_decay=1e-4, fused=True)
    meters = [AverageMeter(name) for name in ("loss", "acc@1", "acc@5")]
    run.restore(net, optimizer, torch.amp.GradScaler("cpu", enabled=False), meters)
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
    flags = {"seed": 0, "precision": "fp32", "checkpoint_freq": 0, "print_freq": 6, "lr": 3.2}
    flags |= {"batch_size": 8, "warmup_epochs": 1.0, "epochs": 2}
    args = SimpleNamespace(**flags)
    dataparallel.train(batches, run.net, nn.CrossEntropyLoss(), run, stop, 0, 1, args)


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


def test_momentum_of_other_parameters_is_refused(tmp_path):
    """Else a layer would go on with the momentum of another one."""
    fine_tuning(tmp_path).save()
    run = opened(tmp_path, "auto")
    net = nets.normed(10)
    groups = [{"params": [net[0].weight, net[0].bias]}, {"params": [net[6].bias]}]
    optimizer = torch.optim.SGD(groups, 0.1, 0.9)
    with pytest.raises(ValueError):
        run.restore(net, optimizer, torch.amp.GradScaler("cpu", enabled=False), [])


def test_another_number_of_groups_is_said_and_evaluated(tmp_path):
    """As recipes/adamw.diff makes them: a script without it can evaluate what it has trained."""
    fine_tuning(tmp_path).save()
    net, scaler = nets.normed(10), torch.amp.GradScaler("cpu", enabled=False)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, 0.9)
    with pytest.raises(ValueError, match=r"checkpoint.pth was trained with 2 groups .* has 1$"):
        opened(tmp_path, "auto").restore(net, optimizer, scaler, [])
    run = opened(tmp_path, "auto")
    run.args["evaluate"] = True
    net = nets.normed(10)
    run.restore(net, optimizer, scaler, [])
    saved = load(tmp_path)["state_dict"]
    assert all(value.equal(saved[name]) for name, value in net.state_dict().items())


def banner(run, capsys):
    args = {"precision": "fp32", "lr": 0.1, "image_size": 24, "pretrained": False}
    run.args = args | {"warmup_epochs": 1.0} | run.args
    print_banner(run, range(80), range(20), 2, "gloo", CPU)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("warmup, warned", [(0.0, False), (3.9, False), (4.0, True), (9.0, True)])
def test_a_warm_up_that_never_ends_is_said(warmup, warned, tmp_path, capsys):
    lines = banner(read(tmp_path, None, epochs=4, warmup_epochs=warmup), capsys)
    said = [line for line in lines if "--warmup-epochs" in line]
    assert len(said) == warned and all(line.startswith("warning: ") for line in said)


def test_an_evaluation_says_whose_weights_it_evaluates(tmp_path, capsys):
    for pretrained, resume, expected in (
        (False, None, "random"),
        (True, None, "torchvision"),
        (True, "auto", "resumed from"),
        (False, "auto", "resumed from"),
    ):
        if resume:
            write(tmp_path, 1)
        run = read(tmp_path, resume, evaluate=True, pretrained=pretrained)
        lines = banner(run, capsys)
        (said,) = [line for line in lines if "weights" in line or "resumed" in line]
        assert expected in said and ("no checkpoint" in said) != bool(resume)


def test_evaluate_pretrained(work, tmp_path):
    """From a file as torchvision caches it: a test downloads nothing."""
    folder = tmp_path / "hub/checkpoints"
    folder.mkdir(parents=True)
    torch.manual_seed(1)
    url = models.get_model_weights("squeezenet1_1").DEFAULT.url
    torch.save(models.squeezenet1_1().state_dict(), folder / url.rsplit("/")[-1])
    flags = "-e --pretrained -a squeezenet1_1 -j 0".split()
    env = {"TORCH_HOME": str(tmp_path)}
    output = run([PYTHON, ROOT / "dataparallel.py", *flags], work, env=env)
    (line,) = [line for line in output.splitlines() if "weights" in line]
    assert "torchvision" in line and last_result(output)
