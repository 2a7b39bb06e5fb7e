"""A signal saves the run and stops it; what was started leaves no process behind."""

import os
import re
import signal
import time

import pytest
from conftest import ONE_THREAD, Job, full, load, needs_horovod, rows, run, torchrun

from tests.launched import (
    FLAGS,
    SCRIPTS,
    finish,
    processes,
    resume,
    resumed_where_it_stood,
    same_run,
    start,
    straight,
)

SIGNALS = {
    # who gets it, which signal, and the exit code of what the user has started
    "one rank": ("distributed", "rank", signal.SIGTERM, [1]),
    "one rank of FSDP": ("fsdp", "rank", signal.SIGTERM, [1]),
    "one rank of mp.spawn": ("multiprocessing", "rank", signal.SIGUSR1, [75]),
    "torchrun": ("distributed", "launcher", signal.SIGTERM, [1]),
    "torchrun at the terminal": ("distributed", "group", signal.SIGINT, [1]),
    "torchrun loses its terminal": ("distributed", "group", signal.SIGHUP, [1]),
    "mp.spawn's parent": ("multiprocessing", "launcher", signal.SIGTERM, [75]),
    "mp.spawn at the terminal": ("multiprocessing", "group", signal.SIGINT, [75]),
    "mp.spawn loses its terminal": ("multiprocessing", "group", signal.SIGHUP, [75]),
    "the only process": ("dataparallel", "launcher", signal.SIGUSR1, [75]),
    "the only process loses its terminal": ("dataparallel", "launcher", signal.SIGHUP, [75]),
    # Two threads of its helper wait for one process: the later one takes the exit code for 0.
    "horovodrun": ("horovod", "launcher", signal.SIGTERM, [0, 1]),
}
QUICK = ["torchrun at the terminal", "the only process"]


@pytest.mark.parametrize("case", [case if case in QUICK else full(case) for case in SIGNALS])
def test_a_signal_saves_and_stops(case, work, tmp_path):
    name, who, number, codes = SIGNALS[case]
    if name == "horovod":
        needs_horovod()
    began = time.monotonic()
    job = start(name, tmp_path / "c", work, "--checkpoint-freq", "0")
    job.wait_for(r"epoch 0 \[4/")
    starting = time.monotonic() - began
    launcher, training, _ = processes(job)
    if who == "group":
        os.killpg(job.process.pid, number)
    else:
        os.kill(launcher if who == "launcher" else training[-1], number)
    sent = time.monotonic()
    code, output = job.wait(30)
    # On two cores of its own it takes 1 to 4 s, and to start 7 or more: a busy machine has longer.
    # horovodrun waits 5 s for its shell where it has frozen that before its end.
    limit = max(10, starting) + (5 if name == "horovod" else 0)
    assert time.monotonic() - sent < limit, output
    assert code in codes and "saved: --resume auto goes on" in output, output
    state = load(tmp_path / "c")
    assert 4 <= state["epoch"] * 29 + state["step"] < 45
    if name in ("dataparallel", "fsdp"):  # what the others save is the same
        output = resume(name, tmp_path / "c", work)
        assert resumed_where_it_stood(output, state), output
        same_run(tmp_path / "c", straight(name, work))


@pytest.mark.parametrize("name", ["dataparallel", full("multiprocessing")])
def test_under_nohup_a_run_outlives_its_terminal(name, work, tmp_path):
    """Not under torchrun, which stops for this signal even then: its processes save and stop."""
    command, env = SCRIPTS[name]
    command = ["nohup", *command, *FLAGS, "--checkpoint-dir", tmp_path / "c"]
    job = Job(command, work, ONE_THREAD | env)
    job.wait_for(r"epoch 0 \[4/")
    os.killpg(job.process.pid, signal.SIGHUP)
    output = finish(job)
    assert "stopped" not in output and len(rows(tmp_path / "c")) == 2
    same_run(tmp_path / "c", straight(name, work))


