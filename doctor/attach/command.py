"""The command: python doctor --attach."""

import argparse
import os
import socket
import sys
from pathlib import Path

from ..words import listed, on_screen, say
from . import look, ranks, sight, slurm, spawned, tell

INSTALL = say("it needs py-spy: {command}", command="python -m pip install py-spy")


def parse_args(words):
    about = "Look at a job that runs, or hangs, now, on this machine; it goes on unharmed."
    parser = argparse.ArgumentParser(prog="doctor --attach", description=about)
    add = parser.add_argument
    add(
        "what",
        nargs="*",
        metavar="PID or FILE",
        help="one of the job's processes; or --out's files",
    )
    add("--seconds", type=seconds, default=5, help="from the first look to the last (default: 5)")
    add("--out", metavar="FILE", help="write what was seen on this machine, to be joined elsewhere")
    add("--slurm", metavar="JOB", help="look at all nodes of a job of Slurm")
    add("--slurm-job", help=argparse.SUPPRESS)  # on one node: of --slurm
    add(
        "--nonblocking",
        action="store_true",
        help="do not stop a process for the milliseconds of a look",
    )
    args = parser.parse_args(words)
    numbers = [one.isdigit() for one in args.what]
    if any(numbers) and not all(numbers):
        parser.error("give processes of one job, or files of --out")
    if args.slurm and args.what:
        parser.error("--slurm finds the processes itself")
    return args


def seconds(text):
    value = float(text)
    if not 0.5 <= value <= 3600:
        raise argparse.ArgumentTypeError("0.5 to 3600: a look alone does not show what stands")
    return value


def main(words):
    """Exits: 0 if nothing hangs, 1: a mistake, 3: it stands still, 2: it could not be looked at."""
    args = parse_args(words)
    try:
        if args.slurm:
            found = joined(*zip(*slurm.reports(args), strict=True))
        elif args.what and not args.what[0].isdigit():
            files = [(text_of(name), name) for name in args.what]
            found = joined(*zip(*files, strict=True))
        else:
            found = here(args)
        if args.out and args.out != "-":
            Path(args.out).write_text(sight.written(found))
    except (OSError, ValueError) as error:
        sys.exit(fail(error))
    if args.out == "-":  # to srun, a line for each node
        print(sight.written(found).replace("\n", ""))
        sys.exit(0)
    if args.out:
        text = say(
            "written: {file}. Join those of all machines: {command}",
            file=args.out,
            command="python doctor --attach FILE...",
        )
        print(f" {on_screen(text)}")
    sys.exit(tell.tell(found))


def text_of(name):
    if not Path(name).is_file():
        raise ValueError(say("{name} is neither a process nor a file of --out", name=name))
    return Path(name).read_text(errors="replace")


def fail(error):
    said = error.args[0] if len(error.args) == 1 else str(error)
    print(f" doctor --attach: {on_screen(said)}", file=sys.stderr)
    return 2


def joined(texts, names):
    known = [sight.read(text, name) for text, name in zip(texts, names, strict=True)]
    return sight.joined(known[0][0], [one for _, part in known for one in part])


def here(args):
    """The Sight of a job of this machine. ValueError says why there is none."""
    if not os.path.isdir("/proc/self"):
        raise ValueError(say("it finds processes in /proc, which only Linux has"))
    if not look.py_spy():
        raise ValueError(INSTALL)
    found = ranks.processes()
    job = chosen(args, found)
    looks = look.looks_at([rank.pid for rank in job.ranks], args.seconds, args.nonblocking)
    seen = [look.seen(rank, looks[rank.pid], found, args.nonblocking) for rank in job.ranks]
    host = socket.gethostname()
    return sight.joined(job.command, [one | {"host": host} for one in seen])


def chosen(args, found):
    """The Job that is asked for, or the only one."""
    jobs = ranks.jobs_of(found)
    given = [int(pid) for pid in args.what]
    left = [pid for pid in given if not any(holds(job, pid, found) for job in jobs)]
    if left or not given:
        jobs += spawned.spawned(found, jobs, left, args.nonblocking)
    if args.slurm_job:
        jobs = of_this_node(args.slurm_job, found, jobs)
    if given:
        chosen = [job_of(pid, found, jobs) for pid in given]
        if any(job != chosen[0] for job in chosen):
            raise ValueError(say("these processes are of several jobs: give those of one"))
        return chosen[0]
    if len(jobs) == 1:
        return jobs[0]
    if jobs:
        raise ValueError(listed(["", tell.jobs(jobs)], "\n ", "\n "))
    closed = ranks.unreadable(found)
    if closed:
        pids = ", ".join(str(one.pid) for one in closed[:4])
        text = say(
            "no rank is found\n{count} Python processes ({pids}) belong to others, or are "
            "closed:\n {remedy}",
            count=len(closed),
            pids=pids,
            remedy=tell.remedy("denied"),
        )
        raise ValueError(text)
    raise ValueError(say("no rank runs on this machine: give the id of a process"))


def of_this_node(number, found, jobs):
    """The ranks that Slurm's job has here: two nodes may be one machine."""
    mine = {"SLURM_JOB_ID": number, "SLURMD_NODENAME": os.environ.get("SLURMD_NODENAME")}
    chosen = []
    for job in jobs:
        envs = {rank.pid: found[rank.pid].env for rank in job.ranks}
        here = [r for r in job.ranks if mine.items() <= envs[r.pid].items()]
        chosen += [job._replace(ranks=here)] if here else []
    return chosen


def holds(job, pid, found):
    """Whether a process is above a rank of the job, or is a rank, or below one."""
    below = ranks.tree(pid, found)
    return any(one.pid in below or pid in ranks.tree(one.pid, found) for one in job.ranks)


def job_of(pid, found, jobs):
    if pid not in found:
        raise ValueError(say("no process {pid}", pid=pid))
    for job in jobs:
        if holds(job, pid, found):
            return job
    if not found[pid].python:
        raise ValueError(say("{pid} is no Python process, and has started no rank", pid=pid))
    size = (found[pid].env or {}).get("WORLD_SIZE", "")
    size = int(size) if size == "1" else None  # of several its number would have to be known, too
    return ranks.Job((), found[pid].command, [ranks.Rank(pid, 0, size, 0, size)])
