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

from minimal.one_gpu import build_net
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
    torch.save(probe | {"state": net.state_dict(), "rates": rates}, f"rank{rank}.pth")""",
}
# As if each process had a machine of its own.
NODES = ("    world_size = int(", "    local_rank = 0\n    world_size = int(")
# Who waits for another that does not come gives up after 10 seconds, not 30 minutes.
GROUP = 'dist.init_process_group("nccl" if device == "cuda" else "gloo"'
LIMIT = (GROUP, f"{GROUP}, timeout=datetime.timedelta(seconds=10)")


class Run(NamedTuple):
    codes: list
    output: str
    folder: Path

    def accuracies(self):
        """What was printed after each epoch; nothing else was."""
        assert not any(self.codes), self.output
        assert re.fullmatch(r"(epoch \d+: \d+\.\d % correct\n)+", self.output), self.output
        return [float(number) for number in re.findall(r": (.*) %", self.output)]

    def ranks(self):
        """What the probe of each process has found, a dict each."""
        assert not any(self.codes), self.output
        paths = sorted(self.folder.glob("rank*.pth"))
        return [torch.load(path, weights_only=True) for path in paths]

    def shares(self, what="seen"):
        """[epoch][rank]: the numbers of the images that a process took, in its order."""
        images = load_digits().images.astype("float32") / 16
        number = {image.tobytes(): i for i, image in enumerate(images)}
        assert len(number) == 1797  # none is there twice

        def numbers(batches):
            return [number[image.numpy().tobytes()] for batch in batches for image in batch]

        found = [rank[what] for rank in self.ranks()]
        return [[*map(numbers, parts)] for parts in zip(*found, strict=True)]

    def differing(self):
        """The weights and BatchNorm statistics that are not the same in all processes."""
        first, *others = (rank["state"] for rank in self.ranks())
        return {key for key in first for other in others if not first[key].equal(other[key])}

    def saved(self):
        return torch.load(self.folder / "digits.pth", weights_only=True)


def explained(name):
    """What docs/bugs.md says of it."""
    sections = (ROOT / "docs/bugs.md").read_text().split("\n### ")
    (text,) = (section for section in sections if f"generated: bug {name} " in section)
    return text


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


def test_each_mistake_is_here():
    assert not {path.stem for path in (ROOT / "bugs").iterdir()} - {n[5:] for n in globals()}


# Training: no error, and a worse model, or more work for the same.


def test_no_set_epoch(trained):
    first, second = trained("no_set_epoch").shares()
    assert first == second
    first, second = trained().shares()
    assert first[0] != second[0] and first[1] != second[1]
    assert trained().accuracies()[-1] > 90 and trained().differing() == set()


def test_no_sampler(trained):
    """Each process takes all images, not a part of them: an epoch takes as long as on one GPU."""
    for name, count, common in [("no_sampler", 1408, 1300), (None, 704, 0)]:
        for one, other in trained(name).shares():
            assert len(one) == len(other) == count
            assert len({*one} & {*other}) >= common
        assert f" {count}" in explained("no_sampler")
    assert not {*one} & {*other}


def test_local_rank_in_sampler(trained):
    """Two machines take the same half of the images, and nobody takes the other."""
    for one, other in trained("local_rank_in_sampler", NODES).shares():
        assert one == other and len({*one}) == 704
    for one, other in trained(None, NODES).shares():
        assert len({*one, *other}) == 1408


def test_split_per_process(trained):
    """Of the images that are validated, most were trained with."""

    def both(run):
        shares = [run.shares(what) for what in ("seen", "validated")]
        seen, validated = ({i for parts in s for part in parts for i in part} for s in shares)
        return len(seen & validated), len(validated)

    trained_too, all_validated = both(trained("split_per_process"))
    assert trained_too > all_validated / 2
    assert both(trained()) == (0, 359)


def test_same_seed(trained):
    for name in ("same_seed", None):
        one, other = (rank["random"] for rank in trained(name).ranks())
        assert (one == other) == (name == "same_seed")


def test_net_in_training(trained):
    """Each process trains a model of its own."""
    assert {"0.0.weight", "2.weight"} <= trained("net_in_training").differing()
    assert trained().differing() == set()


def test_loss_all_reduced(trained):
    """The gradients are divided by the number of processes twice, as if the rate were halved."""
    runs = trained("loss_all_reduced"), trained()
    wrong, right = (run.ranks()[0]["gradients"][1] for run in runs)  # of the first step
    torch.testing.assert_close(2 * wrong, right)
    assert right.norm() > 0


def test_batch_per_process(trained):
    """Four processes take four times the images in a step, and a quarter of the steps."""
    names = "batch_per_process", None
    wrong, right = (trained(name, ranks=4, epochs=1) for name in names)
    steps = [len(run.ranks()[0]["seen"][0]) for run in (wrong, right)]
    assert steps == [5, 22] and "5 steps, not 22" in explained("batch_per_process")
    assert wrong.accuracies()[0] < right.accuracies()[0] - 5


def test_clip_before_unscale(trained):
    clip = "            nn.utils.clip_grad_norm_("
    mended = (clip, f"            scaler.unscale_(optimizer)\n{clip}")
    assert trained("clip_before_unscale").accuracies()[-1] < 60
    assert trained("clip_before_unscale", mended).accuracies()[-1] > 90


def test_no_sync_off_by_one(trained):
    assert "2.weight" in trained("no_sync_off_by_one").differing()
    assert trained("no_sync_off_by_one", ("= i == 2", "= i == 1")).differing() == set()


def test_resume_on_rank_0(trained):
    mended = ("if rank == 0 and os.path", "if os.path")
    assert "2.weight" in trained("resume_on_rank_0", resumed=True).differing()
    assert trained("resume_on_rank_0", mended, resumed=True).differing() == set()


def test_plateau_per_process(trained):
    """Each process lowers the learning rate at another time, so the models part too."""
    step = "        scheduler.step(correct.item())\n"
    reduce = "        dist.all_reduce(correct)  # the sum over all processes\n"
    wrong = trained("plateau_per_process", epochs=8)
    right = trained("plateau_per_process", (step + reduce, reduce + step), epochs=8)
    one, other = (rank["rates"] for rank in wrong.ranks())
    assert one != other and wrong.differing()
    one, other = (rank["rates"] for rank in right.ranks())
    assert one == other and right.differing() == set()


# Validation: a number that is not the model's.


def test_padded_validation(trained):
    """Image 4, the first to validate, counts in both processes."""
    wrong, right = (
        [sorted(parts[0] + parts[1]) for parts in trained(name).shares("validated")]
        for name in ("padded_validation", None)
    )
    assert right == [[*range(4, 1797, 5)]] * 2
    assert wrong == [[4, *range(4, 1797, 5)]] * 2
    said = f"{len(wrong[0])} were validated, and there are {len(right[0])}"
    assert said in explained("padded_validation")


def test_mean_of_means(trained):
    """Another number for the same weights: the last batch is smaller and counts as much."""
    wrong, right = trained("mean_of_means", epochs=5), trained(epochs=5)
    assert all(wrong.saved()[key].equal(value) for key, value in right.saved().items())
    assert wrong.accuracies() != right.accuracies()


def test_no_all_reduce(trained):
    """The images of one process, divided by all."""
    assert all(accuracy < 50.2 for accuracy in trained("no_all_reduce").accuracies())
    assert all(accuracy > 60 for accuracy in trained().accuracies())


def test_validation_not_shared(trained):
    """Each process counts all images, and the counts are added up."""
    assert all(accuracy > 100 for accuracy in trained("validation_not_shared").accuracies())
    assert all(accuracy <= 100 for accuracy in trained().accuracies())


def test_own_batchnorm(trained):
    assert trained("own_batchnorm").differing() == {"0.1.running_mean", "0.1.running_var"}


# Files and lines.


def test_save_on_every_rank(trained):
    """What was just saved can often not be loaded: another process is writing the file.

    For it to be often, it is saved and loaded 50 times after each epoch.
    """
    save = 'torch.save(net.state_dict(), "digits.pth")'
    function = f"""def save_and_load(rank, net):
    bad = 0
    for _ in range(50):
        {save}
        try:
            torch.load("digits.pth", weights_only=True)
        except Exception:
            bad += 1
    with open(f"bad{{rank}}", "a") as file:
        file.write(f"{{bad}} ")


