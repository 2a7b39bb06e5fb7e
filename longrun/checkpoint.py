"""Where a training run stands, and the checkpoints from which it goes on."""

import fcntl
import io
import json
import math
import os
import pickle
import re
import sys
import time
import zipfile
import zlib
from itertools import zip_longest

import torch
from torch.optim.lr_scheduler import LRScheduler

from common.device import own_cores

from .arguments import complete, first_line
from .files import append_line, cut_lines, json_line, whole_file

NEWEST, PREVIOUS, BEST = "checkpoint.pth", "checkpoint.prev.pth", "model_best.pth"
METRICS = "metrics.jsonl"
FILES = (NEWEST, PREVIOUS, BEST, METRICS)  # of a run
TEMPORARY = re.compile(r"(checkpoint.*|model_best)\.pth\.\d+\.tmp")


class Run:
    """Where a run stands: epochs completed, steps done in the current one, the best score so far.

    Rank 0 first locks args.checkpoint_dir, unless it only evaluates, so that no other run changes
    what is read. Then each process reads the checkpoint that args.resume asks for,
    to the CPU; "auto" takes the newest good one in the folder, or starts afresh. The folder is not
    changed before tidy_folder(). Where `step` equals steps_per_epoch, only the validation is left.

    local_world_size: how many processes share the cores of this node. From it follows the number of
    loader workers, args.workers, where none is given.

    Raises ValueError for a folder that another run writes to or has written, and for a checkpoint
    that is damaged or does not fit; OSError for what cannot be read or written.
    """

    def __init__(self, args, rank, world_size, local_world_size=1):
        self.rank, self.world_size = rank, world_size
        self.folder = os.path.realpath(args.checkpoint_dir)
        if rank == 0 and not args.evaluate:
            self.lock = lock_folder(self.folder)  # until this process ends
        self.last_save = contents_of(self.file(NEWEST))
        self.path, self.checkpoint, self.damaged = None, None, []
        if args.resume == "auto":
            self._read_newest()
        elif args.resume:
            self.path = os.path.realpath(args.resume)
            self.checkpoint = read_checkpoint(self.path)
        held = [name for name in FILES if os.path.lexists(self.file(name))]
        goes_on = self.path and (args.resume == "auto" or self.path == self.file(NEWEST))
        if args.evaluate and args.resume and not self.path:
            raise ValueError(f"no checkpoint to evaluate in {self.folder}")
        if held and not goes_on and not args.evaluate:
            remedy = "give another --checkpoint-dir, or continue the newest with --resume auto"
            raise ValueError(f"{self.folder} holds a run ({held[0]}): {remedy}")

        saved = self.checkpoint or {"epoch": 0, "step": 0, "args": {}, "contents": 0}
        self.resumed_args, self.contents = saved["args"], saved["contents"]
        self.args = complete(args, self.resumed_args)
        if vars(args).get("workers") is None:
            self.args.workers = own_cores(local_world_size)
        self.epoch, self.step = saved["epoch"], saved["step"]
        self.began, self.progress = time.perf_counter(), None  # the epoch's ProgressMeter
        self.best_acc1, self.best_epoch, self.ended = -math.inf, 0, False
        if goes_on:  # else the first validation makes the new folder's model_best.pth
            self.best_acc1, self.best_epoch = saved["best_acc1"], saved["best_epoch"]
            # An early end is final, unless more epochs are asked for.
            self.ended = saved["ended"] and self.args.epochs <= saved["args"]["epochs"]

    def file(self, name):
        return os.path.join(self.folder, name)

    def _read_newest(self):
        for path in filter(os.path.lexists, map(self.file, (NEWEST, PREVIOUS, BEST))):
            try:
                self.path, self.checkpoint = path, read_checkpoint(path)
                return
            except Damaged as error:
                self.damaged.append(str(error))
        if self.damaged:
            raise ValueError("; ".join(self.damaged))

    def plan(self, train_set, steps_per_epoch):
        """Learn what is to be trained: a data set with a list `classes`, in so many steps an epoch.

        Raises ValueError for a checkpoint of another model, of other classes or, in the middle of
        an epoch, of another batch size, seed or number of images.
        """
        args = self.args
        self.steps_per_epoch = steps_per_epoch
        self.total_steps = min(args.epochs * steps_per_epoch, args.max_steps or sys.maxsize)
        self.classes = [str(name) for name in train_set.classes]
        # Saved beside the weights, as plain values: what made them, and what a resume compares.
        known = vars(args) | {"world_size": self.world_size, "images": len(train_set)}
        self.saved_args = json.loads(json.dumps(known, default=str))
        if not self.checkpoint:
            return
        saved, now = self.checkpoint, self.saved_args
        self._compare("--arch", saved["arch"], now["arch"])
        for number, (before, name) in enumerate(zip_longest(saved["classes"], self.classes)):
            self._compare(f"class {number}:", before, name)
        if saved["step"] > 0 and not args.evaluate:
            for key in ("batch_size", "seed", "images"):
                self._compare(f"half an epoch of {key}", saved["args"][key], now[key])

    def _compare(self, what, before, now):
        if before != now:
            raise ValueError(f"{self.path} has {what} {before}, but this run has {now}")

    def global_step(self):
        return self.epoch * self.steps_per_epoch + self.step

    def place(self):
        """In words; the first epoch is epoch 1."""
        if self.step == 0 < self.epoch:
            return f"the end of epoch {self.epoch}"
        return f"epoch {self.epoch + 1} step {self.step}"

    def attach(self, net, optimizer, scaler, meters, **more):
        """What save() will write; filled from the checkpoint now, if there is one.

        meters: {name: AverageMeter}. more: anything else with state_dict() and load_state_dict(),
        by name, such as scheduler=scheduler; its state may hold tensors and plain values.

        What the optimizer's groups hold (rate, momentum, ...) comes from the checkpoint. A value
        that the script has changed since counts, except where a torch scheduler is attached. With
        args.evaluate only the model is filled, and of `more` what the checkpoint has. Raises
        ValueError for a checkpoint that does not fit, and what torch raises for a state that it
        could not load.
        """
        self.net, self.optimizer, self.scaler = net, optimizer, scaler
        self.meters, self.more = meters, more
        self.optimizer_type = type(optimizer).__name__.removeprefix("Fused")  # as Apex's are
        # What the script itself gives, before the checkpoint or a scheduler changes it.
        self.given = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        # Tried now: at the resume it would be too late to learn that it cannot be loaded.
        file = io.BytesIO()
        torch.save([part.state_dict() for part in more.values()], file)
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        if optimizer.defaults.get("dampening") == 0:
            # If the first fp16 step overflows, fused SGD would leave them uninitialised.
            for group in optimizer.param_groups:
                for weight in group["params"]:
                    optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        if self.checkpoint:
            saved, self.checkpoint = self.checkpoint, None  # it takes memory
            self._load("the model", net, saved["state_dict"])
            if not self.args.evaluate:
                self._restore_training(saved)
            for name in more.keys() & saved["more"].keys():
                self._load(name, more[name], saved["more"][name])

    def _restore_training(self, saved):
        self._compare("the optimizer", saved["optimizer_type"], self.optimizer_type)
        self._compare("the state of", sorted(saved["more"]), sorted(self.more))
        self._load("the optimizer", self.optimizer, saved["optimizer"])
        if not any(isinstance(part, LRScheduler) for part in self.more.values()):
            groups = zip(self.optimizer.param_groups, saved["given"], self.given, strict=True)
            for group, then, now in groups:  # a flag that was changed counts
                group |= {key: value for key, value in now.items() if value != then.get(key)}
        for weight, state in self.optimizer.state.items():
            for key, value in state.items():
                if torch.is_tensor(value) and value.shape == weight.shape:
                    # Fused kernels read both as flat memory: they must lie there in one order.
                    state[key] = torch.empty_like(weight, dtype=value.dtype).copy_(value)
        if self.scaler.state_dict().keys() == saved["scaler"].keys():  # else another precision
            self.scaler.load_state_dict(saved["scaler"])
        if saved["step"]:  # else each meter starts anew
            self._compare("half an epoch of", sorted(saved["meters"]), sorted(self.meters))
            for name, meter in self.meters.items():
                meter.sum, meter.count = saved["meters"][name]

    def _load(self, name, part, state):
        try:
            part.load_state_dict(state)
        except Exception as error:  # of any type: it may be the user's own class
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            raise ValueError(f"{self.path} does not fit {name}: {reason}") from None

    def check_same(self, train_set, val_set, device, reduce_mean):
        """Raise ValueError unless all processes resume from the same file and have the same images.

        Nodes may have disks of their own. `reduce_mean` is the script's; all processes call this.
        """
        mine = {
            "checkpoint to resume from": self.contents,
            "list of images and classes in train/": fingerprint(train_set),
            "list of images and classes in val/": fingerprint(val_set),
        }
        table = torch.zeros(len(mine), self.world_size, dtype=torch.float64, device=device)
        table[:, self.rank] = torch.tensor(list(mine.values()), dtype=torch.float64)
        table = (reduce_mean(table, self.world_size) * self.world_size).round().tolist()
        for what, row in zip(mine, table, strict=True):
            others = [str(r) for r, value in enumerate(row) if value != row[0]]
            if others:
                raise ValueError(f"the {what} of rank {', '.join(others)} differs from rank 0's")

    def tidy_folder(self):
        """Rank 0, once all processes agree: remove what a killed process has left half-done.

        A damaged newest checkpoint is kept as checkpoint.damaged-TIME.pth.
        """
        self._check_untouched()
        for name in filter(TEMPORARY.fullmatch, os.listdir(self.folder)):
            os.remove(self.file(name))
        if self.damaged and os.path.exists(self.file(NEWEST)):
            os.replace(self.file(NEWEST), self.file(f"checkpoint.damaged-{time.time_ns()}.pth"))
            self.last_save = contents_of(self.file(NEWEST))
        cut_lines(self.file(METRICS), self.epoch, self.step)

    def _check_untouched(self):
        """Raise OSError if another run has written here since this one last read or wrote.

        The lock does not keep it out where a file system has no locks or the folder was moved.
        """
        if contents_of(self.file(NEWEST)) != self.last_save:
            raise OSError(
                f"{self.file(NEWEST)} is not the one that this run last read or wrote: "
                "does another run use the folder, or was it moved?"
            )

    def remaining(self, stop):
        """Yield (epoch, first, end): the epochs that are left, and which of their steps.

        It ends where training is to end, with end(), or once all processes agree to stop.
        """
        while not (self.finished() or self.args.evaluate or stop.agreed):
            in_this_epoch = self.total_steps - self.epoch * self.steps_per_epoch
            end = max(self.step, min(self.steps_per_epoch, in_this_epoch))
            yield self.epoch, self.step, end

    def finished(self):
        """Whether nothing is left to do: no step, and no validation of a complete epoch."""
        lacks_validation = self.step == self.steps_per_epoch
        return self.ended or (self.global_step() >= self.total_steps and not lacks_validation)

    def end_epoch(self, score):
        """Count a complete epoch; returns whether `score`, the higher the better, is the best.

        All ranks call it, so that they know the best score and can take the same decisions.
        """
        if self.step == self.steps_per_epoch:
            self.epoch, self.step = self.epoch + 1, 0
        is_best = score > self.best_acc1
        if is_best:
            self.best_acc1, self.best_epoch = float(score), self.epoch + (self.step > 0)
        return is_best

    def end(self):
        """Make this epoch the last, before it is saved. All ranks must call it."""
        self.ended = True

    def save(self, row=None, is_best=False):
        """Rank 0: write checkpoint.pth; the one before becomes checkpoint.prev.pth.

        After a validation: `row`, a dict, is added to metrics.jsonl, and if is_best the same goes
        to model_best.pth. checkpoint.pth comes last: after a crash before, the epoch's end is
        repeated. Raises OSError where it cannot be written, and leaves the old one;
        FloatingPointError for weights that are not finite.
        """
        bad = [name for name, x in self.net.named_parameters() if not x.isfinite().all()]
        bad += [name for name, x in self.net.named_buffers() if x.isnan().any()]
        if bad:
            raise FloatingPointError(f"{bad[0]} holds NaN or infinity, so nothing was saved")
        line = json_line(row) if row else ""  # an error in it comes before anything changes
        state = {
            "epoch": self.epoch,
            "step": self.step,
            "ended": self.ended,
            "arch": self.args.arch,
            "best_acc1": self.best_acc1,
            "best_epoch": self.best_epoch,
            "state_dict": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "optimizer_type": self.optimizer_type,
            "given": self.given,
            "scaler": self.scaler.state_dict(),
            "meters": {name: (meter.sum, meter.count) for name, meter in self.meters.items()},
            "more": {name: part.state_dict() for name, part in self.more.items()},
            "classes": self.classes,
            "args": self.saved_args,
        }
        self._check_untouched()
        if is_best:
            with whole_file(self.file(BEST)) as file:
                torch.save(state, file)
        if row:
            append_line(self.file(METRICS), line)
        with whole_file(self.file(NEWEST), keep=self.file(PREVIOUS)) as file:
            torch.save(state, file)
            self._check_untouched()  # again: a large checkpoint takes a while to write
        self.last_save = contents_of(self.file(NEWEST))


