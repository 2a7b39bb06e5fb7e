"""The checkpoint's file and folder: whole or not there, damaged ones named, runs kept apart."""

import functools
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import zipfile
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, load, rows

import common.checkpoint
from common import AverageMeter, load_checkpoint, open_folder, restore, save_checkpoint
from tests import nets


class Images(list):
    """What load_checkpoint() asks of a data set."""

    classes = range(10)


IMAGES = Images(range(80))


NAMES = ["checkpoint.pth", "checkpoint.prev.pth", "model_best.pth"]


def parts():
    torch.manual_seed(0)
    net = nets.plain(10)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, 0.9, weight_decay=1e-4, fused=True)
    net(torch.rand(2, 3, 24, 24)).sum().backward()
    optimizer.step()
    return net, optimizer, torch.amp.GradScaler("cpu", enabled=False), [AverageMeter("loss")]


def arguments(folder, resume="auto", **more):
    known = {"arch": "a", "batch_size": 8, "seed": 0, "evaluate": False, "tensorboard": False}
    return SimpleNamespace(**{**known, "checkpoint_dir": str(folder), "resume": resume, **more})


def write(folder, count, **more):
    """Save `count` checkpoints, of epochs 1, 2, ..."""
    folder.mkdir(exist_ok=True)
    for epoch in range(1, count + 1):
        row = {"epoch": epoch, "step": 0}
        save_checkpoint(vars(arguments(folder)), (epoch, 0, 50.0), parts(), row=row, **more)


def test_without_hard_links_copies_are_synced(tmp_path, monkeypatch):
    """Before they get their name: after a power failure it could stand for an empty file."""
    synced = []

    def refuse(source, target):
        raise OSError("no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    write(tmp_path / "c", 2, is_best=True)
    assert [load(tmp_path / "c", name)["epoch"] for name in NAMES] == [2, 1, 2]
    copies = [os.path.basename(path).split(".pth")[0] for path in synced if path.endswith(".tmp")]
    assert copies == ["checkpoint", "model_best", "checkpoint", "model_best", "checkpoint.prev"]


def test_what_is_saved_is_what_is_restored(tmp_path):
    write(tmp_path, 2, is_best=True)
    net, optimizer, scaler, meters = parts()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1)
    optimizer.state.clear()
    optimizer.param_groups[0]["weight_decay"] = 0.5
    checkpoint = load_checkpoint(arguments(tmp_path), IMAGES)
    assert restore(checkpoint, (net, optimizer, scaler, meters)) == (2, 0, 50.0)
    other, other_optimizer, *_ = parts()
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        assert a.equal(b)
        momenta = optimizer.state[a]["momentum_buffer"], other_optimizer.state[b]["momentum_buffer"]
        assert momenta[0].equal(momenta[1])
    assert optimizer.param_groups[0]["weight_decay"] == 0.5  # the command line's
    assert sorted(os.listdir(tmp_path)) == [
        "checkpoint.prev.pth",
        "checkpoint.pth",
        "metrics.jsonl",
        "model_best.pth",
    ]
    assert load(tmp_path, "checkpoint.prev.pth")["epoch"] == 1
    assert (tmp_path / "model_best.pth").samefile(tmp_path / "checkpoint.pth")


def test_an_overflow_in_the_first_step_leaves_no_momentum():
    net, optimizer, _, meters = parts()
    optimizer.state.clear()
    scaler = torch.amp.GradScaler("cpu")
    restore(None, (net, optimizer, scaler, meters))
    scaler.scale(net(torch.rand(2, 3, 24, 24)).sum() * float("inf")).backward()
    scaler.step(optimizer)
    assert not any(state["momentum_buffer"].any() for state in optimizer.state.values())


def test_another_optimizer_is_saved_and_goes_on(tmp_path):
    """Adam's state has numbers beside what is shaped as the weight, and it starts empty."""

    def adam():
        net, *_, scaler, meters = parts()
        return net, torch.optim.AdamW(net.parameters()), scaler, meters

    states = []
    for resume in (None, "auto"):
        known = adam()
        checkpoint = load_checkpoint(arguments(tmp_path, resume), IMAGES)
        assert restore(checkpoint, known) == (0, bool(resume), 0.0)
        known[0](torch.ones(2, 3, 24, 24)).sum().backward()
        known[1].step()
        save_checkpoint(vars(arguments(tmp_path)), (0, 1, 0.0), known)
        states.append(next(iter(known[1].state.values())))
    assert [state["step"].item() for state in states] == [1, 2]


