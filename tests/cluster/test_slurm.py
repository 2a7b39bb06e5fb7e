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
    full,
    last_result,
    load,
    rows,
    run,
    same_state,
)

from tests.launched import (
    FLAGS,
    SLOW,
    cmdline,
    processes,
    resume,
    resumed_where_it_stood,
    same_run,
    straight,
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
        started = subprocess.run(start, check=True, timeout=60, stdout=subprocess.PIPE, text=True)
        assert started.stdout == f"{folder}/slurm.conf\n"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
            yield
    finally:
        subprocess.run([CLUSTER, "stop", folder], check=True, timeout=60)
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
    "a task per GPU": ["-N1 --ntasks-per-node=2 --gpus-per-node=2", "--dist-file", "dist_file"],
}


@pytest.mark.parametrize("shape", [s if s == "a task per node" else full(s) for s in SHAPES])
def test_two_processes_are_the_two_of_distributed(shape, work, tmp_path):
    command = [*srun(*SHAPES[shape]), *FLAGS, "--checkpoint-dir", tmp_path / "c"]
    output = run(command, work, env=ONE_THREAD)
    assert "distributed_slurm_main.py: processes: 2, gloo, cpu" in output
    same_run(tmp_path / "c", straight("distributed", work))
    assert last_result(output)[1] > 50  # of 100: it has learnt
    assert not list(work.glob("dist_file*"))


@pytest.mark.full
def test_sigusr1_to_srun_saves_and_ends_all(work, tmp_path):
    """Not SIGTERM: for that srun kills the tasks at once. distributed.py goes on."""
    flags = [*FLAGS, "--checkpoint-dir", tmp_path / "c"]
    job = Job(srun("-N2 --gres gpu:1", *flags), work, ONE_THREAD | SLOW)
    job.wait_for(r"epoch 1/\d+ \[7/")
    job.process.send_signal(signal.SIGUSR1)
    assert "saved: --resume auto goes on" in job.finish(code=75)
    state = load(tmp_path / "c")
    assert resumed_where_it_stood(resume("distributed", tmp_path / "c", work), state)
    same_run(tmp_path / "c", straight("distributed", work))


COMMANDS = sorted(
    {
        *re.findall(r"\bsrun -K [^`\n|]*\.py[^`\n|]*", (ROOT / "README.md").read_text()),
        *re.findall(r"^\$ (srun .*)$", SCRIPT.read_text(), re.M),
        *re.findall(r"^#   (\w+=.* slurm)\b", (ROOT / "start.sh").read_text(), re.M),
    }
)


@pytest.mark.full
@pytest.mark.parametrize("command", COMMANDS)
def test_command_of_the_documents(command, work, tmp_path):
    for name in ("start.sh", "common", "tests", SCRIPT.name):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "data").symlink_to(work / "data")
    line = command.replace("/path/to/imagenet", "data/digits --epochs 1")
    line = re.sub(r"(-c |NCPU=)(\d+)", lambda c: f"{c[1]}{int(c[2]) // 4}", line)  # nodes have 8
    output = run(["env", *line.split(), *FLAGS, "--max-steps", "2"], tmp_path)
    assert f"processes: {8 if 'ntasks' in command else 2}, gloo, cpu" in output
    assert "start.sh" not in command or re.search(r"^\+ srun -K -N2 --gres gpu:\d -c", output)
    last_result(output)


UNLIKE = f'exec {PYTHON} {SCRIPT} --nprocs $((SLURM_NODEID + 1)) "$@"'


@pytest.mark.full
def test_a_mistake_is_one_line_at_once(work, tmp_path):
    """Nodes that start different numbers of processes; others are in tests/unit."""
    command = ["srun", "-K", "-N2", "--gpus=3", "bash", "-c", UNLIKE, "bash"]
    code, output = Job([*command, "--checkpoint-dir", tmp_path / "c"], work).wait(120)
    assert code in (2, 137, 143), output  # the highest: of the tasks that -K has ended
    own = [line for line in output.splitlines() if not re.match("srun: |slurmstepd", line)]
    # -K may end task 0 in the middle of a call to the store, which torch's C++ then logs.
    log = re.compile(r"\[rank\d+\]:|\[W|frame #|Exception raised|$")
    lines = [line for line in own if not log.match(line)]
    assert len(lines) == 1, output
    (line,) = lines
    message = "task 1 would start 2 processes and task 0 1: take nodes with as many GPUs each"
    assert line.startswith(f"error: {message}"), line


