"""What a user can get wrong is said in one line, and exit code 2: distributed.py, in this process.

tests/run/test_errors.py shows that the same happens by a launcher.
"""

import os
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import SMALL, without_launchers
from torch.distributed.run import get_args_parser

import distributed


@pytest.fixture
def mistake(work, tmp_path, monkeypatch, capfd):
    """Runs distributed.py until it finds what is wrong with the flags; returns what it says."""
    threads = torch.get_num_threads()

    def mistake(*flags, before=""):
        monkeypatch.chdir(work)
        monkeypatch.setattr(os, "environ", without_launchers(os.environ))
        monkeypatch.setattr(os, "_exit", sys.exit)
        # The signals are pytest's.
        monkeypatch.setattr(distributed, "StopRequest", lambda **_: None)
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
    "--data nowhere": "no folder nowhere/train: train/ and val/ must hold a folder per class",
    "-b 2000": "1437 images to train do not fill one --batch-size 2000",
    "-a resnet19": "unknown --arch resnet19: give package.module:callable or one of ",
    "-a nowhere:net": "cannot build nowhere:net for 10 classes and --image-size 24: ModuleNotFound",
    "-a maxvit_t": "cannot build maxvit_t for 10 classes and --image-size 24: ",
    "-a tests.nets:two_outputs": "tests.nets:two_outputs gives a tuple, not scores",
    "-a tests.nets:wrong_head": "gives [2, 11], not scores [n, 10]",
    "--pretrained": "--pretrained is for torchvision's models: give tests.nets:plain --pre",
    "--pretrained nowhere.pth": "--pretrained: no file nowhere.pth",
    "--pretrained=": "--pretrained is empty: is a variable not set? (see --help)",
    "--pretrained weights.pth": "weights.pth (state_dict) is of another model than this of 4 tens",
    "--epoch-count 3": "unrecognized arguments: --epoch-count 3 (see --help)",
    "--print-freq 0": "argument -p/--print-freq: must be 1 or more, not 0 (see --help)",
    "--lr nan": "argument --lr: must be 0 or more, not nan (",
    "--lr inf": "argument --lr: must be 0 or more, not inf (",
    "--seed -1": "argument --seed: must be between 0 and 9",
    "--dist-timeout 1e15": "argument --dist-timeout: invalid int value: '1e15'",
    "--resume=": "--resume is empty: is a variable not set? (see --help)",
    "--resume nothing.pth": "No such file or directory: '/",
    "--resume weights.pth": "weights.pth is no checkpoint of these scripts",
    "-e --resume auto --checkpoint-dir none": "no checkpoint to evaluate",
    "--checkpoint-dir weights.pth": ": File exists",
    "--backend nccl": "--backend nccl needs GPUs and this node has none: use gloo",
    "--sync-bn": "--sync-bn needs GPUs: torch has no SyncBatchNorm for CPUs",
}


@pytest.mark.parametrize("flags", CASES)
def test_flags(flags, mistake, work, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    torch.save({"state_dict": {}}, work / "weights.pth")
    assert CASES[flags] in mistake(*flags.split())


def test_no_network_for_pretrained_weights(mistake, tmp_path, monkeypatch):
    """The proxy is a port that nobody listens at."""
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    line = mistake("-a", "resnet18", "--pretrained")
    assert line.startswith("cannot download the weights of resnet18: ")
    place = f"put resnet18-f37072fd.pth into {tmp_path}/hub/checkpoints, from https://"
    assert f": without internet, {place}" in line
    assert line.endswith("/resnet18-f37072fd.pth, or give --pretrained FILE")


def test_flags_do_not_collide_with_torchruns(monkeypatch):
    """torchrun refuses a script's flag that is an abbreviation of several of its own."""
    theirs = [o for a in get_args_parser()._actions for o in a.option_strings if o[:2] == "--"]
    monkeypatch.setattr(sys, "argv", ["distributed.py"])
    ours = [f"--{name.replace('_', '-')}" for name in vars(distributed.parse_args(1))]
    assert len(ours) > 20
    for flag in ours:
        assert sum(option.startswith(flag) and option != flag for option in theirs) < 2, flag


def test_the_learning_rate_rises_and_falls():
    args = SimpleNamespace(lr=0.1, batch_size=1024, warmup_epochs=5, epochs=90)
    rates = [distributed.learning_rate(args, epoch / 10) for epoch in range(900)]
    assert max(rates) == pytest.approx(0.4) == rates[50]
    assert sorted(rates[1:51]) == rates[1:51] and 0 < rates[0] < 0.01
    assert sorted(rates[50:], reverse=True) == rates[50:] and rates[-1] < 1e-5
