"""How the tests start scripts: as a user does, with a timeout, and with nothing left behind."""

import gc
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest

# A thread that waits for others sleeps, instead of keeping its core busy: other tests need it.
PATIENT = {"OMP_WAIT_POLICY": "passive"}
os.environ |= PATIENT  # is read when torch is loaded
# Some machines set it: each process that a test starts would compile all modules of ours anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

import torch  # noqa: E402

torch.set_num_threads(1)  # pytest's other workers need the cores

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable
# As if its environment was active.
ACTIVE = {"PATH": f"{os.path.dirname(PYTHON)}:{os.environ['PATH']}"}
# What is started under nohup, or behind a shell, as the tests may be, ignores these otherwise.
HEAR_SIGNALS = ["env", "--default-signal=HUP,INT,QUIT"]
# What torchrun sets for two processes and the other launchers do not: sums in one order.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
# Fast settings: a small model without BatchNorm on small images, 29 steps an epoch.
SMALL = "--arch tests.nets:plain --image-size 24 --batch-size 48 --epochs 2".split()


def python(script="distributed.py"):
    return [PYTHON, str(ROOT / script)]


def torchrun(processes, script="distributed.py", *flags):
    """flags: more of torchrun's own."""
    launcher = [PYTHON, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, f"--nproc-per-node={processes}", *flags, str(ROOT / script)]


def without_launchers(env):
    """As a user's command line has it: no thread count, no ranks, no launcher's variables."""
    return {k: v for k, v in env.items() if not re.match("OMP_|RANK|WORLD_|MASTER_", k)}


def full(*parameters):
    """Parameters of a test that only --all runs."""
    return pytest.param(*parameters, marks=pytest.mark.full)


def soak(*parameters):
    """Parameters of a test that is run by hand alone: others show the same in parts."""
    return pytest.param(*parameters, marks=pytest.mark.soak)


def each(names, quick=(), by_hand=()):
    """Parameters: some of them without --all too, some by hand alone."""
    return [n if n in quick else soak(n) if n in by_hand else full(n) for n in names]


HOROVODRUN = [Path(PYTHON).parent / "horovodrun", "-np", 2, PYTHON]


def needs_horovod():
    if not HOROVODRUN[0].exists() and "CI" not in os.environ:
        pytest.skip("Horovod is not installed: tools/install_horovod.sh")


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="also the tests that take long")


# What takes longest comes first, or one core would wait for the other at the end: a file is run by
# one of pytest's workers. Then the rooms.
LONGEST = """docs/test_doctor docs/test_docs run/test_training docs/test_doctor_files
cluster/test_slurm
docs/test_doctor_ends run/test_gpu_hour cluster/test_elastic docs/test_recipes docs/test_minimal
docs/test_libraries docs/test_compose_pairs run/test_resume run/test_faults docs/test_page
run/test_screen docs/test_mean_data docs/test_compose unit/test_optimized""".split()
ROOMS = {"cluster": 0, "run": 1, "gpu": 2, "docs": 3, "unit": 4}


def place(item):
    """Where a test comes in the order."""
    room, name = item.path.parent.name, f"{item.path.parent.name}/{item.path.stem}"
    return LONGEST.index(name) if name in LONGEST else len(LONGEST) + ROOMS.get(room, 0)


def pytest_collection_modifyitems(config, items):
    items.sort(key=place)
    if config.getoption("--all") or any("::" in name for name in config.args):
        return
    long = [i for i in items if i.get_closest_marker("full") and not i.get_closest_marker("soak")]
    config.hook.pytest_deselected(items=long)
    items[:] = [item for item in items if item not in long]


def pytest_collection_finish():
    gc.freeze()  # what was imported: a walk through it takes 0.2 s, each time


def pytest_terminal_summary(terminalreporter, config):
    if not config.getoption("--all"):
        terminalreporter.write_line("Tests that take long: ./start.sh test --all runs them too.")


