"""What a run reports: predictions as CSV, curves, the line or bar of a step, what it says first."""

import csv
import io
import json
import math
import os
import re
import sys

import pytest
import torch
from conftest import events

from common import report
from common.metrics import AverageMeter
from common.report import ProgressMeter, json_line, print_banner, save_predictions
from tests.runs import STEPS, Images, opened, parts, read, save, write

# Predictions.


class Images3(list):
    classes, targets = ["a, b", 'c"d'], [0, 1, 1]

    def path(self, i):
        return ["plain.jpg", "w,\n.jpg", b"\xff.jpg".decode("utf-8", "surrogateescape")][i]


def test_each_image_is_a_line_whatever_its_name(tmp_path):
    shares = [torch.tensor([[0.5, 1.0], [1.0, 0.0]]), torch.tensor([[0.25, 1.0]])]
    (tmp_path / "old.csv").write_text("old")
    (tmp_path / "link.csv").symlink_to("old.csv")
    save_predictions(str(tmp_path / "link.csv"), Images3(range(3)), shares)
    assert (tmp_path / "link.csv").is_symlink()
    with open(tmp_path / "old.csv", newline="", errors="surrogateescape") as file:
        head, *lines = csv.reader(file)
    assert head == ["path", "class", "predicted", "confidence"]
    assert lines == [
        ["plain.jpg", "a, b", 'c"d', "0.500000"],
        ["w,\n.jpg", 'c"d', 'c"d', "0.250000"],
        ["\udcff.jpg", 'c"d', "a, b", "1.000000"],
    ]


def test_predictions_of_another_number_of_images_are_not_written(tmp_path):
    for lengths in ((1, 1), (2, 2), (1, 2), (2,), (4,)):  # of three images
        parts_of = [torch.zeros(n, 2) for n in lengths]
        with pytest.raises(ValueError, match=r"rank \d has \d predictions, not one per image"):
            save_predictions(str(tmp_path / "p.csv"), Images3(range(3)), parts_of)
    assert not list(tmp_path.iterdir())


def test_predictions_replace_no_checkpoint_and_no_image(tmp_path):
    write(tmp_path / "c", 1)
    (tmp_path / "image.jpg").write_text("")
    (tmp_path / "link.csv").symlink_to("c/checkpoint.pth")
    (tmp_path / "folder.csv").mkdir()
    cases = dict.fromkeys(("c/checkpoint.pth", "image.jpg", "link.csv"), "must end in .csv")
    cases |= {"folder.csv": "cannot be written", "none/p.csv": "cannot be written"}
    for name, message in cases.items():
        for more in ({"evaluate": True}, {}):
            path = str(tmp_path / name)
            with pytest.raises(ValueError, match=f"^--predictions {path} {message}$"):
                read(tmp_path / "new", predictions=path, **more)
    assert not (tmp_path / "new").exists()
    assert read(tmp_path / "c", predictions=str(tmp_path / "p.csv")).epoch == 1


# Numbers.


def test_what_is_no_number_in_json_is_null():
    line = json_line({"epoch": 1, "val_loss": math.nan, "lr": math.inf, "acc1": 1.5})

    def refuse(text):
        raise AssertionError(f"{text} is no JSON")

    row = json.loads(line, parse_constant=refuse)
    assert row == {"epoch": 1, "val_loss": None, "lr": None, "acc1": 1.5}
    assert line.endswith("}\n")


def progress_of(folder, names=("loss",), classes="0123456789", **more):
    run = read(folder, None, Images(classes=classes), **more)
    net, optimizer, scaler, _ = parts()
    run.attach(net, optimizer, scaler, {name: AverageMeter(name) for name in names})
    return run, ProgressMeter(run, end=30)


