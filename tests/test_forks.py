"""A fork in place of Python: the same arguments, variables and signals, output and exit code."""

import os
import signal
import time

import pytest
from conftest import PYTHON, ROOT, Forked, Job, forking, run

SAYS = "import os, sys; print(sys.argv, os.getcwd(), os.environ['MINE'], sys.path[0], __name__)"


def test_it_is_a_fork(tmp_path):
    code = "import os, sys; print('torch' in sys.modules, os.getppid())"
    said = run([PYTHON, "-c", code], tmp_path, env=forking())
    assert said == f"True {Forked.process.pid}\n"


@pytest.mark.parametrize("kind", ["-c", "-m", "script"])
def test_a_fork_is_called_as_python_is(kind, tmp_path):
    (tmp_path / "said.py").write_text(f"{SAYS}\nsys.exit(3)")
    words = {"-c": ["-c", f"{SAYS}\nsys.exit(3)"], "-m": ["-m", "said"], "script": ["said.py"]}
    command = [PYTHON, "-u", *words[kind], "--flag", "a b"]
    shown = [run(command, tmp_path, env=env | {"MINE": "1"}, code=3) for env in ({}, forking())]
    assert shown[0] == shown[1] and "'--flag', 'a b'" in shown[0]


def test_a_fork_imports_the_common_beside_its_script(tmp_path):
    (tmp_path / "common").mkdir()
    (tmp_path / "common/device.py").write_text("print('mine')")
    (tmp_path / "said.py").write_text("import common.device")
    assert run([PYTHON, "said.py"], tmp_path, env=forking()) == "mine\n"


SPAWNS = """
import os, sys, torch.multiprocessing as mp
def child(rank, asked, answers):
    started = "as a fork" if "--serve" in open("/proc/self/cmdline").read() else "as Python"
    answers.put((rank, started, asked.get(), __name__, sys.argv, os.getcwd(), 'here' in sys.path))
    sys.exit(rank)
if __name__ == "__main__":
    sys.path.append("here")
    spawn = mp.get_context("spawn")
    asked, answers = spawn.SimpleQueue(), spawn.SimpleQueue()
    context = mp.spawn(child, (asked, answers), nprocs=2, join=False)
    asked.put("a word"), asked.put("a word")
    print(*sorted(answers.get() for _ in "01"))
    print([process.join() or process.exitcode for process in context.processes])
"""


def test_what_a_fork_spawns_is_a_fork(tmp_path):
    """mp.spawn gives it open files, arguments and the parent's sys.path, as it does Python."""
    (tmp_path / "spawns.py").write_text(SPAWNS)
    command = [PYTHON, "spawns.py", "--flag"]
    shown = [run(command, tmp_path, 60, env) for env in ({}, forking())]
    assert shown[0].count("as Python") == 2 and shown[0].endswith("[0, 1]\n")
    assert shown[0].replace("as Python", "as a fork") == shown[1]


def test_a_fork_has_the_cores_of_its_stand_in(tmp_path):
    core = min(os.sched_getaffinity(0))
    code = "import os; print(os.sched_getaffinity(0))"
    command = ["taskset", "-c", core, PYTHON, "-c", code]
    assert run(command, tmp_path, env=forking()) == f"{{{core}}}\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_fork_and_its_stand_in_end_together(number, tmp_path):
    command = [PYTHON, "-c", "import os, time; print(os.getpid()); time.sleep(60)"]
    job = Job(command, tmp_path, forking())
    pid = int(job.wait_for(r"^\d+$"))
    job.process.send_signal(number)
    assert job.wait(20)[0] == -number
    deadline = time.monotonic() + 20
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not os.path.exists(f"/proc/{pid}")
    command[-1] = f"import os; os.kill(0, {number})"
    run(command, tmp_path, env=forking(), code=-number)


def test_flags_of_python_start_the_real_one():
    assert "Python 3" in run([PYTHON, "-V"], ROOT, env=forking())
