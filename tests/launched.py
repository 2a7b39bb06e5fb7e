"""Each script started by its real launcher with two processes, who its processes are, and resumes.

A run is compared with the uninterrupted one to the bit: weights, buffers, momentum, meters, the
best accuracy and every line of metrics.jsonl but for its timings.
"""

import fcntl
import hashlib
import os
import re
import shutil
from pathlib import Path

from conftest import (
    HOROVODRUN,
    ONE_THREAD,
    ROOT,
    Job,
    cmdline,
    load,
    needs_horovod,
    python,
    rows,
    same_state,
    torchrun,
)

from common.images import make_digits
from tests.docs.ranks import good

# BatchNorm and dropout, 29 steps an epoch, over the end of an epoch; a checkpoint at 5, 10, ...
FLAGS = "--arch tests.nets:normed --image-size 24 --batch-size 48 --epochs 2 -p 1".split()
FLAGS += "--checkpoint-freq 5 --max-steps 45 -j 1".split()
# Without BatchNorm: any number of processes trains the same, but for rounding.
SMOOTH = ["--arch", "tests.nets:smooth"]
DOUBLE = {"PYTHONPATH": str(ROOT / "tests/apex_doubles/today")}
IN_ROOT = {"PYTHONPATH": str(ROOT)}  # for code that is not beside common/
# An epoch takes 1.5 s and more: time to see a line and to act.
SLOW = {"STEP_SECONDS": "0.05"}
SLOWER = {"STEP_SECONDS": "0.2"}  # also where the machine is slow: the next steps are not done yet
# Slurm's script has tests of its own, on a cluster.
SCRIPTS = {
    "alone": (python("distributed.py"), {}),
    "dataparallel": (python("dataparallel.py"), {}),
    "distributed": (torchrun(2), {}),
    "multiprocessing": ([*python("multiprocessing_distributed.py"), "--nprocs=2"], {}),
    "apex": ([*torchrun(2, "apex_distributed.py"), "--precision", "fp32"], DOUBLE),
    "horovod": ([*HOROVODRUN, ROOT / "horovod_distributed.py"], {}),
    "fsdp": (torchrun(2, "fsdp_distributed.py"), {}),
}
# Whose sums are the same to the bit: one process adds in another order than two, and so does FSDP.
ALIKE = {"alone": "alone", "dataparallel": "alone", "fsdp": "fsdp"}
# These without a launcher, where nothing depends on it.
FORKED = {"alone": ("distributed.py", 1), "distributed": ("distributed.py", 2)}
FORKED |= {"fsdp": ("fsdp_distributed.py", 2)}
WARNS = "warn|abort|terminate|Traceback"  # no good run says any of it


def start(name, folder, work, *more, env=SLOW):
    if name == "horovod":
        needs_horovod()
    command, own = SCRIPTS[name]
    return Job([*command, *FLAGS, "--checkpoint-dir", folder, *more], work, ONE_THREAD | own | env)


def with_pipes(tmp_path):
    """A folder of the digits in which five images are pipes; more than an epoch leaves out."""
    make_digits(tmp_path)
    data = tmp_path / "digits"
    for path in sorted(data.glob("train/*/*.png"))[::300]:
        path.unlink()
        os.mkfifo(path)
    return data


def at_step(job, step, epoch=1):
    """Wait until this step is done; returns the output so far."""
    return job.wait_for(rf"epoch {epoch}/\d+ \[{step}/")


def forked(name, folder, work, *more):
    """The output of a whole run of one of FORKED: its processes are forks of one (ranks.py)."""
    script, ranks = FORKED[name]
    flags = [*FLAGS, "--checkpoint-dir", folder, *more]
    return good(ROOT / script, *flags, ranks=ranks, cwd=work)


def resume(name, folder, work, *more):
    """The rest of a run of any script, by the cheapest that goes on to the same end."""
    return forked(ALIKE.get(name, "distributed"), folder, work, "--resume", "auto", *more)


def straight(name, work, *more):
    """The folder of a run without a fault that ends as this script's does to the bit.

    It is made once, whichever of pytest's workers is the first to ask for it: that with no other
    flags by torchrun, or with no launcher, as users do.
    """
    name = ALIKE.get(name, "distributed")
    said = " ".join([name, *map(str, more)]).replace(str(work), "WORK")
    shared = work.parent.parent if "PYTEST_XDIST_WORKER" in os.environ else work.parent
    folder = shared / f"straight-{hashlib.sha256(said.encode()).hexdigest()[:16]}"
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            made = work / "straight"
            shutil.rmtree(made, ignore_errors=True)  # of a run that has failed
            if more:
                output = forked(name, made, work, *more)
            else:
                output = start(name, made, work, env={}).finish()
            assert not re.search(WARNS, output, re.I), output
            made.rename(folder)
    return folder


def ends_as_straight(name, folder, work, *more):
    """A resume goes on where the run stood, to the end of one without a fault, to the bit."""
    state = load(folder)
    output = resume(name, folder, work, *more)
    assert resumed_where_it_stood(output, state), output
    same_run(folder, straight(name, work))


def same_run(folder, reference):
    for name in ("checkpoint.pth", "model_best.pth"):
        assert same_state(load(folder, name), load(reference, name))
    assert rows(folder, timings=False) == rows(reference, timings=False)
    assert sorted(os.listdir(folder)) == sorted(os.listdir(reference))  # no temporary file


def resumed_where_it_stood(output, state):
    """Whether it says so, and its first step is indeed the next one."""
    place = f"at epoch {state['epoch'] + 1} step {state['step']}"
    if state["step"] == 0:
        place = f"at the end of epoch {state['epoch']}"
    following = divmod(state["epoch"] * 29 + state["step"], 29)  # that of 29 had only no validation
    first = re.search(r"^(?:\[0\]<stdout>:)?epoch (\d+)/\d+ \[(\d+)/", output, re.M)
    goes_on = first and (int(first[1]) - 1, int(first[2]) - 1) == following
    return goes_on and re.search(rf"resumed from .*/checkpoint(\.prev)?\.pth {place}", output)


def parent(pid):
    try:
        return int(re.search(r"^PPid:\t(\d+)", Path(f"/proc/{pid}/status").read_text(), re.M)[1])
    except OSError:
        return 0


def processes(job):
    """(the launcher, the training processes, the loader workers) of a job, as pids."""
    script = [p for p in job.pids() if re.search(r"\.py |spawn_main", cmdline(p))]
    launchers = "torch.distributed|horovodrun|resource_tracker|bash|sh -c"
    script = [p for p in script if not re.search(launchers, cmdline(p))]
    # A loader worker is a fork of a training process, with its command line.
    workers = [p for p in script if cmdline(parent(p)) == cmdline(p)]
    training = [p for p in script if p not in workers and p != job.process.pid]
    return job.process.pid, training or [job.process.pid], workers
