"""What is told: what ended the script, what was found, what was looked at, what became of files."""

import os
import re
import signal
from pathlib import Path

from . import formats
from .recorder.compare import lines
from .words import on_screen, page, say

ENDED = (signal.SIGTERM, signal.SIGKILL)  # by which a launcher ends the others


def failed(runs):
    """Each process that failed or was ended from outside, in words, the cause first."""
    said = []
    for run in runs:
        for rank, process in enumerate(run):
            error, died = process.end["error"], process.died
            if error:
                late = "closed by peer" in error or "reset by peer" in error
                first = error.splitlines()[0][:99]
                text = say(
                    "{line}  rank {rank} failed: {error}",
                    line=process.end["line"],
                    rank=rank,
                    error=first,
                )
                said.append(((late, False, 0), text))
            elif died and (died["order"] == 0 or died["signal"] not in ENDED):
                line = process.events[-1]["line"] if process.events else "?"
                # Of one that a launcher has ended for another's death the signal may be unknown.
                order = (False, died["signal"] is None, died["order"])
                how = how_it_died(died["signal"])
                said.append(
                    (order, say("{line}  rank {rank} {how}", line=line, rank=rank, how=how))
                )
    said = [text for _, text in sorted(said, key=lambda one: one[0])]
    return said or [*failed_outside(runs)]


def failed_outside(runs):
    """Each process that failed before it joined a group, in words."""
    for process in (process for run in runs for process in run.outside):
        end, died = process.end, process.died
        # mp.spawn's parent fails for a process that has failed.
        if end["error"] and not re.match("Process(Raised|Exited)Exception", end["error"]):
            yield say(
                "{line}  a process that joined no group failed: {error}",
                line=end["line"],
                error=end["error"].splitlines()[0][:99],
            )
        elif died and (died["order"] == 0 or died["signal"] not in ENDED):
            line = process.events[-1]["line"] if process.events else "?"
            how = how_it_died(died["signal"])
            yield say("{line}  a process that joined no group {how}", line=line, how=how)


def how_it_died(number):
    """In words. No exception was raised, so the line is that of the last call that was seen."""
    if number is None:
        return say("ended without an exception, after this line")
    name = signal.Signals(number).name
    text = say("was ended by {name} after this line", name=name)
    if name == "SIGKILL":
        text = say("{text}: by the kernel, if memory was short", text=text)
    if name == "SIGABRT":
        text = say("{text}: gloo does so where sizes differ between the processes", text=text)
    if name == "SIGSEGV":
        text = say("{text}: a fault in compiled code", text=text)
    return text


def not_seen(runs, failed):
    """Why a run shows nothing of a training, or of a validation alone: lines, or none.

    failed: it may have had steps to make.
    """
    run = runs[0]
    if not run:
        return [say("no process of the script began to run: there is nothing to compare")]
    if not run.noted("group"):
        lines = [say("the script joins no process group of torch: there is nothing to compare")]
        asks = [event for event in run[0].of("asks") if not event["told"]]
        return [
            *lines,
            *(
                say(
                    "{line}  here it asks for a GPU, and is told that there is none",
                    line=event["line"],
                )
                for event in asks[:1]
            ),
        ]
    part = [one for one in runs if len(one) < one.size]
    if part and not failed:  # else one may have ended before it joined
        return [
            say(
                "of the {size} processes of a group {count} were looked at: the others run where "
                "the doctor does not see them",
                size=part[0].size,
                count=len(part[0]),
            )
        ]
    if len(runs) > 1 and all(len(one) == 1 for one in runs):
        return [say("each process joins a group of its own: there is nothing to compare")]
    if len(runs) == 1 and run.size == 1:
        return [
            say(
                "the group has one process: there is nothing to compare. Start two, as by "
                "--nproc-per-node=2; with one GPU put CUDA_VISIBLE_DEVICES= before the command"
            )
        ]
    if run.noted("step"):
        return []
    for event in run[0].of("pass"):
        if event["batches"] == 0:
            return [
                say(
                    "{line}  this loader gives no batch: has it fewer items than a batch?",
                    line=event["made"],
                )
            ]
    trains = run.noted("backward") or any(one["trains"] for one in run[0].of("forward"))
    if any(one["validated"] for one in run[0].passes) and not trains:
        return []
    loads = run[0].of("load")
    if loads and not failed:
        return [
            say(
                "no step of an optimizer was seen: does the checkpoint of {line} leave "
                "nothing to train?",
                line=loads[-1]["line"],
            )
        ]
    return [say("no step of an optimizer was seen")]


def without_gpu(run):
    """The line that asks for a GPU, or that names one, where the CPU took its place."""
    asks = [event for event in run[0].of("asks") if event["told"]] if run else []
    if asks:
        return say(
            "{line}  here it asks for a GPU, and is told that there is one: the CPU "
            "takes its place",
            line=asks[0]["line"],
        )
    names = run[0].of("names a gpu") if run else []
    if not names:
        return ""
    return say("{line}  here it names a GPU: the CPU takes its place", line=names[0]["line"])


