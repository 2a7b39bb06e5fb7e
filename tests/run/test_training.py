"""Every way of starting a script trains the same, evaluates every image once, and needs no other.

Slurm's, and what is Apex's, Horovod's and FSDP's own: tests/cluster.
"""

import json
import re
import shutil

import pytest
import torch
from conftest import (
    HOROVODRUN,
    ONE_THREAD,
    PYTHON,
    ROOT,
    SMALL,
    assert_close,
    each,
    full,
    last_result,
    load,
    needs_horovod,
    python,
    rows,
    run,
)
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from common.images import image_folders
from common.prefetcher import Prefetcher
from tests import nets
from tests.docs.ranks import good
from tests.launched import (
    FLAGS,
    IN_ROOT,
    SCRIPTS,
    SMOOTH,
    WARNS,
    forked,
    same_run,
    start,
    straight,
)


@pytest.mark.full
def test_a_script_and_its_rooms_alone_learn_the_digits(tmp_path):
    """Plain python is a group of one; the default model, in the precision that is it on GPUs."""
    shutil.copy(ROOT / "distributed.py", tmp_path)
    for room in ("common", "longrun"):
        shutil.copytree(ROOT / room, tmp_path / room)
    flags = "--max-steps 6 -p 2 --image-size 16 --warmup-epochs 0 --precision bf16".split()
    output = run([PYTHON, "distributed.py", *flags], tmp_path, env=ONE_THREAD)
    losses = [float(x) for x in re.findall(r"loss ([\d.]+) \(", output)]
    assert last_result(output)[0] > 0 and losses[-1] < losses[0], output
    (row,) = rows(tmp_path / "checkpoints")
    assert (row["epoch"], row["step"], row["batch_size"]) == (0, 6, 64)
    assert row["images_per_second"] > 0 and 0 <= row["data_time"] < 1
    assert load(tmp_path / "checkpoints")["arch"] == "resnet18"
    left = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}
    assert left == {"distributed.py", "common", "longrun", "data", "checkpoints"}


LAUNCH = [PYTHON, "-m", "torch.distributed.launch", "--standalone", "--nproc_per_node=2"]
STRATEGIES = {
    "dataparallel": python("dataparallel.py"),
    "multiprocessing": SCRIPTS["multiprocessing"][0],
    "launch": [*LAUNCH, ROOT / "distributed.py"],  # the old launcher: it passes --local-rank
}


@pytest.mark.parametrize("name", each(STRATEGIES, ["multiprocessing"]))
def test_each_strategy_trains_the_same(name, work, tmp_path):
    """To the bit, with BatchNorm, dropout and augmentation. A good run warns of nothing."""
    command = [*STRATEGIES[name], *FLAGS, "--checkpoint-dir", tmp_path / "c"]
    output = run(command, work, env=ONE_THREAD)
    assert re.search(r"global batch 48 = \d x \d+", output), output
    assert name == "launch" or not re.search(WARNS, output, re.I), output  # it says that it is old
    same_run(tmp_path / "c", straight(name, work))


# One process resumes the run of several below; the other two have the lines of distributed.py.
BY_HAND = ["alone", "multiprocessing", "apex"]


@pytest.mark.parametrize("name", each(SCRIPTS, by_hand=BY_HAND))
def test_buffers_of_any_kind_are_rank_0s(name, work, tmp_path):
    """Where they are evaluated, and in the checkpoint, which any script resumes."""
    flags = ["--arch", "tests.nets:odd_buffers", "--max-steps"]
    if name == "fsdp":
        forked(name, tmp_path / "c", work, *flags, 6)
    else:
        start(name, tmp_path / "c", work, *flags, 6, env={}).finish()
    saved = load(tmp_path / "c")["state_dict"]
    assert saved["0.nothing"].isnan().all() and saved["0.empty"].numel() == 0
    ones = {key for key in saved if saved[key].numel() and (saved[key] == 1).all()}
    assert len(ones) == 14 and {"0.strided", "0.expanded", "0.of_uint16", "0.of_bool"} <= ones
    if name == "distributed":  # they are the same in each
        flags = [*flags, 8, "--resume", "auto"]
        assert "at epoch 1 step 6" in forked("alone", tmp_path / "c", work, *flags)


# They are there before the strategy begins; Horovod's takes longest to start.
@pytest.mark.parametrize("name", each(["distributed", "fsdp", "horovod"], by_hand=["horovod"]))
def test_weights_of_another_program(name, work, tmp_path):
    """They are evaluated as they were; then trained on. A resume needs the file no more."""
    one = straight("alone", work)
    state = {f"module.{key}": x for key, x in load(one)["state_dict"].items()}
    torch.save({"epoch": 7, "state_dict": state, "optimizer": {}}, tmp_path / "w.pth")
    flags = ["--pretrained", tmp_path / "w.pth"]

    if name == "horovod":
        output = start(name, tmp_path / "c", work, *flags, "--evaluate", env={}).finish()
    else:
        output = forked(name, tmp_path / "c", work, *flags, "--evaluate")
    told = f"weights of {tmp_path}/w.pth (state_dict): 9 tensors below module.\n"
    output = output.replace("[0]<stdout>:", "")
    assert told in output and output.count("tensors below") == 1
    last = rows(one)[-1]
    right = [last[key] for key in ("val_loss", "acc1", "acc5")]
    assert last_result(output) == pytest.approx(right, abs=1.01e-3)
    if name == "horovod":
        return
    forked(name, tmp_path / "c", work, *flags, "--max-steps", 1, "--lr", 0)
    trained = load(tmp_path / "c")["state_dict"]
    assert all(trained[key].equal(state[f"module.{key}"]) for key in trained if "weight" in key)
    (tmp_path / "w.pth").unlink()
    more = ["--max-steps", 2, "--resume", "auto"]
    assert "step 1" in forked(name, tmp_path / "c", work, *flags, *more)


