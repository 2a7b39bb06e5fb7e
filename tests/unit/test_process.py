"""How a process is asked to stop, and is waited for below mp.spawn."""

import os
import signal
import time

import pytest

import longrun.spawn  # noqa: F401 - before the forks
from tests.unit.child import Child

IMPORTS = """
import atexit, os, signal, sys, time
import torch.multiprocessing as mp
from longrun.arguments import user_errors
from longrun.process import StopRequest, end_with_parent
from longrun.spawn import run_child, supervise

atexit.register(print, "orderly")
"""


def test_a_signal_ends_the_set_up_at_once():
    """Nothing is trained yet."""
    code = "stop = StopRequest(die_with_parent=False)\nwith user_errors(0, stop):\n"
    child = Child(f"{IMPORTS}{code}    print('in')\n    time.sleep(60)\n")
    assert child.output.readline() == "in\n"
    os.kill(child.process.pid, signal.SIGTERM)
    assert child.wait() == (128 + signal.SIGTERM, "")


def test_the_first_signals_are_a_request_and_a_later_one_an_end():
    """A launcher passes on what the terminal has sent already. What nohup ignores is no signal."""
    code = "signal.signal(signal.SIGHUP, signal.SIG_IGN)\nstop = StopRequest(False)\n"
    code += "print('in')\nstop.requested.wait(60)\nprint('asked')\ntime.sleep(60)\n"
    child = Child(IMPORTS + code)
    pid = child.process.pid
    assert child.output.readline() == "in\n"
    os.kill(pid, signal.SIGHUP)
    time.sleep(0.5)
    os.kill(pid, signal.SIGINT)
    assert child.output.readline() == "asked\n"
    os.kill(pid, signal.SIGTERM)
    time.sleep(2.2)
    assert child.process.is_alive()
    os.kill(pid, signal.SIGUSR1)
    assert child.wait() == (128 + signal.SIGUSR1, "")


def test_no_file_takes_the_number_of_a_closed_output(tmp_path):
    """What native code prints would go into it."""
    code = "os.close(1)\nos.close(2)\nsys.stdout = sys.stderr = None\nStopRequest(False)\n"
    code += f"with open('{tmp_path}/made', 'w') as file: file.write(str(file.fileno()))"
    assert Child(IMPORTS + code).wait() == (0, "")
    assert int((tmp_path / "made").read_text()) > 2


@pytest.mark.parametrize("call", ["ignore", "restore_defaults"])
def test_signals_at_the_end_of_a_run_and_in_an_evaluation(call):
    code = f"StopRequest(False).{call}()\nos.kill(os.getpid(), signal.SIGTERM)\nprint('on')"
    expected = (0, "on\n") if call == "ignore" else (-signal.SIGTERM, "")
    assert Child(IMPORTS + code).wait() == expected


SPAWN = """
sys.excepthook = lambda *_: 1 / 0  # whatever happens in it
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
        "rank 5 failed: process 1 terminated with signal SIGKILL",
    ),
}


@pytest.mark.parametrize("main", MAINS)
def test_the_first_to_fail_ends_all_of_mp_spawn(main):
    """At once: an orderly exit would wait for loader workers, which ignore SIGTERM."""
    code, output = Child(f"{IMPORTS}def main(index): return {main}\n{SPAWN}").wait()
    assert (code, output.splitlines()[-1]) == MAINS[main] and "orderly" not in output


def test_the_parent_of_mp_spawn_passes_signals_on():
    code = "def main(index):\n    stop = StopRequest(True)\n    print('ready')\n"
    code += "    return 75 if stop.requested.wait(60) else 0\n"
    child = Child(f"{IMPORTS}{code}{SPAWN}")
    assert sorted(child.output.readline() for _ in range(4)) == ["ready\n"] * 3 + ["started\n"]
    time.sleep(0.5)  # until it waits
    os.kill(child.process.pid, signal.SIGTERM)
    assert child.wait() == (75, "")
