"""What is told: what ended the script, what was found, what was looked at, what became of files."""

import json
import signal
from pathlib import Path

from .recorder.compare import lines

ENDED = (signal.SIGTERM, signal.SIGKILL)  # by which a launcher ends the others


def failed(runs):
    """Each process that failed or was ended from outside, in words, the cause first."""
    said = []
    for run in runs:
        for rank, process in enumerate(run):
            error, died = process.end["error"], process.died
            if error:
                late = "closed by peer" in error or "reset by peer" in error
                text = f"{process.end['line']}  rank {rank} failed: {error.splitlines()[0][:99]}"
                said.append(((late, False, 0), text))
            elif died and (died["order"] == 0 or died["signal"] not in ENDED):
                line = process.events[-1]["line"] if process.events else "?"
                # Of one that a launcher has ended for another's death the signal may be unknown.
                order = (False, died["signal"] is None, died["order"])
                said.append((order, f"{line}  rank {rank} {how_it_died(died['signal'])}"))
    return [text for _, text in sorted(said, key=lambda one: one[0])]


def how_it_died(number):
    """In words. No exception was raised, so the line is that of the last call that was seen."""
    if number is None:
        return "ended without an exception, after this line"
    name = signal.Signals(number).name
    why = {
        "SIGKILL": ": by the kernel, if memory was short",
        "SIGABRT": ": gloo does so where sizes differ between the processes",
        "SIGSEGV": ": a fault in compiled code",
    }
    return f"was ended by {name} after this line{why.get(name, '')}"


def not_seen(run):
    """Why a run shows nothing of a training, or of a validation alone; or ""."""
    if not run:
        return "no process of the script began to run: there is nothing to compare"
    if not run.noted("group"):
        text = "the script joins no process group of torch: there is nothing to compare"
        asks = run[0].of("asks")
        if asks:
            text += f"\n {asks[0]['line']}  here it asks for a GPU, and is told that there is none"
        return text
    if run.noted("step"):
        return ""
    for event in run[0].of("pass"):
        if event["batches"] == 0:
            return f"{event['made']}  this loader gives no batch: has it fewer items than a batch?"
    if not any(one["validated"] for one in run[0].passes):
        loads = run[0].of("load")
        why = (
            f": does the checkpoint of {loads[-1]['line']} leave nothing to train?" if loads else ""
        )
        return f"no step of an optimizer was seen{why}"
    return ""


def not_compared(run):
    """A line where the weights were not compared: no two processes have the same part of one."""
    steps = run[0].of("step") if run else []
    parts = [
        part for process in run for part in (process.of("step") or [{"parts": ()}])[0]["parts"]
    ]
    if len({*parts}) < len(parts):
        return ""
    if steps and not any(step["weights"] or step["ours"] for step in steps):
        return "the weights were not compared: each process has a part of them"
    return ""


def recorded(run):
    """What torch's flight recorder says of each rank, where the run stood still or failed."""
    dumps = {rank: process.calls for rank, process in enumerate(run) if process.calls}
    try:
        return [f"recorded by torch: {line}" for line in lines(dumps)] if len(run) > 1 else []
    except Exception as error:  # another torch's records: the report goes on without them
        return [f"torch's flight recorder could not be read: {type(error).__name__}: {error}"]


def tell(runs, found, seconds, said=(), file=None):
    """Print the report, and write it to a file as JSON; returns the exit code.

    It is 1 for a mistake, 3 for a script that failed, 2 where there was nothing to look at.
    said: lines about other runs, and about files.
    """
    run = runs[0]
    print()
    why = failed(runs)
    for text in why:
        print(f" {text}")
    # gloo may abort while Python ends: that is not the script's.
    well = bool(run) and all(process.end["error"] == "" for one in runs for process in one)
    if run.stopped:
        print(f" the doctor ended the run: {run.stopped}")
    elif run.code and not well:
        text = f"it ended with exit code {run.code}: what it did not come to was not looked at"
        print(f" {text}")
    unseen = "" if run.stopped else not_seen(run)
    if unseen:
        print(f" {unseen}")
    mistakes = [one for one in found if one.certain]
    print(f" mistakes: {len(mistakes)}, hints: {len(found) - len(mistakes)}")
    for one in found:
        hint = "" if one.certain else "hint: "
        print(f" {one.line}  {hint}{one.text}  → {page_of(one.place)}")
    if any(page_of(one.place).startswith("docs/bugs.md") for one in found):
        print(" in the diffs of that page - is right, + is the mistake")
    for fault in sorted({fault for one in runs for fault in one.faults}):
        print(f" the doctor failed, and may have missed something: {fault}")
    if run:
        steps = len(run[0].of("step"))
        seen = [seen_of(process) for process in run]
        who = "each" if len({*seen}) == 1 else "rank 0"
        print(f" looked at {len(run)} processes, {who}: {seen[0]}; {seconds:.0f} s")
        if steps and len(run.rounds("trained")) == 1:
            print(" one epoch was seen: give two, and the orders of their items are compared")
    for line in filter(None, [not_compared(run), *recorded(run), *said]):
        print(f" {line}")
    if file:
        found = [one._asdict() | {"place": page_of(one.place)} for one in found]
        report = {"found": found, "failed": why, "stopped": run.stopped}
        Path(file).write_text(json.dumps(report, indent=1) + "\n")
    if mistakes:
        return 1
    if why or run.stopped or (run.code and not well):
        return 3
    return 2 if unseen else 0


def seen_of(process):
    steps, calls = (len(process.of(kind)) for kind in ("step", "collective"))
    return f"{steps} steps, {len(process.passes)} passes over loaders, {calls} collectives"


def page_of(place):
    return f"docs/{place}" if ".md#" in place else f"docs/bugs.md#{place}"
