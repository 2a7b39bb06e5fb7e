"""A signal saves the run and stops it; what was started leaves no process behind."""

import os
import re
import shlex
import signal
import time

import pytest
from conftest import ONE_THREAD, Job, each, load, rows

from tests.launched import FLAGS, SCRIPTS, SLOW, SLOWER, at_step, ends_as_straight, processes, start

SIGNALS = {
    # who gets it, which signal, and the exit code of what the user has started
    "one rank": ("distributed", "rank", signal.SIGUSR1, [1]),
    "one rank of Apex": ("apex", "rank", signal.SIGUSR1, [1]),
    "one rank of FSDP": ("fsdp", "rank", signal.SIGHUP, [1]),
    "one rank of Horovod": ("horovod", "rank", signal.SIGTERM, [1]),
    "one rank of mp.spawn": ("multiprocessing", "rank", signal.SIGUSR1, [75]),
    "torchrun": ("distributed", "launcher", signal.SIGTERM, [1]),
    "torchrun at the terminal": ("distributed", "group", signal.SIGINT, [1]),
    "torchrun loses its terminal": ("distributed", "group", signal.SIGHUP, [1]),
    "mp.spawn at the terminal": ("multiprocessing", "group", signal.SIGINT, [75]),
    # Ctrl-C ends tee too. A run that then prints finds nobody who reads, and still saves.
    "the only process, piped into tee": ("dataparallel", "group", signal.SIGINT, [75]),
    "torchrun, piped into tee": ("distributed", "group", signal.SIGINT, [1]),
    # Two threads of its helper wait for one process: the later one takes the exit code for 0.
    "horovodrun": ("horovod", "launcher", signal.SIGTERM, [0, 1]),
}
QUICK = ["torchrun at the terminal"]
# What they add is seen apart: each way, signal and launcher is in one of the others, or in
# test_slurm.py (SIGUSR1) and test_kubernetes.py (SIGTERM to torchrun). Apex's script has these
# lines of distributed.py: test_diffs.py.
BY_HAND = ["one rank of Apex", "one rank of mp.spawn", "torchrun", "torchrun loses its terminal"]
BY_HAND += ["torchrun, piped into tee", "horovodrun"]


def start_into_tee(name, folder, work):
    command = shlex.join(map(str, [*SCRIPTS[name][0], *FLAGS, "--checkpoint-dir", folder]))
    piped = f"trap : INT; {command} --checkpoint-freq 0 | tee; exit ${{PIPESTATUS[0]}}"
    return Job(["bash", "-c", piped], work, ONE_THREAD | SLOW)


@pytest.mark.parametrize("case", each(SIGNALS, QUICK, BY_HAND))
def test_a_signal_saves_and_stops(case, work, tmp_path):
    (name, who, number, codes), folder = SIGNALS[case], tmp_path / "c"
    piped = "tee" in case
    if piped:
        job = start_into_tee(name, folder, work)
    else:
        job = start(name, folder, work, "--checkpoint-freq", "0")
    at_step(job, 4)
    launcher, training, _ = processes(job)
    if who == "group":
        os.killpg(job.process.pid, number)
    else:
        os.kill(launcher if who == "launcher" else training[-1], number)
    code, output = job.wait(100)  # on two cores of its own 1 to 4 s
    assert "forcefully exiting" not in output  # torchrun's, which kills after 30 s
    assert code in codes and (piped or "saved: --resume auto goes on" in output), output
    state = load(folder)
    assert 4 <= state["epoch"] * 29 + state["step"] < 45
    assert not list(folder.glob("*.tmp"))
    if case in (
        "the only process, piped into tee",
        "one rank of FSDP",
    ):  # what the others save is the same
        ends_as_straight(name, folder, work)


@pytest.mark.full
def test_a_stop_that_is_seen_at_an_epochs_end_takes_effect_after_its_validation(work, tmp_path):
    """Nothing is printed, so nothing is agreed on, before the epoch's last step."""
    more = "--checkpoint-freq 0 --print-freq 1000".split()
    job = start("multiprocessing", tmp_path / "c", work, *more, env=SLOWER)
    job.wait_for("checkpoints go to")
    time.sleep(2)  # rank 0 has said this: the others may not have come so far
    os.kill(processes(job)[1][-1], signal.SIGTERM)
    output = job.finish(code=75)
    assert re.findall(r"^epoch (\S+ \[\S+)", output, re.M) == ["1/2 [29/29]"], output
    assert re.search("  new best  (?s:.*)\nstopped at the end of epoch 1, saved", output), output
    state = load(tmp_path / "c")
    assert (state["epoch"], state["step"]) == (1, 0) and len(rows(tmp_path / "c")) == 1


@pytest.mark.full
def test_a_launcher_killed_while_its_processes_start(work, tmp_path):
    """They have no request to be killed with it yet, and find it gone after their imports."""
    job = start("multiprocessing", tmp_path / "c", work)
    while processes(job)[1] == [job.process.pid]:
        time.sleep(0.02)
    job.process.kill()
    job.finish(code=-signal.SIGKILL)
    assert not (tmp_path / "c/checkpoint.pth").exists()
