"""Locks on files, which a process holds for a block, or until it ends."""

import contextlib
import fcntl
import os


@contextlib.contextmanager
def locked_if_possible(path):
    """Run the block in one process at a time, by a lock on a file that may be new.

    Where that cannot be written, or the file system has no locks, nobody waits.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            fcntl.flock(stack.enter_context(open(path, "a")), fcntl.LOCK_EX)
        yield


def lock_folder(folder):
    """Make a folder, and lock it until this process ends, or closes the file descriptor returned.

    Where the file system has no locks it goes on without. Raises ValueError where another process
    has locked the folder, and where it cannot be made.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        lock = os.open(os.path.join(folder, ".lock"), os.O_WRONLY | os.O_CREAT, 0o666)
    except OSError as error:
        raise ValueError(f"--checkpoint-dir {folder}: {error.strerror}") from None
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # children do not inherit it
    except (BlockingIOError, PermissionError):
        message = f"another run is writing to {folder}: choose another --checkpoint-dir"
        raise ValueError(message) from None
    except OSError:
        pass  # a file system without locks
    return lock
