"""The full scripts, by real launchers and as forks: they train, agree, evaluate and resume."""

import fcntl
import itertools
import json
import os
import pty
import re
import shutil
import socket
import stat
import struct
import subprocess
import sys
import termios
import time

import numpy as np
import pytest
import torch
from conftest import (
    PYTHON,
    ROOT,
    SMALL,
    Job,
    forked,
    forking,
    full,
    last_result,
    load,
    rows,
    run,
    same_state,
    torchrun,
)
from PIL import Image
from torch.nn.functional import cross_entropy, dropout

from common.images import ImageFolder, centre_crop
from common.seeds import seed_step
from tests import nets

DATAPARALLEL, DISTRIBUTED = forked("dataparallel.py"), forked("distributed.py")
SPAWN = forked("multiprocessing_distributed.py")
LAUNCH = [PYTHON, "-m", "torch.distributed.launch", str(ROOT / "distributed.py")]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
NORMED = (
    "--arch tests.nets:normed --image-size 24 --batch-size 48 --epochs 2 --max-steps 40".split()
)


def ranks(count):
    """distributed.py with `count` processes, where how they are started is not the point."""
    return forked("distributed.py", count)


def launch(processes):
    """The old launcher, on a port of its own: it has no --standalone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    head, script = LAUNCH[:-1], LAUNCH[-1]
    return [*head, f"--nproc_per_node={processes}", f"--master_port={port}", script]


@pytest.mark.parametrize(
    "command",
    [
        [PYTHON, ROOT / "dataparallel.py"],
        full([PYTHON, ROOT / "distributed.py"]),
        torchrun(2),
        LAUNCH,
        full([PYTHON, ROOT / "multiprocessing_distributed.py"]),
    ],
    ids=["dataparallel", "python", "torchrun", "launch", "spawn"],
)
def test_trains_on_the_digits_with_the_default_model(command, work, tmp_path):
    command = launch(4) if command is LAUNCH else command  # it looks for a free port
    flags = "--max-steps 6 -p 2 --warmup-epochs 0 --image-size 32 --checkpoint-dir".split()
    output = run([*command, *flags, tmp_path / "c"], work)
    last_result(output)
    losses = [float(x) for x in re.findall(r"loss ([\d.]+) \(", output)]
    assert losses[-1] < losses[0], output
    (row,) = rows(tmp_path / "c")
    assert (row["epoch"], row["step"], row["batch_size"]) == (0, 6, 64)
    assert row["images_per_second"] > 0 and 0 <= row["data_time"] < 1
    assert re.search(r"global batch 64 = \d x \d+; learning rate 0.025 = 0.1 x 64 / 256", output)
    assert re.search(r"^epoch 0 \[6/6\]  \d+ img/s", output, re.M), output
    assert "arn" not in output.replace("learning", "").split("processes: ")[-1], output


def test_launchers_write_the_same_weights(work, tmp_path):
    env = ONE_THREAD | forking()
    for name, command in {"a": torchrun(2), "b": launch(2), "c": [*SPAWN, "--nprocs=2"]}.items():
        run([*command, *NORMED, "--checkpoint-dir", tmp_path / name], work, env=env)
    states = [load(tmp_path / name) for name in "abc"]
    assert same_state(states[0], states[1]) and same_state(states[0], states[2])
    metrics = [rows(tmp_path / name, timings=False) for name in "abc"]
    assert metrics[0] == metrics[1] == metrics[2]
    assert (states[0]["epoch"], states[0]["step"]) == (1, 11)


def test_dataparallel_on_a_cpu_is_distributed_with_one_process(work, tmp_path):
    for name, command in {"a": DATAPARALLEL, "b": DISTRIBUTED}.items():
        run([*command, *NORMED, "--checkpoint-dir", tmp_path / name], work)
    assert same_state(load(tmp_path / "a"), load(tmp_path / "b"))


def test_any_number_of_processes_trains_the_same(work, tmp_path):
    """Without BatchNorm, with augmentation: only the order of summation differs."""
    for n in (1, 2, 4):
        command = [*forked(ranks=n), *SMALL, "--checkpoint-dir", tmp_path / str(n)]
        run(command, work, env=ONE_THREAD)
    one, *others = (load(tmp_path / str(n)) for n in (1, 2, 4))
    assert one["epoch"] == 2
    for other in others:
        for key, weight in one["state_dict"].items():
            torch.testing.assert_close(weight, other["state_dict"][key], atol=2e-4, rtol=2e-3)
    losses = [rows(tmp_path / str(n))[-1]["train_loss"] for n in (1, 2, 4)]
    assert max(losses) - min(losses) < 1e-4
    # Another seed differs far more: the tolerance means something.
    other = [*DISTRIBUTED, *SMALL, "--seed", "1", "--checkpoint-dir", tmp_path / "seed"]
    run(other, work)
    assert abs(rows(tmp_path / "seed")[-1]["train_loss"] - losses[0]) > 5e-3


@pytest.fixture(scope="module")
def odd_digits(work):
    """53 and 3 images to validate, in folders some of which are empty; and a checkpoint."""
    roots = {}
    for count in (53, 3):
        root = work / f"odd{count}"
        shutil.copytree(work / "data/digits/train", root / "train")
        files = sorted((work / "data/digits/val").glob("*/*.png"), key=lambda path: path.name)
        for digit in range(10):
            (root / "val" / str(digit)).mkdir(parents=True)
        for path in [f for f in files if f.parent.name not in "07"][:count]:
            shutil.copy(path, root / "val" / path.parent.name)
        roots[count] = root
    flags = ["--arch", "tests.nets:normed", "--image-size", "24", "--batch-size", "24"]
    train = ["--max-steps", "60", "--epochs", "2", "--checkpoint-dir", str(work / "odd")]
    run([*DISTRIBUTED, *flags, *train], work)
    return roots, flags, work / "odd" / "checkpoint.pth"


def plain_loop(root, checkpoint):
    """What an evaluation has to give, image by image."""
    net = nets.normed(10)
    net.load_state_dict(load(checkpoint.parent)["state_dict"])
    net.eval()
    dataset = ImageFolder(str(root / "val"), None)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    sums = torch.zeros(3, dtype=torch.float64)
    for i in range(len(dataset)):
        pixels = torch.from_numpy(np.array(Image.open(dataset.path(i)).convert("RGB")))
        image = centre_crop(pixels.permute(2, 0, 1), 24)
        image = (image / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
        with torch.no_grad():
            scores = net(image[None])
        target = torch.tensor([int(dataset.path(i).split("/")[-2])])
        order = scores[0].argsort(descending=True).tolist()
        loss = cross_entropy(scores, target).item()
        hits = [100 * (int(target) in order[:k]) for k in (1, 5)]
        sums += torch.tensor([loss, *hits], dtype=torch.float64)
    return len(dataset), (sums / len(dataset)).tolist()


@pytest.mark.parametrize("count", [53, full(3)])
def test_evaluation_is_exact(odd_digits, work, count):
    roots, flags, checkpoint = odd_digits
    length, expected = plain_loop(roots[count], checkpoint)
    assert length == count
    flags = [*flags, "--data", roots[count], "--evaluate", "--resume", checkpoint]
    before = sorted(work.rglob("*"))
    for command in (*map(ranks, (1, 2, 3, 4)), DATAPARALLEL):
        loss, acc1, acc5 = last_result(run([*command, *flags], work))
        assert loss == pytest.approx(expected[0], abs=1.01e-4)
        assert (acc1, acc5) == pytest.approx(expected[1:], abs=1e-3)
    assert sorted(work.rglob("*")) == before  # it writes nothing


def test_dataparallel_validates_on_all_gpus(work):
    """By the wrapped model. On a CPU that calls the plain one: counted is that it is asked."""
    code = "import torch, dataparallel; forward = torch.nn.DataParallel.forward\n"
    code += "def told(*x): print('asked', len(x[1])); return forward(*x)\n"
    code += "torch.nn.DataParallel.forward = told; dataparallel.main()"
    output = run([*forked("-c"), code, *SMALL, "-e"], work, env={"PYTHONPATH": str(ROOT)})
    assert sum(map(int, re.findall(r"^asked (\d+)$", output, re.M))) == 360


def test_dropout_is_another_in_each_step_and_rank():
    def mask(*position):
        seed_step(*position)
        return dropout(torch.ones(64), 0.5)

    here, others = (0, 1, 2, 3), [(9, 1, 2, 3), (0, 9, 2, 3), (0, 1, 9, 3), (0, 1, 2, 9)]
    assert mask(*here).equal(mask(*here))
    assert not any(mask(*here).equal(mask(*other)) for other in others)


@pytest.mark.parametrize(
    "command", [ranks(2), full(SPAWN), DATAPARALLEL], ids=["ddp", "spawn", "dp"]
)
def test_stopped_and_resumed_is_straight_through(command, work, tmp_path):
    """In mid-epoch, at another print frequency; the same script afresh would not pass."""
    straight = [*command, *NORMED, "--checkpoint-dir", tmp_path / "a"]
    first = [*command, *NORMED, "--checkpoint-dir", tmp_path / "b", "--checkpoint-freq", "5"]
    run(straight, work, env=ONE_THREAD)
    job = Job([*first, "--print-freq", "1"], work, ONE_THREAD)
    job.wait_for(r"epoch 0 \[17/")
    job.kill()
    job.wait(30)
    state = load(tmp_path / "b")
    assert state["epoch"] == 0 and state["step"] >= 15
    output = run([*first, "--resume", "auto"], work, env=ONE_THREAD)
    assert f"at epoch 0 step {state['step']}" in output
    assert same_state(load(tmp_path / "a"), load(tmp_path / "b"))
    assert rows(tmp_path / "a", timings=False) == rows(tmp_path / "b", timings=False)


def test_any_script_resumes_any_other(work, tmp_path):
    folder = tmp_path / "c"
    steps = 0
    for command in (ranks(2), DATAPARALLEL, SPAWN, ranks(4)):
        steps += 9
        flags = [*NORMED[:-1], str(steps), "--checkpoint-dir", folder]
        output = run([*command, *flags, *(["--resume", "auto"] if steps > 9 else [])], work)
        state = load(folder)
        assert state["epoch"] * 29 + state["step"] == steps
        assert set(state["state_dict"]) == set(nets.normed(10).state_dict())
        assert steps == 9 or "resumed from" in output
    assert [row["step"] for row in rows(folder)] == [9, 18, 27, 0, 7]


def test_a_finished_run_says_so(work, tmp_path):
    command = [*DISTRIBUTED, *SMALL, "--max-steps", "3", "--checkpoint-dir", tmp_path / "c"]
    run(command, work)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "c").glob("*.pth")}
    output = run([*command, "--resume", "auto"], work)
    assert "nothing left to train: 3 of 3 steps are done" in output
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "c").glob("*.pth")}


@pytest.mark.full
def test_a_folder_that_holds_a_run_is_refused(work, tmp_path):
    """With every script; nothing in it or beside it is touched, and --resume auto goes on."""
    folder = tmp_path / "c"
    flags = [*SMALL, "--checkpoint-dir", folder, "--max-steps"]
    run([*DISTRIBUTED, *flags, "1"], work)
    before = {path: (path.stat().st_ino, path.read_bytes()) for path in folder.iterdir()}
    message = f"error: {folder} holds a run (checkpoint.pth): go on with --resume auto, "
    message += "or give another --checkpoint-dir\n"
    for command in (DISTRIBUTED, DATAPARALLEL, SPAWN):
        assert run([*command, *flags, "2"], work, code=2) == message
    assert {path: (path.stat().st_ino, path.read_bytes()) for path in folder.iterdir()} == before
    assert list(tmp_path.iterdir()) == [folder]
    output = run([*DISTRIBUTED, *flags, "2", "--resume", "auto"], work)
    assert f"resumed from {folder}/checkpoint.pth at epoch 0 step 1\n" in output
    assert load(folder)["step"] == 2


@pytest.mark.full
def test_two_runs_at_once(work, tmp_path):
    jobs = [
        Job([*SPAWN, *SMALL, "--checkpoint-dir", tmp_path / name], work, ONE_THREAD)
        for name in "ab"
    ]
    for job in jobs:
        code, output = job.wait(120)
        assert code == 0, output
    assert same_state(load(tmp_path / "a"), load(tmp_path / "b"))


def test_rendezvous_file_is_private(work, tmp_path):
    """While it trains, the rendezvous is in a folder that only this user can enter."""
    temporary = tmp_path / "t"
    temporary.mkdir(mode=0o777)
    command = [*SPAWN, *SMALL, "--checkpoint-dir", tmp_path / "c"]
    job = Job(command, work, {"TMPDIR": str(temporary)})
    job.wait_for("global batch")
    stores = list(temporary.rglob("store"))
    assert stores
    assert all(stat.S_IMODE(store.parent.stat().st_mode) == 0o700 for store in stores)
    assert job.wait(120)[0] == 0
    assert not list(temporary.rglob("store"))


def test_two_agents_as_two_nodes(work, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = [
        "-m torch.distributed.run --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d".split(),
        ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "two-nodes"],
    ]
    command = [PYTHON, *nodes[0], *nodes[1], ROOT / "distributed.py", *NORMED]
    env = ONE_THREAD | forking()
    jobs = [Job([*command, "--checkpoint-dir", tmp_path / "a"], work, env) for _ in "01"]
    outputs = [job.wait(150) for job in jobs]
    assert [code for code, _ in outputs] == [0, 0], outputs
    assert sorted("global batch 48 = 2 x 24" in output for _, output in outputs) == [False, True]
    run([*ranks(2), *NORMED, "--checkpoint-dir", tmp_path / "b"], work, env=ONE_THREAD)
    assert same_state(load(tmp_path / "a"), load(tmp_path / "b"))


ORDERS = """
import sys
from {module} import TrainSampler, main
keys = TrainSampler.__iter__

