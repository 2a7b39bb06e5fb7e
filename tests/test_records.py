"""Predictions as a CSV file, curves for TensorBoard, the lines at the start, --help."""

import csv
import io
import re
import sys

import pytest
import torch
from conftest import HOROVODRUN, PYTHON, ROOT, events, load, needs_horovod, run, torchrun
from torch.nn.functional import softmax

from common import Prefetcher, image_folders, make_loader
from common.metrics import AverageMeter, ProgressMeter
from common.records import save_predictions
from tests import nets

SCRIPTS = ["distributed", "dataparallel", "multiprocessing_distributed", "distributed_slurm_main"]
SCRIPTS += ["apex_distributed", "horovod_distributed"]
NORMED = "--arch tests.nets:normed --image-size 24 --batch-size 48 --workers 1".split()
SPAWN = [PYTHON, ROOT / "multiprocessing_distributed.py", "--nprocs=2"]
HOROVOD = [*HOROVODRUN, ROOT / "horovod_distributed.py"]
DOUBLE = {"PYTHONPATH": str(ROOT / "tests/apex_doubles/today")}


def read(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


@pytest.fixture(scope="module")
def trained(work):
    run([*torchrun(2), *NORMED, "--max-steps", "40", "--checkpoint-dir", "predicted"], work)
    return work / "predicted"


@pytest.mark.parametrize(
    "command, env",
    [
        (torchrun(3), {}),
        ([PYTHON, ROOT / "dataparallel.py"], {}),
        (SPAWN, {}),
        ([*torchrun(2, "apex_distributed.py"), "--precision", "fp32"], DOUBLE),
        (HOROVOD, {}),
    ],
    ids=["torchrun", "dataparallel", "spawn", "apex", "horovod"],
)
def test_every_image_is_predicted_once_in_order(command, env, work, trained, tmp_path):
    if command is HOROVOD:
        needs_horovod()
    flags = [*NORMED, "--batch-size", "42", "-e", "--resume", trained / "checkpoint.pth"]
    run([*command, *flags, "--predictions", tmp_path / "p.csv"], work, env=env)
    assert [path.name for path in tmp_path.iterdir()] == ["p.csv"]
    head, *lines = read(tmp_path / "p.csv")
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
    output = run([PYTHON, ROOT / "dataparallel.py", *flags], work, code=2)
    assert output.startswith("error: argument --predictions: cannot write ")
    with pytest.raises(ValueError):  # a share of another length: nothing is written
        save_predictions(tmp_path / "p.csv", [0, 1, 2], [torch.zeros(1, 2), torch.zeros(1, 2)])
    assert not list(tmp_path.iterdir())


def test_curves_go_on_where_a_run_is_resumed(work, tmp_path):
    """And hold what the printed lines and metrics.jsonl do; rank 0 alone writes them."""
    flags = [*NORMED, "--tensorboard", "-p", "5", "--checkpoint-dir", tmp_path / "c"]
    output = run([*torchrun(2), *flags, "--max-steps", "12"], work)
    assert "arn" not in output.split("each process")[-1].replace("learning", ""), output
    output += run([*torchrun(2), *flags, "--max-steps", "35", "--resume", "auto"], work)
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


def test_the_bar_at_a_terminal_shows_every_line(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", terminal)
    progress = ProgressMeter(0, 0, 30, {"batch_size": 8}, [AverageMeter("loss")])
    for step in (10, 20, 30):
        progress.update(step, [step * 1.5])
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


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_is_one_screen(script, work):
    if script == "horovod_distributed":
        needs_horovod()
    output = run([PYTHON, ROOT / f"{script}.py", "--help"], work, env=DOUBLE)
    lines = output.splitlines()
    assert len(lines) <= 42 and max(map(len, lines)) <= 80, output
    source = (ROOT / f"{script}.py").read_text()
    for flag in re.findall(r'add\((?:"-\w", )?"(--[\w-]+)"', source):
        (line,) = [text for text in lines if re.search(rf"(^|[ ,]){flag}\b(?!-)", text)][:1]
        value = "store_true" in source.split(f'"{flag}"')[1].split("\n")[0]
        if not value and flag not in ("--resume", "--predictions", "--max-steps", "--local-rank"):
            assert re.search(r"\(.+\)$", line), f"no default: {line}"


@pytest.mark.parametrize("share, said", [(0.1, False), (0.5, True)])
def test_a_hint_when_images_come_too_slowly(share, said, capsys):
    run = {"batch_size": 8, "images": 80, "world_size": 2}
    progress = ProgressMeter(0, 0, 10, run, [AverageMeter("loss")])
    progress.start -= 100
    progress.update(10, [25.0])
    progress.close(0.1, 100 * share)
    assert capsys.readouterr().out == ""  # of a rank that shows nothing
    progress.display(0.1)
    row = progress.close(0.1, 100 * share)
    assert ("% of the epoch was spent waiting" in capsys.readouterr().out) == said
    assert row["train_loss"] == 2.5 and row["data_time"] == pytest.approx(share, abs=0.01)
    assert row["images_per_second"] == pytest.approx(0.8, abs=0.01)
