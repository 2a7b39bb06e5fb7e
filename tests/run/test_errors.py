"""What a user can get wrong is said in one line, once, with exit code 2, however one starts.

Which mistakes there are, and what is said of them: tests/unit/test_mistakes.py.
"""

import shutil

import pytest
from conftest import ONE_THREAD, PYTHON, ROOT, SMALL, full, python, run, torchrun


@pytest.fixture(scope="module")
def flat_val(work):
    """A data folder whose val/ has images, but no class folders."""
    shutil.copytree(work / "data/digits", work / "flat_val")
    flat = work / "flat_val/val"
    for path in list(flat.glob("*/*")):
        path.rename(flat / path.name)
    for digit in range(10):
        (flat / str(digit)).rmdir()
    return ["--data", "flat_val", *SMALL, "--checkpoint-dir"]


MESSAGE = "error: no class folders in flat_val/val: "


@pytest.mark.parametrize("script", ["distributed", full("dataparallel"), full("fsdp_distributed")])
def test_one_process(script, flat_val, work, tmp_path):
    (line,) = run([*python(f"{script}.py"), *flat_val, tmp_path / "c"], work, code=2).splitlines()
    assert line.startswith(MESSAGE)


@pytest.mark.full
def test_mp_spawn(flat_val, work, tmp_path):
    command = [*python("multiprocessing_distributed.py"), "--nprocs=2", *flat_val, tmp_path / "c"]
    (line,) = run(command, work, code=2).strip().splitlines()
    assert line.startswith(MESSAGE)


def test_torchrun(flat_val, work, tmp_path):
    """It adds its own report and returns 1; our line comes once, from local rank 0."""
    output = run([*torchrun(3), *flat_val, tmp_path / "c"], work, env=ONE_THREAD, code=1)
    assert output.count("error: ") == output.count(MESSAGE) == 1
    assert output.count("Traceback") <= 1  # torchrun's
    assert "exitcode  : 2" in output and "distributed.py FAILED" in output


@pytest.mark.full
def test_copies_cannot_be_compiled(work, tmp_path):
    """With several GPUs, which are made up: each copy would run as if there was no such flag."""
    code = "import torch, dataparallel; torch.cuda.device_count = lambda: 2; "
    code += "dataparallel.set_up_device = lambda *_: torch.device('cpu'); dataparallel.main()"
    command = [PYTHON, "-c", code, *SMALL, "--compile", "--checkpoint-dir", tmp_path / "c"]
    output = run(command, work, env={"PYTHONPATH": str(ROOT)}, code=2, timeout=60)
    assert output == "error: --compile cannot compile copies: use one GPU, or distributed.py\n"
