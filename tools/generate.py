"""Writes what is generated: the scripts and the diffs of minimal/ from minimal/template; diffs/,
docs/*.svg, and the blocks of the READMEs and of docs/*.md between <!-- generated: NAME --> and
<!-- end -->. The tests compare all of it with its sources. The diffs in recipes/ and bugs/ follow
their script when it has changed.

$ python tools/generate.py
"""

import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools"), str(ROOT)]
from figures import draw  # noqa: E402
from page import page  # noqa: E402

import compose  # noqa: E402

READMES = ["README.md", "README.zh-CN.md"]
DOCUMENTS = READMES + sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
OTHERS = ["multiprocessing_distributed", "dataparallel", "distributed_slurm_main"]
OTHERS += ["apex_distributed", "horovod_distributed", "fsdp_distributed"]
SCRIPTS = ["distributed", *OTHERS]
# The minimal script whose diff against minimal/distributed.py a page shows, and those it links.
SHOWN = "by_hand"
LINKED = ["multiprocessing_distributed", "distributed_slurm_main", "apex_distributed"]
LINKED += ["horovod_distributed", "fsdp_distributed", "hsdp_distributed"]
# The folders of diffs that people wrote. Each diff names the script that it changes.
WRITTEN = ["recipes", "bugs", "minimal/recipes/transformer"]

# The lesson, from minimal/one_gpu.py to minimal/distributed.py: a text, and the step of the hunks
# from the one that holds it on.
LESSON = [
    ("import gc", "imports"),
    ("BATCH_SIZE = ", "data"),
    ("rank = int", "ranks"),
    ("sampler = Dist", "data"),
    ("model = Dist", "model"),
    ("set_epoch", "data"),
    ("output = model", "model"),
    ("for buffer in", "metrics"),
]
WIDTH = 60  # characters of a line of the lesson, its sign included: what a phone can show
# Images/s of a ResNet-50 in training, as others have published them: docs/measured.md says who.
GPUS = {"V100": 1200, "RTX 3090": 1218, "A100": 2470, "H100": 5000}
# What docs/losses.md shows of docs/losses.py: from a text to another one.
LOSSES = {
    "weighted_cross_entropy": ("def weighted", "DDP divides by world_size"),
    "sums": ("def sum_of_all", "return 1 - "),
}


