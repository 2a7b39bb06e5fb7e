"""recipes/same_bits.diff: the same weights, to the bit, on any number of processes."""

import pytest
from conftest import load, rows

from tests.docs.copies import copy, dying, equal
from tests.docs.ranks import good, run_ranks

pytestmark = pytest.mark.full
FLAGS = "--image-size 24 -b 60 --parts 12 --epochs 2 -j 1 -p 1 --checkpoint-freq 3".split()
FLAGS += "-a tests.nets:normed --resume auto --checkpoint-dir".split()
# What each ingredient becomes in a script that lacks it.
LACKS = {
    "order": ("rank + i * world_size)", "rank * mine + i)"),
    "statistics": ("norm.track_running_stats = i == 0", "pass"),
    "seeds": ("progress.step, rank + i * world_size)", "progress.step, rank)"),
    "whole numbers": (".mul_(ONE).round_().long()", ".mul_(ONE).float()"),
}


def ended(script, work, ranks, folder, *flags):
    """What is to be the same: the checkpoint, and the lines of metrics.jsonl."""
    good(script, *FLAGS, folder, *flags, ranks=ranks, cwd=work)
    lines = [{**row, "world_size": 0} for row in rows(folder, timings=False)]
    return {**load(folder), "args": None}, lines


BF16 = "-a shufflenet_v2_x0_5 --precision bf16 --max-steps 5".split()  # slow on CPUs


@pytest.mark.parametrize(
    "flags, kills, several",  # how many processes are killed in which epoch and step, from 0
    [
        (["--max-steps", "28"], [(2, 0, 8), (4, 0, 14), (1, 1, 1)], [3, 6]),
        (BF16, [(4, 0, 4)], [3]),
    ],
    ids=["fp32", "bf16"],
)
def test_any_number_of_processes_ends_with_the_same_bits(flags, kills, several, work, tmp_path):
    """Straight on one and in fp32 on three; killed, and continued on another number each time."""
    script = copy(tmp_path / "here", "same_bits")
    expected = ended(script, work, 1, tmp_path / "1", *flags)
    for ranks in several[:-1]:
        assert equal(ended(script, work, ranks, tmp_path / f"{ranks}", *flags), expected)
    given = [*FLAGS, tmp_path / "changing", *flags]
    for ranks, epoch, step in kills:
        codes, output = run_ranks(script, given, ranks, work, before=dying(epoch, step))
        assert codes == [-9] * ranks, output
    assert equal(ended(script, work, several[-1], tmp_path / "changing", *flags), expected)


@pytest.mark.parametrize("missing", LACKS)
def test_each_ingredient_is_needed(missing, work, tmp_path):
    script = copy(tmp_path / "here", "same_bits", edits=[LACKS[missing]])
    one, two = (ended(script, work, n, tmp_path / f"{n}", "--max-steps", "6") for n in (1, 2))
    assert not equal(one, two)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--parts", "7"], "error: --parts must divide --batch-size and be a multiple of 1"),
        (["--precision", "fp16"], "error: the same bits need "),
        (["--lr", "1e9", "--warmup-epochs", "0"], "error: a gradient is above 349525 "),
        (["--parts", "6"], "was trained with --parts 12"),
    ],
)
def test_what_would_not_be_the_same_is_refused(flags, message, work, tmp_path):
    script = copy(tmp_path / "here", "same_bits")
    if "6" in flags:  # fewer parts, at a resume
        ended(script, work, 1, tmp_path / "c", "--max-steps", "1")
    codes, output = run_ranks(script, [*FLAGS, tmp_path / "c", *flags], cwd=work)
    assert codes[0] in (1, 2) and message in output
