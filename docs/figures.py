"""Draws the figures of the README as SVG: who holds what, and what travels.

$ python docs/figures.py
"""

from pathlib import Path
from xml.sax.saxutils import escape

# Okabe and Ito's colours, which the colour-blind tell apart; nothing is said by colour alone.
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
INK, GREY, PALE, PAPER = "#1f2328", "#656d76", "#eef1f4", "#ffffff"
FONT = "Helvetica, Arial, 'Liberation Sans', 'Noto Sans', sans-serif"


class Figure:
    """Collects shapes; str() is the SVG. Lengths are pixels at the README's width, 840."""

    def __init__(self, height, title):
        self.parts, self.height, self.title = [], height, title

    def box(self, x, y, w, h, fill=PAPER, line=GREY, dash=False, thick=1.5):
        dashes = ' stroke-dasharray="6 4"' if dash else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="6" fill="{fill}" '
            f'stroke="{line}" stroke-width="{thick:g}"{dashes}/>'
        )

    def text(self, x, y, lines, size=15, fill=INK, anchor="middle", bold=False):
        """Lines of text; y is the baseline of the first."""
        weight = ' font-weight="bold"' if bold else ""
        for i, line in enumerate([lines] if isinstance(lines, str) else lines):
            self.parts.append(
                f'<text x="{x:g}" y="{y + i * size * 1.3:g}" font-size="{size}" fill="{fill}" '
                f'text-anchor="{anchor}"{weight}>{escape(line)}</text>'
            )

    def label(self, x, y, w, h, words, fill=PALE, line=GREY, ink=INK, size=14, bold=False):
        """A box with a word, or several lines, in its middle."""
        words = [words] if isinstance(words, str) else words
        self.box(x, y, w, h, fill, line)
        first = y + h / 2 + size * 0.35 - (len(words) - 1) * size * 0.65
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
    f = Figure(370, "DistributedDataParallel: every process keeps a model; only gradients travel")
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
    return f


def ring():
    f = Figure(402, "All-reduce by a ring: of 4 parts each process adds one up, then passes it on")
    columns = [(20, "start"), (300, "after 3 steps"), (580, "after 3 more")]
    colors = [BLUE, ORANGE, GREEN, RED]
    for k, (x, title) in enumerate(columns):
        f.text(x + 120, 32, title, 17, bold=True)
        for rank in range(4):
            y = 48 + rank * 60
            f.text(x + 2, y + 28, f"{rank}", 16, GREY, "start", bold=True)
            for part in range(4):
                done = k == 2 or (k == 1 and part == (rank + 1) % 4)
                words = (
                    "Σ" + "abcd"[part] if done else "abcd"[part] + "₀₁₂₃"[rank] if k == 0 else "…"
                )
                fill = {BLUE: "#cfe4f2", ORANGE: "#fbe6b8", GREEN: "#c6eadf", RED: "#f6d5c0"}
                shade = fill[colors[part]] if done else PAPER
                line = colors[part] if done else "#c4cad0"
                ink = INK if done or k == 0 else "#8b939c"
                f.label(x + 22 + part * 54, y, 48, 44, words, shade, line, ink, 17, bold=done)
    for x in (250, 530):
        f.arrow((x + 8, 158), (x + 44, 158), color=INK, thick=3)
    f.text(140, 316, ["process 0 to 3, and its", "gradients in four parts"], 15)
    f.text(
        420,
        316,
        ["each part went round, and was", "added to: each process has", "one whole sum"],
        15,
    )
    f.text(700, 316, ["the sums went round:", "each process has all of them"], 15)
    f.text(
        420, 388, "In each of the 6 steps a process sends 1 part of 4: 6/4 of the bytes.", 15, GREY
    )
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
    f = Figure(330, "Slurm: a task starts a process per GPU; ranks count on from task to task")
    for i, (x, gpus, first) in enumerate([(20, 3, 0), (484, 3, 3)]):
        w = 336
        f.box(x, 62, w, 158, "#e7f1f8", BLUE, thick=2)
        f.text(x + 12, 88, f"node {i}: srun starts task {i}", 16, anchor="start", bold=True)
        f.text(x + 12, 112, f"it sees {gpus} GPUs: {gpus} processes", 15, anchor="start")
        for g in range(gpus):
            f.label(
                x + 12 + g * 104,
                128,
                96,
                76,
                [f"rank {first + g}", f"local {g}", f"GPU {g}"],
                PAPER,
                BLUE,
                size=15,
            )
    f.label(290, 12, 290, 34, "meeting point on node 0", "#fdf3dd", ORANGE, size=15, bold=True)
    f.arrow((200, 58), (290, 48), color=ORANGE, both=True)
    f.arrow((640, 58), (550, 48), color=ORANGE, both=True)
    f.text(130, 40, "task 0 starts 3", 15)
    f.text(720, 40, "task 1 starts 3", 15)
    f.text(420, 252, "2 tasks x 3 processes, so world_size = 6,", 16)
    f.text(420, 280, "and the first rank of task 1 is 1 x 3 = 3.", 16)
    f.text(
        420,
        310,
        "Tasks are not processes: one task per GPU is right too, each then starts 1.",
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
            w = value / rows[-1][1] * 600
            f.box(124, y + row * 22, w, 18, fill, color)
            words = f"{value:.0f}"
            if i == 3:
                words += ["", " (ring)"][row]
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


FIGURES = [dataparallel, ddp, ring, traffic, horovod, slurm, evaluation]


def draw():
    """{file name: SVG} of all figures."""
    return {f"{figure.__name__}.svg": str(figure()) for figure in FIGURES}


if __name__ == "__main__":
    for name, svg in draw().items():
        (Path(__file__).parent / name).write_text(svg)
