"""minimal/transformer.py and the diffs against it: what they train, keep, save and resume."""

import re
import shutil

import pytest
import torch
from conftest import ROOT, run
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from minimal import transformer
from tests.docs.copies import USER, commands_of, edited, equal, patched
from tests.docs.ranks import good, run_ranks

pytestmark = pytest.mark.full
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
SCRIPT = ROOT / "minimal/transformer.py"
TEXT = ROOT / "docs/minimal.md"  # a short one
PAGE = (ROOT / "docs/transformer.md").read_text()
(FILES,) = re.findall(r"^FILES = sorted\(.*?\)\)", SCRIPT.read_text(), re.M)


def train(folder, ranks, epochs, *edits, diff=None, before=""):
    """{epoch: loss} of a short run in a folder, which prints nothing else but its sample."""
    script = copy(folder, epochs, *edits, diff=diff)
    return losses(good(script, ranks=ranks, before=before))


def copy(folder, epochs, *edits, diff=None, sample=True):
    folder.mkdir(exist_ok=True)
    script = folder / "script.py"
    script.write_text(SCRIPT.read_text())
    assert diff is None or patched(script, f"minimal/recipes/transformer/{diff}.diff")
    edits = [("EPOCHS = 4", f"EPOCHS = {epochs}"), *edits]
    edits += [("range(300)", "range(5)")] * sample
    script.write_text(edited(script.read_text(), [(FILES, f"FILES = [Path('{TEXT}')]"), *edits]))
    return script


def losses(output):
    lines, _ = output.split("What goes wrong: ")
    lines = re.sub(r"^transformer: goes on after \d of \d epochs\n", "", lines)
    found = re.findall(r"epoch (\d+): loss (\d+\.\d{4})\n", lines)
    assert lines == "".join(f"epoch {epoch}: loss {loss}\n" for epoch, loss in found), output
    return {int(epoch): float(loss) for epoch, loss in found}


def saved(folder, epoch):
    """{"net": weights, "optimizer": ...} of an epoch, whole."""
    dcp_to_torch_save(folder / f"transformer/{epoch}", folder / "whole.pth")
    return torch.load(folder / "whole.pth", weights_only=True)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """(folder, losses) of two processes and four epochs without a stop."""
    folder = tmp_path_factory.mktemp("straight")
    return folder, train(folder, 2, 4)


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=GPU)])
def test_learns(ranks, tmp_path):
    """As the docstring's command starts it. Two checkpoints are kept; one becomes a file.

    Its text is a quarter of the pages: with all of them it takes four times as long.
    """
    for name in ("minimal/transformer.py", "docs/bugs.md"):
        (tmp_path / name).parent.mkdir()
        shutil.copy(ROOT / name, tmp_path / name)
    (command,) = commands_of(SCRIPT.read_text())
    command = command.replace("node=2", f"node={ranks}")
    env = USER | {"OMP_NUM_THREADS": "1"}
    output = run(["env", *command.split()], tmp_path, timeout=600, env=env)
    found = losses("epoch 0" + output.split("epoch 0", 1)[1])
    # From how often each byte comes, and no more, it is 3.4.
    assert [*found] == [0, 1, 2, 3] and found[3] < 3.0 and found[3] + 0.2 < found[0]
    assert {path.name for path in (tmp_path / "transformer").iterdir()} == {"3", "4"}
    (command,) = re.findall(r"`(python -m torch\.distributed\.checkpoint.*?)`", PAGE)
    run(["env", *command.split()], tmp_path, env=USER)
    transformer.Net().load_state_dict(torch.load(tmp_path / "model.pth")["net"])


