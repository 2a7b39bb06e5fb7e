"""Records the terminal of the README: a mistake is applied to minimal/distributed.py, run, and
taken back. Writes results/recording.json, from which tools/generate.py draws docs/recording.svg.

$ python tools/record.py
"""

import fcntl
import json
import os
import pty
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROWS, COLUMNS = 24, 100
MISTAKE = "bugs/validation_not_shared.diff"
TRAIN = "torchrun --standalone --nproc-per-node=2 minimal/distributed.py"
COMMANDS = [
    f"grep '^[-+] ' {MISTAKE}",
    f"patch minimal/distributed.py {MISTAKE}",
    TRAIN,
    f"patch -R minimal/distributed.py {MISTAKE}",
    TRAIN,
]


def record():
    """[{"command", "output": [[seconds since its start, line]]}] of a copy of the project."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("minimal", "bugs"):
            shutil.copytree(ROOT / name, Path(folder) / name)
        return [
            {"command": command, "output": in_terminal(command, folder)} for command in COMMANDS
        ]


def in_terminal(command, folder):
    """What a command prints at a terminal, line by line: [[seconds, line]]. Exits if it fails."""
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    env = os.environ | {"OMP_NUM_THREADS": "1"}  # which torchrun sets too, with a warning
    start, text, times = time.monotonic(), "", []
    process = subprocess.Popen(
        ["sh", "-c", command], cwd=folder, env=env, stdin=end, stdout=end, stderr=end
    )
    os.close(end)
    while True:
        try:
            part = os.read(terminal, 1000).decode()
        except OSError:  # the last process has closed it
            break
        text += part
        times += [round(time.monotonic() - start, 2)] * part.count("\n")
    os.close(terminal)
    if process.wait():
        sys.exit(f"error: {command} ended with {process.returncode}:\n{text}")
    return [list(pair) for pair in zip(times, text.splitlines(), strict=True)]


if __name__ == "__main__":
    lines = [json.dumps(part) for part in record()]
    (ROOT / "results/recording.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")
