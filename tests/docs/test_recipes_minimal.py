"""Each recipe of minimal/recipes, applied to a copy of minimal/distributed.py: it does what
docs/recipes_minimal.md says.
"""

import itertools
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import PYTHON, ROOT, run, torchrun
from sklearn.datasets import load_digits
from sklearn.metrics import f1_score

from minimal import one_gpu
from tests.docs.ranks import good, run_ranks
from tests.docs.test_minimal import accuracy, assert_same

RECIPES = sorted(path.stem for path in (ROOT / "minimal/recipes").glob("*.diff"))
PAGE = (ROOT / "docs/recipes_minimal.md").read_text()
TABLE = re.findall(r"^\| \[(\w+)\]\(#\w+\) \|", PAGE, re.M)
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.M | re.S)

# Edits of a script: a line of it, and what takes its place.
DDP = "    model = DistributedDataParallel(net)  # averages the gradients in backward()\n"
STEPS = "        for images, target in train_loader:\n"
LOOP = "        net.train()\n"
TRAINED = "        for buffer in net.buffers():\n"
END = "    dist.destroy_process_group()\n"
# Each process saves what it ended with, and what its script has put into `seen`.
SEE = [
    ("def main():\n", "def main():\n    torch.set_num_threads(1)\n    seen = []\n"),
    (END, f'    torch.save((net.state_dict(), seen), f"rank{{rank}}.pth")\n{END}'),
]
NO_BATCHNORM = ("nn.BatchNorm2d(64), ", "")


def patched(path, name):
    """Apply a recipe to a file; returns whether it fits."""
    command = ["patch", "-s", "-r-", path, ROOT / f"minimal/recipes/{name}.diff"]
    return subprocess.run(command, capture_output=True).returncode == 0


def make(folder, *names, edits=(), epochs=2):
    """A copy of the script with recipes, in a folder; returns its path."""
    folder.mkdir(exist_ok=True)
    path = Path(shutil.copy(ROOT / "minimal/distributed.py", folder / "script.py"))
    assert all(patched(path, name) for name in names)
    text = path.read_text()
    for old, new in [("EPOCHS = 5", f"EPOCHS = {epochs}"), *SEE, *edits]:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text)
    return path


def ends(script, ranks=2):
    """Run it; returns [(weights, seen) of each process], the accuracies and the output."""
    output = good(script, ranks=ranks)
    paths = [script.parent / f"rank{rank}.pth" for rank in range(ranks)]
    said = [float(number) for number in re.findall(r"epoch \d+: (.*) % correct", output)]
    return [torch.load(path, weights_only=True) for path in paths], said, output


def saved(folder, name="digits.pth"):
    return torch.load(folder / name, weights_only=True)


