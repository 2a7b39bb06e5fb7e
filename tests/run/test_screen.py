"""What a run prints: a bar at a terminal, lines elsewhere, and names that no terminal can show."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import time

import pytest
from conftest import SMALL, full, python, run


@pytest.mark.parametrize("size", [(24, 80), full((0, 0))], ids=["usual", "unknown"])
def test_a_bar_at_a_terminal(size, work, tmp_path):
    """Also where the terminal does not tell its size."""
    command = [*python(), *SMALL, "-j", "1", "--checkpoint-dir", str(tmp_path / "c")]
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    process = subprocess.Popen(command, cwd=work, stdout=follower, stderr=follower)
    os.close(follower)
    shown, deadline = b"", time.monotonic() + 90
    while time.monotonic() < deadline:
        try:
            shown += os.read(leader, 4096)
        except OSError:  # the other end is closed
            break
    assert process.wait(timeout=10) == 0
    text = shown.decode()
    assert "\r" in text.replace("\r\n", "") and "epoch 1 100%|" in text and "img/s" in text, text
    assert len(re.findall(r"^ \* loss", text, re.M)) == 2


def test_names_that_the_terminal_cannot_show(work, tmp_path):
    """They are escaped, on stdout and in an error; the run goes on."""
    folder = tmp_path / "Prüfläufe"
    flags = [*SMALL, "-j", "0", "--max-steps", "2", "--checkpoint-dir", folder]
    ascii_only = {"PYTHONIOENCODING": "ascii"}
    output = run([*python(), *flags], work, env=ascii_only)
    assert "Pr\\xfcfl\\xe4ufe" in output and (folder / "checkpoint.pth").exists()
    output = run([*python(), *flags], work, env=ascii_only, code=2)
    assert output.startswith("error: ") and "Pr\\xfcfl\\xe4ufe" in output
    assert output.count("\n") == 1
