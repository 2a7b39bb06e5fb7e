"""What is judged. A judge is a small function; the files of this folder hold them by subject.

A judge is asked about one thing (ABOUT), with the whole run beside it. It returns None, or a
Finding: a line, what is wrong there, and the place that explains it if that is not the decorator's.
"""

import collections
from typing import NamedTuple


class Finding(NamedTuple):
    line: str  # "train.py:48"
    text: str
    place: str | None = None  # a heading of docs/bugs.md, or PAGE.md#HEADING; None: the judge's
    certain: bool | None = None  # a mistake, not a hint; None: as the judge says


# What can be seen without its cause. A judge that tells one of them is silent where a certain one
# explains it.
GENERAL = {
    "items": "an item is not read once",
    "weights": "the weights differ",
    "rates": "the learning rates differ",
    "hang": "the run stands still, or processes do not make the same calls",
    "early": "a number is read before it is added up",
}


class Judge(NamedTuple):
    ask: object  # the function
    about: str  # a key of ABOUT
    place: str  # a heading of docs/bugs.md, or PAGE.md#HEADING
    certain: bool  # a mistake, not a hint
    explains: list  # of GENERAL
    general: str | None  # the one of GENERAL that it tells


JUDGES = []


def judge(about, place, certain, explains=(), general=None):
    """A decorator: asks this function about each `about` of a run. The arguments: see Judge."""
    if about not in ABOUT or {*explains, general} - {*GENERAL, None}:
        raise ValueError(f"not in ABOUT or GENERAL: {about} {explains} {general}")

    def add(ask):
        JUDGES.append(Judge(ask, about, place, certain, explains, general))
        return ask

    return add


def of_the_first(kind):
    return lambda run: [[event] for event in run[0].of(kind)]


def means_by_line(run):
    lines = collections.defaultdict(list)
    for row in run.rows("mean"):
        lines[row[0]["line"]].append(row)
    return lines.values()


def steps_by_optimizer(run):
    rows = collections.defaultdict(list)
    for row in run.rows("step"):
        rows[tuple(event["optimizer"] for event in row)].append(row)
    return rows.values()


# What a judge can be asked about: its first argument, and how it is found in a run.
ABOUT = {
    "run": None,  # the whole run is the only argument
    "trained": lambda run: run.rounds("trained"),  # a row of passes in which models were trained
    "validated": lambda run: run.rounds("validated"),
    "epochs": lambda run: run.epochs(),  # [a pass of training, the next one], of one process
    "step": lambda run: run.rows("step"),  # a row: the n-th step in all processes
    "optimizers": steps_by_optimizer,  # all rows of steps of one optimizer
    "apart": lambda run: [row for row in [run.apart()] if row],  # before the weights differ
    "plateau": lambda run: run.rows("plateau"),
    "looks": lambda run: run.looks(),  # a row: the same look at a model that is validated
    "means": means_by_line,  # all rows of means that one line takes
    "gradient": of_the_first("gradient"),  # a row with the event of rank 0 alone
    "clip": of_the_first("clip"),
    "schedule": of_the_first("schedule"),
    "save": of_the_first("save"),
    "unwaited": lambda run: [[event] for process in run for event in process.of("unwaited")],
}
# Where Run.divided() holds, some processes may differ on purpose; but none of a model that DDP has
# wrapped in all of them, or from itself. The report says that the others are not asked.
OF_ALL = {"run", "epochs", "apart", "gradient", "clip", "schedule", "save", "unwaited"}


def findings(runs, others=()):
    """[Finding], each once, mistakes first.

    runs: the groups of the run; others: Findings of comparisons with other runs.
    """
    from . import (  # noqa: F401 - fill JUDGES
        data,
        ending,
        missing,
        recorded,
        saving,
        steps,
        together,
        training,
        validation,
    )

    found = []
    for run in runs:
        if len(run) > 1 and run.noted("group"):
            found += judged(run)
    once = {}
    for finding in sorted([*found, *others], key=lambda finding: not finding.certain):
        once.setdefault((finding.place, finding.line), finding)
    return [*once.values()]


def judged(run):
    said, divided = [], run.divided()
    for one in JUDGES:
        if divided and one.about not in OF_ALL:
            continue
        for answer in filter(None, answers(one, run)):
            certain = one.certain if answer.certain is None else answer.certain
            certain &= run.size <= len(run)  # those that were not seen may do what is missed here
            said.append((one, answer._replace(place=answer.place or one.place, certain=certain)))
    explained = {what for one, finding in said if finding.certain for what in one.explains}
    return [finding for one, finding in said if one.general is None or one.general not in explained]


def answers(one, run):
    """What a judge says of each thing it is asked about. If it fails, that is told, no more."""
    try:
        asks = [(run,)] if one.about == "run" else [(row, run) for row in ABOUT[one.about](run)]
        found = [one.ask(*what) for what in asks]
        if one.about == "apart" and asks and asks[0][0][0]["again"]:  # they may part on purpose
            return [answer and answer._replace(certain=False) for answer in found]
        return found
    except Exception as error:
        run.faults.append(f"{type(error).__name__}: {error} ({one.ask.__name__})")
        return []
