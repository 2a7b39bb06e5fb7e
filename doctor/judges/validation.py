"""Which items are validated, by which model, and what is added up."""

import re
from collections import defaultdict

from ..run import differ, names, times_seen
from ..words import say
from . import Finding, judge

ONCE = "doctor.md#an-item-is-not-counted-once"
REDUCING = {"all_reduce", "reduce", "gather", "all_gather", "all_gather_into_tensor"}
REDUCING |= {"all_gather_object", "gather_object"}


@judge("validated", "each-process-makes-its-own-split", certain=True, explains=["items"])
def own_split(row, run):
    """Certain where they train one model, for in one process no item is in both parts.

    Else a hint, for each may have a model of its own, as for the folds of a cross-validation.
    """
    trained, validated = ([items_of(p, what) for p in run] for what in ("trained", "validated"))
    both = set.union(*trained) & set.union(*validated)
    if both and not any(a & b for a, b in zip(trained, validated, strict=True)):
        text = say("{count} items that one process validates, another trains with", count=len(both))
        return Finding(row[0]["made"], text, certain=train_one_model(run))


def train_one_model(run):
    """Whether DDP or FSDP does it, or gradients are averaged."""
    sums = any(event["gradients"] for process in run for event in process.of("collective"))
    return sums or run.noted("wrap", "shards")


def items_of(process, what):
    return {item for one in process.passes if one[what] for item in one["items"]}


def called(one, process):
    """The collectives of a validation and after it, until the next step."""
    events = process.events
    steps = (e["place"] for e in events[one["last"] :] if e["kind"] == "step")
    until = next(steps, len(events))
    return [e for e in events[one["place"] : until] if e["kind"] == "collective"]


def added_up(one, process):
    """Whether numbers of all processes came together."""
    return any(event["name"] in REDUCING for event in called(one, process))


def by_files(passes, processes):
    """Whether the others write what they have validated into files, which rank 0 may read."""
    return all(
        any(e["place"] > one["place"] for e in process.of("writes", "save"))
        for one, process in zip(passes, processes, strict=True)
    )


def gathered(one, process):
    return any("gather" in event["name"] for event in called(one, process))


def padding_of(row):
    """How many items the sampler repeats, if that is all that is seen twice."""
    items = [name for one in row for name in names(one)]
    twice, padding = len(items) - len({*items}), row[0]["padding"]
    known = all(one["cut"] or (one["whole"] and twice == padding) for one in row)
    return padding if known and padding > 0 and not row[0]["trims"] else 0


@judge("validated", "padded-validation", certain=True)
def padded(row, run):
    """A mistake where numbers are added up; a hint where items are gathered, or come by files.

    They may be cut to the right number, or be put together by their numbers.
    """
    if padding := padding_of(row):
        text = say(
            "the sampler repeats {padding} of {size} items, for equal parts",
            padding=padding,
            size=row[0]["size"],
        )
        if gathered(row[0], run[0]) or not added_up(row[0], run[0]):
            text = say("{text}, unless they are cut off again", text=text)
            return Finding(row[0]["sampler"], text, certain=False)
        return Finding(row[0]["sampler"], text)


@judge("validated", "only-one-part-is-counted", certain=False)
def one_part(row, run):
    """A hint, for rank 0's part may be meant as a sample."""
    whole = all(one["whole"] for one in row) and all(process.of("end") for process in run)
    overlap = len(set.intersection(*[{*names(one)} for one in row]))
    together = added_up(row[0], run[0]) or by_files(row[1:], run[1:])
    if whole and overlap <= max(0, row[0]["padding"]) and not together:
        text = say("each process validates a part, and nothing is added up")
        return Finding(row[0]["line"], text)


@judge("validated", "every-process-validates-all-images", certain=False)
def all_validated(row, run):
    """A mistake where the script prints more than 100 %; else a mean of the same may be right."""
    if row[0]["whole"] and not differ(row, "items") and added_up(row[0], run[0]):
        text = say(
            "each process validates all {count} items: a sum counts them {times} times",
            count=len(row[0]["items"]),
            times=len(run),
        )
        return Finding(row[0]["made"], text, certain=run.noted("above 100 %"))


@judge("run", "validation-numbers-its-classes-by-itself", certain=True)
def other_classes(run):
    """Certain where one has a part of the other's classes, and gives them other numbers.

    A hint where they share some names, or only their numbers are seen. Nothing where they share no
    name: what is trained without labels may lie in one folder, and be validated on other data.
    """
    trained, validated = (
        [one for one in run[0].passes if one[what] and one["whole"]]
        for what in ("trained", "validated")
    )
    if not trained or not validated:
        return None
    ours, theirs = trained[0]["classes"], validated[0]["classes"]
    if ours and theirs and {*ours}.isdisjoint(theirs):
        return None
    if ours and theirs and ours != theirs:
        number = next(i for i, name in enumerate([*ours, None]) if theirs[i : i + 1] != [name])
        text = say(
            "class {number} is {name} in training and {other} here",
            number=number,
            name=[*ours, None][number],
            other=[*theirs, None][number],
        )
        part = {*ours} <= {*theirs} or {*theirs} <= {*ours}
        return Finding(validated[0]["made"], text, certain=part)
    labels, others = labels_of(trained), labels_of(validated)
    alike = labels == {*range(len(labels))} and others == {*range(len(others))}
    if alike and 1 < len(others) < len(labels) and len(validated[0]["items"]) > 9 * len(labels):
        text = say(
            "the labels are 0 to {last}, in training 0 to {other}: are they the same classes?",
            last=len(others) - 1,
            other=len(labels) - 1,
        )
        return Finding(validated[0]["made"], text, certain=False)
    return None


