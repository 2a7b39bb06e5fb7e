"""What a judge answers, and how ranks and places are named."""

from typing import NamedTuple

from . import places


class Finding(NamedTuple):
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
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return "ranks " + ", ".join(map(str, ranks[:-1])) + f" and {ranks[-1]}"


def they(found, verb):
    """ "rank 0 waits", "ranks 0 and 1 wait"; found: what was seen of ranks, or their numbers"""
    numbers = [one["rank"] if isinstance(one, dict) else one for one in found]
    one = {"has": "have", "is": "are"}
    return f"{names(numbers)} {verb if len(numbers) == 1 else one.get(verb, verb[:-1])}"


def of(found):
    return names(one["rank"] for one in found)


def waiting(sight):
    return sight.that("stands", *places.WAITS)


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
        said.append(f"{of(group)} {'in ' + one['words'] if one['words'] else 'is'} ({at(one)})")
    return ", ".join(said)