@pytest.mark.parametrize("size", [(24, 80), (24, 120), (0, 0)], ids=str)
def test_the_bar_at_a_terminal(monkeypatch, tmp_path, size):
    """With the means first of all, for 80 columns are few; also where the size is not told."""
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size(size[::-1]))
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    run, progress = progress_of(tmp_path, ("loss", "acc@1", "acc@5"))
    for run.step in (10, 20, 30):
        progress.update([run.step * 1.5, 1000.0, 5000.0])
        progress.display(0.1)
    shown = terminal.getvalue().split("\r")
    for step, mean in ((10, 1.5), (20, 2.25), (30, 3.0)):
        pattern = rf"epoch 0 +\d+%\|.*\| {step}/30 \[.*, \d+ img/s  loss {mean:.3f}  acc@1 100\.000"
        assert any(re.match(pattern, line) for line in shown), shown
    assert all(len(line) < (size[1] or 80) for line in shown)
    assert ("lr 0.1]" in shown[-1]) == (size[1] == 120)


def test_a_line_elsewhere(capsys, tmp_path):
    run, progress = progress_of(tmp_path, ("loss", "acc@1", "acc@5"))
    for run.step in (10, 20):
        progress.update([run.step * 1.5, 500.0, 1000.0])
        progress.display(0.1)
    expected = r"epoch 0 \[20/30\]  \d+ img/s  loss 3.000 \(2.250\)  acc@1 50.000 \(50.000\)  "
    expected += r"acc@5 100.000 \(100.000\)  lr 0.1"
    assert re.fullmatch(expected, capsys.readouterr().out.splitlines()[1])
    run, progress = progress_of(tmp_path / "b", ("loss", "acc@1", "acc@5"), classes="01234")
    progress.display(0.1)
    assert "acc@5" not in capsys.readouterr().out  # of five classes it is always right


@pytest.mark.parametrize("share, said", [(0.1, False), (0.5, True)])
def test_a_hint_when_images_come_too_slowly(share, said, capsys, tmp_path):
    run, progress = progress_of(tmp_path)
    assert progress.close(0.0) == {}  # only the validation was left
    progress.start -= 100
    run.step = 10
    progress.update([25.0])
    row = progress.close(100 * share)
    assert ("% of the epoch was spent waiting" in capsys.readouterr().out) == said
    run.rank = 1
    assert progress.close(100 * share).keys() == row.keys() and not capsys.readouterr().out
    assert run.meters["loss"].avg == 2.5 and row["data_time"] == pytest.approx(share, abs=0.01)
    assert row["images_per_second"] == pytest.approx(0.8, abs=0.01)
    assert row["seconds"] == pytest.approx(100, abs=1)


def test_the_meters_of_a_resumed_epoch_go_on(tmp_path):
    run, progress = progress_of(tmp_path)
    run.step = 4
    progress.update([20.0])
    run.save()
    run, progress = opened(tmp_path), None
    progress, meter = ProgressMeter(run, end=10), run.meters["loss"]
    run.step = 6
    progress.update([10.0])
    assert (meter.val, meter.avg, meter.count) == (5.0, 5.0, 6)
    run.epoch, run.step = 1, 0
    ProgressMeter(run, end=10)
    assert (meter.sum, meter.count) == (0.0, 0)


# Curves.


def drawn(run, *steps):
    progress = ProgressMeter(run, end=STEPS)
    for run.step in steps:
        progress.update([run.step * 1.0])
        progress.display(0.1)
    return progress


def test_curves_go_on_where_a_run_is_resumed(tmp_path, capsys):
    run = opened(tmp_path, tensorboard=True)
    assert os.listdir(tmp_path) == [".lock"]  # nothing before the first point
    drawn(run, 2, 4)
    run.save()
    drawn(run, 6, 8)  # and killed: this will be drawn again
    run = opened(tmp_path, tensorboard=True)
    drawn(run, 7, 10)
    save(run, 1)
    shown = events(tmp_path / "tensorboard")
    assert list(shown["train/loss"]) == [2, 4, 7, 10]
    assert list(shown["train/loss"].values()) == pytest.approx([1, 2, 7 / 3, 10 / 3])
    assert {"lr", "images per second"} < shown.keys()
    assert list(shown["epoch/epoch"]) == [10]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2  # one for each start


def test_who_draws(tmp_path, monkeypatch):
    """Rank 0, and no evaluation; a package that is missing is said before anything is written."""
    assert read(tmp_path, None, tensorboard=True).curves
    assert not read(tmp_path, None, tensorboard=True, evaluate=True).curves
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"--tensorboard needs a package: pip install tensorboard"):
        read(tmp_path, None, tensorboard=True)
    assert os.listdir(tmp_path) == [".lock"]