def test_small_tidy_and_on_the_page(tmp_path):
    assert sorted(TABLE) == RECIPES
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name in RECIPES:
        lines = (ROOT / f"minimal/recipes/{name}.diff").read_text().splitlines()[2:]
        assert sum(line.startswith(("+", "-")) for line in lines) <= 15
        path = shutil.copy(ROOT / "minimal/distributed.py", tmp_path / f"{name}.py")
        assert patched(path, name)
    for command in (["format", "--check"], ["check"]):
        ended = subprocess.run(["ruff", *command], cwd=tmp_path, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout


def test_which_do_not_fit_together(tmp_path):
    """In the order of the table."""
    (sentence,) = re.findall(r"do not fit together: (.*?),? which has", PAGE)
    clauses = [re.findall(r"`(\w+)`", clause) for clause in sentence.split(";")]
    said = {frozenset([first, other]) for first, *others in clauses for other in others}
    found = set()
    for first, second in itertools.combinations(TABLE, 2):
        path = shutil.copy(ROOT / "minimal/distributed.py", tmp_path)
        if not (patched(path, first) and patched(path, second)):
            found.add(frozenset([first, second]))
    assert found == said


@pytest.mark.full
@pytest.mark.parametrize("block", BLOCKS)
def test_block_of_the_page(block, tmp_path):
    shutil.copytree(ROOT / "minimal", tmp_path / "minimal")
    env = {"PATH": f"{Path(PYTHON).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    output = run(["bash", "-ec", block], tmp_path, env=env)
    *_, (epoch, said) = re.findall(r"epoch (\d): (.*) % correct", output)
    assert float(said) >= 95 and (epoch == "4" or "early_stopping" in block)
    assert "FAILED" not in output and (tmp_path / "checkpoint.pth").exists()


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_amp(dtype, tmp_path):
    """Forward has the dtype, the weights are float32; fp16's gradients are those of fp32."""
    step = "            scaler.step(optimizer)\n"
    look = """            seen.append((output.dtype, net[2].bias.grad.clone()))
            scaler.unscale_(optimizer)
            seen.append((scaler.get_scale(), net[2].bias.grad.clone()))
"""
    edits = [("DTYPE = torch.bfloat16", f"DTYPE = torch.{dtype}"), (step, look + step)]
    script = make(tmp_path / "amp", "amp", edits=edits, epochs=3)
    (one, other), said, _ = ends(script)
    assert said[-1] >= 95 and said[-1] == float(accuracy(one[0]))
    assert_same(one[0], other[0])
    assert {value.dtype for value in one[0].values()} == {torch.float32, torch.int64}
    (found, scaled), (scale, unscaled) = one[1][:2]
    assert found == getattr(torch, dtype)
    assert scale > 1 if dtype == "float16" else scale == 1
    torch.testing.assert_close(scaled / scale, unscaled)

    step = "            optimizer.step()\n"
    plain = [(step, f"            seen.append(net[2].bias.grad.clone())\n{step}")]
    (plainly, _), _, _ = ends(make(tmp_path / "plain", edits=plain, epochs=1))
    torch.testing.assert_close(unscaled, plainly[1][0], atol=0.01, rtol=0.05)


# DDP's own exchange of gradients, counted.
COUNTED = f"""{DDP}
    def counted(state, bucket):
        seen.append(bucket.buffer().numel())
        return allreduce_hook(None, bucket)

    model.register_comm_hook(None, counted)
"""
HOOK = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
HOOK = [("import os\n", f"import os\nfrom {HOOK} import allreduce_hook\n"), (DDP, COUNTED)]


@pytest.mark.full
def test_accumulate(tmp_path):
    """The weights are those without it, to rounding, and gradients are sent once in a step."""
    edits = [NO_BATCHNORM, *HOOK]
    (plain, _), _, _ = ends(make(tmp_path / "a", edits=edits, epochs=1))
    (one, other), _, _ = ends(make(tmp_path / "b", "accumulate", edits=edits, epochs=1))
    assert one[1] == plain[1] and len(one[1]) == 1437 // 64
    assert_same(one[0], other[0])
    for key, weight in plain[0].items():
        torch.testing.assert_close(one[0][key], weight, atol=1e-5, rtol=1e-4)
    (_, _), said, _ = ends(make(tmp_path / "c", "accumulate", epochs=3))
    assert said[-1] >= 95


RATE = (STEPS, f'{STEPS}            seen.append(optimizer.param_groups[0]["lr"])\n')
SEQUENCE = """
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=20)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps - 20)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[20])
"""


@pytest.mark.full
def test_schedule(tmp_path):
    """The rates are those of one process, in all, and come to their end with the training."""
    script = make(tmp_path / "here", "schedule", edits=[RATE], epochs=3)
    (one, other), said, _ = ends(script)
    ((_, alone),), _, _ = ends(script, ranks=1)
    rates = one[1]
    assert rates == other[1] == alone and len(rates) == 3 * (1437 // 64)
    assert max(rates) == pytest.approx(0.1, rel=0.01) and rates[-1] < 0.0001
    assert said[-1] >= 95

    (line,) = re.findall(r"    scheduler = .*\n", script.read_text())
    for call in re.findall(r"(\w+LR\(.*\))", SEQUENCE):
        assert f"`{call}`" in PAGE
    script.write_text(script.read_text().replace(line, SEQUENCE))
    ((_, rates), _), _, _ = ends(script)
    assert rates.index(max(rates)) == 20 and rates[0] < 0.001 and rates[-1] < 0.001


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 3])
def test_f1(ranks, tmp_path):
    """As scikit-learn has it, on the whole validation set."""
    script = make(tmp_path / "here", "f1", epochs=1)
    _, _, output = ends(script, ranks)
    weights = saved(script.parent)
    net = one_gpu.build_net()
    net.load_state_dict(weights)
    digits = load_digits()
    images = torch.tensor(digits.images[4::5], dtype=torch.float32).unsqueeze(1) / 16
    with torch.no_grad():
        predicted = net.eval()(images).argmax(1).numpy()
    f1, micro = (f1_score(digits.target[4::5], predicted, average=a) for a in ("macro", "micro"))
    assert output == f"F1 {f1:.4f}  epoch 0: {accuracy(weights)} % correct\n"
    assert f"{f1:.4f}" != f"{micro:.4f}"  # which is the accuracy


@pytest.mark.full
def test_loss(tmp_path):
    """The mean over both processes and all steps: of these losses, as each process has them."""
    step = "            loss.backward()\n"
    edits = [(step, f"            seen.append(loss.item())\n{step}")]
    found, _, output = ends(make(tmp_path / "here", "loss", edits=edits))
    said = [float(number) for number in re.findall(r"^loss (\S+)  epoch", output, re.M)]
    losses = torch.tensor([seen for _, seen in found]).unflatten(1, (2, -1))  # [rank, epoch, step]
    torch.testing.assert_close(torch.tensor(said), losses.mean(dim=(0, 2)), atol=1e-4, rtol=0)
    assert (losses[0].mean(dim=1) - losses[1].mean(dim=1)).abs().max() > 1e-3


@pytest.mark.full
def test_best_f1_of_a_run_that_was_killed(tmp_path):
    """In the epoch after the best one, which the rest of the run does not reach again."""
    (block,) = (block for block in BLOCKS if "early_stopping.diff" in block)
    edits = re.findall(r"^sed -i 's/(.*?)/(.*?)/' .*$", block, re.M)
    assert len(edits) == 3
    edits = [(re.sub(r"\\(.)", r"\1", old), new) for old, new in edits]
    die = f"        {DIE.replace('1', '3')}\n            {KILL}\n{TRAINED}"
    edits.append((TRAINED, die))
    scripts = [
        make(tmp_path / x, "f1", "early_stopping", "resume", edits=edits, epochs=4) for x in "ab"
    ]
    _, _, output = ends(scripts[0])
    scores = [float(number) for number in re.findall(r"^F1 (\S+)", output, re.M)]
    assert max(scores[:3]) > scores[3]
    (scripts[1].parent / "die").touch()
    codes, output = run_ranks(scripts[1], ranks=2)
    assert codes == [-9, -9], output
    (scripts[1].parent / "die").unlink()
    _, said, output = ends(scripts[1])
    assert len(said) == 1 and "epoch 3" in output
    assert same(saved(tmp_path / "a"), saved(tmp_path / "b"))
    states = [saved(tmp_path / x, "checkpoint.pth") for x in "ab"]
    assert same(*states) and states[0]["best"] == pytest.approx(max(scores), abs=1e-4)
    assert states[0]["waited"] == 3 - scores.index(max(scores))


@pytest.mark.full
def test_best(tmp_path):
    """The last of these four epochs is not the best."""
    script = make(tmp_path / "here", "best", epochs=4)
    _, said, _ = ends(script)
    assert max(said) > said[-1]
    assert float(accuracy(saved(script.parent))) == max(said)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 3])
