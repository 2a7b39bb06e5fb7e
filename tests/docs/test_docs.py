"""Every command of README.md, docs/, the docstrings and start.sh runs, in its form for a machine
without GPUs; what is generated is as its source; links and names of functions hold.
"""

import io
import json
import os
import platform
import re
import runpy
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet
import pytest
import torch
from conftest import PYTHON, ROOT, Job, last_result, needs_horovod, run, soak
from PIL import Image
from torch.distributed.run import get_args_parser
from torchvision.datasets import imagenet
from torchvision.models import resnet18

from common.images import image_folders
from tests.cluster import test_slurm
from tests.docs.copies import USER, cached_weights, commands_of, joined
from tests.docs.ranks import good
from tests.ports import free_port
from tests.unit.test_archives import pack
from tools import generate

DOCUMENTS = generate.DOCUMENTS
ENGLISH = [name for name in DOCUMENTS if "zh-CN" not in name]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
BLOCK = re.compile(r"<!-- generated: (.+?) -->(.*?)<!-- end -->", re.S)
DIFF = re.compile(r"\]\(([^)\s]+\.diff)\)")
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"\]\(([^)\s]+)\)")
# An answer ends with where it is: [file](file): `function`, or a full-width colon.
PLACE = re.compile(r"\[([^\]]+)\]\(([^)#]+)\)(?:: |\uff1a)`([^`]+)`$", re.M)
STARTS = ("python ", "torchrun ", "horovodrun ", "srun ", "sbatch ", "./start.sh", "diff ")
STARTS += ("tools/", "tests/")


def read(name="README.md"):
    return (ROOT / name).read_text(encoding="utf-8")


def commands(text):
    """Each line of a block of commands and each `command` of the text, in their order."""
    found = []
    for match in re.finditer(f"{FENCE.pattern}|{CODE.pattern}", text, re.M | re.S):
        kind, block, code = match.groups()
        if kind == "sh":
            found += joined(block).splitlines()
        elif code and code.startswith(STARTS) and " " in code.removeprefix("tests/"):
            found.append(code)
    return [" ".join(line.split()) for line in found]


def in_docstrings(*folders):
    paths = [path for folder in folders for path in (ROOT / folder).glob("*.py")]
    return [command for path in paths for command in commands_of(path.read_text())]


# Those of docs/recipes.md make scripts, and are run block by block: here, or, those that make a
# minimal one, in test_recipes_minimal.py.
BLOCKS = [joined(b) for kind, b in FENCE.findall(read("docs/recipes.md")) if kind == "sh"]
RECIPES = [block for block in BLOCKS if "compose.py torchrun" not in block]
DOCUMENTED = [c for name in ENGLISH if name != "docs/recipes.md" for c in commands(read(name))]
DOCUMENTED += in_docstrings(".", "docs", "tools", "benchmarks", "minimal", "minimal/libraries")
DOCUMENTED = list(dict.fromkeys(DOCUMENTED))
# What start.sh runs, by its name there. Slurm's is run on a cluster.
STARTED = {
    "dataparallel": "python dataparallel.py",
    "distributed": "torchrun --standalone --nproc-per-node=4 distributed.py",
    "launch": "python -m torch.distributed.launch --nproc_per_node=4 distributed.py",
    "multiprocessing": "python multiprocessing_distributed.py",
    "apex": "torchrun --standalone --nproc-per-node=4 apex_distributed.py",
    "horovod": "horovodrun -np 4 python horovod_distributed.py",
    "fsdp": "torchrun --standalone --nproc-per-node=4 fsdp_distributed.py",
}
DATA = "--data /path/to/imagenet"
# A script and its flags, behind a launcher that test_start runs.
LAUNCHER = r"(?:torchrun --standalone --nproc-per-node=\d|\./start\.sh|python)"
SCRIPT = rf"{LAUNCHER} (?!compose|doctor|predict)(\w+)(?:\.py)? (?!{DATA}$)(--.*)"
NODE = r"torchrun --nnodes=2 --node-rank=[01] .*"
SCRIPTS = "|".join(generate.SCRIPTS)
GENERATORS = r"python tools/(figures|generate)\.py"


