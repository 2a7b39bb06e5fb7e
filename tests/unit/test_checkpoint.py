"""Checkpoints: what is saved is what goes on, whole or not there; a folder only goes forward."""

import builtins
import contextlib
import errno
import fcntl
import functools
import io
import os
import pickle
import random
import re
import resource
import shutil
import signal
import stat
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import load, rows, same_state

from common import checkpoint
from common.checkpoint import Run, fingerprint, read_checkpoint
from common.metrics import AverageMeter
from tests import nets
from tests.runs import STEPS, Images, arguments, opened, parts, read, save, train_a_step, write

NAMES = ["checkpoint.pth", "checkpoint.prev.pth", "model_best.pth"]
GO_ON = SimpleNamespace(agreed=False)  # nobody asks the run to stop


def content(folder):
    """What is in a folder and below: {path: (kind and content, time of the last change)}."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        state = path.lstat()
        data = path.read_bytes() if stat.S_ISREG(state.st_mode) else stat.S_IFMT(state.st_mode)
        found[str(path.relative_to(folder))] = data, state.st_mtime_ns
    return found


def fork(function):
    """Call it in a process of its own; returns its pid. It may save, but not train: the threads of
    this process, which torch waits for, are not there.
    """
    pid = os.fork()
    if pid:
        return pid
    signal.alarm(60)
    try:
        function()
        os._exit(0)
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
        os._exit(1)


def in_child(function):
    """Its exit code. A lock keeps processes apart, not the runs of one."""
    return os.waitstatus_to_exitcode(os.waitpid(fork(function), 0)[1])


def save_epochs(run, *epochs):
    for epoch in epochs:
        save(run, epoch)


def refused(folder, message, *given, **more):
    """A run is refused with this message, and changes nothing."""
    before = content(folder)
    with pytest.raises((ValueError, OSError), match=message):
        opened(folder, *given, **more)
    after = content(folder)
    after.pop(".lock", None)
    before.pop(".lock", None)
    assert after == before


# What is saved is what goes on.


def restored(folder, make=parts, **more):
    """(run, net, optimizer, scaler, meters) after a resume; `more` is attached too."""
    run, made = read(folder), make()
    run.attach(*made, **more)
    return run, *made


def test_what_is_saved_is_what_is_restored(tmp_path):
    saved = write(tmp_path, 2)
    net, optimizer, scaler, meters = parts()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1)
    run = read(tmp_path)
    assert (run.epoch, run.step, run.best_acc1) == (2, 0, 52.0)
    run.attach(net, optimizer, scaler, meters)
    for a, b in zip(net.parameters(), saved.net.parameters(), strict=True):
        assert a.equal(b)
        momentum = saved.optimizer.state[b]["momentum_buffer"]
        assert momentum.any() and momentum.equal(optimizer.state[a]["momentum_buffer"])
    assert sorted(os.listdir(tmp_path)) == sorted([*NAMES, ".lock", "metrics.jsonl"])
    assert [load(tmp_path, name)["epoch"] for name in NAMES] == [2, 1, 2]
    run.save()
    assert same_state(load(tmp_path), load(tmp_path, NAMES[1]))


def with_buffers(scaled=True):
    net = nets.normed(10).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, 0.9, fused=True)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    return net, optimizer, scaler, {"loss": AverageMeter("loss")}


def test_in_mid_epoch_all_is_restored(tmp_path):
    """BatchNorm's statistics, sums, the loss scale; and momentum lies as its weight does."""
    run = opened(tmp_path)
    net, optimizer, scaler, meters = made = with_buffers()
    run.attach(*made)
    scaler.scale(net(torch.rand(4, 3, 24, 24)).sum()).backward()
    scaler.step(optimizer)
    scaler.update(1024.0)
    meters["loss"].add(5.0, 2)
    run.step = 3
    run.save()
    run, net, optimizer, scaler, meters = restored(tmp_path, with_buffers)
    assert (run.epoch, run.step) == (0, 3) and scaler.get_scale() == 1024.0
    assert (meters["loss"].sum, meters["loss"].count) == (5.0, 2)
    assert all(net.state_dict()[key].equal(x) for key, x in load(tmp_path)["state_dict"].items())
    weight = net[0].weight
    assert optimizer.state[weight]["momentum_buffer"].stride() == weight.stride() != (75, 25, 5, 1)
    restored(tmp_path, lambda: with_buffers(scaled=False))  # as bf16 is trained


def test_an_overflow_in_the_first_step_leaves_no_momentum(tmp_path):
    net, optimizer, _, meters = parts()
    scaler = torch.amp.GradScaler("cpu")
    read(tmp_path).attach(net, optimizer, scaler, meters)
    scaler.scale(net(torch.rand(2, 3, 24, 24)).sum() * float("inf")).backward()
    scaler.step(optimizer)
    assert optimizer.state
    assert not any(state["momentum_buffer"].any() for state in optimizer.state.values())


