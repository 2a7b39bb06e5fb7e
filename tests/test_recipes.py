"""Each recipe, applied to a copy of a script as docs/recipes.md says: it fits, it does what it
says, and a run that was killed ends as a straight one. And the recipes follow their script.
"""

import importlib.util
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
    PYTHON,
    ROOT,
    Forked,
    Job,
    forked,
    forking,
    last_result,
    load,
    needs_horovod,
    rows,
    run,
)
from torch import nn
from torchvision.models import ResNet18_Weights, resnet18

from common.metrics import AverageMeter
from common.prefetcher import Prefetcher
from tests import nets
from tests.runs import opened
from tools import generate

RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.diff"))
PAGE = (ROOT / "docs/recipes.md").read_text()
# Of the page's table: the recipe, and the other scripts that it fits too.
ROW = re.compile(r"^\| \[(\w+)\]\(#\w+\) \|.*\|([^|]*)\|$", re.M)
FITS = {name: re.findall(r"`(\w+)`", others) for name, others in ROW.findall(PAGE)}
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
SMALL = "--image-size 24 --batch-size 48 --epochs 2 -j 1 --arch".split()


def written(name):
    return (ROOT / f"recipes/{name}.diff").read_text()


def copy(folder, *recipes, script="distributed.py"):
    """A copy of a script, with common/ beside it, and these recipes; returns its path."""
    folder.mkdir(exist_ok=True)
    shutil.copy(ROOT / script, folder)
    (folder / "common").symlink_to(ROOT / "common")
    for name in recipes:
        patch(folder, f"{script} < {ROOT}/recipes/{name}.diff")
    return folder / script


def patch(folder, words, code=0):
    ended = subprocess.run(f"patch {words}", shell=True, cwd=folder, capture_output=True, text=True)
    assert ended.returncode == code, ended.stdout
    return ended.stdout


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
    keys = ("epoch", "step", "best_acc1", "state_dict", "optimizer", "scaler", "meters")
    return all(equal(a[key], b[key]) for key in keys)


