"""What people take out of here works in a program of their own: docs/copying.md."""

import os
import re
import shutil
import zipfile
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import PYTHON, ROOT, SMALL, load, run
from torch import nn
from torch.utils.data import DataLoader

from common.loader import Seeded
from common.metrics import AverageMeter, accuracy
from longrun.model import build_model
from tests import nets
from tests.docs.copies import copy, edited
from tests.docs.ranks import good, run_ranks

PAGE = (ROOT / "docs/copying.md").read_text()


def said(start, page="copying"):
    """The `code` of a page that begins so: the only one."""
    text = (ROOT / f"docs/{page}.md").read_text()
    (found,) = {code for code in re.findall(r"`([^`\n]+)`", text) if code.startswith(start)}
    return found


@pytest.mark.full
def test_a_script_alone_runs_with_what_may_do_nothing(work, tmp_path):
    """The functions that the page names are replaced by some that do as it says."""
    nothing, contexts, context, name, methods = re.search(
        r"^At first (.*) may do nothing; (.*) may return `(.*?)`\. "
        r"A `(\w+)` needs (.*), which may do nothing\.",
        PAGE,
        re.M,
    ).groups()
    results = dict.fromkeys(re.findall(r"`(\w+)`", nothing), "None")
    results |= dict.fromkeys(re.findall(r"`(\w+)`", contexts), context)
    methods = dict.fromkeys(re.findall(r"`(\w+)`", methods), "staticmethod(lambda: None)")
    results[name] = f"type('{name}', (), dict({', '.join(f'{m}={x}' for m, x in methods.items())}))"
    stubs = [f"def {name}(*args, **_): return {result}\n" for name, result in results.items()]
    text = (ROOT / "distributed.py").read_text()
    assert all(f"{name}(" in text for name in results)
    edits = [("\n\ndef main", "\n".join(["\nimport contextlib", *stubs, "\ndef main"]))]
    (tmp_path / "alone.py").write_text(edited(text, edits))
    flags = [*SMALL, "--max-steps", "1", "--checkpoint-dir", tmp_path / "c"]
    assert "new best" in good(tmp_path / "alone.py", *flags, ranks=2, cwd=work)


