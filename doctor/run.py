"""A run as the judges see it: the events of all processes, side by side.

A row is a list with one event, or one pass over a loader, of each process, by rank.
"""

import collections
import itertools
import json
from pathlib import Path

from .passes import passes_of
from .recorder.read import dump_of
from .words import both


class Process:
    """What one process did."""

    def __init__(self, events, died=None, calls=None):
        self.events = [event | {"place": place} for place, event in enumerate(events)]
        self.passes = passes_of(self.events)
        # {"signal": ..., "order": how many died before} if it ended without an "end", on its own
        self.died = died
        # What torch's flight recorder knew, if it has stood still or failed since; or None.
        known = events and events[-1]["kind"] in ("stands", "end")
        self.calls = calls if known else None

    def of(self, *kinds):
        return [event for event in self.events if event["kind"] in kinds]

    @property
    def world_size(self):
        """Of the largest group that it has joined; 0 if none."""
        return max((event["world_size"] for event in self.of("group")), default=0)

    def parts(self, kind):
        """Those of a kind, outside of Join() and in it by turns: [outside, inside, outside]"""
        found = [[]]
        for event in self.of(kind, "join", "joined"):
            if event["kind"] == kind:
                found[-1].append(event)
            else:
                found.append([])
        return found

    def epochs(self):
        """[[pass]]: those in which each loader was trained with, in their order.

        A loader may be made anew for each, at the same line; but not while one before is read.
        """
        found = []
        for one in self.passes:
            if not one["trained"]:
                continue
            before = [epochs for epochs in found if epochs[-1]["line"] == one["line"]]
            same = [epochs for epochs in before if epochs[-1]["loader"] == one["loader"]]
            same += [epochs for epochs in before if is_over(epochs[-1], one)]
            if same:
                same[0].append(one)
            else:
                found.append([one])
        return found

    @property
    def end(self):
        """Its end, with error None if it has none: it was ended from outside."""
        return (self.of("end") or [{"error": None, "line": "?"}])[-1]


class Run(list):
    """The processes of one group, by rank."""

    code = 0  # the launcher's exit code
    stopped = ""  # why the doctor has ended the run, in words
    outside = ()  # of the first one: the processes that have joined no group
    aborted = False  # one of them after its script had ended, as gloo does at times

    def __init__(self, processes=()):
        super().__init__(processes)
        self.faults = [event["error"] for process in self for event in process.of("fault")]

    @property
    def size(self):
        """Of the group, as its processes have it: some of them may not have been looked at."""
        return max((process.world_size for process in self), default=0)

    def rows(self, kind):
        """The n-th events of a kind in all processes; of each Join(), where some have more.

        Steps are those of one model, and means those of one line: a process may have an optimizer
        of its own, as for a probe that rank 0 trains alone.
        """
        key = {"step": trained_by, "mean": lambda event: event["line"]}.get(kind, lambda _: kind)
        found = []
        for part in zip(*(process.parts(kind) for process in self), strict=False):
            tables = [collections.defaultdict(list) for _ in part]
            for table, events in zip(tables, part, strict=True):
                for event in events:
                    table[key(event)].append(event)
            for one in tables[0]:
                found += zip(*(table.get(one, []) for table in tables), strict=False)
        return sorted(found, key=lambda row: row[0]["place"])

    def rounds(self, what):
        """The same pass over a loader in all processes: those with one.trained or .validated."""
        tables = []
        for process in self:
            tables.append({})
            for one in process.passes:
                count = sum(line == one["line"] for line, _ in tables[-1])
                tables[-1][one["line"], count] = one
        found = [[table.get(key) for table in tables] for key in tables[0]]
        return [row for row in found if all(one and one[what] for one in row)]

    def looks(self):
        """Rows of "validates": the same look at a model without gradients in all processes.

        It is at one line, after as many steps, of each Join(). Where one process looks more often
        there, it may have looked at another model first: none of these is compared.
        """
        tables = []
        for process in self:
            tables.append(collections.defaultdict(list))
            joins = steps = 0
            for event in process.of("step", "join", "joined", "validates"):
                if event["kind"] == "validates":
                    tables[-1][event["line"], joins, steps].append(event)
                elif event["kind"] == "step":
                    steps += 1
                else:
                    joins, steps = joins + 1, 0
        found = [[table.get(key, []) for table in tables] for key in tables[0]]
        alike = [looks for looks in found if len({*map(len, looks)}) == 1]
        return [row for looks in alike for row in zip(*looks, strict=True)]

    def epochs(self):
        """[[a pass of training, the next one of its loader]], of each process alone."""
        of_all = [epochs for process in self for epochs in process.epochs()]
        return [pair for epochs in of_all for pair in itertools.pairwise(epochs)]

    def divided(self):
        """The event that shows that processes may differ on purpose, or None.

        They use groups of their own, or compute a model together. A collective in a group of one
        does nothing; but where each process has one, each may have a model of its own.
        """
        found = [process.of("part", "together") for process in self]
        several = [e for events in found for e in events if e["kind"] != "part" or e["size"] > 1]
        several.sort(key=lambda event: event["kind"] == "part")  # the other kind says more
        return next(iter(several), found[0][0] if all(found) else None)

    def noted(self, *kinds):
        return any(process.of(*kinds) for process in self)

    def apart(self):
        """The row of the step after which a weight of a wrapped model differs, with its name.

        Weights are noted before each step, and after the last: it is the step before the first row
        in which they differ, or that row if it is the first. None if they are the same again when
        they are seen last: they may part for some steps on purpose. again: they were the same at a
        look in between, and no file was loaded before it: they may part on purpose, too. late: the
        row after the last step is the first in which they differ.
        """
        last = {}  # model: the last row with a step of it
        steps = [row for row in self.rows("step") + self.rows("last") if row[0]["weights"]]
        names = {name for row in steps for name in row[0]["weights"]}
        rows_of = {name: [row for row in steps if name in row[0]["weights"]] for name in names}
        apart = {name for name, rows in rows_of.items() if has_parted(rows[-1], name)}
        for row in steps:
            for name in row[0]["weights"]:
                model, _, name_there = name.partition(".")
                if name in apart and has_parted(row, name):
                    cause = last.get(model, row)
                    orders = [event["order"].get(model, []) for event in cause]
                    again = self.met_again(rows_of[name], name)
                    late = row[0]["kind"] == "last"
                    facts = {"name": name_there, "late": late, "again": again}
                    found = zip(cause, orders, strict=True)
                    return [e | facts | {"order": order} for e, order in found]
            if all(event["order"].keys() == row[0]["order"].keys() for event in row):
                last |= dict.fromkeys(row[0]["order"], row)
        return None

    def met_again(self, rows, name):
        """Whether a weight has parted, and was the same later, though no file was loaded."""
        parted = list(itertools.dropwhile(lambda row: not has_parted(row, name), rows))
        again = next((row for row in parted if not has_parted(row, name)), None)
        return again is not None and not any(
            before["place"] < load["place"] < after["place"]
            for process, before, after in zip(self, parted[0], again, strict=True)
            for load in process.of("load")
        )


