"""Every way of starting a script trains the same, evaluates every image once, and needs no other.

Each strategy is started once by its own launcher: FSDP, Apex, Horovod and Slurm in tests/cluster.
"""

import json
import re
import shutil
import socket
import stat

import numpy as np
import pytest
import torch
from conftest import (
    ONE_THREAD,
    PYTHON,
    ROOT,
    SMALL,
    Job,
    assert_close,
    full,
    last_result,
    load,
    python,
    rows,
    run,
    same_state,
    torchrun,
)
from PIL import Image
from torch.nn.functional import cross_entropy

from common.images import ImageFolder, centre_crop
from tests import nets
from tests.launched import FLAGS, finish, same_run, start, straight

IN_ROOT = {"PYTHONPATH": str(ROOT)}  # for code that is not beside common/
NORMED = "--arch tests.nets:normed --image-size 24 --batch-size 48 --epochs 2 -j 1".split()


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_the_default_model_learns_the_digits(work, tmp_path):
    """Plain python is a group of one, and needs no flag."""
    flags = "--max-steps 6 -p 2 --warmup-epochs 0 --checkpoint-dir".split()
    output = run([*python(), *flags, tmp_path / "c"], work)
    losses = [float(x) for x in re.findall(r"loss ([\d.]+) \(", output)]
    assert last_result(output)[0] > 0 and losses[-1] < losses[0], output
    (row,) = rows(tmp_path / "c")
    assert (row["epoch"], row["step"], row["batch_size"]) == (0, 6, 64)
    assert row["images_per_second"] > 0 and 0 <= row["data_time"] < 1
    assert load(tmp_path / "c")["arch"] == "resnet18"


@pytest.mark.parametrize("name", ["dataparallel", "distributed", "multiprocessing"])
def test_each_strategy_trains_the_same(name, work, tmp_path):
    """To the bit, with BatchNorm, dropout and augmentation. A good run warns of nothing."""
    output = finish(start(name, tmp_path / "c", work))
    assert re.search(r"global batch 48 = \d x \d+", output), output
    assert not re.search("warn|abort|terminate|Traceback", output, re.I), output
    state = load(tmp_path / "c")
    assert (state["epoch"], state["step"]) == (1, 16)
    same_run(tmp_path / "c", straight(name, work))


def test_torch_distributed_launch_trains_the_same(work, tmp_path):
    """The old launcher: it passes --local-rank, and has no --standalone."""
    launcher = [PYTHON, "-m", "torch.distributed.launch", "--nproc_per_node=2"]
    command = [*launcher, f"--master_port={free_port()}", ROOT / "distributed.py", *FLAGS]
    run([*command, "--checkpoint-dir", tmp_path / "c"], work, env=ONE_THREAD)
    same_run(tmp_path / "c", straight("distributed", work))


