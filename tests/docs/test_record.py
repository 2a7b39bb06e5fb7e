"""The recording at the top of the README, by tools/record.py: the commands still say this."""

import json
import os
import re
from pathlib import Path
from xml.sax.saxutils import unescape

import pytest
from conftest import PYTHON, ROOT

from tools import record

KEPT = json.loads((ROOT / "results/recording.json").read_text())
NUMBER = re.compile(r"\d+\.\d")
LINE = re.compile("<text.*?>(.*)</text>")


def said(parts):
    """[(command, its lines without numbers)] and the numbers."""
    forms = [[NUMBER.sub("#", line) for line in part["output"]] for part in parts]
    numbers = [float(n) for part in parts for n in NUMBER.findall(" ".join(part["output"]))]
    return [*zip([part["command"] for part in parts], forms, strict=True)], numbers


@pytest.mark.full
def test_the_recording_is_what_the_commands_print(monkeypatch):
    """Another CPU may round otherwise: an image or two more or less, of 359, each counted twice.

    That the doctor's other runs add no line of docs/bugs.md is seen in test_doctor.py.
    """
    monkeypatch.setenv("PATH", f"{Path(PYTHON).parent}:{os.environ['PATH']}")
    *commands, doctor = record.COMMANDS
    assert doctor.startswith("python doctor ")
    quick = doctor.replace("doctor ", "doctor --quick ", 1)
    monkeypatch.setattr(record, "COMMANDS", [*commands, quick])
    parts = record.record()
    parts[-1]["command"] = doctor
    (forms, numbers), (kept_forms, kept) = said(parts), said(KEPT)
    assert forms == kept_forms and numbers == pytest.approx(kept, abs=1.2)


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md", "docs/recording.svg"])
def test_what_is_said_of_it(name):
    (wrong,) = said(KEPT)[1]
    assert wrong > 100 and KEPT[-1]["output"][0].startswith(" distributed.py:46  each process")
    text = (ROOT / name).read_text(encoding="utf-8")
    assert re.findall(r"(\d+\.\d) % correct", text)[0] == f"{wrong}"


def test_a_phone_shows_it_whole():
    svg = (ROOT / "docs/recording.svg").read_text()
    width, size = (float(re.search(f'{name}="(.*?)"', svg)[1]) for name in ("width", "font-size"))
    assert all(12 + 0.602 * size * len(unescape(line)) <= width for line in LINE.findall(svg))


@pytest.mark.parametrize("path", sorted(ROOT.glob("docs/*.svg")), ids=lambda path: path.name)
def test_a_phone_shows_letters_of_ten_pixels_or_more(path):
    """It shows a picture 358 pixels wide. Nothing in it moves or comes later."""
    svg = path.read_text()
    width = float(re.search('viewBox="0 0 ([0-9]+) ', svg)[1])
    sizes = {float(size) for size in re.findall('font-size="([0-9.]+)"', svg)}
    assert min(sizes) * 358 / width >= 10 and "animat" not in svg
