"""Every command of README.md, docs/, the docstrings and start.sh runs, in its form for a machine
without GPUs; what is generated is as its source; links, figures and names of functions hold.
"""

import ast
import io
import json
import os
import re
import runpy
import shlex
import shutil
import socket
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import PYTHON, ROOT, Job, last_result, load, needs_horovod, rows, run
from scipy.io import savemat
from torch.utils.data import DistributedSampler
from torchvision.datasets import imagenet
from torchvision.models import ResNet18_Weights, ResNet50_Weights, resnet18, resnet50

from tests.docs.ranks import good
from tools import generate

DOCUMENTS = generate.DOCUMENTS
ENGLISH = [name for name in DOCUMENTS if "zh-CN" not in name]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
BLOCK = re.compile(r"<!-- generated: (.+?) -->(.*?)<!-- end -->", re.S)
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"\]\(([^)\s]+)\)")
# An answer ends with where it is: [file](file): `function`, or a full-width colon.
PLACE = re.compile(r"\[([^\]]+)\]\(([^)#]+)\)(?:: |\uff1a)`([^`]+)`$", re.M)
STARTS = ("python ", "torchrun ", "horovodrun ", "srun ", "sbatch ", "./start.sh", "diff ", "pip ")
STARTS += ("tools/", "tests/")
QUICK = ["--max-steps", "1", "--image-size", "32"]
DATA = " --data /path/to/imagenet"

# What other tests run, and words that these have.
ELSEWHERE = {
    r"(python|torchrun|horovodrun|srun) .*minimal/\w+\.py": ("docs/test_minimal.py", "def start"),
    r"srun -K .*": ("cluster/test_slurm.py", r"\bsrun -K"),  # finds them in README.md by itself
    r"TORCH_DISABLE_\w+=1 torchrun .*": ("cluster/test_elastic.py", "def command"),
    r"sbatch .*": ("cluster/test_slurm.py", "distributed_slurm.sbatch"),
    r"tests/cluster/slurm/cluster\.sh start": ("cluster/test_slurm.py", "{CLUSTER} start"),
    r"tools/install_horovod\.sh": ("cluster/test_horovod.py", "tools/install_horovod.sh"),
    r"python -m benchmarks\.\w+.*": ("run/test_benchmark.py", "benchmarks"),
    r"\./start\.sh NAME .*": ("docs/test_docs.py", "def test_start_names"),
    r"\./start\.sh": ("docs/test_docs.py", "def test_first_command"),
    r"\./start\.sh test": ("docs/test_docs.py", "def test_start_runs_the_tests"),
    r"python docs/unpack_imagenet\.py": ("docs/test_docs.py", "def test_the_archives_are_unpacked"),
    r"python docs/use_weights\.py": ("docs/test_docs.py", "def test_weights_are_used_elsewhere"),
    # From the network: the tests run in an environment that has it, or what it would break.
    r"pip install (tensorboard|horovod|apex)": ("docs/test_docs.py", "--tensorboard"),
    "pip install wandb": ("docs/test_recipes.py", "def test_wandb"),
}
STARTED = {
    "dataparallel": "python dataparallel.py",
    "distributed": "torchrun --standalone --nproc-per-node=4 distributed.py",
    "launch": "python -m torch.distributed.launch --nproc_per_node=4 distributed.py",
    "multiprocessing": "python multiprocessing_distributed.py",
    "apex": "torchrun --standalone --nproc-per-node=4 apex_distributed.py",
    "horovod": "horovodrun -np 4 python horovod_distributed.py",
    "fsdp": "torchrun --standalone --nproc-per-node=4 fsdp_distributed.py",
}


def read(name="README.md"):
    return (ROOT / name).read_text(encoding="utf-8")


def prose(text):
    return FENCE.sub("", text)


def commands(text):
    """Each line of a block of commands and each `command` of the text, in their order."""
    found = []
    for match in re.finditer(f"{FENCE.pattern}|{CODE.pattern}", text, re.M | re.S):
        kind, block, code = match.groups()
        if kind == "sh":
            found += block.replace("\\\n", " ").splitlines()
        elif code and code.startswith(STARTS) and " " in code.removeprefix("tests/"):
            found.append(code)
    return [" ".join(line.split()) for line in found]


