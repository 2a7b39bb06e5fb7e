"""Whether all processes take the same steps and keep the same weights."""

import re

from ..run import differ, each, trained_by
from ..words import both, say
from . import Finding, judge
from .validation import other_weights

# In the order of a step's calls: F and f are forward passes of DDP, f those in no_sync(); p is one
# of the plain model, B a backward. The line is that of the letter in brackets.
WRONG_ORDERS = {
    "(p)": (
        "the-plain-model-is-trained",
        say("DDP's model is not called: nothing is averaged"),
    ),
    "^[^F]*(f)[^F]*$": ("no_sync-is-one-off", say("all parts of a step are in no_sync()")),
    "F[^F]*(f)[^F]*$": (
        "no_sync-around-backward-alone",
        say("the last forward pass is in no_sync()"),
    ),
    "FFB(B)": (
        "two-forwards-then-two-backwards",
        say("this second backward's gradients stay local"),
    ),
}
DIFFER = "doctor.md#the-weights-differ"
NOT_THE_SAME = "doctor.md#the-processes-do-not-do-the-same"


@judge("apart", "the-plain-model-is-trained", certain=True, explains=["weights"])
def wrong_order(row, run):
    """Certain, for the weights differ afterwards; its place is that of WRONG_ORDERS."""
    letters, lines = zip(*row[0]["order"], strict=True) if row[0]["order"] else ("", "")
    for pattern, (place, text) in WRONG_ORDERS.items():
        if found := re.search(pattern, "".join(letters)):
            return Finding(lines[found.start(1)], text, place)


@judge("apart", "only-rank-0-resumes", certain=True, explains=["weights"])
def one_resumes(row, run):
    """Certain, for the weights differ, and processes load more than others."""
    loads = [process.of("load") for process in run]
    if len({*map(len, loads)}) > 1:
        rank = min(range(len(run)), key=lambda rank: len(loads[rank]))
        text = say("rank {rank} does not load it", rank=rank)
        return Finding(max(loads, key=len)[-1]["line"], text)


@judge("apart", "unfrozen-after-wrapping", certain=True, explains=["weights"])
def unfrozen(row, run):
    """Certain, for the weight that differs was frozen then."""
    for wrap in run[0].of("wrap"):
        if row[0]["name"] in wrap["frozen"]:
            text = say(
                "{name} was frozen when DDP wrapped it: its gradients are not averaged",
                name=row[0]["name"],
            )
            return Finding(wrap["line"], text)


@judge(
    "plateau",
    "each-process-lowers-its-own-learning-rate",
    certain=True,
    explains=["rates", "early"],
)
def own_decision(row, run):
    """Certain where their numbers differ."""
    if differ(row, "value"):
        text = say("each process decides by its own number: {values}", values=each(row, "value"))
        return Finding(row[0]["line"], text)


@judge(
    "run",
    "doctor.md#the-learning-rates-differ",
    certain=True,
    explains=["weights"],
    general="rates",
)
def rates_differ(run):
    """Certain for weights of DDP, and parts of FSDP: they average gradients, and no rate."""
    for row in run.rows("step"):
        if differ(row, "lr") and (row[0]["weights"] or row[0]["parts"]):
            text = say("the learning rates differ: {rates}", rates=each(row, "lr"))
            return Finding(scheduled(run) or row[0]["line"], text)


def scheduled(run):
    """The line of a schedule's step that not all processes make."""
    counts = [{} for _ in run]
    for count, process in zip(counts, run, strict=True):
        for event in process.of("rate"):
            count[event["line"]] = count.get(event["line"], 0) + 1
    for line in dict.fromkeys(line for count in counts for line in count):  # the first one
        if len({count.get(line, 0) for count in counts}) > 1:
            return line
    return None


@judge("run", NOT_THE_SAME, certain=True, explains=["weights"])
def steps_differ(run):
    """Certain for weights of DDP, fully_shard, or averaged by hand, where all have ended well.

    Else a hint; nothing where it is a process's own optimizer beside such ones. Outside of Join(),
    in which each process steps for itself.
    """
    if any(process.end["error"] != "" for process in run):
        return None
    outside = [[s for part in process.parts("step")[::2] for s in part] for process in run]
    for name in dict.fromkeys(trained_by(step) for steps in outside for step in steps):
        steps = [[s for s in of_one if trained_by(s) == name] for of_one in outside]
        counts = [*map(len, steps)]
        if len({*counts}) > 1:
            longest = max(steps, key=len)
            of_all = is_averaged(longest, run)
            if not of_all and 0 in counts and run.noted("wrap", "shards"):
                continue
            text = say("the processes make {counts} steps of the optimizer", counts=both(counts))
            return Finding(longest[-1]["line"], text, certain=of_all)
    return None


