"""What a run leaves for people to look at: predictions as a CSV file, curves for TensorBoard."""

import argparse
import contextlib
import csv
import importlib.util
import os

_writers = {}  # by folder


def new_file(path):
    """A `type` for add_argument: the path of a file that can be written."""
    if os.path.isdir(path) or not os.access(os.path.dirname(os.path.abspath(path)), os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {path}")
    return path


def sync(file):
    """Have what was written to an open file on the disk."""
    file.flush()
    os.fsync(file.fileno())


def save_predictions(path, dataset, shares):
    """Write a CSV file with a line for each image of `dataset`, in its order.

    Its columns are path, class, predicted class and confidence, the softmax of that class. shares:
    what each rank has found, float32 [n, 2]: confidence and predicted class of the images rank,
    rank + world_size, ... The file is the old or the new one at every moment. Raises ValueError for
    a share of another length, OSError when the file cannot be written.
    """
    found = [None] * len(dataset)
    for rank, share in enumerate(shares):
        found[rank :: len(shares)] = share.tolist()  # raises ValueError for another length
    new = f"{path}.{os.getpid()}.tmp"
    try:
        # A name on disk may be any bytes: they come out as they are.
        with open(new, "w", newline="", encoding="utf-8", errors="surrogateescape") as file:
            writer = csv.writer(file)
            writer.writerow(["path", "class", "predicted", "confidence"])
            for i, (confidence, guess) in enumerate(found):
                names = dataset.classes[dataset.targets[i]], dataset.classes[int(guess)]
                writer.writerow([dataset.path(i), *names, f"{confidence:.6f}"])
            sync(file)
        os.replace(new, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.remove(new)
        raise OSError(f"cannot write {path}: {error}") from error


def check_tensorboard():
    """Raises ValueError where the package is missing."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ValueError("--tensorboard needs a package: pip install tensorboard")


def add_curves(run, epoch, step, values):
    """Add a point to the curves in run["checkpoint_dir"]/tensorboard, if run["tensorboard"] is set.

    values: numbers by name. The horizontal axis counts steps over all epochs.
    """
    if not run.get("tensorboard"):
        return
    from torch.utils.tensorboard import SummaryWriter  # takes seconds

    folder = os.path.join(run["checkpoint_dir"], "tensorboard")
    place = epoch * (run["images"] // run["batch_size"]) + step
    if folder not in _writers:
        # What an interrupted run has written from here on is not shown; but where only the row of
        # an epoch is missing, the line of its last step has the same place, and stays.
        _writers[folder] = SummaryWriter(folder, purge_step=place + ("lr" not in values))
    for name, value in values.items():
        if value is not None:
            _writers[folder].add_scalar(name, value, place)
    _writers[folder].flush()  # a process may end at any moment
