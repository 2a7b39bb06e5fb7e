"""compose.py and its template: every script that it can write is clean, the page's renderer writes
the same, and what the scripts do is true. That minimal/ comes out of it is seen in test_docs.py.
"""

import ast
import itertools
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import PYTHON, ROOT, full, needs_horovod, run

import compose
from tests.docs import composed
from tests.docs.composed import lines_of, load, started, trained, write
from tests.docs.copies import USER, accuracy, equal

KNOWN = compose.choices()
STARTS = [start["name"] for start in KNOWN["starts"] if "hidden" not in start]
FEATURES = [feature["name"] for feature in KNOWN["features"]]
DATA = [data["name"] for data in KNOWN["data"]]
TEMPLATE = (ROOT / "minimal/template/train.py.txt").read_text()


def allowed(start, data, features):
    return not compose.refusal(KNOWN, {start, data, *features})


def some_combinations(count, seed=0):
    """[(start, data, features)], with few features and with many."""
    found, draw = [], random.Random(seed)
    while len(found) < count:
        share = draw.choice([0.1, 0.3, 0.5, 0.8])
        chosen = [name for name in FEATURES if draw.random() < share]
        choice = draw.choice(STARTS), draw.choice(DATA), chosen
        found += [choice] * allowed(*choice)
    return found


def small_combinations(most):
    """With each set of at most so many features, and each that lacks at most one of them all."""
    sets = [[*s] for count in range(most + 1) for s in itertools.combinations(FEATURES, count)]
    sets += [FEATURES, *([f for f in FEATURES if f != name] for name in FEATURES)]
    for start, data, chosen in itertools.product(STARTS, DATA, sets):
        if allowed(start, data, chosen):
            yield start, data, chosen


# Choices of three that are said together in a condition are in some of the combinations by chance.
@pytest.mark.parametrize(
    "most, more", [(1, 150), full(2, 1500), pytest.param(3, 6000, marks=pytest.mark.soak)]
)
def test_every_script_is_clean(most, more, tmp_path):
    """Each imports what it uses and no more, knows its names, and is written as ruff would."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    chosen = [*small_combinations(most), *some_combinations(more)]
    for number, (start, data, features) in enumerate(chosen):
        known = {start, data, *features}
        text = compose.render(TEMPLATE, known, "train.py", compose.made_by(KNOWN, known))
        (tmp_path / f"script_{number}.py").write_text(text)
    for words in (["check", "-q"], ["format", "--check", "-q"]):
        found = subprocess.run(["ruff", *words, "."], cwd=tmp_path, capture_output=True, text=True)
        assert found.returncode == 0, found.stdout[-3000:]


def test_the_template_knows_its_words():
    """A misspelt name would never be true."""
    names = {*STARTS, *FEATURES, *DATA, "by_hand", "made"}
    names |= {*re.findall(r"^#let (\w+) =", TEMPLATE, re.M)}
    conditions = re.findall(r"^#(?:(?:el)?if|indent|let \w+ =) (.*)$", TEMPLATE, re.M)
    for texts in re.findall(r"^#let \$\w+ = (.*)$", TEMPLATE, re.M):
        conditions += [part.split(" if ")[1] for part in texts.split(" else ") if " if " in part]
    used = {word for condition in conditions for word in re.findall(r"\w+", condition)}
    assert used - {"and", "or", "not"} <= names


def command(*words, code=0):
    return run([PYTHON, ROOT / "compose.py", *words], ROOT, code=code)


def test_the_command(tmp_path):
    """What it writes says how it was made, and makes itself; a diff has the lines of a feature."""
    words = ["fsdp", "--data", "images", "--with", ",".join(FEATURES)]
    text = command(*words)
    (made,) = re.findall(r"^Made by: (.*(?:(?<=\\)\n.*)*)$", text, re.M)
    assert run(["bash", "-c", made], ROOT, env=USER) == text and "\nbest," not in made
    assert command("torchrun", "--with", "f1,", "amp") == command("torchrun", "--with", "amp,f1")
    added = [line for line in command(*words, "--diff", "clip").splitlines() if line[0] == "+"]
    assert "clip_grad_norm_" in added[-1] and "unscale_" in added[-2]
    assert "-    rank = " in command("one_gpu", "--diff", "torchrun")
    listed = command("--list")
    assert all(f"  {name} " in listed for name in [*STARTS, *compose.WHOLE, *FEATURES, *DATA])


@pytest.mark.parametrize("name", compose.WHOLE)
def test_a_whole_script_says_how_it_is_started(name):
    """In this project's root, which has the text that some of them learn."""
    text = command(name)
    (said,) = re.findall(r"^\$ torchrun .* (\S+)$", text, re.M)
    assert said == "train.py"
    if files := re.findall(r"^FILES = (.*?)  #", text, re.M):
        found = eval(files[0], {"Path": Path, "__file__": str(ROOT / "train.py")})
        assert len(found) > 9 and all(path.parent == ROOT / "docs" for path in found)


