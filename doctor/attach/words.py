"""What a judge answers, and how ranks and places are named."""

from typing import NamedTuple

from ..words import both, clauses, listed, say
from . import places


class Answer(NamedTuple):
    text: str
    place: str  # PAGE.md#HEADING
    line: str = ""  # "train.py:48"
    hangs: bool = True
    mistake: bool = False  # in the code; else the job may only be slow, or has lost a rank


def at(one):
    return f"{one['file']}:{one['line']}"


def names(ranks):
    """ "rank 0", "ranks 1 to 3", "ranks 0 and 2" """
    ranks = sorted(ranks)
    if len(ranks) == 1:
        return say("rank {rank}", rank=ranks[0])
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return say("ranks {first} to {last}", first=ranks[0], last=ranks[-1])
    return say("ranks {ranks}", ranks=both([listed(ranks[:-1]), ranks[-1]]))


# What one rank does, and what several do.
VERBS = {
    "waits": ("{ranks} waits", "{ranks} wait"),
    "works": ("{ranks} works", "{ranks} work"),
    "reads": ("{ranks} reads", "{ranks} read"),
    "has": ("{ranks} has", "{ranks} have"),
    "computes": ("{ranks} computes", "{ranks} compute"),
    "is": ("{ranks} is", "{ranks} are"),
}


def they(found, verb):
    """ "rank 0 waits", "ranks 0 and 1 wait"; found: what was seen of ranks, or their numbers"""
    numbers = [one["rank"] if isinstance(one, dict) else one for one in found]
    one, several = VERBS[verb]
    return say(one if len(numbers) == 1 else several, ranks=names(numbers))


def of(found):
    return names(one["rank"] for one in found)


def waiting(sight):
    return sight.that("stands", *places.WAITS)


def unknown(sight):
    """Whether one process alone was found, which does not say of how many it is."""
    return len(sight.ranks) == 1 and sight.ranks[0]["size"] is None


def by_place(found):
    """[[those at one line in one call]], the fewest first."""
    groups = {}
    for one in found:
        groups.setdefault((one["words"], one["file"], one["line"]), []).append(one)
    return sorted(groups.values(), key=len)


def where(found):
    """ "rank 0 in all_reduce (train.py:73), rank 1 in backward (train.py:59)" """
    said = []
    for group in by_place(found):
        one = group[0]
        known = {"ranks": of(group), "line": at(one)}
        several = say("{ranks} are ({line})", **known)
        text = say("{ranks} is ({line})", **known) if len(group) == 1 else several
        if one["words"]:
            text = say("{ranks} in {call} ({line})", **known, call=one["words"])
        said.append(text)
    return clauses(said)