class Patience:
    """A user's own state."""

    def __init__(self):
        self.bad_epochs, self.average = 0, torch.zeros(3)

    def state_dict(self):
        return {"bad_epochs": self.bad_epochs, "average": self.average}

    def load_state_dict(self, state):
        self.bad_epochs, self.average = state["bad_epochs"], state["average"]


def one_cycle(folder, optimizer_type, *ends, **more):
    """Train by OneCycle, which changes the momentum (AdamW's betas) too; returns the checkpoint.

    ends: steps at which all is saved, and continued by new objects.
    """
    for end in ends:
        net, _, scaler, meters = parts()
        groups = [{"params": net[0].parameters(), "lr": 0.01}, {"params": net[4].parameters()}]
        optimizer = optimizer_type(groups, lr=0.1, **more)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
        patience, run = Patience(), read(folder)
        run.attach(net, optimizer, scaler, meters, scheduler=schedule, patience=patience)
        while run.step < end:
            torch.manual_seed(run.step)
            train_a_step(run)
            schedule.step()
            run.step += 1
            patience.bad_epochs += 1
            patience.average += run.step
        run.save()
    return load(folder)


@pytest.mark.parametrize(
    "optimizer, more",
    [(torch.optim.SGD, {"momentum": 0.9, "fused": True}), (torch.optim.AdamW, {})],
    ids=["SGD", "AdamW"],
)
def test_a_schedule_and_a_state_of_ones_own_go_on(tmp_path, optimizer, more):
    """A scheduler that started anew would train on at a wrong rate, and nothing would say so."""
    straight = one_cycle(tmp_path / "a", optimizer, 7, **more)
    broken = one_cycle(tmp_path / "b", optimizer, 4, 7, **more)
    assert straight["more"]["scheduler"] == broken["more"]["scheduler"]
    assert straight["more"]["scheduler"]["last_epoch"] == 7
    assert broken["more"]["patience"]["bad_epochs"] == 7
    assert straight["more"]["patience"]["average"].equal(broken["more"]["patience"]["average"])
    for key, weight in straight["state_dict"].items():
        assert weight.equal(broken["state_dict"][key]), key
    assert straight["optimizer"]["param_groups"] == broken["optimizer"]["param_groups"]


def test_what_the_command_line_changes_is_changed(tmp_path):
    """And what it leaves is the checkpoint's, though a scheduler has moved it."""
    run = opened(tmp_path)
    run.optimizer.param_groups[0] |= {"momentum": 0.85, "lr": 0.03, "weight_decay": 0.5}
    run.save()
    net, optimizer, scaler, meters = parts()
    optimizer.param_groups[0]["weight_decay"] = 0.25
    read(tmp_path).attach(net, optimizer, scaler, meters)
    (group,) = optimizer.param_groups
    assert (group["momentum"], group["lr"], group["weight_decay"]) == (0.85, 0.03, 0.25)


def using(make):
    """parts() with the optimizer that make(net) gives."""

    def made():
        net, _, scaler, meters = parts()
        return net, make(net), scaler, meters

    return made


adamw = using(lambda net: torch.optim.AdamW(net.parameters()))
lbfgs = using(lambda net: torch.optim.LBFGS(net.parameters()))
no_momentum = using(lambda net: torch.optim.SGD(net.parameters(), 0.1))
four_groups = using(lambda net: torch.optim.SGD([{"params": [x]} for x in net.parameters()], 0.1))
a_weight_less = using(lambda net: torch.optim.SGD([*net.parameters()][1:], 0.1))


@pytest.mark.parametrize("make", [adamw, lbfgs, no_momentum])
def test_another_optimizer_is_saved_and_goes_on(tmp_path, make):
    """Numbers beside what is shaped as the weight, lists, None: whatever its state is."""
    states = []
    for step in (1, 2):
        run, net, optimizer, *_ = restored(tmp_path, make)
        assert (run.epoch, run.step) == (0, step - 1)
        if states:
            assert repr(optimizer.state_dict()["state"]) == states[-1]
        loss = net(torch.ones(2, 3, 24, 24)).square().sum()
        loss.backward()
        optimizer.step(*([lambda loss=loss: loss] if make is lbfgs else []))
        run.step = step
        run.save()
        states.append(repr(optimizer.state_dict()["state"]))
    assert states[0] != states[1] or make is no_momentum


def other_model():
    net = nets.normed(10)
    return net, torch.optim.SGD(net.parameters(), 0.1, 0.9), *parts()[2:]


def more_meters():
    *made, meters = parts()
    return *made, meters | {"acc@10": AverageMeter("acc@10")}


