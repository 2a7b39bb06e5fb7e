"""What needs an NVIDIA GPU: ./start.sh test -m gpu."""

import importlib.util
import time

import pytest
import torch
from conftest import SMALL, last_result, load, python, rows, run, torchrun
from torch import nn
from torch.utils.data import TensorDataset

from common.loader import Seeded, TrainSampler, start_loader
from common.prefetcher import MEAN, STD, Prefetcher

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
ONE = python()
APEX = []  # the flags of each precision of the Apex that is installed, if it is; fp32 comes first
if importlib.util.find_spec("amp_C"):
    old = importlib.util.find_spec("apex.amp")
    APEX = [f"--opt-level O{level}" for level in range(4)] if old else []
    APEX = APEX or [f"--precision {precision}" for precision in ("fp32", "bf16", "fp16")]
# For runs that are compared: the tensor cores round float32 to 10 bits, in some of cuDNN's choices.
NO_TF32 = {"NVIDIA_TF32_OVERRIDE": "0"}
DEEP = "--arch resnet18 --image-size 64 --batch-size 64 --max-steps 3 --seed 3".split()


def assert_alike(folder, other, atol, rtol):
    """Not to the bit: cuDNN's choices are not the same in every run."""
    a, b = load(folder), load(other)
    assert (a["epoch"], a["step"]) == (b["epoch"], b["step"])
    for key, value in a["state_dict"].items():
        torch.testing.assert_close(value, b["state_dict"][key], atol=atol, rtol=rtol)


def test_prefetcher_equals_the_plain_path_to_the_bit():
    """Over many batches, with a consumer that keeps the GPU busy and lets go of each batch."""
    device = torch.device("cuda")
    images = torch.randint(0, 256, (8, 32, 3, 96, 96), dtype=torch.uint8).pin_memory()
    targets = torch.randint(0, 10, (8, 32)).pin_memory()
    batches = [*zip(images, targets, strict=True)] * 25
    mean, std = torch.tensor([MEAN, STD], dtype=torch.float64, device=device).view(2, 1, 3, 1, 1)
    shift, scale = (-mean / std).float(), (1 / (255 * std)).float()
    work = torch.randn(2048, 2048, device=device)

    def sums(images, target):
        return torch.stack([images.double().sum(), images.double().pow(2).sum(), target.sum()])

    found = []
    for images, target in Prefetcher(batches, device):
        assert images.is_contiguous(memory_format=torch.channels_last)
        for _ in range(5):
            work = torch.tanh(work @ work)  # so that the copies run ahead of what reads them
        found.append(sums(images, target))
    expected = []
    for images, target in batches:
        plain = images.cuda().to(torch.float32, memory_format=torch.channels_last)
        expected.append(sums(torch.addcmul(shift, plain, scale), target.cuda()))
    assert torch.stack(found).equal(torch.stack(expected))


def test_waiting_is_the_gpus_not_the_hosts():
    """The host runs ahead of the GPU, and has time: it matters when the GPU has none to wait."""
    device, busy = torch.device("cuda"), torch.randn(8192, 8192, device="cuda")

    def slow(seconds):
        for _ in range(10):
            time.sleep(seconds)
            yield torch.zeros(1, 3, 8, 8, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)

    for rounds, least, most in ((0, 0.45, 1.0), (10, 0.0, 0.2)):  # a round takes 20 ms or more
        batches = Prefetcher(slow(0.05), device)
        for _ in batches:
            for _ in range(rounds):
                busy @ busy
        assert least < batches.waited() < most


FLAGS = ["", "--precision fp16", "--precision fp32", "--compile"]
CASES = [("distributed.py", flags) for flags in FLAGS]
CASES += [("apex_distributed.py", flags) for flags in APEX]


@pytest.mark.parametrize("script, flags", CASES)
def test_trains_resumes_and_evaluates(script, flags, work, tmp_path):
    """bf16 is the default: from the same start, the loss falls and the digits are learned."""
    command = [*python(script), *flags.split(), "--checkpoint-dir", tmp_path / "c"]
    output = run([*command, "--max-steps", "44"], work, timeout=600)
    assert f"{script}: processes: 1, nccl, " in output
    assert f", {torch.cuda.get_device_name()}, " in output
    assert script != "distributed.py" or ("bf16" in output) == ("--precision" not in flags)
    output = run([*command, "--resume", "auto"], work, timeout=600)
    assert "resumed from" in output and "at the end of epoch 2\n" in output
    loss, acc1, _ = last_result(output)
    assert (acc1 > 80) if "O3" in flags else (acc1 > 95 and loss < 0.3)  # O3 trains in half
    assert rows(tmp_path / "c")[-1]["epoch"] == 4
    evaluate = [*command, "--evaluate", "--resume", tmp_path / "c/checkpoint.pth"]
    assert last_result(run(evaluate, work)) == pytest.approx((loss, acc1, 100), abs=0.6)
    if "--opt-level" not in flags:
        assert bool(load(tmp_path / "c")["scaler"]) == ("fp16" in flags)