def test_full_scripts_with_recipes(tmp_path):
    """In their order, whatever was asked for first; a diff has the lines of one."""
    text = command("distributed.py", "--with", "ema", "clip,accumulate")
    assert text == command("distributed.py", "--with", "accumulate,clip,ema")
    assert all(word in text for word in ("--accumulate", "clip_grad_norm_", "average = deepcopy"))
    lines = command("distributed.py", "--with=clip,ema", "--diff=clip").splitlines()
    added = "".join(line for line in lines if line.startswith("+"))
    assert "clip_grad_norm_" in added and "deepcopy" not in added
    # Two change one line of the imports, two others lines that touch.
    text = command("distributed.py", "--with=archives,weighted,accumulate,predictions")
    assert "import contextlib\nimport csv\nimport gc\n" in text
    assert "TrainSampler, position_seed, seed_step" in text and "common.images" not in text
    ast.parse(text)
    assert command("horovod_distributed.py", "--list").split() == [
        "adamw",
        "bad_images",
        "early_stopping",
        "wandb",
        "tensorboard",
    ]


@pytest.mark.parametrize(
    "words, says",
    [
        ("torchrun --with f2", "f2 is none of loss, amp"),
        ("torch", "torch is none of one_gpu"),
        ("torchrun amp f1", "features come after --with: torchrun --with amp,f1\n"),
        ("torchrun --data mnist", "mnist is none of digits"),
        ("dataparallel --with compile", "DataParallel copies the net anew"),
        ("accelerate --with accumulate,weighted", "Accelerate's accumulate"),
        ("torchrun --with amp --diff f1", "--diff f1 needs f1 in --with"),
        ("tensor_parallel --with amp", "tensor_parallel takes no --with amp: what each"),
        ("pipeline --data own", "pipeline takes no --data own: what each process"),
        (
            "distributed.py --with clip,f1,ema,predictions",
            "these change the same lines of distributed.py: ema and f1, f1 and predictions\n",
        ),
        ("distributed.py --with clip,amp", "distributed.py has amp without a recipe: --precision"),
        ("fsdp_distributed.py --with f1", "fsdp_distributed.py takes no f1, but clip, adamw"),
        ("train.py --with f1", "train.py is none of distributed.py, "),
        ("distributed.py --data own", "a full script has a flag --data of its own"),
        ("distributed.py --with clip --diff f1", "--diff f1 needs f1 in --with"),
    ],
)
def test_what_makes_no_sense_is_one_line(words, says):
    output = command(*words.split(), code=2)
    assert output.startswith(f"error: {says}") and output.count("\n") == 1


def test_the_pages_have_the_reasons():
    """Word for word, in both languages; and each choice has all of its texts."""
    for language, page in (("en", "recipes.md"), ("zh", "recipes.zh-CN.md")):
        text = (ROOT / "docs" / page).read_text()
        for feature in KNOWN["features"]:
            section = text.split(f"\n## {feature['name']}\n")[1].split("\n## ")[0]
            assert feature["why"][language] in section and feature["wrong"][language] in section
    for choice in [*KNOWN["starts"], *KNOWN["data"], *KNOWN["features"]]:
        assert all(
            choice[key][language]
            for key in ("label", "adds", "why")
            for language in "en zh".split()
        )


# ---- What the scripts do.


