"""apex_distributed.py: with doubles of both eras on a CPU, with a real Apex where a GPU is.

The doubles in tests/apex_doubles prove our calls, not Apex: only `pytest -m gpu` does that.
"""

import importlib.util
import re

import pytest
import torch
from conftest import PYTHON, ROOT, forked, full, last_result, load, rows, run, same_state, torchrun

SCRIPT = ROOT / "apex_distributed.py"
ALONE, TWO = forked(SCRIPT), forked(SCRIPT, ranks=2)
# BatchNorm, dropout and weight decay, over the end of an epoch of 29 steps.
NORMED = [*"--arch tests.nets:normed --image-size 24 --batch-size 48 --epochs 2".split()]
NORMED += [*"--wd 1e-2 -j 1 --max-steps 36".split()]
# What each era is called with to compute as distributed.py does in fp32.
ERAS = {"older": ["--opt-level", "O1"], "today": ["--precision", "fp32"]}
REMEDY = "build it as github.com/NVIDIA/apex says; distributed.py --precision bf16 needs none"
real = importlib.util.find_spec("amp_C") is not None


def double(era):
    return {"PYTHONPATH": str(ROOT / "tests/apex_doubles" / era), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def reference(work):
    run([*forked(ranks=2), *NORMED, "--checkpoint-dir", "apex-reference"], work, env=double("none"))
    return work / "apex-reference"


@pytest.mark.skipif(real, reason="Apex is installed")
@pytest.mark.parametrize(
    "files, message",
    [
        ([], "no Apex of NVIDIA's here (pip's is another: uninstall that): "),
        (["apex/__init__.py"], "no Apex of NVIDIA's here (pip's is another: uninstall that): "),
        (
            ["apex/__init__.py", "apex/optimizers/__init__.py"],
            "the Apex here lacks its CUDA extensions: ",
        ),
    ],
    ids=["none", "the one of the index", "without extensions"],
)
def test_one_line_says_what_is_missing(files, message, work, tmp_path):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("import pyramid_of_another_project")
    path = {"PYTHONPATH": str(tmp_path)}
    assert run(ALONE, work, env=path, code=2) == f"error: {message}{REMEDY}\n"
    if not files:
        output = run(torchrun(2, SCRIPT), work, code=1)
        assert output.count("error: ") == output.count(message) == 1


@pytest.mark.parametrize("era", ERAS)
def test_is_the_same_as_distributed(era, work, reference, tmp_path):
    flags = [*NORMED, *ERAS[era], "--checkpoint-dir", tmp_path / "c"]
    output = run([*TWO, *flags], work, env=double(era))
    used = {
        "older": ["double: amp.initialize O1", "double: Apex's DDP", "apex.amp O1, Apex's DDP, "],
        "today": ["double: FusedSGD", "gloo, Apex's FusedSGD, cpu, fp32"],
    }
    assert all(line in output for line in used[era]), output
    ours, theirs = load(tmp_path / "c"), load(reference)
    assert same_state({**ours, "scaler": None}, {**theirs, "scaler": None})
    assert rows(tmp_path / "c", timings=False) == rows(reference, timings=False)
    scaler = {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 36}} if era == "older" else {}
    assert ours["scaler"] == scaler


@pytest.mark.parametrize("era", ["today", full("older")])
def test_resumes_and_is_resumed_in_mid_epoch(era, work, reference, tmp_path):
    flags = [*NORMED, "--checkpoint-dir", tmp_path / "c", "--resume", "auto"]
    for script, own, steps in (
        ("distributed.py", [], 9),
        ("apex_distributed.py", ERAS[era], 18),
        ("apex_distributed.py", ERAS[era], 30),
        ("distributed.py", [], 36),
    ):
        command = [*forked(script, ranks=2), *flags, *own, "--max-steps", steps]
        output = run(command, work, env=double(era))
        assert steps == 9 or "resumed from" in output
        if era == "older" and own:  # scaled losses are counted on over the second resume
            assert load(tmp_path / "c")["scaler"]["loss_scaler0"]["unskipped"] == steps - 9
    assert same_state(load(tmp_path / "c"), load(reference))


def test_fp16s_scaler_goes_on(work, tmp_path):
    flags = [*NORMED, "--precision", "fp16", "--checkpoint-dir"]
    run([*forked(ranks=2), *flags, tmp_path / "a"], work, env=double("none"))
    for steps in (20, 36):
        command = [*TWO, *flags, tmp_path / "b", "--resume", "auto"]
        run([*command, "--max-steps", steps], work, env=double("today"))
    assert load(tmp_path / "b")["scaler"]["scale"] > 0
    assert same_state(load(tmp_path / "a"), load(tmp_path / "b"))


@pytest.mark.parametrize("era, flags", [("older", "--opt-level O3"), ("today", "--precision bf16")])
def test_validates_in_the_precision_of_training(era, flags, work, tmp_path):
    command = [*TWO, *NORMED, *flags.split(), "--checkpoint-dir", tmp_path / "c"]
    trained = last_result(run(command, work, env=double(era)))
    assert trained[1] > 30
    again = [*command, "--evaluate", "--resume", tmp_path / "c/checkpoint.pth"]
    assert last_result(run(again, work, env=double(era))) == trained
    single = [*ALONE, *again[len(TWO) :]]
    assert last_result(run(single, work, env=double(era))) == pytest.approx(trained, abs=0.3)
    if era == "today":
        ddp = [*forked(ranks=2), *again[len(TWO) :]]
        assert last_result(run(ddp, work, env=double(era))) == trained
    else:
        assert {w.dtype for w in load(tmp_path / "c")["state_dict"].values()} >= {torch.bfloat16}


@pytest.mark.parametrize(
    "era, flags, message",
    [
        ("older", "--precision bf16", "--opt-level is for an Apex with apex.amp, --precision for"),
        ("today", "--opt-level O1", "--opt-level is for an Apex with apex.amp, --precision for"),
    ],
)
def test_flags_of_the_other_era(era, flags, message, work):
    output = run([*ALONE, *flags.split()], work, env=double(era), code=2)
    assert output.startswith(f"error: {message}") and output.count("\n") == 1


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
    command = [PYTHON, SCRIPT, *flags.split(), "--checkpoint-dir", tmp_path / "c"]
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
    flags = [*NORMED, "--checkpoint-dir"]
    env = {"NVIDIA_TF32_OVERRIDE": "0"}  # which of cuDNN's choices round to 10 bits differs
    run([PYTHON, SCRIPT, *real_flags()[0].split(), *flags, tmp_path / "a"], work, env=env)
    ddp = [PYTHON, ROOT / "distributed.py", "--precision", "fp32"]
    run([*ddp, *flags, tmp_path / "b"], work, env=env)
    a, b = load(tmp_path / "a")["state_dict"], load(tmp_path / "b")["state_dict"]
    for key in a:
        torch.testing.assert_close(a[key], b[key], atol=1e-3, rtol=1e-2)
