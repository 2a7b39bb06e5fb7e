"""The command: which runs are made, and what each of them adds."""

import os
import re
import sys
import time

from . import notebook, report
from .files import run_guarded
from .judges import comparing, findings
from .launch import Launcher, examine
from .options import parse_args, text_of
from .streams import lasting
from .words import say

AGAIN, ALONE = say("started again"), say("one process")
SEVERAL = say("three machines of a process each")


def main():
    args = parse_args()
    args.starts_its_own = args.gpus = False
    args.output = open_output(args)
    sys.exit(run_guarded(lambda files: check_up(args, files), keep=args.keep))


def open_output(args):
    """Where a format without a file is written. Two of them stand there alone.

    All else, what the script prints too, goes to stderr then.
    """
    if not any(name in ("json", "sarif") and not file for name, file in args.forms):
        return sys.stdout
    sys.stdout.flush()
    real = lasting(os.dup(1), "utf-8")
    os.dup2(2, 1)
    return real


def check_up(args, files):
    """All runs, and the report of them; returns the exit code."""
    began = time.monotonic()
    runs = examine(args, files, args.n, args.nodes)
    if runs[0].noted("spawns"):
        args.starts_its_own = True
        runs = examine(args, files, args.n, args.nodes)
    of_files = []
    if wants_gpus(args, runs):
        of_files = files.put_back()
        runs = as_if_with_gpus(args, files, runs)
    seconds = time.monotonic() - began
    more = OtherRuns(args, files, runs, seconds, of_files)
    found = findings(runs, more.make_and_judge())
    return report.tell(runs, found, seconds, [*more.said, *more.of_files], args, more.ill)


def went_on(runs):
    """How far a run has come, to compare: (it joined a group, took steps in it, did not fail)"""
    run = runs[0]
    group = run.noted("group")
    return group, group and run.noted("step"), not report.failed(runs)


def wants_gpus(args, runs):
    """Whether it has asked for a GPU, and did not go on when it was told that there is none.

    Ray waits for GPUs, for ever; and its processes are not looked at.
    """
    group, steps, well = went_on(runs)
    ray = re.search(r"^(import|from) ray\b", text_of(args), re.M)
    return runs[0].noted("asks") and not (group and (steps or well)) and not ray


def as_if_with_gpus(args, files, runs):
    """The Runs of a script that was told that there is a GPU, if that brings it further."""
    files.begin()
    args.gpus = True
    again = examine(args, files, args.n, args.nodes, quiet=True)
    if again[0].noted("spawns"):
        args.starts_its_own = True
        again = examine(args, files, args.n, args.nodes, quiet=True)
    args.gpus = went_on(again) > went_on(runs)
    return again if args.gpus else runs


