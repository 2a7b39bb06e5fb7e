"""What a user can get wrong is said in one line, and exit code 2: distributed.py, in this process.

tests/run/test_errors.py shows that the same happens by a launcher.
"""

import os
import shutil
import socket
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import SMALL

import distributed


@pytest.fixture(scope="module")
def folders(work):
    """A folder to be in, with data folders that have one thing wrong in each."""

    def copy(name):
        shutil.copytree(work / "data/digits", work / "mistakes" / name)
        return work / "mistakes" / name

    shutil.rmtree(copy("no_val") / "val")
    flat = copy("flat_val") / "val"
    for path in list(flat.glob("*/*")):
        path.rename(flat / path.name)
    for digit in range(10):
        (flat / str(digit)).rmdir()
    shutil.rmtree(copy("other_classes") / "val/7")
    for path in (copy("empty_class") / "train/4").iterdir():
        path.unlink()
    for path in (copy("empty_val") / "val").glob("*/*"):
        path.unlink()
    folder = work / "mistakes"
    (folder / "data").symlink_to(work / "data")
    (folder / "garbage.pth").write_bytes(b"not a checkpoint")
    torch.save({"state_dict": {}}, folder / "weights.pth")
    (folder / "a_file").write_text("")
    return folder


@pytest.fixture
def mistake(folders, tmp_path, monkeypatch, capfd):
    """Runs distributed.py until it finds what is wrong with the flags; returns what it says."""
    threads = torch.get_num_threads()

    def leave(code):
        raise SystemExit(code)

    def mistake(*flags, env=(), before=""):
        monkeypatch.chdir(folders)
        monkeypatch.setattr(os, "environ", {**os.environ, **dict(env)})
        monkeypatch.setattr(os, "_exit", leave)
        monkeypatch.setattr(
            distributed, "StopRequest", lambda **_: None
        )  # the signals are pytest's
        given = [*SMALL, "-j", "0", "--checkpoint-dir", str(tmp_path / "c"), *flags]
        monkeypatch.setattr(sys, "argv", ["distributed.py", *given])
        with pytest.raises(SystemExit) as end:
            distributed.main()
        assert end.value.code == 2
        (line,) = "".join(capfd.readouterr()).removeprefix(before).splitlines()
        assert line.startswith("error: ")
        assert not list(tmp_path.glob("c/[!.]*"))  # nothing is written
        return line.removeprefix("error: ")

    yield mistake
    torch.set_num_threads(threads)


CASES = {
    "no folder": ("--data nowhere", "no folder nowhere/train: --data needs train/ and val/ in it"),
    "no val": ("--data no_val", "no folder no_val/val: --data needs train/ and val/ in it"),
    "flat val": (
        "--data flat_val",
        "no class folders in flat_val/val: put its images into flat_val/val/CLASS/",
    ),
    "classes": ("--data other_classes", "classes in only one of train/ and val/: 7"),
    "empty class": ("--data empty_class", "no images in empty_class/train/4"),
    "empty val": ("--data empty_val", "no images"),
    "batch too large": ("-b 2000", "1437 images to train do not fill one --batch-size 2000"),
    "unknown arch": ("-a resnet19", "unknown --arch resnet19: give package.module:callable or one"),
    "unknown module": ("-a nowhere:net", "cannot import --arch nowhere:net: No module named"),
    "unknown callable": ("-a tests.nets:x", "cannot import --arch tests.nets:x: "),
    "size": ("-a maxvit_t", "maxvit_t cannot take --image-size 24: "),
    "tuple": ("-a tests.nets:two_outputs", "tests.nets:two_outputs gives a tuple for one image"),
    "head": ("-a tests.nets:wrong_head", "gives (1, 11) for one image, not scores [1, 10]"),
    "weights of own": ("--pretrained", "--pretrained is for torchvision's models"),
    "unknown flag": ("--epoch-count 3", "unrecognized arguments: --epoch-count 3 (see --help)"),
    "not a number": ("--epochs many", "argument --epochs: invalid int value: 'many'"),
    "zero": ("--print-freq 0", "argument -p/--print-freq: must be at least 1, not 0 ("),
    "nan": ("--lr nan", "argument --lr: must be at least 0, not nan ("),
    "infinite": ("--lr inf", "argument --lr: must be finite, not inf ("),
    "negative seed": ("--seed -1", "argument --seed: must be between 0 and 9"),
    "timeout": ("--dist-timeout 1e15", "argument --dist-timeout: invalid int value: '1e15'"),
    "one image": (
        "-a resnet18 -b 1",
        "resnet18 cannot take --image-size 24 with one image per process: Expected more than 1 val",
    ),
    "empty resume": ("--resume=", "--resume is empty: is a variable not set? (see --help)"),
    "no checkpoint": ("--resume nothing.pth", "/nothing.pth"),
    "garbage": ("--resume garbage.pth", "garbage.pth is damaged (BadZipFile: File is not a zip"),
    "not ours": ("--resume weights.pth", "weights.pth is no checkpoint of these scripts"),
    "nothing to evaluate": ("-e --resume auto --checkpoint-dir none", "no checkpoint to evaluate"),
    "folder is a file": ("--checkpoint-dir a_file", "File exists: "),
    "folder below a file": ("--checkpoint-dir a_file/c", "Not a directory: "),
    "nccl": ("--backend nccl", "--backend nccl needs GPUs and this node has none: use gloo"),
    "sync-bn": ("--sync-bn", "--sync-bn needs GPUs: torch has no SyncBatchNorm for CPUs"),
}


