"""Ends all that a run has started: Python or not, also what has left its parent."""

import contextlib
import ctypes
import fcntl
import os
import signal
import time

RUN = "DOCTOR_FILES"  # the variable that tells a process of the run its doctor's alive-...
PDEATHSIG, CHILD_SUBREAPER = 1, 36  # of prctl


def prctl(option, value):
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def end_processes(marks, spared=()):
    """Kill all that the run has started, until none is left; returns those that do not die."""
    until = time.monotonic() + 10
    while alive := processes(marks) - {*spared}:
        for pid in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > until:
            return sorted(alive)
        time.sleep(0.02)
    return []


def end_run(alive):
    """For a process whose doctor is gone: it ends all the others, then itself.

    What is no Python does not see that: a shell would go on and write. alive: the doctor's file.
    """
    try:
        # One does it: two would end each other, and leave the others. The file is closed by death.
        with contextlib.suppress(OSError):
            file = os.open(os.path.join(os.path.dirname(alive), b"heartbeat"), os.O_RDONLY)
            fcntl.flock(file, fcntl.LOCK_EX)
        end_processes([alive])
    finally:
        os.kill(os.getpid(), signal.SIGKILL)


def processes(marks):
    """Those below this one, and those that have one of the marks in their environment."""
    if not os.path.isdir("/proc/self"):
        return below_by_ps()
    parent_of, marked = {}, set()
    marks = {RUN.encode() + b"=" + mark for mark in marks}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError):
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b") ")[2].split()
            if fields[0] in (b"Z", b"X"):
                continue
            parent_of[int(name)] = int(fields[1])
            with open(f"/proc/{name}/environ", "rb") as file:
                if marks & {*file.read().split(b"\0")}:
                    marked.add(int(name))
    return (marked | below(parent_of)) - {os.getpid()}


def below(parent_of):
    """All descendants of this process."""
    found, new = set(), {os.getpid()}
    while new:
        new = {pid for pid, parent in parent_of.items() if parent in new} - found
        found |= new
    return found


def below_by_ps():
    import subprocess

    ps = subprocess.Popen(["ps", "-axo", "pid=,ppid="], stdout=subprocess.PIPE)
    pairs = [line.split() for line in ps.communicate()[0].splitlines()]
    return below({int(pid): int(up) for pid, up in pairs}) - {ps.pid}
