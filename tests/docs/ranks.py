"""Runs a copy of a script as one process or several, without a launcher.

multiprocessing's forkserver has imported torch once and forks each of them: that saves 4 s of CPU
for each. The launchers themselves are started in test_docs.py, test_minimal.py and tests/run.
"""

import gc
import multiprocessing
import os
import runpy
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT

from tests.ports import free_port

forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(["tests.preloaded"])  # found from the project's root


def run_ranks(script, flags=(), ranks=1, cwd=None, env=None, before="", seconds=1000):
    """(exit codes, output) of processes as torchrun would start them; `before` is run first."""
    cwd = Path(cwd or Path(script).parent)
    output = cwd / "output.txt"
    output.write_text("")
    known = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "OMP_NUM_THREADS": 1}
    known |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "CUDA_VISIBLE_DEVICES": ""}
    arguments = [str(word) for word in (script, *flags)]
    processes, deadline = [], time.monotonic() + seconds
    for rank in range(ranks):
        own = known | {"RANK": rank, "LOCAL_RANK": rank} | (env or {})
        own = {name: str(value) for name, value in own.items()}
        given = arguments, own, str(cwd), str(output), before
        processes.append(forks.Process(target=be_a_rank, args=given))
        processes[-1].start()
    try:
        for process in processes:
            process.join(max(0, deadline - time.monotonic()))
        codes = [process.exitcode for process in processes]
        assert None not in codes, f"{script} took more than {seconds} s:\n{output.read_text()}"
        return codes, output.read_text()
    finally:
        for process in processes:
            process.kill()


def be_a_rank(arguments, env, cwd, output, before):
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    # A line at once, also under PYTHONUNBUFFERED: those of two processes must not be mixed.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)
    # What the forkserver has imported need not be walked through: that was half of a short run.
    gc.freeze()
    os.environ |= env
    os.chdir(cwd)
    sys.argv = arguments
    sys.path[:0] = [os.path.dirname(arguments[0]), str(ROOT)]
    torch.set_num_threads(1)  # as under torchrun
    # The workers of its loaders start as they do without a forkserver. It would be their parent:
    # they would outlive a rank that is killed, for they end when their parent does.
    multiprocessing.set_start_method(None, force=True)
    try:
        exec(before, {})
        runpy.run_path(arguments[0], run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())  # the full scripts have one of their own
        sys.exit(1)


def good(script, *flags, **more):
    """The output of processes that all end well."""
    codes, output = run_ranks(script, flags, **more)
    if any(codes):
        pytest.fail(f"{script} {flags} ended with {codes}:\n{output}")
    return output
