"""The mistakes of bugs/: each is applied to a copy of minimal/distributed.py, and its symptom seen.

The script as it is must not show it; or, where the mistake is in lines that the diff adds, the copy
with the right line. Every copy has the same probe, for a process prints little of what it did.
"""

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from conftest import ROOT
from sklearn.datasets import load_digits

from tests.docs.ranks import run_ranks

pytestmark = pytest.mark.full  # a minute for all of them
SCRIPT = ROOT / "minimal/distributed.py"
# The probe, what is added below a line: what each process read, computed and ended with.
PROBE = {
    "import os": "import datetime",
    "def main():": """
    torch.set_num_threads(1)  # as torchrun has it
    seen, validated, gradients, rates = [], [], [], []""",
    "    for epoch in range(EPOCHS):": """
        seen.append([])
        validated.append([])
        rates.append(optimizer.param_groups[0]["lr"])""",
    "        for images, target in train_loader:": """
            seen[-1].append(images)
            gradients.append(net[2].bias.grad)  # of the step before""",
    "            for images, target in val_loader:": """
                validated[-1].append(images)""",
    "    dist.destroy_process_group()": """
    probe = {"seen": seen, "validated": validated, "gradients": gradients, "random": torch.rand(1)}
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
    # Validation: a number that is not the model's.
    "padded_validation": lambda run: sum(map(len, run.shares("validated")[0])) > 359,
    "no_all_reduce": lambda run: max(run.accuracies()) < 50.2,  # those of one process, of all
    "validation_not_shared": lambda run: min(run.accuracies()) > 100,
    "own_batchnorm": lambda run: {"0.1.running_mean", "0.1.running_var"} & run.differing(),
    # Files and lines.
    "save_on_every_rank": lambda run: run.failed(r'torch\.load\("digits\.pth"'),
    "module_keys": lambda run: all(key.startswith("module.") for key in run.saved()),
    "local_rank_0": lambda run: run.output.count("epoch 0") == 2,
    # It hangs until the time limit, or ends with an error.
    "all_reduce_on_rank_0": lambda run: run.failed("Timed out waiting 10000ms"),
    "model_on_rank_0": lambda run: run.failed("Timed out waiting 10000ms"),
    "uneven_parts": lambda run: run.failed("mismatch|Timed out|by peer"),
    "early_stop_on_rank_0": lambda run: run.failed("by peer"),
    "freeze_after_wrap": lambda run: run.failed("Expected to have finished reduction in the prior"),
}

# The right line for a mistake in what the diff adds: a text of the diff, and what takes its place.
STEP = "        scheduler.step(correct.item())\n"
REDUCE = "        dist.all_reduce(correct)  # the sum over all processes\n"
CLIP = "            nn.utils.clip_grad_norm_("
WRAP = "    model = DistributedDataParallel(net)  # averages the gradients in backward()\n"
FREEZE = "    net[0].requires_grad_(False)  # train the last layer only\n"
MENDED = {
    "no_sync_off_by_one": ("= i == 2", "= i == 1"),
    "resume_on_rank_0": ("if rank == 0 and os.path", "if os.path"),
    "plateau_per_process": (STEP + REDUCE, REDUCE + STEP),
    "clip_before_unscale": (CLIP, f"            scaler.unscale_(optimizer)\n{CLIP}"),
    "model_on_rank_0": ("                output = model(", "                output = net("),
    "freeze_after_wrap": (WRAP + FREEZE, FREEZE + WRAP),
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
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A function: the Run of a mistake, or of the right script, each done once.

    edits: pairs of a text and what takes its place; resumed: there is a digits.pth to begin with.
    """

    @cache
    def once(name=None, *edits, ranks=2, epochs=2, resumed=False):
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


def test_each_mistake_is_here():
    here = {*SYMPTOMS, "loss_all_reduced", "mean_of_means"}
    assert {path.stem for path in (ROOT / "bugs").iterdir()} == here
