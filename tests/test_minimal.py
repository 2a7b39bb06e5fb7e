"""The minimal scripts, each started by its own launcher, once: what they say, save and differ in.

Apex is a double here: it proves our calls, not Apex.
"""

import difflib
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch
from conftest import PYTHON, ROOT, needs_horovod, run
from torch.utils.data import DataLoader

from minimal import one_gpu

NAMES = sorted(path.stem for path in (ROOT / "minimal").glob("*.py"))
# Lines that a script adds to one_gpu.py: a little above what they are.
CEILINGS = {
    "dataparallel": 4,
    "distributed": 31,
    "multiprocessing_distributed": 34,
    "distributed_slurm_main": 34,
    "apex_distributed": 35,
    "horovod_distributed": 24,
    "fsdp_distributed": 37,
}
# The same to the letter in all that start several processes: the lines that people forget.
SHARED = [
    "        torch.cuda.set_device(",
    "    torch.manual_seed(rank)",
    "    sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank)",
    "    train_loader = DataLoader(train_set, BATCH_SIZE // world_size, sampler=",
    "    val_loader = DataLoader(val_set, BATCH_SIZE, sampler=range(rank",
    "        sampler.set_epoch(epoch)",
    "        for buffer in net.buffers():",
    "        if rank == 0:",
]
CLUSTER = ROOT / "tests/slurm/cluster.sh"


def text(name):
    return (ROOT / f"minimal/{name}.py").read_text()


def start(name, folder, processes=2):
    """Runs the command of a script's docstring, with two processes; returns its output."""
    (folder / "minimal").symlink_to(ROOT / "minimal")
    (command,) = re.findall(r"^\$ (.*)$", text(name), re.M)
    command = command.replace("node=2", f"node={processes}")
    command = command.replace("node=4", "node=1").replace("-c 8", "-c 1")  # srun's: on two nodes
    env = {"PATH": f"{Path(PYTHON).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    env["PLAIN_END"] = "1"  # gloo can fail there: see tests/start/sitecustomize.py
    if name == "apex_distributed":
        env["PYTHONPATH"] = str(ROOT / "tests/apex_doubles/today")
    if name != "distributed_slurm_main":
        return run(["env", *command.split()], folder, env=env)
    begun = ["bash", "-c", f'eval "$({CLUSTER} start {folder}/slurm)" && echo "$SLURM_CONF"']
    try:
        conf = subprocess.run(begun, check=True, timeout=60, stdout=subprocess.PIPE, text=True)
        return run(["env", *command.split()], folder, env=env | {"SLURM_CONF": conf.stdout.strip()})
    finally:
        subprocess.run([CLUSTER, "stop", folder / "slurm"], check=True, timeout=60)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A function: name -> (output, state_dict) of its only run."""

    @cache
    def once(name):
        if name == "horovod_distributed":
            needs_horovod()
        path = os.environ["PATH"] + ":/usr/sbin"
        slurm = shutil.which("slurmctld", path=path) and os.getuid() == 0
        if name == "distributed_slurm_main" and not slurm and "CI" not in os.environ:
            pytest.skip("needs root and: apt-get install slurmctld slurmd slurm-client munge")
        folder = tmp_path_factory.mktemp(name)
        output = start(name, folder).replace("[0]<stdout>:", "")  # horovodrun's
        assert {path.name for path in folder.iterdir()} == {"minimal", "digits.pth"}
        return output, torch.load(folder / "digits.pth", weights_only=True)

    return once


@pytest.mark.parametrize("name", NAMES)
def test_trains_and_saves_what_the_plain_net_loads(name, trained):
    """Only rank 0 speaks, and what it says of the last epoch is true of the file, to an image.

    The shares of 359 images differ in length: to count one twice would show.
    """
    output, weights = trained(name)
    lines = [line for line in output.splitlines() if not line.startswith("double: ")]
    said = [re.fullmatch(r"epoch (\d): (\d+\.\d) % correct", line) for line in lines]
    assert all(said) and [int(line[1]) for line in said] == [*range(one_gpu.EPOCHS)], output
    assert float(said[-1][2]) >= 95

    net = one_gpu.build_net()
    net.load_state_dict(weights)
    net.eval()
    val_set = validation_set()
    with torch.no_grad():
        batches = DataLoader(val_set, one_gpu.BATCH_SIZE)
        correct = sum((net(images).argmax(1) == target).sum().item() for images, target in batches)
    assert len(val_set) == 359 and said[-1][2] == f"{100 * correct / 359:.1f}"


def validation_set():
    """The one that the scripts make, by their own lines."""
    lines = text("one_gpu").splitlines()
    first = next(i for i, line in enumerate(lines) if "digits = " in line)
    last = next(i for i, line in enumerate(lines) if "val_set = " in line)
    found = vars(one_gpu).copy()
    exec("\n".join(line.strip() for line in lines[first : last + 1]), found)
    return found["val_set"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", ["one_gpu", "dataparallel", "distributed", "fsdp_distributed"])
def test_trains_on_a_gpu(name, tmp_path):
    """And prints nothing else, such as a warning."""
    lines = start(name, tmp_path, processes=1).splitlines()
    assert len(lines) == one_gpu.EPOCHS and float(lines[-1].split()[2]) >= 95
    weights = torch.load(tmp_path / "digits.pth", weights_only=True, map_location="cpu")
    one_gpu.build_net().load_state_dict(weights)


@pytest.mark.parametrize("name", ["multiprocessing_distributed", "distributed_slurm_main"])
def test_the_launcher_changes_no_bit(name, trained):
    ours, torchruns = trained(name)[1], trained("distributed")[1]
    assert ours.keys() == torchruns.keys()
    assert all(ours[key].equal(torchruns[key]) for key in ours)


@pytest.mark.parametrize("name", NAMES)
def test_is_short_and_needs_no_other_file(name):
    assert len(text(name).splitlines()) <= 80
    imported = set(re.findall(r"^(?:import|from) (\w+)", text(name), re.M))
    assert imported <= {"gc", "os", "tempfile", "torch", "sklearn", "apex", "horovod"}


@pytest.mark.parametrize("name", CEILINGS)
def test_adds_its_strategy_only(name):
    lines = list(difflib.unified_diff(*(text(n).splitlines() for n in ("one_gpu", name)), n=0))
    added = [line for line in lines[2:] if line[0] == "+"]
    assert len(added) <= CEILINGS[name], "\n".join(added)
    assert {*NAMES} == {"one_gpu", *CEILINGS}
    if name != "dataparallel":
        assert [line for line in SHARED if f"\n{line}" not in text(name)] == []