def any_of(known):
    return "|".join(map(re.escape, known))


# Every command is one of these; the test that runs it.
TESTED = {
    f"({any_of(STARTED.values())})( {DATA})?": "docs/test_docs.py::test_start",
    SCRIPT: "docs/test_docs.py::test_flags_of_a_script",
    NODE: "docs/test_docs.py::test_two_nodes",
    r"python doctor (?!--attach|--dumps).*": "docs/test_doctor.py::test_the_example_of_the_page",
    r"python doctor --by \"bash .*": "docs/test_doctor_starts.py::test_a_shell_script_that_starts",
    r"python doctor --by \"acc.*": "docs/test_doctor_starts.py::test_accelerate_launch",
    r"python doctor train\.ipynb": "docs/test_doctor_starts.py::test_a_notebook_by_its_cells",
    r"python doctor -m .*": "docs/test_doctor_ends.py::test_a_script_that_starts_its_processes",
    r"python doctor --format .*": "docs/test_doctor_ci.py::test_the_action_shows_a_mistake",
    r"python doctor --attach --slurm JOB": "cluster/test_slurm.py::test_a_job_that_hangs",
    r"python doctor --attach(?! --slurm).*": "docs/test_attach.py::test_the_commands_of_the_page",
    r"python doctor --dumps DIR": "unit/test_recorder.py::test_the_command",
    r"python tests/docs/mutant_runs\.py FOLDER": "docs/test_doctor_mutants.py::test_the_command",
    r"python doctor\.py": "docs/test_doctor_ends.py::test_the_old_name",
    GENERATORS: "docs/test_docs.py::test_generators_change_nothing",
    rf"diff ({SCRIPTS})\.py ({SCRIPTS})\.py": "docs/test_diffs.py::test_scripts_differ",
    r"grep -o .*data_time.*": "docs/test_docs.py::test_how_long_a_run_waited_for_images",
    r"diff minimal/one_gpu\.py minimal/libraries/\w+\.py": "docs/test_diffs.py::test_libraries",
    r"\./start\.sh": "docs/test_docs.py::test_first_command",
    r"\./start\.sh NAME \[flags\]": "docs/test_docs.py::test_start",
    r"\./start\.sh test( .*)?": "docs/test_docs.py::test_start_runs_the_tests",
    r"python plot\.py .*": "docs/test_docs.py::test_plot",
    r"python predict\.py --.*": "unit/test_predict.py::test_the_commands_of_the_page",
    r"(torchrun .* predict|python predict)\.py .*net\.json.*": "run/test_box.py::test_it_measures",
    r"python -m benchmarks\.predict": "run/test_box.py::test_predictions_hold",
    r"python -m pip install matplotlib": "unit/test_plot.py::test_without_matplotlib",
    r"python -m pip install py-spy": "docs/test_attach.py::test_without_py_spy",
    r"python docs/unpack_imagenet\.py": "docs/test_docs.py::test_the_archives_are_unpacked",
    r"python docs/class_folders\.py": "docs/test_docs.py::test_other_layouts_become_class_folders",
    r"python docs/use_weights\.py": "docs/test_docs.py::test_weights_are_used_elsewhere",
    r"torchrun .* train\.py && mv .*": "docs/test_losses.py::test_the_commands_that_show_it",
    r"python docs/compare_weights\.py .*": "docs/test_losses.py::test_the_commands_that_show_it",
    r".* minimal/(segmentation|gan)\.py": "docs/test_tasks.py::test_the_command_learns",
    any_of(in_docstrings("minimal")): "docs/test_minimal.py::test_trains_and_saves",
    r"torchrun .* minimal/transformer\.py": "docs/test_transformer.py::test_learns",
    r"torchrun .* minimal/pretrained\.py": "docs/test_pretrained.py::test_trains_as_one_process",
    r"torchrun .* minimal/(tensor_p\w+|pipeline)\.py": "docs/test_beyond.py::test_trains_as_one_",
    r"torchrun .* minimal/stream\.py": "docs/test_stream.py::test_trains_as_one_process",
    r"patch minimal/transformer\.py .*": "docs/test_transformer.py::test_other_strategies",
    r"python -m torch\.distributed\.checkpoint\..*": "docs/test_transformer.py::test_learns",
    any_of(in_docstrings("minimal/libraries")): "docs/test_libraries.py::test_trains",
    any_of(test_slurm.COMMANDS): "cluster/test_slurm.py::test_command_of_the_documents",
    r"sbatch .*": "cluster/test_slurm.py::test_the_job_file",
    r"tests/cluster/slurm/cluster\.sh start": "docs/test_minimal.py::slurm",
    r"TORCH_\w+=1 torchrun .* --max-restarts=3 .*": "run/test_resume.py::test_torchrun_",
    r"TORCH_\w+=1 torchrun --nnodes=2:4 .*": "cluster/test_elastic.py::command",
    r"tools/install_horovod\.sh": "cluster/test_horovod.py::test_install",
    r"python compose\.py .*": "docs/test_compose.py::test_the_command",
    r"torchrun .* -- gan\.py .*": "docs/test_docs.py::test_flags_that_torchrun_would_take",
    r"python -m benchmarks\.(communication|loader|scale|shards|step|strategies).*": (
        "run/test_benchmark.py::command"
    ),
    r"python -m benchmarks\.(batches|facts|gpu_hour).*": "run/test_gpu_hour.py::test_all_parts",
    r"python tools/record\.py": "docs/test_record.py::test_the_recording",
    r"python tools/versions\.py .*": "docs/test_docs.py::test_versions_of_torch",
    r"pip install torch scikit-learn": "docs/test_minimal.py::test_needs_torch_and_scikit_learn",
    r"python tools/picture\.py": "docs/test_page.py::test_the_pictures_of_the_readmes",
}


