"""The mistakes of bugs/: each is applied to a copy of minimal/distributed.py, and its symptom seen.

The script as it is must not show it; or, where the mistake is in lines that the diff adds, the copy
with the right line. Every copy has the same probe, for a process prints little of what it did.
"""

import re
import runpy
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from conftest import ROOT
from sklearn.datasets import load_digits
from sklearn.metrics import f1_score

from tests.docs.ranks import run_ranks

pytestmark = pytest.mark.full  # two minutes for all of them
SCRIPT = ROOT / "minimal/distributed.py"
# The probe, what is added below a line: what each process read, computed and ended with.
PROBE = {
    "import os": "import datetime\nimport itertools\nimport multiprocessing\nimport time",
    "def main():": """
    torch.set_num_threads(1)  # as torchrun has it
    seen, validated, gradients, rates, helpers = [], [], [], [], []""",
    "        net.train()": """
        seen.append([])
        validated.append([])
        rates.append(optimizer.param_groups[0]["lr"])""",
    "        for images, target in train_loader:": """
            seen[-1].append(images)
            gradients.append(net[2].bias.grad)  # of the step before
            helpers.append(len(multiprocessing.active_children()))""",
    "            for images, target in val_loader:": """
                validated[-1].append(images)""",
    "    dist.destroy_process_group()": """
    rates.append(optimizer.param_groups[0]["lr"])
    probe = {"seen": seen, "validated": validated, "gradients": gradients, "random": torch.rand(1)}
    probe["workers"] = max(helpers, default=0)
    state = net.state_dict() | {"rates": torch.tensor(rates)}
    torch.save(probe | {"state": state}, f"rank{rank}.pth")""",
}


class Run(NamedTuple):
    codes: list
    output: str
    folder: Path

    def failed(self, said):
        """Whether it has; in this way, then."""
        assert not any(self.codes) or re.search(said, self.output), self.output
        return any(self.codes)

    def accuracies(self):
        """What was printed after each epoch; nothing else was."""
        assert not any(self.codes), self.output
        assert re.fullmatch(r"(epoch \d+: \d+\.\d % correct\n)+", self.output), self.output
        return [float(number) for number in re.findall(r": (.*) %", self.output)]

    def ranks(self, what):
        """What the probe of each process has found."""
        assert not any(self.codes), self.output
        paths = sorted(self.folder.glob("rank*.pth"))
        return [torch.load(path, weights_only=True)[what] for path in paths]

    def shares(self, what="seen"):
        """[epoch][rank]: the numbers of the images that a process took, in its order."""
        images = load_digits().images.astype("float32") / 16
        number = {image.tobytes(): i for i, image in enumerate(images)}  # none is there twice

        def numbers(batches):
            return [number[image.numpy().tobytes()] for batch in batches for image in batch]

        return [[*map(numbers, parts)] for parts in zip(*self.ranks(what), strict=True)]

    def images(self, what):
        return {i for epoch in self.shares(what) for share in epoch for i in share}

    def differing(self):
        """The weights, BatchNorm statistics and rates that are not the same in all processes."""
        first, *others = self.ranks("state")
        return {key for key in first for other in others if not first[key].equal(other[key])}

    def saved(self):
        return torch.load(self.folder / "digits.pth", weights_only=True)


