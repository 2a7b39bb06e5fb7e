"""minimal/stream.py: trains as one process does, and takes each image of an epoch exactly once.

What it is compared with is written here: a plain loop over the same images.
"""

import shutil
import tarfile
from collections import Counter
from functools import cache

import pytest
import torch
from conftest import ONE_THREAD, ROOT, run, soak
from sklearn.datasets import load_digits
from torch import nn

from minimal import stream
from tests.docs.copies import USER, commands_of, edited, equal, patched, validation_set
from tests.docs.ranks import good, run_ranks

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
IMAGES = torch.tensor(load_digits().images, dtype=torch.float32).flatten(1) / 16
NUMBER = {tuple(image.tolist()): i for i, image in enumerate(IMAGES)}
TRAIN = [i for i in range(1797) if i % 5 < 4]
MISTAKES = {"stream_join", "stream_starts_again"}
LOADER = "        for images, target in steps_of(train_stream):"
# What a process saves for the tests whenever the script saves.
PROBE = """
class Probe:
    steps = []
    def before(self, net):
        self.weights = {n: w.detach().clone() for n, w in net.named_parameters()}
    def after(self, net, loss, images, target):
        gradients = {n: w.grad.clone() for n, w in net.named_parameters()}
        self.steps.append((self.weights, gradients, loss.item(), images, target))
"""


def copy(folder, *edits, diff=None, epochs=1, tag=""):
    """A script that saves what the tests look at: probe0.pth ... of rank 0 ..."""
    (folder / "minimal").mkdir(parents=True, exist_ok=True)
    script = folder / "minimal/stream.py"
    script.write_text((ROOT / "minimal/stream.py").read_text())
    assert diff is None or patched(script, f"bugs/{diff}.diff")
    text = edited(script.read_text(), [*edits, ("EPOCHS = 5", f"EPOCHS = {epochs}")])
    step = "optimizer.step()\n"
    loss = "total" if " total = " in text else "loss"
    text = text.replace(step, f"{step[:-1]}; probe.after(net, {loss}, images, target)\n")
    text = text.replace("optimizer.zero_grad()", "optimizer.zero_grad(); probe.before(net)")
    text = text.replace("def main():", f"{PROBE}\ndef main():\n    probe = Probe()")
    text = text.replace(
        "        if rank == 0:\n            state",
        f"        torch.save(probe.steps, f'probe{{rank}}{tag}.pth')\n"
        "        if rank == 0:\n            state",
    )
    text = text.replace("dist.all_reduce(correct)", "dist.all_reduce(correct); print(correct[1])")
    script.write_text(text)
    return script


