"""Each command of benchmarks/ in a tiny form: what it writes is checked, not how fast it was."""

import json
import re
import shlex
import shutil
import time
from pathlib import Path

import pytest
import torch
from conftest import PYTHON, ROOT, Job, run
from PIL import Image

from benchmarks.resident import ResidentLoader
from benchmarks.strategies import STRATEGIES, copy_of_scripts

PATIENCE = 400  # seconds: several processes import torch at the same time
PATH = {"PYTHONPATH": str(ROOT)}  # a user starts the commands in the root itself
FLAGS = {
    "loader": "--images 64 --batch-size 16 --image-size 32 --rounds 1 --seconds 0",
    "step": "--rounds 2 --steps 1 --batch-size 4 --image-size 32",
    "scale": "--rounds 1 --files 100 300 --classes 10 --batch-size 20 --workers 1",
    "strategies": "--images 64 --batch-size 16 --image-size 24 --epochs 2 --rounds 1 "
    "--arch benchmarks.models:tiny --processes 2 --only distributed multiprocessing",
}


def command(name, *flags):
    return [PYTHON, "-m", f"benchmarks.{name}", *flags]


def measure(name, folder):
    """The dict that `python -m benchmarks.NAME` writes into the folder."""
    flags = FLAGS[name].split()
    output = run(command(name, *flags, "--out", folder / "out"), folder, PATIENCE, env=PATH)
    results = json.loads((folder / "out" / f"{name}.json").read_text())
    typed = ["python", "-m", f"benchmarks.{name}", *flags, "--out", str(folder / "out")]
    assert shlex.split(results["command"]) == typed and f"{name}.json" in output
    assert results["hardware"] and {"python", "torch", "torchvision"} <= results["versions"].keys()
    assert results["settings"]["batch_size"] and results["date"].count("-") == 2
    return results


@pytest.fixture(scope="module")
def folder(work, tmp_path_factory):
    """One for all: the photographs are made once."""
    folder = tmp_path_factory.mktemp("benchmark")
    shutil.copytree(work / "data", folder / "data")
    return folder


@pytest.mark.full
def test_loader(folder):
    results = measure("loader", folder)
    assert [run["name"].split(":")[0] for run in results["runs"]][:2] == ["usual recipe", "ours"]
    for run_ in results["runs"]:
        assert run_["images_per_second"]["median"] > 0 and run_["first_batch_ms"]["low"] > 0
        assert len(run_["images_per_second"]["all"]) == 1
    assert results["runs"][0]["to_usual"]["all"] == [1]
    assert 60_000 < results["settings"]["bytes_per_file"] < 130_000
    with Image.open(next(Path(folder, "data/photographs-64/train/3").iterdir())) as image:
        assert image.size == (500, 375) and image.mode == "RGB"


@pytest.mark.full
def test_step(folder):
    results = measure("step", folder)
    assert [run["name"] for run in results["runs"]] == ["script", "bare", "plain"]
    for run_ in results["runs"]:
        assert len(run_["ms"]["all"]) == 2 and run_["peak_memory_mb"] > 100
        # ResNet-18 has 3.6 GFLOP at 224 pixels; four images of 32, forward and twice that backward.
        assert run_["roofline"]["gflop"] == pytest.approx(3.6 * 4 * 3 * (32 / 224) ** 2, rel=0.2)
    assert results["runs"][1]["time_to_bare"] == 1 and results["runs"][2]["speed_to_plain"] == 1


@pytest.mark.full
def test_scale(folder):
    results = measure("scale", folder)
    assert [(run["name"], run["files"]) for run in results["runs"]] == [
        ("usual recipe", 100),
        ("ours", 100),
        ("ours, an archive", 100),
        ("usual recipe", 300),
        ("ours", 300),
        ("ours, an archive", 300),
    ]
    for run_ in results["runs"]:
        assert ("archive" in run_["name"]) == bool(run_["index_s"])
        assert run_["start_s"]["median"] > 0 and run_["us_per_image"]["median"] > 0
        assert 1 < run_["worker_private_mb"]["median"] < run_["worker_pss_mb"]["median"]


@pytest.mark.full
def test_strategies(folder):
    results = measure("strategies", folder)
    names = {"distributed": "torchrun", "multiprocessing": "mp.spawn"}
    expected = [(bound, name) for bound in ("loader", "compute") for name in names]
    assert [(run["bound"], run["strategy"]) for run in results["runs"]] == expected
    for run_ in results["runs"]:
        assert run_["launcher"] == names[run_["strategy"]] and run_["processes"] == 2
        assert run_["script"].startswith(run_["strategy"])
        assert run_["images_per_second"] == pytest.approx(run_["all"][0])
        epoch = results["settings"]["epoch_images"] / run_["images_per_second"]
        assert run_["seconds_per_epoch"] == pytest.approx(epoch, rel=1e-3)
    with Image.open(folder / "out/strategies.png") as image:
        assert 800 <= image.width <= 1000 and image.height > 150
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 20)}
    assert (0x56, 0xB4, 0xE9) in colours and len(colours) > 50  # bars, and letters


def test_missing_matplotlib_is_said(folder, tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ImportError('no matplotlib here')")
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    output = run(command("strategies"), folder, env=env, code=1)
    assert output == "error: the picture needs matplotlib: pip install -r requirements-dev.txt\n"


@pytest.mark.full
def test_wrong_model_is_said(folder):
    output = run(command("step", "--arch", "resnet19"), folder, PATIENCE, env=PATH, code=1)
    assert "error: unknown --arch resnet19" in output and "Traceback" not in output
    assert output.endswith("error: a contestant has ended, see above\n")


@pytest.mark.full
def test_terminated_benchmark_leaves_nothing(folder, tmp_path):
    flags = [*FLAGS["step"].split(), "--rounds", 10**6]
    job = Job(command("step", *flags), folder, PATH | {"TMPDIR": str(tmp_path)})
    deadline = time.monotonic() + PATIENCE
    while len(job.pids()) < 4 or not list(tmp_path.glob("tmp*")):  # itself and three contestants
        assert time.monotonic() < deadline
        time.sleep(0.2)
    time.sleep(5)
    job.process.terminate()
    code, output = job.wait(60)  # fails if a process is left
    assert code == 143 and "Traceback" not in output
    assert not list(tmp_path.glob("tmp*"))


def test_resident_loader_yields_as_many_images_as_the_sampler_has_keys():
    dataset = [(torch.zeros(3, 4, 5, dtype=torch.uint8), 0)] * 10
    loader = ResidentLoader(dataset, range(1, 10, 1), 4, workers=0, device=torch.device("cpu"))
    batches = list(loader)
    assert [len(target) for _, target in batches] == [4, 4, 1] and len(loader) == 3
    for images, target in batches:
        assert images.dtype == torch.uint8 and images.shape == (len(target), 3, 4, 5)
    assert batches[0][0].is_contiguous(memory_format=torch.channels_last)
    assert loader.dataset is dataset


def test_scripts_of_a_copy_have_its_loader():
    with copy_of_scripts(resident=True) as copy:
        code = "import distributed; print(distributed.start_loader.__module__)"
        assert run([PYTHON, "-c", code], copy).strip() == "benchmarks.resident"
        for script, _, _ in STRATEGIES.values():
            source = Path(copy, script).read_text()
            assert re.search("^from common.loader import .*start_loader$", source, re.M), script
