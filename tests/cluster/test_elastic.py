"""Hosts come and go: a cable is cut, a host is added, processes are killed; the run ends as ever.

The command is the one of docs/elastic.md, at the size of a test.
"""

import os
import re
import shlex
import signal

import pytest
from conftest import ONE_THREAD, PYTHON, ROOT, assert_close, load, rows, run, same_state, torchrun

from tests.docs.copies import joined
from tests.docs.test_recipes import copy
from tests.hosts import FLAGS, STEP, Hosts, first_child, needs_hosts
from tests.launched import IN_ROOT, straight

SCRIPT = ROOT / "distributed.py"
TWO, ONE = (f"changed: world_size {was}" for was in ("1 -> 2", "2 -> 1"))
SMALLER = {  # what a test makes of the command: one process on each of one or two hosts
    "torchrun": f"{PYTHON} -m torch.distributed.run",
    "--nnodes=2:4 --nproc-per-node=8": "--nnodes=1:2 --nproc-per-node=1",
    " distributed.py": " --rdzv-conf=last_call_timeout=5 SCRIPT",
    " --data /path/to/imagenet --batch-size 960": "",
    "--checkpoint-freq 500": "--checkpoint-freq 5",
    "--dist-timeout 60": "--dist-timeout 20",
}


def command():
    """That of docs/elastic.md, with HOST and SCRIPT in it, as it is on each host."""
    page = joined((ROOT / "docs/elastic.md").read_text())
    (line,) = re.findall(r"^(?:\w+=\w+ )*torchrun .*$", page, re.M)
    for written, smaller in SMALLER.items():
        assert line.count(written) == 1, f"{written} is not in {line}"
        line = line.replace(written, smaller)
    return line


class Elastic(Hosts):
    """Two hosts that run the command in `work`; `host` is where the rendezvous is."""

    def __init__(self, host, work, folder, script=SCRIPT, more=()):
        super().__init__(folder.parent / "brake", "host-a", "host-b")
        self.line = command().replace("HOST", host).replace("SCRIPT", str(script))
        self.work, self.flags = work, [*FLAGS, *more, "--checkpoint-dir", folder]

    def join(self, i):
        return self.start(i, ["env", *shlex.split(self.line), *self.flags], self.work)


def restarted(job, change):
    """Wait for a restart; returns whether it goes on at the step where it had stopped."""
    output = job.wait_for(change) + job.wait_for(STEP)
    stopped = re.findall(r"^stopped at (.*), saved", output, re.M)
    resumed = re.findall(r"^resumed from \S+ at (.*)$", output, re.M)
    assert not stopped or stopped == resumed
    return bool(stopped)


@pytest.mark.full
@needs_hosts
def test_the_cable_is_cut_and_comes_back(work, tmp_path):
    """The first host goes on alone; the second joins again by itself. The recipe: to the bit."""
    folder, script, more = tmp_path / "c", copy(tmp_path / "here", "same_bits"), ["--parts", "2"]
    with Elastic("host-a", work, folder, script, more) as hosts:
        jobs = [hosts.join(0), hosts.join(1)]
        jobs[0].wait_for(r"^epoch 1/\d+ \[7/")
        hosts.cable("down")
        assert not restarted(jobs[0], ONE)  # from the checkpoint at step 5
        hosts.cable("up")
        assert restarted(jobs[0], TWO)  # without a loss
        hosts.brake.unlink()
        outputs = [job.finish() for job in jobs]
    assert re.search(r"^rank 1 failed at epoch 1 step \d+: ", outputs[1], re.M), outputs[1]
    alone = [*torchrun(1, script), *FLAGS, *more, "--checkpoint-dir", tmp_path / "alone"]
    run(alone, work, env=ONE_THREAD | IN_ROOT)
    assert same_state(load(folder), load(tmp_path / "alone"))
    for mine, its in zip(rows(folder, False), rows(tmp_path / "alone", False), strict=True):
        assert mine | {"world_size": 1} == its


@pytest.mark.full
@needs_hosts
def test_a_host_is_added_a_process_is_killed_and_then_the_host_of_the_rendezvous(work, tmp_path):
    """host-b has the rendezvous. host-a comes first in the alphabet: rank 0 moves there."""
    folder = tmp_path / "c"
    with Elastic("host-b", work, folder) as hosts:
        b = hosts.join(1)
        assert "processes: 1" in b.wait_for(STEP)
        a = hosts.join(0)
        a.wait_for(TWO)
        a.wait_for(STEP)
        os.kill(first_child(b), signal.SIGKILL)
        # With both again, or with one of them first.
        a.wait_for(r"^resumed from .* at .*epoch")
        a.wait_for(STEP)
        b.process.kill()
        assert "RendezvousConnectionError" in a.finish(code=1, timeout=60)
        b.finish(code=-signal.SIGKILL)
        hosts.brake.unlink()
        for job in [hosts.join(1), hosts.join(0)]:
            job.finish()
    two = straight("distributed", work, *FLAGS)
    assert_close(load(folder), load(two))
    for mine, its in zip(rows(folder), rows(two), strict=True):
        assert (mine["epoch"], mine["step"]) == (its["epoch"], its["step"])
        assert mine["train_loss"] == pytest.approx(its["train_loss"], rel=1e-4)
