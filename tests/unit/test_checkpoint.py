"""Checkpoints: what is saved is what goes on, whole or not there; a folder only goes forward."""

import contextlib
import errno
import functools
import io
import itertools
import os
import pickle
import random
import resource
import signal
import socket
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import load, rows, same_state
from torch.utils._pytree import tree_map

from common.loader import TrainSampler
from common.metrics import AverageMeter
from longrun import checkpoint
from longrun.checkpoint import Checkpoints, Damaged, listed, read_checkpoint
from tests import nets
from tests.runs import (
    STEPS,
    Images,
    arguments,
    opened,
    parts,
    read,
    save,
    train_a_step,
    two_groups,
    write,
)
from tests.unit.child import forked

NAMES = ["checkpoint.pth", "checkpoint.prev.pth", "model_best.pth"]


def content(folder):
    """{path: (content, time of the change)} of all in a folder and below, but for the lock."""
    found = {}
    for path in Path(folder).rglob("*"):
        if path.name != ".lock":
            real = path.is_file() and not path.is_symlink()
            found[path] = path.read_bytes() if real else None, path.lstat().st_mtime_ns
    return found


def refused(folder, message, *given, **more):
    """A run is refused with one line, which matches, and changes nothing."""
    before = content(folder)
    with pytest.raises((ValueError, OSError), match=message) as error:
        opened(folder, *given, **more)
    assert "\n" not in str(error.value) and len(str(error.value)) < 600
    assert content(folder) == before


def restored(folder, make=parts, **more):
    """(run, net, optimizer, scaler, meters) after a resume; `more` is attached too."""
    run, made = read(folder), make()
    run.attach(*made, **more)
    run.restore()
    return run, *made


def with_buffers(scaled=True):
    net = nets.normed(10).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, 0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    return net, optimizer, scaler, {"loss": AverageMeter("loss")}


def test_in_mid_epoch_all_is_restored(tmp_path):
    """BatchNorm's statistics, momentum, sums, the loss scale."""
    run, net, optimizer, scaler, meters = restored(tmp_path, with_buffers)
    scaler.scale(net(torch.rand(4, 3, 24, 24)).sum()).backward()
    scaler.step(optimizer)
    scaler.update(1024.0)
    meters["loss"].add(5.0, 2)
    run.progress.step = 3
    run.save()
    run, net, optimizer, scaler, meters = restored(tmp_path, with_buffers)
    assert (run.progress.step, scaler.get_scale(), meters["loss"].avg) == (3, 1024.0, 2.5)
    run.save()
    assert same_state(load(tmp_path), load(tmp_path, NAMES[1]))
    restored(tmp_path, lambda: with_buffers(scaled=False))  # as bf16 is trained


def test_momentum_lies_in_memory_as_its_weight(tmp_path):
    """Apex's kernels go through both in this order; FSDP saves what is contiguous."""
    run, net, optimizer, _, _ = restored(tmp_path, with_buffers)
    net(torch.rand(4, 3, 24, 24)).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].contiguous()
    run.progress.step = 3
    run.save()
    now = restored(tmp_path, with_buffers)[2].state
    for (weight, state), before in zip(now.items(), optimizer.state.values(), strict=True):
        assert state["momentum_buffer"].stride() == weight.stride()
        assert state["momentum_buffer"].equal(before["momentum_buffer"])
    assert any(not weight.is_contiguous() for weight in now)


class Patience:
    """A user's own state."""

    def __init__(self):
        self.state = {"bad_epochs": 0, "average": torch.zeros(3)}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def one_cycle(folder, *ends):
    """Train by OneCycle, which changes AdamW's betas too; returns the checkpoint.

    ends: steps at which all is saved, and continued by new objects, with another --lr.
    """
    for number, end in enumerate(ends, 1):
        net, optimizer, scaler, meters = two_groups(torch.optim.AdamW)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1 * number, total_steps=9)
        patience, run = Patience(), read(folder)
        run.attach(net, optimizer, scaler, meters, scheduler=schedule, patience=patience)
        run.restore()
        while run.progress.step < end:
            torch.manual_seed(run.progress.step)
            train_a_step(run)
            schedule.step()
            run.progress.step += 1
            patience.state["bad_epochs"] += 1
            patience.state["average"] += run.progress.step
        run.save()
    return tree_map(lambda x: x.tolist() if torch.is_tensor(x) else x, load(folder))


