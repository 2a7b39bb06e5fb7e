"""start.sh installs nothing into an environment of the user's: it says what to run there."""

import os
import shutil
import subprocess
import sys

import pytest
from conftest import PYTHON, ROOT, run


@pytest.fixture
def active(tmp_path):
    """The variables of an active environment without packages, and where start.sh is."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    for name in ("start.sh", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return {
        "VIRTUAL_ENV": str(tmp_path / "env"),
        "PATH": f"{tmp_path}/env/bin:/usr/local/bin:/usr/bin:/bin",
    }


def test_without_torch(active, tmp_path):
    said = run(["./start.sh"], tmp_path, env=active, code=2)
    needed = "torch >= 2.6 with torchvision: run python -m pip install -r requirements.txt"
    assert said == f"error: your Python has no {needed}\n"
    assert not (tmp_path / ".venv").exists()


def test_without_what_the_digits_need(active, tmp_path):
    """Doubles of torch and torchvision, which say that they are here. No GPU, no torchcodec."""
    text = "__version__ = '2.10.0'\nclass cuda:\n    device_count = staticmethod(lambda: 0)\n"
    for name in ("torch", "torchvision"):
        (tmp_path / f"{name}.py").write_text(text)
    env = active | {"PYTHONPATH": str(tmp_path)}
    said = run(["./start.sh"], tmp_path, env=env, code=2)
    needed = "scikit-learn and tqdm: run python -m pip install scikit-learn tqdm"
    assert said == f"error: your Python has no {needed}\n"
    for name in ("sklearn", "tqdm"):
        (tmp_path / f"{name}.py").write_text("")
    said = run(["./start.sh", "nonsense"], tmp_path, env=env, code=2)
    assert said.startswith("hint: PIL reads the images, slowly; torch >= 2.11 can have torchcodec")
    assert said.splitlines()[1] == "error: no NAME: nonsense"


def test_its_own_environment_may_be_active(tmp_path):
    """Then it installs there; no index is asked."""
    subprocess.run([PYTHON, "-m", "venv", tmp_path / ".venv"], check=True)
    for name in ("start.sh", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    env = {"VIRTUAL_ENV": f"{tmp_path}/.venv", "PATH": f"{tmp_path}/.venv/bin:{os.defpath}"}
    env |= {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    said = run(["./start.sh"], tmp_path, env=env, code=2)
    assert "No matching distribution found for torch" in said
    assert said.endswith(
        "error: .venv has no torch >= 2.6 with torchvision: see above, or remove it\n"
    )