def diff(old, new, *flags):
    """The lines of `diff old.py new.py` in the root."""
    command = ["diff", *flags, "--label", f"{old}.py", "--label", f"{new}.py"]
    command += [f"{old}.py", f"{new}.py"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()


def composed():
    """{path: text} of what the template makes: the minimal scripts, and a diff for each feature."""
    known, base = compose.choices(), "minimal/distributed.py"
    paths = {start["file"]: start["name"] for start in known["starts"]}
    files = {path: compose.script(name, file=path, made="") for path, name in paths.items()}
    labels = f"--- {base}\n+++ {base}\n"
    for feature in known["features"]:
        text = compose.script("torchrun", features=[feature["name"]], file=base, made="")
        files[f"minimal/recipes/{feature['name']}.diff"] = unified(files[base], text, labels)
    return files


def written_diffs():
    """{path: text} of the diffs in WRITTEN's folders, as they fit the scripts of today."""
    files = {}
    for folder in WRITTEN:
        for path in sorted((ROOT / folder).glob("*.diff")):
            name, written = f"{folder}/{path.name}", path.read_text()
            script = changes(written)
            fits = applied((ROOT / script).read_text(), written)
            files[name] = written if fits else moved(name, written, script)
    return files


def changes(written):
    """The script that a diff is of: what its first line names."""
    return re.match("--- (.+)", written)[1]


def applied(text, written):
    """A script's text after a diff; None if the diff is not of the very lines that it names."""
    after = in_files(["patch", "-F0", "-r-", "-o-"], text, written).stdout
    return after if unified(text, after, written) == written else None


def moved(name, written, script):
    """A diff of an older script, made to fit today's: a merge of what both have changed since.

    The older script is the newest committed one that the diff fits. Exits where there is none, and
    where both have changed the same lines, or lines side by side; imports may be any lines.
    """
    now = (ROOT / script).read_text()
    by_hand = f"change a copy of it, then diff -U3 --label {script} --label {script} {script} COPY"
    git = ["git", "-C", str(ROOT)]
    commits = subprocess.run([*git, "log", "--format=%h", "--", script], capture_output=True)
    for commit in commits.stdout.decode().split():
        shown = subprocess.run([*git, "show", f"{commit}:{script}"], capture_output=True, text=True)
        if after := applied(shown.stdout, written):
            if text := merged(now, shown.stdout, after):
                return unified(now, text, written)
            sys.exit(f"error: {script} has changed beside lines of {name}: {by_hand} > {name}")
    sys.exit(f"error: {name} fits neither {script} nor an older one: {by_hand} > {name}")


def merged(now, old, after):
    """A script's text `now` with what differs in `old` and `after`; None if that does not fit."""
    before, then = imported(old), imported(after)
    changes = [f"-{line}" for line in before - then] + [f"+{line}" for line in then - before]
    mine = compose.with_imports(now, changes) if changes else now
    # With the same imports in all three there is nothing to merge in them.
    imports = compose.around_imports(mine)[1]
    parts = [compose.around_imports(text) for text in (mine, old, after)]
    texts = ["\n".join([*before, *imports, *rest]) + "\n" for before, _, rest in parts]
    made = in_files(["git", "merge-file", "-p", "-q"], *texts)
    return None if made.returncode else made.stdout


def imported(text):
    """What a script imports, a set: "import os", "from math import pi", each name for itself."""
    lines = filter(None, compose.around_imports(text)[1])
    parts = [compose.IMPORT.match(line).groups() for line in lines]
    return {start + name for _, start, names in parts for name in names.split(", ")}


def unified(old, new, written):
    """The diff of two texts, with the first two lines of the diff `written`."""
    made = in_files(["diff", "-U3"], old, new).stdout.splitlines(keepends=True)[2:]
    return "".join(written.splitlines(keepends=True)[:2] + made)


def in_files(command, *texts):
    """Run a command on files with these texts."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / str(number) for number in range(len(texts))]
        for path, text in zip(paths, texts, strict=True):
            path.write_text(text)
        return subprocess.run([*command, *paths], capture_output=True, text=True)


def minimal_hunks(old, new):
    """The hunks of two minimal scripts, without the docstrings: [(place in old, lines)].

    The place is that of the first old line, from 0; the lines begin with + and -.
    """
    hunks = []
    for line in diff(f"minimal/{old}", f"minimal/{new}", "-U0")[2:]:
        if line.startswith("@@"):
            first, count = re.match(r"@@ -(\d+)(?:,(\d+))?", line).groups()
            hunks.append((int(first) - (count != "0"), []))
        else:
            hunks[-1][1].append(line)
    assert all(line[1:].startswith(('"""', "$ ")) for _, hunk in hunks[:2] for line in hunk)
    return hunks[2:]  # the docstring's sentence and its command are two


def in_place(old, hunks):
    """The lines of some hunks of minimal_hunks, between the lines of the old script around them.

    "..." stands for what lies between two hunks that are not neighbours.
    """
    lines, shown, last = (ROOT / f"minimal/{old}.py").read_text().splitlines(), [], None
    for first, hunk in hunks:
        before = first - 1
        while not lines[before]:
            before -= 1
        if last is not None and before <= last + 1:
            shown += [" " + line for line in lines[last:first]]
        else:
            if last is not None:
                shown += [*following(lines, last), " ..."]
            shown += [" " + lines[before]] * (first - before < 3)  # what is above a function
        shown += [line.rstrip() for line in hunk]
        last = first + sum(line.startswith("-") for line in hunk)
    return [line.rstrip() for line in shown + following(lines, last)]


def following(lines, place):
    """The next line, if it is not blank."""
    return [" " + line for line in lines[place : place + 1] if line]


def lesson():
    """{"lesson STEP": a block with its hunks}, which together are the whole diff."""
    hunks, steps, step = minimal_hunks("one_gpu", "distributed"), {}, None
    for place, hunk in hunks:
        step = next((s for text, s in LESSON if any(text in line for line in hunk)), step)
        steps.setdefault(step, []).append((place, hunk))
    assert steps.keys() == {step for _, step in LESSON}
    shown = {step: in_place("one_gpu", h) for step, h in steps.items()}
    imports = [line.rstrip() for _, hunk in steps["imports"] for line in hunk]
    shown["imports"] = [line for line in imports if line != "+"]
    made = {f"lesson {step}": fenced("diff", narrow(lines)) for step, lines in shown.items()}
    made["added"] = str(sum(line[0] == "+" != line for _, hunk in hunks for line in hunk))
    return made


def narrow(lines):
    """The lines of a diff for a phone: a comment above its line, a long line in parts.

    What is long and the same on both sides, or only moved to the right, is cut: print(...).
    """
    sides = [{line[1:].strip() for line in lines if line[0] in signs} for signs in (" -", " +")]
    shown = []
    for line in lines:
        code, _, comment = line.partition("  # ")
        start = code[: len(code) - len(code[1:].lstrip())]
        width = WIDTH - len(start) - 2
        shown += [f"{start}# {part}" for part in textwrap.wrap(comment, width)]
        if len(code) <= WIDTH:
            shown.append(code)
        elif line[1:].strip() in sides[0] & sides[1]:
            shown.append(code.replace(in_brackets(code), "...", 1))
        else:
            shown += parts_of(code, start)
    return shown


def in_brackets(code):
    """What stands in the first brackets of a line."""
    depth, first = 0, code.index("(") + 1
    for place in range(first, len(code)):
        depth += {"(": 1, ")": -1}.get(code[place], 0)
        if depth < 0:
            return code[first:place]
    raise ValueError(code)


def parts_of(code, start):
    """A line of code, broken at the commas in its first brackets; a string between two words."""
    if " import " in code:  # has no brackets
        head, inner = code.split(" import ")
        head += " import "
    else:
        inner = in_brackets(code)
        head = code.removesuffix(f"({inner})")
    width, string = WIDTH - len(start) - 4, re.fullmatch('f"(.*)"', inner)
    if string:
        *pieces, last = textwrap.wrap(string[1], width - len('f" "'))
        pieces = [*(f'f"{piece} "' for piece in pieces), f'f"{last}"']
    else:
        pieces = [""]
        for argument in arguments(inner):
            if len(pieces[-1] + argument) > width:
                pieces.append("")
            pieces[-1] += f"{argument} "
    return [f"{head}(", *(f"{start}    {piece.rstrip()}" for piece in pieces), f"{start})"]


def arguments(text):
    """Its parts between commas that are in no brackets, each with its comma."""
    found, depth = [""], 0
    for sign in text:
        depth += {"(": 1, ")": -1}.get(sign, 0)
        found[-1] += sign
        if sign == "," and not depth:
            found.append("")
    return [part.strip() for part in found]


def bug(written):
    """A block with the hunks of a diff, each from its first changed line to its last.

    Lines that are only added stand between their neighbours. Comments of the script itself, which
    has them, are left out.
    """
    lines, script = [], (ROOT / changes(written)).read_text()
    for hunk in written.split("\n@@")[1:]:
        hunk = [line.rstrip() for line in hunk.splitlines()[1:]]
        changed = [i for i, line in enumerate(hunk) if line.startswith(("+", "-"))]
        more = not any(line.startswith("-") for line in hunk)
        part = filter(None, hunk[changed[0] - more : changed[-1] + 1 + more])
        for code, mark, comment in (line.partition("  # ") for line in part):
            lines.append(code if f"{mark}{comment}\n" in script else code + mark + comment)
    return fenced("diff", lines)


def fenced(kind, lines):
    return "\n".join([f"\n```{kind}", *lines, "```\n"])


def whole(old, new):
    """A block with all hunks of two minimal scripts; the imports, which come first, stand last."""
    hunks = minimal_hunks(old, new)
    main = (ROOT / f"minimal/{old}.py").read_text().splitlines().index("EPOCHS = 5")
    body = in_place(old, [hunk for hunk in hunks if hunk[0] > main])
    imports = [line for place, hunk in hunks if place <= main for line in hunk]
    return fenced("diff", body + [" ..."] * bool(imports) + [i for i in imports if i[1:]])


def excerpt(path, first, last):
    """A block with the lines of a file from a text to another one."""
    lines = (ROOT / path).read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if first in line)
    end = next(i for i in range(start, len(lines)) if last in lines[i])
    return fenced("python", textwrap.dedent("\n".join(lines[start : end + 1])).splitlines())