def test_other_scripts_and_a_resumed_run_end_as_a_straight_one(work, tmp_path):
    fp32, runs = ["--precision", "fp32"], [("straight", ONE)]
    runs += [("cut", [*ONE, "--max-steps", "17"]), ("cut", [*ONE, "--resume", "auto"])]
    runs += [("dataparallel", python("dataparallel.py"))]
    runs += [("apex", python("apex_distributed.py"))] if APEX else []
    for name, command in runs:
        precision = APEX[0].split() if name == "apex" else fp32
        flags = [*SMALL, *precision, "--checkpoint-freq", "5", "--checkpoint-dir", tmp_path / name]
        run([*command, *flags], work, env=NO_TF32 | {"CUDA_VISIBLE_DEVICES": "0"})
    for name in {name for name, _ in runs}:
        atol = 1e-4 if name == "dataparallel" else 1e-3
        assert_alike(tmp_path / name, tmp_path / "straight", atol, 10 * atol)


def test_a_gpu_goes_on_from_a_cpu_and_back(work, tmp_path):
    flags = [*SMALL, "--checkpoint-dir", tmp_path / "c", "--resume", "auto"]
    cpu = {"CUDA_VISIBLE_DEVICES": ""}
    for steps, env in ((10, cpu), (20, {}), (30, cpu)):
        output = run([*ONE, *flags, "--max-steps", str(steps)], work, env=env)
        assert ("processes: 1, gloo, cpu, " in output) == (env == cpu)
    assert rows(tmp_path / "c")[-1]["step"] == 1


@pytest.mark.parametrize("workers", [1, 3])
def test_batches_stay_as_they_are(workers):
    """Pinned, for as long as somebody holds them: a list of a whole epoch."""
    images = torch.randint(256, (40, 3, 8, 8), dtype=torch.uint8)
    dataset, batches = TensorDataset(images, torch.arange(40)), {}
    for device in map(torch.device, ("cpu", "cuda")):
        sampler = TrainSampler(40, 2, 0, 1, 0)
        loader = start_loader(Seeded(dataset, 0), sampler, 2, workers, device)
        batches[device.type] = []
        for epoch in range(3):
            sampler.set_epoch(epoch)
            held = list(loader)
            assert all(images.is_pinned() == (device.type == "cuda") for images, _ in held)
            batches[device.type] += [images.flatten().tolist() for images, _ in held]
    assert batches["cpu"] == batches["cuda"] and len(batches["cpu"]) == 60


def test_sync_bn_of_two_processes_is_batchnorm_of_one(work, tmp_path):
    """They share a GPU. Without --sync-bn each has statistics of its own half."""
    flags = [*DEEP, "--precision", "fp32", "--checkpoint-dir"]
    run([*ONE, *flags, tmp_path / "one"], work, env=NO_TF32)
    two = [*torchrun(2), "--backend", "gloo", *flags]
    run([*two, tmp_path / "two", "--sync-bn"], work, env=NO_TF32)
    output = run([*two, tmp_path / "halves"], work, env=NO_TF32)
    assert f"processes: 2, gloo, {torch.cuda.get_device_name()}, fp32" in output
    assert_alike(tmp_path / "one", tmp_path / "two", 1e-3, 1e-2)
    with pytest.raises(AssertionError):
        assert_alike(tmp_path / "one", tmp_path / "halves", 1e-3, 1e-2)


@two_gpus
def test_two_gpus_with_nccl_train_as_one(work, tmp_path):
    """In mid-epoch too, from a checkpoint of the other."""
    flags = [*SMALL, "--precision", "fp32", "--checkpoint-dir"]
    run([*ONE, *flags, tmp_path / "one"], work, env=NO_TF32)
    for number, command, steps in ((2, torchrun(2), 5), (1, ONE, 17), (2, torchrun(2), 9999)):
        command = [*command, *flags, tmp_path / "two", "--resume", "auto", "--max-steps", steps]
        output = run(command, work, env=NO_TF32)
        assert f"processes: {number}, nccl, {torch.cuda.get_device_name()}" in output
    assert_alike(tmp_path / "one", tmp_path / "two", 1e-4, 1e-3)


@two_gpus
def test_dataparallels_threads_compute_in_the_dtype_asked_for():
    """Autocast's dtype is not handed to nn.DataParallel's threads."""
    net = nn.Linear(4, 4).cuda()
    net.register_forward_pre_hook(lambda *_: torch.set_autocast_dtype("cuda", torch.bfloat16))
    with torch.autocast("cuda", torch.bfloat16):
        assert nn.DataParallel(net)(torch.rand(4, 4).cuda()).dtype == torch.bfloat16
