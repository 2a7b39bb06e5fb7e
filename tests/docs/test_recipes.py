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
from tests.docs.copies import copy, cached_weights, dying, edited, equal
from tests.docs.ranks import good, run_ranks

PAGE = (ROOT / "docs/recipes.md").read_text()
FLAGS = [*SMALL, "-j", "1"]
SHORT_NORM = ("max_norm=1.0", "max_norm=0.01")  # one that each step reaches


@pytest.fixture
def train(work, tmp_path):
    """A function: run a script in a folder of checkpoints; returns (its output, its checkpoint)."""

    def train(script, to, *flags, arch="plain", **more):
        given = [*FLAGS, "--arch", f"tests.nets:{arch}", "--checkpoint-dir", tmp_path / to, *flags]
        return good(script, *given, cwd=work, **more), load(tmp_path / to)

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


@pytest.mark.full
def test_accumulate_is_as_many_more_processes(train, work, tmp_path):
    """To the bit, dropout and averages included: two processes, or one with two parts."""
    script = copy(tmp_path / "here", "accumulate")
    ends = {}
    for processes, parts in [(2, 1), (1, 2), (4, 1), (2, 2)]:
        name, flags = f"{processes}x{parts}", ["--max-steps", "12", "--accumulate", parts]
        _, ends[name] = train(script, name, *flags, arch="transformer", ranks=processes)
    assert same(ends["2x1"], ends["1x2"])
    assert_close(ends["4x1"], ends["2x2"])
    said = "error: --accumulate must divide the 48 images per process\n"
    assert run_ranks(script, ["-b", "48", "--accumulate", "5"], cwd=work) == ([2], said)


# Ends the process at a step, as SIGKILL does: after what was saved some steps before.
DYING = """
import os, signal
import common.loader
seed_step = common.loader.seed_step
def dying(seed, epoch, step, rank):
    if (epoch, step) == (1, 8):
        os.kill(os.getpid(), signal.SIGKILL)
    seed_step(seed, epoch, step, rank)
common.loader.seed_step = dying
"""
KILLED = {
    "adamw ema": [2, "--lr", "0.01"],
    "accumulate": [1, "--accumulate", "4"],
    "clip": [1, "--precision", "fp16"],
    "mixup_cutmix": [2],
    "randaugment": [2],
    "weighted": [2],
    "activation_checkpointing": [2],
}


@pytest.mark.full
@pytest.mark.parametrize("recipes", KILLED)
def test_killed_and_resumed_is_a_straight_run(recipes, train, work, tmp_path):
    """In mid-epoch, and to the bit: BatchNorm, dropout, the optimizer and the averages too."""
    script = copy(tmp_path / "here", *recipes.split())
    ranks, *more = KILLED[recipes]
    more += ["--max-steps", "44", "--checkpoint-freq", "5"]
    _, straight = train(script, "a", *more, arch="normed", ranks=ranks)
    flags = [*SMALL, "tests.nets:normed", *more, "--checkpoint-dir", tmp_path / "b"]
    codes, output = run_ranks(script, flags, ranks, work, before=DYING)
    assert codes == [-9] * ranks, output
    output, resumed = train(script, "b", *more, "--resume", "auto", arch="normed", ranks=ranks)
    assert "at epoch 2 step 5" in output
    assert same(straight, resumed) and (resumed["epoch"], resumed["step"]) == (1, 15)
    assert rows(tmp_path / "a", timings=False) == rows(tmp_path / "b", timings=False)


@pytest.mark.full
def test_clip(train, tmp_path):
    """The norm is that of the mean over all processes, and not that of fp16's scaled gradients."""
    script = copy(tmp_path / "here", "clip")
    script.write_text(script.read_text().replace("max_norm=1.0", "max_norm=0.01"))
    flags = "--max-steps 1 --warmup-epochs 0 --momentum 0 --wd 0 --precision".split()
    before, steps = start().state_dict(), []  # what one step changes, as one tensor
    for ranks, precision in [(1, "fp32"), (2, "fp32"), (1, "fp16")]:
        _, state = train(script, f"{ranks}-{precision}", *flags, precision, ranks=ranks)
        after = state["state_dict"]
        steps.append(torch.cat([(after[key] - before[key]).flatten() for key in before]))
        assert steps[-1].norm() == pytest.approx(0.1 * 48 / 256 * 0.01, rel=1e-3)
    torch.testing.assert_close(steps[0], steps[1], atol=1e-7, rtol=1e-3)


