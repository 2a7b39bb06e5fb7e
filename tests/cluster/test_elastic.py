"""Hosts come and go: a cable is cut, a host is added, processes are killed; the run ends as ever.

The command is the one of docs/elastic.md, at the size of a test.
"""

import os
import re
import shlex
import signal
import socket

import pytest
from conftest import PYTHON, ROOT, assert_close, last_result, load, rows, run
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout

from common.loader import TrainSampler
from tests.cluster.braked import FLAGS, STEP
from tests.cluster.ddp import TWO_THREADS, ddp
from tests.hosts import Hosts, first_child, needs_hosts

DOCUMENT = (ROOT / "docs/elastic.md").read_text()
TWO, ONE = (f"changed: world_size {was}, same global batches" for was in ("1 -> 2", "2 -> 1"))
SMALLER = {  # what a test makes of the command: one process on each of one or two hosts
    "torchrun": f"{PYTHON} -m torch.distributed.run",
    "--nnodes=2:4 --nproc-per-node=8": "--nnodes=1:2 --nproc-per-node=1",
    " distributed.py": f" --rdzv-conf=last_call_timeout=5 {ROOT}/distributed.py",
    " --data /path/to/imagenet --batch-size 960": "",
    "--checkpoint-freq 500": "--checkpoint-freq 5",
    "--dist-timeout 60": "--dist-timeout 20",
}


def command(host, *flags):
    """The command of docs/elastic.md, as it is on each host."""
    (line,) = re.findall(r"^(?:\w+=\w+ )*torchrun .*$", DOCUMENT, re.M)
    for written, smaller in SMALLER.items():
        assert line.count(written) == 1, f"{written} is not in {line}"
        line = line.replace(written, smaller)
    return ["env", *shlex.split(line.replace("HOST", host)), *FLAGS, *map(str, flags)]


class Elastic(Hosts):
    """Two hosts that run the command in `work`; `host` is where the rendezvous is.

    As long as `brake` is there a step takes a second: nothing has to be in time.
    """

    def __init__(self, host, work, folder):
        super().__init__("host-a", "host-b")
        self.host, self.work, self.folder = host, work, folder
        self.brake = folder.parent / "brake"
        self.brake.touch()

    def join(self, i, *flags):
        words = command(self.host, "--checkpoint-dir", self.folder, *flags)
        return self.start(i, words, self.work, TWO_THREADS | {"BRAKE": str(self.brake)})


def restarted(job, change):
    """Wait for a restart after a stop: it goes on at the step where it had stopped."""
    output = job.wait_for(change, 120) + job.wait_for(STEP)
    stopped = re.findall(r"^stopped at (.*), saved", output, re.M)
    resumed = re.findall(r"^resumed from \S+ at (.*)$", output, re.M)
    assert not stopped or stopped == resumed
    return bool(stopped)


def finish(jobs, code=0, timeout=120):
    ends = [job.wait(timeout) for job in jobs]
    assert [ended for ended, _ in ends] == [code] * len(jobs), ends
    return [output for _, output in ends]


def same_but_for_rounding(folder, work):
    """As a run of two processes that nothing has happened to."""
    other = ddp(work, *FLAGS)
    assert_close(load(folder), load(other))
    for mine, its in zip(rows(folder), rows(other), strict=True):
        assert (mine["epoch"], mine["step"]) == (its["epoch"], its["step"])
        assert mine["train_loss"] == pytest.approx(its["train_loss"], rel=1e-4)


