"""start.sh installs nothing into an environment of the user's: it says what to run there."""

import os
import shutil
import subprocess

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
    assert said[:2] == [f"error: your Python has no {missing}" for missing in (torch, others)]
    assert said[2].startswith("hint: images are read faster with nvidia.nvimgcodec")
    assert said[3] == "error: no NAME: nonsense"
    (tmp_path / "nvidia").mkdir()
    (tmp_path / "nvidia/nvimgcodec.py").touch()
    env = {"PYTHONPATH": str(tmp_path), "NGPU": "0"}
    (line,) = start_sh(tmp_path, tmp_path / "env", **env)
    assert line == "error: NGPU=0: it is the number of processes"
    assert not (tmp_path / ".venv").exists()


def test_its_own_environment_may_be_active(tmp_path):
    """Then it installs there."""
    subprocess.run([PYTHON, "-m", "venv", tmp_path / ".venv"], check=True)
    *said, last = start_sh(tmp_path, tmp_path / ".venv")
    assert any("No matching distribution found for torch" in line for line in said)
    assert last == "error: .venv has no torch >= 2.6 with torchvision: see above, or remove it"