class Run:
    """The steps of all processes."""

    def __init__(self, folder, ranks, tag=""):
        self.folder = folder
        self.probes = [torch.load(folder / f"probe{rank}{tag}.pth") for rank in range(ranks)]
        self.steps = max(map(len, self.probes))

    def of(self, step):
        """(weights before it, gradients, losses, images, classes) of a step, images of all."""
        some = [probe[step] for probe in self.probes if step < len(probe)]
        images, target = (torch.cat([one[i] for one in some]) for i in (3, 4))
        return *some[0][:2], [one[2] for one in some], images, target

    def items(self, step):
        return sorted(NUMBER[tuple(image.tolist())] for image in self.of(step)[3].flatten(1))

    def epoch(self):
        return Counter(i for step in range(self.steps) for i in self.items(step))

    def share_of_gradient(self, step):
        """How long the gradient of a step is, along the mean of its images': 1 if right."""
        weights, found, _, images, target = self.of(step)
        net = stream.build_net()
        net.load_state_dict(weights)
        nn.functional.cross_entropy(net(images), target).backward()
        found = torch.cat([found[n].flatten() for n, _ in net.named_parameters()])
        right = torch.cat([w.grad.flatten() for w in net.parameters()])
        return (found @ right / right.square().sum()).item()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A function: the Run of a script on some processes, for an epoch, done once."""

    @cache
    def once(ranks, diff=None, by_torchrun=False):
        folder = tmp_path_factory.mktemp("stream")
        script = copy(folder, diff=diff)
        if by_torchrun:  # as its first lines say
            (command,) = commands_of(script.read_text())
            command = command.replace("node=2", f"node={ranks}").split()
            output = run(["env", *command], folder, env=USER | ONE_THREAD)
        else:
            output = good(script, ranks=ranks, cwd=folder)
        found = Run(folder, ranks)
        found.output = output
        return found

    return once


@pytest.mark.parametrize("ranks, by_torchrun", [(2, True), (3, False), soak(4, False)])
def test_trains_as_one_process(ranks, by_torchrun, trained):
    """Losses of all steps, gradients of the first; the images of each step are the same."""
    found, one = trained(ranks, by_torchrun=by_torchrun), trained(1)
    assert found.epoch() == Counter(TRAIN) and found.steps == 20 == one.steps
    torch.manual_seed(0)
    net = stream.build_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(found.steps):
        _, gradients, losses, images, target = found.of(step)
        assert found.items(step) == one.items(step) and len(target) == (72 if step < 19 else 70)
        loss = nn.functional.cross_entropy(net(images), target)
        optimizer.zero_grad()
        loss.backward()
        assert abs(loss.item() - sum(losses) / len(target)) < 1e-5
        if step == 0:
            for name, weight in net.named_parameters():
                assert (gradients[name] - weight.grad).abs().max() < 1e-5
        optimizer.step()


@pytest.mark.parametrize("ranks", [2, 3])
def test_validation_is_exact(ranks, trained):
    found = trained(ranks, by_torchrun=ranks == 2)
    images, target = validation_set()
    net = stream.build_net()
    net.load_state_dict(torch.load(found.folder / "stream.pth")["net"])
    correct = (net(images).argmax(dim=1) == target).sum().item()
    assert f"epoch 0: {100 * correct / 359:.1f} % correct" in found.output
    assert found.output.count("tensor(359.)") == ranks


def killed_and_resumed(folder, ranks, then, *edits, diff=None):
    """The Run of the steps before the file that was left, and of those after it."""
    kill = f"{LOADER}\n            if step == 10:\n                os.kill(os.getpid(), 9)"
    script = copy(folder, (LOADER, kill), diff=diff)
    assert run_ranks(script, ranks=ranks, cwd=folder)[0] == [-9] * ranks
    assert torch.load(folder / "stream.pth")["step"] == 8
    good(copy(folder, *edits, diff=diff, tag="-2"), ranks=then, cwd=folder)
    return Run(folder, ranks), Run(folder, then, "-2")


@pytest.mark.parametrize(
    "ranks, then, workers", [(2, 2, 2), (2, 3, 2), soak(3, 2, 3), (4, 1, 0), soak(1, 4, 2)]
)
def test_killed_and_resumed(ranks, then, workers, trained, tmp_path):
    """Each image once; with the same number to the bit as without a stop."""
    edit = ("WORKERS = 2", f"WORKERS = {workers}")
    first, second = killed_and_resumed(tmp_path, ranks, then, edit)
    assert first.steps == 8 and second.steps == 12
    assert first.epoch() + second.epoch() == Counter(TRAIN)
    whole = trained(2, by_torchrun=True)
    left, right = (torch.load(x.folder / "stream.pth") for x in (whole, second))
    if ranks == then:
        assert equal(left, right)
    else:
        torch.testing.assert_close(left["net"], right["net"], rtol=1e-4, atol=1e-5)


def test_the_stream_starts_again(tmp_path):
    """The mistake: the images before the stop are taken twice."""
    first, second = killed_and_resumed(tmp_path, 2, 2, diff="stream_starts_again")
    seen = first.epoch() + second.epoch()
    assert sum(number == 2 for number in seen.values()) == 8 * 72 and max(seen.values()) == 2


def test_the_last_batches_of_join(trained):
    """The mistake: where one process is left, its gradient is divided by two all the same."""
    found, right = trained(2, "stream_join"), trained(2, by_torchrun=True)
    lengths = [len(probe) for probe in found.probes]
    assert found.epoch() == Counter(TRAIN) and min(lengths) < max(lengths)
    for step in range(min(lengths), max(lengths)):
        assert found.share_of_gradient(step) == pytest.approx(0.5, abs=1e-4)
    for step in range(right.steps):
        assert right.share_of_gradient(step) == pytest.approx(1, abs=1e-4)


def refused(folder, *edits, ranks=2):
    codes, output = run_ranks(copy(folder, *edits), ranks=ranks, cwd=folder)
    assert codes == [1] * ranks
    return output


def test_what_cannot_be_right_is_one_line(trained, tmp_path):
    data = trained(2, by_torchrun=True).folder / "stream"
    shutil.copytree(data, tmp_path / "stream")
    said = refused(tmp_path, ("WORKERS = 2", "WORKERS = 13"))
    assert said == 2 * "2 processes with 13 workers: more than LANES 24\n"
    said = refused(tmp_path, ("LANES = 24", "LANES = 99"))
    assert said.count(" shards in stream/train, LANES 99") == 2
    state = {"epoch": 0, "step": 8, "order": {}}
    torch.save(state, tmp_path / "stream.pth")
    said = refused(tmp_path)
    assert said.count("stream.pth is in the middle of an epoch of other shards") == 2
    one = ("SAVED.exists()", "rank == 0")  # a file that the other process does not see
    assert refused(tmp_path, one).count("the processes differ in the shards or in SAVED") == 2


@pytest.mark.parametrize("damage", ["cut", "header", "pair", "end"])
def test_a_damaged_shard_is_named(damage, trained, tmp_path):
    shutil.copytree(trained(2, by_torchrun=True).folder / "stream", tmp_path / "stream")
    path = sorted((tmp_path / "stream/train").iterdir())[3]
    data = path.read_bytes()
    if damage == "pair":
        with tarfile.open(path, "a") as archive:
            archive.add(ROOT / "LICENSE", "more.npy")
    else:
        wrong = {"cut": data[:1700], "header": data[:1024] + b"x" * 9 + data[1033:]}
        wrong["end"] = data.rstrip(b"\0") + bytes(-len(data.rstrip(b"\0")) % 512)
        path.write_bytes(wrong[damage])
    lines = refused(tmp_path).splitlines()
    assert len(lines) == 2 and len({*lines}) == 1
    assert lines[0].startswith(f"stream/train/{path.name} ")