def trained_by(step):
    """The models of DDP that a step changes; without DDP the number of its optimizer."""
    return tuple(sorted(step["order"])) or step["optimizer"]


def is_over(one, other):
    """Whether a pass was over before another one began, of a loader that was made at its line."""
    return one["made"] == other["made"] and one["last"] < other["place"]


def has_parted(row, name):
    """Whether a weight differs between those that have it."""
    return len({event["weights"][name] for event in row if name in event["weights"]}) > 1


def differ(row, fact):
    return any(event[fact] != row[0][fact] for event in row)


def each(row, fact):
    """ "719 and 718" """
    return both(event[fact] for event in row)


def names(one, parts=1):
    """The names of a pass's items; 2 parts: with labels, 3: with images."""
    return [item[:parts] for item in one["items"]]


def read(folder, died):
    """The Runs that a folder of events holds: one for each group of processes.

    A script may call mp.spawn more than once: the second process that is rank 0 is of a new group,
    and so is one of a group of another size.
    died: {name of a process: ...}, see Process.
    """
    groups, processes = [], []
    for path in sorted(Path(folder).glob("*.jsonl"), key=lambda path: path.stat().st_mtime):
        lines = path.read_text().splitlines()
        events = [json.loads(line) for line in lines if line.endswith("}")]  # the last may be cut
        process = Process(events, died.get(path.stem), recorded(f"{path}.calls"))
        processes.append(process)
        for rank in {event["rank"] for event in process.of("group")}:
            size = process.world_size
            ranks = next((g for of, g in groups if of == size and rank not in g), None)
            if ranks is None:
                groups.append((size, ranks := {}))
            ranks[rank] = process
    runs = [Run(ranks[rank] for rank in sorted(ranks)) for _, ranks in groups]
    if runs:
        runs[0].outside = [process for process in processes if not process.of("group")]
        # mp.spawn's parent has seen it.
        runs[0].aborted = any("SIGABRT" in str(one.end["error"]) for one in runs[0].outside)
    return runs or [Run(processes)]


def recorded(path):
    try:
        return dump_of(Path(path).read_bytes())
    except (OSError, ValueError):  # none was written, or not to its end
        return None


def times_seen(row, parts=1):
    """Counter: how often each item was read in a row of passes; parts: see names()."""
    return collections.Counter(name for one in row for name in names(one, parts))