def folder_is_gone():
    """Whether the working folder was removed: nothing can be started in it."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


class OtherRuns:
    """What only another run can show. Each is made if the first was short enough."""

    def __init__(self, args, files, runs, seconds, of_files=()):
        self.args, self.files, self.run, self.seconds = args, files, runs[0], seconds
        self.until = time.monotonic() + (0 if args.quick else args.budget)
        self.said = []  # a line about each
        self.ill = False  # whether it could not go on with its own files
        self.of_files = [*of_files]  # what became of the files

    def make_and_judge(self):
        args, run, found = self.args, self.run, []
        if args.script and notebook.is_one(args.script):
            self.said += filter(None, [notebook.left_out(args.script)])
        if args.nodes > 1:
            text = say(
                "played {count} machines: the local ranks began at 0 on each", count=args.nodes
            )
            self.said.append(text)
        compared = bool(run) and run.noted("group")
        well = compared and all(process.end["error"] == "" for process in run)
        if compared and (args.twice or (well and self.may_resume() and self.time_for(AGAIN))):
            found += self.started_again()
        self.put_back(args.keep)
        by_torchrun = compared and Launcher(args, args.n).is_torchrun
        if args.against_one and not by_torchrun:
            self.said.append(say("not compared with one process: the script starts its own"))
        asked = args.against_one or (run and run.noted("step") and self.time_for(ALONE))
        if by_torchrun and asked:
            found += self.alone()
        usual = args.n == 2 and args.nodes == 1 and not self.gpus()
        if by_torchrun and well and usual and self.time_for(SEVERAL, 1.5):
            found += self.several_machines()
        return [one for one in found if one]

    def anew(self, processes, nodes=1):
        """The Runs of a start with the files as they were before, but for new ones with --keep."""
        self.files.begin()
        runs = examine(self.args, self.files, processes, nodes, quiet=True)
        self.put_back()
        return runs

    def findings(self, runs):
        """Those of another run; on other machines its processes may have other groups."""
        if not report.not_asked([self.run]):
            self.said += filter(None, [report.not_asked(runs)])
        return findings(runs)

    def put_back(self, keep=False):
        self.of_files += [one for one in self.files.put_back(keep) if one not in self.of_files]

    def time_for(self, what, times=1.0):
        if self.args.quick:
            return False
        if time.monotonic() + times * self.seconds < self.until:
            return True
        text = say(
            "not tried, for the run took {seconds:.0f} s: {what} (--budget)",
            seconds=self.seconds,
            what=what,
        )
        self.said.append(text)
        return False

    def may_resume(self):
        loads = re.search(r"torch\.load|load_state_dict|resume", text_of(self.args))
        return self.run.noted("save") and loads

    def gpus(self):
        return any(event["gpus"] for process in self.run for event in process.of("began"))

    def started_again(self):
        """With the files that the first run has left: what it does then is judged, too."""
        if folder_is_gone():
            self.said.append(say("not started again: the script has removed its working folder"))
            return []
        runs = examine(self.args, self.files, self.args.n, self.args.nodes, quiet=True)
        if not any(process.of("load") for process in runs[0]):
            self.said.append(say("started again: torch.load() was not called: it began anew"))
            return []
        why = report.failed(runs)
        self.ill = bool(why or runs[0].stopped)
        if why:
            self.said.append(say("started again: it loaded a file; {why}", why=why[0]))
        elif runs[0].stopped:
            text = say("started again: it loaded a file; {why}", why=runs[0].stopped)
            self.said.append(text)
        else:
            self.said.append(say("started again: it loaded a file"))
        return [comparing.epoch_repeated(self.run, runs[0]), *self.findings(runs)]

    def alone(self):
        alone = self.anew(1)[0]
        here, there = (len(one[0].of("step")) if one else 0 for one in (self.run, alone))
        text = say(
            "compared with one process: {here} steps here, {there} there", here=here, there=there
        )
        self.said.append(text)
        if not alone:
            return []
        batch = comparing.batch_per_process(self.run, alone)
        if batch:  # it explains other numbers
            return [batch]
        gradients = comparing.other_gradients(self.run, alone)
        return [gradients, *comparing.other_numbers(self.run, alone)]

    def several_machines(self):
        """Parts that are not alike, and a local rank that is taken for a rank.

        Three processes, or four: a script may refuse a number that its batch does not divide by.
        """
        for machines in (3, 4):
            runs = self.anew(machines, nodes=machines)
            failed = report.failed(runs)
            if runs[0].stopped or runs[0].noted("step") or not failed:
                break
        steps = len(runs[0][0].of("step")) if runs[0] else 0
        said = say("{steps} steps in each", steps=steps)
        if failed and not runs[0].stopped:
            said = failed[0]
        text = say("{count} machines of a process each: {said}", count=machines, said=said)
        self.said.append(text)
        # On these machines each is local rank 0: who saves on two processes does so on all.
        all_save = {one.line for one in findings([self.run]) if one.place == "every-process-saves"}
        found = filter(None, [*map(comparing.joins_as_local_rank, runs), *self.findings(runs)])
        return [one for one in found if one.place != comparing.LOCAL or one.line not in all_save]