def test_a_schedule_and_a_state_of_ones_own_go_on(tmp_path):
    """To the bit, whatever --lr says now: a scheduler's state has the rates of its run.

    One that started anew would train on at a wrong rate, unnoticed.
    """
    straight, broken = one_cycle(tmp_path / "a", 7), one_cycle(tmp_path / "b", 4, 7)
    assert straight["more"]["patience"] == {"bad_epochs": 7, "average": [28.0] * 3}
    for key in ("state_dict", "optimizer", "more", "meters"):
        assert straight[key] == broken[key], key


def test_what_the_script_gives_now_counts(tmp_path):
    """Where no torch scheduler has set it."""
    opened(tmp_path).save()
    net, optimizer, scaler, meters = parts()
    given = {"momentum": 0.85, "lr": 0.03, "weight_decay": 0.5}
    optimizer.param_groups[0] |= given
    run = read(tmp_path)
    run.attach(net, optimizer, scaler, meters)
    run.restore()
    assert optimizer.param_groups[0].items() >= given.items()


def test_flags_that_are_the_checkpoints(tmp_path):
    write(tmp_path, 1, arch="mine:net")
    given, fresh = arguments(tmp_path), arguments(tmp_path, None)
    assert Checkpoints.saved_flags(given, "arch", "seed", "none") == {"arch": "mine:net", "seed": 0}
    assert Checkpoints.saved_flags(fresh, "arch") == {}


def test_a_checksum_is_of_all_bits_of_the_weights(tmp_path):
    run = read(tmp_path, None)
    for dtype, number in (torch.float32, 31), (torch.bfloat16, 15), (torch.float64, 63):
        run.net = nets.plain(10).to(dtype)
        before = run.checksum()
        run.net.to(memory_format=torch.channels_last)
        assert run.checksum() == before and 0 < before < 2**20
        bits = run.net[0].weight.data.view(getattr(torch, f"int{number + 1}"))
        bits[0, 0, 0, 0] ^= -1 << number  # the highest bit
        assert abs(run.checksum() - before) > 1000  # else a mean of many processes would hide it
    run.net = torch.nn.ParameterList([torch.ones(2, dtype=torch.complex128)])
    before = run.checksum()
    run.net[0].data[0] = 2
    assert run.checksum() != before
    run.net = torch.nn.ReLU()
    assert 0 <= run.checksum() < 2**20  # without weights too


no_meters = lambda: (*parts()[:3], {})  # noqa: E731
ADAMW, SGD = (functools.partial(two_groups, kind) for kind in (torch.optim.AdamW, torch.optim.SGD))


@pytest.mark.parametrize(
    "now, ema, message",
    [
        (ADAMW, nets.plain(10), "has the optimizer SGD, but this run has AdamW$"),
        (SGD, nets.plain(10), "does not fit the optimizer: ValueError: .* parameter groups$"),
        (with_buffers, nets.plain(10), "does not fit the model: .*Missing key.*running_mean"),
        (no_meters, nets.plain(10), r"has half an epoch of \['loss'\], but this run has \[\]$"),
        (parts, None, r"has the state of \['ema'\], but this run has \[\]$"),
        (parts, nets.normed(10), "does not fit ema: .*Missing key"),
    ],
)
def test_a_checkpoint_of_something_else_is_one_line(tmp_path, now, ema, message):
    run = opened(tmp_path)
    run.attach(*parts(), ema=nets.plain(10))
    run.progress.step = 5
    run.save()
    with pytest.raises(ValueError, match=f"^{tmp_path}/checkpoint.pth {message}") as raised:
        restored(tmp_path, now, **({"ema": ema} if ema else {}))
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 500


