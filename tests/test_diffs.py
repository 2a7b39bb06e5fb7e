"""What a reader meets: scripts that differ only where the strategy does, and drag little along.

No length of a script is held: short code is not the aim, code that reads at once is.
"""

import ast
import difflib
import re
import subprocess

import pytest
from conftest import ROOT

# Changed lines against distributed.py, both sides: a little above what they are.
CEILINGS = {
    "dataparallel": 110,
    "multiprocessing_distributed": 50,
    "distributed_slurm_main": 55,
    "apex_distributed": 60,
    "horovod_distributed": 120,
    "fsdp_distributed": 58,
}
OTHERS = list(CEILINGS)
SCRIPTS = ["distributed", *OTHERS]
MODULES = {path.stem: path for path in (ROOT / "common").glob("*.py") if path.stem != "__init__"}

# What a script has and distributed.py has not, and the other way round.
FLAGS = {
    "dataparallel": (set(), {"--sync-bn", "--backend", "--dist-timeout"}),
    "multiprocessing_distributed": ({"--nprocs"}, set()),
    "distributed_slurm_main": ({"--nprocs", "--dist-file"}, set()),
    "apex_distributed": ({"--opt-level"}, set()),
    "horovod_distributed": ({"--fp16-allreduce"}, {"--sync-bn", "--backend", "--dist-timeout"}),
    "fsdp_distributed": (set(), set()),
}
# The functions that may differ besides main and parse_args, and those that are new.
DIFFERING = {
    "dataparallel": {"train", "validate"},
    "multiprocessing_distributed": {"spawn"},
    "distributed_slurm_main": {"launch"},
    "apex_distributed": {"train"},
    "horovod_distributed": {"train", "validate", "reduce_mean", "contiguous_view"},
    "fsdp_distributed": {"train", "validate"},
}
# What a hunk has that is about the strategy: what it starts with, meets at, sends or wraps.
STRATEGY = {
    "dataparallel": r"\bdist\.|DataParallel|environ|device_count|_store\(|reduce_mean"
    r"|validate\(val_batches, model",
    "multiprocessing_distributed": r"environ|FileStore|mp\.spawn",
    "distributed_slurm_main": r"environ|open_store|mp\.spawn",
    "apex_distributed": r"\bamp\b",
    "horovod_distributed": r"\bhvd\.|restart_safe_store|synchronize|channels_last",
    "fsdp_distributed": r"fully_shard|\bmesh\b|\bparts\b|device\('cpu'\)|model\.buffers"
    r"|validate\(val_batches, model|net\(torch\.zeros",
}


def text_of(name):
    return (ROOT / f"{name}.py").read_text()


def functions(name):
    """{name: code} of a script's functions, without comments and as one style writes it."""
    nodes = ast.parse(text_of(name)).body
    return {n.name: ast.unparse(n) for n in nodes if isinstance(n, ast.FunctionDef)}


def flags(name):
    return set(re.findall(r'add\([^)]*?"(--[\w-]+)"', text_of(name)))


