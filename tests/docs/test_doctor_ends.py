"""How the doctor ends: what it says of a run that fails, was killed or stands still."""

import json
import os
import re
import shutil
import signal
import subprocess

import pytest
from conftest import PYTHON, ROOT, run, soak

from doctor import launch
from doctor.files.hosts import pid_of, who
from tests.docs.copies import USER
from tests.docs.mutant_runs import diagnosed

HEAD = """import os, signal, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.ones(1)
"""


def report(folder, text, *flags, code, timeout=250):
    """What the doctor prints of a script; it runs once."""
    (folder / "train.py").write_text(HEAD + text)
    words = [PYTHON, ROOT / "doctor", "--quick", "--patience=3", *flags, "train.py"]
    output = run(words, folder, env=USER, code=code, timeout=timeout)
    assert "the doctor failed" not in output and "Traceback" not in output.rpartition("mistakes")[2]
    return output


def forked(folder, text, *flags, code):
    """As report(), but for the launcher: the processes are forks."""
    (folder / "run").mkdir()
    found = diagnosed(folder / "run", ["--quick", "--patience=3", *flags], HEAD + text)
    assert found["code"] == code, found["said"]
    return found["said"].replace("script.py", "train.py")


def line(text, what):
    """Its place in the script."""
    lines = (HEAD + text).splitlines()
    return f"train.py:{1 + next(i for i, one in enumerate(lines) if what in one)}"


@pytest.mark.full
def test_a_process_that_was_killed_is_named_first(tmp_path):
    """The other's "Connection closed by peer" is what followed."""
    text = """dist.all_reduce(x)
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(x)
"""
    output = report(tmp_path, text, code=3)
    first = re.findall(r"^ train\.py:\d+  rank .*$", output, re.M)[0]
    # The launcher may have asked for its signal before the doctor has.
    ways = "was ended by SIGKILL after this line|ended without an exception, after this line"
    place = re.escape(line(text, "all_reduce"))
    assert re.match(rf" {place}  rank 1 ({ways})", first), output


def test_of_two_deaths_that_are_seen_at_once_the_terminated_one_is_second(tmp_path):
    """A busy machine may give the doctor no time between them, and their parent has asked."""
    text = "import faulthandler, signal, sys, time\n"
    text += "file = open(sys.argv[1], 'w')\n"
    text += "faulthandler.register(signal.SIGTERM, file, all_threads=False, chain=True)\n"
    text += "print(1, flush=True)\ntime.sleep(60)"
    terminated, killed = (
        subprocess.Popen([PYTHON, "-c", text, tmp_path / name], stdout=subprocess.PIPE)
        for name in ("first", "second")
    )
    for process in (terminated, killed):
        process.stdout.readline()
        (tmp_path / f"{who(process.pid)}.jsonl").write_text('{"kind": "step"}\n')
    (tmp_path / "first").rename(tmp_path / f"{who(terminated.pid)}.jsonl.terminated")
    deaths = launch.Deaths(tmp_path)
    deaths.wait(0)
    killed.kill()
    terminated.terminate()
    assert (killed.wait(), terminated.wait()) == (-signal.SIGKILL, -signal.SIGTERM)
    deaths.wait(0)
    assert deaths.alone == {
        who(killed.pid): {"signal": None, "order": 0},
        who(terminated.pid): {"signal": signal.SIGTERM, "order": 1},
    }


def test_a_process_of_another_machine_is_not_asked_for_and_not_ended(tmp_path):
    """Here its number is that of another process, or of none, which is no death."""
    with subprocess.Popen(["sleep", "60"]) as other:
        with subprocess.Popen(["true"]) as gone:
            pass
        for process in (other, gone):
            (tmp_path / f"{process.pid}-elsewhere.jsonl").write_text('{"kind": "step"}\n')
        deaths = launch.Deaths(tmp_path)
        deaths.wait(0)
        launch.stop(tmp_path, deaths, ended_too=True)
        assert other.poll() is None and not deaths.alone and not deaths.gone
        (tmp_path / f"{other.pid}-elsewhere.jsonl").rename(tmp_path / f"{who(other.pid)}.jsonl")
        deaths.wait(0)
        launch.stop(tmp_path, deaths)
        assert other.wait(5) == -signal.SIGKILL and deaths.gone == {who(other.pid)}
    assert pid_of(who()) == os.getpid() and pid_of("1") is None


@pytest.mark.full
@pytest.mark.parametrize(
    "text",
    [
        "dist.recv(x)",
        "dist.recv(x, src=1 - rank)\ndist.send(x, 1 - rank)",
        "work = dist.irecv(x, src=1 - rank)\nwork.wait()",
        "(work,) = dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, 1 - rank)])\nwork.wait()",
    ],
)
def test_a_hang_at_one_line_ends(text, tmp_path):
    output = (report if text == "dist.recv(x)" else forked)(tmp_path, text, code=1)
    assert "the doctor ended the run: it had stood still for 3 s" in output, output
    assert "rank 0 waits in" in output and "docs/doctor.md#it-stands-still" in output, output