def test_early_stopping(ranks, tmp_path):
    """All end after the same epoch, the first that has two before it that were no better."""
    edits = [("PATIENCE = 3", "PATIENCE = 2"), (LOOP, f"        seen.append(epoch)\n{LOOP}")]
    script = make(tmp_path / "here", "early_stopping", edits=edits, epochs=30)
    found, said, _ = ends(script, ranks)
    best = said.index(max(said))
    assert len(said) == best + 3 < 30
    assert [seen for _, seen in found] == [[*range(len(said))]] * ranks
    assert float(accuracy(saved(script.parent))) == max(said)


DROPOUT = [("nn.Flatten(), ", "nn.Flatten(), nn.Dropout(0.2), ")]
DIE = 'if epoch == 1 and os.path.exists("die"):'
KILL = "os.kill(os.getpid(), 9)"
REPLACE = '            os.replace("checkpoint.tmp"'
# Where it is killed, if there is a file `die`; the exit codes.
KILLED = {
    "all, in an epoch": (TRAINED, f"        {DIE}\n            {KILL}\n{TRAINED}", [-9, -9]),
    "one, in a save": (REPLACE, f"            {DIE}\n                {KILL}\n{REPLACE}", [-9, 1]),
}


def same(a, b):
    if torch.is_tensor(a):
        return a.equal(b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.full
@pytest.mark.parametrize("where", KILLED)
@pytest.mark.parametrize("more", [(), ("schedule", "f1")], ids=["alone", "with schedule and f1"])
def test_resume(where, more, tmp_path):
    """Killed and started again, it ends as one that was not, and has not begun anew."""
    old, new, expected = KILLED[where]
    edits = [*DROPOUT, (old, new)]
    if more:
        (block,) = (block for block in BLOCKS if "schedule.diff" in block)
        edits += re.findall(r"^sed -i 's/(.*?)/(.*?)/' .*$", block, re.M)
    scripts = [make(tmp_path / name, *more, "resume", edits=edits, epochs=3) for name in "ab"]
    _, said, _ = ends(scripts[0])
    (scripts[1].parent / "die").touch()
    codes, output = run_ranks(scripts[1], ranks=2)
    assert codes == expected, output
    assert saved(tmp_path / "b", "checkpoint.pth")["epoch"] == 1
    (scripts[1].parent / "die").unlink()
    _, resumed, output = ends(scripts[1])
    assert resumed == said[1:] and "epoch 0" not in output
    for name in ("digits.pth", "checkpoint.pth", "rank1.pth"):
        one, other = (torch.load(tmp_path / f"{x}/{name}", weights_only=True) for x in "ab")
        assert same(one, other), name
    assert ("scheduler" in saved(tmp_path / "a", "checkpoint.pth")) == bool(more)


@pytest.mark.full
def test_resume_under_torchrun(tmp_path):
    """One process fails once; torchrun starts both again, and each epoch is there once."""
    fail = f"        {DIE}\n            os.remove('die')\n            {KILL}\n{TRAINED}"
    fail = fail.replace("if epoch", "if rank == 1 and epoch")
    script = make(tmp_path / "here", "resume", edits=[(TRAINED, fail)], epochs=3)
    (script.parent / "die").touch()
    (setting,) = re.findall(r"`(\w+)=1 torchrun --max-restarts=3`", PAGE)
    command = torchrun(2, script, "--max-restarts=3")
    output = run(command, script.parent, env={"OMP_NUM_THREADS": "1", setting: "1"})
    assert re.findall(r"epoch (\d): ", output) == ["0", "1", "2"]
    assert not (script.parent / "die").exists()