def imports(path):
    """{module of common/: the names that a file imports from it}"""
    found = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.level or node.module.startswith("common")):
            module = node.module if node.level else node.module.partition(".")[2]
            assert module in MODULES, f"{path} imports {ast.unparse(node)}"
            found.setdefault(module, []).extend(alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            assert not any(alias.name.partition(".")[0] == "common" for alias in node.names), path
    return found


def reached(path):
    """The modules of common/ that a file's imports reach, directly or through others."""
    found, todo = set(), set(imports(path))
    while todo:
        module = todo.pop()
        found.add(module)
        todo |= set(imports(MODULES[module])) - found
    return found


def all_imported(path):
    """Every package or module that a file imports anywhere, by its first name."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names]
    names += [n.module for n in nodes if isinstance(n, ast.ImportFrom) and not n.level]
    return {name.partition(".")[0] for name in names}


def changed_hunks(old, new):
    """The hunks in which two lists of lines differ, each a pair of lists."""
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    codes = matcher.get_opcodes()
    return [(old[a:b], new[c:d]) for kind, a, b, c, d in codes if kind != "equal"]


def test_distributed_takes_few_names():
    assert sum(map(len, imports(ROOT / "distributed.py").values())) <= 24


def test_distributed_drags_little_of_common_along():
    """All modules that its imports reach, docstrings included: a third of them are docstrings.

    Growing is a decision: each mechanism is there for a user who would miss it.
    """
    modules = reached(ROOT / "distributed.py")
    lines = {module: len(MODULES[module].read_text().splitlines()) for module in modules}
    assert sum(lines.values()) <= 2230, (sum(lines.values()), lines)


@pytest.mark.parametrize("name", SCRIPTS)
def test_functions_have_few_names_of_their_own(name):
    for function in ast.parse(text_of(name)).body:
        if isinstance(function, ast.FunctionDef):
            names = [n for n in ast.walk(function) if isinstance(n, ast.Name)]
            stored = {n.id for n in names if isinstance(n.ctx, ast.Store)}
            assert len(stored) <= 40, (function.name, sorted(stored))


@pytest.mark.parametrize("name", OTHERS)
def test_diff_is_the_one_committed_and_below_its_ceiling(name):
    command = ["diff", "-U2", "--label", "distributed.py", "--label", f"{name}.py"]
    command += [ROOT / "distributed.py", ROOT / f"{name}.py"]
    made = subprocess.run(command, capture_output=True, text=True).stdout
    assert made == (ROOT / "diffs" / f"{name}.diff").read_text(), "run tools/generate.py"
    changed = [line for line in made.splitlines()[2:] if line[0] in "+-"]
    assert len(changed) <= CEILINGS[name], "\n".join(changed)


def test_diffs_are_of_scripts_that_exist():
    assert sorted(p.stem for p in (ROOT / "diffs").glob("*.diff")) == sorted(OTHERS)
    assert not any(re.search("fmt: |noqa", text_of(name)) for name in SCRIPTS)


@pytest.mark.parametrize("name", OTHERS)
def test_functions_differ_only_where_the_strategy_is(name):
    base, other = functions("distributed"), functions(name)
    differing = {f for f in base.keys() | other.keys() if base.get(f) != other.get(f)}
    assert differing <= {"main", "parse_args"} | DIFFERING[name]
    for function in differing - {"parse_args"}:
        old, new = (found.get(function, "").splitlines() for found in (base, other))
        for hunk in changed_hunks(old, new):
            code = "\n".join(hunk[0] + hunk[1])
            assert re.search(STRATEGY[name], code), f"{function} of {name}.py:\n{code}"


@pytest.mark.parametrize("name", OTHERS)
def test_flags_differ_only_where_the_strategy_does(name):
    base, other = flags("distributed"), flags(name)
    assert len(base) > 25
    assert (other - base, base - other) == FLAGS[name]
    old, new = (functions(n)["parse_args"].splitlines() for n in ("distributed", name))
    for hunk in changed_hunks(old, new):
        for line in hunk[0] + hunk[1]:
            # An Apex with apex.amp has a precision of its own.
            amp = name == "apex_distributed" and re.search(r"if amp:|set_defaults\(prec", line)
            own = set(re.findall(r"add\('(--[\w-]+)'", line)) & set().union(*FLAGS[name])
            assert own or amp, line


@pytest.mark.parametrize("name", OTHERS)
def test_comments_differ_only_with_the_code(name):
    """A comment of its own is for a truth of its own: dataparallel.py has no processes."""
    if name == "dataparallel":
        return
    lines = [text_of(n).splitlines() for n in ("distributed", name)]
    for old, new in changed_hunks(*lines):
        code = [[line.partition("  # ")[0] for line in side] for side in (old, new)]
        code = [[line for line in side if not line.lstrip().startswith("#")] for side in code]
        if name == "fsdp_distributed" and re.search(r"# Model\.|= net\(images", "".join(new)):
            continue  # it validates a model whose parts travel, and has a whole one besides
        assert code[0] != code[1], (old, new)


def test_outside_of_functions_only_imports_differ():
    """And what the launcher would have set, what may be missing, what an engine is given."""

    def rest(name):
        text = text_of(name)
        nodes = ast.parse(text).body[1:]  # without the docstring
        skipped = (ast.Import, ast.ImportFrom, ast.FunctionDef)
        return [ast.unparse(n) for n in nodes if not isinstance(n, skipped)]

    base = rest("distributed")
    for name in OTHERS:
        for hunk in changed_hunks(base, rest(name)):
            for code in hunk[0] + hunk[1]:
                allowed = r"GROUP_OF_ONE|REMEDY|with user_errors\(|if __name__ == '__main__'"
                allowed += "|class ChannelsLast"  # what Horovod needs is a class
                allowed += "|DTYPES"  # FSDP needs no fp16, nor a scaler that looks at all parts
                assert re.match(allowed, code), (name, code)


def test_no_script_imports_another_and_common_imports_none():
    for name in SCRIPTS:
        assert not all_imported(ROOT / f"{name}.py") & set(SCRIPTS), name
    for path in MODULES.values():
        assert not all_imported(path) & {*SCRIPTS, "common", "horovod", "apex"}, path
    assert (ROOT / "common/__init__.py").read_text() == ""


def test_every_module_of_common_is_used():
    users = [ROOT / f"{name}.py" for name in SCRIPTS]
    assert set().union(*map(reached, users)) == set(MODULES)


def test_common_reads_no_rank():
    """Who a process is is read in the scripts. A module gets it, or the environment, or its names.

    Only distributed_slurm_main.py uses the module that knows Slurm.
    """
    for module, path in MODULES.items():
        text = path.read_text()
        assert not re.search(r"RANK|WORLD_SIZE|HOROVOD_|TORCHELASTIC_(?!USE_AGENT_STORE)", text), (
            path
        )
        assert ("SLURM_" in text) == (module == "slurm"), path
    assert not re.search(r"\benviron\b|getenv|\bos\.env", MODULES["slurm"].read_text())
    users = [name for name in SCRIPTS if "slurm" in reached(ROOT / f"{name}.py")]
    assert users == ["distributed_slurm_main"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_order_of_a_script(name):
    """Docstring with the command, imports, parse_args, main: who am I, errors, data, wrap, loop."""
    text = text_of(name)
    assert any(line.startswith("$ ") for line in text.split('"""')[1].splitlines())
    marks = ["import ", "def parse_args", "def main", "# Who am I?", "stop = Stop("]
    marks += ["with user_errors(local_rank", "run = Run(", "watch = Watch(", "# Data.", "# Model."]
    marks += ["# Strategy.", "run.restore(net", "for epoch in range(", "def train"]
    marks += ["for images, target", "def learning_rate", "def validate", "__main__"]
    places = [text.index(mark) for mark in marks]
    assert places == sorted(places)


def test_format_and_lint():
    for command in (["format", "--check"], ["check"]):
        subprocess.run(["ruff", *command, "."], cwd=ROOT, check=True)
    scripts = [ROOT / "start.sh", ROOT / ".ci/run", ROOT / "distributed_slurm.sbatch"]
    scripts += [*ROOT.glob("*/*.sh"), *ROOT.glob("tests/*/*.sh")]
    subprocess.run(["shellcheck", *scripts], check=True)