def told(self):
    order = list(keys(self))
    print("order", *(index for _, index in order[:20]))
    return iter(order)

TrainSampler.__iter__ = told
sys.exit(main())
"""


@pytest.mark.parametrize("module", ["distributed", "dataparallel", "fsdp_distributed"])
def test_each_epoch_has_an_order_of_its_own(module, work, tmp_path):
    flags = [*SMALL, "--max-steps", "31", "--checkpoint-dir", tmp_path / "c"]
    code, env = ORDERS.format(module=module), {"PYTHONPATH": str(ROOT)}
    output = run([*forked("-c"), code, *flags], work, env=env)
    orders = re.findall(r"^order ([\d ]+)$", output, re.M)
    assert len(orders) == len({*orders}) == 2, output


COUNTER = """
import collections, json, os, sys
import torch, torch.distributed as dist
import {module} as script

calls = collections.Counter()

def counted(owner, name):
    function = getattr(owner, name)
    def count(*args, **kwargs):
        calls[name] += 1
        return function(*args, **kwargs)
    setattr(owner, name, count)

for name in ("item", "tolist", "__float__", "__int__", "__bool__", "cpu", "numpy"):
    counted(torch.Tensor, name)
for name in ("all_reduce", "barrier", "broadcast", "all_gather", "all_gather_object", "reduce"):
    counted(dist, name)
