"""The command line of the doctor. --attach, --dumps and --restore do their work here, and exit."""

import argparse
import ast
import importlib.util
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

from . import notebook
from .files import restore_dead
from .words import on_screen, say

FORMS = ("github", "sarif", "json")
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
    form = "github (lines that it shows in the code), sarif or json: on the output, or in a file"
    add("--format", action="append", default=[], metavar="FORM[=FILE]", help=form)
    by = "start it by another launcher, such as 'srun -n2 python'; alone: the whole command"
    add("--by", metavar="COMMAND", help=by)
    add("-m", dest="module", action="store_true", help="the script is a module: -m package.train")
    add("script", nargs="?", help="your script, or a notebook")
    add("flags", nargs=argparse.REMAINDER, help="the script's own flags, after the doctor's")
    args = parser.parse_args()
    check(parser, args)
    return args


def check(parser, args):
    """Exit with one line, before anything is started, if it cannot be."""
    if args.n < 1 or args.nodes < 1 or args.n % args.nodes:
        parser.error(f"-n {args.n} --nodes {args.nodes}: each machine needs as many processes")
    first, *_ = shlex.split(args.by or "") or [""]
    if args.by and not shutil.which(first):
        parser.error(f"--by: there is no command {first}")
    check_script(parser, args)
    text = text_of(args)
    for action in parser._actions if takes_no_others(text) else ():
        for flag in action.option_strings:
            name = flag.lstrip("-").replace("-", "[-_]")
            if flag.startswith("--") and flag in args.flags and not re.search(name, text):
                parser.error(f"put {flag} before {args.script}: it is a flag of the doctor")
    args.forms = [(name, file) for name, _, file in (one.partition("=") for one in args.format)]
    args.forms += [("json", args.json)] if args.json else []
    for name, file in args.forms:
        if name not in FORMS:
            parser.error(f"--format {name}: it is one of {', '.join(FORMS)}")
        if file and not os.access(os.path.dirname(os.path.abspath(file)), os.W_OK):
            text = "there is no such folder, or it may not be written to"
            parser.error(f"--{'json' if file == args.json else 'format'} {file}: {text}")
    if not args.by and not importlib.util.find_spec("torch"):  # --by may start another Python
        parser.exit(2, f"doctor: {sys.executable} has no torch: use the Python of your script\n")


def check_script(parser, args):
    if not args.script and not args.by:
        parser.error("name your script")
    if args.script and not args.module and not os.path.isfile(args.script):
        more = f": --attach {args.script}, if it is a process" if args.script.isdigit() else ""
        parser.error(f"{args.script} is no file{more}")
    if args.script and notebook.is_one(args.script):
        try:
            notebook.cells(args.script)
        except ValueError as error:
            parser.error(str(error))


def text_of(args):
    """What the script says; "" where --by alone knows it."""
    path = Path(args.script or "")
    if args.module:
        places = [Path(args.script.replace(".", "/") + end) for end in (".py", "/__main__.py")]
        path = next(filter(Path.is_file, places), path)
    return path.read_text(errors="replace") if path.is_file() else ""


def takes_no_others(text):
    """Whether a script surely takes no flag that it does not name.

    What it imports may have a parser, and what it reads or starts may look at sys.argv.
    """
    if not text or re.search(r"\b(argv|exec|importlib|runpy|__import__)\b", text):
        return False
    try:
        nodes = [*ast.walk(ast.parse(text))]
    except SyntaxError:
        return False
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [
        f".{node.level}" if node.level else node.module
        for node in nodes
        if isinstance(node, ast.ImportFrom)
    ]
    known = {*sys.stdlib_module_names, "numpy", "torch", "torchvision"}
    return {name.partition(".")[0] for name in names} <= known


class Restore(argparse.Action):
    """--restore alone, as --help."""

    def __call__(self, parser, *_):
        for line in restore_dead() or [say("there is nothing to put back")]:
            print(f" {on_screen(line)}")
        parser.exit(0)


class Attach(argparse.Action):
    """--attach and all behind it: the script was started by somebody else."""

    def __call__(self, parser, namespace, words, option=None):
        from . import attach

        if namespace.json or namespace.format:
            parser.error("--attach has no --json and no --format: its file is --out FILE")
        attach.main(words)


class Dumps(argparse.Action):
    """--dumps DIR alone."""

    def __call__(self, parser, namespace, folder, option=None):
        from .recorder import compare

        parser.exit(compare.main(folder))