@pytest.mark.full
def test_one_host_alone_trains(work, tmp_path):
    """It need not wait for others for longer than torchrun's thirty seconds."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    words = [w.replace(":29400", f":{port}") for w in command("localhost", "--max-steps", 6)]
    output = run([*words, "--checkpoint-dir", tmp_path / "c"], work)
    assert "processes: 1, gloo" in output and load(tmp_path / "c")["step"] == 6
    last_result(output)
    defaults = RendezvousTimeout()
    assert defaults.last_call.seconds == 30 and "waits 30 seconds" in DOCUMENT
    assert defaults.join.seconds == 600 and "after ten minutes it gives up" in DOCUMENT


def test_a_batch_that_does_not_divide_is_told_what_does():
    said = "--batch-size 256 does not divide among 3 processes: try 255 or 258"
    with pytest.raises(ValueError, match=said):
        TrainSampler(1000, 256, rank=0, world_size=3, seed=0)
    with pytest.raises(ValueError, match="among 4 processes: try 4"):
        TrainSampler(1000, 3, rank=0, world_size=4, seed=0)
    # The one of the document does, with each number of its hosts.
    least, most, each = map(
        int, re.findall(r"--nnodes=(\d):(\d) --nproc-per-node=(\d)", DOCUMENT)[0]
    )
    batch = int(re.findall(r"--batch-size (\d+)", DOCUMENT)[0])
    assert not any(batch % (hosts * each) for hosts in range(least, most + 1))
    shares = batch // least // each, batch // most // each
    assert (
        f"with {least} hosts each GPU takes {shares[0]} images, with {most} it takes {shares[1]}"
        in DOCUMENT
    )


@pytest.mark.full
@needs_hosts
def test_the_cable_is_cut_and_comes_back(work, tmp_path):
    """The first host goes on alone; the second joins again by itself."""
    folder = tmp_path / "c"
    with Elastic("host-a", work, folder) as hosts:
        jobs = [hosts.join(0), hosts.join(1)]
        jobs[0].wait_for(r"^epoch 0 \[7/", 120)
        hosts.cable("down")
        assert not restarted(jobs[0], ONE)  # from the checkpoint at step 5
        hosts.cable("up")
        assert restarted(jobs[0], TWO)  # without a loss
        hosts.brake.unlink()
        outputs = finish(jobs)
    assert re.search(r"^rank 1 failed at epoch 0 step \d+: ", outputs[1], re.M), outputs[1]
    same_but_for_rounding(folder, work)


@pytest.mark.full
@needs_hosts
def test_a_host_is_added_a_process_is_killed_and_then_the_host_of_the_rendezvous(work, tmp_path):
    """host-b has the rendezvous. host-a comes first in the alphabet: rank 0 moves there."""
    folder = tmp_path / "c"
    with Elastic("host-b", work, folder) as hosts:
        b = hosts.join(1)
        assert "processes: 1" in b.wait_for(STEP, 120)
        a = hosts.join(0)
        a.wait_for(TWO, 120)
        a.wait_for(STEP)
        os.kill(first_child(b), signal.SIGKILL)
        a.wait_for(r"^resumed from .* at epoch", 120)  # with both again, or with one of them first
        a.wait_for(STEP)
        b.process.kill()
        (output,) = finish([a], code=1, timeout=60)
        assert "RendezvousConnectionError" in output
        finish([b], code=-signal.SIGKILL)
        hosts.brake.unlink()
        finish([hosts.join(1), hosts.join(0)])
    same_but_for_rounding(folder, work)


@pytest.mark.full
@needs_hosts
def test_a_host_too_many_for_the_batch(work, tmp_path):
    """Two processes cannot share 45 images. When the host is taken out the other goes on."""
    folder, flags = tmp_path / "c", ["--batch-size", 45, "--max-steps", 60]
    with Elastic("host-a", work, folder) as hosts:
        a = hosts.join(0, *flags)
        a.wait_for(STEP, 120)
        b = hosts.join(1, *flags)
        said = "^error: --batch-size 45 does not divide among 2 processes: try 44 or 46$"
        a.wait_for(said, 120)
        b.wait_for(said, 60)
        b.process.send_signal(signal.SIGTERM)
        hosts.brake.unlink()
        finish([a])
    assert (load(folder)["epoch"], load(folder)["step"]) == (1, 29)
