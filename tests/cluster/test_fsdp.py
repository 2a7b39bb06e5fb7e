"""fsdp_distributed.py: the training of distributed.py, with weights and momentum in parts."""

import shutil
import socket

import pytest
from conftest import (
    PYTHON,
    ROOT,
    Job,
    assert_close,
    last_result,
    load,
    python,
    rows,
    run,
    torchrun,
)

from tests.cluster.ddp import TWO_THREADS, ddp
from tests.launched import FLAGS

SCRIPT = "fsdp_distributed.py"
FSDP = torchrun(2, SCRIPT)
SMOOTH = ["--arch", "tests.nets:smooth"]  # trains the same with any number of processes


@pytest.fixture(scope="module")
def two(work):
    """The folder of two processes, in the middle of the second epoch."""
    run([*FSDP, *FLAGS, "--checkpoint-dir", "fsdp"], work, env=TWO_THREADS)
    return work / "fsdp"


def test_trains_as_ddp_does(work, two):
    assert_close(load(two), load(ddp(work)))
    ours, others = rows(two, timings=False), rows(ddp(work), timings=False)
    for row, other in zip(ours, others, strict=True):
        assert row == pytest.approx(other, abs=1e-4)
    assert ours[-1]["acc1"] > 50  # of 100: it has learnt


@pytest.mark.full
def test_gradients_are_clipped_as_with_ddp(work, two, tmp_path):
    """What docs/strategies.md says: the norm is that of all parts."""
    step = "        scaler.step(optimizer)\n"
    clip = "        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)\n"
    for name in ("distributed.py", SCRIPT):
        text = (ROOT / name).read_text()
        assert text.count(step) == 1
        (tmp_path / name).write_text(text.replace(step, clip + step))
        command = [
            *torchrun(2, tmp_path / name),
            *FLAGS,
            "--checkpoint-dir",
            tmp_path / f"c-{name}",
        ]
        run(command, work, env=TWO_THREADS | {"PYTHONPATH": str(ROOT)})
    clipped = load(tmp_path / f"c-{SCRIPT}")
    assert_close(clipped, load(tmp_path / "c-distributed.py"))
    with pytest.raises(AssertionError):
        assert_close(clipped, load(two))


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
    for name, script in {"ddp": tmp_path / "distributed.py", "fsdp": SCRIPT}.items():
        run([*torchrun(2, script), *flags, "--checkpoint-dir", tmp_path / name], work)
    states = load(tmp_path / "ddp"), load(tmp_path / "fsdp")
    for key, weight in states[0]["state_dict"].items():
        assert weight.equal(states[1]["state_dict"][key]), key
    for i, state in states[0]["optimizer"]["state"].items():
        other = states[1]["optimizer"]["state"][i]["momentum_buffer"]
        assert state["momentum_buffer"].equal(other)


@pytest.mark.full
def test_goes_on_where_ddp_stopped_and_back(work, tmp_path):
    """In mid-epoch, with another number of processes."""
    flags = [*FLAGS, *SMOOTH, "--checkpoint-dir", tmp_path / "c", "--resume", "auto"]
    run([*torchrun(2), *flags, "--max-steps", "9"], work, env=TWO_THREADS)
    output = run([*torchrun(3, SCRIPT), *flags, "--max-steps", "20"], work, env=TWO_THREADS)
    assert "at epoch 0 step 9\n" in output
    assert "at epoch 0 step 20\n" in run([*torchrun(2), *flags], work, env=TWO_THREADS)
    assert_close(load(tmp_path / "c"), load(ddp(work, *SMOOTH)))


@pytest.mark.full
def test_an_epoch_that_only_lacks_its_validation(work, tmp_path):
    """Its row is that of a run without a stop, with the learning rate of the last step."""
    flags = [*FLAGS, "--epochs", "1", "--checkpoint-dir"]
    run([*FSDP, *flags, tmp_path / "c"], work)
    straight, trained = rows(tmp_path / "c", timings=False), tmp_path / "c/checkpoint.prev.pth"
    assert (load(trained.parent, trained.name)["epoch"], straight[0]["epoch"]) == (0, 1)
    output = run([*FSDP, *flags, tmp_path / "d", "--resume", trained], work)
    assert "epoch 0 [" not in output and rows(tmp_path / "d", timings=False) == straight


@pytest.mark.full
def test_validates_every_image_once(work, two, tmp_path):
    """353 images: three processes have 10, 10 and 9 batches. And a process needs no launcher."""
    shutil.copytree(work / "data/digits/val", tmp_path / "val")
    (tmp_path / "train").symlink_to(work / "data/digits/train")
    for path in sorted((tmp_path / "val").glob("*/*"))[::50][:7]:
        path.unlink()
    flags = [*FLAGS, "--data", tmp_path, "-b", "39", "-e", "--resume", two / "checkpoint.pth"]
    expected = last_result(run([*python(), *flags], work))
    for command in (torchrun(3, SCRIPT), python(SCRIPT)):
        assert last_result(run([*command, *flags], work)) == pytest.approx(expected, abs=2e-4)


AUTOCAST = """
import torch
import torch.distributed as dist
from tests import nets

def check(module, _):
    if torch.compiler.is_compiling():
        assert module.training  # to compile takes time: the others wait for it in a collective
    elif dist.is_initialized():
        assert torch.is_autocast_enabled("cpu")

def checked(module):
    module.register_forward_pre_hook(check)
    return module

def transformer(num_classes):
    return checked(nets.transformer(num_classes))

def plain(num_classes):
    return checked(nets.plain(num_classes))
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "processes, more",
    [(4, "-a autocast:transformer -b 20"), (2, "-a autocast:plain -b 2 --compile")],
)
def test_a_process_with_a_batch_less_takes_part_in_all_gathers(processes, more, work, tmp_path):
    """Three images: of four processes one has none, of two one has less. In bf16, with blocks."""
    for split, count in (("train", 60), ("val", 3)):
        files = sorted((work / "data/digits" / split).glob("*/*.png"), key=lambda path: path.name)
        for path in files[:count]:
            folder = tmp_path / "data" / split / path.parent.name
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder)
        for label in range(10):
            (tmp_path / "data" / split / str(label)).mkdir(exist_ok=True)
    (tmp_path / "autocast.py").write_text(AUTOCAST)
    flags = f"--image-size 24 -j 0 --epochs 1 --precision bf16 {more}".split()
    flags += ["--data", tmp_path / "data", "--checkpoint-dir", tmp_path / "c"]
    env = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    output = run([*torchrun(processes, SCRIPT), *flags], work, env=env, timeout=400)
    again = [*flags, "-e", "--resume", tmp_path / "c/checkpoint.pth"]
    loss, acc1, acc5 = last_result(run([*python(), *again], work, env=env))
    assert last_result(output) == pytest.approx((loss, acc1, acc5), abs=0.03)


@pytest.mark.full
def test_nodes_keep_a_copy_each(work, tmp_path):
    """Two nodes of two processes: parts of halves."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    node = "-m torch.distributed.run --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d".split()
    node += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "two-nodes"]
    flags = [*FLAGS, *SMOOTH, "--checkpoint-dir", tmp_path / "c"]
    jobs = [Job([PYTHON, *node, ROOT / SCRIPT, *flags], work) for _ in "01"]
    outputs = [job.wait(150) for job in jobs]
    assert [code for code, _ in outputs] == [0, 0], outputs
    assert "processes: 4, gloo, cpu" in "".join(output for _, output in outputs)
    assert_close(load(tmp_path / "c"), load(ddp(work, *SMOOTH)))