def results(name):
    path = ROOT / "results" / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def measured():
    """Where, when and how the figures were taken: no word that needs translation."""
    found = results("strategies")
    if not found:
        return "-"
    return f"{found['date'][:10]}; {found['hardware']}; `{found['command']}`"


def workers():
    """What a loader process gives, and the rows of a table: how many of them a GPU needs."""
    found, each = results("loader"), {}
    for run in found["runs"][:2]:
        name = re.match(r"\w+", run["name"])[0]
        each[name] = run["images_per_second"]["median"] / found["settings"]["workers"]
    made = {f"a worker {name}": f"{speed:.0f}" for name, speed in each.items()}
    rows = []
    for gpu, takes in GPUS.items():
        needs = [str(math.ceil(takes / each[name])) for name in ("ours", "usual")]
        rows.append(" | ".join([gpu, f"{takes:,}", *needs]))
    return made | {"workers": " |\n| ".join(rows)}


def figures():
    """What a step takes beside a bare one, and how many MB a worker adds for each loader."""
    runs = {run["name"]: run for run in results("step")["runs"]}
    made = {"step": f"{runs['script']['time_to_bare']:.2f}"}
    for run in results("scale")["runs"]:
        if run["files"] == 1280000:
            made[f"scale {run['name']}"] = f"{run['worker_private_mb']['median']:.0f}"
    del made["scale ours, an archive"]
    return made


