"""What a user can get wrong is said in one line, once, with exit code 2, however one starts.

Which mistakes there are, and what is said of them: tests/unit/test_mistakes.py.
"""

import pytest
from conftest import each

from tests.launched import SCRIPTS, start


# Of one launcher, or none, there is one script: these lines are the same in all (test_diffs.py).
@pytest.mark.parametrize("name", each(SCRIPTS, ["distributed"], ["alone", "apex", "fsdp"]))
def test_a_mistake_is_one_line(name, work, tmp_path):
    """torchrun and horovodrun add a report of their own, and return 1."""
    repeated = name in ("distributed", "apex", "fsdp")  # torchrun does, in its last lines
    launched = repeated or name == "horovod"
    job = start(name, tmp_path / "c", work, "--data", "nowhere")
    output = job.finish(code=1 if launched else 2)
    message = "error: no folder nowhere/train: train/ and val/ must "
    assert output.count(f"  traceback : {message}") == repeated, output
    assert output.count("error: ") == output.count(message) == 1 + repeated, output
    assert launched or (output.startswith(message) and output.count("\n") == 1), output