def test_keys_are_plain_python(tmp_path):
    write(tmp_path, 1)
    checkpoint = load(tmp_path)
    assert checkpoint.keys() == {
        *("epoch", "step", "arch", "best_acc1", "state_dict"),
        *("optimizer", "scaler", "meters", "args"),
    }
    assert type(checkpoint["args"]) is dict


def damaged(path, how):
    content = bytearray(path.read_bytes())
    if how == "flipped":
        # Bytes of a weight: torch.load would take them.
        with zipfile.ZipFile(path) as archive:
            entry = max(archive.infolist(), key=lambda entry: entry.file_size)
        content[entry.header_offset + entry.file_size // 2 + 200] ^= 0xFF
    else:
        content = content[: len(content) * how // 100]
    path.unlink()  # not in place: model_best.pth may be the same file
    path.write_bytes(content)


@pytest.mark.parametrize("how", [0, 50, 99, "flipped"])
def test_the_previous_one_is_taken_for_a_damaged_one(tmp_path, how):
    write(tmp_path, 2)
    newest, previous = tmp_path / "checkpoint.pth", tmp_path / "checkpoint.prev.pth"
    damaged(newest, how)
    checkpoint = load_checkpoint(arguments(tmp_path), IMAGES)
    assert (checkpoint["epoch"], checkpoint["path"]) == (1, str(previous))
    (message,) = checkpoint["damaged"]
    assert message.startswith(f"{newest} is damaged")
    with pytest.raises(ValueError, match=f"{newest} is damaged"):
        load_checkpoint(arguments(tmp_path, str(newest)), IMAGES)
    damaged(previous, how)
    with pytest.raises(ValueError, match=f"{newest} is damaged .*; {previous} is damaged "):
        load_checkpoint(arguments(tmp_path), IMAGES)


def test_every_flipped_bit_is_noticed(tmp_path):
    write(tmp_path, 1)
    path = tmp_path / "checkpoint.pth"
    good, state = path.read_bytes(), load(tmp_path)["state_dict"]
    random.seed(0)
    for _ in range(40):
        content = bytearray(good)
        content[random.randrange(len(good))] ^= 1 << random.randrange(8)
        path.write_bytes(content)
        try:
            got = load_checkpoint(arguments(tmp_path), IMAGES)["state_dict"]
        except ValueError:
            continue
        assert all(got[key].equal(state[key]) for key in state)  # it hit padding


class Command:
    def __reduce__(self):
        return os.system, (f"touch {Command.path}",)


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    Command.path = tmp_path / "ran"
    pickle.loads(pickle.dumps(Command()))
    assert Command.path.exists()  # it would
    Command.path.unlink()
    write(tmp_path / "c", 1)
    checkpoint = load(tmp_path / "c")
    torch.save({**checkpoint, "args": Command()}, tmp_path / "c/checkpoint.pth")
    with pytest.raises(ValueError, match="holds more than tensors, it is not loaded"):
        load_checkpoint(arguments(tmp_path / "c"), IMAGES)
    assert not Command.path.exists()


def test_resume_cuts_what_the_checkpoint_did_not_commit(tmp_path):
    write(tmp_path, 2)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"epoch": 3, "step": 0}) + '\n{"epoch": 4, "st')
    (tmp_path / "checkpoint.pth.1234.tmp").write_text("of a process that was killed")
    open_folder(arguments(tmp_path), load_checkpoint(arguments(tmp_path), IMAGES))
    assert [row["epoch"] for row in rows(tmp_path)] == [1, 2]
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("name", ["model_best.pth", "checkpoint.prev.pth"])
def test_what_an_older_one_goes_on_from_is_the_newest(tmp_path, name):
    """Else a crash before its first save left the newer one, and no lines of it."""
    for epoch in (1, 2):
        row = {"epoch": epoch, "step": 0}
        save_checkpoint(vars(arguments(tmp_path)), (epoch, 0, 0.0), parts(), epoch == 1, row)
    (tmp_path / "link.pth").symlink_to(name)
    # Of a process with the same number, as in a container: it died in the middle of a save.
    os.link(tmp_path / name, tmp_path / f"checkpoint.pth.{os.getpid()}.tmp")
    for again in (name, name, "checkpoint.pth", "checkpoint.pth.1", "link.pth"):
        newer = again == "checkpoint.pth.1"
        older = load_checkpoint(arguments(tmp_path, f"{tmp_path}/{again}"), IMAGES)
        open_folder(arguments(tmp_path), older)
        assert not (tmp_path / "checkpoint.pth").is_symlink()
        assert load(tmp_path)["epoch"] == 1 + newer and rows(tmp_path)[-1]["epoch"] == 1
        assert load(tmp_path, name)["epoch"] == 1
        assert load(tmp_path, "checkpoint.pth.1")["epoch"] == 2  # should it be a mistake
    assert len(list(tmp_path.glob("checkpoint.pth.*"))) == 3  # each that was replaced