def not_compared(run):
    """A line where the weights were not compared: no two processes have the same part of one."""
    steps = run[0].of("step") if run else []
    parts = [
        part for process in run for part in (process.of("step") or [{"parts": ()}])[0]["parts"]
    ]
    if len({*parts}) < len(parts):
        return ""
    if steps and not any(step["weights"] or step["ours"] for step in steps):
        return say("the weights were not compared: each process has a part of them")
    return ""


def not_asked(runs):
    """A line where processes may differ on purpose, or "": most judges that compare are silent."""
    event = next(filter(None, (run.divided() for run in runs if len(run) > 1)), None)
    if not event:
        return ""
    why = say("they compute a model together")
    if event["kind"] == "part":
        why = say("some use a group of their own")
    return say(
        "{line}  here the processes may differ on purpose, for {why}: what they read, count and "
        "validate, and weights without DDP, were not compared",
        line=event["line"],
        why=why,
    )


def recorded(run):
    """What torch's flight recorder says of each rank, where the run stood still or failed."""
    dumps = {rank: process.calls for rank, process in enumerate(run) if process.calls}
    try:
        found = lines(dumps) if len(run) > 1 else []
        return [say("recorded by torch: {line}", line=line) for line in found]
    except Exception as error:  # another torch's records: the report goes on without them
        said = f"{type(error).__name__}: {error}"
        return [say("torch's flight recorder could not be read: {error}", error=said)]


def tell(runs, found, seconds, said, args, ill_later=False):
    """Print the report, and write it in the formats of args; returns the exit code.

    It is 1 for a mistake, 3 for a script that failed, 2 where there was nothing to look at.
    said: lines about other runs, and about files. ill_later: the script failed when it was started
    again.
    """
    run = runs[0]
    why = failed(runs)
    unseen = [] if run.stopped else not_seen(runs, bool(why) or bool(run.code))
    well = bool(run) and all(process.end["error"] == "" for one in runs for process in one)
    ill = bool(run.code) and not (well and run.aborted)
    print()
    for line in [*how_it_ended(run, why, ill), *unseen, *of_findings(found)]:
        show(line)
    faults = sorted({fault for one in runs for fault in one.faults})
    for fault in faults:
        show(say("the doctor failed, and may have missed something: {fault}", fault=fault))
    for line in filter(None, [*looked_at(run, seconds), not_asked(runs), *recorded(run), *said]):
        show(line)
    mistake = any(one.certain for one in found)
    code = 1 if mistake else 3 if why or run.stopped or ill or ill_later else 2 if unseen else 0
    write_forms(args, found, why, run.stopped, code)
    return code


def show(line):
    """A line of the report. Those of a notebook are shown as it shows them."""
    print(" " + re.sub(r"(\.ipynb cell \d+):(\d+)", r"\1 line \2", on_screen(line)))


def how_it_ended(run, why, ill):
    if run.stopped:
        return [*why, say("the doctor ended the run: {why}", why=run.stopped)]
    text = say(
        "it ended with exit code {code}: what it did not come to was not looked at", code=run.code
    )
    return [*why, text] if ill else why


def of_findings(found):
    mistakes = sum(one.certain for one in found)
    lines = [
        say("mistakes: {mistakes}, hints: {hints}", mistakes=mistakes, hints=len(found) - mistakes)
    ]
    for one in found:
        text = one.text if one.certain else say("hint: {text}", text=one.text)
        lines.append(
            say("{line}  {text}  → {page}", line=one.line, text=text, page=page(address(one.place)))
        )
    if any(address(one.place).startswith("bugs.md") for one in found):
        lines.append(say("in the diffs of that page - is right, + is the mistake"))
    return lines


def looked_at(run, seconds):
    """What was seen, and what was not."""
    if not run:
        return []
    seen = [seen_of(process) for process in run]
    known = {"count": len(run), "seen": seen[0], "seconds": seconds}
    if len({*seen}) == 1:
        text = say("looked at {count} processes, each: {seen}; {seconds:.0f} s", **known)
    else:
        text = say("looked at {count} processes, rank 0: {seen}; {seconds:.0f} s", **known)
    lines = [text]
    epochs = [*map(len, run[0].epochs())]
    if run[0].of("step") and epochs and max(epochs) == 1:
        lines.append(
            say("one epoch was seen: give two, and the orders of their items are compared")
        )
    if run.noted("step") and not any(process.passes for process in run):
        lines.append(say("no DataLoader was seen: the items of the processes were not compared"))
    return [*lines, without_gpu(run), not_compared(run)]


def write_forms(args, found, failed, stopped, code):
    found = [one._replace(place=f"docs/{address(one.place)}") for one in found]
    folder = os.path.dirname(os.path.abspath(args.script or "?"))  # as launch.examine() has it
    told = formats.Told(found, failed, stopped, code, folder)
    for name, file in args.forms:
        text = formats.written(told, name)
        if file:
            Path(file).write_text(text, encoding="utf-8")
        else:
            print(text, end="", file=args.output, flush=True)


def seen_of(process):
    steps, calls = (len(process.of(kind)) for kind in ("step", "collective"))
    return say(
        "{steps} steps, {passes} passes over loaders, {calls} collectives",
        steps=steps,
        passes=len(process.passes),
        calls=calls,
    )


def address(place):
    """PAGE.md#HEADING"""
    return place if ".md#" in place else f"bugs.md#{place}"
