"""On a real Slurm of two nodes, n1 and n2, that tests/cluster/slurm/cluster.sh starts here.

The GPUs of its nodes are not there: Slurm gives them out, the processes train on the CPU.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from conftest import (
    ONE_THREAD,
    PYTHON,
    ROOT,
    Job,
    each,
    full,
    last_result,
    load,
    rows,
    run,
    same_state,
    soak,
)

from tests.docs.copies import joined
from tests.launched import (
    FLAGS,
    SLOW,
    at_step,
    cmdline,
    ends_as_straight,
    processes,
    resumed_where_it_stood,
    same_run,
    straight,
    with_pipes,
)

CLUSTER = ROOT / "tests/cluster/slurm/cluster.sh"
SCRIPT = ROOT / "distributed_slurm_main.py"
missing = not shutil.which("slurmctld", path=os.environ["PATH"] + ":/usr/sbin") or os.getuid() != 0
pytestmark = pytest.mark.skipif(
    missing and "CI" not in os.environ,
    reason="needs root and: apt-get install slurmctld slurmd slurm-client munge",
)


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm") / "two"
    # It returns, with what a shell needs: no daemon keeps the pipe open that the shell reads.
    start = ["bash", "-c", f'eval "$({CLUSTER} start {folder})" && echo "$SLURM_CONF"']
    try:
        started = subprocess.run(start, check=True, timeout=300, stdout=subprocess.PIPE, text=True)
        assert started.stdout == f"{folder}/slurm.conf\n"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
            yield
    finally:
        subprocess.run([CLUSTER, "stop", folder], check=True, timeout=150)
    assert not folder.exists()
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    assert not [pid for pid in pids if f"{folder}/" in cmdline(pid)]


def srun(options, *flags):
    return ["srun", "-K", *options.split(), PYTHON, SCRIPT, *flags]


def slurm(*command):
    return subprocess.run(command, check=True, timeout=30, capture_output=True, text=True).stdout


SHAPES = {
    "a task per node": ["-N2 --gres gpu:1"],
    "that starts two processes": ["-N1 --gres gpu:2", "--nprocs", "2"],
    "a task per GPU": ["-N1 --ntasks-per-node=2 --gpus-per-node=2"],
}


@pytest.mark.parametrize("shape", each(SHAPES, by_hand=["that starts two processes"]))
def test_a_killed_process_ends_the_step_and_the_next_goes_on(shape, work, tmp_path):
    """A task, or a process that a task has started; to the end of distributed.py's two processes.

    What a killed one leaves disturbs nobody.
    """
    command = [*srun(*SHAPES[shape]), *FLAGS, "--checkpoint-dir", tmp_path / "c"]
    command += ["--dist-file", tmp_path / "file"] if shape == "a task per GPU" else []
    job = Job(command, work, ONE_THREAD | SLOW)
    at_step(job, random.randrange(6, 15))
    os.kill(processes(job)[1][-1], signal.SIGKILL)
    code, output = job.wait(100)  # looks for leftovers too
    assert code not in (0, 75)
    own = "--nprocs" in command
    assert re.search(r"rank \d failed: .*SIGKILL" if own else r"task \d: Killed", output), output
    state, stale = load(tmp_path / "c"), [*tmp_path.glob("file.*")]
    output = run([*command, "--resume", "auto"], work, env=ONE_THREAD)
    assert "distributed_slurm_main.py: processes: 2, gloo, cpu" in output
    assert resumed_where_it_stood(output, state)
    same_run(tmp_path / "c", straight("distributed", work))
    assert [*tmp_path.glob("file.*")] == stale and len(stale) == ("--dist-file" in command)


# A process that waits for an image ends itself, as in tests/run/test_faults.py.
@pytest.mark.parametrize("fault", each(["a stopped process", "a pipe"], by_hand=["a pipe"]))
def test_a_hang_ends_the_step(fault, work, tmp_path):
    """SIGSTOP, which Slurm does not see; an image that is never read to its end."""
    flags = [*FLAGS, "--checkpoint-dir", tmp_path / "c", "--dist-timeout", "25"]
    flags += ["--data", with_pipes(tmp_path)] if fault == "a pipe" else []
    job = Job(srun("-N2 --gres gpu:1", *flags), work, ONE_THREAD | SLOW)
    if fault == "a stopped process":
        at_step(job, 13)
        os.kill(processes(job)[1][-1], signal.SIGSTOP)
    job.wait_for(r"rank \d failed at epoch 1 step \d+: ")
    code, output = job.wait(100)  # looks for leftovers too
    assert code == 1 or (fault == "a stopped process" and code == 137), output  # killed, or awake


@pytest.mark.parametrize("processes", [soak(1), full(2)])
def test_sigusr1_to_srun_saves_and_ends_all(processes, work, tmp_path):
    """Not SIGTERM: for that srun kills the tasks at once. distributed.py goes on.

    With two processes a task is their parent too. srun -K ends the step with the first task, and
    sends SIGTERM to the other one, which may still be on its way out. The job file has one.
    """
    flags = [*FLAGS, "--checkpoint-dir", tmp_path / "c", "--nprocs", processes]
    job = Job(srun("-N2 --gres gpu:1", *flags), work, ONE_THREAD | SLOW)
    at_step(job, 7)
    job.process.send_signal(signal.SIGUSR1)
    assert "saved: --resume auto goes on" in job.finish(code=75)
    if processes == 1:  # with four in all, sums have another order
        ends_as_straight("distributed", tmp_path / "c", work)


COMMANDS = sorted(
    {
        *re.findall(r"^srun -K .*$", joined((ROOT / "docs/full.md").read_text()), re.M),
        *re.findall(r"^\$ (srun .*)$", SCRIPT.read_text(), re.M),
        *re.findall(r"^#   (\w+=.* slurm)\b", (ROOT / "start.sh").read_text(), re.M),
    }
)


@pytest.mark.full
@pytest.mark.parametrize("command", COMMANDS)
def test_command_of_the_documents(command, work, tmp_path):
    for name in ("start.sh", "common", "longrun", "tests", SCRIPT.name):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "data").symlink_to(work / "data")
    line = command.replace("/path/to/imagenet", "data/digits --epochs 1")
    line = re.sub(r"(-c |NCPU=)(\d+)", lambda c: f"{c[1]}{int(c[2]) // 4}", line)  # nodes have 8
    line = line.replace("-per-node=4", "-per-node=2")
    output = run(["env", *line.split(), *FLAGS, "--max-steps", "2"], tmp_path)
    assert f"processes: {4 if 'ntasks' in command else 2}, gloo, cpu" in output
    assert "start.sh" not in command or re.search(r"^\+ srun -K -N2 --gres gpu:\d -c", output)
    last_result(output)


HANGS = """import os
import torch
import torch.distributed as dist