@pytest.mark.parametrize(
    "change, message",
    [
        ({"images": Images(classes="0132456789")}, "class 2: 2, but this run has 3"),
        ({"images": Images(classes="012345678")}, "class 9: 9, but this run has None"),
        ({"arch": "b"}, "--arch a, but this run has b"),
        ({"batch_size": 16}, "half an epoch of batch_size 8, but this run has 16"),
        ({"seed": 7}, "half an epoch of seed 0, but this run has 7"),
        ({"images": Images(81)}, "half an epoch of images 80, but this run has 81"),
    ],
)
def test_another_training_is_refused(tmp_path, change, message):
    """Only within an epoch is the order of the images a part of it."""
    run = opened(tmp_path)
    run.progress.step = 5
    run.save()
    refused(tmp_path, f"has {message}$", **change)
    save(run, 1)
    for evaluate in (False, True):
        if message.startswith("half"):
            assert read(tmp_path, evaluate=evaluate, **change).progress.epoch == 1
        else:
            refused(tmp_path, f"has {message}$", evaluate=evaluate, **change)


def test_fewer_images_than_a_step_takes(tmp_path):
    steps = TrainSampler(7, 8, 0, 1, seed=0).steps_per_epoch
    with pytest.raises(ValueError, match="7 images to train do not fill one --batch-size 8"):
        Checkpoints(arguments(tmp_path, None), 0, 1).start_progress(Images(7), steps)
    evaluating = Checkpoints(arguments(tmp_path, None, evaluate=True), 0, 1)
    evaluating.start_progress(Images(7), steps)


def test_an_evaluation_needs_the_model_alone(tmp_path):
    """It takes what else is there. It changes nothing, and needs no lock: it may read beside a run.

    Only where there is no checkpoint that was asked for, there is nothing to evaluate.
    """
    run = write(tmp_path / "c", 1)
    run.attach(*parts(), patience=Patience(), ema=nets.plain(10))
    save(run, 2)
    before = content(tmp_path)
    for resume, epoch in {None: 0, "auto": 2, f"{tmp_path}/c/{NAMES[1]}": 1}.items():
        evaluating = read(tmp_path / "c", resume, evaluate=True)
        evaluating.attach(*ADAMW(), patience=Patience())
        evaluating.restore()
        assert evaluating.progress.epoch == epoch
    with pytest.raises(ValueError, match=f"no checkpoint to evaluate in {tmp_path}/none"):
        read(tmp_path / "none", evaluate=True)
    assert content(tmp_path) == before


def test_a_state_that_could_not_be_read_again_is_said_at_once(tmp_path):
    """Not at the resume: then it would be too late."""
    mine = SimpleNamespace(state_dict=lambda: {"value": Patience()})
    with pytest.raises(pickle.UnpicklingError, match=r"GLOBAL test_checkpoint\.Patience"):
        restored(tmp_path, mine=mine)


def test_keys_are_plain_python(tmp_path):
    """Whatever a program of one's own hands over: read_checkpoint() takes nothing else."""
    run = opened(tmp_path, None, backend=torch.device("cpu"), data=tmp_path)
    save(run, 1, torch.tensor(60.0))
    assert read_checkpoint(str(tmp_path / NAMES[0]))["args"]["data"] == str(tmp_path)


# The best, the end, and what is left.


def test_only_a_better_validation_is_the_best(tmp_path):
    run = write(tmp_path / "a", 1)
    for epoch, acc1, best in ((2, 50.0, 1), (3, 51.0, 1), (4, 51.5, 4)):
        save(run, epoch, acc1)
        assert load(tmp_path / "a", "model_best.pth")["epoch"] == best
    for rank in (1, 0):  # each knows the best of the run before it
        progress = Checkpoints(arguments(tmp_path / "a"), rank, 2).start_progress(Images(), STEPS)
        assert not progress.record_score(51.5) and progress.record_score(51.6)
    # In a folder of its own the first is the best, whatever its score.
    save(opened(tmp_path / "b", str(tmp_path / "a/model_best.pth")), 5, -3.5)
    assert load(tmp_path / "b", "model_best.pth")["best_acc1"] == -3.5


def left(run):
    """What remaining() yields, each trained and validated."""
    found = []
    for epoch, steps in run.progress.remaining():
        found.append((epoch, steps))
        run.progress.step = steps.stop
        run.progress.end_epoch()
        run.progress.record_score(0)
        run.save({"epoch": run.progress.epoch, "step": run.progress.step}, False)
    assert run.progress.finished()
    return found


