"""Draws the figures of the README and of docs/ as SVG, in English and in Chinese: who holds what,
and what travels; and the terminal that tools/record.py has recorded.

$ python tools/figures.py
"""

import json
import re
from pathlib import Path
from textwrap import wrap
from xml.sax.saxutils import escape

from chinese import CHINESE, PATTERNS

DOCS = Path(__file__).resolve().parent.parent / "docs"

# Okabe and Ito's colours, which the colour-blind tell apart; nothing is said by colour alone.
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
INK, GREY, PALE, PAPER = "#1f2328", "#656d76", "#eef1f4", "#ffffff"
FONT = "Helvetica, Arial, 'Liberation Sans', 'PingFang SC', 'Microsoft YaHei', 'Noto Sans', "
FONT += "'Noto Sans CJK SC', sans-serif"


class Figure:
    """Collects shapes; str() is the SVG.

    Lengths are pixels at a width of 480. A phone shows a picture 358 wide, and letters of 14 as
    10: none is smaller.
    """

    chinese = False  # draw() sets it

    def __init__(self, height, title):
        self.parts, self.height, self.title = [], height, self.say(title)

    def say(self, words):
        """Words, or lines of them, in the figure's language. KeyError where there are none."""
        if not self.chinese:
            return words
        text = words if isinstance(words, str) else " ".join(words)
        if text in CHINESE:
            return CHINESE[text]
        for pattern, chinese in PATTERNS:
            if match := re.fullmatch(pattern, text):
                return match.expand(chinese) if chinese else words
        if re.search("[a-z]{2}", text):
            raise KeyError(f"tools/chinese.py lacks: {text}")
        return words

    def box(self, x, y, w, h, fill=PAPER, line=GREY, dash=False, thick=1.5):
        dashes = ' stroke-dasharray="6 4"' if dash else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="6" fill="{fill}" '
            f'stroke="{line}" stroke-width="{thick:g}"{dashes}/>'
        )

    def text(self, x, y, lines, size=15, fill=INK, anchor="middle", bold=False):
        """Lines of text; y is the baseline of the first."""
        weight = ' font-weight="bold"' if bold else ""
        lines = self.say(lines)
        for i, line in enumerate([lines] if isinstance(lines, str) else lines):
            self.parts.append(
                f'<text x="{x:g}" y="{y + i * size * 1.3:g}" font-size="{size}" fill="{fill}" '
                f'text-anchor="{anchor}"{weight}>{escape(line)}</text>'
            )

    def label(self, x, y, w, h, words, fill=PALE, line=GREY, ink=INK, size=14, bold=False):
        """A box with a word, or several lines, in its middle."""
        said = self.say(words)
        self.box(x, y, w, h, fill, line)
        below = 0 if isinstance(said, str) else len(said) - 1
        first = y + h / 2 + size * 0.35 - below * size * 0.65
        self.text(x + w / 2, first, words, size, ink, bold=bold)

    def arrow(self, *points, color=INK, thick=2.5, dash=False, both=False):
        """Through the points, with a head at the last one (or at `both` ends)."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        name = color.strip("#")
        start = f' marker-start="url(#h{name})"' if both else ""
        dashes = ' stroke-dasharray="6 4"' if dash else ""
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{thick:g}"'
            f'{dashes} marker-end="url(#h{name})"{start}/>'
        )

    def __str__(self):
        heads = "".join(
            f'<marker id="h{c.strip("#")}" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="5.5" '
            f'markerHeight="5.5" orient="auto-start-reverse"><path d="M0,0 L10,5 L0,10 z" '
            f'fill="{c}"/></marker>'
            for c in (INK, BLUE, ORANGE, GREEN, RED, GREY)
        )
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 480 {self.height}" width="480" '
            f'height="{self.height}" font-family="{FONT}" role="img">\n'
            f"<title>{escape(self.title)}</title>\n<defs>{heads}</defs>\n"
            f'<rect x="0.5" y="0.5" width="479" height="{self.height - 1}" rx="8" fill="{PAPER}" '
            f'stroke="#d0d7de"/>\n{body}\n</svg>\n'
        )


def dataparallel():
    f = Figure(606, "DataParallel: in every step GPU 0 sends the model out and takes gradients in")
    phases = [
        (
            "1  scatter and replicate",
            "GPU 0 sends each GPU its images and a whole model",
            ["model", "optimizer", "batch"],
            "copy",
        ),
        (
            "2  forward and gather",
            "the scores go to GPU 0, which computes the loss",
            ["scores", "loss"],
            "scores",
        ),
        (
            "3  backward and step",
            "gradients are added on GPU 0; the copies are thrown away",
            ["gradients", "optimizer"],
            "gradients",
        ),
    ]
    for k, (title, note, held, answer) in enumerate(phases):
        y = 16 + k * 198
        f.text(20, y + 18, title, 17, anchor="start", bold=True)
        f.text(20, y + 40, note, 14, anchor="start")
        f.box(20, y + 52, 150, 124, "#e7f1f8", BLUE, thick=2.5)
        f.text(95, y + 70, "GPU 0", 15, bold=True)
        for i, word in enumerate(held):
            f.label(30, y + 78 + i * 32, 130, 28, word, PAPER, BLUE)
        for i in range(2):
            top = y + 52 + i * 64
            f.box(310, top, 150, 60, PALE, GREY)
            f.text(385, top + 20, f"GPU {i + 1}", 15, bold=True)
            f.label(320, top + 26, 130, 28, answer, PAPER, GREY)
            if k == 0:
                f.arrow((176, top + 22), (304, top + 22), color=ORANGE, thick=5)
                f.text(236, top + 16, "model", 14, "#8a5a00")
                f.arrow((176, top + 48), (304, top + 48), color=GREY)
                f.text(236, top + 43, "images", 14, GREY)
            else:
                color, thick = (GREY, 2.5) if k == 1 else (ORANGE, 5)
                f.arrow((304, top + 40), (176, top + 40), color=color, thick=thick)
    return f


def ddp():
    f = Figure(424, "DistributedDataParallel: every process keeps a model, gradients are averaged")
    for i in range(2):
        x = 18 + i * 230
        f.box(x, 18, 214, 196, "#e7f1f8", BLUE, thick=2)
        f.text(x + 107, 43, f"process {i}, GPU {i}", 16, bold=True)
        f.label(x + 14, 56, 186, 32, "images of its own", PAPER, BLUE, size=15)
        f.label(x + 14, 94, 186, 32, "model", PAPER, BLUE, size=15)
        f.label(x + 14, 132, 186, 32, "optimizer", PAPER, BLUE, size=15)
        f.label(x + 14, 170, 186, 34, "gradients", "#fdf3dd", ORANGE, size=15, bold=True)
        f.arrow((x + 107, 207), (x + 107, 252), color=ORANGE, thick=3, both=True)
    words = ["all-reduce: gives every process", "the mean of all gradients"]
    f.label(18, 256, 444, 50, words, "#fdf3dd", ORANGE, size=16, bold=True)
    words = ["Equal weights and equal gradients:", "equal weights after the step."]
    f.text(240, 334, words, 16, bold=True)
    words = [
        "By default rank 0's buffers (BatchNorm's statistics)",
        "are sent too, before each forward().",
    ]
    f.text(240, 386, words, 15, GREY)
    return f


def ring():
    f = Figure(560, "All-reduce by a ring: each process sends to the next one only")
    colors = [BLUE, ORANGE, GREEN, RED]
    fill = {BLUE: "#cfe4f2", ORANGE: "#fbe6b8", GREEN: "#c6eadf", RED: "#f6d5c0"}
    places = [(128, 54), (214, 140), (128, 226), (42, 140)]  # clockwise from the top
    for rank, (x, y) in enumerate(places):
        f.parts.append(
            f'<circle cx="{x}" cy="{y}" r="32" fill="#e7f1f8" stroke="{BLUE}" stroke-width="2"/>'
        )
        f.text(x, y - 3, "rank", 14)
        f.text(x, y + 16, f"{rank}", 17, bold=True)
        to_x, to_y = places[(rank + 1) % 4]
        dx, dy = (to_x - x) / 86, (to_y - y) / 86
        f.arrow((x + 26 * dx, y + 26 * dy), (to_x - 26 * dx, to_y - 26 * dy), color=ORANGE, thick=4)
    f.text(366, 96, "who sends to whom", 17, bold=True)
    words = ["in each of the 6 steps,", "all at once: one part of four", "to the next"]
    f.text(366, 130, words, 15)
    columns = [
        ("start", ["each has its", "gradients,", "in four parts"]),
        ("after 3 steps", ["each has", "added up", "one part"]),
        ("after 3 more", ["the sums", "went round:", "each has them all"]),
    ]
    for k, (title, words) in enumerate(columns):
        x = 38 + k * 146
        f.text(x + 63, 298, title, 16, bold=True)
        for rank in range(4):
            y = 312 + rank * 38
            if k == 0:
                f.text(20, y + 23, f"{rank}", 15, GREY, bold=True)
            for part in range(4):
                done = k == 2 or (k == 1 and part == (rank + 1) % 4)
                word = (
                    "Σ" + "abcd"[part] if done else "abcd"[part] + "₀₁₂₃"[rank] if k == 0 else "…"
                )
                shade = fill[colors[part]] if done else PAPER
                line = colors[part] if done else "#c4cad0"
                ink = INK if done or k == 0 else "#8b939c"
                f.label(x + part * 32, y, 30, 34, word, shade, line, ink, 15, bold=done)
        f.text(x + 63, 484, words, 14)
    words = "A process sends 6 parts of 4: 6/4 of its gradients, and receives as much."
    f.text(240, 546, words, 14, GREY)
    return f


def horovod():
    f = Figure(386, "Horovod: a thread beside each process averages the gradients that all have")
    for i in range(2):
        x = 14 + i * 244
        f.box(x, 18, 208, 258, "#e7f1f8", BLUE, thick=2)
        f.text(x + 104, 42, f"process {i}, GPU {i}", 16, bold=True)
        f.label(x + 10, 56, 188, 30, "images of its own", PAPER, BLUE)
        words = ["model; backward() hands", "over each gradient"]
        f.label(x + 10, 94, 188, 50, words, PAPER, BLUE)
        f.arrow((x + 104, 144), (x + 104, 166), color=INK)
        words = ["Horovod's thread: what is", "ready is sent together"]
        f.label(x + 10, 170, 188, 50, words, "#fdf3dd", ORANGE)
        f.arrow((x + 104, 220), (x + 104, 236), color=INK)
        f.label(x + 10, 238, 188, 30, "step() waits for the mean", PAPER, BLUE)
    f.arrow((214, 195), (266, 195), color=ORANGE, thick=3, both=True)
    f.arrow((362, 280), (362, 300), (118, 300), (118, 280), color=GREY, dash=True)
    words = ["Dashed: each thread tells that of process 0 which gradients"]
    words += ["it has; when all have one, process 0 says so, and"]
    words += ["all-reduce (orange) averages it."]
    f.text(240, 328, words, 15)
    return f


def slurm():
    f = Figure(484, "Slurm: a task is a process; ranks count on from node to node")
    words = ["all meet at one port of node 0,", "made from the job's number"]
    f.label(70, 16, 300, 50, words, "#fdf3dd", ORANGE, size=15, bold=True)
    for node in range(2):
        y = 92 + node * 152
        f.box(18, y, 404, 138, "#e7f1f8", BLUE, thick=2)
        f.text(30, y + 25, f"node {node}: srun starts 4 tasks", 16, anchor="start", bold=True)
        for local in range(4):
            rank = node * 4 + local
            words = [f"PROCID {rank}", f"LOCALID {local}", f"GPU {local}"]
            f.label(28 + local * 97, y + 38, 93, 88, words, PAPER, BLUE, size=15)
        f.arrow((426, y + 69), (450, y + 69), (450, 41), (374, 41), color=ORANGE, both=True)
    words = ["rank is SLURM_PROCID, local_rank SLURM_LOCALID,", "world_size SLURM_NTASKS = 8."]
    f.text(240, 408, words, 15)
    words = ["The full script also takes one task per node,", "and starts the processes itself."]
    f.text(240, 452, words, 14, GREY)
    return f


def evaluation():
    f = Figure(644, "Ten images on three processes: padded to twelve, and as they are")
    wrong = (0, 1)
    shares = [[0, 3, 6, 9], [1, 4, 7, 0], [2, 5, 8, 1]], [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    notes = [
        ["images 0 and 1 counted twice", "(dashed: padding)"],
        ["one sum of hits, one of images", "(mean of the three shares: 80.6 %)"],
    ]
    for k, title in enumerate(["DistributedSampler", "range(rank, 10, 3)"]):
        top = k * 318
        f.text(240, top + 32, title, 17, bold=True)
        for rank, share in enumerate(shares[k]):
            y = top + 50 + rank * 60
            f.text(20, y + 32, f"rank {rank}", 15, anchor="start", bold=True)
            for i, image in enumerate(share):
                twice = k == 0 and rank > 0 and i == 3
                fill, line = (PAPER, RED) if twice else ("#e7f1f8", BLUE)
                x = 86 + i * 74
                f.box(x, y, 64, 50, fill, line, dash=twice, thick=2)
                f.text(x + 32, y + 23, f"{image}", 17, bold=True)
                mark, ink = ("✗", RED) if image in wrong else ("✓", "#00694d")
                f.text(x + 32, y + 43, mark, 15, ink, bold=True)
            hits = sum(image not in wrong for image in share)
            f.text(424, y + 31, f"{hits} of {len(share)}", 16)
        hits = sum(image not in wrong for share in shares[k] for image in share)
        count = sum(map(len, shares[k]))
        color = RED if k == 0 else "#00694d"
        words = f"{hits} of {count} right: {100 * hits / count:.1f} %"
        f.text(240, top + 254, words, 18, color, bold=True)
        f.text(240, top + 280, notes[k][0], 15)
        f.text(240, top + 302, notes[k][1], 15, GREY)
    return f


def traffic():
    model = 25.557032 * 4  # MB: ResNet-50's parameters as float32
    f = Figure(372, "Bytes that the busiest process sends in a step: one for all against a ring")
    words = ["MB that the busiest process sends in a step,", "ResNet-50 (it receives as much)"]
    f.text(20, 32, words, 17, bold=True, anchor="start")
    rows = [
        (world, (world - 1) * model, 2 * (world - 1) / world * model) for world in (2, 4, 8, 16)
    ]
    for i, (world, star, ring) in enumerate(rows):
        y = 74 + i * 60
        f.text(114, y + 28, f"{world} processes", 15, anchor="end")
        for value, color, fill, row in ((star, RED, "#f6d5c0", 0), (ring, BLUE, "#cfe4f2", 1)):
            w = value / rows[-1][1] * 200
            f.box(124, y + row * 24, w, 20, fill, color)
            words = f"{value:.0f} {['through one', 'ring'][row]}"
            f.text(124 + w + 8, y + row * 24 + 15, words, 15, anchor="start")
    f.text(20, 334, "Upper bars: all through one process.", 15, GREY, "start")
    f.text(20, 356, "Lower bars, ring: each process alike.", 15, GREY, "start")
    return f


def fsdp():
    f = Figure(706, "FSDP: each GPU keeps a shard, and gathers one block at a time")
    for gpu in range(4):
        x, y = 18 + gpu % 2 * 230, 16 + gpu // 2 * 150
        f.box(x, y, 214, 138, "#e7f1f8", BLUE, thick=2)
        f.text(x + 107, y + 25, f"rank {gpu}, GPU {gpu}", 16, bold=True)
        for row, word in enumerate(["weights", "gradients", "optimizer"]):
            f.text(x + 92, y + 57 + row * 32, word, 15, anchor="end")
            for part in range(4):
                mine = part == gpu
                fill, line = (BLUE, BLUE) if mine else (PAPER, "#c4cad0")
                f.box(x + 102 + part * 26, y + 41 + row * 32, 22, 22, fill, line, dash=not mine)
    f.text(
        240, 336, ["blue: the shard that a GPU keeps;", "the rest is on the other GPUs"], 15, GREY
    )
    gather = ["all-gather: the whole", "block's weights"]
    scatter = ["reduce-scatter:", "mean gradients"]
    columns = [
        ("forward()", "block 1, 2, 3 ...", [gather, "compute", "free"]),
        ("backward()", "block ... 3, 2, 1", ["all-gather again", "compute", scatter, "free"]),
    ]
    for k, (name, order, parts) in enumerate(columns):
        x = 18 + k * 230
        f.text(x + 107, 388, name, 17, bold=True)
        f.text(x + 107, 410, order, 15, GREY)
        y = 422
        for i, words in enumerate(parts):
            sent = words in (gather, scatter, "all-gather again")
            fill, line = ("#fdf3dd", ORANGE) if sent else (PALE, GREY)
            height = 50 if isinstance(words, list) else 34
            f.label(x, y, 214, height, words, fill, line, size=15, bold=sent)
            if i + 1 < len(parts):
                f.arrow((x + 107, y + height), (x + 107, y + height + 18))
            y += height + 20
    words = ["The next block is gathered while this one computes."]
    words += ["Then each GPU's optimizer steps on its own shard."]
    f.text(240, 668, words, 15)
    return f


def hang():
    f = Figure(536, "A hang: rank 0 waits in all_reduce, rank 1 in the next forward")
    f.text(240, 32, "if rank == 0: dist.all_reduce(correct)", 17, RED, bold=True)
    f.text(30, 66, "time", 14, GREY)
    f.arrow((30, 76), (30, 424), color=GREY)
    for rank in range(2):
        x = 60 + rank * 206
        f.text(x + 98, 66, f"rank {rank}", 17, bold=True)
        f.label(x, 78, 196, 40, "last step", "#e7f1f8", BLUE, size=15)
        f.label(x, 124, 196, 40, "validation", "#e7f1f8", BLUE, size=15)
    f.label(60, 170, 196, 50, "all_reduce", "#fdf3dd", ORANGE, size=16, bold=True)
    f.box(60, 226, 196, 200, PAPER, RED, dash=True, thick=2)
    f.text(158, 306, ["waits for", "rank 1's all_reduce:", "it never comes"], 16, RED)
    f.label(266, 170, 196, 50, ["if is false:", "next epoch"], "#e7f1f8", BLUE, size=15)
    f.label(266, 226, 196, 50, "model(images)", "#fdf3dd", ORANGE, size=16, bold=True)
    f.box(266, 282, 196, 144, PAPER, RED, dash=True, thick=2)
    f.text(364, 334, ["waits for", "rank 0's forward:", "it never comes"], 16, RED)
    words = ["No error, no output, until the timeout:", "10 minutes with NCCL, 30 with gloo."]
    f.text(240, 452, words, 16)
    words = ["Each call alone is right; but all processes must make"]
    words += ["the same calls, in the same order."]
    f.text(240, 500, words, 15, GREY)
    return f


def set_epoch():
    from torch.utils.data import DistributedSampler  # takes seconds

    f = Figure(376, "Which images each rank takes in each step, with and without set_epoch")
    for k, title in enumerate(["without set_epoch", "sampler.set_epoch(epoch)"]):
        left = 14 + k * 240
        f.text(left + 106, 30, title, 16, RED if k == 0 else "#00694d", bold=True)
        samplers = [DistributedSampler(range(8), 2, rank) for rank in range(2)]
        for epoch in range(3):
            y = 46 + epoch * 94
            f.text(left, y + 16, f"epoch {epoch}", 15, anchor="start", bold=True)
            for step in range(2):
                f.text(left + 88 + step * 82, y + 16, f"step {step}", 14, GREY)
            for rank, sampler in enumerate(samplers):
                if k == 1:
                    sampler.set_epoch(epoch)
                f.text(left, y + 42 + rank * 30, f"rank {rank}", 14, GREY, "start")
                for i, image in enumerate(sampler):
                    fill, line = ("#e7f1f8", BLUE) if rank == 0 else ("#fdf3dd", ORANGE)
                    x = left + 52 + i * 37 + (i // 2) * 8
                    f.label(x, y + 24 + rank * 30, 34, 27, f"{image}", fill, line, size=15)
    f.text(120, 344, ["every epoch", "the same batches"], 15)
    f.text(360, 344, ["a new order each epoch,", "equal parts"], 15)
    return f


FIGURES = [dataparallel, ddp, ring, traffic, horovod, slurm, evaluation, fsdp, hang, set_epoch]


def recording(parts):
    """The SVG of a terminal; parts: as tools/record.py writes them.

    It is narrow, with large letters, so that a phone can show it.
    """
    rows = []
    for part in parts:
        lines = ("$ " + part["command"]).splitlines()
        rows += [(line, "#e6edf3", ' font-weight="bold"') for line in lines]
        for text in part["output"]:
            color = "#9aa4af"
            if text.startswith("+") or "% correct" in text:  # the mistake, and what it makes
                color = "#ff7b72"
            elif "→" in text:  # what the doctor says of it
                color = "#7ee787"
            indent = " " * (8 if text[0] in "+-" else 2)
            lines = wrap(text.strip(), 54, subsequent_indent=indent, break_on_hyphens=False)
            rows += [(line, color, "") for line in lines]
    texts = [
        f'<text x="12" y="{30 + 20 * i}" fill="{color}"{bold} xml:space="preserve">{escape(line)}'
        "</text>"
        for i, (line, color, bold) in enumerate(rows)
    ]
    height = 24 + 20 * len(rows)
    title = "A mistake in minimal/distributed.py: 195.0 % correct; the doctor names its line"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 480 {height}" width="480" '
        f'height="{height}" font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, '
        f'\'DejaVu Sans Mono\', monospace" font-size="14" role="img">\n'
        f"<title>{escape(title)}</title>\n"
        f'<rect width="480" height="{height}" rx="8" fill="#0d1117"/>\n'
        + "\n".join(texts)
        + "\n</svg>\n"
    )


def draw():
    """{file name: SVG} of all figures."""
    recorded = DOCS.parent / "results/recording.json"
    drawn = {"recording.svg": recording(json.loads(recorded.read_text()))}
    try:
        for Figure.chinese, ending in ((False, ".svg"), (True, ".zh-CN.svg")):
            drawn |= {f"{figure.__name__}{ending}": str(figure()) for figure in FIGURES}
    finally:
        Figure.chinese = False
    return drawn


if __name__ == "__main__":
    for name, svg in draw().items():
        (DOCS / name).write_text(svg)