PATCHED = [c for c in commands(read("docs/recipes.md")) if c.startswith(("patch ", "torchrun "))]
there = "docs/test_recipes.py", "def test_commands_of_the_page"
ELSEWHERE |= {re.escape(command): there for command in PATCHED}


def in_docstrings():
    folders = [ROOT, *(ROOT / name for name in ("docs", "tools", "benchmarks", "minimal"))]
    paths = [path for folder in folders for path in folder.glob("*.py")]
    return [c for path in paths for c in re.findall(r"^\$ (.*)$", path.read_text(), re.M)]


def documented():
    """Those of README.md, of docs/ and of the docstrings, each once."""
    written = [command for name in ENGLISH for command in commands(read(name))]
    return list(dict.fromkeys(written + in_docstrings()))


def short(command):
    """Without how many processes, and which images: what start.sh has to agree with."""
    command = re.sub(r" --data .*", "", command)
    return re.sub(r" --nprocs=\d+", "", re.sub(r"(node[= ]|-np |gpu:)\d+", r"\1N", command))


def direct():
    """Commands that are run here as they stand: not elsewhere, nor by way of start.sh."""
    started = {f"{command}{data}" for command in STARTED.values() for data in ("", DATA)}
    there = re.compile("|".join(ELSEWHERE))
    return [c for c in documented() if c not in started and not there.fullmatch(c)]


def test_commands_are_found():
    assert len(documented()) > 40 and 10 < len(direct()) < 25
    for file, words in ELSEWHERE.values():
        assert (ROOT / "tests" / file).exists() and words in read(f"tests/{file}"), file
    # What the tests of other files find by themselves: in docstrings, and srun's in README.md too.
    known = {short(command) for command in in_docstrings()}
    for command in documented():
        if "minimal/" in command or command.startswith("srun"):
            there = [c for c in commands(read()) if c.startswith("srun")]
            assert short(command) in known or command in there, command


# ---- Commands


@pytest.fixture(scope="module")
def clone(work, tmp_path_factory):
    """A copy of what is committed or will be, with the digits already written."""
    folder = tmp_path_factory.mktemp("clone") / "here"
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    shutil.copytree(work / "data", folder / "data")
    for part in ("train", "val"):
        shutil.copytree(work / "data/digits/val", folder / "data/small" / part)
    # torchvision's weights, as if they had been downloaded before: random ones.
    hub = folder / "data/torch/hub/checkpoints"
    hub.mkdir(parents=True)
    torch.save(resnet18().state_dict(), hub / Path(ResNet18_Weights.DEFAULT.url).name)
    return folder


# The environment of these tests, as one that a user has activated; with a double of Apex, which
# needs a GPU.
ACTIVE = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
ACTIVE["PYTHONPATH"] = str(ROOT / "tests/apex_doubles/today")
# ImageNet's place is taken by a small data set, and one step is taken of training.
SMALL = "-b 64 -a resnet18 -j 1".split()
PLAIN = "-b 64 -a tests.nets:plain -j 1".split()


def result(output):
    return last_result(output.replace("[0]<stdout>:", ""))  # horovodrun's


@pytest.fixture(scope="module")
def trained(clone):
    """The folder of checkpoints that a user has, who has run what comes first, with curves."""
    result(good(clone / "distributed.py", "--tensorboard", *QUICK))
    assert list((clone / "checkpoints/tensorboard").iterdir())
    return clone / "checkpoints"


# A script's flags, behind a launcher that other tests run.
LAUNCHED = re.compile(
    r"(?:torchrun --standalone --nproc-per-node=\d|\./start.sh|python) (\w+)(?:\.py)? (.*)"
)