def test_the_loss_is_that_of_all_bytes(tmp_path):
    """On one, two and three processes: the last window of the text is shorter, and counts less."""
    torch.manual_seed(0)
    net = transformer.Net()
    text = torch.tensor(list(TEXT.read_bytes()))
    text, total = text[len(text) * 9 // 10 :], 0
    with torch.no_grad():
        for window in (text[i : i + 65] for i in range(0, len(text) - 1, 64)):
            scores = net(window[None, :-1])[0]
            total += nn.functional.nll_loss(scores, window[1:], reduction="sum").item()
    still = ("lr=0.01", "lr=0.0")
    found = [train(tmp_path / f"{ranks}", ranks, 1, still)[0] for ranks in (1, 2, 3)]
    assert found == pytest.approx([total / (len(text) - 1)] * 3, abs=1e-4)


@pytest.mark.parametrize("torn", [False, True])
def test_killed_while_it_saves(torn, straight, tmp_path):
    """Before the second checkpoint has its name. The same number of processes ends alike."""
    kill = """
import os, signal
rename = os.rename
def dying(old, new):
    if str(new).endswith("2"):
        os.kill(os.getpid(), signal.SIGKILL)
    rename(old, new)
os.rename = dying
"""
    codes, output = run_ranks(copy(tmp_path, 4), ranks=2, before=kill)
    assert -9 in codes and "epoch 1" not in output
    folder = tmp_path / "transformer"
    assert {path.name for path in folder.iterdir()} == {"1", "unfinished"}
    for path in folder.glob("unfinished/*") if torn else ():
        path.write_bytes(path.read_bytes()[:100])
    found = train(tmp_path, 2, 4)
    assert found == {epoch: loss for epoch, loss in straight[1].items() if epoch > 0}
    assert equal(saved(tmp_path, 4), saved(straight[0], 4))


def test_goes_on_with_another_number_of_processes(straight, tmp_path):
    """Two, three, one, and two with DDP: the loss goes on as on two, and so does the rate."""
    found = {}
    for epoch, (ranks, diff) in enumerate([(2, None), (3, None), (1, None), (2, "ddp")]):
        rate = [("lr=0.01", "lr=0.0")] * (epoch > 0)
        found |= train(tmp_path, ranks, epoch + 1, *rate, diff=diff)
    assert found == pytest.approx(straight[1], abs=0.02)


@pytest.mark.parametrize("diff, ranks", [("ddp", 2), ("hsdp", 4)])
def test_other_strategies_train_alike(diff, ranks, straight, tmp_path):
    found = train(tmp_path, ranks, 2, diff=diff)
    assert found == pytest.approx({epoch: straight[1][epoch] for epoch in (0, 1)}, abs=0.01)


GRADIENTS = """            loss.backward()
            if not os.path.exists(f"gradients{rank}.pth"):  # whole ones, of the first step
                whole = {name: weight.grad.full_tensor() for name, weight in net.named_parameters()}
                torch.save([loss.item(), whole], f"gradients{rank}.pth")
"""


@pytest.mark.parametrize("ranks", [2, 4])
def test_parts_of_the_length_train_as_whole_windows(ranks, tmp_path):
    """Loss and gradients of the first step, as of one process; and the loss of the validation."""
    printed, first = [], []
    for name, number, diff in (("whole", 1, None), ("parts", ranks, "ulysses")):
        edits = [("            loss.backward()\n", GRADIENTS)]
        script = copy(tmp_path / name, 1, *edits, diff=diff, sample=not diff)
        output = good(script, ranks=number)
        printed.append(float(re.search(r"epoch 0: loss (.*)", output)[1]))
        found = [torch.load(script.parent / f"gradients{rank}.pth") for rank in range(number)]
        first.append((sum(loss for loss, _ in found) / number, found[0][1]))
    (whole, right), (parts, gradients) = first
    assert abs(whole - parts) < 1e-6
    assert max((right[name] - gradients[name]).abs().max() for name in right) < 1e-6
    assert printed[0] == pytest.approx(printed[1], abs=2e-3)


def test_without_gpus_on_an_old_torch(tmp_path):
    codes, output = run_ranks(copy(tmp_path, 1), before="import torch\ntorch.cpu.Stream = object")
    assert codes == [1] and output == "without GPUs fully_shard needs torch 2.7 or newer\n"


STEP = "            optimizer.step()\n"
KEPT = """
            def local(tensors):
                return sum((t.to_local() if hasattr(t, "to_local") else t).nbytes for t in tensors)
            moments = [t for state in optimizer.state.values() for t in state.values() if t.dim()]
            gradients = [weight.grad for weight in net.parameters()]
            torch.save([*map(local, (net.parameters(), gradients, moments))], f"kept{rank}.pth")
"""


@pytest.mark.parametrize("diff, ranks", [(None, 1), (None, 2), (None, 4), ("ddp", 2)])
def test_what_a_process_keeps(diff, ranks, tmp_path):
    """As the table of the page says, in thousands of bytes."""
    train(tmp_path, ranks, 1, (STEP, STEP + KEPT), diff=diff)
    name = f"{'DDP' if diff else 'FSDP'}, {ranks}"
    (row,) = re.findall(rf"^\| {name} process\w* \| (.*) \|$", PAGE, re.M)
    for rank in range(ranks):
        kept = torch.load(tmp_path / f"kept{rank}.pth")
        assert row.split(" | ") == [f"{number / 1000:.0f}" for number in kept]
