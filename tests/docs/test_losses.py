"""docs/losses.py: each loss has the gradient of one process, and the wrong ways have not."""

import ast
import re
from functools import cache

import pytest
import torch
from conftest import PYTHON, ROOT, run

import compose
from tests.docs.copies import USER, edited
from tests.docs.ranks import good

pytestmark = pytest.mark.full
PAGE = (ROOT / "docs/losses.md").read_text(encoding="utf-8")
# Each process has its share of 48 images; what the gradient of each loss is in rank 0.
SCRIPT = """
import os, sys, warnings
import torch, torch.distributed as dist, torch.nn as nn
from torch.nn.functional import cross_entropy, l1_loss, mse_loss
from torch.nn.parallel import DistributedDataParallel
from docs import losses

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
torch.manual_seed(0)
images, chance = torch.randn(48, 4, 6, 6), torch.rand(48, 1, 1)
masks = (images[:, 0] > 1).long()
masks[(images[:, 1] > 0) & (chance < 0.15)] = 2  # as in life: a class that few images have
some = masks.where(torch.rand(48, 6, 6) > chance, -100)
part = slice(rank * 48 // world_size, (rank + 1) * 48 // world_size)
known = torch.rand(48, 6, 6, generator=torch.Generator().manual_seed(1))
depth = known.where(known > 0.5, torch.nan)
depth[:16] = 0  # one of three processes has no pixel with a depth
images, masks, some, depth = images[part], masks[part], some[part], depth[part]
weight = torch.tensor([1.0, 5.0, 2.0])
net = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 3, 1))
model = DistributedDataParallel(net)

def weighted():
    return losses.weighted_cross_entropy(model(images), some, weight)

def each_weighted():
    return cross_entropy(model(images), some, weight)

def dice():
    return losses.dice_loss(model(images), masks)

def info_nce():
    output = model(images)
    return losses.info_nce(output.mean(dim=(2, 3)), output.amax(dim=(2, 3)))

def masked_l1():
    return losses.masked_l1(model(images)[:, 0], depth)

def each_masked_l1():
    return l1_loss(model(images)[:, 0][depth > 0], depth[depth > 0])

def rmse():
    return losses.rmse(model(images)[:, 0], depth)

def each_rmse():
    return mse_loss(model(images)[:, 0][depth > 0], depth[depth > 0]).sqrt()

def correlation():
    one, other = model(images).mean(dim=(2, 3)).unbind(dim=1)[:2]
    return torch.corrcoef(losses.rows_of_all(torch.stack([one, other], dim=1)).T)[0, 1]

def sum_of_sums():
    x = model(images).mean(dim=(2, 3))[:, :2]
    x = x - losses.sum_of_all(x.sum(dim=0)) / 48
    matrix = losses.sum_of_all(x.T @ x)
    return matrix[0, 1] / (matrix[0, 0] * matrix[1, 1]).sqrt()

gradients = {}

def run(loss, name):
    net.zero_grad()
    loss().backward()
    gradients[name] = torch.cat([weight.grad.flatten() for weight in net.parameters()])

warnings.simplefilter("error")
for loss in (weighted, dice, info_nce, masked_l1, rmse, correlation, sum_of_sums):
    run(loss, loss.__name__)
warnings.simplefilter("default")
run(each_weighted, "each weighted")
if world_size == 1:  # else one process has the mean of nothing
    run(each_masked_l1, "each masked_l1")
    run(each_rmse, "each rmse")
losses.sum_of_all = losses.rows_of_all = lambda part: part
run(dice, "each dice")
run(info_nce, "each info_nce")
run(correlation, "each correlation")

def reduced(part):
    dist.all_reduce(part)
    return part

losses.sum_of_all = reduced
run(dice, "reduced")
if rank == 0:
    torch.save(gradients, "gradients.pth")
dist.destroy_process_group()
"""
LOSSES = ["weighted", "dice", "info_nce"]


@pytest.fixture(scope="module")
def gradients(tmp_path_factory):
    """A function: {loss: its gradient} of so many processes, and what they said."""

    @cache
    def once(ranks):
        folder = tmp_path_factory.mktemp(f"ranks{ranks}")
        (folder / "script.py").write_text(SCRIPT)
        said = good(folder / "script.py", ranks=ranks)
        return torch.load(folder / "gradients.pth", weights_only=True), said

    return once