def matching(pattern):
    return [command for command in DOCUMENTED if re.fullmatch(pattern, command)]


def test_every_command_is_run_by_a_test():
    assert {command for pattern in TESTED for command in matching(pattern)} == {*DOCUMENTED}
    for pattern, test in TESTED.items():
        file, _, name = test.partition("::")
        assert matching(pattern) and f"def {name}" in read(f"tests/{file}"), test


def test_what_restarts_has_a_store_of_its_own():
    """Else torch's store outlives a restart, and most restarts fail."""
    for name in DOCUMENTS:
        for line in re.findall(r"^.*torchrun .*--max-restarts=[1-9].*$", joined(read(name)), re.M):
            assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun" in line, (name, line)


# ---- Commands


@pytest.fixture(scope="module")
def clone(work, tmp_path_factory):
    """A copy of the project, with the digits already written."""
    folder = tmp_path_factory.mktemp("clone") / "here"
    left = shutil.ignore_patterns(".git", ".venv", "__pycache__", "checkpoints*", "data")
    shutil.copytree(ROOT, folder, ignore=left)
    shutil.copytree(work / "data", folder / "data")
    for part in ("train", "val"):
        shutil.copytree(work / "data/digits/val", folder / "data/small" / part)
    cached_weights(folder / "data/torch")
    return folder


# With a double of Apex, which needs a GPU.
ACTIVE = USER | {"PYTHONPATH": str(ROOT / "tests/apex_doubles/today")}
QUICK = "--max-steps 1 --image-size 32 -b 64 -j 1".split()
PLAIN = [*QUICK, "-a", "tests.nets:plain"]


def result(output):
    return last_result(output.replace("[0]<stdout>:", ""))  # horovodrun's


@pytest.fixture(scope="module")
def generated():
    return generate.everything()


@pytest.fixture(scope="module")
def trained(clone):
    """The folder of checkpoints that a user has, who has run what comes first."""
    good(clone / "distributed.py", *QUICK)
    return clone / "checkpoints"


