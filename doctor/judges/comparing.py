"""What another run of the same script shows: with one process, or started again.

These are no judges: command.py calls them, with both runs.
"""

import math
import re

from ..run import names
from ..words import say
from . import Finding

BATCH = "the-batch-size-is-per-process"
LOCAL = "local-rank-0-is-taken-for-rank-0"
REPEATED = "the-resumed-run-repeats-an-epoch"
SUM = "doctor.md#the-gradients-are-a-sum"
NUMBERS = "doctor.md#a-number-is-that-of-a-part"
UNIT = r"s\b|ms|sec|min|h\b|it\b|\w+ ?(/|per)"  # of a time or a speed


def batch_per_process(run, alone):
    """A hint, for the learning rate may be chosen for it."""
    for row, (one, *_) in zip(run.rounds("trained"), alone.rounds("trained"), strict=False):
        if row[0]["stream"] or not (row[0]["steps"] and one["steps"]):
            continue  # of a stream a batch is noted as one item
        step, single = (len(p["items"]) / p["steps"] for p in (row[0], one))
        if step * len(run) > 1.5 * single:
            text = say(
                "a step takes {items:.4g} items; with one process {single:.4g}",
                items=step * len(run),
                single=single,
            )
            return Finding(row[0]["made"], text, BATCH, certain=False)
    return None


def joins_as_local_rank(run):
    """Certain: two processes would be one rank, and the group waits for the other."""
    for process in run:
        for event in process.of("joins"):
            if event["rank"] != event["number"]:
                text = say(
                    "it joins as rank {rank}, and its RANK is {number}: is it LOCAL_RANK?",
                    rank=event["rank"],
                    number=event["number"],
                )
                return Finding(event["line"], text, LOCAL, certain=True)
    return None


def epoch_repeated(run, again):
    """Certain where the last order of items comes again."""
    line = next((one["line"] for one in again[0].passes if one["trained"]), None)
    loaders = ([e for e in one[0].epochs() if e[0]["line"] == line] for one in (run, again))
    for before, after in zip(*loaders, strict=False):
        if before[1:] and names(before[0]) != names(after[0]) == names(before[-1]):
            text = say("the run that resumes begins with the epoch that was done")
            return Finding(line, text, REPEATED, certain=True)
    return None


def other_gradients(run, alone):
    """A hint, for the learning rate may be chosen for a sum. Of steps from the same weights."""
    steps, others = run.rows("step")[:3], alone[0].of("step")[:3]
    same = steps and others and all(steps[0][0][k] == others[0][k] for k in ("weights", "own"))
    if not same or not (steps[0][0]["weights"] or steps[0][0]["own"] or same_shards(run, alone)):
        return None
    ratios = [
        ratio(gradient_norm(row), gradient_norm([other]))
        for row, other in zip(steps, others, strict=False)
    ]
    if times := factor_in_words(ratios, len(run), 0.1):
        sums = [e["line"] for e in run[0].of("collective") if e["gradients"]]
        text = say("the gradients are {times} those of one process", times=times)
        return Finding((sums or [steps[0][0]["line"]])[0], text, SUM, certain=False)
    return None


def same_shards(run, alone):
    own, other = run[0].of("shards"), alone[0].of("shards")
    return own and [e["weights"] for e in own] == [e["weights"] for e in other]


def gradient_norm(row):
    """The norm of all gradients, of which each process may have a part."""
    plain, _ = row[0]["squares"] or (0, 0)
    return math.sqrt(plain + sum(event["squares"][1] for event in row if event["squares"]))


def ratio(a, b):
    return a / b if b else 0


def factor_in_words(ratios, size, near):
    """ "2 times" or "1/2 of" if all ratios are about that, else ""."""
    if ratios and all(abs(one / size - 1) < near for one in ratios):
        return say("{size} times", size=size)
    if ratios and all(abs(one * size - 1) < near for one in ratios):
        return say("1/{size} of", size=size)
    return ""


def other_numbers(run, alone):
    """A hint, of the first one: it may be meant to be that of one process, as a rate or a time."""
    own, other = printed(run[0]), printed(alone[0])
    found = []
    for key in [key for key in own if key in other]:  # in the order in which they were printed
        pairs = [*zip(own[key], other[key], strict=False)]
        apart = len(pairs) > 1 and len(own[key]) == len(other[key])
        if apart and (times := factor_in_words([ratio(a, b) for a, b in pairs], len(run), 0.2)):
            a, b = pairs[-1]
            text = say("it prints {a:g}, with one process {b:g}: {times} it", a=a, b=b, times=times)
            found.append(Finding(key[0], text, NUMBERS, certain=False))
    return found[:1]


def printed(process):
    """{(line, words, which of its numbers): [that number each time]}, of those with a point."""
    found = {}
    for event in process.of("prints"):
        for i, number in enumerate(event["numbers"]):
            after = event["words"][i + 1].strip()
            if "." in number and not re.match(UNIT, after):
                key = (event["line"], tuple(event["words"]), i)
                found.setdefault(key, []).append(float(number))
    return found
