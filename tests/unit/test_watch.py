"""What fails or hangs is ended, with a line that says which rank it was, and where."""

import os
import re
import subprocess

import pytest
from conftest import PYTHON, ROOT

import longrun.watch  # noqa: F401 - before the forks
from tests.unit.child import Child

WATCH = """
import ctypes, faulthandler, os, signal, sys, time, traceback, types
import torch.distributed as dist
import longrun.watch
from longrun.watch import Watch

where = types.SimpleNamespace(place=lambda: "epoch 5 step 6")
"""
FAILED = "rank 3 failed at epoch 5 step 6: "
# Another process of ours dies just when the first error is about to be said.
DEATH = """
def raise_again(*_): raise RuntimeError("second")
def die_first(*error):
    if os.fork() == 0: os._exit(0)
    time.sleep(0.5)
    return shown(*error)

shown, traceback.format_exception = traceback.format_exception, die_first
signal.signal(signal.SIGCHLD, raise_again)  # as torch does, for its workers
store = dist.HashStore()
store.set("failed 0", "")
dist.get_world_size = lambda: 4
dist.distributed_c10d._get_default_store = lambda: store
watch = Watch(3, where, 60)
"""
ERRORS = {
    "RuntimeError('CUDA error: launch failed\\nCompile with `DSA`.')": "CUDA error: launch failed",
    "OSError('Caught OSError in worker 0.\\nTraceback\\nOSError: no a.jpg')": "OSError: no a.jpg",
    "RuntimeError('Gloo: timed out')": "Gloo: timed out; rank 1, 2 did not respond",
    "KeyError": "KeyError",
}
CODES = {error: f"{DEATH}raise {error}" for error in ERRORS} | {
    "hang": """
watch = Watch(3, where, 1)
with watch: time.sleep(0.5)
time.sleep(2.5)
print("outside")
with watch: time.sleep(100)
""",
    "native": """
longrun.watch.NATIVE, hang = 1, ctypes.PyDLL(None).sleep  # it keeps the interpreter's lock
watch = Watch(3, where, 1)
with watch: pass
hang(4)
print("outside")
with watch: hang(100)
""",
    "fork": """
watch = Watch(3, where, 60)
with watch:
    if os.fork() == 0:
        faulthandler.cancel_dump_traceback_later()  # as the interpreter does when it exits
        with watch: os._exit(0)
    os.wait()
""",
    "loss of rank 0": "Watch(0, where, 60)\nraise FloatingPointError('the loss is nan')",
    "loss of rank 1": "Watch(1, where, 60)\nraise FloatingPointError('the loss is nan')",
}


@pytest.fixture(scope="module")
def children():
    """All at once: what they do most is to sleep."""
    children = {name: Child(WATCH + code) for name, code in CODES.items()}
    yield children
    for child in children.values():
        child.kill()


def test_an_error_ends_a_process_at_once(tmp_path):
    """Though init_process_group has wrapped the hook; nothing of an orderly exit is done."""
    code = f"{WATCH}import atexit, pathlib\natexit.register(pathlib.Path('orderly').touch)\n"
    code += "store = dist.FileStore('store', 1)\nwatch = Watch(0, where, 60)\n"
    code += "dist.init_process_group('gloo', store=store, rank=0, world_size=1)\n"
    command, env = [PYTHON, "-c", f"{code}raise ValueError('the cause')"], {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=tmp_path, env=os.environ | env, stderr=-1, text=True)
    assert ended.returncode == 1 and not (tmp_path / "orderly").exists()
    assert ended.stderr.endswith("rank 0 failed at epoch 5 step 6: the cause\n")


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_is_said_in_the_last_line(error, children):
    """Though another comes while it is said. Through the store the ranks tell that they fail."""
    code, output = children[error].wait()
    assert code == 1 and "Traceback" in output and "second" not in output
    assert output.endswith(f"{FAILED}{ERRORS[error]}\n")


def test_a_loss_that_is_not_finite_is_one_line_of_rank_0(children):
    said = "error: the loss is nan (epoch 5 step 6): a lower --lr may help\n"
    assert children["loss of rank 0"].wait() == (2, said)
    assert children["loss of rank 1"].wait() == (2, "")


def test_a_block_may_fork(children):
    """A fork does not have the thread in C, and must not wait for it."""
    assert children["fork"].wait() == (0, "")


def test_a_hang_is_ended_and_only_in_a_block(children):
    code, output = children["hang"].wait()
    assert code == 1 and output.startswith("outside\n")
    assert re.search(r'File "<string>", line \d+, in <module>', output)
    end = r"no progress for (1|0\.9) s; see the stack above"
    assert re.fullmatch(FAILED + end, output.splitlines()[-1]), output


def test_a_hang_that_lets_no_python_run_is_ended_and_only_in_a_block(children):
    code, output = children["native"].wait()
    assert code == 1 and output.startswith("outside\nTimeout (0:00:0")
    assert re.search(r'File "<string>", line \d+ in <module>', output)
