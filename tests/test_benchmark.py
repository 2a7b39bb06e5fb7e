"""Each command of benchmark.py in a tiny form: what it writes is looked at, not how fast it was."""

import json
import os
import shutil
from pathlib import Path

import pytest
from conftest import PYTHON, ROOT, run
from PIL import Image

FLAGS = {
    "loader": "--images 64 --batch-size 16 --image-size 32 --rounds 1 --seconds 0",
    "step": "--rounds 2 --steps 1 --batch-size 4 --image-size 32",
    "scale": "--rounds 1 --files 100 300 --classes 10 --batch-size 20 --workers 1",
    "strategies": "--images 64 --batch-size 16 --image-size 24 --arch benchmark:tiny --epochs 2 "
    "--rounds 1 --processes 2 --only distributed multiprocessing",
}


def measure(name, folder):
    """The dict that `benchmark.py NAME` writes in the folder."""
    command = [PYTHON, ROOT / "benchmark.py", name, *FLAGS[name].split(), "--out", folder / "out"]
    output = run(command, folder)
    found = json.loads((folder / "out" / f"{name}.json").read_text())
    assert f"{name}.json" in output and found["command"].startswith(f"python benchmark.py {name}")
    assert found["hardware"] and {"python", "torch", "torchvision"} <= found["versions"].keys()
    assert found["settings"]["batch_size"] and found["date"].count("-") == 2
    return found


@pytest.fixture(scope="module")
def folder(work, tmp_path_factory):
    """One for all: the photographs are made once."""
    folder = tmp_path_factory.mktemp("benchmark")
    shutil.copytree(work / "data", folder / "data")
    return folder


def test_loader(folder):
    found = measure("loader", folder)
    assert [run["name"].split(":")[0] for run in found["runs"]][:2] == ["usual recipe", "ours"]
    for run_ in found["runs"]:
        assert run_["images_per_second"]["median"] > 0 and run_["first_batch_ms"]["low"] > 0
        assert len(run_["images_per_second"]["all"]) == 1
    assert found["runs"][0]["to_usual"]["all"] == [1]
    assert 60_000 < found["settings"]["bytes_per_file"] < 130_000
    with Image.open(next(Path(folder, "data/photographs-64/train/3").iterdir())) as image:
        assert image.size == (500, 375) and image.mode == "RGB"


def test_step(folder):
    found = measure("step", folder)
    assert [run["name"] for run in found["runs"]] == ["script", "bare", "plain"]
    for run_ in found["runs"]:
        assert len(run_["ms"]["all"]) == 2 and run_["peak_memory_mb"] > 100
        # ResNet-18 has 3.6 GFLOP at 224 pixels; four images of 32, forward and twice that backward.
        assert run_["roofline"]["gflop"] == pytest.approx(3.6 * 4 * 3 * (32 / 224) ** 2, rel=0.2)
    assert found["runs"][1]["time_to_bare"] == 1 and found["runs"][2]["speed_to_plain"] == 1


def test_scale(folder):
    found = measure("scale", folder)
    assert [(run["name"], run["files"]) for run in found["runs"]] == [
        ("usual recipe", 100),
        ("ours", 100),
        ("usual recipe", 300),
        ("ours", 300),
    ]
    for run_ in found["runs"]:
        assert run_["start_s"]["median"] > 0 and run_["us_per_image"]["median"] > 0
        assert 1 < run_["worker_private_mb"]["median"] < run_["worker_pss_mb"]["median"]


def test_strategies(folder):
    found = measure("strategies", folder)
    names = {"distributed": "torchrun", "multiprocessing": "mp.spawn"}
    expected = [(bound, name) for bound in ("loader", "compute") for name in names]
    assert [(run["bound"], run["strategy"]) for run in found["runs"]] == expected
    for run_ in found["runs"]:
        assert run_["launcher"] == names[run_["strategy"]] and run_["processes"] == 2
        assert run_["script"].startswith(run_["strategy"])
        assert run_["images_per_second"] == pytest.approx(run_["all"][0])
        epoch = found["settings"]["epoch_images"] / run_["images_per_second"]
        assert run_["seconds_per_epoch"] == pytest.approx(epoch, rel=1e-3)
    with Image.open(folder / "out/strategies.png") as image:
        assert 800 <= image.width <= 1000 and image.height > 150
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 20)}
    assert (0x56, 0xB4, 0xE9) in colours and len(colours) > 50  # bars, and letters


def test_nothing_is_left_in_the_temporary_folder(folder):
    assert not [name for name in os.listdir(folder) if name not in ("data", "out")]


def test_missing_matplotlib_is_said(folder, tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ImportError('no matplotlib here')")
    command = [PYTHON, ROOT / "benchmark.py", "strategies"]
    output = run(command, folder, env={"PYTHONPATH": str(tmp_path)}, code=1)
    assert output == "error: the picture needs matplotlib: pip install -r requirements-dev.txt\n"