@pytest.mark.full
def test_first_command(clone, tmp_path):
    """It learns the digits and says what docs/faq.md shows. A second: run/test_screen.py."""
    folder = tmp_path / "here"
    shutil.copytree(clone, folder, ignore=shutil.ignore_patterns("checkpoints*"))
    output = run(["./start.sh"], folder, env=ACTIVE, timeout=1000)
    assert result(output)[1] >= 97

    def form(line):
        line = line.replace(str(folder), "/home/you/here")
        line = re.sub(r"\d[\d.e+-]*(cu\d+|cpu)?( min\b| s\b)?", "#", line)
        return re.sub("  (new best|best #)", "", line)  # which epoch is best may be the machine's

    (sample,) = re.findall(r"^```text\n(\+ .*?)^```", read("docs/faq.md"), re.M | re.S)
    shown = {form(line) for line in sample.splitlines()} - {"..."}
    assert shown and shown - {form(line) for line in output.splitlines()} == set()


@pytest.mark.parametrize("command", matching(r"python plot\.py .*"))
def test_plot(command, tmp_path):
    row = {"epoch": 1, "step": 0, "train_loss": 2.5, "acc1": 50.0}
    for name in ("checkpoints", "checkpoints-2", "other/checkpoints"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(row))
    said = run([PYTHON, ROOT / "plot.py", *command.split()[2:]], tmp_path)
    assert "acc1" in said or (tmp_path / "curves.svg").exists()


def small(command, folder, *more, data="data/small"):
    """What a script says, behind a launcher that test_start runs; more: flags of a small model."""
    script, flags = re.fullmatch(rf"{LAUNCHER} (\w+)(?:\.py)? ?(.*)", command).groups()
    words = shlex.split(re.sub("/path/to/[a-z]+", str(data), flags))
    env = {"TORCH_HOME": folder / "data/torch"}
    return good(folder / f"{script}.py", *words, *more, env=env)


@pytest.mark.full
@pytest.mark.parametrize("command", matching(SCRIPT))
def test_flags_of_a_script(command, clone, trained, tmp_path):
    more = ["--checkpoint-dir", tmp_path / "c"]
    if "checkpoints/" not in command:  # else the model is that of the checkpoint
        more += [*QUICK, "-a", "resnet18"] if "--data" in command else PLAIN
    data = "data/small"
    if "--evaluate" in command and "--pretrained" in command:  # of ImageNet's 1000 classes
        data, image = tmp_path / "data", next((clone / "data/small/val").rglob("*.*"))
        for number in range(1000):
            (data / f"val/{number}").mkdir(parents=True)
            shutil.copy(image, data / f"val/{number}")
    if "--pretrained weights.pth" in command:
        torch.save(resnet18().state_dict(), clone / "weights.pth")
    result(small(command, clone, *more, data=data))
    assert (tmp_path / "c").exists() != ("--evaluate" in command)


@pytest.mark.full
@pytest.mark.parametrize("block", RECIPES)
def test_block_of_recipes(block, clone, tmp_path):
    """Its lines one after another, on a fresh copy of the script."""
    for name in ("distributed.py", "fsdp_distributed.py", "compose.py"):
        shutil.copy(clone / name, tmp_path)
    for name in ("common", "longrun", "recipes", "data", "docs", "minimal"):
        (tmp_path / name).symlink_to(clone / name)
    if "checkpoints/" in block:
        arch = ["-a", "resnet18"] if "-a resnet18" in block else PLAIN
        small("python distributed.py", tmp_path, *QUICK, *arch)
    for line in block.splitlines():
        if line.startswith(("patch ", "sed ", "python compose.py ")):
            run(["sh", "-c", line], tmp_path, env=ACTIVE)
        else:
            said = small(line, tmp_path, *([] if "--evaluate" in line else QUICK))
            assert re.search(r"^(?: \*|epoch \S+ step \d+)  ?loss ", said, re.M), said
    if "accumulate" in block:
        assert "--accumulate" in (tmp_path / "mine.py").read_text()


