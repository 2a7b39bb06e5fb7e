"""fsdp_distributed.py: the training of distributed.py, with weights and momentum in parts."""

import re
import shutil
import socket

import pytest
import torch
from conftest import (
    PYTHON,
    ROOT,
    Job,
    assert_close,
    forked,
    forking,
    last_result,
    load,
    rows,
    run,
)
from torch import nn
from torchvision import models

from common.sharded import blocks, precision_policy
from tests import nets

DDP = forked("distributed.py", ranks=2)
FSDP = forked("fsdp_distributed.py", ranks=2)
NORMED = "--arch tests.nets:normed --image-size 24 --batch-size 48 -j 1 -p 1".split()


@pytest.fixture(scope="module")
def two(work):
    """The folder of two processes that end in mid-epoch of the second epoch."""
    run([*FSDP, *NORMED, "--max-steps", "36", "--checkpoint-dir", "fsdp"], work)
    return work / "fsdp"


def test_trains_as_ddp_does(work, two):
    run([*DDP, *NORMED, "--max-steps", "36", "--checkpoint-dir", "ddp"], work)
    assert_close(load(two), load(work / "ddp"))
    ours, others = rows(two, timings=False), rows(work / "ddp", timings=False)
    for row, other in zip(ours, others, strict=True):
        assert row == pytest.approx(other, abs=1e-4)
    assert ours[-1]["acc1"] > 50  # of 100: it has learnt


CLIP = "        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)\n"


@pytest.mark.full
def test_gradients_are_clipped_as_with_ddp(work, two, tmp_path):
    """What docs/strategies.md says: the norm is that of all parts."""
    flags = [*NORMED, "--max-steps", "12", "--checkpoint-dir"]
    for name in ("distributed", "fsdp_distributed"):
        text = (ROOT / f"{name}.py").read_text()
        assert text.count("        scaler.step(optimizer)\n") == 1
        text = text.replace(
            "        scaler.step(optimizer)\n", f"{CLIP}        scaler.step(optimizer)\n"
        )
        (tmp_path / f"{name}.py").write_text(text)
        command = [*forked("-c", ranks=2), RUN, tmp_path / f"{name}.py"]
        run([*command, *flags, tmp_path / name], work)
    run([*FSDP, *flags, tmp_path / "not"], work)
    clipped = load(tmp_path / "fsdp_distributed")
    assert_close(clipped, load(tmp_path / "distributed"))
    with pytest.raises(AssertionError):
        assert_close(clipped, load(tmp_path / "not"))


RUN = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
SAME_KERNELS = {  # what distributed.py computes otherwise, for speed
    "distributed.py": ("fused=True", "foreach=True"),
    "common/model.py": ("net = net.to(memory_format=torch.channels_last)", "pass"),
}


@pytest.mark.full
def test_a_resnet_is_ddps_to_the_bit_where_both_run_the_same_kernels(work, tmp_path):
    for name in ("common", "distributed.py"):
        copy = shutil.copytree if name == "common" else shutil.copy
        copy(ROOT / name, tmp_path / name)
    for name, (ours, plain) in SAME_KERNELS.items():
        text = (tmp_path / name).read_text()
        assert text.count(ours) == 1
        (tmp_path / name).write_text(text.replace(ours, plain))
    flags = "--arch resnet18 --image-size 32 --batch-size 32 --max-steps 6 -j 0".split()
    ddp, fsdp = tmp_path / "ddp", tmp_path / "fsdp"
    run([*forked(tmp_path / "distributed.py", 2), *flags, "--checkpoint-dir", ddp], work)
    run([*forked("fsdp_distributed.py", 2), *flags, "--checkpoint-dir", fsdp], work)
    states = load(ddp), load(fsdp)
    for key, weight in states[0]["state_dict"].items():
        assert weight.equal(states[1]["state_dict"][key]), key
    for i, state in states[0]["optimizer"]["state"].items():
        other = states[1]["optimizer"]["state"][i]["momentum_buffer"]
        assert state["momentum_buffer"].equal(other)


def test_goes_on_where_ddp_stopped_and_back(work, tmp_path):
    """In mid-epoch, and with another number of processes: without BatchNorm they train the same."""
    flags = [*NORMED, "--arch", "tests.nets:smooth", "--max-steps"]
    three = forked("fsdp_distributed.py", ranks=3)
    for number, command in enumerate((DDP, FSDP, three, DDP), start=1):
        command = [*command, *flags, str(9 * number), "--checkpoint-dir", tmp_path / "c"]
        output = run([*command, "--resume", "auto"], work)
        assert number == 1 or f"at epoch 0 step {9 * number - 9}\n" in output
    run([*DDP, *flags, "36", "--checkpoint-dir", tmp_path / "ddp"], work)
    assert_close(load(tmp_path / "c"), load(tmp_path / "ddp"))


def test_an_epoch_that_only_lacks_its_validation(work, tmp_path):
    """Its row is that of a run without a stop, with the learning rate of the last step."""
    flags = [*NORMED, "--epochs", "1", "--checkpoint-dir"]
    run([*FSDP, *flags, tmp_path / "c"], work)
    straight, trained = rows(tmp_path / "c", timings=False), tmp_path / "c/checkpoint.prev.pth"
    assert (load(trained.parent, trained.name)["epoch"], straight[0]["epoch"]) == (0, 1)
    output = run([*FSDP, *flags, tmp_path / "d", "--resume", trained], work)
    assert "epoch 0 [" not in output and rows(tmp_path / "d", timings=False) == straight


