"""What is in the working folder, by facts alone: so that what no journal saw is told at least."""

import os
import stat
import time

ENTRIES, SECONDS = 100_000, 1.0


def inventory(folder, without):
    """{path: (inode, size, time of change)}; None where there is too much to look at."""
    found, folders, until = {}, [folder], time.monotonic() + SECONDS
    while folders:
        try:
            entries = [*os.scandir(folders.pop())]
        except OSError:
            continue
        for entry in entries:
            if len(found) > ENTRIES or time.monotonic() > until:
                return None
            try:
                info = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if stat.S_ISDIR(info.st_mode):
                if entry.name not in (b".git", b"__pycache__") and entry.path != without:
                    folders.append(entry.path)
            else:
                found[entry.path] = (info.st_ino, info.st_size, info.st_mtime_ns)
    return found


def changed(before, after):
    """The paths that are not as they were."""
    if before is None or after is None:
        return []
    return [p for p in before.keys() | after.keys() if before.get(p) != after.get(p)]
