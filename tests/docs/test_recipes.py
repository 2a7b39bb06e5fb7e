"""Each recipe, applied to a copy of a script as docs/recipes.md says: it does what it says, and a
run that was killed ends as a straight one. That it fits is seen in test_diffs.py.
"""

import csv
import importlib.util
import itertools
import json
import os
import re
import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    HOROVODRUN,
    PYTHON,
    ROOT,
    SMALL,
    assert_close,
    last_result,
    load,
    needs_horovod,
    rows,
    run,
    torchrun,
)
from sklearn.metrics import f1_score
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests import nets
from tests.docs.copies import cached_weights, copy, dying, equal, joined
from tests.docs.ranks import good, run_ranks

pytestmark = pytest.mark.full
PAGE = (ROOT / "docs/recipes.md").read_text()
FLAGS = [*SMALL, "-j", "1"]
NORMED = ["-a", "tests.nets:normed"]
SHORT_NORM = ("max_norm=1.0", "max_norm=0.01")  # one that each step reaches


@pytest.fixture
def train(work, tmp_path):
    """A function: run a script with recipes; returns (its output, its checkpoint).

    codes: the exit codes where it is to fail.
    """

    def train(recipes, to, *flags, script="distributed", edits=(), ranks=1, codes=None, **more):
        folder = tmp_path / f"{script} {recipes}"
        path = folder / f"{script}.py"
        if not folder.exists():
            copy(folder, *recipes.split(), script=script, edits=edits)
        flags = [*FLAGS, "--checkpoint-dir", tmp_path / to, *flags]
        ended, output = run_ranks(path, flags, ranks, work, **more)
        assert ended == (codes or [0] * ranks), output
        return output, None if codes else load(tmp_path / to)

    return train


def same(a, b):
    keys = ("epoch", "step", "state_dict", "optimizer", "scaler", "meters", "more")
    return all(equal(a[key], b[key]) for key in keys)


def start(arch="plain"):
    """The weights that a run starts with."""
    torch.manual_seed(0)
    return getattr(nets, arch)(10)


def told(name):
    """Before a script: each call of this transform is said."""
    return f"""
import os
from torchvision.transforms import v2
forward = v2.{name}.forward
def told(*given):
    os.write(1, b"{name}\\n")
    return forward(*given)
v2.{name}.forward = told
"""


def test_accumulate_is_as_many_more_processes(train):
    """To the bit, dropout and averages included: two processes, or one with two parts."""
    ends = {}
    for ranks, parts in [(2, 1), (1, 2), (4, 1), (2, 2)]:
        flags = ["-a", "tests.nets:transformer", "--max-steps", "12", "--accumulate", parts]
        _, ends[ranks, parts] = train("accumulate", f"{ranks}x{parts}", *flags, ranks=ranks)
    assert same(ends[2, 1], ends[1, 2])
    assert_close(ends[4, 1], ends[2, 2])
    said, _ = train("accumulate", "c", "--accumulate", "5", codes=[2])
    assert said == "error: --accumulate must divide the 48 images per process\n"


KILLED = {
    "adamw ema": [2, "--lr", "0.01"],
    "accumulate": [1, "--accumulate", "4"],
    "clip": [1, "--precision", "fp16"],
    "mixup_cutmix": [2],
    "randaugment": [2],
    "weighted": [2],
    "activation_checkpointing": [2],
}


@pytest.mark.parametrize("recipes", KILLED)
def test_killed_and_resumed_is_a_straight_run(recipes, train, tmp_path):
    """In mid-epoch, and to the bit: BatchNorm, dropout, the optimizer and the averages too."""
    ranks, *flags = KILLED[recipes]
    flags += [*NORMED, "--max-steps", "44", "--checkpoint-freq", "5"]
    _, straight = train(recipes, "a", *flags, ranks=ranks)
    train(recipes, "b", *flags, ranks=ranks, before=dying(1, 8), codes=[-9] * ranks)
    output, resumed = train(recipes, "b", *flags, "--resume", "auto", ranks=ranks)
    assert "at epoch 2 step 5" in output
    assert same(straight, resumed) and (resumed["epoch"], resumed["step"]) == (1, 15)
    assert rows(tmp_path / "a", timings=False) == rows(tmp_path / "b", timings=False)


