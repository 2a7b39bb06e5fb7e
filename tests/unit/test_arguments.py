"""Flags: what --help says, what is refused, what a checkpoint and the data add; a user's errors."""

import io
import os
import sys
from types import SimpleNamespace

import pytest
import torch

from common.arguments import DIGITS, IMAGENET, ArgumentParser, bounded, complete, say, user_errors


def parsed(*argv, **flag):
    parser = ArgumentParser()
    parser.add_argument("--flag", **flag)
    return parser.parse_args([*argv])


def test_help_shows_the_default_of_every_flag(monkeypatch, capsys):
    import distributed

    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setattr(sys, "argv", ["distributed.py", "--help"])
    with pytest.raises(SystemExit) as end:
        distributed.parse_args()
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    precision = "bf16" if torch.cuda.is_available() else "fp32"
    for words in (
        "your package.module:callable (default: resnet50; for the digits: resnet18) ",
        "over all processes (default: 256; for the digits: 64) ",
        "it is scaled with the batch (default: 0.1) ",
        "rises linearly (default: 5.0; for the digits: 1.0) ",
        "side length in pixels (default: 224; for the digits: 64) ",
        "of all weights (default: 0.0001) ",
        "save every N steps too; 0: do not (default: 0) ",
        "one for each run (default: checkpoints) ",
        f"of the forward pass (default: {precision}) ",
        "loader processes per data set (default: cores) -",  # what the text says itself
        "(default: nccl on GPUs, gloo on CPUs) -",
        "torch.compile the model -",
        "the newest of the run, if any -",
        "show this help message and exit -",
    ):
        assert words in text, words


@pytest.mark.parametrize(
    ("limits", "text", "message"),
    [
        ((int, 1), "0", "must be at least 1, not 0"),
        ((int, 1, 4096), "4097", "must be between 1 and 4096, not 4097"),
        ((int, 1, 4096), "0", "must be between 1 and 4096, not 0"),
        ((float, 0, 1), "1.5", "must be between 0 and 1, not 1.5"),
        ((float, 0), "nan", "must be at least 0, not nan"),
        ((float, 0), "inf", "must be finite, not inf"),
        ((float, 0), "-inf", "must be at least 0, not -inf"),
        ((int, 1), "many", "invalid int value: 'many'"),
    ],
)
def test_numbers_out_of_bounds(limits, text, message):
    with pytest.raises(ValueError) as error:
        parsed(f"--flag={text}", type=bounded(*limits))
    assert str(error.value) == f"argument --flag: {message} (see --help)"


def test_numbers_within_bounds():
    assert parsed("--flag", "1", type=bounded(int, 1, 2)).flag == 1
    assert parsed("--flag", "2", type=bounded(int, 1, 2)).flag == 2
    assert parsed("--flag", "1e-4", type=bounded(float, 0)).flag == 1e-4


def test_an_empty_value_is_an_error():
    with pytest.raises(ValueError, match=r"^--flag is empty: is a variable not set\? \(see --help"):
        parsed("--flag=")


@pytest.mark.parametrize("data", [None, "somewhere"])
def test_defaults_are_those_of_the_data(data):
    args = SimpleNamespace(data=data, lr=None, epochs=None, resume=None, arch="mine:net")
    completed = complete(args, {})
    defaults = IMAGENET if data else DIGITS
    assert (completed.lr, completed.epochs) == (defaults["lr"], defaults["epochs"])
    assert (completed.arch, completed.resume) == ("mine:net", None)
    assert args.lr is None and not hasattr(completed, "image_size")  # it has no such flag


def test_a_checkpoint_knows_its_model_and_its_image_size():
    saved = {"arch": "mine:net", "image_size": 24, "lr": 7.0, "epochs": 9}
    args = SimpleNamespace(data=None, arch=None, image_size=None, lr=None, epochs=None)
    completed = complete(args, saved)
    assert (completed.arch, completed.image_size) == ("mine:net", 24)
    assert (completed.lr, completed.epochs) == (DIGITS["lr"], DIGITS["epochs"])
    args.image_size = 32
    assert complete(args, saved).image_size == 32  # the command line comes first


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_name_that_the_terminal_cannot_show_is_printed_with_escapes(name, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, name, io.TextIOWrapper(written, "ascii", "strict"))
    parsed()
    print("für \udcff", file=getattr(sys, name), flush=True)
    assert written.getvalue() == b"f\\xfcr \\udcff\n"


def test_a_closed_stdout(monkeypatch, capfd):
    """By `>&-` in a shell, or by the script itself."""
    closed = open(os.devnull)  # noqa: SIM115
    closed.close()
    for stdout in (closed, None):
        monkeypatch.setattr(sys, "stdout", stdout)
        say("words")
    parsed()
    assert capfd.readouterr().err == "words\nwords\n"


def test_the_other_processes_wait_for_local_rank_0_to_speak(monkeypatch, capfd):
    ended, waited = [], []

    def leave(code):
        ended.append(code)
        raise SystemExit

    def fail(*who):
        waited.clear()
        with pytest.raises(SystemExit), user_errors(*who):
            raise ValueError("wrong\nfurther lines")
        return capfd.readouterr().err, list(waited)

    def stop(asked):
        wait = lambda seconds: waited.append(seconds) or asked  # noqa: E731
        return SimpleNamespace(requested=SimpleNamespace(wait=wait))

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr("time.sleep", waited.append)
    assert fail(0) == fail(0, stop(False)) == ("error: wrong\n", [])
    # An error of this process alone: nobody has stopped it.
    assert fail(1) == fail(1, stop(False)) == ("error: wrong\n", [30])
    # The launcher stops those that local rank 0 has left.
    assert fail(1, stop(True)) == ("", [30])
    assert ended == [2] * 5


def test_a_signal_ends_the_block_at_once():
    stop = SimpleNamespace(at_once=False)
    with pytest.raises(ZeroDivisionError), user_errors(0, stop):
        assert stop.at_once
        _ = 1 / 0  # a mistake of ours is no user's error
    assert not stop.at_once


def test_a_package_that_is_missing(monkeypatch, capfd):
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit), user_errors(0, remedy="pip install it"):
        raise ImportError("no apex")
    assert capfd.readouterr().err == "error: no apex: pip install it\n"
    with pytest.raises(ImportError), user_errors(0):
        raise ImportError("no apex")