@pytest.mark.full
@pytest.mark.parametrize("shape", SHAPES)
def test_a_killed_process_ends_the_step_and_the_next_goes_on(shape, work, tmp_path):
    """A task, or a process that a task has started. What a killed one leaves disturbs nobody."""
    command = [*srun(*SHAPES[shape]), *FLAGS, "--checkpoint-dir", tmp_path / "c"]
    command += ["--dist-file", tmp_path / "file"]
    job = Job(command, work, ONE_THREAD | SLOW)
    job.wait_for(rf"epoch 1/\d+ \[{random.randrange(6, 25)}/")
    os.kill(processes(job)[1][-1], signal.SIGKILL)
    code, output = job.wait(100)  # looks for leftovers too
    assert code not in (0, 75)
    own = "--nprocs" in command
    assert re.search(r"rank \d failed: .*SIGKILL" if own else r"task \d: Killed", output), output
    state, stale = load(tmp_path / "c"), [*tmp_path.glob("file.*")]
    output = run([*command, "--resume", "auto"], work, env=ONE_THREAD)
    assert resumed_where_it_stood(output, state)
    same_run(tmp_path / "c", straight("distributed", work))
    assert len(stale) == 1 and [*tmp_path.glob("file.*")] == stale


@pytest.mark.full
def test_the_job_file_goes_on_after_the_signal_and_after_a_requeue(work, tmp_path):
    long = ["--epochs", "10", "--max-steps", "290"]
    (tmp_path / "data").symlink_to(work / "data")
    (tmp_path / SCRIPT.name).symlink_to(SCRIPT)
    edit = "--nodes=2 --gpus-per-node=1 --cpus-per-task=2".split()
    submit = ["sbatch", *edit, ROOT / "distributed_slurm.sbatch", *FLAGS, *long]
    path = os.path.dirname(PYTHON) + ":" + os.environ["PATH"]
    job = Job([*submit, "--dist-file", "file"], tmp_path, ONE_THREAD | {"PATH": path})
    number = re.search(r"job (\d+)", job.wait_for("Submitted batch job"))[1]
    output = tmp_path / f"imagenet-{number}.out"

    def state():
        return slurm("squeue", "-h", "-j", number, "-t", "all", "-o", "%T").strip()

    def text():
        return output.read_text() if output.exists() else ""

    def until(reached, seconds=60):
        deadline = time.monotonic() + seconds
        while not reached():
            if time.monotonic() > deadline:
                slurm("scancel", number)
                pytest.fail(f"{state()}:\n{text()}")
            time.sleep(0.2)

    def runs_again(count):
        # The count first: the old run, still running when asked, must not be taken for the new one.
        restarts = re.search(r"Restarts=(\d+)", slurm("scontrol", "show", "job", number))
        if int(restarts[1]) < count or state() == "PENDING":
            # No need to wait for two minutes. Nor to come at once: a job that starts within a
            # second of its end fails, "revoked".
            if state() == "PENDING":  # while the old run is ending, the delay is set once more
                slurm("scontrol", "update", f"jobid={number}", "StartTime=now+3")
                time.sleep(6)
            return False
        return state() == "RUNNING"

    until(lambda: re.search(r"epoch 2/\d+ \[", text()))
    slurm("scancel", "--signal=USR1", number)  # what --signal sends before the time limit
    until(lambda: runs_again(1))
    until(lambda: re.search(r"resumed from .*(?s:.*)epoch 5/\d+ \[", text()))
    slurm("scontrol", "requeue", number)
    until(lambda: runs_again(2))
    until(lambda: state() not in ("RUNNING", "COMPLETING"), 90)
    assert state() == "COMPLETED" and not job.pids(), text()
    resumed = re.findall(r"resumed from .* at .*epoch (\d+)", text())
    assert len(resumed) == 2 and int(resumed[0]) >= 2 and int(resumed[1]) >= 4, text()
    (folder,) = tmp_path.glob("checkpoints-*")
    undisturbed = straight("distributed", work, *long)
    assert same_state(load(folder), load(undisturbed))
    assert rows(folder, timings=False) == rows(undisturbed, timings=False)
