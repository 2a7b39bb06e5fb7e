"""Scripts that differ only where the strategy does; recipes that fit what compose.py says they fit;
and diffs that follow their script.
"""

import ast
import difflib
import itertools
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

import compose
from tests.docs.copies import patched
from tools import generate

# The functions that may differ from distributed.py's, besides main and parse_args; and what a block
# that does has, which is about the strategy: what starts, meets, sends or wraps.
DIFFERING = {
    "dataparallel": (
        {"train", "validate"},
        r"\bdist\.|DataParallel|environ|device_count|reduce_mean|val_batches, model"
        "|different weights|asked",
    ),
    "multiprocessing_distributed": (
        {"spawn"},
        r"def main|environ|store=store|FileStore|mp\.spawn",
    ),
    "distributed_slurm_main": (
        {"launch"},
        r"def main|environ|store=store|open_store|mp\.spawn",
    ),
    "apex_distributed": ({"train"}, r"\bamp\b"),
    "horovod_distributed": (
        {"train", "validate", "reduce_mean", "contiguous_view", "broadcast"},
        r"\bhvd\.|\bdist\.|synchronize|channels_last",
    ),
    "fsdp_distributed": (
        {"divide", "train", "validate"},
        r"fully_shard|check_shapes|\bshards\b|model\.buffers|val_batches, model|device\('cpu'\)"
        "|force_eager|longest|checksum|different weights",
    ),
}


def functions(name):
    """{name: its lines, comments included}"""
    text = (ROOT / f"{name}.py").read_text()
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.get_source_segment(text, node) for node in nodes}


@pytest.mark.parametrize("name", generate.OTHERS)
def test_scripts_differ_only_where_the_strategy_is(name):
    """All other functions are the same to the letter, comments included."""
    base, other = functions("distributed"), functions(name)
    differing = {f for f in base.keys() | other.keys() if base.get(f) != other.get(f)}
    allowed, strategy = DIFFERING[name]
    assert differing <= {"main", "parse_args"} | allowed
    for function in differing - {"parse_args"}:
        sides = [ast.unparse(ast.parse(f.get(function, ""))).splitlines() for f in (base, other)]
        for kind, a, b, c, d in difflib.SequenceMatcher(None, *sides, False).get_opcodes():
            block = "\n".join(sides[0][a:b] + sides[1][c:d])
            assert kind == "equal" or re.search(strategy, block), f"{function}:\n{block}"


@pytest.mark.parametrize("name", ["with_accelerate", "with_fabric", "with_ray"])
def test_libraries_change_nothing_but_main(name):
    """So the diff that docs/libraries.md names shows the library."""
    base, other = functions("minimal/one_gpu"), functions(f"minimal/libraries/{name}")
    assert base.keys() == other.keys() and base.pop("main") != other.pop("main")
    assert base == other


def ruff(folder):
    for command in (["format", "--check"], ["check"]):
        subprocess.run(["ruff", *command, "."], cwd=folder, check=True)


def test_format_and_lint():
    ruff(ROOT)
    scripts = [ROOT / "start.sh", ROOT / ".ci/run", ROOT / "distributed_slurm.sbatch"]
    scripts += [*ROOT.glob("tools/*.sh"), *ROOT.glob("tests/**/*.sh")]
    subprocess.run(["shellcheck", *scripts], check=True)


def table():
    """{recipe: the scripts that take it}, in the order in which they are applied."""
    taken = compose.TAKES.items()
    names = compose.TAKES["distributed.py"]
    return {name: [s.removesuffix(".py") for s, t in taken if name in t] for name in names}


