"""What a user can get wrong is said in one line, once, with exit code 2, however one starts.

Which mistakes there are, and what is said of them: tests/unit/test_mistakes.py.
"""

import pytest
from conftest import PYTHON, SMALL, full, run

from tests.launched import IN_ROOT, SCRIPTS, start


@pytest.mark.parametrize("name", [n if n == "distributed" else full(n) for n in SCRIPTS])
def test_a_mistake_is_one_line(name, work, tmp_path):
    """torchrun and horovodrun add a report of their own, and return 1."""
    repeated = name in ("distributed", "apex", "fsdp")  # torchrun does, in its last lines
    launched = repeated or name == "horovod"
    job = start(name, tmp_path / "c", work, "--data", "nowhere")
    output = job.finish(code=1 if launched else 2)
    message = "error: no folder nowhere/train: --data needs "
    assert output.count(f"  traceback : {message}") == repeated, output
    assert output.count("error: ") == output.count(message) == 1 + repeated, output
    assert launched or (output.startswith(message) and output.count("\n") == 1), output


@pytest.mark.full
def test_copies_cannot_be_compiled(work, tmp_path):
    """With several GPUs, which are made up: each copy would run as if there was no such flag."""
    code = "import torch, dataparallel; torch.cuda.device_count = lambda: 2; "
    code += "dataparallel.set_up_device = lambda *_: torch.device('cpu'); dataparallel.main()"
    command = [PYTHON, "-c", code, *SMALL, "--compile", "--checkpoint-dir", tmp_path / "c"]
    output = run(command, work, env=IN_ROOT, code=2)
    assert output == "error: --compile cannot compile copies: use one GPU, or distributed.py\n"