def test_what_is_left(tmp_path):
    assert left(opened(tmp_path, max_steps=14)) == [(0, range(10)), (1, range(4))]
    assert left(opened(tmp_path, max_steps=14)) == left(opened(tmp_path, max_steps=3)) == []
    run = opened(tmp_path, epochs=3)
    assert next(run.progress.remaining()) == (1, range(4, 10))
    assert list(opened(tmp_path, evaluate=True).progress.remaining()) == []
    run.progress.step = 10
    run.save()  # trained, and not validated yet
    assert left(opened(tmp_path, max_steps=20)) == [(1, range(10, 10))]
    assert [(row["epoch"], row["step"]) for row in rows(tmp_path)] == [(1, 0), (1, 4), (2, 0)]


def test_an_early_end_is_an_end(tmp_path):
    """Until more epochs are asked for, or the run goes on elsewhere."""
    run = write(tmp_path, 1, epochs=5)
    run.progress.stop_early()
    save(run, 2)
    assert left(opened(tmp_path, epochs=5)) == left(opened(tmp_path, epochs=4)) == []
    assert left(opened(tmp_path / "d", run.path_of(NAMES[0]), epochs=3)) == [(2, range(10))]
    assert left(opened(tmp_path, epochs=6))[0] == (2, range(10))


# Damage is noticed, and what is replaced was read.


def cut(paths, share):
    for path in paths:
        os.truncate(path, int(os.path.getsize(path) * share))


@pytest.mark.parametrize("share", [0, 0.5, 0.99])
@pytest.mark.parametrize("bad, epoch", [(1, 1), (2, 2)], ids=["the newest", "the one before too"])
def test_the_one_before_is_taken_for_a_damaged_one(tmp_path, bad, epoch, share):
    """The previous one, or else the best one; the damaged newest one is kept."""
    run = write(tmp_path, 2)
    paths = [run.path_of(name) for name in NAMES]
    cut(paths[:bad], share)
    refused(tmp_path, f"^{paths[0]} is .*damaged", paths[0])
    content = Path(paths[0]).read_bytes()
    run = opened(tmp_path)
    assert (run.progress.epoch, run.path) == (epoch, paths[bad])
    assert [line.split(" is ")[0] for line in run.damaged] == paths[:bad]
    assert len(rows(tmp_path)) == epoch
    (kept,) = tmp_path.glob("checkpoint.damaged-*.pth")
    assert kept.read_bytes() == content and not os.path.exists(paths[0])
    assert opened(tmp_path).progress.epoch == epoch  # a kill between two renames leaves none
    save(run, epoch + 1)
    assert opened(tmp_path).damaged == [] and kept.exists()
    save(run, epoch + 2)
    cut(paths, share)
    refused(tmp_path, "; ".join(f"{path} is .*damaged.*" for path in paths))


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
        except Damaged:
            continue
        assert all(got[key].equal(state[key]) for key in state)  # it hit padding


class Command:
    def __reduce__(self):
        return os.mkdir, (Command.path,)


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    """It is whole: the one before is not taken for it."""
    Command.path = str(tmp_path / "ran")
    write(tmp_path, 2)
    newest = str(tmp_path / NAMES[0])
    torch.save({**load(tmp_path), "args": Command()}, newest)
    for resume in (newest, "auto"):
        refused(tmp_path, f"^{newest} is no checkpoint of these scripts: ", resume)
    torch.load(newest, weights_only=False)
    assert os.path.exists(Command.path)  # then it is run, and only then


def test_a_checkpoint_that_cannot_be_read_is_not_damaged(tmp_path):
    """It stays where it is, for the disk may come back. The double of a bad disk is memory."""
    write(tmp_path, 2)
    (tmp_path / NAMES[0]).unlink()
    (tmp_path / NAMES[0]).symlink_to("/proc/self/mem")  # at 0 there is none
    refused(tmp_path, "Input/output error")


@pytest.mark.parametrize("good", [0, 1, 2, 3])
def test_a_disk_that_fails_in_the_middle_of_a_checkpoint(good, tmp_path):
    """After so many reads. Of an error in its first zipfile makes one of its own."""
    write(tmp_path, 1)

    class Failing(io.BytesIO):
        name, left = "it", good

        def read(self, *size):
            if self.left == 0:
                raise OSError(errno.EIO, "Input/output error")
            self.left -= 1
            return super().read(*size)

    with pytest.raises(OSError, match="Input/output error"):
        checkpoint.check_whole(Failing((tmp_path / NAMES[0]).read_bytes()))