@pytest.mark.full
def test_adamw(train, tmp_path):
    """Norms and biases do not decay; it learns."""
    script = copy(tmp_path / "here", "adamw")
    flags = ["--max-steps", "1", "--warmup-epochs", "0", "--lr", "0.1", "--wd"]
    _, end = train(script, "0", *flags, "0", arch="normed")
    _, other = train(script, "0.5", *flags, "0.5", arch="normed")
    free, decayed = end["state_dict"], other["state_dict"]
    changed = {key for key in free if not free[key].equal(decayed[key])}
    assert changed == {"0.weight", "6.weight"}
    for name in changed:
        expected = free[name] - 0.1 * 48 / 256 * 0.5 * start("normed").state_dict()[name]
        torch.testing.assert_close(decayed[name], expected, atol=1e-6, rtol=1e-4)
    assert {"exp_avg", "exp_avg_sq"} < end["optimizer"]["state"][0].keys()
    assert last_result(train(script, "c", "--lr", "0.05", arch="normed")[0])[1] > 80


@pytest.mark.full
def test_ema(train, work, tmp_path):
    """What is saved and validated is the average, which any other script evaluates."""
    script = copy(tmp_path / "here", "ema")
    average = dict(start("normed").named_parameters())
    for steps, decay in ((1, 1 / 10), (2, 2 / 11)):
        flags = ["--max-steps", steps, "--resume", "auto"]
        output, state = train(script, "c", *flags, arch="normed")
        for name, before in average.items():
            trained = state["more"]["trained"][name]
            average[name] = before.detach().lerp(trained, 1 - decay)
            assert state["state_dict"][name].equal(average[name])
            assert name != "0.weight" or not trained.equal(average[name])
    other, flags = ROOT / "dataparallel.py", ["--resume", "auto"]
    evaluated, _ = train(other, "c", *flags, "--evaluate", arch="normed")
    assert last_result(evaluated) == last_result(output)
    flags += ["-b", "48", "--checkpoint-dir", tmp_path / "c"]
    codes, said = run_ranks(other, flags, cwd=work)
    assert codes == [2] and "has the state of ['trained'], but this run has []" in said


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


@pytest.mark.full
def test_mixup_cutmix(train, tmp_path):
    script = copy(tmp_path / "here", "mixup_cutmix")
    output, _ = train(script, "c", "--max-steps", "29", before=MIXED)
    kinds = [output.count(kind) for kind in ("MixUp\n", "CutMix\n")]
    assert sum(kinds) == 29 and min(kinds) > 5


# Says for how many images the recipe's own transform is called.
JITTERED = """
import os
from torchvision.transforms import v2
forward = v2.ColorJitter.forward
def told(*given):
    os.write(1, b"jittered\\n")
    return forward(*given)
v2.ColorJitter.forward = told
"""


@pytest.mark.full
@pytest.mark.parametrize("recipes", ["finetune", "adamw finetune"])
def test_finetune(recipes, work, tmp_path):
    """Frozen layers keep weights and statistics, the rest has two rates; also after a resume."""
    script, hub = copy(tmp_path / "here", *recipes.split()), tmp_path / "hub/checkpoints"
    hub.mkdir(parents=True)  # where torchvision caches its weights: random ones here
    before = resnet18().state_dict()
    torch.save(before, hub / Path(ResNet18_Weights.DEFAULT.url).name)
    flags = "--pretrained -a resnet18 --image-size 32 -b 32 -j 0 --warmup-epochs 0".split()
    flags += ["--resume", "auto"]
    for folder, steps in [("whole", 4), ("parts", 2), ("parts", 4)]:
        more = ["--max-steps", steps, "--checkpoint-dir", tmp_path / folder]
        output = good(
            script, *flags, *more, cwd=work, env={"TORCH_HOME": tmp_path}, before=JITTERED
        )
        assert output.count("jittered\n") >= 2 * 32
    state = load(tmp_path / "whole")
    assert same(state, load(tmp_path / "parts"))
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