@pytest.mark.full
@pytest.mark.parametrize("command", [c for c in direct() if "--tensorboard" not in c])
def test_command_runs(command, clone, trained, tmp_path):
    launched = LAUNCHED.fullmatch(command)
    if launched and launched[1] != "test":
        flags = re.sub("--data /path/to/[a-z]+", "--data data/small", launched[2])
        words = shlex.split(flags)
        if "checkpoints/" not in command:  # else the model is that of the checkpoint
            words += QUICK + (SMALL if "--data" in words else PLAIN)
        words += ["--checkpoint-dir", tmp_path / "c"]
        env = {"TORCH_HOME": clone / "data/torch"}
        result(good(clone / f"{launched[1]}.py", *words, env=env))
        assert (tmp_path / "c").exists() != ("--evaluate" in words)
        if "--predictions" in words:
            assert len((clone / "predictions.csv").read_text().splitlines()) == 1 + 360
    elif command.startswith("diff "):
        assert run(["env", *command.split()], clone, env=ACTIVE, code=1)
    elif "tools/" in command or "docs/" in command:
        before = {p: (clone / p).read_text() for p in generate.everything()}
        run(["env", *command.split()], clone, env=ACTIVE)
        assert {p: (clone / p).read_text() for p in before} == before
    elif command.startswith("./start.sh test "):
        (name,) = re.findall(r"tests/[\w/.]+", command)  # start.sh passes it on to pytest
        assert (ROOT / name).exists()
    elif "--max-restarts" in command:
        words = [*command.replace("node=4", "node=2").split(), *PLAIN, *QUICK]
        result(run(["env", *words, "--checkpoint-dir", tmp_path / "c"], clone, env=ACTIVE))
    else:
        two_nodes(command, clone, tmp_path)


def two_nodes(command, clone, folder):
    """The two lines are one run: started with the first of them."""
    assert "--nnodes=2" in command
    first = command.replace("--node-rank=1", "--node-rank=0")
    assert {first, first.replace("--node-rank=0", "--node-rank=1")} <= set(documented())
    if command != first:
        return
    with socket.create_server(("localhost", 0)) as free:
        port = str(free.getsockname()[1])
    line = command.replace("HOST", "localhost").replace("node=4", "node=1")
    line = line.replace(DATA, " --data data/small")
    words = ["env", *line.split(), *PLAIN, *QUICK, "--checkpoint-dir", str(folder / "c")]
    lines = [[w.replace("rank=0", f"rank={rank}") for w in words] for rank in (0, 1)]
    nodes = [Job(line, clone, ACTIVE | {"PET_MASTER_PORT": port}) for line in lines]
    ends = [node.wait(150) for node in nodes]
    assert [code for code, _ in ends] == [0, 0], ends
    assert "distributed.py: processes: 2, " in ends[0][1] + ends[1][1]
    result(ends[0][1] + ends[1][1])


