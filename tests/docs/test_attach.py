"""python doctor --attach: it names why a job hangs that others have started, and harms none."""

import json
import os
import re
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from conftest import PYTHON, ROOT, Job, each, run, torchrun

from tests.docs.copies import USER, equal, patched
from tests.docs.ranks import be_a_rank, forks
from tests.docs.test_docs import anchors
from tests.ports import free_port

ATTACH = [PYTHON, ROOT / "doctor", "--attach"]
# Where Yama lets a process be read by its parents alone, these ask to be read.
OPEN = "import ctypes; ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(2**64 - 1))\n"
HEAD = (
    OPEN
    + """import os, sys, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.ones(3)
dist.barrier()
print("ready", flush=True)
"""
)


@contextmanager
def job(folder, text, ranks=2, head=HEAD):
    """The process ids of ranks that run a script, which says "ready"."""
    script, output = folder / "train.py", folder / "output.txt"
    script.write_text(head + text)
    output.write_text("")
    known = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    processes = []
    for rank in range(ranks):
        env = {name: str(value) for name, value in (known | {"RANK": rank}).items()}
        given = [str(script)], env, str(folder), str(output), ""
        processes.append(forks.Process(target=be_a_rank, args=given))
        processes[-1].start()
    try:
        until(lambda: output.read_text().count("ready") == ranks, output)
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join(10)


def until(done, output, seconds=150):
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.1)


def attach(*words, code=1, folder=ROOT):
    """What it prints."""
    return run([*ATTACH, *words], folder, env=USER, code=code, timeout=150)


def attach_when_it_stands(pid, code=1):
    """As a user does: again, until nothing moves. A busy machine takes its time."""
    deadline = time.monotonic() + 150
    while True:
        words = [*ATTACH, "--seconds", "1", str(pid)]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode or time.monotonic() > deadline:
            assert done.returncode == code, done.stdout + done.stderr
            return done.stdout


def found(output):
    """(line of the script, text, place) of the finding."""
    line = r"^ (?:\S*train\.py:(\d+)  )?(.*)  → docs/(\S+\.md#\S+)$"
    ((number, text, place),) = re.findall(line, output, re.M)
    return int(number or 0), text, place


def line_of(text, what, head=HEAD):
    lines = (head + text).splitlines()
    return 1 + next(i for i, one in enumerate(lines) if what in one)


