"""Flags: what --help says, what a checkpoint and the data add; how a user's errors are said.

Which flags are refused: test_mistakes.py.
"""

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from longrun.arguments import DIGITS, IMAGENET, ArgumentParser, complete, say, user_errors


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
        "it is scaled with the batch (default: 0.1; for the digits: 0.1) ",
        "save every N steps too; 0: do not (default: 0) ",
        f"of the forward pass (default: {precision}) ",
        "loader processes per data set (default: cores) -",  # what the text says itself
        "torch.compile the model -",
        "the newest of the run, if any -",
    ):
        assert words in text, words
    of_a_copy = ArgumentParser()
    of_a_copy.add_argument("--lr", default=0.3)
    assert "(default: 0.3)" in of_a_copy.format_help()


@pytest.mark.parametrize("data", [None, "somewhere"])
def test_what_is_not_given_is_the_checkpoints_or_that_of_the_data(data):
    """The model and its image size are the checkpoint's, where there is one."""
    args = SimpleNamespace(data=data, lr=None, epochs=7, resume=None, arch=None, image_size=None)
    defaults = IMAGENET if data else DIGITS
    expected = defaults | {"data": data, "resume": None, "epochs": 7}
    assert vars(complete(args, {})) == expected  # all of them, also for a copy with fewer flags
    args.image_size = 32
    completed = complete(args, {"arch": "mine:net", "image_size": 24, "lr": 7.0, "epochs": 9})
    assert vars(completed) == expected | {"arch": "mine:net", "image_size": 32}


def test_a_closed_stdout(monkeypatch, capfd):
    """By `>&-` in a shell."""
    monkeypatch.setattr(sys, "stdout", None)
    say("words")
    ArgumentParser().parse_args([])
    assert capfd.readouterr().err == "words\n"


@pytest.mark.parametrize(
    "rank, asked, said, waited",
    [
        (0, None, "error: wrong\n", []),
        (1, None, "error: wrong\n", [30]),  # an error of this process alone: nobody has stopped it
        (1, False, "error: wrong\n", [30]),
        (1, True, "", [30]),  # the launcher stops those that local rank 0 has left
    ],
)
def test_the_others_wait_for_local_rank_0_to_speak(rank, asked, said, waited, monkeypatch, capfd):
    waits = []
    wait = lambda seconds: waits.append(seconds) or asked  # noqa: E731
    stop = None if asked is None else SimpleNamespace(requested=SimpleNamespace(wait=wait))
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr("time.sleep", waits.append)
    with pytest.raises(SystemExit) as end, user_errors(rank, stop):
        raise ValueError("wrong\nfurther lines")
    assert end.value.code == 2 and capfd.readouterr().err == said and waits == waited


def test_a_mistake_of_ours_is_no_users_error(monkeypatch, capfd):
    """Nor is a package that is missing, unless it is said how to get it."""
    monkeypatch.setattr(os, "_exit", sys.exit)
    for raised, remedy in (ZeroDivisionError, "pip install it"), (ImportError, None):
        with pytest.raises(raised), user_errors(0, remedy=remedy):
            raise raised
    with pytest.raises(SystemExit), user_errors(0, remedy="pip install it"):
        raise ImportError("no apex")
    assert capfd.readouterr().err == "error: no apex: pip install it\n"
