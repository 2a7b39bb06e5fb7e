"""start.sh installs nothing into an environment of the user's: it says what to run there."""

import os
import shutil
import subprocess

from conftest import PYTHON, ROOT, run


def start_sh(folder, venv, *flags, env=None):
    """What start.sh says where this environment, of no packages, is active."""
    if not venv.exists():
        subprocess.run([PYTHON, "-m", "venv", venv], check=True)
    for name in ("start.sh", "requirements.txt"):
        shutil.copy(ROOT / name, folder)
    active = {"VIRTUAL_ENV": str(venv), "PATH": f"{venv}/bin:{os.defpath}"}
    return run(["./start.sh", *flags], folder, env=active | (env or {}), code=2)


def test_an_environment_of_the_users(tmp_path):
    """Doubles of torch and torchvision say that they are here. No GPU, no fast decoder."""
    said = start_sh(tmp_path, tmp_path / "env")
    needed = "torch >= 2.6 with torchvision: run python -m pip install -r requirements.txt"
    assert said == f"error: your Python has no {needed}\n"
    assert not (tmp_path / ".venv").exists()
    text = "__version__ = '2.10.0'\nclass cuda:\n    device_count = staticmethod(lambda: 0)\n"
    for name in ("torch", "torchvision"):
        (tmp_path / f"{name}.py").write_text(text)
    doubles = {"PYTHONPATH": str(tmp_path)}
    needed = "scikit-learn and tqdm: run python -m pip install scikit-learn tqdm"
    said = start_sh(tmp_path, tmp_path / "env", env=doubles)
    assert said == f"error: your Python has no {needed}\n"
    for name in ("sklearn", "tqdm"):
        (tmp_path / f"{name}.py").write_text("")
    said = start_sh(tmp_path, tmp_path / "env", "nonsense", env=doubles)
    hints = [f"hint: images are read faster with {p}" for p in ("nvidia.nvimgcodec", "torchcodec")]
    *lines, last = said.splitlines()[:3]
    assert all(line.startswith(hint) for line, hint in zip(lines, hints, strict=True))
    assert last == "error: no NAME: nonsense"


def test_its_own_environment_may_be_active(tmp_path):
    """Then it installs there; no index is asked."""
    no_index = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    said = start_sh(tmp_path, tmp_path / ".venv", env=no_index)
    assert "No matching distribution found for torch" in said
    needed = "torch >= 2.6 with torchvision: see above, or remove it"
    assert said.endswith(f"error: .venv has no {needed}\n")
