"""What was found, for programs: JSON, lines that GitHub shows in the code, and SARIF.

Their words are English in every locale: a tool compares them with those of the last run.
"""

import json
import os
import re
import urllib.parse
from pathlib import Path
from typing import NamedTuple

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
ROOT = "%SRCROOT%"  # SARIF's name for the folder from which files are named


class Result(NamedTuple):
    level: str  # "error" or "warning"
    rule: str  # "docs/bugs.md#padded-validation"; "failed" or "stopped" for what ended the script
    text: str
    line: str  # "train.py:48"


class Told(NamedTuple):
    """What a run has shown."""

    found: list  # of Finding, with the page in its place
    failed: list  # why a process failed, in words that begin with its line
    stopped: str  # why the doctor has ended the run, or ""
    code: int  # the doctor's exit code
    folder: str  # from which lines are named


def written(told, form):
    """The text of a format; it ends with a newline, or is empty."""
    return {"json": as_json, "github": as_annotations, "sarif": as_sarif}[form](told)


def as_json(told):
    found = [one._asdict() for one in told.found]
    known = {"found": found, "failed": told.failed, "stopped": told.stopped}
    return json.dumps(known, indent=1) + "\n"


def results(told):
    found = []
    for one in told.found:
        level = "error" if one.certain else "warning"
        found.append(Result(level, one.place, one.text, one.line))
    for text in told.failed:
        line, _, said = text.partition("  ")
        found.append(Result("error", "failed", said, line))
    if told.stopped:
        found.append(Result("error", "stopped", told.stopped, "?"))
    return found


# ---- where a line is


def place_of(line, folder):
    """(the file's path from the repository's root, its line); (None, None) if it is not known.

    A notebook's lines are those of its cells, not of the file. Outside of the repository the path
    is absolute.
    """
    file, _, number = line.rpartition(":")
    notebook = re.fullmatch(r"(.*\.ipynb) cell \d+", file)
    if not number.isdigit():
        return None, None
    path = os.path.abspath(os.path.join(folder, notebook[1] if notebook else file))
    inside = os.path.relpath(path, root_of(folder))
    path = path if inside.startswith("..") else inside
    return path.replace(os.sep, "/"), None if notebook else int(number)


def root_of(folder):
    """The folder above that has a .git; without one, the current folder."""
    folder = Path(folder).resolve()
    return next((str(one) for one in (folder, *folder.parents) if (one / ".git").exists()), "") or (
        os.path.realpath(os.getcwd())
    )


# ---- GitHub: workflow commands on the output of a step


def as_annotations(told):
    return "".join(f"{annotation(one, told.folder)}\n" for one in results(told))


def annotation(one, folder):
    file, line = place_of(one.line, folder)
    known = {"file": file, "line": line, "title": f"doctor: {one.rule.rpartition('#')[2]}"}
    known = ",".join(f"{name}={escaped(value, True)}" for name, value in known.items() if value)
    at = f"{one.line}: " if line is None and one.line != "?" else ""  # such as a notebook's cell
    link = f" → {one.rule}" if "#" in one.rule else ""
    return f"::{one.level} {known}::{escaped(at + one.text + link)}"


def escaped(value, is_property=False):
    """As GitHub's own toolkit does."""
    text = str(value).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if is_property else text


# ---- SARIF 2.1.0


def as_sarif(told):
    root = root_of(told.folder)
    found = results(told)
    rules = list(dict.fromkeys(one.rule for one in found))
    run = {
        "tool": {"driver": {"name": "doctor", "rules": [rule(name) for name in rules]}},
        "originalUriBaseIds": {ROOT: {"uri": Path(root).as_uri().rstrip("/") + "/"}},
        "invocations": [{"executionSuccessful": told.code < 2, "exitCode": told.code}],
        "results": [result(one, rules.index(one.rule), told.folder) for one in found],
        "columnKind": "unicodeCodePoints",
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1) + "\n"


def rule(name):
    words = name.rpartition("#")[2].replace("-", " ")
    more = f"It is explained in {name}." if "#" in name else "The script did not end by itself."
    return {"id": name, "shortDescription": {"text": words}, "help": {"text": more}}


def result(one, number, folder):
    known = {"ruleId": one.rule, "ruleIndex": number, "level": one.level}
    file, line = place_of(one.line, folder)
    at = f"{one.line}: " if line is None and one.line != "?" else ""
    known["message"] = {"text": at + one.text}
    if file:
        known["locations"] = [{"physicalLocation": physical(file, line)}]
    return known


def physical(file, line):
    inside = not os.path.isabs(file)
    uri = urllib.parse.quote(file) if inside else Path(file).as_uri()
    place = {"artifactLocation": {"uri": uri} | ({"uriBaseId": ROOT} if inside else {})}
    return place | ({"region": {"startLine": line}} if line else {})
