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
    """Collects shapes; str() is the SVG. Lengths are pixels at the README's width, 840."""

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
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 840 {self.height}" width="840" '
            f'height="{self.height}" font-family="{FONT}" role="img">\n'
            f"<title>{escape(self.title)}</title>\n<defs>{heads}</defs>\n"
            f'<rect x="0.5" y="0.5" width="839" height="{self.height - 1}" rx="8" fill="{PAPER}" '
            f'stroke="#d0d7de"/>\n{body}\n</svg>\n'
        )


def dataparallel():
    f = Figure(380, "DataParallel: in every step GPU 0 sends the model out and takes gradients in")
    titles = [
        ["1  scatter and replicate"],
        ["2  forward and gather"],
        ["3  backward and step"],
    ]
    notes = [
        ["GPU 0 sends each GPU its", "images and a whole model"],
        ["the scores go to GPU 0,", "which computes the loss"],
        ["gradients are added on GPU 0;", "the copies are thrown away"],
    ]
    for k in range(3):
        x = 20 + k * 272
        f.text(x + 128, 36, titles[k], 17, bold=True)
        f.text(x + 128, 336, notes[k], 15, INK)
        f.box(x, 54, 84, 252, "#e7f1f8", BLUE, thick=2.5)
        f.text(x + 42, 78, "GPU 0", 15, bold=True)
        held = [["model", "optimizer", "batch"], ["scores", "loss"], ["gradients", "optimizer"]][k]
        for i, word in enumerate(held):
            f.label(x + 6, 92 + i * 36, 72, 28, word, PAPER, BLUE, size=14)
        for i in range(3):
            y = 54 + i * 88
            f.box(x + 172, y, 84, 76, PALE, GREY)
            f.text(x + 214, y + 22, f"GPU {i + 1}", 15, bold=True)
            f.label(x + 178, y + 34, 72, 30, ["copy", "scores", "gradients"][k], PAPER, GREY)
            if k == 0:
                f.arrow((x + 88, y + 28), (x + 168, y + 28), color=ORANGE, thick=5)
                f.arrow((x + 88, y + 50), (x + 168, y + 50), color=GREY)
            elif k == 1:
                f.arrow((x + 168, y + 38), (x + 88, y + 38), color=GREY)
            else:
                f.arrow((x + 168, y + 38), (x + 88, y + 38), color=ORANGE, thick=5)
        if k == 0:
            f.text(x + 126, 74, "model", 13, "#8a5a00")
            f.text(x + 126, 122, "images", 13, GREY)
    return f


def ddp():
    f = Figure(400, "DistributedDataParallel: every process keeps a model, gradients are averaged")
    for i in range(4):
        x = 20 + i * 204
        f.box(x, 20, 188, 196, "#e7f1f8", BLUE, thick=2)
        f.text(x + 94, 44, f"process {i}, GPU {i}", 16, bold=True)
        f.label(x + 12, 58, 164, 30, "images of its own", PAPER, BLUE)
        f.label(x + 12, 96, 164, 30, "model", PAPER, BLUE)
        f.label(x + 12, 134, 164, 30, "optimizer", PAPER, BLUE)
        f.label(x + 12, 172, 164, 32, "gradients", "#fdf3dd", ORANGE, bold=True)
        f.arrow((x + 94, 207), (x + 94, 266), color=ORANGE, thick=3, both=True)
    words = "all-reduce: gives every process the mean of all gradients"
    f.label(20, 270, 800, 36, words, "#fdf3dd", ORANGE, size=16, bold=True)
    f.text(420, 332, "backward() still computes the gradients of earlier layers meanwhile.", 15)
    f.text(420, 356, "Equal weights and equal gradients: equal weights after the step.", 15, GREY)
    words = (
        "By default rank 0's buffers (BatchNorm's statistics) are sent too, before each forward()."
    )
    f.text(420, 380, words, 15, GREY)
    return f


