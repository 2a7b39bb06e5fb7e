"""Nothing that is promised hangs on an assert or a docstring: python -O and -OO drop these."""

import ast
import os
import subprocess
import sys

import pytest
from conftest import ONE_THREAD, PYTHON, ROOT, SMALL, each, run, without_launchers

SCRIPTS = [*sorted(path.name for path in ROOT.glob("*distributed*.py")), "dataparallel.py"]
ROOMS = sorted(
    str(p.relative_to(ROOT)) for room in ("common", "longrun") for p in ROOT.glob(f"{room}/*.py")
)


def test_no_assert():
    files = [*SCRIPTS, *ROOMS, "compose.py", "plot.py", "predict.py"]
    assert len(SCRIPTS) == 7 and len(files) > 25
    for name in files:
        for node in ast.walk(ast.parse((ROOT / name).read_text())):
            assert not isinstance(node, ast.Assert), f"{name}:{node.lineno}"


HELP = each(SCRIPTS, ["distributed.py"], by_hand=[n for n in SCRIPTS if n != "distributed.py"])


@pytest.mark.parametrize("name", [*HELP, "compose.py", "plot.py", "predict.py"])
def test_help(name, tmp_path):
    if name.startswith("horovod"):
        pytest.importorskip("horovod")
    env = {"PYTHONPATH": str(ROOT / "tests/apex_doubles/today")}
    output = run([PYTHON, "-OO", ROOT / name, "--help"], tmp_path, env=env)
    assert output.startswith(f"usage: {name} ") and "show this help" in output


LOST = """
import distributed
start = distributed.start_loader
def one_less(data, sampler, *more, **flags):
    return start(data, sampler[1:] if isinstance(sampler, range) else sampler, *more, **flags)
distributed.start_loader = one_less
distributed.main()
"""


def test_an_image_that_is_lost_ends_the_evaluation(work):
    """One of the 360."""
    flags = [*SMALL, "-j", "0", "--arch", "tests.nets:odd_buffers", "--evaluate"]
    env = {"PYTHONPATH": str(ROOT), "PYTHONOPTIMIZE": "2"} | ONE_THREAD
    output = run([PYTHON, "-c", LOST, *flags], work, env=env, code=1)
    assert output.endswith("images lost or counted twice\n")


@pytest.mark.full
def test_the_unit_tests():
    """Without the asserts of ours, if there were any; those of tests pytest has rewritten.

    In one process: pytest's workers would not be given the flag.
    """
    command = [PYTHON, "-O", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["tests/unit", "--deselect", "tests/unit/test_optimized.py"]
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env=without_launchers(os.environ),
        capture_output=True,
        text=True,
        timeout=1100,
    )
    assert ended.returncode == 0, ended.stdout[-3000:]
    assert "assert statements are not executed" in ended.stdout  # pytest's own warning of -O


def test_asserts_of_tests_hold_here():
    with pytest.raises(AssertionError):
        assert sys.flags.optimize < 0
