"""start.sh installs nothing into an environment of the user's: it says what to run there.

Nor anywhere else before it has said why a torch that is there cannot be imported.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import PYTHON, ROOT, run

TORCH = "__version__ = '2.10.0'\nclass cuda:\n    device_count = staticmethod(lambda: 0)\n"


def start_sh(folder, venv, *flags, **env):
    """The lines of start.sh where this environment is active; no index of packages is asked."""
    for name in ("start.sh", "requirements.txt"):
        shutil.copy(ROOT / name, folder)
    active = {"VIRTUAL_ENV": str(venv), "PATH": f"{venv}/bin:{os.defpath}"}
    active |= {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    return run(["./start.sh", *flags], folder, env=active | env, code=2).splitlines()


def test_an_environment_of_the_users(tmp_path):
    """Doubles say that they are torch and what else is there. No GPU, no fast decoder."""
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    install = "run python -m pip install"
    torch = f"torch >= 2.6 with torchvision: {install} -r requirements.txt"
    others = f"scikit-learn and tqdm: {install} scikit-learn tqdm"
    doubles = [{}, {"torch": TORCH, "torchvision": TORCH}, {"sklearn": "", "tqdm": ""}]
    said = []
    for made in doubles:
        for name, text in made.items():
            (tmp_path / f"{name}.py").write_text(text)
        said += start_sh(tmp_path, tmp_path / "env", "nonsense", PYTHONPATH=str(tmp_path))
    assert said[0] == f"error: your Python has no {torch}"
    assert said[1:3] == ["missing: sklearn tqdm", f"error: your Python has no {others}"]
    assert said[3].startswith("hint: images are read faster with nvidia.nvimgcodec")
    assert said[4] == "error: no NAME: nonsense"
    (tmp_path / "nvidia").mkdir()
    (tmp_path / "nvidia/nvimgcodec.py").touch()
    env = {"PYTHONPATH": str(tmp_path), "NGPU": "0"}
    (line,) = start_sh(tmp_path, tmp_path / "env", **env)
    assert line == "error: NGPU=0: it is the number of processes"
    assert not (tmp_path / ".venv").exists()


@pytest.mark.full
def test_its_own_environment_may_be_active(tmp_path):
    """Then it installs there."""
    subprocess.run([PYTHON, "-m", "venv", tmp_path / ".venv"], check=True)
    *said, last = start_sh(tmp_path, tmp_path / ".venv")
    assert any("No matching distribution found for torch" in line for line in said)
    assert last == "error: .venv has no torch >= 2.6 with torchvision: see above, or remove it"


BROKEN = {
    "a missing library": "raise ImportError('libcudart.so.13: cannot open shared object file')",
    "an old numpy": "raise AttributeError('no _ARRAY_API')",
}


@pytest.mark.parametrize("why", BROKEN)
@pytest.mark.parametrize("flags", [["distributed"], ["test", "-m", "gpu"]])
def test_a_torch_that_cannot_be_imported(why, flags, tmp_path):
    """No environment is active: neither .venv nor anything else is made, as long as it is there."""
    for name, text in {"torch": BROKEN[why], "torchvision": ""}.items():
        (tmp_path / f"{name}.py").write_text(text)
    env = {
        "VIRTUAL_ENV": "",
        "CONDA_PREFIX": "",
        "PYTHONPATH": str(tmp_path),
        "PYTHONOPTIMIZE": "2",
    }
    *trace, reason, last = start_sh(tmp_path, Path(PYTHON).parent.parent, *flags, **env)
    assert trace[0].startswith("Traceback")
    assert reason.partition(": ")[2] in BROKEN[why]
    assert last == f"error: {PYTHON} has torch, but cannot import it: see above"
    assert not (tmp_path / ".venv").exists()


def test_an_old_torch_counts_as_none(tmp_path):
    """Where Python drops its asserts too."""
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    (tmp_path / "torchvision.py").touch()
    for version in ("2.5.1", "2.7.0+cu126", "1.13"):
        (tmp_path / "torch.py").write_text(TORCH.replace("2.10.0", version))
        env = {"PYTHONPATH": str(tmp_path), "PYTHONOPTIMIZE": "1"}
        (line,) = start_sh(tmp_path, tmp_path / "env", **env)
        assert line.startswith("error: your Python has no torch >= 2.6 with torchvision: run pyth")