def test_clip(train):
    """The norm is that of the mean over all processes, and not that of fp16's scaled gradients."""
    flags = "--max-steps 1 --warmup-epochs 0 --momentum 0 --wd 0 --precision".split()
    before, steps = start().state_dict(), []  # what one step changes, as one tensor
    for ranks, precision in [(1, "fp32"), (2, "fp32"), (1, "fp16")]:
        known = {"ranks": ranks, "edits": [SHORT_NORM]}
        _, state = train("clip", f"{ranks}-{precision}", *flags, precision, **known)
        after = state["state_dict"]
        steps.append(torch.cat([(after[key] - before[key]).flatten() for key in before]))
        assert steps[-1].norm() == pytest.approx(0.1 * 48 / 256 * 0.01, rel=1e-3)
    torch.testing.assert_close(steps[0], steps[1], atol=1e-7, rtol=1e-3)


def test_adamw(train):
    """Norms and biases do not decay; it learns."""
    flags = [*NORMED, "--max-steps", "1", "--warmup-epochs", "0", "--lr", "0.1", "--wd"]
    _, end = train("adamw", "free", *flags, "0")
    free, decayed = end["state_dict"], train("adamw", "decayed", *flags, "0.5")[1]["state_dict"]
    changed = {key for key in free if not free[key].equal(decayed[key])}
    assert changed == {"0.weight", "6.weight"}
    for name in changed:
        expected = free[name] - 0.1 * 48 / 256 * 0.5 * start("normed").state_dict()[name]
        torch.testing.assert_close(decayed[name], expected, atol=1e-6, rtol=1e-4)
    assert {"exp_avg", "exp_avg_sq"} < end["optimizer"]["state"][0].keys()
    assert last_result(train("adamw", "c", *NORMED, "--lr", "0.05")[0])[1] > 80


def test_ema(train):
    """What is saved and validated is the average, which any other script evaluates."""
    average = dict(start("normed").named_parameters())
    flags = [*NORMED, "--resume", "auto"]
    for steps, decay in ((1, 1 / 10), (2, 2 / 11)):
        output, state = train("ema", "c", *flags, "--max-steps", steps)
        for name, before in average.items():
            trained = state["more"]["trained"][name]
            average[name] = before.detach().lerp(trained, 1 - decay)
            assert state["state_dict"][name].equal(average[name])
            assert name != "0.weight" or not trained.equal(average[name])
    evaluated, _ = train("", "c", *flags, "--evaluate", script="dataparallel")
    assert last_result(evaluated) == last_result(output)
    said, _ = train("", "c", *flags, script="dataparallel", codes=[2])
    assert "has the state of ['trained'], but this run has []" in said


# Says which of the two has mixed a batch. What it makes is what the model and the loss must get.
MIXED = """
import os
import torch
from torchvision.transforms import v2

for kind in (v2.MixUp, v2.CutMix):
    def forward(self, *batch, kind=kind, mix=kind.forward):
        global mixed
        mixed = mix(self, *batch)
        os.write(1, f"{kind.__name__}\\n".encode())
        return mixed
    kind.forward = forward

def look(module, given):
    if module.training and isinstance(module, torch.nn.parallel.DistributedDataParallel):
        assert given[0] is mixed[0]
    if isinstance(module, torch.nn.CrossEntropyLoss):
        assert given[1] is mixed[1] and mixed[1].shape[1] == 10

torch.nn.modules.module.register_module_forward_pre_hook(look)
"""


def test_mixup_cutmix(train):
    output, _ = train("mixup_cutmix", "c", "--max-steps", "29", before=MIXED)
    kinds = [output.count(kind) for kind in ("MixUp\n", "CutMix\n")]
    assert sum(kinds) == 29 and min(kinds) > 5