# Rows of results/loader.json that docs/measured.md leaves to the file.
LEFT_OUT = ("ours: bytes", "ours, out of", "decoding")


def table(name, *columns):
    """The rows of a table: these columns of the runs in a file of results; medians, of spreads."""

    def cell(x):
        x = x["median"] if isinstance(x, dict) else x
        if isinstance(x, float):
            return f"{x:.{0 if x >= 100 else 3 if x < 1 else 2}f}"
        return str(x).partition(";")[0]  # without the names of the tests that failed

    runs = (results(name) or {"runs": []})["runs"]
    runs = [run for run in runs if not run.get("name", "").startswith(LEFT_OUT)]
    lines = [" | ".join(cell(run[column]) for column in columns) for run in runs]
    return " |\n| ".join(lines or [" | ".join("-" * len(columns))])


def predicted():
    """{NAME: the rows of a table} of results/predict.json: the box by kinds, and what others have.

    The errors are those of the predicted speed: +3 % is too fast.
    """
    found = results("predict") or {"runs": [], "settings": {"published": []}}
    kinds = {}
    for run in found["runs"]:
        if not run["fitted"]:
            processes = "4 and 8" if run["world"] <= 8 else str(run["world"])
            kind = (processes, run["strategy"].upper(), run["limit"])
            kinds.setdefault(kind, []).append(run["error"])
    box = [
        f"{' | '.join(kind)} | {len(errors)} | {statistics.median(map(abs, errors)):.1%} | "
        f"{max(errors, key=abs):+.1%}"
        for kind, errors in sorted(kinds.items(), key=lambda one: len(one[0][0]), reverse=True)
    ]
    published = [
        f"[{run['name']}]({run['source'].split()[0]}) | {run['nodes'] * run['gpus']} | "
        f"{run['published']:,.0f} | {run['predicted']:,.0f} | {run['error']:+.1%}"
        for run in found["settings"]["published"]
    ]
    nothing = ["not measured | | | | | "]
    made = {"predict box": box or nothing, "predict published": published}
    return {name: " |\n| ".join(rows) for name, rows in made.items()}


def memory():
    """The rows of a table: what DDP and FSDP keep of a model in each of 8 GPUs, in GB.

    Weights, gradients and the optimizer's state are float32. FSDP gathers two blocks at a time, one
    of them to be ready for the next, and has the gradients of one.
    """
    import torch  # takes seconds
    from torchvision import models

    from longrun.sharded import blocks, precision_policy

    rows = []
    for name in ("resnet50", "vit_l_16", "vit_h_14"):
        with torch.device("meta"):
            net = models.get_model(name)
        whole = sum(weight.numel() for weight in net.parameters())
        sizes = [sum(weight.numel() for weight in block.parameters()) for block in blocks(net)]
        gathered = 2 if precision_policy(net, torch.bfloat16).param_dtype else 4  # bytes
        gathered = max(sizes) * (2 * gathered + 4) + (whole - sum(sizes)) * (gathered + 4)
        for optimizer, kept in (("SGD", 12), ("AdamW", 16)):  # bytes for a weight
            ddp, fsdp = whole * kept / 1e9, (whole * kept / 8 + gathered) / 1e9
            rows.append(f"{name} | {optimizer} | {ddp:.2f} | {fsdp:.2f}")
    return " |\n| ".join(rows)


