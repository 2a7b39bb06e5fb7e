"""Every way of starting a script trains the same, evaluates every image once, and needs no other.

Slurm's, and what is Apex's, Horovod's and FSDP's own: tests/cluster.
"""

import json
import re
import shutil

import pytest
from conftest import (
    HOROVODRUN,
    ONE_THREAD,
    PYTHON,
    ROOT,
    SMALL,
    assert_close,
    full,
    last_result,
    load,
    needs_horovod,
    python,
    rows,
    run,
    torchrun,
)

from tests.launched import FLAGS, SCRIPTS, WARNS, same_run, straight

IN_ROOT = {"PYTHONPATH": str(ROOT)}  # for code that is not beside common/
NORMED = "--arch tests.nets:normed --image-size 24 --batch-size 48 --epochs 2 -j 1".split()


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


LAUNCH = [PYTHON, "-m", "torch.distributed.launch", "--standalone", "--nproc_per_node=2"]
STRATEGIES = {
    "dataparallel": python("dataparallel.py"),
    "multiprocessing": SCRIPTS["multiprocessing"][0],
    "launch": [*LAUNCH, ROOT / "distributed.py"],  # the old launcher: it passes --local-rank
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_strategy_trains_the_same(name, work, tmp_path):
    """To the bit, with BatchNorm, dropout and augmentation. A good run warns of nothing."""
    command = [*STRATEGIES[name], *FLAGS, "--checkpoint-dir", tmp_path / "c"]
    output = run(command, work, env=ONE_THREAD)
    assert re.search(r"global batch 48 = \d x \d+", output), output
    assert name == "launch" or not re.search(WARNS, output, re.I), output  # it says that it is old
    same_run(tmp_path / "c", straight(name, work))


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


@pytest.fixture(scope="module")
def odd_digits(work):
    """53 and 3 images to validate, in folders some of which are empty, and what is right for them.

    That is what one process finds that takes one image at a time.
    """
    train = ["-b", "24", "--max-steps", "60", "--checkpoint-dir", work / "odd"]
    run([*python(), *NORMED, *train], work)
    files = sorted((work / "data/digits/val").glob("*/*.png"), key=lambda path: path.name)
    flags, right = {}, {}
    for count in (53, 3):
        root = work / f"odd{count}"
        (root / "val").mkdir(parents=True)
        (root / "train").symlink_to(work / "data/digits/train")
        for digit in range(10):
            (root / "val" / str(digit)).mkdir()
        for path in [f for f in files if f.parent.name not in "07"][:count]:
            shutil.copy(path, root / "val" / path.parent.name)
        flags[count] = ["--data", root, "-j", "1", "-e", "--resume", work / "odd/checkpoint.pth"]
        right[count] = last_result(run([*python(), *flags[count], "-b", "1"], work))
    return flags, right


EVALUATIONS = {
    "three": (53, torchrun(3)),
    "dataparallel": (53, python("dataparallel.py")),
    "one": (53, python()),
    "two": (53, torchrun(2)),
    "four": (53, torchrun(4)),
    "few": (3, torchrun(4)),  # one process has no image
    "spawned": (53, SCRIPTS["multiprocessing"][0]),
    "horovod": (53, [*HOROVODRUN[:2], 4, PYTHON, ROOT / "horovod_distributed.py"]),
    "fsdp": (53, torchrun(3, "fsdp_distributed.py")),
    # A process with a batch less takes part in all that gathers the parts.
    "fsdp, few": (3, torchrun(4, "fsdp_distributed.py")),
    "fsdp, compiled": (3, [*torchrun(2, "fsdp_distributed.py"), "--compile"]),
}


@pytest.mark.parametrize(
    "case", [c if c in ("three", "dataparallel") else full(c) for c in EVALUATIONS]
)
def test_evaluation_is_exact(case, odd_digits, work):
    """By the checkpoint's model and image size, which need not be told again."""
    if case == "horovod":
        needs_horovod()
    (flags, right), (count, command) = odd_digits, EVALUATIONS[case]
    before = sorted(work.rglob("*"))
    batch = ["-b", "4" if "compiled" in case else "24"]
    output = run([*command, *flags[count], *batch], work).replace("[0]<stdout>:", "")
    assert last_result(output) == pytest.approx(right[count], abs=1.01e-4)
    assert sorted(work.rglob("*")) == before  # it writes nothing


def test_dataparallel_validates_on_all_gpus(work):
    """By the wrapped model. On a CPU that calls the plain one: counted is that it is asked."""
    code = "import torch, dataparallel; forward = torch.nn.DataParallel.forward\n"
    code += "def told(*x): print('asked', len(x[1])); return forward(*x)\n"
    code += "torch.nn.DataParallel.forward = told; dataparallel.main()"
    output = run([PYTHON, "-c", code, *SMALL, "-j", "0", "-e"], work, env=IN_ROOT)
    assert sum(map(int, re.findall(r"^asked (\d+)$", output, re.M))) == 360


COUNTER = """
import collections, json, os
import torch, torch.distributed as dist
import distributed

calls, steps, orders = collections.Counter(), [], []

def counted(owner, name, after=lambda *_: None):
    function = getattr(owner, name)
    def count(*args, **kwargs):
        calls[name] += 1
        result = function(*args, **kwargs)
        after(result)
        return result
    setattr(owner, name, count)

for name in ("item", "tolist", "__float__", "__int__", "__bool__", "cpu", "numpy"):
    counted(torch.Tensor, name)
for name in ("all_reduce", "barrier", "broadcast", "all_gather", "all_gather_object", "reduce"):
    counted(dist, name)
counted(torch.optim.SGD, "zero_grad", lambda _: steps.append({**calls, "zero_grad": 0}))
keys = distributed.TrainSampler.__iter__
distributed.TrainSampler.__iter__ = lambda self: iter(orders.append([*keys(self)]) or orders[-1])
distributed.main()
if os.environ["RANK"] == "0":
    with open("counted.json", "w") as file:
        json.dump([steps, calls, [[index for _, index in order] for order in orders]], file)
"""


def test_a_step_waits_for_nothing_but_its_gradients(work, tmp_path):
    """In an epoch there is no collective of ours, and no number is read; each has its own order."""
    (tmp_path / "data").symlink_to(work / "data")
    flags = "--max-steps 31 --print-freq 100 -j 1".split()
    (tmp_path / "count.py").write_text(COUNTER)
    run([*torchrun(2, tmp_path / "count.py"), *SMALL, *flags], tmp_path, env=IN_ROOT)
    steps, calls, orders = json.loads((tmp_path / "counted.json").read_text())
    assert len(steps) == 31 and all(step == steps[0] for step in steps[:29])
    assert calls["all_reduce"] == 5  # same checkpoint everywhere; twice the print, the validation
    assert calls["barrier"] == 1 and "broadcast" not in calls
    assert len(orders[-1]) == 2 * 24 and orders[0][:48] != orders[-1]


def test_a_script_and_common_work_elsewhere(tmp_path):
    shutil.copy(ROOT / "distributed.py", tmp_path)
    shutil.copytree(ROOT / "common", tmp_path / "common")
    (tmp_path / "mine.py").write_text((ROOT / "tests/nets.py").read_text())
    command = f"{PYTHON} distributed.py --arch mine:plain --image-size 24 --max-steps 3".split()
    last_result(run(command, tmp_path))
    left = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}
    assert left == {"distributed.py", "common", "mine.py", "data", "checkpoints"}


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
