"""What a reader meets: scripts that differ only where the strategy does, and diffs that fit."""

import ast
import difflib
import re
import subprocess

import pytest
from conftest import ROOT

from tools import generate

SCRIPTS, OTHERS = generate.SCRIPTS, generate.OTHERS
MODULES = {path.stem: path for path in (ROOT / "common").glob("*.py") if path.stem != "__init__"}
# What a script has and distributed.py has not, and the other way round.
FLAGS = {
    "dataparallel": (set(), {"--sync-bn", "--backend"}),
    "multiprocessing_distributed": ({"--nprocs"}, set()),
    "distributed_slurm_main": ({"--nprocs", "--dist-file"}, set()),
    "apex_distributed": ({"--opt-level"}, set()),
    "horovod_distributed": ({"--fp16-allreduce"}, {"--sync-bn", "--backend"}),
    "fsdp_distributed": (set(), set()),
}
# The functions that may differ besides main and parse_args, and those that are new. All others are
# the same to the letter, comments included.
DIFFERING = {
    "dataparallel": {"train", "validate"},
    "multiprocessing_distributed": {"spawn"},
    "distributed_slurm_main": {"launch"},
    "apex_distributed": {"train"},
    "horovod_distributed": {"train", "validate", "reduce_mean", "contiguous_view"},
    "fsdp_distributed": {"train", "validate"},
}
# What a changed block has that is about the strategy: what starts, meets, sends or wraps.
STRATEGY = {
    "dataparallel": r"\bdist\.|DataParallel|environ|device_count|meet_all_ranks|reduce_mean"
    r"|val_batches, model",
    "multiprocessing_distributed": r"environ|FileStore|mp\.spawn",
    "distributed_slurm_main": r"environ|open_store|mp\.spawn",
    "apex_distributed": r"\bamp\b",
    "horovod_distributed": r"\bhvd\.|\bdist\.|meet_all_ranks|synchronize|channels_last",
    "fsdp_distributed": r"fully_shard|\bmesh\b|\bshards\b|model\.buffers|val_batches, model"
    r"|device\('cpu'\)|force_eager|longest",
}
WRITTEN = [(f, path) for f in generate.WRITTEN for path in sorted((ROOT / f).glob("*.diff"))]


def text_of(name):
    return (ROOT / f"{name}.py").read_text()


def functions(name):
    """{name: its lines, comments included}"""
    text = text_of(name)
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.get_source_segment(text, node) for node in nodes}


def flags(name):
    return set(re.findall(r'add\([^)]*?"(--[\w-]+)"', text_of(name)))


