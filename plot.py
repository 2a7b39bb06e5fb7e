"""Draw the curves of runs: loss, scores, learning rate and images per second over the epochs.

$ python plot.py checkpoints other/checkpoints --out curves.svg

Without --out they are drawn as text. A run is a folder with a metrics.jsonl.
"""

import json
import math
import os
import shutil
import sys

from longrun.arguments import ArgumentParser
from longrun.messages import escaped, exit_on_user_error, print_lines

# What is drawn in one panel; any other number in a row has a panel of its own.
PANELS = {
    "loss": ["train_loss", "val_loss"],
    "accuracy, %": ["acc1", "acc5"],
    "learning rate": ["lr"],
    "images per second": ["images_per_second"],
}
NOT_DRAWN = {"epoch", "step", "world_size", "batch_size", "data_time", "seconds"}
STYLES = ["-", "--", ":", "-."]
BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", ".:-=+*%#"


def parse_args():
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", metavar="DIR", help="a --checkpoint-dir of a run")
    parser.add_argument("--out", metavar="FILE", help="a picture: .svg, .png or .pdf")
    return parser.parse_args()


def main():
    with exit_on_user_error(0):
        args = parse_args()
        runs = {folder: read_run(folder) for folder in args.folders}
        if not panels(runs):
            raise ValueError(f"no numbers to draw in {' '.join(runs)}")
        if args.out:
            draw(runs, args.out)
            print_lines(f"drawn: {args.out}")
        else:
            print_lines(*as_text(runs))


def read_run(folder):
    """The rows of a run, dicts sorted by epoch. Raises ValueError where there are none."""
    path = os.path.join(folder, "metrics.jsonl")
    if not os.path.isfile(path):
        raise ValueError(f"no {path}: give the --checkpoint-dir of a run, once it has an epoch")
    rows = {}
    with open(path, errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
                # --max-steps may have cut an epoch: it is drawn half-way to the next.
                x = row["epoch"] + (0.5 if row.get("step") else 0)
                rows[float(x)] = row  # of an epoch that was trained again, the last
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
                continue  # a line that is cut off, or is somebody else's
    if not rows:
        raise ValueError(f"{path} has no epoch yet")
    return dict(sorted(rows.items()))


def curve(rows, key):
    """(epochs, values) of what is a number in these rows; NaN where it is null."""
    found = {x: row[key] for x, row in rows.items() if key in row}
    kind = (int, float, type(None))
    found = {x: y for x, y in found.items() if isinstance(y, kind) and not isinstance(y, bool)}
    return list(found), [math.nan if y is None else as_float(y) for y in found.values()]


def as_float(number):
    try:
        return float(number)
    except OverflowError:  # an integer of hundreds of digits
        return math.inf


def panels(runs):
    """{title: keys} of all that the runs have, in the order of PANELS, then of the rows."""
    keys = [key for rows in runs.values() for row in rows.values() for key in row]
    keys = [key for key in dict.fromkeys(keys) if key not in NOT_DRAWN]
    drawn = {key for rows in runs.values() for key in keys if is_drawn(curve(rows, key)[1])}
    known = {key for group in PANELS.values() for key in group}
    titles = PANELS | {key: [key] for key in keys if key not in known}
    found = {title: [key for key in group if key in drawn] for title, group in titles.items()}
    return {title: group for title, group in found.items() if group}


def is_drawn(values):
    return any(map(math.isfinite, values))


def draw(runs, path):
    """Write a picture: a panel for each kind of number, a colour for each run.

    Raises ValueError where matplotlib is missing, or does not know the kind of file; OSError where
    it cannot be written.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        remedy = "--out needs it: python -m pip install matplotlib"
        raise ValueError(f"{error}: {remedy}") from None

    shown = panels(runs)
    rows = math.ceil(len(shown) / 2)
    how = dict(squeeze=False, sharex=True, layout="constrained")
    figure, axes = plt.subplots(rows, 2, figsize=(10, 3.2 * rows), **how)
    for axis, (title, keys) in zip(axes.flat, shown.items(), strict=False):
        for number, run in enumerate(runs.values()):
            for key, style in zip(keys, STYLES * len(keys), strict=False):
                label = key if len(keys) > 1 and number == 0 else None
                how = dict(color=f"C{number % 10}", linestyle=style, marker=".", markersize=4)
                axis.plot(*curve(run, key), label=label, **how)
        axis.set_title(escaped(title), fontsize=10)
        axis.set_xlabel("epoch", fontsize=9)
        axis.tick_params(labelbottom=True)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
        if keys == ["images_per_second"]:
            axis.set_ylim(0, 1.05 * axis.get_ylim()[1])  # else 1 % looks large
        if len(keys) > 1:
            axis.legend(fontsize=8)
    for axis in list(axes.flat)[len(shown) :]:
        axis.axis("off")
    names = [plt.Line2D([], [], color=f"C{number % 10}") for number in range(len(runs))]
    folders = list(map(escaped, runs))
    figure.legend(names, folders, loc="outside upper center", ncols=2, fontsize=9)
    figure.savefig(path, dpi=120)


def as_text(runs):
    """Lines with a small chart of each number; runs share its scale, and a character its epochs."""
    try:
        BARS.encode(sys.stdout.encoding or "ascii")
        bars = BARS
    except UnicodeEncodeError:
        bars = ASCII_BARS
    columns = shutil.get_terminal_size().columns
    width = min(max(map(len, runs)), columns // 3)
    epochs = sorted({x for rows in runs.values() for x in rows})
    yield f"epoch {epochs[0]:g} to {epochs[-1]:g}, first -> last value"
    for key in [key for group in panels(runs).values() for key in group]:
        curves = {name: dict(zip(*curve(rows, key), strict=True)) for name, rows in runs.items()}
        known = [y for values in curves.values() for y in values.values() if math.isfinite(y)]
        yield f"{key}, from {min(known):.4g} to {max(known):.4g}"
        for name, values in curves.items():
            ends = [f"{y:.4g}" for y in values.values() if math.isfinite(y)]
            if ends:
                room = max(10, columns - width - 30)
                line = sparkline([values.get(x, math.nan) for x in epochs], known, room, bars)
                yield f"  {name[-width:]:{width}}  {line}  {ends[0]} -> {ends[-1]}"


def sparkline(values, known, room, bars):
    """One character a value; means of neighbours where there are more values than room."""
    lowest, highest = min(known), max(known)
    size = math.ceil(len(values) / room)
    text = ""
    for first in range(0, len(values), size):
        part = [y for y in values[first : first + size] if math.isfinite(y)]
        if part:
            height = (sum(part) / len(part) - lowest) / ((highest - lowest) or 1)
        text += bars[round(height * (len(bars) - 1))] if part else " "
    return text


if __name__ == "__main__":
    sys.exit(main())
