"""On a real Slurm of two nodes, n1 and n2, that tests/cluster/slurm/cluster.sh starts here.

The GPUs of its nodes are not there: Slurm gives them out, the processes train on the CPU.
"""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from conftest import (
    HOROVODRUN,
    PYTHON,
    ROOT,
    Job,
    assert_close,
    full,
    last_result,
    load,
    needs_horovod,
    python,
    rows,
    run,
    same_state,
    torchrun,
)

from common.slurm import first_host
from tests.cluster.ddp import TWO_THREADS, ddp
from tests.launched import DOUBLE, FLAGS, same_run

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
    assert not [pid for pid in pids if f"{folder}/" in said(pid, "cmdline")]


def said(pid, file):
    try:
        return Path(f"/proc/{pid}/{file}").read_text(errors="replace").replace("\0", "\n")
    except OSError:
        return ""  # ended meanwhile


def srun(options, *flags):
    return ["srun", "-K", *options.split(), PYTHON, SCRIPT, *flags]


def slurm(*command):
    return subprocess.run(command, check=True, timeout=30, capture_output=True, text=True).stdout


SHAPES = {
    "a task per node": ("-N2 --gres gpu:1", ""),
    "that starts two processes": ("-N1 --gres gpu:2", "--nprocs 2"),
    "a task per GPU": ("-N1 --ntasks-per-node=2 --gpus-per-node=2", "--dist-file dist_file"),
}


@pytest.mark.parametrize("shape", [s if s == "a task per node" else full(s) for s in SHAPES])
def test_two_processes_are_the_two_of_distributed(shape, work, tmp_path):
    options, flags = SHAPES[shape]
    command = srun(options, *FLAGS, *flags.split(), "--checkpoint-dir", tmp_path / "c")
    output = run(command, work, env=TWO_THREADS)
    assert "distributed_slurm_main.py: processes: 2, gloo, cpu" in output
    same_run(tmp_path / "c", ddp(work))
    assert last_result(output)[1] > 50  # of 100: it has learnt
    assert not list(work.glob("dist_file*"))


def test_the_first_host_is_that_of_slurm():
    for nodes in ("n[1-2]", "gpu[01-03,07]", "rack[2-3]node[04-11]", "login1,gpu[01-03]"):
        assert first_host(nodes) == slurm("scontrol", "show", "hostnames", nodes).split()[0]


@pytest.mark.full
def test_sigusr1_to_srun_saves_and_ends_all(work, tmp_path):
    """Not SIGTERM: for that srun kills the tasks at once. distributed.py goes on."""
    flags = [*FLAGS, "--checkpoint-dir", tmp_path / "c"]
    job = Job(srun("-N2 --gres gpu:1", *flags), work, TWO_THREADS)
    job.wait_for(r"epoch 0 \[7/")
    job.process.send_signal(signal.SIGUSR1)
    code, output = job.wait(60)
    assert code == 75 and "saved: --resume auto goes on" in output, output
    assert "resumed from" in run([*torchrun(2), *flags, "--resume", "auto"], work, env=TWO_THREADS)
    same_run(tmp_path / "c", ddp(work))


@pytest.mark.full
def test_a_checkpoint_goes_through_all_scripts(work, tmp_path):
    """Each goes on with what the one before left; the end is that of one script, to rounding."""
    needs_horovod()
    commands = [  # with any number of processes: without BatchNorm they train the same
        (torchrun(2), {}),
        (python("dataparallel.py"), {}),
        ([*python("multiprocessing_distributed.py"), "--nprocs=2"], {}),
        (srun("-N2 --ntasks-per-node=2 -m cyclic"), {}),  # tasks 0 and 2 are on the first node
        ([*torchrun(2, "apex_distributed.py"), "--precision", "fp32"], DOUBLE),
        ([*HOROVODRUN, ROOT / "horovod_distributed.py"], {}),
        (torchrun(2, "fsdp_distributed.py"), {}),
        (torchrun(2), {}),
    ]
    smooth = ["--arch", "tests.nets:smooth"]
    for number, (command, env) in enumerate(commands, start=1):
        flags = [*FLAGS, *smooth, "--checkpoint-dir", tmp_path / "c", "--resume", "auto"]
        flags += ["--max-steps", 45 if number == len(commands) else 5 * number]
        output = run([*command, *flags], work, env=TWO_THREADS | env)
        place = "at epoch {} step {}".format(*divmod(5 * number - 5, 29))
        assert number == 1 or re.search(f"resumed from .*/checkpoint.pth {place}", output), output
    assert_close(load(tmp_path / "c"), load(ddp(work, *smooth)))


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


