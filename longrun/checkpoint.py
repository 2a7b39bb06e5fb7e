"""Checkpoints: how one is found, compared, restored and written."""

import errno
import io
import json
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

from .files import append_line, atomic_write, cut_lines, json_line
from .locks import lock_folder
from .messages import first_line
from .progress import Progress

NEWEST, PREVIOUS, BEST = "checkpoint.pth", "checkpoint.prev.pth", "model_best.pth"
METRICS = "metrics.jsonl"
FILES = (NEWEST, PREVIOUS, BEST, METRICS)  # of a run
KEYS = {"epoch", "step", "ended", "arch", "best_acc1", "best_epoch", "state_dict", "optimizer"}
KEYS |= {"optimizer_type", "scaler", "meters", "more", "classes", "args"}  # of a checkpoint
MAY_CHANGE = {"resume", "evaluate", "workers", "images"}  # without a word, from start to start
# Paths are a node's own, and so is its number of cores.
OF_A_NODE = {"data", "pretrained", "checkpoint_dir", "resume", "workers", "local_rank", "dist_file"}
SMALL = 2**20 - 3  # a prime: of numbers below it the squares, summed up in float64, are exact
FACTOR = 648_055  # SMALL divided by the golden ratio: multiples of it are far from each other
TEMPORARY = re.compile(r"(checkpoint|model_best)\.pth\.[0-9]+\.tmp")