@pytest.mark.parametrize("ranks", [4, 1, 7])
def test_validates_every_image_once(ranks, work, two):
    """Of 360 images four processes have 90: batches of 15. Seven: 51 or 52; batches of 8 or 9."""
    flags = [*NORMED, "--batch-size", "63" if ranks == 7 else "60"]
    flags += ["-e", "--resume", two / "checkpoint.pth"]
    expected = last_result(run([*forked("distributed.py"), *flags], work))
    output = run([*forked("fsdp_distributed.py", ranks), *flags], work)
    assert last_result(output) == pytest.approx(expected, abs=2e-4)


def test_a_process_with_a_batch_less_takes_part_in_all_gathers(work, tmp_path):
    """Three images for four processes: the last has none. In bf16, dropout, and blocks."""
    for split, count in (("train", 60), ("val", 3)):
        files = sorted((work / "data/digits" / split).glob("*/*.png"), key=lambda path: path.name)
        for path in files[:count]:
            folder = tmp_path / "data" / split / path.parent.name
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder)
        for label in range(10):
            (tmp_path / "data" / split / str(label)).mkdir(exist_ok=True)
    flags = "--arch tests.nets:transformer --image-size 24 --batch-size 20 -j 0".split()
    flags += ["--data", tmp_path / "data", "--epochs", "1", "--precision", "bf16"]
    flags += ["--warmup-epochs", "0", "--checkpoint-dir", tmp_path / "c"]
    output = run([*forked("fsdp_distributed.py", ranks=4), *flags], work)
    again = [*flags, "-e", "--resume", tmp_path / "c/checkpoint.pth"]
    loss, acc1, acc5 = last_result(run([*forked("distributed.py"), *again], work))
    assert last_result(output) == pytest.approx((loss, acc1, acc5), abs=0.03)


@pytest.mark.full
def test_nodes_keep_a_copy_each(work, tmp_path):
    """Two nodes of two processes: parts of halves, and the weights of four processes of one."""
    flags = [*NORMED, "--arch", "tests.nets:smooth", "--max-steps", "12", "--checkpoint-dir"]
    run([*forked("fsdp_distributed.py", ranks=4), *flags, tmp_path / "one"], work)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    node = "-m torch.distributed.run --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d".split()
    node += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "two-nodes"]
    command = [PYTHON, *node, ROOT / "fsdp_distributed.py", *flags, tmp_path / "two"]
    jobs = [Job(command, work, forking()) for _ in "01"]
    outputs = [job.wait(150) for job in jobs]
    assert [code for code, _ in outputs] == [0, 0], outputs
    assert "processes: 4, gloo, cpu" in "".join(output for _, output in outputs)
    assert_close(load(tmp_path / "two"), load(tmp_path / "one"))


SHARES = """
import os
import sys
import torch
import common.sharded as sharded

class Seen(sharded.Parts):
    def gather(self):
        super().gather()
        tensors = [part for _, part in self.pairs]
        tensors += [state["momentum_buffer"] for state in self.optimizer.state.values()]
        mine = sum(tensor.to_local().numel() for tensor in tensors)
        whole = sum(tensor.numel() for tensor in tensors)
        line = f"share {mine / whole:.2f} {tensors[0].device_mesh.shape}"
        os.write(1, f"{line}\\n".encode())  # at once: print() writes in pieces

sharded.Parts = Seen
import fsdp_distributed
sys.exit(fsdp_distributed.main())
"""


def test_every_process_keeps_its_part_only(work, tmp_path):
    flags = [*NORMED, "--max-steps", "1", "--arch", "tests.nets:transformer"]
    flags += ["--precision", "fp32", "--checkpoint-dir", tmp_path / "c"]
    output = run([*forked("-c", ranks=2), SHARES, *flags], work)
    shares = [float(share) for share in re.findall(r"share ([\d.]+) \(2,\)", output)]
    assert len(shares) == 2 and min(shares) > 0.45 and max(shares) < 0.55, output


def test_blocks_of_torchvisions_models():
    names = [name for name in models.list_models(module=models) if "regnet" not in name]
    for name in [*names, "regnet_y_400mf"]:  # all regnets are built alike, and not on "meta"
        with torch.device("cpu" if "regnet" in name else "meta"):
            net = models.get_model(name)
        found = list(blocks(net))
        inside = [weight for block in found for weight in block.parameters()]
        assert len(set(inside)) == len(inside), name  # none is in two blocks
        most = sum(weight.numel() for weight in net.parameters())
        most *= 0.75 if "regnet" in name else 0.5  # its stages are Sequentials of another type
        for block in found:  # a layer cannot be gathered in pieces
            size = sum(weight.numel() for weight in block.parameters())
            assert size < most or not list(block.children()), name
    assert len(list(blocks(models.resnet18()))) == 8
    assert len(list(blocks(nets.transformer(10)))) == 3  # two layers and the head
    assert not list(blocks(nn.Linear(1, 1)))


def test_batch_norm_keeps_float32():
    assert precision_policy(nets.normed(10), torch.bfloat16).param_dtype is None
    policy = precision_policy(nets.transformer(10), torch.bfloat16)
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