rank, size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
store = dist.FileStore(os.environ["STORE"], size)
dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
dist.barrier()
print("ready", flush=True)
if rank == 1:
    dist.barrier()
dist.all_reduce(torch.ones(1))
"""


@pytest.mark.full
def test_a_job_that_hangs(tmp_path):
    """The doctor looks at both nodes, by a step beside it."""
    (tmp_path / "train.py").write_text(HANGS)
    options = ["--job-name=hangs", "-N2", "--ntasks-per-node=1", PYTHON, tmp_path / "train.py"]
    job = Job(["srun", *options], tmp_path, {"STORE": str(tmp_path / "store")})
    for _ in range(2):
        job.wait_for("ready")
    queue = ["squeue", "--noheader", "--name=hangs", "--format=%A"]
    number = subprocess.run(queue, capture_output=True, text=True, check=True).stdout.strip()
    command = [PYTHON, ROOT / "doctor", "--attach", "--slurm", number, "--seconds", "2"]
    output = run(command, tmp_path, code=1)
    assert re.search(r"^ 2 ranks of: .*train\.py", output, re.M), output
    assert "rank 1 alone calls barrier: it stands under `if rank == 1 (line 10)`" in output, output
    subprocess.run(["scancel", number], check=True)
    job.finish(code=None)


@pytest.mark.full
def test_a_mistake_is_one_line(work, tmp_path):
    """What only Slurm can have: tests/unit/test_slurm_env.py."""
    flags = ["--data", "nowhere", "--checkpoint-dir", tmp_path / "c"]
    code, output = Job(srun(*SHAPES["a task per GPU"], *flags), work).wait(120)
    assert code in (2, 137, 143), output  # the highest: of the task that -K has ended
    lines = [x for x in output.splitlines() if not re.match("srun: |slurmstepd", x)]
    assert len(lines) == 1 and lines[0].startswith("error: no folder nowhere/train: "), output


@pytest.mark.full
def test_the_job_file_goes_on_after_the_signal_and_after_a_requeue(work, tmp_path):
    long = ["--epochs", "10", "--max-steps", "290"]
    (tmp_path / "data").symlink_to(work / "data")
    (tmp_path / SCRIPT.name).symlink_to(SCRIPT)
    edit = "--nodes=2 --gpus-per-node=1 --cpus-per-task=2".split()
    submit = ["sbatch", *edit, ROOT / "distributed_slurm.sbatch", *FLAGS, *long]
    job = Job([*submit, "--dist-file", "file"], tmp_path, ONE_THREAD)
    number = re.search(r"job (\d+)", job.wait_for("Submitted batch job"))[1]
    output = tmp_path / f"imagenet-{number}.out"

    def state():
        return slurm("squeue", "-h", "-j", number, "-t", "all", "-o", "%T").strip()

    def text():
        return output.read_text() if output.exists() else ""

    def until(reached, seconds=180):
        deadline = time.monotonic() + seconds
        while not reached():
            if time.monotonic() > deadline:
                slurm("scancel", number)
                pytest.fail(f"{state()}:\n{text()}")
            time.sleep(0.2)

    def runs_again(count):
        # The count first: the old run, still running when asked, must not be taken for the new one.
        restarts = re.search(r"Restarts=(\d+)", slurm("scontrol", "show", "job", number))
        if state() == "PENDING":
            # No need to wait for two minutes. Nor to come at once: a job that starts within a
            # second of its end fails, "revoked". The delay is set once more as the old run ends.
            # It may have begun meanwhile: then there is nothing to set.
            subprocess.run(["scontrol", "update", f"jobid={number}", "StartTime=now+3"], timeout=30)
            time.sleep(6)
        return int(restarts[1]) >= count and state() == "RUNNING"

    until(lambda: re.search(r"epoch 2/\d+ \[", text()))
    slurm("scancel", "--signal=USR1", number)  # what --signal sends before the time limit
    until(lambda: runs_again(1))
    until(lambda: re.search(r"resumed from .*(?s:.*)epoch 5/\d+ \[", text()))
    slurm("scontrol", "requeue", number)
    until(lambda: runs_again(2))
    until(lambda: state() not in ("RUNNING", "COMPLETING"))
    assert state() == "COMPLETED" and not job.pids(), text()
    resumed = re.findall(r"resumed from .* at .*epoch (\d+)", text())
    assert len(resumed) == 2 and int(resumed[0]) >= 2 and int(resumed[1]) >= 4, text()
    (folder,) = tmp_path.glob("checkpoints-*")
    undisturbed = straight("distributed", work, *long)
    assert same_state(load(folder), load(undisturbed))
    assert rows(folder, timings=False) == rows(undisturbed, timings=False)
