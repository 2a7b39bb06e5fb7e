"""Breaks the code at one place at a time, and runs the tests that must fail then.

$ python tests/mutations.py               all of tests/mutations.txt, one after the other
$ python tests/mutations.py damaged save  those whose title has one of these words

Each is done in a copy of the project, one on each core. Before that the tests run in a copy where
nothing is broken: they must pass there. Exit code 1: a mistake was not noticed.
"""

import os
import queue
import shlex
import shutil
import subprocess
import sys
import tempfile
from multiprocessing.pool import ThreadPool
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


def all_tests(mutations):
    """The tests of all of them, as arguments of pytest for each file."""
    names = {}
    for file, _, name in (mutation.tests for mutation in mutations):
        names.setdefault(file, []).append(f"({name})")
    return [[file, "-k", " or ".join(dict.fromkeys(found))] for file, found in names.items()]


def main(words):
    chosen = [m for m in read() if not words or any(word in m.title for word in words)]
    cores, free, missed = len(os.sched_getaffinity(0)), queue.SimpleQueue(), 0
    with tempfile.TemporaryDirectory() as name, ThreadPool(cores) as pool:
        for number in range(cores):
            ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", "checkpoints*")
            shutil.copytree(ROOT, Path(name) / str(number), ignore=ignored)
            free.put(Path(name) / str(number))

        def in_a_copy(function, argument):
            folder = free.get()
            try:
                return argument, function(argument, folder)
            finally:
                free.put(folder)

        def each(function, arguments):
            return pool.imap_unordered(lambda argument: in_a_copy(function, argument), arguments)

        for arguments, ended in each(run_tests, all_tests(chosen)):
            if ended.returncode:
                sys.exit(f"fails where nothing is broken: {arguments}\n{ended.stdout}")
            print(arguments[0], ended.stdout.splitlines()[-1], flush=True)
        for mutation, noticed in each(is_noticed, chosen):
            missed += not noticed
            print("noticed" if noticed else "MISSED ", mutation.title, flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} noticed")
    return missed > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
