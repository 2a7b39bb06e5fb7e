"""A notebook: its code cells are run one after the other, as by "Run All".

A line of a cell has the file "train.ipynb cell 3" in a traceback, where 3 counts the code cells:
the number that Jupyter shows beside a cell after all were run once. What is no Python is left out:
magics such as %matplotlib, shell lines such as !pip, and cells for another language.
"""

import json
import linecache
import re
import sys
import types
from pathlib import Path

from .words import listed, say

# Of these magics of a whole cell, what is below is Python that runs here.
KEEP = ("%%time", "%%timeit", "%%capture", "%%prun")
SHELL = re.compile(r"\s*(?:[\w, .\[\]]+=\s*)?[%!]\s*\w|\s*\?|.*\w\?\??\s*$")


def is_one(path):
    return str(path).endswith(".ipynb")


def cells(path):
    """[source] of the code cells; ValueError if it is no notebook."""
    try:
        known = json.loads(Path(path).read_text(encoding="utf-8"))
        found = [cell["source"] for cell in known["cells"] if cell["cell_type"] == "code"]
        return ["".join(source) for source in found]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no notebook: {type(error).__name__}: {error}") from None


def python_of(source):
    """(the cell with `pass` for each line that is no Python, how many lines those are)"""
    lines = source.split("\n")
    first = next((line for line in lines if line.strip()), "")
    if first.startswith("%%") and not first.startswith(KEEP):
        return "", sum(bool(line.strip()) for line in lines)
    kept, left, goes_on = [], 0, False
    if first.startswith("%%"):
        lines[lines.index(first)] = "pass"
    for line in lines:
        # A string of several lines may have such a line; a comparison is none.
        begins = not goes_on and SHELL.match(line) and not is_python(line)
        other = goes_on or bool(begins)
        goes_on = other and line.rstrip().endswith("\\")
        left += other
        # What goes on may be indented as no Python is: an empty line is right anywhere.
        instead = re.match(r"\s*", line)[0] + "pass" if begins else ""
        kept.append(instead if other else line)
    return "\n".join(kept), left


def is_python(line):
    try:
        compile(line.strip(), "", "exec")
    except SyntaxError:
        return False
    return True


def python_cells(path):
    """([a cell's Python], [how many of its lines are left out])

    A cell that is Python as it is stays so, whatever its lines look like.
    """
    kept, left = [], []
    for source in cells(path):
        python, count = (source, 0) if is_python(source) else python_of(source)
        kept.append(python)
        left.append(count)
    return kept, left


def left_out(path):
    """A line for the report, or ""."""
    _, left = python_cells(path)
    numbers = [str(number) for number, count in enumerate(left, 1) if count]
    if not numbers:
        return ""
    return say(
        "left out {count} lines of magics and shell, in cells {cells}",
        count=sum(left),
        cells=listed(numbers),
    )


def run(path):
    """In this process, as __main__."""
    main = types.ModuleType("__main__")
    main.__dict__.update({"__file__": path, "display": print})
    sys.modules["__main__"] = main
    for number, source in enumerate(python_cells(path)[0], 1):
        name = f"{path} cell {number}"
        # A traceback, inspect and torch.jit read the lines here.
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        exec(compile(source, name, "exec"), main.__dict__)
