"""Breaks the code at one place at a time, and runs the tests that must fail then.

$ python tests/mutations.py               all of tests/mutations.txt, one after the other
$ python tests/mutations.py damaged save  those whose title has one of these words

Each is done in a copy of the project. Exit code 1: a mistake was not noticed.
"""

import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Mutation(NamedTuple):
    title: str
    file: str
    right: str
    wrong: str
    tests: list  # arguments of pytest


def read():
    """What tests/mutations.txt holds.

    A paragraph each: the file and what is wrong, the right text after "-", the wrong one after "+",
    the tests that notice it.
    """
    found = []
    for paragraph in (ROOT / "tests/mutations.txt").read_text().strip().split("\n\n"):
        title, *lines, tests = paragraph.split("\n")
        right, wrong = (
            "\n".join(line[2:] for line in lines if line.startswith(mark)) for mark in ("-", "+")
        )
        found.append(Mutation(title, title.split(": ")[0], right, wrong, shlex.split(tests)))
    return found


def is_noticed(mutation, folder):
    """Whether a test fails; what is broken is whole again afterwards."""
    path = folder / mutation.file
    text = path.read_text()
    path.write_text(text.replace(mutation.right, mutation.wrong))
    command = [sys.executable, "-m", "pytest", "--all", "-x", "-q", "-p", "no:cacheprovider"]
    ended = subprocess.run([*command, *mutation.tests], cwd=folder, capture_output=True, text=True)
    path.write_text(text)
    if ended.returncode not in (0, 1):  # 5: no test has such a name
        sys.exit(f"{mutation}:\n{ended.stdout}{ended.stderr}")
    return ended.returncode == 1


def main(words):
    chosen = [m for m in read() if not words or any(word in m.title for word in words)]
    missed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "copy"
        ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", "checkpoints*")
        shutil.copytree(ROOT, folder, ignore=ignored)
        for mutation in chosen:
            noticed = is_noticed(mutation, folder)
            missed += not noticed
            print("noticed" if noticed else "MISSED ", mutation.title, flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} noticed")
    return missed > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