def transformer():
    """{NAME: what stands in a block} of docs/transformer.md, but for the diffs."""
    divided = excerpt("minimal/transformer.py", "net = Net()", "optimizer = ")
    plan = excerpt("minimal/tensor_parallel.py", "# Each process has some", "mesh=mesh[")
    made = {"transformer divided": divided, "transformer plan": plan}
    rows = []
    for size, layers in ((1, 24), (7, 32)):  # billions
        shares = [f"{16 * size / processes:g}" for processes in (1, 2, 8)]
        unit = size / layers * (2 * 2 + 4)  # two blocks in bf16, the gradients of one
        rows.append(" | ".join([f"{size} billion", *shares, f"{unit:.1f}"]))
    return made | {"transformer memory": " |\n| ".join(rows)}


def blocks():
    """{NAME: what stands in the block}."""
    made = {}
    for name in OTHERS:
        lines = [line for line in diff("distributed", name, "-U0")[2:] if line[0] in "+-"]
        made[f"changed {name}"] = f"[{len(lines)}](../diffs/{name}.diff)"
    made["measured"] = measured()
    made |= workers()
    made["memory"] = memory()
    made["loader"] = table("loader", "name", "images_per_second", "to_usual", "first_batch_ms")
    made |= figures()
    made |= predicted()
    made["shards"] = table("shards", "name", "rank_0_mb", "others_mb")
    made["shards whole"] = f"{results('shards')['runs'][0]['whole_mb']:.0f}"
    sends = ["name", "points", "percent", "sent_kib", "state_kib"]
    made["communication"] = table("communication", *sends)
    made["versions"] = table("versions", "torch", "unit", "full", "minimal")
    made |= lesson()
    made["mistakes"] = str(len(list((ROOT / "bugs").glob("*.diff"))))
    made["minimal dataparallel"] = whole("one_gpu", "dataparallel")
    made[f"minimal {SHOWN}"] = whole("distributed", SHOWN)
    for path, text in written_diffs().items():
        folder, _, name = path.removesuffix(".diff").rpartition("/")
        if folder == "bugs" or name == "hsdp":  # else a page links the file
            made[f"{'bug' if folder == 'bugs' else 'transformer'} {name}"] = bug(text)
    made |= transformer()
    made["unpack"] = excerpt("docs/unpack_imagenet.py", "from torchvision", "val")
    for name, (first, last) in LOSSES.items():
        made[f"losses {name}"] = excerpt("docs/losses.py", first, last)
    return made


def fill(text, made):
    """The text with the contents of its blocks replaced."""

    def put(match):
        return f"{match[1]}{made[match[2]]}<!-- end -->"

    return re.sub(r"(<!-- generated: (.+?) -->).*?<!-- end -->", put, text, flags=re.S)


def navigation(name):
    """The first line of a page of docs/: its way back, its other language, and the next page.

    The order is that of the links in docs/README.md, or in its Chinese twin.
    """
    end, other, label, after = ".md", ".zh-CN.md", "中文", "next"
    if name.endswith(other):
        end, other, label, after = other, end, "English", "下一页"
    page = name.removeprefix("docs/")
    index = (ROOT / f"docs/README{end}").read_text()
    order = [f"README{end}", *re.findall(r"^- \[.*?\]\(([\w.-]+\.md)\)", index, re.M)]
    links = [f"[README](../README{end})", f"[{label}]({page.removesuffix(end)}{other})"]
    if page != order[-1]:
        following = order[order.index(page) + 1]
        title = re.search("^# (.*)$", (ROOT / "docs" / following).read_text(), re.M)[1]
        links.append(f"{after}: [{title}]({following})")
    return " · ".join(links)


def everything():
    """{path: text} of all that is generated."""
    pairs = [("distributed", name) for name in OTHERS]
    pairs += [("minimal/distributed", f"minimal/{name}") for name in LINKED]
    files = {f"diffs/{new}.diff": diff(old, new, "-U2") for old, new in pairs}
    files = {path: "\n".join(lines) + "\n" for path, lines in files.items()}
    files |= {f"docs/{name}": svg for name, svg in draw().items()} | written_diffs()
    files |= composed()
    bugs = {path: text for path, text in files.items() if path.startswith("bugs/")}
    files["docs/index.html"] = page({Path(path).stem: text for path, text in bugs.items()})
    made = blocks()
    for name in DOCUMENTS:
        files[name] = fill((ROOT / name).read_text(), made)
        if name not in READMES:
            files[name] = files[name][files[name].index("# ") :]
            files[name] = f"{navigation(name)}\n\n{files[name]}"
    return files


if __name__ == "__main__":
    for made in (composed, everything):  # the pages show scripts that were composed before
        for path, text in made().items():
            (ROOT / path).write_text(text)