NET = """net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
model = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
images = torch.ones(4, 3)
"""
ALONE = "bugs.md#all_reduce-on-rank-0-alone"
# What hangs: (the script, its line that is named, what is said, the place, the exit code).
HANGS = {
    "saved under a rank": (
        NET
        + """def save():
    torch.save(net.state_dict(), "net.pth")
    dist.barrier()
if rank == 0:
    save()
for step in range(9):
    model(images).sum().backward()
""",
        "    dist.barrier()",
        r"rank 0 alone calls barrier: it stands under `if rank == 0 \(line \d+\)`",
        ALONE,
        1,
    ),
    "an early return": (
        """def report(total):
    if rank != 1:
        return
    dist.all_reduce(total)
report(x)
dist.all_gather_object([None, None], rank)
""",
        "dist.all_reduce(total)",
        r"rank 1 alone calls all_reduce: it stands under `if not rank != 1 \(line \d+\)`",
        ALONE,
        1,
    ),
    "a skipped batch": (
        NET
        + """for step in range(9):
    loss = model(images).sum()
    if step == 3 + rank:
        continue
    loss.backward()
""",
        "loss.backward()",
        "waits in backward for gradients that do not come: .*skipped on one rank alone, at `if",
        "bugs.md#a-branch-that-depends-on-a-processs-own-data",
        1,
    ),
    "a group of its members": (
        """if rank == 0:
    group = dist.new_group([0])
both = dist.new_group([0, 1])
dist.all_reduce(x, group=both)
""",
        "both = ",
        r"all ranks must call each new_group\(\), in one order",
        "doctor.md#it-stands-still",
        1,
    ),
    "two that receive": (
        "dist.recv(x, 1 - rank)\n",
        "dist.recv",
        "all ranks wait in recv at .*: each for a message that none sends",
        "doctor.md#it-stands-still",
        1,
    ),
    "a message that is waited for": (
        "for request in dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, 1 - rank)]):\n"
        "    request.wait()\n",
        "request.wait()",
        r"no rank answers: ranks 0 and 1 in an asynchronous call \(train.py:\d+\)",
        "debugging.md#the-flight-recorder",
        3,
    ),
    "another order": (
        """calls = [dist.all_reduce, lambda x: dist.broadcast(x, 0)]
second = lambda: calls[1](x)
if int(os.environ["LOCAL_ORDER"] if "LOCAL_ORDER" in os.environ else rank):
    calls.reverse()
other = torch.distributed.new_group([0, 1])
for call in calls:
    if call is dist.all_reduce:
        dist.all_reduce(x, group=other)
    else:
        dist.broadcast(x, 0)
""",
        "dist.",
        "the ranks do not make the same calls: ",
        "doctor.md#the-processes-do-not-do-the-same",
        1,
    ),
    "a download": (
        "if rank == 0:\n    time.sleep(3600)  # downloads\ndist.barrier()\n",
        "time.sleep",
        r"rank 1 waits in barrier for rank 0, seen at .* `time\.sleep",
        "bugs.md#rank-0-prepares-for-longer-than-the-timeout",
        3,
    ),
    "a file that does not come": (
        NET
        + """def main():
    for step in range(3 - rank):
        model(images).sum().backward()
    while not os.path.exists("epoch.pth"):
        time.sleep(0.5)
main()
""",
        "sum().backward()",
        r"rank 0 waits in .* for rank 1, which is past this loop, `for step in range\(3 - rank\):` "
        r"\(line \d+\): a batch less\? It stands in `while not os\.path\.exists",
        "bugs.md#one-process-has-one-step-more",
        1,
    ),
    "a loader's worker": (
        """class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if index == 5 and rank == 1:
            time.sleep(3600)  # a file server that does not answer
        return index
for item in torch.utils.data.DataLoader(Images(), num_workers=1):
    dist.all_reduce(x)
""",
        "for item in",
        r"rank 1 waits for data at .*; its worker \d+ stands at train\.py:\d+ `time\.sleep.*"
        "rank 0 waits for it",
        "debugging.md#who-waits-where",
        3,
    ),
}


QUICK = ["a skipped batch", "a group of its members", "two that receive"]


@pytest.mark.parametrize("name", each(HANGS, QUICK))
def test_names_why_it_hangs(name, tmp_path):
    text, what, said, place, code = HANGS[name]
    with job(tmp_path, text) as ranks:
        output = attach_when_it_stands(ranks[0].pid, code)
    number, finding, where = found(output)
    assert re.search(said, finding) and where == place, output
    lines = (HEAD + text).splitlines()
    assert what in lines[number - 1], output
    for rank in (0, 1):
        assert re.search(rf"^ ranks? (0 and )?{rank}( and 1)? +stand", output, re.M), output


def test_a_rank_that_was_killed(tmp_path):
    text = """def main(rank):
    if rank == 1:
        time.sleep(3600)
    dist.recv(x, 2 - rank)
main(rank)
"""
    with job(tmp_path, text, ranks=3) as ranks:
        ranks[1].kill()
        ranks[1].join()
        seen = json.loads(written(tmp_path / "seen.json", ranks[0].pid).read_text())
    # The three were no torchrun's: how many there should be is known from what is in the file.
    for one in seen["ranks"]:
        one |= {"size": 3, "here": 3}
    (tmp_path / "seen.json").write_text(json.dumps(seen))
    output = attach(tmp_path / "seen.json", code=3)
    assert "rank 1    no such process" in output and "rank 1 is gone" in output, output


def written(path, pid):
    attach("--seconds", 0.5, "--out", path, pid, code=None)
    return path


LEARNS = (
    NET
    + """for step in range(600):
    optimizer.zero_grad()
    model(torch.rand(4, 3)).sum().backward()
    optimizer.step()
    if rank == 1 and not os.path.exists("looked"):
        time.sleep(0.1)  # it computes nothing that is worth a name: each look is like the last
torch.save(net.state_dict(), f"net{rank}.pth")
dist.barrier()
"""
)


