"""Each recipe of docs/recipes.md, alone or with others in a composed script: it does what
that page says. More of it, and the other starts: test_compose.py.
"""

import re
from typing import NamedTuple

import pytest
import torch
from conftest import ROOT, run, torchrun
from sklearn.metrics import f1_score

import compose
from minimal import one_gpu
from tests.docs.copies import USER, accuracy, edited, equal, joined, predicted, validation_set
from tests.docs.ranks import good, run_ranks

pytestmark = pytest.mark.full
PAGE = (ROOT / "docs/recipes.md").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", joined(PAGE), re.M | re.S)
BLOCKS = [block for block in BLOCKS if "compose.py torchrun" in block]

# Lines of the script, below or above which a test writes others.
MAIN = "def main():\n"
DDP = "    model = DistributedDataParallel(net)  # averages the gradients in backward()\n"
EPOCH = "        net.train()\n"
STEP = "        for images, target in train_loader:\n"
TRAINED = "        for buffer in net.buffers():\n"
END = "    dist.destroy_process_group()\n"


THREE = [("BATCH_SIZE = 64", "BATCH_SIZE = 66")]  # which three processes can share


def make(folder, *recipes, edits=(), epochs=2):
    """A copy of the script with recipes, in a folder; returns its path.

    Each process saves the weights that it ended with, and what its script has put into `seen`.
    """
    folder.mkdir(exist_ok=True)
    path = folder / "script.py"
    end = f'    torch.save((net.state_dict(), seen), f"rank{{rank}}.pth")\n{END}'
    more = [("EPOCHS = 5", f"EPOCHS = {epochs}"), (MAIN, f"{MAIN}    seen = []\n"), (END, end)]
    path.write_text(edited(compose.script("torchrun", features=recipes), [*more, *edits]))
    return path


class End(NamedTuple):
    weights: list  # of each process
    seen: list
    said: list  # the accuracy of each epoch
    output: str


def ended(script, ranks=2):
    output = good(script, ranks=ranks)
    saved = [load(script, f"rank{rank}.pth") for rank in range(ranks)]
    said = [float(number) for number in re.findall(r"epoch \d+: (.*) % correct", output)]
    return End(*zip(*saved, strict=True), said, output)


def load(script, name="digits.pth"):
    """A file that a script has written."""
    return torch.load(script.parent / name, weights_only=True)


@pytest.mark.parametrize("block", BLOCKS)
def test_block_of_the_page(block, tmp_path):
    (tmp_path / "compose.py").symlink_to(ROOT / "compose.py")
    output = run(["bash", "-ec", block], tmp_path, env=USER | {"OMP_NUM_THREADS": "1"})
    if "torchrun --standalone" in block:
        *_, (epoch, said) = re.findall(r"epoch (\d): (.*) % correct", output)
        assert float(said) >= 95 and epoch == "4" and (tmp_path / "checkpoint.pth").exists()
    else:
        assert "+            os.replace" in output and "-        print(f" in output


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_amp(dtype, tmp_path):
    """Forward has the dtype, the weights are float32; fp16's gradients are those of fp32."""
    step = "            scaler.step(optimizer)\n"
    look = """            seen.append((output.dtype, net[2].bias.grad.clone()))
            scaler.unscale_(optimizer)
            seen.append((scaler.get_scale(), net[2].bias.grad.clone()))
"""
    edits = [("DTYPE = torch.bfloat16", f"DTYPE = torch.{dtype}"), (step, look + step)]
    end = ended(make(tmp_path / "amp", "amp", edits=edits, epochs=3))
    assert end.said[-1] >= 95 and end.said[-1] == float(accuracy(end.weights[0]))
    assert equal(*end.weights)
    assert {value.dtype for value in end.weights[0].values()} == {torch.float32, torch.int64}
    (found, scaled), (scale, unscaled) = end.seen[0][:2]
    assert found == getattr(torch, dtype)
    assert scale > 1 if dtype == "float16" else scale == 1
    torch.testing.assert_close(scaled / scale, unscaled)

    step = "            optimizer.step()\n"
    edits = [(step, f"            seen.append(net[2].bias.grad.clone())\n{step}")]
    plain = ended(make(tmp_path / "plain", edits=edits, epochs=1))
    torch.testing.assert_close(unscaled, plain.seen[0][0], atol=0.01, rtol=0.05)


