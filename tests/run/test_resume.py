"""Runs that are killed, or find other files than they wrote, end with the same weights to the bit.

Or with an error, where going on would lose something.
"""

import os
import random
import re
import signal
import time

import pytest
from conftest import (
    ONE_THREAD,
    PYTHON,
    ROOT,
    SMALL,
    Job,
    assert_close,
    events,
    full,
    load,
    needs_horovod,
    python,
    rows,
    run,
    torchrun,
)

from tests import nets
from tests.launched import (
    FLAGS,
    finish,
    processes,
    resume,
    resumed_where_it_stood,
    same_run,
    start,
    straight,
)

IN_ROOT = {"PYTHONPATH": str(ROOT), **ONE_THREAD}
SOAK = [pytest.mark.soak, pytest.mark.timeout(7200)]
LAUNCHED = ["dataparallel", "distributed", "multiprocessing", "apex", "horovod", "fsdp"]


def leaked_shared_memory():
    """Files of torch, torch_PID_..., whose process is gone."""
    found = [(name, re.match(r"torch_(\d+)_", name)) for name in os.listdir("/dev/shm")]
    return {name for name, pid in found if pid and not os.path.exists(f"/proc/{pid[1]}")}


@pytest.mark.parametrize("name", [n if n == "distributed" else full(n) for n in LAUNCHED])
def test_killed_and_resumed_is_straight_through(name, work, tmp_path):
    """One worker, then the launcher; twice in one epoch, at steps that no seed chooses."""
    if name == "horovod":
        needs_horovod()
    folder = tmp_path / "c"
    job = start(name, folder, work)
    job.wait_for(rf"epoch 0 \[{random.randrange(6, 12)}/")
    os.kill(processes(job)[1][-1], signal.SIGKILL)
    assert job.wait(60)[0] != 0  # it fails for a process that is left
    first = load(folder)
    assert (first["epoch"], first["step"]) >= (0, 5)

    job = start(name, folder, work, "--resume", "auto")
    output = job.wait_for(rf"epoch 0 \[{random.randrange(17, 23)}/")
    assert resumed_where_it_stood(output, first), output
    os.kill(processes(job)[0], signal.SIGKILL)
    job.wait(60)
    second = load(folder)
    assert second["epoch"] == 0 and second["step"] > first["step"]

    before = leaked_shared_memory()  # SIGKILL may come before torch has unlinked what it made
    output = resume(name, folder, work)
    assert resumed_where_it_stood(output, second), output
    same_run(folder, straight(name, work))
    assert leaked_shared_memory() <= before


@pytest.mark.parametrize(("workers", "epoch"), [full("0", 0), ("2", 1)])
def test_all_killed_with_any_number_of_workers(workers, epoch, work, tmp_path):
    """In the second epoch too. A run that is done says so, and writes nothing."""
    folder, more = tmp_path / "c", ["-j", workers]
    job = start("alone", folder, work, *more)
    job.wait_for(rf"epoch {epoch} \[{3 if epoch else 13}/")
    job.kill()
    job.wait(60)
    state = load(folder)
    assert state["epoch"] == epoch and bool(state["step"]) != epoch  # 1: the one of epoch 0's end
    output = resume("alone", folder, work, *more)
    assert resumed_where_it_stood(output, state), output
    same_run(folder, straight("alone", work))
    if epoch:
        before = {path: path.stat().st_mtime_ns for path in folder.glob("*.pth")}
        output = resume("alone", folder, work, *more)
        assert "nothing left to train: 45 of 45 steps are done" in output
        assert before == {path: path.stat().st_mtime_ns for path in folder.glob("*.pth")}


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sample", [True, pytest.param(False, marks=SOAK)])
def test_soak_of_kills(sample, work, tmp_path):
    """Any script, any victim, thrice: while it starts, at any line, or soon after one.

    As a soak 36 such runs: about a hundred kills.
    """
    for number in range(1 if sample else 36):
        name = "multiprocessing" if sample else LAUNCHED[number % len(LAUNCHED)]
        if name == "horovod":
            needs_horovod()
        folder, kills = tmp_path / str(number), []
        while len(kills) < 3:
            more = ["-j", random.choice("012")]
            more += ["--resume", "auto"] if folder.exists() else []
            job = start(name, folder, work, *more)
            lines = random.choice([0, random.randrange(1, 25)])
            for _ in range(lines):
                if not job.line(time.monotonic() + 60):
                    break  # it has come to its end
            time.sleep(random.uniform(0, 0.5 if lines else 6))
            launcher, *groups = processes(job)
            victim = random.choice([[launcher], groups[0][:1], groups[0][-1:], groups[1][:1]])
            if job.process.poll() is None and victim:
                os.kill(victim[0], signal.SIGKILL)
                kills.append(f"{'launcher' if victim == [launcher] else 'other'} after {lines}")
            elif job.process.poll() is not None and kills:
                break  # it has come to its end
            else:
                job.kill()
            job.wait(200)  # torchrun's orphans end after 77 s, on an idle machine
        print(f"{name}: {kills}")
        finish(start(name, folder, work, "--resume", "auto"))
        same_run(folder, straight(name, work))