ALIKE = ["torchrun", "spawn", "slurm", "fsdp", "hsdp", "horovod", "fabric", "ray"]
# On each start by hand, on some of them by CI: the rest takes half an hour.
SOAK = pytest.mark.soak
NEUTRAL = ["loss", "f1", "best", "early_stopping", "predictions", "workers", "dict_batches"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A function: what the plain script of a start prints of each epoch."""

    def once(start, known={}):  # noqa: B006
        if start not in known:
            folder = tmp_path_factory.mktemp(start)
            known[start] = lines_of(trained(write(folder, start, epochs=3), start))
        return [line[2] for line in known[start]]

    return once


def some(*names, of=STARTS):
    """Parameters: these with --all, the others as a soak."""
    return [pytest.param(x, marks=pytest.mark.full if x in names else SOAK) for x in of]


@pytest.mark.parametrize("start", some("one_gpu", "torchrun", "accelerate"))
def test_what_only_looks_on_changes_nothing(start, plain, tmp_path):
    """The accuracies are those of the plain script, to an image."""
    if start == "horovod":
        needs_horovod()
    features = NEUTRAL + ["resume"] * (start in ALIKE)  # else it changes the order of the images
    if start in ("one_gpu", "dataparallel"):  # and workers draw another number before each epoch
        features.remove("workers")
    output = trained(write(tmp_path, start, "digits", features, epochs=3), start)
    assert [line[2] for line in lines_of(output)] == plain("torchrun" if start in ALIKE else start)


STATEFUL = "loss amp clip schedule f1 early_stopping predictions ema resume workers".split()
# Dropout draws random numbers in each step.
DROPOUT = [("nn.Flatten(), ", "nn.Flatten(), nn.Dropout(0.2), ")]


@pytest.mark.parametrize("start", some("torchrun", "fsdp"))
def test_a_resume_after_a_kill_ends_with_the_same_bits(start, tmp_path):
    """All processes are killed in mid-epoch; all that is saved is compared."""
    if start == "horovod":
        needs_horovod()
    features = [name for name in STATEFUL if allowed(start, "digits", [name])]
    whole, killed = (
        write(tmp_path / x, start, "digits", features, 3, DROPOUT, dying=True) for x in "ab"
    )
    straight = lines_of(trained(whole, start))
    well, output = started(killed, start, env={"DIE": 1})
    assert not well and len(lines_of(output)) == 1 and load(killed, "checkpoint.pth")["epoch"] == 1
    assert lines_of(trained(killed, start)) == straight[1:]
    for name in ("digits.pth", "checkpoint.pth"):
        assert equal(load(whole, name), load(killed, name)), name
    assert (tmp_path / "a/predictions.csv").read_text() == (
        tmp_path / "b/predictions.csv"
    ).read_text()


@pytest.mark.full
@pytest.mark.parametrize("start", ["torchrun", "fsdp"])
def test_two_parts_are_two_processes(start, tmp_path):
    """To the bit, but for BatchNorm's statistics: those of one process have seen both parts."""
    edits = [("PARTS = 4", "PARTS = 2")]
    parts = write(tmp_path / "parts", start, features=["accumulate"], edits=edits)
    ranks = write(tmp_path / "ranks", start)
    trained(parts, start, ranks=1), trained(ranks, start)
    one, two = load(parts, "digits.pth"), load(ranks, "digits.pth")
    names = [name for name in one if "running" not in name and "num_batches" not in name]
    assert all(one[name].equal(two[name]) for name in names) and len(names) == 6


NO_BATCHNORM = [("nn.BatchNorm2d(64), ", "")]


@pytest.mark.full
def test_parts_by_accelerate_are_the_plain_steps(tmp_path):
    """To rounding: each step is of the same images, and an epoch has no other at its end."""
    whole, parts = (
        write(tmp_path / "-".join(["x", *features]), "accelerate", "digits", features, 1, edits)
        for features, edits in (([], NO_BATCHNORM), (["accumulate"], NO_BATCHNORM))
    )
    trained(whole, "accelerate"), trained(parts, "accelerate")
    two = load(parts, "digits.pth")
    torch.testing.assert_close(two, load(whole, "digits.pth"), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("parts", [[], ["accumulate"]])
@pytest.mark.parametrize(
    "start",
    some("torchrun", of=["torchrun", "fsdp", "horovod", "fabric", "ray", "accelerate"]),
)
def test_class_weights_are_those_of_the_whole_batch(start, parts, tmp_path):
    """The weights of two processes are those of one, to rounding, and other than without."""
    if start == "horovod":
        needs_horovod()
    if not allowed(start, "digits", ["weighted", *parts]):
        return
    features = ["weighted", *parts]
    trained(write(tmp_path / "two", start, features=features, epochs=1, edits=NO_BATCHNORM), start)
    alone = start if start == "accelerate" else "torchrun"  # Accelerate has another order
    one = write(tmp_path / "one", alone, features=["weighted"], epochs=1, edits=NO_BATCHNORM)
    trained(one, alone, ranks=1)
    two = load(tmp_path / "two/train.py", "digits.pth")
    torch.testing.assert_close(two, load(one, "digits.pth"), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("start", some("torchrun", of=["one_gpu", "torchrun", "fsdp"]))
def test_ema(start, tmp_path):
    """The first steps' weights are taken as they are; then a hundredth of the way in each step."""
    probe = "            average.update_parameters(net)"
    seen = """            bias = net[2].bias.detach()
            whole = bias.full_tensor() if hasattr(bias, "full_tensor") else bias
            seen = whole.clone() if epoch + step == 0 else 0.99 * seen + 0.01 * whole
"""
    features = ["ema"]
    path = write(tmp_path, start, features=features, epochs=1)
    script = path.read_text().replace(probe, seen + probe)
    script = script.replace(
        "for images, target in train_loader",
        "for step, (images, target) in enumerate(train_loader)",
    )
    script = re.sub(r"( +)torch\.save\(", r"\1torch.save(seen, 'seen.pth')\n\1torch.save(", script)
    path.write_text(script)
    output = trained(path, start)
    weights = load(path, "digits.pth")
    torch.testing.assert_close(weights["2.bias"], load(path, "seen.pth"))
    assert f"{accuracy(weights)} % correct" in output


@pytest.mark.parametrize("start", some("torchrun", of=["torchrun", "fsdp", "horovod"]))
def test_gradients_are_clipped_once_they_are_averaged_and_unscaled(start, tmp_path):
    """In fp16: the norm of what a step uses is 1 at most, and 1 in some; all agree."""
    path = write(tmp_path, start, features=["amp", "clip"], epochs=4)
    script = path.read_text().replace("torch.bfloat16", "torch.float16", 1)
    line = re.search(r"^ +(?=nn\.utils\.clip_grad_norm_.*\n)", script, re.M)[0]
    clip = re.search(r"nn\.utils\.clip_grad_norm_.*\n", script)[0]
    look = f"{line}norm = nn.utils.get_total_norm([w.grad for w in net.parameters()])\n"
    look += f"{line}norm = float(getattr(norm, 'full_tensor', lambda: norm)())\n"
    look += f"{line}rank or print('norm 0', norm)\n"
    path.write_text(script.replace(clip, f"{clip}{look}"))
    output = trained(path, start)
    norms = [float(number) for number in re.findall(r"norm 0 (\S+)", output)]
    assert len(norms) == 88 and max(norms) == pytest.approx(1, abs=1e-3) and min(norms) < 0.9


@pytest.mark.parametrize("start", some("torchrun", of=["one_gpu", "torchrun"]))
def test_compile(start, tmp_path):
    """By Inductor: it trains, and the keys are those of the plain net."""
    composed.write(tmp_path, start)
    path = tmp_path / "train.py"
    path.write_text(compose.script(start, features=["compile"]).replace("EPOCHS = 5", "EPOCHS = 1"))
    output = trained(path, start)
    assert f"{accuracy(load(path, 'digits.pth'))} % correct" in output


def test_a_template_with_carriage_returns_gives_the_same(tmp_path):
    """As an archive from Windows has it."""
    shutil.copytree(ROOT / "minimal/template", tmp_path / "minimal/template")
    for path in [shutil.copy(ROOT / "compose.py", tmp_path), *tmp_path.rglob("template/*")]:
        path = tmp_path / path
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    words = ["compose.py", "torchrun", "--with", "amp,f1,resume"]
    said = [
        subprocess.run(
            [PYTHON, *words], cwd=folder, stdout=subprocess.PIPE, check=True, timeout=150
        )
        for folder in (ROOT, tmp_path)
    ]
    assert said[0].stdout == said[1].stdout and b"\r" not in said[0].stdout