# What is true of a run with the mistake, and of no run with the right lines.
SYMPTOMS = {
    # Training: no error, and a worse model, or more work for the same.
    "no_set_epoch": lambda run: run.shares()[0] == run.shares()[1],
    "no_sampler": lambda run: {*run.shares()[0][0]} & {*run.shares()[0][1]},
    "local_rank_in_sampler": lambda run: run.shares()[0][0] == run.shares()[0][1],
    "split_per_process": lambda run: run.images("seen") & run.images("validated"),
    "same_seed": lambda run: len({number.item() for number in run.ranks("random")}) == 1,
    "batch_per_process": lambda run: len(run.ranks("seen")[0][0]) < 1437 // 64,  # steps
    "net_in_training": lambda run: "2.weight" in run.differing(),
    "no_sync_off_by_one": lambda run: "2.weight" in run.differing(),
    "resume_on_rank_0": lambda run: "2.weight" in run.differing(),
    "plateau_per_process": lambda run: {"2.weight", "rates"} & run.differing(),
    "clip_before_unscale": lambda run: run.accuracies()[-1] < 60,
    "stream_not_shared": lambda run: [len({*share}) for share in run.shares()[0]] != [704, 704],
    "schedule_of_one_gpu": lambda run: run.ranks("state")[0]["rates"][-1] > 0.02,
    "no_sync_around_backward": lambda run: "2.weight" in run.differing(),
    "two_forwards": lambda run: "2.weight" in run.differing(),
    "workers_per_process": lambda run: sum(run.ranks("workers")) != 2,
    # Validation: a number that is not the model's.
    "padded_validation": lambda run: sum(map(len, run.shares("validated")[0])) > 359,
    "no_all_reduce": lambda run: max(run.accuracies()) < 50.2,  # those of one process, of all
    "validation_not_shared": lambda run: min(run.accuracies()) > 100,
    "own_batchnorm": lambda run: {"0.1.running_mean", "0.1.running_var"} & run.differing(),
    # Files and lines.
    "save_on_every_rank": lambda run: run.failed(r'torch\.load\("digits\.pth"'),
    "module_keys": lambda run: all(key.startswith("module.") for key in run.saved()),
    "local_rank_0": lambda run: run.output.count("epoch 0") == 2,
    "no_barrier_after_save": lambda run: "2.weight" in run.differing(),
    "resume_repeats_epoch": lambda run: len(run.accuracies()) == 2,
    # It hangs until the time limit, or ends with an error.
    "all_reduce_on_rank_0": lambda run: run.failed("Timed out waiting 10000ms"),
    "model_on_rank_0": lambda run: run.failed("Timed out waiting 10000ms"),
    "uneven_parts": lambda run: run.failed("mismatch|Timed out|by peer"),
    "early_stop_on_rank_0": lambda run: run.failed("by peer"),
    "freeze_after_wrap": lambda run: run.failed("Expected to have finished reduction in the prior"),
    "branch_on_data": lambda run: run.failed("mismatch|Timed out"),
    "rank_0_prepares": lambda run: run.failed("Timed out waiting 10000ms"),
}

# The right line for a mistake in what the diff adds: a text of the diff, and what takes its place.
STEP = "        scheduler.step(correct.item())\n"
REDUCE = "        dist.all_reduce(correct)  # the sum over all processes\n"
CLIP = "            nn.utils.clip_grad_norm_("
WRAP = "    model = DistributedDataParallel(net)  # averages the gradients in backward()\n"
FREEZE = "    net[0].requires_grad_(False)  # train the last layer only\n"
BACKWARDS = """            loss.backward()
            nn.functional.cross_entropy(flipped, target.to(device)).backward()
"""
BACKWARD = """            loss = loss + nn.functional.cross_entropy(flipped, target.to(device))
            loss.backward()
"""
PART = """                output = model(part.to(device))
                loss = nn.functional.cross_entropy(output, labels.to(device)) / 2
"""
FLAG = "                model.require_backward_grad_sync = i == 1"
FLAG += "  # what no_sync() sets: only the last\n"
MEAN = "loss = nn.functional.cross_entropy(output, target.to(device))"
TOTAL = """count = (target >= 0).sum().to(device)
            dist.all_reduce(count)  # of all processes
            loss = nn.functional.cross_entropy(output, target.to(device), reduction="sum")
            loss = loss * world_size / count  # DDP divides by world_size"""
