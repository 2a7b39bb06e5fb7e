"""Runs that are killed end with the same weights to the bit; a folder belongs to one run."""

import os
import random
import re
import signal

import pytest
from conftest import HOROVODRUN, ONE_THREAD, Job, assert_close, each, load, rows, torchrun

from tests.launched import (
    FLAGS,
    SCRIPTS,
    SLOWER,
    SMOOTH,
    at_step,
    ends_as_straight,
    forked,
    processes,
    resume,
    resumed_where_it_stood,
    same_run,
    start,
    straight,
)

LAUNCHED = ["dataparallel", "distributed", "multiprocessing", "apex", "horovod", "fsdp"]


def leaked_shared_memory():
    """Files of torch, torch_PID_..., whose process is gone."""
    found = [(name, re.match(r"torch_(\d+)_", name)) for name in os.listdir("/dev/shm")]
    return {name for name, pid in found if pid and not os.path.exists(f"/proc/{pid[1]}")}


# Apex: tests/cluster/test_apex.py.
@pytest.mark.parametrize("name", each(LAUNCHED, ["distributed"], ["apex"]))
def test_killed_and_resumed_is_straight_through(name, work, tmp_path):
    """One worker, then the launcher; twice in one epoch, at steps that no seed chooses.

    FSDP's launcher is that of distributed.py, and nn.DataParallel has none: one kill.
    """
    folder = tmp_path / "c"
    job = start(name, folder, work, env=SLOWER)
    at_step(job, random.randrange(6, 9))
    os.kill(processes(job)[1][-1], signal.SIGKILL)
    assert job.wait(60)[0] != 0  # it fails for a process that is left
    first = load(folder)
    assert (first["epoch"], first["step"]) >= (0, 5)

    if name not in ("dataparallel", "fsdp"):
        job = start(name, folder, work, "--resume", "auto", env=SLOWER)
        output = at_step(job, random.randrange(17, 20))
        job.process.kill()
        assert resumed_where_it_stood(output, first), output
        job.wait(60)
        second = load(folder)
        assert second["epoch"] == 0 and second["step"] > first["step"]

    before = leaked_shared_memory()  # SIGKILL may come before torch has unlinked what it made
    ends_as_straight(name, folder, work)
    assert leaked_shared_memory() <= before


@pytest.mark.full
def test_a_folder_has_one_run_until_that_is_killed(work, tmp_path):
    """In the second epoch, with two workers. A run that is done says so, and writes nothing."""
    folder = tmp_path / "c"
    job = start("alone", folder, work, "-j", "2", env=SLOWER)
    at_step(job, 3, epoch=2)
    job.process.send_signal(signal.SIGSTOP)
    again = start("alone", folder, work, "--resume", "auto")  # as after a requeue
    error = f"error: another run is writing to {folder}: choose another --checkpoint-dir\n"
    assert again.finish(code=2) == error
    job.kill()
    job.wait(60)
    assert load(folder)["epoch"] == 1
    ends_as_straight("alone", folder, work, "-j", "2")
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*.pth")}
    assert "nothing left to train: 45 of 45 steps are done" in resume("alone", folder, work)
    assert before == {path: path.stat().st_mtime_ns for path in folder.glob("*.pth")}


@pytest.mark.soak
def test_a_checkpoint_goes_through_all_scripts(work, tmp_path):
    """Each goes on with what the one before left, with as many processes as it has.

    In short, and on what stands in for GPUs: tests/gpu/test_rehearsal.py.

    The same global batches, so the same weights but for the order of summation. With four
    processes even where nothing changes: DDP forms its buckets anew after the first backward.
    """
    names = [name for name in LAUNCHED if name != "horovod" or HOROVODRUN[0].exists()]
    commands = [SCRIPTS[name] for name in names]
    commands += [(torchrun(3, "fsdp_distributed.py"), {}), (torchrun(4), {})]
    folder = tmp_path / "c"
    for number, (command, env) in enumerate(commands, start=1):
        flags = [*FLAGS, *SMOOTH, "--checkpoint-dir", folder, "--resume", "auto", "--max-steps"]
        steps = 45 if number == len(commands) else 5 * number
        output = Job([*command, *flags, steps], work, ONE_THREAD | env).finish()
        place = "at epoch {} step {}".format(*divmod(5 * number + 24, 29))
        assert number == 1 or f"resumed from {folder}/checkpoint.pth {place}\n" in output, output
    assert "world_size 3 -> 4" in output and "global batch 48 = 4 x 12" in output
    assert_close(load(folder), load(straight("distributed", work, *SMOOTH)))


@pytest.mark.full
def test_torchrun_restarts_a_killed_worker_by_itself(work, tmp_path):
    command = [*torchrun(2, "distributed.py", "--max-restarts=3"), *FLAGS, "--resume", "auto"]
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # as in docs/recovery.md
    job = Job([*command, "--checkpoint-dir", tmp_path / "c"], work, ONE_THREAD | SLOWER | env)
    at_step(job, 13)
    os.kill(processes(job)[1][-1], signal.SIGKILL)
    output = job.finish()
    assert re.search(r"resumed from .* at epoch 1 step \d+", output), output
    same_run(tmp_path / "c", straight("distributed", work))


@pytest.mark.parametrize("name", each(["alone", "fsdp"]))
def test_an_epoch_that_only_lacks_its_validation(name, work, tmp_path):
    """Its row is that of a run without a stop, with the learning rate of the last step."""
    forked(name, tmp_path / "a", work, "--epochs", "1")
    trained = load(tmp_path / "a", "checkpoint.prev.pth")
    assert (trained["epoch"], trained["step"]) == (0, 29)
    more = ["--epochs", "1", "--resume", tmp_path / "a/checkpoint.prev.pth"]
    assert "epoch 1/1 [" not in forked(name, tmp_path / "b", work, *more)
    assert rows(tmp_path / "b", timings=False) == rows(tmp_path / "a", timings=False)
