"""minimal/tensor_parallel.py and minimal/pipeline.py: each trains as one process does; HSDP.

What they are compared with is written here: a plain loop over the net of minimal/transformer.py.
"""

import re
import shutil
from functools import cache

import pytest
import torch
from conftest import ONE_THREAD, ROOT, run
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from minimal import tensor_parallel, transformer
from tests.docs.copies import USER, commands_of, edited, equal, patched
from tests.docs.ranks import good, run_ranks

pytestmark = pytest.mark.full
TEXT = (ROOT / "docs/bugs.md").read_bytes()[: 8 * 24 * 64 + 1]  # 8 steps in an epoch
WINDOWS = torch.tensor(list(TEXT)).unfold(0, 65, 64)
FILES = 'FILES = sorted(Path(__file__).parents[1].glob("docs/*[a-z].md"))'
# What a process saves for the tests: the loss of each step (of its group; in a pipeline 0, but in
# the last stage), the first step's gradients, and the norm of the first three after clipping.
PROBE = """            if not probe["losses"]:
                probe["gradients"] = {{n: {whole} for n, w in net.named_parameters()}}
            probe["losses"].append({loss})
"""
CLIPPED = """            if len(probe["clipped"]) < 3:
                norms = torch.stack([({whole}).norm() for w in net.parameters()])
                probe["clipped"].append(norms.norm().item())
"""
WORDS = {
    "tensor_parallel": {
        "whole": "w.grad.full_tensor()",
        "loss": "loss.full_tensor().item() / world_size",
    },
    "pipeline": {
        "whole": "w.grad.clone()",
        "loss": "float(sum(x.detach() for x in losses)) / PARTS",
    },
}


def copy(folder, name, epochs, *edits, diff=None):
    """A script that trains on TEXT and saves what the tests look at: probe0.pth ..."""
    (folder / "minimal").mkdir(parents=True, exist_ok=True)
    (folder / "text").write_bytes(TEXT)
    script = folder / f"minimal/{name}.py"
    script.write_text((ROOT / f"minimal/{name}.py").read_text())
    assert diff is None or patched(script, f"bugs/{diff}.diff")
    before = {
        "    for epoch in range(saved": "    probe = {'losses': [], 'clipped': []}\n",
        "            total += ": PROBE.format(**WORDS[name]),
        "            optimizer.step()": CLIPPED.format(**WORDS[name]),
        "    del net, optimizer": "    torch.save(probe, f'probe{rank}.pth')\n",
    }
    edits = [*edits, (FILES, "FILES = [Path('text')]"), ("EPOCHS = 2", f"EPOCHS = {epochs}")]
    edits += [(line, more + line) for line, more in before.items()]
    script.write_text(edited(script.read_text(), edits))
    return script


