"""Nothing is lost: processes are killed, stopped and cut off; the run ends with the same weights.

A run is compared with the uninterrupted one to the bit: weights, buffers, momentum, meters, the
best accuracy and every line of metrics.jsonl but for its timings.
"""

import functools
import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import (
    HOROVODRUN,
    PYTHON,
    ROOT,
    Forked,
    Job,
    events,
    forked,
    full,
    load,
    needs_horovod,
    rows,
    run,
    same_state,
    torchrun,
)

from tests import nets
from tests.hosts import Hosts, needs_hosts

# BatchNorm and dropout, 29 steps an epoch, over the end of an epoch; a checkpoint at 5, 10, ...
FLAGS = "--arch tests.nets:normed --image-size 24 --batch-size 48 --epochs 2 -p 1".split()
FLAGS += "--checkpoint-freq 5 --max-steps 45 -j 1".split()
SOAK = [pytest.mark.soak, pytest.mark.timeout(7200)]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
PLAIN_END = {"PLAIN_END": "1"}  # see tests/start/sitecustomize.py
SPAWN = [PYTHON, ROOT / "multiprocessing_distributed.py", "--nprocs=2"]
DOUBLE = {"PYTHONPATH": str(ROOT / "tests/apex_doubles/today")}
# How each script is started with two processes; Slurm's has tests of its own, on a cluster.
SCRIPTS = {
    "dataparallel": ([PYTHON, ROOT / "dataparallel.py"], {}),
    "distributed": (torchrun(2), {}),
    "multiprocessing": (SPAWN, {}),
    "apex": ([*torchrun(2, "apex_distributed.py"), "--precision", "fp32"], DOUBLE),
    "horovod": ([*HOROVODRUN, ROOT / "horovod_distributed.py"], {}),
    "fsdp": (torchrun(2, "fsdp_distributed.py"), {}),
    # Where how it is started is not the point.
    "one": (forked("dataparallel.py"), {}),
    "two": (forked("distributed.py", ranks=2), {}),
    "parts": (forked("fsdp_distributed.py", ranks=2), {}),
}
# Who computes the same sums: one process adds in another order than two, and FSDP's kernels do.
ALONE = {"dataparallel": "one", "one": "one", "fsdp": "parts"}
LAUNCHED = ["dataparallel", "distributed", "multiprocessing", "apex", "horovod", "fsdp"]


def start(name, folder, work, *more):
    command, env = SCRIPTS[name]
    return Job([*command, *FLAGS, "--checkpoint-dir", folder, *more], work, {**ONE_THREAD, **env})


def finish(job, code=0, timeout=120):
    returned, output = job.wait(timeout)
    assert returned == code, output
    return output