# Names each call of the functions that write files, and kills its process before the n-th.
KILLER = """
import os, sys
calls, main = 0, os.getpid()

def counted(name, function):
    def count(*args):
        global calls
        calls += os.getpid() == main
        if calls == int(os.environ["KILL_AT"]):
            os.kill(main, 9)
        path = os.readlink(f"/proc/self/fd/{args[0]}") if name == "fsync" else args[-1]
        print("call", name, os.path.basename(path), flush=True)
        return function(*args)
    setattr(os, name, count)

for name in ("fsync", "link", "replace", "remove", "rename"):
    counted(name, getattr(os, name))
import distributed
sys.exit(distributed.main())
"""


@pytest.mark.parametrize("sample", [True, pytest.param(False, marks=SOAK)])
def test_killed_between_the_files_of_a_checkpoint(sample, work, tmp_path):
    """Before a validation, which alone is done again.

    As a soak: at every moment of a run that saves thrice.
    """
    command = [PYTHON, "-c", KILLER, *FLAGS, "--max-steps", "31", "--checkpoint-freq", "0"]
    command += ["--tensorboard", "--checkpoint-dir"]
    output = run([*command, tmp_path / "a"], work, env=IN_ROOT | {"KILL_AT": "0"})
    calls = re.findall(r"^call (.*)", output, re.M)
    synced = [call for call in calls if re.fullmatch(r"fsync checkpoint\.pth\.\d+\.tmp", call)]
    assert calls.count("replace checkpoint.pth") == len(synced) == 3
    trained = calls.index("replace checkpoint.pth") + 1
    for at in [trained + 1] if sample else range(1, len(calls) + 1):
        folder = tmp_path / str(at)
        assert Job([*command, folder], work, IN_ROOT | {"KILL_AT": str(at)}).wait(60)[0] == -9
        again = [*command, folder, "--resume", "auto"]
        if sample:
            assert (load(folder)["epoch"], load(folder)["step"]) == (0, 29)
            # Without an epoch left: what is known of the training alone is enough for the line.
            output = run([*again, "--epochs", "1"], work, env=IN_ROOT | {"KILL_AT": "0"})
            assert output.count(" * loss ") == 1 and "epoch 0 [" not in output, output
            (row,) = rows(folder)
            assert row.get("images_per_second") is row.get("data_time") is None
            shown = events(folder / "tensorboard")
            assert max(shown["train/loss"]) == max(shown["epoch/acc1"]) == 29
        output = run(again, work, env=IN_ROOT | {"KILL_AT": "0"})
        assert not sample or re.findall(r"^epoch (\d \S+)", output, re.M) == ["1 [1/2]", "1 [2/2]"]
        same_run(folder, tmp_path / "a")


