"""The minimal scripts of other tasks: as exact as with one process, and what they learn."""

import re
import runpy

import pytest
import torch
from conftest import ROOT, run, soak

from tests.docs.copies import USER, commands_of, edited, equal
from tests.docs.ranks import good, run_ranks

pytestmark = pytest.mark.full
END = "    dist.destroy_process_group()\n"


def make(name, folder, *edits, epochs=1):
    """A copy of a script in a folder, for so many epochs; its path."""
    folder.mkdir(exist_ok=True)
    text = (ROOT / f"minimal/{name}.py").read_text()
    text, count = re.subn(r"^EPOCHS = \d+$", f"EPOCHS = {epochs}", text, flags=re.M)
    assert count == 1
    (folder / "script.py").write_text(edited(text, edits))
    return folder / "script.py"


def load(script, name):
    return torch.load(script.parent / name, weights_only=True)


def off(found, right):
    """How far a gradient is off, as a share of the right one's length."""
    return ((found - right).norm() / right.norm()).item()


# What the last epoch's line says, and the file that is saved.
LEARNT = {
    "segmentation": (5, r"mIoU (\S+) %", lambda said: said > 94, "segmentation.pth"),
    "gan": (30, r"distance (\S+)", lambda said: said < 3, "gan.pth"),
}


@pytest.mark.parametrize("name", LEARNT)
def test_the_command_learns(name, tmp_path):
    """Rank 0 alone speaks, and there is no warning."""
    epochs, form, good_enough, file = LEARNT[name]
    (tmp_path / "minimal").symlink_to(ROOT / "minimal")
    (command,) = commands_of((ROOT / f"minimal/{name}.py").read_text())
    env = USER | {"OMP_NUM_THREADS": "1"}
    output = run(["env", *command.split()], tmp_path, timeout=900, env=env)
    lines = [re.fullmatch(rf"epoch (\d+): {form}", line) for line in output.splitlines()]
    assert all(lines) and [int(line[1]) for line in lines] == [*range(epochs)], output
    assert good_enough(float(lines[-1][2])) and not good_enough(float(lines[0][2]))
    assert (tmp_path / file).exists()


# ---- Segmentation

PROBE = ("            loss.backward()\n", "            loss.backward()\n            probe()\n")
# The gradient of the first step, and the table of the validation.
FUNCTION = """
    seen = []
    def probe():
        if not seen:
            seen.append(torch.cat([w.grad.flatten() for w in net.parameters()]))
"""
FIXED = ("augment=True", "augment=False")  # the crops follow from each process's seed
NET = "    net = UNet().to(device)\n"
SAVED = f'    torch.save((seen[0], matrix), "seen.pth")\n{END}'
SEEN = [PROBE, (NET, NET + FUNCTION), (END, SAVED)]
SUMS = "sum_of_all(torch.stack([both, either]))"
WRONG = {"each": "[both, either]", "all_reduce": "reduced(torch.stack([both, either]))"}
MAIN = "def main"
REDUCED = (MAIN, f"def reduced(part):\n    dist.all_reduce(part)\n    return part\n\n\n{MAIN}")
CROSS = ("cross_entropy(output, target) + ", "")  # Dice alone


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    script = make("segmentation", tmp_path_factory.mktemp("one"), FIXED, CROSS, *SEEN)
    good(script)
    return load(script, "seen.pth")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_segmentation_is_that_of_one_process(ranks, one, tmp_path):
    """The gradient, and IoU over the whole set: each pixel counts once."""
    script = make("segmentation", tmp_path, FIXED, CROSS, *SEEN)
    output = good(script, ranks=ranks)
    gradient, matrix = load(script, "seen.pth")
    assert off(gradient, one[0]) < 1e-5

    names = runpy.run_path(str(script))
    net = names["UNet"]()
    net.load_state_dict(load(script, "segmentation.pth"))
    pairs = names["make_pairs"]()[4::5, :, 4:36, 4:36]
    target, iou = pairs[:, 1].long(), []
    with torch.no_grad():
        prediction = net(pairs[:, :1]).argmax(dim=1)
    for number in range(2):
        a, b = target == number, prediction == number
        iou.append(((a & b).sum() / (a | b).sum()).item())
    assert torch.equal(matrix.sum(dim=1), target.flatten().bincount())
    assert float(re.findall(r"mIoU (\S+) %", output)[0]) == pytest.approx(50 * sum(iou), abs=0.06)


