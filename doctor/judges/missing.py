"""Items that no process validates."""

from collections import defaultdict

from ..run import differ, names, times_seen
from ..words import say
from . import Finding, judge
from .validation import ONCE, added_up


@judge("run", ONCE, certain=True, general="items")
def never_validated(run):
    """Certain where drop_last leaves items out, or no process reads the part of another one.

    A hint where samplers choose a part: it may be meant to look at no more. So may the loader that
    it trains with, and what is read in training mode. Nothing where samplers divide one data set
    into training and validation.
    """
    rows = validations(run)
    found = [one for row in rows if (one := left_out(row, rows, run))]
    return max(found, key=lambda one: one.certain, default=None)


def left_out(row, rows, run):
    passes, idle = [*row.values()], [p for rank, p in enumerate(run) if rank not in row]
    first, size = passes[0], passes[0]["size"]
    if not size or any(one["stream"] or one["cut"] or not one["whole"] for one in passes):
        return None
    if differ(passes, "size"):  # each process has a part as a data set
        return None
    if any(process.end["error"] != "" for process in idle):  # it may not have come to it
        return None
    dropped = left_over(passes)
    if not dropped and not any(one["length"] and one["length"] < size for one in passes):
        return None
    # A look at a part may come before a validation of all.
    others = [one for other in rows for one in other.values() if of_all(one, first)]
    never = size - len(times_seen([*passes, *others], parts=3))
    trained = trained_with(first, run)
    split = trained and not trained & keys(passes)
    if split:
        never = dropped or never - len(trained)
    if never <= 0 or (split and not dropped and not idle):
        return None
    text = say("{never} of {size} items are never validated", never=never, size=size)
    if dropped:
        text = say("{text}: drop_last=True", text=text)
    # Those that it trains with, in an order that changes, are looked at for an estimate.
    trains = any(one["trained"] and loader(one) == loader(first) for one in run[0].passes)
    # In training mode, and without a sum of results, BatchNorm takes its statistics from them.
    counted = any(added_up(one, run[rank]) for rank, one in row.items())
    modes = any(one["forward"] and one["forward"]["training"] for one in passes)
    trains = trains or (modes and not counted)
    share = shares(passes, run) and (added(row, run) if idle else never < len(run))
    return Finding(first["line"], text, certain=bool(dropped or share) and not trains)


def validations(run):
    """[{rank: pass}]: the n-th validations of one line, in those processes that have one."""
    lines = defaultdict(dict)
    for rank, process in enumerate(run):
        counts = defaultdict(int)
        for one in process.passes:
            if one["validated"]:
                lines[one["line"], counts[one["line"]]][rank] = one
                counts[one["line"]] += 1
    return [*lines.values()]


def loader(one):
    """Where it was made, and the number of its data set."""
    return one["made"], one["items"][0][0].partition(":")[0]


def left_over(passes):
    """How many items their samplers have given, and drop_last has left out."""
    counts = [
        max(0, one["length"] - len(one["items"])) if one["drops"] and one["length"] else 0
        for one in passes
    ]
    alike = len({name for one in passes for name in names(one)}) == len(passes[0]["items"])
    return max(counts) if alike else sum(counts)


def of_all(one, first):
    """Whether another loader has all items of a data set of this length."""
    return loader(one) != loader(first) and one["size"] == one["base"] == first["size"]


def keys(passes):
    """{(index, label)}: another data set may have the same images, changed in other ways."""
    return {(item[0].partition(":")[2], item[1]) for one in passes for item in one["items"]}


def trained_with(first, run):
    """What any process trains with of the whole data set of a pass, as keys()."""
    if first["size"] != first["base"]:
        return set()
    passes = [one for process in run for one in process.passes]
    return keys(one for one in passes if one["trained"] and one["base"] == first["base"])


def shares(passes, run):
    """Whether each has read what is one process's share of all."""
    size, count = passes[0]["size"], len(run)
    return all(one["length"] in (size // count, -(-size // count)) for one in passes)


def added(row, run):
    """Whether those of other processes are to come to it: it has a sampler's part of them, or adds.

    Else rank 0 alone may look at half of the items.
    """
    rank, one = next(iter(row.items()))
    return one["num_replicas"] == len(run) or added_up(one, run[rank])