def imported(script):
    spec = importlib.util.spec_from_file_location("recipe", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def start(arch="plain"):
    """The weights that a run starts with."""
    torch.manual_seed(0)
    return getattr(nets, arch)(10)


def test_all_are_in_the_table():
    assert sorted(FITS) == RECIPES and len(RECIPES) >= 10


@pytest.mark.parametrize("name", RECIPES)
def test_fits_to_the_line(name, tmp_path):
    """Without fuzz and offset, in few lines; and back again."""
    lines = written(name).splitlines()
    assert lines[:2] == ["--- distributed.py", "+++ distributed.py"]
    assert len([line for line in lines[2:] if line[0] in "+-"]) <= 25
    copy(tmp_path / "a")
    said = patch(tmp_path / "a", f"distributed.py < {ROOT}/recipes/{name}.diff")
    assert said == "patching file distributed.py\n"
    patch(tmp_path / "a", f"-R distributed.py < {ROOT}/recipes/{name}.diff")
    text = (ROOT / "distributed.py").read_text()
    assert (tmp_path / "a/distributed.py").read_text() == text


def test_is_written_as_the_scripts_are(tmp_path):
    """In the scripts that it fits too; compiled, and no name is missing."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "common").symlink_to(ROOT / "common")
    for name in RECIPES:
        for script in ("distributed", *FITS[name]):
            path = copy(tmp_path / f"{name} {script}", name, script=f"{script}.py")
            path.rename(tmp_path / f"{name}_of_{script}.py")
            shutil.rmtree(tmp_path / f"{name} {script}")
    for command in (["format", "--check"], ["check"]):
        ended = subprocess.run(["ruff", *command], cwd=tmp_path, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout


# ---- What one does


@pytest.fixture(scope="module")
def accumulating(tmp_path_factory):
    """distributed.py with accumulate, beside it a model with dropout and without BatchNorm."""
    folder = tmp_path_factory.mktemp("accumulate") / "here"
    script = copy(folder, "accumulate")
    text = "from torch import nn\nfrom tests.nets import plain\n\ndef net(num_classes):\n"
    text += "    return nn.Sequential(nn.Dropout(0.1), plain(num_classes))\n"
    (folder / "dropped.py").write_text(text)
    return script


def accumulated(script, work, folder, processes, parts):
    """The end of a run with so many processes, each taking so many parts of a batch."""
    flags = [*SMALL, "dropped:net", "--max-steps", "12", "--checkpoint-dir", folder]
    flags += ["--accumulate", parts] if parts else []
    run([*forked(script, processes), *flags], work, env=ONE_THREAD)
    return load(folder), rows(folder, timings=False)


def test_accumulate_is_as_many_more_processes(accumulating, work, tmp_path):
    """To the bit, dropout and averages included: two processes, or one with two parts."""
    two, rows_two = accumulated(accumulating, work, tmp_path / "2x1", 2, None)
    one, rows_one = accumulated(accumulating, work, tmp_path / "1x2", 1, 2)
    assert same(two, one)
    assert [row["train_loss"] for row in rows_two] == [row["train_loss"] for row in rows_one]
    other, _ = accumulated(accumulating, work, tmp_path / "1x1", 1, 1)
    assert not same(one, other)  # other dropout
    flags = [*SMALL, "tests.nets:plain", "--accumulate", "5", "--checkpoint-dir", tmp_path / "c"]
    output = run([*forked(accumulating), *flags], work, code=2)
    assert output == "error: --accumulate must divide the 48 images per process\n"


def test_accumulate_with_more_processes(accumulating, work, tmp_path):
    four, _ = accumulated(accumulating, work, tmp_path / "4x1", 4, 1)
    two, _ = accumulated(accumulating, work, tmp_path / "2x2", 2, 2)
    for key, weight in four["state_dict"].items():
        torch.testing.assert_close(weight, two["state_dict"][key], atol=1e-5, rtol=1e-4)
    moved = [w - four["state_dict"][f"1.{key}"] for key, w in start().state_dict().items()]
    assert max(difference.abs().max() for difference in moved) > 1e-3  # so that means something


# Ends the process at a step, as SIGKILL does: after what was saved some steps before.
DYING = """
import os, runpy, signal, sys
import common.seeds
seed_step = common.seeds.seed_step
def dying(seed, epoch, step, rank):
    if (epoch, step) == (1, 8):
        os.kill(os.getpid(), signal.SIGKILL)
    seed_step(seed, epoch, step, rank)
common.seeds.seed_step = dying
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
KILLED = {
    "ema": [2],
    "adamw ema": [1, "--lr", "0.01"],
    "accumulate": [1, "--accumulate", "4"],
    "clip": [1, "--precision", "fp16"],
    "mixup_cutmix": [2],
}


@pytest.mark.parametrize("recipes", KILLED)
def test_killed_and_resumed_is_a_straight_run(recipes, work, tmp_path):
    """In mid-epoch, and to the bit: BatchNorm, dropout, the optimizer and the averages too."""
    script = copy(tmp_path / "here", *recipes.split())
    processes, *more = KILLED[recipes]
    flags = [*SMALL, "tests.nets:normed", "--max-steps", "44", "--checkpoint-freq", "5", *more]
    straight, parts = tmp_path / "a", tmp_path / "b"
    run([*forked(script, processes), *flags, "--checkpoint-dir", straight], work, env=ONE_THREAD)
    flags += ["--checkpoint-dir", parts]
    job = Job([Forked, processes, "-c", DYING, script, *flags], work, ONE_THREAD)
    code, output = job.wait(60)
    assert code in (9, -9), output
    assert (load(parts)["epoch"], load(parts)["step"]) == (1, 5)
    output = run([*forked(script, processes), *flags, "--resume", "auto"], work, env=ONE_THREAD)
    assert "at epoch 1 step 5" in output
    a, b = load(straight), load(parts)
    assert same(a, b) and (a["epoch"], a["step"]) == (1, 15)
    assert rows(straight, timings=False) == rows(parts, timings=False)


ONE_STEP = "--max-steps 1 --warmup-epochs 0 --momentum 0 --wd 0".split()


def step_of(script, processes, work, folder, *flags):
    """What one step changes, as one tensor."""
    words = [*SMALL, "tests.nets:plain", *ONE_STEP, *flags, "--checkpoint-dir", folder]
    run([*forked(script, processes), *words], work, env=ONE_THREAD)
    after, before = load(folder)["state_dict"], start().state_dict()
    return torch.cat([(after[key] - before[key]).flatten() for key in before])


def test_clip(work, tmp_path):
    """The norm is that of the mean over all processes, and not that of fp16's scaled gradients."""
    script = copy(tmp_path / "here", "clip")
    script.write_text(script.read_text().replace("max_norm=1.0", "max_norm=0.01"))
    rate = 0.1 * 48 / 256
    steps = [
        step_of(script, 1, work, tmp_path / "1"),
        step_of(script, 2, work, tmp_path / "2"),
        step_of(script, 1, work, tmp_path / "fp16", "--precision", "fp16"),
    ]
    for step in steps:
        assert step.norm() == pytest.approx(rate * 0.01, rel=1e-3)
    torch.testing.assert_close(steps[0], steps[1], atol=1e-7, rtol=1e-3)
    free = step_of(ROOT / "distributed.py", 1, work, tmp_path / "free")
    assert free.norm() > 10 * steps[0].norm()
    torch.testing.assert_close(free / free.norm(), steps[0] / steps[0].norm(), atol=1e-4, rtol=1e-2)


def test_adamw(work, tmp_path):
    """Norms and biases do not decay; it learns."""
    script = copy(tmp_path / "here", "adamw")
    ends = []
    for decay in ("0", "0.5"):
        flags = [*SMALL, "tests.nets:normed", "--max-steps", "1", "--warmup-epochs", "0"]
        flags += ["--lr", "0.1", "--wd", decay, "--checkpoint-dir", tmp_path / decay]
        run([*forked(script), *flags], work, env=ONE_THREAD)
        ends.append(load(tmp_path / decay))
    free, decayed = (end["state_dict"] for end in ends)
    changed = {key for key in free if not free[key].equal(decayed[key])}
    assert changed == {"0.weight", "6.weight"}
    for name in changed:
        rate = 0.1 * 48 / 256
        expected = free[name] - rate * 0.5 * start("normed").state_dict()[name]
        torch.testing.assert_close(decayed[name], expected, atol=1e-6, rtol=1e-4)
    assert {"exp_avg", "exp_avg_sq"} < ends[0]["optimizer"]["state"][0].keys()
    assert ends[0]["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.999)
    flags = [*SMALL, "tests.nets:normed", "--lr", "0.05", "--checkpoint-dir", tmp_path / "c"]
    assert last_result(run([*forked(script), *flags], work, env=ONE_THREAD))[1] > 80


def test_ema(work, tmp_path):
    """What is saved and validated is the average, which any other script reads."""
    script, folder = copy(tmp_path / "here", "ema"), tmp_path / "c"
    flags = [*SMALL, "tests.nets:normed", "--checkpoint-dir", folder]
    average = dict(start("normed").named_parameters())
    for steps, decay in ((1, 1 / 10), (2, 2 / 11)):
        words = [*forked(script), *flags, "--max-steps", steps, "--resume", "auto"]
        said = last_result(run(words, work, env=ONE_THREAD))
        state = load(folder)
        for number, (name, before) in enumerate(average.items()):
            trained = state["optimizer"]["state"][number]["trained"]
            average[name] = before.detach().lerp(trained, 1 - decay)
            assert state["state_dict"][name].equal(average[name])
            assert name != "0.weight" or not trained.equal(average[name])
    words = [*forked("dataparallel.py"), *flags, "--evaluate", "--resume", "auto"]
    assert last_result(run(words, work)) == said


def test_mixup_cutmix(tmp_path):
    """In a script's own loop: each image is of two, and its target says how much of which."""
    module = imported(copy(tmp_path / "here", "mixup_cutmix", script="dataparallel.py"))
    train_run = opened(tmp_path / "c", None)
    train_run.steps_per_epoch = 40
    net = nets.plain(10)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, 0.9)
    meters = [AverageMeter(name) for name in ("loss", "acc@1", "acc@5")]
    train_run.restore(net, optimizer, torch.amp.GradScaler("cpu", enabled=False), meters)
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
    flags = {"seed": 0, "precision": "fp32", "checkpoint_freq": 0, "print_freq": 50, "lr": 0.1}
    flags |= {"batch_size": 8, "warmup_epochs": 1.0, "epochs": 2}
    stop = SimpleNamespace(requested=threading.Event(), agreed=False)
    module.train(batches, Model(), criterion, train_run, stop, 0, 1, SimpleNamespace(**flags))
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
    assert train_run.step == 40 and 0 <= meters[1].avg <= 100


# Says for how many images the recipe's own transform is called.
JITTERED = """
import os, runpy, sys
from torchvision.transforms import v2
forward = v2.ColorJitter.forward
def told(*given):
    print("jittered")
    return forward(*given)
v2.ColorJitter.forward = told
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_finetune(work, tmp_path):
    """From a file as torchvision caches it, with random weights."""
    script = copy(tmp_path / "here", "finetune")
    (tmp_path / "hub/checkpoints").mkdir(parents=True)
    torch.manual_seed(1)
    before = resnet18().state_dict()
    torch.save(before, tmp_path / "hub/checkpoints" / Path(ResNet18_Weights.DEFAULT.url).name)
    flags = "--pretrained -a resnet18 --image-size 32 -b 32 -j 0 --max-steps 3".split()
    flags += ["--warmup-epochs", "0", "--checkpoint-dir", tmp_path / "c"]
    command = [*forked("-c"), JITTERED, script, *flags]
    output = run(command, work, env={"TORCH_HOME": str(tmp_path)})
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


def test_text(tmp_path):
    """Under torchrun, where there are no images at all."""
    copy(tmp_path / "here", "text")
    torchrun = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    flags = "distributed.py --lr 8 -j 1".split()
    output = run([*torchrun, *flags], tmp_path / "here", env=forking())
    acc1 = last_result(output)[1]
    assert acc1 > 75
    assert not (tmp_path / "here/data").exists()
    state = load(tmp_path / "here/checkpoints")
    assert state["classes"] == ["argparse", "doctest", "tarfile", "typing"]
    assert state["arch"] == "distributed:bag_of_trigrams"


def test_bad_images(work, tmp_path):
    """A broken image ends the script, and not the recipe's; which one it is is said."""
    for part in ("train", "val"):
        shutil.copytree(work / "data/digits/val", tmp_path / "data" / part)
    broken = sorted((tmp_path / "data/train").glob("3/*"))[2]
    broken.write_bytes(broken.read_bytes()[:40])
    flags = [*SMALL, "tests.nets:plain", "-b", "40", "--data", tmp_path / "data", "--epochs", "1"]
    command = [*forked(), *flags, "--checkpoint-dir", tmp_path / "a"]
    assert f"cannot read image {broken}" in run(command, work, code=1)
    script = copy(tmp_path / "here", "bad_images")
    output = run([*forked(script), *flags, "--checkpoint-dir", tmp_path / "b"], work)
    assert output.count(f"warning: cannot read image {broken}") == 1
    assert last_result(output) and load(tmp_path / "b")["epoch"] == 1


@pytest.mark.full
def test_wandb(work, tmp_path):
    """Offline: what it would send lies in the folder of checkpoints. A second start is another."""
    if importlib.util.find_spec("wandb") is None and "CI" not in os.environ:
        pytest.skip("wandb is not installed: pip install wandb")
    script = copy(tmp_path / "here", "wandb")
    flags = [*SMALL, "tests.nets:plain", "-p", "10", "--checkpoint-dir", tmp_path / "c"]
    env = {"WANDB_MODE": "offline", "HOME": str(tmp_path)}
    for steps in ("12", "40"):
        run([*forked(script, 2), *flags, "--max-steps", steps, "--resume", "auto"], work, env=env)
    runs = sorted((tmp_path / "c/wandb").glob("offline-run-*"))
    assert len(runs) == 2  # one for each start, and none of rank 1
    for folder, steps in zip(runs, (12, 40), strict=True):
        (row,) = [r for r in rows(tmp_path / "c") if r["epoch"] * 29 + r["step"] == steps]
        (file,) = folder.glob("*.wandb")
        sent = file.read_bytes()
        for name in ("train_loss", "val_loss", "acc1", "lr"):
            assert f"epoch/{name}".encode() in sent and str(row[name]).encode() in sent
        assert b"train/acc@1" in sent


def test_profile_counts_what_is_not_hidden(tmp_path, capsys):
    """Computing from 5 to 25 hides half of two collectives."""
    module = imported(copy(tmp_path / "here", "profile"))

    def event(name, start, end, children=()):
        span = SimpleNamespace(start=start * 1000, end=end * 1000)
        device = SimpleNamespace(name="CUDA" if torch.cuda.is_available() else "CPU")
        more = {"device_type": device, "cpu_children": children, "is_user_annotation": "#" in name}
        return SimpleNamespace(name=name, time_range=span, **more)

    events = [event("gloo:all_reduce", 0, 10), event("gloo:all_reduce", 20, 30)]
    events += [event("aten::mm", 5, 15), event("aten::mm", 12, 25)]
    events += [event("aten::linear", 0, 30, children=events), event("Optimizer#SGD", 0, 30)]
    profiler = SimpleNamespace(events=lambda: events, export_chrome_trace=lambda path: None)
    module.report(profiler, "a.json")
    assert capsys.readouterr().out == "a.json: collectives 20.0 ms, not hidden 10.0 ms\n"


def test_profile(work, tmp_path):
    """A trace of each process. With accumulate too, it shows that a step sends once."""
    script = copy(tmp_path / "here", "accumulate", "profile")
    flags = [*SMALL, "tests.nets:plain", "--max-steps", "12", "-p", "100", "--accumulate", "2"]
    output = run([*forked(script, 2), *flags, "--checkpoint-dir", tmp_path / "c"], work)
    for rank in (0, 1):
        path = tmp_path / f"c/trace-{rank}.json"
        events = json.loads(path.read_text())["traceEvents"]
        names = [event.get("name") for event in events]
        assert names.count("gloo:all_reduce") == 5  # steps
        assert names.count("aten::convolution") == 10
        spans = [e for e in events if e.get("name") == "gloo:all_reduce"]
        sent, last = 0, 0  # on a busy machine one may end after the next has begun
        for start, end in sorted((e["ts"], e["ts"] + e["dur"]) for e in spans):
            sent, last = sent + max(0, end - max(start, last)) / 1000, max(end, last)
        said = re.search(rf"{path}: collectives ([\d.]+) ms, not hidden ([\d.]+) ms", output)
        assert float(said[1]) == pytest.approx(sent, abs=0.1) and float(said[2]) <= float(said[1])


# ---- The page


BLOCKS = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.M | re.S)
COMMAND = re.compile(r"torchrun --standalone --nproc-per-node=\d distributed\.py(.*)")


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_commands_of_the_page(number, work, tmp_path):
    """A block after another, each on a fresh copy; one step is taken of a training."""
    script = copy(tmp_path / "here")
    (tmp_path / "here/recipes").symlink_to(ROOT / "recipes")
    shutil.copytree(work / "data", tmp_path / "here/data")
    for part in ("train", "val"):
        shutil.copytree(work / "data/digits/val", tmp_path / "own" / part)
    (tmp_path / "hub/checkpoints").mkdir(parents=True)
    weights = tmp_path / "hub/checkpoints" / Path(ResNet18_Weights.DEFAULT.url).name
    torch.save(resnet18().state_dict(), weights)
    for line in BLOCKS[number].splitlines():
        if line.startswith("patch "):
            patch(tmp_path / "here", line.removeprefix("patch "))
            continue
        flags = COMMAND.fullmatch(line)[1].replace("/path/to/own", str(tmp_path / "own")).split()
        words = [*forked(script, 2), *flags, *"--max-steps 1 --image-size 32 -j 1".split()]
        last_result(run(words, tmp_path / "here", env={"TORCH_HOME": str(tmp_path)}))


