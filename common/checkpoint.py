"""Checkpoints that are whole or not there, and the folder they live in."""

import contextlib
import errno
import fcntl
import glob
import itertools
import json
import os
import pickle
import shutil
import zipfile
import zlib

import torch

from .errors import user_errors
from .records import add_curves, check_tensorboard, sync

KEYS = {"epoch", "step", "arch", "best_acc1", "state_dict", "optimizer", "scaler", "meters", "args"}
_locks = []  # open files


def load_checkpoint(args, train_set):
    """The checkpoint that args.resume asks for, on the CPU, or None for a fresh start.

    "auto" takes the newest good one in args.checkpoint_dir. Beside the KEYS the dict has its
    `path`, a `crc` of its contents, and what is to be said of `damaged` ones that were passed over.
    Raises ValueError for a checkpoint that is damaged or does not go with args.
    """
    names, damaged = ("checkpoint.pth", "checkpoint.prev.pth"), []
    paths = [os.path.join(args.checkpoint_dir, name) for name in names]
    paths = filter(os.path.exists, paths) if args.resume == "auto" else filter(None, [args.resume])
    for path in paths:
        try:
            checkpoint = _read(path)
            break
        except ValueError as error:
            damaged.append(str(error))
    else:
        if damaged:
            raise ValueError("; ".join(damaged))
        if args.resume and args.evaluate:
            raise ValueError(f"no checkpoint to evaluate in {args.checkpoint_dir}")
        return None

    if checkpoint["arch"] != args.arch:
        raise ValueError(f"{path} holds a {checkpoint['arch']}, not the --arch {args.arch}")
    now = {"--batch-size": args.batch_size, "--seed": args.seed, "images": len(train_set)}
    now["classes"] = len(train_set.classes)
    for name, value in now.items():
        before = checkpoint["args"].get(name.strip("-").replace("-", "_"), value)
        if before != value and (name == "classes" or (checkpoint["step"] and not args.evaluate)):
            place = "in mid-epoch with" if checkpoint["step"] else "of"
            raise ValueError(f"{path} is {place} {name} {before}: it cannot become {value}")
    return {**checkpoint, "damaged": damaged}


def _read(path):
    """A checkpoint as a dict. Raises ValueError with the path for whatever is wrong with it."""
    if not os.path.isfile(path):
        raise ValueError(f"no checkpoint {path}")
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load takes flipped bytes for weights
            if archive.testzip() is not None:
                raise zipfile.BadZipFile("a checksum does not match")
            crc = zlib.crc32(repr([entry.CRC for entry in archive.infolist()]).encode())
        checkpoint = torch.load(path, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{path} holds more than tensors, it is not loaded: {reason}") from None
    except Exception as error:  # each kind of damage raises another one
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error})") from None
    if not isinstance(checkpoint, dict) or not checkpoint.keys() >= KEYS:
        raise ValueError(f"{path} is no checkpoint of these scripts: it lacks some of {KEYS}")
    return {**checkpoint, "path": path, "crc": crc}


def check_same(checkpoint, rank, local_rank, world_size, device, reduce_mean):
    """End with one line unless all processes have read the same: nodes may have disks of their own.

    `reduce_mean` is the one of the script, called once by every process. Returns how many nodes
    there are: each has one local rank 0.
    """
    found = torch.zeros(world_size + 1, dtype=torch.float64, device=device)
    found[rank] = checkpoint["crc"] if checkpoint else -1.0
    found[-1] = local_rank == 0
    *found, nodes = reduce_mean(found, world_size).tolist()
    with user_errors(local_rank):
        if len(set(found)) > 1:
            own = checkpoint["path"] if checkpoint else "no checkpoint"
            raise ValueError(f"the processes resume from different files; rank {rank} from {own}")
    return round(nodes * world_size)


def restore(checkpoint, parts):
    """Fill the parts (net, optimizer, scaler, meters) of a run; returns (epoch, step, best_acc1).

    Without a checkpoint they stay as they are. Momentum and weight decay stay in any case: they are
    the command line's, as the learning rate is from the next step on.
    """
    net, optimizer, scaler, meters = parts
    # When fp16 overflows in the first step, fused SGD keeps a new buffer as memory was. Others, who
    # take any state for all of theirs, have no dampening.
    for weight in net.parameters() if "dampening" in optimizer.defaults else ():
        optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    if checkpoint is None:
        return 0, 0, 0.0
    net.load_state_dict(checkpoint["state_dict"])
    optimizer.load_state_dict({**optimizer.state_dict(), "state": checkpoint["optimizer"]["state"]})
    optimizer.param_groups[0]["lr"] = checkpoint["optimizer"]["param_groups"][0]["lr"]
    for weight, state in optimizer.state.items():
        for key, value in state.items():  # fused kernels read both as flat memory: in one layout
            if torch.is_tensor(value) and value.shape == weight.shape:
                state[key] = torch.empty_like(weight).copy_(value)
    if scaler.state_dict().keys() == checkpoint["scaler"].keys():  # else of another precision
        scaler.load_state_dict(checkpoint["scaler"])
    for meter in meters:
        meter.sum, meter.count = checkpoint["meters"][meter.name]
    return checkpoint["epoch"], checkpoint["step"], checkpoint["best_acc1"]


