"""Every command of the READMEs, of the docstrings and of start.sh runs, in its form for a machine
without GPUs; what is generated is as its source; links, figures and quotations hold.
"""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import PYTHON, ROOT, Job, last_result, run
from torch.utils.data import DistributedSampler
from torchvision.models import resnet50

from tools import generate

READMES = generate.READMES
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
BLOCK = re.compile(r"<!-- generated: (.+?) -->(.*?)<!-- end -->", re.S)
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"\]\(([^)\s]+)\)")
# An answer ends with the line that gives it: [file](file): `line`, or a full-width colon.
QUOTE = re.compile(r"\[([^\]]+)\]\(([^)#]+)\)(?:: |\uff1a)`([^`]+)`$", re.M)
STARTS = ("python ", "torchrun ", "horovodrun ", "srun ", "sbatch ", "./start.sh", "diff ", "pip ")
STARTS += ("tools/", "tests/slurm/")
QUICK = ["--max-steps", "1", "--image-size", "32"]

# What other tests run, and words that these have.
ELSEWHERE = {
    r"srun -K .*": ("test_slurm.py", r"\bsrun -K"),  # finds them in README.md by itself
    r"sbatch .*": ("test_slurm.py", "distributed_slurm.sbatch"),
    r"tests/slurm/cluster\.sh start": ("test_slurm.py", "{CLUSTER} start"),
    r"tools/install_horovod\.sh": ("test_horovod.py", "tools/install_horovod.sh"),
    r"python -m benchmarks\.\w+.*": ("test_benchmark.py", "benchmarks"),
    # What was measured before keeps the command that measured it.
    r"python benchmark\.py .*": ("test_benchmark.py", "benchmarks"),
    r"\./start\.sh NAME .*": ("test_docs.py", "def test_start_names"),
    r"\./start\.sh": ("test_docs.py", "def test_first_command"),
    r"\./start\.sh test": ("test_docs.py", "def test_start_runs_the_tests"),
    # From the network: the tests run in an environment that has it, or what it would break.
    r"pip install (tensorboard|horovod|apex)": ("test_docs.py", "--tensorboard"),
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
        elif code and code.startswith(STARTS):
            found.append(code)
    return [" ".join(line.split()) for line in found]


def documented():
    """Those of README.md and of the docstrings, each once."""
    found = commands(read())
    folders = [ROOT, ROOT / "docs", ROOT / "tools", ROOT / "benchmarks"]
    for path in [path for folder in folders for path in folder.glob("*.py")]:
        found += re.findall(r"^\$ (.*)$", path.read_text(), re.M)
    return list(dict.fromkeys(found))


def short(command):
    """Without how many processes, and which images: what start.sh has to agree with."""
    command = re.sub(r" --data .*", "", command)
    return re.sub(r" --nprocs=\d+", "", re.sub(r"(node[= ]|-np |gpu:)\d+", r"\1N", command))


NAMES = ["dataparallel", "distributed", "launch", "multiprocessing", "apex", "horovod"]
STARTED = {
    "dataparallel": "python dataparallel.py",
    "distributed": "torchrun --standalone --nproc-per-node=4 distributed.py",
    "launch": "python -m torch.distributed.launch --nproc_per_node=4 distributed.py",
    "multiprocessing": "python multiprocessing_distributed.py",
    "apex": "torchrun --standalone --nproc-per-node=4 apex_distributed.py",
    "horovod": "horovodrun -np 4 python horovod_distributed.py",
}


def direct():
    """Commands that are run here as they stand: not elsewhere, nor by way of start.sh."""
    started = {f"{command}{data}" for command in STARTED.values() for data in ("", DATA)}
    there = re.compile("|".join(ELSEWHERE))
    return [c for c in documented() if c not in started and not there.fullmatch(c)]


DATA = " --data /path/to/imagenet"


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
    data = folder / "data/small"
    for part in ("train", "val"):
        shutil.copytree(work / "data/digits/val", data / part)
    return folder


# The environment of these tests, as one that a user has activated; with a double of Apex, which
# needs a GPU.
ACTIVE = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
ACTIVE["PYTHONPATH"] = str(ROOT / "tests/apex_doubles/today")
# ImageNet's place is taken by a small data set, and one step is taken of training.
SMALL = "--data data/small -b 64 -a resnet18 -j 1"


def need_horovod():
    if not shutil.which("horovodrun", path=ACTIVE["PATH"]):
        assert "CI" not in os.environ
        pytest.skip("Horovod is not installed: tools/install_horovod.sh")


def result(output):
    return last_result(output.replace("[0]<stdout>:", ""))  # horovodrun's


@pytest.fixture(scope="module")
def trained(clone):
    """The folder of checkpoints that a user has, who has run what comes first, with curves."""
    output = run(["env", "python", "distributed.py", "--tensorboard", *QUICK], clone, env=ACTIVE)
    result(output)
    assert list((clone / "checkpoints/tensorboard").iterdir())
    return clone / "checkpoints"


def test_commands_are_found():
    assert "python distributed.py --tensorboard" in documented()  # run by the fixture above
    assert len(documented()) > 20 and 5 < len(direct()) < 16
    for file, words in ELSEWHERE.values():
        assert (ROOT / "tests" / file).exists() and words in read(f"tests/{file}"), file


@pytest.mark.parametrize("command", [c for c in direct() if "--tensorboard" not in c])
def test_command_runs(command, clone, trained, tmp_path):
    line = (
        command.replace(DATA, f" {SMALL}").replace("node=4", "node=2").replace("HOST", "localhost")
    )
    words = ["env", *shlex.split(line)]
    if words[1] == "diff":
        assert run(words, clone, env=ACTIVE, code=1)
    elif "tools/" in command or "docs/" in command:
        before = {p: (clone / p).read_text() for p in generate.everything()}
        run(words, clone, env=ACTIVE)
        assert {p: (clone / p).read_text() for p in before} == before
    elif words[1:3] == ["./start.sh", "test"]:
        assert re.search(
            r"^[1-9]\d*(/\d+)? tests collected",
            run([*words, "--collect-only", "-q"], clone, env=ACTIVE),
            re.M,
        )
    elif "--nnodes=2" in words:
        # The two lines are one run: started with the first of them.
        others = [w.replace("--node-rank=0", "--node-rank=1") for w in command.split()]
        assert " ".join(others) in documented()
        if "--node-rank=1" in words:
            return
        with socket.create_server(("localhost", 0)) as free:
            port = str(free.getsockname()[1])
        words = [word.replace("node=2", "node=1") for word in words]
        words += [*QUICK, "--checkpoint-dir", str(tmp_path / "c")]
        lines = [[w.replace("rank=0", f"rank={rank}") for w in words] for rank in (0, 1)]
        nodes = [Job(line, clone, ACTIVE | {"PET_MASTER_PORT": port}) for line in lines]
        ends = [node.wait(150) for node in nodes]
        assert [code for code, _ in ends] == [0, 0], ends
        assert "distributed.py: processes: 2, " in ends[0][1] + ends[1][1]
        result(ends[0][1] + ends[1][1])
    else:
        kept = [] if "checkpoints/" in command else QUICK
        flags = [*kept, "--image-size", "32", "--checkpoint-dir", tmp_path / "c"]
        result(run([*words, *flags], clone, env=ACTIVE))
        assert (tmp_path / "c").exists() != ("--evaluate" in words)
        if "--predictions" in words:
            assert len((clone / "predictions.csv").read_text().splitlines()) == 1 + 360


@pytest.mark.parametrize("name", [n for n in NAMES if n != "distributed"])
def test_start_names(name, clone, tmp_path):
    """And that what start.sh runs is what the documents say, with their --data."""
    if name == "horovod":
        need_horovod()
    flags = [*SMALL.split(), *QUICK, "--checkpoint-dir", str(tmp_path / "c")]
    output = run(["./start.sh", name, *flags], clone, env=ACTIVE)
    result(output)
    (started,) = re.findall(r"^\+ (.*)", output, re.M)
    assert short(started) == short(STARTED[name])
    known = [short(command) for command in documented()]
    assert short(started) in known and started.endswith(" ".join(flags))


@pytest.mark.slow
def test_first_command(clone, tmp_path):
    """./start.sh, from an empty folder of checkpoints, says what README.md shows, and learns.

    A second one is refused, and its line says what to do.
    """
    folder = tmp_path / "here"
    shutil.copytree(clone, folder, ignore=shutil.ignore_patterns("checkpoints*"))
    env = ACTIVE | {"CUDA_VISIBLE_DEVICES": ""}
    output = run(["./start.sh"], folder, env=env, timeout=300)
    assert result(output)[1] > 95

    def form(line):
        return re.sub(r"\d[\d.e+-]*(cu\d+|cpu)?", "#", line.replace(str(folder), "/home/you/here"))

    said = {form(line) for line in output.splitlines()}
    (sample,) = [block for kind, block in FENCE.findall(read()) if block.startswith("+ ")]
    shown = [form(line) for line in sample.splitlines() if line != "..."]
    assert len(shown) > 6 and [line for line in shown if line not in said] == []
    # Nothing before the first step is left out.
    first = output[: output.index("epoch 0")].splitlines()
    assert [form(line) for line in first] == shown[: len(first)]
    assert short(STARTED["distributed"]) == short(first[0][2:])

    before = {path: path.stat() for path in (folder / "checkpoints").iterdir()}
    lines = run(["./start.sh"], folder, env=env, code=1).splitlines()  # torchrun makes 1 of 2
    said = f"error: {folder}/checkpoints holds a run (checkpoint.pth): "
    said += "go on with --resume auto, or give another --checkpoint-dir"
    assert [line for line in lines if "error: " in line] == [said]
    assert {path: path.stat() for path in (folder / "checkpoints").iterdir()} == before


def test_start_horovod_without_it_says_what_to_do(clone, tmp_path):
    for name in ("bash", "dirname", "env"):
        (tmp_path / name).symlink_to(shutil.which(name))
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {PYTHON} "$@"\n')
    (tmp_path / "python").chmod(0o755)
    bare = ACTIVE | {"PATH": str(tmp_path)}  # a python with torch, and no horovodrun
    output = run(["./start.sh", "horovod"], clone, env=bare, code=2)
    assert output == "error: needs Horovod: run tools/install_horovod.sh\n"


def test_start_runs_the_tests_and_explains_itself(clone):
    output = run(
        ["./start.sh", "test", "-q", "tests/test_diffs.py", "-k", "order"], clone, env=ACTIVE
    )
    assert " passed" in output and "failed" not in output
    for unknown in ("--help", "nonsense"):
        output = run(["./start.sh", unknown], clone, env=ACTIVE, code=2)
        assert "./start.sh NAME [flags]" in output and len(output.splitlines()) < 14


def test_a_script_alone_runs_with_what_may_do_nothing(clone, tmp_path):
    sentence = re.search(r"^At first (.*) may do nothing; (.*) may return `(.*)`", read(), re.M)
    nothing, contexts = (re.findall(r"`(\w+)`", part) for part in sentence.groups()[:2])
    assert len(nothing) > 3 and len(contexts) > 1
    text = read("distributed.py")
    for name in nothing + contexts:
        assert f" {name}(" in text
    stubs = [f"def {name}(*_, **__): return None" for name in nothing]
    stubs += [f"def {name}(*_, **__): return {sentence[3]}" for name in contexts]
    stubs = "\n".join(["import contextlib", *stubs, "\n\ndef main"])
    (clone / "alone.py").write_text(text.replace("def main", stubs, 1))
    command = ["torchrun", "--standalone", "--nproc-per-node=2", "alone.py", *QUICK]
    output = run(["env", *command, "--checkpoint-dir", tmp_path / "c"], clone, env=ACTIVE)
    (clone / "alone.py").unlink()
    result(output)


def test_start_chooses_the_number_of_processes(clone, tmp_path):
    flags = [*QUICK, "--checkpoint-dir", tmp_path / "c"]
    output = run(["./start.sh", "distributed", *flags], clone, env=ACTIVE | {"NGPU": "1"})
    assert "global batch 64 = 1 x 64" in output and "--nproc-per-node=1" in output


# Slurm's runs on a cluster, in test_slurm.py.
EXAMPLES = [e for e in re.findall(r"^#   (\w+=.*?)  ", read("start.sh"), re.M) if "slurm" not in e]


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_of_start(example, clone, tmp_path):
    flags = [*QUICK, "--checkpoint-dir", tmp_path / "c"]
    output = run(["env", *example.split(), *flags], clone, env=ACTIVE)
    assert output.startswith("+ torchrun --standalone --nproc-per-node=2 distributed.py")
    result(output)


def test_start_makes_an_environment_where_there_is_none(clone):
    """Without torch on the PATH it makes .venv, and without pip's index it says so and stops.

    The stand-in for an index proves only that requirements.txt is what gets installed.
    """
    bare = {"PATH": "/usr/local/bin:/usr/bin:/bin", "PIP_NO_INDEX": "1"}
    bare["PIP_CONFIG_FILE"] = os.devnull  # a machine may have packages in a folder of its own
    if subprocess.run(["python3", "-c", "import torch"], env=bare, capture_output=True).returncode:
        output = run(["./start.sh", "distributed", *QUICK], clone, env=bare, code=2)
        assert "Making .venv with torch and torchvision" in output
        assert "No matching distribution found for torch" in output
        shutil.rmtree(clone / ".venv")


def test_what_is_generated_is_as_its_source():
    for path, text in generate.everything().items():
        assert read(path) == text, f"{path}: run tools/generate.py"
    assert {p.name for p in (ROOT / "docs").glob("*.svg")} == generate.draw().keys()


@pytest.mark.parametrize("name", READMES)
def test_generated_blocks_are_there_and_full(name):
    """All are measured but Apex, which needs a GPU and a build of its own."""
    blocks = BLOCK.findall(read(name))
    assert sorted(block for block, _ in blocks) == sorted(generate.blocks())
    empty = [block for block, text in blocks if text.strip() in ("", "-")]
    assert set(empty) <= {"speed apex_distributed"}


def test_measurements_are_of_scripts_that_exist():
    runs = json.loads(read("results/strategies.json"))["runs"]
    scripts = {f"{name}.py" for name in generate.SCRIPTS}
    assert scripts >= {run["script"] for run in runs} >= scripts - {"apex_distributed.py"}
    assert all(run["images_per_second"] > 0 for run in runs)


def skeleton(text):
    """What a translation keeps: levels of headings, items and rows, and where they stand."""
    marks = re.findall(r"^(#+|- |\||!|<!-- generated: .+? -->|```\w*)", prose(text), re.M)
    return marks, [kind for kind, _ in FENCE.findall(text)]


def test_both_readmes_say_the_same():
    english, chinese = map(read, READMES)
    assert commands(english) == commands(chinese)
    assert BLOCK.findall(english) == BLOCK.findall(chinese)
    assert FENCE.findall(english) == FENCE.findall(chinese)
    assert QUOTE.findall(english) == QUOTE.findall(chinese)
    assert skeleton(english) == skeleton(chinese)
    files = [[link.partition("#")[0] for link in LINK.findall(t)] for t in (english, chinese)]
    other = {READMES[0]: READMES[1]}
    assert [other.get(f, f) for f in files[0]] == [other.get(f, f) for f in files[1]]


def anchors(text):
    """The names that GitHub gives to headings."""
    heads = re.findall(r"^#+ (.*)$", prose(text), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("name", READMES)
def test_links_resolve(name):
    links = LINK.findall(read(name))
    assert len(links) > 60
    for link in links:
        path, _, anchor = link.partition("#")
        if link.startswith("https://"):
            continue
        assert not path or (ROOT / path).exists(), link
        assert not anchor or anchor in anchors(read(path or name)), link


@pytest.mark.parametrize("name", READMES)
def test_answers_quote_a_line_of_ours(name):
    """Each question's answer names the line that deals with it, and it stands there."""
    answers = re.findall(r"^- \*\*.*$", read(name), re.M)
    asked = [line for line in answers if QUOTE.search(line)]
    assert len(asked) >= 30
    first, last = answers.index(asked[0]), answers.index(asked[-1])
    assert asked == answers[first : last + 1]
    for label, path, code in QUOTE.findall(read(name)):
        assert label == path and code in read(path), f"{path} has no {code}"


def test_numbers_of_the_evaluation():
    """Ten images, two of them wrong, on three processes, as README.md and the figure have them."""
    text, right = read(), [i > 1 for i in range(10)]
    padded = [DistributedSampler(range(10), 3, r, shuffle=False) for r in range(3)]
    hits = [right[i] for sampler in padded for i in sampler]
    assert f"{sum(hits)} of {len(hits)}: {100 * sum(hits) / len(hits):.1f} %" in text
    shares = [[right[i] for i in range(r, 10, 3)] for r in range(3)]
    assert (
        ", ".join(f"{sum(s)} of {len(s)}" for s in shares).replace(", 3 of 3", " and 3 of 3")
        in text
    )
    assert (
        f"The mean of the three is {sum(100 * sum(s) / len(s) for s in shares) / 3:.1f} %" in text
    )
    assert sum(map(sum, shares)) / sum(map(len, shares)) == 0.8
    padding = {w: len(DistributedSampler(range(50000), w, 0)) * w - 50000 for w in range(1, 65)}
    assert all(padding[w] == 0 for w in (2, 4, 8, 16)) and (padding[6], padding[64]) == (4, 48)
    assert "on 6 it adds 4, on 64 it adds 48" in text


def test_numbers_of_the_communication():
    with torch.device("meta"):
        net = resnet50()
    weights = sum(p.numel() for p in net.parameters())
    sent = {w: 2 * (w - 1) / w * weights * 4 for w in (8, 64)}
    text = read()
    assert f"{weights / 1e6:.1f} million parameters, {weights * 4e-6:.0f} MB" in text
    assert f"ring of 8 each process sends {sent[8] / 1e6:.0f} MB" in text
    assert f"one of 64 {sent[64] / 1e6:.0f} MB" in text
    assert f"{sent[64] * 8 / 100e9 * 1e3:.0f} ms at 100 Gbit/s" in text
    assert f"{round(sent[64] * 8 / 10e9 * 1e3, -1):.0f} ms at 10 Gbit/s" in text
    assert f"= {2 * 7 * weights * 4e-6:.0f} MB" in text
    saved = 2 * weights * 4 + sum(b.numel() * b.element_size() for b in net.buffers())
    assert f"rank 0 writes {saved / 1e6:.0f} MB" in text
    drawn = read("docs/traffic.svg")
    assert all(f">{2 * (w - 1) * weights * 4e-6:.0f}<" in drawn for w in (2, 4, 8, 16))
