"""How a process is asked to stop, and is waited for below mp.spawn."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from conftest import ROOT

import longrun.spawn  # noqa: F401 - before the forks
from tests.unit.child import Child

IMPORTS = """
import atexit, os, signal, sys, time
import torch.multiprocessing as mp
from longrun.signals import StopRequest
from longrun.spawn import run_child, supervise

atexit.register(print, "orderly")
"""


SIGNALS = """
def send(number):
    os.kill(os.getpid(), number)
    return stop.requested.is_set()

def another_comes_inside():
    send(signal.SIGTERM)
    really_set()

now = 100.0
time.monotonic = lambda: now
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
stop = StopRequest()
really_set, stop.requested.set = stop.requested.set, another_comes_inside
print(send(signal.SIGHUP), send(signal.SIGINT))
now += 1.9
print(send(signal.SIGTERM))
if os.fork() == 0:
    send(signal.SIGTERM)
    os._exit(0)
print(os.wait()[1] == signal.SIGTERM)
now += 0.2
send(signal.SIGUSR1)
"""


def test_the_first_signals_are_a_request_and_a_later_one_an_end():
    """A launcher passes on what the terminal has sent already. A fork is asked for nothing."""
    ended = 128 + signal.SIGUSR1, "False True\nTrue\nTrue\n"
    assert Child(IMPORTS + SIGNALS).wait() == ended


def test_signals_at_the_end_of_a_run_do_nothing():
    code = "stop = StopRequest()\nstop.ignore()\nos.kill(os.getpid(), signal.SIGTERM)\nprint('on')"
    code, output = Child(IMPORTS + code).wait()
    assert code == 0 and output.startswith("on\n")  # since Python 3.13 a fork's exit is orderly


SPAWN = """
sys.excepthook = lambda *_: 1 / 0  # whatever happens in it
join = mp.ProcessContext.join
mp.ProcessContext.join = lambda self, grace_period: join(self, grace_period=grace_period / 20)
children = mp.start_processes(run_child, (main,), 3, join=False, start_method="fork")
print("started")
os._exit(supervise(children, rank=4))
"""
MAINS = {  # what they do, and what follows: the exit code, and the last line of output
    "index * 0": (0, "started"),
    "75": (75, "started"),
    "1 // (index - 1) and 0": (1, "started"),
    "os.kill(os.getpid(), 9 * (index == 1)) or time.sleep(60 * (index == 2))": (
        1,
        "rank 5 failed: killed by SIGKILL",
    ),
}


@pytest.mark.parametrize("main", MAINS)
def test_the_first_to_fail_ends_all_of_mp_spawn(main):
    """At once: an orderly exit would wait for loader workers, which ignore SIGTERM."""
    code, output = Child(f"{IMPORTS}def main(index): return {main}\n{SPAWN}").wait()
    assert (code, output.splitlines()[-1]) == MAINS[main] and "orderly" not in output


def test_a_signal_after_the_end_of_all_does_not_hide_the_exit_code():
    """Ignored, not handled: while Python ends it has given up its handlers already.

    `srun -K` sends SIGTERM then, as soon as another task has ended.
    """
    ignored = "all(signal.getsignal(number) == signal.SIG_IGN for number in SIGNALS)"
    last = f"code = supervise(children)\nprint({ignored})\nos._exit(code)\n"
    code = SPAWN.replace("os._exit(supervise(children, rank=4))", last)
    main = "from common.loader import SIGNALS\ndef main(index): return 75\n"
    assert Child(IMPORTS + main + code).wait() == (75, "started\nTrue\n")


def test_a_killed_process_is_named_though_the_others_have_failed_too():
    """A killed process makes the others fail; a busy machine shows its parent all ends at once."""
    all_ended = SPAWN.replace('print("started")', "for one in children.processes: one.join()")
    main = "def main(index): return os.kill(os.getpid(), 9) if index == 2 else 3\n"
    assert Child(IMPORTS + main + all_ended).wait() == (1, "rank 6 failed: killed by SIGKILL\n")


def test_one_that_is_killed_in_the_midst_of_supervise_is_named():
    """Just when the end of another, a good one, has been seen."""
    main = "def main(index): time.sleep(60 * (index > 0))\n"
    late = """
import longrun.spawn
waits = []
real_wait, real_join = longrun.spawn.wait, mp.ProcessContext.join

def kill():
    if children.processes[1].is_alive():
        os.kill(children.processes[1].pid, 9)
        children.processes[1].join()

def late_wait(sentinels):
    waits.append(kill() if waits else None)
    return real_wait(sentinels)

def late_join(context, **flags):
    kill()
    return real_join(context, **flags)

longrun.spawn.wait, mp.ProcessContext.join = late_wait, late_join
os._exit"""
    code = SPAWN.replace("os._exit", late)
    assert Child(IMPORTS + main + code).wait() == (1, "started\nrank 5 failed: killed by SIGKILL\n")


def test_the_parent_of_mp_spawn_passes_signals_on():
    code = "def main(index):\n    stop = StopRequest()\n    print('ready')\n"
    # Not wait(): the signal's handler could never set what this very thread is about to wait for.
    code += "    while not stop.requested.is_set(): time.sleep(0.01)\n    return 75\n"
    child = Child(f"{IMPORTS}{code}{SPAWN}")
    assert sorted(child.output.readline() for _ in range(4)) == ["ready\n"] * 3 + ["started\n"]
    status = Path(f"/proc/{child.process.pid}/status")
    while not int(re.search("SigCgt:(.*)", status.read_text())[1], 16) & 1 << signal.SIGTERM - 1:
        time.sleep(0.01)
    os.kill(child.process.pid, signal.SIGTERM)
    assert child.wait() == (75, "")


ENDS = {
    "sys.exit": "sys.exit(ends(0))",
    "mp.spawn": """
context = mp.spawn(run_child, (ends,), nprocs=1, join=False)
context.processes[0].join()
os._exit(context.processes[0].exitcode)
""",
}


@pytest.mark.parametrize("how", ENDS)
def test_a_full_disk_leaves_the_exit_code(how, tmp_path):
    """It tells a scheduler whether to start the run again. Python's own at its last flush: 120."""
    script = tmp_path / "script.py"
    begin = """
import os, sys
import torch.multiprocessing as mp
from longrun.messages import print_if_possible
from longrun.spawn import run_child

def ends(index):
    print_if_possible("lost")
    return 75

if __name__ == "__main__":
"""
    script.write_text(begin + textwrap.indent(ENDS[how], "    "))
    env = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        command = [sys.executable, script]
        ended = subprocess.run(
            command, env=env | {"PYTHONPATH": str(ROOT)}, stdout=full, stderr=-1, timeout=100
        )
    assert (ended.returncode, ended.stderr) == (75, b"")
