"""The checkpoint's file and folder: whole or not there, damaged ones named, runs kept apart."""

import functools
import itertools
import json
import os
import pickle
import random
import signal
import time
import zipfile

import pytest
import torch
from conftest import load, rows

from common.checkpoint import read_checkpoint
from tests.runs import Images, opened, parts, read, save, write

NAMES = ["checkpoint.pth", "checkpoint.prev.pth", "model_best.pth"]


def test_without_hard_links_copies_are_synced(tmp_path, monkeypatch):
    """Before they get their name: after a power failure it could stand for an empty file."""
    synced = []

    def refuse(source, target):
        raise OSError("no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    write(tmp_path / "c", 2)
    assert [load(tmp_path / "c", name)["epoch"] for name in NAMES] == [2, 1, 2]
    copies = [os.path.basename(path).split(".pth")[0] for path in synced if path.endswith(".tmp")]
    assert copies == ["checkpoint", "model_best", "checkpoint", "model_best", "checkpoint.prev"]


def test_what_is_saved_is_what_is_restored(tmp_path):
    saved = write(tmp_path, 2)
    net, optimizer, scaler, meters = parts()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1)
    optimizer.param_groups[0]["weight_decay"] = 0.5
    run = read(tmp_path)
    assert (run.epoch, run.step, run.best_acc1) == (2, 0, 52.0)
    run.restore(net, optimizer, scaler, meters)
    for a, b in zip(net.parameters(), saved.net.parameters(), strict=True):
        assert a.equal(b)
        momentum = saved.optimizer.state[b]["momentum_buffer"]
        assert momentum.any() and momentum.equal(optimizer.state[a]["momentum_buffer"])
    assert optimizer.param_groups[0]["weight_decay"] == 0.5  # the command line's
    assert sorted(os.listdir(tmp_path)) == sorted([*NAMES, ".lock", "metrics.jsonl"])
    assert load(tmp_path, "checkpoint.prev.pth")["epoch"] == 1
    assert (tmp_path / "model_best.pth").samefile(tmp_path / "checkpoint.pth")


def test_a_first_save_that_was_killed_may_have_left_the_best_alone(tmp_path):
    """It goes on from there, where nothing newer is; the run is not refused."""
    write(tmp_path, 1)
    (tmp_path / "checkpoint.pth").unlink()
    run = opened(tmp_path)
    run.restore(*parts())
    assert run.epoch == load(tmp_path)["epoch"] == 1 and len(rows(tmp_path)) == 1
    save(run, 2)
    assert [load(tmp_path, name)["epoch"] for name in NAMES] == [2, 1, 2]


def test_only_a_better_validation_is_the_best(tmp_path):
    run = write(tmp_path, 1)
    for epoch, acc1 in ((2, 50.0), (3, 51.0), (4, 51.5)):
        save(run, epoch, acc1)
        assert load(tmp_path)["epoch"] == epoch
        assert load(tmp_path, "model_best.pth")["epoch"] == (4 if epoch == 4 else 1)
    run.step = 3
    run.save()  # within an epoch: no validation, no line
    assert load(tmp_path)["step"] == 3 and load(tmp_path, "model_best.pth")["step"] == 0
    assert [row["epoch"] for row in rows(tmp_path)] == [1, 2, 3, 4]
    run = opened(tmp_path)
    run.restore(*parts())
    save(run, 5, 51.2)  # the best of the run before it counts too
    assert load(tmp_path, "model_best.pth")["epoch"] == 4 and run.best_acc1 == 51.5


def test_an_overflow_in_the_first_step_leaves_no_momentum(tmp_path):
    net, optimizer, _, meters = parts()
    optimizer.state.clear()
    scaler = torch.amp.GradScaler("cpu")
    read(tmp_path).restore(net, optimizer, scaler, meters)
    scaler.scale(net(torch.rand(2, 3, 24, 24)).sum() * float("inf")).backward()
    scaler.step(optimizer)
    assert optimizer.state
    assert not any(state["momentum_buffer"].any() for state in optimizer.state.values())


def test_another_optimizer_is_saved_and_goes_on(tmp_path):
    """Adam's state has numbers beside what is shaped as the weight, and it starts empty."""
    states = []
    for step in (1, 2):
        net, *_, scaler, meters = parts()
        optimizer = torch.optim.AdamW(net.parameters())
        run = opened(tmp_path)
        assert (run.epoch, run.step) == (0, step - 1)
        run.restore(net, optimizer, scaler, meters)
        net(torch.ones(2, 3, 24, 24)).sum().backward()
        optimizer.step()
        run.step = step
        run.save()
        states.append(next(iter(optimizer.state.values())))
    assert [state["step"].item() for state in states] == [1, 2]


