"""Copies of scripts: with a recipe or a mistake, with other lines, and what they learn."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import torch
from conftest import PYTHON, ROOT
from sklearn.datasets import load_digits
from torchvision.models import ResNet18_Weights, resnet18

from minimal import one_gpu

# The command line of a user who has activated the environment of these tests.
USER = {"PATH": f"{Path(PYTHON).parent}:{os.environ['PATH']}"}


def commands_of(text):
    """Those in a script's docstring."""
    return re.findall(r"^\$ (.*)$", text, re.M)


def joined(text):
    """A text whose lines that end with a backslash are one with the next."""
    return re.sub(r" *\\\n *", " ", text)


def edited(text, edits):
    """A text with other lines: (old, new), of which each old one is there once."""
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def patched(path, diff, *flags):
    """Apply a diff of the project to a file; whether it fits."""
    command = ["patch", "-s", "-r-", *flags, path, ROOT / diff]
    return subprocess.run(command, capture_output=True).returncode == 0


def copy(folder, *recipes, script="distributed", edits=()):
    """A copy of a full script with recipes and edits, and with both rooms beside it; its path."""
    folder.mkdir(exist_ok=True)
    for room in ("common", "longrun", "recipes"):
        (folder / room).symlink_to(ROOT / room)
    path = Path(shutil.copy(ROOT / f"{script}.py", folder))
    assert all(patched(path, f"recipes/{name}.diff") for name in recipes)
    path.write_text(edited(path.read_text(), edits))
    return path


def equal(a, b):
    """Whether two checkpoints, or parts of them, are the same: tensors to the bit."""
    if torch.is_tensor(a):
        return a.equal(b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def validation_set():
    """(images, targets) of the minimal scripts."""
    digits = load_digits()
    images = torch.tensor(digits.images[4::5], dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(digits.target[4::5])


@torch.no_grad()
def predicted(weights):
    """What the net of the minimal scripts, with these weights, takes those images for."""
    net = one_gpu.build_net()
    net.load_state_dict(weights)
    return net.eval()(validation_set()[0]).argmax(dim=1)


def accuracy(weights):
    """On all of these images; as the scripts print it."""
    correct = predicted(weights) == validation_set()[1]
    return f"{100 * correct.sum().item() / 359:.1f}"


def cached_weights(folder):
    """Random ones for a ResNet-18, as torchvision has downloaded them where TORCH_HOME=folder."""
    weights, hub = resnet18().state_dict(), folder / "hub/checkpoints"
    hub.mkdir(parents=True)
    torch.save(weights, hub / Path(ResNet18_Weights.DEFAULT.url).name)
    return weights


def dying(epoch, step):
    """Before a full script: it ends at this step, from 0, as by SIGKILL."""
    return f"""
import os
import common.loader
seed_step = common.loader.seed_step
def dying(seed, epoch, step, rank):
    if (epoch, step) == ({epoch}, {step}):
        os.kill(os.getpid(), 9)
    seed_step(seed, epoch, step, rank)
common.loader.seed_step = dying
"""
