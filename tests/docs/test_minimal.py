"""The minimal scripts, each started by its own launcher, once: what they say, and what they save.

Apex is a double here: it proves our calls, not Apex.
"""

import os
import re
import signal
import subprocess
import sys
from functools import cache

import pytest
import torch
from conftest import ROOT, Job, needs_horovod, run

from minimal import one_gpu
from tests.cluster.test_slurm import CLUSTER, missing
from tests.docs.copies import USER, accuracy, commands_of, edited, equal, predicted, validation_set
from tests.docs.ranks import good
from tests.launched import cmdline

TASKS = {
    "transformer",
    "tensor_parallel",
    "pipeline",
    "stream",
    "pretrained",
    "segmentation",
    "gan",
}  # with tests of their own
NAMES = sorted({path.stem for path in (ROOT / "minimal").glob("*.py")} - TASKS)


def command_of(name, folder, processes=2, epochs=one_gpu.EPOCHS):
    """(command, environment) of a script's docstring, for a copy alone in a folder."""
    text = (ROOT / f"minimal/{name}.py").read_text()
    (folder / "minimal").mkdir()
    (folder / f"minimal/{name}.py").write_text(text.replace("EPOCHS = 5", f"EPOCHS = {epochs}"))
    (command,) = commands_of(text)
    command = command.replace("node=2", f"node={processes}")
    command = command.replace("node=4", "node=1").replace("-c 8", "-c 1")  # srun's: on two nodes
    env = USER | {"OMP_NUM_THREADS": "1"}
    if name == "apex_distributed":
        env["PYTHONPATH"] = str(ROOT / "tests/apex_doubles/today")
    return ["env", *command.split()], env


@pytest.mark.parametrize(
    "scripts", ["minimal/one_gpu.py", "minimal/distributed.py", "doctor/**/*.py"]
)
def test_needs_torch_and_scikit_learn_alone(scripts):
    text = "".join(path.read_text() for path in ROOT.glob(scripts))
    imports = re.findall(r"^(?:import|from) (\w+)", text, re.M)
    assert {*imports} - sys.stdlib_module_names <= {"torch", "sklearn"}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """The environment in which srun finds a cluster of two nodes."""
    if missing and "CI" not in os.environ:
        pytest.skip("needs root and: apt-get install slurmctld slurmd slurm-client munge")
    folder = tmp_path_factory.mktemp("slurm") / "cluster"
    begun = ["bash", "-c", f'eval "$({CLUSTER} start {folder})" && echo "$SLURM_CONF"']
    try:
        conf = subprocess.run(begun, check=True, timeout=150, stdout=subprocess.PIPE, text=True)
        yield {"SLURM_CONF": conf.stdout.strip()}
    finally:
        subprocess.run([CLUSTER, "stop", folder], check=True, timeout=150)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, request):
    """A function: name -> (output, state_dict) of its only run."""

    @cache
    def once(name):
        if name == "horovod_distributed":
            needs_horovod()
        folder = tmp_path_factory.mktemp(name)
        command, env = command_of(name, folder)
        if name == "distributed_slurm_main":
            env |= request.getfixturevalue("slurm")
        output = run(command, folder, env=env).replace("[0]<stdout>:", "")  # horovodrun's
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
    lines = re.sub(r"double: FusedSGD\n?", "", output).strip().splitlines()  # two may share a line
    said = [re.fullmatch(r"epoch (\d): (\d+\.\d) % correct", line) for line in lines]
    assert all(said) and [int(line[1]) for line in said] == [*range(one_gpu.EPOCHS)], output
    assert float(said[-1][2]) >= 95 and said[-1][2] == accuracy(weights)


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["multiprocessing_distributed", "distributed_slurm_main", "by_hand"]
)
def test_ends_with_the_bits_of_ddp_under_torchrun(name, trained):
    assert equal(trained(name)[1], trained("distributed")[1])


@pytest.mark.full
def test_fsdp_is_ddp_in_parts(trained):
    torch.testing.assert_close(trained("fsdp_distributed")[1], trained("distributed")[1])


@pytest.mark.full
def test_fsdp_validates_in_parts_of_unlike_length(tmp_path):
    """Of 357 images, 179 and 178: two batches and one. No process waits, each image counts once.

    After a step each process has half of every weight, and no more.
    """
    text, line = (ROOT / "minimal/fsdp_distributed.py").read_text(), "        net.eval()"
    probe = """
        kept = [(w.numel(), w.to_local().numel()) for w in net.parameters()]
        torch.save(kept, f"kept{rank}.pth")"""
    edits = [
        ("EPOCHS = 5", "EPOCHS = 1"),
        ("= 64  #", "= 178  #"),
        ("range(4, 1797, 5)", "range(4, 1787, 5)"),
        (line, line + probe),
    ]
    (tmp_path / "script.py").write_text(edited(text, edits))
    output = good(tmp_path / "script.py", ranks=2)
    weights = torch.load(tmp_path / "digits.pth", weights_only=True)
    right = (predicted(weights) == validation_set()[1])[:357].sum().item()
    assert output == f"epoch 0: {100 * right / 357:.1f} % correct\n"
    for rank in (0, 1):
        kept = torch.load(tmp_path / f"kept{rank}.pth")
        assert kept and all(2 * part == whole for whole, part in kept)


@pytest.mark.full
@pytest.mark.parametrize("name", ["distributed", "multiprocessing_distributed"])
def test_what_a_launcher_leaves_that_is_killed(name, tmp_path):
    """As docs/faq.md says: torchrun's processes train on, mp.spawn's end."""
    command, env = command_of(name, tmp_path, epochs=500)
    job = Job(command, tmp_path, env)
    job.wait_for("epoch 1:")
    os.kill(job.process.pid, signal.SIGKILL)
    if name == "distributed":
        job.wait_for("epoch 9:")
        assert len([pid for pid in job.pids() if "minimal/" in cmdline(pid)]) == 2
        job.kill()
    code, _ = job.wait(60)  # fails if a process is left
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