class Damaged(ValueError):
    """A checkpoint whose contents are not what was written."""


def read_checkpoint(path):
    """A checkpoint as a dict on the CPU, with the number of its `contents`.

    Raises Damaged for contents that changed since they were written, ValueError for what is no
    checkpoint of these scripts, OSError for what cannot be read.
    """
    with open(path, "rb") as file:
        check_whole(file)
        contents = contents_of(file)
        file.seek(0)
        try:
            checkpoint = torch.load(file, weights_only=True, map_location="cpu")
        except (pickle.UnpicklingError, RuntimeError) as error:  # it holds code; memory is short
            raise ValueError(f"torch.load cannot read {path}: {first_line(error)}") from None
    if not isinstance(checkpoint, dict) or "best_epoch" not in checkpoint:
        raise ValueError(f"{path} is no checkpoint of these scripts, or of an older version")
    return checkpoint | {"contents": contents}


def check_whole(file):
    """Raise Damaged unless a checkpoint is as written: torch.load does not see flipped bytes."""
    try:
        with zipfile.ZipFile(file) as archive:
            if archive.testzip() is not None:
                raise zipfile.BadZipFile("a checksum does not match")
    except Exception as error:  # each kind of damage raises another one
        file.seek(0)
        try:
            while file.read(1 << 24):
                pass
        except OSError as disk:  # which zipfile takes for damage
            raise OSError(f"cannot read {file.name}: {disk}") from None
        raise Damaged(f"{file.name} is damaged ({type(error).__name__}: {error})") from None


def contents_of(file):
    """A number for what a checkpoint holds, by the checksums in its archive; 0 where it is none.

    Not its inode or time of change: on network file systems these may change by themselves.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            return zlib.crc32(repr([(x.filename, x.CRC) for x in archive.infolist()]).encode())
    except Exception:  # it is not there, or damaged
        return 0


def lock_folder(folder):
    """Make a folder, and lock it for as long as this process keeps the file that is returned.

    Raises ValueError where another process has locked it.
    """
    os.makedirs(folder, exist_ok=True)
    lock = open(os.path.join(folder, ".lock"), "a")  # noqa: SIM115
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # children do not inherit it
    except (BlockingIOError, PermissionError):
        message = f"another run is writing to {folder}: choose another --checkpoint-dir"
        raise ValueError(message) from None
    except OSError:
        pass  # a file system without locks
    return lock


def fingerprint(dataset):
    """A number that changes with the classes, the files and the length of a data set."""
    known = len(dataset), *(list(getattr(dataset, name, [])) for name in ("classes", "paths"))
    return zlib.crc32(repr(known).encode())