def main():"""
    edits = (save, "save_and_load(rank, net)"), ("def main():", function)
    wrong, right = (trained(name, *edits) for name in ("save_on_every_rank", None))
    bad = {p.name: sum(map(int, p.read_text().split())) for p in wrong.folder.glob("bad*")}
    assert bad.keys() == {"bad0", "bad1"} and sum(bad.values()) > 0
    assert [path.name for path in right.folder.glob("bad*")] == ["bad0"]
    assert (right.folder / "bad0").read_text() == "0 0 "


def test_module_keys(trained):
    net, saved = build_net(), trained("module_keys").saved()
    with pytest.raises(RuntimeError, match=r'(?s)Missing key.*Unexpected key.*"module\.0\.0\.wei'):
        net.load_state_dict(saved)
    assert net.load_state_dict(saved, strict=False).unexpected_keys == [*saved]  # nothing is taken
    net.load_state_dict(trained().saved())


def test_local_rank_0(trained):
    """Each line stands there twice, from two machines."""
    runs = trained("local_rank_0", NODES), trained(None, NODES)
    twice, once = (re.findall(r"epoch \d+: \S+ % correct", run.output) for run in runs)
    assert sorted(twice) == sorted(2 * once) and len(once) == 2


# It hangs, or ends with an error.


def ends_with(pattern, run, epochs=()):
    """Whether it printed these epochs, then failed in this way."""
    printed = [int(epoch) for epoch in re.findall(r"^epoch (\d+)", run.output, re.M)]
    assert any(run.codes) and printed == [*epochs], run.output
    return re.search(pattern, run.output)


def test_all_reduce_on_rank_0(trained):
    assert ends_with("Timed out waiting 10000ms", trained("all_reduce_on_rank_0", LIMIT))
    assert trained().accuracies()


def test_model_on_rank_0(trained):
    assert ends_with("Timed out waiting 10000ms", trained("model_on_rank_0", LIMIT))
    mended = ("                output = model(", "                output = net(")
    assert trained("model_on_rank_0", mended).accuracies()


def test_uneven_parts(trained):
    """480, 479 and 479 images: in batches of 32 the first process has one step more."""
    three = ("BATCH_SIZE = 64", "BATCH_SIZE = 96")
    assert ends_with("mismatch|Timed out|by peer", trained("uneven_parts", three, LIMIT, ranks=3))
    right = trained(None, three, ranks=3)
    assert [len(rank["seen"][0]) for rank in right.ranks()] == [14, 14, 14]


def test_early_stop_on_rank_0(trained):
    assert ends_with("by peer", trained("early_stop_on_rank_0", LIMIT, epochs=5), [0])
    assert len(trained(epochs=5).accuracies()) == 5


def test_freeze_after_wrap(trained):
    wrap, freeze = (
        "    model = DistributedDataParallel(net)  # averages the gradients in backward()\n",
        "    net[0].requires_grad_(False)  # train the last layer only\n",
    )
    said = "Expected to have finished reduction in the prior iteration"
    assert ends_with(said, trained("freeze_after_wrap"))
    assert trained("freeze_after_wrap", (wrap + freeze, freeze + wrap)).accuracies()
