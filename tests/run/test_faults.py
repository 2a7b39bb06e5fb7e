"""What fails in the middle of a run: a lost host, a bad image, a process that hangs.

The run ends by itself, says which rank failed where, and what it had saved stays.
"""

import os
import random
import re
import shutil
import signal
import time

import pytest
from conftest import HOROVODRUN, ONE_THREAD, PYTHON, ROOT, load, needs_horovod

from tests.hosts import Hosts, needs_hosts
from tests.launched import FLAGS, SCRIPTS, SLOW, processes, resume, same_run, start, straight


def test_a_folder_that_is_moved_away_under_a_run(work, tmp_path):
    """Its path belongs to another run by then: that one's checkpoint is not replaced."""
    folder = tmp_path / "c"
    job = start("dataparallel", folder, work, "--epochs", "99", "--max-steps", "999")
    job.wait_for(r"epoch 1/\d+ \[6/")
    job.process.send_signal(signal.SIGSTOP)
    folder.rename(tmp_path / "moved")
    start("dataparallel", folder, work, "--max-steps", "1").finish()
    job.process.send_signal(signal.SIGCONT)
    (said,) = re.findall(r"rank 0 failed at epoch 1 step \d+: (.*)", job.finish(code=1))
    assert str(folder / "checkpoint.pth") in said
    assert load(folder)["step"] == 1 and load(tmp_path / "moved")["step"] % 5 == 0


def test_an_image_that_cannot_be_read_is_named(work, tmp_path):
    """By the process that met it, in a loader worker too."""
    data = tmp_path / "data"
    shutil.copytree(work / "data/digits", data)
    path = data / "train/3/broken.png"
    path.write_bytes(b"no image")
    job = start("alone", tmp_path / "c", work, "-b", "1438", "--data", data)
    last = job.finish(code=1).splitlines()[-1]
    assert re.fullmatch(rf"rank 0 failed at epoch 1 step 0: .*cannot read image {path}: .*", last)


@pytest.mark.full
@pytest.mark.parametrize("name", ["distributed", "horovod"])
def test_a_stopped_process_is_missed(name, work, tmp_path):
    """SIGSTOP: it holds its connections and says nothing. Horovod itself would only warn."""
    if name == "horovod":
        needs_horovod()
    job = start(name, tmp_path / "c", work, "--dist-timeout", "10")
    job.wait_for(r"epoch 1/\d+ \[13/")
    stopped = processes(job)[1][-1]
    os.kill(stopped, signal.SIGSTOP)
    output = job.wait_for(r"rank \d failed at epoch 1 step \d+: ")
    assert name == "horovod" or re.search(r"rank \d did not respond", output), output
    os.kill(stopped, signal.SIGCONT)  # a launcher's SIGTERM does not end what is suspended
    job.finish(code=1, timeout=60)
    resume(name, tmp_path / "c", work)
    same_run(tmp_path / "c", straight(name, work))


def test_a_run_that_waits_for_images_ends(work, tmp_path):
    """The loader's workers are stopped: the main thread would wait for them without limit."""
    job = start("dataparallel", tmp_path / "c", work, "--dist-timeout", "5")
    job.wait_for(r"epoch 1/\d+ \[13/")
    for pid in processes(job)[2]:
        os.kill(pid, signal.SIGSTOP)
    output = job.finish(code=1, timeout=60)
    assert "see the stack above" in output, output
    assert re.search(r"rank 0 failed at epoch 1 step \d+: no progress for [45]\S* s", output)


def start_on(hosts, work, folder, *more):
    """A torchrun on each host."""
    agent = f"{PYTHON} -m torch.distributed.run --nnodes=2 --nproc-per-node=1 --master-addr=host-a"
    command = [ROOT / "distributed.py", *FLAGS, "--checkpoint-dir", folder, *more]
    return [
        hosts.start(i, [*agent.split(), f"--node-rank={i}", *command], work, ONE_THREAD | SLOW)
        for i in (0, 1)
    ]


@pytest.mark.full
@needs_hosts
def test_two_hosts_lose_each_other(work, tmp_path):
    """The cable is cut: no connection is reset, nothing comes any more.

    Everything ends by itself, the launchers too. They are started with --node-rank: with the c10d
    rendezvous, torchrun (2.15) asks its store once a second, and once that is cut off it waits for
    the kernel to give up the connection, 15 minutes.
    """
    folder, limit = tmp_path / "c", 10
    with Hosts("host-a", "host-b") as hosts:
        jobs = start_on(hosts, work, folder, "--dist-timeout", limit)
        jobs[0].wait_for(r"epoch 1/\d+ \[13/")
        hosts.cable("down")
        outputs = [job.finish(1, limit + 30 + 15) for job in jobs]  # on an idle machine 16 s
        # torchrun repeats it further to the right.
        line = r"^rank \d failed at epoch 1 step \d+: .*"
        said = [re.findall(line, text, re.M) for text in outputs]
        assert len(said[0]) == len(said[1]) == 1 and "rank 1 did not respond" in said[0][0], outputs
        hosts.cable("up")
        for job in start_on(hosts, work, folder, "--resume", "auto"):
            job.finish()
    same_run(folder, straight("distributed", work))


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_many_kills(work, tmp_path):
    """Any script, any victim, about thrice a run: while it starts, or soon after any line."""
    names = [name for name in SCRIPTS if name != "horovod" or HOROVODRUN[0].exists()]
    kills = 0
    for number in range(36):
        name, folder = names[number % len(names)], tmp_path / str(number)
        for _ in range(3):
            job = start(name, folder, work, "--resume", "auto", "-j", random.choice("012"))
            for _ in range(random.choice([0, random.randrange(1, 25)])):
                if not job.line(time.monotonic() + 60):
                    break  # it has come to its end
            time.sleep(random.uniform(0, 3))
            victims = [pid for group in ([job.process.pid], *processes(job)[1:]) for pid in group]
            if job.process.poll() is None:
                os.kill(random.choice(victims), signal.SIGKILL)
                kills += 1
            job.wait(200)  # torchrun's orphans end after 77 s, on an idle machine
        resume(name, folder, work)
        same_run(folder, straight(name, work))
        print(f"run {number}, {name}: {kills} kills so far")