# What is said first.


def banner(run, capsys, train_set=None, example=None):
    images = train_set or Images()
    example = torch.zeros(1, 3, 24, 24) if example is None else example
    print_banner(run, images, Images(16), example, 2, "gloo", torch.device("cpu"))
    return capsys.readouterr().out


def test_the_banner_of_a_new_run(tmp_path, capsys):
    said = banner(opened(tmp_path), capsys)
    first, *lines = said.splitlines()
    assert re.search(r": processes: 1, gloo, cpu, fp32, torch \d", first)
    assert re.search(
        r"each process: threads: \d+, loader workers: 2, images decoded by \w", lines[0]
    )
    assert lines[1] == "80 items of [3, 24, 24] to train, 16 to validate, 10 classes; a"
    assert lines[2] == "global batch 8 = 1 x 8; learning rate 0.1"  # not of --lr 0.1 x 8 / 256
    assert lines[3] == f"checkpoints go to {tmp_path}"
    assert lines[4] == "no checkpoint: the weights are random" and len(lines) == 5
    said = banner(opened(tmp_path / "b", None, lr=3.2), capsys)
    assert "learning rate 0.1 = 3.2 x 8 / 256" in said and "no checkpoint" not in said
    said = banner(opened(tmp_path / "c", None, warmup_epochs=5, epochs=5), capsys)
    assert "warning: --warmup-epochs is not less than --epochs" in said


def test_the_banner_is_true_of_a_copy(tmp_path, capsys):
    """With tokens instead of images, groups with rates of their own, a scheduler, fewer flags."""
    run = read(tmp_path, None)
    net, _, scaler, meters = parts()
    groups = [{"params": net[0].parameters(), "lr": 0.01}, {"params": net[4].parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=0.5)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    run.attach(net, optimizer, scaler, meters, scheduler=scheduler)
    for name in ("lr", "warmup_epochs", "pretrained"):
        delattr(run.args, name)
    tokens = torch.zeros(1, 9, dtype=torch.int64)
    said = banner(run, capsys, example=tokens)
    assert "80 items of [9] to train" in said and "learning rate 0.01, 0.5\n" in said
    assert "80 items to train" in banner(run, capsys, example={"ids": tokens})


@pytest.mark.parametrize(
    "more, said",
    [
        ({"pretrained": True}, "those of torchvision, except in the head: it is random"),
        ({"pretrained": True, "images": Images(classes=range(1000))}, "those of torchvision"),
        ({}, "random"),
    ],
)
def test_an_evaluation_says_whose_weights_it_takes(tmp_path, capsys, more, said):
    run = read(tmp_path, None, evaluate=True, **more)
    run.attach(*parts())
    assert f"no checkpoint: the weights are {said}\n" in banner(run, capsys)
    assert "checkpoints go to" not in banner(run, capsys)


def test_the_banner_of_a_resumed_run(tmp_path, capsys):
    write(tmp_path, 2)
    (tmp_path / "checkpoint.pth").write_bytes(b"damaged")
    run = read(tmp_path, world_size=2, seed=5, evaluate=True)
    run.attach(*parts())
    lines = banner(run, capsys).splitlines()[4:]
    assert lines == [
        f"{tmp_path}/checkpoint.pth is damaged (BadZipFile: File is not a zip file)",
        f"resumed from {tmp_path}/checkpoint.prev.pth at epoch 1 step 0",
        "  changed: seed 0 -> 5",
        "  changed: world_size 1 -> 2, same global batches",
    ]
    said = banner(opened(tmp_path, epochs=1), capsys)
    assert said.endswith("nothing left to train: 10 of 10 steps are done\n")


def test_an_early_end_is_said(tmp_path, capsys):
    run = write(tmp_path, 1, epochs=4)
    run.end()
    run.save()
    said = banner(opened(tmp_path, epochs=4), capsys)
    assert "nothing left to train: the run has ended early; more --epochs continue it\n" in said
    said = banner(opened(tmp_path, epochs=5), capsys)
    assert "nothing left" not in said and "changed: epochs 4 -> 5" in said
