"""On a real Slurm of two nodes, n1 and n2, that tests/slurm/cluster.sh starts on this machine.

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
    forked,
    forking,
    full,
    last_result,
    load,
    needs_horovod,
    rows,
    run,
    same_state,
    torchrun,
)

from common.slurm import Step, first_host, processes_per_task, tasks_per_node

CLUSTER = ROOT / "tests" / "slurm" / "cluster.sh"
SCRIPT = ROOT / "distributed_slurm_main.py"
# BatchNorm and dropout, 29 steps an epoch. One thread in each process, if two share two cores or
# one is told so: the fixture below leaves two to everybody.
NORMED = "--arch tests.nets:normed --image-size 24 --batch-size 48 -j 1 -p 1".split()
THREADS = {"OMP_NUM_THREADS": "1"}
TWO = forked("distributed.py", ranks=2)

missing = not shutil.which("slurmctld", path=os.environ["PATH"] + ":/usr/sbin") or os.getuid() != 0
pytestmark = pytest.mark.skipif(
    missing and "CI" not in os.environ,
    reason="needs root and: apt-get install slurmctld slurmd slurm-client munge",
)


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory):
    folder, cores = tmp_path_factory.mktemp("slurm") / "two", os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:2])
    # It returns, with what a shell needs: no daemon keeps the pipe open that the shell reads.
    start = ["bash", "-c", f'eval "$({CLUSTER} start {folder})" && echo "$SLURM_CONF"']
    try:
        started = subprocess.run(start, check=True, timeout=60, stdout=subprocess.PIPE, text=True)
        assert started.stdout == f"{folder}/slurm.conf\n"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
            yield
    finally:
        os.sched_setaffinity(0, cores)
        subprocess.run([CLUSTER, "stop", folder], check=True, timeout=60)
    assert not folder.exists()
    assert not [pid for pid in pids() if f"{folder}/" in said(pid, "cmdline")]


def pids():
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def said(pid, file):
    try:
        return Path(f"/proc/{pid}/{file}").read_text(errors="replace").replace("\0", "\n")
    except OSError:
        return ""  # ended meanwhile


def srun(options, *flags):
    return ["srun", "-K", *options.split(), PYTHON, SCRIPT, *flags]


def slurm(*command):
    return subprocess.run(command, check=True, timeout=30, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def two(work):
    """Folder and output of two processes of distributed.py, for two epochs."""
    command = [*TWO, *NORMED, "--epochs", "2", "--checkpoint-dir", "two"]
    output = run(command, work, env=THREADS)
    return work / "two", output


SHAPES = {
    "a task per node": ("-N1 --gres gpu:2", "--nprocs 2"),
    "a task per node of two": ("-N2 --gres gpu:1", "--dist-file dist_file"),
    "a task per GPU": ("-N1 --ntasks-per-node=2 --gpus-per-node=2", ""),
    "a task per GPU on two nodes": ("-N2 --ntasks-per-node=1 --gpus-per-node=1", ""),
    "a task sees its GPU only": ("-N1 --ntasks-per-node=2 --gpus-per-task=1", ""),
}


PLAIN = ["a task per node of two", "a task per GPU"]  # the others start forks


@pytest.mark.parametrize("shape", SHAPES)
def test_two_processes_are_the_two_of_distributed(shape, work, two, tmp_path):
    options, flags = SHAPES[shape]
    flags = [*flags.split(), "--epochs", "2", "--checkpoint-dir", tmp_path / "run"]
    env = THREADS if shape in PLAIN else THREADS | forking()
    output = run(srun(options, *NORMED, *flags), work, env=env)
    assert "distributed_slurm_main.py: processes: 2, gloo, cpu" in output
    assert same_state(load(tmp_path / "run"), load(two[0]))
    assert rows(tmp_path / "run", timings=False) == rows(two[0], timings=False)
    assert last_result(output) == last_result(two[1])
    assert last_result(output)[1] > 50  # of 100: it has learnt
    assert not list(work.glob("dist_file*"))


@pytest.mark.full
def test_resume_a_run_of_the_other_in_mid_epoch(work, two, tmp_path):
    launchers = srun("-N2 --gres gpu:1"), TWO
    for first, second in (launchers, launchers[::-1]):
        flags = [*NORMED, "--epochs", "2", "--checkpoint-dir", tmp_path / str(first is TWO)]
        run([*first, *flags, "--max-steps", "40"], work, env=THREADS | forking())
        output = run([*second, *flags, "--resume", "auto"], work, env=THREADS | forking())
        assert "at epoch 1 step 11" in output
        assert same_state(load(flags[-1]), load(two[0]))
        assert rows(flags[-1], timings=False)[-1] == rows(two[0], timings=False)[-1]


@pytest.mark.full
def test_a_checkpoint_goes_through_all_scripts(work, tmp_path):
    """Each goes on with what the one before left; the end is that of one script, to rounding."""
    double = {"PYTHONPATH": str(ROOT / "tests/apex_doubles/today")}
    commands = [  # with one process or two: without BatchNorm they train the same
        (torchrun(2), {}),
        ([PYTHON, ROOT / "dataparallel.py"], {}),
        ([PYTHON, ROOT / "multiprocessing_distributed.py", "--nprocs=2"], {}),
        (srun("-N2 --gres gpu:1"), {}),
        ([*torchrun(2, "apex_distributed.py"), "--precision", "fp32"], double),
        ([*HOROVODRUN, ROOT / "horovod_distributed.py"], {}),
        (torchrun(2, "fsdp_distributed.py"), {}),
        (torchrun(2), {}),
    ]
    needs_horovod()
    smooth = [*NORMED, "--arch", "tests.nets:smooth", "--epochs", "2", "--max-steps"]
    for number, (command, env) in enumerate(commands, start=1):
        flags = [*smooth, str(5 * number), "--checkpoint-dir", tmp_path / "c", "--resume", "auto"]
        output = run([*command, *flags], work, env=THREADS | forking() | env)
        assert number == 1 or re.search(r"resumed from .*/checkpoint.pth at epoch \d", output), (
            output
        )
    run([*TWO, *smooth, "40", "--checkpoint-dir", tmp_path / "one"], work, env=THREADS)
    assert_close(load(tmp_path / "c"), load(tmp_path / "one"))


@pytest.mark.full
def test_nodes_with_different_process_counts(work, tmp_path):
    command = f"exec python {SCRIPT} --nprocs $((SLURM_NODEID + 1)) " + '"$@"'
    flags = [*NORMED, "--max-steps", "5", "--checkpoint-dir", tmp_path / "run"]
    line = ["srun", "-K", "-N2", "--gpus=3", "bash", "-c", command, "bash"]
    output = run([*line, *flags], work, env=forking())
    assert "processes: 3, gloo, cpu" in output
    assert rows(tmp_path / "run")[0]["world_size"] == 3


COMMANDS = sorted(
    {
        *re.findall(r"\bsrun -K [^`\n|]*\.py[^`\n|]*", (ROOT / "README.md").read_text()),
        *re.findall(r"^\$ (srun .*)$", SCRIPT.read_text(), re.M),
        *re.findall(r"^#   (\w+=.* slurm)\b", (ROOT / "start.sh").read_text(), re.M),
        "NNODES=2 ./start.sh slurm",
    }
)


@pytest.mark.parametrize("command", COMMANDS)
def test_command_of_the_documents(command, work, tmp_path):
    for name in ("start.sh", "common", "tests", SCRIPT.name):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "data").symlink_to(work / "data")
    line = command.replace("/path/to/imagenet", "data/digits --epochs 1")
    line = re.sub(r"(-c |NCPU=)(\d+)", lambda c: f"{c[1]}{int(c[2]) // 4}", line)  # nodes have 8
    output = run(
        ["env", *line.split(), *NORMED, "--max-steps", "2"],
        tmp_path,
        env=forking(),
    )
    assert f"processes: {8 if 'ntasks' in command else 2}, gloo, cpu" in output
    assert "start.sh" not in command or re.search(r"^\+ srun -K -N2 --gres gpu:\d -c", output)
    last_result(output)


@pytest.mark.full
def test_two_jobs_on_one_node_at_once(work, tmp_path):
    flags = [*NORMED, "--epochs", "2", "--checkpoint-dir"]
    options = "-N1 -w n1 --ntasks-per-node=2 --gpus-per-node=2"
    jobs = [Job(srun(options, *flags, tmp_path / name), work, forking()) for name in "ab"]
    for job in jobs:
        code, output = job.wait(120)
        assert code == 0, output
    assert same_state(load(tmp_path / "a"), load(tmp_path / "b"))


def test_a_mismatch_is_one_line_at_once(work):
    # No GPU here: the count is made up, all that happens to it is real. Without -K on purpose.
    fake = (
        "import runpy, sys, torch; torch.cuda.device_count = lambda: 2; "
        "sys.argv[0] = sys.argv.pop(1); runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    start = time.monotonic()
    command = ["srun", "-N1", "-n3", "--gres=gpu:2", PYTHON, "-c", fake, SCRIPT]
    output = run(command, work, code=2, env={"PYTHONPATH": str(ROOT)})
    assert time.monotonic() - start < 60
    (line,) = [line for line in output.splitlines() if not line.startswith("srun: ")]
    assert line.startswith("error: 3 tasks x 1 processes on a node with 2 GPUs")
    assert "srun --ntasks-per-node=2 --gpus-per-node=2" in line


@pytest.mark.parametrize("launcher", [[], ["sbatch", "--wait", "-o", "out", "--wrap"]])
def test_without_srun_it_says_how_to_use_it(launcher, tmp_path):
    command = [PYTHON, SCRIPT]
    if launcher:
        run([*launcher, f"{PYTHON} {SCRIPT}"], tmp_path, code=2)
        output = (tmp_path / "out").read_text()
    else:
        output = run(command, tmp_path, code=2)
    (line,) = output.splitlines()
    assert line.startswith("error: not a task of srun: srun -K -N2 --gres gpu:4 -c 32 python dist")


def test_a_folder_that_is_not_there(work):
    output = run(srun("-N1", "--dist-file", "none/dist"), work, code=2)
    assert f"error: no folder {work}/none for --dist-file" in output


@pytest.mark.full
@pytest.mark.parametrize("shape", [full("-n4 --gpus-per-node=2"), "--gres gpu:2"])
def test_a_killed_process_ends_the_step_and_the_next_run_is_not_disturbed(shape, work, tmp_path):
    own = [] if "-n4" in shape else ["--nprocs", "2"]
    flags = [*NORMED, "--epochs", "400", "--dist-file", "stale", *own]
    job = Job(srun(f"-N2 {shape}", *flags, "--checkpoint-dir", tmp_path / "run"), work)
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
    run(srun(f"-N2 {shape}", *flags), work, env=forking())
    assert rows(tmp_path / "b")[0]["world_size"] == 4
    assert list(work.glob("stale.*")) == [stale]
    stale.unlink()


def test_sigusr1_to_srun_saves_and_ends_all(work, two, tmp_path):
    """Not SIGTERM: for that srun kills the tasks at once."""
    flags = [*NORMED, "--epochs", "2", "--checkpoint-dir", tmp_path / "run"]
    job = Job(srun("-N2 --gres gpu:1", *flags), work, THREADS)
    job.wait_for(r"epoch 0 \[5/")
    job.process.send_signal(signal.SIGUSR1)
    code, output = job.wait(60)
    assert code == 75 and "saved: --resume auto goes on" in output, output
    output = run(srun("-N2 --gres gpu:1", *flags, "--resume", "auto"), work, env=THREADS)
    assert "resumed from" in output
    assert same_state(load(tmp_path / "run"), load(two[0]))


@pytest.mark.full
def test_the_job_file_goes_on_after_the_signal_and_after_a_requeue(work, tmp_path):
    flags = [*NORMED, "--epochs", "10", "--checkpoint-freq", "10"]
    run([*TWO, *flags, "--checkpoint-dir", tmp_path / "whole"], work, env=THREADS)

    (tmp_path / "data").symlink_to(work / "data")
    (tmp_path / SCRIPT.name).symlink_to(SCRIPT)
    edit = "--nodes=2 --gpus-per-node=1 --cpus-per-task=2".split()
    submit = ["sbatch", *edit, ROOT / "distributed_slurm.sbatch", *flags, "--dist-file", "file"]
    path = os.path.dirname(PYTHON) + ":" + os.environ["PATH"]
    job = Job(submit, tmp_path, THREADS | {"PATH": path})
    number = re.search(r"job (\d+)", job.wait_for("Submitted batch job"))[1]
    output = tmp_path / f"imagenet-{number}.out"

    def state():
        return slurm("squeue", "-h", "-j", number, "-t", "all", "-o", "%T").strip()

    def wait_for(pattern):
        deadline = time.monotonic() + 60
        while not (output.exists() and re.search(pattern, output.read_text())):
            if time.monotonic() > deadline:
                slurm("scancel", number)
                pytest.fail(f"{state()}, no {pattern!r}:\n{output.read_text()}")
            time.sleep(0.1)

    def restarts():
        return int(re.search(r"Restarts=(\d+)", slurm("scontrol", "show", "job", number))[1])

    def skip_the_delay(count):
        deadline = time.monotonic() + 60
        # The count first: the old run, still running when asked, must not be taken for the new one.
        while restarts() < count or state() != "RUNNING":
            assert time.monotonic() < deadline, f"{state()}:\n{output.read_text()}"
            if state() == "PENDING":  # while the old run is ending, the delay is set once more
                # Not at once: a job that starts within a second of its end fails, "revoked".
                slurm("scontrol", "update", f"jobid={number}", "StartTime=now+3")
                time.sleep(6)
            time.sleep(0.2)

    wait_for(r"epoch 1 \[")
    slurm("scancel", "--signal=USR1", number)  # what --signal sends before the time limit
    skip_the_delay(1)
    wait_for(r"resumed from .*(?s:.*)epoch 4 \[")
    slurm("scontrol", "requeue", number)
    skip_the_delay(2)

    wait_for(r"epoch 9 \[29/29\].*\n(hint.*\n)? \* loss")
    deadline = time.monotonic() + 30
    while state() in ("RUNNING", "COMPLETING") and time.monotonic() < deadline:
        time.sleep(0.2)
    text = output.read_text()
    assert state() == "COMPLETED" and not job.pids(), text
    (folder,) = tmp_path.glob("checkpoints-*")
    resumed = re.findall(r"resumed from .* at epoch (\d+) step \d+", text)
    assert len(resumed) == 2 and int(resumed[0]) >= 1 and int(resumed[1]) >= 4, text
    assert same_state(load(folder), load(tmp_path / "whole"))
    assert rows(folder, timings=False) == rows(tmp_path / "whole", timings=False)


NODE_LISTS = {
    "n1": "n1",
    "n[1-2]": "n1",
    "gpu[01-03,07]": "gpu01",
    "gpu[007,009-012]-ib0": "gpu007-ib0",
    "rack[2-3]node[04-11]": "rack2node04",
    "login1,gpu[01-03]": "login1",
    "gpu-a[3,5],gpu-b[1-2]": "gpu-a3",
    "127.0.0.[1-2]": "127.0.0.1",
    "n[8-11].cluster.local,m1": "n8.cluster.local",
}


@pytest.mark.parametrize("nodes", NODE_LISTS)
def test_first_host_is_that_of_slurm(nodes):
    assert first_host(nodes) == NODE_LISTS[nodes]
    if not re.search(r"\][^][,]+(,|$)", nodes):  # Slurm itself takes no name that ends in a suffix
        assert slurm("scontrol", "show", "hostnames", nodes).split()[0] == NODE_LISTS[nodes]


# What Slurm 22.05 tells the second task of the second node of -N2 -n4 --gres gpu:2.
TASK = {
    "SLURM_JOB_ID": "100",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_GPUS_ON_NODE": "2",
    "SLURM_CPUS_ON_NODE": "8",
}


def step(job=100, number=0, restarts=0, dist_file=None):
    env = {"JOB_ID": job, "STEP_ID": number, "RESTART_COUNT": restarts}
    return Step(TASK | {f"SLURM_{name}": str(value) for name, value in env.items()}, dist_file)


def test_a_task_reads_what_slurm_says():
    task = step()
    assert (task.task, task.local_task, task.tasks, task.tasks_on_node) == (3, 1, 4, 2)
    assert (task.gpus_on_node, task.cores_on_node) == (2, 8)


def test_meeting_points_differ_by_job_step_and_restart(tmp_path):
    steps = [(job, number, 0) for job in range(100, 120) for number in range(20)]
    addresses = {step(*which).address for which in steps}
    assert len(addresses) == len(steps) and {host for host, _ in addresses} == {"n1"}
    assert all(1024 < port < 32768 for _, port in addresses)
    steps += [(100, 0, 1)]
    assert len({step(*which, str(tmp_path / "file")).address for which in steps}) == 401


@pytest.mark.parametrize(
    ("tasks", "visible", "on_node", "nprocs", "share", "expected"),
    [
        (1, 0, 0, None, False, 1),  # no GPU: what srun starts
        (4, 0, 4, None, False, 1),
        (2, 0, 4, 3, False, 3),
        (1, 4, 4, None, False, 4),  # -N2 --gres gpu:4
        (4, 4, 4, None, False, 1),  # --ntasks-per-node=4 --gpus-per-node=4
        (2, 4, 4, None, False, 2),
        (4, 1, 4, None, False, 1),  # --gpus-per-task=1
        (1, 1, 1, None, False, 1),
        (2, 2, 4, None, False, 2),  # --gpus-per-task=2
        (4, 4, 0, None, False, 1),  # a Slurm that does not count GPUs
        (1, 4, 4, 2, False, 2),
        (3, 2, 2, None, False, None),  # more tasks than GPUs
        (4, 2, 2, None, False, None),
        (3, 4, 4, None, False, None),  # one GPU idle
        (1, 4, 4, 8, False, None),
        (4, 1, 2, None, False, None),  # two tasks on each GPU
        (4, 2, 2, None, True, 1),  # gloo may
        (1, 1, 1, 2, True, 2),
    ],
)
def test_processes_per_task(tasks, visible, on_node, nprocs, share, expected):
    if expected is None:
        with pytest.raises(ValueError, match=rf"^{tasks} tasks x \d+ .* {on_node} GPUs: .*srun"):
            processes_per_task(tasks, visible, on_node, nprocs, share)
    else:
        assert processes_per_task(tasks, visible, on_node, nprocs, share) == expected


@pytest.mark.parametrize(
    ("counts", "expected"),
    [("1", [1]), ("4(x3)", [4, 4, 4]), ("2(x2),1", [2, 2, 1]), ("3,12(x2),1", [3, 12, 12, 1])],
)
def test_tasks_per_node(counts, expected):
    assert tasks_per_node(counts) == expected


@pytest.mark.full
def test_tasks_that_slurm_deals_out_in_turn(work, tmp_path):
    """-m cyclic: tasks 0 and 2 are on the first node, 1 and 3 on the second."""
    flags = [*NORMED, "--epochs", "2", "--checkpoint-dir", tmp_path / "run"]
    output = run(srun("-N2 -n4 -m cyclic --gpus-per-node=2", *flags), work)
    assert "global batch 48 = 4 x 12" in output
    assert last_result(output)[1] > 50