@pytest.mark.full
@pytest.mark.parametrize(
    "name, script",
    [
        ("accumulate", "multiprocessing_distributed"),
        ("adamw", "horovod_distributed"),
        ("adamw", "fsdp_distributed"),
        ("clip", "fsdp_distributed"),
    ],
)
def test_runs_in_other_scripts(name, script, work, tmp_path):
    """Two processes where there can be two; what a run of distributed.py ends with, the same."""
    flags = [*SMALL, "tests.nets:plain", "--max-steps", "8"]
    flags += {"accumulate": ["--accumulate", "2"], "clip": ["--lr", "4"]}.get(name, [])
    ends = []
    for number, which in enumerate(("distributed", script)):
        path = copy(tmp_path / str(number), name, script=f"{which}.py")
        path.write_text(path.read_text().replace("max_norm=1.0", "max_norm=0.01"))
        command = forked(path, 2)
        if which == "horovod_distributed":
            needs_horovod()
            command = [*HOROVODRUN, path]
        elif which == "multiprocessing_distributed":
            command = [*forked(path), "--nprocs=2"]
        folder = tmp_path / f"{number}/c"
        env = ONE_THREAD | forking() | {"PYTHONPATH": str(ROOT)}  # for --arch
        run([*command, *flags, "--checkpoint-dir", folder], work, env=env)
        ends.append(load(folder))
    if script != "fsdp_distributed":  # which adds up in another order
        assert same(*ends)
    for key, weight in ends[0]["state_dict"].items():
        torch.testing.assert_close(weight, ends[1]["state_dict"][key], atol=1e-5, rtol=1e-4)