def test_a_run_is_only_continued_in_its_own_folder(tmp_path, capsys):
    write(tmp_path / "a", 1)
    write(tmp_path / "b", 2)
    open_folder(
        arguments(f"{tmp_path}/b/"),
        load_checkpoint(arguments(tmp_path, f"{tmp_path}/a/checkpoint.pth"), IMAGES),
    )
    assert capsys.readouterr().out.endswith(f"renamed to {tmp_path}/b.1\n")
    assert load(tmp_path / "b.1")["epoch"] == 2
    assert sorted(os.listdir(tmp_path / "b")) == [".lock", "metrics.jsonl"] and not rows(
        tmp_path / "b"
    )


WRITER = """
import sys
sys.path[:0] = sys.argv[1:3]
from test_checkpoint import *
folder = Path(sys.argv[3])
for epoch in range(1, 1000):
    row = {"epoch": epoch, "step": 0}
    save_checkpoint(vars(arguments(folder)), (epoch, 0, 0.0), parts(), epoch % 2, row)
    print(epoch, flush=True)
"""


def test_killed_while_writing(tmp_path):
    """At any moment there is a good checkpoint, at least as new as the last that was reported."""
    folder = tmp_path / "c"
    folder.mkdir()
    code = WRITER.replace("import sys", "import sys\nfrom pathlib import Path", 1)
    random.seed(0)
    for _ in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", code, ROOT, ROOT / "tests", folder],
            stdout=subprocess.PIPE,
            text=True,
        )
        reported = 0
        for _ in range(random.randrange(5, 60)):
            reported = int(process.stdout.readline())
        process.kill()
        process.communicate()
        checkpoint = load_checkpoint(arguments(folder), IMAGES)
        assert checkpoint["epoch"] >= reported
        assert load(folder, "model_best.pth")["epoch"] % 2 == 1
        open_folder(arguments(folder), checkpoint)
        assert [row["epoch"] for row in rows(folder)] == list(range(1, checkpoint["epoch"] + 1))
        assert not list(folder.glob("*.tmp"))
        shutil.rmtree(folder)
        folder.mkdir()


def test_killed_before_each_system_call_of_a_write(tmp_path):
    """Whatever the write was about to do: the run goes on from the old or the new checkpoint."""
    known, seen = parts(), set()
    for at in range(1, 40):
        folder = tmp_path / str(at)
        write(folder, 2)
        pid = os.fork()
        if pid == 0:
            calls = 0

            def counted(function, *args, at=at):
                nonlocal calls
                calls += 1
                if calls == at:
                    os.kill(os.getpid(), 9)
                return function(*args)

            for name in ("fsync", "link", "replace", "remove", "close"):
                setattr(os, name, functools.partial(counted, getattr(os, name)))
            row = {"epoch": 3, "step": 0}
            save_checkpoint(vars(arguments(folder)), (3, 0, 60.0), known, True, row)
            os._exit(0)
        if os.waitpid(pid, 0)[1] == 0:
            break
        checkpoint = load_checkpoint(arguments(folder), IMAGES)
        seen.add(checkpoint["epoch"])
        open_folder(arguments(folder), checkpoint)
        assert [row["epoch"] for row in rows(folder)] == list(range(1, checkpoint["epoch"] + 1))
        if checkpoint["epoch"] == 2:
            row = {"epoch": 3, "step": 0}
            save_checkpoint(vars(arguments(folder)), (3, 0, 60.0), known, True, row)
        assert [load(folder, name)["epoch"] for name in NAMES] == [3, 2, 3]
        assert [row["epoch"] for row in rows(folder)] == [1, 2, 3]
        assert not list(folder.glob("*.tmp"))
        common.checkpoint._locks.clear()
    assert at == 10 and seen == {2, 3}, (at, seen)
