"""Predictions as a CSV file, curves for TensorBoard, the line of each step, --help."""

import csv
import io
import json
import math
import os
import re
import sys

import pytest
import torch
from conftest import HOROVODRUN, PYTHON, ROOT, events, forked, full, load, needs_horovod, run
from torch.nn.functional import softmax

from common.images import image_folders
from common.loader import make_loader
from common.prefetcher import Prefetcher
from common.progress import ProgressMeter
from common.records import json_line, save_predictions
from tests import nets
from tests.runs import parts, read

SCRIPTS = ["distributed", "dataparallel", "multiprocessing_distributed", "distributed_slurm_main"]
SCRIPTS += ["apex_distributed", "horovod_distributed", "fsdp_distributed"]
NORMED = "--arch tests.nets:normed --image-size 24 --batch-size 48 --workers 1".split()
SPAWN = [*forked("multiprocessing_distributed.py"), "--nprocs=2"]
HOROVOD = [*HOROVODRUN, ROOT / "horovod_distributed.py"]
DOUBLE = {"PYTHONPATH": str(ROOT / "tests/apex_doubles/today")}


def table(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


@pytest.fixture(scope="module")
def trained(work):
    run([*forked(ranks=2), *NORMED, "--max-steps", "40", "--checkpoint-dir", "predicted"], work)
    return work / "predicted"


@pytest.mark.parametrize(
    "command, env",
    [
        (forked("distributed.py", ranks=3), {}),
        (forked("dataparallel.py"), {}),
        full(SPAWN, {}),
        ([*forked("apex_distributed.py", ranks=2), "--precision", "fp32"], DOUBLE),
        full(HOROVOD, {}),
        (forked("fsdp_distributed.py", ranks=3), {}),
    ],
    ids=["distributed", "dataparallel", "spawn", "apex", "horovod", "fsdp"],
)
def test_every_image_is_predicted_once_in_order(command, env, work, trained, tmp_path):
    if command is HOROVOD:
        needs_horovod()
    flags = [*NORMED, "--batch-size", "42", "-e", "--resume", trained / "checkpoint.pth"]
    run([*command, *flags, "--predictions", tmp_path / "p.csv"], work, env=env)
    assert [path.name for path in tmp_path.iterdir()] == ["p.csv"]
    head, *lines = table(tmp_path / "p.csv")
    assert head == ["path", "class", "predicted", "confidence"]

    _, val_set = image_folders(str(work / "data/digits"), 24)
    net = nets.normed(10)
    net.load_state_dict(load(trained)["state_dict"])
    net.eval()
    cpu = torch.device("cpu")
    loader = make_loader(val_set, range(len(val_set)), 60, 0, cpu)
    with torch.no_grad():
        scores = torch.cat([softmax(net(x), 1) for x, _ in Prefetcher(loader, cpu)])
    assert len(lines) == len(val_set) == 360
    for i, (path, name, guess, confidence) in enumerate(lines):
        assert path == val_set.path(i).replace(f"{work}/", "")
        assert name == path.split("/")[-2] and guess == str(scores[i].argmax().item())
        assert float(confidence) == pytest.approx(scores[i].max().item(), abs=2e-6)
    assert len({guess for _, _, guess, _ in lines}) > 5


def test_names_of_any_bytes_and_with_commas(tmp_path):
    class Set(list):
        classes, targets = ["a, b", 'c"d'], [0, 1, 1]

        def path(self, i):
            return ["plain.jpg", "w,\n.jpg", b"\xff.jpg".decode("utf-8", "surrogateescape")][i]

    shares = [torch.tensor([[0.5, 1.0], [1.0, 0.0]]), torch.tensor([[0.25, 1.0]])]
    save_predictions(tmp_path / "p.csv", Set(range(3)), shares)
    with open(tmp_path / "p.csv", newline="", errors="surrogateescape") as file:
        lines = list(csv.reader(file))[1:]
    assert lines[0] == ["plain.jpg", "a, b", 'c"d', "0.500000"]
    assert lines[1] == ["w,\n.jpg", 'c"d', 'c"d', "0.250000"]
    assert lines[2] == ["\udcff.jpg", 'c"d', "a, b", "1.000000"]


def test_predictions_that_cannot_be_written(work, tmp_path):
    flags = [*NORMED, "--predictions", tmp_path / "none/p.csv"]
    output = run([*forked("dataparallel.py"), *flags], work, code=2)
    assert output.startswith("error: argument --predictions: cannot write ")
    for lengths in ((1, 1), (2, 2), (1, 2), (2,), (4,)):  # of three images: nothing is written
        with pytest.raises(ValueError):
            save_predictions(tmp_path / "p.csv", [0, 1, 2], [torch.zeros(n, 2) for n in lengths])
    assert not list(tmp_path.iterdir())


def test_curves_go_on_where_a_run_is_resumed(work, tmp_path):
    """And hold what the printed lines and metrics.jsonl do; rank 0 alone writes them."""
    flags = [*NORMED, "--tensorboard", "-p", "5", "--checkpoint-dir", tmp_path / "c"]
    output = run([*forked(ranks=2), *flags, "--max-steps", "12"], work)
    assert "arn" not in output.split("each process")[-1].replace("learning", ""), output
    output += run([*forked(ranks=2), *flags, "--max-steps", "35", "--resume", "auto"], work)
    shown = events(tmp_path / "c/tensorboard")
    assert list(shown["train/loss"]) == [5, 10, 12, 15, 20, 25, 29, 34, 35]
    losses = [float(x) for x in re.findall(r"  loss ([\d.]+) \(", output)]
    assert list(shown["train/loss"].values()) == pytest.approx(losses, abs=6e-4)
    results = [float(x) for x in re.findall(r"^ \* loss [\d.]+  acc@1 ([\d.]+)", output, re.M)]
    assert list(shown["epoch/acc1"]) == [12, 29, 35]
    assert list(shown["epoch/acc1"].values()) == pytest.approx(results, abs=1e-3)
    names = {"lr", "images per second", "train/acc@1", "train/acc@5", "epoch/data_time"}
    assert names <= shown.keys()
    assert len(list((tmp_path / "c/tensorboard").iterdir())) == 2  # one for each start


def test_the_bar_at_a_terminal_shows_every_line(monkeypatch, tmp_path):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", terminal)
    run = read(tmp_path)
    run.restore(*parts())
    progress = ProgressMeter(run, end=30)
    for run.step in (10, 20, 30):
        progress.update([run.step * 1.5])
        progress.display(0.1)
    for step in (10, 20, 30):
        assert re.search(rf"epoch 0 .* {step}/30 .*loss {step * 0.15:.3f}", terminal.getvalue())


def test_tensorboard_that_is_missing_is_said(work, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\nf = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'tensorboard' else f(name, *a)\n"
    )
    flags = [*NORMED, "--tensorboard", "--checkpoint-dir", tmp_path / "c"]
    env = {"PYTHONPATH": str(tmp_path)}
    output = run([PYTHON, ROOT / "dataparallel.py", *flags], work, env=env, code=2)
    assert output == "error: --tensorboard needs a package: pip install tensorboard\n"
    assert not (tmp_path / "c").exists()


def test_help_shows_each_flag_and_its_default(work):
    """Of every script, in one process: it imports torch once."""
    scripts = SCRIPTS if HOROVODRUN[0].exists() or "CI" in os.environ else SCRIPTS[:-1]
    code = f"""
import importlib, sys
for name in {scripts}:
    print("script:", name)
    module = importlib.import_module(name)
    sys.argv = [name + ".py", "--help"]
    try:
        module.parse_args()
    except SystemExit as end:
        assert end.code == 0
"""
    env = {"PYTHONPATH": f"{ROOT}:{DOUBLE['PYTHONPATH']}", "COLUMNS": "200"}
    output = run([*forked("-c"), code], work, env=env)
    shown = dict(part.split("\n", 1) for part in output.split("script: ")[1:])
    assert list(shown) == scripts
    for script, text in shown.items():
        source = (ROOT / f"{script}.py").read_text()
        assert text.startswith(f"usage: {script}.py ")
        flags = re.findall(r'add\((?:"-\w", )?"(--[\w-]+)"', source)
        assert len(flags) > 20
        for flag in flags:
            assert re.search(rf"^  -(.*, -)?{flag[1:]}[ ,\n]", text, re.M), (flag, text)


@pytest.mark.parametrize("share, said", [(0.1, False), (0.5, True)])
def test_a_hint_when_images_come_too_slowly(share, said, capsys, tmp_path):
    run = read(tmp_path)
    run.restore(*parts())
    progress = ProgressMeter(run, end=10)
    progress.start -= 100
    run.step = 10
    progress.update([25.0])
    progress.close(100 * share)
    assert capsys.readouterr().out == ""  # of a rank that shows nothing
    progress.display(0.1)
    row = progress.close(100 * share)
    assert ("% of the epoch was spent waiting" in capsys.readouterr().out) == said
    assert run.meters[0].avg == 2.5 and row["data_time"] == pytest.approx(share, abs=0.01)
    assert row["images_per_second"] == pytest.approx(0.8, abs=0.01)
    assert row["seconds"] == pytest.approx(100, abs=1)


def test_the_meters_of_a_resumed_epoch_go_on(tmp_path):
    run = read(tmp_path)
    run.restore(*parts())
    (meter,) = run.meters
    meter.add(20.0, 4)
    run.step = 4
    progress = ProgressMeter(run, end=10)
    run.step = 6
    progress.update([10.0])
    assert (meter.val, meter.avg, meter.count) == (5.0, 5.0, 6)
    run.epoch, run.step = 1, 0
    ProgressMeter(run, end=10)
    assert (meter.sum, meter.count) == (0.0, 0)


def test_what_is_no_number_in_json_is_null():
    line = json_line({"epoch": 1, "val_loss": math.nan, "lr": math.inf, "acc1": 1.5})

    def refuse(text):
        raise AssertionError(f"{text} is no JSON")

    row = json.loads(line, parse_constant=refuse)
    assert row == {"epoch": 1, "val_loss": None, "lr": None, "acc1": 1.5}
    assert line.endswith("}\n")