@pytest.mark.full
def test_a_group_that_its_members_alone_make(tmp_path):
    """The next group has another number in each process: they wait for one another in vain."""
    text = """if rank == 0:
    alone = dist.new_group([0])
both = dist.new_group([0, 1])
dist.all_reduce(x, group=both)
"""
    output = forked(tmp_path, text, code=1)
    assert "all processes must call new_group()" in output, output
    assert f" {line(text, 'both = ')}  rank 0 waits in new_group" in output, output


@pytest.mark.full
def test_a_skipped_batch_is_counted(tmp_path):
    """Of what DDP sends, which torch's recorder has noted."""
    text = """net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1))
model = torch.nn.parallel.DistributedDataParallel(net)
for step in range(5):
    loss = model(torch.ones(2, 1)).sum()
    if (rank, step) == (1, 2):
        continue
    loss.backward()
"""
    output = report(tmp_path, text, code=1)
    place = re.escape(line(text, "loss = model"))
    said = rf"^ {place}  rank 1 has left out a backward, .* made 2, the others 3  → docs/bugs\.md#"
    assert re.search(f"{said}a-branch-that-depends", output, re.M), output
    assert "mistakes: 1, hints: 0" in output, output
    last = r"^ recorded by torch: rank \d: call \d+ is the last, call \d+ has ended; the last: "
    assert re.search(last + r"its sum of gradients \[4\] \(train\.py:\d+\)$", output, re.M), output


@pytest.mark.full
def test_a_healthy_wait_is_not_ended(tmp_path):
    """Rank 0 sleeps, as in a download, for longer than the patience; rank 1 waits for it."""
    text = """if rank == 0:
    time.sleep(15)
dist.barrier()
print("came through")
"""
    output = report(tmp_path, text, "--patience=8", code=None)
    assert output.count("came through") == 2 and "ended the run" not in output, output


@pytest.mark.full
def test_a_file_that_is_written_after_a_longer_loop(tmp_path):
    """Rank 0 has a batch more, and rank 1 asks for what rank 0 writes after it."""
    text = """net = torch.nn.Linear(1, 1)
model = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for x in torch.utils.data.DataLoader(torch.ones(5 - rank, 1)):
    model(x).sum().backward()
    optimizer.step()
if rank == 0:
    open("done", "w").close()
while not os.path.exists("done"):
    time.sleep(0.1)
"""
    output = forked(tmp_path, text, code=1)
    said = rf" {line(text, 'backward')}  rank 0 waits in backward at .*, rank 1 is at .*"
    assert re.search(rf"^{said} → docs/bugs\.md#one-process-has-one-step-more$", output, re.M), (
        output
    )
    assert "mistakes: 1" in output and "will the timeout be longer" not in output, output


@pytest.mark.full
def test_a_wait_is_no_mistake_where_all_make_as_many_steps(tmp_path):
    """Rank 0 has a batch more, and leaves it out; then it waits for rank 1, which sleeps."""
    text = """net = torch.nn.Linear(1, 1)
model = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for epoch in range(2):
    for number, x in enumerate(torch.utils.data.DataLoader(torch.ones(5 - rank, 1))):
        if number == 3:
            break
        model(x).sum().backward()
        optimizer.step()
    if rank == 1:
        time.sleep(1000)
"""
    output = forked(tmp_path, text, code=3)
    assert "mistakes: 0" in output and "will the timeout be longer" in output, output


@pytest.mark.full
def test_who_ended_a_wait_without_end_is_said(tmp_path):
    text = """if rank == 0:
    time.sleep(1000)
dist.barrier()
"""
    output = forked(tmp_path, text, code=3)
    said = "the doctor ended the run: it had stood still for 24 s: see --patience"
    assert said in output and "exit code" not in output, output
    assert "hint: rank 0 is at" in output and "will the timeout be longer?" in output, output


@pytest.mark.full
def test_an_endless_loop_ends(tmp_path, monkeypatch):
    """Here after 8 times the patience, not 40: it keeps a core busy."""
    assert launch.BUSY == 40 > launch.IDLE == 8
    monkeypatch.setattr(launch, "BUSY", 8)
    monkeypatch.setattr(launch, "IDLE", 0)
    text = """if rank == 0:
    while True:
        pass
dist.barrier()
"""
    output = forked(tmp_path, text, "--patience=1", code=3)
    assert "it had stood still for 8 s" in output, output


@pytest.mark.full
def test_a_failed_script_is_no_mistake(tmp_path):
    """Its exit code is another; what it had found goes into the file."""
    output = report(tmp_path, "1 / (rank - 1)", "--json=report.json", code=3)
    assert "rank 1 failed: ZeroDivisionError" in output, output
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["found"] == [] and "ZeroDivisionError" in found["failed"][0]


def test_a_folder_that_is_missing_is_said_before_the_run(tmp_path):
    (tmp_path / "train.py").touch()
    words = [PYTHON, ROOT / "doctor", "--json", "no/report.json", "train.py"]
    output = run(words, tmp_path, env=USER, code=2)
    assert "--json no/report.json: there is no such folder" in output, output


