"""How the tasks of a Slurm step meet and agree on who is who. Nothing here asks Slurm."""

import json
import os
import re
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def meeting_point(nodelist, job, step, restart, dist_file):
    """Where the tasks of a step find each other: (host, port), or the path of a file."""
    if dist_file is None:
        # Below the ports that the kernel gives out; 31 steps in a job before it meets the next's.
        return first_host(nodelist), 10000 + (job * 31 + step) % 20000
    # A requeued job keeps its number: it must not meet the file that its past has left.
    path = os.path.abspath(f"{dist_file}.{job}.{step}.{restart}")
    if not os.path.isdir(os.path.dirname(path)):
        raise ValueError(f"no folder {os.path.dirname(path)} for --dist-file")
    return path


def first_host(nodelist):
    """The first name in a Slurm node list such as gpu[01-03,07]-ib,login1."""
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", nodelist).partition(",")[0]


def open_store(point, tasks, timeout, host=False):
    """The store at a meeting_point(). The task with `host` keeps it going as long as it lives."""
    timeout = timedelta(seconds=timeout)
    if isinstance(point, str):
        store = dist.FileStore(point, tasks)  # its file ends with the last of them
        store.set_timeout(timeout)
        return store
    return dist.TCPStore(*point, is_master=host, wait_for_workers=False, timeout=timeout)


def agree(store, number, tasks, **about):
    """Tell the other tasks about this one, listen to them; returns its place (see layout).

    A task can see neither the GPUs of another node nor with whom it shares its own.
    """
    about |= {"visible": torch.cuda.device_count(), "cores": sorted(os.sched_getaffinity(0))}
    store.set(f"task {number}", json.dumps(about))
    heard = [json.loads(store.get(f"task {i}")) for i in range(tasks)]
    store.set(f"task {number} has heard", "")
    try:
        return layout(heard)[number]
    except ValueError:
        if number != 0:  # all meet the same error: task 0 says it before an exit ends the step
            time.sleep(3)
            os._exit(2)
        for i in range(tasks):  # the store may end with this task
            store.get(f"task {i} has heard")
        raise


def layout(tasks):
    """For each task (processes, first rank, first local rank, local world size, world size).

    tasks: what they tell about themselves, by number: `node` (its number), `cores`, and what
    processes_per_task() takes. Ranks go by node, whatever --distribution says. The local world
    size counts the processes that share the cores of the task, if not its GPUs.
    """
    places, world_size = {}, 0
    for node in sorted({task["node"] for task in tasks}):
        here = {i: task for i, task in enumerate(tasks) if task["node"] == node}
        counts = {i: processes_per_task(len(here), **task) for i, task in here.items()}
        local_rank = 0
        for i, task in here.items():
            own = 0 < task["visible"] < (task["on_node"] or 0)
            near = [j for j in here if not own and set(task["cores"]) & set(here[j]["cores"])]
            places[i] = [counts[i], world_size, local_rank, sum(counts[j] for j in near or [i])]
            local_rank, world_size = local_rank + counts[i], world_size + counts[i]
    return [[*places[i], world_size] for i in range(len(tasks))]


def processes_per_task(tasks, visible, on_node=None, nprocs=None, share=False, **_):
    """How many processes each of the `tasks` of a node starts: `nprocs`, else one per GPU, or 1.

    visible: the GPUs that a task sees; on_node: those that the step has there, which are more
    where each task has its own. Raises ValueError when there are not enough for every process, or
    when they do not divide, unless processes may `share` them.
    """
    gpus = max(visible, on_node or 0) if visible else 0
    own = visible < gpus
    each = nprocs or (visible if own else visible // tasks) or 1
    idle = 0 if nprocs or own else gpus % tasks
    if gpus and not share and (idle or tasks * each > gpus):
        raise ValueError(
            f"{tasks} tasks x {each} processes on a node with {gpus} GPUs: start one task per GPU, "
            f"srun --ntasks-per-node={gpus} --gpus-per-node={gpus} python ..., or one per node, "
            f"srun --ntasks-per-node=1 --gpus-per-node={gpus} python ..."
        )
    return each
