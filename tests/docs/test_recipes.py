"""Each recipe, applied to a copy of a script as docs/recipes.md says: it does what it says, and a
run that was killed ends as a straight one.
"""

import importlib.util
import itertools
import json
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    HOROVODRUN,
    ONE_THREAD,
    ROOT,
    last_result,
    load,
    needs_horovod,
    rows,
    run,
    torchrun,
)
from torch import nn
from torchvision.models import ResNet18_Weights, resnet18

from common.metrics import AverageMeter
from common.prefetcher import Prefetcher
from tests import nets
from tests.docs.ranks import good, run_ranks
from tests.runs import read

RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.diff"))
PAGE = (ROOT / "docs/recipes.md").read_text()
# Of the page's table: the recipe, and the other scripts that it fits too.
ROW = re.compile(r"^\| \[(\w+)\]\(#\w+\) \|.*\|([^|]*)\|$", re.M)
FITS = {name: re.findall(r"`(\w+)`", others) for name, others in ROW.findall(PAGE)}
SMALL = "--image-size 24 --batch-size 48 --epochs 2 -j 1 --arch".split()


def copy(folder, *recipes, script="distributed.py"):
    """A copy of a script, with common/ beside it, and these recipes; returns its path."""
    folder.mkdir(exist_ok=True)
    shutil.copy(ROOT / script, folder)
    (folder / "common").symlink_to(ROOT / "common")
    for name in recipes:
        patch(folder, f"{script} < {ROOT}/recipes/{name}.diff")
    return folder / script


