"""Finds the ranks among the processes of this machine, by the variables that a launcher sets."""

import contextlib
import os
import re
from typing import NamedTuple

# What a launcher sets: the rank, how many there are, the same two on this machine, and what tells
# its job from others. torchrun's come first: Slurm's are also in the environment of what it starts.
NAMES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", ("MASTER_ADDR", "MASTER_PORT")),
    (
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        "HOROVOD_LOCAL_RANK",
        "HOROVOD_LOCAL_SIZE",
        ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    ),
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE",),
    ),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "", ("SLURM_JOB_ID", "SLURM_STEP_ID")),
    # Lightning's, on the first of its machines: there the local number is the rank.
    ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", ("MASTER_ADDR", "MASTER_PORT")),
)
LAUNCHER = re.compile(
    r"(^|/)(torchrun|accelerate|deepspeed|horovodrun|mpirun|srun)( |$)"
    r"|-m (torch\.distributed\.(run|launch)|accelerate\.commands|deepspeed\.launcher)"
)
HELPER = "multiprocessing.resource_tracker import"  # Python's own, beside a rank
HERE = {"localhost", "127.0.0.1", "::1"}


class Process(NamedTuple):
    pid: int
    parent: int
    env: dict  # as it was started; None if it may not be read
    command: str
    python: bool
    torch: bool  # it has loaded torch
    gpu: bool  # it has opened one


class Rank(NamedTuple):
    pid: int
    rank: int | None  # None: to be read from its stack
    size: int | None  # of the job
    local: int | None
    here: int | None  # how many there are on this machine; None: not known


class Job(NamedTuple):
    key: tuple
    command: str
    ranks: list  # of Rank


def processes():
    """{process id: Process}, without this one."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError, IndexError):
            if int(name) != os.getpid():
                found[int(name)] = process(int(name))
    return found


def process(pid):
    state, parent = read(pid, "stat").rpartition(")")[2].split()[:2]
    command = read(pid, "cmdline").replace("\0", " ").strip()
    if state == "Z" or not command:
        raise ValueError("it has ended, or is a thread of the kernel")
    env, maps = None, ""
    with contextlib.suppress(OSError):  # another user's
        pairs = [text.split("=", 1) for text in read(pid, "environ").split("\0") if "=" in text]
        env = dict(pairs)
        maps = read(pid, "maps")
    python = "python" in os.path.basename(command.split()[0])
    python = python or "libpython" in maps
    return Process(
        pid, int(parent), env, command, python, "libtorch" in maps, "/dev/nvidia" in maps
    )


def read(pid, name):
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read().decode(errors="replace")


def tree(pid, found):
    """The ids of a process and of all that it has started."""
    below = [pid]
    for one in below:
        below += [process.pid for process in found.values() if process.parent == one]
    return below


def above(process, found):
    """Its ancestors, the nearest first."""
    while process.parent in found:
        process = found[process.parent]
        yield process


def jobs_of(found):
    """[Job] of the ranks that have a number in their environment."""
    candidates = {}  # pid: (variables, key)
    for one in found.values():
        names = one.python and not LAUNCHER.search(one.command) and names_of(one)
        if names and (one.torch or names[0] == "RANK"):  # Slurm's are in any program's environment
            key = tuple(one.env.get(name, "") for name in (names[0], *names[4]))
            candidates[one.pid] = names, key
    jobs = {}
    for pid, (names, key) in candidates.items():
        if not is_below_its_like(found[pid], candidates, found):
            one = found[pid]
            job = jobs.setdefault((names[0], *key[1:]), Job(key[1:], one.command, []))
            job.ranks.append(rank_of(one, names))
    for (name, *_), job in jobs.items():
        job.ranks.extend(starter(job.ranks, found) if name == "LOCAL_RANK" else [])
    return [
        job._replace(ranks=sorted(job.ranks, key=lambda rank: rank.rank)) for job in jobs.values()
    ]


def names_of(one):
    """The row of NAMES that holds a process's number, or None."""
    env = one.env or {}
    row = next((row for row in NAMES if env.get(row[0], "").isdigit()), None)
    if row and row[0] == "LOCAL_RANK":
        known = "WORLD_SIZE" in env and "MASTER_PORT" in env and env.get("NODE_RANK", "0") == "0"
        # Rank 0 has set the variables in itself: its loader's workers, if spawned, start with them.
        return row if known and "multiprocessing." not in one.command else None
    return row


def starter(known, found):
    """[Rank] of rank 0, if it has started the others: its own environment was without a number."""
    parents = {found[rank.pid].parent for rank in known}
    parent = found.get(parents.pop()) if len(parents) == 1 else None
    known_so = all(rank.rank and "NODE_RANK" in found[rank.pid].env for rank in known)
    if known_so and parent and parent.torch and parent.python:
        return [known[0]._replace(pid=parent.pid, rank=0, local=0)]
    return []


def is_below_its_like(one, candidates, found):
    """A loader's worker, or another helper, has the variables of the rank that has started it.

    Of a chain the first that has loaded torch is the rank: a shell or a wrapper may be above it.
    """
    mine = candidates[one.pid]
    chain = [p for p in above(one, found) if candidates.get(p.pid) == mine]
    if HELPER in one.command or any(process.torch for process in chain):
        return True
    if one.torch:
        return False
    below = [found[pid] for pid in tree(one.pid, found)[1:]]
    is_launcher = any(p.torch and p.pid in candidates for p in below)
    return bool(chain) or is_launcher


def rank_of(process, names):
    number = {n: int(process.env[n]) for n in names[:4] if process.env.get(n, "").isdigit()}
    size, here = number.get(names[1]), number.get(names[3])
    alone = process.env.get("SLURM_STEP_NUM_NODES") == "1" if names[0] == "SLURM_PROCID" else False
    if here is None and (alone or process.env.get("MASTER_ADDR") in HERE or size == 1):
        here = size
    return Rank(process.pid, number[names[0]], size, number.get(names[2]), here)


def maybe_spawned(found, jobs):
    """{parent's id: [Process]}: those that a Python process may have started as ranks.

    Their numbers are arguments of a function, as mp.spawn() passes them; the workers of a loader
    are among them. Only their stacks tell.
    """
    taken = {pid for job in jobs for rank in job.ranks for pid in tree(rank.pid, found)}
    groups = {}
    for one in found.values():
        parent = found.get(one.parent)
        if not (one.torch and one.python and parent and parent.python) or one.pid in taken:
            continue
        if HELPER not in one.command and not LAUNCHER.search(parent.command):
            groups.setdefault(parent.pid, []).append(one)
    return groups


def unreadable(found):
    """Python processes whose environment may not be read."""
    return [one for one in found.values() if one.env is None and one.python]