@pytest.mark.full
def test_the_number_of_processes_and_the_script_may_change(work, tmp_path):
    """The same global batches, so the same weights but for the order of summation.

    With four processes even where nothing changes: DDP forms its buckets anew after the first
    backward, and sums are then taken in another order.
    """
    flags = [*FLAGS, "--arch", "tests.nets:smooth", "--checkpoint-freq", "1"]
    run([*torchrun(2), *flags, "--checkpoint-dir", tmp_path / "a"], work, env=ONE_THREAD)
    flags += ["--checkpoint-dir", tmp_path / "b", "--resume", "auto", "--max-steps"]
    run([*torchrun(2, "fsdp_distributed.py"), *flags, 12], work, env=ONE_THREAD)
    output = run([*python("dataparallel.py"), *flags, 21], work, env=ONE_THREAD)
    assert "world_size 2 -> 1" in output
    job = Job([*torchrun(4), *flags, 45], work, ONE_THREAD)
    job.wait_for(r"epoch 1 \[4/")
    job.kill()
    job.wait(60)
    state = load(tmp_path / "b")
    assert set(state["state_dict"]) == set(nets.smooth(10).state_dict())
    output = run([*torchrun(4), *flags, 45], work, env=ONE_THREAD)
    assert "global batch 48 = 4 x 12" in output and resumed_where_it_stood(output, state), output
    assert_close(load(tmp_path / "a"), load(tmp_path / "b"))
    losses = [rows(tmp_path / name)[-1]["train_loss"] for name in "ab"]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.full
def test_torchrun_restarts_a_killed_worker_by_itself(work, tmp_path):
    command = [*torchrun(2, "distributed.py", "--max-restarts=3"), *FLAGS, "--resume", "auto"]
    job = Job([*command, "--checkpoint-dir", tmp_path / "c"], work, ONE_THREAD)
    job.wait_for(r"epoch 0 \[13/")
    os.kill(processes(job)[1][-1], signal.SIGKILL)
    output = finish(job)
    assert re.search(r"resumed from .* at epoch 0 step \d+", output), output
    same_run(tmp_path / "c", straight("distributed", work))


@pytest.mark.full
def test_a_damaged_checkpoint_is_named_once_and_the_previous_one_taken(work, tmp_path):
    folder = tmp_path / "c"
    finish(start("distributed", folder, work, "--max-steps", "10"))
    damaged = (folder / "checkpoint.pth").read_bytes()[:-100]
    (folder / "checkpoint.pth").write_bytes(damaged)
    output = finish(start("distributed", folder, work, "--resume", "auto"))
    assert output.count(f"{folder}/checkpoint.pth is damaged (") == 1
    assert f"resumed from {folder}/checkpoint.prev.pth at epoch 0 step 5" in output
    (kept,) = folder.glob("checkpoint.damaged*.pth")
    assert kept.read_bytes() == damaged
    kept.unlink()
    same_run(folder, straight("distributed", work))


# Waits where HOLD says, once "go" is there: after the checkpoint was read, or before the lock.
LATE = """
import os, sys, time
import fcntl, torch, distributed

def held(owner, name, after):
    function = getattr(owner, name)
    def wait(*args, **kwargs):
        result = function(*args, **kwargs) if after else None
        print("held", flush=True)
        setattr(owner, name, function)
        while not os.path.exists(os.environ["GO"]):
            time.sleep(0.1)
        return result if after else function(*args, **kwargs)
    setattr(owner, name, wait)

held(*{"read": (torch, "load", True), "lock": (fcntl, "lockf", False)}[os.environ["HOLD"]])
sys.exit(distributed.main())
"""