def patch(folder, words):
    ended = subprocess.run(f"patch {words}", shell=True, cwd=folder, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout


def equal(a, b):
    """Whether two parts of a checkpoint are the same, tensors to the bit."""
    if torch.is_tensor(a):
        return a.equal(b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def same(a, b):
    keys = ("epoch", "step", "best_acc1", "state_dict", "optimizer", "scaler", "meters", "more")
    return all(equal(a[key], b[key]) for key in keys)


def start(arch="plain"):
    """The weights that a run starts with."""
    torch.manual_seed(0)
    return getattr(nets, arch)(10)


def torchvisions(folder):
    """TORCH_HOME with a file of weights as torchvision caches it: random ones, returned too."""
    (folder / "hub/checkpoints").mkdir(parents=True)
    torch.manual_seed(1)
    weights = resnet18().state_dict()
    torch.save(weights, folder / "hub/checkpoints" / Path(ResNet18_Weights.DEFAULT.url).name)
    return {"TORCH_HOME": folder}, weights


def test_fit_what_the_table_says(tmp_path):
    """The other scripts too: compiled, no name is missing, and written as the scripts are."""
    assert sorted(FITS) == RECIPES and len(RECIPES) >= 10
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "common").symlink_to(ROOT / "common")
    for name in RECIPES:
        for script in ("distributed", *FITS[name]):
            path = copy(tmp_path / "one", name, script=f"{script}.py")
            path.rename(tmp_path / f"{name}_of_{script}.py")
            shutil.rmtree(tmp_path / "one")
    for command in (["format", "--check"], ["check"]):
        ended = subprocess.run(["ruff", *command], cwd=tmp_path, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout


def test_which_do_not_fit_together(tmp_path):
    """In the order of the table."""
    (sentence,) = re.findall(r"^These change the same lines .*: (.*)\.$", PAGE, re.M)
    clauses = [re.findall(r"`(\w+)`", clause) for clause in sentence.split(";")]
    said = {frozenset([first, other]) for first, *others in clauses for other in others}
    found = set()
    for pair in itertools.combinations(FITS, 2):
        folder = tmp_path / "_".join(pair)
        copy(folder, pair[0])
        loosely = "-l " * (pair == ("accumulate", "clip"))
        words = f"patch {loosely}distributed.py < {ROOT}/recipes/{pair[1]}.diff"
        if subprocess.run(words, shell=True, cwd=folder, stdout=-3).returncode:
            found.add(frozenset(pair))
    assert found == said


# ---- What one does


@pytest.mark.full
def test_accumulate_is_as_many_more_processes(work, tmp_path):
    """To the bit, dropout and averages included: two processes, or one with two parts."""
    script = copy(tmp_path / "here", "accumulate")
    text = "from torch import nn\nfrom tests.nets import plain\n\ndef net(num_classes):\n"
    text += "    return nn.Sequential(nn.Dropout(0.1), plain(num_classes))\n"
    (tmp_path / "here/dropped.py").write_text(text)
    ends, losses = {}, {}
    for processes, parts in [(2, 1), (1, 2), (1, 1), (4, 1), (2, 2)]:
        folder = tmp_path / f"{processes}x{parts}"
        flags = [*SMALL, "dropped:net", "--max-steps", "12", "--checkpoint-dir", folder]
        good(script, *flags, "--accumulate", parts, ranks=processes, cwd=work)
        ends[processes, parts] = load(folder)
        losses[processes, parts] = [row["train_loss"] for row in rows(folder)]
    assert same(ends[2, 1], ends[1, 2]) and losses[2, 1] == losses[1, 2]
    assert not same(ends[2, 1], ends[1, 1])  # other dropout
    four, two = ends[4, 1]["state_dict"], ends[2, 2]["state_dict"]
    for key, weight in four.items():
        torch.testing.assert_close(weight, two[key], atol=1e-5, rtol=1e-4)
    moved = [weight - four[f"1.{key}"] for key, weight in start().state_dict().items()]
    assert max(difference.abs().max() for difference in moved) > 1e-3  # so that means something
    flags = [*SMALL, "tests.nets:plain", "--accumulate", "5", "--checkpoint-dir", tmp_path / "c"]
    said = "error: --accumulate must divide the 48 images per process\n"
    assert run_ranks(script, flags, cwd=work) == ([2], said)


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
    "ema": [2],
    "adamw ema": [1, "--lr", "0.01"],
    "accumulate": [1, "--accumulate", "4"],
    "clip": [1, "--precision", "fp16"],
    "mixup_cutmix": [2],
}


@pytest.mark.full
@pytest.mark.parametrize("recipes", KILLED)
def test_killed_and_resumed_is_a_straight_run(recipes, work, tmp_path):
    """In mid-epoch, and to the bit: BatchNorm, dropout, the optimizer and the averages too."""
    script = copy(tmp_path / "here", *recipes.split())
    ranks, *more = KILLED[recipes]
    flags = [*SMALL, "tests.nets:normed", "--max-steps", "44", "--checkpoint-freq", "5", *more]
    straight, parts = tmp_path / "a", tmp_path / "b"
    good(script, *flags, "--checkpoint-dir", straight, ranks=ranks, cwd=work)
    flags += ["--checkpoint-dir", parts]
    codes, output = run_ranks(script, flags, ranks, work, before=DYING)
    assert codes == [-9] * ranks, output
    assert (load(parts)["epoch"], load(parts)["step"]) == (1, 5)
    output = good(script, *flags, "--resume", "auto", ranks=ranks, cwd=work)
    assert "at epoch 1 step 5" in output
    a, b = load(straight), load(parts)
    assert same(a, b) and (a["epoch"], a["step"]) == (1, 15)
    assert rows(straight, timings=False) == rows(parts, timings=False)


@pytest.mark.full
def test_clip(work, tmp_path):
    """The norm is that of the mean over all processes, and not that of fp16's scaled gradients."""
    script = copy(tmp_path / "here", "clip")
    script.write_text(script.read_text().replace("max_norm=1.0", "max_norm=0.01"))
    flags = [*SMALL, "tests.nets:plain", *"--max-steps 1 --warmup-epochs 0 --momentum 0".split()]
    before, steps = start().state_dict(), []  # what one step changes, as one tensor
    for path, ranks, precision in [(script, 1, "fp32"), (script, 2, "fp32"), (script, 1, "fp16")]:
        folder = tmp_path / f"{ranks}-{precision}"
        own = ["--wd", "0", "--precision", precision, "--checkpoint-dir", folder]
        good(path, *flags, *own, ranks=ranks, cwd=work)
        after = load(folder)["state_dict"]
        steps.append(torch.cat([(after[key] - before[key]).flatten() for key in before]))
        assert steps[-1].norm() == pytest.approx(0.1 * 48 / 256 * 0.01, rel=1e-3)
    torch.testing.assert_close(steps[0], steps[1], atol=1e-7, rtol=1e-3)


@pytest.mark.full
def test_adamw(work, tmp_path):
    """Norms and biases do not decay; it learns."""
    script = copy(tmp_path / "here", "adamw")
    flags = [*SMALL, "tests.nets:normed", "--checkpoint-dir"]
    ends, rate = [], 0.1 * 48 / 256
    for decay in ("0", "0.5"):
        more = ["--max-steps", "1", "--warmup-epochs", "0", "--lr", "0.1", "--wd", decay]
        good(script, *flags, tmp_path / decay, *more, cwd=work)
        ends.append(load(tmp_path / decay))
    free, decayed = (end["state_dict"] for end in ends)
    changed = {key for key in free if not free[key].equal(decayed[key])}
    assert changed == {"0.weight", "6.weight"}
    for name in changed:
        expected = free[name] - rate * 0.5 * start("normed").state_dict()[name]
        torch.testing.assert_close(decayed[name], expected, atol=1e-6, rtol=1e-4)
    assert {"exp_avg", "exp_avg_sq"} < ends[0]["optimizer"]["state"][0].keys()
    assert ends[0]["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.999)
    assert last_result(good(script, *flags, tmp_path / "c", "--lr", "0.05", cwd=work))[1] > 80


@pytest.mark.full
def test_ema(work, tmp_path):
    """What is saved and validated is the average, which any other script evaluates."""
    script, folder = copy(tmp_path / "here", "ema"), tmp_path / "c"
    flags = [*SMALL, "tests.nets:normed", "--checkpoint-dir", folder, "--resume", "auto"]
    average = dict(start("normed").named_parameters())
    for steps, decay in ((1, 1 / 10), (2, 2 / 11)):
        said = last_result(good(script, *flags, "--max-steps", steps, cwd=work))
        state = load(folder)
        for name, before in average.items():
            trained = state["more"]["trained"][name]
            average[name] = before.detach().lerp(trained, 1 - decay)
            assert state["state_dict"][name].equal(average[name])
            assert name != "0.weight" or not trained.equal(average[name])
    other = ROOT / "dataparallel.py"
    assert last_result(good(other, *flags, "--evaluate", cwd=work, output=tmp_path / "o")) == said
    codes, output = run_ranks(other, flags, cwd=work, output=tmp_path / "o")
    assert codes == [2] and "has the state of trained, but this script has nothing" in output


@pytest.mark.full
def test_mixup_cutmix(tmp_path):
    """In a script's own loop: each image is of two, and its target says how much of which."""
    path = copy(tmp_path / "here", "mixup_cutmix", script="dataparallel.py")
    module, net = imported(path), nets.plain(10)
    flags = {"checkpoint_freq": 0, "print_freq": 50, "warmup_epochs": 1.0, "epochs": 2}
    train_run = read(tmp_path / "c", None, **flags)
    train_run.steps_per_epoch = 40
    optimizer = torch.optim.SGD(net.parameters(), 0.1, 0.9)
    meters = {name: AverageMeter(name) for name in ("loss", "acc@1", "acc@5")}
    train_run.attach(net, optimizer, torch.amp.GradScaler("cpu", enabled=False), meters)
    torch.manual_seed(3)
    images, target = torch.rand(40, 8, 3, 24, 24), torch.randint(10, (40, 8))
    seen = []

    class Model(nn.Module):
        def forward(self, images):
            seen.append([images.clone()])
            return net(images)

    def criterion(output, target):
        seen[-1].append(target)
        return nn.functional.cross_entropy(output, target)

    batches = Prefetcher(list(zip(images, target, strict=True)), torch.device("cpu"))
    stop = SimpleNamespace(requested=threading.Event(), agreed=False)
    module.train(batches, Model(), criterion, train_run, stop, 0, 1, train_run.args)
    kinds = []
    for (mixed, soft), image, label in zip(seen, images, target, strict=True):
        one, other = nn.functional.one_hot(torch.stack([label, label.roll(1)]), 10)
        unlike = label != label.roll(1)
        share = float(soft[unlike, label[unlike]][0])
        torch.testing.assert_close(soft, share * one + (1 - share) * other)
        partner = image.roll(1, 0)
        if torch.allclose(mixed, share * image + (1 - share) * partner, atol=1e-6):
            kinds.append("mixup")
        else:
            assert ((mixed == image) | (mixed == partner)).all()
            assert float((mixed != image).float().mean()) == pytest.approx(1 - share, abs=1e-4)
            kinds.append("cutmix")
    assert min(kinds.count("mixup"), kinds.count("cutmix")) > 5
    assert train_run.step == 40 and 0 <= meters["acc@1"].avg <= 100


def imported(script):
    spec = importlib.util.spec_from_file_location("recipe", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Says for how many images the recipe's own transform is called.
JITTERED = """
from torchvision.transforms import v2
forward = v2.ColorJitter.forward
def told(*given):
    print("jittered")
    return forward(*given)
v2.ColorJitter.forward = told
"""


@pytest.mark.full
def test_finetune(work, tmp_path):
    script, (env, before) = copy(tmp_path / "here", "finetune"), torchvisions(tmp_path)
    flags = "--pretrained -a resnet18 --image-size 32 -b 32 -j 0 --max-steps 3".split()
    flags += ["--warmup-epochs", "0", "--checkpoint-dir", tmp_path / "c"]
    output = good(script, *flags, cwd=work, env=env, before=JITTERED)
    assert output.count("jittered\n") >= 3 * 32
    state = load(tmp_path / "c")
    after = state["state_dict"]
    kept = {key for key in before if key in after and before[key].equal(after[key])}
    frozen = {key for key in after if re.match(r"conv1|bn1|layer[12]", key)}
    assert kept == frozen and any("running_mean" in key for key in frozen)
    body, head = state["optimizer"]["param_groups"]
    assert body["lr"] == pytest.approx(0.1 * head["lr"]) and head["lr"] > 0
    assert len(state["optimizer"]["state"]) == len(body["params"]) + len(head["params"])
    assert len(head["params"]) == 2


@pytest.mark.full
def test_text(tmp_path):
    """Where there are no images at all."""
    script = copy(tmp_path / "here", "text")
    output = good(script, "--lr", "8", "-j", "1", ranks=2)
    assert float(re.findall(r"^ \* loss .* acc@1 ([\d.]+)$", output, re.M)[-1]) > 75
    assert not (tmp_path / "here/data").exists()
    state = load(tmp_path / "here/checkpoints")
    assert state["classes"] == ["argparse", "doctest", "tarfile", "typing"]
    assert state["arch"] == "distributed:bag_of_trigrams"


@pytest.mark.full
def test_bad_images(work, tmp_path):
    """A broken image ends the script, and not the recipe's; which one it is is said."""
    for part in ("train", "val"):
        shutil.copytree(work / "data/digits/val", tmp_path / "data" / part)
    broken = sorted((tmp_path / "data/train").glob("3/*"))[2]
    broken.write_bytes(broken.read_bytes()[:40])
    flags = [*SMALL, "tests.nets:plain", "-b", "40", "--data", tmp_path / "data", "--epochs", "1"]
    codes, output = run_ranks(copy(tmp_path / "bare"), [*flags, "--checkpoint-dir", tmp_path / "a"])
    assert codes == [1] and f"cannot read image {broken}" in output
    script = copy(tmp_path / "here", "bad_images")
    output = good(script, *flags, "--checkpoint-dir", tmp_path / "b")
    assert output.count(f"warning: cannot read image {broken}") == 1
    assert last_result(output) and load(tmp_path / "b")["epoch"] == 1


@pytest.mark.full
def test_wandb(work, tmp_path):
    """Offline: what it would send lies in the folder of checkpoints. A second start is another."""
    if importlib.util.find_spec("wandb") is None and "CI" not in os.environ:
        pytest.skip("wandb is not installed: pip install wandb")
    script = copy(tmp_path / "here", "wandb")
    flags = [*SMALL, "tests.nets:plain", "--checkpoint-dir", tmp_path / "c", "--resume", "auto"]
    env = {"WANDB_MODE": "offline", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    for steps in (12, 40):  # by torchrun: wandb writes the last of it when the interpreter ends
        run([*torchrun(2, script), *flags, "--max-steps", steps], work, env=env)
    runs = sorted((tmp_path / "c/wandb").glob("offline-run-*"))
    assert len(runs) == 2  # one for each start, and none of rank 1
    for folder, steps in zip(runs, (12, 40), strict=True):
        (row,) = [r for r in rows(tmp_path / "c") if r["epoch"] * 29 + r["step"] == steps]
        (file,) = folder.glob("*.wandb")
        sent = file.read_bytes()
        for name in ("train_loss", "val_loss", "acc1", "lr"):
            assert f"epoch/{name}".encode() in sent and str(row[name]).encode() in sent
        assert b"train/acc@1" in sent


@pytest.mark.full
def test_profile(work, tmp_path, capsys):
    """A trace of each process. With accumulate too, it shows that a step sends once."""
    script = copy(tmp_path / "here", "accumulate", "profile")
    flags = [*SMALL, "tests.nets:plain", "--max-steps", "12", "-p", "100", "--accumulate", "2"]
    output = good(script, *flags, "--checkpoint-dir", tmp_path / "c", ranks=2, cwd=work)
    for rank in (0, 1):
        path = tmp_path / f"c/trace-{rank}.json"
        events = json.loads(path.read_text())["traceEvents"]
        names = [event.get("name") for event in events]
        assert names.count("gloo:all_reduce") == 5  # steps
        assert names.count("aten::convolution") == 10
        assert re.search(rf"{path}: collectives ([\d.]+) ms, not hidden ([\d.]+) ms", output)

    # What it says is checked on a made-up trace: computing from 5 to 25 hides half of two.
    def event(name, start, end, children=()):
        span = SimpleNamespace(start=start * 1000, end=end * 1000)
        device = SimpleNamespace(name="CUDA" if torch.cuda.is_available() else "CPU")
        more = {"device_type": device, "cpu_children": children, "is_user_annotation": "#" in name}
        return SimpleNamespace(name=name, time_range=span, **more)

    events = [event("gloo:all_reduce", 0, 10), event("gloo:all_reduce", 20, 30)]
    events += [event("aten::mm", 5, 15), event("aten::mm", 12, 25)]
    events += [event("aten::linear", 0, 30, children=events), event("Optimizer#SGD", 0, 30)]
    profiler = SimpleNamespace(events=lambda: events, export_chrome_trace=lambda path: None)
    imported(script).report(profiler, "a.json")
    assert capsys.readouterr().out == "a.json: collectives 20.0 ms, not hidden 10.0 ms\n"


# ---- The page


BLOCKS = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.M | re.S)
COMMAND = re.compile(r"torchrun --standalone --nproc-per-node=\d distributed\.py(.*)")


@pytest.mark.full
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_commands_of_the_page(number, work, tmp_path):
    """A block after another, each on a fresh copy; one step is taken of a training."""
    script, (env, _) = copy(tmp_path / "here"), torchvisions(tmp_path)
    (tmp_path / "here/recipes").symlink_to(ROOT / "recipes")
    shutil.copytree(work / "data", tmp_path / "here/data")
    for part in ("train", "val"):
        shutil.copytree(work / "data/digits/val", tmp_path / "own" / part)
    for line in BLOCKS[number].splitlines():
        if line.startswith("patch "):
            patch(tmp_path / "here", line.removeprefix("patch "))
            continue
        flags = COMMAND.fullmatch(line)[1].replace("/path/to/own", str(tmp_path / "own")).split()
        flags += "--max-steps 1 --image-size 32 -j 1".split()
        assert " * loss " in good(script, *flags, ranks=2, env=env)


@pytest.mark.full
@pytest.mark.parametrize(
    "name, script",
    [
        ("accumulate", "multiprocessing_distributed"),
        ("adamw", "horovod_distributed"),
        ("clip", "fsdp_distributed"),
    ],
)
def test_runs_in_other_scripts(name, script, work, tmp_path):
    """Two processes; what a run of distributed.py ends with, the same."""
    flags = [*SMALL, "tests.nets:plain", "--max-steps", "8"]
    flags += {"accumulate": ["--accumulate", "2"], "clip": ["--lr", "4"]}.get(name, [])
    ends = []
    for number, which in enumerate(("distributed", script)):
        path = copy(tmp_path / str(number), name, script=f"{which}.py")
        path.write_text(path.read_text().replace("max_norm=1.0", "max_norm=0.01"))
        own = [*flags, "--checkpoint-dir", tmp_path / f"{number}/c"]
        env = ONE_THREAD | {"PYTHONPATH": str(ROOT)}  # for --arch
        if which == "horovod_distributed":
            needs_horovod()
            run([*HOROVODRUN, path, *own], work, env=env)
        elif which == "multiprocessing_distributed":
            run([HOROVODRUN[-1], path, "--nprocs=2", *own], work, env=env)
        else:
            good(path, *own, ranks=2, cwd=work)
        ends.append(load(tmp_path / f"{number}/c"))
    if script != "fsdp_distributed":  # which adds up in another order
        assert same(*ends)
    for key, weight in ends[0]["state_dict"].items():
        torch.testing.assert_close(weight, ends[1]["state_dict"][key], atol=1e-5, rtol=1e-4)
