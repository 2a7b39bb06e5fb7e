"""The command: which runs are made, and what each of them adds."""

import argparse
import importlib.util
import os
import re
import sys
import tempfile
import time
from pathlib import Path

from . import report
from .judges import comparing, findings
from .launch import examine, launcher

DOCS = Path(__file__).resolve().parent.parent / "docs"


def parse_args():
    about = "Run a training script on two processes, and name the mistakes that it makes."
    more = "Give the script little data and two epochs, and a folder without its checkpoints."
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
    add("--keep", action="store_true", help="leave the files that the script writes")
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


def main():
    args = parse_args()
    args.starts_its_own = False
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(check_up(args, folder))


def check_up(args, folder):
    """All runs, and the report of them; returns the exit code."""
    began = time.monotonic()
    runs = examine(args, f"{folder}/first", args.n, args.nodes)
    if runs[0].noted("spawns"):
        args.starts_its_own = True
        runs = examine(args, f"{folder}/own", args.n, args.nodes)
    seconds = time.monotonic() - began
    more = OtherRuns(args, folder, runs, seconds)
    found = findings(runs, more.findings())
    return report.tell(runs, found, seconds, more.said, args.json)


class OtherRuns:
    """What only another run can show. Each is made if the first was short enough."""

    def __init__(self, args, folder, runs, seconds):
        self.args, self.folder, self.run, self.seconds = args, folder, runs[0], seconds
        self.until = time.monotonic() + (0 if args.quick else args.budget)
        self.said = []  # a line about each

    def findings(self):
        args, run, found = self.args, self.run, []
        if args.nodes > 1:
            self.said.append(f"played {args.nodes} machines: the local ranks began at 0 on each")
        if not run or not run.noted("group"):
            return []
        well = all(process.end["error"] == "" for process in run)
        if args.twice or (well and self.may_resume() and self.time_for("starting it again")):
            found.append(self.started_again())
        by_torchrun = launcher(args, args.n).is_torchrun
        if args.against_one or (by_torchrun and run.noted("step") and self.time_for("one process")):
            found += self.alone()
        alone = args.n == 2 and args.nodes == 1 and not self.gpus()
        if by_torchrun and well and alone and self.time_for("three machines", 1.5):
            found += self.three_machines()
        return [one for one in found if one]

    def time_for(self, what, times=1.0):
        if self.args.quick:
            return False
        if time.monotonic() + times * self.seconds < self.until:
            return True
        self.said.append(f"not tried, for the run took {self.seconds:.0f} s: {what} (--budget)")
        return False

    def may_resume(self):
        text = "" if self.args.module else Path(self.args.script).read_text(errors="replace")
        return self.run.noted("save") and re.search(r"\bload|resume", text)

    def gpus(self):
        return any(event["gpus"] for process in self.run for event in process.of("began"))

    def started_again(self):
        again = examine(self.args, f"{self.folder}/again", self.args.n, self.args.nodes)[0]
        loads = again and again[0].of("load")
        began = "it loaded a file" if loads else "torch.load() was not called: it began anew"
        self.said.append(f"started again: {began}")
        return comparing.epoch_repeated(self.run, again) if again else None

    def alone(self):
        alone = examine(self.args, f"{self.folder}/alone", 1)[0]
        steps = [len(one[0].of("step")) if one else 0 for one in (self.run, alone)]
        self.said.append("compared with one process: {} steps here, {} there".format(*steps))
        if not alone:
            return []
        batch = comparing.batch_per_process(self.run, alone)
        if batch:  # it explains other numbers
            return [batch]
        gradients = comparing.other_gradients(self.run, alone)
        return [gradients, *comparing.other_numbers(self.run, alone)]

    def three_machines(self):
        """Parts that are not alike, and a local rank that is taken for a rank."""
        runs = examine(self.args, f"{self.folder}/three", 3, nodes=3)
        failed = report.failed(runs)
        said = "three machines of a process each: "
        if failed and not runs[0].stopped:
            self.said.append(said + failed[0])
            return [one for one in findings(runs) if one.certain]
        self.said.append(f"{said}{len(runs[0][0].of('step')) if runs[0] else 0} steps in each")
        return findings(runs)
