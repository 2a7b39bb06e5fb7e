"""Composed scripts on data that are not as they should be: either the figures of several processes
are those of one, or they end with an error that says why.
"""

import random
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from conftest import each
from PIL import Image
from torch.testing import assert_close

from tests.docs.composed import SLURM, lines_of, load, started, write
from tests.docs.ranks import run_ranks
from tests.docs.test_compose import FEATURES, allowed

ROOT = Path(__file__).resolve().parent.parent.parent
APEX = f"import sys; sys.path.insert(0, {str(ROOT / 'tests/apex_doubles/today')!r})\n"
STARTS = ["torchrun", "torchrun", "fsdp", "slurm", "apex", "accelerate"]
QUICK = [name for name in FEATURES if name != "compile"]  # which reads no data, and takes seconds
LAUNCHED = ["spawn", "fabric", "ray", "horovod"]  # by their own launchers: it takes longer
# In each process: it is in a folder of its own, as if each had a machine of its own.
NODES = "import os; os.chdir(f'node{os.environ[\"RANK\"]}')\n"
# The places of the script that say how many items there are, and what they are.
SIZES = 'range(640 if part == "train" else 99)'
IMAGE = "image = torch.full([3, 32, 32], label / CLASSES)  # in place of what self.files[i] holds"
# Its values are those of the item alone, and no two are alike; it can be learnt.
NOISY = """image = torch.full([3, 32, 32], label / CLASSES)
        image = image + 0.1 * torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(i))"""
LABEL = "label = i % CLASSES"
COUNT = "        return len(self.files)"
RANK = 'int(__import__("os").environ.get("RANK", __import__("os").environ.get("SLURM_PROCID")))'


class Case(NamedTuple):
    number: int
    kind: str
    start: str
    data: str
    features: list
    ranks: int
    train: int  # how many items
    val: int
    batch: int
    parts: int

    def __str__(self):
        return f"{self.number}-{self.kind}-{self.start}-{self.data}-{'-'.join(self.features)}"


# What an error says, of each kind. Where none is needed the figures may be right instead.
KINDS = {
    "as it should be": None,
    "a batch that does not divide": r"BATCH_SIZE|batch size \(|batch_size",
    "fewer items than a batch": "no step in an epoch",
    "as many as a batch, and some": None,
    "one to validate": None,
    "nothing to validate": "no images to validate|Found no valid file|Couldn't find any class",
    "one class": None,
    "a class that val lacks": r"class folders in train or val, but not in both: \['a'\]",
    "a class that train lacks": r"class folders in train or val, but not in both: \['d'\]",
    "a hidden folder in val": None,
    "a hidden folder in train": None,
    "a hidden folder in a class": None,
    "an empty class": "Found no valid file for the classes d",
    "an image that is cut off": r"cannot read image data/(train|val)/b/\d+\.png: ",
    "a text for an image": r"cannot read image data/(train|val)/b/\d+\.png: ",
    "16 bits": None,
    "labels as floats": "scalar type Long|not implemented for|dtype|used as indices",
    "a label too large": "Target 10 is out of bounds|out of bounds|shape '\\[10, 10\\]' is invalid",
    "labels to be left out": "label -100: to leave items out, see",
    "NaN in an item": None,
    "says it has more": "IndexError|list index out of range",
    "says it has fewer": None,
    "an item of another size": "stack expects each tensor to be equal|Trying to resize storage",
    "None for an item": "NoneType",
    "other names in one process": "the processes differ in images to train, .* of their names",
    "fewer items in one process": "the processes differ in images to train",
    "no items in one process": "Couldn't find any class|No such file|no step|processes differ",
    "a checkpoint in one process": r"the processes differ in the epochs in checkpoint\.pth",
    "an older checkpoint in one process": r"differ in the epochs in checkpoint\.pth",
}
OF_IMAGES = {"a class that val lacks", "a class that train lacks", "an empty class", "16 bits"}
OF_IMAGES |= {kind for kind in KINDS if re.search("hidden|an image|other names", kind)}
OF_OWN = {
    "labels as floats",
    "labels to be left out",
    "a label too large",
    "NaN in an item",
    "says it has more",
}
OF_OWN |= {"says it has fewer", "an item of another size", "None for an item"}
# What one process trains on instead, whose figures they should have.
RIGHT = {kind: "as it should be" for kind in KINDS if "hidden" in kind} | {"16 bits": "8 bits"}