def test_recipes_fit_what_their_table_says(tmp_path):
    """No name is missing, and they are written as the scripts are."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for room in ("common", "longrun", "recipes"):
        (tmp_path / room).symlink_to(ROOT / room)
    assert sorted(table()) == sorted(path.stem for path in (ROOT / "recipes").glob("*.diff"))
    for name, scripts in table().items():
        for number, fitting in enumerate(f"{script}.py" for script in scripts):
            path = shutil.copy(ROOT / fitting, tmp_path / f"{name}_{number}.py")
            assert patched(path, f"recipes/{name}.diff"), f"{name} does not fit {fitting}"
            assert Path(path).read_text() == compose.with_recipes(fitting, [name])
    ruff(tmp_path)


# Of the same script; what compose.py says of the others is tested in test_compose.py.
APART = """accumulate-mixup_cutmix finetune-mixup_cutmix finetune-randaugment
f1-ema f1-predictions wandb-tensorboard same_bits-clip""".split()


def test_which_recipes_do_not_fit_together():
    """Each pair that distributed.py takes: what comes out can be parsed, or the line names both."""
    apart = set()
    for pair in itertools.combinations(compose.TAKES["distributed.py"], 2):
        try:
            text = compose.with_recipes("distributed.py", pair)
        except ValueError as error:
            said = f"these change the same lines of distributed.py: {' and '.join(pair)}"
            assert str(error) == said
            apart.add(frozenset(pair))
        else:
            ast.parse(text)
    assert {frozenset(pair.split("-")) for pair in APART} <= apart
    assert len(apart) < 60, sorted(map(sorted, apart))  # 21 of 153


LINES = [f"line {number}\n" for number in range(40)]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with a script and a recipe, both committed."""
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "distributed.py").write_text("".join(LINES))
    text = generate.unified("".join(LINES), changed(LINES, 20), "--- distributed.py\n+++ new\n")
    (tmp_path / "recipes/a.diff").write_text(text)
    user = "-c user.name=a -c user.email=a@b".split()
    for words in (["init", "-q"], ["add", "."], [*user, "commit", "-q", "-m", "all"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    return tmp_path


def changed(lines, place):
    return "".join([*lines[:place], "new\n", *lines[place + 1 :]])


def test_a_change_elsewhere_moves_written_diffs(project):
    """One above them, and one in the lines around a diff."""
    lines = ["first\n"] + LINES[:22] + ["another\n"] + LINES[23:]
    (project / "distributed.py").write_text("".join(lines))
    (text,) = generate.written_diffs().values()
    assert text != (project / "recipes/a.diff").read_text()
    assert generate.applied("".join(lines), text) == changed(lines, 21)


@pytest.mark.parametrize(
    "line, other",
    [
        ("import math\n", "import itertools\nimport math\n"),
        ("import cross_entropy\n", "import cross_entropy, softmax\n"),
        ("import image_folders\n", "import ImageFolder, image_folders\n"),
        ("import TrainSampler, seed_step, start_loader\n", "import TrainSampler, start_loader\n"),
    ],
)
def test_a_change_of_imports_moves_each_recipe(line, other):
    """Whatever line of imports a recipe changes, or adds beside it: what is gone stays gone."""
    old = (ROOT / "distributed.py").read_text()
    now = old.replace(line, other)
    assert now != old
    for path in (ROOT / "recipes").glob("*.diff"):
        written = path.read_text()
        if generate.changes(written) == "distributed.py":
            after = generate.applied(old, written)
            text = generate.merged(now, old, after)
            ast.parse(text)
            before, then = generate.imported(old), generate.imported(after)
            expected = (generate.imported(now) - (before - then)) | (then - before)
            assert generate.imported(text) == expected, path.name
            assert generate.applied(now, generate.unified(now, text, written)) == text, path.name


@pytest.mark.parametrize(
    "file, line, message",
    [
        ("recipes/a.diff", "-line 20\n", r"recipes/a\.diff fits neither"),
        ("distributed.py", "line 20\n", r"distributed\.py has changed beside lines of recipes/a"),
    ],
)
def test_a_written_diff_that_cannot_follow_is_an_error(file, line, message, project):
    text = (project / file).read_text()
    (project / file).write_text(text.replace(line, line.replace("20", "999")))
    with pytest.raises(SystemExit, match=message):
        generate.written_diffs()


def test_a_checkout_has_no_carriage_returns(tmp_path):
    """Though git is told to write them, as Windows' git is by default: no shell would take them."""
    source, clone = tmp_path / "source", tmp_path / "clone"
    source.mkdir()
    for name in (".gitattributes", "start.sh", "distributed.py", "recipes/clip.diff"):
        (source / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "core.autocrlf=true"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *words], cwd=source, check=True, timeout=150)
    subprocess.run([*git, "clone", "-q", source, clone], check=True, timeout=150)
    files = [path for path in clone.rglob("*") if path.is_file() and ".git" not in path.parts]
    assert len(files) == 4
    assert all(path.read_bytes() == (ROOT / path.relative_to(clone)).read_bytes() for path in files)
