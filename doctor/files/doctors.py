"""Begins a doctor's run, and knows which doctors live: each holds the lock of a file."""

import contextlib
import fcntl
import os
import shutil
import time

from .hosts import BOOT, HOST
from .journal import Journal, locked, runs
from .paths import seen

ALIVE = b"alive-"


def begin(root, work, caches):
    """(the journal, the path of the file whose lock says that this doctor lives, and that file)

    Doctors in one folder, in one above it or below have one journal: their scripts may move what
    the other has made. Others have journals of their own, and mark what they share.
    """
    with locked(root):
        others = [*runs(root)]
        journal = next((o for o in others if o.beside(work) and doctors_here(o.folder)), None)
        if not journal:
            name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{os.urandom(2).hex()}"
            folder = os.path.join(root, name.encode())
            os.makedirs(os.path.join(folder, b"kept"), mode=0o700)
            journal = Journal(folder)
            caches = [path.decode("latin-1") for path in caches]
            journal.append({"do": "run", "path": work, "caches": caches}, sync=True)
        for other in others:
            other.append({"do": "met"})
            journal.append({"do": "met"})
        name = f"{os.getpid()}-{os.urandom(2).hex()}@{BOOT}@{HOST}"
        path = os.path.join(journal.folder, ALIVE + name.encode())
        alive = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(alive, fcntl.LOCK_EX)
    beat(journal.folder)
    return journal, path, alive


def beat(folder):
    with open(os.path.join(folder, b"heartbeat"), "wb"):
        pass
    os.utime(os.path.join(folder, b"heartbeat"))


def elsewhere(alive):
    """The other machine whose doctor's file this is, or "".

    This one may have been started anew since; or it is another container of it, by another name.
    """
    boot, host = (os.path.basename(alive).decode() + "@@").split("@")[1:3]
    return "" if host in ("", HOST) or (boot and boot == BOOT) else host


def lives(alive):
    """Whether a doctor holds the lock of this file. To ask disturbs none that lives.

    Of one of another machine it is not known: locks may not be seen here. Its file is not there
    when it has ended.
    """
    if elsewhere(alive):
        return os.path.exists(alive)
    try:
        file = os.open(alive, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(file, fcntl.LOCK_UN)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(file)


def all_doctors_of(folder):
    """The files of all doctors of a run; none where another doctor has put it back meanwhile."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return [os.path.join(folder, name) for name in names if name.startswith(ALIVE)]


def doctors_of(folder):
    """The files of those that live. A process of a dead one may just be asking: look again."""
    found = [*filter(lives, all_doctors_of(folder))]
    for _ in range(2):
        if found:
            time.sleep(0.02)
            found = [*filter(lives, found)]
    return found


def doctors_here(folder):
    """The files of those that live on this machine."""
    return [alive for alive in doctors_of(folder) if not elsewhere(alive)]


def left_elsewhere(journal):
    """The other machine whose doctor has not shown for an hour, and has put nothing back; or ""."""
    hosts = [*filter(None, map(elsewhere, all_doctors_of(journal.folder)))]
    return hosts[0] if hosts and time.time() - last_beat(journal) > 3600 else ""


def last_beat(journal):
    """When its doctor was last seen alive, and a little: a beat comes once a second."""
    info = seen(os.path.join(journal.folder, b"heartbeat"))
    return (info.st_mtime if info else time.time()) + 3


def sweep(root):
    """Remove the folders of runs that are put back, unless they hold files that were left."""
    for name in os.listdir(root):
        folder = os.path.join(root, name)
        if not os.path.isdir(folder):
            continue
        journal = Journal(folder).refresh()
        if not journal.done and os.path.exists(os.path.join(folder, b"journal")):
            continue
        with contextlib.suppress(OSError):  # not empty
            for place in filter(os.path.isdir, [os.path.join(folder, b"kept"), *journal.stores]):
                os.rmdir(place)
            shutil.rmtree(folder)