@pytest.mark.full
def test_finetune_from_a_checkpoint(work, tmp_path):
    """Of other classes and another optimizer: the head alone is new. A resume needs it no more."""
    for part, number in itertools.product(("train", "val"), range(3)):
        folder = f"{part}/{number}"
        shutil.copytree(work / "data/digits/val" / str(number), tmp_path / "data" / folder)
    flags = "-a resnet18 --image-size 32 -b 32 -j 0 --max-steps".split()
    to = "--checkpoint-dir"
    good(copy(tmp_path / "one", script="dataparallel"), *flags, 2, to, tmp_path / "a", cwd=work)
    before = load(tmp_path / "a")
    weights = ["--weights", tmp_path / "a/checkpoint.pth", "--data", tmp_path / "data"]
    script = copy(tmp_path / "other", "adamw", "finetune")
    good(script, *flags, 2, *weights, to, tmp_path / "b", cwd=work)
    (tmp_path / "a/checkpoint.pth").rename(tmp_path / "a/moved.pth")
    output = good(script, *flags, 3, *weights, to, tmp_path / "b", "--resume", "auto", cwd=work)
    assert "at epoch 1 step 2" in output
    after = load(tmp_path / "b")
    assert (before["optimizer_type"], after["optimizer_type"]) == ("SGD", "AdamW")
    for key, weight in after["state_dict"].items():
        frozen = re.match(r"conv1|bn1|layer[12]", key)
        assert not frozen or weight.equal(before["state_dict"][key])
    name = "layer4.1.conv2.weight"  # three small steps away: not a random start
    torch.testing.assert_close(
        after["state_dict"][name], before["state_dict"][name], atol=1e-3, rtol=0
    )
    assert len(after["state_dict"]["fc.weight"]) == 3
    wrong = ["--weights", tmp_path / "a/moved.pth", "-a", "resnet34", to, tmp_path / "c"]
    codes, said = run_ranks(script, ["--image-size", "32", *wrong], cwd=work)
    assert codes == [2] and said.startswith("error: ") and "--arch resnet18" in said


# Each process says after which epoch it ends early.
ENDING = """
import os
from common.checkpoint import Run
end = Run.end
def told(run):
    os.write(1, f"rank {run.rank} ends after epoch {run.epoch}\\n".encode())
    end(run)
Run.end = told
"""


@pytest.mark.full
def test_early_stopping(train, tmp_path):
    """Two epochs after the best one, in all processes, also if it is resumed between them."""
    script = copy(tmp_path / "here", "early_stopping")
    flags = ["--patience", "2", "--epochs", "40", "--lr", "0.3"]
    output, straight = train(script, "a", *flags, ranks=2, before=ENDING)
    scores = [row["acc1"] for row in rows(tmp_path / "a")]
    best = 1 + scores.index(max(scores))
    assert len(scores) == best + 2 < 40 and scores[0] < 90 < max(scores) and straight["ended"]
    for rank in (0, 1):
        assert f"rank {rank} ends after epoch {best + 2}\n" in output
    train(script, "b", *flags, "--max-steps", 29 * (best + 1), ranks=2)
    _, resumed = train(script, "b", *flags, "--resume", "auto", ranks=2)
    assert same(straight, resumed)
    assert rows(tmp_path / "a", timings=False) == rows(tmp_path / "b", timings=False)


