"""stdout and stderr that nobody may read any more, as behind `| head`: the doctor goes on.

The run goes on, and ends with its usual exit code. That of a BrokenPipeError is 1: "a mistake".
"""

import contextlib
import io
import sys


class Lasting(io.FileIO):
    def write(self, data):
        try:
            return super().write(data)
        except BrokenPipeError:
            return len(data)


def lasting(file, encoding, errors="strict"):
    """A text stream that writes to this file descriptor, each line at once."""
    raw = io.BufferedWriter(Lasting(file, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding=encoding, errors=errors, line_buffering=True)


def install():
    for name in ("stdout", "stderr"):
        real = getattr(sys, name)
        with contextlib.suppress(OSError, AttributeError):  # it was closed, or is no file
            real.flush()
            setattr(sys, name, lasting(real.fileno(), real.encoding, real.errors))
