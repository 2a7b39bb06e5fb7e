"""What is told of a job, and why a process could not be read."""

import os
import re
import time

from ..words import listed, on_screen, page, say
from . import ranks, source
from .judges import findings
from .words import at, names

RERUN = "python doctor SCRIPT"


def tell(sight):
    """Print where the ranks are and what was found; returns the exit code.

    It is 0 if nothing hangs, 1 for a mistake, 3 for a job that stands still without one, and 2 if
    no rank could be read.
    """
    seconds = max((one.get("seconds", 0) for one in sight.ranks), default=0)
    folders = {one.get("folder", "") for one in sight.ranks} - {""}
    known = {"command": short(sight.command, folders), "folder": listed(sorted(folders))}
    known["seconds"] = seconds
    if len(sight.ranks) > 1:
        text = say(
            "{count} ranks of: {command}, in {folder}; looked at for {seconds:.0f} s",
            **known,
            count=len(sight.ranks),
        )
    else:
        text = say("1 rank of: {command}, in {folder}; looked at for {seconds:.0f} s", **known)
    print(f" {on_screen(text)}")
    for group in together(sight.ranks):
        print(row([one["rank"] for one in group], doing(group)))
    if sight.gone:
        print(row(sight.gone, say("no such process: it has ended, or was killed")))
    if sight.elsewhere:
        print(row(sight.elsewhere, say("not on this machine, or gone")))
    for reason in {one["error"] for one in sight.that("unread")}:
        print(f" {on_screen(remedy(reason))}")
    found = findings(sight)
    for one in found:
        line = f"{one.line}  " if one.line else ""
        print(f" {line}{on_screen(one.text)}  → {page(one.place)}")
    if any(one.line and one.hangs for one in found):
        text = say(
            "why it came so is seen from the start: {command}, in a copy of the folder",
            command=RERUN,
        )
        print(f" {on_screen(text)}")
    if any(one.mistake for one in found):
        return 1
    if any(one.hangs for one in found):
        return 3
    return 2 if sight.that("unread") else 0


def short(command, folders):
    """It is told beside the folders in which it runs: their names are left out of it."""
    for folder in folders:
        command = command.replace(f" {folder}/", " ") if folder else command
    return command if len(command) <= 100 else f"{command[:97]}..."


def row(numbers, said):
    return f" {on_screen(names(numbers)):9} {on_screen(said)}"


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
        return say("has ended between the looks")
    if one["state"] == "stopped":
        return say("stopped by a signal")
    if one["state"] == "unread":
        return say("could not be read")
    code = f"  {one['text'].partition('  #')[0][:60]}" if one["text"] else ""
    if one["state"] == "works":
        verb = say("works") if len(group) == 1 else say("work")
    else:
        verb = say("stands") if len(group) == 1 else say("stand")
    known = {"does": verb, "line": at(one), "function": f"{one['function']}(){code}"}
    if one["words"]:
        return say("{does} in {call}, {line} {function}", **known, call=one["words"])
    return say("{does}, {line} {function}", **known)


def remedy(reason):
    """What to do where a process may not be read."""
    if not re.search("denied|not permitted", reason):
        last = next((line for line in reason.splitlines() if line.strip()), "")
        return say("py-spy could not read a process: {error}", error=last)
    said = [say("a process may not be read by another (ptrace). Either:")]
    if in_container():
        command = "docker run --cap-add SYS_PTRACE ..."
        said.append(say("- start the container with it: {command}", command=command))
        setting = '{capabilities: {add: ["SYS_PTRACE"]}}'
        said.append(say("  in Kubernetes securityContext: {setting}", setting=setting))
        said.append(say("- or look from outside of it, as root"))
    if os.getuid():
        command = 'sudo env "PATH=$PATH" python doctor --attach'
        said.append(say("- as root: {command}", command=command))
    if scope() and not in_container():
        command = "sudo sysctl kernel.yama.ptrace_scope=0"
        said.append(say("- allow it until the next start: {command}", command=command))
    return listed(said, "\n ", "\n ")


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
    said = [say("several jobs run here: give a process of one")]
    for job in found:
        pids = ", ".join(str(rank.pid) for rank in job.ranks[:4])
        pids += ", ..." if len(job.ranks) > 4 else ""
        said.append(f"python doctor --attach {job.ranks[0].pid}")
        ranks_of = names(rank.rank for rank in job.ranks)
        folder = source.folder_of(job.ranks[0].pid)
        said.append(
            say(
                "  {ranks}, pids {pids}, since {time}: {command}, in {folder}",
                ranks=ranks_of,
                pids=pids,
                time=time.strftime("%H:%M", time.localtime(source.began(job.ranks[0].pid))),
                command=short(job.command, [folder]),
                folder=folder,
            )
        )
    return listed(said, "\n ", "\n ")