@pytest.mark.full
def test_f1(train, work, tmp_path):
    """That of scikit-learn over the whole validation set, which the mean of three parts is not.

    With early_stopping, and the line of the page between them, it also chooses the best.
    """
    script = copy(tmp_path / "here", "f1", "early_stopping")
    (before, after) = re.findall(r"^sed -i 's/(.*)/(.*)/' distributed.py$", PAGE, re.M)[0]
    assert before in script.read_text()
    script.write_text(script.read_text().replace(before, after))
    _, state = train(script, "c", "--max-steps", "20", ranks=3)
    found = rows(tmp_path / "c")[0]["f1"]
    _, val_set = image_folders(str(work / "data/digits"), 24)
    images = torch.stack([image for image, _ in val_set]).float() / 255
    images = (images - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    net = nets.plain(10)
    net.load_state_dict(state["state_dict"])
    with torch.no_grad():
        predicted = net.eval()(images).argmax(dim=1).numpy()
    target = val_set.targets
    assert found == pytest.approx(100 * f1_score(target, predicted, average="macro"), abs=1e-9)
    parts = [f1_score(target[i::3], predicted[i::3], average="macro") for i in range(3)]
    assert abs(found - 100 * sum(parts) / 3) > 0.01
    assert state["best_acc1"] == found
    evaluated, _ = train(script, "c", "--evaluate", "--resume", "auto")
    assert f"  f1 {found:.3f}\n" in evaluated


# Says of which classes the images of each step are.
DRAWN = """
import os
import torch

def look(module, given):
    if isinstance(module, torch.nn.CrossEntropyLoss):
        os.write(1, f"drawn {given[1].tolist()}\\n".encode())

torch.nn.modules.module.register_module_forward_pre_hook(look)
"""


@pytest.mark.full
def test_weighted(train, work, tmp_path):
    """Where a class has up to 15 times the images of another, each is drawn as often."""
    for number in range(10):
        for part in ("train", "val"):
            folder = tmp_path / "data" / part / str(number)
            folder.mkdir(parents=True)
            files = sorted((work / "data/digits/train" / str(number)).iterdir())
            for file in files[: 8 + 12 * number if part == "train" else 2]:
                (folder / file.name).symlink_to(file)
    script = copy(tmp_path / "here", "weighted")
    flags = ["--data", tmp_path / "data", "--epochs", "3"]
    output, _ = train(script, "c", *flags, ranks=2, before=DRAWN)
    lines = re.findall(r"^drawn (.*)$", output, re.M)
    assert len(lines) == 2 * 3 * (620 // 48)  # 24 images each
    drawn = torch.tensor([int(word) for line in lines for word in json.loads(line)]).bincount()
    expected = len(lines) * 24 / 10
    assert len(drawn) == 10 and (drawn - expected).abs().max() < 5 * expected**0.5


def test_weighted_order(tmp_path):
    """A function of (seed, epoch): any number of processes read it, and a resume goes on in it."""
    make = runpy.run_path(str(copy(tmp_path / "here", "weighted")))["WeightedSampler"]
    weights = torch.tensor([0.0, 1, 2, 5]).repeat(25)
    whole = make(weights, 20, 0, 1, seed=3)
    whole.set_epoch(2)
    keys = list(whole)
    assert len(keys) == len(whole) == 100 == len(set(keys))  # no image has the same crop twice
    for rank in range(4):
        part = make(weights, 20, rank, 4, seed=3)
        part.set_epoch(2, first=3)
        assert list(part) == keys[60 + rank :: 4] and len(part) == 10
    others = []
    for seed, epoch in ((3, 1), (4, 2)):
        other = make(weights, 20, 0, 1, seed)
        other.set_epoch(epoch)
        others.append(list(other))
    orders = [[index for _, index in found] for found in (keys, *others)]
    assert orders[0] != orders[1] and orders[0] != orders[2]
    assert not {*keys} & {*others[0]}  # nor in another epoch
    counts = torch.zeros(4)
    for epoch in range(50):
        whole.set_epoch(epoch)
        counts += torch.tensor([index % 4 for _, index in whole]).bincount(minlength=4)
    assert counts[0] == 0
    torch.testing.assert_close(counts / 5000, torch.tensor([0, 1, 2, 5]) / 8, atol=0.03, rtol=0)


# Says for how many images RandAugment is called.
AUGMENTED = """
import os
from torchvision.transforms import v2
forward = v2.RandAugment.forward
def told(*given):
    os.write(1, b"augmented\\n")
    return forward(*given)
v2.RandAugment.forward = told
"""


@pytest.mark.full
def test_randaugment(train, tmp_path):
    """Each training image, and no other; how does not depend on the loader's processes."""
    ends = []
    for name, workers in (("a", 0), ("b", 3)):
        script = copy(tmp_path / name, "randaugment")
        flags = ["--max-steps", "10", "--epochs", "1", "-j", workers]
        output, state = train(script, name, *flags, before=AUGMENTED)
        assert output.count("augmented") == 10 * 48
        ends.append(state)
    assert same(*ends)
    _, plain = train(copy(tmp_path / "here"), "c", *flags)
    assert not same(plain, ends[0])


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


@pytest.mark.full
@pytest.mark.parametrize(
    "arch, share, more",
    [("resnet18", 0.6, []), ("tests.nets:transformer", 0.35, ["ema"])],
    ids=["resnet", "transformer"],
)
def test_activation_checkpointing(arch, share, more, train, tmp_path):
    """To the bit as without it, BatchNorm's statistics and dropout too, with less memory."""
    ends, kept = [], []
    for name in ([], ["activation_checkpointing"]):
        script = copy(tmp_path / f"here{len(name)}", *more, *name)
        flags = ["-a", arch, "--max-steps", "4"]
        output, state = train(script, f"{len(name)}", *flags, ranks=2, before=KEPT)
        ends.append(state)
        kept.append(int(re.findall(r"^kept (\d+)$", output, re.M)[-1]))
    assert same(*ends)
    assert kept[1] < share * kept[0]


@pytest.mark.full
def test_text(tmp_path):
    """Where there are no images at all."""
    script = copy(tmp_path / "here", "text")
    output = good(script, "--lr", "8", "-j", "1", ranks=2)
    assert float(re.findall(r"^epoch \S+  loss .* acc@1 ([\d.]+)", output, re.M)[-1]) > 75
    assert not (tmp_path / "here/data").exists()
    state = load(tmp_path / "here/checkpoints")
    assert state["classes"] == ["argparse", "doctest", "tarfile", "typing"]


@pytest.mark.full
def test_bad_images(train, work, tmp_path):
    """A broken image, which would end the script, is left out; which one it is is said."""
    for part in ("train", "val"):
        shutil.copytree(work / "data/digits/val", tmp_path / "data" / part)
    broken = sorted((tmp_path / "data/train").glob("3/*"))[2]
    broken.write_bytes(broken.read_bytes()[:40])
    flags = ["-b", "40", "--data", tmp_path / "data", "--epochs", "1"]
    output, state = train(copy(tmp_path / "here", "bad_images"), "c", *flags)
    assert output.count(f"warning: cannot read image {broken}") == 1
    assert last_result(output) and state["epoch"] == 1


@pytest.mark.full
def test_wandb(work, tmp_path):
    """Offline: what it would send lies in the folder of checkpoints. A second start is another."""
    if importlib.util.find_spec("wandb") is None and "CI" not in os.environ:
        pytest.skip("wandb is not installed: pip install wandb")
    script = copy(tmp_path / "here", "wandb")
    flags = [*SMALL, "tests.nets:plain", "--checkpoint-dir", tmp_path / "c", "--resume", "auto"]
    env = {"WANDB_MODE": "offline", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    for steps in (29, 58):  # by torchrun: wandb writes the last of it when the interpreter ends
        run([*torchrun(2, script), *flags, "--max-steps", steps], work, env=env)
    sent = sorted((tmp_path / "c/wandb").glob("offline-run-*/*.wandb"))  # none of rank 1
    for file, row in zip(sent, rows(tmp_path / "c"), strict=True):
        assert b"train/acc@1" in file.read_bytes()
        for name in ("train_loss", "val_loss", "acc1", "lr"):
            assert str(row[name]).encode() in file.read_bytes()


@pytest.mark.full
def test_tensorboard(work, tmp_path):
    """What a killed run has drawn beyond its checkpoint is not shown."""
    script, folder = copy(tmp_path / "here", "tensorboard"), tmp_path / "c"
    flags = [*SMALL, "tests.nets:plain", "-p", "3", "--checkpoint-dir", folder]
    env = {"PYTHONPATH": str(ROOT)}
    job = Job([*torchrun(2, script), *flags, "--checkpoint-freq", "20"], work, env)
    job.wait_for(r"epoch 1/\d+ \[27/")
    job.kill()
    job.wait(60)
    run([*torchrun(2, script), *flags, "--resume", "auto", "--max-steps", "58"], work, env=env)
    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    for name in ("train/loss", "lr", "images/s"):
        steps = [event.step for event in found.Scalars(name)]
        assert steps == sorted(set(steps)) and steps[-1] == 58
    last = rows(folder)[-1]
    assert found.Scalars("epoch/acc1")[-1].value == pytest.approx(last["acc1"])


@pytest.mark.full
def test_predictions(train, work, tmp_path):
    """A line for each image, of three processes too; as many are right as the evaluation says."""
    script, table = copy(tmp_path / "here", "predictions"), tmp_path / "predictions.csv"
    train(script, "c", "--max-steps", "30", ranks=2)
    flags = ["--evaluate", "--resume", "auto", "--predictions", table]
    output, _ = train(script, "c", *flags, ranks=3)
    with open(table, newline="") as file:
        lines = list(csv.DictReader(file))
    files = sorted(path.relative_to(work) for path in work.glob("data/digits/val/*/*"))
    assert [Path(line["path"]) for line in lines] == files
    right = sum(line["class"] == line["predicted"] for line in lines)
    assert last_result(output)[1] == pytest.approx(100 * right / 360, abs=1e-3)
    assert all(0.1 <= float(line["confidence"]) <= 1 for line in lines)


@pytest.mark.full
def test_profile(train, tmp_path):
    """A trace of each process. With accumulate too, it shows that a step sends once."""
    script = copy(tmp_path / "here", "accumulate", "profile")
    flags = ["--max-steps", "12", "-p", "100", "--accumulate", "2"]
    output, _ = train(script, "c", *flags, ranks=2)
    for rank in (0, 1):
        path = tmp_path / f"c/trace-{rank}.json"
        names = [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]
        assert names.count("gloo:all_reduce") == 5  # steps
        assert names.count("aten::convolution") == 10
        assert re.search(rf"{path}: collectives ([\d.]+) ms, not hidden ([\d.]+) ms", output)


def test_what_profile_says(tmp_path, capsys):
    """Of a made-up trace: computing from 5 to 25 hides half of two collectives."""
    report = runpy.run_path(str(copy(tmp_path / "here", "profile")))["report"]

    def event(name, start, end, children=()):
        span = SimpleNamespace(start=start * 1000, end=end * 1000)
        device = SimpleNamespace(name="CUDA" if torch.cuda.is_available() else "CPU")
        more = {"device_type": device, "cpu_children": children, "is_user_annotation": "#" in name}
        return SimpleNamespace(name=name, time_range=span, **more)

    events = [event("gloo:all_reduce", 0, 10), event("gloo:all_reduce", 20, 30)]
    events += [event("aten::mm", 5, 15), event("aten::mm", 12, 25)]
    events += [event("aten::linear", 0, 30, children=events), event("Optimizer#SGD", 0, 30)]
    profiler = SimpleNamespace(events=lambda: events, export_chrome_trace=lambda path: None)
    report(profiler, "a.json")
    assert capsys.readouterr().out == "a.json: collectives 20.0 ms, not hidden 10.0 ms\n"


@pytest.mark.full
@pytest.mark.parametrize(
    "name, script, launcher, more",
    [
        ("accumulate", "multiprocessing_distributed", [PYTHON], ["--accumulate", "2"]),
        ("adamw", "horovod_distributed", HOROVODRUN, []),
        ("clip", "fsdp_distributed", torchrun(2)[:-1], ["--lr", "4"]),
    ],
)
def test_runs_in_other_scripts(name, script, launcher, more, train, work, tmp_path):
    """Two processes; what a run of distributed.py ends with, to rounding."""
    if script == "horovod_distributed":
        needs_horovod()
    one, other = (copy(tmp_path / which, name, script=which) for which in ("distributed", script))
    for path in (one, other):
        path.write_text(path.read_text().replace("max_norm=1.0", "max_norm=0.01"))
    flags = ["--max-steps", "8", *more, "--checkpoint-dir"]
    _, expected = train(one, "a", *flags, tmp_path / "a", ranks=2)
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}  # the latter for --arch
    run([*launcher, other, *SMALL, "tests.nets:plain", *flags, tmp_path / "b"], work, env=env)
    assert_close(expected, load(tmp_path / "b"))
