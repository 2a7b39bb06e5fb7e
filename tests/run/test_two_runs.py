"""Two runs in one folder, started up to a minute apart in any way: no checkpoint goes backward."""

import random
import re
import signal
import threading
import time

import pytest
import torch
from conftest import ONE_THREAD, PYTHON, ROOT, SMALL, Job, load, python, rows, torchrun

# As on a file system without locks: then only what lies there tells the runs of each other.
WITHOUT_LOCKS = """
import errno, fcntl, sys
def refuse(*_):
    raise OSError(errno.ENOLCK, "No locks available")
fcntl.lockf = refuse
import distributed
sys.exit(distributed.main())
"""
FLAGS = [*SMALL, "--epochs", "99", "-j", "0", "-p", "1"]


class Poller(threading.Thread):
    """Sees how far the newest checkpoint is, as often as it can."""

    def __init__(self, folder):
        super().__init__(daemon=True)
        self.folder, self.seen, self.ended = folder, [0], threading.Event()

    def run(self):
        while not self.ended.wait(0.05):
            try:
                state = load(self.folder)
            except FileNotFoundError:
                continue  # not yet, or for a moment
            self.seen.append(state["epoch"] * 29 + state["step"])


# The second node comes later; the first, which has the lock by then, waits for it.
NODES = """
"$@" --node-rank=0 $FLAGS & sleep $LATER; "$@" --node-rank=1 $FLAGS; second=$?
wait $!; first=$?; exit $((first > second ? first : second))
"""


def two_nodes(chance, flags):
    """A command that starts two nodes of one process each, some seconds apart."""
    node = [PYTHON, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    node += [f"--master-port={chance.randrange(20000, 30000)}"]
    set_up = ["env", f"LATER={chance.uniform(0, 20)}"]
    words = " ".join(map(str, [ROOT / "distributed.py", *flags, "--dist-timeout", 40]))
    return [*set_up, f"FLAGS={words}", "bash", "-c", NODES, "nodes", *node]


def one_start(chance, folder, kinds):
    """A random command that trains in the folder."""
    kind = chance.choice(kinds)
    command = {
        "alone": python(),
        "two": torchrun(2),
        "without locks": [PYTHON, "-c", WITHOUT_LOCKS],
    }.get(kind, [])
    flags = [*FLAGS, "--checkpoint-dir", folder, "--max-steps", str(chance.randrange(50, 400))]
    flags += ["--checkpoint-freq", chance.choice("137")]
    resume = chance.choice([*["auto"] * 5, None, folder / "checkpoint.pth"])
    flags += ["--resume", resume] if resume else []
    return kind, two_nodes(chance, flags) if kind == "two nodes" else [*command, *flags]


def what_happened(code, output):
    """In a word or two; any other end is a failure of the test."""
    for words, pattern in (
        ("refused: in use", "another run is writing to"),
        ("refused: holds a run", "holds a run"),
        ("refused: no checkpoint", r"No such file or directory: .*checkpoint\.pth"),
        ("stopped itself", "is not the one that this run last read or wrote"),
        ("stopped itself", r"cannot write .*No such file"),  # the other has tidied the folder
        ("nothing left", "nothing left to train"),
    ):
        if re.search(pattern, output) and (code or words == "nothing left"):
            return words
    # 1: torchrun, when it is stopped. -15: before the script hears signals.
    ends = {0: "trained to its end", -9: "killed", -15: "stopped", 75: "stopped", 1: "stopped"}
    if "did not come within" in output:  # one node was killed, or refused
        return "a node was missing"
    assert code in ends and "rank 0 failed" not in output, output
    return ends[code]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    "kinds", [["alone", "alone", "two", "without locks"], ["two nodes", "two nodes", "alone"]]
)
def test_no_checkpoint_goes_backward(kinds, seed, work, tmp_path):
    chance, folder = random.Random(seed), tmp_path / "c"
    env = {"PYTHONPATH": str(ROOT), **ONE_THREAD}
    poller = Poller(folder)
    poller.start()
    if chance.random() < 0.5:  # else the folder is new to both
        begin = [*python(), *FLAGS, "--checkpoint-dir", folder, "--max-steps", "7"]
        assert Job(begin, work, env).wait(90)[0] == 0
    jobs, said = [], []
    for delay in (0, chance.uniform(0, chance.choice([6, 60]))):
        time.sleep(delay)
        kind, command = one_start(chance, folder, kinds)
        jobs.append(Job(command, work, env))
        said.append(f"after {delay:.0f} s {kind} {' '.join(map(str, command[-2:]))}")
    for job in jobs:
        fate = chance.choice([None, None, signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP])
        if fate:
            time.sleep(chance.uniform(0, 20))
            job.kill(fate)
        if fate == signal.SIGSTOP:  # as a machine that swaps; the other one may end meanwhile
            threading.Timer(chance.uniform(0, 40), job.kill, [signal.SIGCONT]).start()
    ends = [what_happened(*job.wait(200)) for job in jobs]
    left = Job([*python(), *FLAGS, "--checkpoint-dir", folder, "--resume", "auto"], work, env)
    left.wait_for(r"epoch \d+/\d+ \[")
    left.kill(signal.SIGTERM)
    assert left.wait(60)[0] == 75
    poller.ended.set()
    poller.join(10)
    print(f"{seed}: {'; '.join(f'{a}: {b}' for a, b in zip(said, ends, strict=True))}")
    print(f"{len(poller.seen)} looks, {len(set(poller.seen))} checkpoints up to {poller.seen[-1]}")
    assert poller.seen == sorted(poller.seen)
    if (folder / "metrics.jsonl").exists():
        places = [(row["epoch"], row["step"]) for row in rows(folder)]
        assert places == sorted(set(places))
    for path in folder.glob("*.pth"):
        torch.load(path, weights_only=True)
    assert not list(folder.glob("*.tmp")) and not list(folder.glob("*damaged*"))