@pytest.mark.parametrize(
    "before, now, message",
    [
        (adamw, parts, "has the optimizer state of AdamW, but this script has SGD"),
        (parts, adamw, "has the optimizer state of SGD, but this script has AdamW"),
        (parts, other_model, "does not fit the model: .*Missing key.*running_mean"),
        (parts, four_groups, "has weights in groups of 4, but this script has 1, 1, 1, 1$"),
        (parts, a_weight_less, "has weights in groups of 4, but this script has 3$"),
        (parts, more_meters, "has half an epoch's meters of loss, but this .* has acc@10, loss$"),
        (more_meters, parts, "has half an epoch's meters of acc@10, loss, but this .* has loss$"),
    ],
)
def test_a_checkpoint_of_something_else_is_one_line(tmp_path, before, now, message):
    run = opened(tmp_path)
    run.attach(*before())
    run.step = 5
    run.save()
    path = re.escape(str(tmp_path / "checkpoint.pth"))
    with pytest.raises(ValueError, match=f"^{path} {message}") as raised:
        restored(tmp_path, now)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 500


def test_another_meter_may_begin_with_an_epoch(tmp_path):
    write(tmp_path, 1)
    _, *_, meters = restored(tmp_path, more_meters)
    assert meters["acc@10"].count == 0


def test_what_more_is_saved_is_compared(tmp_path):
    run = opened(tmp_path)
    run.attach(*parts(), patience=Patience(), ema=nets.plain(10))
    run.save()
    for more, said in (({}, "nothing"), ({"patience": Patience()}, "patience")):
        message = f"has the state of ema, patience, but this script has {said}$"
        with pytest.raises(ValueError, match=message):
            restored(tmp_path, **more)
        # An evaluation needs the model alone; it takes what is there.
        evaluating = read(tmp_path, evaluate=True)
        evaluating.attach(*parts(), **more)
    with pytest.raises(ValueError, match=r"does not fit ema: .*Missing key"):
        restored(tmp_path, patience=Patience(), ema=nets.normed(10))
    write(tmp_path / "without", 1)
    with pytest.raises(ValueError, match=r"has the state of nothing, but this .* has patience$"):
        restored(tmp_path / "without", patience=Patience())


class Holding:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}


@pytest.mark.parametrize(
    "value, named",
    [(Patience(), "GLOBAL test_checkpoint.Patience"), (len, "GLOBAL len"), (lambda: 0, "lambda")],
)
def test_a_state_that_could_not_be_read_again_is_said_at_once(tmp_path, value, named):
    """Not at the resume: then it would be too late."""
    message = f"^the state of mine holds more than tensors: .*{named}"
    with pytest.raises(ValueError, match=message) as raised:
        restored(tmp_path, mine=Holding(value))
    assert "\n" not in str(raised.value)


def test_keys_are_plain_python(tmp_path):
    """Whatever a program of one's own hands over: read_checkpoint() takes nothing else."""
    images = Images()
    images.classes = range(10)
    run = opened(tmp_path, None, images, backend=torch.device("cpu"), data=tmp_path)
    save(run, 1, torch.tensor(60.0))
    found = read_checkpoint(str(tmp_path / "checkpoint.pth"))
    assert found.keys() >= checkpoint.KEYS
    assert type(found["args"]) is dict and found["args"]["data"] == str(tmp_path)
    assert found["classes"] == Images().classes and type(found["best_acc1"]) is float
    assert opened(tmp_path, images=images).epoch == 1


def test_a_checkpoint_of_an_older_version_goes_on(tmp_path):
    """It has no type of optimizer, no early end, and nothing more."""
    write(tmp_path, 2)
    state = load(tmp_path)
    for key in ("ended", "optimizer_type", "given", "more", "line"):
        del state[key]
    torch.save(state, tmp_path / "checkpoint.pth")
    run = opened(tmp_path)
    save(run, 3)
    assert same_state(load(tmp_path), {**state, "epoch": 3, "best_acc1": 53.0})


def test_the_flags_that_describe_the_model_are_the_checkpoints(tmp_path):
    write(tmp_path, 1, arch="resnet34", image_size=32, seed=5)
    run = read(tmp_path, arch=None, image_size=None)
    assert (run.args.arch, run.args.image_size, run.args.seed) == ("resnet34", 32, 0)
    assert read(tmp_path, arch=None, image_size=48).args.image_size == 48
    with pytest.raises(ValueError, match="holds a resnet34, not the --arch vgg11"):
        read(tmp_path, arch="vgg11")


# The best, the end, and what is left.


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
    save(run, 5, 51.2)  # the best of the run before it counts too
    assert load(tmp_path, "model_best.pth")["epoch"] == 4 and run.best_acc1 == 51.5


def test_every_rank_knows_the_best(tmp_path):
    write(tmp_path, 1)
    for rank in (0, 1):
        run = Run(arguments(tmp_path), rank, 2)
        run.plan(Images(), STEPS)
        assert run.best_acc1 == 51.0
        run.step = STEPS
        assert not run.end_epoch(51.0) and (run.epoch, run.step) == (2, 0)
        assert run.end_epoch(51.1) and run.best_acc1 == 51.1


