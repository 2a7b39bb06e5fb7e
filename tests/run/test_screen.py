"""What stands on the screen of a terminal: of a run, a stop, a resume, an evaluation, an error."""

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time

import pyte
import pytest
from conftest import (
    ACTIVE,
    HEAR_SIGNALS,
    ONE_THREAD,
    load,
    python,
    rows,
    torchrun,
    without_launchers,
)

FLAGS = "--arch tests.nets:normed --image-size 64 --batch-size 48 -j 1 -p 1".split()
FLAGS += ["--checkpoint-dir", "c"]


class Terminal:
    """A command at a terminal of its own, and what was to be seen there."""

    def __init__(self, command, cwd, size=(80, 24), **env):
        columns, lines = size
        # It is so wide that no line is wrapped, and so high that all stay.
        self.screen = pyte.Screen(1000, 1000)
        self.screen.set_mode(pyte.modes.LNM)
        self.stream = pyte.ByteStream(self.screen)
        self.raw, self.current = b"", []  # all bytes; the cursor's lines, whole ones
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        clean = without_launchers(os.environ) | {"CUDA_VISIBLE_DEVICES": "", "TERM": "xterm"}
        self.process = subprocess.Popen(
            [*HEAR_SIGNALS, *map(str, command)],
            cwd=cwd,
            env=clean | ACTIVE | ONE_THREAD | env,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            preexec_fn=lambda: (os.setsid(), fcntl.ioctl(0, termios.TIOCSCTTY, 0)),
        )
        os.close(slave)

    def read(self, until=None, seconds=200):
        """Read until a line of the cursor matches, or all that there is; returns the lines."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not select.select([self.master], [], [], 0.2)[0]:
                continue
            data = b""
            with contextlib.suppress(OSError):  # at the end of a terminal that nobody writes to
                data = os.read(self.master, 4096)
            if not data:
                assert until is None, self.lines()
                self.process.wait(20)
                return self.lines()
            self.raw += data
            seen = len(self.current)
            # A bar may come and go in one read, or take two: it is whole once the next \r comes.
            for part in re.split(rb"(?=\r)", data):
                if part.startswith(b"\r"):
                    self.current.append(self.line(self.screen.cursor.y))
                self.stream.feed(part)
            if until and any(re.search(until, line) for line in self.current[seen:]):
                return self.lines()
        self.process.kill()
        pytest.fail("\n".join(self.lines()))

    def line(self, number):
        cells = self.screen.buffer[number]
        return "".join(cells[x].data for x in range(max(cells, default=-1) + 1)).rstrip()

    def lines(self):
        """What was written, in lines as long as they are."""
        whole = "\n".join(self.line(number) for number in range(self.screen.cursor.y + 1))
        return whole.rstrip().split("\n")


@pytest.fixture
def terminal(work, tmp_path):
    """Starts commands at terminals, in a folder of their own."""
    started = []
    (tmp_path / "data").symlink_to(work / "data")

    def start(*args, **more):
        started.append(Terminal(*args, cwd=tmp_path, **more))
        return started[-1]

    yield start
    for each in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(each.process.pid, signal.SIGKILL)
        os.close(each.master)


EPOCH = r"epoch {}  loss \d\.\d{{4}}  acc@1 \d+\.\d{{3}}  acc@5 \d+\.\d{{3}}  "
EPOCH += r"(new best|best \d+\.\d{{3}})  0:\d\d:\d\d"
BAR = r"epoch [12]/\d \S* +\d+/29 \d\d:\d\d \d+ img/s loss \d\.\d{3} acc@1 \d+\.\d+"


@pytest.mark.full
def test_a_run_and_the_evaluation_that_it_names(terminal, tmp_path):
    """On 80 columns."""
    run = terminal([*torchrun(2), *FLAGS, "--epochs", 2])
    lines = run.read()
    assert run.process.returncode == 0, lines

    bars = [line for line in run.current if re.search(r"/29 \d\d:\d\d", line)]
    assert bars and all(re.fullmatch(BAR, line) for line in bars), bars
    assert max(map(len, bars)) <= 80
    # Bars are gone at the end, and each epoch is one line.
    start = next(i for i, line in enumerate(lines) if line.startswith("epoch 1/2"))
    first, second, done, best, evaluate = lines[start:]
    assert max(map(len, lines[start:])) <= 90, lines
    assert re.fullmatch(EPOCH.format("1/2") + r"  0:\d\d:\d\d left", first), first
    assert re.fullmatch(EPOCH.format("2/2"), second), second
    assert re.fullmatch(r"done in 0:\d\d:\d\d", done)
    top = max(rows(tmp_path / "c"), key=lambda row: row["acc1"])
    state = load(tmp_path / "c", "model_best.pth")
    assert state["epoch"] == state["best_epoch"] == top["epoch"]
    assert f"best: {top['acc1']:.3f} in epoch {top['epoch']}, saved as " in best
    start, more = evaluate.split(": ")
    assert start == "to evaluate it, add to the command"

    evaluation = terminal([*torchrun(2), *FLAGS, "--epochs", 2, *more.split()])
    lines = evaluation.read()
    assert evaluation.process.returncode == 0, lines
    assert f"model_best.pth at the end of epoch {top['epoch']}" in " ".join(" ".join(lines).split())
    assert lines[-1].startswith(f" * loss {top['val_loss']:.4f}  acc@1 {top['acc1']:.3f}"), lines


@pytest.mark.full
def test_a_stop_an_error_and_a_resume(terminal, tmp_path):
    """On 120 columns: there is room for all. The terminal of the resume can do little."""
    command, wide = [*torchrun(2), *FLAGS, "--epochs", 200], (120, 24)
    run = terminal(command, size=wide)
    run.read(until=r"^epoch 2/200 .* acc@1")
    os.write(run.master, b"\x03")
    lines = run.read()
    (first,) = [line for line in lines if line.startswith("epoch 1/200  loss ")]
    assert re.match(EPOCH.format("1/200") + r"  \d:\d\d:\d\d left", first), first
    (stopped,) = [i for i, line in enumerate(lines) if "stopped at" in line]
    found = re.fullmatch(r"stopped at (.*), saved: --resume auto goes on", lines[stopped])
    state = load(tmp_path / "c")
    assert found[1] == f"epoch {state['epoch'] + 1} step {state['step']}"
    assert lines[stopped + 1] == "torchrun reports every stop as below: that is no error"
    assert lines[stopped + 2].startswith("Traceback (most recent call last):")

    run = terminal(command, size=wide)
    lines = run.read()
    assert run.process.returncode == 1
    (error, *_, repeated) = [line for line in lines if "holds a run" in line]
    assert error.startswith(f"error: {tmp_path}/c holds a run (checkpoint.pth): ")
    assert "--resume auto" in error and "--checkpoint-dir" in error
    assert repeated.strip() == f"traceback : {error}"
    below = lines[lines.index(repeated) :]
    assert sum(1 + len(line) // 120 for line in below) < 24  # it is on the screen
    assert f"\r\x1b[K{error}".encode() in run.raw

    last = state["epoch"] * 29 + state["step"] + 5
    run = terminal([*command, "--resume", "auto", "--max-steps", last], size=wide, TERM="dumb")
    lines = run.read()
    assert run.process.returncode == 0
    assert f"at {found[1]}" in " ".join(" ".join(lines).split())
    assert sum("/s  loss " in line for line in lines) == 5, lines  # a line for each step
    epoch, step = divmod(last, 29)
    title = f"epoch {epoch + 1}/200 step {step}  loss " if step else f"epoch {epoch}/200  loss "
    assert any(line.startswith(title) for line in lines), lines
    assert b"\x1b" not in run.raw


def test_an_error_takes_the_place_of_the_bar(terminal):
    """Of any rank: each writes to the same terminal."""
    run = terminal([*python(), *FLAGS, "--lr", "1e30"])
    lines = run.read()
    assert run.process.returncode == 2
    assert re.fullmatch(r"error: .* \(epoch 1 step \d+\): a lower --lr may help", lines[-1]), lines
    assert not any("img/s" in line for line in lines)
    assert any(re.match(r"epoch [12]/\d \S* +\d+/29 ", line) for line in run.current)
