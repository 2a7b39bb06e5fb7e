"""Files that are whole or not there, and the lines of metrics.jsonl."""

import contextlib
import json
import math
import os


@contextlib.contextmanager
def atomic_write(path, keep=None):
    """A new binary file that takes the place of `path` when the block ends: all of it, or nothing.

    keep: where the old file goes. Raises OSError, and leaves the old file, where it cannot be
    written.
    """
    new = f"{path}.{os.getpid()}.tmp"
    try:
        with open(new, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if keep and os.path.exists(path):
            os.replace(path, keep)
        os.replace(new, path)
    except (OSError, RuntimeError) as error:  # a full disk makes torch.save raise either
        if "DataLoader worker" in str(error):  # a worker has died meanwhile: no matter of this file
            raise
        reason = error
        while reason.__context__:  # the disk's own error, which torch's do not repeat
            reason = reason.__context__
        raise OSError(f"cannot write {path}: {reason}") from error
    finally:
        with contextlib.suppress(OSError):  # it is gone already, or the disk is
            os.remove(new)


def json_line(row):
    """A dict as a line of JSON, which has no NaN and no infinity: they become null."""
    lost = [key for key, x in row.items() if isinstance(x, float) and not math.isfinite(x)]
    return json.dumps(row | dict.fromkeys(lost)) + "\n"


def append_line(path, line):
    """Add a line to metrics.jsonl, and have it on the disk."""
    with open(path, "a") as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def cut_lines(path, epoch, step):
    """Cut metrics.jsonl at its first line beyond a position: that will be written again."""
    if not os.path.exists(path):
        return
    with open(path, "rb+") as file:
        while line := file.readline():
            try:
                row = json.loads(line)
                beyond = (row["epoch"], row["step"]) > (epoch, step)
            except (ValueError, TypeError, KeyError, RecursionError):  # not ours, or half a line
                beyond = not line.endswith(b"\n")
            if beyond:
                file.truncate(file.tell() - len(line))
                return
