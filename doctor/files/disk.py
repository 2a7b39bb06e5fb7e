"""Copies, walks and small questions about files; all paths are bytes."""

import collections
import contextlib
import errno
import fcntl
import os
import shutil
import stat

from .journal import DEV, HIDDEN, INO, MODE
from .paths import seen

CLONE = 0x40049409  # ioctl FICLONE: a copy that shares its blocks, where the file system can
AS_I_AM = {"effective_ids": True} if os.access in os.supports_effective_ids else {}


def up(path):
    return os.path.dirname(path)


def on(place, device):
    info = seen(place)
    return bool(info) and info.st_dev == device


def writable(path):
    folder = os.path.isdir(path)
    return os.access(path, os.W_OK | os.X_OK if folder else os.W_OK, **AS_I_AM)


def without_links(path):
    """The name itself, which may be a link; its folder has no links."""
    folder, name = os.path.split(path.rstrip(b"/") or b"/")
    if name in (b"", b".", b".."):
        return os.path.realpath(path)
    return os.path.join(os.path.realpath(folder or b"."), name)


def walk(top):
    """(path, facts) of all that is in a folder, itself first; links are not followed.

    What is deeper comes later: there may be a million images, above them a few checkpoints.
    """
    folders = collections.deque([top])
    while folders:
        folder = folders.popleft()
        info = seen(folder)
        if not info:
            continue
        yield folder, info
        if not stat.S_ISDIR(info.st_mode):
            continue
        with contextlib.suppress(OSError):
            names = (name for name in os.listdir(folder) if not name.startswith(HIDDEN))
            for path in sorted(os.path.join(folder, name) for name in names):
                info = seen(path)
                if info and stat.S_ISDIR(info.st_mode):
                    folders.append(path)
                elif info:
                    yield path, info


def copy(path, target):
    """Its bytes, times, mode; sharing its blocks where the file system can."""
    with open(path, "rb") as source, open(target, "xb") as file:
        try:
            fcntl.ioctl(file.fileno(), CLONE, source.fileno())
        except OSError:
            copy_bytes(source.fileno(), file.fileno())
    shutil.copystat(path, target)


def copy_bytes(source, target):
    """From one open file to another; a hole in it, which takes no room, stays one."""
    at, size = 0, os.fstat(source).st_size
    while at < size:
        end = size
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
            end = os.lseek(source, at, os.SEEK_HOLE)
        except OSError as error:  # else a file system that does not tell where holes are
            if error.errno == errno.ENXIO:
                break  # nothing but a hole is left
        os.lseek(source, at, os.SEEK_SET)
        os.lseek(target, at, os.SEEK_SET)
        begin = at
        while part := os.read(source, min(1 << 20, end - at)):
            at += len(part)
            while part:
                part = part[os.write(target, part) :]
        if at == begin:
            break  # somebody has made it shorter meanwhile
    os.ftruncate(target, size)


def copy_facts(path, fresh, info):
    with contextlib.suppress(OSError):
        os.chown(fresh, info.st_uid, info.st_gid)
    shutil.copystat(path, fresh)  # its extended attributes too


def make_writable(path, info):
    """Let its owner look into it and write."""
    owner = os.geteuid() == info.st_uid
    if owner and os.geteuid() and stat.S_IMODE(info.st_mode) & 0o700 != 0o700:
        os.chmod(path, stat.S_IMODE(info.st_mode) | 0o700)


def is_inode(path, facts):
    info = seen(path)
    return bool(info) and (info.st_dev, info.st_ino) == (facts[DEV], facts[INO])


def put(kept, path, entry):
    """Put back a file or link that was kept; a copy stays, until its mode and time are set."""
    with contextlib.suppress(OSError):
        make_writable(up(path), os.stat(up(path)))
    with contextlib.suppress(OSError):  # another file system by now, or a folder that is closed
        if entry["how"] == "link":
            os.replace(kept, path)
            return
    if os.path.islink(kept):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        os.symlink(os.readlink(kept), path)
    elif is_inode(path, entry["facts"]):  # its folder may be closed; another's bytes may be kept
        with contextlib.suppress(OSError):
            os.chmod(path, stat.S_IMODE(entry["facts"][MODE]) | stat.S_IWUSR)
        with open(kept, "rb") as source, open(path, "r+b") as file:
            shutil.copyfileobj(source, file, 1 << 20)
            file.truncate()
            os.fsync(file.fileno())
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        fresh = os.path.join(up(path), os.path.basename(kept))
        with contextlib.suppress(FileNotFoundError):
            os.unlink(fresh)
        copy(kept, fresh)
        os.replace(fresh, path)
