"""apex_distributed.py: with doubles of both eras on a CPU, with a real Apex where a GPU is.

The doubles in tests/apex_doubles prove our calls, not Apex: only `pytest -m gpu` does that.
"""

import importlib.util
import re

import pytest
import torch
from conftest import ROOT, full, last_result, load, python, rows, run, same_state, torchrun

from tests.cluster.ddp import TWO_THREADS, ddp
from tests.launched import FLAGS

SCRIPT = "apex_distributed.py"
TWO = torchrun(2, SCRIPT)
# What each era is called with to compute as distributed.py does in fp32.
ERAS = {"older": ["--opt-level", "O1"], "today": ["--precision", "fp32"]}
REMEDY = "build it as github.com/NVIDIA/apex says; distributed.py --precision bf16 needs none"
real = importlib.util.find_spec("amp_C") is not None


def double(era):
    return TWO_THREADS | {"PYTHONPATH": str(ROOT / "tests/apex_doubles" / era)}


@pytest.mark.full
@pytest.mark.skipif(real, reason="Apex is installed")
def test_one_line_says_what_is_missing(work, tmp_path):
    """No Apex, the one of pip's index, one without its extensions; flags of the other era."""
    none = "no Apex of NVIDIA's here (pip's is another: uninstall that): "
    output = run(TWO, work, code=1)
    assert output.count("error: ") == output.count(f"error: {none}{REMEDY}\n") == 1
    extensions = "the Apex here lacks its CUDA extensions: "
    for file, message in (("apex", none), ("apex/optimizers", extensions)):
        (tmp_path / file).mkdir()
        (tmp_path / file / "__init__.py").write_text("import pyramid_of_another_project")
        output = run(python(SCRIPT), work, env={"PYTHONPATH": str(tmp_path)}, code=2)
        assert output == f"error: {message}{REMEDY}\n"
    message = "error: --opt-level is for an Apex with apex.amp, --precision for"
    for era, flags in (("older", "--precision bf16"), ("today", "--opt-level O1")):
        output = run([*python(SCRIPT), *flags.split()], work, env=double(era), code=2)
        assert output.startswith(message) and output.count("\n") == 1


@pytest.mark.parametrize("era", ["today", full("older")])
def test_is_the_same_as_distributed(era, work, tmp_path):
    flags = [*FLAGS, *ERAS[era], "--checkpoint-dir", tmp_path / "c"]
    output = run([*TWO, *flags], work, env=double(era))
    used = {
        "older": ["double: amp.initialize O1", "double: Apex's DDP", "apex.amp O1, Apex's DDP, "],
        "today": ["double: FusedSGD", "gloo, Apex's FusedSGD, cpu, fp32"],
    }
    assert all(line in output for line in used[era]), output
    ours, theirs = load(tmp_path / "c"), load(ddp(work))
    assert same_state({**ours, "scaler": None}, {**theirs, "scaler": None})
    assert rows(tmp_path / "c", timings=False) == rows(ddp(work), timings=False)
    scaler = {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 45}} if era == "older" else {}
    assert ours["scaler"] == scaler


@pytest.mark.full
def test_resumes_and_is_resumed_in_mid_epoch(work, tmp_path):
    """By the older era; today's has nothing else to save, but for the scaler of fp16."""
    flags = [*FLAGS, "--checkpoint-dir", tmp_path / "c", "--resume", "auto", "--max-steps"]
    for command, steps in ((torchrun(2), 9), (TWO, 18), (TWO, 30), (torchrun(2), 45)):
        output = run([*command, *flags, steps], work, env=double("older"))
        assert steps == 9 or "resumed from" in output
        if command is TWO:  # scaled losses are counted on over the second resume
            assert load(tmp_path / "c")["scaler"]["loss_scaler0"]["unskipped"] == steps - 9
    assert same_state(load(tmp_path / "c"), load(ddp(work)))


@pytest.mark.full
def test_fp16s_scaler_goes_on(work, tmp_path):
    flags = ["--precision", "fp16", "--checkpoint-dir", tmp_path / "c", "--resume", "auto"]
    for steps in (20, 45):
        run([*TWO, *FLAGS, *flags, "--max-steps", steps], work, env=double("today"))
    assert load(tmp_path / "c")["scaler"]["scale"] > 0
    assert same_state(load(tmp_path / "c"), load(ddp(work, "--precision", "fp16")))


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
LEVELS = ["O0", "O1", "O2", "O3"]


def real_flags():
    """The flags of each precision of the Apex that is installed."""
    if real and importlib.util.find_spec("apex.amp"):
        return [f"--opt-level {level}" for level in LEVELS]
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
    assert "at epoch 2 step 0" in output
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
