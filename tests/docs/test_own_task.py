"""Another task in a full script, by the lines that docs/copying.md names: it learns, is evaluated
alike on any number of processes, and goes on to the bit.
"""

import re
import runpy

import pytest
import torch
from conftest import ROOT, load, rows, soak
from torch import nn

from tests.docs.copies import copy, dying, edited, equal
from tests.docs.ranks import good, run_ranks

pytestmark = pytest.mark.full
PAGE = (ROOT / "docs/copying.md").read_text()
# Of its table: a part of a line of the script, and what stands in its place, or below its line.
TABLE = re.findall(r"^\| `(.*?)` \| (below: )?`(.*?)` \|$", PAGE, re.M)
assert len(TABLE) == 8
OF_EACH_ITEM, OF_DICE_AND_IOU = TABLE[:5], TABLE[5:]
IGNORED = re.search(r"`(output, target = output\[.*?)`", PAGE)[1]
NAMED = re.findall("`(.*?)`", " ".join(re.findall(r" \*Lines\*: (`.*)$", PAGE, re.M)))
IMPORT = ("from common.images import image_folders\n", "from task import *\n")
GROUPS = re.search(r'`(\{"params": .*?\})`', PAGE)[1]


def below(text, part, new):
    """A text with another line below the only one that has a part, indented as that one."""
    text, count = re.subn(rf"^( *)(.*{re.escape(part)}.*)$", rf"\1\2\n\1{new}", text, flags=re.M)
    assert count == 1, part
    return text


def by_the_table(path, table):
    text = edited(path.read_text(), [(old, new) for old, where, new in table if not where])
    for old, where, new in table:
        if where:
            text = below(text, old, new)
    path.write_text(text)


PIXELS = """
import torch
from docs.losses import dice_loss
from minimal import segmentation

class Pairs(segmentation.Crops):
    classes = ["background", "digit"]

def my_sets(args):
    pairs = segmentation.make_pairs()
    train = pairs[torch.arange(1797) % 5 < 4]
    return Pairs(train, augment=True), Pairs(pairs[4::5], augment=False)

def UNet(num_classes):
    assert num_classes == 2
    return segmentation.UNet()
"""


def a_segmentation(folder):
    path = copy(folder, "f1", edits=[IMPORT])
    (folder / "task.py").write_text(PIXELS)
    by_the_table(path, TABLE)
    return path


# A text of which 93 windows are to train, and 12, of which the last is short, to validate.
TEXT = (ROOT / "docs/bugs.md").read_bytes()[:6680]
BYTES = """
from pathlib import Path
import torch
from torch import nn
from minimal import transformer

class Windows:
    def __init__(self, text):
        self.text, self.classes = text, range(256)

    def __len__(self):
        return (len(self.text) + 62) // 64

    def __getitem__(self, i):
        window = self.text[i * 64 : i * 64 + 65]
        window = nn.functional.pad(window, (0, 65 - len(window)), value=-100)
        return window[:-1].clamp(min=0), window[1:]

def my_sets(args):
    text = torch.tensor([*Path(__file__).with_name("text").read_bytes()])
    return Windows(text[: 93 * 64 + 1]), Windows(text[93 * 64 :])

class Net(transformer.Net):
    def __init__(self, num_classes):
        super().__init__()
        self.blocks = nn.Sequential(*self.blocks)  # which blocks() finds

    def forward(self, text):
        return super().forward(text).transpose(1, 2).contiguous()  # [n, num_classes, length]
"""


def a_language_model(folder):
    path = copy(folder, "clip", "adamw", script="fsdp_distributed", edits=[IMPORT])
    (folder / "task.py").write_text(BYTES)
    (folder / "text").write_bytes(TEXT)
    table = [
        (old, where, new.replace("len(dataset) * 32 * 32", "len(dataset.text) - 1"))
        for old, where, new in OF_EACH_ITEM
    ]
    by_the_table(path, table)
    (flat,) = {new for _, where, new in table if where}
    (indent,) = {*re.findall(rf"^( *){re.escape(flat)}$", path.read_text(), re.M)}
    path.write_text(path.read_text().replace(flat, f"{flat}\n{indent}{IGNORED}"))
    return path