PARTS = "dist.get_rank(), None, dist.get_world_size()"
NINE = "if not (target == 9).any():"
ANY = """nine = (target == 9).any().int().to(device)
            dist.all_reduce(nine)
            if not nine:"""
PREPARE = """    if rank == 0:
        time.sleep(3600)  # stands for: download, unpack, tokenize
    dist.barrier()"""
PATIENT = """    patient = dist.new_group(backend="gloo", timeout=datetime.timedelta(hours=5))
"""
READ = "    net.load_state_dict(torch.load("
F1 = """        f1 = torch.tensor(f1_score(labels, answers, average="macro"), device=device)
        dist.all_reduce(f1)
"""
TABLE = """        table = torch.zeros(10, 10, device=device)
        for label, answer in zip(labels, answers, strict=True):
            table[label, answer] += 1
        dist.all_reduce(table)
        f1 = (2 * table.diag() / (table.sum(0) + table.sum(1))).mean() * world_size
"""
MENDED = {
    "no_sync_off_by_one": ("= i == 2", "= i == 1"),
    "resume_on_rank_0": ("if rank == 0 and os.path", "if os.path"),
    "plateau_per_process": (STEP + REDUCE, REDUCE + STEP),
    "clip_before_unscale": (CLIP, f"            scaler.unscale_(optimizer)\n{CLIP}"),
    "model_on_rank_0": ("                output = model(", "                output = net("),
    "freeze_after_wrap": (WRAP + FREEZE, FREEZE + WRAP),
    "stream_not_shared": ("iter(self.items)", f"itertools.islice(self.items, {PARTS})"),
    "schedule_of_one_gpu": ("len(train_set) // train_loader.batch_size", "len(train_loader)"),
    "no_sync_around_backward": (PART + FLAG, FLAG + PART),
    "workers_per_process": ("os.cpu_count()", "os.cpu_count() // world_size"),
    "no_barrier_after_save": (READ, f"    dist.barrier()\n{READ}"),
    "resume_repeats_epoch": ('"epoch": epoch}', '"epoch": epoch + 1}'),
    "two_forwards": (BACKWARDS, BACKWARD),
    "branch_on_data": (NINE, ANY),
    "rank_0_prepares": (PREPARE, PATIENT + PREPARE.replace("()", "(patient)")),
    "masked_mean": (MEAN, TOTAL),
    "f1_per_process": (F1, TABLE),
    "sampler_without_seed": ("rank=rank, drop_last", "rank=rank, seed=SEED, drop_last"),
}

