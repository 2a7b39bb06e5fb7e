"""What doctor --attach makes of a job that was looked at: made-up processes, stacks and ranks."""

import pytest

from doctor.attach import source


def around(monkeypatch, text):
    """What is known of the line that holds HERE."""
    lines = text.split("\n")
    monkeypatch.setattr(source, "lines_of", lambda pid, file: lines)
    line = 1 + next(number for number, one in enumerate(lines) if "HERE" in one)
    return source.Around(1, "train.py", line)


# Which all ranks enter, or which speak of another rank.
ALL = """RANK != -1
not RANK == -1
-1 != rank
rank > -1
local_rank is not None
rank >= 0
0 <= rank
lora_rank > 0
low_rank
torch.linalg.matrix_rank(x) > 2
use_ranking_loss
reranker is None"""
SOME = """rank == 0
not rank
0 == rank
rank > 0
RANK in (-1, 0)
rank is None or rank == 0
args.distributed and dist.get_rank() == 0
local_rank < 1
is_main_process()"""


@pytest.mark.parametrize("test", ALL.split("\n") + SOME.split("\n"))
def test_a_condition_that_some_ranks_enter(test, monkeypatch):
    found = around(monkeypatch, f"if {test}:\n    pass\n    HERE()\n")
    assert bool(found.under) == (test in SOME.split("\n")), found.under
    other = around(monkeypatch, f"if {test}:\n    pass\nelse:\n    HERE()\n")
    assert bool(other.under) == bool(found.under)


def test_a_guard_that_raises_is_no_condition(monkeypatch):
    text = "def main():\n    if local_rank >= count:\n        {}\n    HERE()\n"
    assert around(monkeypatch, text.format("raise ValueError")).under == ""
    assert around(monkeypatch, text.format("return")).under.startswith("if not local_rank >= count")