WORK = """import torch.distributed as dist

def work(rank, path):
    dist.init_process_group("gloo", f"file://{path}", rank=rank, world_size=2)
    dist.barrier()
    print("worked")
"""
STARTS = """import tempfile
import torch.multiprocessing as mp
from package.work import work

def main():
    mp.spawn(work, (tempfile.mktemp(),), 2)
"""


@pytest.mark.full
@pytest.mark.parametrize("module", [False, soak(True)])
def test_a_script_that_starts_its_processes_in_another_file(module, tmp_path):
    """It is started again, without a launcher. As a file, and as a module."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package/work.py").write_text(WORK)
    (tmp_path / "package/starts.py").write_text(STARTS)
    text = 'from package.starts import main\n\nif __name__ == "__main__":\n    main()\n'
    name = ["-m", "package.train"] if module else ["train.py"]
    (tmp_path / ("package/train.py" if module else "train.py")).write_text(text)
    words = [PYTHON, ROOT / "doctor", "--quick", *name]
    output = run(words, tmp_path, env=USER, code=2, timeout=250)
    assert output.count("worked") == 2 and "looked at 2 processes" in output, output


@pytest.mark.full
def test_the_line_that_asks_for_a_gpu_is_named(tmp_path):
    (tmp_path / "train.py").write_text("import torch\n\nassert torch.cuda.is_available()\n")
    words = [PYTHON, ROOT / "doctor", "--quick", "train.py"]
    output = run(words, tmp_path, env=USER, code=2)
    assert "\n train.py:3  here it asks for a GPU, and is told that there is one: the CPU" in output


@pytest.mark.full
def test_without_docstrings(tmp_path):
    """python -OO: nothing hangs on one."""
    output = run([PYTHON, "-OO", ROOT / "doctor", "--help"], tmp_path, env=USER)
    assert "usage: doctor" in output
    (tmp_path / "train.py").write_text(HEAD + "dist.all_gather([x], torch.ones(1 + rank))\n")
    words = [PYTHON, "-OO", ROOT / "doctor", "--quick", "train.py"]
    output = run(words, tmp_path, env=USER | {"PYTHONOPTIMIZE": "2"}, code=None)
    assert "is given tensors of shape [1] and [2]" in output, output


def test_the_old_name(tmp_path):
    """python doctor.py, of older instructions."""
    assert "usage: doctor" in run([PYTHON, ROOT / "doctor.py", "--help"], tmp_path, env=USER)


@pytest.mark.full
def test_pip_installs_it_as_a_command(tmp_path):
    """From a copy: pip builds in the folder that it is given."""
    for name in ("doctor", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    words = [PYTHON, "-m", "pip", "install", "--quiet", "--no-deps", "--target", "here", "."]
    run(words, tmp_path, env=USER, code=0)
    (tmp_path / "work").mkdir()
    (tmp_path / "work/train.py").write_text(HEAD + "dist.all_gather([x], torch.ones(1 + rank))\n")
    env = USER | {"PYTHONPATH": str(tmp_path / "here")}
    words = [PYTHON, tmp_path / "here/bin/doctor", "--quick", "train.py"]
    output = run(words, tmp_path / "work", env=env, code=None)
    assert "is given tensors of shape [1] and [2]" in output, output


@pytest.mark.full
def test_buffers_that_meet_another_call(tmp_path):
    """DDP sends BatchNorm's statistics before each forward pass, also where nothing is trained."""
    text = """net = torch.nn.Sequential(torch.nn.Linear(4, 999), torch.nn.BatchNorm1d(999))
model = torch.nn.parallel.DistributedDataParallel(net)
for step in range(3):
    model(torch.randn(4, 4)).mean().backward()
    if rank == 0:
        model.eval()
        with torch.no_grad():
            model(torch.randn(4, 4)).sum()
        model.train()
"""
    output = forked(tmp_path, text, code=1)
    place = line(text, "model(torch.randn(4, 4)).sum()")
    said = f" {place}  rank 0 alone calls DDP's model here: it sends its buffers  → docs/bugs.md"
    assert f"{said}#the-wrapped-model-on-rank-0-alone\n" in output, output


@pytest.mark.full
def test_a_file_that_both_write(tmp_path):
    text = """open("log.csv", "w").write(f"{rank}")
open(f"log{rank}.csv", "w").write(f"{rank}")
"""
    output = report(tmp_path, text, code=2)
    said = f" {line(text, 'log.csv')}  hint: 2 processes write log.csv  → docs/bugs.md"
    assert f"{said}#every-process-saves\n" in output, output


@pytest.mark.full
def test_the_order_of_a_set_where_strings_have_other_hashes(tmp_path):
    """As in processes that a launcher starts: it is certain."""
    text = """for name in {"right", "all"}:
    dist.all_reduce(x)
"""
    output = report(tmp_path, text, code=1)
    place = line(text, "for name in")
    assert f" {place}  the order of this set may be another in each process" in output, output
