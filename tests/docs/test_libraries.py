"""minimal/one_gpu.py with Accelerate, Fabric and Ray Train, as they are installed: what it learns,
and each row of the table of docs/libraries.md, found by two processes (library_facts.py).
"""

import json
import os
import re
import shutil
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch
from conftest import PYTHON, ROOT, run, torchrun

from tests.docs.test_minimal import accuracy, assert_same

pytestmark = pytest.mark.full
NAMES = sorted(path.stem for path in (ROOT / "minimal/libraries").glob("*.py"))
PAGE = (ROOT / "docs/libraries.md").read_text()
FACTS = "tests/docs/library_facts.py"


def start(command, folder):
    """Run a command; returns its output. Ray's own files are removed: their paths must be short."""
    ray = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    env = {"PATH": f"{Path(PYTHON).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    env |= {"RAY_TMPDIR": ray, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    try:
        return run(["env", *command], folder, env=env, timeout=300)  # Ray starts slowly
    finally:
        shutil.rmtree(ray)


def trained(name, folder):
    """Run a script as its docstring says; returns (output, state_dict)."""
    folder.mkdir()
    (command,) = re.findall(r"^\$ (.*)$", (ROOT / f"minimal/{name}.py").read_text(), re.M)
    output = start(command.replace("minimal/", f"{ROOT}/minimal/").split(), folder)
    return output, torch.load(folder / "digits.pth", weights_only=True)


@pytest.mark.parametrize("name", NAMES)
def test_trains(name, tmp_path):
    """What it says of the last epoch is true of the file, to an image. Ray prints lines twice.

    Fabric's and Ray's weights are those of DDP. One test: to start Ray takes half a minute.
    """
    output, weights = trained(f"libraries/{name}", tmp_path / name)
    said = dict(re.findall(r"epoch (\d): (\d+\.\d) % correct", output))
    assert list(said) == ["0", "1", "2", "3", "4"] and float(said["4"]) >= 95
    assert said["4"] == accuracy(weights)
    if name != "with_accelerate":
        assert_same(weights, trained("distributed", tmp_path / "ddp")[1])


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    """A function: hand, accelerate, fabric or ray -> [what each process has found]."""

    @cache
    def once(name):
        folder = tmp_path_factory.mktemp(name)
        command = [PYTHON, ROOT / FACTS]
        if name in ("hand", "accelerate"):
            command = torchrun(2, FACTS)
        start([*map(str, command), name, "."], folder)
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]

    return once


LIBRARIES = ["hand", "accelerate", "fabric", "ray"]


def each(facts, key):
    """What rank 0 has found by hand and with each library."""
    return [facts(name)[0][key] for name in LIBRARIES]


def parts(facts, name, key):
    return [found[key] for found in facts(name)]


def items(facts, name, key):
    one, other = parts(facts, name, key)
    return one + other


def batch(facts):
    """Of 100 images, with a batch of 8."""
    assert each(facts, "batch") == [4, 8, 8, 8]
    assert each(facts, "steps") == [12, 6, 6, 6]
    assert parts(facts, "accelerate", "split") == [[0, 1, 2, 3], [4, 5, 6, 7]]


def schedule(facts):
    assert each(facts, "schedule") == [1, 2, 1, 1]
    assert facts("accelerate")[0]["split_schedule"] == 1


def accumulated(facts):
    assert each(facts, "gradient") == [1, 0.25, 1, 1]


def validated(facts):
    counts = [len(items(facts, name, "validated")) for name in LIBRARIES]
    assert counts == [37, 48, 38, 38]
    assert facts("accelerate")[0]["trimmed"] == 37
    for name in LIBRARIES:
        assert {*items(facts, name, "validated")} == {*range(37)}


def trained_last(facts):
    counts = [len(items(facts, name, "trained")) for name in LIBRARIES]
    assert counts == [100, 112, 100, 100]


def new_order(facts):
    assert each(facts, "new_order") == [False, True, True, False]


def resumed(facts):
    """The epoch whose images come after set_epoch(1), and what else helps."""
    assert each(facts, "resumed") == [1, 0, 0, 1]
    assert facts("accelerate")[0]["load_state"] == 0
    assert facts("accelerate")[0]["seedable"] == facts("fabric")[0]["counted"] == 1


def seed(facts):
    assert each(facts, "seed_counts") == [False, True, True, False]
    assert facts("fabric")[0]["manual_seed"]  # changes nothing


def own_seed(facts):
    """Whether the two processes then share images."""
    shared = []
    for name in LIBRARIES:
        one, other = parts(facts, name, "random")
        assert one == other
        one, other = parts(facts, name, "own_random")
        assert one != other
        one, other = parts(facts, name, "own_part")
        shared.append(bool({*one} & {*other}))
    assert shared == [False, False, True, False]


def summed(facts):
    """0 and 1; Ray has no call of its own."""
    assert each(facts, "sum") == [1, 1, 0.5, 1]


def keys(facts):
    plain = [all(not key.startswith("module.") for key in found) for found in each(facts, "keys")]
    assert plain == [False, False, True, False]


def batchnorm(facts):
    for name in LIBRARIES:
        one, other = parts(facts, name, "trained_mean")
        assert one != other
        assert parts(facts, name, "validated_mean") == [one, one]


def without_gpus(facts):
    assert parts(facts, "accelerate", "alone") == [1, 1]


def folder(facts):
    assert "/artifacts/" in facts("ray")[0]["folder"]


ROWS = {
    "`DataLoader(data, 64)`": batch,
    "`scheduler.step()`": schedule,
    "the loss of a part of a batch": accumulated,
    "validation: 37 images in batches of 8": validated,
    "training without `drop_last`: 100 images, batches of 8": trained_last,
    "the order in the next epoch": new_order,
    "a run that resumes at epoch 1": resumed,
    "another seed": seed,
    "a seed for each process": own_seed,
    "a number of each process": summed,
    "`model.state_dict()`": keys,
    "BatchNorm's statistics": batchnorm,
    "without GPUs": without_gpus,
    "a relative path": folder,
}


def test_the_rows_of_the_table(facts):
    for found in ROWS.values():
        found(facts)


def test_the_table_has_these_rows():
    rows = re.findall(r"^\| ([^|]+?) \|", PAGE, re.M)
    assert rows[1:] == [*ROWS]  # below its head
