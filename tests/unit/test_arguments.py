"""Flags: what --help says; how errors, and all else that a run says, come to the terminal.

Which flags are refused: test_mistakes.py.
"""

import io
import os
import sys

import pytest
import torch

from longrun.arguments import ArgumentParser
from longrun.messages import exit_on_user_error, print_error, print_if_possible


def test_help_shows_the_default_of_every_flag(monkeypatch, capsys):
    import distributed

    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setattr(sys, "argv", ["distributed.py", "--help"])
    with pytest.raises(SystemExit) as end:
        distributed.parse_args(10000)
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    precision = "bf16" if torch.cuda.is_available() else "fp32"
    for words in (
        "your package.module:callable (default: resnet50) ",
        "it is scaled with the batch (default: 0.1) ",
        "save every N steps of an epoch (default: 0) ",
        "of the training loss (default: 0.0) ",
        f"of the forward pass (default: {precision}) ",
        "loader processes (default: 1) ",
        "torch.compile the model -",
        "the newest of the run, if any -",
        "show this help message and exit -",
    ):
        assert words in text, words


def test_a_closed_stdout(monkeypatch, capfd):
    """By `>&-` in a shell."""
    monkeypatch.setattr(sys, "stdout", None)
    print_error("words")
    print_if_possible("words")
    ArgumentParser().parse_args([])
    assert capfd.readouterr().err == "words\n"


@pytest.mark.parametrize("rank, waited", [(0, []), (1, [30])])
def test_the_others_wait_for_local_rank_0_to_speak(rank, waited, monkeypatch, capfd):
    """If nobody has stopped one after that time, it alone has the error."""
    waits = []
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr("time.sleep", waits.append)
    with pytest.raises(SystemExit) as end, exit_on_user_error(rank):
        raise ValueError("wrong\nfurther lines")
    assert (end.value.code, capfd.readouterr().err, waits) == (2, "error: wrong\n", waited)


def test_a_mistake_of_ours_is_no_users_error():
    with pytest.raises(ZeroDivisionError), exit_on_user_error(0):
        raise ZeroDivisionError


def test_a_package_that_is_missing_is_the_users_to_install(monkeypatch, capfd):
    """Such as the one that a recipe needs."""
    monkeypatch.setattr("os._exit", sys.exit)
    with pytest.raises(SystemExit) as end, exit_on_user_error(0):
        import no_such_package  # noqa: F401
    assert end.value.code == 2
    assert capfd.readouterr().err == "error: No module named 'no_such_package'\n"


NAME = "caf\u00e9\x1b[2K\r\u202e\x85\udcff\nrank 0 failed"  # of a file, as somebody may make it


@pytest.mark.parametrize("encoding, e", [("utf-8", "\u00e9"), ("ascii", r"\xe9")])
def test_no_name_moves_the_cursor_or_looks_like_a_line_of_ours(encoding, e, monkeypatch, capfd):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr(sys, "stdout", stdout)
    print_if_possible(NAME, "next")
    print_error(NAME, f"Traceback\n{NAME}\n")
    shown = rf"caf{e}\x1b[2K\r\u202e\x85\udcff"
    reason = rf"{shown}\nrank 0 failed"
    assert stdout.buffer.getvalue().decode(encoding) == f"{reason}\nnext\n"
    assert capfd.readouterr().err == f"Traceback\n{shown}\nrank 0 failed\n{reason}\n"


def test_a_full_disk_and_a_closed_pipe_do_not_stop_a_run(tmp_path, monkeypatch):
    """What a full disk did not take is written once there is room."""
    stdout = open("/dev/full", "w")  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", stdout)
    print_if_possible("first")
    with open(tmp_path / "file", "w") as file:
        os.dup2(file.fileno(), stdout.fileno())
    print_if_possible("second")
    assert (tmp_path / "file").read_text() == "first\nsecond\n"
    read, write = os.pipe()
    os.close(read)
    monkeypatch.setattr(sys, "stdout", open(write, "w"))  # noqa: SIM115
    print_if_possible("first")
    print_if_possible("second")
