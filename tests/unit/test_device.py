"""Which GPU a process uses, how many cores and threads; what does not go together is said."""

import os
from types import SimpleNamespace

import joblib
import pytest
import torch

from longrun.device import own_cores, set_threads, set_up_device
from tests.unit.child import Child


@pytest.fixture(autouse=True)
def as_before():
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    yield
    torch.set_num_threads(threads)
    torch.backends.cudnn.benchmark = benchmark


def test_a_process_takes_its_share_of_what_it_may_use():
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    assert own_cores(1) == own_cores(8) == 1
    os.sched_setaffinity(0, cores)


@pytest.mark.parametrize(
    ("wish", "processes", "expected"),
    [
        ("", 2, 4),
        ("1", 2, 4),  # torchrun's, nobody's wish
        ("1", 1, 1),
        ("3", 2, 3),
        ("100000", 2, 8),
        ("many", 2, 4),
    ],
)
def test_threads(wish, processes, expected, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(joblib, "cpu_count", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", wish)
    set_threads(processes)
    assert torch.get_num_threads() == expected


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
    with pytest.raises(ValueError, match=r"with 2 GPUs: start 2$"):  # Horovod's has no --backend
        set_up_device(0, 4, SimpleNamespace())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
    with pytest.raises(
        ValueError, match=r"this GPU has no bf16, .*: add --precision fp32, or fp16"
    ):
        set_up_device(0, 2, SimpleNamespace(precision="bf16"))

    def too_old(device):
        raise RuntimeError("The NVIDIA driver on your system is too old\nfurther lines")

    monkeypatch.setattr(torch.cuda, "set_device", too_old)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=r"is too old \(CUDA_VISIBLE_DEVICES= in front trains"):
        set_up_device(0, 2, nccl)


ONE_GPU = """
import time, types, torch
from longrun.device import set_up_device

torch.cuda.device_count = lambda: 1
torch.cuda.set_device = lambda device: None
torch.cuda.get_device_properties = lambda _: types.SimpleNamespace(uuid="{uuid}")
print(set_up_device(3, 4, types.SimpleNamespace()))
time.sleep(60)
"""


def test_one_visible_gpu_for_each_process():
    """By a mask of its own: number 0 is another GPU in each. The same one is an error."""
    first, other = (Child(ONE_GPU.format(uuid=uuid)) for uuid in "ab")
    assert first.output.readline() == other.output.readline() == "cuda:0\n"
    # As by horovodrun, which gives each process a parent of its own.
    fork = "import os, sys\nif os.fork(): sys.exit(os.wait()[1] >> 8)\n"
    code, said = Child(fork + ONE_GPU.format(uuid="a")).wait()
    first.kill()
    other.kill()
    assert code == 1 and "\nValueError: 4 processes on a node with 1 GPUs: start 1\n" in said
