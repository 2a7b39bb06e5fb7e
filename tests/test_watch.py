"""What ends a process, and what says that it waits, whatever order threads run in."""

import os
import signal
import time

import pytest
from conftest import ROOT, Job, forked, run

from common.errors import time_limit

WATCH = """
import ctypes, sys, threading, time, types
import torch.distributed as dist
import common.watch
from common.watch import Watch

where = types.SimpleNamespace(place=lambda: "epoch 5 step 6")
stop = types.SimpleNamespace(requested=threading.Event())
common.watch.NATIVE, common.watch.QUIET = 2, 3
"""
HANG = "ctypes.PyDLL(None).sleep(1000)  # it never gives the interpreter's lock back\n"


@pytest.mark.parametrize("stderr", ["", "sys.stderr = sys.__stderr__ = None"])
def test_what_lets_no_python_run_is_ended_though_the_watching_thread_never_ran(stderr):
    """Forced: it is not even started. As it is when the lock is taken before its first line."""
    code = f"{WATCH}threading.Thread.start = lambda thread: None; {stderr}\n"
    code += "watch = Watch(3, 4, where, seconds=1)\nwith watch:\n    " + HANG
    output = run([*forked("-c"), code], ROOT, timeout=100, code=-signal.SIGALRM)
    assert ('File "<string>", line 13 in <module>' in output) == (not stderr)


def test_what_lets_no_python_run_is_left_alone_outside_of_a_block():
    """Right after one too, and between the outer's end and the inner's."""
    code = WATCH + "watch = Watch(3, 4, where, seconds=1)\n"
    code += "with watch:\n    with watch: pass\nctypes.PyDLL(None).sleep(4)\nprint('the end')"
    assert run([*forked("-c"), code], ROOT, timeout=100) == "the end\n"
    code = WATCH + "threading.Thread.start = lambda thread: None\n"
    code += "watch = Watch(3, 4, where, seconds=1)\nwith watch:\n    with watch: pass\n    " + HANG
    run([*forked("-c"), code], ROOT, timeout=100, code=-signal.SIGALRM)


@pytest.mark.full
def test_one_that_is_to_stop_and_waits_says_so_and_goes_on():
    """Once for each wait, and of whom there is no sign; not while batches come."""
    code = WATCH + "store = dist.HashStore()\nstore.set('waits 0', '')\n"
    code += "watch = Watch(1, 4, where, store, 60, stop)\n"
    code += "def step(seconds):\n    with watch: time.sleep(seconds)\n"
    code += "step(5)\nstop.requested.set()\nprint('asked', flush=True)\n"
    code += "for _ in range(16): step(0.3)\nprint('slow', flush=True)\nstep(10)\nprint('the end')\n"
    output = run([*forked("-c"), code], ROOT, timeout=100)
    said = "rank 1 is to stop, and waits at epoch 5 step 6 for 3 s; no sign of rank 2, 3"
    assert output.splitlines() == ["asked", "slow", said, "the end"]


def test_an_error_of_the_network_is_said_before_nccl_aborts():
    """Its backend is a double: the rehearsal has torch's own."""
    code = WATCH + "error = types.SimpleNamespace(name='SUCCESS')\n"
    code += "backend = types.SimpleNamespace(get_error=lambda: error)\n"
    code += "dist.get_backend = lambda: 'nccl'\n"
    code += "dist.group.WORLD = types.SimpleNamespace(_get_backend=lambda device: backend)\n"
    code += "watch = Watch(3, 4, where, seconds=60)\n"
    code += "time.sleep(3)\nprint('good', flush=True)\nerror.name = 'REMOTE_ERROR'\n"
    code += "with watch:\n    time.sleep(60)\n"
    output = run([*forked("-c"), code], ROOT, timeout=100, code=1)
    assert output.startswith("good\n") and 'File "<string>", line 19, in <module>' in output
    end = "rank 3 failed at epoch 5 step 6: NCCL reports REMOTE_ERROR; it waits as above\n"
    assert output.endswith(end)


def test_a_signal_ends_the_set_up_at_once():
    """Nothing is trained yet. Later the first is a wish, and the second, two seconds on, an end."""
    code = "import time\nfrom common.errors import user_errors\nfrom common.process import Stop\n"
    code += "stop = Stop(launched=False)\n"
    block = "with user_errors(0, stop):\n    print('in', flush=True)\n    time.sleep(WAIT)\n"
    after = "print('after', flush=True)\nstop.requested.wait(30)\ntime.sleep(4)\nprint('the end')"
    for wait, line, code_expected in ((60, "in", 128 + signal.SIGTERM), (0, "after", 0)):
        job = Job([*forked("-c"), code + block.replace("WAIT", str(wait)) + after], ROOT)
        job.wait_for(f"^{line}$")
        job.process.send_signal(signal.SIGTERM)
        returned, output = job.wait(40)
        assert returned == code_expected and ("the end" in output) == (line == "after")


def test_a_block_that_takes_too_long_is_ended_in_one_line(monkeypatch, capfd):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with time_limit(0.2, "the reason"):
        deadline = time.monotonic() + 20
        while not ended and time.monotonic() < deadline:
            time.sleep(0.1)
    lines = capfd.readouterr().err.splitlines()
    assert ended == [2] and lines[-1] == "error: the reason"
    assert any("in test_a_block_that_takes_too_long" in line for line in lines)
    with time_limit(0.2, "the reason"):
        pass
    time.sleep(0.5)
    assert ended == [2] and capfd.readouterr().err == ""


def test_an_error_of_cuda_is_said_without_the_advice_below_it():
    code = WATCH + "watch = Watch(3, 4, where)\n"
    code += "raise RuntimeError('CUDA error: unspecified launch failure\\nCompile with `DSA`.')"
    output = run([*forked("-c"), code], ROOT, timeout=100, code=1)
    assert output.count("Compile with") == 1 and output.endswith(
        "rank 3 failed at epoch 5 step 6: CUDA error: unspecified launch failure\n"
    )


# Another process of ours dies just when the first error is about to be said.
DEATH = """
import os, signal, traceback

def raise_again(*_): raise RuntimeError("second")
def die_first(*error):
    if os.fork() == 0: os._exit(0)
    time.sleep(0.5)
    return shown(*error)

shown, traceback.format_exception = traceback.format_exception, die_first
signal.signal(signal.SIGCHLD, raise_again)  # as torch does, for its workers
"""


def test_an_error_is_said_though_another_comes_while_it_is_said():
    code = WATCH + DEATH + "watch = Watch(3, 4, where)\nraise ValueError('first')\n"
    output = run([*forked("-c"), code], ROOT, timeout=100, code=1)
    assert output.endswith("rank 3 failed at epoch 5 step 6: first\n") and "second" not in output


def test_an_error_ends_a_process_of_mp_spawn_at_once_whatever_happens():
    """An orderly exit would wait for loader workers, which ignore SIGTERM."""
    code = "import atexit, sys; from common.spawn import child\n"
    code += "atexit.register(print, 'orderly')\nsys.excepthook = lambda *_: 1 / 0\n"
    code += "def main(index): raise ValueError\nchild(0, main)"
    assert "orderly" not in run([*forked("-c"), code], ROOT, timeout=100, code=1)