@pytest.mark.full
def test_how_long_a_run_waited_for_images(clone, trained):
    """One figure for each epoch, below 1."""
    (command,) = matching("grep .*data_time.*")
    command = command.replace("checkpoints-try", trained.name)
    (figure,) = re.findall(r'^"data_time": (0\.\d+)$', run(["sh", "-c", command], clone), re.M)
    assert 0 < float(figure) < 1


EXAMPLES = [e for e in re.findall(r"^#   (\w+=.*?)  ", read("start.sh"), re.M) if "slurm" not in e]


# Stands for a program: it says how it was called. What start.sh asks of its Python it answers.
STUB = """#!/bin/sh
[ "$1" = -c ] && echo 0 || echo "called: ${0##*/} $*"
"""


@pytest.mark.parametrize("name", STARTED)
def test_what_start_calls(name, tmp_path):
    """What the documents say. That its strategy then trains, run/test_training.py shows."""
    for program in ("python", "torchrun", "horovodrun"):
        (tmp_path / program).write_text(STUB)
        (tmp_path / program).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "NGPU": "4"}
    output = run(["./start.sh", name, "--epochs", 2], ROOT, env=env)
    command = f"{STARTED[name]}{' --nprocs=4' if name == 'multiprocessing' else ''} --epochs 2"
    assert f"+ {command}\n" in output and f"called: {command}\n" in output


# The others, in all, by hand: what start.sh calls is seen above, and it trains in test_training.py.
TRAINED = ["./start.sh launch"]


@pytest.mark.full
@pytest.mark.parametrize(
    "line",
    [
        line if line in TRAINED else soak(line)
        for line in [*(f"./start.sh {n}" for n in STARTED if n != "distributed"), *EXAMPLES]
    ],
)
def test_start(line, clone, tmp_path):
    """What start.sh runs is what the documents say; two processes are the default."""
    assert {"distributed"} <= {example.split()[-1] for example in EXAMPLES if "NGPU" not in example}
    name = line.split()[-1]
    if name == "horovod":
        needs_horovod()
    flags = ["--data", "data/small", *PLAIN, "--checkpoint-dir", tmp_path / "c"]
    alone = "NGPU" in line or name not in ("distributed", "multiprocessing", "horovod")
    words = ["env", *["NGPU=1"] * alone, *line.replace("NGPU=2", "NGPU=1").split(), *flags]
    output = run(words, clone, env=ACTIVE)
    result(output)
    processes = 1 if alone else 2
    assert f"global batch 64 = {processes} x" in output
    assert f"+ {STARTED[name].replace('4', str(processes))} " in output


def test_start_horovod_without_it_says_what_to_do(clone, tmp_path):
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {PYTHON} "$@"\n')
    (tmp_path / "python").chmod(0o755)
    bare = {"PATH": f"{tmp_path}:/usr/bin:/bin"}  # a python with torch, and no horovodrun
    output = run(["./start.sh", "horovod"], clone, env=bare, code=2)
    assert output == "error: needs Horovod: run tools/install_horovod.sh\n"


def test_commands_of_the_tests_name_files():
    for command in matching(r"\./start\.sh test .*"):
        assert all((ROOT / path).exists() for path in re.findall(r"tests/\S+", command)), command


@pytest.mark.soak  # so does CI, with all tests
def test_start_runs_the_tests(clone):
    words = "-n 1 -q tests/docs/test_diffs.py -k lint".split()
    output = run(["./start.sh", "test", *words], clone, env=ACTIVE, timeout=600)
    assert " passed" in output and "failed" not in output


def test_flags_that_torchrun_would_take(capsys, monkeypatch):
    (command,) = matching(r"torchrun .* -- .*")
    words = command.split()[1:]
    assert get_args_parser().parse_args(words).training_script_args == ["--n", "640"]
    words.remove("--")
    with pytest.raises(SystemExit):
        get_args_parser().parse_args(words)
    (said,) = re.findall(r"`torchrun: error: (.*?)`", read("docs/faq.md"))
    assert said in capsys.readouterr().err

    monkeypatch.setenv("PET_NNODES", "2")  # as Kubeflow sets it
    assert get_args_parser().parse_args(["distributed.py"]).nnodes == "2"