def make_torchscript(path):
    """What torch takes for it."""
    with zipfile.ZipFile(path, "w") as file:
        for name in ("data.pkl", "constants.pkl", "version"):
            file.writestr(f"x/{name}", b"3")


NET, OLD = nets.plain(10), functools.partial(torch.save, _use_new_zipfile_serialization=False)
NO_FILE = ", but a folder, a pipe or a device$"
OF_OTHERS = " of these scripts: to start from weights in it, give --pretrained /"
OTHERS = {  # how they are made, and what they are not
    "folder": (Path.mkdir, NO_FILE),
    "pipe": (os.mkfifo, NO_FILE),
    "socket": (lambda path: socket.socket(socket.AF_UNIX).bind(str(path)), NO_FILE),
    "device": (lambda path: path.symlink_to("/dev/zero"), NO_FILE),
    "weights": (lambda path: torch.save(NET.state_dict(), path), OF_OTHERS),
    "module": (lambda path: torch.save(NET, path), OF_OTHERS),
    "TorchScript": (make_torchscript, OF_OTHERS),
    "empty": (Path.touch, " of these scripts, or damaged$"),
    "keys of another": (lambda path: torch.save(dict(best_epoch=3, args={}), path), OF_OTHERS),
    "old format": (lambda path: OLD({}, path), " of these scripts, or damaged$"),
}


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore:.*TorchScript")
@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_no_checkpoint_is_one_line_at_once(tmp_path, kind):
    """Without torch's advice, which is to run the code in it."""
    make, what = OTHERS[kind]
    make(tmp_path / kind)
    path = os.path.realpath(tmp_path / kind)
    refused(tmp_path / "c", f"^{path} is no checkpoint{what}", f"{tmp_path}/{kind}")


def test_what_was_read_and_not_restored_is_not_saved_over(tmp_path):
    """A loop of one's own may leave out restore(): its weights are those of the start."""
    write(tmp_path, 2)
    run = read(tmp_path)
    run.attach(*parts())
    before = content(tmp_path)
    with pytest.raises(RuntimeError, match=f"^{tmp_path}/checkpoint.pth was read and not restored"):
        run.save()
    assert content(tmp_path) == before


@pytest.mark.parametrize(
    "spoil, error, message",
    [
        (lambda run: run.net[0].weight.data.view(-1)[0].fill_(torch.inf), FloatingPointError, "0"),
        (lambda run: run.net[1].mean.fill_(torch.nan), FloatingPointError, "1.mean holds NaN"),
        (lambda run: setattr(run.progress, "epoch", torch.ones(2)), TypeError, "serializable"),
    ],
    ids=["weight", "buffer", "no JSON"],
)
def test_what_is_not_finite_or_no_json_is_not_saved(tmp_path, spoil, error, message):
    """And changes nothing."""
    run = write(tmp_path, 2)
    run.net[1].register_buffer("mean", torch.zeros(3))
    spoil(run)
    before = content(tmp_path)
    with pytest.raises(error, match=message):
        run.save({"epoch": run.progress.epoch, "step": 0}, True)
    assert content(tmp_path) == before


def test_a_constant_that_is_no_number_is_saved(tmp_path):
    """NaN from the start, as of a mask; not what becomes NaN in training."""
    made = parts()
    for name, value in {"mask": torch.nan, "mean": 0.0}.items():
        made[0][1].register_buffer(name, torch.full((2,), value))
    run = read(tmp_path)
    run.attach(*made)
    run.save()
    assert run.net.state_dict()["1.mask"].isnan().all()
    assert torch.load(tmp_path / "checkpoint.pth")["state_dict"]["1.mask"].isnan().all()
    run.net[1].mean.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match=r"^1\.mean holds NaN"):
        run.save()


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path):
    """A limit of the size of a file: what lies beyond it cannot be written."""
    run = write(tmp_path, 2)
    before = content(tmp_path)
    run.progress.step = 5

    def save_on_full_disk():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limit = (tmp_path / NAMES[0]).stat().st_size // 2
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        with pytest.raises(OSError, match=f"^cannot write {tmp_path}/{NAMES[0]}: .*too large"):
            run.save()

    assert forked(save_on_full_disk) == [0]
    assert content(tmp_path) == before