def test_a_segmentation(tmp_path):
    """It learns; any number of processes evaluates each pixel once, and has the same mean IoU."""
    script = a_segmentation(tmp_path / "here")
    save = 'torch.save(matrix, f"{args.checkpoint_dir}/matrix{rank}.pth")'
    script.write_text(below(script.read_text(), "matrix = (reduce_mean(", save))
    flags = "-j 1 -b 48 --arch task:UNet --lr 0.5 --checkpoint-dir".split()
    output = good(script, *flags, tmp_path / "c", ranks=2)
    best = float(re.findall(r"^epoch 4/4  loss .* f1 ([\d.]+)", output, re.M)[0])
    assert best > 92 and load(tmp_path / "c")["best_acc1"] == pytest.approx(best, abs=1e-3)
    names = runpy.run_path(str(tmp_path / "here/task.py"))
    masks = names["my_sets"](None)[1].pairs[:, 1, 4:36, 4:36].long()
    for ranks in (1, 3):
        more = ["--resume", tmp_path / "c/checkpoint.pth", "--evaluate"]
        output = good(script, *flags, tmp_path / "c", *more, ranks=ranks)
        assert float(output.split(" f1 ")[1]) == pytest.approx(best, abs=2e-3)
        for rank in range(ranks):
            matrix = torch.load(tmp_path / f"c/matrix{rank}.pth")
            assert torch.equal(matrix.sum(dim=1).long(), masks.flatten().bincount())


def test_a_language_model(tmp_path):
    """It learns; any number of processes has the loss of all bytes, in unequal parts too."""
    script = a_language_model(tmp_path / "here")
    flags = "-j 1 -b 24 --arch task:Net --lr 0.3 --epochs 4 --warmup-epochs 1".split()
    flags += ["--checkpoint-dir", tmp_path / "c"]
    output = good(script, *flags, ranks=2)
    losses = [float(loss) for loss in re.findall(r"^epoch \S+  loss (\S+)", output, re.M)]
    assert 3 < losses[-1] + 0.3 < losses[0]
    task = runpy.run_path(str(tmp_path / "here/task.py"))
    net, found = task["Net"](256), [losses[-1]]
    net.load_state_dict(load(tmp_path / "c")["state_dict"])
    text = torch.tensor([*TEXT[93 * 64 :]])
    with torch.no_grad():
        scores = [net(part[None])[0].T for part in text[:-1].split(64)]
    expected = nn.functional.cross_entropy(torch.cat(scores), text[1:]).item()
    for ranks in (1, 3):
        more = ["--evaluate", "--resume", tmp_path / "c/checkpoint.pth"]
        output = good(script, *flags, *more, ranks=ranks)
        found.append(float(re.search(r" \* loss (\S+)", output)[1]))
    assert found == pytest.approx([expected] * 3, abs=1e-4)