def labels_of(passes):
    """The numbers of classes in these passes, if each item has one; else an empty set."""
    labels = {item[1] for one in passes for item in one["items"]}
    whole = all(re.fullmatch(r"\d+(\.0)?", str(label)) for label in labels)
    return {int(float(label)) for label in labels} if whole and len(labels) <= 1000 else set()


@judge("validated", ONCE, certain=True, general="items")
def validated_twice(row, run):
    """Certain where numbers of parts are added up that overlap by more than a padding.

    A hint where a process has an item twice itself: items may be drawn at random.
    """
    trims = row[0]["trims"]  # Accelerate cuts off what it repeats
    if trims or not all(one["whole"] for one in row) or not added_up(row[0], run[0]):
        return None
    seen = times_seen(row, parts=3)
    twice = sum(count > 1 for count in seen.values())
    if twice > max(0, row[0]["padding"]) and differ(row, "items"):
        text = say(
            "{twice} of {count} validated items count several times", twice=twice, count=len(seen)
        )
        once = all(len({*names(one, parts=3)}) == len(one["items"]) for one in row)
        return Finding(row[0]["made"], text, certain=once)


@judge("run", "doctor.md#the-processes-do-not-do-the-same", certain=False)
def adds_nothing(run):
    """A hint: a process that validates items adds 0 each time, and others something.

    Where they add up in place, as in `correct += ...`, it must never have done so: a process may
    have no right answer. Else a count that comes to 0 is all that is seen of it.
    """
    sums = [added(process) for process in run]
    for line in sums[0]:
        calls = [mine.get(line, []) for mine in sums]
        nothing = [rank for rank, of in enumerate(calls) if of and not any(n for n, _ in of)]
        in_place = any(changes for of in calls for _, changes in of)
        idle = [rank for rank in nothing if not in_place or not any(c for _, c in calls[rank])]
        if idle and any(n for of in calls for n, _ in of):
            text = say("rank {rank} validates items, and adds 0 here each time", rank=idle[0])
            return Finding(line, text)
    return None


def added(process):
    """{line: [(number, changes)]} of the sums over all processes that its validations end with."""
    found = defaultdict(list)
    for one in process.passes:
        for event in called(one, process) if one["validated"] else []:
            if event["name"] in ("all_reduce", "reduce") and event["number"] is not None:
                found[event["line"]].append((event["number"], event["changes"]))
    return found


@judge("looks", "batchnorm-statistics-of-ones-own", certain=False)
def own_batchnorm(row, run):
    """A hint, for rank 0's may be the only ones that count."""
    if differ(row, "buffers") and not differ(row, "weights") and not run.noted("synced"):
        buffers = [event["buffers"] for event in row]
        name = next((k for k in buffers[0] if len({str(b.get(k)) for b in buffers}) > 1), None)
        if name:
            text = say("{name} differs between the processes when they validate", name=name)
            return Finding(row[0]["line"], text)


@judge("looks", "doctor.md#the-weights-differ", certain=True, general="weights")
def other_model(row, run):
    """Certain where what several models have got right is added up, and one is trained."""
    of_all = [[one for one in p.passes if one["validated"]] for p in run]
    together = all(of_all) and added_up(of_all[0][0], run[0])
    # Of what DDP has wrapped a judge of steps has told where it came apart, if it saw it.
    parted = row[0]["wrapped"] and run.apart()
    told = parted and not parted[0]["late"]
    if other_weights(row) and not told:
        name = next(n for n in row[0]["weights"] if len({e["weights"][n] for e in row}) > 1)
        text = say("{name} of the model that is validated differs between the processes", name=name)
        return Finding(row[0]["line"], text, certain=together and train_one_model(run))


def other_weights(row):
    """Whether one model is looked at in all processes, with other weights."""
    same = all(event["weights"].keys() == row[0]["weights"].keys() for event in row)
    return same and differ(row, "weights")


@judge("looks", "doctor.md#the-processes-do-not-do-the-same", certain=True)
def validated_in_other_modes(row, run):
    """Certain for BatchNorm and dropout: in training mode they give other answers."""
    if differ(row, "training"):
        rank = next(rank for rank, event in enumerate(row) if event["training"])
        text = say(
            "rank {rank} validates in training mode, others do not: who calls eval()?", rank=rank
        )
        return Finding(row[0]["line"], text, certain=any(event["modes"] for event in row))


@judge("run", "doctor.md#a-result-is-read-too-early", certain=False, general="early")
def read_before_the_sum(run):
    """A hint, for both may be printed: that of one process, and that of all."""
    for process in run:
        sums = defaultdict(list)
        for event in process.of("collective"):
            if event["name"] in ("all_reduce", "reduce"):
                sums[event["line"]].append(event["known"])
        read = {event["line"] for event in process.of("sum read")}
        for line, known in sums.items():
            if all(known) and line not in read:
                text = say(
                    "{line} has read this number before it is added up, and none after",
                    line=known[0],
                )
                return Finding(line, text)
    return None
