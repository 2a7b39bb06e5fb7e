"""Every command of the README, of the docstrings and of start.sh runs; every link resolves."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PYTHON, ROOT, last_result, run

README = (ROOT / "README.md").read_text()
QUICK = ["--max-steps", "1", "--image-size", "32"]
# Run by tests of their own: what is a test run itself, needs two nodes, or a cluster's launcher.
ELSEWHERE = r"\./start\.sh( test.*| NAME .*)?$|NNODES|torchrun --nnodes=2|srun |sbatch "


def commands():
    """Each line of a block of commands, each `command` of the text and each line of a docstring."""
    blocks = re.findall(r"^```\n(.*?)^```$", README, re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    text = re.sub(r"^```.*?^```$", "", README, flags=re.M | re.S)
    lines += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text)]
    for path in ROOT.glob("*.py"):
        lines += re.findall(r"^\$ (.*)$", path.read_text(), re.M)
    starts = ("python ", "torchrun ", "horovodrun ", "./start.sh", "diff ", "NGPU=", "CUDA_")
    lines = {line for line in lines if line.startswith(starts) and line.split()[1:]}
    return sorted(line for line in lines if not re.match(ELSEWHERE, line))


@pytest.fixture(scope="module")
def clone(work, tmp_path_factory):
    """A copy of what is committed or will be, with the digits already written."""
    folder = tmp_path_factory.mktemp("clone") / "here"
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    shutil.copytree(work / "data", folder / "data")
    data = folder / "data/small"
    for part in ("train", "val"):
        shutil.copytree(work / "data/digits/val", data / part)
    return folder


# The environment of these tests, as one that a user has activated; with a double of Apex, which
# needs a GPU.
ACTIVE = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
ACTIVE["PYTHONPATH"] = str(ROOT / "tests/apex_doubles/today")


def test_commands_are_found():
    assert len(commands()) >= 11 and "python dataparallel.py" in commands()


@pytest.mark.parametrize("command", commands())
def test_command_runs(command, clone, tmp_path):
    # The only changes: a small data set for ImageNet's path, and one step where it would train.
    line = command.replace("/path/to/imagenet", "data/small -b 64 -a resnet18 -j 1")
    words = shlex.split(line)
    if words[0] == "horovodrun" and not shutil.which("horovodrun", path=ACTIVE["PATH"]):
        assert "CI" not in os.environ
        pytest.skip("Horovod is not installed: tools/install_horovod.sh")
    if words[0] == "diff":
        run(words, clone, code=1)
        return
    if words[0] == "python":
        words[0] = PYTHON
    flags = [*QUICK, "--checkpoint-dir", tmp_path / "c"]
    output = run(["env", *words, *flags], clone, env=ACTIVE, timeout=120)
    last_result(output.replace("[0]<stdout>:", ""))  # horovodrun's


NAMES = ["dataparallel", "distributed", "launch", "multiprocessing", "apex", "horovod"]


@pytest.mark.parametrize("name", NAMES)
def test_start_names(name, clone):
    have_horovod = shutil.which("horovodrun", path=ACTIVE["PATH"])
    if name == "horovod" and not have_horovod and "CI" not in os.environ:
        pytest.skip("Horovod is not installed: tools/install_horovod.sh")
    output = run(["./start.sh", name, *QUICK], clone, env=ACTIVE)
    last_result(output.replace("[0]<stdout>:", ""))
    assert re.search(r"^\+ (python|torchrun|horovodrun) .*\.py .*--max-steps 1", output, re.M)


def test_start_horovod_without_it_says_what_to_do(clone, tmp_path):
    for name in ("bash", "dirname", "env"):
        (tmp_path / name).symlink_to(shutil.which(name))
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {PYTHON} "$@"\n')
    (tmp_path / "python").chmod(0o755)
    bare = ACTIVE | {"PATH": str(tmp_path)}  # a python with torch, and no horovodrun
    output = run(["./start.sh", "horovod"], clone, env=bare, code=2)
    assert output == "error: needs Horovod: run tools/install_horovod.sh\n"


def test_start_runs_the_tests_and_explains_itself(clone):
    output = run(
        ["./start.sh", "test", "-q", "tests/test_diffs.py", "-k", "order"], clone, env=ACTIVE
    )
    assert " passed" in output and "failed" not in output
    for unknown in ("--help", "nonsense"):
        output = run(["./start.sh", unknown], clone, env=ACTIVE, code=2)
        assert "./start.sh NAME [flags]" in output and len(output.splitlines()) < 14


def test_start_chooses_the_number_of_processes(clone):
    output = run(["./start.sh", "distributed", *QUICK], clone, env=ACTIVE | {"NGPU": "1"})
    assert "global batch 64 = 1 x 64" in output and "--nproc-per-node=1" in output


def test_start_makes_an_environment_where_there_is_none(clone):
    """Without torch on the PATH it makes .venv, and without pip's index it says so and stops.

    The stand-in for an index proves only that requirements.txt is what gets installed.
    """
    bare = {"PATH": "/usr/local/bin:/usr/bin:/bin", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    if subprocess.run(["python3", "-c", "import torch"], env=bare, capture_output=True).returncode:
        output = run(["./start.sh", "distributed", *QUICK], clone, env=bare, code=2)
        assert "Making .venv with torch and torchvision" in output
        assert "No matching distribution found for torch" in output
        shutil.rmtree(clone / ".venv")


def test_links_resolve():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    for link in links:
        assert link.startswith("https://") or (ROOT / link).exists(), link
