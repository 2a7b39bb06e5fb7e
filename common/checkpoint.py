"""Where a training run stands, and the checkpoints from which it goes on."""

import json
import os
import pickle
import sys
import time
import zipfile
import zlib

import torch

from .files import TEMPORARY, is_same, lock_folder, replace_by_link, sync, temporary, try_remove
from .records import Curves, append_line, cut_rows, json_line

NEWEST, PREVIOUS, BEST = "checkpoint.pth", "checkpoint.prev.pth", "model_best.pth"
KEYS = {"epoch", "step", "arch", "best_acc1", "state_dict", "optimizer", "scaler", "meters", "args"}


class Run:
    """Where a run stands: epochs completed, steps done in the current one, best acc@1 so far.

    Reads the checkpoint that args.resume asks for, to the CPU; "auto" takes the newest good one in
    args.checkpoint_dir, or starts afresh. restore() then fills the model and what trains it, and
    save() writes them. A run whose `step` equals steps_per_epoch has trained that epoch and not
    validated it. total_steps: where the run ends. train_set: a data set with a list `classes`.
    Raises ValueError for a checkpoint that is damaged or does not fit, OSError for one that cannot
    be read.
    """

    def __init__(self, args, train_set, steps_per_epoch, world_size):
        self.folder = os.path.realpath(args.checkpoint_dir)
        self.newest = os.path.join(self.folder, NEWEST)
        self.classes, self.steps_per_epoch = [str(c) for c in train_set.classes], steps_per_epoch
        self.total_steps = min(args.epochs * steps_per_epoch, args.max_steps or sys.maxsize)
        # Saved beside the weights: what made them, and what is compared when they are resumed.
        known = vars(args) | {"world_size": world_size, "images": len(train_set)}
        # read_checkpoint() takes plain values only.
        self.args = json.loads(json.dumps(known, default=str))
        self.resumed_args = {}
        self.epoch, self.step, self.best_acc1 = 0, 0, 0.0
        self.path, self.checkpoint, self.damaged, self.curves = None, None, [], None
        if args.resume == "auto":
            self._read_newest()
        elif args.resume:
            self.path = os.path.realpath(args.resume)
            self.checkpoint = read_checkpoint(self.path)
        elif not args.evaluate and (held := self._held()):
            go_on = "go on with --resume auto, or give another --checkpoint-dir"
            raise ValueError(f"{self.folder} holds a run ({held}): {go_on}")
        if self.checkpoint:
            self._check_fit()
            self.epoch, self.step = self.checkpoint["epoch"], self.checkpoint["step"]
            self.best_acc1 = self.checkpoint["best_acc1"]
            self.resumed_args = self.checkpoint["args"]
        elif args.resume and args.evaluate:
            raise ValueError(f"no checkpoint to evaluate in {self.folder}")

    def _read_newest(self):
        paths = [self.newest, os.path.join(self.folder, PREVIOUS)]
        if not any(map(os.path.lexists, paths)):
            # A first save that was interrupted may have left this one alone.
            paths = [os.path.join(self.folder, BEST)]
        for path in filter(os.path.lexists, paths):
            try:
                self.path, self.checkpoint = path, read_checkpoint(path)
                return
            except Damaged as error:
                self.damaged.append(str(error))
        if self.damaged:
            raise ValueError("; ".join(self.damaged))

    def _held(self):
        """The first file in the folder that a run has left there, or None."""
        for name in (NEWEST, PREVIOUS, BEST, "metrics.jsonl"):
            if os.path.lexists(os.path.join(self.folder, name)):
                return name

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
        for name in ("batch_size", "seed", "images") if old["step"] and not new["evaluate"] else ():
            before, now = old["args"].get(name, new[name]), new[name]
            if before != now:
                what = name if name == "images" else f"--{name.replace('_', '-')}"
                in_epoch = f"{self.path} is in mid-epoch with {what} {before}"
                raise ValueError(f"{in_epoch}: it cannot become {now}")

    def global_step(self):
        return self.epoch * self.steps_per_epoch + self.step

    def place(self):
        return f"epoch {self.epoch} step {self.step}"

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
            others = ", ".join(str(r) for r, value in enumerate(row) if value != row[0])
            if others:
                raise ValueError(f"rank {others} has not the same {what} as rank 0")

    def open_folder(self):
        """Rank 0: create, lock and tidy the checkpoint folder.

        A run in it may only be continued, and only from its newest checkpoint. Nothing is removed
        but temporary files of a process that was killed. A damaged newest checkpoint is kept as
        checkpoint.damaged-TIME.pth. Lines of metrics.jsonl beyond the checkpoint are cut, for they
        will be written again. Raises ValueError for a folder that another run writes to or has
        written, OSError where it cannot be written.
        """
        if self.args["tensorboard"]:
            self.curves = Curves(self.folder, self.global_step() + 1)
        os.makedirs(self.folder, exist_ok=True)
        self.lock = lock_folder(self.folder)
        inside = self.path is not None and os.path.dirname(self.path) == self.folder
        if not inside and (held := self._held()):
            raise ValueError(f"{self.folder} holds a run ({held}): give another --checkpoint-dir")
        continued = not inside or is_same(self.path, self.newest)
        if not continued and self.args["resume"] != "auto":
            other = "give another --checkpoint-dir to go on from it"
            raise ValueError(f"{self.path} is not the newest checkpoint of its folder: {other}")
        for name in os.listdir(self.folder):
            if TEMPORARY.fullmatch(name):
                try_remove(os.path.join(self.folder, name))
        if not continued:
            if os.path.lexists(self.newest):  # and damaged
                replace_by_link(
                    self.newest, f"{self.folder}/checkpoint.damaged-{time.time_ns()}.pth"
                )
            replace_by_link(self.path, self.newest)
        cut_rows(self.folder, self.epoch, self.step)

    def restore(self, net, optimizer, scaler, meters):
        """Fill them from the checkpoint, if there is one; from now on save() saves them.

        What else the groups of the optimizer hold (momentum, weight decay) stays the command
        line's. So does the learning rate, from the next step on. With args.evaluate the model is
        all that is filled. Raises ValueError for an optimizer with other groups.
        """
        self.net, self.optimizer, self.scaler, self.meters = net, optimizer, scaler, meters
        if optimizer.defaults.get("dampening") == 0:
            # If the first fp16 step overflows, fused SGD leaves a new momentum buffer
            # uninitialised, so make it first, of zeros.
            for group in optimizer.param_groups:
                for weight in group["params"]:
                    optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        if self.checkpoint is None:
            return
        checkpoint, self.checkpoint = self.checkpoint, None  # it takes memory
        net.load_state_dict(checkpoint["state_dict"])
        if self.args["evaluate"]:
            return
        saved = checkpoint["optimizer"]
        groups = len(saved["param_groups"]), len(optimizer.param_groups)
        if groups[0] != groups[1]:
            trained = f"{self.path} was trained with {groups[0]} groups of parameters"
            raise ValueError(f"{trained}, this optimizer has {groups[1]}")
        pairs = zip(optimizer.state_dict()["param_groups"], saved["param_groups"], strict=True)
        groups = [now | {"params": old["params"], "lr": old["lr"]} for now, old in pairs]
        optimizer.load_state_dict({"state": saved["state"], "param_groups": groups})
        for weight, state in optimizer.state.items():
            for key, value in state.items():
                if torch.is_tensor(value) and value.shape == weight.shape:
                    # Fused kernels read both as flat memory: they must lie there in one order.
                    state[key] = torch.empty_like(weight, dtype=value.dtype).copy_(value)
        if scaler.state_dict().keys() == checkpoint["scaler"].keys():  # else another precision
            scaler.load_state_dict(checkpoint["scaler"])
        for meter in meters:
            meter.sum, meter.count = checkpoint["meters"][meter.name]

    def save(self, row=None, acc1=None):
        """Write checkpoint.pth; the one before becomes checkpoint.prev.pth.

        After a validation: `row`, a dict, is added to metrics.jsonl, and if acc1 is the best acc@1
        so far, model_best.pth is the same file. checkpoint.pth is replaced last: after a crash
        before that, the epoch's end is repeated. Raises OSError, and leaves the old files, when
        they cannot be written; FloatingPointError for weights that are not finite.
        """
        bad = [name for name, x in self.net.named_parameters() if not x.isfinite().all()]
        bad += [name for name, x in self.net.named_buffers() if x.isnan().any()]
        if bad:
            raise FloatingPointError(f"{bad[0]} holds NaN or infinity, so nothing was saved")
        is_best = acc1 is not None and acc1 > self.best_acc1
        if is_best:
            self.best_acc1 = float(acc1)
        line = json_line(row) if row else None
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
        new = temporary(self.newest)
        try:
            with open(new, "wb") as file:
                torch.save(state, file)
                sync(file)
            if is_best:
                replace_by_link(new, os.path.join(self.folder, BEST))
            if line:
                append_line(self.folder, line)
            if os.path.exists(self.newest):
                replace_by_link(self.newest, os.path.join(self.folder, PREVIOUS))
            os.replace(new, self.newest)
            directory = os.open(self.folder, os.O_RDONLY)
            os.fsync(directory)
            os.close(directory)
        except (OSError, RuntimeError) as error:  # a full disk makes torch.save raise either
            try_remove(new)
            kept = "; the one before it is untouched" if os.path.exists(self.newest) else ""
            raise OSError(f"cannot write {self.newest}: {error}{kept}") from error
        if row:
            self.draw({f"epoch/{name}": value for name, value in row.items()})

    def draw(self, values):
        """Add a point to the curves of TensorBoard, numbers by name, if --tensorboard is given."""
        if self.curves:
            self.curves.add(self.global_step(), values)