def cmdline(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


class Job:
    """A command in a session of its own, whose every descendant can be found."""

    started, gpu = [], False  # in this test; whether it is one that needs a GPU

    def __init__(self, command, cwd, env=None):
        self.mark = f"TEST_JOB={uuid.uuid4()}"
        name, _, value = self.mark.partition("=")
        clean = without_launchers(os.environ) | ACTIVE
        if not self.gpu:  # what the tests hold to the bit is bits of CPUs
            clean["CUDA_VISIBLE_DEVICES"] = ""
        clean |= {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", name: value}
        self.process = subprocess.Popen(
            [*HEAR_SIGNALS, *map(str, command)],
            cwd=cwd,
            env=clean | PATIENT | (env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines = queue.SimpleQueue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        self.started.append(self)

    def _read(self):
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")

    def pids(self):
        """Every live process that this job has started, itself included, the oldest first."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    state, *numbers = (entry / "stat").read_text().rpartition(")")[2].split()
                    ours = self.mark.encode() in (entry / "environ").read_bytes()
                    if ours and state != "Z":
                        found.append((int(numbers[18]), int(entry.name)))  # start: pids may wrap
                except OSError:
                    continue  # ended meanwhile, or not ours to look at
        return [pid for _, pid in sorted(found)]

    def kill(self, number=signal.SIGKILL):
        for pid in self.pids():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def wait(self, timeout):
        """(exit code, output since wait_for). Fails if it takes longer, or leaves a process."""
        self.reader.join(timeout)  # as long as any process can write
        if late := self.reader.is_alive():
            self.kill(signal.SIGABRT)  # faulthandler says where each thread is
            time.sleep(3)
            self.kill()
            self.reader.join(20)
        output = "".join(self.lines.get() for _ in range(self.lines.qsize()))
        if late:
            pytest.fail(f"{self.process.args} took more than {timeout} s:\n{output}")
        self.process.wait(20)
        deadline = time.monotonic() + 40
        while self.pids() and time.monotonic() < deadline:
            time.sleep(0.1)
        left = [*filter(None, map(cmdline, self.pids()))]  # one may end while it is asked
        self.kill()
        assert not left, f"left behind by {self.process.args}: {left}\n{output}"
        return self.process.returncode, output

    def finish(self, code=0, timeout=300):
        """As wait(), for an end with this exit code, or any if None; returns the output alone."""
        returned, output = self.wait(timeout)
        assert code in (None, returned), f"{self.process.args} ended with {returned}:\n{output}"
        return output

    def wait_for(self, pattern, timeout=240):
        """Read the output until a line matches; returns what was read."""
        seen, deadline = "", time.monotonic() + timeout
        while line := self.line(deadline):
            seen += line
            if re.search(pattern, line):
                return seen
        self.kill()
        pytest.fail(f"{pattern!r} not in the output of {self.process.args}:\n{seen}")

    def line(self, deadline):
        """The next line; "" at the end of all, or when time.monotonic() is past the deadline."""
        try:
            return self.lines.get(timeout=max(0.01, deadline - time.monotonic()))
        except queue.Empty:
            return ""


@pytest.fixture(autouse=True)
def no_job_outlives_its_test(request):
    Job.gpu = request.node.get_closest_marker("gpu") is not None
    yield
    for job in Job.started:
        job.kill()
    Job.started.clear()


def run(command, cwd, timeout=600, env=None, code=0):
    """Run to the end; returns the output. Fails on another exit code than `code`."""
    return Job(command, cwd, env).finish(code, timeout)


def load(folder, name="checkpoint.pth"):
    """A run that is killed while it saves may leave the newest as checkpoint.prev.pth alone."""
    path = Path(folder) / name
    if name == "checkpoint.pth" and not path.exists():
        path = path.with_name("checkpoint.prev.pth")
    return torch.load(path, weights_only=True, map_location="cpu")


def rows(folder, timings=True):
    """The lines of metrics.jsonl as dicts."""
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    times = () if timings else ("images_per_second", "data_time", "seconds")
    return [{key: value for key, value in line.items() if key not in times} for line in lines]


def tensors(checkpoint):
    """Weights, buffers and momentum, by their names."""
    state = checkpoint["optimizer"]["state"]
    assert state
    return checkpoint["state_dict"] | {i: state[i]["momentum_buffer"] for i in state}


def same_state(a, b):
    """Whether two checkpoints hold the same to the bit: tensors, meters, the loss scale."""
    mine, its = tensors(a), tensors(b)
    same = mine.keys() == its.keys() and all(mine[name].equal(its[name]) for name in mine)
    return same and all(a[k] == b[k] for k in ("epoch", "step", "best_acc1", "meters", "scaler"))


def assert_close(a, b, atol=1e-5, rtol=1e-4):
    """Two checkpoints stand at one place, and their tensors are the same but for rounding.

    The sums of other processes or kernels are added up in another order.
    """
    for key in ("epoch", "step", "arch"):
        assert a[key] == b[key]
    torch.testing.assert_close(tensors(a), tensors(b), atol=atol, rtol=rtol)


def last_result(output):
    """(loss, acc@1, acc@5) of the last validation in a script's output."""
    result = r"^(?: \*|epoch .*)  ?loss ([\d.]+)  acc@1 ([\d.]+)  acc@5 ([\d.]+)(?:$|  )"
    found = re.findall(result, output, re.M)
    assert found, output
    return tuple(map(float, found[-1]))


@pytest.fixture(scope="session")
def work(tmp_path_factory):
    """A folder to run in, which has the digits already."""
    from common.images import make_digits

    folder = tmp_path_factory.mktemp("work")
    make_digits(str(folder / "data"))
    return folder
