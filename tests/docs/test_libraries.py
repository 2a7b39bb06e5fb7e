"""minimal/one_gpu.py with Accelerate, Fabric, Ray Train and Trainer, as they are installed: what it
learns, and each row of the table of docs/libraries.md, found by two processes (library_facts.py and
trainer_facts.py).
"""

import json
import re
import shutil
import tempfile
from functools import cache

import pytest
import torch
from conftest import PYTHON, ROOT, run

from tests.docs.copies import USER, accuracy, commands_of, equal
from tests.docs.ranks import good

pytestmark = pytest.mark.full
NAMES = sorted(path.stem for path in (ROOT / "minimal/libraries").glob("*.py"))
FACTS = "tests/docs/library_facts.py"


def start(command, folder):
    """Run a command; returns its output. Ray's own files are removed: their paths must be short."""
    ray = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    env = USER | {"OMP_NUM_THREADS": "1", "RAY_TMPDIR": ray}
    env |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    try:
        return run(["env", *command], folder, env=env, timeout=600)  # Ray starts slowly
    finally:
        shutil.rmtree(ray)


@pytest.fixture(scope="module")
def weights_of_ddp(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    good(shutil.copy(ROOT / "minimal/distributed.py", folder), ranks=2)
    return torch.load(folder / "digits.pth", weights_only=True)


@pytest.mark.parametrize("name", NAMES)
def test_trains(name, weights_of_ddp, tmp_path):
    """What it says of the last epoch is true of the file, to an image. Ray prints lines twice.

    Fabric's and Ray's weights are those of DDP. One test: to start Ray takes half a minute.
    """
    (command,) = commands_of((ROOT / f"minimal/libraries/{name}.py").read_text())
    output = start(command.replace("minimal/", f"{ROOT}/minimal/").split(), tmp_path)
    weights = torch.load(tmp_path / "digits.pth", weights_only=True)
    said = dict(re.findall(r"epoch (\d): (\d+\.\d) % correct", output))
    assert list(said) == ["0", "1", "2", "3", "4"] and float(said["4"]) >= 95
    assert said["4"] == accuracy(weights)
    if name not in ("with_accelerate", "with_trainer"):
        assert equal(weights, weights_of_ddp)


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    """A function: what is found by hand or with a library."""

    @cache
    def once(name):
        folder = tmp_path_factory.mktemp(name)
        if name == "trainer":
            good(ROOT / "tests/docs/trainer_facts.py", "facts.json", ranks=2, cwd=folder)
        elif name in ("hand", "accelerate"):  # which torchrun would start
            good(ROOT / FACTS, name, "facts.json", ranks=2, cwd=folder)
        else:
            start([PYTHON, str(ROOT / FACTS), name, "facts.json"], folder)
        return json.loads((folder / "facts.json").read_text())

    return once


LIBRARIES = ["hand", "accelerate", "fabric", "ray", "trainer"]
# The rows of the table: of each fact of library_facts.py, what it is with each of LIBRARIES; None
# where it does not exist.
ROWS = {
    "`DataLoader(data, 64)`": {  # here of 100 images, with a batch of 8
        "batch": [4, 8, 8, 8, 8],
        "steps": [12, 6, 6, 6, 7],
        "split": [None, [[0, 1, 2, 3], [4, 5, 6, 7]], None, None, None],
    },
    "`scheduler.step()`": {
        "schedule": [1, 2, 1, 1, 1],
        "split_schedule": [None, 1, None, None, None],
    },
    "the loss of a part of a batch": {"gradient": [1, 0.25, 1, 1, 0.25]},
    "validation: 37 images in batches of 8": {
        "validated": [37, 48, 38, 38, 37],
        "validates_all": [True, True, True, True, True],
        "trimmed": [None, 37, None, None, None],
    },
    "training without `drop_last`: 100 images, batches of 8": {
        "trained": [100, 112, 100, 100, 112]
    },
    "the order in the next epoch": {"new_order": [False, True, True, False, True]},
    "a run that resumes at epoch 1": {
        "resumed": [1, 0, 0, 1, 1],
        "load_state": [None, 0, None, None, None],
        "seedable": [None, 1, None, None, None],
        "counted": [None, None, 1, None, None],
    },
    "another seed": {
        "seed_counts": [False, True, True, False, True],
        "manual_seed_counts": [None, None, False, None, None],
    },
    "a seed for each process": {
        "random_differs": [False, False, False, False, False],
        "own_random_differs": [True, True, True, True, None],
        "own_seeds_share_images": [False, False, True, False, None],
    },
    "a number of each process": {"reduced": [1, 1, 0.5, 1, None]},
    "`model.state_dict()`": {"prefix": [True, True, False, True, False]},
    "BatchNorm's statistics": {
        "own_mean": [True, True, True, True, True],
        "sent_mean": [True, True, True, True, False],
    },
    "without GPUs": {"alone": [None, True, None, None, True]},
    "a relative path": {"in_rays_folder": [None, None, None, True, None]},
}


@pytest.mark.parametrize("row", ROWS)
def test_a_row_of_the_table(row, facts):
    found = {fact: [facts(name).get(fact) for name in LIBRARIES] for fact in ROWS[row]}
    assert found == ROWS[row]


def test_the_list_has_these_rows():
    rows = re.findall(r"^- \*\*(.+)\*\*$", (ROOT / "docs/libraries.md").read_text(), re.M)
    assert rows == [*ROWS]


def test_what_the_page_says_of_trainer_alone(facts):
    """Its defaults, and what a flag for training does to the validation."""
    found = facts("trainer")
    assert (found["falls"], found["clips"], found["dropped"]) == (True, 1, 32)