@pytest.mark.parametrize("recipes", ["finetune", "adamw finetune"])
def test_finetune(recipes, train, tmp_path):
    """Frozen layers keep weights and statistics, the rest has two rates; also after a resume."""
    before = cached_weights(tmp_path)
    flags = "--pretrained -a resnet18 --image-size 32 -b 32 -j 0 --warmup-epochs 0".split()
    flags += ["--resume", "auto", "--max-steps"]
    known = {"env": {"TORCH_HOME": tmp_path}, "before": told("ColorJitter")}
    output, state = train(recipes, "whole", *flags, 4, **known)
    assert output.count("ColorJitter\n") >= 4 * 32
    train(recipes, "parts", *flags, 2, **known)
    assert same(state, train(recipes, "parts", *flags, 4, **known)[1])
    after = state["state_dict"]
    kept = {key for key in before if key in after and before[key].equal(after[key])}
    frozen = {key for key in after if re.match(r"conv1|bn1|layer[12]", key)}
    assert kept == frozen and any("running_mean" in key for key in frozen)
    groups = state["optimizer"]["param_groups"]
    heads, bodies = groups[: len(groups) // 2], groups[len(groups) // 2 :]
    for head, body in zip(heads, bodies, strict=True):
        assert body["lr"] == pytest.approx(0.1 * head["lr"]) and head["lr"] > 0
        assert body["weight_decay"] == head["weight_decay"]
    assert sum(len(head["params"]) for head in heads) == 2
    assert len(state["optimizer"]["state"]) == sum(len(group["params"]) for group in groups)
    if "adamw" in recipes:
        assert [group["weight_decay"] for group in groups] == [0.05, 0, 0.05, 0]


def test_finetune_from_a_checkpoint(train, work, tmp_path):
    """Of other classes and another optimizer: the head alone is new. A resume needs it no more."""
    for part, number in itertools.product(("train", "val"), "012"):
        source = work / "data/digits/val" / number
        shutil.copytree(source, tmp_path / "data" / part / number)
    flags = "-a resnet18 --image-size 32 -b 32 -j 0 --max-steps".split()
    _, before = train("", "a", *flags, 2, script="dataparallel")
    flags = ["--pretrained", tmp_path / "a/checkpoint.pth", "--data", tmp_path / "data", *flags]
    train("adamw finetune", "b", *flags, 2)
    (tmp_path / "a/checkpoint.pth").rename(tmp_path / "a/moved.pth")
    output, after = train("adamw finetune", "b", *flags, 3, "--resume", "auto")
    assert "at epoch 1 step 2" in output
    assert (before["optimizer_type"], after["optimizer_type"]) == ("SGD", "AdamW")
    old, new = before["state_dict"], after["state_dict"]
    frozen = [key for key in new if re.match(r"conv1|bn1|layer[12]", key)]
    assert frozen and all(new[key].equal(old[key]) for key in frozen)
    name = "layer4.1.conv2.weight"  # three small steps away: not a random start
    torch.testing.assert_close(new[name], old[name], atol=1e-3, rtol=0)
    assert len(new["fc.weight"]) == 3
    wrong = ["--pretrained", tmp_path / "a/moved.pth", "-a", "resnet34"]
    said, _ = train("adamw finetune", "c", *wrong, codes=[2])
    assert said.startswith("error: ") and "is of another model than this of 182 tensors" in said


def test_early_stopping(train, tmp_path):
    """Two epochs after the best one, in all processes, also if it is resumed between them."""
    flags = ["--patience", "2", "--epochs", "40", "--lr", "0.3"]
    _, straight = train("early_stopping", "a", *flags, ranks=2)  # one alone would wait and fail
    scores = [row["acc1"] for row in rows(tmp_path / "a")]
    best = 1 + scores.index(max(scores))
    assert len(scores) == best + 2 < 40 and scores[0] < 90 < max(scores) and straight["ended"]
    train("early_stopping", "b", *flags, "--max-steps", 29 * (best + 1), ranks=2)
    _, resumed = train("early_stopping", "b", *flags, "--resume", "auto", ranks=2)
    assert same(straight, resumed)
    assert rows(tmp_path / "a", timings=False) == rows(tmp_path / "b", timings=False)


def test_f1_and_predictions(train, work, tmp_path):
    """Of three processes: a line for each image, and scikit-learn's F1 of them all.

    The mean of the parts' F1 is another. With early_stopping, and the line of the page between
    them, F1 also chooses the best.
    """
    (by_f1,) = re.findall(r"^sed -i 's/(.*)/(.*)/' mine.py$", joined(PAGE), re.M)
    _, state = train("f1 early_stopping", "c", "--max-steps", "20", ranks=3, edits=[by_f1])
    found = rows(tmp_path / "c")[0]["f1"]
    assert state["best_acc1"] == found
    flags = ["--evaluate", "--resume", "auto"]
    assert f"  f1 {found:.3f}\n" in train("f1 early_stopping", "c", *flags)[0]

    table = tmp_path / "predictions.csv"
    output, _ = train("predictions", "c", *flags, "--predictions", table, ranks=3)
    with open(table, newline="") as file:
        lines = list(csv.DictReader(file))
    files = sorted(path.relative_to(work) for path in work.glob("data/digits/val/*/*"))
    assert [Path(line["path"]) for line in lines] == files
    assert [line["class"] for line in lines] == [path.parent.name for path in files]
    assert all(0.1 <= float(line["confidence"]) <= 1 for line in lines)
    pairs = [(line["class"], line["predicted"]) for line in lines]
    right = sum(target == predicted for target, predicted in pairs)
    assert last_result(output)[1] == pytest.approx(100 * right / 360, abs=1e-3)

    def f1(pairs):
        return 100 * f1_score(*zip(*pairs, strict=True), average="macro")

    assert found == pytest.approx(f1(pairs), abs=1e-9)
    assert abs(found - sum(f1(pairs[i::3]) for i in range(3)) / 3) > 0.01

    # Nothing written is lost: but a run that goes on writes its own file anew, as a new one does
    # that was killed before it wrote a line.
    said, _ = train("predictions", "c", *flags, "--predictions", table, codes=[2])
    assert said == f"error: {table} is not empty: name another file\n"
    (tmp_path / "empty.csv").touch()
    first = ["--predictions", tmp_path / "empty.csv", "--max-steps"]
    train("predictions", "d", *first, "1")
    before = (tmp_path / "empty.csv").read_text()
    train("predictions", "d", *first, "2", "--resume", "auto")
    after = (tmp_path / "empty.csv").read_text()
    assert before != after and before.count("\n") == after.count("\n") == 361


def test_archives(train, work, tmp_path):
    """The same weights as from the folders, to the bit."""
    for part in ("train", "val"):
        shutil.make_archive(tmp_path / "data" / part, "tar", work / "data/digits" / part)
    flags = ["--max-steps", "8", "--data"]
    _, folders = train("", "a", *flags, work / "data/digits")
    output, archives = train(
        "archives", "b", *flags, tmp_path / "data", env={"TORCH_HOME": tmp_path}
    )
    assert output.count("indexing") == 2 and same(folders, archives)


# Says of which classes the images of each step are.
DRAWN = """
import os
import torch

real = torch.nn.functional.cross_entropy
def look(output, target, **more):
    if more:  # in training: label_smoothing
        os.write(1, f"drawn {target.tolist()}\\n".encode())
    return real(output, target, **more)

torch.nn.functional.cross_entropy = look
"""


def test_weighted(train, work, tmp_path):
    """Where a class has up to 15 times the images of another, each is drawn as often."""
    for part, number in itertools.product(("train", "val"), range(10)):
        folder = tmp_path / f"data/{part}/{number}"
        folder.mkdir(parents=True)
        files = sorted((work / f"data/digits/train/{number}").iterdir())
        for file in files[: 8 + 12 * number if part == "train" else 2]:
            (folder / file.name).symlink_to(file)
    flags = ["--data", tmp_path / "data", "--epochs", "3"]
    output, _ = train("weighted", "c", *flags, ranks=2, before=DRAWN)
    lines = re.findall(r"^drawn (.*)$", output, re.M)
    assert len(lines) == 2 * 3 * (620 // 48)  # 24 images each
    drawn = torch.tensor([number for line in lines for number in json.loads(line)]).bincount()
    expected = len(lines) * 24 / 10
    assert len(drawn) == 10 and (drawn - expected).abs().max() < 5 * expected**0.5


def test_weighted_order(tmp_path):
    """A function of (seed, epoch): any number of processes read it, and a resume goes on in it."""
    make = runpy.run_path(str(copy(tmp_path / "here", "weighted")))["WeightedSampler"]
    weights = torch.tensor([0.0, 1, 2, 5]).repeat(25)

    def keys(rank=0, world_size=1, seed=3, epoch=2, first=0):
        sampler = make(weights, 20, rank, world_size, seed)
        sampler.set_epoch(epoch, range(first, 5))
        assert len(sampler) == len([*sampler])
        return [*sampler]

    def images(**known):
        return [image for _, image in keys(**known)]

    assert len(keys()) == len({*keys()}) == 100  # no image has the same crop twice,
    assert not {*keys()} & {*keys(epoch=1)}  # nor in another epoch
    for rank in range(4):
        assert keys(rank, world_size=4, first=3) == keys()[60 + rank :: 4]
    assert images() != images(epoch=1) and images() != images(seed=4)
    drawn = [image % 4 for epoch in range(50) for image in images(epoch=epoch)]
    shares = torch.tensor(drawn).bincount() / 5000
    assert shares[0] == 0
    torch.testing.assert_close(shares, torch.tensor([0, 1, 2, 5]) / 8, atol=0.03, rtol=0)


def test_randaugment(train):
    """Each training image, and no other; how does not depend on the loader's processes."""
    flags, ends = ["--max-steps", "10", "--epochs", "1", "-j"], []
    for workers in (0, 3):
        known = {"before": told("RandAugment")}
        output, state = train("randaugment", f"{workers}", *flags, workers, **known)
        assert output.count("RandAugment\n") == 10 * 48
        ends.append(state)
    assert same(*ends)
    assert not same(ends[0], train("", "plain", *flags, "1")[1])


# Says how many bytes forward() keeps for backward(), beside the weights.
KEPT = """
import os
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

forward = DDP.forward
def told(model, images):
    kept, weights = {}, {weight.data_ptr() for weight in model.parameters()}
    def pack(tensor):
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in weights:
            kept[memory.data_ptr()] = memory.nbytes()
        return tensor
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward(model, images)
    os.write(1, f"kept {sum(kept.values())}\\n".encode())
    return output
DDP.forward = told
"""


@pytest.mark.parametrize(
    "arch, share, more",
    [("resnet18", 0.6, ""), ("tests.nets:transformer", 0.35, "ema")],
    ids=["resnet", "transformer"],
)
def test_activation_checkpointing(arch, share, more, train):
    """To the bit as without it, BatchNorm's statistics and dropout too, with less memory."""
    ends, kept = [], []
    for recipes in (more, f"{more} activation_checkpointing"):
        flags = ["-a", arch, "--max-steps", "4"]
        output, state = train(recipes, f"c{len(recipes)}", *flags, ranks=2, before=KEPT)
        ends.append(state)
        kept.append(int(re.findall(r"^kept (\d+)$", output, re.M)[-1]))
    assert same(*ends)
    assert kept[1] < share * kept[0]


def test_bad_images(train, work, tmp_path):
    """A broken image, which would end the script, is left out; which one it is is said."""
    for part in ("train", "val"):
        shutil.copytree(work / "data/digits/val", tmp_path / "data" / part)
    broken = sorted((tmp_path / "data/train").glob("3/*"))[2]
    broken.write_bytes(broken.read_bytes()[:40])
    flags = ["-b", "40", "--data", tmp_path / "data", "--epochs", "1"]
    output, state = train("bad_images", "c", *flags)
    assert output.count(f"warning: cannot read image '{broken}'") == 1
    assert last_result(output) and state["epoch"] == 1


def test_wandb(work, tmp_path):
    """Offline: what it would send lies in the folder of checkpoints. A second start is another."""
    if importlib.util.find_spec("wandb") is None and "CI" not in os.environ:
        pytest.skip("wandb is not installed: pip install wandb")
    script = copy(tmp_path / "here", "wandb")
    flags = [*FLAGS, "--checkpoint-dir", tmp_path / "c", "--resume", "auto"]
    env = {"WANDB_MODE": "offline", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    for steps in (29, 58):  # by torchrun: wandb writes the last of it when the interpreter ends
        run([*torchrun(2, script), *flags, "--max-steps", steps], work, env=env)
    sent = sorted((tmp_path / "c/wandb").glob("offline-run-*/*.wandb"))  # none of rank 1
    for file, row in zip(sent, rows(tmp_path / "c"), strict=True):
        assert b"train/acc@1" in file.read_bytes()
        for name in ("train_loss", "val_loss", "acc1", "lr"):
            assert str(row[name]).encode() in file.read_bytes()


def test_tensorboard(train, tmp_path):
    """What a killed run has drawn beyond its checkpoint is not shown."""
    flags = ["-p", "3", "--checkpoint-freq", "20"]
    known = {"before": dying(0, 28), "codes": [-9, -9]}
    assert "[27/" in train("tensorboard", "c", *flags, ranks=2, **known)[0]
    train("tensorboard", "c", *flags, "--resume", "auto", "--max-steps", "58", ranks=2)
    found = EventAccumulator(str(tmp_path / "c/tensorboard"))
    found.Reload()
    for name in ("train/loss", "lr", "images/s"):
        steps = [event.step for event in found.Scalars(name)]
        assert steps == sorted(set(steps)) and steps[-1] == 58
    last = rows(tmp_path / "c")[-1]
    assert found.Scalars("epoch/acc1")[-1].value == pytest.approx(last["acc1"])


def test_profile(train, tmp_path):
    """A trace of each process. With accumulate too, it shows that a step sends once."""
    flags = ["--max-steps", "12", "-p", "100", "--accumulate", "2"]
    output, _ = train("accumulate profile", "c", *flags, ranks=2)
    for rank in (0, 1):
        path = tmp_path / f"c/trace-{rank}.json"
        names = [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]
        assert names.count("gloo:all_reduce") == 5  # steps
        assert names.count("aten::convolution") == 10
        assert re.search(rf"{path}: collectives ([\d.]+) ms, not hidden ([\d.]+) ms", output)


def test_what_profile_says(tmp_path, capsys):
    """Of a made-up trace: computing from 5 to 25 hides half of two collectives."""
    print_times = runpy.run_path(str(copy(tmp_path / "here", "profile")))["print_times"]

    def event(name, start, end, children=()):
        span = SimpleNamespace(start=start * 1000, end=end * 1000)
        device = SimpleNamespace(name="CUDA" if torch.cuda.is_available() else "CPU")
        more = {"device_type": device, "cpu_children": children, "is_user_annotation": "#" in name}
        return SimpleNamespace(name=name, time_range=span, **more)

    events = [event("gloo:all_reduce", 0, 10), event("gloo:all_reduce", 20, 30)]
    events += [event("aten::mm", 5, 15), event("aten::mm", 12, 25)]
    events += [event("aten::linear", 0, 30, children=events), event("Optimizer#SGD", 0, 30)]
    profiler = SimpleNamespace(events=lambda: events, export_chrome_trace=lambda path: None)
    print_times(profiler, "a.json")
    assert capsys.readouterr().out == "a.json: collectives 20.0 ms, not hidden 10.0 ms\n"


@pytest.mark.parametrize(
    "name, script, launcher, more",
    [
        ("accumulate", "multiprocessing_distributed", [PYTHON], ["--accumulate", "2"]),
        ("adamw", "horovod_distributed", HOROVODRUN, []),
        ("clip", "fsdp_distributed", None, ["--lr", "4"]),
    ],
)
def test_runs_in_other_scripts(name, script, launcher, more, train, work, tmp_path):
    """Two processes; what a run of distributed.py ends with, to rounding."""
    if script == "horovod_distributed":
        needs_horovod()
    edits = [SHORT_NORM] if name == "clip" else []
    flags = ["--max-steps", "8", *more]
    _, expected = train(name, "a", *flags, ranks=2, edits=edits)
    other = copy(tmp_path / "other", name, script=script, edits=edits)
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}  # the latter for --arch
    command = [other, *FLAGS, *flags, "--checkpoint-dir", tmp_path / "b"]
    if launcher:
        run([*launcher, *command], work, env=env)
    else:
        good(*command, ranks=2, cwd=work)
    weights = load(tmp_path / "b")["state_dict"]
    torch.testing.assert_close(weights, expected["state_dict"], atol=1e-5, rtol=1e-4)