@pytest.mark.parametrize("score", [0.0, -3.5])
def test_the_first_validation_of_a_folder_is_its_best(tmp_path, score):
    """Also where all predictions are wrong, and where the run came from another folder."""
    save(opened(tmp_path / "a"), 1, score)
    assert load(tmp_path / "a", "model_best.pth")["best_acc1"] == score
    write(tmp_path / "b", 3)
    run = opened(tmp_path / "c", str(tmp_path / "b/model_best.pth"))
    assert not (tmp_path / "c/metrics.jsonl").exists()
    save(run, 4, score)
    assert load(tmp_path / "c", "model_best.pth")["epoch"] == 4
    assert load(tmp_path / "b", "model_best.pth")["epoch"] == 3


def left(run):
    """What remaining() yields, each trained and validated."""
    found = []
    for epoch, first, end in run.remaining(GO_ON):
        found.append((epoch, first, end))
        run.step = end
        run.end_epoch(0)
        run.save({"epoch": run.epoch, "step": run.step}, False)
    return found


def test_what_is_left(tmp_path):
    assert left(opened(tmp_path, max_steps=14)) == [(0, 0, 10), (1, 0, 4)]
    assert left(opened(tmp_path, max_steps=14)) == left(opened(tmp_path, max_steps=3)) == []
    run = opened(tmp_path, epochs=3)
    assert next(run.remaining(GO_ON)) == (1, 4, 10)
    run.step = 10
    run.save()  # trained, and not validated yet
    run = opened(tmp_path, max_steps=20)
    assert not run.finished() and left(run) == [(1, 10, 10)] and run.finished()
    run = opened(tmp_path, epochs=3)
    assert list(run.remaining(SimpleNamespace(agreed=True))) == []
    assert list(opened(tmp_path, evaluate=True).remaining(GO_ON)) == []
    assert left(run) == [(2, 0, 10)] and run.finished()
    places = [(row["epoch"], row["step"]) for row in rows(tmp_path)]
    assert places == [(1, 0), (1, 4), (2, 0), (3, 0)]


def test_an_early_end_is_an_end(tmp_path):
    """Until more epochs are asked for, or the run goes on elsewhere."""
    run = opened(tmp_path / "c", epochs=5)
    for epoch, _, end in run.remaining(GO_ON):
        run.step = end
        run.end_epoch(0)
        if epoch == 1:
            run.end()
        run.save({"epoch": run.epoch, "step": 0}, True)
    assert run.finished() and run.epoch == 2
    for epochs in (5, 4):
        run = opened(tmp_path / "c", epochs=epochs)
        assert run.finished() and list(run.remaining(GO_ON)) == []
    newest = str(tmp_path / "c/checkpoint.pth")
    for folder, epochs in (("c", 6), ("d", 5)):
        run = opened(tmp_path / folder, newest, epochs=epochs)
        assert not run.finished() and next(run.remaining(GO_ON)) == (2, 0, 10)


# Damage is noticed, and what is replaced was read.


