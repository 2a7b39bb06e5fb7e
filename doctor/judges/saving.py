"""What is saved: by whom, under which names, and whether it is read too early."""

import os
import tempfile
from collections import defaultdict
from itertools import combinations

from ..words import listed, say
from . import Finding, judge
from .order import MEETS, in_order, links


@judge("save", "the-wrapped-model-is-saved", certain=False)
def wrapped_saved(row, run):
    """A hint, for what loads it may be wrapped too."""
    if row[0]["of_wrapped"]:
        text = say('the keys begin with "module.": save the plain model')
        return Finding(row[0]["line"], text)


@judge("run", "every-process-saves", certain=True)
def all_save(run):
    """Certain, for it is one path. A hint where they write it by turns, with a barrier between.

    And where each machine has such a folder of its own: what it needs once, one process makes.
    """
    writers, known = defaultdict(list), links(run)
    for rank, process in enumerate(run):
        for save in process.of("save"):
            writers[save["path"]].append((rank, save))
    for path, by in writers.items():
        last = dict(by)  # of each rank
        if not path or len(last) < 2:
            continue
        line = next(iter(last.values()))["line"]
        text = writers_of(len(last), [path])
        if all(a[0] == b[0] or in_order(known, a, b) for a, b in combinations(by, 2)):
            return Finding(line, text, certain=False)
        if {run[rank].of("group")[0]["local"] for rank in last} == {"0"}:
            place = "local-rank-0-is-taken-for-rank-0"
            text = say("{text}, as local rank 0", text=text)
            return Finding(line, text, place, certain=not is_machines_own(path))
        return Finding(line, text)


@judge("run", "every-process-saves", certain=False)
def all_write(run):
    """A hint: what comes last stays; or what two write at the same time is mixed."""
    saved = {event["path"] for process in run for event in process.of("save")}
    writers = defaultdict(dict)
    for process in run:
        for event in process.of("writes"):
            writers[event["path"]].setdefault(id(process), event["line"])
    several = {path: by for path, by in writers.items() if len(by) > 1 and path not in saved}
    if not several:
        return None
    lines, *_ = several.values()
    return Finding(next(iter(lines.values())), writers_of(len(lines), several))


def is_machines_own(path):
    """Whether it lies where each machine has a disk of its own, and not below the run's folder."""
    folders = {tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm", "/run"}
    here = os.path.join(os.path.realpath(os.getcwd()), "")
    path = os.path.realpath(path)
    return path.startswith(
        tuple(f"{os.path.realpath(one)}/" for one in folders)
    ) and not path.startswith(here)


def writers_of(count, paths):
    names = sorted({*map(os.path.basename, paths)})[:3]
    return say("{count} processes write {names}", count=count, names=listed(names))


@judge("run", "doctor.md#the-processes-do-not-do-the-same", certain=True)
def one_saves_its_part(run):
    """Certain where a process saves no file, and one saves what FSDP has left it."""
    saves = [process.of("save") for process in run]
    parts = [save for of_one in saves for save in of_one if save["parts"]]
    if parts and not all(saves):
        text = say("a part of the weights is saved, that of this process: the others save none")
        return Finding(parts[0]["line"], text)


@judge("run", "read-before-rank-0-has-saved", certain=True, explains=["weights"])
def read_too_early(run):
    """Certain where no wait is between the two, and the script has none that torch does not see."""

    def calls(process, event):  # in which it has met the others
        return sum(e["kind"] in MEETS for e in process.events[: event["place"]])

    known, all_ranks = links(run), range(len(run))
    saves = [(rank, save) for rank in all_ranks for save in run[rank].of("save")]
    for a, save, b in ((a, save, b) for a, save in saves for b in all_ranks if b != a):
        for load in run[b].of("load"):
            same = save["path"] and load["path"] == save["path"]
            alike = same and calls(run[a], save) == calls(run[b], load)
            if alike and not in_order(known, (a, save), (b, load)):
                text = say(
                    "it may be read before another process has saved it ({line}): no barrier() "
                    "is between",
                    line=save["line"],
                )
                return Finding(load["line"], text, certain=not load["waits"])
    return None