def test_accumulate(tmp_path):
    """The weights are those without it, to rounding, and gradients are sent once in a step."""
    counted = """
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    def counted(state, bucket):
        seen.append(bucket.buffer().numel())
        return allreduce_hook(None, bucket)

    model.register_comm_hook(None, counted)
"""
    edits = [("nn.BatchNorm2d(64), ", ""), (DDP, DDP + counted)]
    plain = ended(make(tmp_path / "plain", edits=edits, epochs=1))
    end = ended(make(tmp_path / "parts", "accumulate", edits=edits, epochs=1))
    assert end.seen == plain.seen and len(end.seen[0]) == 1437 // 64
    assert equal(*end.weights)
    torch.testing.assert_close(end.weights[0], plain.weights[0], atol=1e-5, rtol=1e-4)
    assert ended(make(tmp_path / "whole", "accumulate", epochs=3)).said[-1] >= 95


def test_schedule(tmp_path):
    """The rates are those of one process, in all, and come to their end with the training."""
    edits = [(STEP, f'{STEP}            seen.append(optimizer.param_groups[0]["lr"])\n')]
    script = make(tmp_path / "here", "schedule", edits=edits, epochs=3)
    end = ended(script)
    rates, other = end.seen
    assert rates == other == ended(script, ranks=1).seen[0] and len(rates) == 3 * (1437 // 64)
    assert rates[:20] == sorted(rates[:20]) and rates[20:] == sorted(rates[20:], reverse=True)
    assert rates[0] == pytest.approx(0.05 / 20) and max(rates) == 0.05 and rates[-1] < 0.0001
    assert end.said[-1] >= 95


@pytest.mark.parametrize("ranks", [2, 3])
def test_f1(ranks, tmp_path):
    """As scikit-learn has it, on the whole validation set."""
    script = make(tmp_path / "here", "f1", edits=THREE, epochs=1)
    output, weights = ended(script, ranks).output, load(script)
    pair = validation_set()[1], predicted(weights)
    f1, micro = (f1_score(*pair, average=average) for average in ("macro", "micro"))
    assert output == f"F1 {f1:.4f}  epoch 0: {accuracy(weights)} % correct\n"
    assert f"{f1:.4f}" != f"{micro:.4f}"  # which is the accuracy


def test_loss(tmp_path):
    """The mean over both processes and all steps: of these losses, as each process has them."""
    step = "            loss.backward()\n"
    edits = [(step, f"            seen.append(loss.item())\n{step}")]
    end = ended(make(tmp_path / "here", "loss", edits=edits))
    said = [float(number) for number in re.findall(r"^loss (\S+)  epoch", end.output, re.M)]
    losses = torch.tensor(end.seen).unflatten(1, (2, -1))  # [rank, epoch, step]
    torch.testing.assert_close(torch.tensor(said), losses.mean(dim=(0, 2)), atol=1e-4, rtol=0)
    assert (losses[0].mean(dim=1) - losses[1].mean(dim=1)).abs().max() > 1e-3


def test_best(tmp_path):
    """The last of these four epochs is not the best."""
    script = make(tmp_path / "here", "best", epochs=4)
    said = ended(script).said
    assert float(accuracy(load(script))) == max(said) > said[-1]


@pytest.mark.parametrize("ranks", [2, 3])
def test_early_stopping(ranks, tmp_path):
    """All end after the same epoch, the first that has two before it that were no better."""
    edits = [
        *THREE,
        ("PATIENCE = 5", "PATIENCE = 2"),
        (EPOCH, f"        seen.append(epoch)\n{EPOCH}"),
    ]
    script = make(tmp_path / "here", "early_stopping", edits=edits, epochs=30)
    _, seen, said, _ = ended(script, ranks)
    assert len(said) == said.index(max(said)) + 3 < 30
    assert [*seen] == [[*range(len(said))]] * ranks
    assert float(accuracy(load(script))) == max(said)


REPLACE = '            os.replace("checkpoint.tmp"'
DIE = 'if epoch == int(os.environ.get("DIE", -1)):\n'
KILL = "os.kill(os.getpid(), 9)\n"
DROPOUT = ("nn.Flatten(), ", "nn.Flatten(), nn.Dropout(0.2), ")
# Where it is killed, in the epoch of the variable DIE; the exit codes.
KILLED = {
    "in an epoch": (TRAINED, f"        {DIE}            {KILL}{TRAINED}", [-9, -9]),
    "in a save": (REPLACE, f"            {DIE}                {KILL}{REPLACE}", [-9, 1]),
}


@pytest.mark.parametrize(
    "where, others, die, epochs",
    [
        ("in an epoch", "", 1, 3),
        ("in a save", "schedule f1", 1, 3),
        ("in an epoch", "f1 early_stopping", 3, 4),
    ],
)
def test_resume(where, others, die, epochs, tmp_path):
    """Killed and started again, it ends as one that was not, and has not begun anew."""
    old, new, expected = KILLED[where]
    edits, recipes = [DROPOUT, (old, new)], [*others.split(), "resume"]
    whole, killed = (make(tmp_path / x, *recipes, edits=edits, epochs=epochs) for x in "ab")
    straight = ended(whole)
    codes, output = run_ranks(killed, ranks=2, env={"DIE": die})
    assert codes == expected, output
    assert load(killed, "checkpoint.pth")["epoch"] == die
    resumed = ended(killed)
    assert resumed.said == straight.said[die:] and "epoch 0" not in resumed.output
    for name in ("digits.pth", "checkpoint.pth", "rank1.pth"):
        assert equal(load(whole, name), load(killed, name)), name
    state = load(whole, "checkpoint.pth")
    assert ("scheduler" in state) == ("schedule" in recipes)
    if "early_stopping" in recipes:  # the rest of the run does not reach the best again
        scores = [float(number) for number in re.findall(r"^F1 (\S+)", straight.output, re.M)]
        assert max(scores[:die]) > scores[die]
        assert state["best"] == pytest.approx(max(scores), abs=1e-4)
        assert state["waited"] == die - scores.index(max(scores))


def test_resume_under_torchrun(tmp_path):
    """One process fails once; torchrun starts both again, and each epoch is there once."""
    once = 'rank == epoch == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"'
    fail = f"        if {once}:\n            {KILL}{TRAINED}"
    script = make(tmp_path / "here", "resume", edits=[(TRAINED, fail)], epochs=3)
    (setting,) = re.findall(r"`(\w+)=1 torchrun --max-restarts=3`", PAGE)
    env = {"OMP_NUM_THREADS": "1", setting: "1"}
    output = run(torchrun(2, script, "--max-restarts=3"), script.parent, env=env)
    assert re.findall(r"epoch (\d): ", output) == ["0", "1", "2"]
    assert "exitcode: -9" in output


def test_weights_of_others(tmp_path):
    """Lightning's, of a net for 7 classes: the head alone is new, and all processes learn on."""
    function = (ROOT / "docs/load_weights.py").read_text().partition('"""\n')[2]
    page = (ROOT / "docs/full.md").read_text()
    call = re.search(r"`(new = load_weights\(.*?\))`", page)[1]
    torch.manual_seed(3)
    net = one_gpu.build_net()
    net[2] = torch.nn.Linear(64 * 6 * 6, 7)
    state = {f"model.{key}": value for key, value in net.state_dict().items()}
    (tmp_path / "here").mkdir()
    torch.save({"epoch": 3, "state_dict": state}, tmp_path / "here/weights.pth")
    look = "    seen.append({key: value.clone() for key, value in net.state_dict().items()})\n"
    edits = [
        ("def build_net", f"{function}\n\ndef build_net"),
        ("    optimizer = torch", f"    {call}\n    seen.append(new)\n    optimizer = torch"),
        (DDP, DDP + look),
    ]
    end = ended(make(tmp_path / "here", edits=edits, epochs=3))
    new, first = end.seen[1]
    assert new == ["2.weight", "2.bias"]
    assert all(first[key].equal(net.state_dict()[key]) for key in first if not key.startswith("2."))
    assert equal(*end.weights) and end.said[-1] >= 95
    torch.save({"a": torch.ones(1)}, tmp_path / "here/weights.pth")
    codes, output = run_ranks(tmp_path / "here/script.py", [], 2, tmp_path / "here")
    assert any(codes) and "weights.pth is of another model: it has no 0.0.weight, 0" in output