@pytest.mark.full
def test_a_job_that_is_looked_at_ends_with_the_same_weights(tmp_path):
    """Each time it moves; the rank that waits for the other is none that hangs."""
    for name in ("alone", "seen"):
        (tmp_path / name).mkdir()
        head = HEAD + "torch.manual_seed(rank)\n"
        with job(tmp_path / name, LEARNS, head=head) as ranks:
            if name == "seen":
                for words in ([], ["--nonblocking"]):
                    output = attach("--seconds", 1, *words, ranks[1].pid, code=0)
                    assert re.search("it does not hang|no hang by now", output), output
            (tmp_path / name / "looked").touch()
            for process in ranks:
                process.join(60)
            assert [process.exitcode for process in ranks] == [0, 0]
    for rank in (0, 1):
        one, other = (torch.load(tmp_path / n / f"net{rank}.pth") for n in ("alone", "seen"))
        assert equal(one, other)


@pytest.mark.full
def test_a_rank_that_sleeps_while_the_others_go_on(tmp_path):
    text = "if rank == 1:\n    time.sleep(600)\nwhile True:\n    sum(range(10**5))\n"
    with job(tmp_path, text) as ranks:
        output = attach("--seconds", 1, ranks[0].pid, code=0)
    said = found(output)[1]
    assert re.fullmatch(r"rank 0 works \(.*\), and rank 1 is \(train.py:\d+\): no hang.*", said)


def test_a_wait_for_a_rank_that_computes_is_no_hang(tmp_path):
    text = "if rank == 0:\n    while True:\n        sum(range(10**5))\ndist.barrier()\n"
    with job(tmp_path, text) as ranks:
        output = attach("--seconds", 1, ranks[0].pid, code=0)
    assert "rank 1    stands in barrier" in output, output
    assert found(output)[1].startswith("rank 0 works (last seen at train.py:"), output


@pytest.mark.full
def test_a_breakpoint(tmp_path):
    text = """if rank == 0:
    import pdb
    pdb.Pdb(stdin=open(os.pipe()[0]), stdout=sys.stdout).set_trace()
dist.barrier()
"""
    with job(tmp_path, text) as ranks:
        output = attach_when_it_stands(ranks[1].pid, code=3)
    assert found(output)[2] == "debugging.md#stop-in-a-line", output


@pytest.mark.full
def test_a_rank_that_was_stopped(tmp_path):
    with job(tmp_path, "if rank == 0:\n    dist.barrier()\ntime.sleep(3600)\n") as ranks:
        os.kill(ranks[1].pid, signal.SIGSTOP)
        output = attach("--seconds", 0.5, ranks[0].pid, code=3)
        assert f"rank 1 is stopped, by SIGSTOP or a debugger: `kill -CONT {ranks[1].pid}`" in output


def test_every_place_is_a_heading():
    text = "".join(path.read_text() for path in (ROOT / "doctor").glob("attach/*.py"))
    text += (ROOT / "doctor/recorder/compare.py").read_text()
    places = set(re.findall(r'"(\w+\.md)#([\w-]+)"', text))
    assert len(places) > 8
    for page, heading in places:
        assert heading in anchors((ROOT / "docs" / page).read_text()), (page, heading)


# ---- The commands of the page, with torchrun


def commands():
    page = (ROOT / "docs/doctor.md").read_text()
    section = page.partition("## A job that hangs now")[2].partition("\n## ")[0]
    return re.findall(r"^python doctor --attach.*$", section, re.M)


