"""What a run reports: the line of a step and of an epoch, what it says first and at its end."""

import json
import math
import re
import time

import pytest
import torch
from conftest import rows
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from common.metrics import AverageMeter
from longrun.files import json_line
from longrun.report import Report
from tests.runs import Images, opened, parts, read, two_groups, write


def reporting(run):
    return Report(run.progress, run.rank, run.world_size, run.args)


def test_the_line_of_a_step(capsys, tmp_path):
    """Where there is no terminal: tests/run/test_screen.py has one."""
    run = read(tmp_path, None)
    meters = {name: AverageMeter(name) for name in ("loss", "acc@1", "acc@5")}
    report = reporting(run)
    report.start_epoch(30)
    for run.progress.step in (10, 20):
        for meter, total in zip(meters.values(), (run.progress.step * 1.5, 500, 1000), strict=True):
            meter.add(total, 10)
        report.print_step(meters, 0.1)
    expected = r"epoch 1/\d+ \[20/30\]  \d+ img/s  loss 3.000 \(2.250\)  acc@1 50.000 \(50.000\)  "
    expected += r"acc@5 100.000 \(100.000\)  lr 0.1"
    assert re.fullmatch(expected, capsys.readouterr().out.splitlines()[1])


def test_what_is_no_number_in_json_is_null():
    line = json_line({"epoch": 1, "val_loss": math.nan, "lr": math.inf, "acc1": 1.5})
    assert line.endswith("}\n") and "NaN" not in line and "Infinity" not in line
    assert json.loads(line) == {"epoch": 1, "val_loss": None, "lr": None, "acc1": 1.5}


def test_the_speed_of_an_epoch(tmp_path):
    run = opened(tmp_path)
    report = reporting(run)
    report.start_epoch(10)
    assert report.end_steps(0.0) == {}  # only the validation was left
    report.started -= 100
    run.progress.step = 10
    expected = {"images_per_second": 0.8, "data_time": 0.5, "seconds": 100}
    assert report.end_steps(50) == pytest.approx(expected, 0.1)


# What is said at the end of an epoch, and of a run.


def epoch(run, acc1, seconds=10.0, validation=2.0, steps=10, report=None, **scores):
    """Train and validate an epoch, which takes so many seconds, save it and print its line."""
    report, progress = report or reporting(run), run.progress
    report.start_epoch(progress.step + steps)
    report.started -= seconds
    progress.step += steps
    speed = report.end_steps(0.0)
    report.started -= validation
    progress.end_epoch()
    is_best = progress.record_score(acc1)
    row = {"epoch": progress.epoch, "step": progress.step, "train_loss": 2.5, "val_loss": 1.25}
    row |= {"acc1": acc1, "acc5": 90.0, **scores, "lr": 0.1, "world_size": 1, "batch_size": 8}
    run.save(row | speed, is_best)
    report.print_epoch(row | speed, is_best)


def test_the_line_of_an_epoch(tmp_path, capsys):
    run = opened(tmp_path, epochs=90)
    epoch(run, 50.0, f1=0.5, note="x", flag=None)
    line = "epoch 1/90  loss 1.2500  acc@1 50.000  acc@5 90.000  f1 0.500  new best  0:00:12"
    line += r"  0:1[78]:\d\d left\n"
    assert re.fullmatch(line, capsys.readouterr().out)
    epoch(run, 40.0, seconds=90, validation=0)
    assert re.search(r"  best 50.000  0:01:3\d  2:1\d:\d\d left\n", capsys.readouterr().out)


def test_the_line_of_an_epoch_that_is_cut_and_of_one_that_lacked_its_validation(tmp_path, capsys):
    run = opened(tmp_path, epochs=9, max_steps=4)
    epoch(run, 50.0, steps=4)
    assert capsys.readouterr().out.startswith("epoch 1/9 step 4  loss 1.2500  ")
    assert (run.progress.best_epoch, rows(tmp_path)[-1]["epoch"]) == (1, 0)
    run = opened(tmp_path / "b")
    run.progress.step = 10
    epoch(run, 50.0, steps=0)
    said = capsys.readouterr().out
    assert said.startswith("epoch 1/9999  loss ") and "left" not in said


def test_the_summary_of_a_run(tmp_path, capsys, monkeypatch):
    """Also by a process that only finds all done."""
    monkeypatch.chdir(tmp_path)
    run = opened("c", epochs=5)
    report = reporting(run)
    for acc1 in (50.0, 70.0, 60.0):
        epoch(run, acc1, report=report)
    run.progress.stop_early()
    run.save()
    report.began -= 7200
    capsys.readouterr()
    report.print_end()
    reporting(opened("c", epochs=5)).print_end()
    done, *others = capsys.readouterr().out.splitlines()
    assert done == "done in 2:00:00, after 3 of 5 epochs"
    best = [
        "best: 70.000 in epoch 2, saved as c/model_best.pth",
        "to evaluate it, add to the command: --evaluate --resume c/model_best.pth",
    ]
    assert others == best * 2