def ring():
    f = Figure(420, "All-reduce by a ring: each process sends to the next one only")
    colors = [BLUE, ORANGE, GREEN, RED]
    fill = {BLUE: "#cfe4f2", ORANGE: "#fbe6b8", GREEN: "#c6eadf", RED: "#f6d5c0"}
    f.text(130, 32, "who sends to whom", 17, bold=True)
    places = [(130, 88), (216, 174), (130, 260), (44, 174)]  # clockwise from the top
    for rank, (x, y) in enumerate(places):
        f.parts.append(
            f'<circle cx="{x}" cy="{y}" r="32" fill="#e7f1f8" stroke="{BLUE}" stroke-width="2"/>'
        )
        f.text(x, y - 3, "rank", 13)
        f.text(x, y + 16, f"{rank}", 17, bold=True)
        to_x, to_y = places[(rank + 1) % 4]
        dx, dy = (to_x - x) / 86, (to_y - y) / 86
        f.arrow((x + 26 * dx, y + 26 * dy), (to_x - 26 * dx, to_y - 26 * dy), color=ORANGE, thick=4)
    f.text(
        130, 330, ["in each of the 6 steps,", "all at once: one part of four", "to the next"], 15
    )
    columns = [(276, "start"), (468, "after 3 steps"), (660, "after 3 more")]
    for k, (x, title) in enumerate(columns):
        f.text(x + 88, 32, title, 17, bold=True)
        for rank in range(4):
            y = 58 + rank * 60
            f.text(x - 12, y + 28, f"{rank}", 15, GREY, bold=True)
            for part in range(4):
                done = k == 2 or (k == 1 and part == (rank + 1) % 4)
                words = (
                    "Σ" + "abcd"[part] if done else "abcd"[part] + "₀₁₂₃"[rank] if k == 0 else "…"
                )
                shade = fill[colors[part]] if done else PAPER
                line = colors[part] if done else "#c4cad0"
                ink = INK if done or k == 0 else "#8b939c"
                f.label(x + part * 40, y, 36, 44, words, shade, line, ink, 16, bold=done)
    f.text(356, 330, ["each has its gradients,", "in four parts"], 15)
    f.text(548, 330, ["each has added up", "one part"], 15)
    f.text(740, 330, ["the sums went round:", "each has them all"], 15)
    words = "A process sends 6 parts of 4: 6/4 of its gradients, and receives as much."
    f.text(420, 402, words, 15, GREY)
    return f


def horovod():
    f = Figure(376, "Horovod: a thread beside each process averages the gradients that all have")
    for i in range(3):
        x = 20 + i * 272
        f.box(x, 20, 256, 250, "#e7f1f8", BLUE, thick=2)
        f.text(x + 128, 44, f"process {i}, GPU {i}", 16, bold=True)
        f.label(x + 14, 58, 228, 30, "images of its own", PAPER, BLUE)
        f.label(x + 14, 94, 228, 48, ["model; backward() hands over", "each gradient"], PAPER, BLUE)
        f.arrow((x + 128, 142), (x + 128, 164), color=INK)
        f.label(
            x + 14,
            168,
            228,
            48,
            ["Horovod's thread: what is", "ready is sent together"],
            "#fdf3dd",
            ORANGE,
        )
        f.arrow((x + 128, 216), (x + 128, 232), color=INK)
        f.label(x + 14, 234, 228, 28, "step() waits for the mean", PAPER, BLUE)
    for x in (262, 534):
        f.arrow((x + 3, 192), (x + 41, 192), color=ORANGE, thick=3, both=True)
    f.arrow((420, 274), (420, 292), (176, 292), (176, 274), color=GREY, dash=True)
    f.arrow((692, 274), (692, 304), (120, 304), (120, 274), color=GREY, dash=True)
    f.text(420, 330, "Dashed: each thread tells that of process 0 which gradients it has;", 15)
    f.text(
        420, 354, "when all have one, process 0 says so, and all-reduce (orange) averages it.", 15
    )
    return f


def slurm():
    f = Figure(300, "Slurm: a task is a process; ranks count on from node to node")
    for node, x in enumerate([20, 430]):
        f.box(x, 66, 390, 150, "#e7f1f8", BLUE, thick=2)
        f.text(x + 12, 90, f"node {node}: srun starts 4 tasks", 16, anchor="start", bold=True)
        for local in range(4):
            rank = node * 4 + local
            words = [f"PROCID {rank}", f"LOCALID {local}", f"GPU {local}"]
            f.label(x + 12 + local * 93, 106, 88, 92, words, PAPER, BLUE, size=14)
    words = "all meet at one port of node 0, made from the job's number"
    f.label(160, 14, 520, 34, words, "#fdf3dd", ORANGE, size=15, bold=True)
    f.arrow((100, 64), (160, 46), color=ORANGE, both=True)
    f.arrow((740, 64), (680, 46), color=ORANGE, both=True)
    f.text(
        420, 246, "rank is SLURM_PROCID, local_rank SLURM_LOCALID, world_size SLURM_NTASKS = 8.", 16
    )
    f.text(
        420,
        274,
        "The full script also takes one task per node, and starts the processes itself.",
        15,
        GREY,
    )
    return f