# A folder only goes forward, and belongs to one run.


@pytest.mark.parametrize("name", [*NAMES, "metrics.jsonl"])
def test_each_file_of_a_run_makes_the_folder_its_own(tmp_path, name):
    other = str(tmp_path / "other/checkpoint.pth")
    write(tmp_path / "other", 1)
    folder = tmp_path / "c"
    folder.mkdir()
    (folder / name).symlink_to("/not/mounted")  # what is behind must not be replaced
    message = f"{folder} holds a run .{name}.: give another --checkpoint-dir, or continue"
    for resume in (None, other):
        refused(folder, message, resume)
    alone = r"holds a run \(metrics.jsonl\): no checkpoint is with it: give another"
    refused(folder, alone if name == "metrics.jsonl" else f"{folder}/{name}", "auto")


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").touch()
    refused(tmp_path / "file", f"^--checkpoint-dir {tmp_path}/file: File exists$", None)
    (tmp_path / "c/.lock").mkdir(parents=True)  # as where one may not write
    refused(tmp_path / "c", f"^--checkpoint-dir {tmp_path}/c: Is a directory$", None)


def test_only_the_newest_goes_on_in_its_folder(tmp_path):
    """By whatever name. An older one would replace the newer one: it goes on elsewhere."""
    run = write(tmp_path / "c", 1)
    save(run, 2, 0.0)
    save(run, 3, 0.0)
    links = {"best.pth": "c/model_best.pth", "newest.pth": "c/checkpoint.pth", "d": "c"}
    for link, target in links.items():
        (tmp_path / link).symlink_to(target)
    before = content(tmp_path / "c")
    for name, epoch in (("c/checkpoint.prev.pth", 2), ("d/model_best.pth", 1), ("best.pth", 1)):
        for folder in "cd":
            message = "holds a run .*: give another --checkpoint-dir, or continue the newest"
            refused(tmp_path / folder, message, f"{tmp_path}/{name}")
        assert opened(tmp_path / "new", f"{tmp_path}/{name}").progress.epoch == epoch
    assert content(tmp_path / "c") == before
    for epoch, name in enumerate(("c/checkpoint.pth", "d/checkpoint.pth", "newest.pth"), 4):
        save(opened(tmp_path / "c", f"{tmp_path}/{name}"), epoch)
    assert [load(tmp_path / "c", name)["epoch"] for name in NAMES] == [6, 5, 6]
    assert [row["epoch"] for row in rows(tmp_path / "c")] == [1, 2, 3, 4, 5, 6]


