"""The recording at the top of the README, by tools/record.py: the commands still say this."""

import json
import os
import re
from pathlib import Path

import pytest
from conftest import PYTHON, ROOT

from tools import record

KEPT = json.loads((ROOT / "results/recording.json").read_text())
NUMBER = re.compile(r"\d+\.\d")


def said(parts):
    """[(command, its lines without numbers)] and the numbers."""
    lines = [[line for _, line in part["output"]] for part in parts]
    forms = [[NUMBER.sub("#", line) for line in output] for output in lines]
    numbers = [float(n) for output in lines for line in output for n in NUMBER.findall(line)]
    return [*zip([part["command"] for part in parts], forms, strict=True)], numbers


@pytest.mark.full
def test_the_recording_is_what_the_commands_print(monkeypatch):
    """Another CPU may round otherwise: an image or two more or less, of 359."""
    monkeypatch.setenv("PATH", f"{Path(PYTHON).parent}:{os.environ['PATH']}")
    (forms, numbers), (kept_forms, kept) = said(record.record()), said(KEPT)
    assert forms == kept_forms and numbers == pytest.approx(kept, abs=1.2)


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md", "docs/recording.svg"])
def test_what_is_said_of_it(name):
    wrong, right = said(KEPT)[1][4::5]
    assert wrong > 100 > right
    text = (ROOT / name).read_text(encoding="utf-8")
    assert re.findall(r"(\d+\.\d) % correct\W.*?(\d+\.\d) %", text)[0] == (f"{wrong}", f"{right}")
