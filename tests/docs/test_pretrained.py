"""minimal/pretrained.py: from weights in a file it trains as one process does, all or LoRA's."""

import re
import runpy
import shutil

import pytest
import torch
from conftest import ROOT, soak
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from minimal import pretrained
from tests.docs.copies import edited, equal, patched
from tests.docs.ranks import good, run_ranks
from tests.docs.test_beyond import FILES, TEXT, WINDOWS, largest

pytestmark = pytest.mark.full
MISTAKE = "async_save_not_awaited"
PROBE = """            if not probe["losses"]:
                trains = [(n, w) for n, w in net.named_parameters() if w.requires_grad]
                probe["gradients"] = {n: w.grad.full_tensor() for n, w in trains}
            probe["losses"].append(loss.item() / world_size)
"""


def copy(folder, lora, epochs, *edits, diff=None):
    """The script, on TEXT; each process saves what the tests look at: probe0.pth ..."""
    (folder / "minimal").mkdir(parents=True, exist_ok=True)
    (folder / "text").write_bytes(TEXT)
    script = folder / "minimal/pretrained.py"
    script.write_text((ROOT / "minimal/pretrained.py").read_text())
    assert diff is None or patched(script, f"bugs/{diff}.diff")
    before = {
        "    saving = None": "    probe = {'losses': []}\n",
        "            nn.utils.clip_grad": PROBE,
        "    del net, optimizer": "    torch.save(probe, f'probe{rank}.pth')\n",
    }
    edits = [*edits, (FILES, "FILES = [Path('text')]"), ("EPOCHS = 2", f"EPOCHS = {epochs}")]
    edits += [("LORA = 4", f"LORA = {lora}")]
    edits += [(line, more + line) for line, more in before.items()]
    script.write_text(edited(script.read_text(), edits))
    return script


def found_in(folder, ranks):
    """(the losses of all processes together, the first gradients)"""
    probes = [torch.load(folder / f"probe{rank}.pth") for rank in range(ranks)]
    losses = [sum(step) for step in zip(*(one["losses"] for one in probes), strict=True)]
    return losses, probes[0]["gradients"]