# As if each process had a machine of its own.
NODES = ("    world_size = int(", "    local_rank = 0\n    world_size = int(")
# Who waits for another that does not come gives up after 10 seconds, not 30 minutes.
GROUP = 'dist.init_process_group("nccl" if device == "cuda" else "gloo"'
LIMIT = (GROUP, f"{GROUP}, timeout=datetime.timedelta(seconds=10)")
# 480, 479 and 479 images for three processes: in batches of 32 the first has one step more.
THREE = ("BATCH_SIZE = 64", "BATCH_SIZE = 96")
# A file that two write can be broken when it is loaded. For that to be often: 50 times an epoch.
SAVE = 'torch.save(net.state_dict(), "digits.pth")'
LOAD = 'torch.load("digits.pth", weights_only=True)'
OFTEN = f"def often(net):\n    for _ in range(50):\n        {SAVE}\n        {LOAD}\n\n\ndef main():"
# Two processes that make different calls, as with TORCH_DISTRIBUTED_DEBUG=DETAIL.
PARTED = """
import torch
import torch.distributed as dist

dist.set_debug_level(dist.DebugLevel.DETAIL)
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(2))
else:
    dist.broadcast(torch.ones(2), src=0)
"""
# Edits of both scripts, the wrong one and the right one, and how they are run.
HOW = {
    "local_rank_in_sampler": ([NODES], {}),
    "resume_on_rank_0": ([], {"resumed": True}),
    "plateau_per_process": ([], {"epochs": 8}),
    "mean_of_means": ([], {"epochs": 5}),
    "save_on_every_rank": ([(SAVE, "often(net)"), ("def main():", OFTEN)], {}),
    "local_rank_0": ([NODES], {}),
    "all_reduce_on_rank_0": ([LIMIT], {}),
    "model_on_rank_0": ([LIMIT], {}),
    "uneven_parts": ([LIMIT, THREE], {"ranks": 3}),
    "early_stop_on_rank_0": ([LIMIT], {"epochs": 5}),
    "workers_per_process": ([("os.cpu_count()", "2")], {"epochs": 1}),
    "no_barrier_after_save": ([(SAVE, f"time.sleep(2)\n            {SAVE}")], {}),
    "resume_repeats_epoch": ([], {"again": True}),
    "branch_on_data": ([LIMIT], {}),
    "rank_0_prepares": ([LIMIT, ("time.sleep(3600)", "time.sleep(13)")], {"epochs": 1}),
    "masked_mean": ([], {"epochs": 1}),
    "f1_per_process": ([], {"epochs": 1}),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A function: the Run of a mistake, or of the right script, each done once.

    edits: pairs of a text and what takes its place; resumed: there is a digits.pth to begin with;
    again: it is started again, for one more epoch.
    """

    @cache
    def once(name=None, *edits, ranks=2, epochs=2, resumed=False, again=False):
        folder = tmp_path_factory.mktemp(name or "right")
        script = Path(shutil.copy(SCRIPT, folder / "script.py"))
        if name:
            patch = ["patch", "-s", script, ROOT / f"bugs/{name}.diff"]
            subprocess.run(patch, check=True)
        if resumed:
            shutil.copy(once().folder / "digits.pth", folder)
        text = script.read_text()
        probe = [(f"\n{line}\n", f"\n{line}\n{more}\n") for line, more in PROBE.items()]
        for old, new in [("EPOCHS = 5", f"EPOCHS = {epochs}"), *probe, *edits]:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        script.write_text(text)
        if again:
            run_ranks(script, ranks=ranks)
            script.write_text(text.replace(f"EPOCHS = {epochs}", f"EPOCHS = {epochs + 1}"))
        return Run(*run_ranks(script, ranks=ranks), folder)

    return once


def test_the_right_script(trained):
    """Each process has a half of the images, in a new order each epoch, and the same model."""
    (one, other), (next_one, next_other) = trained().shares()
    assert len(one) == len(other) == len({*one, *other}) / 2 == 704
    assert one != next_one and other != next_other
    (one, other), _ = trained().shares("validated")
    assert sorted(one + other) == [*range(4, 1797, 5)]
    assert trained().accuracies()[-1] > 90 and trained().differing() == set()


def pair(trained, name):
    """The runs with a mistake and with the right lines."""
    edits, more = HOW.get(name, ([], {}))
    right = [name, MENDED[name]] if name in MENDED else [None]
    return trained(name, *edits, **more), trained(*right, *edits, **more)


@pytest.mark.parametrize("name", SYMPTOMS)
def test_the_mistake_has_its_symptom(name, trained):
    wrong, right = pair(trained, name)
    assert SYMPTOMS[name](wrong) and not SYMPTOMS[name](right)


def test_loss_all_reduced(trained):
    """The gradients are divided by the number of processes twice, as if the rate were halved."""
    wrong, right = (run.ranks("gradients")[0][1] for run in pair(trained, "loss_all_reduced"))
    torch.testing.assert_close(2 * wrong, right)
    assert right.norm() > 0


def test_mean_of_means(trained):
    """Another number for the same weights: the last batch is smaller and counts as much."""
    wrong, right = pair(trained, "mean_of_means")
    assert all(wrong.saved()[key].equal(value) for key, value in right.saved().items())
    assert wrong.accuracies() != right.accuracies()


def test_masked_mean(trained):
    """The gradient is not that of the mean over all images that have a label."""
    wrong, right = pair(trained, "masked_mean")
    digits = load_digits()
    torch.manual_seed(0)
    net = runpy.run_path(SCRIPT)["build_net"]()  # as rank 0 makes it and DDP sends it to all
    total = count = 0
    for share in right.shares()[0]:
        images = torch.tensor(digits.images[share[:32]], dtype=torch.float32).unsqueeze(1) / 16
        target = torch.tensor(digits.target[share[:32]])
        target[images.mean(dim=(1, 2, 3)) < 0.3] = -100
        total = total + torch.nn.functional.cross_entropy(net(images), target, reduction="sum")
        count += (target >= 0).sum()
    (total / count).backward()
    wrong, right = (run.ranks("gradients")[0][1] for run in (wrong, right))
    torch.testing.assert_close(right, net[2].bias.grad)
    assert (wrong - right).norm() > 0.01 * right.norm()


def test_f1_per_process(trained):
    """It is not the F1 of the saved model; that of the right lines is."""
    wrong, right = pair(trained, "f1_per_process")
    digits = load_digits()
    net = runpy.run_path(SCRIPT)["build_net"]().eval()
    net.load_state_dict(right.saved())
    images = torch.tensor(digits.images[4::5], dtype=torch.float32).unsqueeze(1) / 16
    f1 = f1_score(digits.target[4::5], net(images).argmax(dim=1), average="macro")
    assert f"F1 {100 * f1:.2f}" in right.output and f"F1 {100 * f1:.2f}" not in wrong.output


def test_sampler_without_seed(trained):
    """Another seed, and the same order of the images."""
    for mended in [], [MENDED["sampler_without_seed"]]:
        edits = [[*mended, ("SEED = 1", f"SEED = {seed}")] for seed in (1, 2)]
        one, other = (trained("sampler_without_seed", *edit, epochs=1).shares() for edit in edits)
        assert (one == other) == (not mended)


def test_no_sync_around_backward_alone_changes_nothing(trained):
    """As a context manager it comes too late: the gradients of each part are averaged."""
    late = "                with model.no_sync() if i == 0 else contextlib.nullcontext():\n    "
    run = trained(
        "no_sync_around_backward", (FLAG, late), ("import gc\n", "import contextlib, gc\n")
    )
    assert run.differing() == set()
    right = pair(trained, "no_sync_around_backward")[1]
    for key, value in right.ranks("state")[0].items():
        torch.testing.assert_close(run.ranks("state")[0][key], value, atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("flag", ["static_graph", "find_unused_parameters"])
def test_unused_parameters_may_stay(flag, trained):
    """What is said beside freeze_after_wrap; and that INFO names them where neither is set."""
    name = "freeze_after_wrap"
    edit = ("DistributedDataParallel(net)  #", f"DistributedDataParallel(net, {flag}=True)  #")
    assert trained(name, edit).accuracies()
    level = ("    dist.init", "    dist.set_debug_level(dist.DebugLevel.INFO)\n    dist.init")
    assert "did not receive grad for rank 1: 0.1.bias" in trained(name, level).output


def test_torch_compares_calls(tmp_path):
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL: it names both."""
    script = tmp_path / "script.py"
    script.write_text(PARTED)
    said = r"Detected mismatch between collectives on ranks\. Rank \d is running collective: "
    said += r"CollectiveFingerPrint\(SequenceNumber=0, OpType=(ALLREDUCE|BROADCAST), TensorShape=\["
    codes, output = run_ranks(script, ranks=2)
    assert all(codes) and re.search(said, output)


def test_each_mistake_is_here():
    here = {*SYMPTOMS, "loss_all_reduced", "mean_of_means"}
    here |= {"masked_mean", "f1_per_process", "sampler_without_seed"}
    assert {path.stem for path in (ROOT / "bugs").iterdir()} == here
