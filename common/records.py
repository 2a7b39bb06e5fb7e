"""What a run leaves for people to look at: metrics.jsonl, curves for TensorBoard, predictions."""

import contextlib
import csv
import importlib.util
import json
import math
import os


def append_row(folder, row):
    """Add a dict as a line to metrics.jsonl, and have it on the disk. NaN and infinity become null."""
    odd = [key for key, x in row.items() if isinstance(x, float) and not math.isfinite(x)]
    row = row | dict.fromkeys(odd)
    with open(os.path.join(folder, "metrics.jsonl"), "a") as file:
        file.write(json.dumps(row) + "\n")
        _sync(file)


def cut_rows(folder, epoch, step):
    """Cut the lines of metrics.jsonl that lie beyond a position: they will be written again."""
    path, kept = os.path.join(folder, "metrics.jsonl"), []
    if not os.path.exists(path):
        return
    with open(path) as file, contextlib.suppress(ValueError):  # half a line ends it
        for line in file:
            row = json.loads(line)
            if (row["epoch"], row["step"]) <= (epoch, step):
                kept.append(line)
    _write(path, lambda file: file.writelines(kept))


def save_predictions(path, dataset, predictions):
    """Write a CSV file with a line for each image of `dataset`, in its order.

    Its columns are path, class, predicted class and confidence, the softmax of that class.
    predictions: a list with a float32 tensor [n, 2] of each rank: confidence and predicted class of
    the images rank, rank + world_size, ... The file is the old or the new one at every moment.
    Raises ValueError for a tensor of another length, OSError when the file cannot be written.
    """
    rows = [None] * len(dataset)
    for rank, part in enumerate(predictions):
        rows[rank :: len(predictions)] = part.tolist()  # raises ValueError for another length

    def write(file):
        writer = csv.writer(file)
        writer.writerow(["path", "class", "predicted", "confidence"])
        for i, (confidence, predicted) in enumerate(rows):
            names = dataset.classes[dataset.targets[i]], dataset.classes[int(predicted)]
            writer.writerow([dataset.path(i), *names, f"{confidence:.6f}"])

    try:
        _write(path, write)
    except OSError as error:
        raise OSError(f"cannot write {path}: {error}") from error


def _write(path, write):
    """Replace a file by what write(file) writes, in one step."""
    new = f"{path}.{os.getpid()}.tmp"
    try:
        # A file's name on disk may be any bytes: surrogateescape writes them as they are.
        with open(new, "w", newline="", encoding="utf-8", errors="surrogateescape") as file:
            write(file)
            _sync(file)
        os.replace(new, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.remove(new)
        raise


def _sync(file):
    file.flush()
    os.fsync(file.fileno())


def check_tensorboard():
    """Raises ValueError where the package is missing."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ValueError("--tensorboard needs a package: pip install tensorboard")


class Curves:
    """Curves for TensorBoard, in `folder`/tensorboard.

    step: where they begin, counted over all epochs. What an interrupted run has drawn from there on
    is not shown any more.
    """

    def __init__(self, folder, step):
        from torch.utils.tensorboard import SummaryWriter  # takes seconds

        self.writer = SummaryWriter(os.path.join(folder, "tensorboard"), purge_step=step)

    def add(self, step, values):
        """Add a point to each curve. values: numbers by name; None is no point."""
        for name, value in values.items():
            if value is not None:
                self.writer.add_scalar(name, value, step)
        self.writer.flush()  # a process may end at any moment
