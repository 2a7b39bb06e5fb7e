"""What a task makes of what Slurm tells it; tests/cluster/test_slurm.py starts a real Slurm."""

import os
import pickle
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from longrun.slurm import SrunTask, first_host, processes_per_task


def test_the_first_host_of_a_list():
    assert first_host("n1") == "n1"
    assert first_host("login1,gpu[01-03]") == "login1"
    assert first_host("rack[2-3]gpu[007,009-012]-ib0") == "rack2gpu007-ib0"


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


@pytest.fixture(autouse=True)
def outlive_the_parent(monkeypatch):
    monkeypatch.setattr("longrun.slurm.die_with_parent", lambda: None)  # it is that of the tests


def task(dist_file=None, **more):
    return SrunTask(TASK | {f"SLURM_{name}": str(x) for name, x in more.items()}, dist_file)


def test_meeting_points_differ_by_job_step_and_restart(tmp_path):
    steps = [{"JOB_ID": job, "STEP_ID": step} for job in range(9) for step in range(9)]
    tcp = {task(**step).address for step in steps}
    assert len(tcp) == 81 and all(host == "n1" and 1024 < port < 32768 for host, port in tcp)
    files = {task(f"{tmp_path}/x", **step).address for step in [*steps, {"RESTART_COUNT": 1}]}
    assert len(files) == 82


@pytest.mark.parametrize(
    "change, message",
    [
        ({"STEP_ID": 2**32 - 5}, "^not a task of srun: srun -K -N2 --gres"),  # the shell of sbatch
        ({"STEP_TASKS_PER_NODE": "4(x2),3"}, "tasks on the nodes: use --ntasks-per-node$"),
        ({"dist_file": "/none/file"}, "^no folder /none for --dist-file$"),
    ],
)
def test_what_cannot_be(change, message):
    with pytest.raises(ValueError, match=message):
        task(**change)
    with pytest.raises(ValueError, match="not a task of srun"):
        SrunTask({})


@pytest.mark.parametrize(
    ("tasks", "visible", "on_node", "nprocs", "share", "expected"),
    [
        (4, 0, 4, None, False, 1),  # no GPU: what srun starts
        (1, 4, 4, None, False, 4),  # -N2 --gres gpu:4
        (4, 4, 4, None, False, 1),  # --ntasks-per-node=4 --gpus-per-node=4
        (4, 1, 4, None, False, 1),  # --gpus-per-task=1
        (2, 2, 4, None, False, 2),  # --gpus-per-task=2
        (4, 4, 0, None, False, 1),  # a Slurm that does not count GPUs
        (1, 4, 4, 2, False, 2),
        (3, 2, 2, None, False, None),  # more tasks than GPUs
        (1, 4, 4, 8, False, None),
        (4, 1, 2, None, False, None),  # two tasks on each GPU
        (4, 2, 2, None, True, 1),  # gloo may
    ],
)
def test_processes_per_task(tasks, visible, on_node, nprocs, share, expected):
    if expected is None:
        with pytest.raises(ValueError, match=rf"^{tasks} tasks x \d+ .* {on_node} GPUs: .*srun"):
            processes_per_task(tasks, visible, on_node, nprocs, share)
    else:
        assert processes_per_task(tasks, visible, on_node, nprocs, share) == expected


@pytest.mark.parametrize("more_cores, sharers", [(0, 2), (1, 1)])
def test_a_task_for_each_process(more_cores, sharers, tmp_path, monkeypatch):
    """Cores that are the task's own are not divided among the tasks of the node."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    cores = len(os.sched_getaffinity(0)) + more_cores
    node = {"STEP_TASKS_PER_NODE": "2", "CPUS_ON_NODE": cores, "NTASKS": 2}
    tasks = [task(tmp_path / "file", PROCID=i, LOCALID=i, **node) for i in range(2)]
    with ThreadPoolExecutor() as pool:
        first = pool.submit(tasks[0].agree, seconds=20)
        time.sleep(0.1)
        assert not first.done()  # its end would be the store's, while the other connects
        tasks[1].agree(seconds=20)
        first.result()
    for number, made in enumerate(tasks):
        copy = pickle.loads(pickle.dumps(made))  # as mp.spawn does
        assert copy.open_store(20).get("nprocs") == b"1"
        ranks = copy.rank, copy.local_rank, copy.world_size, copy.local_world_size
        assert ranks == (number, number, 2, sharers)


@pytest.mark.parametrize("bound", [True, False])
def test_tasks_with_gpus_of_their_own_share_the_cores(bound, tmp_path, monkeypatch):
    """--gpus-per-task=1: also where Slurm does not bind a task to some cores of the node."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    cores, taken = {4, 5, 8, 9} if bound else {2, 3, 4, 5, 6, 7, 8, 9}, []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, mine: taken.append(mine))
    node = {"STEP_TASKS_PER_NODE": "2", "CPUS_ON_NODE": 8, "NTASKS": 2}
    tasks = [task(tmp_path / "file", PROCID=i, LOCALID=i, **node) for i in range(2)]
    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(one.agree, seconds=20) for one in tasks]:
            done.result()
    assert [one.local_world_size for one in tasks] == [1, 1]
    assert sorted(taken) == ([] if bound else [[2, 3, 4, 5], [6, 7, 8, 9]])


def test_a_task_that_does_not_come(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    node = {"STEP_TASKS_PER_NODE": "1(x2)", "NTASKS": 2, "LOCALID": 0}
    for number in (0, 1):
        with pytest.raises(ValueError, match=r"^a task of this step did not come: .*; "):
            task(f"{tmp_path}/{number}", PROCID=number, **node).agree(seconds=1)


def test_nodes_that_would_start_different_numbers_of_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    node = {"STEP_TASKS_PER_NODE": "1(x2)", "NTASKS": 2, "LOCALID": 0}
    first, second = (task(tmp_path / "file", PROCID=i, **node) for i in range(2))
    message = "^task 1 would start 2 processes and task 0 4: take nodes with as many GPUs each"
    with ThreadPoolExecutor() as pool:
        done = pool.submit(first.agree, 4, seconds=20)
        with pytest.raises(ValueError, match=message):
            second.agree(2, seconds=20)
        done.result()
    assert (first.rank, first.local_rank, first.world_size) == (0, 0, 8)


def test_a_port_that_is_taken(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    one = task(PROCID=0, LOCALID=0, NTASKS=1, STEP_TASKS_PER_NODE="1", STEP_NODELIST="localhost")
    with socket.socket() as other:
        other.bind(("", one.address[1]))
        other.listen()
        with pytest.raises(
            ValueError, match=r"^the tasks cannot meet at localhost:\d+: .*--dist-f"
        ):
            one.agree(seconds=5)