def evaluation():
    f = Figure(350, "Ten images on three processes: padded to twelve, and as they are")
    wrong = (0, 1)
    shares = [[0, 3, 6, 9], [1, 4, 7, 0], [2, 5, 8, 1]], [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    for k, (x, title) in enumerate([(20, "DistributedSampler"), (440, "range(rank, 10, 3)")]):
        f.text(x + 190, 34, title, 17, bold=True)
        for rank, share in enumerate(shares[k]):
            y = 52 + rank * 66
            f.text(x, y + 32, f"rank {rank}", 15, anchor="start", bold=True)
            for i, image in enumerate(share):
                twice = k == 0 and rank > 0 and i == 3
                fill, line = (PAPER, RED) if twice else ("#e7f1f8", BLUE)
                f.box(x + 60 + i * 62, y, 54, 52, fill, line, dash=twice, thick=2)
                f.text(x + 87 + i * 62, y + 24, f"{image}", 17, bold=True)
                f.text(
                    x + 87 + i * 62,
                    y + 44,
                    "✗" if image in wrong else "✓",
                    15,
                    RED if image in wrong else "#00694d",
                    bold=True,
                )
            hits = sum(image not in wrong for image in share)
            f.text(x + 346, y + 32, f"{hits} of {len(share)}", 15)
        hits = sum(image not in wrong for share in shares[k] for image in share)
        count = sum(map(len, shares[k]))
        color = RED if k == 0 else "#00694d"
        f.text(
            x + 190,
            274,
            f"{hits} of {count} right: {100 * hits / count:.1f} %",
            18,
            color,
            bold=True,
        )
    f.text(210, 302, "images 0 and 1 counted twice", 15)
    f.text(630, 302, "one sum of hits, one of images", 15)
    f.text(630, 328, "(mean of the three shares: 80.6 %)", 15, GREY)
    f.text(210, 328, "(dashed: padding)", 15, GREY)
    return f


def traffic():
    model = 25.557032 * 4  # MB: ResNet-50's parameters as float32
    f = Figure(316, "Bytes that the busiest process sends in a step: one for all against a ring")
    f.text(
        20,
        34,
        "MB that the busiest process sends in a step, ResNet-50 (it receives as much)",
        17,
        bold=True,
        anchor="start",
    )
    rows = [
        (world, (world - 1) * model, 2 * (world - 1) / world * model) for world in (2, 4, 8, 16)
    ]
    for i, (world, star, ring) in enumerate(rows):
        y = 54 + i * 58
        f.text(112, y + 28, f"{world} processes", 15, anchor="end")
        for value, color, fill, row in ((star, RED, "#f6d5c0", 0), (ring, BLUE, "#cfe4f2", 1)):
            w = value / rows[-1][1] * 550
            f.box(124, y + row * 22, w, 18, fill, color)
            words = f"{value:.0f} {['through one', 'ring'][row]}"
            f.text(124 + w + 8, y + row * 22 + 14, words, 14, anchor="start")
    f.text(
        20,
        300,
        "Upper bars: all through one process. Lower bars, ring: each process alike.",
        15,
        GREY,
        "start",
    )
    return f


def fsdp():
    f = Figure(420, "FSDP: each GPU keeps a shard, and gathers one block at a time")
    for gpu in range(4):
        x = 20 + gpu * 204
        f.box(x, 18, 188, 142, "#e7f1f8", BLUE, thick=2)
        f.text(x + 94, 42, f"rank {gpu}, GPU {gpu}", 16, bold=True)
        for row, word in enumerate(["weights", "gradients", "optimizer"]):
            f.text(x + 82, 72 + row * 32, word, 14, anchor="end")
            for part in range(4):
                mine = part == gpu
                fill, line = (BLUE, BLUE) if mine else (PAPER, "#c4cad0")
                f.box(x + 90 + part * 23, 57 + row * 32, 20, 20, fill, line, dash=not mine)
    f.text(420, 184, "blue: the shard that a GPU keeps; the rest is on the other GPUs", 15, GREY)
    rows = [
        (
            "forward()",
            ["all-gather: the whole block's weights", "compute", "free"],
            "block 1, 2, 3 ...",
        ),
        (
            "backward()",
            ["all-gather again", "compute", "reduce-scatter: mean gradients", "free"],
            "block ... 3, 2, 1",
        ),
    ]
    widths = [[320, 150, 90], [160, 120, 290, 70]]
    for row, (name, parts, order) in enumerate(rows):
        y, x = 206 + row * 80, 130
        f.text(118, y + 30, name, 16, anchor="end", bold=True)
        for width, words in zip(widths[row], parts, strict=True):
            sent = "all-gather" in words or "scatter" in words
            fill, line = ("#fdf3dd", ORANGE) if sent else (PALE, GREY)
            f.label(x, y, width, 48, words, fill, line, size=15, bold=sent)
            x += width + 8
        f.text(130, y + 66, order, 14, GREY, anchor="start")
    f.text(
        420,
        378,
        "The next block is gathered while this one computes. Then each GPU's optimizer",
        15,
    )
    f.text(420, 400, "steps on its own shard.", 15)
    return f


def hang():
    f = Figure(330, "A hang: rank 0 waits in all_reduce, rank 1 in the next forward")
    f.text(20, 34, "if rank == 0: dist.all_reduce(correct)", 16, RED, "start", bold=True)
    f.text(820, 34, "time", 14, GREY, "end")
    f.arrow((660, 29), (780, 29), color=GREY)
    for rank, y in enumerate([56, 176]):
        f.text(20, y + 36, f"rank {rank}", 17, anchor="start", bold=True)
        x = 90
        for width, words in [(110, "last step"), (110, "validation")]:
            f.label(x, y, width, 60, words, "#e7f1f8", BLUE, size=15)
            x += width + 8
    f.label(326, 56, 130, 60, "all_reduce", "#fdf3dd", ORANGE, size=16, bold=True)
    f.box(460, 56, 360, 60, PAPER, RED, dash=True, thick=2)
    f.text(640, 92, "waits for rank 1's all_reduce", 16, RED)
    f.label(326, 176, 110, 60, ["if is false:", "next epoch"], "#e7f1f8", BLUE, size=15)
    f.label(444, 176, 140, 60, "model(images)", "#fdf3dd", ORANGE, size=15, bold=True)
    f.box(588, 176, 232, 60, PAPER, RED, dash=True, thick=2)
    f.text(704, 212, "waits for rank 0's forward", 16, RED)
    f.arrow((391, 118), (391, 172), color=RED, dash=True)
    f.text(402, 150, "nobody answers", 15, RED, "start")
    f.arrow((610, 174), (610, 120), color=RED, dash=True)
    f.text(621, 150, "nobody answers", 15, RED, "start")
    f.text(
        420,
        270,
        "No error, no output, until the timeout: 10 minutes with NCCL, 30 with gloo.",
        16,
    )
    words = (
        "Each call alone is right; but all processes must make the same calls, in the same order."
    )
    f.text(420, 298, words, 15, GREY)
    return f


def set_epoch():
    from torch.utils.data import DistributedSampler  # takes seconds

    f = Figure(322, "Which images each rank takes in each step, with and without set_epoch")
    for k, (x, title) in enumerate([(20, "without set_epoch"), (440, "sampler.set_epoch(epoch)")]):
        f.text(x + 190, 34, title, 17, RED if k == 0 else "#00694d", bold=True)
        samplers = [DistributedSampler(range(8), 2, rank) for rank in range(2)]
        for step in range(2):
            f.text(x + 160 + step * 130, 62, f"step {step}", 14, GREY)
        for epoch in range(3):
            y = 72 + epoch * 70
            f.text(x, y + 34, f"epoch {epoch}", 15, anchor="start", bold=True)
            for rank, sampler in enumerate(samplers):
                if k == 1:
                    sampler.set_epoch(epoch)
                f.text(x + 88, y + 20 + rank * 28, f"rank {rank}", 13, GREY)
                for i, image in enumerate(sampler):
                    fill, line = ("#e7f1f8", BLUE) if rank == 0 else ("#fdf3dd", ORANGE)
                    left = x + 112 + i * 48 + (i // 2) * 34
                    f.label(left, y + rank * 28, 44, 25, f"{image}", fill, line, size=14)
    f.text(210, 302, "every epoch the same batches", 15)
    f.text(630, 302, "a new order each epoch, equal parts", 15)
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
            color = "#ff7b72" if text.startswith("+") else "#9aa4af"  # + is the mistake
            if number := re.search(r"([\d.]+) % correct", text):
                color = "#ff7b72" if float(number[1]) > 100 else "#7ee787"
            rows += [(line, color, "") for line in wrap(text, 54, subsequent_indent=" " * 8)]
    texts = [
        f'<text x="12" y="{30 + 20 * i}" fill="{color}"{bold} xml:space="preserve">{escape(line)}'
        "</text>"
        for i, (line, color, bold) in enumerate(rows)
    ]
    height = 24 + 20 * len(rows)
    title = "A mistake applied to minimal/distributed.py: 195.0 % correct; taken back: 97.5 %"
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