def imported(path):
    """The full names of the modules that a file imports anywhere."""
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    names = {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            names.add(f"common.{node.module}" if node.level else node.module)
    return names


def test_scripts_and_common_import_nothing_else_of_ours():
    """No script imports another, and common/ no script, nor what a single strategy needs."""
    used = set()
    for name in SCRIPTS:
        used |= imported(ROOT / f"{name}.py")
        assert not imported(ROOT / f"{name}.py") & set(SCRIPTS), name
    for path in MODULES.values():
        found = imported(path)
        used |= found
        firsts = {name.partition(".")[0] for name in found}
        assert not firsts & {*SCRIPTS, "horovod", "apex"}, path
    assert {name[7:] for name in used if name.startswith("common.")} == MODULES.keys()
    assert (ROOT / "common/__init__.py").read_text() == ""


def test_common_reads_no_rank():
    """Who a process is is read in the scripts. A module gets it, or the environment, or its names.

    rendezvous checks what torchrun has set; only distributed_slurm_main.py uses what knows Slurm.
    """
    for module, path in MODULES.items():
        text = path.read_text()
        assert module == "rendezvous" or not re.search("RANK|WORLD_SIZE|HOROVOD_", text), path
        assert ("SLURM_" in text) == (module == "slurm"), path
    users = [name for name in SCRIPTS if "common.slurm" in imported(ROOT / f"{name}.py")]
    assert users == ["distributed_slurm_main"]
    assert not re.search(r"\benviron\b|getenv|\bos\.env", MODULES["slurm"].read_text())


@pytest.mark.parametrize("name", OTHERS)
def test_scripts_differ_only_where_the_strategy_is(name):
    base, other = functions("distributed"), functions(name)
    differing = {f for f in base.keys() | other.keys() if base.get(f) != other.get(f)}
    assert differing <= {"main", "parse_args"} | DIFFERING[name]
    for function in differing - {"parse_args"}:
        sides = [ast.unparse(ast.parse(f.get(function, ""))).splitlines() for f in (base, other)]
        for kind, a, b, c, d in difflib.SequenceMatcher(None, *sides, False).get_opcodes():
            block = "\n".join(sides[0][a:b] + sides[1][c:d])
            assert kind == "equal" or re.search(STRATEGY[name], block), f"{function}:\n{block}"
    assert len(flags("distributed")) > 25
    assert (flags(name) - flags("distributed"), flags("distributed") - flags(name)) == FLAGS[name]


@pytest.mark.parametrize("name", SCRIPTS)
def test_order_of_a_script(name):
    """Docstring with the command, imports, flags, main: who am I, errors, data, wrap, loop."""
    text = text_of(name)
    assert any(line.startswith("$ ") for line in text.split('"""')[1].splitlines())
    marks = ["import ", "def parse_args", "def main", "# Who am I?", "stop = StopRequest("]
    marks += ["run = Run(", "# Data.", "# Model.", "watch = Watch(", "# Strategy.", "run.attach("]
    marks += ["in run.remaining(", "def train", "for images, target", "def learning_rate"]
    marks += ["def validate", "__main__"]
    places = [text.index(mark) for mark in marks]
    assert places == sorted(places)


def test_format_and_lint():
    for command in (["format", "--check"], ["check"]):
        subprocess.run(["ruff", *command, "."], cwd=ROOT, check=True)
    assert not any(re.search("fmt: |noqa", text_of(name)) for name in SCRIPTS)
    scripts = [ROOT / "start.sh", ROOT / ".ci/run", ROOT / "distributed_slurm.sbatch"]
    scripts += [*ROOT.glob("tools/*.sh"), *ROOT.glob("tests/**/*.sh")]
    subprocess.run(["shellcheck", *scripts], check=True)


# ---- Diffs that are generated, and diffs that people wrote


def test_diffs_are_true():
    assert sorted(p.stem for p in (ROOT / "diffs").iterdir()) == sorted(OTHERS)
    for name in OTHERS:
        command = ["diff", "-U2", "--label", "distributed.py", "--label", f"{name}.py"]
        command += [ROOT / "distributed.py", ROOT / f"{name}.py"]
        made = subprocess.run(command, capture_output=True, text=True).stdout
        assert made == (ROOT / f"diffs/{name}.diff").read_text(), "run tools/generate.py"


@pytest.mark.parametrize("folder, path", WRITTEN, ids=[path.stem for _, path in WRITTEN])
def test_a_written_diff_fits_to_the_line_and_is_explained(folder, path, tmp_path):
    script, lines = generate.WRITTEN[folder], path.read_text().splitlines()
    assert lines[:2] == [f"--- {script}", f"+++ {script}"]
    changes = [line[0] for line in lines[2:] if line[0] in "+-"]
    many = {"recipes": len(changes), "bugs": max(changes.count("+"), changes.count("-"))}
    assert 1 <= many[folder] <= {"recipes": 25, "bugs": 5}[folder]
    text = (ROOT / script).read_text()
    (tmp_path / "script.py").write_text(text)
    for back in ([], ["-R"]):
        command = ["patch", "-F0", *back, "script.py", path]
        made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert made.stdout == "patching file script.py\n"  # no offset
    assert (tmp_path / "script.py").read_text() == text
    for language in ("", ".zh-CN"):
        page = (ROOT / f"docs/{folder}{language}.md").read_text()
        assert f"<!-- generated: {folder[:-1]} {path.stem} -->" in page


LINES = [f"line {number}\n" for number in range(40)]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with a script and three recipes, all committed."""
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "distributed.py").write_text("".join(LINES))
    for place in (5, 20, 35):
        changed = LINES[:place] + ["new\n"] + LINES[place + 1 :]
        header = "--- distributed.py\n+++ distributed.py\n"
        text = generate.unified("".join(LINES), "".join(changed), header)
        (tmp_path / f"recipes/at{place}.diff").write_text(text)
    user = "-c user.name=a -c user.email=a@b".split()
    for words in (["init", "-q"], ["add", "."], [*user, "commit", "-q", "-m", "all"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    return tmp_path


def test_a_change_elsewhere_moves_written_diffs(project):
    """One above them, and one in the lines around a diff; one that fits is left alone."""
    before = {f"recipes/{p.name}": p.read_text() for p in (project / "recipes").iterdir()}
    assert generate.written_diffs() == before
    lines = ["first\n"] + LINES[:22] + ["another\n"] + LINES[23:]
    (project / "distributed.py").write_text("".join(lines))
    after = generate.written_diffs()
    assert after.keys() == before.keys() and not any(after[name] == before[name] for name in after)
    for name, text in after.items():
        (project / name).write_text(text)
        place = int(re.search(r"\d+", name)[0])
        expected = lines[: place + 1] + ["new\n"] + lines[place + 2 :]
        assert generate.applied("".join(lines), text) == "".join(expected)
    assert generate.written_diffs() == after


def test_a_written_diff_that_cannot_follow_is_an_error(project):
    path = project / "recipes/at20.diff"
    text = path.read_text()
    path.write_text(text.replace("-line 20\n", "-line 999\n"))
    with pytest.raises(SystemExit, match=r"recipes/at20\.diff fits neither"):
        generate.written_diffs()
    path.write_text(text)
    script = project / "distributed.py"
    script.write_text(script.read_text().replace("line 20\n", "another\n"))
    with pytest.raises(SystemExit, match=r"distributed\.py has changed beside lines of recipes/at"):
        generate.written_diffs()
