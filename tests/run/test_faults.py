"""What fails in the middle of a run: a full disk, a lost host, a process that hangs.

The run ends by itself, says which rank failed where, and what it had saved stays.
"""

import os
import re
import shutil
import signal
import subprocess
import time

import pytest
from conftest import ONE_THREAD, PYTHON, ROOT, SMALL, full, load, python, run, same_state

from tests.hosts import Hosts, needs_hosts
from tests.launched import FLAGS, SCRIPTS, finish, processes, same_run, start, straight


@pytest.fixture
def disk(tmp_path):
    """A folder on a disk of 400 KB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.getuid() != 0:
        pytest.skip("needs root to mount a disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "none", folder], check=True)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.full
def test_a_full_disk_leaves_the_old_checkpoint(disk, work):
    folder = disk / "c"
    finish(start("alone", folder, work, "--max-steps", "5"))
    before = load(folder)
    room, filler = shutil.disk_usage(disk).free, disk / "filler"
    subprocess.run(["fallocate", "-l", str(room - 8192), filler], check=True)
    output = finish(start("alone", folder, work, "--resume", "auto"), code=1)
    where = r"rank 0 failed at epoch 0 step 10: cannot write .*/checkpoint.pth: .*No space left"
    assert re.search(where, output), output
    assert same_state(load(folder), before) and not list(folder.glob("*.tmp"))
    filler.unlink()
    finish(start("alone", folder, work, "--resume", "auto"))
    assert same_state(load(folder), load(straight("alone", work)))


@pytest.mark.parametrize("then", [full("deleted"), "another"])
def test_a_folder_that_is_moved_away_under_a_run(then, work, tmp_path):
    """Its path may belong to another run by then: that one's checkpoint is not replaced."""
    folder = tmp_path / "c"
    job = start("dataparallel", folder, work, "--epochs", "99", "--max-steps", "999")
    job.wait_for(r"epoch 0 \[6/")
    os.kill(job.process.pid, signal.SIGSTOP)
    folder.rename(tmp_path / "moved")
    if then == "another":
        finish(start("dataparallel", folder, work, "--max-steps", "1"))
    os.kill(job.process.pid, signal.SIGCONT)
    output = finish(job, code=1)
    (said,) = re.findall(r"rank 0 failed at epoch 0 step \d+: (.*)", output)
    assert str(folder / "checkpoint.pth") in said and "untouched" not in said
    if then == "another":
        assert load(folder)["step"] == 1
    else:
        assert not folder.exists()
    assert load(tmp_path / "moved")["step"] % 5 == 0


def test_an_image_that_cannot_be_read_is_named(work, tmp_path):
    """By the process that met it, in a loader worker too."""
    data = tmp_path / "data"
    shutil.copytree(work / "data/digits", data)
    path = data / "train/3/broken.png"
    path.write_bytes(b"no image")
    command = [*python(), *SMALL, "-b", "1438", "-j", "1", "--data", data, "--checkpoint-dir"]
    last = run([*command, tmp_path / "c"], work, code=1).splitlines()[-1]
    assert re.fullmatch(rf"rank 0 failed at epoch 0 step 0: .*cannot read image {path}: .*", last)


@pytest.mark.full
def test_a_stopped_process_is_missed_by_name(work, tmp_path):
    """SIGSTOP: it holds its connections and says nothing."""
    job = start("distributed", tmp_path / "c", work, "--dist-timeout", "10")
    job.wait_for(r"epoch 0 \[13/")
    os.kill(processes(job)[1][1], signal.SIGSTOP)
    sent = time.monotonic()
    code, output = job.wait(90)
    assert code == 1 and time.monotonic() - sent < 10 + 7 + 30 + 8
    found = re.findall(r"rank (\d) failed at epoch 0 step \d+: .*rank (\d) did not respond", output)
    assert [{"0", "1"}] == [set(pair) for pair in found], output
    finish(start("distributed", tmp_path / "c", work, "--resume", "auto"))
    same_run(tmp_path / "c", straight("distributed", work))


@pytest.mark.parametrize("name", ["dataparallel", full("distributed")])
def test_a_run_that_waits_for_images_ends(name, work, tmp_path):
    """The loader's worker is stopped: the main thread would wait for it without limit."""
    job = start(name, tmp_path / "c", work, "--dist-timeout", "5")
    job.wait_for(r"epoch 0 \[13/")
    for pid in processes(job)[2]:
        os.kill(pid, signal.SIGSTOP)
    code, output = job.wait(60)
    assert code == 1 and "see the stack above" in output, output
    assert re.search(r"rank \d failed at epoch 0 step \d+: no progress for [45]\S* s", output)


@pytest.mark.full
@pytest.mark.parametrize("name", ["distributed", "dataparallel"])
def test_a_closed_stdout_ends_no_run(name, work, tmp_path):
    """>&- in a shell: what is printed is lost, and nothing else."""
    command, env = SCRIPTS[name]
    shell = ["bash", "-c", 'exec "$@" >&-', "bash", *command, *FLAGS]
    shell += ["--checkpoint-dir", tmp_path / "c"]
    output = run(shell, work, env=ONE_THREAD | env)
    assert "Traceback" not in output and "rank" not in output, output
    same_run(tmp_path / "c", straight(name, work))
    # What is wrong is still said.
    output = run(shell, work, code=1 if name == "distributed" else 2)
    assert output.count("error: ") == 1 and "holds a run (checkpoint.pth): " in output


def start_on(hosts, work, folder, *more):
    """A torchrun on each host."""
    agent = f"{PYTHON} -m torch.distributed.run --nnodes=2 --nproc-per-node=1 --master-addr=host-a"
    command = [ROOT / "distributed.py", *FLAGS, "--checkpoint-dir", folder, *more]
    return [
        hosts.start(i, [*agent.split(), f"--node-rank={i}", *command], work, ONE_THREAD)
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
        jobs[0].wait_for(r"epoch 0 \[13/")
        hosts.cable("down")
        ended = [job.wait(limit + 30 + 15) for job in jobs]  # on a machine of its own 16 s
        codes, outputs = zip(*ended, strict=True)
        said = [re.findall(r"rank \d failed at epoch 0 step \d+: .*", text) for text in outputs]
        assert codes == (1, 1) and len(said[0]) == len(said[1]) == 1, outputs
        assert "rank 1 did not respond" in said[0][0], outputs
        hosts.cable("up")
        codes = [job.wait(120) for job in start_on(hosts, work, folder, "--resume", "auto")]
        assert [code for code, _ in codes] == [0, 0], codes
    same_run(folder, straight("distributed", work))