def damage(path, how):
    content = bytearray(path.read_bytes())
    if how == "flipped":
        # Bytes of a weight: torch.load would take them.
        with zipfile.ZipFile(path) as archive:
            entry = max(archive.infolist(), key=lambda entry: entry.file_size)
        content[entry.header_offset + entry.file_size // 2 + 200] ^= 0xFF
    else:
        content = content[: len(content) * how // 100]
    path.write_bytes(content)


@pytest.mark.parametrize("how", [0, 50, 99, "flipped"])
def test_the_previous_one_is_taken_for_a_damaged_one(tmp_path, how):
    write(tmp_path, 2)
    newest, previous = tmp_path / NAMES[0], tmp_path / NAMES[1]
    damage(newest, how)
    bad = newest.read_bytes()
    refused(tmp_path, f"^{newest} is damaged", str(newest))
    run = opened(tmp_path)
    assert (run.epoch, run.path) == (1, str(previous))
    (message,) = run.damaged
    assert message.startswith(f"{newest} is damaged")
    (kept,) = tmp_path.glob("checkpoint.damaged-*.pth")
    assert [row["epoch"] for row in rows(tmp_path)] == [1] and not newest.exists()
    save(run, 2)
    assert [load(tmp_path, name)["epoch"] for name in NAMES] == [2, 1, 2]
    assert kept.read_bytes() == bad and opened(tmp_path).damaged == []
    for path in (newest, previous):
        damage(path, how)
    refused(tmp_path, f"{newest} is damaged .*; {previous} is damaged ")


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
    found = load(tmp_path / "c")
    torch.save({**found, "args": Command()}, tmp_path / "c/checkpoint.pth")
    message = "is not loaded, it holds more than tensors: GLOBAL posix.system$"
    refused(tmp_path / "c", message)
    assert not Command.path.exists()


class Failing(io.FileIO):
    """A double of a file on a disk that fails: to have a real one takes a kernel's module."""

    def read(self, *_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    readinto = readall = read


def test_a_checkpoint_that_cannot_be_read_is_not_damaged(tmp_path, monkeypatch):
    """Nor is one for which there is no memory."""
    write(tmp_path, 2)
    newest, really_open = str(tmp_path / NAMES[0]), builtins.open

    def failing_open(path, *rest, **more):
        return Failing(path) if path == newest else really_open(path, *rest, **more)

    def no_memory(_):
        raise MemoryError("no memory")

    before = content(tmp_path)
    for owner, name, double, raised in (
        (builtins, "open", failing_open, OSError),
        (zipfile.ZipFile, "testzip", no_memory, MemoryError),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, double)
            with pytest.raises(raised, match=f"cannot read {newest}: .*|no memory"):
                opened(tmp_path)
        assert content(tmp_path) == before and read_checkpoint(newest)["epoch"] == 2
    os.remove(newest)
    os.mkdir(newest)  # as one without permission, which stops no root
    refused(tmp_path, f"cannot read {newest}: .*Is a directory")


@pytest.mark.parametrize("name, number", [("weight", "nan"), ("weight", "inf"), ("mean", "nan")])
def test_weights_that_are_not_finite_are_not_saved(tmp_path, name, number):
    run = write(tmp_path, 2)
    train_a_step(run)
    run.net.register_buffer("running_mean", torch.zeros(3))
    with torch.no_grad():
        broken = run.net[0].weight if name == "weight" else run.net.running_mean
        broken.flatten()[0] = float(number)
    before = content(tmp_path)
    with pytest.raises(FloatingPointError, match=name):
        save(run, 3)
    assert content(tmp_path) == before


def test_a_row_that_is_no_json_is_an_error_before_anything_is_written(tmp_path):
    run = write(tmp_path, 2)
    before = content(tmp_path)
    run.epoch = 3
    with pytest.raises(TypeError):
        run.save({"epoch": 3, "step": 0, "val_loss": torch.tensor(1.0)}, True)
    assert content(tmp_path) == before


@pytest.mark.parametrize("share", [0, 0.5])
def test_a_full_disk_leaves_the_old_checkpoint(tmp_path, share):
    """A limit of the size of a file: what lies beyond it cannot be written."""
    run = write(tmp_path, 2)
    before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    run.step = 5

    def save_on_full_disk():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limit = int((tmp_path / NAMES[0]).stat().st_size * share)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        message = f"^cannot write {tmp_path}/{NAMES[0]}: .*; the one before it is untouched$"
        with pytest.raises(OSError, match=re.compile(message, re.DOTALL)):
            run.save()

    assert in_child(save_on_full_disk) == 0
    assert before == {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}


# A folder only goes forward, and belongs to one run.


@pytest.mark.parametrize("name", [*NAMES, "metrics.jsonl"])
def test_each_file_of_a_run_makes_the_folder_its_own(tmp_path, name):
    write(tmp_path / "whole", 2)
    folder = tmp_path / "c"
    folder.mkdir()
    shutil.copy(tmp_path / "whole" / name, folder / name)
    message = f"{folder} holds a run .{name}.: give another --checkpoint-dir"
    refused(folder, f"{message}, or continue it with --resume auto$", None)
    refused(folder, message, str(tmp_path / "whole/checkpoint.pth"))
    if name == "metrics.jsonl":
        refused(folder, f"{message}$", "auto")
    else:
        run = opened(folder)
        assert run.epoch == load(tmp_path / "whole", name)["epoch"]
        save(run, 3)
        assert load(folder)["epoch"] == rows(folder)[-1]["epoch"] == 3


def test_a_link_without_a_target_is_a_run_too(tmp_path):
    """Of a disk that is not mounted: what is behind it must not be replaced."""
    (tmp_path / NAMES[0]).symlink_to("/not/mounted/checkpoint.pth")
    for resume in (None, "auto"):
        refused(tmp_path, r"checkpoint\.pth", resume)
    assert (tmp_path / NAMES[0]).is_symlink()


def test_an_older_checkpoint_goes_on_elsewhere(tmp_path):
    """However it is named: in its own folder it would have to replace the newer one."""
    run = write(tmp_path / "c", 1)
    save(run, 2, 0.0)
    save(run, 3, 0.0)
    (tmp_path / "outside.pth").symlink_to("c/model_best.pth")
    (tmp_path / "also_c").symlink_to("c")
    shutil.copy(tmp_path / "c/model_best.pth", tmp_path / "c/copy.pth")
    older = {"c/checkpoint.prev.pth": 2, "c/model_best.pth": 1, "outside.pth": 1, "c/copy.pth": 1}
    before = content(tmp_path / "c")
    for name, epoch in older.items():
        for folder in ("c", "also_c"):
            message = r"not the newest .*: give another --checkpoint-dir to continue it"
            refused(tmp_path / folder, message, f"{tmp_path}/{name}")
        run = opened(tmp_path / "new" / name, f"{tmp_path}/{name}")
        assert run.epoch == epoch
        save(run, epoch + 1)
        assert load(tmp_path / "new" / name)["epoch"] == epoch + 1
    assert content(tmp_path / "c") == before


@pytest.mark.parametrize("name", ["checkpoint.pth", "../link.pth", "../d/checkpoint.pth"])
def test_the_newest_goes_on_by_any_of_its_names(tmp_path, name):
    write(tmp_path / "c", 2)
    (tmp_path / "link.pth").symlink_to("c/checkpoint.pth")
    (tmp_path / "d").symlink_to("c")
    save(opened(tmp_path / "c", f"{tmp_path}/c/{name}"), 3)
    assert [load(tmp_path / "c", name)["epoch"] for name in NAMES] == [3, 2, 3]
    assert [row["epoch"] for row in rows(tmp_path / "c")] == [1, 2, 3]


@pytest.mark.parametrize("name", ["relative", ".", "../Größe ü", os.fsdecode(b"\xff"), "link"])
def test_what_is_locked_is_what_is_written(tmp_path, monkeypatch, name):
    """Though the process goes elsewhere, and a link comes to point elsewhere, meanwhile."""
    cwd = tmp_path / "here"
    for folder in (cwd, cwd / "one", cwd / "two"):
        folder.mkdir()
    (cwd / "link").symlink_to("one")
    target = (cwd / name).resolve()
    monkeypatch.chdir(cwd)
    run = opened(name)
    monkeypatch.chdir("/")
    (cwd / "link").unlink()
    (cwd / "link").symlink_to("two")
    save(run, 1)
    assert {path.name for path in target.iterdir()} - {"one", "two", "link"} == {
        *(".lock", "checkpoint.pth", "metrics.jsonl", "model_best.pth")
    }
    assert not os.listdir(cwd / "two")


def test_only_our_own_temporary_files_are_removed(tmp_path):
    theirs = ["notes.tmp", "results.csv.2024.tmp", "events.jsonl.1.tmp", "checkpoint.pth.tmp"]
    theirs += ["checkpoint.pth.12.tmp.txt", "old_checkpoint.pth.12.tmp", "checkpoint.pth.old"]
    ours = [f"{name}.12.tmp" for name in (*NAMES, "metrics.jsonl", "checkpoint.damaged-1.pth")]
    for name in theirs + ours:
        (tmp_path / name).write_text(name)
    save(opened(tmp_path), 1)
    left = {".lock", "checkpoint.pth", "model_best.pth", "metrics.jsonl", *theirs}
    assert {path.name for path in tmp_path.iterdir()} == left


def test_an_evaluation_changes_nothing(tmp_path):
    """And needs no lock: it may read beside a run."""
    write(tmp_path / "c", 2)
    before = content(tmp_path)
    for resume in (None, "auto", f"{tmp_path}/c/{NAMES[1]}"):
        run = read(tmp_path / "c", resume, evaluate=True)
        run.attach(*parts())
        assert run.epoch == {None: 0, "auto": 2}.get(resume, 1)
    with pytest.raises(ValueError, match=f"no checkpoint to evaluate in {tmp_path}/none"):
        read(tmp_path / "none", evaluate=True)
    assert content(tmp_path) == before


def test_who_comes_second_is_refused_until_the_first_has_ended(tmp_path):
    """And then goes on from where that ended, not from where it stood before."""
    write(tmp_path, 1)
    locked, end = os.pipe(), os.pipe()

    def first():
        run = opened(tmp_path)
        os.write(locked[1], b".")
        os.read(end[0], 1)
        save_epochs(run, 2, 3, 4, 5)

    pid = fork(first)
    os.read(locked[0], 1)
    message = f"another run is writing to {tmp_path}: choose another --checkpoint-dir"
    for resume in ("auto", str(tmp_path / NAMES[0]), None):
        refused(tmp_path, message, resume)
    assert read(tmp_path, evaluate=True).epoch == 1
    os.write(end[1], b".")
    assert os.waitpid(pid, 0)[1] == 0
    assert opened(tmp_path).epoch == 5
    # A killed process leaves no lock.
    assert in_child(lambda: os.kill(opened(tmp_path) and os.getpid(), signal.SIGKILL)) == -9
    assert opened(tmp_path).epoch == 5


@pytest.fixture
def no_locks(monkeypatch):
    """As on a file system that has none, or others on each node."""

    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)


@pytest.mark.parametrize("begins", ["fresh", "continued"])
@pytest.mark.parametrize("late", ["opens", "saves", "writes"])
def test_without_locks_a_checkpoint_does_not_go_backward(
    tmp_path, no_locks, monkeypatch, begins, late
):
    """One has read, another trains on and ends: the first is stopped, wherever it is by then."""
    if begins == "continued":
        write(tmp_path, 1)
    stale = read(tmp_path)
    stale.attach(*parts())
    if late != "opens":
        stale.tidy_folder()
    other, left = opened(tmp_path), {}

    def train():
        save_epochs(other, 2, 3, 4, 5)
        left.update(content(tmp_path))

    if late == "writes":  # the other one ends while the first one writes its file
        really_save = torch.save

        def save_meanwhile(*given):
            monkeypatch.setattr(torch, "save", really_save)
            train()
            really_save(*given)

        monkeypatch.setattr(torch, "save", save_meanwhile)
        stale.step = 5
    else:
        train()
    message = r"checkpoint\.pth is not the one that this run last read or wrote: does another run"
    with pytest.raises(OSError, match=message):
        {"opens": stale.tidy_folder, "writes": stale.save}.get(late, lambda: save(stale, 2))()
    after = content(tmp_path)
    for name in [name for name in left if name.endswith(".tmp")]:
        del left[name]  # the first one's own, which it removes
    assert after == left and load(tmp_path)["epoch"] == 5


@pytest.mark.parametrize("saved", [0, 2])
def test_a_folder_that_is_moved_and_made_anew(tmp_path, saved):
    """The lock has moved with it: what is in the new one is not replaced."""
    run = write(tmp_path / "c", saved)
    (tmp_path / "c").rename(tmp_path / "moved")
    if saved:
        with pytest.raises(OSError, match="or was it moved"):
            run.save()
    assert in_child(lambda: save_epochs(opened(tmp_path / "c"), 1, 2, 3)) == 0
    before = content(tmp_path)
    with pytest.raises(OSError, match=f"{tmp_path}/c/checkpoint.pth is not .* or was it moved"):
        run.save()
    assert content(tmp_path) == before


def test_a_copied_checkpoint_is_the_same(tmp_path):
    """Only what it holds counts: on network file systems inodes and times change by themselves."""
    run = write(tmp_path, 1)
    shutil.copy(tmp_path / NAMES[0], tmp_path / "copy")
    os.replace(tmp_path / "copy", tmp_path / NAMES[0])
    save(run, 2)
    assert load(tmp_path)["epoch"] == 2


# metrics.jsonl goes with the checkpoint.


def test_resume_cuts_what_the_checkpoint_did_not_commit(tmp_path):
    write(tmp_path, 2)
    path = tmp_path / "metrics.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    theirs = b'null\n\n[1, 2]\n{"epoch": "x", "step": 0}\n"\xff\n{"epoch": 1, "st\n'
    late = b'{"epoch": 3, "step": 0}\n'
    path.write_bytes(first + theirs + late + second + late + b'{"epoch": 4, "st')
    opened(tmp_path)
    assert path.read_bytes() == first + theirs + second  # what is not ours stays
    inode = path.stat().st_ino
    save(opened(tmp_path), 3)
    assert path.read_bytes() == first + theirs + second + late
    assert path.stat().st_ino == inode  # there was nothing to cut


def test_a_line_that_the_checkpoint_committed_is_there(tmp_path):
    write(tmp_path, 2)
    path = tmp_path / "metrics.jsonl"
    first, second = path.read_text().splitlines(keepends=True)
    for before, after in ((first + second[:-5], first + second), (first, first + second)):
        path.write_text(before)
        opened(tmp_path)
        assert path.read_text() == after
    run = opened(tmp_path / "elsewhere", str(tmp_path / NAMES[0]))
    assert run.epoch == 2 and not (tmp_path / "elsewhere/metrics.jsonl").exists()


# The same classes and images, whoever reads them.


@pytest.mark.parametrize("evaluate", [False, True])
def test_other_classes_are_refused(tmp_path, evaluate):
    write(tmp_path, 1)
    for classes, expected in (
        ("0123456x89", "was trained on other classes: class 7 is '7' in it and 'x' in --data"),
        ("0132456789", "was trained on other classes: class 2 is '2' in it and '3' in --data"),
        ("012345678", "has 10 classes, --data 9"),
    ):
        with pytest.raises(ValueError, match=re.escape(expected)):
            read(tmp_path, "auto", Images(classes=classes), evaluate=evaluate)


@pytest.mark.parametrize(
    "before, now, change",
    [
        ("--batch-size 8", 16, {"batch_size": 16}),
        ("--seed 0", 7, {"seed": 7}),
        ("number of images 80", 81, {"images": Images(81)}),
    ],
)
def test_in_mid_epoch_the_order_of_images_may_not_change(tmp_path, before, now, change):
    run = opened(tmp_path)
    run.step = 5
    run.save()
    message = f"saved in the middle of an epoch with {before}: it cannot continue with {now}$"
    with pytest.raises(ValueError, match=message):
        read(tmp_path, **change)
    assert read(tmp_path, evaluate=True, **change).step == 5
    save(run, 1)
    assert read(tmp_path, **change).epoch == 1


def test_what_is_compared_is_names_of_any_data_set():
    """A data set need not be of files; those of files hold their names as it suits them."""
    numbers = [fingerprint(Images(80)), fingerprint(Images(81)), fingerprint(Images(classes="ab"))]
    for paths in (["a", "b"], ["a", "c"], ["ab", ""], [Path("a"), Path("c/d")]):
        dataset = Images(80)
        dataset.paths = paths
        numbers.append(fingerprint(dataset))
    assert len(set(numbers)) == len(numbers)
    assert fingerprint(range(5)) != fingerprint(range(6))


def test_ranks_that_differ_are_told(tmp_path):
    """Each of three has read from a disk of its own."""
    write(tmp_path / "a", 2)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    write(tmp_path / "c", 1)

    def compare(folders, train, val):
        runs, tables = [], []
        for rank, name in enumerate(folders):
            runs.append(Run(arguments(tmp_path / name), rank, len(folders)))
            runs[-1].plan(Images(), STEPS)

        def add(table, _):
            tables.append(table)
            raise InterruptedError  # the others' tables are not there yet

        for rank, run in enumerate(runs):
            with contextlib.suppress(InterruptedError):
                run.check_same(train[rank], val[rank], torch.device("cpu"), add)
        for rank, run in enumerate(runs):
            run.check_same(train[rank], val[rank], torch.device("cpu"), lambda *_: sum(tables) / 3)

    same, less = [Images()] * 3, [Images(), Images(79), Images()]
    compare("aab", same, same)
    for given, what, others in (
        (("abc", same, same), "checkpoint to resume from", "2"),
        (("axc", same, same), "checkpoint to resume from", "1, 2"),
        (("aaa", less, same), "list of images and classes in train/", "1"),
        (("aaa", same, [Images(classes="ab"), *same]), "list of images and .* in val/", "1, 2"),
    ):
        message = f"^the {what} of rank {others} differs from rank 0's$"
        with pytest.raises(ValueError, match=message):
            compare(*given)


# Ended at any moment.


def ends_at(call, how, saves):
    """Whether these saves make so many calls. Before the last of them the disk fails or, with
    how="killed", the process ends; a line of metrics.jsonl is then written half-way.
    """
    calls, append_line = 0, checkpoint.append_line

    def counted(function, *args):
        nonlocal calls
        calls += 1
        if calls == call:
            if function is append_line:
                with open(f"{args[0]}/metrics.jsonl", "a") as file:
                    file.write(args[1][:8])
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.EIO, "the disk fails")
        return function(*args)

    def save_all():
        names = [(os, "fsync"), (os, "replace"), (torch, "save"), (checkpoint, "append_line")]
        for module, name in names:
            setattr(module, name, functools.partial(counted, getattr(module, name)))
        with contextlib.suppress(OSError):
            for step in saves:
                step()
        os._exit(calls >= call)

    return in_child(save_all) != 0


def in_an_epoch(run):
    run.step = 5
    run.save()


def at_its_end(run):
    run.step = STEPS
    run.save()


def validated(run, score=99.0):
    is_best = run.end_epoch(score)
    run.save({"epoch": run.epoch, "step": run.step}, is_best)


def not_best(run):
    validated(run, -1.0)


def cut_short(run):
    """As --max-steps ends a run in its first epoch: its first save has a row, and is the best."""
    run.step = 5
    validated(run)


def reached(run):
    path = Path(run.folder, "metrics.jsonl")
    return run.epoch, run.step, path.read_text() if path.exists() else ""


@pytest.mark.parametrize("how", ["killed", "failed"])
@pytest.mark.parametrize(
    "before, saves",
    [
        ([], [in_an_epoch, at_its_end, validated]),
        ([], [cut_short]),
        ([at_its_end, validated], [at_its_end, not_best]),
    ],
    ids=["first", "only", "later"],
)
def test_a_save_that_ends_before_any_of_its_calls(tmp_path, how, before, saves):
    """--resume auto goes on from a whole checkpoint, to the same end as without that."""
    run, places = opened(tmp_path / "straight"), []
    for step in before:
        step(run)
    for step in saves:
        places.append(reached(run))
        step(run)
    last, seen = reached(run), set()
    for at in range(1, 99):
        folder = tmp_path / str(at)
        run = opened(folder)
        for step in before:
            step(run)
        if not ends_at(at, how, [functools.partial(step, run) for step in saves]):
            break
        run = opened(folder)
        assert not list(folder.glob("*.tmp")) and not run.damaged
        here = reached(run)
        seen.add(here)
        assert here in (*places, last)
        if here != last:
            for step in saves[places.index(here) :]:
                step(run)
        assert reached(run) == last
        newest = NAMES[0] if (folder / NAMES[0]).exists() else NAMES[2]  # if there was no other
        assert same_state(load(folder, newest), load(tmp_path / "straight"))
        if validated in before + saves or saves == [cut_short]:
            assert same_state(*(load(x, NAMES[2]) for x in (folder, tmp_path / "straight")))
    assert at > 4 * len(saves) and seen == {*places, last}, (at, seen)