@pytest.mark.full
def test_two_nodes(clone, tmp_path):
    """The two lines are one run."""
    port = str(free_port())
    nodes = []
    for command in matching(NODE):
        line = command.replace("HOST", "localhost").replace("node=4", "node=1")
        words = line.replace(DATA, "--data data/small").split()
        words = ["env", *words, *PLAIN, "--checkpoint-dir", tmp_path / "c"]
        nodes.append(Job(words, clone, ACTIVE | {"PET_MASTER_PORT": port}))
    output = "".join(node.finish() for node in nodes)
    assert "distributed.py: processes: 2, " in output
    result(output)


@pytest.mark.full
def test_generators_change_nothing(clone, generated):
    """Where all is as its sources."""
    for command in matching(GENERATORS):
        run(["env", *command.split()], clone, env=ACTIVE)
    assert {path: (clone / path).read_text() for path in generated} == generated


@pytest.mark.soak  # a tool of those who keep the project
def test_versions_of_torch(clone, tmp_path):
    """The tool itself, in this environment; that pip installs others is not tried here."""
    version, python = torch.__version__.partition("+")[0], platform.python_version()
    for name in (version, f"{python.rpartition('.')[0]}-{version}"):
        (tmp_path / name).symlink_to(Path(PYTHON).parent.parent)
    tool = clone / "tools/versions.py"
    quick = '{"unit": ["tests/unit/test_metrics.py"], "full": [], "minimal": ["none.py"]}'
    text = re.sub(r"TESTS = \{.*?^\}", f"TESTS = {quick}", tool.read_text(), flags=re.M | re.S)
    tool.write_text(text)
    (clone / "results/versions.json").unlink(missing_ok=True)
    asked = [name.replace("-", "/") for name in os.listdir(tmp_path)]  # the same in two ways
    run([PYTHON, tool, "--environments", tmp_path, *asked], clone, env=ACTIVE)
    (row,) = json.loads((clone / "results/versions.json").read_text())["runs"]
    assert row["torch"] in torch.__version__ and re.fullmatch(r"\d+ passed", row["unit"])
    assert row["minimal"] == "none ran" and row["python"] == python