def alone(script, weights):
    """The same by a plain loop with the plain net."""
    parts = runpy.run_path(str(script))
    torch.manual_seed(0)
    net = parts["Net"]()
    if parts["LORA"]:
        parts["adapt"](net)
    with torch.no_grad():
        for seed, (name, weight) in enumerate(net.named_parameters()):
            known = weights.get(name.replace(".layer.", "."))
            new = known is None or name.startswith(tuple(parts["NEW"]))
            weight.copy_(parts["begin"](name, weight.shape, seed) if new else known)
    trained = [w for w in net.parameters() if w.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    sampler = DistributedSampler(WINDOWS, num_replicas=1, rank=0)
    losses, gradients = [], {}
    for text in DataLoader(WINDOWS, 24, sampler=sampler):
        loss = nn.functional.nll_loss(net(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        named = [(n, w) for n, w in net.named_parameters() if w.requires_grad]
        gradients = gradients or {n: w.grad.clone() for n, w in named}
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients


@pytest.mark.parametrize("lora, ranks", [(0, 2), soak(0, 3), (4, 3), soak(4, 4)])
def test_trains_as_one_process(lora, ranks, tmp_path):
    """Losses of 8 steps, and the gradients of the first; parts of a weight may be unlike."""
    script = copy(tmp_path, lora, 1)
    output = good(script, ranks=ranks, cwd=tmp_path)
    losses, gradients = alone(script, load_file(tmp_path / "pretrained.safetensors"))
    found = found_in(tmp_path, ranks)
    assert len(losses) == 8 and largest(found[0], losses) < 1e-5
    assert largest(found[1], gradients) < 1e-6
    assert f"epoch 0: loss {sum(losses) / 8:.4f}\n" in output
    assert len(gradients) == (20 if lora else 30)


def test_killed_while_it_saves_and_resumed_by_more_processes(tmp_path):
    """In the second epoch, of which nothing is then left; to rounding as without a stop."""
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    good(copy(straight, 4, 2), ranks=2, cwd=straight)
    kill = ("        saving.result()", "        os.kill(os.getpid(), 9 * (epoch == 1))\n")
    script = copy(killed, 4, 2, (kill[0], kill[1] + kill[0]))
    codes, _ = run_ranks(script, ranks=2, cwd=killed)
    assert -9 in codes and [p.name for p in (killed / "pretrained").glob("[0-9]*")] == ["1"]
    again = tmp_path / "again"
    shutil.copytree(killed, again)
    good(copy(killed, 4, 2), ranks=2, cwd=killed)
    losses = found_in(straight, 2)[0]
    assert found_in(killed, 2)[0] == losses[8:]  # to the bit
    assert equal(net_of(killed), net_of(straight))
    good(copy(again, 4, 2), ranks=3, cwd=again)
    assert largest(found_in(again, 3)[0], losses[8:]) < 1e-5


def net_of(folder):
    """What the last checkpoint has of the net, whole."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(folder / "pretrained/2", folder / "whole.pth")
    return torch.load(folder / "whole.pth")["net"]


def test_a_checkpoint_of_lora_has_what_is_trained(tmp_path):
    good(copy(tmp_path, 4, 2), ranks=1, cwd=tmp_path)
    names = net_of(tmp_path)
    assert len(names) == 20
    assert all(re.search(r"^head\.|\.(up|down)\.", name) for name in names)


def test_weights_of_another_dtype_and_with_two_names(tmp_path):
    """bf16 in the file; the embedding is the head's weight too, and in the file once."""
    tied = ("    def forward(self, text)", "        self.head[1].weight = self.byte.weight\n\n")
    edits = [(tied[0], tied[1] + tied[0]), ('NEW = ["head."]', 'NEW = ["head.0."]')]
    script = copy(tmp_path, 0, 1, *edits)
    torch.manual_seed(0)
    weights = {n: w.bfloat16() for n, w in pretrained.Net().state_dict().items()}
    del weights["head.1.weight"]
    save_file(weights, tmp_path / "pretrained.safetensors")
    good(script, ranks=2, cwd=tmp_path)
    losses, gradients = alone(script, weights)
    found = found_in(tmp_path, 2)
    assert largest(found[0][:1], losses[:1]) < 1e-4 * losses[0]  # 42: byte's weights are no head's
    assert largest(found[1], gradients) < 1e-4 * max(g.abs().max() for g in gradients.values())


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda w: w.pop("place.weight"), "has no, or another, ['place.weight [64, 64]']; the net"),
        (lambda w: w.update(more=torch.ones(1)), "the net has no ['more']"),
        (
            lambda w: w.update({"byte.weight": torch.ones(200, 64)}),
            "has no, or another, ['byte.weight [256, 64]']",
        ),
        (lambda w: w.pop("head.1.bias"), None),
    ],
)
def test_a_file_of_another_net_is_one_line(change, said, tmp_path):
    """Of what NEW names the file may have what it will."""
    weights = pretrained.Net().state_dict()
    change(weights)
    save_file(weights, tmp_path / "pretrained.safetensors")
    codes, output = run_ranks(copy(tmp_path, 0, 1), ranks=1, cwd=tmp_path)
    assert codes == [1 if said else 0] and (said or "epoch 0: loss") in output, output


def test_what_would_be_wrong_in_silence_is_one_line(tmp_path):
    found = run_ranks(copy(tmp_path, 4, 1), env={"WORLD_SIZE": 5}, cwd=tmp_path)
    assert found == ([1], "BATCH_SIZE 24 must be a multiple of 5 (processes)\n")
    script = copy(tmp_path, 4, 1)
    (tmp_path / "text").write_bytes(TEXT[:1000])
    codes, output = run_ranks(script, ranks=1, cwd=tmp_path)
    assert codes == [1] and "1000 bytes in FILES: no step in an epoch" in output


def test_nobody_waits_for_what_is_saved(tmp_path):
    """The mistake: the last checkpoint has its name, and is not whole. Else it is."""
    for diff in (None, MISTAKE):
        folder = tmp_path / str(diff)
        run_ranks(copy(folder, 4, 2, diff=diff), ranks=2, cwd=folder)
        assert (folder / "pretrained/2/.metadata").exists() == (diff is None)
