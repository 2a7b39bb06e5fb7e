"""Prints a training script in one file: how it starts, what it can do, and which data it trains on.

$ python compose.py torchrun --with amp,resume,f1 > train.py

Or a full script with recipes, the diffs in recipes/:

$ python compose.py distributed.py --with clip,ema > mine.py
"""

import argparse
import difflib
import itertools
import json
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent
FOLDER = ROOT / "minimal/template"
WIDTH = 100  # of a line
# The recipes of each full script, in the order in which they are applied.
TAKES = {
    "distributed.py": """accumulate clip adamw ema mixup_cutmix randaugment finetune weighted
        archives bad_images activation_checkpointing f1 early_stopping wandb tensorboard predictions
        same_bits profile""".split()
}
TAKES["distributed_slurm_main.py"] = TAKES["distributed.py"]
TAKES["multiprocessing_distributed.py"] = [n for n in TAKES["distributed.py"] if n != "ema"]
TAKES |= {
    "apex_distributed.py": """mixup_cutmix randaugment weighted archives bad_images
        activation_checkpointing f1 early_stopping wandb tensorboard predictions""".split(),
    "dataparallel.py": "clip adamw mixup_cutmix archives bad_images wandb tensorboard".split(),
    "horovod_distributed.py": "adamw bad_images early_stopping wandb tensorboard".split(),
    "fsdp_distributed.py": "clip adamw archives early_stopping".split(),
}
# What a full script has without a recipe, for who knows it from a minimal one.
BUILT_IN = {
    "amp": "--precision",
    "best": "model_best.pth",
    "compile": "--compile",
    "loss": "train_loss in metrics.jsonl",
    "resume": "--resume auto",
    "schedule": "--lr and --warmup-epochs",
    "workers": "--workers",
}
# Scripts whose model or data is divided in a way of its own: minimal/NAME.py as it is. What each
# process reads, sums up and saves depends on that, so no feature fits all.
WHOLE = {
    "tensor_parallel": "each layer over several GPUs, with FSDP over the groups: a transformer",
    "pretrained": "FSDP from weights in a file, with LoRA if wanted: a transformer",
    "stream": "DDP on tar shards or any stream, resumed in the middle of an epoch",
    "pipeline": "some layers on each GPU: a transformer",
}
HOW = {"starts": "the first word", "features": "--with", "data": "--data"}


def choices():
    """What can be chosen, with its texts in both languages, and what is refused: choices.json."""
    return json.loads((FOLDER / "choices.json").read_text(encoding="utf-8"))


def script(start, data="digits", features=(), file="train.py", made=None):
    """The text of a script. ValueError with one line if the combination makes no sense.

    file: its name in the command of its first lines; made: how it was made, "" for nothing.
    """
    known = choices()
    for name, among in [(start, "starts"), (data, "data"), *((f, "features") for f in features)]:
        names = [choice["name"] for choice in known[among]]
        if name not in names:
            raise ValueError(f"{name} is none of {', '.join(names)}")
    chosen = {start, data, *features}
    if why := refusal(known, chosen):
        raise ValueError(why)
    template = (FOLDER / "train.py.txt").read_text(encoding="utf-8")
    made = made_by(known, chosen) if made is None else made
    return render(template, chosen, file, made)


def whole(name, data, features):
    """The text of a script of WHOLE, as train.py of this folder. ValueError for a feature."""
    if features or data != "digits":
        words = " ".join(["--with " + ",".join(features)] * bool(features))
        words = words or f"--data {data}"
        raise ValueError(
            f"{name} takes no {words}: what each process reads and saves depends on how it "
            f"divides; change minimal/{name}.py by hand"
        )
    text = (ROOT / f"minimal/{name}.py").read_text(encoding="utf-8")
    text = text.replace(f"minimal/{name}.py", "train.py")
    return text.replace('.parents[1].glob("docs/', '.parent.glob("docs/')  # the text it learns


def refusal(known, chosen, language="en"):
    """Why these names make no sense together, in one line; "" if they do."""
    for rule in known["refused"]:
        if holds(rule["when"], chosen):
            return rule["why"][language]
    return ""


def made_by(known, chosen):
    """The command that makes this script."""
    (start,) = (choice["name"] for choice in known["starts"] if choice["name"] in chosen)
    (data,) = (choice["name"] for choice in known["data"] if choice["name"] in chosen)
    words = ["python compose.py", start] + ["--data " + data] * (data != "digits")
    line, *lines = [" ".join(words)]
    features = [choice["name"] for choice in known["features"] if choice["name"] in chosen]
    for number, name in enumerate(features):
        word = name if number else f" --with {name}"
        line += "," * (number > 0)
        if len(line + word) > WIDTH - 12:
            lines.append(line + "\\")
            line = ""
        line += word
    return "\n".join([*lines, line])


