"""apex_distributed.py: with doubles of both eras on a CPU, with a real Apex where a GPU is.

The doubles in tests/apex_doubles prove our calls, not Apex: only `pytest -m gpu` does that.
"""

import importlib.util
import re

import pytest
import torch
from conftest import (
    ONE_THREAD,
    ROOT,
    full,
    last_result,
    load,
    python,
    run,
    same_state,
    torchrun,
)

from tests.launched import FLAGS, straight

SCRIPT = "apex_distributed.py"
TWO = torchrun(2, SCRIPT)
# Which era, its flags, what it prints, and the flags with which distributed.py computes the same.
CASES = {
    "fp32": ("today", "--precision fp32", "Apex's FusedSGD, cpu, fp32", ""),
    "fp16": ("today", "--precision fp16", "double: FusedSGD", "--precision fp16"),
    "O1": ("older", "--opt-level O1", "apex.amp O1, Apex's DDP, ", ""),
}
REMEDY = "build it as github.com/NVIDIA/apex says; distributed.py --precision bf16 needs none"
real = importlib.util.find_spec("amp_C") is not None


def double(era):
    return ONE_THREAD | {"PYTHONPATH": str(ROOT / "tests/apex_doubles" / era)}


@pytest.mark.full
@pytest.mark.skipif(real, reason="Apex is installed")
def test_one_line_says_what_is_missing(work, tmp_path):
    """No Apex, the one of pip's index, one without its extensions; flags of the other era."""
    none = "no Apex of NVIDIA's here (pip's is another: uninstall that): "
    extensions = "the Apex here lacks its CUDA extensions: "
    env = {"PYTHONPATH": str(tmp_path)}
    assert run(python(SCRIPT), work, env=env, code=2) == f"error: {none}{REMEDY}\n"
    for file, message in (("apex", none), ("apex/optimizers", extensions)):
        (tmp_path / file).mkdir()
        (tmp_path / file / "__init__.py").write_text("import pyramid_of_another_project")
        assert run(python(SCRIPT), work, env=env, code=2) == f"error: {message}{REMEDY}\n"
    message = "error: --opt-level is for an Apex with apex.amp, --precision for"
    for era, flags in (("older", "--precision bf16"), ("today", "--opt-level O1")):
        output = run([*python(SCRIPT), *flags.split()], work, env=double(era), code=2)
        assert output.startswith(message) and output.count("\n") == 1


@pytest.mark.parametrize("case", ["fp32", full("fp16"), full("O1")])
def test_goes_on_from_distributed_and_is_the_same(case, work, tmp_path):
    """In mid-epoch, twice: scaled losses are counted on over the second resume."""
    era, flags, said, same = CASES[case]
    begin, folder = [*torchrun(2), *same.split()], tmp_path / "c"
    for command, steps in ((begin, 9), ([*TWO, *flags.split()], 20), ([*TWO, *flags.split()], 45)):
        command = [*command, *FLAGS, "--checkpoint-dir", folder, "--resume", "auto"]
        output = run([*command, "--max-steps", steps], work, env=double(era))
        assert steps == 9 or (said in output and "resumed from" in output), output
    ours, theirs = load(folder), load(straight("distributed", work, *same.split()))
    if case == "O1":
        assert ours["scaler"] == {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 36}}
        ours["scaler"] = theirs["scaler"]
    assert same_state(ours, theirs) and bool(theirs["scaler"]) == (case == "fp16")


@pytest.mark.full
@pytest.mark.parametrize("era, flags", [("older", "--opt-level O3"), ("today", "--precision bf16")])
def test_validates_in_the_precision_of_training(era, flags, work, tmp_path):
    command = [*TWO, *FLAGS, *flags.split(), "--checkpoint-dir", tmp_path / "c"]
    trained = last_result(run(command, work, env=double(era)))
    assert trained[1] > 30
    dtypes = {weight.dtype for weight in load(tmp_path / "c")["state_dict"].values()}
    assert (torch.bfloat16 in dtypes) == (era == "older")
    again = [*command, "--evaluate", "--resume", tmp_path / "c/checkpoint.pth"]
    assert last_result(run(again, work, env=double(era))) == trained


gpu = pytest.mark.gpu
no_apex = pytest.mark.skipif(
    not (real and torch.cuda.is_available()), reason="needs a GPU and Apex with CUDA extensions"
)


def real_flags():
    """The flags of each precision of the Apex that is installed."""
    if real and importlib.util.find_spec("apex.amp"):
        return [f"--opt-level O{level}" for level in range(4)]
    return [f"--precision {precision}" for precision in ("fp32", "bf16", "fp16")]


@gpu
@no_apex
@pytest.mark.parametrize("flags", real_flags())
def test_real_apex_trains_resumes_and_evaluates(flags, work, tmp_path):
    command = [*python(SCRIPT), *flags.split(), "--checkpoint-dir", tmp_path / "c"]
    output = run([*command, "--max-steps", "44"], work, timeout=300)
    losses = [float(x) for x in re.findall(r"loss ([\d.]+) \(", output)]
    assert losses[-1] < losses[0] / 2
    output = run([*command, "--resume", "auto"], work, timeout=300)
    assert "at the end of epoch 2\n" in output
    trained = last_result(output)
    assert trained[1] > (80 if "O3" in flags else 95)
    again = run([*command, "--evaluate", "--resume", tmp_path / "c/checkpoint.pth"], work)
    assert last_result(again) == pytest.approx(trained, abs=0.6)


@gpu
@no_apex
def test_real_apex_in_fp32_is_distributed(work, tmp_path):
    flags = [*FLAGS, "--checkpoint-dir"]
    env = {"NVIDIA_TF32_OVERRIDE": "0"}  # which of cuDNN's choices round to 10 bits differs
    run([*python(SCRIPT), *real_flags()[0].split(), *flags, tmp_path / "a"], work, env=env)
    run([*python(), "--precision", "fp32", *flags, tmp_path / "b"], work, env=env)
    a, b = load(tmp_path / "a")["state_dict"], load(tmp_path / "b")["state_dict"]
    for key in a:
        torch.testing.assert_close(a[key], b[key], atol=1e-3, rtol=1e-2)
