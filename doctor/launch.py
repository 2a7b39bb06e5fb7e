"""Starts the script on several processes, and ends them when they stand still."""

import contextlib
import json
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .events import HERE, MESSAGES
from .files import hosts
from .options import text_of
from .recorder import dump
from .run import read
from .words import listed, say

# How often the patience of all waiting: where one process is idle elsewhere, or computes.
IDLE, BUSY = 8, 40
BY = os.path.join(os.path.dirname(__file__), "by.py")
# torch's, not numpy's SeedSequence.spawn(). Where this misses one, "spawns" is noted.
SPAWNS = re.compile(r"\b(mp|multiprocessing)\.spawn\(|(?<![\w.])spawn\(")


def examine(args, files, processes, nodes=1, quiet=False):
    """The Runs of the script, started once, to its end or until it hangs.

    files: the files.GuardedRun that keeps what the script touches. quiet: its output is not shown.
    """
    folder = tempfile.mkdtemp(prefix="events-", dir=os.fsdecode(files.journal.folder))
    by = Launcher(args, processes)
    # Lines are named from the script's folder; "?": --by alone, the current one.
    settings = {"folder": folder, "script": os.path.abspath(args.script or "?"), "nodes": nodes}
    settings |= {"patience": args.patience, "steps": args.steps, "launched": by.is_torchrun}
    settings |= {"gpus": args.gpus}
    known = {"OMP_NUM_THREADS": "1"} if processes > 1 else {}  # as torchrun sets it, with a warning
    job = subprocess.Popen(
        [*by.words, *script_words(args)],
        env=known | dump.SETTINGS | files.env() | {"DOCTOR": json.dumps(settings)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if quiet else None,
        stderr=subprocess.DEVNULL if quiet else None,
    )
    deaths = Deaths(folder)
    stopped = ""
    try:
        while job.poll() is None:
            deaths.wait(0.1)
            stopped = stopped or stands_still(folder, args.patience, deaths.gone)
            if stopped:
                stop(folder, deaths, ended_too=True)
                if by.is_torchrun:
                    job.kill()  # else it tells at length how its processes were killed
    finally:
        stop(folder, deaths)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(60)
        job.kill()
    runs = read(folder, deaths.alone)
    for run in runs:
        run.code, run.stopped = job.wait(), stopped
        run.aborted |= signal.SIGABRT in deaths.late
    return runs


def script_words(args):
    """The doctor and the script, behind a launcher; none if --by is the whole command.

    Then the processes below tell by themselves what they are: see below.py.
    """
    if not args.script:
        return []
    name = ["-m", args.script] if args.module else [os.path.abspath(args.script)]
    return [HERE, *name, *args.flags]


class Launcher:
    """How the script is started: words, and whether they are torchrun's."""

    def __init__(self, args, processes):
        own = args.starts_its_own or bool(SPAWNS.search(text_of(args)))
        self.is_torchrun = not (args.by or own)
        self.words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        self.words += [f"--nproc-per-node={processes}"]
        if args.by:
            first, *others = shlex.split(args.by)
            self.words = [sys.executable, BY, shutil.which(first), *others]
        elif own:
            self.words = [sys.executable]


class Deaths:
    """Sees at once when a process of the script is gone, and by which signal.

    A launcher that sees one fail ends the others: what was first is the cause. Of a process of
    another machine it is not known.
    """

    def __init__(self, folder):
        self.folder, self.files, self.poll = folder, {}, select.poll()
        self.gone = set()  # names of those that are, or were ended by the doctor: see hosts.who()
        self.alone = {}  # name: {"signal": ..., "order": ...}: without an end of their own
        self.late = set()  # signals that ended those whose script had ended

    def wait(self, seconds):
        """Until one dies, or so long."""
        for path in Path(self.folder).glob("*.jsonl"):
            name, pid = path.stem, hosts.pid_of(path.stem)
            if name not in self.files:
                self.files[name] = None
                if pid is None:
                    continue
                try:
                    self.files[name] = os.pidfd_open(pid)
                    self.poll.register(self.files[name], select.POLLIN)
                except ProcessLookupError:  # gone already
                    self.died(name)
                except (AttributeError, OSError):  # not Linux
                    pass
        if not any(self.files.values()):
            time.sleep(min(seconds, 0.1))
            return
        ready = {file for file, _ in self.poll.poll(1000 * seconds)}
        gone = [name for name, file in self.files.items() if file in ready]
        # Of several at once, those that were ended for another's death come last.
        for name in sorted(gone, key=self.was_terminated):
            self.poll.unregister(self.files[name])
            os.close(self.files[name])
            self.files[name] = None
            self.died(name)

    def was_terminated(self, name):
        """Whether SIGTERM came to it, by which launchers end the others: see process.begin()."""
        path = Path(self.folder, f"{name}.jsonl.terminated")
        return path.exists() and path.stat().st_size > 0

    def died(self, name):
        last = last_event(Path(self.folder, f"{name}.jsonl"))["kind"]
        number = signal_of(hosts.pid_of(name))
        if last == "end":
            self.late.add(number)
        elif name not in self.gone and last != "spawns":
            number = signal.SIGTERM if self.was_terminated(name) else number
            self.alone[name] = {"signal": number, "order": len(self.gone)}
        self.gone.add(name)


def signal_of(pid):
    """The signal that ended a process, while its parent has not asked; None if not known."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        status = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[49])
        return status & 127 or None
    return None


def stands_still(folder, patience, gone):
    """Why the run must be ended, or "". A process says every `patience` seconds that it stands.

    gone: processes that are no more: none waits for them, or else in vain.
    """
    last, ages = [], []
    for name, event in last_events(folder).items():
        if name not in gone:
            ages.append(time.time() - Path(folder, f"{name}.jsonl").stat().st_mtime)
            last.append(as_standing(event, ages[-1], patience))
    ended = [age for event, age in zip(last, ages, strict=True) if event["kind"] == "end"]
    if ended and min(ended) < patience:  # one that has just ended may have let the others go on
        return ""
    if ended == ages and min(ages, default=0) > IDLE * patience:
        return say("the script has ended, and something keeps its process: a thread?")
    if any(event["kind"] not in ("stands", "end") for event in last):
        return ""
    waiting = [event for event in last if event.get("where")]
    if not waiting:
        return none_goes_on(last, patience)
    last = [event for event in last if not event.get("outside")]
    others = [event for event in last if event["kind"] == "stands" and not event["where"]]
    # A process that computes may be waited for longest (BUSY). One that stands elsewhere is waited
    # for (IDLE), and so is one collective in which all are: it may be slow. Else each waits for
    # another in vain, as where all are in a recv(): each for the other's message.
    calls = [e for e in waiting if e["where"] not in (*MESSAGES, "wait()")]
    places = {(event["line"], event["where"]) for event in calls}
    slow = others or (len(calls) == len(last) and len(places) == 1)
    times = BUSY if any(event.get("busy") for event in last) else IDLE if slow else 1
    if not have_stood(last, times):
        return ""
    return say("it had stood still for {seconds} s: see --patience", seconds=times * patience)


def as_standing(event, age, patience):
    """A process that no longer says where it stands: Python itself stands in it."""
    if event["kind"] in ("stands", "end") or age < 2 * patience + 5:
        return event
    return {"kind": "stands", "line": event["line"], "where": None, "busy": True} | {
        "computes": False,
        "times": int(age / patience),
    }


def none_goes_on(last, patience):
    """All stand, and none waits for another: for a file, a lock or their loaders' workers."""
    if any(event.get("computes") for event in last):
        return ""
    if not have_stood(last, BUSY):
        return ""
    lines = listed(sorted({event["line"] for event in last if event["kind"] == "stands"}))
    seconds = BUSY * patience
    return say("it had stood still for {seconds} s at {lines}", seconds=seconds, lines=lines)


def have_stood(last, times):
    """Whether all have said so often that they stand still."""
    stood = [event["times"] for event in last if event["kind"] == "stands"]
    return min(stood, default=0) >= times


def last_events(folder):
    """{name of a process: its last event}"""
    paths = [path for path in Path(folder).glob("*.jsonl") if path.stat().st_size]
    return {path.stem: last_event(path) for path in paths}


def last_event(path):
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 20_000))
        line = (file.read().splitlines() or [b""])[-1]
    whole = line.startswith(b"{") and line.endswith(b"}")  # a step's may be longer
    return json.loads(line) if whole else {"kind": "?", "line": "?"}


def stop(folder, deaths, ended_too=False):
    """End those of this machine; the others end themselves when the doctor's file is gone."""
    for name, event in last_events(folder).items():
        pid = hosts.pid_of(name)
        if pid and (ended_too or event["kind"] != "end") and name not in deaths.gone:
            deaths.gone.add(name)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