def test_the_archives_are_unpacked(tmp_path, monkeypatch):
    """Small ones of the same build: two classes, and a third that is made of others."""
    source = read("docs/unpack_imagenet.py")
    script = tmp_path / "unpack.py"
    script.write_text(source.replace("/path/to/imagenet", str(tmp_path)))
    image = (next((ROOT / "results").glob("*.png"))).read_bytes()
    synsets = [(1, "n01", "tench", "a fish", 0), (2, "n02", "cock", "a bird", 0)]
    synsets += [(3, "n00", "animal", "both", 2)]
    kinds = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("gloss", "O")]
    meta = io.BytesIO()
    savemat(meta, {"synsets": np.array(synsets, dtype=[*kinds, ("num_children", "O")])})
    inner = {w: pack({f"{w}_{i}.JPEG": image for i in range(2)}) for w in ("n01", "n02")}
    devkit = {
        "ILSVRC2012_devkit_t12/data/meta.mat": meta.getvalue(),
        "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt": b"2\n1\n2\n",
    }
    files = {
        "devkit": pack(devkit, "w:gz"),
        "train": pack({f"{wnid}.tar": archive for wnid, archive in inner.items()}),
        "val": pack({f"ILSVRC2012_val_0000000{i}.JPEG": image for i in (1, 2, 3)}),
    }
    known = {}
    for part, data in files.items():
        name, _ = imagenet.ARCHIVE_META[part]
        assert part == "devkit" or name in read()
        (tmp_path / name).write_bytes(data)
        known[part] = (name, None)  # the checksums are those of the large ones
    monkeypatch.setattr(imagenet, "ARCHIVE_META", known)
    runpy.run_path(str(script))
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*/*.JPEG"))
    assert found == [
        *[f"train/n0{c}/n0{c}_{i}.JPEG" for c in (1, 2) for i in (0, 1)],
        "val/n01/ILSVRC2012_val_00000002.JPEG",
        "val/n02/ILSVRC2012_val_00000001.JPEG",
        "val/n02/ILSVRC2012_val_00000003.JPEG",
    ]


def pack(files, mode="w"):
    """An archive of {name: bytes}, as bytes."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=mode) as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return packed.getvalue()


@pytest.mark.full
def test_weights_are_used_elsewhere(clone, trained):
    """With the model and the classes of what was trained here."""
    source = read("docs/use_weights.py").replace("resnet50", "resnet18").replace("1000", "10")
    (clone / "use.py").write_text(source)
    run(["env", "python", "use.py"], clone, env=ACTIVE)
    net = resnet18(num_classes=10).eval()
    net.load_state_dict(torch.load(trained / "model_best.pth", weights_only=True)["state_dict"])
    program = torch.export.load(clone / "resnet18.pt2").module()
    images = torch.rand(1, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(program(images), net(images))
    (clone / "use.py").unlink()


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in STARTED if name != "distributed"])
def test_start_names(name, clone, tmp_path):
    """And that what start.sh runs is what the documents say, with their --data."""
    if name == "horovod":
        needs_horovod()
    flags = ["--data", "data/small", *PLAIN, *QUICK, "--checkpoint-dir", str(tmp_path / "c")]
    output = run(["./start.sh", name, *flags], clone, env=ACTIVE)
    result(output)
    (started,) = re.findall(r"^\+ (.*)", output, re.M)
    assert short(started) == short(STARTED[name])
    known = [short(command) for command in documented()]
    assert short(started) in known and started.endswith(" ".join(flags))


# Slurm's runs on a cluster, in test_slurm.py.
EXAMPLES = [e for e in re.findall(r"^#   (\w+=.*?)  ", read("start.sh"), re.M) if "slurm" not in e]


@pytest.mark.full
@pytest.mark.parametrize("example", EXAMPLES)
def test_example_of_start(example, clone, tmp_path):
    flags = [*PLAIN, *QUICK, "--checkpoint-dir", tmp_path / "c"]
    processes = 1 if "NGPU" in example else 2  # two are the default
    words = example.replace("NGPU=2", "NGPU=1").split()
    output = run(["env", *words, *flags], clone, env=ACTIVE)
    said = f"+ torchrun --standalone --nproc-per-node={processes} distributed.py"
    assert output.startswith(said) and f"global batch 64 = {processes} x" in output
    result(output)


@pytest.mark.full
def test_first_command(clone, tmp_path):
    """./start.sh, from an empty folder of checkpoints, says what docs/faq.md shows.

    It reaches 97 %. A second one is refused, and its line says what to do.
    """
    folder = tmp_path / "here"
    shutil.copytree(clone, folder, ignore=shutil.ignore_patterns("checkpoints*"))
    env = ACTIVE | {"CUDA_VISIBLE_DEVICES": ""}
    output = run(["./start.sh"], folder, env=env, timeout=300)
    loss, acc1, acc5 = result(output)
    assert acc1 >= 97 and acc5 > 99 and loss < 0.2
    accuracies = [row["acc1"] for row in rows(folder / "checkpoints")]
    best = load(folder / "checkpoints", "model_best.pth")
    assert best["best_acc1"] == max(accuracies) == accuracies[best["epoch"] - 1]

    def form(line):
        return re.sub(r"\d[\d.e+-]*(cu\d+|cpu)?", "#", line.replace(str(folder), "/home/you/here"))

    said = {form(line) for line in output.splitlines()}
    blocks = [block for _, block in FENCE.findall(read("docs/faq.md"))]
    (sample,) = [block for block in blocks if block.startswith("+ ")]
    shown = [form(line) for line in sample.splitlines() if line != "..."]
    assert len(shown) > 6 and [line for line in shown if line not in said] == []
    # Nothing before the first step is left out.
    first = output[: output.index("epoch 0")].splitlines()
    assert [form(line) for line in first] == shown[: len(first)]
    assert short(STARTED["distributed"]) == short(first[0][2:])

    before = {path: path.stat() for path in (folder / "checkpoints").iterdir()}
    # 1 is torchrun's exit code, whatever that of its processes.
    (line,) = re.findall("^.*error: .*$", run(["./start.sh"], folder, env=env, code=1), re.M)
    assert line.startswith(f"error: {folder}/checkpoints holds a run (checkpoint.pth): ")
    assert "--resume auto" in line and "--checkpoint-dir" in line
    assert {path: path.stat() for path in (folder / "checkpoints").iterdir()} == before


def test_start_horovod_without_it_says_what_to_do(clone, tmp_path):
    for name in ("bash", "dirname", "env"):
        (tmp_path / name).symlink_to(shutil.which(name))
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {PYTHON} "$@"\n')
    (tmp_path / "python").chmod(0o755)
    bare = ACTIVE | {"PATH": str(tmp_path)}  # a python with torch, and no horovodrun
    output = run(["./start.sh", "horovod"], clone, env=bare, code=2)
    assert output == "error: needs Horovod: run tools/install_horovod.sh\n"


@pytest.mark.full
def test_start_runs_the_tests_and_explains_itself(clone):
    words = "-n 1 -q tests/docs/test_diffs.py -k order".split()
    output = run(["./start.sh", "test", *words], clone, env=ACTIVE, timeout=300)
    assert " passed" in output and "failed" not in output
    output = run(["./start.sh", "--help"], clone, env=ACTIVE, code=2)
    assert "./start.sh NAME [flags]" in output and len(output.splitlines()) < 14


@pytest.mark.full
def test_a_script_alone_runs_with_what_may_do_nothing(clone, tmp_path):
    said = r"^At first (.*) may do nothing; (.*) may return `(.*)`"
    sentence = re.search(said, read("docs/copying.md"), re.M)
    nothing, contexts = (re.findall(r"`(\w+)`", part) for part in sentence.groups()[:2])
    assert len(nothing) > 3 and len(contexts) > 1
    text = read("distributed.py")
    for name in nothing + contexts:
        assert f" {name}(" in text
    stubs = [f"def {name}(*_, **__): return None" for name in nothing]
    stubs += [f"def {name}(*_, **__): return {sentence[3]}" for name in contexts]
    stubs = "\n".join(["import contextlib", *stubs, "\n\ndef main"])
    (tmp_path / "alone.py").write_text(text.replace("def main", stubs, 1))
    flags = [*PLAIN, *QUICK, "--checkpoint-dir", tmp_path / "c"]
    result(good(tmp_path / "alone.py", *flags, ranks=2, cwd=clone))


# ---- Texts


def test_what_is_generated_is_as_its_source():
    for path, text in generate.everything().items():
        assert read(path) == text, f"{path}: run tools/generate.py"
    assert {p.name for p in (ROOT / "docs").glob("*.svg")} == generate.draw().keys()
    # All blocks stand in one document or another. Apex alone is not measured: it needs a GPU.
    blocks = [block for name in ENGLISH for block in BLOCK.findall(read(name))]
    assert {name for name, _ in blocks} == generate.blocks().keys()
    assert not [name for name, text in blocks if text.strip() in ("", "-")]


@pytest.mark.parametrize("name", ENGLISH)
def test_every_block_of_code_is_generated(name):
    """From a file that a test runs. What is not code is a command, or what a command printed."""
    rest = BLOCK.sub("", read(name))
    assert {kind for kind, _ in FENCE.findall(rest)} <= {"sh", "text"}


@pytest.mark.parametrize("name", generate.READMES)
def test_readme_is_short(name):
    assert len(read(name).splitlines()) <= 300


def skeleton(text):
    """What a translation keeps: each line, and which are headings, items, rows, figures."""
    marks = re.findall(r"^(#+ |- |\||!|)", prose(text), re.M)
    return marks, [kind for kind, _ in FENCE.findall(text)]


@pytest.mark.parametrize("name", ENGLISH)
def test_both_languages_say_the_same(name):
    english, chinese = read(name), read(name.replace(".md", ".zh-CN.md"))
    for same in (commands, BLOCK.findall, FENCE.findall, PLACE.findall, skeleton):
        assert same(english) == same(chinese)
    files = [[link.partition("#")[0] for link in LINK.findall(t)] for t in (english, chinese)]
    kept = [re.sub(r"(\.zh-CN)?\.md$", ".md", link) for link in files[1]]
    assert kept == [re.sub(r"(\.zh-CN)?\.md$", ".md", link) for link in files[0]]


def names_in(path):
    """The functions, classes and methods (Class.method) of a script; the lines of another file."""
    if path.suffix != ".py":
        return path.read_text()
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
            inner = node.body if isinstance(node, ast.ClassDef) else []
            names |= {f"{node.name}.{n.name}" for n in inner if isinstance(n, ast.FunctionDef)}
    return names


def test_answers_link_to_functions_that_exist():
    places = PLACE.findall(read("docs/faq.md"))
    assert len(places) >= 30
    for label, path, name in places:
        assert path.removeprefix("../") == label and name in names_in(ROOT / label), name


def test_what_a_copy_changes_is_there():
    """The table of README.md: lines of a minimal script, and of the files that are linked."""
    table = read().partition("| to change |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(table) > 3
    for row in table:
        minimal, full_script = row.split(" | ")[1:3]
        for code in CODE.findall(minimal):
            assert code in read("minimal/distributed.py"), code
        for codes, path in re.findall(r"([^;]*) in \[[^]]+\]\(([^)]+)\)", full_script):
            for code in CODE.findall(codes):
                assert code in read(path), f"{path} has no {code}"


def test_accuracies_are_those_of_torchvision():
    published = [
        f"{weights.meta['_metrics']['ImageNet-1K']['acc@1']:.1f} % acc@1"
        for weights in (ResNet50_Weights.DEFAULT, ResNet50_Weights.IMAGENET1K_V1)
    ]
    assert re.findall(r"\d\d\.\d % acc@1", read()) == published


def test_measurements_are_of_scripts_that_exist():
    runs = json.loads(read("results/strategies.json"))["runs"]
    scripts = {f"{name}.py" for name in generate.SCRIPTS}
    assert scripts >= {run["script"] for run in runs} >= scripts - {"apex_distributed.py"}
    assert all(run["images_per_second"] > 0 for run in runs)


def anchors(text):
    """The names that GitHub gives to headings."""
    heads = re.findall(r"^#+ (.*)$", prose(text), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_links_resolve_and_reach_every_document():
    shown = set()
    for name in DOCUMENTS:
        for link in LINK.findall(read(name)):
            path, _, anchor = link.partition("#")
            if link.startswith("https://"):
                continue
            target = (ROOT / name).parent / path if path else ROOT / name
            assert target.exists(), link
            assert not anchor or anchor in anchors(target.read_text()), link
            shown.add(target.resolve())
    assert {ROOT / name for name in DOCUMENTS[1:]} | {*(ROOT / "docs").glob("*.svg")} <= shown


def test_numbers_of_the_evaluation():
    """Ten images, two of them wrong, on three processes, as docs/evaluation.md and the figure."""
    text, right = read("docs/evaluation.md"), [i > 1 for i in range(10)]
    padded = [DistributedSampler(range(10), 3, r, shuffle=False) for r in range(3)]
    hits = [right[i] for sampler in padded for i in sampler]
    assert f"{sum(hits)} of {len(hits)}: {100 * sum(hits) / len(hits):.1f} %" in text
    shares = [[right[i] for i in range(r, 10, 3)] for r in range(3)]
    said = ", ".join(f"{sum(s)} of {len(s)}" for s in shares)
    assert said.replace(", 3 of 3", " and 3 of 3") in text
    mean = sum(100 * sum(s) / len(s) for s in shares) / 3
    assert f"The mean of the three is {mean:.1f} %" in text
    assert sum(map(sum, shares)) / sum(map(len, shares)) == 0.8
    padding = {w: len(DistributedSampler(range(50000), w, 0)) * w - 50000 for w in range(1, 65)}
    assert all(padding[w] == 0 for w in (2, 4, 8, 16)) and (padding[6], padding[64]) == (4, 48)
    assert "on 6 it adds 4, on 64 it adds 48" in text


def test_numbers_of_the_communication():
    with torch.device("meta"):
        net = resnet50()
    weights = sum(p.numel() for p in net.parameters())
    sent = {w: 2 * (w - 1) / w * weights * 4 for w in (8, 64)}
    text = read("docs/scaling.md")
    assert f"{weights / 1e6:.1f} million parameters, {weights * 4e-6:.0f} MB" in text
    assert f"ring of 8 each process sends {sent[8] / 1e6:.0f} MB" in text
    assert f"one of 64 {sent[64] / 1e6:.0f} MB" in text
    assert f"{sent[64] * 8 / 100e9 * 1e3:.0f} ms at 100 Gbit/s" in text
    assert f"{round(sent[64] * 8 / 10e9 * 1e3, -1):.0f} ms at 10 Gbit/s" in text
    assert f"= {2 * 7 * weights * 4e-6:.0f} MB" in text
    saved = 2 * weights * 4 + sum(b.numel() * b.element_size() for b in net.buffers())
    assert f"rank 0 writes {saved / 1e6:.0f} MB" in text
    drawn = read("docs/traffic.svg")
    assert all(f">{(w - 1) * weights * 4e-6:.0f}<" in drawn for w in (2, 4, 8, 16))