@pytest.mark.full
def test_the_commands_of_the_page(tmp_path):
    """On a mistake of the list; two machines are played by two files, of a rank each."""
    script = tmp_path / "train.py"
    script.write_text(OPEN + (ROOT / "minimal/distributed.py").read_text())
    assert patched(script, "bugs/all_reduce_on_rank_0.diff")
    trains = Job(torchrun(2, script), tmp_path, USER)
    pid = trains.process.pid
    seen = tmp_path / "a.json"
    words = [PYTHON, ROOT / "doctor", "--attach", "--seconds", "2"]
    deadline = time.monotonic() + 200
    while True:  # until the first epoch is over
        done = subprocess.run([*words, "--out", seen, str(pid)], capture_output=True, text=True)
        if done.returncode == 1:
            break
        assert time.monotonic() < deadline, done.stdout + done.stderr
    number, text, place = found(done.stdout)
    assert "dist.all_reduce(correct)" in script.read_text().splitlines()[number - 1]
    assert text.startswith("rank 0 alone calls all_reduce: it stands under `if rank == 0"), text
    assert place == ALONE
    known = json.loads(seen.read_text())
    ranks = [one | {"here": 1, "host": f"n{one['rank']}"} for one in known["ranks"]]
    for command in commands():
        if "--slurm" in command:
            continue  # tests/cluster/test_slurm.py
        if command.endswith("node0.json node1.json"):
            for one, name in zip(ranks, ("node0.json", "node1.json"), strict=True):
                (tmp_path / name).write_text(json.dumps(known | {"ranks": [one]}))
        words = command.replace("PID", str(pid)).split()[2:]
        doctor = [PYTHON, ROOT / "doctor", *words]
        done = subprocess.run(doctor, cwd=tmp_path, capture_output=True, text=True)
        if "several jobs run here" in done.stderr:  # as where tests run side by side
            doctor.append(str(pid))
            done = subprocess.run(doctor, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 1 and found(done.stdout)[2] == ALONE, done.stdout + done.stderr
    assert len(commands()) >= 4
    # One machine alone has half of it.
    half = attach(tmp_path / "node1.json", code=3)
    assert "rank 0    not on this machine, or gone" in half and "join the files" in half, half
    trains.kill(signal.SIGKILL)


# ---- What it needs


def test_without_py_spy(tmp_path):
    """As it says, by pip. A Python beside which there is none."""
    python = tmp_path / "python"
    python.symlink_to(Path(PYTHON).resolve())
    command = [python, ROOT / "doctor", "--attach", 1]
    output = run(command, tmp_path, env={"PATH": "/usr/bin:/bin"}, code=2)
    assert output == " doctor --attach: it needs py-spy: python -m pip install py-spy\n"


def test_no_process():
    assert "no process 4194305" in attach(4194305, code=2)
    assert "was not written by doctor --attach --out" in attach("README.md", code=2)
    assert "abc is neither a process nor a file of --out" in attach("abc", code=2)
    assert "give processes of one job, or files" in attach("1", "README.md", code=2)
    assert "--seconds: 0.5 to 3600" in attach("--seconds", "0", code=2)
    doctor = [PYTHON, ROOT / "doctor"]
    output = run([*doctor, "--json", "x.json", "--attach", "1"], ROOT, env=USER, code=2)
    assert "--attach has no --json and no --format: its file is --out FILE" in output
    assert "12 is no file: --attach 12, if it is a process" in run([*doctor, "12"], ROOT, code=2)


@pytest.mark.parametrize(
    ("root", "container", "scope", "said"),
    [
        (False, False, 1, ['sudo env "PATH=$PATH" python doctor --attach', "ptrace_scope=0"]),
        (True, True, 0, ["docker run --cap-add SYS_PTRACE", 'add: ["SYS_PTRACE"]']),
    ],
)
def test_the_remedy(root, container, scope, said, monkeypatch):
    from doctor.attach import tell

    monkeypatch.setattr(tell.os, "getuid", lambda: 0 if root else 1000)
    monkeypatch.setattr(tell, "in_container", lambda: container)
    monkeypatch.setattr(tell, "scope", lambda: scope)
    text = tell.remedy("Error: Permission denied (os error 13)")
    assert all(one in text for one in said), text
    assert ("sudo" in text) is not root and ("docker" in text) is container


@pytest.mark.full
def test_where_it_may_not_read(tmp_path):
    """A root without the right, as in a container."""
    drop = ["setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"]
    with job(tmp_path, "time.sleep(3600)\n") as ranks:
        output = run([*drop, *ATTACH, ranks[0].pid], tmp_path, env=USER, code=2)
    assert "docker run --cap-add SYS_PTRACE" in output, output
