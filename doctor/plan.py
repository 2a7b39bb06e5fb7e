"""The command: which runs are made, and what each of them adds."""

import argparse
import importlib.util
import os
import re
import sys
import time
from pathlib import Path

from . import report
from .files import guarded, restore_dead
from .judges import comparing, findings
from .launch import Launcher, examine

AGAIN, ALONE, SEVERAL = "started again", "one process", "three machines of a process each"
DOCS = Path(__file__).resolve().parent.parent / "docs"


def parse_args():
    about = "Run a training script on two processes, and name the mistakes that it makes."
    more = "Give the script little data and two epochs, and a folder without its checkpoints."
    if DOCS.is_dir():  # it may have been copied, or installed, without them
        more += f" The mistakes: {DOCS / 'bugs.md'}; more: {DOCS / 'doctor.md'}."
    parser = argparse.ArgumentParser(prog="doctor", description=about, epilog=more)
    add = parser.add_argument
    add("-n", type=int, default=2, metavar="N", help="how many processes (default: 2)")
    add("--nodes", type=int, default=1, metavar="N", help="play so many machines with them")
    add("--quick", action="store_true", help="one run, none to compare it with")
    add("--budget", type=int, default=120, metavar="S", help="seconds for the other runs (120)")
    add("--against-one", action="store_true", help="one process too, however long it takes")
    add("--twice", action="store_true", help="start it again, however long it takes")
    add("--steps", type=int, metavar="N", help="end each pass over a loader after N batches")
    add("--patience", type=int, default=15, metavar="S", help="a hang stands still so long (15)")
    add("--keep", action="store_true", help="leave the new files that the script writes")
    restore = "put back what a doctor that was killed has left, and do nothing else"
    add("--restore", nargs=0, action=Restore, help=restore)
    attach = "look at a job that runs now, on this machine: a process's id (--attach --help)"
    add("--attach", nargs=argparse.REMAINDER, action=Attach, metavar="...", help=attach)
    dumps = "compare the ranks' files of torch's flight recorder"
    add("--dumps", metavar="DIR", action=Dumps, help=dumps)
    add("--json", metavar="FILE", help="write what was found into a file, too")
    add("--by", metavar="COMMAND", help="start it by another launcher, such as 'srun -n2 python'")
    add("-m", dest="module", action="store_true", help="the script is a module: -m package.train")
    add("script", help="your script")
    add("flags", nargs=argparse.REMAINDER, help="the script's own flags, after the doctor's")
    args = parser.parse_args()
    check(parser, args)
    return args


def check(parser, args):
    """Exit with one line, before anything is started, if it cannot be."""
    if args.n < 1 or args.nodes < 1 or args.n % args.nodes:
        parser.error(f"-n {args.n} --nodes {args.nodes}: each machine needs as many processes")
    if not args.module and not os.path.isfile(args.script):
        parser.error(f"{args.script} is no file")
    text = "" if args.module else Path(args.script).read_text(errors="replace")
    for action in parser._actions:
        for flag in action.option_strings:
            name = flag.lstrip("-").replace("-", "[-_]")
            if flag.startswith("--") and flag in args.flags and not re.search(rf"{name}\b", text):
                parser.error(f"put {flag} before {args.script}: it is a flag of the doctor")
    if args.json and not os.access(os.path.dirname(os.path.abspath(args.json)), os.W_OK):
        parser.error(f"--json {args.json}: there is no such folder, or it may not be written to")
    if not args.by and not importlib.util.find_spec("torch"):  # --by may start another Python
        parser.exit(2, f"doctor: {sys.executable} has no torch: use the Python of your script\n")


class Restore(argparse.Action):
    """--restore alone, as --help."""

    def __call__(self, parser, *_):
        for line in restore_dead() or ["there is nothing to put back"]:
            print(f" {line}")
        parser.exit(0)


class Attach(argparse.Action):
    """--attach and all behind it: the script was started by somebody else."""

    def __call__(self, parser, namespace, words, option=None):
        from . import attach

        attach.main(words)


class Dumps(argparse.Action):
    """--dumps DIR alone."""

    def __call__(self, parser, namespace, folder, option=None):
        from .recorder import compare

        parser.exit(compare.main(folder))


def main():
    args = parse_args()
    args.starts_its_own = False
    sys.exit(guarded(lambda files: check_up(args, files), keep=args.keep))


def check_up(args, files):
    """All runs, and the report of them; returns the exit code."""
    began = time.monotonic()
    runs = examine(args, files, args.n, args.nodes)
    if runs[0].noted("spawns"):
        args.starts_its_own = True
        runs = examine(args, files, args.n, args.nodes)
    seconds = time.monotonic() - began
    more = OtherRuns(args, files, runs, seconds)
    found = findings(runs, more.findings())
    return report.tell(runs, found, seconds, [*more.said, *more.of_files], args.json)


class OtherRuns:
    """What only another run can show. Each is made if the first was short enough."""

    def __init__(self, args, files, runs, seconds):
        self.args, self.files, self.run, self.seconds = args, files, runs[0], seconds
        self.until = time.monotonic() + (0 if args.quick else args.budget)
        self.said = []  # a line about each
        self.of_files = []  # what became of the files

    def findings(self):
        args, run, found = self.args, self.run, []
        if args.nodes > 1:
            self.said.append(f"played {args.nodes} machines: the local ranks began at 0 on each")
        compared = bool(run) and run.noted("group")
        well = compared and all(process.end["error"] == "" for process in run)
        if compared and (args.twice or (well and self.may_resume() and self.time_for(AGAIN))):
            found.append(self.started_again())
        self.of_files = self.files.put_back(args.keep)
        by_torchrun = compared and Launcher(args, args.n).is_torchrun
        if args.against_one and not by_torchrun:
            self.said.append("not compared with one process: the script starts its own")
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
        self.of_files += [one for one in self.files.put_back() if one not in self.of_files]
        return runs

    def time_for(self, what, times=1.0):
        if self.args.quick:
            return False
        if time.monotonic() + times * self.seconds < self.until:
            return True
        self.said.append(f"not tried, for the run took {self.seconds:.0f} s: {what} (--budget)")
        return False

    def may_resume(self):
        text = "" if self.args.module else Path(self.args.script).read_text(errors="replace")
        return self.run.noted("save") and re.search(r"torch\.load|load_state_dict|resume", text)

    def gpus(self):
        return any(event["gpus"] for process in self.run for event in process.of("began"))

    def started_again(self):
        """With the files that the first run has left."""
        again = examine(self.args, self.files, self.args.n, self.args.nodes, quiet=True)[0]
        loads = again and again[0].of("load")
        began = "it loaded a file" if loads else "torch.load() was not called: it began anew"
        self.said.append(f"started again: {began}")
        return comparing.epoch_repeated(self.run, again) if again else None

    def alone(self):
        alone = self.anew(1)[0]
        steps = [len(one[0].of("step")) if one else 0 for one in (self.run, alone)]
        self.said.append("compared with one process: {} steps here, {} there".format(*steps))
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
        said = failed[0] if failed and not runs[0].stopped else f"{steps} steps in each"
        self.said.append(f"{machines} machines of a process each: {said}")
        # On these machines each is local rank 0: who saves on two processes does so on all.
        all_save = {one.line for one in findings([self.run]) if one.place == "every-process-saves"}
        found = filter(None, [*map(comparing.joins_as_local_rank, runs), *findings(runs)])
        return [one for one in found if one.place != comparing.LOCAL or one.line not in all_save]