def holds(condition, true):
    """Whether a condition holds: names, which are true if they are in `true`; and, or, not, ( )."""
    code = compiled(condition)
    return eval(code, {name: name in true for name in code.co_names})


@cache
def compiled(condition):
    return compile(condition, condition, "eval")


def render(template, chosen, file, made):
    """The script that a template gives for the names in `chosen`.

    The syntax is told at the top of the template. render.js does the same in a browser.
    """
    true = {*chosen, *["made"] * bool(made)}
    words = {"file": file, "made": made}

    def filled(text):
        return re.sub(r"\$([a-z_]+)", lambda match: words[match[1]], text)

    def chosen_text(texts):
        for text in texts.split(" else "):
            text, _, condition = text.partition(" if ")
            if not condition or holds(condition, true):
                return filled(text)
        return ""

    lines, open_blocks = [], []  # of each block: [shown, whether one of its parts was, its indent]
    for line in template.splitlines():
        directive, _, rest = line.strip().partition(" ")
        shown = all(block[0] for block in open_blocks)
        if directive == "#if":
            now = holds(rest, true)
            open_blocks.append([now, now, ""])
        elif directive == "#indent":
            open_blocks.append([True, True, "    " * holds(rest, true)])
        elif directive in ("#elif", "#else"):
            block = open_blocks[-1]
            block[0] = not block[1] and (directive == "#else" or holds(rest, true))
            block[1] = block[1] or block[0]
        elif directive == "#end":
            open_blocks.pop()
        elif directive == "#let":
            name, _, value = rest.partition(" = ")
            if name.startswith("$"):
                words[name[1:]] = chosen_text(value)
            elif holds(value, true):
                true.add(name)
        elif shown and directive != "##":
            indent = "".join(block[2] for block in open_blocks)
            lines += [indent + part if part else "" for part in filled(line).split("\n")]
    return "\n".join(used_imports(lines)) + "\n"


def used_imports(lines):
    """The lines without the imports that they do not use; a long import in brackets."""
    end = lines.index('"""') + 1
    imports = [re.match(r"(?:from \S+ )?import (.*)", line) for line in lines]
    rest = [line for line, match in zip(lines, imports, strict=True) if not match][end:]
    code = re.sub(r'(^|\s)#.*|"[^"\n]*"', "", "\n".join(rest), flags=re.M)
    used = {*re.findall(r"(?<![\w.])\w+\.?", code)}  # with the dot behind a name
    kept = lines[:end]
    for line, match in zip(lines[end:], imports[end:], strict=True):
        if not match:
            if line or kept[-1] or kept[-2] != '"""':
                kept.append(line)
        elif line.startswith("import"):
            kept += [line] * (match[1].split(" ")[-1] + "." in used)
        else:
            names = [name for name in match[1].split(", ") if used & {name, name + "."}]
            line = line[: match.start(1)] + ", ".join(names)
            if len(line) > WIDTH:
                kept += [line[: match.start(1)] + "(", *(f"    {name}," for name in names), ")"]
            elif names:
                kept.append(line)
    return kept


def with_recipes(name, recipes):
    """The text of a full script, such as distributed.py, with recipes.

    ValueError for one that it does not take, and for those that do not fit together.
    """
    if name not in TAKES:
        raise ValueError(f"{name} is none of {', '.join(TAKES)}")
    for recipe in recipes:
        if recipe in BUILT_IN:
            raise ValueError(f"{name} has {recipe} without a recipe: {BUILT_IN[recipe]}")
        if recipe not in TAKES[name]:
            raise ValueError(f"{name} takes no {recipe}, but {', '.join(TAKES[name])}")
    if recipes and not shutil.which("patch"):
        raise ValueError("needs the program patch, such as from: apt-get install patch")
    chosen = sorted({*recipes}, key=TAKES[name].index)
    text = patched(name, chosen)
    if text is None:
        apart = [pair for pair in itertools.combinations(chosen, 2) if not patched(name, pair)]
        named = ", ".join(" and ".join(pair) for pair in apart or [chosen])
        raise ValueError(f"these change the same lines of {name}: {named}")
    return text