ALIKE = {
    "three": ([ROOT / "distributed.py"], 3),
    "compiled": ([ROOT / "distributed.py", "--compile"], 2),
    "FSDP, compiled": ([ROOT / "fsdp_distributed.py", "--compile"], 2),
}


@pytest.mark.parametrize("case", ["three", full("compiled"), full("FSDP, compiled")])
def test_trains_as_one_process_but_for_rounding(case, work, tmp_path):
    command, ranks = ALIKE[case]
    good(*command, *FLAGS, *SMOOTH, "--checkpoint-dir", tmp_path / "c", ranks=ranks, cwd=work)
    one = straight("alone", work, *SMOOTH)
    assert_close(load(tmp_path / "c"), load(one), atol=1e-4, rtol=1e-3)
    losses = [row["train_loss"] for row in rows(tmp_path / "c")]
    assert losses == pytest.approx([row["train_loss"] for row in rows(one)], abs=1e-4)


@pytest.fixture(scope="module")
def odd_digits(work):
    """53 images and one to validate, some classes without: {count: (flags, the right result)}."""
    checkpoint = straight("alone", work) / "checkpoint.pth"
    net = nets.normed(10).eval()
    net.load_state_dict(load(checkpoint.parent)["state_dict"])
    files = sorted((work / "data/digits/val").glob("*/*.png"), key=lambda path: path.name)
    found = {}
    for count in (53, 1):
        root = work / f"odd{count}"
        for digit in range(10):
            (root / "val" / str(digit)).mkdir(parents=True)
        (root / "train").symlink_to(work / "data/digits/train")
        for path in [file for file in files if file.parent.name not in "07"][:count]:
            shutil.copy(path, root / "val" / path.parent.name)
        _, val_set = image_folders(str(root), 24)
        ((images, target),) = Prefetcher(DataLoader(val_set, count), torch.device("cpu"))
        with torch.no_grad():
            output = net(images)
        hits = output.topk(5).indices == target[:, None]
        loss = round(cross_entropy(output, target).item(), 4)
        right = loss, *(round(100 * x.sum().item() / count, 3) for x in (hits[:, 0], hits))
        flags = ["--data", root, "-j", "1", "-e", "--resume", checkpoint]
        found[count] = flags, right
    return found


# On a CPU it calls the plain model: counted is that it is asked, as it would be with several GPUs.
ASKED = """
import torch, dataparallel
forward = torch.nn.DataParallel.forward
def told(model, images):
    print("asked", len(images))
    return forward(model, images)
torch.nn.DataParallel.forward = told
dataparallel.main()
"""
UNLIKE = ["-b", "26"]  # 27 and 26 images in batches of 13: three batches and two
EVALUATIONS = {
    "three": (53, 3),  # processes
    "dataparallel": (53, [PYTHON, "-c", ASKED]),
    "few": (1, 2),  # one process has no image
    # A process with a batch less takes part in all that gathers the parts.
    "horovod": (53, [*HOROVODRUN, ROOT / "horovod_distributed.py", *UNLIKE]),
    "fsdp, few": (1, 2),
    "fsdp, compiled": (53, 2),
}


@pytest.mark.parametrize(
    "case", [c if c in ("three", "dataparallel") else full(c) for c in EVALUATIONS]
)
def test_evaluation_is_exact(case, odd_digits, work, tmp_path):
    """By the checkpoint's model and image size, which need not be told again."""
    if case == "horovod":
        needs_horovod()
    count, command = EVALUATIONS[case]
    flags, right = odd_digits[count]
    before = sorted(work.rglob("*"))
    if isinstance(command, int):
        script = "fsdp_distributed.py" if "fsdp" in case else "distributed.py"
        more = ["--compile", *UNLIKE] if "compiled" in case else ["-b", "24"]
        output = good(ROOT / script, *more, *flags, ranks=command, cwd=tmp_path)
    else:
        size = [] if "-b" in command else ["-b", "24"]
        output = run([*command, *size, *flags], work, env=IN_ROOT).replace("[0]<stdout>:", "")
    assert last_result(output) == pytest.approx(right, abs=1.01e-4)
    assert sorted(work.rglob("*")) == before  # it writes nothing
    if case == "dataparallel":
        assert sum(map(int, re.findall(r"^asked (\d+)$", output, re.M))) == 53


COUNTER = """
import collections, json, os
import torch, torch.distributed as dist
import distributed

calls, steps, orders = collections.Counter(), [], []

def counted(owner, name, after=lambda: None):
    function = getattr(owner, name)
    def count(*args, **kwargs):
        calls[name] += 1
        result = function(*args, **kwargs)
        after()
        return result
    setattr(owner, name, count)

for name in ("item", "tolist", "__float__", "__int__", "__bool__", "cpu", "numpy"):
    counted(torch.Tensor, name)
for name in ("all_reduce", "barrier", "broadcast", "all_gather", "all_gather_object", "reduce"):
    counted(dist, name)
counted(torch.optim.SGD, "zero_grad", lambda: steps.append({**calls, "zero_grad": 0}))
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
    good(tmp_path / "count.py", *SMALL, *flags, ranks=2)
    steps, calls, orders = json.loads((tmp_path / "counted.json").read_text())
    assert len(steps) == 31 and all(step == steps[0] for step in steps[:29])
    assert calls["all_reduce"] == 5  # same checkpoint everywhere; twice the print, the validation
    assert calls["barrier"] == 1 and "broadcast" not in calls
    assert len(orders[-1]) == 2 * 24 and orders[0][:48] != orders[-1]