def cases(count, seed=0, launched=0.0):
    """Each kind as often; launched: the share of those that are started by their own launcher."""
    draw, found, kinds = random.Random(seed), [], sorted(KINDS)
    while len(found) < count:
        kind = kinds[len(found) % len(kinds)]
        data = "images" if kind in OF_IMAGES else "own" if kind in OF_OWN else None
        data = data or draw.choice(["own", "images"])
        share = draw.choice([0.1, 0.2, 0.4])
        features = [name for name in QUICK if draw.random() < share]
        start = draw.choice(STARTS)
        if draw.random() < launched and "one process" not in kind:
            start = draw.choice(LAUNCHED)
        if "checkpoint" in kind and "resume" not in features:
            features.append("resume")
        if start == "accelerate":  # it validates in bf16, too; workers draw a number of its order
            features = [name for name in features if name not in ("amp", "workers")]
        if not allowed(start, data, features):
            continue
        ranks = 2 if start in LAUNCHED else draw.choice([2, 2, 3])
        parts = draw.choice([2, 3]) if "accumulate" in features else 1
        batch = ranks * parts * draw.choice([2, 3])
        train = batch * draw.choice([2, 3]) + draw.randrange(batch)
        val = draw.choice([5, 11, 20])
        if kind == "a batch that does not divide":
            batch += draw.randrange(1, ranks * parts)
        elif kind == "fewer items than a batch":
            train = draw.randrange(1, batch) if data == "own" else max(3, batch - 1)
            batch = max(batch, 4 // ranks * ranks * parts + ranks * parts)
        elif kind == "as many as a batch, and some":
            train = batch * draw.choice([1, 2]) + batch - 1
        elif kind == "one to validate":
            val = 1
        elif kind == "nothing to validate":
            val = 0
        if data == "images":
            train, val = max(train, 3), max(val, 3) if val > 1 else val
        found.append(Case(len(found), kind, start, data, features, ranks, train, val, batch, parts))
    return found


def image(path, number, label):
    """A small image whose colour says the class, and no two are alike."""
    draw = random.Random(number)
    colour = [60 + draw.randrange(40) for _ in range(3)]
    colour[label % 3] += 100
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = Image.frombytes("RGB", (32, 32), draw.randbytes(32 * 32 * 3))
    Image.blend(noise, Image.new("RGB", (32, 32), tuple(colour)), 0.8).save(path)


def folders(folder, case):
    """The images of a case, below `folder`/data."""
    shutil.rmtree(folder / "data", ignore_errors=True)
    classes = "a" if case.kind == "one class" else "abc"
    if case.kind == "one to validate":
        classes = "a"
    for part, count in (("train", case.train), ("val", case.val)):
        (folder / "data" / part).mkdir(parents=True)
        for i in range(count):
            name = classes[i % len(classes)]
            image(folder / f"data/{part}/{name}/{i}.png", (part == "val") * 1000 + i, ord(name))
    data, draw = folder / "data", random.Random(case.number)
    part = draw.choice(["train", "val"])
    if case.kind == "a class that val lacks":
        shutil.rmtree(data / "val/a")
    elif case.kind == "a class that train lacks":
        image(data / "val/d/0.png", 7, 0)
    elif case.kind.startswith("a hidden folder in"):
        where = {"val": "val", "train": "train", "class": f"{part}/b"}[case.kind.split()[-1]]
        image(data / where / ".ipynb_checkpoints/1-checkpoint.png", 7, 2)
        if where.endswith("b"):
            (data / "val/b/._1.png").write_bytes(b"of a Mac")
    elif case.kind == "an empty class":
        for name in ("train", "val"):
            (data / name / "d").mkdir()
    elif case.kind == "an image that is cut off":
        path = data / part / "b/1.png"
        path.write_bytes(path.read_bytes()[:300])
    elif case.kind == "a text for an image":
        (data / part / "b/1.png").write_text("<html>not found</html>")
    elif case.kind == "16 bits":
        for path in data.glob("*/*/*.png"):
            grey = Image.open(path).convert("L").convert("I")
            grey.point(lambda value: value * 256 + 128).convert("I;16").save(path)
    elif case.kind == "8 bits":
        for path in data.glob("*/*/*.png"):
            Image.open(path).convert("L").save(path)


def edits_of(case):
    """Of the script: it has the sizes of the case, and nothing that depends on the processes."""
    items = f"range({case.train} if part == 'train' else {case.val})"
    edits = []
    if case.data == "own":
        edits += [("nn.BatchNorm2d(16), ", ""), (SIZES, items)]
        item, label = NOISY, LABEL  # of the data set
        if case.kind == "one class":
            label = "label = 0"
        elif case.kind == "labels as floats":
            label = "label = float(i % CLASSES)"
        elif case.kind == "labels to be left out":
            label = "label = -100 if i % 3 == 0 else i % CLASSES"
        elif case.kind == "a label too large":
            label = "label = i % (CLASSES + 1)"
            edits[-1] = (SIZES, "range(max(12, " + items[6:-1] + "))")
        elif case.kind == "NaN in an item":
            item += "\n        image[:, i == 3] = torch.nan"
        elif case.kind == "says it has more":
            edits += [
                (COUNT, f"{COUNT} + 2"),
                ("        label = ", "        self.files[i]\n        label = "),
            ]
        elif case.kind == "says it has fewer":
            edits += [(COUNT, f"{COUNT} - 1")]
        elif case.kind == "an item of another size":
            item += "\n        image = image[:, : 32 - (i == 3)]"
        elif case.kind == "None for an item":
            item += "\n        image = None if i == 3 else image"
        edits += [(IMAGE, item), (LABEL, label)]
        if case.kind == "fewer items in one process":
            items = f"range({case.train} - {RANK} * 2 if part == 'train' else {case.val})"
            edits[1] = SIZES, items
        elif case.kind == "no items in one process":
            edits[1] = SIZES, f"(range(0) if {RANK} else {items})"
    return edits


def prepared(folder, case):
    """(the script of a case, what each process runs before it, whether each has its own disk)."""
    path = write(folder, case.start, case.data, case.features, edits=edits_of(case))
    text = path.read_text()
    text = re.sub(r"^BATCH_SIZE = \d+", f"BATCH_SIZE = {case.batch}", text, flags=re.M)
    text = re.sub(r"^PARTS = \d+", f"PARTS = {case.parts}", text, flags=re.M)
    text = re.sub(r"^WARMUP = \d+", "WARMUP = 1", text, flags=re.M)  # less than the steps
    # Else its order is another one with one process.
    seeded = "DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True, data_seed=0)"
    text = text.replace("DataLoaderConfiguration(split_batches=True)", seeded)
    if case.data == "images":
        folders(folder, case)
        small = "nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(1800, classes)"
        model = r"models\.\w+\(num_classes=classes\)"
        text, count = re.subn(model, f"nn.Sequential({small})", text)
        assert count == 1
        text = re.sub(r"\[(\w+)\.layer1, .*\]", r"[\1]", text)
        text = re.sub(
            r"(random_crop|center) = .*", r"\1 = [transforms.Resize([32, 32]), *end]", text
        )
    path.write_text(text)
    before = SLURM if case.start == "slurm" else APEX if case.start == "apex" else ""
    own_disks = "checkpoint" in case.kind or (case.data == "images" and "one process" in case.kind)
    return path, before, own_disks


def nodes(folder, case):
    """A folder for each process, with its data; in that of one there are fewer, or none."""
    for rank in range(case.ranks):
        node = folder / f"node{rank}"
        node.mkdir()
        if case.data == "images":
            shutil.copytree(folder / "data", node / "data")
    if case.kind == "fewer items in one process":
        next((folder / f"node{case.ranks - 1}/data/train/b").iterdir()).unlink()
    elif case.kind == "no items in one process":
        shutil.rmtree(folder / f"node{case.ranks - 1}/data")
    elif case.kind == "other names in one process":
        for part in ("train", "val"):
            data = folder / f"node{case.ranks - 1}/data/{part}"
            (data / "a").rename(data / "z")


def run(path, case, ranks, before):
    """(exit codes, output) of the processes; no codes if they hang."""
    if case.start in LAUNCHED and ranks > 1:
        well, output = started(path, case.start)
        return [int(not well)], output
    for _ in range(3):
        env, output = {"SLURM_JOB_ID": random.randrange(10**6)}, path.with_name("output.txt")
        try:
            codes = run_ranks(path, ranks=ranks, env=env, before=before, seconds=250)[0]
        except AssertionError:
            codes = None
        if "EADDRINUSE" not in output.read_text():  # somebody else took the port meanwhile
            break
    return codes, output.read_text()


def verdict(case, folder):
    """What is wrong, in words; nothing if it is as it should be."""
    folder.mkdir(exist_ok=True)
    path, before, own_disks = prepared(folder / "several", case)
    alone = case._replace(kind=RIGHT.get(case.kind, case.kind))
    if case.start in LAUNCHED:
        alone = alone._replace(start="torchrun")
    one, *_ = prepared(folder / "one", alone)
    if own_disks:
        nodes(folder / "several", case)
        nodes(folder / "one", case)
        before = NODES + before
        if "checkpoint" in case.kind:
            text = path.read_text()
            path.write_text(text.replace("EPOCHS = 2", "EPOCHS = 1"))
            run(path, case, case.ranks, before)  # rank 0 saves one
            run(one, case, 1, before)
            path.write_text(text)
            if case.kind.startswith("an older"):
                old = load(path.with_name("node0") / "x", "checkpoint.pth")
                torch.save(old, folder / "several/node1/checkpoint.pth")
                path.write_text(text.replace("EPOCHS = 2", "EPOCHS = 3"))
                old["epoch"] = 2
                torch.save(old, folder / "several/node0/checkpoint.pth")
    codes, output = run(path, case, case.ranks, before)
    if codes is None:
        return f"HANGS: {output[-300:]}"
    said = KINDS[case.kind]
    if case.data == "images" and case.kind in ("one class", "one to validate"):
        said = "1 class in data/train: is it one folder level too many"
    if any(codes):
        if 0 in codes:
            return f"SOME END WELL {codes}: {output[-500:]}"
        if said and re.search(said, output):
            return ""
        return f"SAYS OTHER THINGS: {output[-1500:]}"
    if said and "image" not in case.kind:  # of those one may be left out, as others are
        return f"ENDS WELL: {output}"
    codes, alone = run(one, case, 1, before)
    if codes is None or any(codes):
        return f"ONE PROCESS ENDS WITH {codes}: {alone[-1000:]}"
    return differs(path, one, output, alone, case, own_disks)


def differs(path, one, output, alone, case, own_disks):
    """In what the figures of several processes are not those of one."""
    here, there = lines_of(output), lines_of(alone)
    near = 0.05 if "amp" in case.features or case.start == "apex" else 2e-4
    if len(here) != len(there):
        return f"OTHER LINES: {output} {alone}"
    for line, other in zip(here, there, strict=True):
        image = 100 / case.val + 0.1 if near > 0.01 else 0  # bf16 may round one to another class
        for a, b, by in zip(line, other, (10 * near, 100 * near, image), strict=True):
            if (a is None) != (b is None) or (a is not None and a == a and abs(a - b) > by + 1e-9):
                return f"OTHER FIGURES: {line} {other}"
    parent = "node0/x" if own_disks else "x"
    a, b = (load(p.parent / parent, "model.pth") for p in (path, one))
    try:
        assert_close(a, b, atol=near, rtol=50 * near, equal_nan=True)
    except AssertionError as error:
        return f"OTHER WEIGHTS: {str(error)[:300]}"
    return ""


# The least of each kind that was once trained on in silence.
POINTS = [
    Case(0, "a class that val lacks", "torchrun", "images", [], 2, 12, 6, 6, 1),
    Case(1, "a hidden folder in val", "torchrun", "images", [], 2, 12, 6, 6, 1),
    Case(2, "a hidden folder in train", "torchrun", "images", [], 2, 12, 6, 6, 1),
    Case(3, "fewer items than a batch", "torchrun", "own", ["loss"], 2, 5, 5, 6, 1),
    Case(4, "a batch that does not divide", "torchrun", "own", ["accumulate"], 2, 20, 5, 4, 3),
    Case(5, "a batch that does not divide", "torchrun", "own", [], 2, 20, 5, 7, 1),
    Case(6, "a checkpoint in one process", "torchrun", "own", ["resume"], 2, 12, 5, 6, 1),
    Case(7, "a checkpoint in one process", "fsdp", "own", ["resume"], 2, 12, 5, 6, 1),
    Case(8, "an image that is cut off", "torchrun", "images", [], 2, 12, 6, 6, 1),
    Case(9, "16 bits", "torchrun", "images", [], 2, 12, 6, 6, 1),
    Case(10, "other names in one process", "torchrun", "images", [], 2, 12, 6, 6, 1),
]


@pytest.mark.parametrize("case", each(POINTS, POINTS[::3]), ids=str)
def test_equals_one_process_or_says_why_not(case, tmp_path):
    assert not verdict(case, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("case", cases(len(KINDS)), ids=str)
def test_each_kind(case, tmp_path):
    assert not verdict(case, tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_many_cases(tmp_path):
    """Half an hour on a machine with nothing else to do."""
    found = {}
    for case in cases(324, launched=0.08):
        if wrong := verdict(case, tmp_path / str(case.number)):
            found[str(case)] = wrong
        shutil.rmtree(tmp_path / str(case.number))
    assert not found