def open_folder(args, checkpoint):
    """Make args.checkpoint_dir this run's, for rank 0: create, lock and tidy it.

    A run that it holds is renamed to DIR.1, DIR.2, ..., unless `checkpoint` is of that run: then
    it becomes checkpoint.pth, a good one that it replaces stays as checkpoint.pth.1, ..., and the
    lines of metrics.jsonl beyond it are cut, for they will be written again. Raises ValueError
    when another run is writing there or args.tensorboard lacks its package, OSError when this run
    could not write.
    """
    if args.tensorboard:
        check_tensorboard()
    folder = os.path.realpath(args.checkpoint_dir)
    resumed = checkpoint and os.path.dirname(os.path.realpath(checkpoint["path"])) == folder
    os.makedirs(folder, exist_ok=True)
    _lock(folder)
    if not resumed and glob.glob(glob.escape(folder) + "/*.pth"):
        os.rename(folder, old := _free(folder))
        print(f"{folder} held a run: renamed to {old}", flush=True)
        os.makedirs(folder)
        _lock(folder)
    for leftover in glob.glob(glob.escape(folder) + "/*.tmp"):
        os.remove(leftover)
    if resumed:  # a crash before the next save must come back to it, not to what it left behind
        source, newest = os.path.realpath(checkpoint["path"]), f"{folder}/checkpoint.pth"
        left = os.path.exists(newest) and not checkpoint["damaged"]
        if left and not os.path.samefile(source, newest):
            _link(newest, old := _free(newest))
            print(f"{newest} was another one: kept as {old}", flush=True)
        _link(source, newest)
    path, kept = os.path.join(folder, "metrics.jsonl"), []
    if resumed and os.path.exists(path):
        position = (checkpoint["epoch"], checkpoint["step"])
        with open(path) as file, contextlib.suppress(ValueError):  # half a line ends it
            for line in file:
                row = json.loads(line)
                kept += [line] if (row["epoch"], row["step"]) <= position else []
    with open(path + ".tmp", "w") as file:
        file.writelines(kept)
        sync(file)
    os.replace(path + ".tmp", path)


def _free(path):
    """The first of path.1, path.2, ... that is not there."""
    return next(p for i in itertools.count(1) if not os.path.exists(p := f"{path}.{i}"))


def _lock(folder):
    """Lock the folder for as long as this process lives; its children do not inherit the lock."""
    _locks.append(os.open(os.path.join(folder, ".lock"), os.O_RDWR | os.O_CREAT))
    try:
        fcntl.lockf(_locks[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):  # others: a file system without locks
            message = f"another run is writing to {folder}: choose another --checkpoint-dir"
            raise ValueError(message) from None


def save_checkpoint(run, position, parts, is_best=False, row=None):
    """Write checkpoint.pth in run["checkpoint_dir"]; the one before becomes checkpoint.prev.pth.

    run: the flags, and what else must or may differ when it is resumed; position: (epochs
    completed, steps done in the current one, best_acc1); parts: as in restore(). With is_best,
    model_best.pth is the same file; `row` is added to metrics.jsonl. To replace checkpoint.pth
    comes last and commits them: what came before a crash is done again. Each file is the old or
    the new one at every moment. Raises OSError, and leaves the old ones, when the disk is full.
    """
    net, optimizer, scaler, meters = parts
    state = dict(zip(("epoch", "step", "best_acc1"), position, strict=True))
    state |= {"arch": run["arch"], "args": run, "state_dict": net.state_dict()}
    state |= {"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
    state["meters"] = {meter.name: (meter.sum, meter.count) for meter in meters}
    folder = run["checkpoint_dir"]
    path = os.path.join(folder, "checkpoint.pth")
    new = f"{path}.{os.getpid()}.tmp"
    try:
        with open(new, "wb") as file:
            torch.save(state, file)
            sync(file)
        if is_best:
            _link(new, os.path.join(folder, "model_best.pth"))
        if row:
            with open(os.path.join(folder, "metrics.jsonl"), "a") as file:
                file.write(json.dumps(row) + "\n")
                sync(file)
            points = {f"epoch/{name}": value for name, value in row.items()}
            add_curves(run, row["epoch"], row["step"], points)
        if os.path.exists(path):
            _link(path, os.path.join(folder, "checkpoint.prev.pth"))
        os.replace(new, path)
        directory = os.open(folder, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)
    except (OSError, RuntimeError) as error:  # a full disk makes torch.save raise either
        with contextlib.suppress(OSError):
            os.remove(new)
        raise OSError(f"cannot write {path}: {error}; the one before is untouched") from error


def _link(source, target):
    """Let `target` be `source` too, in one step: no moment without a file of that name."""
    if os.path.exists(target) and os.path.samefile(source, target):
        return  # since a crash; and to rename one of two links to a file to the other does nothing
    new = f"{target}.{os.getpid()}.tmp"
    try:
        os.link(source, new)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, new)
        with open(new, "rb+") as file:
            sync(file)
    os.replace(new, target)