class Checkpoints:
    """The checkpoints of a run: the one that it goes on from, and those that it writes.

    Rank 0 locks args.checkpoint_dir against other runs, unless it only evaluates. Each process
    reads the checkpoint that args.resume asks for, to the CPU; "auto" takes the newest good one in
    the folder, or starts afresh. Nothing in the folder changes but its `.lock`, until
    discard_leftovers(). Call the methods in the order in which they stand here.

    Raises ValueError for a folder that another run writes to or has written, and for a checkpoint
    that is damaged or does not fit; OSError for what cannot be read or written.
    """

    def __init__(self, args, rank, world_size):
        self.args, self.rank, self.world_size = args, rank, world_size
        self.folder = os.path.realpath(args.checkpoint_dir)
        if rank == 0 and not args.evaluate:
            self.lock = lock_folder(self.folder)  # until this process ends
        self.path, self.checkpoint, self.damaged = load_resumed(args)
        held = [name for name in FILES if os.path.lexists(self.path_of(name))]
        self.goes_on = self.path and (args.resume == "auto" or self.path == self.path_of(NEWEST))
        if held and not self.goes_on and not args.evaluate:
            remedy = "give another --checkpoint-dir, or continue the newest with --resume auto"
            if args.resume == "auto":  # it has found no checkpoint
                remedy = "no checkpoint is with it: give another --checkpoint-dir, or move it away"
            raise ValueError(f"{self.folder} holds a run ({held[0]}): {remedy}")

    @staticmethod
    def saved_flags(args, *names):
        """{name: value} of these flags in the checkpoint that args.resume asks for, if any.

        Raises as load_resumed() does.
        """
        checkpoint = load_resumed(args)[1]
        saved = checkpoint["args"] if checkpoint else {}
        return {name: saved[name] for name in names if name in saved}

    def path_of(self, name):
        return os.path.join(self.folder, name)

    def start_progress(self, train_set, steps_per_epoch):
        """The Progress from which training goes on; with args.evaluate it has ended there.

        train_set: a data set with a list `classes`. Raises ValueError for fewer images than one
        step takes, and for a checkpoint of another model, of other classes or, in the middle of an
        epoch, of another batch size, seed or number of images.
        """
        args = self.args
        if steps_per_epoch == 0 and not args.evaluate:
            images = f"{len(train_set)} images to train"
            raise ValueError(f"{images} do not fill one --batch-size {args.batch_size}")
        self.classes = [str(name) for name in train_set.classes]
        # Saved beside the weights, as plain values: what made them, and what a resume compares.
        known = vars(args) | {"world_size": self.world_size, "images": len(train_set)}
        self.saved_args = json.loads(json.dumps(known, default=str))
        self.resumed_args = self.checkpoint["args"] if self.checkpoint else {}
        total_steps = min(args.epochs * steps_per_epoch, args.max_steps or sys.maxsize)
        self.progress = Progress(steps_per_epoch, total_steps, ended=args.evaluate)
        if self.checkpoint:
            self._require_same_task()
            self._take_position()
        return self.progress

    def _require_same_task(self):
        saved, now = self.checkpoint, self.saved_args
        self._require_same("--arch", saved["arch"], now["arch"])
        for number, (before, name) in enumerate(zip_longest(saved["classes"], self.classes)):
            self._require_same(f"class {number}:", before, name)
        if saved["step"] > 0 and not self.args.evaluate:
            for key in ("batch_size", "seed", "images"):
                self._require_same(f"half an epoch of {key}", saved["args"][key], now[key])

    def _take_position(self):
        saved, progress, args = self.checkpoint, self.progress, self.args
        progress.epoch, progress.step = saved["epoch"], saved["step"]
        if self.goes_on:  # else the first validation makes the new folder's model_best.pth
            progress.best_acc1, progress.best_epoch = saved["best_acc1"], saved["best_epoch"]
            # An early end is final, unless more epochs are asked for.
            progress.ended |= saved["ended"] and args.epochs <= saved["args"]["epochs"]

    def _require_same(self, what, before, now):
        if before != now:
            raise ValueError(f"{self.path} has {what} {before}, but this run has {now}")

    def attach(self, net, optimizer, scaler, meters, **more):
        """Name what save() is to write.

        meters: {name: AverageMeter}. more: anything else with state_dict() and load_state_dict(),
        by name, such as scheduler=scheduler; its state may hold tensors and plain values. Raises
        what torch raises for a state in `more` that it could not load.
        """
        self.net, self.optimizer, self.scaler = net, optimizer, scaler
        self.meters, self.more = meters, more
        self.constants = {name for name, x in net.named_buffers() if x.isnan().any()}  # a mask?
        # At the resume it would be too late to learn that it cannot be loaded.
        check_loadable([part.state_dict() for part in more.values()])

    def restore(self):
        """Fill what is attached from the checkpoint, if there is one.

        The settings of the optimizer's groups (rate, momentum, ...) are the script's, not the
        checkpoint's, except where a torch scheduler is attached, which has set them, and the rate
        where only the validation is left. With args.evaluate only the model is filled, and what
        else is attached as far as the checkpoint has it. Raises ValueError for a checkpoint that
        does not fit.
        """
        if self.checkpoint:
            saved, self.checkpoint = self.checkpoint, None  # it takes memory
            self._load("the model", self.net, saved["state_dict"])
            if not self.args.evaluate:
                self._restore_training(saved)
            for name in self.more.keys() & saved["more"].keys():
                self._load(name, self.more[name], saved["more"][name])

    def _restore_training(self, saved):
        self._require_same("the optimizer", saved["optimizer_type"], self._optimizer_type())
        self._require_same("the state of", sorted(saved["more"]), sorted(self.more))
        settings = [group | {"params": None} for group in self.optimizer.param_groups]
        self._load("the optimizer", self.optimizer, saved["optimizer"])
        self._lay_out_as_weights()
        if not any(isinstance(part, LRScheduler) for part in self.more.values()):
            # Where only the validation is left, no step sets a rate: it stays the last one's.
            kept = ("params", "lr") if self.progress.lacks_validation() else ("params",)
            for group, now in zip(self.optimizer.param_groups, settings, strict=True):
                group |= now | {key: group[key] for key in kept}
        if self.scaler.state_dict().keys() == saved["scaler"].keys():  # else another precision
            self.scaler.load_state_dict(saved["scaler"])
        if saved["step"]:  # else each meter starts anew
            self._require_same("half an epoch of", sorted(saved["meters"]), sorted(self.meters))
            for name, meter in self.meters.items():
                meter.sum, meter.count = saved["meters"][name]

    def _lay_out_as_weights(self):
        """Give the optimizer's tensors the strides of their weights, whatever script saved them.

        Apex's kernels go through both in the order of memory: where a checkpoint of FSDP has a
        contiguous momentum, a weight in channels_last would get that of other elements.
        """
        for weight, state in self.optimizer.state.items():
            for name, value in state.items():
                alike = torch.is_tensor(value) and value.shape == weight.shape
                if alike and value.stride() != weight.stride():
                    state[name] = torch.empty_like(weight, dtype=value.dtype).copy_(value)

    def _optimizer_type(self):
        return type(self.optimizer).__name__.removeprefix("Fused")  # as Apex's are

    def _load(self, name, part, state):
        try:
            part.load_state_dict(state)
        except Exception as error:  # of any type: it may be the user's own class
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            raise ValueError(f"{self.path} does not fit {name}: {reason}") from None

    def check_ranks_agree(self, train_set, val_set, device, reduce_mean):
        """Raise ValueError unless all processes go on from one place, with one data set and flags.

        Nodes may have disks, and be given flags, of their own. `reduce_mean` is the script's; all
        processes call this.
        """
        # Not the steps in all: an epoch that lacks its validation has as many as the next one's
        # beginning, and the two go on differently.
        progress = self.progress
        mine = {
            "the place where training goes on": [progress.epoch, progress.step, progress.ended],
            "the images and classes in train/": listed(train_set),
            "the images and classes in val/": listed(val_set),
        }
        flags = vars(self.args)
        for name in sorted(flags.keys() - OF_A_NODE):
            # Of another type, such as a function, the text may be each process's own.
            if isinstance(flags[name], str | int | float | None):
                mine[f"--{name.replace('_', '-')}"] = flags[name]
        hashes = [small_hash(x) for x in mine.values()]
        values = torch.tensor(hashes, dtype=torch.float64, device=device)
        means = reduce_mean(torch.stack([values, values**2]), self.world_size)
        for what, mean, square in zip(mine, *means.tolist(), strict=True):
            if round(square - mean**2) > 0:  # it has a variance
                remedy = "compare the nodes' commands and disks"
                raise ValueError(f"{what} must be the same in all processes: {remedy}")

    def discard_leftovers(self):
        """Rank 0, once all processes agree: remove what a killed process has left half-done.

        A damaged newest checkpoint is kept as checkpoint.damaged-TIME.pth. Lines of metrics.jsonl
        that are beyond the checkpoint are cut off.
        """
        for name in filter(TEMPORARY.fullmatch, os.listdir(self.folder)):
            os.remove(self.path_of(name))
        if self.damaged and os.path.exists(self.path_of(NEWEST)):
            damaged = self.path_of(f"checkpoint.damaged-{time.time_ns()}.pth")
            os.replace(self.path_of(NEWEST), damaged)
        cut_lines(self.path_of(METRICS), self.progress.epoch, self.progress.step)

    def describe(self):
        """Lines for people: where checkpoints go, which was read, and which flags have changed."""
        args, lines = self.args, []
        if not args.evaluate:
            lines.append(f"checkpoints go to {self.folder}")
        lines += self.damaged
        if self.path:
            lines.append(f"resumed from {self.path} at {self.progress}")
        elif args.evaluate or args.resume:
            lines.append("no checkpoint was read")
        before, now = self.resumed_args, self.saved_args
        for name in sorted(before.keys() & now.keys() - MAY_CHANGE):
            if before[name] != now[name]:
                lines.append(f"  changed: {name} {before[name]} -> {now[name]}")
        return lines

    def checksum(self):
        """A number for all bits of the weights, float64 [] on their device: the CPU need not wait.

        Processes whose weights were trained alike have the same, in any memory format: the mean of
        its square is then the square of its mean. It is below SMALL, so that sums of squares are
        exact, and a single other bit changes it by much.
        """
        whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        weights = [torch.view_as_real(x) if x.is_complex() else x for x in self.net.parameters()]
        bits = [x.detach().view(whole[x.element_size()]) for x in weights]
        total = torch.as_tensor(sum(x.sum(dtype=torch.int64) for x in bits))
        return (total % SMALL * FACTOR % SMALL).double()

    def save(self, row=None, is_best=False):
        """Rank 0: write checkpoint.pth; the one before becomes checkpoint.prev.pth.

        row: a dict, after a validation: it becomes a line of metrics.jsonl. is_best: whether what
        is saved goes to model_best.pth too. checkpoint.pth comes after these two: after a crash
        before, the epoch's end is repeated. Raises OSError where it cannot be written, and leaves
        the old one; FloatingPointError for weights that are not finite; RuntimeError where
        restore() was left out.
        """
        if self.checkpoint:  # a run that goes on would lose all that it had learned
            raise RuntimeError(f"{self.path} was read and not restored: call restore() first")
        bad = [name for name, x in self.net.named_parameters() if not x.isfinite().all()]
        buffers = [pair for pair in self.net.named_buffers() if pair[0] not in self.constants]
        bad += [name for name, x in buffers if x.isnan().any()]
        if bad:
            raise FloatingPointError(f"{bad[0]} holds NaN or infinity, so nothing was saved")
        line = json_line(row) if row else ""  # an error in it comes before anything changes
        state = {
            "epoch": self.progress.epoch,
            "step": self.progress.step,
            "ended": self.progress.ended,
            "arch": self.args.arch,
            "best_acc1": self.progress.best_acc1,
            "best_epoch": self.progress.best_epoch,
            "state_dict": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "optimizer_type": self._optimizer_type(),
            "scaler": self.scaler.state_dict(),
            "meters": {name: (meter.sum, meter.count) for name, meter in self.meters.items()},
            "more": {name: part.state_dict() for name, part in self.more.items()},
            "classes": self.classes,
            "args": self.saved_args,
        }
        if is_best:
            with atomic_write(self.path_of(BEST)) as file:
                torch.save(state, file)
        if row:
            append_line(self.path_of(METRICS), line)
        with atomic_write(self.path_of(NEWEST), keep=self.path_of(PREVIOUS)) as file:
            torch.save(state, file)


