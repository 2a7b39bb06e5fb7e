"""What a run leaves for people to look at: metrics.jsonl, curves for TensorBoard, predictions."""

import contextlib
import csv
import importlib.util
import json
import math
import os

from .files import replace_text, sync


def json_line(row):
    """A dict as a line of JSON, which has no NaN and no infinity: they become null."""
    lost = [key for key, x in row.items() if isinstance(x, float) and not math.isfinite(x)]
    return json.dumps(row | dict.fromkeys(lost)) + "\n"


def append_line(folder, line):
    """Add a line to metrics.jsonl, and have it on the disk."""
    with open(os.path.join(folder, "metrics.jsonl"), "a") as file:
        file.write(line)
        sync(file)


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
    replace_text(path, lambda file: file.writelines(kept))


def save_predictions(path, dataset, predictions):
    """Write a CSV file with a line for each image of `dataset`, in its order.

    Its columns are path, class, predicted class and confidence, the softmax of that class.
    predictions: a list with a float32 tensor [n, 2] of each rank: confidence and predicted class of
    the images rank, rank + world_size, ... Raises ValueError for a tensor of another length,
    OSError when the file cannot be written.
    """
    rows = [None] * len(dataset)
    for rank, part in enumerate(predictions):
        if len(part) != len(rows[rank :: len(predictions)]):
            raise ValueError(f"rank {rank} has {len(part)} predictions, another number than images")
        rows[rank :: len(predictions)] = part.tolist()

    def write(file):
        writer = csv.writer(file)
        writer.writerow(["path", "class", "predicted", "confidence"])
        for i, (confidence, predicted) in enumerate(rows):
            names = dataset.classes[dataset.targets[i]], dataset.classes[int(predicted)]
            writer.writerow([dataset.path(i), *names, f"{confidence:.6f}"])

    replace_text(path, write)


class Curves:
    """Curves for TensorBoard, in `folder`/tensorboard; nothing is written before the first point.

    first: the first step, counted over all epochs, that will be drawn. What an interrupted run has
    drawn from there on is not shown any more. Raises ValueError where the package is missing.
    """

    def __init__(self, folder, first):
        if importlib.util.find_spec("tensorboard") is None:
            raise ValueError("--tensorboard needs a package: pip install tensorboard")
        self.how = {"log_dir": os.path.join(folder, "tensorboard"), "purge_step": first}
        self.writer = None

    def add(self, step, values):
        """Add a point to each curve. values: numbers by name."""
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter  # takes seconds

            self.writer = SummaryWriter(**self.how)
        try:
            for name, value in values.items():
                self.writer.add_scalar(name, value, step)
            self.writer.flush()  # a process may end at any moment
        except OSError as error:  # such as a full disk
            raise OSError(f"cannot write {self.how['log_dir']}: {error}") from error
