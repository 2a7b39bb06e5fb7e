"""Models that several processes compute together: layers in parts, or the stages of a pipeline."""

import math

from ..run import names
from ..words import say
from . import Finding, judge

SAMPLER = {
    "layer": "rank-in-the-sampler-of-a-tensor-group",
    "pipeline": "rank-in-the-sampler-of-a-pipeline",
}


def groups(run, of):
    """The ranks that compute together, each group once."""
    found = {tuple(e["ranks"]) for p in run for e in p.of("together") if e["of"] == of}
    return [group for group in sorted(found) if max(group) < len(run)]


@judge("run", "rank-in-the-sampler-of-a-tensor-group", certain=True, explains=["weights"])
def read_others(run):
    """Certain, for what they compute together is of the same items."""
    for of, place in SAMPLER.items():
        for group in groups(run, of):
            for row in run.rounds("trained"):
                ranks = [rank for rank in group if row[rank]["read"] == row[group[0]]["read"]]
                other = [rank for rank in ranks if names(row[rank]) != names(row[group[0]])]
                if other:
                    ranks = {"one": group[0], "other": other[0]}
                    text = say("ranks {one} and {other} read other items", **ranks)
                    if of == "layer":
                        text = say("{text}: they have parts of one layer", text=text)
                    else:
                        text = say("{text}: they have stages of one pipeline", text=text)
                    return Finding(row[0]["sampler"] or row[0]["made"], text, place)
    return None


@judge("run", "each-stage-clips-by-itself", certain=True)
def clip_of_a_stage(run):
    """Certain where it may change a gradient: the largest norm is no infinity."""
    clips = [e for e in run[0].of("clip") if e["norm"] is not None and math.isfinite(e["norm"])]
    if clips and groups(run, "pipeline"):
        text = say("each stage is scaled by the norm of its own gradients")
        return Finding(clips[0]["line"], text)
    return None


@judge("run", "the-norm-of-ones-own-part", certain=True, general="weights")
def same_part_differs(run):
    """Certain for weights that were the same before: each has the part with this name and place.

    The processes have the same part of a weight where it is copied: LayerNorm's of layers in parts,
    and all of a model that FSDP copies into each node. In a pipeline other weights have its number.
    """
    if groups(run, "pipeline"):
        return None
    before = None
    for row in run.rows("step"):
        apart = [key for key in row[0]["parts"] if len(values_of(row, key)) > 1]
        if apart and before is None:  # they began so: on purpose, or see shards_differ
            return None
        if apart:
            shape = f"{apart[0].partition(' ')[2].partition(']')[0]}]"
            text = say(
                "from here on a weight of shape {shape} differs between processes that have the "
                "same part of it",
                shape=shape,
            )
            if groups(run, "layer"):
                text = say("{text}: is its gradient scaled by each alone?", text=text)
                return Finding(before[0]["line"], text)
            return Finding(before[0]["line"], text, "doctor.md#the-weights-differ")
        before = row if row[0]["parts"] else before
    return None


def values_of(row, key):
    return {event["parts"][key] for event in row if key in event["parts"]}
