"""Draws the images per second by strategy."""

import sys

# Okabe and Ito's colours, which everybody can tell apart: one for each number of processes.
COLOURS = ["#56B4E9", "#E69F00", "#009E73", "#CC79A7"]
TITLES = {"loader": "loading JPEG files is the bound", "compute": "images are on the device"}


def import_pyplot():
    try:
        import matplotlib
    except ImportError:
        sys.exit("error: the picture needs matplotlib: pip install -r requirements-dev.txt")
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def draw(pyplot, runs, path, gpus):
    """Write the picture to `path`: a panel for what bounds the speed, a bar for each run.

    Without GPUs DataParallel calls the plain model: its bars are hatched, and named so.
    """
    bounds = list(dict.fromkeys(run["bound"] for run in runs))
    counts = sorted({run["processes"] for run in runs})
    height = 1.2 + 0.36 * len(runs) / len(bounds)
    figure, axes = pyplot.subplots(1, len(bounds), figsize=(9, height), squeeze=False)
    for bound, axis in zip(bounds, axes[0], strict=True):
        shown = [run for run in runs if run["bound"] == bound]
        labels = []
        for row, run in enumerate(shown):
            plain = run["strategy"] == "dataparallel" and not gpus
            colour = COLOURS[counts.index(run["processes"]) % len(COLOURS)]
            _draw_bar(axis, row, run, "#ffffff" if plain else colour, hatched=plain)
            labels.append("dataparallel, no GPU" if plain else run["strategy"])
        axis.set_yticks(range(len(shown)), labels if axis is axes[0][0] else [])
        axis.set_title(TITLES[bound], fontsize=11)
        axis.set_xlabel("images per second")
        axis.locator_params(axis="x", nbins=5)  # a number at the edge would be cut off
        axis.spines[["top", "right"]].set_visible(False)
        axis.invert_yaxis()
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS[: len(counts)]]
    names = [f"{count} process{'es' if count > 1 else ''}" for count in counts]
    figure.tight_layout(rect=(0, 0.3 / height, 1, 1))
    figure.legend(handles, names, loc="lower center", ncols=len(counts), frameon=False)
    figure.savefig(path, dpi=100)


def _draw_bar(axis, row, run, colour, hatched):
    speed = run["images_per_second"]
    errors = [[speed - min(run["all"])], [max(run["all"]) - speed]]  # slowest and fastest round
    how = dict(hatch="//", edgecolor="#999999") if hatched else {}
    axis.barh(row, speed, 0.8, color=colour, xerr=errors, ecolor="#444444", **how)
    axis.text(0, row, f" {speed:.0f}", va="center", fontsize=10)