@pytest.mark.parametrize("case", CASES)
def test_flags(case, mistake):
    if case in ("nccl", "sync-bn") and torch.cuda.is_available():
        pytest.skip("a GPU is here")
    flags, message = CASES[case]
    assert message in mistake(*flags.split())


def test_no_network_for_pretrained_weights(mistake, tmp_path, monkeypatch):
    """The proxy is a port that nobody listens at."""
    env = {"https_proxy": "http://127.0.0.1:9", "TORCH_HOME": str(tmp_path)}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    file = "resnet18-f37072fd.pth"
    before = f'Downloading: "https://download.pytorch.org/models/{file}" to {tmp_path}/hub'
    before += f"/checkpoints/{file}\n"  # torch says so
    line = mistake("-a", "resnet18", "--pretrained", before=before)
    assert line.startswith("cannot download the weights of resnet18: ")


ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
ALONE |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (
            {"RANK": "0", "WORLD_SIZE": "4"},
            "LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT not set though others are",
        ),
        (ALONE | {"RANK": "abc"}, "RANK must be an integer of at least 0, not 'abc'"),
        (ALONE | {"WORLD_SIZE": "0"}, "WORLD_SIZE must be an integer of at least 1"),
        (ALONE | {"RANK": "1"}, "RANK=1"),  # of one
        (ALONE | {"MASTER_PORT": "70000"}, "rank 0 cannot use 127.0.0.1:70000 to meet the others:"),
    ],
    ids=["some are missing", "no number", "nobody", "no such rank", "no port"],
)
def test_variables(env, message, mistake):
    assert message in mistake("--dist-timeout", "3", env=env)


def test_a_taken_port(mistake):
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        line = mistake("--dist-timeout", "3", env=ALONE | {"MASTER_PORT": port})
    assert line.startswith(f"rank 0 cannot use 127.0.0.1:{port} to meet the others: ")
    assert "EADDRINUSE" in line


def test_flags_do_not_collide_with_torchruns(monkeypatch):
    """torchrun refuses a script's flag that is an abbreviation of several of its own."""
    from torch.distributed.run import get_args_parser

    theirs = [o for a in get_args_parser()._actions for o in a.option_strings if o[:2] == "--"]
    parsers = []
    parse = distributed.ArgumentParser.parse_args
    monkeypatch.setattr(sys, "argv", ["distributed.py"])
    monkeypatch.setattr(
        distributed.ArgumentParser, "parse_args", lambda self: parsers.append(self) or parse(self)
    )
    distributed.parse_args()
    ours = [o for a in parsers[0]._actions for o in a.option_strings if o[:2] == "--"]
    assert len(ours) > 25
    for flag in ours:
        assert sum(option.startswith(flag) and option != flag for option in theirs) < 2, flag


def test_the_learning_rate_rises_and_falls():
    args = SimpleNamespace(lr=0.1, batch_size=1024, warmup_epochs=5, epochs=90)
    rates = [distributed.learning_rate(args, epoch / 10) for epoch in range(900)]
    assert max(rates) == pytest.approx(0.4) == rates[50]
    assert sorted(rates[1:51]) == rates[1:51] and 0 < rates[0] < 0.01
    assert sorted(rates[50:], reverse=True) == rates[50:] and rates[-1] < 1e-5
