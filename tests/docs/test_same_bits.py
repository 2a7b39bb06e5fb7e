"""recipes/same_bits.diff: the same weights, to the bit, on any number of processes."""

import pytest
from conftest import ONE_THREAD, ROOT, Job, load, rows, run, torchrun

from tests.docs.test_recipes import copy, equal

FLAGS = "--image-size 24 -b 60 --parts 12 --epochs 2 -j 1 -p 1 --checkpoint-freq 3".split()
# What each ingredient becomes in a script that lacks it.
LACKS = {
    "order": ("rank + i * world_size)", "rank * mine + i)"),
    "statistics": ("norm.track_running_stats = i == 0", "pass"),
    "seeds": ("run.step, rank + i * world_size)", "run.step, rank)"),
    "whole numbers": (".mul_(ONE).round_().long()", ".mul_(ONE).float()"),
}


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    return copy(tmp_path_factory.mktemp("here"), "same_bits")


def job(script, work, ranks, folder, *flags):
    command = [*torchrun(ranks, script), *FLAGS, "--checkpoint-dir", folder, *flags]
    return Job(command, work, ONE_THREAD | {"PYTHONPATH": str(ROOT)})


def ended(script, work, ranks, folder, *flags):
    """What is to be the same: the checkpoint, and the lines of metrics.jsonl."""
    job(script, work, ranks, folder, *flags).finish()
    lines = [{**row, "world_size": 0} for row in rows(folder, timings=False)]
    return {**load(folder), "args": None}, lines


@pytest.mark.full
@pytest.mark.parametrize(
    "arch, more",
    [("tests.nets:normed", []), ("mobilenet_v3_small", ["--precision", "bf16"])],
    ids=["fp32", "bf16"],
)
def test_any_number_of_processes_ends_with_the_same_bits(arch, more, script, work, tmp_path):
    """Straight on one and on three; killed, and continued on another number each time."""
    flags = ["--arch", arch, "--max-steps", "28", *more]
    expected = ended(script, work, 1, tmp_path / "1", *flags)
    assert equal(ended(script, work, 3, tmp_path / "3", *flags), expected)
    folder = tmp_path / "changing"
    for ranks, step in ((2, r"1/\d+ \[8/"), (4, r"1/\d+ \[14/"), (1, r"2/\d+ \[1/")):
        changing = job(script, work, ranks, folder, *flags, "--resume", "auto")
        changing.wait_for(f"epoch {step}")
        changing.kill()
        changing.wait(60)
    assert equal(ended(script, work, 6, folder, *flags, "--resume", "auto"), expected)


@pytest.mark.full
@pytest.mark.parametrize("missing", LACKS)
def test_each_ingredient_is_needed(missing, work, tmp_path):
    script = copy(tmp_path / "here", "same_bits")
    before, after = LACKS[missing]
    assert before in script.read_text()
    script.write_text(script.read_text().replace(before, after))
    flags = ["--arch", "tests.nets:normed", "--max-steps", "6"]
    one, two = (ended(script, work, ranks, tmp_path / str(ranks), *flags) for ranks in (1, 2))
    assert not equal(one, two)


@pytest.mark.full
@pytest.mark.parametrize(
    "flags, message",
    [
        (["--parts", "7"], "error: --parts must divide --batch-size and be a multiple of 1"),
        (["--precision", "fp16"], "error: the same bits need "),
        (["--lr", "1e9", "--warmup-epochs", "0"], "error: a gradient is above 349525 "),
    ],
)
def test_what_would_not_be_the_same_is_refused(flags, message, script, work, tmp_path):
    command = [*torchrun(1, script), *FLAGS, "--arch", "tests.nets:plain", "--checkpoint-dir"]
    env = ONE_THREAD | {"PYTHONPATH": str(ROOT)}
    assert message in run([*command, tmp_path / "c", *flags], work, env=env, code=1)


@pytest.mark.full
def test_other_parts_are_refused_at_a_resume(script, work, tmp_path):
    flags = ["--arch", "tests.nets:plain", "--max-steps", "1"]
    job(script, work, 1, tmp_path / "c", *flags).finish()
    other = job(script, work, 1, tmp_path / "c", *flags, "--resume", "auto", "--parts", "6")
    assert "was trained with --parts 12" in other.finish(code=1)