@pytest.mark.full
def test_a_schedule_by_step_ends_with_the_training(tmp_path):
    """As docs/minimal.md says: it has as many steps as all epochs together, in each process."""
    row = re.search(r"^\| schedule by step (.*)$", (ROOT / "docs/minimal.md").read_text(), re.M)[1]
    step, below, length = re.findall(r"`(.*?)`", row)[:3]
    made = f"scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, {length})"
    saved = 'torch.save(scheduler.state_dict(), f"{rank}.pth")'
    edits = [
        ("    model = Distributed", f"    {made}\n    model = Distributed"),
        (f"            {below}\n", f"            {below}\n            {step}\n"),
        ("    dist.destroy", f"    {saved}\n    dist.destroy"),
    ]
    script = tmp_path / "script.py"
    script.write_text(edited((ROOT / "minimal/distributed.py").read_text(), edits))
    good(script, ranks=2)
    for rank in range(2):
        state = torch.load(tmp_path / f"{rank}.pth", weights_only=False)
        assert state["last_epoch"] == state["total_steps"] == 5 * (1437 // 64)


class Several(nn.Module):
    """A model of a dict of a video, whose weights have five dimensions, and a tuple."""

    def __init__(self, num_classes):
        super().__init__()
        self.body = nn.Sequential(nn.Conv3d(3, 4, 3), nn.AdaptiveAvgPool3d(1), nn.Flatten())
        self.head = nn.Linear(4, num_classes)

    def forward(self, batch):
        return self.head(self.body(batch["video"]) + batch["more"][0])


def test_a_model_of_what_is_no_image(monkeypatch):
    """It is tried on a batch of one of what it takes, and comes ready to be trained."""
    monkeypatch.setattr(nets, "plain", Several)
    args = SimpleNamespace(arch="tests.nets:plain", image_size=24, evaluate=False)
    example = {"video": torch.zeros(1, 3, 5, 8, 8), "more": (torch.ones(1, 4),)}
    net = build_model(args, 3, torch.device("cpu"), example)
    assert net.training and net(example).shape == (1, 3)


class Zipped:
    def __init__(self, path):
        self.path, self.pid = path, None

    def __len__(self):
        return 6

    def __getitem__(self, index):
        exec(said("if self.pid != "), {"self": self, "os": os, "zipfile": zipfile})
        return len(self.file.read(str(index)))


def test_a_file_is_opened_at_first_use(tmp_path):
    """By each worker for itself, though this process, which they copy, has read an item."""
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
        for index in range(6):
            file.writestr(str(index), bytes(index))
    data = Zipped(tmp_path / "a.zip")
    assert data[5] == 5
    looked_at = data.file
    loader = DataLoader(data, None, num_workers=2, multiprocessing_context="fork")
    looked_at.close()  # now nobody can read from it
    assert [*loader] == [*range(6)]


@pytest.mark.parametrize("line", ["aug.set_random_seed", "rng = np.", "cv2.setRNGSeed"])
def test_a_generator_of_ones_own_is_seeded(line):
    """With doubles of Albumentations and OpenCV: as they are seeded."""

    class Drawn(list):
        def __getitem__(self, index):
            here = {"aug": Mock(), "cv2": Mock(), "np": np, "torch": torch}
            exec(said(line, "faq"), here)
            calls = [*here["aug"].method_calls, *here["cv2"].method_calls]
            return here["rng"].random() if "rng" in here else calls[0].args

    data = Seeded(Drawn([0, 1]), seed=0)
    first, other, again = (data[key] for key in [(0, 0), (0, 1), (0, 0)])
    assert first == again != other


IMPORTS = """
import os, sys, torch, torchvision.transforms.v2
for name in sys.argv[1:]:
    if os.fork() == 0:
        __import__(f"common.{name}")
        os._exit(0)
    assert os.wait()[1] == 0, name
"""


def test_each_module_can_be_imported_alone(tmp_path):
    """Whatever was imported before."""
    names = [path.stem for path in (ROOT / "common").glob("[a-z]*.py")]
    assert names
    run([PYTHON, "-c", IMPORTS, *names], tmp_path, env={"PYTHONPATH": str(ROOT)})


ALONE = """
import torch
import torch.distributed as dist
from common.images import image_folders
from common.loader import TrainSampler, seed_step, start_loader
from common.metrics import AverageMeter, accuracy, reduce_mean
from common.prefetcher import Prefetcher

dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
train_set, val_set = image_folders(None, 24)  # or a folder with train/ and val/ in it
sampler = TrainSampler(len(train_set), 64, rank=0, world_size=1, seed=0)
loader = start_loader(train_set, sampler, 64, 2, torch.device("cpu"), seed=0)
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 24 * 24, 10))
optimizer, meter = torch.optim.SGD(model.parameters(), lr=0.01), AverageMeter("acc@1")
for epoch in range(2):
    sampler.set_epoch(epoch)
    meter.reset()
    for step, (images, target) in enumerate(Prefetcher(loader, torch.device("cpu"))):
        seed_step(0, epoch, step, rank=0)
        output = model(images)
        torch.nn.functional.cross_entropy(output, target).backward()
        optimizer.step()
        optimizer.zero_grad()
        meter.update(reduce_mean(accuracy(output, target)[0], 1).item(), len(target))
print(meter.count, meter.avg)
dist.destroy_process_group()
"""


def test_common_is_copied_alone(tmp_path):
    """Into a project that has no `args`, and no flags that an error could name."""
    shutil.copytree(ROOT / "common", tmp_path / "common")
    (tmp_path / "train.py").write_text(ALONE)
    count, accuracy = run([PYTHON, "train.py"], tmp_path).split()
    assert int(count) == 1437 // 64 * 64 and float(accuracy) > 30
    for path in (ROOT / "common").glob("*.py"):
        code = path.read_text()
        assert not re.search(r"\bargs\.|[\"' ]--\w", code), path


@pytest.mark.parametrize("classes", [4, 5, 30])
def test_soft_targets_count_by_their_most_probable_class(classes):
    torch.manual_seed(0)
    output, hard = torch.randn(64, classes), torch.randint(classes, (64,))
    soft = 0.7 * nn.functional.one_hot(hard, classes) + 0.3 / classes
    found = output.argsort(dim=1, descending=True)[:, :5] == hard[:, None]
    top1, top5 = (100 * found[:, :k].any(1).double().mean() for k in (1, 5))
    assert [top1, top5] == accuracy(output, soft) == accuracy(output, hard)


@pytest.mark.parametrize("output, target", [((4, 3), (4, 3)), ((4, 3, 8, 8), (4,))])
def test_targets_that_are_no_classes_are_refused(output, target):
    """Several classes at once, or an image of them: the numbers would mean nothing."""
    with pytest.raises(ValueError, match=r"^scores \[n, classes\] and targets \[n\] are needed$"):
        accuracy(torch.rand(output), torch.zeros(target, dtype=torch.int64))


def test_a_meter_takes_means_as_everywhere():
    meter = AverageMeter("loss")
    meter.update(torch.tensor(2.0), n=3)
    meter.update(4.0)
    assert (meter.val, meter.avg, meter.count) == (4.0, 2.5, 4)


@pytest.mark.full
@pytest.mark.parametrize("most, step", [(87, 10), (35, 6)])
def test_layers_that_are_unfrozen_after_the_wrap_end_the_run(most, step, work, tmp_path):
    """Each process would train them on its own part: seen before they are saved.

    At the next print, also the last of an epoch that --max-steps cuts: so a stop saves none.
    """
    order = "        train_sampler.set_epoch(epoch, steps)"
    edits = [
        ("    optimizer = torch", "    net[0].requires_grad_(False)\n    optimizer = torch"),
        (order, f"        net[0].requires_grad_(epoch > 0)\n{order}"),
    ]
    path = copy(tmp_path / "here", edits=edits)
    flags = [*SMALL, "--epochs", "3", "--max-steps", most, "--checkpoint-dir", tmp_path / "c"]
    codes, output = run_ranks(path, flags, 2, work)
    assert any(codes) and f"step {step}: the processes have different weights: each" in output
    assert load(tmp_path / "c")["epoch"] == 1 and "epoch 1/3  loss " in output
