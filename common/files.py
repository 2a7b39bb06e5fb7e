"""Files that are replaced in one step: whoever reads one sees all of the old or all of the new."""

import contextlib
import errno
import fcntl
import os
import re
import shutil

# What temporary() makes of the names in a checkpoint folder.
TEMPORARY = re.compile(r"(checkpoint[\w.-]*\.pth|model_best\.pth|metrics\.jsonl)\.\d+\.tmp")


def temporary(path):
    """The name that a file has while it is written. No other process uses it: it has the pid."""
    return f"{path}.{os.getpid()}.tmp"


def sync(file):
    """Have what was written to an open file on the disk."""
    file.flush()
    os.fsync(file.fileno())


def replace_text(path, write):
    """Replace a text file by what write(file) writes. Raises OSError, and keeps the old one."""
    new = temporary(path)
    try:
        # A file's name on disk may be any bytes: surrogateescape writes them as they are.
        with open(new, "w", newline="", encoding="utf-8", errors="surrogateescape") as file:
            write(file)
            sync(file)
        os.replace(new, path)
    except OSError as error:
        raise OSError(f"cannot write {path}: {error}") from error
    finally:
        try_remove(new)  # gone already after a success


def try_remove(path):
    """Remove a file that may not be there, on a disk that may be gone."""
    with contextlib.suppress(OSError):
        os.remove(path)


def is_same(path, other):
    return os.path.exists(other) and os.path.samefile(path, other)


def replace_by_link(source, target):
    """Let `target` be `source` too, in one step: no moment without a file of that name."""
    if is_same(source, target):
        return  # we crashed after linking; renaming a hard link onto its twin does nothing
    new = temporary(target)
    try_remove(new)  # of a killed process with the same pid, as in a container
    try:
        os.link(source, new)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, new)
        with open(new, "rb+") as file:
            sync(file)
    os.replace(new, target)


def lock_folder(folder):
    """Lock a folder for as long as this process keeps the file that is returned.

    Raises ValueError where another process has locked it.
    """
    lock = open(os.path.join(folder, ".lock"), "a")  # noqa: SIM115
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # children do not inherit it
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):  # others: a file system without locks
            message = f"another run is writing to {folder}: choose another --checkpoint-dir"
            raise ValueError(message) from None
    return lock