@pytest.mark.full
def test_a_stop_during_validation_takes_effect_after_it(work, tmp_path):
    job = start("multiprocessing", tmp_path / "c", work, "--checkpoint-freq", "0")
    job.wait_for(r"epoch 0 \[4/")
    training = processes(job)[1]
    job.wait_for(r"epoch 0 \[29/29\]")  # what comes next is the validation
    os.kill(training[-1], signal.SIGTERM)
    code, output = job.wait(30)
    assert code == 75, output
    assert output.index(" * loss ") < output.index("stopped at epoch 1 step "), output
    state = load(tmp_path / "c")
    assert state["epoch"] == rows(tmp_path / "c")[0]["epoch"] == 1 and 1 <= state["step"] < 10
    resume("multiprocessing", tmp_path / "c", work)
    same_run(tmp_path / "c", straight("multiprocessing", work))


@pytest.mark.full
def test_a_stop_that_is_seen_at_an_epochs_end_takes_effect_after_it(work, tmp_path):
    """Nothing is printed, so nothing is agreed on, before the epoch's last step."""
    more = ["--checkpoint-freq", "0", "--print-freq", "1000"]
    job = start("multiprocessing", tmp_path / "c", work, *more)
    job.wait_for("checkpoints go to")
    os.kill(processes(job)[1][-1], signal.SIGTERM)
    code, output = job.wait(60)
    assert code == 75 and re.findall(r"^epoch (\d \S+)", output, re.M) == ["0 [29/29]"], output
    assert output.index(" * loss ") < output.index("stopped at epoch 1 step 0, saved"), output
    state = load(tmp_path / "c")
    assert (state["epoch"], state["step"]) == (1, 0) and len(rows(tmp_path / "c")) == 1


def test_an_evaluation_is_stopped_at_once(work, tmp_path):
    """It has nothing to save."""
    long = ["--arch", "resnet18", "--image-size", "224", "--evaluate"]
    job = start("dataparallel", tmp_path / "c", work, *long)
    job.wait_for("the weights are random")
    time.sleep(1)
    job.process.send_signal(signal.SIGTERM)
    code, output = job.wait(20)
    assert code == -signal.SIGTERM and "loss" not in output and not (tmp_path / "c").exists()


@pytest.mark.full
def test_a_second_signal_ends_a_process_that_is_stuck(work, tmp_path):
    """In a collective, in C++, where no handler of Python's runs: the other rank is stopped."""
    job = start("multiprocessing", tmp_path / "c", work)
    job.wait_for(r"epoch 0 \[4/")
    stuck, stopped = processes(job)[1]
    os.kill(stopped, signal.SIGSTOP)
    time.sleep(1)
    os.kill(stuck, signal.SIGTERM)
    time.sleep(4)
    assert stuck in job.pids()
    os.kill(stuck, signal.SIGTERM)
    code, _ = job.wait(40)
    assert code == 128 + signal.SIGTERM


@pytest.mark.parametrize("name", [full("distributed"), "multiprocessing"])
def test_a_launcher_killed_while_its_processes_start(name, work, tmp_path):
    """They have no request to be killed with it yet, and find it gone after their imports.

    Those of mp.spawn do so at once. Those of torchrun take 77 s on an idle machine: for 20 s,
    twice, they look for its store; then local rank 1 gives local rank 0 30 s to speak first.
    """
    job = start(name, tmp_path / "c", work)
    while processes(job)[1] == [job.process.pid]:
        time.sleep(0.02)
    job.process.kill()
    deadline = time.monotonic() + 150  # with the imports of a busy machine
    while job.pids() and time.monotonic() < deadline:
        time.sleep(0.1)
    code, output = job.wait(20)
    assert code == -signal.SIGKILL and not (tmp_path / "c/checkpoint.pth").exists(), output


@pytest.mark.parametrize("count", [full(2), pytest.param(100, marks=pytest.mark.soak)])
def test_good_runs_end_well(count, work, tmp_path):
    command = [*torchrun(2), *FLAGS, "--max-steps", "3", "--checkpoint-dir"]
    for number in range(count):
        output = run([*command, tmp_path / str(number)], work, env=ONE_THREAD)
        assert not re.search("warn|abort|terminate|Traceback", output, re.I), output