def test_the_archives_are_unpacked(tmp_path, monkeypatch):
    """Small ones of one class; what torchvision reads from the devkit is there already."""
    source = read("docs/unpack_imagenet.py")
    (tmp_path / "unpack.py").write_text(source.replace("/path/to/imagenet", str(tmp_path)))
    torch.save(({"n01": ("tench",)}, ["n01"]), tmp_path / "meta.bin")
    names = {part: name for part, (name, _) in imagenet.ARCHIVE_META.items()}
    pack(tmp_path / "n01.tar", {"a.JPEG": b""})
    pack(tmp_path / names["train"], {"n01.tar": (tmp_path / "n01.tar").read_bytes()})
    pack(tmp_path / names["val"], {"b.JPEG": b""})
    unchecked = {part: (name, None) for part, name in names.items()}
    monkeypatch.setattr(imagenet, "ARCHIVE_META", unchecked)  # the sums are of the large ones
    runpy.run_path(tmp_path / "unpack.py")
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*/*.JPEG")}
    assert found == {"train/n01/a.JPEG", "val/n01/b.JPEG"}


def test_other_layouts_become_class_folders(tmp_path, monkeypatch):
    """Of two classes with an image each, as --data takes them."""
    monkeypatch.chdir(tmp_path)
    layouts = SimpleNamespace(**runpy.run_path(ROOT / "docs/class_folders.py"))
    image = io.BytesIO()
    Image.new("RGB", (8, 8)).save(image, "JPEG")
    kaggle, tiny, boxes = "k/ILSVRC/Data/CLS-LOC", "tiny-imagenet-200", "\t0\t0\t7\t7\n"
    texts = {
        "k/LOC_val_solution.csv": "ImageId,PredictionString\nv0,n0 1 2 3 4 n0 5 5 9 9\nv1,n1 1 2 3",
        f"{tiny}/val/val_annotations.txt": f"v0.JPEG\tn0{boxes}v1.JPEG\tn1{boxes}",
        "table.csv": "\ufefffile,label\nv0.JPEG,n0\nv1.JPEG,n1\n",
    }
    images = [f"{kaggle}/train/n0/a.JPEG", f"{kaggle}/train/n1/b.JPEG"]
    images += [f"{tiny}/train/n0/images/a.JPEG", f"{tiny}/train/n1/images/b.JPEG"]
    for folder in (f"{kaggle}/val", f"{tiny}/val/images"):
        images += [f"{folder}/v0.JPEG", f"{folder}/v1.JPEG"]
    contents = texts | dict.fromkeys(images, image.getvalue())
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content if name in images else content.encode())

    layouts.kaggle("k", "data/kaggle")
    runpy.run_path(ROOT / "docs/class_folders.py", run_name="__main__")  # Tiny ImageNet
    rows = [{"image": {"bytes": image.getvalue()}, "label": label} for label in (9, 10)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), "val-0.parquet")
    for part in ("train", "val"):
        layouts.labels_in_a_csv("table.csv", f"{kaggle}/val", f"data/csv/{part}")
        layouts.parquet(["val-0.parquet"], f"data/parquet/{part}")
    for name in ("kaggle", "tiny", "csv", "parquet"):
        for dataset in image_folders(f"data/{name}", 8):
            assert [target for _, target in dataset] == [0, 1], name
            assert dataset.classes == (["0009", "0010"] if name == "parquet" else ["n0", "n1"])


@pytest.mark.full
def test_weights_are_used_elsewhere(clone, trained, tmp_path):
    """With the model and the classes of what was trained here."""
    source = read("docs/use_weights.py").replace("resnet50", "resnet18").replace("1000", "10")
    (tmp_path / "use.py").write_text(source)
    run([PYTHON, tmp_path / "use.py"], clone)
    net = resnet18(num_classes=10).eval()
    best = torch.load(trained / "model_best.pth", weights_only=True)
    net.load_state_dict(best["state_dict"])
    program = torch.export.load(clone / "resnet18.pt2").module()
    for count in (1, 5):
        images = torch.rand(count, 3, 224, 224)
        with torch.no_grad():
            torch.testing.assert_close(program(images), net(images))


# ---- Texts


def test_what_is_generated_is_as_its_source(generated):
    """So is every block of code. What is not code is a command, or what a command printed."""
    for path, text in generated.items():
        assert read(path) == text, f"{path}: run tools/generate.py"
    there = [*ROOT.glob("docs/*.svg"), *ROOT.glob("diffs/**/*.diff")]
    assert {str(path.relative_to(ROOT)) for path in there} <= generated.keys()
    texts = [read(name) for name in ENGLISH]
    assert {name for text in texts for name, _ in BLOCK.findall(text)} == generate.blocks().keys()
    others = [FENCE.findall(BLOCK.sub("", text)) for text in texts]
    kinds = {"sh", "text", "yaml"}  # yaml: see test_doctor_ci.py
    assert {kind for blocks in others for kind, _ in blocks} == kinds


def bare(code):
    """Without what a line of code loses or gets where it is broken into parts."""
    return re.sub(r"[\s()]", "", code).replace('"f"', "")


