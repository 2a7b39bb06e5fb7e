"""What fails or hangs is ended, with a line that says which rank it was, and where."""

import re

import pytest

import common.prefetcher  # noqa: F401 - before the forks
import longrun.watch  # noqa: F401
from tests.unit.child import Child

WATCH = """
import ctypes, faulthandler, os, signal, sys, time, traceback, types
import torch
import torch.distributed as dist
import longrun.watch
from common.prefetcher import Prefetcher
from longrun.watch import Watch

IN_WORKER = '''Caught OSError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "data.py", line 5, in read
OSError: no a.jpg
it may help to copy it again
'''
where = "epoch 5 step 6"
"""
FAILED = "rank 3 failed at epoch 5 step 6: "
# Another process of ours dies just when the first error is about to be said.
DEATH = """
def raise_again(*_): raise RuntimeError("second")
def die_first(*error):
    if os.fork() == 0: os._exit(0)
    time.sleep(0.2)
    return shown(*error)

shown, traceback.format_exception = traceback.format_exception, die_first
signal.signal(signal.SIGCHLD, raise_again)  # as torch does, for its workers
Watch(3, where, 60)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # it wraps the hook
try:
    raise {}
except Exception:
    sys.excepthook(*sys.exc_info())
print("orderly")
"""
ERRORS = {
    "RuntimeError('CUDA error: launch failed\\nCompile with `DSA`.')": "CUDA error: launch failed",
    "RuntimeError('Expected to have finished.\\n In addition')": "Expected to have finished.",
    "OSError(IN_WORKER)": "OSError: no a.jpg",
    "ValueError('cannot read \\x1b[2K.jpg')": r"cannot read \x1b[2K.jpg",
    "KeyError": "KeyError",
    "KeyError('label')": "KeyError: 'label'",
}
# The clock goes on when the test says so, and the watch looks at it all the time.
HANG = """
def go_on(seconds):
    global now, looks
    now, looks = now + seconds, 0
    while looks < 3: time.sleep(0.001)

def look(_):
    global looks
    really_sleep(0.001)
    looks += 1

class Loader:  # a worker is stopped before it sends its first batch
    def __iter__(self):
        go_on(limit - 1)
        print("inside")
        go_on(2)
        time.sleep(60)

now, looks, limit, really_sleep = 0, 0, {limit}, time.sleep
torch.cuda.is_available = lambda: {gpus}
longrun.watch.time = types.SimpleNamespace(monotonic=lambda: now, sleep=look)
watch = Watch(3, where, 60)
for _ in range(3):
    watch.beat()
    go_on(limit - 1)
watch.rest()
go_on(1000)
print("outside")
watch.beat()
list(Prefetcher(Loader(), torch.device("cpu")))
"""
CODES = {error: DEATH.format(error) for error in ERRORS} | {
    "hang": HANG.format(limit=60, gpus=False),
    "hang on GPUs": HANG.format(limit=120, gpus=True),  # NCCL's own limit comes first
    "native": """
longrun.watch.NATIVE, hang = 0.1, ctypes.PyDLL(None).sleep  # it keeps the interpreter's lock
watch = Watch(3, where, 0.3)
watch.beat()
watch.rest()
hang(1)
print("outside")
watch.beat()
if os.fork() == 0:
    faulthandler.cancel_dump_traceback_later()  # as the interpreter does when it exits
    os._exit(0)
os.wait()
print("forked")
watch.beat()
hang(100)
""",
    "loss of rank 0": "Watch(0, where, 60)\nraise FloatingPointError('the loss is nan')",
    "loss of rank 1": """
really_sleep = time.sleep
time.sleep = lambda seconds: print(seconds) if seconds > 1 else really_sleep(seconds)
Watch(1, where, 60)
raise FloatingPointError('the loss is nan')
""",
}


@pytest.fixture(scope="module")
def children():
    """All at once: what they do most is to sleep."""
    children = {name: Child(WATCH + code) for name, code in CODES.items()}
    yield children
    for child in children.values():
        child.kill()


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_is_said_in_the_last_line(error, children):
    """At once, though another comes while it is said."""
    code, output = children[error].wait()
    assert code == 1 and "Traceback" in output and "second" not in output
    assert output.endswith(f"{FAILED}{ERRORS[error]}\n") and "\x1b" not in output


def test_a_loss_that_is_not_finite_is_one_line(children):
    """Of rank 0, if all have it: the others wait until the launcher has ended them."""
    said = "error: the loss is nan (epoch 5 step 6): a lower --lr may help\n"
    assert children["loss of rank 0"].wait() == (2, said)
    assert children["loss of rank 1"].wait() == (2, f"10\n{said}")


@pytest.mark.parametrize("name, limit", [("hang", 60), ("hang on GPUs", 120)])
def test_a_hang_is_ended_but_not_a_rest(name, limit, children):
    """Of the loop's first batch too."""
    code, output = children[name].wait()
    assert code == 1 and output.startswith("outside\ninside\n")
    assert re.search(r'File "<string>", line \d+, in __iter__', output)
    assert output.endswith(f"{FAILED}no progress for {limit} s; see the stack above\n"), output


def test_a_hang_that_lets_no_python_run_is_ended_but_not_a_rest(children):
    """After a fork too, which does not have the thread in C, and must not wait for it."""
    code, output = children["native"].wait()
    assert code == 1 and output.startswith("outside\nforked\nTimeout (0:00:00"), output
    assert re.search(r'File "<string>", line \d+ in <module>', output)