# Linear in a half of an image each: how bright it is. Of inputs that are dicts.
NUMBERS = """
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import mse_loss

class Images:
    def __init__(self, images):
        self.images, self.classes = torch.tensor(images, dtype=torch.float32) / 16, ["up", "left"]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image = self.images[i]
        halves = torch.stack([image[:4], image[:, :4].T])
        return {"image": image, "twice": [2 * image]}, halves.mean(dim=(1, 2))

def my_sets():
    images = load_digits().images
    return Images(images[:1400]), Images(images[1400:])

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.body, self.fc = nn.Linear(64, num_classes), nn.Linear(64, num_classes)

    def forward(self, batch):
        return self.body(batch["image"].flatten(1)) + self.fc(batch["twice"][0].flatten(1))
"""
# In the lines of the contract, and in no others.
CHANGES = {
    r"DIGITS = .*": 'DIGITS = {"epochs": 4, "batch_size": 40}',
    "resnet50": "task:Net",
    r"image_folders\(.*": "my_sets()",
    r"example = .*": "example = None",
    r"cross_entropy\((.*?, target).*": r"mse_loss(\1)",
    r"acc1, acc5 = accuracy.*": "off = (output - target).abs().mean()",
    '"acc@1", "acc@5"': '"off"',
    r"torch.zeros\(3": "torch.zeros(2",
    r"torch.zeros\(4": "torch.zeros(3",
    "acc1, acc5 = loss_sum.*": "off = loss_sum / count, off_sum / count",
    r"acc@1 .*\}": "off {off:.6f}",
    r"record_score\(": "record_score(-",
    r'"acc5": acc5,': "",
    r'"acc1": acc1,': '"off": off,',
    "acc1_sum, acc5_sum": "off_sum",
    "acc1, acc5": "off",
    "acc1": "off",
}


def test_what_is_no_classifier(tmp_path):
    """By the lines that the contract names, and no others; a group has ten times the rate."""
    lines, found = (ROOT / "distributed.py").read_text().replace(*IMPORT).splitlines(), []
    for number, line in enumerate(lines):
        names = [name for name in NAMED if name in line]
        found += names
        for old, new in CHANGES.items() if names else ():
            lines[number] = re.sub(old, new, lines[number])
        assert lines[number] != line or not names, line
    assert sorted(found) == sorted([*NAMED, "acc1, acc5 = accuracy(output, target)"])
    text = "\n".join(lines)
    groups = f'[{{"params": net.body.parameters()}}, {GROUPS}]'
    script = copy(tmp_path / "here")
    script.write_text(edited(text, [("        net.parameters(),", f"        {groups},")]))
    (tmp_path / "here/task.py").write_text(NUMBERS)
    flags = ["-j", "1", "--lr", "0.05", "--warmup-epochs", "1", "--checkpoint-dir"]
    output = good(script, *flags, tmp_path / "c", ranks=2)
    found = [row["off"] for row in rows(tmp_path / "c")]
    assert found[-1] < 0.5 * found[0] and load(tmp_path / "c")["best_acc1"] == -min(found)
    body, head = load(tmp_path / "c")["optimizer"]["param_groups"]
    assert head["lr"] == 10 * body["lr"] > 0
    for ranks in (1, 3):
        more = ["--evaluate", "--resume", tmp_path / "c/checkpoint.pth", "-b", "39"]
        output = good(script, *flags, tmp_path / "c", *more, ranks=ranks)
        assert float(output.split(" off ")[1]) == pytest.approx(found[-1], abs=2e-6)


@pytest.mark.parametrize(
    "make, flags, steps",
    [
        (a_segmentation, "-b 48 --arch task:UNet", 40),
        # What it has of its own is trained and evaluated above; it resumes by the same lines.
        soak(a_language_model, "-b 8 --arch task:Net --epochs 4", 20),
    ],
)
def test_another_task_resumes_to_the_bit(make, flags, steps, tmp_path):
    """Killed in mid-epoch; the random crops are those of a straight run too."""
    script = make(tmp_path / "here")
    flags = [*flags.split(), "-j", "1", "--max-steps", steps, "--checkpoint-freq", "5"]
    flags += ["--checkpoint-dir"]
    good(script, *flags, tmp_path / "a", ranks=2)
    codes, output = run_ranks(script, [*flags, tmp_path / "b"], 2, before=dying(1, 8))
    assert codes == [-9, -9], output
    output = good(script, *flags, tmp_path / "b", "--resume", "auto", ranks=2)
    assert "at epoch 2 step 5" in output
    straight, resumed = load(tmp_path / "a"), load(tmp_path / "b")
    for key in ("epoch", "step", "state_dict", "optimizer", "scaler", "meters", "more"):
        assert equal(straight[key], resumed[key]), key
    assert rows(tmp_path / "a", timings=False) == rows(tmp_path / "b", timings=False)
