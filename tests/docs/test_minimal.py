"""The minimal scripts, each started by its own launcher, once: what they say, save and differ in.

Apex is a double here: it proves our calls, not Apex.
"""

import os
import re
import shutil
import signal
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch
from conftest import PYTHON, ROOT, Job, needs_horovod, run
from torch.utils.data import DataLoader, DistributedSampler

from minimal import one_gpu
from tests.launched import cmdline

NAMES = sorted(path.stem for path in (ROOT / "minimal").glob("*.py"))
SEVERAL = [name for name in NAMES if name not in ("one_gpu", "dataparallel")]
# The same to the letter in all that start several processes: the lines that people forget.
SHARED = [
    "        torch.cuda.set_device(",
    "    torch.manual_seed(rank)",
    "    sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank, drop_last",
    "    train_loader = DataLoader(train_set, BATCH_SIZE // world_size, sampler=",
    "    val_loader = DataLoader(val_set, BATCH_SIZE, sampler=range(rank",
    "        sampler.set_epoch(epoch)",
    "        for buffer in net.buffers():",
    "        if rank == 0:",
]
CLUSTER = ROOT / "tests/cluster/slurm/cluster.sh"


def text(name):
    return (ROOT / f"minimal/{name}.py").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_is_short_and_needs_no_other_file(name):
    assert len(text(name).splitlines()) <= 80
    imported = set(re.findall(r"^(?:import|from) (\w+)", text(name), re.M))
    assert imported <= {"gc", "os", "tempfile", "torch", "sklearn", "apex", "horovod"}
    if name in SEVERAL:
        assert [line for line in SHARED if f"\n{line}" not in text(name)] == []


@pytest.mark.parametrize("name", SEVERAL)
def test_several_processes_take_as_many_steps_as_one(name):
    """By the scripts' own lines. A sampler that pads would have 38 steps for two processes."""
    for images, world_size in [(2431, 1), (2431, 2), (2431, 4), (1438, 2)]:
        lengths = set()
        for rank in range(world_size):
            known = {"rank": rank, "world_size": world_size, "train_set": range(images)}
            known |= {"DistributedSampler": DistributedSampler, "DataLoader": DataLoader}
            lines = re.findall(r"^    ((?:sampler|train_loader) = .*)$", text(name), re.M)
            exec("\n".join(lines), known | {"BATCH_SIZE": 64}, known)
            lengths.add(len(known["train_loader"]))
        assert lengths == {images // 64}


# ---- Started by their launchers


def command_of(name, folder, processes=2):
    """(command, environment) of a script's docstring, with two processes, to be run in a folder."""
    (folder / "minimal").symlink_to(ROOT / "minimal")
    (command,) = re.findall(r"^\$ (.*)$", text(name), re.M)
    command = command.replace("node=2", f"node={processes}")
    command = command.replace("node=4", "node=1").replace("-c 8", "-c 1")  # srun's: on two nodes
    env = {"PATH": f"{Path(PYTHON).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    if name == "apex_distributed":
        env["PYTHONPATH"] = str(ROOT / "tests/apex_doubles/today")
    return ["env", *command.split()], env


def start(name, folder):
    """Its output."""
    command, env = command_of(name, folder)
    if name != "distributed_slurm_main":
        return run(command, folder, env=env)
    begun = ["bash", "-c", f'eval "$({CLUSTER} start {folder}/slurm)" && echo "$SLURM_CONF"']
    try:
        conf = subprocess.run(begun, check=True, timeout=60, stdout=subprocess.PIPE, text=True)
        return run(command, folder, env=env | {"SLURM_CONF": conf.stdout.strip()})
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


@pytest.mark.full
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

    if name in ("multiprocessing_distributed", "distributed_slurm_main"):
        torchruns = trained("distributed")[1]  # the launcher changes no bit
        assert weights.keys() == torchruns.keys()
        assert all(weights[key].equal(torchruns[key]) for key in weights)


def validation_set():
    """The one that the scripts make, by their own lines."""
    lines = text("one_gpu").splitlines()
    first = next(i for i, line in enumerate(lines) if "digits = " in line)
    last = next(i for i, line in enumerate(lines) if "val_set = " in line)
    found = vars(one_gpu).copy()
    exec("\n".join(line.strip() for line in lines[first : last + 1]), found)
    return found["val_set"]


@pytest.mark.full
@pytest.mark.parametrize("name", ["distributed", "multiprocessing_distributed"])
def test_what_a_launcher_leaves_that_is_killed(name, tmp_path):
    """As README.md says: torchrun's processes train on, mp.spawn's end."""
    command, env = command_of(name, tmp_path)
    long = text(name).replace("EPOCHS = 5", "EPOCHS = 500")
    (tmp_path / "minimal").unlink()
    (tmp_path / "minimal").mkdir()
    (tmp_path / f"minimal/{name}.py").write_text(long)
    job = Job(command, tmp_path, env)
    job.wait_for("epoch 1:")
    os.kill(job.process.pid, signal.SIGKILL)
    if name == "distributed":
        job.wait_for("epoch 9:")
        left = [pid for pid in job.pids() if "minimal/" in cmdline(pid)]
        assert len(left) == 2
        job.kill()
    code, _ = job.wait(20)  # fails if a process is left
    assert code == -signal.SIGKILL


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", ["one_gpu", "dataparallel", "distributed", "fsdp_distributed"])
def test_trains_on_a_gpu(name, tmp_path):
    """And prints nothing else, such as a warning."""
    command, env = command_of(name, tmp_path, processes=1)
    lines = run(command, tmp_path, env=env).splitlines()
    assert len(lines) == one_gpu.EPOCHS and float(lines[-1].split()[2]) >= 95
    weights = torch.load(tmp_path / "digits.pth", weights_only=True, map_location="cpu")
    one_gpu.build_net().load_state_dict(weights)
