"""Composed scripts: written into a folder, started as their first lines say, and looked at."""

import random
import re
import shutil
import tempfile

import torch
from conftest import HOROVODRUN, PYTHON, ROOT, Job
from torch.utils.data import DataLoader

import compose
from tests.docs.copies import USER, edited
from tests.docs.ranks import run_ranks

# Before a script that srun would start: Slurm's variables, and no scontrol, as in a container.
SLURM = """
import os
os.environ |= {"SLURM_PROCID": os.environ["RANK"], "SLURM_LOCALID": os.environ["LOCAL_RANK"]}
os.environ |= {"SLURM_NTASKS": os.environ["WORLD_SIZE"], "SLURM_STEP_NODELIST": "localhost"}
os.environ |= {"SLURM_STEP_ID": "0", "PATH": "/nowhere"}
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    del os.environ[name]
"""
RAY = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
TRAINING = re.compile(r"^        for (images, target|batch) in train_loader:\n", re.M)
# It ends as by kill -9 in the third step of the epoch DIE, before anything is said of that epoch.
DYING = r"""        for step, (\1) in enumerate(train_loader):
            if (epoch, step) == (int(__import__("os").environ.get("DIE", -1)), 2):
                __import__("os").kill(__import__("os").getpid(), 9)
"""


def write(folder, start, data="digits", features=(), epochs=2, edits=(), dying=False):
    """A script alone in a folder, and what it needs there; returns its path."""
    folder.mkdir(exist_ok=True)
    text = compose.script(start, data, features)
    text = re.sub(r"^EPOCHS = \d+", f"EPOCHS = {epochs}", text, flags=re.M)
    if data == "images":  # smaller ones, and a smaller model
        # With bfloat16 a ResNet takes minutes on a CPU; FSDP's starts name the layers of one.
        small = "resnet18" if start in ("fsdp", "hsdp") else "shufflenet_v2_x0_5"
        text = text.replace("resnet50", small).replace("(224)", "(32)").replace("(256)", "(32)")
        text = re.sub(r"^BATCH_SIZE = \d+", "BATCH_SIZE = 16", text, flags=re.M)
        text = text.replace("lr=0.1, ", "lr=0.01, ")  # or so small a batch may end in NaN
        text = re.sub(r"^WARMUP = \d+", "WARMUP = 5", text, flags=re.M)
        class_folders(folder / "data")
    text = text.replace(".compile()", '.compile(backend="eager")')  # Inductor takes a minute
    text = text.replace('"num_workers": 4', '"num_workers": 1')
    text = edited(text, edits)
    if dying:
        text, count = TRAINING.subn(DYING, text)
        assert count == 1
    path = folder / "train.py"
    path.write_text(text)
    return path


def class_folders(folder):
    """96 and 27 noisy images of three classes, which differ in their colour."""
    from PIL import Image

    for part, count in (("train", 96), ("val", 27)):
        for i in range(count):
            name = folder / part / "abc"[i % 3] / f"{i}.png"
            name.parent.mkdir(parents=True, exist_ok=True)
            colour = [80, 80, 80]
            colour[i % 3] = 120 + i
            noise = Image.frombytes("RGB", (40, 36), random.Random(f"{part} {i}").randbytes(4320))
            Image.blend(noise, Image.new("RGB", (40, 36), tuple(colour)), 0.5).save(name)


def started(path, start, ranks=2, env=None):
    """(whether it ended well, its output) of a script, started as it says."""
    folder, env = path.parent, env or {}
    if start in (
        "one_gpu",
        "dataparallel",
        "torchrun",
        "fsdp",
        "hsdp",
        "accelerate",
        "slurm",
        "apex",
    ):
        before = ""
        if start == "slurm":
            before = SLURM
            env = env | {"SLURM_JOB_ID": random.randrange(10**6)}
        if start == "apex":
            before = f"import sys; sys.path.insert(0, {str(ROOT / 'tests/apex_doubles/today')!r})"
        alone = start in ("one_gpu", "dataparallel")
        codes, output = run_ranks(path, ranks=1 if alone else ranks, env=env, before=before)
        return not any(codes), output
    env = USER | {"OMP_NUM_THREADS": "1"} | {name: str(value) for name, value in env.items()}
    command = [*HOROVODRUN, path] if start == "horovod" else [PYTHON, path]
    ray = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # its own files: their paths must be short
    try:
        job = Job(["env", *command], folder, env | RAY | {"RAY_TMPDIR": ray})
        code, output = job.wait(900)
    finally:
        shutil.rmtree(ray)
    return code == 0, re.sub(r"^\[0\]<stdout>:", "", output, flags=re.M)  # horovodrun's


def trained(path, start, **more):
    """The output of a run that ends well."""
    well, output = started(path, start, **more)
    assert well, output
    return output


def lines_of(output):
    """[(loss, F1, accuracy)] of each epoch, as they are printed; None for what is not.

    Ray prints lines twice, and a line that is printed in parts may be several.
    """
    output = re.sub(r"\x1b\[\d*m|\(RayTrainWorker pid=\d+\) ?", "", output)
    pattern = r"(?:loss (\S+)\s+)?(?:F1 (\S+)\s+)?epoch (\d+): (\S+) % correct"
    found = {}
    for loss, f1, epoch, said in re.findall(pattern, output):
        if loss or f1 or int(epoch) not in found:
            found[int(epoch)] = loss, f1, said
    assert list(found) == sorted(found), output
    return [tuple(float(x) if x else None for x in found[epoch]) for epoch in sorted(found)]


@torch.no_grad()
def guessed(path, data):
    """(targets, predictions) of the weights that a script has saved, for its validation set."""
    names = {"__name__": "train"}
    exec(re.sub(r"^from apex.*\n", "", path.read_text(), flags=re.M), names)
    if data == "digits":
        from tests.docs.copies import predicted, validation_set

        return validation_set()[1], predicted(load(path, "digits.pth"))
    if data == "own":
        val_set, net = names["Items"]("val"), names["build_net"]()
    else:
        from torchvision import transforms
        from torchvision.datasets import ImageFolder

        normalize = transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
        steps = [transforms.Resize(32), transforms.CenterCrop(32), transforms.ToTensor(), normalize]
        val_set = ImageFolder(path.parent / "data/val", transforms.Compose(steps))
        net = names["build_net"](3)
    net.load_state_dict(load(path, "model.pth"))
    (batch,) = DataLoader(val_set, len(val_set))
    images, target = batch.values() if isinstance(batch, dict) else batch
    return target, net.eval()(images).argmax(dim=1)


def load(path, name):
    return torch.load(path.parent / name, weights_only=True)
