"""The doctor on tensor parallel, pipelines and FSDP with copies: what several compute together."""

import re

import pytest
from conftest import ROOT

from tests.docs.copies import edited, patched
from tests.docs.mutant_runs import diagnosed
from tests.docs.test_beyond import FILES, TEXT
from tests.docs.test_doctor import TOGETHER, heading_of

pytestmark = pytest.mark.full
TEXTS = (FILES, "FILES = [Path('text')]")
NAMED = {  # what its line says; test_doctor.TOGETHER
    "tensor_sampler_by_rank": "sampler = DistributedSampler(",
    "tensor_clip_own_part": "optimizer.step()",
    "pipeline_sampler_by_rank": "sampler = DistributedSampler(",
    "pipeline_clip_per_stage": "nn.utils.clip_grad_norm_(",
}
DRIFT = """            for weight in net.parameters():
                weight.grad *= 1 + rank // 2 * (epoch > 0)
            optimizer.step()
"""


def examined(folder, name, *edits, diff=None, flags=()):
    """(the script's text, what the doctor says of it); each process is a fork."""
    script = folder / "before.py"
    script.write_text((ROOT / f"minimal/{name}.py").read_text())
    assert diff is None or patched(script, f"bugs/{diff}.diff")
    text = edited(script.read_text(), edits)
    (folder / "run").mkdir()
    files = []
    if TEXTS in edits:
        (folder / "text").write_bytes(TEXT)
        files = [folder / "text"]
    return text, diagnosed(folder / "run", ["--quick", *flags], text, files)


@pytest.mark.parametrize("mistake", sorted(TOGETHER))
def test_names_the_mistake_and_nothing_else(mistake, tmp_path):
    name = re.match("--- minimal/(.*).py", (ROOT / f"bugs/{mistake}.diff").read_text())[1]
    text, report = examined(tmp_path, name, TEXTS, diff=mistake)
    (found,) = report["found"]
    assert found["certain"] and found["place"] == f"docs/bugs.md#{heading_of(mistake)}", report
    line = text.splitlines()[int(found["line"].rpartition(":")[2]) - 1]
    assert NAMED[mistake] in line and report["code"] == 1, report["said"]


@pytest.mark.parametrize(
    ("name", "processes"), [("tensor_parallel", 2), ("tensor_parallel", 4), ("pipeline", 3)]
)
def test_finds_nothing_in_a_right_script(name, processes, tmp_path):
    """Processes that compute one model together rightly read the same items."""
    _, report = examined(tmp_path, name, TEXTS, flags=[f"-n={processes}"])
    assert (report["found"], report["code"]) == ([], 0), report["said"]
    assert "the weights were not compared" not in report["said"]
    assert "may differ on purpose, for they compute a model together" in report["said"]


@pytest.mark.parametrize("drifts", [False, True])
def test_copies_of_a_model_that_fsdp_divides_are_compared(drifts, tmp_path):
    """Two copies, each divided among two."""
    edits = [("EPOCHS = 5", "EPOCHS = 2")]
    edits += [("            optimizer.step()\n", DRIFT)] if drifts else []
    text, report = examined(tmp_path, "hsdp_distributed", *edits, flags=["-n=4"])
    assert "the weights were not compared" not in report["said"]
    if not drifts:
        assert (report["found"], report["code"]) == ([], 0), report["said"]
        return
    (found,) = report["found"]
    assert found["certain"] and found["place"] == "docs/doctor.md#the-weights-differ", report
    assert "the same part of it" in found["text"] and report["code"] == 1
    line = text.splitlines()[int(found["line"].rpartition(":")[2]) - 1]
    assert "optimizer.step()" in line, report["said"]


def test_a_norm_that_is_only_measured_is_no_mistake(tmp_path):
    """clip_grad_norm_ with inf changes no gradient."""
    edits = [
        TEXTS,
        (
            "clip_grad_norm_(net.parameters(), 1.0)",
            "clip_grad_norm_(net.parameters(), float('inf'))",
        ),
    ]
    _, report = examined(tmp_path, "pipeline", *edits, diff="pipeline_clip_per_stage")
    assert (report["found"], report["code"]) == ([], 0), report["said"]
