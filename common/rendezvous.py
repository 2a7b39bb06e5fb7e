"""How processes find each other: torchrun's, and the tasks of a Slurm step."""

import hashlib
import json
import os
import re
import time
import uuid
from datetime import timedelta

import torch.distributed as dist


def fresh_store(rank, world_size, timeout):
    """The store that the environment names, without what others left in it.

    torchrun (2.15) goes on with the same store when it restarts its workers, who would connect to
    the addresses of the dead. So each writes a number of its own, and looks under the hash of all
    numbers; a hash that every rank has come to is of living ones only. timeout: a timedelta.
    Raises TimeoutError, with the ranks that have not come.
    """
    seconds, key = timeout.total_seconds(), None
    store, *_ = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))
    store.set(f"number {rank}", uuid.uuid4().hex)
    while True:
        numbers = [store.get(f"number {r}") for r in range(world_size)]
        before, key = key, hashlib.blake2b(b"".join(numbers), digest_size=8).hexdigest()
        if key != before:
            end = time.monotonic() + seconds  # somebody has come
        store.set(f"{key} {rank}", "")
        if store.check([f"{key} {r}" for r in range(world_size)]):
            return dist.PrefixStore(key, store)
        if time.monotonic() > end:
            late = [str(r) for r in range(world_size) if not store.check([f"{key} {r}"])]
            raise TimeoutError(f"no sign of rank {', '.join(late)} for {seconds:g} s")
        time.sleep(0.05)


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


def tasks_on_node(counts, node):
    """How many tasks a node has: in "2(x3),1", which Slurm writes for 2, 2, 2, 1, the node-th."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(count) for count, times in found for _ in range(int(times or 1))][node]


def processes_per_task(tasks, visible, on_node, nprocs=None, share=False):
    """How many processes each of the `tasks` of a node starts: `nprocs`, else one per GPU, or 1.

    visible: the GPUs that a task sees; on_node: those that the step has there, which are more
    where each task has its own. Raises ValueError when there are not enough for every process, or
    when they do not divide, unless processes may `share` them.
    """
    own = 0 < visible < on_node
    gpus = on_node if own else visible
    each = nprocs or (visible if own else visible // tasks) or 1
    idle = 0 if nprocs or own else gpus % tasks
    if gpus and not share and (idle or tasks * each > gpus):
        raise ValueError(
            f"{tasks} tasks x {each} processes on a node with {gpus} GPUs: start one task per GPU, "
            f"srun --ntasks-per-node={gpus} --gpus-per-node={gpus} python ..., or one per node, "
            f"srun --ntasks-per-node=1 --gpus-per-node={gpus} python ..., with its cores: -c N"
        )
    return each


def open_store(point, tasks, timeout, host=False):
    """The store at a meeting_point(). The task with `host` keeps it going as long as it lives."""
    timeout = timedelta(seconds=timeout)
    if isinstance(point, str):
        store = dist.FileStore(point, tasks)  # its file ends with the last of them
        store.set_timeout(timeout)
        return store
    return dist.TCPStore(*point, is_master=host, wait_for_workers=False, timeout=timeout)


def exchange(store, number, tasks, count):
    """What count() gives in each task, by number: no task can see the GPUs of another node.

    A ValueError of one is raised in task 0, and ends the others: nobody waits for it in vain.
    """
    try:
        told = count()
    except ValueError as error:
        told = str(error)
    store.set(f"task {number}", json.dumps(told))
    told = [json.loads(store.get(f"task {i}")) for i in range(tasks)]
    store.set(f"task {number} has heard", "")
    if number == 0:
        store.wait([f"task {i} has heard" for i in range(tasks)])  # the store may end with task 0
    errors = [answer for answer in told if isinstance(answer, str)]
    if errors and number != 0:
        time.sleep(3)  # an exit can end the step: not before task 0 has said why
        os._exit(2)
    if errors:
        raise ValueError(errors[0])
    return told