def off(gradient, right):
    return ((gradient - right).norm() / right.norm()).item()


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("loss", [*LOSSES, "masked_l1", "rmse", "correlation"])
def test_a_loss_has_the_gradient_of_one_process(loss, ranks, gradients):
    """And no warning. That of one process is computed by torch's own functions."""
    right = gradients(1)[0][f"each {loss}"]
    assert off(gradients(ranks)[0][loss], right) < 1e-5


def test_what_each_process_divides_by_itself(gradients):
    """How far off it is, as the page has it, for 2 and for 8 processes."""
    rows = re.findall(r"^\|.*\(#.*\) \| (\S+) % \| (\S+) % \|$", PAGE, re.M)
    assert len(rows) == len(LOSSES)
    for loss, row in zip(LOSSES, rows, strict=True):
        right = gradients(1)[0][loss]
        for ranks, shown in zip((2, 8), row, strict=True):
            found = 100 * off(gradients(ranks)[0][f"each {loss}"], right)
            assert found == pytest.approx(float(shown), rel=0.05), (loss, ranks)


@pytest.mark.parametrize("ranks, wrong", [(1, False), (2, True), (8, True)])
def test_a_sum_of_sums_has_another_gradient(ranks, wrong, gradients):
    """sum_of_all() of what an earlier one has given: a correlation of centred numbers."""
    right = gradients(1)[0]["each correlation"]
    assert (off(gradients(ranks)[0]["sum_of_sums"], right) > 0.01) is wrong


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_all_reduce_loses_the_gradient_of_the_others(ranks, gradients):
    """The gradient is divided by the number of processes; one warning says so."""
    found, said = gradients(ranks)
    assert off(found["reduced"] * ranks, gradients(1)[0]["dice"]) < 1e-5
    assert "UserWarning: c10d::allreduce_: an autograd kernel was not registered" in said


def test_the_segmentation_has_the_same_lines():
    texts = [(ROOT / path).read_text() for path in ("docs/losses.py", "minimal/segmentation.py")]
    bodies = []
    for text in texts:
        functions = {f.name: f for f in ast.parse(text).body if isinstance(f, ast.FunctionDef)}
        lines = [ast.unparse(line) for line in functions["sum_of_all"].body]
        bodies.append([line for line in lines if not line.startswith(('"""', "'"))])
    assert bodies[0] == bodies[1]


BATCHNORM = "nn.BatchNorm2d(64), "


def script_of(cell, folder):
    """minimal/distributed.py for one epoch, as a cell of the page's table says."""
    parts = re.fullmatch(r"`PARTS` (\d)", cell)
    edits = [("EPOCHS = 5", "EPOCHS = 1")]
    edits += [("PARTS = 4", f"PARTS = {parts[1]}")] if parts else []
    edits += [(BATCHNORM, "")] if cell == "without BatchNorm" else []
    text = compose.script("torchrun", features=["accumulate"] if parts else [])
    (folder / "train.py").write_text(edited(text, edits))
    return folder / "train.py"


def apart(folder):
    """What docs/compare_weights.py says: percent of the weights, and of the statistics or None."""
    said = run([PYTHON, ROOT / "docs/compare_weights.py", "1.pth", "2.pth"], folder)
    pattern = r"weights: (\S+) % apart\n(?:BatchNorm statistics: (\S+) % apart\n)?"
    return [number and float(number) for number in re.fullmatch(pattern, said).groups()]


ROWS = re.findall(r"^\| (.*) \| (.*) \| ([\d.]+) % \| (?:([\d.]+) %|none) \|$", PAGE, re.M)


@pytest.mark.parametrize("row", ROWS[1:], ids=" ".join)
def test_how_far_two_processes_are_from_one(row, tmp_path):
    """As the page says; another CPU rounds otherwise."""
    for ranks in (1, 2):
        good(script_of(row[ranks - 1], tmp_path), ranks=ranks)
        (tmp_path / "digits.pth").rename(tmp_path / f"{ranks}.pth")
    weights, statistics = apart(tmp_path)
    assert weights == pytest.approx(float(row[2]), rel=0.1, abs=1e-4)
    assert statistics == pytest.approx(float(row[3]), rel=0.1)


def test_the_commands_that_show_it(tmp_path):
    """The first row: with no BatchNorm two processes are one."""
    (block,) = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.M | re.S)
    script_of(ROWS[0][0], tmp_path)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    said = run(["bash", "-ec", block], tmp_path, env=USER | {"OMP_NUM_THREADS": "1"})
    assert said.endswith(f"\nweights: {ROWS[0][2]} % apart\n") and len(ROWS) == 5
