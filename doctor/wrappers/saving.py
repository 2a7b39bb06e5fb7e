"""Files that the script saves and loads. That none is lost is the work of files/."""

import functools
import itertools
import linecache
import os
import re
import sys
import threading

from ..events import is_users, note
from . import wrap

numbers = itertools.count()  # of files that are written
# How processes wait for each other without torch: they poll a file, or use a lock or an event.
WAITS = re.compile(
    r"^\s*while\b.*\b(exists|isfile|is_file)\b"
    r"|^\s*while (True|1):(?=(.*\n){1,6}?.*\bsleep\()(.*\n){1,4}?.*\b(exists|isfile|is_file)\b"
    r"|\b(SoftFileLock|FileLock|flock|lockf|Barrier|Condition|(?<!cuda\.)Event|Semaphore)\b",
    re.MULTILINE,
)
by_threads = set()  # files that other threads write: each is noted once, a heartbeat would go on


def install(torch):
    if files := getattr(sys, "doctor_files", None):
        files.told.append(writes)
    wrap(torch, "save", before=save)
    wrap(torch, "load", before=load)


def writes(path):
    """Of files below the current folder, where results lie; none that is hidden, and no lock."""
    name = os.path.relpath(os.fsdecode(path), os.path.realpath(os.getcwd()))
    hidden = any(part.startswith(".") for part in name.split(os.sep))  # ".." too
    if threading.current_thread() is not threading.main_thread():
        hidden |= name in by_threads
        by_threads.add(name)
    if not hidden and not name.endswith(".lock") and next(numbers) < 500:
        note("writes", path=os.path.abspath(name))


def path_of(file):
    """The absolute path of what is given by a str, a Path or an open file; or None.

    None of a device, as os.devnull, too: it keeps nothing.
    """
    name = file if isinstance(file, (str, os.PathLike)) else getattr(file, "name", None)
    if not isinstance(name, (str, bytes, os.PathLike)):
        return None
    path = os.path.abspath(os.fsdecode(name))
    return None if os.path.exists(path) and not os.path.isfile(path) else path


def load(f, *_, **__):
    note("load", path=path_of(f), waits=any(map(may_wait, users_files())))


def users_files():
    """The files of the user's own functions that are being called now."""
    frame, files = sys._getframe(1), set()
    while frame is not None:
        files.add(frame.f_code.co_filename)
        frame = frame.f_back
    return filter(is_users, files)


@functools.cache
def may_wait(file):
    """Whether its code has such a wait anywhere."""
    return bool(WAITS.search("".join(linecache.getlines(file))))


def save(obj, f, *args, **kwargs):
    inner = obj.values() if isinstance(obj, dict) else []
    dicts = [some for some in (obj, *inner) if isinstance(some, dict) and some]
    of_wrapped = any(all(str(key).startswith("module.") for key in some) for some in dicts)
    tensors = [x for some in dicts for x in some.values() if hasattr(x, "placements")]
    parts = any(one.is_shard() for x in tensors for one in x.placements)
    note("save", path=path_of(f), of_wrapped=of_wrapped, parts=parts)
