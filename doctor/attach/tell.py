"""What is told of a job, and why a process could not be read."""

import os
import re

from . import ranks
from .judges import findings
from .words import at, names


def tell(sight):
    """Print where the ranks are and what was found; returns the exit code.

    It is 0 if nothing hangs, 1 for a mistake, 3 for a job that stands still without one, and 2 if
    no rank could be read.
    """
    seconds = max((one.get("seconds", 0) for one in sight.ranks), default=0)
    count = f"{len(sight.ranks)} ranks" if len(sight.ranks) > 1 else "1 rank"
    print(f" {count} of: {sight.command[:100]}; looked at for {seconds:.0f} s")
    for group in together(sight.ranks):
        print(f" {names(one['rank'] for one in group):9} {doing(group)}")
    if sight.gone:
        print(f" {names(sight.gone):9} no such process: it has ended, or was killed")
    if sight.elsewhere:
        print(f" {names(sight.elsewhere):9} not on this machine, or gone")
    for reason in {one["error"] for one in sight.that("unread")}:
        print(remedy(reason))
    found = findings(sight)
    for one in found:
        line = f"{one.line}  " if one.line else ""
        print(f" {line}{one.text}  → docs/{one.place}")
    if any(one.mistake for one in found):
        return 1
    if any(one.hangs for one in found):
        return 3
    return 2 if sight.that("unread") else 0


def together(found):
    """Those that do the same at one line, in the order of their ranks."""
    groups = {}
    for one in found:
        key = [one.get(name) for name in ("state", "words", "file", "line", "error")]
        groups.setdefault(str(key), []).append(one)
    return groups.values()


def doing(group):
    """What ranks of one place do, in words."""
    one = group[0]
    if one["state"] == "gone":
        return "has ended between the looks"
    if one["state"] == "stopped":
        return "stopped by a signal"
    if one["state"] == "unread":
        return "could not be read"
    call = f" in {one['words']}" if one["words"] else ""
    text = f"  {one['text'].partition('  #')[0][:60]}" if one["text"] else ""
    verb = one["state"] if len(group) == 1 else one["state"][:-1]
    return f"{verb}{call}, {at(one)} {one['function']}(){text}"


def remedy(reason):
    """What to do where a process may not be read."""
    if not re.search("denied|not permitted", reason):
        last = next((line for line in reason.splitlines() if line.strip()), "")
        return f" py-spy could not read a process: {last}"
    said = " a process may not be read by another (ptrace). Either:"
    if in_container():
        said += "\n - start the container with it: docker run --cap-add SYS_PTRACE ..."
        said += '\n   in Kubernetes securityContext: {capabilities: {add: ["SYS_PTRACE"]}}'
        said += "\n - or look from outside of it, as root"
    if os.getuid():
        said += '\n - as root: sudo env "PATH=$PATH" python doctor --attach'
    if scope() and not in_container():
        said += "\n - allow it until the next start: sudo sysctl kernel.yama.ptrace_scope=0"
    return said


def scope():
    """Yama's: 1 lets a process be read by its parents alone, 2 by root; 0, or none: by its user."""
    try:
        with open("/proc/sys/kernel/yama/ptrace_scope") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0


def in_container():
    return os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv") or not may_trace()


def may_trace():
    """Whether root has the right to, which a container takes from it."""
    capabilities = re.search(r"CapEff:\s*(\w+)", ranks.read("self", "status"))
    return os.getuid() != 0 or bool(capabilities and int(capabilities[1], 16) >> 19 & 1)


def jobs(found):
    """The list, where there are several."""
    said = [" several jobs run here: name one of its processes"]
    for job in found:
        pids = ", ".join(str(rank.pid) for rank in job.ranks[:4])
        pids += ", ..." if len(job.ranks) > 4 else ""
        said.append(f" python doctor --attach {job.ranks[0].pid}")
        said.append(f"   {names(r.rank for r in job.ranks)}, pids {pids}: {job.command[:100]}")
    return "\n".join(said)