def test_a_stop_is_said_to_torchrun_too(tmp_path, capsys, monkeypatch):
    run = opened(tmp_path / "c")
    run.progress.step = 10  # it is not validated
    reporting(run).print_end()
    assert capsys.readouterr().out == "stopped at epoch 1 step 10, saved: --resume auto goes on\n"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    reporting(run).print_end()
    assert "\ntorchrun reports every stop as below: that is no error\n" in capsys.readouterr().out
    failure = ProcessFailure(0, 1, 75, str(tmp_path / "error.json"))  # torchrun's own
    assert failure.message["message"].startswith("stopped at epoch 1 step 10, saved")
    assert 0 <= time.time() - failure.timestamp < 60


# What is said first.


def banner(run, capsys, **about_images):
    train_set = Images()
    vars(train_set).update(about_images)
    reporting(run).print_banner(
        "gloo", torch.device("cpu"), train_set, Images(16), run.optimizer, run.describe()
    )
    return capsys.readouterr().out


def test_the_banner_of_a_new_run(tmp_path, capsys):
    first, threads, *lines = banner(opened(tmp_path, workers=3), capsys).splitlines()
    assert re.search(r": processes: 1, gloo, cpu, fp32, torch \d", first)
    assert re.fullmatch(r"each process: threads: \d+, loader workers: 3", threads)
    assert lines == [
        "80 items to train, 16 to validate, 10 classes; a",
        "global batch 8 = 1 x 8; learning rate 0.1",  # not of --lr 0.1 x 8 / 256
        f"checkpoints go to {tmp_path}",
        "no checkpoint was read",
    ]
    run = opened(tmp_path / "b", None, lr=3.2, warmup_epochs=9999)
    said = banner(run, capsys, decoder="PIL", skipped="2 .gif files")
    assert ", images decoded by PIL\n" in said and "\nwarning: not read: 2 .gif files\n" in said
    assert "learning rate 0.1 = 3.2 x 8 / 256" in said and "no checkpoint" not in said
    assert "\nwarning: --warmup-epochs is not less than --epochs: the rate only rises" in said


def test_the_banner_is_true_of_a_copy(tmp_path, capsys):
    """With groups that have rates of their own, and fewer flags."""
    run = read(tmp_path, None)
    run.attach(*two_groups(torch.optim.AdamW))
    for name in ("lr", "warmup_epochs"):
        delattr(run.args, name)
    assert "; learning rate 0.01, 0.1\n" in banner(run, capsys)


def test_the_banner_shows_the_rate_that_each_group_learns_at(tmp_path, capsys):
    """Each once; as the last step left them where only the validation is left."""
    run = read(tmp_path, None, lr=3.2)
    net, _, scaler, meters = parts()
    groups = [{"params": [x], "scale": 1 if i else 0.1} for i, x in enumerate(net.parameters())]
    run.attach(net, torch.optim.SGD(groups, 0.1), scaler, meters)
    assert "; learning rate 0.01, 0.1\n" in banner(run, capsys)
    run.progress.step = 10
    run.optimizer.param_groups[0]["lr"] = 0.02
    assert "; learning rate 0.02, 0.1\n" in banner(run, capsys)


def test_the_banner_of_a_resumed_run(tmp_path, capsys):
    write(tmp_path, 2)
    (tmp_path / "checkpoint.pth").write_bytes(b"damaged")
    run = read(tmp_path, world_size=2, seed=5, workers=99, evaluate=True)  # 99 change nothing
    run.attach(*parts())
    run.restore()
    assert banner(run, capsys).splitlines()[4:] == [
        f"{tmp_path}/checkpoint.pth is no checkpoint of these scripts, or damaged",
        f"resumed from {tmp_path}/checkpoint.prev.pth at the end of epoch 1",
        "  changed: seed 0 -> 5",
        "  changed: world_size 1 -> 2",
    ]
    run = opened(tmp_path, epochs=1)
    done = "nothing left to train: 10 of 10 steps are done"
    assert banner(run, capsys).endswith(f"{done}\n")
    run.progress.stop_early()
    run.save()
    said = banner(opened(tmp_path, epochs=1), capsys)
    assert said.endswith(f"{done}, and it was ended early\n")