class Damaged(ValueError):
    """A checkpoint whose contents are not what was written."""


def load_resumed(args):
    """(path, checkpoint, damaged) of what args.resume asks for; (None, None, []) for a fresh start.

    damaged: a line on each newer file that could not be used. Raises ValueError where all that are
    there are damaged, and where there is none to evaluate; and as read_checkpoint() does.
    """
    if args.resume != "auto":
        path = args.resume and os.path.realpath(args.resume)
        return path, path and read_checkpoint(path), []
    folder, damaged = os.path.realpath(args.checkpoint_dir), []
    paths = [os.path.join(folder, name) for name in (NEWEST, PREVIOUS, BEST)]
    for path in filter(os.path.lexists, paths):
        try:
            return path, read_checkpoint(path), damaged
        except Damaged as error:
            damaged.append(str(error))
    if damaged:
        raise ValueError("; ".join(damaged))
    if args.evaluate:
        raise ValueError(f"no checkpoint to evaluate in {folder}")
    return None, None, []


def read_checkpoint(path):
    """A checkpoint as a dict on the CPU.

    Raises Damaged for contents that changed since they were written, ValueError for what is no
    checkpoint of these scripts, OSError for what cannot be read.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"{path} is no checkpoint, but a folder, a pipe or a device")
    with open(path, "rb") as file:
        if file.read(2) != b"PK":  # torch.load's format before 2020, or something else
            raise Damaged(f"{path} is no checkpoint of these scripts, or damaged")
        check_whole(file)
        file.seek(0)
        try:
            checkpoint = torch.load(file, weights_only=True, map_location="cpu")
        except (pickle.UnpicklingError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "weights_only" not in str(error):
                reason = first_line(error)  # such as: memory is short
                # torch 2.6 also looks at bytes that zipfile does not.
                kind = Damaged if "PytorchStreamReader" in reason else ValueError
                raise kind(f"torch.load cannot read {path}: {reason}") from None
            checkpoint = None  # torch's message is advice to run the code in it
    if not isinstance(checkpoint, dict) or KEYS - checkpoint.keys():
        remedy = f"to start from weights in it, give --pretrained {path}"
        raise ValueError(f"{path} is no checkpoint of these scripts: {remedy}")
    return checkpoint


def check_whole(file):
    """Raise Damaged unless a checkpoint is as written: torch.load does not see flipped bytes."""
    try:
        with zipfile.ZipFile(file) as archive:
            if archive.testzip() is not None:
                raise zipfile.BadZipFile("a checksum does not match")
    except Exception as error:  # each kind of damage raises another one
        cause = error if isinstance(error, OSError) else error.__context__
        # EINVAL is damage too: it names a place before the file. Any other is the disk's own.
        if isinstance(cause, OSError) and cause.errno != errno.EINVAL:
            raise cause from None
        raise Damaged(f"{file.name} is damaged ({type(error).__name__}: {error})") from None


def check_loadable(states):
    """Raises what torch raises for one that it saves and does not load."""
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    torch.load(file, weights_only=True)


def listed(dataset):
    """The length, the classes and the files of a data set."""
    lists = (list(getattr(dataset, name, [])) for name in ("classes", "paths"))
    return [len(dataset), *lists]


def small_hash(known):
    """A number below SMALL. Of things that differ a little the numbers differ by much."""
    return zlib.crc32(repr(known).encode()) % SMALL
