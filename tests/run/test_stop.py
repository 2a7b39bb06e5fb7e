"""A signal saves the run and stops it; what was started leaves no process behind."""

import os
import re
import shlex
import signal
import time

import pytest
from conftest import ONE_THREAD, Job, full, load, needs_horovod, rows

from tests.launched import (
    FLAGS,
    SCRIPTS,
    SLOW,
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
    "one rank of Apex": ("apex", "rank", signal.SIGUSR1, [1]),
    "one rank of FSDP": ("fsdp", "rank", signal.SIGTERM, [1]),
    "one rank of Horovod": ("horovod", "rank", signal.SIGTERM, [1]),
    "one rank of mp.spawn": ("multiprocessing", "rank", signal.SIGUSR1, [75]),
    "torchrun": ("distributed", "launcher", signal.SIGTERM, [1]),
    "torchrun at the terminal": ("distributed", "group", signal.SIGINT, [1]),
    "torchrun loses its terminal": ("distributed", "group", signal.SIGHUP, [1]),
    "mp.spawn's parent": ("multiprocessing", "launcher", signal.SIGTERM, [75]),
    "mp.spawn at the terminal": ("multiprocessing", "group", signal.SIGINT, [75]),
    "the only process": ("dataparallel", "launcher", signal.SIGUSR1, [75]),
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
    job.wait_for(r"epoch 1/\d+ \[4/")
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
    if case in ("the only process", "one rank of FSDP"):  # what the others save is the same
        output = resume(name, tmp_path / "c", work)
        assert resumed_where_it_stood(output, state), output
        same_run(tmp_path / "c", straight(name, work))


@pytest.mark.parametrize("name", ["dataparallel", full("distributed")])
def test_ctrl_c_of_a_run_that_is_piped_into_tee(name, work, tmp_path):
    """It ends tee too. A run that then prints finds nobody who reads, and still saves."""
    command = shlex.join(map(str, [*SCRIPTS[name][0], *FLAGS, "--checkpoint-dir", tmp_path / "c"]))
    piped = f"trap : INT; {command} --checkpoint-freq 0 | tee; exit ${{PIPESTATUS[0]}}"
    job = Job(["bash", "-c", piped], work, ONE_THREAD | SLOW)
    job.wait_for(r"epoch 1/\d+ \[4/")
    os.killpg(job.process.pid, signal.SIGINT)
    job.finish(code=75 if name == "dataparallel" else 1)  # torchrun's own
    state = load(tmp_path / "c")
    assert 4 <= state["epoch"] * 29 + state["step"] < 45
    assert not list((tmp_path / "c").glob("*.tmp"))


@pytest.mark.full
def test_a_stop_that_is_seen_at_an_epochs_end_takes_effect_after_its_validation(work, tmp_path):
    """Nothing is printed, so nothing is agreed on, before the epoch's last step."""
    more = "--checkpoint-freq 0 --print-freq 1000".split()
    job = start("multiprocessing", tmp_path / "c", work, *more)
    job.wait_for("checkpoints go to")
    time.sleep(0.5)  # rank 0 has said this: the others may not have come so far
    os.kill(processes(job)[1][-1], signal.SIGTERM)
    output = job.finish(code=75)
    assert re.findall(r"^epoch (\S+ \[\S+)", output, re.M) == ["1/2 [29/29]"], output
    assert output.index("  new best  ") < output.index("stopped at the end of epoch 1, saved"), (
        output
    )
    state = load(tmp_path / "c")
    assert (state["epoch"], state["step"]) == (1, 0) and len(rows(tmp_path / "c")) == 1


@pytest.mark.full
def test_a_second_signal_ends_a_process_that_is_stuck(work, tmp_path):
    """In a collective, in C++, where no handler of Python's runs: the other rank is stopped."""
    job = start("multiprocessing", tmp_path / "c", work)
    job.wait_for(r"epoch 1/\d+ \[4/")
    stuck, stopped = processes(job)[1]
    os.kill(stopped, signal.SIGSTOP)
    time.sleep(1)
    os.kill(stuck, signal.SIGTERM)
    time.sleep(4)
    assert stuck in job.pids()
    os.kill(stuck, signal.SIGTERM)
    job.finish(code=128 + signal.SIGTERM, timeout=40)


def test_a_launcher_killed_while_its_processes_start(work, tmp_path):
    """They have no request to be killed with it yet, and find it gone after their imports."""
    job = start("multiprocessing", tmp_path / "c", work)
    while processes(job)[1] == [job.process.pid]:
        time.sleep(0.02)
    job.process.kill()
    job.finish(code=-signal.SIGKILL)
    assert not (tmp_path / "c/checkpoint.pth").exists()