def is_averaged(steps, run):
    """Whether gradients of an optimizer, whose steps these are, are averaged."""
    by_hand = any(
        event["gradients"] == "own" and steps[0]["optimizer"] in event["optimizers"]
        for process in run
        for event in process.of("collective")
    )
    return by_hand or any(step["weights"] or step["parts"] for step in steps)


@judge("step", NOT_THE_SAME, certain=True)
def zeroed_differ(row, run):
    """Certain: what one process has left in its gradients goes into the mean."""
    if differ(row, "zeroed") and 0 in {event["zeroed"] for event in row}:
        ranks = [rank for rank, event in enumerate(row) if not event["zeroed"]]
        text = say(
            "rank {rank} has not called zero_grad() since its last step, others have", rank=ranks[0]
        )
        return Finding(row[0]["line"], text)


@judge("trained", NOT_THE_SAME, certain=True)
def trained_in_other_modes(row, run):
    """Certain for BatchNorm and dropout: they compute otherwise in training mode."""
    row = [one["forward"] for one in row]  # the first of each pass
    if all(row) and differ(row, "training") and not differ(row, "line"):
        ranks = [rank for rank, event in enumerate(row) if not event["training"]]
        text = say(
            "rank {rank} is not in training mode here, others are: who calls train()?",
            rank=ranks[0],
        )
        return Finding(row[0]["line"], text, certain=any(event["modes"] for event in row))


@judge("apart", DIFFER, certain=True, general="weights")
def weights_differ(row, run):
    """Certain, for they differ; told unless a judge names the cause.

    A hint after the last step: a process may have changed its own for what it does alone. What is
    validated so has a judge of its own.
    """
    if row[0]["late"] and any(other_weights(look) for look in run.looks() if look[0]["wrapped"]):
        return None
    text = say("from here on {name} differs between the processes", name=row[0]["name"])
    return Finding(row[0]["line"], text, certain=not row[0]["late"])


@judge("optimizers", DIFFER, certain=False)
def own_weights_differ(rows, run):
    """Of weights without DDP: a mistake where their gradients are averaged by hand.

    Else a hint, for each process may have a model of its own, also beside one that all train.
    """
    steps = [row for row in rows if any(event["own"] for event in row)]
    if not steps or not differ(steps[-1], "own") or not same_names(steps[-1]):
        return None
    first = next(row for row in steps if differ(row, "own"))
    sums = [event for event in run[0].of("collective") if event["gradients"] == "own"]
    by_hand = any(first[0]["optimizer"] in event["optimizers"] for event in sums)
    begins = first is steps[0]
    if begins:
        text = say("the weights differ between the processes from the first step on")
    else:
        text = say("the weights differ between the processes from here on")
    if begins and by_hand:
        text = say("{text}: broadcast rank 0's before", text=text)
    elif not by_hand and any(event["weights"] for event in steps[-1]):
        text = say(
            "{text}: DDP has not wrapped them, and averages no gradient of theirs", text=text
        )
    elif sums and not by_hand:
        text = say("{text}: no gradient of this optimizer is averaged", text=text)
    elif not by_hand:
        text = say("{text}: no DDP, and no gradient is averaged", text=text)
    return Finding(first[0]["line"], text, certain=by_hand)


def same_names(row):
    """Parts of one model, as in a pipeline, have other shapes."""
    return all(event["own"].keys() == row[0]["own"].keys() for event in row)


@judge("run", DIFFER, certain=True)
def shards_differ(run):
    """Certain where nothing comes after that could make them equal."""
    later = ("load", "collective")
    for row in run.rows("shards"):
        names = [name for name in row[0]["weights"] if differ_at(row, name)]
        first = min((event["place"] for event in run[0].of("step")), default=len(run[0].events))
        sent = [e for e in run[0].of(*later) if row[0]["place"] < e["place"] < first]
        if names and not sent:
            text = say(
                "{name} differs between the processes here: FSDP sends no weights", name=names[0]
            )
            return Finding(row[0]["line"], text)
    return None


def differ_at(row, name):
    return len({event["weights"].get(name) for event in row}) > 1
