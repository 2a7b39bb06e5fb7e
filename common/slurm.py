"""Which processes a Slurm step has, and where they meet."""

import json
import os
import re
import time
from datetime import timedelta

import torch
import torch.distributed as dist


class Step:
    """One task of a step of srun; after agree() the ranks of the processes that it starts.

    env: the environment of the task. dist_file: a path on shared storage, where the tasks meet;
    without one it is a TCP port of the first node. Raises ValueError outside of a step of srun, and
    where dist_file cannot be.
    """

    def __init__(self, env, dist_file=None):
        # The highest numbers are the shell of sbatch or salloc, which runs on the first node only.
        number = int(env.get("SLURM_STEP_ID", 2**32))
        if number > 2**32 - 9:
            command = "srun -K -N2 --gres gpu:4 -c 32 python distributed_slurm_main.py"
            raise ValueError(f"not a task of srun: {command}")
        self.task = int(env["SLURM_PROCID"])
        self.local_task = int(env["SLURM_LOCALID"])
        self.tasks = int(env["SLURM_NTASKS"])
        node = int(env["SLURM_NODEID"])
        self.tasks_on_node = tasks_per_node(env["SLURM_STEP_TASKS_PER_NODE"])[node]
        self.gpus_on_node = int(env.get("SLURM_GPUS_ON_NODE", 0))
        self.cores_on_node = int(env["SLURM_CPUS_ON_NODE"])
        job, restarts = int(env["SLURM_JOB_ID"]), env.get("SLURM_RESTART_COUNT", 0)
        if dist_file is None:
            # Below the ports that the kernel gives out. Each job has 31 ports for its steps.
            port = 10000 + (job * 31 + number) % 20000
            self.address = first_host(env["SLURM_STEP_NODELIST"]), port
        else:
            # A requeued job keeps its number: it must not meet the file that its past has left.
            self.address = os.path.abspath(f"{dist_file}.{job}.{number}.{restarts}")
            folder = os.path.dirname(self.address)
            if not os.path.isdir(folder):
                raise ValueError(f"no folder {folder} for --dist-file")

    def agree(self, nprocs=None, sharing=False, seconds=600):
        """Tell the other tasks how many processes this one starts; sets what follows from all.

        nprocs: how many, by default one per GPU. sharing: whether processes may share a GPU. Sets
        `nprocs`, `world_size`, and, of the first process of this task, `rank` and `local_rank`.
        Raises ValueError when GPUs and tasks of any node do not go together: in task 0, while the
        others exit with 2.
        """
        visible = torch.cuda.device_count()
        own_gpus = 0 < visible < self.gpus_on_node  # Slurm gave each task GPUs of its own
        gpus = visible, self.gpus_on_node
        try:
            answer = processes_per_task(self.tasks_on_node, *gpus, nprocs, sharing)
        except ValueError as error:
            answer = str(error)
        # It lives as long as this task: the processes meet there too.
        self.store = self.open_store(seconds, host=self.task == 0)
        counts = exchange(self.store, self.task, self.tasks, answer)
        self.nprocs = counts[self.task]
        self.rank = sum(counts[: self.task])
        self.world_size = sum(counts)
        own_cores = len(os.sched_getaffinity(0)) < self.cores_on_node
        sharers = 1 if own_gpus or own_cores else self.tasks_on_node
        self.local_rank = self.local_task * self.nprocs
        self.local_world_size = sharers * self.nprocs

    def open_store(self, seconds, host=False):
        """The store where all meet. The task with `host` keeps it going as long as it lives."""
        timeout = timedelta(seconds=seconds)
        if isinstance(self.address, str):
            store = dist.FileStore(self.address, self.tasks)  # its file ends with the last of them
            store.set_timeout(timeout)
            return store
        return dist.TCPStore(*self.address, is_master=host, wait_for_workers=False, timeout=timeout)

    def __getstate__(self):
        """What mp.spawn hands to the processes: all but the store."""
        return {name: value for name, value in vars(self).items() if name != "store"}


def first_host(nodelist):
    """The first name in a Slurm node list such as gpu[01-03,07]-ib,login1."""
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", nodelist).partition(",")[0]


def tasks_per_node(counts):
    """The number of tasks of each node, a list: of "2(x3),1", as Slurm writes it, [2, 2, 2, 1]."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(count) for count, times in found for _ in range(int(times or 1))]


def processes_per_task(tasks, visible, on_node, nprocs=None, sharing=False):
    """How many processes each of the `tasks` of a node starts: `nprocs`, else one per GPU, or 1.

    visible: the GPUs that a task sees; on_node: those that the step has there, which are more
    where each task has its own. Raises ValueError when there are not enough for every process, or
    when they do not divide, unless processes may share them.
    """
    own_gpus = 0 < visible < on_node
    gpus = on_node if own_gpus else visible
    each = nprocs or (visible if own_gpus else visible // tasks) or 1
    idle = 0 if nprocs or own_gpus else gpus % tasks
    if gpus and not sharing and (idle or tasks * each > gpus):
        raise ValueError(
            f"{tasks} tasks x {each} processes on a node with {gpus} GPUs: start one task per GPU, "
            f"srun --ntasks-per-node={gpus} --gpus-per-node={gpus} python ..., or one per node, "
            f"srun --ntasks-per-node=1 --gpus-per-node={gpus} python ..., with its cores: -c N"
        )
    return each


def exchange(store, task, tasks, answer):
    """The answers of all tasks, a list: no task can see the GPUs of another node.

    An answer is a number, or a text that says what is wrong: task 0 raises the first of them as
    ValueError, and the others exit with 2, so nobody waits for them in vain.
    """
    store.set(f"task {task}", json.dumps(answer))
    answers = [json.loads(store.get(f"task {i}")) for i in range(tasks)]
    store.set(f"task {task} has read", "")
    if task == 0:
        store.wait([f"task {i} has read" for i in range(tasks)])  # the store may end with task 0
    errors = [answer for answer in answers if isinstance(answer, str)]
    if errors and task != 0:
        time.sleep(3)  # an exit can end the step: not before task 0 has said why
        os._exit(2)
    if errors:
        raise ValueError(errors[0])
    return answers
