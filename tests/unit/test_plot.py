"""Pictures of metrics.jsonl: as a file, and as text."""

import json
import os
import subprocess
import sys

import pytest
from conftest import PYTHON, ROOT

import plot


def write(folder, rows, more=""):
    folder.mkdir()
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text + more)
    return str(folder)


@pytest.fixture
def runs(tmp_path):
    """Two: one was stopped and resumed, one has scores of its own and a loss that is null."""
    rows = [
        {"epoch": x, "step": 0, "train_loss": 3 / x, "val_loss": 2 / x, "acc1": 10.0 * x}
        | {"acc5": 90.0, "lr": 0.1, "images_per_second": 100.0 + x, "seconds": 1.0}
        for x in (1, 2, 3)
    ]
    cut = {"epoch": 1, "step": 4, "val_loss": 1.5}
    half = '{"epoch": 4, "st'
    a = write(tmp_path / "a", [rows[0], cut, *rows[1:]], f"null\n[]\n{half}")
    mine = [{"epoch": x, "step": 0, "f1": x / 8, "val_loss": None, "note": "x"} for x in (1, 2)]
    return {folder: plot.read_run(folder) for folder in (a, write(tmp_path / "b", mine))}


def test_rows_are_those_that_are_whole(runs):
    assert [list(rows) for rows in runs.values()] == [[1.0, 1.5, 2.0, 3.0], [1.0, 2.0]]
    assert plot.panels(runs) == {
        "loss": ["train_loss", "val_loss"],
        "accuracy, %": ["acc1", "acc5"],
        "learning rate": ["lr"],
        "images per second": ["images_per_second"],
        "f1": ["f1"],
    }


def test_text(runs, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    a, b = runs
    lines = list(plot.as_text(runs))
    assert lines[0] == "epoch 1 to 3, first -> last value"
    at = lines.index("acc1, from 10 to 30")
    assert lines[at + 1].split() == [a[-40:], "▁", "▅█", "10", "->", "30"]
    at = lines.index("f1, from 0.125 to 0.25")
    assert lines[at + 1].split() == [b[-40:], "▁", "█", "0.125", "->", "0.25"]
    monkeypatch.setenv("COLUMNS", "40")
    many = {"x": {float(i): {"lr": i} for i in range(1, 1000)}}
    assert max(map(len, plot.as_text(many))) <= 40
    assert "  ▁▂▃▃▄▅▆▆▇█  1 -> 999" in list(plot.as_text(many))[-1]


@pytest.mark.parametrize("name", ["curves.svg", "curves.png"])
def test_a_picture(runs, name, tmp_path):
    plot.draw(runs, tmp_path / name)
    written = (tmp_path / name).read_bytes()
    assert written.startswith(b"\x89PNG" if name.endswith("png") else b"<?xml")
    if name.endswith("svg"):  # in which each panel and each run is named
        for text in [*runs, "loss", "train_loss", "learning rate", "f1", "epoch"]:
            assert f"<!-- {text} -->".encode() in written, text


def plotted(*words, **env):
    command = [PYTHON, ROOT / "plot.py", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=150)
    return done.returncode, done.stdout, done.stderr


def test_errors_are_one_line(runs, tmp_path, monkeypatch):
    code, _, said = plotted(tmp_path)
    expected = f"error: no {tmp_path}/metrics.jsonl: give the --checkpoint-dir of a run"
    assert code == 2 and said.startswith(expected) and said.count("\n") == 1
    (tmp_path / "metrics.jsonl").write_text("null\n")
    assert plotted(tmp_path)[2] == f"error: {tmp_path}/metrics.jsonl has no epoch yet\n"
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 1}\n')
    assert plotted(tmp_path)[2] == f"error: no numbers to draw in {tmp_path}\n"
    (tmp_path / "metrics.jsonl").write_text(f'{"[" * 9999}\n{{"epoch": 1, "loss": {"9" * 400}}}\n')
    assert plotted(tmp_path)[2] == f"error: no numbers to draw in {tmp_path}\n"
    (tmp_path / "metrics.jsonl").unlink()
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert plotted(tmp_path)[2].startswith(expected)
    code, _, said = plotted(next(iter(runs)), "--out", tmp_path / "x.doc")
    assert code == 2 and said.startswith("error: Format 'doc' is not supported")
    monkeypatch.setattr(sys, "argv", ["plot.py", next(iter(runs))])
    monkeypatch.setattr(sys, "stdout", open("/dev/full", "w"))  # noqa: SIM115
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit, match="2"):
        plot.main()


def test_without_matplotlib(runs, tmp_path):
    """A terminal without Unicode has other characters."""
    (tmp_path / "matplotlib.py").write_text("raise ModuleNotFoundError('No module matplotlib')")
    env = {"PYTHONPATH": str(tmp_path), "PYTHONIOENCODING": "ascii"}
    a = next(iter(runs))
    code, said, _ = plotted(a, **env)
    assert code == 0 and "acc1, from 10 to 30\n" in said and ". +#  10 -> 30" in said
    code, _, said = plotted(a, "--out", tmp_path / "x.svg", **env)
    assert code == 2 and said.startswith("error: No module matplotlib: --out needs it: python -m")


def test_it_starts_fast():
    """Without torch."""
    code = "import sys, plot; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