class Run:
    """What the processes of a copy have found, in a folder."""

    def __init__(self, folder, name, ranks):
        probes = [torch.load(folder / f"probe{rank}.pth") for rank in range(ranks)]
        self.folder = folder
        self.losses = [sum(step) for step in zip(*(one["losses"] for one in probes), strict=True)]
        self.gradients = {n: x for one in probes for n, x in one["gradients"].items()}
        clipped = torch.tensor([one["clipped"] for one in probes])
        if name == "pipeline":  # each stage has its own weights
            clipped = clipped.norm(dim=0, keepdim=True)
        else:
            self.gradients = tensor_parallel.reordered(self.gradients, 4, 3)
        self.clipped = clipped[0].tolist()

    def plain(self):
        """The net of minimal/transformer.py with the saved weights."""
        net = transformer.Net()
        net.load_state_dict(torch.load(self.folder / "transformer.pth")["net"])
        return net


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A function: the Run of a script on some processes, done once."""

    @cache
    def once(name, ranks, epochs=1, diff=None, by_torchrun=False):
        folder = tmp_path_factory.mktemp(name)
        script = copy(folder, name, epochs, diff=diff)
        if by_torchrun:  # as its first lines say
            (command,) = commands_of(script.read_text())
            command = command.replace("node=2", f"node={ranks}").split()
            output = run(["env", *command], folder, env=USER | ONE_THREAD)
        else:
            output = good(script, ranks=ranks, cwd=folder)
        found = Run(folder, name, ranks)
        steps = len(found.losses) // epochs
        for epoch in range(epochs):
            mean = sum(found.losses[steps * epoch :][:steps]) / steps
            assert f"epoch {epoch}: loss {mean:.4f}\n" in output, output
        return found

    return once


@cache
def alone(name, epochs=1):
    """The same of one process, with its net: (losses, gradients, clipped norms, net)."""
    torch.manual_seed(0)
    net = transformer.Net()
    if name == "tensor_parallel":  # which takes the same rows of qkv for others
        net.load_state_dict(tensor_parallel.reordered(net.state_dict(), 4, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    sampler = DistributedSampler(WINDOWS, num_replicas=1, rank=0)
    losses, gradients, clipped = [], {}, []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for text in DataLoader(WINDOWS, 24, sampler=sampler):
            loss = loss_of(net, text)
            optimizer.zero_grad()
            loss.backward()
            gradients = gradients or {n: w.grad.clone() for n, w in net.named_parameters()}
            norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0).item()
            optimizer.step()
            losses.append(loss.item())
            clipped.append(min(norm, 1.0))
    return losses, gradients, clipped[:3], net


def loss_of(net, windows):
    return nn.functional.nll_loss(net(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def largest(found, right):
    """The largest difference of two lists, or of two dicts of tensors."""
    if isinstance(found, dict):
        assert found.keys() == right.keys()
        return max((found[name] - right[name]).abs().max().item() for name in found)
    return max(abs(x - y) for x, y in zip(found, right, strict=True))


@pytest.mark.parametrize(
    "name, ranks, by_torchrun",
    [
        ("tensor_parallel", 2, False),
        ("tensor_parallel", 4, True),
        ("pipeline", 2, False),
        ("pipeline", 3, True),
        ("pipeline", 4, False),
    ],
)
def test_trains_as_one_process(name, ranks, by_torchrun, trained):
    """Losses, gradients, clipping; and the file, in the plain net."""
    epochs = 1 if ranks > 2 else 2
    found = trained(name, ranks, epochs, by_torchrun=by_torchrun)
    losses, gradients, clipped, net = alone(name, epochs)
    assert len(losses) == 8 * epochs and clipped.count(1.0) > 1
    assert largest(found.losses, losses) < 1e-5
    assert largest(found.gradients, gradients) < 1e-6
    assert largest(found.clipped, clipped) < 1e-5
    with torch.no_grad():
        assert abs(loss_of(found.plain(), WINDOWS) - loss_of(net, WINDOWS)) < 1e-5


@pytest.mark.parametrize("name", ["tensor_parallel", "pipeline"])
def test_killed_while_it_saves(name, trained, tmp_path):
    """In the second epoch: the file is that of the first, and the losses are as without a stop."""
    kill = "            if epoch == 1:\n                os.kill(os.getpid(), 9)\n"
    replace = "            os.replace("
    script = copy(tmp_path, name, 2, (replace, kill + replace))
    codes, _ = run_ranks(script, ranks=2, cwd=tmp_path)
    assert codes[0] == -9
    assert torch.load(tmp_path / "transformer.pth")["epoch"] == 1
    good(copy(tmp_path, name, 2), ranks=2, cwd=tmp_path)
    straight, resumed = trained(name, 2, 2), Run(tmp_path, name, 2)
    assert resumed.losses == straight.losses[8:]
    assert equal(resumed.plain().state_dict(), straight.plain().state_dict())


def test_each_goes_on_from_the_others_file(trained, tmp_path):
    """Four that share layers by two, a pipeline of three, two that share layers: as one process."""
    first = trained("tensor_parallel", 4, by_torchrun=True)
    shutil.copy(first.folder / "transformer.pth", tmp_path)
    losses = first.losses
    for epochs, name, ranks in [(2, "pipeline", 3), (3, "tensor_parallel", 2)]:
        good(copy(tmp_path, name, epochs), ranks=ranks, cwd=tmp_path)
        losses = losses + Run(tmp_path, name, ranks).losses

    assert largest(losses, alone("tensor_parallel", 3)[0]) < 1e-5


@pytest.mark.parametrize(
    "name, ranks, edit, said",
    [
        ("tensor_parallel", 3, None, "3 processes must be a multiple of TENSOR 2"),
        (
            "tensor_parallel",
            3,
            ("TENSOR = 2", "TENSOR = 3"),
            "HEADS 4 and 256 must be multiples of TENSOR 3",
        ),
        ("tensor_parallel", 10, None, "BATCH_SIZE 24 must be a multiple of 5 (groups)"),
        ("pipeline", 2, ("PARTS = 8", "PARTS = 5"), "BATCH_SIZE 24 must be a multiple of PARTS 5"),
        ("pipeline", 5, None, "5 processes: more than PARTS 8 or than BLOCKS + 2"),
        (
            "pipeline",
            3,
            ("PARTS = 8", "PARTS = 2"),
            "3 processes: more than PARTS 2 or than BLOCKS + 2",
        ),
    ],
)
def test_what_would_be_wrong_in_silence_is_one_line(name, ranks, edit, said, tmp_path):
    """One process is enough: each ends before it waits for others."""
    script = copy(tmp_path, name, 1, *([edit] if edit else []))
    found = run_ranks(script, env={"WORLD_SIZE": ranks}, cwd=tmp_path)
    assert found == ([1], f"{said}\n")


@pytest.mark.parametrize("name", ["tensor_parallel", "pipeline"])
def test_a_file_that_one_process_lacks(name, tmp_path):
    script = copy(tmp_path, name, 1, ("SAVED.exists()", "rank == 0"))
    torch.save({"epoch": 1}, tmp_path / "transformer.pth")
    codes, output = run_ranks(script, ranks=2, cwd=tmp_path)
    said = "the processes differ in (bytes in FILES, epochs in SAVED): [(12289, 1), (12289, 0)]"
    assert codes == [1, 1] and output.count(said) == 2


def test_copies_of_fsdp_train_as_one(tmp_path):
    """Two copies in two parts each, and one in four: the same weights, to rounding."""
    weights = []
    for name in ("hsdp", "fsdp"):
        (tmp_path / name).mkdir()
        text = (ROOT / f"minimal/{name}_distributed.py").read_text()
        script = tmp_path / name / "script.py"
        script.write_text(edited(text, [("EPOCHS = 5", "EPOCHS = 1")]))
        good(script, ranks=4)
        weights.append(torch.load(script.parent / "digits.pth"))
    torch.testing.assert_close(*weights)


def test_copies_that_do_not_divide_the_processes(tmp_path):
    script = tmp_path / "script.py"
    text = (ROOT / "minimal/hsdp_distributed.py").read_text()
    script.write_text(edited(text, [("BATCH_SIZE = 64", "BATCH_SIZE = 63")]))
    said = "3 processes must be a multiple of COPIES 2\n"
    assert run_ranks(script, env={"WORLD_SIZE": 3}) == ([1], said)


def other_loss(found, right):
    """Whether any step's is another one."""
    pairs = zip(found.losses, right[0], strict=False)  # it may make fewer steps
    return max(abs(one - other) for one, other in pairs) > 1e-2


def longer(found, right):
    """Whether what is left of the gradients after clipping to 1 is still longer."""
    return max(found.clipped) > 1.001


MISTAKES = {
    "tensor_sampler_by_rank": other_loss,
    "tensor_qkv_cut": other_loss,
    "tensor_clip_own_part": longer,
    "pipeline_sampler_by_rank": other_loss,
    "pipeline_clip_per_stage": longer,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_mistake_has_its_symptom(mistake, trained):
    """No error, and a loss that falls. The right script must not show it."""
    name = re.match("--- minimal/(.*).py", (ROOT / f"bugs/{mistake}.diff").read_text())[1]
    found, right = trained(name, 2, diff=mistake), trained(name, 2, 2)
    # Without the other order of its rows one process is the plain net, as the pipeline is.
    one = alone("pipeline" if mistake == "tensor_qkv_cut" else name)
    assert found.losses[-1] < found.losses[0] - 0.5
    assert MISTAKES[mistake](found, one)
    assert not MISTAKES[mistake](right, alone(name))