@pytest.mark.parametrize("hold", [full("read"), "lock"])
def test_a_run_that_is_late_takes_no_checkpoint_back(hold, work, tmp_path):
    """Two runs are started in one folder. What the other has trained meanwhile stays."""
    folder, go = tmp_path / "c", tmp_path / "go"
    flags = [*SMALL, "-j", "0", "--checkpoint-dir", folder, "--resume", "auto", "--max-steps"]
    run([*python(), *flags, "10"], work)
    env = IN_ROOT | {"HOLD": hold, "GO": str(go)}
    late = Job([PYTHON, "-c", LATE, *flags, "31"], work, env)
    late.wait_for("^held$")
    other = Job([*python(), *flags, "30"], work)
    code, output = other.wait(60)
    between = load(folder)
    go.touch()
    late_code, late_output = late.wait(60)
    assert late_code == 0, late_output
    if code == 2:  # the late one has the folder already
        assert output == f"error: another run is writing to {folder}: choose another " + (
            "--checkpoint-dir\n"
        )
        assert (between["epoch"], between["step"]) == (0, 10)
    else:
        assert (code, between["epoch"], between["step"]) == (0, 1, 1)
        assert "at epoch 1 step 1" in late_output
    assert (load(folder)["epoch"], load(folder)["step"]) == (1, 2)
    assert [row["step"] for row in rows(folder)] == ([10, 0, 2] if code else [10, 0, 1, 2])


def test_a_folder_in_use(work, tmp_path):
    """Refused as long as it is; free again when that run was killed."""
    flags = [*SMALL, "--epochs", "500", "-j", "0", "--checkpoint-freq", "5", "--checkpoint-dir"]
    command = [*python(), *flags, tmp_path / "c", "--resume", "auto"]  # as after a requeue
    job = Job(command, work)
    job.wait_for(r"epoch 0 \[10/")
    error = f"error: another run is writing to {tmp_path}/c: choose another --checkpoint-dir\n"
    assert run(command, work, code=2, timeout=60) == error
    assert job.process.poll() is None and list(tmp_path.iterdir()) == [tmp_path / "c"]
    job.kill()
    job.wait(20)
    assert "nothing left to train" in run([*command, "--max-steps", "1"], work)


CHANGED = """
import sys, torch, distributed
from torch import nn
from tests import nets

def adamw(params, lr, momentum, weight_decay, fused):
    return torch.optim.AdamW(params, lr, weight_decay=weight_decay)

def head(num_classes, plain=nets.plain):
    return nn.Sequential(plain(num_classes), nn.Linear(num_classes, num_classes))

if sys.argv.pop(1) == "optimizer":
    torch.optim.SGD = adamw
else:
    nets.plain = head
sys.exit(distributed.main())
"""


@pytest.mark.parametrize("changed", ["optimizer", full("model")])
def test_another_optimizer_or_model_is_refused(changed, work, tmp_path):
    """In one line, before anything in the folder is touched: also rows without a checkpoint."""
    folder = tmp_path / "c"
    flags = [*SMALL, "-j", "0", "--checkpoint-dir", folder, "--resume", "auto", "--max-steps"]
    run([*python(), *flags, "3"], work)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 1, "step": 0}\n')  # of an epoch whose checkpoint was not written
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    output = run([PYTHON, "-c", CHANGED, changed, *flags, "5"], work, env=IN_ROOT, code=2)
    assert output.startswith("error: ") and output.count("\n") == 1, output
    assert str(folder / "checkpoint.pth") in output
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


NODES = """
import os, sys, distributed
sys.argv += ["--checkpoint-dir", sys.argv.pop(1) + "/" + "cd"[int(os.environ["RANK"])]]
sys.exit(distributed.main())
"""


@pytest.mark.full
def test_processes_that_would_resume_from_different_files(work, tmp_path):
    """Two nodes with disks of their own: one process finds a checkpoint and one does not."""
    run([*python(), *SMALL, "--max-steps", "2", "--checkpoint-dir", tmp_path / "c"], work)
    (tmp_path / "node.py").write_text(NODES)
    command = [*torchrun(2, tmp_path / "node.py"), tmp_path, *SMALL, "--resume", "auto"]
    output = run(command, work, env=IN_ROOT, code=1)
    (line,) = re.findall("^error: .*", output, re.M)
    assert "the checkpoint to resume from of rank 1 differs from rank 0's" in line, line
    assert "global batch" not in output  # nothing was trained
