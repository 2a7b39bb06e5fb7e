"""What fails in the middle of a run: a lost host, or a process that hangs.

The run ends by itself, says which rank failed where, and what it had saved stays.
"""

import os
import random
import re
import signal
import time

import pytest
from conftest import HOROVODRUN, PYTHON, ROOT, each

from tests.hosts import Hosts, needs_hosts
from tests.launched import (
    FLAGS,
    SCRIPTS,
    SLOW,
    at_step,
    ends_as_straight,
    processes,
    resume,
    same_run,
    start,
    straight,
    with_pipes,
)

NAMES = ["distributed", "horovod", "multiprocessing"]


# The lines that end a run of distributed.py are those of multiprocessing_distributed.py.
@pytest.mark.parametrize("name", each(NAMES, by_hand=["distributed"]))
def test_a_stopped_process_is_missed(name, work, tmp_path):
    """SIGSTOP: it holds its connections and says nothing. Horovod itself would only warn."""
    job = start(name, tmp_path / "c", work, "--dist-timeout", "25")
    at_step(job, 13)
    stopped = processes(job)[1][-1]
    os.kill(stopped, signal.SIGSTOP)
    job.wait_for(r"rank \d failed at epoch 1 step \d+: ")
    os.kill(stopped, signal.SIGCONT)  # a launcher's SIGTERM does not end what is suspended
    job.finish(code=1, timeout=60)
    ends_as_straight(name, tmp_path / "c", work)


@pytest.mark.full
def test_a_run_that_waits_for_images_ends(work, tmp_path):
    """The loader's workers are stopped: the main thread would wait for them without limit."""
    job = start("dataparallel", tmp_path / "c", work, "--dist-timeout", "5")
    at_step(job, 13)
    for pid in processes(job)[2]:
        os.kill(pid, signal.SIGSTOP)
    output = job.finish(code=1, timeout=60)
    assert "see the stack above" in output, output
    assert re.search(r"rank 0 failed at epoch 1 step \d+: no progress for [45]\S* s", output)


# Each process ends itself: the launcher sees what it sees above.
@pytest.mark.parametrize("name", each(NAMES, by_hand=NAMES[1:]))
def test_an_image_that_is_a_pipe_ends_the_run(name, work, tmp_path):
    """Nobody writes to it, so that a worker waits for ever, and each process for another."""
    job = start(name, tmp_path / "c", work, "--dist-timeout", "25", "--data", with_pipes(tmp_path))
    job.wait_for(r"rank \d failed at epoch 1 step \d+: no progress for 25 s")
    job.finish(code=1, timeout=90)


@pytest.mark.full
@needs_hosts
def test_two_hosts_lose_each_other(work, tmp_path):
    """The cable is cut: no connection is reset, nothing comes any more.

    Everything ends by itself, the launchers too. They are started with --node-rank: with the c10d
    rendezvous, torchrun (2.15) asks its store once a second, and once that is cut off it waits for
    the kernel to give up the connection, 15 minutes.
    """
    agent = f"{PYTHON} -m torch.distributed.run --nnodes=2 --nproc-per-node=1 --master-addr=host-a"
    script = [ROOT / "distributed.py", *FLAGS, "--checkpoint-dir", tmp_path / "c"]
    script += ["--dist-timeout", 25]
    with Hosts(tmp_path / "brake", "host-a", "host-b") as hosts:
        nodes = [[*agent.split(), f"--node-rank={i}", *script] for i in (0, 1)]
        jobs = [hosts.start(i, node, work, SLOW) for i, node in enumerate(nodes)]
        at_step(jobs[0], 7)
        hosts.cable("down")
        outputs = [job.finish(1, 200) for job in jobs]  # on an idle machine 31 s
    # torchrun repeats it further to the right.
    said = [re.findall(r"^rank \d failed at epoch 1 step \d+: .*", x, re.M) for x in outputs]
    assert len(said[0]) == len(said[1]) == 1, outputs
    ends_as_straight("distributed", tmp_path / "c", work)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_many_kills(work, tmp_path):
    """Any script, any victim, about thrice a run: while it starts, or soon after any line."""
    names = [name for name in SCRIPTS if name != "horovod" or HOROVODRUN[0].exists()]
    for number in range(36):
        name, folder = names[number % len(names)], tmp_path / str(number)
        for _ in range(3):
            job = start(name, folder, work, "--resume", "auto", "-j", random.choice("012"))
            for _ in range(random.choice([0, random.randrange(1, 25)])):
                if not job.line(time.monotonic() + 60):
                    break  # it has come to its end
            time.sleep(random.uniform(0, 3))
            launcher, training, workers = processes(job)
            if job.process.poll() is None:
                os.kill(random.choice([launcher, *training, *workers]), signal.SIGKILL)
            job.wait(200)
        resume(name, folder, work)
        same_run(folder, straight(name, work))