def patched(name, recipes):
    """The text of a full script with these recipes, in their order; None if they do not fit."""
    text = (ROOT / name).read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        path, diff = Path(folder, name), Path(folder, "diff")
        path.write_text(text, encoding="utf-8")
        imports = []
        for recipe in recipes:
            head, *hunks = re.split("^(?=@@)", recipe_text(recipe), flags=re.M)
            for hunk in hunks[:]:
                changes = re.findall("^[+-].*", hunk, re.M)
                if all(map(IMPORT.match, changes)):
                    imports += changes
                    hunks.remove(hunk)
            diff.write_text("".join([head, *hunks]), encoding="utf-8")
            # accumulate has indented lines of clip: -l does not look at blanks.
            loosely = ["-l"] * (recipe == "clip" and "accumulate" in recipes)
            command = ["patch", "-s", "-r-", *loosely, path, diff]
            if hunks and subprocess.run(command, capture_output=True).returncode:
                return None
        return with_imports(path.read_text(encoding="utf-8"), imports)


def recipe_text(name):
    return (ROOT / f"recipes/{name}.diff").read_text(encoding="utf-8")


# A line that imports for the whole file: of a script, or of a diff, with its sign.
IMPORT = re.compile(r"([+-]?)((?:from \S+ )?import )(.*)")
OURS = ("common", "longrun", "recipes")


def with_imports(text, changes):
    """A full script with the lines of imports that diffs add and remove: "+import csv".

    Not by patch: two recipes may change the same line, or lines next to each other.
    """
    before, there, rest = around_imports(text)
    imported = {}  # the line up to its names, "from math import ": its names, or "" for none
    for line in [*filter(None, there), *changes]:
        sign, start, names = IMPORT.match(line).groups()
        names, start = ({*names.split(", ")}, start) if "from" in start else ({""}, start + names)
        others = imported.get(start, set()) - names
        imported[start] = others if sign == "-" else others | names
    groups = ([], [], [])  # as ruff sorts them: Python's own, other people's, ours
    for start in sorted(imported, key=lambda start: (start.startswith("from"), start)):
        top = re.split("[ .]", start)[1]
        group = groups[0 if top in sys.stdlib_module_names else 1 + (top in OURS)]
        classes_first = sorted(imported[start], key=lambda name: (name.islower(), name))
        group += [start + ", ".join(classes_first)] * bool(classes_first)
    block = "\n\n".join("\n".join(group) for group in groups)
    return "\n".join([*before, block, "", *rest]) + "\n"


def around_imports(text):
    """The lines of a script before its imports, those of its imports, and the rest."""
    lines = text.splitlines()
    first = next((n for n, line in enumerate(lines) if IMPORT.match(line)), 0)
    rest = next(n for n in range(first, len(lines)) if not IMPORT.match(lines[n] or "import "))
    return lines[:first], lines[first:rest], lines[rest:]


def main():
    known = choices()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("start", nargs="*", help="how it starts, such as torchrun")
    parser.add_argument(
        "--with", dest="features", nargs="+", default=[], help="such as amp,resume,f1"
    )
    parser.add_argument("--data", default="digits", help="digits, images or own")
    parser.add_argument("--diff", help="against this start, or the script without this feature")
    help_of_list = "all that can be chosen, or the recipes of a full script"
    parser.add_argument("--list", action="store_true", help=help_of_list)
    args = parser.parse_args()
    if args.list and args.start and args.start[0] in TAKES:
        print("\n".join(TAKES[args.start[0]]))
        return
    if args.list or not args.start:
        for axis in ("starts", "features", "data"):
            print(f"{axis} ({HOW[axis]}):")
            for choice in known[axis]:
                if not choice.get("hidden"):
                    print(f"  {choice['name']:15} {choice['adds']['en']}")
            if axis == "starts":
                for name, adds in WHOLE.items():
                    print(f"  {name:15} {adds}; no features")
        return
    start, *more = args.start
    features = " ".join(args.features).replace(",", " ").split()
    full = start.endswith(".py")

    def made(start, features):
        if start in WHOLE:
            return whole(start, args.data, features)
        return with_recipes(start, features) if full else script(start, args.data, features)

    try:
        if more:
            raise ValueError(f"features come after --with: {start} --with {','.join(more)}")
        if full and args.data != "digits":
            raise ValueError(f"a full script has a flag --data of its own: {start} --data DIR")
        text = made(start, features)
        if args.diff:
            known = TAKES[start] if full else [feature["name"] for feature in known["features"]]
            if args.diff not in features and args.diff in known:
                raise ValueError(f"--diff {args.diff} needs {args.diff} in --with")
            less = [name for name in features if name != args.diff]
            old = made(start if args.diff in features else args.diff, less)
            lines = [part.splitlines(keepends=True) for part in (old, text)]
            text = "".join(difflib.unified_diff(*lines, f"without {args.diff}", "train.py"))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
