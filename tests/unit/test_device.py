"""Which GPU a process uses, how many cores and threads; what does not go together is said."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

from common import device
from common.device import cpu_quota, own_cores, set_threads, set_up_device


@pytest.fixture(autouse=True)
def as_before():
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    yield
    torch.set_num_threads(threads)
    torch.backends.cudnn.benchmark = benchmark


QUOTAS = {
    "none": ({}, float("inf")),
    "version 2": ({"cpu.max": "150000 100000\n"}, 1.5),
    "version 2, no limit": ({"cpu.max": "max 100000\n"}, float("inf")),
    "version 1": (
        {"cpu/cpu.cfs_quota_us": "6400000\n", "cpu/cpu.cfs_period_us": "100000\n"},
        64,
    ),
    "version 1, no limit": (
        {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
        float("inf"),
    ),
}


@pytest.mark.parametrize("case", QUOTAS)
def test_quotas(case, tmp_path):
    files, expected = QUOTAS[case]
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert cpu_quota(tmp_path) == expected


@pytest.mark.parametrize(
    ("cores", "quota", "processes", "expected"),
    [
        (128, float("inf"), 8, 16),
        (128, 64.0, 8, 8),  # a pod with cpu: 64 on a node of 128
        (4, 64.0, 1, 4),  # and some cores only
        (128, 1.5, 1, 1),
        (2, 0.5, 8, 1),
    ],
)
def test_a_process_takes_its_share_of_what_it_may_use(
    cores, quota, processes, expected, monkeypatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(device, "cpu_quota", lambda: quota)
    assert own_cores(processes) == expected


@pytest.mark.parametrize(
    ("wish", "processes", "expected"),
    [
        (None, 2, 4),
        ("1", 2, 4),  # torchrun's, nobody's wish
        ("1", 1, 1),
        ("3", 2, 3),
        ("100000", 2, 8),
        ("many", 2, 4),
    ],
)
def test_threads(wish, processes, expected, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(device, "cpu_quota", lambda: float("inf"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if wish:
        monkeypatch.setenv("OMP_NUM_THREADS", wish)
    set_threads(processes)
    assert torch.get_num_threads() == expected


MANY_THREADS = """
from types import SimpleNamespace
import torch
from common.device import set_up_device
set_up_device(0, 1, SimpleNamespace())
a = torch.ones(1000, 1000)
print(float((a @ a)[0, 0]))
"""


def test_more_threads_than_openmp_can_start():
    env = os.environ | {"OMP_NUM_THREADS": "100000", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", MANY_THREADS]
    output = subprocess.check_output(command, cwd=ROOT, env=env, text=True, timeout=60)
    assert output == "1000.0\n"


def test_gpus_and_processes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    nccl, gloo = SimpleNamespace(backend=None), SimpleNamespace(backend="gloo")
    assert set_up_device(1, 2, nccl) == torch.device("cuda:1")
    assert torch.backends.cudnn.benchmark
    assert set_up_device(3, 4, gloo) == torch.device("cuda:1")  # shared
    assert chosen == [torch.device("cuda:1")] * 2
    with pytest.raises(ValueError, match="4 processes on a node with 2 GPUs: start 2, or let them"):
        set_up_device(0, 4, nccl)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
    bf16 = SimpleNamespace(precision="bf16")
    with pytest.raises(ValueError, match=r"this GPU has no bf16, .*: add --precision fp16 or fp32"):
        set_up_device(0, 2, bf16)


def test_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert set_up_device(3, 4, SimpleNamespace()) == torch.device("cpu")
    with pytest.raises(ValueError, match="--backend nccl needs GPUs and this node has none: use"):
        set_up_device(0, 1, SimpleNamespace(backend="nccl"))
    with pytest.raises(ValueError, match="--sync-bn needs GPUs"):
        set_up_device(0, 1, SimpleNamespace(sync_bn=True))


def test_gpus_that_torch_cannot_use(monkeypatch):
    def fail(device):
        raise RuntimeError("The NVIDIA driver on your system is too old\nfurther lines")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", fail)
    with pytest.raises(ValueError, match=r"is too old \(CUDA_VISIBLE_DEVICES= in front trains"):
        set_up_device(0, 1, SimpleNamespace())