class Damaged(ValueError):
    """A checkpoint whose contents are not what was written."""


def read_checkpoint(path):
    """A checkpoint as a dict on the CPU, with a `crc` of its contents.

    Raises Damaged for contents that changed since they were written, ValueError for what is no
    checkpoint of these scripts, OSError for what cannot be read.
    """
    if not os.path.exists(path):
        raise ValueError(f"no checkpoint {path}")
    crc = 0
    try:
        with open(path, "rb") as file:
            while part := file.read(1 << 24):
                crc = zlib.crc32(part, crc)
    except OSError as error:  # of the disk: zipfile would take it for damage
        raise OSError(f"cannot read {path}: {error}") from error
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load does not notice flipped bytes
            if archive.testzip() is not None:
                raise zipfile.BadZipFile("a checksum does not match")
    except MemoryError:
        raise
    except Exception as error:  # each kind of damage raises another one
        raise Damaged(f"{path} is damaged ({type(error).__name__}: {error})") from None
    try:
        checkpoint = torch.load(path, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{path} holds more than tensors, it is not loaded: {reason}") from None
    except RuntimeError as error:
        raise ValueError(f"{path} cannot be loaded: {error}") from None
    if not isinstance(checkpoint, dict) or not checkpoint.keys() >= KEYS:
        raise ValueError(f"{path} is no checkpoint of these scripts: it lacks some of {KEYS}")
    return checkpoint | {"crc": crc}


def fingerprint(dataset):
    """A number that changes with the classes, the files and the length of a data set."""
    known = list(getattr(dataset, "classes", [])), len(dataset)
    files = b"\0".join(os.fsencode(path) for path in getattr(dataset, "paths", []))
    return zlib.crc32(files, zlib.crc32(repr(known).encode()))