@pytest.mark.full
def test_two_agents_train_the_same(work, tmp_path):
    """As on two nodes, which meet at one address."""
    agent = "-m torch.distributed.run --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-id=2"
    command = [PYTHON, *agent.split(), f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    command += [ROOT / "distributed.py", *FLAGS, "--checkpoint-dir", tmp_path / "c"]
    jobs = [Job(command, work, ONE_THREAD) for _ in "01"]
    outputs = [finish(job) for job in jobs]
    assert sorted("global batch 48 = 2 x 24" in output for output in outputs) == [False, True]
    same_run(tmp_path / "c", straight("distributed", work))


@pytest.mark.full
def test_two_runs_at_once_meet_their_own_processes(work, tmp_path):
    """By mp.spawn, whose rendezvous is a file: in a folder that only this user can enter."""
    (tmp_path / "t").mkdir(mode=0o777)
    env = ONE_THREAD | {"TMPDIR": str(tmp_path / "t")}
    command = [*python("multiprocessing_distributed.py"), "--nprocs=2", *SMALL, "--checkpoint-dir"]
    jobs = [Job([*command, tmp_path / name], work, env) for name in "ab"]
    for job in jobs:
        job.wait_for("global batch")
    stores = list((tmp_path / "t").rglob("store"))
    assert stores and all(stat.S_IMODE(store.parent.stat().st_mode) == 0o700 for store in stores)
    for job in jobs:
        finish(job)
    assert same_state(load(tmp_path / "a"), load(tmp_path / "b"))
    assert not list((tmp_path / "t").rglob("store"))


def test_any_number_of_processes_trains_the_same(work, tmp_path):
    """Without BatchNorm, with augmentation: only the order of summation differs."""
    flags = [*SMALL, "-j", "1", "--checkpoint-dir"]
    run([*python(), *flags, tmp_path / "1"], work, env=ONE_THREAD)
    run([*torchrun(3), *flags, tmp_path / "3"], work, env=ONE_THREAD)
    one, three = load(tmp_path / "1"), load(tmp_path / "3")
    assert one["epoch"] == 2
    assert_close(one, three, atol=2e-4, rtol=2e-3)
    losses = [rows(tmp_path / n)[-1]["train_loss"] for n in "13"]
    assert abs(losses[0] - losses[1]) < 1e-4
    # Another seed differs far more: the tolerance means something.
    run([*python(), *flags, tmp_path / "seed", "--seed", "1"], work, env=ONE_THREAD)
    assert abs(rows(tmp_path / "seed")[-1]["train_loss"] - losses[0]) > 5e-3


@pytest.fixture(scope="module")
def odd_digits(work):
    """53 and 3 images to validate, in folders some of which are empty; and a checkpoint."""
    roots = {}
    for count in (53, 3):
        roots[count] = root = work / f"odd{count}"
        shutil.copytree(work / "data/digits/train", root / "train")
        files = sorted((work / "data/digits/val").glob("*/*.png"), key=lambda path: path.name)
        for digit in range(10):
            (root / "val" / str(digit)).mkdir(parents=True)
        for path in [f for f in files if f.parent.name not in "07"][:count]:
            shutil.copy(path, root / "val" / path.parent.name)
    train = ["-b", "24", "--max-steps", "60", "--checkpoint-dir", work / "odd"]
    run([*python(), *NORMED, *train], work)
    return roots, work / "odd/checkpoint.pth"


def image_by_image(root, checkpoint):
    """(loss, acc@1, acc@5) that an evaluation has to give."""
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
        hits = [100 * (int(target) in order[:k]) for k in (1, 5)]
        sums += torch.tensor([cross_entropy(scores, target).item(), *hits])
    return (sums / len(dataset)).tolist()


@pytest.mark.parametrize(
    "count, command",
    [
        (53, torchrun(3)),
        (53, python("dataparallel.py")),
        full(53, python()),
        full(53, torchrun(2)),
        full(53, torchrun(4)),
        full(3, torchrun(4)),  # one process has no image
    ],
    ids=["three", "dataparallel", "one", "two", "four", "few"],
)
def test_evaluation_is_exact(count, command, odd_digits, work):
    """By the checkpoint's model and image size, which need not be told again."""
    roots, checkpoint = odd_digits
    flags = ["-b", "24", "--data", roots[count], "--evaluate", "--resume", checkpoint, "-j", "1"]
    before = sorted(work.rglob("*"))
    loss, acc1, acc5 = last_result(run([*command, *flags], work))
    expected = image_by_image(roots[count], checkpoint)
    assert loss == pytest.approx(expected[0], abs=1.01e-4)
    assert (acc1, acc5) == pytest.approx(expected[1:], abs=1e-3)
    assert sorted(work.rglob("*")) == before  # it writes nothing


def test_dataparallel_validates_on_all_gpus(work):
    """By the wrapped model. On a CPU that calls the plain one: counted is that it is asked."""
    code = "import torch, dataparallel; forward = torch.nn.DataParallel.forward\n"
    code += "def told(*x): print('asked', len(x[1])); return forward(*x)\n"
    code += "torch.nn.DataParallel.forward = told; dataparallel.main()"
    output = run([PYTHON, "-c", code, *SMALL, "-j", "0", "-e"], work, env=IN_ROOT)
    assert sum(map(int, re.findall(r"^asked (\d+)$", output, re.M))) == 360


ORDERS = """
import sys, {module} as script
keys = script.TrainSampler.__iter__

def told(self):
    order = list(keys(self))
    print("order", *(index for _, index in order[:20]))
    return iter(order)

script.TrainSampler.__iter__ = told
sys.exit(script.main())
"""


@pytest.mark.parametrize("module", ["distributed", full("dataparallel"), full("fsdp_distributed")])
def test_each_epoch_has_an_order_of_its_own(module, work, tmp_path):
    flags = [*SMALL, "--max-steps", "31", "-j", "0", "--checkpoint-dir", tmp_path / "c"]
    output = run([PYTHON, "-c", ORDERS.format(module=module), *flags], work, env=IN_ROOT)
    orders = re.findall(r"^order ([\d ]+)$", output, re.M)
    assert len(orders) == len({*orders}) == 2, output


COUNTER = """
import collections, json, sys
import torch, torch.distributed as dist
import distributed

calls, snapshots = collections.Counter(), []

def counted(owner, name, after=lambda: None):
    function = getattr(owner, name)
    def count(*args, **kwargs):
        calls[name] += 1
        after()
        return function(*args, **kwargs)
    setattr(owner, name, count)

for name in ("item", "tolist", "__float__", "__int__", "__bool__", "cpu", "numpy"):
    counted(torch.Tensor, name)
for name in ("all_reduce", "barrier", "broadcast", "all_gather", "all_gather_object", "reduce"):
    counted(dist, name)
counted(torch.optim.SGD, "zero_grad", lambda: snapshots.append(dict(calls)))
distributed.main()
with open("counted.json", "w") as file:
    json.dump([snapshots, calls], file)
"""


def test_a_step_waits_for_nothing_but_its_gradients(work, tmp_path):
    """From one step to the next there is no collective of ours, and no number is read."""
    (tmp_path / "data").symlink_to(work / "data")
    flags = "--max-steps 12 --print-freq 100 -j 1".split()
    command = [*torchrun(2, tmp_path / "count.py"), *SMALL, *flags]
    (tmp_path / "count.py").write_text(COUNTER)
    run(command, tmp_path, env=IN_ROOT)
    steps, calls = json.loads((tmp_path / "counted.json").read_text())
    counts = [{**step, "zero_grad": 0} for step in steps]
    assert len(counts) == 12 and all(step == counts[0] for step in counts)
    assert calls["all_reduce"] == 3  # same checkpoint everywhere; the print; the validation
    assert calls["barrier"] == 1 and "broadcast" not in calls


@pytest.mark.parametrize("script", ["distributed", full("multiprocessing_distributed")])
def test_a_script_and_common_work_elsewhere(script, work, tmp_path):
    shutil.copy(ROOT / f"{script}.py", tmp_path)
    shutil.copytree(ROOT / "common", tmp_path / "common")
    (tmp_path / "mine.py").write_text((ROOT / "tests/nets.py").read_text())
    command = f"{PYTHON} {script}.py --arch mine:plain --image-size 24 --max-steps 3".split()
    last_result(run(command, tmp_path))
    left = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}
    assert left == {f"{script}.py", "common", "mine.py", "data", "checkpoints"}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_on_a_cpu(precision, work, tmp_path):
    flags = [*SMALL, "--precision", precision, "--checkpoint-dir", tmp_path / "c"]
    losses = [float(x) for x in re.findall(r"loss ([\d.]+) \(", run([*python(), *flags], work))]
    assert losses[-1] < losses[0]
    assert bool(load(tmp_path / "c")["scaler"]) == (precision == "fp16")


@pytest.mark.full
@pytest.mark.parametrize("script", ["distributed.py", "fsdp_distributed.py"])
def test_compiled_trains_alike(script, work, tmp_path):
    for name, flags in {"a": [], "b": ["--compile"]}.items():
        command = [*torchrun(2, script), *SMALL, "--max-steps", "4", *flags]
        run([*command, "--checkpoint-dir", tmp_path / name], work, timeout=300, env=ONE_THREAD)
    assert_close(load(tmp_path / "a"), load(tmp_path / "b"), atol=1e-4, rtol=1e-3)
