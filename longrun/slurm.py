"""Which processes a task of srun starts, and where all of them meet."""

import os
import re
from datetime import timedelta

import torch
import torch.distributed as dist

from common.loader import die_with_parent

from .messages import first_line


class SrunTask:
    """A task that srun has started; after agree() also the ranks of the processes that it starts.

    env: the environment of the task. dist_file: a path on shared storage, where the tasks meet;
    without one it is a TCP port of the first node. Raises ValueError outside of srun, where nodes
    have different numbers of tasks, and where dist_file cannot be.
    """

    def __init__(self, env, dist_file=None):
        # The highest numbers are the shell of sbatch or salloc, which runs on the first node only.
        step = int(env.get("SLURM_STEP_ID", 2**32))
        if step > 2**32 - 9:
            command = "srun -K -N2 --gres gpu:4 -c 32 python distributed_slurm_main.py"
            raise ValueError(f"not a task of srun: {command}")
        die_with_parent()  # Slurm's, if that is killed
        self.number, self.tasks = int(env["SLURM_PROCID"]), int(env["SLURM_NTASKS"])
        self.local_number = int(env["SLURM_LOCALID"])
        self.gpus_on_node = int(env.get("SLURM_GPUS_ON_NODE", 0))
        self.cores_on_node = int(env["SLURM_CPUS_ON_NODE"])
        counts = env["SLURM_STEP_TASKS_PER_NODE"]  # such as 4(x2), or 4(x2),3 where they differ
        if "," in counts:
            raise ValueError(f"{counts} tasks on the nodes: use --ntasks-per-node")
        self.tasks_on_node = int(counts.partition("(")[0])
        job, restarts = int(env["SLURM_JOB_ID"]), env.get("SLURM_RESTART_COUNT", 0)
        if dist_file is None:
            # Below the ports that the kernel gives out. Each job has 31 ports for its steps.
            port = 10000 + (job * 31 + step) % 20000
            self.address = first_host(env["SLURM_STEP_NODELIST"]), port
        else:
            # A requeued job keeps its number: it must not meet the file that its past has left.
            self.address = os.path.abspath(f"{dist_file}.{job}.{step}.{restarts}")
            folder = os.path.dirname(self.address)
            if not os.path.isdir(folder):
                raise ValueError(f"no folder {folder} for --dist-file")

    def agree(self, nprocs=None, sharing=False, seconds=600):
        """Find how many processes each task starts; all tasks call it, and start as many.

        nprocs: how many, by default one per GPU. sharing: whether processes may share a GPU. Sets
        `nprocs`, `world_size`, `local_world_size`, and, of the first process of this task, `rank`
        and `local_rank`. Raises ValueError when GPUs and tasks do not go together, when nodes have
        different numbers of GPUs, and when the tasks cannot meet.
        """
        visible, on_node = torch.cuda.device_count(), self.tasks_on_node
        self.nprocs = processes_per_task(on_node, visible, self.gpus_on_node, nprocs, sharing)
        # It lives as long as this task: the processes meet there too.
        self.store = self.open_store(seconds, host=self.number == 0)
        try:
            if self.number == 0:
                self.store.set("nprocs", str(self.nprocs))
                # The store ends with this task, which a wrong flag may end next: first all connect.
                self.store.wait([f"task {number}" for number in range(1, self.tasks)])
            first = int(self.store.get("nprocs"))
            self.store.set(f"task {self.number}", "agreed")
        except RuntimeError as error:  # after `seconds`, or when task 0 has ended
            problem = "a task of this step did not come: see what the others say"
            raise ValueError(f"{problem}; {first_line(error)}") from None
        if first != self.nprocs:
            counts = f"task {self.number} would start {self.nprocs} processes and task 0 {first}"
            raise ValueError(f"{counts}: take nodes with as many GPUs each, or give --nprocs")
        self.rank, self.world_size = self.number * self.nprocs, self.tasks * self.nprocs
        self.local_rank = self.local_number * self.nprocs
        # Slurm may give each task cores of its own, or GPUs: nobody else uses those.
        cores = sorted(os.sched_getaffinity(0))
        own_cores, own_gpus = len(cores) < self.cores_on_node, 0 < visible < self.gpus_on_node
        if own_gpus and not own_cores:  # --cpu-bind=none: all tasks would take all cores
            each = len(cores) // on_node
            mine = cores[self.local_number * each : (self.local_number + 1) * each]
            os.sched_setaffinity(0, mine or cores)  # none: there are more tasks than cores
        self.local_world_size = self.nprocs * (1 if own_cores or own_gpus else on_node)

    def open_store(self, seconds, host=False):
        """The store where all meet. The task with `host` keeps it going as long as it lives."""
        timeout = timedelta(seconds=seconds)
        if isinstance(self.address, str):
            store = dist.FileStore(self.address, self.tasks)  # its file ends with the last of them
            store.set_timeout(timeout)
            return store
        try:
            return dist.TCPStore(
                *self.address, is_master=host, wait_for_workers=False, timeout=timeout
            )
        except RuntimeError as error:  # such as: another program has this port
            place = ":".join(map(str, self.address))
            problem = (
                f"the tasks cannot meet at {place}: give --dist-file, a path on shared storage"
            )
            raise ValueError(f"{problem}; {first_line(error)}") from None

    def __getstate__(self):
        return vars(self) | {"store": None}  # mp.spawn cannot hand it to the processes


def first_host(nodelist):
    """The first name in a Slurm node list such as gpu[01-03,07]-ib,login1."""
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", nodelist).partition(",")[0]


def processes_per_task(tasks, visible, on_node, nprocs=None, sharing=False):
    """How many processes each of the `tasks` of a node starts: `nprocs`, else one per GPU, or 1.

    visible: the GPUs that a task sees; on_node: those that the step has there, which are more
    where each task has its own. Raises ValueError when there are not enough for every process,
    unless processes may share them.
    """
    own = 0 < visible < on_node
    gpus = on_node if own else visible
    each = nprocs or (visible if own else visible // tasks) or 1
    if gpus and not sharing and tasks * each > gpus:
        raise ValueError(
            f"{tasks} tasks x {each} processes on a node with {gpus} GPUs: start one task per GPU, "
            f"srun --ntasks-per-node={gpus} --gpus-per-node={gpus} python ..., or one per node, "
            f"srun --ntasks-per-node=1 --gpus-per-node={gpus} python ..., with its cores: -c N"
        )
    return each