FAKE = (  # No GPU here: the count is made up, all that happens to it is real.
    "import runpy, sys, torch; torch.cuda.device_count = lambda: 2; "
    "sys.argv[0] = sys.argv.pop(1); runpy.run_path(sys.argv[0], run_name='__main__')"
)
UNLIKE = f'exec {PYTHON} {SCRIPT} --nprocs $((SLURM_NODEID + 1)) "$@"'
MISTAKES = {
    "more tasks than GPUs": (
        ["-N1", "-n3", "--gres=gpu:2", PYTHON, "-c", FAKE, SCRIPT],
        "3 tasks x 1 processes on a node with 2 GPUs: .*srun --ntasks-per-node=2 --gpus-per-node=2",
    ),
    "unlike nodes": (
        ["-N2", "--gpus=3", "bash", "-c", UNLIKE, "bash"],
        "task 1 would start 2 processes and task 0 1: take nodes with as many GPUs each",
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_at_once(mistake, work, tmp_path):
    command, message = MISTAKES[mistake]
    command = ["srun", "-K", *command, "--checkpoint-dir", tmp_path / "c"]
    code, output = Job(command, work, {"PYTHONPATH": str(ROOT)}).wait(120)
    assert code in (2, 143), output  # the highest: of the tasks that -K has ended
    (line,) = [line for line in output.splitlines() if not re.match("srun: |slurmstepd", line)]
    assert re.match(f"error: {message}", line), line


@pytest.mark.full
@pytest.mark.parametrize("shape", ["--ntasks-per-node=2", "--gres gpu:2"])
def test_a_killed_process_ends_the_step_and_the_next_run_is_not_disturbed(shape, work, tmp_path):
    """A task, or one of the processes that a task has started."""
    own = [] if "ntasks" in shape else ["--nprocs", "2"]
    flags = [*FLAGS, "--epochs", "400", "--max-steps", "9999", "--dist-file", "stale"]
    job = Job(srun(f"-N2 {shape}", *flags, *own, "--checkpoint-dir", tmp_path / "a"), work)
    job.wait_for(r"epoch 1 \[")
    task = 1 if own else 3
    (victim,) = {
        int(found[1])
        for pid in job.pids()
        if f"SLURM_PROCID={task}\n" in (environ := said(pid, "environ"))
        and (found := re.search(r"^SLURM_TASK_PID=(\d+)$", environ, re.M))
    }
    if own:  # the second of those that the task has spawned: rank 3
        children = [p for p in job.pids() if f"\nPPid:\t{victim}\n" in said(p, "status")]
        victim = [p for p in children if "spawn_main" in said(p, "cmdline")][1]
    os.kill(victim, 9)
    start = time.monotonic()
    code, output = job.wait(100)  # looks for leftovers too
    assert time.monotonic() - start < 90  # Slurm itself waits 30 s before it kills
    assert code not in (0, 75)
    assert re.search("rank 3 failed: .*SIGKILL" if own else "task 3: Killed", output), output

    (stale,) = work.glob("stale.*")
    flags += ["--max-steps", "3", "--checkpoint-dir", tmp_path / "b"]
    run(srun("-N2 --gres gpu:1", *flags), work)
    assert rows(tmp_path / "b")[0]["world_size"] == 2
    assert list(work.glob("stale.*")) == [stale]
    stale.unlink()


@pytest.mark.full
def test_the_job_file_goes_on_after_the_signal_and_after_a_requeue(work, tmp_path):
    long = ["--epochs", "10", "--max-steps", "290"]
    straight = ddp(work, *long)
    (tmp_path / "data").symlink_to(work / "data")
    (tmp_path / SCRIPT.name).symlink_to(SCRIPT)
    edit = "--nodes=2 --gpus-per-node=1 --cpus-per-task=2".split()
    submit = ["sbatch", *edit, ROOT / "distributed_slurm.sbatch", *FLAGS, *long]
    path = os.path.dirname(PYTHON) + ":" + os.environ["PATH"]
    job = Job([*submit, "--dist-file", "file"], tmp_path, TWO_THREADS | {"PATH": path})
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

    until(lambda: re.search(r"epoch 1 \[", text()))
    slurm("scancel", "--signal=USR1", number)  # what --signal sends before the time limit
    until(lambda: runs_again(1))
    until(lambda: re.search(r"resumed from .*(?s:.*)epoch 4 \[", text()))
    slurm("scontrol", "requeue", number)
    until(lambda: runs_again(2))
    until(lambda: state() not in ("RUNNING", "COMPLETING"), 90)
    assert state() == "COMPLETED" and not job.pids(), text()
    resumed = re.findall(r"resumed from .* at epoch (\d+) step \d+", text())
    assert len(resumed) == 2 and int(resumed[0]) >= 1 and int(resumed[1]) >= 4, text()
    (folder,) = tmp_path.glob("checkpoints-*")
    assert same_state(load(folder), load(straight))
    assert rows(folder, timings=False) == rows(straight, timings=False)