try:
    script.main()
finally:
    with open(sys.argv[0] + os.environ["RANK"], "w") as file:
        json.dump(calls, file)
"""


def test_a_step_waits_for_nothing_but_its_gradients(work, tmp_path):
    """Four times the steps, and not one more collective or number read."""
    counts = {}
    for steps in (6, 24):
        script = tmp_path / f"count{steps}.py"
        script.write_text(COUNTER.format(module="distributed"))
        flags = ["--max-steps", str(steps), "--print-freq", "100", "--workers", "1"]
        flags += ["--checkpoint-dir", str(tmp_path / str(steps))]
        env = {"PYTHONPATH": str(ROOT), **ONE_THREAD}
        run([*forked(script, ranks=2), *SMALL, *flags], work, env=env)
        counts[steps] = [
            json.loads((tmp_path / f"count{steps}.py{rank}").read_text()) for rank in "01"
        ]
    assert counts[6] == counts[24]
    for calls in counts[6]:
        assert calls["all_reduce"] == 3  # same checkpoint everywhere; the print; the validation
        assert calls["barrier"] == 1 and "broadcast" not in calls


@pytest.mark.parametrize(
    "script", ["distributed", "dataparallel", full("multiprocessing_distributed")]
)
def test_a_script_and_common_work_elsewhere(script, work, tmp_path):
    shutil.copy(ROOT / f"{script}.py", tmp_path)
    shutil.copytree(ROOT / "common", tmp_path / "common")
    (tmp_path / "mine.py").write_text((ROOT / "tests/nets.py").read_text())
    command = f"{PYTHON} {script}.py --arch mine:plain --image-size 24 --max-steps 3".split()
    last_result(run(command, tmp_path, env={} if script == "distributed" else forking()))
    left = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}
    assert left == {f"{script}.py", "common", "mine.py", "data", "checkpoints"}


def test_a_bar_at_a_terminal_and_lines_elsewhere(work, tmp_path):
    command = [
        PYTHON,
        str(ROOT / "distributed.py"),
        *SMALL,
        "--checkpoint-dir",
        str(tmp_path / "c"),
    ]
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    process = subprocess.Popen(command, cwd=work, stdout=follower, stderr=follower)
    os.close(follower)
    shown, deadline = b"", time.monotonic() + 90
    while time.monotonic() < deadline:
        try:
            shown += os.read(leader, 4096)
        except OSError:  # the other end is closed
            break
    assert process.wait(timeout=10) == 0
    text = shown.decode()
    assert "\r" in text.replace("\r\n", "") and "epoch 1 100%|█" in text and "img/s" in text
    assert len(re.findall(r"^ \* loss", text, re.M)) == 2


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_on_a_cpu(precision, work, tmp_path):
    flags = [*SMALL, "--precision", precision, "--checkpoint-dir", tmp_path / "c"]
    losses = [float(x) for x in re.findall(r"loss ([\d.]+) \(", run([*ranks(2), *flags], work))]
    assert losses[-1] < losses[0]
    assert bool(load(tmp_path / "c")["scaler"]) == (precision == "fp16")


@pytest.mark.full
@pytest.mark.parametrize("script", ["distributed.py", "fsdp_distributed.py"])
def test_compiled_trains_alike(script, work, tmp_path):
    for name, flags in {"a": [], "b": ["--compile"]}.items():
        command = [*forked(script, 2), *SMALL, "--max-steps", "4", *flags]
        run([*command, "--checkpoint-dir", tmp_path / name], work, timeout=300, env=ONE_THREAD)
    a, b = load(tmp_path / "a")["state_dict"], load(tmp_path / "b")["state_dict"]
    assert a.keys() == b.keys()
    for key in a:
        torch.testing.assert_close(a[key], b[key], atol=1e-4, rtol=1e-3)


def test_learning_rate_and_batch_semantics():
    sys.path.insert(0, str(ROOT))
    from types import SimpleNamespace

    from distributed import learning_rate

    args = SimpleNamespace(lr=0.1, batch_size=1024, warmup_epochs=5, epochs=90)
    rates = [learning_rate(args, epoch / 10) for epoch in range(900)]
    assert max(rates) == pytest.approx(0.4) == rates[50]
    assert all(a < b for a, b in itertools.pairwise(rates[1:51])) and 0 < rates[0] < 0.01
    assert all(a > b for a, b in itertools.pairwise(rates[50:])) and rates[-1] < 1e-5
