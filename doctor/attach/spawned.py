"""The ranks that mp.spawn, or a script itself, has started: their numbers are in their stacks."""

from . import places, ranks
from .look import STOPPED, Look

SERVER = "multiprocessing.forkserver import"


def local(thread, name, end=""):
    """The number in a local variable, of the innermost frame that has one; or None."""
    for frame in thread["frames"]:
        for one in frame["locals"] or []:
            mine = frame["filename"].endswith(end) and one["name"] == name
            if mine and (one["repr"] or "").isdigit():
                return int(one["repr"])
    return None


def number_spawned(parent, found, nonblocking):
    """mp.spawn's number of processes; a forkserver may stand between it and them."""
    for pid in (parent, found[parent].parent):
        thread = Look(pid, nonblocking).thread if pid in found and found[pid].python else None
        number = thread and local(thread, "nprocs", places.SPAWNED)
        if number:
            return number
    return None


def spawned(found, jobs, near=(), nonblocking=False):
    """[Job] of those that have no number in their environment.

    near: look only at processes that have started one of these, or were started by it: a look
    stops a process, and others are none of this job.
    """
    more = []
    for parent, children in ranks.maybe_spawned(found, jobs).items():
        tree = ranks.tree(parent, found)
        if near and not any(pid in tree or parent in ranks.tree(pid, found) for pid in near):
            continue
        looks = [(child, Look(child.pid, nonblocking)) for child in sorted(children)]
        members = [(child, look) for child, look in looks if is_rank(look)]
        size = number_spawned(parent, found, nonblocking)
        if not any(look.stack for _, look in members) or (len(members) < 2 and not size):
            continue
        size = size or len(members)
        numbers = numbered([number_of(look) for _, look in members])
        pairs = zip(members, numbers, strict=True)
        all_of = [ranks.Rank(child.pid, n, size, n, size) for (child, _), n in pairs]
        above = found.get(found[parent].parent)
        command = above.command if SERVER in found[parent].command and above else ""
        command = command or found[parent].command
        all_of.sort(key=lambda rank: rank.rank)
        more.append(ranks.Job((f"process {parent}",), command, all_of))
    return more


def is_rank(look):
    """Neither a loader's worker nor a manager. A stopped process cannot be read: it may be one."""
    others = (places.WORKER, "multiprocessing/managers.py")
    if any(places.has(look.stack, end) for end in others):
        return False
    return look.error == STOPPED or places.has(look.stack, places.STARTED)


def number_of(look):
    """The argument of mp.spawn's function, or a variable `rank`; or None."""
    if not look.thread:
        return None
    number = local(look.thread, "i", places.SPAWNED)
    return local(look.thread, "rank") if number is None else number


def numbered(numbers):
    """Each of them once: those that are not known get what is left, in the order of their start."""
    known = [number for number in numbers if number is not None]
    if len({*known}) < len(known):
        return list(range(len(numbers)))
    left = (number for number in range(len(numbers) + max(known, default=0)) if number not in known)
    return [next(left) if number is None else number for number in numbers]