@pytest.mark.parametrize("ranks", [2, soak(8)])
def test_a_segmentation_with_the_sums_of_each_process(ranks, one, tmp_path):
    """Gradients that are off, or exactly so many times too small."""
    found = {}
    for way, code in WRONG.items():
        edits = [FIXED, CROSS, *SEEN, (SUMS, code), REDUCED]
        script = make("segmentation", tmp_path / way, *edits)
        good(script, ranks=ranks)
        found[way], _ = load(script, "seen.pth")
    assert off(found["each"], one[0]) > 1e-5
    assert off(found["all_reduce"] * ranks, one[0]) < 1e-5


def test_image_and_mask_are_cropped_alike():
    """Where the image is bright is the mask; and no two crops are the same."""
    names = runpy.run_path(str(ROOT / "minimal/segmentation.py"))
    crops = names["Crops"](names["make_pairs"](), augment=True)
    torch.manual_seed(0)
    first, second = ([crops[i] for i in range(50)] for _ in range(2))
    for image, mask in first:
        assert image.shape == (1, 32, 32) and mask.dtype == torch.int64
        assert mask[image[0] > 0.6].all() and (image[0][mask == 1] > 0.4).all()
    assert sum(a.equal(b) for (a, _), (b, _) in zip(first, second, strict=True)) < 5


# ---- GAN


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_gan_is_that_of_one_process(ranks, tmp_path):
    """To rounding, for the first steps: a GAN makes much of it, later."""
    ends = []
    for number in (1, ranks):
        stop = ("            average.update", "            steps += 1\n            average.update")
        count = ("    start = 0\n", "    start, steps = 0, 0\n")
        leave = ("        for real in loader:\n", "        for real in loader:\n" + STEPS)
        script = make("gan", tmp_path / str(number), stop, count, leave)
        good(script, ranks=number)
        ends.append(load(script, "gan.pth"))
    for name in ("generator", "discriminator", "average"):
        torch.testing.assert_close(ends[1][name], ends[0][name], atol=1e-4, rtol=1e-4)


STEPS = """            if steps == 5:
                break
"""
TRAINED = "        torch.manual_seed(0)\n        with torch.no_grad():\n"
REPLACE = '            os.replace("gan.tmp"'
DIE = 'if epoch == int(os.environ.get("DIE", -1)):\n'
KILL = "os.kill(os.getpid(), 9)\n"
KILLED = {
    "in an epoch": (TRAINED, f"        {DIE}            {KILL}{TRAINED}", [-9, -9]),
    "in a save": (REPLACE, f"            {DIE}                {KILL}{REPLACE}", [-9, 1]),
}


@pytest.fixture(scope="module")
def straight_gan(tmp_path_factory):
    """(the script, its output)."""
    script = make("gan", tmp_path_factory.mktemp("straight") / "here", epochs=4)
    return script, good(script, ranks=2)


@pytest.mark.parametrize("where", KILLED)
def test_a_killed_gan_ends_as_a_straight_one(where, straight_gan, tmp_path):
    """Both models, both optimizers and the average, to the bit."""
    old, new, expected = KILLED[where]
    whole, straight = straight_gan
    killed = make("gan", tmp_path / "here", (old, new), epochs=4)
    codes, output = run_ranks(killed, ranks=2, env={"DIE": 2})
    assert codes == expected, output
    assert load(killed, "gan.pth")["epoch"] == 2
    first, *resumed = good(killed, ranks=2).splitlines()
    assert first == "gan.pth: goes on after 2 of 4 epochs"
    assert resumed == straight.splitlines()[2:]
    assert equal(load(whole, "gan.pth"), load(killed, "gan.pth"))


@pytest.mark.parametrize("wrong", [False, True])
def test_the_processes_of_a_gan_stay_alike(wrong, tmp_path):
    """Not where the discriminator's step goes through the plain one: nobody averages it."""
    both = "[discriminator.state_dict(), average.state_dict()]"
    saved = f'    torch.save({both}, f"rank{{rank}}.pth")\n{END}'
    edits = [(END, saved)]
    if wrong:
        edits += [("model_d(real", "discriminator(real"), ("model_d(fake", "discriminator(fake")]
    script = make("gan", tmp_path, *edits)
    good(script, ranks=2)
    assert equal(*(load(script, f"rank{rank}.pth") for rank in (0, 1))) == (not wrong)
