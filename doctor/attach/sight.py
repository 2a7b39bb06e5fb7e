"""What was seen of a job: its ranks side by side, as a file, and joined with other machines'."""

import json
import socket

from ..words import say

FORMAT = "doctor --attach 2"  # the first entry of a file
# rank, size (of the job), here (how many on its machine), local, pid, host: numbers and a name
# folder: in which the process is
# state: "works" (it moves, or computes), "stands", "stopped" (by SIGSTOP), "gone", "unread" (error)
# kind, words: see places.py; file, line, function, text: of the user's code
# under, when, without, leaves, loops: see source.Around
# seconds: between the first look and the last; times: in how many of them it was in this kind
# sure: that it stands, and not only waits for a GPU; gpu: whether it uses one
# busy: its processor, which a wait for a GPU keeps so, too
# children: how many Python processes a rank that waits for a loader has started
# workers: of its loader, see look.workers()


class Sight:
    """A job, as it was seen."""

    def __init__(self, command, ranks, missing=(), elsewhere=()):
        self.command = command
        self.ranks = ranks  # dicts, by rank
        self.missing = list(missing)  # ranks that should be on a machine that was looked at
        self.elsewhere = list(elsewhere)  # ranks of which nothing is known

    def that(self, state, *kinds):
        """Those in a state, and of these kinds if any is named."""
        found = [one for one in self.ranks if one["state"] == state]
        return [one for one in found if not kinds or one.get("kind") in kinds]

    @property
    def gone(self):
        return sorted({*self.missing, *(one["rank"] for one in self.that("gone"))})


def joined(command, ranks):
    """A Sight of ranks that were seen on one machine or on several."""
    ranks = sorted(ranks, key=lambda one: one["rank"])
    size = max([one["size"] or 0 for one in ranks] + [len(ranks)])
    seen = {one["rank"] for one in ranks}
    absent = [rank for rank in range(size) if rank not in seen]
    hosts = {}
    for one in ranks:
        hosts.setdefault(one["host"], []).append(one)
    # How many should be on the machines that were looked at, if each rank there knows it.
    should = [here[0]["here"] for here in hosts.values()]
    if None in should:
        return Sight(command, ranks, [], absent)
    here = sum(should) - len(seen)  # so many of them are missing
    if len(absent) <= here:
        return Sight(command, ranks, absent, [])
    near = [rank for rank in absent if is_between(rank, hosts)][:here]
    return Sight(command, ranks, near, [rank for rank in absent if rank not in near])


def is_between(rank, hosts):
    """Whether a rank is of one of these machines, if each has the ranks in a row."""
    for here in hosts.values():
        one = here[0]
        if one["local"] is not None:
            first = one["rank"] - one["local"]
            if first <= rank < first + one["here"]:
                return True
    return False


def written(sight):
    known = {"format": FORMAT, "host": socket.gethostname(), "command": sight.command}
    return json.dumps(known | {"ranks": sight.ranks}, indent=1) + "\n"


def read(text, name):
    """(command, ranks) of a file; ValueError if it is none of these."""
    try:
        known = json.loads(text)
        if known["format"] != FORMAT:
            raise ValueError
        return known["command"], known["ranks"]
    except (ValueError, KeyError, TypeError):
        text = say("{file} was not written by doctor --attach --out", file=name)
        raise ValueError(text) from None
