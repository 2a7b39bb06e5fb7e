"""What each process trains with: which items, in which order, how many batches and workers."""

import os

from ..run import differ, each, names, times_seen
from ..words import say
from . import Finding, judge
from .validation import train_one_model


def same_rank(row, run):
    ranks = {one["rank"] for one in row if one["num_replicas"] == len(run)}
    return bool(ranks) and len(ranks) < len(row)


def alike(row):
    """Whether nine of ten items are read by all."""
    sets = [{*names(one, parts=2)} for one in row]
    return len(set.intersection(*sets)) > 0.9 * len(set.union(*sets))


@judge("trained", "every-process-reads-all-images", certain=False)
def reads_all(row, run):
    """A hint, for a small set may be meant to be read whole."""
    if alike(row) and row[0]["whole"] and row[0]["length"] and not same_rank(row, run):
        count = len({*names(row[0])})
        text = say("each process reads all {count} items: there is no sampler", count=count)
        return Finding(row[0]["made"], text)


@judge("trained", "every-process-reads-the-whole-stream", certain=True)
def reads_the_stream(row, run):
    """Certain where its batches are not all alike, and are given to a model that all train.

    Else a hint: a process may take its part of each batch, or compute a part of the model.
    """
    several = len({*names(row[0])}) > 1
    if several and row[0]["length"] is None and not differ(row, "items"):
        given = [one["forward"] and one["forward"]["given"] for one in row]
        text = say("each process reads the whole stream: __iter__ must give it a part")
        same = bool(given[0]) and all(one == given[0] for one in given)
        return Finding(row[0]["made"], text, certain=same and train_one_model(run))


@judge("trained", "local-rank-in-the-sampler", certain=True)
def rank_in_sampler(row, run):
    """Certain where samplers for all processes share a rank."""
    if same_rank(row, run):
        text = say("the processes' samplers have rank {ranks}", ranks=each(row, "rank"))
        return Finding(row[0]["sampler"], text)


@judge("epochs", "set_epoch-is-forgotten", certain=True)
def same_order(row, run):
    """Certain where a shuffled order of 8 items or more comes again, in any process.

    Nothing where another loader begins again with its first epoch, as for a second training. A
    hint for a sampler of the script's own, which may have one order on purpose.
    """
    before, one = row
    few = len(one["items"]) < 8  # their order may be the same by chance
    own = one["told"] is None and one["shuffle"] is None
    shuffled = one["shuffle"] or (own and one["epoch"] == before["epoch"] and not ascending(one))
    if few or not shuffled or names(one) != names(before):
        return None
    if one["told"] and one["loader"] != before["loader"]:
        return None
    text = say("the order is that of the epoch before: call set_epoch(epoch) of its sampler")
    return Finding(one["line"], text, certain=not own)


def ascending(one):
    numbers = [name.partition(":")[2] for name, *_ in one["items"]]
    return numbers == sorted(numbers, key=lambda number: (len(number), number))


@judge("trained", "doctor.md#an-item-is-not-counted-once", certain=True, general="items")
def samplers_disagree(row, run):
    """Certain where a fact of samplers that divide the data among all shows why they do not.

    Else a hint, for they may draw at random; nothing where one gives its own process items again.
    """
    ours = all(one["num_replicas"] == len(run) for one in row)
    if not ours or same_rank(row, run) or alike(row):
        return None
    if any(len({*names(one)}) < len(one["items"]) for one in row):
        return None
    twice = sum(count > 1 for count in times_seen(row).values())
    if twice > max(0, row[0]["padding"]):
        cause = next((what for what in ("epoch", "seed", "shuffle") if differ(row, what)), None)
        text = say("{twice} items are read by several processes", twice=twice)
        if cause:
            text = say(
                "{text}: their samplers' {cause} is {values}",
                text=text,
                cause=cause,
                values=each(row, cause),
            )
        return Finding(row[0]["sampler"], text, certain=bool(cause))


@judge("trained", "doctor.md#an-item-is-not-counted-once", certain=False)
def own_shuffles(row, run):
    """A hint, for to draw items at random may be meant."""
    known = all(one["length"] is not None and one["size"] is not None for one in row)
    if not known or any(one["num_replicas"] for one in row) or alike(row):
        return None
    seen, size = times_seen(row), row[0]["size"]
    twice = sum(count > 1 for count in seen.values())
    if all(one["whole"] for one in row) and twice > 0.1 * len(seen) and len(seen) < 0.95 * size:
        text = say(
            "{twice} of {size} items are read by several processes, {never} by none",
            twice=twice,
            size=size,
            never=size - len(seen),
        )
        return Finding(row[0]["made"], text)


@judge("trained", "the-sampler-does-not-get-the-seed", certain=False)
def sampler_without_seed(row, run):
    """A hint, for a single run needs no other seed."""
    seeds = [event["seed"] for process in run for event in process.of("seed")]
    if row[0]["shuffle"] and row[0]["seed"] == 0 and seeds and min(seeds) >= len(run):
        text = say("the seed is {seed}, that of the sampler is always 0", seed=min(seeds))
        return Finding(row[0]["sampler"], text)


@judge("trained", "all-cores-for-each-process", certain=False)
def all_cores(row, run):
    """A hint, for such workers may have little to do."""
    if all(one["workers"] >= os.cpu_count() > 1 for one in row):
        workers = sum(one["workers"] for one in row)
        text = say(
            "{workers} workers for one loader, and {cores} cores",
            workers=workers,
            cores=os.cpu_count(),
        )
        return Finding(row[0]["made"], text)


def uneven(row, run):
    return row[0]["length"] and differ(row, "length") and not run.noted("join")


@judge("trained", "one-process-has-one-step-more", certain=False)
def uneven_parts(row, run):
    """A hint, for a loop may end before; ending.py says it where the run hangs or fails by it."""
    if uneven(row, run) and differ(row, "batches"):
        text = say(
            "the processes have {items} items, {batches} batches: one with a batch more waits "
            "for the others in vain",
            items=each(row, "length"),
            batches=each(row, "batches"),
        )
        return Finding(row[0]["made"], text)


@judge("trained", "a-branch-that-depends-on-a-processs-own-data", certain=True, explains=["hang"])
def skipped(row, run):
    """Certain for a model of DDP: its processes pair their gradients by number, not by batch.

    Those of no_sync() are not sent: of them a step may have any number.
    """
    if run.noted("wrap") and not differ(row, "read") and differ(row, "backwards"):
        if in_parts(run):
            return None
        text = say(
            "of {all} batches the processes train with {some}",
            all=row[0]["read"],
            some=each(row, "backwards"),
        )
        return Finding(row[0]["line"], text)


def in_parts(run):
    """Whether some forward passes are in no_sync(), and each process has as many that are not."""
    passes = [[e for e in p.of("forward") if e["trains"] and e["synced"] is not None] for p in run]
    sent = [sum(event["synced"] for event in of_one) for of_one in passes]
    return max(sent) == min(sent) and any(
        n < len(of_one) for n, of_one in zip(sent, passes, strict=True)
    )