def test_keys_are_plain_python(tmp_path):
    """Whatever a program of one's own hands over: read_checkpoint() takes nothing else."""
    images = Images()
    images.classes = range(10)
    run = read(tmp_path, None, images, backend=torch.device("cpu"), data=tmp_path)
    run.open_folder()
    run.restore(*parts())
    save(run, 1, torch.tensor(60.0))
    checkpoint = read_checkpoint(str(tmp_path / "checkpoint.pth"))
    assert checkpoint.keys() == {
        *("epoch", "step", "arch", "best_acc1", "state_dict", "classes"),
        *("optimizer", "scaler", "meters", "args", "crc"),
    }
    assert type(checkpoint["args"]) is dict and checkpoint["args"]["data"] == str(tmp_path)
    assert checkpoint["classes"] == Images().classes
    assert type(checkpoint["best_acc1"]) is float
    assert opened(tmp_path, images=images).epoch == 1


def test_a_row_that_is_no_json_is_an_error_before_anything_is_written(tmp_path):
    run = write(tmp_path, 2)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    run.epoch = 3
    with pytest.raises(TypeError):
        run.save({"epoch": 3, "step": 0, "val_loss": torch.tensor(1.0)}, 99.0)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


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
    run = read(tmp_path)
    assert (run.epoch, run.path) == (1, str(previous))
    (message,) = run.damaged
    assert message.startswith(f"{newest} is damaged")
    with pytest.raises(ValueError, match=f"{newest} is damaged"):
        read(tmp_path, str(newest))
    damaged(previous, how)
    with pytest.raises(ValueError, match=f"{newest} is damaged .*; {previous} is damaged "):
        read(tmp_path)


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
            got = read_checkpoint(str(path))["state_dict"]
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
        read(tmp_path / "c")
    assert not Command.path.exists()


def test_resume_cuts_what_the_checkpoint_did_not_commit(tmp_path):
    write(tmp_path, 2)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"epoch": 3, "step": 0}) + '\n{"epoch": 4, "st')
    for name in (*NAMES, "metrics.jsonl", "checkpoint.damaged.pth", "checkpoint.damaged.1.pth"):
        (tmp_path / f"{name}.1234.tmp").write_text("of a process that was killed")
    # Of a process with the same number, as in a container: it died in the middle of a save.
    os.link(tmp_path / NAMES[0], tmp_path / f"{NAMES[0]}.{os.getpid()}.tmp")
    opened(tmp_path)
    assert [row["epoch"] for row in rows(tmp_path)] == [1, 2]
    assert not list(tmp_path.glob("*.tmp"))


def test_killed_while_writing(tmp_path):
    """At any moment there is a good checkpoint, at least as new as the last that was reported."""
    random.seed(0)
    for number in range(12):
        folder = tmp_path / str(number)
        run = write(folder, 1)
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            for epoch in itertools.count(2):
                save(run, epoch, 50.0 + epoch if epoch % 2 else 0.0)
                os.write(writing, f"{epoch}\n".encode())
        os.close(writing)
        with open(reading) as lines:
            for _ in range(random.randrange(5, 60)):
                reported = int(lines.readline())
            time.sleep(random.random() / 100)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        run = opened(folder)
        assert run.epoch >= reported
        best = load(folder, "model_best.pth")["epoch"]
        assert best % 2 == 1 and best >= run.epoch - 1
        assert [row["epoch"] for row in rows(folder)] == list(range(1, run.epoch + 1))
        assert not list(folder.glob("*.tmp"))


def killed_at(call, save):
    """Whether a process that saves is killed before it makes so many of its system calls."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1] != 0
    calls = 0

    def counted(function, *args):
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args)

    for name in ("fsync", "link", "replace", "remove", "close"):
        setattr(os, name, functools.partial(counted, getattr(os, name)))
    save()
    os._exit(0)


def test_killed_before_each_system_call_of_a_write(tmp_path):
    """Whatever the write was about to do: the run goes on from the old or the new checkpoint."""
    seen = set()
    for at in range(1, 40):
        folder = tmp_path / str(at)
        run = write(folder, 2)
        if not killed_at(at, functools.partial(save, run, 3)):
            break
        run = opened(folder)
        seen.add(run.epoch)
        assert [row["epoch"] for row in rows(folder)] == list(range(1, run.epoch + 1))
        if run.epoch == 2:
            run.restore(*parts())
            save(run, 3)
        assert [load(folder, name)["epoch"] for name in NAMES] == [3, 2, 3]
        assert [row["epoch"] for row in rows(folder)] == [1, 2, 3]
        assert not list(folder.glob("*.tmp"))
    assert at > 9 and seen == {2, 3}, (at, seen)


def test_killed_before_each_system_call_of_the_first_write(tmp_path):
    """Then there is no old one: the run starts afresh, in the same folder."""
    seen = set()
    for at in range(1, 40):
        folder = tmp_path / str(at)
        run = write(folder, 0)
        run.step = 5
        if not killed_at(at, run.save):  # within an epoch, or at its end before its validation
            break
        run = opened(folder)
        seen.add(run.step)
        assert sorted(os.listdir(folder)) == [".lock", "checkpoint.pth"][: 1 + bool(run.step)]
    assert at > 4 and seen == {0, 5}, (at, seen)