def test_the_lesson_is_the_whole_difference():
    """All lines of `diff` are in a step, none twice; how many are added is what README.md says.

    They are narrow: comments stand above their lines, and what is long is in parts.
    """
    lines = generate.diff("minimal/one_gpu", "minimal/distributed", "-U0")[2:]
    changed = [line for line in lines if line[0] in "+-" and line not in "+-"]
    changed = changed[4:]  # without the two lines of the docstrings
    steps = [text for name, text in BLOCK.findall(read()) if name.startswith("lesson ")]
    shown = [line for text in steps for line in FENCE.findall(text)[0][1].splitlines()]
    assert max(map(len, shown)) <= 60
    for sign in "+-":
        here = [line[1:] for line in shown if line[0] == sign]
        code = bare("".join(line for line in here if not line.strip().startswith("#")))
        comments = " ".join(line.strip()[2:] for line in here if line.strip().startswith("#"))
        for line in [line[1:] for line in changed if line[0] == sign]:
            text, _, comment = line.partition("  # ")
            if text.lstrip().startswith("print("):  # only moved: print(...)
                text = "print(...)"
            assert bare(text) in code and comment in comments
            code, comments = code.replace(bare(text), "", 1), comments.replace(comment, "", 1)
        assert not code and not comments.strip()
    added = sum(line[0] == "+" for line in changed)
    assert f"{added}<!-- end --> lines that take a loop" in read()


@pytest.mark.parametrize("name", ENGLISH)
def test_both_languages_have_the_same_commands_and_code(name):
    english, chinese = read(name), read(name.replace(".md", ".zh-CN.md"))
    for same in (commands, BLOCK.findall, FENCE.findall, PLACE.findall, DIFF.findall):
        assert same(english) == same(chinese)


def test_each_feature_has_a_section_of_one_form():
    """What it does, its minimal and its full form with their diffs, and what goes wrong."""
    page = read("docs/recipes.md")
    sections = dict(section.split("\n", 1) for section in page.split("\n## ")[1:])
    forms = {"Minimal": ("minimal/", "torchrun"), "Full": ("", "distributed.py")}
    recipes = {
        kind: {path.stem for path in (ROOT / folder / "recipes").glob("*.diff")}
        for kind, (folder, _) in forms.items()
    }
    assert sections.keys() == recipes["Minimal"] | recipes["Full"]
    assert [*sections] == re.findall(r"\[(\w+)\]\(#\1\)", page.split("\n## ")[0])
    for name, text in sections.items():
        assert re.search(r"^\S.*\n\n- Minimal: .*\n- Full: ", text.strip(), re.M), name
        assert text.count("**What goes wrong.** ") == 1, name
        for kind, (folder, start) in forms.items():
            (line,) = re.findall(rf"^- {kind}: (.*)$", text, re.M)
            diff = f"([diff](../{folder}recipes/{name}.diff))"
            form = f"`python compose.py {start} --with {name}` {diff}"
            assert line.startswith(form) == (name in recipes[kind]) and form.count(diff) == 1
            assert (diff in line) == (name in recipes[kind])


def test_answers_link_to_functions_that_exist():
    places = PLACE.findall(read("docs/faq.md"))
    assert places
    for label, path, name in places:
        target = ROOT / "docs" / path
        assert target == ROOT / "docs" / ".." / label, path
        if target.suffix == ".py":
            for part in name.split("."):  # Class.method
                assert re.search(rf"^ *(def|class) {part}\b", target.read_text(), re.M), name


def anchors(text):
    """The names that GitHub gives to headings."""
    heads = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_no_line_begins_with_a_comment():
    """What follows it in the line would be shown as it is typed, its backticks too."""
    for name in DOCUMENTS:
        assert not re.findall(r"^[-*>\d. ]*<!--.*?-->.*\S", FENCE.sub("", read(name)), re.M), name


def test_links_resolve_and_reach_every_document():
    shown = set()
    for name in DOCUMENTS:
        for link in LINK.findall(read(name)):
            path, _, anchor = link.partition("#")
            if link.startswith("https://"):
                continue
            if path.endswith(".svg") and "recording" not in path:  # it has labels
                assert (".zh-CN." in path) == (".zh-CN." in name), link
            target = (ROOT / name).parent / path if path else ROOT / name
            assert target.exists(), link
            assert not anchor or anchor in anchors(target.read_text()), link
            shown.add(target.resolve())
    assert {ROOT / name for name in DOCUMENTS[1:]} | {*(ROOT / "docs").glob("*.svg")} <= shown
