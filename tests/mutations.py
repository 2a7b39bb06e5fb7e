"""Breaks the code at one place at a time, and runs the tests that must fail then.

$ python tests/mutations.py               all of tests/mutations.txt, one after the other
$ python tests/mutations.py damaged save  those whose title has one of these words

In a copy of the project, where the tests must pass before. Exit code 1: a mistake was not noticed.
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
        right, wrong = ("\n".join(x[2:] for x in lines if x[0] == mark) for mark in "-+")
        found.append(Mutation(title, title.split(": ")[0], right, wrong, shlex.split(tests)))
    return found


def run_tests(arguments, folder):
    command = [sys.executable, "-m", "pytest", "--all", "-x", "-q", "-p", "no:cacheprovider"]
    return subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True)


def is_noticed(mutation, folder):
    """Whether a test fails, not merely its file; what is broken is whole again afterwards."""
    path = folder / mutation.file
    text = path.read_text()
    path.write_text(text.replace(mutation.right, mutation.wrong))
    ended = run_tests(mutation.tests, folder)
    path.write_text(text)
    return ended.returncode == 1  # 2: not even imported; 5: no test has such a name


def main(words):
    chosen, missed = [m for m in read() if not words or any(word in m.title for word in words)], 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "copy"
        ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", "checkpoints*")
        shutil.copytree(ROOT, folder, ignore=ignored)
        for mutation in chosen:
            ended = run_tests(mutation.tests, folder)
            assert not ended.returncode, f"fails where nothing is broken:\n{ended.stdout}"
            noticed = is_noticed(mutation, folder)
            missed += not noticed
            print("noticed" if noticed else "MISSED ", mutation.title, flush=True)
    return missed > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
