"""apex_distributed.py with doubles of both eras of Apex, on a CPU.

The doubles in tests/apex_doubles prove our calls, not Apex: only tests/gpu does that.
"""

import importlib.util

import pytest
import torch
from conftest import ONE_THREAD, ROOT, last_result, load, run, same_state, torchrun

from tests.docs.ranks import good, run_ranks
from tests.launched import FLAGS, straight

SCRIPT = "apex_distributed.py"
# Which era, its flags, what it prints, and the flags with which distributed.py computes the same.
CASES = {
    "fp16": ("today", "--precision fp16", "double: FusedSGD", "--precision fp16"),
    "O1": ("older", "--opt-level O1", "apex.amp O1, Apex's DDP, ", ""),
}
REMEDY = "build it as github.com/NVIDIA/apex says; distributed.py --precision bf16 needs none"


DOUBLES = ROOT / "tests/apex_doubles"


def double(era):
    return ONE_THREAD | {"PYTHONPATH": str(DOUBLES / era)}


def first_of_all(folder):
    """As PYTHONPATH, for forks."""
    return f"import sys; sys.path.insert(0, {str(folder)!r})"


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("amp_C") is not None, reason="Apex is installed")
def test_one_line_says_what_is_missing(work, tmp_path):
    """No Apex, the one of pip's index, one without its extensions."""
    none = "no Apex of NVIDIA's here (pip's is another: uninstall that)"
    extensions = "the Apex here lacks its CUDA extensions"
    for folder, message in ((".", none), ("apex", none), ("apex/optimizers", extensions)):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "__init__.py").write_text("import pyramid_of_another_project")
        codes, output = run_ranks(ROOT / SCRIPT, cwd=work, before=first_of_all(tmp_path))
        assert codes == [2] and output == f"error: {message}: {REMEDY}\n"


@pytest.mark.full
@pytest.mark.parametrize("era, flag", [("older", "--precision=bf16"), ("today", "--opt-level=O1")])
def test_a_flag_of_the_other_era_is_one_line(era, flag, work):
    codes, output = run_ranks(ROOT / SCRIPT, [flag], cwd=work, before=first_of_all(DOUBLES / era))
    assert codes == [2] and output.startswith(
        "error: --opt-level is for an Apex with apex.amp, --precision for"
    )
    assert output.count("\n") == 1


@pytest.mark.full
@pytest.mark.parametrize("case", ["fp16", "O1"])
def test_goes_on_from_distributed_and_is_the_same(case, work, tmp_path):
    """In mid-epoch, and from its own checkpoint: scaled losses are counted on.

    Under torchrun in fp16, whose scaler is torch's in both: apex.amp's is forked.
    """
    (era, flags, said, same), folder = CASES[case], tmp_path / "c"
    begin, go_on = ["distributed.py", *same.split()], [SCRIPT, *flags.split()]
    stops = ((begin, 9), (go_on, 20), (go_on, 45)) if case == "O1" else ((begin, 9), (go_on, 45))
    for (script, *own), steps in stops:
        more = [*own, *FLAGS, "--checkpoint-dir", folder, "--resume", "auto", "--max-steps", steps]
        if case == "O1":
            known = {"ranks": 2, "cwd": work, "before": first_of_all(DOUBLES / era)}
            output = good(ROOT / script, *more, **known)
        else:
            output = run([*torchrun(2, script), *more], work, env=double(era))
        assert steps == 9 or (said in output and "resumed from" in output), output
    ours, theirs = load(folder), load(straight("distributed", work, *same.split()))
    if case == "O1":
        assert ours["scaler"] == {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 36}}
        ours["scaler"] = theirs["scaler"]
    assert same_state(ours, theirs) and bool(theirs["scaler"]) == (case == "fp16")


@pytest.mark.full
@pytest.mark.parametrize("era, flags", [("older", "--opt-level O3"), ("today", "--precision bf16")])
def test_validates_in_the_precision_of_training(era, flags, work, tmp_path):
    command = [ROOT / SCRIPT, *FLAGS, *flags.split(), "--checkpoint-dir", tmp_path / "c"]
    known = {"ranks": 2, "cwd": work, "before": first_of_all(DOUBLES / era)}
    trained = last_result(good(*command, **known))
    assert trained[1] > 30
    dtypes = {weight.dtype for weight in load(tmp_path / "c")["state_dict"].values()}
    assert (torch.bfloat16 in dtypes) == (era == "older")
    again = [*command, "--evaluate", "--resume", tmp_path / "c/checkpoint.pth"]
    assert last_result(good(*again, **known)) == trained