def cmdline(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def parent(pid):
    try:
        return int(re.search(r"^PPid:\t(\d+)", Path(f"/proc/{pid}/status").read_text(), re.M)[1])
    except OSError:
        return 0


def processes(job):
    """(the launcher, the training processes, the loader workers) of a job, as pids."""
    pids = job.pids()
    if isinstance(job.process, Forked):
        launcher = job.process.pid
        training = [p for p in pids if parent(p) == launcher] if job.process.args[1] > 1 else []
        workers = [p for p in pids if p not in (launcher, *training)]
        return launcher, training or [launcher], workers
    script = [p for p in pids if re.search(r"\.py |spawn_main", cmdline(p))]
    script = [p for p in script if not re.search("torch.distributed|horovodrun", cmdline(p))]
    script = [p for p in script if not re.search("resource_tracker|bash|sh -c", cmdline(p))]
    # A loader worker is a fork of a training process, with its command line.
    workers = [p for p in script if cmdline(parent(p)) == cmdline(p)]
    training = [p for p in script if p not in workers and p != job.process.pid]
    return job.process.pid, training or [job.process.pid], workers


def same_run(folder, reference):
    for name in ("checkpoint.pth", "model_best.pth"):
        assert same_state(load(folder, name), load(reference, name))
    assert rows(folder, timings=False) == rows(reference, timings=False)
    assert sorted(os.listdir(folder)) == sorted(os.listdir(reference))  # no temporary file


def leaked_shared_memory():
    """Files of torch, torch_PID_..., whose process is gone."""
    found = [(name, re.match(r"torch_(\d+)_", name)) for name in os.listdir("/dev/shm")]
    return [name for name, pid in found if pid and not Path(f"/proc/{pid[1]}").exists()]


@pytest.fixture(scope="module")
def straight(work):
    """The folder of a run without a fault, with as many processes as that script has here."""

    @functools.cache
    def folder(name):
        finish(start(name, work / f"straight-{name}", work))
        return work / f"straight-{name}"

    return lambda name: folder(ALONE.get(name, "two"))


def resume(name, folder, work, *more):
    """The rest of a run of any script, by a cheap one: it goes on to the same end."""
    return finish(start(ALONE.get(name, "two"), folder, work, "--resume", "auto", *more))


def resumed_where_it_stood(output, state):
    """Whether it says so, and its first step is indeed the next one."""
    place = f"at epoch {state['epoch']} step {state['step']}"
    following = divmod(state["epoch"] * 29 + state["step"], 29)  # that of 29 had only no validation
    first = re.search(r"^(?:\[0\]<stdout>:)?epoch (\d+) \[(\d+)/", output, re.M)
    goes_on = first and (int(first[1]), int(first[2]) - 1) == following
    return goes_on and re.search(f"resumed from .*/checkpoint.pth {place}", output)


def kill_and_go_on(name, victims, moment, folder, work, more=()):
    """SIGKILL processes of a run once a line matches; then resume it to the end."""
    job = start(name, folder, work, *more)
    job.wait_for(moment)
    launcher, training, _ = processes(job)
    killed = {"worker": training[-1:], "all": [*training, launcher], "launcher": [launcher]}
    for pid in killed[victims]:
        os.kill(pid, signal.SIGKILL)
    code, output = job.wait(60)  # fails for a process that is left
    assert code != 0
    state = load(folder)
    output = resume(name, folder, work, *more)
    assert resumed_where_it_stood(output, state), output
    return state


@pytest.mark.parametrize("name", [n if n == "distributed" else full(n) for n in LAUNCHED])
def test_killed_and_resumed_is_straight_through(name, work, straight, tmp_path):
    """One worker, then the launcher; twice in one epoch, at steps that no seed chooses."""
    if name == "horovod":
        needs_horovod()
    folder = tmp_path / "c"
    job = start(name, folder, work)
    job.wait_for(rf"epoch 0 \[{random.randrange(6, 12)}/")
    os.kill(processes(job)[1][-1], signal.SIGKILL)
    code, output = job.wait(60)
    assert code != 0
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
    same_run(folder, straight(name))
    assert set(leaked_shared_memory()) <= set(before)


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
    assert code == -signal.SIGKILL and not (tmp_path / "c").exists(), output


@pytest.mark.parametrize(("workers", "epoch"), [("0", 0), ("2", 0), ("0", 1)])
def test_all_killed_with_any_number_of_workers(workers, epoch, work, straight, tmp_path):
    more, moment = ["-j", workers], rf"epoch {epoch} \[{3 if epoch else 13}/"
    state = kill_and_go_on("two", "all", moment, tmp_path / "c", work, more)
    assert state["epoch"] == epoch and bool(state["step"]) != epoch  # 1: the one of epoch 0's end
    same_run(tmp_path / "c", straight("two"))


@pytest.mark.full
def test_four_processes_end_within_rounding(work, tmp_path):
    """DDP forms its buckets anew after the first backward: sums are taken in another order."""
    command = [*forked(ranks=4), *FLAGS, "--checkpoint-dir"]
    run([*command, tmp_path / "a"], work, env=ONE_THREAD)
    job = Job([*command, tmp_path / "b"], work, ONE_THREAD)
    job.wait_for(r"epoch 0 \[18/")
    os.kill(processes(job)[1][1], signal.SIGKILL)
    assert job.wait(60)[0] != 0
    state = load(tmp_path / "b")
    output = run([*command, tmp_path / "b", "--resume", "auto"], work, env=ONE_THREAD)
    assert state["epoch"] == 0 and resumed_where_it_stood(output, state), output
    a, b = load(tmp_path / "a"), load(tmp_path / "b")
    for key, weight in a["state_dict"].items():
        torch.testing.assert_close(weight, b["state_dict"][key], atol=1e-5, rtol=1e-4)
    assert (a["epoch"], a["step"]) == (b["epoch"], b["step"])
    losses = [row["train_loss"] for name in "ab" for row in rows(tmp_path / name)]
    assert len(losses) == 4 and losses[:2] == pytest.approx(losses[2:], abs=1e-5)


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

for name in ("fsync", "link", "replace", "remove"):
    counted(name, getattr(os, name))
import distributed
sys.exit(distributed.main())
"""


@pytest.mark.parametrize("sample", [True, pytest.param(False, marks=SOAK)])
def test_killed_between_the_files_of_a_checkpoint(sample, work, tmp_path):
    """Before a validation and after it. As a soak: at every moment of a run that saves thrice."""
    script = tmp_path / "killer.py"
    script.write_text(KILLER)
    command = [*forked(script), *FLAGS, "--max-steps", "31", "--checkpoint-freq", "0"]
    command += ["--checkpoint-dir"]
    env = {"PYTHONPATH": str(ROOT), **ONE_THREAD}
    output = run([*command, tmp_path / "a"], work, env=env | {"KILL_AT": "0"})
    calls = re.findall(r"^call (.*)", output, re.M)
    trained = calls.index("replace checkpoint.pth") + 1
    best = calls.index("replace model_best.pth") + 1
    synced = [call for call in calls if re.fullmatch(r"fsync checkpoint\.pth\.\d+\.tmp", call)]
    assert calls.count("replace checkpoint.pth") == len(synced) == 3
    committed = calls.index("replace checkpoint.pth", best) + 1
    assert calls[best] == "fsync metrics.jsonl"
    assert "replace checkpoint.prev.pth" in calls[best:committed]
    sampled = (trained + 1, best + 1, best + 2, committed)
    for at in sampled if sample else range(1, len(calls) + 1):
        folder = tmp_path / str(at)
        assert Job([*command, folder], work, {**env, "KILL_AT": str(at)}).wait(60)[0] == -9
        found = [p.name for p in folder.glob("*")]
        assert "checkpoint.pth" in found or "checkpoint.prev.pth" not in found
        if sample:
            assert (load(folder)["epoch"], load(folder)["step"]) == (0, 29)
        if sample and at > best:  # these are of the validated epoch already
            assert load(folder, "model_best.pth")["epoch"] == rows(folder)[0]["epoch"] == 1
        again, env = [*command, folder, "--resume", "auto"], env | {"KILL_AT": "0"}
        if sample:
            output = run([*again, "-e"], work, env=env)
            assert output.count(" * loss ") == 1 and "epoch 0 [" not in output, output
        output = run(again, work, env=env)
        assert not sample or re.findall(r"^epoch (\d \S+)", output, re.M) == ["1 [1/2]", "1 [2/2]"]
        same_run(folder, tmp_path / "a")


def test_killed_in_a_validation_that_alone_is_done_again(work, straight, tmp_path):
    """Also when no epoch is left, and with what was known of the training alone."""
    (tmp_path / "killer.py").write_text(KILLER)
    command = [*forked(tmp_path / "killer.py"), *FLAGS, "--checkpoint-freq", "0", "--tensorboard"]
    command += ["--resume", "auto", "--checkpoint-dir", tmp_path / "c"]
    env = {"PYTHONPATH": str(ROOT), **ONE_THREAD}
    assert Job(command, work, env | {"KILL_AT": "5"}).wait(60)[0] == -9
    assert (load(tmp_path / "c")["epoch"], load(tmp_path / "c")["step"]) == (0, 29)
    output = run([*command, "--epochs", "1"], work, env=env | {"KILL_AT": "0"})
    assert output.count(" * loss ") == 1 and "epoch 0 [" not in output, output
    (row,) = rows(tmp_path / "c")
    assert row.get("images_per_second") is row.get("data_time") is None
    reference = straight("one")
    assert rows(tmp_path / "c", timings=False) == rows(reference, timings=False)[:1]
    shown = events(tmp_path / "c/tensorboard")
    assert max(shown["train/loss"]) == max(shown["epoch/acc1"]) == 29


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("round", range(36))
def test_soak_of_kills(round, work, straight, tmp_path):
    """Any script, any victim, three times: while it starts, at any line, or soon after one."""
    name = LAUNCHED[round % len(LAUNCHED)]
    if name == "horovod":
        needs_horovod()
    folder, kills = tmp_path / "c", []
    while len(kills) < 3:
        more = ["-j", random.choice("012"), *(["--resume", "auto"] if folder.exists() else [])]
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
            kills.append(f"{'launcher' if victim == [launcher] else 'other'} after {lines} lines")
        elif job.process.poll() is not None and kills:
            break  # it has come to its end
        else:
            job.kill()
        job.wait(200)  # torchrun's orphans end after 77 s, on an idle machine
    print(f"{name}: {kills}")
    finish(start(name, folder, work, "--resume", "auto"))
    same_run(folder, straight(name))


def test_torchrun_restarts_a_killed_worker_by_itself(work, straight, tmp_path):
    command = [*torchrun(2)[:-1], "--max-restarts=3", torchrun(2)[-1], *FLAGS, "--resume", "auto"]
    job = Job([*command, "--checkpoint-dir", tmp_path / "c"], work, ONE_THREAD)
    job.wait_for(r"epoch 0 \[13/")
    os.kill(processes(job)[1][-1], signal.SIGKILL)
    output = finish(job)
    assert re.search(r"resumed from .* at epoch 0 step \d+", output), output
    same_run(tmp_path / "c", straight("distributed"))


def test_a_rank_that_does_not_come_back_after_a_restart_is_missed():
    """The store still has the number that its predecessor left."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("id 1", "of the dead")
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    env["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    code = "from common.rendezvous import restart_safe_store; restart_safe_store(0, 2, 1)"
    output = run([*forked("-c"), code], ROOT, timeout=60, env=env, code=1)
    assert output.endswith("TimeoutError: no sign of rank 1 for 1 s\n")


SIGNALS = {
    # who gets it, which signal, and the exit code of what the user has started
    "one rank": ("distributed", "rank", signal.SIGTERM, 1),
    "one rank of mp.spawn": ("multiprocessing", "rank", signal.SIGUSR1, 75),
    "torchrun": ("distributed", "launcher", signal.SIGTERM, 1),
    "torchrun at the terminal": ("distributed", "group", signal.SIGINT, 1),
    "mp.spawn's parent": ("multiprocessing", "launcher", signal.SIGTERM, 75),
    "mp.spawn's parent alone": ("multiprocessing", "launcher", signal.SIGINT, 75),
    "mp.spawn at the terminal": ("multiprocessing", "group", signal.SIGINT, 75),
    "the only process": ("dataparallel", "launcher", signal.SIGUSR1, 75),
    "the only process at the terminal": ("dataparallel", "group", signal.SIGINT, 75),
    "the only process loses its terminal": ("dataparallel", "launcher", signal.SIGHUP, 75),
    "mp.spawn loses its terminal": ("multiprocessing", "group", signal.SIGHUP, 75),
    "torchrun loses its terminal": ("distributed", "group", signal.SIGHUP, 1),
    # Two threads of its helper wait for one process: the later one takes the exit code for 0.
    "horovodrun": ("horovod", "launcher", signal.SIGTERM, (0, 1)),
}


QUICK = ["torchrun at the terminal", "the only process"]


@pytest.mark.parametrize("case", [case if case in QUICK else full(case) for case in SIGNALS])
def test_a_signal_saves_and_stops(case, work, straight, tmp_path):
    name, who, number, expected = SIGNALS[case]
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
    assert code in (expected if isinstance(expected, tuple) else (expected,)), output
    state = load(tmp_path / "c")
    assert 4 <= state["epoch"] * 29 + state["step"] < 45
    assert "saved: --resume auto goes on" in output
    output = resume(name, tmp_path / "c", work, "--checkpoint-freq", "0")
    assert resumed_where_it_stood(output, state), output
    same_run(tmp_path / "c", straight(name))


@pytest.mark.parametrize("name", ["dataparallel", full("multiprocessing")])
def test_under_nohup_a_run_outlives_its_terminal(name, work, straight, tmp_path):
    """Not under torchrun, which stops for this signal even then: its processes save and stop."""
    command, env = SCRIPTS[name]
    command = ["nohup", *command, *FLAGS, "--checkpoint-dir", tmp_path / "c"]
    job = Job(command, work, ONE_THREAD | env)
    job.wait_for(r"epoch 0 \[4/")
    os.killpg(job.process.pid, signal.SIGHUP)
    output = finish(job)
    assert "stopped" not in output and len(rows(tmp_path / "c")) == 2
    same_run(tmp_path / "c", straight(name))


@pytest.mark.full
def test_a_stop_during_validation_takes_effect_after_it(work, straight, tmp_path):
    job = start("multiprocessing", tmp_path / "c", work, "--checkpoint-freq", "0")
    job.wait_for(r"epoch 0 \[4/")
    training = processes(job)[1]
    job.wait_for(r"epoch 0 \[29/29\]")  # what comes next is the validation
    os.kill(training[-1], signal.SIGTERM)
    code, output = job.wait(30)
    assert code == 75 and output.index(" * loss ") < output.index("stopped at epoch 1 step "), (
        output
    )
    state = load(tmp_path / "c")
    assert state["epoch"] == rows(tmp_path / "c")[0]["epoch"] == 1 and 1 <= state["step"] < 10
    resume("multiprocessing", tmp_path / "c", work)
    same_run(tmp_path / "c", straight("multiprocessing"))


@pytest.mark.full
def test_a_stop_that_is_seen_at_an_epochs_end_takes_effect_after_it(work, straight, tmp_path):
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
    resume("multiprocessing", tmp_path / "c", work)
    same_run(tmp_path / "c", straight("multiprocessing"))


def test_an_evaluation_is_stopped_at_once(work, tmp_path):
    """It has nothing to save."""
    long = ["--arch", "resnet18", "--image-size", "224", "--evaluate"]
    job = start("one", tmp_path / "c", work, *long)
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


@pytest.mark.full
def test_the_number_of_processes_may_change(work, tmp_path):
    """2, 1, 4: the same global batches, so the same weights but for the order of summation."""
    plain = [*FLAGS, "--arch", "tests.nets:plain", "--max-steps"]
    run([*forked(ranks=2), *plain, "45", "--checkpoint-dir", tmp_path / "a"], work, env=ONE_THREAD)
    for processes, steps in ((2, 12), (1, 21), (4, 45)):
        command = [*forked(ranks=processes), *plain, steps, "--checkpoint-dir", tmp_path / "b"]
        output = run([*command, "--resume", "auto"], work, env=ONE_THREAD)
        assert f"global batch 48 = {processes} x {48 // processes}" in output
        if steps == 21:
            assert "  changed: world_size 2 -> 1, same global batches" in output
    a, b = load(tmp_path / "a"), load(tmp_path / "b")
    for key, weight in a["state_dict"].items():
        torch.testing.assert_close(weight, b["state_dict"][key], atol=1e-5, rtol=1e-4)
    losses = [rows(tmp_path / name)[-1]["train_loss"] for name in "ab"]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.parametrize("count", [2, pytest.param(100, marks=SOAK)])
def test_good_runs_end_well(count, work, tmp_path):
    command = [*torchrun(2), *FLAGS, "--max-steps", "3", "--checkpoint-dir"]
    for number in range(count):
        output = run([*command, tmp_path / str(number)], work, env=ONE_THREAD | PLAIN_END)
        assert not re.search("warn|abort|terminate|Traceback", output, re.I), output


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of 400 KB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.getuid() != 0:
        pytest.skip("needs root to mount a small disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "none", folder], check=True)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_leaves_the_old_checkpoint(small_disk, work):
    folder = small_disk / "c"
    finish(start("two", folder, work, "--max-steps", "5"))
    before = load(folder)
    room, filler = shutil.disk_usage(small_disk).free, small_disk / "filler"
    subprocess.run(["fallocate", "-l", str(room - 8192), filler], check=True)
    for name in ("two", "one"):
        output = finish(start(name, folder, work, "--resume", "auto"), code=1)
        where = r"rank 0 failed at epoch 0 step 10: cannot write .*/checkpoint.pth: .*No space left"
        assert re.search(where, output), output
        assert same_state(load(folder), before) and not list(folder.glob("*.tmp"))
    filler.unlink()
    resume("two", folder, work)
    assert load(folder)["epoch"] == 1


@pytest.mark.parametrize("name", ["one", "two"])
def test_a_folder_that_is_deleted_under_a_run(name, work, tmp_path):
    """It does not say that the checkpoint before is still there."""
    job = start(name, tmp_path / "c", work)
    job.wait_for(r"epoch 0 \[6/")
    shutil.rmtree(tmp_path / "c")
    output = finish(job, code=1)
    path = tmp_path / "c/checkpoint.pth"
    (said,) = re.findall(r"rank 0 failed at epoch 0 step \d+: (.*)", output)
    assert said.startswith(f"cannot write {path}: ") and "untouched" not in said
    assert not (tmp_path / "c").exists()


def test_a_folder_that_cannot_be_written(work, tmp_path):
    """Root may write everywhere but on a disk that is mounted read-only."""
    if os.getuid() != 0:
        pytest.skip("needs root to mount a read-only disk")
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", folder], check=True)
    try:
        for path in (folder, folder / "deeper"):
            output = finish(start("one", path, work), code=2)
            assert output.startswith("error: ") and "Read-only file system" in output
            assert output.count("\n") == 1
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_damaged_checkpoint_is_named_once_and_the_previous_one_taken(work, straight, tmp_path):
    folder = tmp_path / "c"
    finish(start("two", folder, work, "--max-steps", "10"))
    damaged = (folder / "checkpoint.pth").read_bytes()[:-100]
    (folder / "checkpoint.pth").write_bytes(damaged)
    output = finish(start("two", folder, work, "--resume", "auto", "--max-steps", "5"))
    assert output.count(f"{folder}/checkpoint.pth is damaged (") == 1
    assert f"resumed from {folder}/checkpoint.prev.pth at epoch 0 step 5" in output
    # It has saved nothing; but the next save must not put the damaged one in the place of this.
    names = ("checkpoint.pth", "checkpoint.prev.pth")
    assert same_state(*(load(folder, name) for name in names))
    output = finish(start("two", folder, work, "--resume", "auto"))
    assert resumed_where_it_stood(output, {"epoch": 0, "step": 5}), output
    (kept,) = folder.glob("checkpoint.damaged*.pth")
    assert kept.read_bytes() == damaged
    kept.unlink()
    same_run(folder, straight("two"))


def test_both_checkpoints_damaged(work, tmp_path):
    folder = tmp_path / "c"
    finish(start("one", folder, work, "--max-steps", "10"))
    for name in ("checkpoint.pth", "checkpoint.prev.pth"):
        (folder / name).write_bytes((folder / name).read_bytes()[:-100])
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    output = finish(start("one", folder, work, "--resume", "auto"), code=2)
    assert output.startswith("error: ") and output.count(" is damaged ") == 2
    assert output.count("\n") == 1
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


class Command:
    def __init__(self, line):
        self.line = line

    def __reduce__(self):
        return os.system, (self.line,)


def test_a_checkpoint_with_code_is_refused(work, tmp_path):
    folder, ran = tmp_path / "c", tmp_path / "ran"
    folder.mkdir()
    torch.save({"args": Command(f"touch {ran}")}, folder / "checkpoint.pth")
    torch.load(folder / "checkpoint.pth", weights_only=False)
    ran.unlink()  # it would have run
    output = finish(start("one", folder, work, "--resume", "auto"), code=2)
    assert output.startswith("error: ") and output.count("\n") == 1
    assert "holds more than tensors, it is not loaded" in output and not ran.exists()
    assert os.listdir(folder) == ["checkpoint.pth"]


@pytest.mark.full
def test_a_stopped_process_is_missed_by_name(work, straight, tmp_path):
    """SIGSTOP: it holds its connections and says nothing."""
    job = start("two", tmp_path / "c", work, "--dist-timeout", "10")
    job.wait_for(r"epoch 0 \[13/")
    os.kill(processes(job)[1][1], signal.SIGSTOP)
    sent = time.monotonic()
    code, output = job.wait(60)
    assert code == 1 and time.monotonic() - sent < 10 + 7 + 30 + 8
    pattern = r"rank (\d) failed at epoch 0 step \d+: .*; no sign of rank (\d)"
    (found,) = re.findall(pattern, output)
    assert set(found) == {"0", "1"}
    finish(start("two", tmp_path / "c", work, "--resume", "auto"))
    same_run(tmp_path / "c", straight("two"))


@pytest.mark.full
def test_a_run_that_waits_for_images_ends_too(work, tmp_path):
    """The loader's worker is stopped: the main thread would wait for it without limit."""
    job = start("two", tmp_path / "c", work, "--dist-timeout", "10")
    job.wait_for(r"epoch 0 \[13/")
    for pid in processes(job)[2]:
        os.kill(pid, signal.SIGSTOP)
    code, output = job.wait(60)
    assert code == 1 and "no progress for 10 s; it waits as above" in output
    assert re.search(r"rank \d failed at epoch 0 step \d+: no progress", output)


WATCH = """
import ctypes, os, pathlib, signal, sys, time, types
from common.watch import Watch
watch = Watch(3, 4, types.SimpleNamespace(place=lambda: "epoch 5 step 6"), None, SECONDS)
"""


@pytest.mark.parametrize("hang", ["time.sleep(100)", "[time.sleep(0.1) for _ in range(1000)]"])
def test_what_takes_too_long_is_ended(hang):
    """Such as NCCL's set-up, which has no limit of its own."""
    code = WATCH.replace("SECONDS", "1") + f"with watch: {hang}"
    output = run([*forked("-c"), code], ROOT, timeout=60, code=1)
    expected = r"rank 3 failed at epoch 5 step 6: no progress for (1|0.9) s; it waits as above\n"
    assert re.search(expected + "$", output), output
    assert "Traceback" not in output and 'File "<string>", line 5' in output  # where it hangs


@pytest.mark.full
def test_what_is_not_watched_is_not_ended():
    """A loop of one's own, before, between and after what is watched."""
    code = WATCH.replace("SECONDS", "2") + "for _ in range(3):\n"
    code += "    time.sleep(4)\n    with watch: time.sleep(0.5)\n"
    code += "time.sleep(4); print('the end')"
    assert run([*forked("-c"), code], ROOT, timeout=90) == "the end\n"


def test_a_process_that_was_suspended_ends_once_it_is_continued():
    code = WATCH.replace("SECONDS", "3") + "with watch:\n    print('in', flush=True)\n"
    code += "    time.sleep(100)"
    job = Job([*forked("-c"), code], ROOT)
    job.wait_for("^in$")
    job.process.send_signal(signal.SIGSTOP)
    time.sleep(6)
    assert job.process.poll() is None
    job.process.send_signal(signal.SIGCONT)
    code, output = job.wait(20)
    assert code == 1 and "rank 3 failed at epoch 5 step 6: no progress for" in output


def test_an_error_ends_a_process_that_nobody_listens_to(tmp_path):
    """Its output is a closed pipe. An orderly exit would wait for loader workers in mp.spawn."""
    orderly = tmp_path / "orderly"
    code = WATCH.replace("SECONDS", "None")
    code += f"import atexit; atexit.register(pathlib.Path({str(orderly)!r}).touch)\n"
    code += "print('lost', flush=True)"
    to_nobody = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen([PYTHON, "-c", code], cwd=ROOT, **to_nobody)
    process.stdout.close()
    assert process.wait(60) == 1 and not orderly.exists()


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    ["distributed", full("dataparallel"), full("multiprocessing")],
)
def test_a_closed_stdout_ends_no_run(name, work, straight, tmp_path):
    """>&- in a shell: what is printed is lost, and nothing else."""
    command, env = SCRIPTS[name]
    shell = ["bash", "-c", 'exec "$@" >&-', "bash", *command, *FLAGS]
    output = run([*shell, "--checkpoint-dir", tmp_path / "c"], work, env=ONE_THREAD | env)
    assert "Traceback" not in output and "rank" not in output, output
    same_run(tmp_path / "c", straight(name))
    # What is wrong is still said.
    output = run(
        [*shell, "--checkpoint-dir", tmp_path / "c"], work, code=1 if name == "distributed" else 2
    )
    assert output.count("error: ") == 1 and "holds a run (checkpoint.pth): go on with" in output


def start_on(hosts, work, folder, *more):
    """A torchrun on each host."""
    jobs = []
    for i in (0, 1):
        agent = f"{PYTHON} -m torch.distributed.run --nnodes=2 --nproc-per-node=1"
        agent += f" --node-rank={i} --master-addr=host-a"
        command = [*agent.split(), ROOT / "distributed.py", *FLAGS, "--checkpoint-dir", folder]
        jobs.append(hosts.start(i, [*command, *more], work, ONE_THREAD))
    return jobs


@pytest.mark.full
@needs_hosts
@pytest.mark.parametrize("fault", ["cable", "suspended"])
def test_two_hosts_lose_each_other(fault, work, straight, tmp_path):
    """The cable is cut: no connection is reset, nothing comes any more. Or a process is suspended.

    Everything ends by itself, the launchers too. They are started with --node-rank: with the c10d
    rendezvous, torchrun (2.15) asks its store once a second, and once that is cut off it waits for
    the kernel to give up the connection, 15 minutes. A scheduler may suspend a job on purpose, so
    a suspended process is left alone, and ends soon after it is continued.
    """
    folder, limit = tmp_path / "c", 10
    with Hosts("host-a", "host-b") as hosts:
        jobs = start_on(hosts, work, folder, "--dist-timeout", limit)
        jobs[0].wait_for(r"epoch 0 \[13/")
        (training,) = processes(jobs[1])[1]
        if fault == "cable":
            hosts.cable("down")
        else:
            os.kill(training, signal.SIGSTOP)
        ended = [jobs[0].wait(limit + 30 + 15)]  # on a machine of its own 16 s
        if fault == "suspended":
            time.sleep(5)
            assert training in jobs[1].pids() and jobs[1].process.poll() is None
            os.kill(training, signal.SIGCONT)
        ended.append(jobs[1].wait(limit + 30 + 15))
        codes, outputs = zip(*ended, strict=True)
        said = [re.findall(r"rank \d failed at epoch 0 step \d+: .*", text) for text in outputs]
        assert codes == (1, 1) and len(said[0]) == len(said[1]) == 1, outputs
        assert "no sign of rank 1" in said[0][0], outputs
        hosts.cable("up")
        codes = [job.wait(120) for job in start_on(hosts, work, folder, "--resume", "auto")]
        assert [code for code, _ in codes] == [0, 0], codes
    same_run(folder, straight("distributed"))


def test_plain_model_is_what_its_name_says():
    assert not list(nets.plain(10).buffers()) and list(nets.normed(10).buffers())