def test_only_our_own_temporary_files_are_removed(tmp_path):
    theirs = ["notes.csv.2024.tmp", "checkpoint.pth.tmp", "checkpoint_mine.pth.77.tmp"]
    theirs.append("checkpoint.pth.\u0663.tmp")  # a digit of another script
    ours = ["checkpoint.pth.12.tmp", "model_best.pth.12.tmp"]
    for name in theirs + ours:
        (tmp_path / name).write_text(name)
    opened(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {".lock", *theirs}


def test_resume_cuts_from_metrics_what_the_checkpoint_did_not_commit(tmp_path):
    write(tmp_path, 2)
    path = tmp_path / "metrics.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    theirs = b'null\n\n[1, 2]\n{"epoch": "x", "step": 0}\n"\xff\n{"epoch": 1, "st\n'
    late = b'{"epoch": 3, "step": 0}\n'
    for end in (late, late + b'{"epoch": 4, "st', b'{"ep'):
        path.write_bytes(first + theirs + second + end)
        opened(tmp_path)
        assert path.read_bytes() == first + theirs + second  # what is not ours stays
    save(opened(tmp_path), 3)
    assert path.read_bytes() == first + theirs + second + late


# The same classes and images, whoever reads them.


def test_what_is_compared_is_names_of_any_data_set():
    """A data set need not be of files; those of files hold their names as it suits them."""
    images = [Images(80), Images(81), Images(classes="ab"), Images(80), Images(80), Images(80)]
    images[3].paths, images[4].paths, images[5].paths = ["ab", ""], ["a", "b"], [Path("a"), "c"]
    assert len({repr(listed(x)) for x in (*images, range(5), range(6))}) == 8


SAME, LESS = [Images()] * 3, [Images(), Images(79), Images()]


@pytest.mark.parametrize(
    "places, train, val, seeds, what",
    [
        ([(0, 2)] * 3, SAME, SAME, [0, 0, 0], None),
        ([(0, 2), (0, 3), (0, 2)], SAME, SAME, [0, 0, 0], "the place where training goes on"),
        # As many steps: all of an epoch, with and without its validation.
        ([(2, 0), (2, 0), (1, STEPS)], SAME, SAME, [0, 0, 0], "the place where training goes on"),
        ([(0, 0)] * 3, LESS, SAME, [0, 0, 0], "the images and classes in train/"),
        ([(0, 0)] * 3, SAME, [Images(classes="ab"), *SAME], [0, 0, 0], "the images and .* val/"),
        ([(0, 0)] * 3, SAME, SAME, [0, 7, 0], "--seed"),
    ],
)
def test_processes_that_differ_are_an_error_in_each(tmp_path, places, train, val, seeds, what):
    """Each of three has read from a disk of its own, and was started by a command of its own."""
    run, tables = read(tmp_path, None, world_size=3), []

    def check(rank, mean):
        run.progress.epoch, run.progress.step = places[rank]
        run.args.seed, run.args.workers, run.args.data = seeds[rank], rank, f"/disk{rank}"
        run.args.mine = object()  # a flag of the user's, such as a function
        run.check_ranks_agree(train[rank], val[rank], torch.device("cpu"), mean)

    for rank in range(3):
        check(rank, lambda table, _: tables.append(table) or 0 * table)
    said = f"^{what} must be the same in all processes: compare the nodes' commands and disks$"
    for rank in range(3):
        with pytest.raises(ValueError, match=said) if what else contextlib.nullcontext():
            check(rank, lambda table, world_size: sum(tables) / world_size)


# Killed at any moment.

SAVES = [(5, None), (STEPS, None), (STEPS, 99.0), (STEPS, None), (STEPS, -1.0)]


def save_at(run, step, score):
    """Save in an epoch or, with a score, after its validation."""
    run.progress.step = step
    if score is None:
        run.save()
    else:
        run.progress.end_epoch()
        is_best = run.progress.record_score(score)
        run.save({"epoch": run.progress.epoch, "step": run.progress.step}, is_best)


def killed_at(call, run):
    """Whether SAVES make so many calls. Before the last of them the process is killed, or when it
    has half written a line of metrics.jsonl.
    """
    calls, append_line = itertools.count(1), checkpoint.append_line

    def counted(function, *args):
        if next(calls) == call:
            if function is append_line:
                with open(args[0], "a") as file:
                    file.write(args[1][:8])
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args)

    def save_all():
        names = [(os, "fsync"), (os, "replace"), (torch, "save"), (checkpoint, "append_line")]
        for module, name in names:
            setattr(module, name, functools.partial(counted, getattr(module, name)))
        for step, score in SAVES:
            save_at(run, step, score)

    return forked(save_all) != [0]


def started(folder):
    run = opened(folder)
    if not run.optimizer.state:
        train_a_step(run)
    return run


def reached(run):
    path = Path(run.folder, "metrics.jsonl")
    return run.progress.epoch, run.progress.step, path.read_text() if path.exists() else ""


def test_a_kill_in_any_moment_of_a_save(tmp_path):
    """--resume auto goes on from a whole checkpoint, to the same end as without that."""
    run, places = started(tmp_path / "straight"), []
    for step, score in SAVES:
        places.append(reached(run))
        save_at(run, step, score)
    last, seen = reached(run), set()
    for at in range(1, 99):
        folder = tmp_path / str(at)
        if not killed_at(at, started(folder)):
            break
        run = started(folder)
        assert not list(folder.glob("*.tmp")) and not run.damaged
        seen.add(reached(run))
        if reached(run) in places:
            for step, score in SAVES[places.index(reached(run)) :]:
                save_at(run, step, score)
        assert reached(run) == last
        for name in (NAMES[0], NAMES[2]):
            assert same_state(load(folder, name), load(tmp_path / "straight", name))
    assert at > 4 * len(SAVES) and seen | {last} == {*places, last}, (at, seen)
