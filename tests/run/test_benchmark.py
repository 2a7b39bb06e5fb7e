"""Each command of benchmarks/ in a tiny form: what it writes is checked, not how fast it was."""

import contextlib
import itertools
import json
import shlex
import shutil
import time
from pathlib import Path

import pytest
from conftest import PYTHON, Job, each, run
from PIL import Image

from benchmarks.communication import WAYS
from benchmarks.loader import NAMES
from benchmarks.shards import WAYS as LOADS
from tests.launched import IN_ROOT

PATIENCE = 400  # seconds: several processes import torch at the same time
STRATEGIES = ["distributed", "multiprocessing"]
# Flags; what is compared, as its files and its name; and what is measured of each.
BENCHMARKS = {
    "loader": (
        "--images 64 --batch-size 16 --image-size 32 --rounds 1 --seconds 0",
        [(None, name) for name in NAMES.values()],
        ["images_per_second"],
    ),
    "step": (
        "--rounds 2 --steps 1 --batch-size 4 --image-size 32",
        [(None, "script"), (None, "bare"), (None, "plain")],
        ["ms", "peak_memory_mb"],
    ),
    "scale": (
        "--rounds 1 --files 100 300 --classes 10 --batch-size 20 --workers 1",
        [*itertools.product([100, 300], ["usual recipe", "ours", "ours, an archive"])],
        ["start_s", "us_per_image", "worker_private_mb"],
    ),
    "communication": (
        "--rounds 2",
        [(None, name) for name in WAYS],
        ["correct", "sent_kib", "state_kib"],
    ),
    "shards": (
        "--rounds 1 --width 128 --blocks 2 --processes 2",
        [(None, name) for name in LOADS],
        ["whole_mb"],
    ),
    "strategies": (
        "--images 64 --batch-size 16 --image-size 24 --epochs 2 --rounds 1 "
        f"--arch benchmarks.models:tiny --processes 2 --only {' '.join(STRATEGIES)}",
        [*itertools.product(["loader", "compute"], STRATEGIES)],
        ["images_per_second", "seconds_per_epoch"],
    ),
}


def command(name, *flags):
    return [PYTHON, "-m", f"benchmarks.{name}", *flags]


@pytest.fixture(scope="module")
def folder(work, tmp_path_factory):
    """One for all: the photographs are made once."""
    folder = tmp_path_factory.mktemp("benchmark")
    shutil.copytree(work / "data", folder / "data")
    return folder


# The others are parts of the hour in test_gpu_hour.py.
@pytest.mark.parametrize("name", each(BENCHMARKS, by_hand=["loader", "step", "strategies"]))
def test_a_benchmark_writes_what_it_measured(name, folder):
    flags, expected, measured = BENCHMARKS[name]
    words = [*flags.split(), "--out", str(folder / "out")]
    output = run(command(name, *words), folder, PATIENCE, env=IN_ROOT)
    results = json.loads((folder / "out" / f"{name}.json").read_text())
    typed = ["python", *command(name, *words)[1:]]
    assert shlex.split(results["command"]) == typed and f"{name}.json" in output
    assert results["hardware"] and {"python", "torch", "torchvision"} <= results["versions"].keys()
    found = [
        (one.get("files") or one.get("bound"), one.get("name") or one.get("strategy"))
        for one in results["runs"]
    ]
    assert found[: len(expected)] == expected  # loaders of others come after them, if installed
    for one, key in itertools.product(results["runs"], measured):
        assert (one[key]["median"] if isinstance(one[key], dict) else one[key]) > 0
    if name == "strategies":
        with Image.open(folder / "out/strategies.png") as image:
            assert 800 <= image.width <= 1000 and image.height > 150


def has_torch(pid):
    """Whether a process has come to its own code: itself and three contestants do."""
    with contextlib.suppress(OSError):
        return "libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text()
    return False


@pytest.mark.full
def test_a_benchmark_that_is_stopped_leaves_nothing(folder, tmp_path):
    flags = [*BENCHMARKS["step"][0].split(), "--rounds", 10**6]
    job = Job(command("step", *flags), folder, IN_ROOT | {"TMPDIR": str(tmp_path)})
    deadline = time.monotonic() + PATIENCE
    while sum(map(has_torch, job.pids())) < 4 or not list(tmp_path.glob("tmp*")):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    job.process.terminate()
    assert "Traceback" not in job.finish(code=143, timeout=150)  # fails if a process is left
    assert not list(tmp_path.glob("tmp*"))
