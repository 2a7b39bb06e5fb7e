"""Mistakes that nobody has listed: the doctor names mutants of right scripts. See mutants.py."""

import json
import sys

import pytest
from conftest import ROOT, run

from tests.docs.mutant_runs import SCRIPTS, Script, diagnosed, measure, named
from tests.docs.mutants import mutants

LOOP = """
def main():
    \"\"\"Trains.\"\"\"
    rank = 0  # mine
    for epoch in range(2):
        sampler.set_epoch(epoch)
        total += loss * world_size
    if rank == 0:
        print(total)
"""


def test_a_mutant_is_another_script_with_one_change():
    found = mutants(LOOP)
    assert found == mutants(LOOP) and len({one.text for one in found} | {LOOP}) == len(found) + 1
    texts = {one.name: one for one in found}
    guarded = texts["on rank 0: sampler.set_epoch(epoch)"]
    assert "        if rank == 0:\n            sampler.set_epoch(epoch)\n" in guarded.text
    assert (guarded.line, guarded.last) == (6, 7) and guarded.assigned == {"sampler", "epoch"}
    assert (
        "for epoch in range(2):\n        pass\n" in texts["removed: sampler.set_epoch(epoch)"].text
    )
    assert "loss * 1\n" in texts["world_size -> 1: total += loss * world_size"].text
    assert "    if True:\n" in texts["without if: if rank == 0:"].text
    swapped = "total += loss * world_size\n        sampler.set_epoch(epoch)\n"
    assert swapped in texts["after the next: sampler.set_epoch(epoch)"].text


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


# Of minimal/distributed.py: the mutant, how it differs on two processes, how it is named.
SAMPLE = [
    ("on rank 0: sampler.set_epoch(epoch)", "other weights", "mistake"),
    ("on rank 0: net.eval()", "other printed", "mistake"),
    ("on rank 0: optimizer.step()", "weights apart", "mistake"),
    ("on rank 0: for images, target in train_loader:", "hangs", "mistake"),
    ("after the next: dist.all_reduce(correct)", "other printed", "hint"),
    ("without if: if rank == 0:", "other saves", "mistake"),
    ('removed: local_rank = int(os.environ["LOCAL_RANK"])', "", ""),
    ("after the next: optimizer = torch.optim.SGD", "", ""),
]


@pytest.mark.full
def test_the_doctor_names_mutants_that_one_process_does_not_show(folder):
    """And says nothing of those that are as right as the script."""
    script = Script("distributed", folder)
    found = mutants(script.text)
    for name, how, word in SAMPLE:
        mutant = next(one for one in found if one.name.startswith(name))
        assert script.kind(mutant) == ("counts" if how else "right", how), mutant.name
        flags = [] if word == "hint" else ["--quick"]
        report = diagnosed(folder, flags, mutant.text)
        assert named(mutant, report, script.known) == word, report["said"]


@pytest.mark.full
def test_the_command_of_the_page(folder):
    command = [sys.executable, ROOT / "tests/docs/mutant_runs.py", folder, "by_hand"]
    run([*command, "--limit", "1", "--quick"], cwd=folder.parent)
    (row,) = json.loads((folder / "by_hand.json").read_text())
    assert row["name"] and row["kind"] in ("alone", "counts", "right", "fails")


# Of other scripts: what judges one process's gradients and numbers, shards, and an average.
OTHERS = {
    "by_hand": ("removed: weight.grad /= world_size", "hint", "the gradients are 2 times"),
    "accumulate_loss": ("world_size -> 1: print(f", "hint", "2 times it"),
    "fsdp_distributed": ("on rank 0: torch.manual_seed(0)", "mistake", "FSDP sends no weights"),
    "f1_predictions_ema": ("on rank 0: average.module.eval()", "mistake", "in training mode"),
}


def other(name, folder, start):
    script = Script(name, folder)
    mutant = next(one for one in mutants(script.text) if one.name.startswith(start))
    assert script.kind(mutant)[0] == "counts"
    report = diagnosed(folder, [], mutant.text, script.files[2])
    return named(mutant, report, script.known), report["said"]


@pytest.mark.soak
@pytest.mark.parametrize("name", OTHERS)
def test_what_other_scripts_show(name, folder):
    start, word, text = OTHERS[name]
    how, said = other(name, folder, start)
    assert how == word and text in said, said


@pytest.mark.soak
def test_a_part_of_the_weights_is_saved(folder):
    """Without full_state_dict=True."""
    how, said = other("fsdp_distributed", folder, "without options=: state = get_model_state")
    assert how == "mistake" and "a part of the weights is saved" in said, said


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SCRIPTS)
def test_nine_of_ten_are_named_and_no_right_one(name, tmp_path):
    rows = measure(name, tmp_path, 60)
    counting = [row for row in rows if row["kind"] == "counts"]
    missed = [row for row in counting if row["named"] not in ("mistake", "hint")]
    assert len(missed) <= max(1, 0.1 * len(counting)), [row["name"] for row in missed]
    wrong = [row["name"] for row in rows if (row["kind"], row.get("named")) == ("right", "mistake")]
    assert not wrong