# ---- How recipes follow their script


LINES = [f"line {number}\n" for number in range(40)]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with a script and three recipes, all committed."""
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "distributed.py").write_text("".join(LINES))
    for place in (5, 20, 35):
        changed = LINES[:place] + ["new\n"] + LINES[place + 1 :]
        header = "--- distributed.py\n+++ distributed.py\n"
        text = generate.unified("".join(LINES), "".join(changed), header)
        (tmp_path / f"recipes/at{place}.diff").write_text(text)
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


def git(folder, *words):
    subprocess.run(["git", *words], cwd=folder, check=True)


def commit(folder):
    git(folder, "add", ".")
    git(folder, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "all")


def files(project):
    return {f"recipes/{p.name}": p.read_text() for p in (project / "recipes").iterdir()}


def test_a_diff_that_fits_is_left_alone(project):
    assert generate.written_diffs() == files(project)
    text = "".join(LINES).replace("line 12\n", "another\n")  # near none of them
    (project / "distributed.py").write_text(text)
    assert generate.written_diffs() == files(project)


@pytest.mark.parametrize("committed", [False, True])
def test_a_change_elsewhere_moves_the_diffs(project, committed):
    """One above them, and one in the lines around a diff; merged into the main branch, too."""
    before = files(project)
    lines = ["first\n"] + LINES[:22] + ["another\n"] + LINES[23:]
    (project / "distributed.py").write_text("".join(lines))
    if committed:
        commit(project)
    after = generate.written_diffs()
    assert after.keys() == before.keys() and not any(after[name] == before[name] for name in after)
    for name, text in after.items():
        (project / name).write_text(text)
        place = int(re.search(r"\d+", name)[0])
        expected = lines[: place + 1] + ["new\n"] + lines[place + 2 :]
        assert generate.applied("".join(lines), text) == "".join(expected)
    assert generate.written_diffs() == after


@pytest.mark.parametrize("committed", [False, True])
def test_a_change_of_the_same_lines_stops(project, committed):
    text = "".join(LINES).replace("line 20\n", "another\n")
    (project / "distributed.py").write_text(text)
    if committed:
        commit(project)
    with pytest.raises(SystemExit) as error:
        generate.written_diffs()
    assert str(error.value).startswith(
        "error: distributed.py has changed beside lines of recipes/at20.diff"
    )


def test_a_diff_of_no_version_stops(project):
    path = project / "recipes/at20.diff"
    path.write_text(path.read_text().replace("-line 20\n", "-line 999\n"))
    with pytest.raises(SystemExit, match=r"recipes/at20\.diff fits neither"):
        generate.written_diffs()
