"""How a run ends: one process stops early, fails, or all stand still."""

import re

from ..events import FORWARD, MESSAGES
from ..run import differ
from ..words import both, clauses, listed, say
from . import Finding, judge
from .data import uneven

STANDS = "doctor.md#it-stands-still"


def more_batches(run):
    """Whether a process has a batch more than another."""
    return any(uneven(row, run) and differ(row, "batches") for row in run.rounds("trained"))


def read_more(run):
    """Whether a process has read more batches than another one has in all."""
    rows = [row for row in run.rounds("trained") if uneven(row, run)]
    return any(max(p["read"] for p in row) > min(p["batches"] for p in row) for row in rows)


@judge("run", "rank-0-stops-early", certain=True)
def stops_early(run):
    """Certain where one failed for want of another, which has ended well."""
    good = [rank for rank, process in enumerate(run) if process.end["error"] == ""]
    for process in run:
        if good and re.search("closed by peer|reset by peer", process.end["error"] or ""):
            text = say("it waits here for rank {rank}, which has ended its training", rank=good[0])
            place = "one-process-has-one-step-more" if more_batches(run) else None
            return Finding(process.end["line"], text, place)


@judge("run", "frozen-after-wrapping", certain=True)
def frozen_late(run):
    """Certain, for DDP's own error says so, and weights were frozen."""
    for process in run:
        if "finished reduction in the prior" in (process.end["error"] or ""):
            wrap = run[0].of("wrap")[-1]
            late = {*process.end["frozen"]} - {*wrap["frozen"]}
            if late:
                text = say("frozen after the wrapping: {names}", names=listed(sorted(late)))
                return Finding(wrap["line"], text)


@judge("run", "the-wrapped-model-on-rank-0-alone", certain=True, explains=["hang"])
def wrapped_alone(run):
    """Certain where the run fails, and the others have gone on to a training step meanwhile."""
    if run.stopped or not any(process.end["error"] or process.died for process in run):
        return None
    lines = [
        {e["line"] for e in process.of("forward") if e["sends"] and not e["trains"]}
        for process in run
    ]
    for line in sorted(set.union(*lines) - set.intersection(*lines)):
        calls = [rank for rank, of_one in enumerate(lines) if line in of_one]
        before = min(trained_before(run[rank], line) for rank in calls)
        others = [trained_before(run[r]) for r, of_one in enumerate(lines) if line not in of_one]
        if max(others) > before:  # else they may have failed before they came to it
            return Finding(
                line,
                say(
                    "rank {ranks} alone calls DDP's model here: it sends its buffers",
                    ranks=both(calls),
                ),
            )
    return None


def trained_before(process, line=None):
    """How many forward passes of training it has begun before it comes to a line; or at all."""
    count = 0
    for event in process.of("forward"):
        if event["line"] == line:
            break
        count += event["trains"]
    return count


@judge("run", "doctor.md#the-processes-do-not-do-the-same", certain=True, general="hang")
def calls_differ(run):
    """Certain: what one calls among all, all must call. gloo may take what another call has sent.

    Of a run that failed, with what DDP and FSDP do in a training step: they send gradients.
    """
    failed = any(process.end["error"] != "" for process in run)
    if run.stopped or (failed and any(process.end["error"] == "" for process in run)):
        return None  # hang() or stops_early() tell it
    for row in zip(*(calls(process, failed) for process in run), strict=False):
        names, lines, shapes = zip(*row, strict=True)
        sums = names[0] in ("calls all_reduce()", "calls reduce()")
        others = failed and sums and len({*lines}) > 1 and len({*map(str, shapes)}) > 1
        if len({*names}) > 1 or others:
            said = both(
                say("rank {rank} {does} ({line})", rank=rank, does=does, line=line)
                for rank, (does, line, _) in enumerate(row)
            )
            text = say("the processes do not make the same calls: {said}", said=said)
            return Finding(row[0][1], text)
    return None


def calls(process, steps):
    """[(what, line, shape)] of its calls that all processes must make, in their order."""
    found = []
    wraps, shards = process.of("wrap"), process.of("shards")
    for event in process.of("collective", "forward", "backward"):
        if event["kind"] == "collective" and event["whole"]:
            call = say("calls {name}()", name=event["name"])
            found.append((call, event["line"], event["shape"]))
        elif event["kind"] == "forward" and steps and event["trains"]:
            if shards or event["wrapped"]:
                found.append((say("trains"), event["line"], None))
        elif event["kind"] == "backward" and steps and (wraps or shards):
            found.append((say("calls {name}()", name="backward"), event["line"], None))
    return found


def standing(run):
    """(the last event of each, those that wait for others, all in words)"""
    last, said = [process.events[-1] for process in run], []
    waiting = [event for event in last if event["kind"] == "stands" and event["where"]]
    for rank, event in enumerate(last):
        if event in waiting:
            text = say(
                "rank {rank} waits in {call} at {line}",
                rank=rank,
                call=event["where"],
                line=event["line"],
            )
        elif event["kind"] == "end":
            text = say("rank {rank} has ended", rank=rank)
        else:
            text = say("rank {rank} is at {line}", rank=rank, line=event["line"])
        said.append(text)
    return last, waiting, clauses(said)


@judge("run", "rank-0-prepares-for-longer-than-the-timeout", certain=False)
def one_prepares(run):
    """A hint, for it may be done in time; not where it waits for a batch that another has not."""
    last, waiting, said = standing(run)
    if waiting and any(event["kind"] == "stands" and event not in waiting for event in last):
        trains = any(event["where"] in (FORWARD, "backward") for event in waiting)
        if run.stopped and trains and read_more(run):
            place = "one-process-has-one-step-more"
            return Finding(waiting[0]["line"], said, place, certain=True)
        text = say("{said}: will the timeout be longer?", said=said)
        return Finding(waiting[0]["line"], text)


@judge("run", "it-hangs-or-fails-late", certain=True, general="hang")
def hang(run):
    """Or the place of a mistake that explains it. Certain where all that have not ended wait."""
    last, waiting, said = standing(run)
    if not run.stopped or not waiting or one_prepares(run):
        return None
    if any(process.end["error"] for process in run):
        return None
    waiting.sort(key=lambda event: event["where"] in (FORWARD, "backward"))
    line, place = waiting[0]["line"], "all_reduce-on-rank-0-alone"
    forwards = [process.of("forward")[-1:] for process in run]
    alone = [e for e, f in zip(last, forwards, strict=True) if f and not f[0]["trains"]]
    alone = [event for event in alone if event.get("where") == FORWARD]
    where = {event["where"] for event in waiting}
    if alone:
        line, place = alone[0]["line"], "the-wrapped-model-on-rank-0-alone"
    elif more_batches(run):
        place = "one-process-has-one-step-more"
    elif "new_group" in where:
        place, said = STANDS, say("{said}: all processes must call new_group()", said=said)
        line = next(event["line"] for event in waiting if event["where"] == "new_group")
    elif where & {*MESSAGES, "wait()"}:
        place = STANDS
    elif "backward" in where:
        place = "a-branch-that-depends-on-a-processs-own-data"
    elif len(waiting) == len(run) and len({(e["line"], e["where"]) for e in waiting}) == 1:
        place = STANDS
    return Finding(line, said, place)
