"""What a run reports: lines of metrics.jsonl, the line or bar of a step, what it says first."""

import json
import math
import re

import pytest
import torch

from common.metrics import AverageMeter
from common.report import ProgressMeter, json_line, print_banner
from tests.runs import Images, opened, parts, read, write


def test_what_is_no_number_in_json_is_null():
    line = json_line({"epoch": 1, "val_loss": math.nan, "lr": math.inf, "acc1": 1.5})
    assert line.endswith("}\n") and "NaN" not in line and "Infinity" not in line
    assert json.loads(line) == {"epoch": 1, "val_loss": None, "lr": None, "acc1": 1.5}


def progress_of(folder, classes="0123456789"):
    run = read(folder, None, Images(classes=classes))
    meters = {name: AverageMeter(name) for name in ("loss", "acc@1", "acc@5")}
    run.attach(*parts()[:3], meters)
    return run, ProgressMeter(run, end=30)


def test_the_line_of_a_step(capsys, tmp_path):
    """Where there is no terminal: tests/run/test_screen.py has one."""
    run, progress = progress_of(tmp_path)
    for run.step in (10, 20):
        progress.update([run.step * 1.5, 500.0, 1000.0])
        progress.display(0.1)
    expected = r"epoch 0 \[20/30\]  \d+ img/s  loss 3.000 \(2.250\)  acc@1 50.000 \(50.000\)  "
    expected += r"acc@5 100.000 \(100.000\)  lr 0.1"
    assert re.fullmatch(expected, capsys.readouterr().out.splitlines()[1])
    run, progress = progress_of(tmp_path / "b", classes="01234")
    progress.display(0.1)
    assert "acc@5" not in capsys.readouterr().out  # of five classes it is always right


@pytest.mark.parametrize("share, said", [(0.1, False), (0.5, True)])
def test_a_hint_when_images_come_too_slowly(share, said, capsys, tmp_path):
    run, progress = progress_of(tmp_path)
    assert progress.close(0.0) == {}  # only the validation was left
    progress.start -= 100
    run.step = 10
    progress.update([25.0, 0.0, 0.0])
    row = progress.close(100 * share)
    assert ("% of the epoch was spent waiting" in capsys.readouterr().out) == said
    run.rank = 1
    assert progress.close(100 * share).keys() == row.keys() and not capsys.readouterr().out
    assert row == pytest.approx({"images_per_second": 0.8, "data_time": share, "seconds": 100}, 0.1)


def test_the_meters_of_a_resumed_epoch_go_on(tmp_path):
    run = opened(tmp_path)
    progress = ProgressMeter(run, end=10)
    run.step = 4
    progress.update([20.0])
    run.save()
    run = opened(tmp_path)
    progress, meter = ProgressMeter(run, end=10), run.meters["loss"]
    run.step = 6
    progress.update([10.0])
    assert (meter.val, meter.avg, meter.count) == (5.0, 5.0, 6)
    run.epoch, run.step = 1, 0
    ProgressMeter(run, end=10)
    assert (meter.sum, meter.count) == (0.0, 0)


# What is said first.


def banner(run, capsys, example=None):
    example = torch.zeros(1, 3, 24, 24) if example is None else example
    print_banner(run, Images(), Images(16), example, 2, "gloo", torch.device("cpu"))
    return capsys.readouterr().out


def test_the_banner_of_a_new_run(tmp_path, capsys):
    first, threads, *lines = banner(opened(tmp_path), capsys).splitlines()
    assert re.search(r": processes: 1, gloo, cpu, fp32, torch \d", first)
    assert re.fullmatch(r"each process: threads: \d+, loader workers: 2", threads)
    assert lines == [
        "80 items of [3, 24, 24] to train, 16 to validate, 10 classes; a",
        "global batch 8 = 1 x 8; learning rate 0.1",  # not of --lr 0.1 x 8 / 256
        f"checkpoints go to {tmp_path}",
        "no checkpoint: the weights are random",
    ]
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
    said = banner(run, capsys, tokens)
    assert "80 items of [9] to train" in said and "rate: a scheduler's\n" in said
    assert "80 items to train" in banner(run, capsys, {"ids": tokens})


def test_an_evaluation_says_whose_weights_it_takes(tmp_path, capsys):
    run = read(tmp_path, None, evaluate=True, pretrained=True)
    run.attach(*parts())
    said = banner(run, capsys)
    assert "the weights are those of torchvision, except in the head: it is random\n" in said
    assert "checkpoints go to" not in said


def test_the_banner_of_a_resumed_run(tmp_path, capsys):
    write(tmp_path, 2)
    (tmp_path / "checkpoint.pth").write_bytes(b"damaged")
    run = read(tmp_path, world_size=2, seed=5, evaluate=True)
    run.attach(*parts())
    assert banner(run, capsys).splitlines()[4:] == [
        f"{tmp_path}/checkpoint.pth is damaged (BadZipFile: File is not a zip file)",
        f"resumed from {tmp_path}/checkpoint.prev.pth at epoch 1 step 0",
        "  changed: seed 0 -> 5",
        "  changed: world_size 1 -> 2, same global batches",
    ]
    run = opened(tmp_path, epochs=1)
    assert banner(run, capsys).endswith("nothing left to train: 10 of 10 steps are done\n")
    run.end()
    run.save()
    said = banner(opened(tmp_path, epochs=1), capsys)
    assert "ended early, after 1 of 1 epochs\n" in said
    assert "nothing left to train: run.end() has ended it; more --epochs" in said
