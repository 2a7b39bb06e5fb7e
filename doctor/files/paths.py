"""What is at a path, and what lies above and below it. Paths are absolute bytes."""

import errno
import os

NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


def seen(path):
    """os.lstat, or None where nothing is."""
    try:
        return os.lstat(path)
    except OSError as error:
        if error.errno in NOTHING_THERE:
            return None
        raise


def there(path):
    """As seen(); None where a folder above it is a link by now: then it names another file."""
    folder = os.path.dirname(path)
    return seen(path) if os.path.realpath(folder) == folder else None


def below(path, folder):
    return path.startswith(folder.rstrip(b"/") + b"/")


def inside(path, folder):
    return path == folder or below(path, folder)


def parents(path):
    while True:
        up = os.path.dirname(path)
        if up == path:
            return
        yield up
        path = up
