"""Where a training run stands, and its checkpoints: each is whole or not there."""

import contextlib
import errno
import fcntl
import os
import pickle
import re
import shutil
import sys
import zipfile
import zlib

import torch

from .records import Curves, append_row, check_tensorboard, cut_rows

NEWEST, PREVIOUS, BEST = "checkpoint.pth", "checkpoint.prev.pth", "model_best.pth"
KEYS = {"epoch", "step", "arch", "best_acc1", "state_dict", "optimizer", "scaler", "meters", "args"}
TEMPORARY = re.compile(
    r"(checkpoint(\.prev|\.damaged(\.\d+)?)?\.pth|model_best\.pth|metrics\.jsonl)\.\d+\.tmp"
)
# What may differ between a run and its resumption without a word.
UNREMARKABLE = {"resume", "evaluate", "predictions", "tensorboard"}


class Run:
    """Where a run stands: epochs completed, steps done in the current one, best acc@1 so far.

    Reads the checkpoint that args.resume asks for, to the CPU; "auto" takes the newest good one in
    args.checkpoint_dir, or starts afresh. Later restore() fills the model and what trains it, and
    save() writes them. `steps` is the number of steps in an epoch: a run whose `step` equals it has
    trained that epoch, and not validated it. train_set: a data set with a list `classes`. Raises
    ValueError for a checkpoint that is damaged or does not fit args, OSError for one that cannot be
    read.
    """

    def __init__(self, args, train_set, steps, world_size):
        self.folder = os.path.realpath(args.checkpoint_dir)
        self.classes = list(train_set.classes)
        self.steps = steps
        self.last_step = min(
            args.epochs * steps, args.max_steps or sys.maxsize
        )  # counted over all epochs
        # Saved beside the weights: what made them, and what is compared when they are resumed.
        self.args = vars(args) | {"world_size": world_size, "images": len(train_set)}
        self.epoch, self.step, self.best_acc1 = 0, 0, 0.0
        self.path, self.checkpoint, self.damaged = None, None, []
        self.curves, self.drawn = None, 0
        if args.resume == "auto":
            self._read_newest()
        elif args.resume:
            self.path = os.path.realpath(args.resume)
            self.checkpoint = read_checkpoint(self.path)
        elif not args.evaluate and (held := _held(self.folder)):
            raise ValueError(
                f"{self.folder} holds a run ({held}): go on with --resume auto, "
                "or give another --checkpoint-dir"
            )
        if self.checkpoint:
            self._check_fit()
            self.epoch, self.step = self.checkpoint["epoch"], self.checkpoint["step"]
            self.best_acc1 = self.checkpoint["best_acc1"]
            self.drawn = self.epoch * self.steps + self.step  # the curves end there
        elif args.resume and args.evaluate:
            raise ValueError(f"no checkpoint to evaluate in {self.folder}")

    def _read_newest(self):
        for name in (NEWEST, PREVIOUS):
            path = os.path.join(self.folder, name)
            if not os.path.lexists(path):
                continue
            try:
                self.path, self.checkpoint = path, read_checkpoint(path)
                return
            except Damaged as error:
                self.damaged.append(str(error))
        if self.damaged:
            raise ValueError("; ".join(self.damaged))

    def _check_fit(self):
        old, new = self.checkpoint, self.args
        if old["arch"] != new["arch"]:
            raise ValueError(f"{self.path} holds a {old['arch']}, not the --arch {new['arch']}")
        classes = old.get("classes", self.classes)
        if len(classes) != len(self.classes):
            raise ValueError(f"{self.path} has {len(classes)} classes, --data {len(self.classes)}")
        for number, (before, now) in enumerate(zip(classes, self.classes, strict=True)):
            if before != now:
                names = f"class {number} is {before!r} there and {now!r} in --data"
                raise ValueError(f"{self.path} is of other classes: {names}")
        if old["step"] and not new["evaluate"]:
            for flag in ("--batch-size", "--seed", "images"):
                name = flag.strip("-").replace("-", "_")
                before, now = old["args"].get(name, new[name]), new[name]
                if before != now:
                    place = f"{self.path} is in mid-epoch with {flag} {before}"
                    raise ValueError(f"{place}: it cannot become {now}")

    def draw(self, values):
        """Add a point to the curves of TensorBoard, where --tensorboard is given."""
        if self.args["tensorboard"]:
            step = self.epoch * self.steps + self.step
            self.curves = self.curves or Curves(self.folder, self.drawn + 1)
            self.curves.add(step, values)

    def place(self):
        return f"epoch {self.epoch} step {self.step}"

    def changed(self):
        """{name: (before, now)} of the flags and sizes that differ from those of the checkpoint."""
        old = self.checkpoint["args"] if self.checkpoint else {}
        both = (old.keys() & self.args.keys()) - UNREMARKABLE
        return {n: (old[n], self.args[n]) for n in sorted(both) if old[n] != self.args[n]}

    def check_same(self, train_set, val_set, rank, world_size, device, reduce_mean):
        """Raise ValueError unless all processes resume from the same file and have the same images.

        Nodes may have disks of their own. `reduce_mean` is the script's; all processes call this.
        """
        mine = {
            "checkpoint to resume from": self.checkpoint["crc"] if self.checkpoint else 0,
            "images and classes in train/": fingerprint(train_set),
            "images and classes in val/": fingerprint(val_set),
        }
        table = torch.zeros(len(mine), world_size, dtype=torch.float64, device=device)
        table[:, rank] = torch.tensor(list(mine.values()), dtype=torch.float64)
        table = (reduce_mean(table, world_size) * world_size).round().tolist()
        for what, row in zip(mine, table, strict=True):
            others = [str(r) for r, value in enumerate(row) if value != row[0]]
            if others:
                raise ValueError(
                    f"rank {', '.join(others)} has not the same {what} as rank 0: "
                    "make the folders of all nodes equal"
                )

    def open_folder(self):
        """Make the checkpoint folder this run's, for rank 0: create, lock and tidy it.

        It only goes forward: a run in it is continued from its newest checkpoint or not at all, and
        nothing is removed but temporary files of save(). A damaged newest checkpoint is kept as
        checkpoint.damaged.pth, ... Lines of metrics.jsonl beyond the checkpoint are cut, for they
        will be written again. Raises ValueError for a folder that another run writes to, and for
        one that holds another run than this; OSError where it cannot be written.
        """
        if self.args["tensorboard"]:
            check_tensorboard()
        os.makedirs(self.folder, exist_ok=True)
        self.lock = _lock(self.folder)
        newest = os.path.join(self.folder, NEWEST)
        held = _held(self.folder)
        inside = self.path is not None and os.path.dirname(self.path) == self.folder
        if held and not inside:
            raise ValueError(f"{self.folder} holds a run ({held}): give another --checkpoint-dir")
        if inside and self.args["resume"] != "auto" and not _same(self.path, newest):
            raise ValueError(
                f"{self.path} is not the newest checkpoint of its folder: "
                "give another --checkpoint-dir to go on from it"
            )
        for name in os.listdir(self.folder):
            if TEMPORARY.fullmatch(name):  # of a process that was killed
                os.remove(os.path.join(self.folder, name))
        if inside and not _same(self.path, newest):
            if os.path.lexists(newest):  # a damaged one
                _link(newest, _free(os.path.join(self.folder, "checkpoint.damaged{}.pth")))
            _link(self.path, newest)
        cut_rows(self.folder, self.epoch, self.step)

    def restore(self, net, optimizer, scaler, meters):
        """Fill them from the checkpoint, if there is one; from now on save() saves them.

        Momentum, weight decay and what else the groups of the optimizer hold stay the command
        line's; the learning rate does until the next step sets it.
        """
        self.net, self.optimizer, self.scaler, self.meters = net, optimizer, scaler, meters
        if "dampening" in optimizer.defaults:
            # If the first fp16 step overflows, fused SGD leaves a new momentum buffer
            # uninitialised, so make it first, of zeros.
            for group in optimizer.param_groups:
                for weight in group["params"]:
                    optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        if self.checkpoint is None:
            return
        checkpoint, self.checkpoint = self.checkpoint, {"args": self.checkpoint["args"]}
        net.load_state_dict(checkpoint["state_dict"])
        saved = checkpoint["optimizer"]
        optimizer.load_state_dict(optimizer.state_dict() | {"state": saved["state"]})
        for group, old in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            group["lr"] = old["lr"]
        for weight, state in optimizer.state.items():
            for (
                key,
                value,
            ) in state.items():  # fused kernels read both as flat memory: in one layout
                if torch.is_tensor(value) and value.shape == weight.shape:
                    state[key] = torch.empty_like(weight).copy_(value)
        if scaler.state_dict().keys() == checkpoint["scaler"].keys():  # else of another precision
            scaler.load_state_dict(checkpoint["scaler"])
        for meter in meters:
            meter.sum, meter.count = checkpoint["meters"][meter.name]

    def save(self, row=None, acc1=None):
        """Write checkpoint.pth; the one before becomes checkpoint.prev.pth.

        After a validation: `row`, a dict, is added to metrics.jsonl and drawn, and if acc1 is the
        best acc@1 so far, model_best.pth is the same file. checkpoint.pth is replaced last: after a crash before that, the save is repeated. Each file
        is the old or the new one at every moment. Raises OSError, and leaves the old ones, when
        they cannot be written; FloatingPointError for weights that are not finite.
        """
        is_best = acc1 is not None and acc1 > self.best_acc1
        if is_best:
            self.best_acc1 = acc1
        state = {
            "epoch": self.epoch,
            "step": self.step,
            "arch": self.args["arch"],
            "best_acc1": self.best_acc1,
            "state_dict": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "meters": {meter.name: (meter.sum, meter.count) for meter in self.meters},
            "classes": self.classes,
            "args": self.args,
        }
        bad = [name for name, x in self.net.named_parameters() if not x.isfinite().all()]
        bad += [name for name, x in self.net.named_buffers() if x.isnan().any()]
        if bad:
            raise FloatingPointError(f"{bad[0]} holds NaN or infinity, so nothing was saved")
        newest, previous, best = (os.path.join(self.folder, n) for n in (NEWEST, PREVIOUS, BEST))
        new = f"{newest}.{os.getpid()}.tmp"
        try:
            with open(new, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            if is_best:
                _link(new, best)
            if row:
                append_row(self.folder, row)
                self.draw({f"epoch/{name}": value for name, value in row.items()})
            if os.path.exists(newest):
                _link(newest, previous)
            os.replace(new, newest)
            directory = os.open(self.folder, os.O_RDONLY)
            os.fsync(directory)
            os.close(directory)
        except (OSError, RuntimeError) as error:  # a full disk makes torch.save raise either
            with contextlib.suppress(OSError):
                os.remove(new)
            kept = "; the one before it is untouched" if os.path.exists(newest) else ""
            raise OSError(f"cannot write {newest}: {error}{kept}") from error


class Damaged(ValueError):
    """A checkpoint whose contents are not what was written."""


def read_checkpoint(path):
    """A checkpoint as a dict on the CPU, with a `crc` of its contents.

    Raises Damaged for contents that changed since they were written, ValueError for what is no
    checkpoint of these scripts, OSError for what cannot be read.
    """
    if not os.path.exists(path):
        raise ValueError(f"no checkpoint {path}")
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load does not notice flipped bytes
            if archive.testzip() is not None:
                raise zipfile.BadZipFile("a checksum does not match")
            crc = zlib.crc32(repr([entry.CRC for entry in archive.infolist()]).encode())
    except MemoryError:
        raise
    except Exception as error:  # each kind of damage raises another one
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # EINVAL: a wrong offset
            raise OSError(f"cannot read {path}: {error}") from error
        raise Damaged(f"{path} is damaged ({type(error).__name__}: {error})") from None
    try:
        checkpoint = torch.load(path, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{path} holds more than tensors, it is not loaded: {reason}") from None
    except RuntimeError as error:
        raise ValueError(f"{path} cannot be loaded: {error}") from None
    if not isinstance(checkpoint, dict) or not checkpoint.keys() >= KEYS:
        missing = sorted(KEYS - set(checkpoint))
        raise ValueError(f"{path} is no checkpoint of these scripts: it lacks {', '.join(missing)}")
    return checkpoint | {"crc": crc}


def fingerprint(dataset):
    """A number for the classes and files of a data set; for its length where it does not tell."""
    names = getattr(dataset, "paths", [])
    known = repr((list(getattr(dataset, "classes", [])), len(dataset))).encode()
    return zlib.crc32(b"\0".join(names) if len(names) else b"", zlib.crc32(known))


def _held(folder):
    """The first file in the folder that a run has left there, or None."""
    names = (NEWEST, PREVIOUS, BEST, "metrics.jsonl")
    return next((n for n in names if os.path.lexists(os.path.join(folder, n))), None)


def _lock(folder):
    """Lock the folder for as long as the file that this returns is open in this process."""
    lock = open(os.path.join(folder, ".lock"), "a")  # noqa: SIM115
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # children do not inherit it
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):  # others: a file system without locks
            message = f"another run is writing to {folder}: choose another --checkpoint-dir"
            raise ValueError(message) from None
    return lock


def _free(pattern):
    """The first name that is not taken: with "", ".1", ".2", ... in the place of {}."""
    number = 0
    while os.path.lexists(path := pattern.format(f".{number}" if number else "")):
        number += 1
    return path


def _same(path, other):
    return os.path.exists(other) and os.path.samefile(path, other)


def _link(source, target):
    """Let `target` be `source` too, in one step: no moment without a file of that name."""
    if _same(source, target):
        return  # we crashed after linking; renaming a hard link onto its twin does nothing
    new = f"{target}.{os.getpid()}.tmp"
    try:
        os.link(source, new)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, new)
        with open(new, "rb+") as file:
            os.fsync(file.fileno())
    os.replace(new, target)
