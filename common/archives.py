"""Images in tar archives, read where they lie."""

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import re
import zipfile

import numpy as np
import torch

from .files import sync, temporary, try_remove
from .tar_index import DEVKIT, ILSVRC, compressed, make_index, needs_devkit

FORMAT = 1  # of the index: another one is made anew
OPEN_FILES = 256  # at most, of one data set; a process may often open 1024


def find_archives(data, part):
    """The archives of `part`, train or val, in the folder `data`: a list of paths, [] for none.

    They are PART.tar, or PART-000000.tar, PART-000001.tar, ..., or ILSVRC2012's own. Raises
    ValueError for shards of which one is missing, and for compressed archives.
    """
    files = sorted(os.listdir(data)) if os.path.isdir(data) else []
    if names := [name for name in (f"{part}.tar", ILSVRC.format(part)) if name in files]:
        return [os.path.join(data, names[0])]
    shards = {int(m[1]): m[0] for f in files if (m := re.fullmatch(rf"{part}-(\d+)\.tar", f))}
    if shards:
        missing = [n for n in range(min(shards), max(shards)) if n not in shards]
        if missing:
            raise ValueError(f"{data} has {shards[max(shards)]}, but no {part} shard {missing[0]}")
        return [os.path.join(data, shards[number]) for number in sorted(shards)]
    for name in files:
        if re.fullmatch(rf"{part}(-\d+)?\.(tar\.\w+|t[gbx]z2?|tzst)", name):
            raise ValueError(compressed(os.path.join(data, name)))
    return []


class Archives:
    """The images of some tar archives, in the order that image folders have.

    Members are CLASS/NAME.jpg, or KEY.jpg beside a KEY.cls with the number of the class, or they
    are archives CLASS.tar. classes: names. For each image, as arrays: `names` (bytes, CLASS/NAME),
    `targets`, and where its bytes lie: `archives` (its index in `paths`), `offsets`, `sizes`.

    The index is written to PART.index.npz beside the archives or, where that cannot be, to a cache
    folder. It holds their sizes and times, and is made anew when they change. Of the processes of a
    node, one makes it and the others wait. Raises ValueError for archives that are not complete, or
    have no classes.
    """

    def __init__(self, paths, part):
        self.paths, self.files = paths, {}
        for number in range(min(len(paths), OPEN_FILES)):
            self._file(number)
        index = _index(paths, part)
        self.names, self.targets = index["names"], index["targets"]
        self.classes = [os.fsdecode(name) for name in index["classes"]]
        self.archives, self.offsets = index["archives"], index["offsets"]
        self.sizes = index["sizes"]

    def __getstate__(self):
        return self.__dict__ | {"files": {}}  # a spawned worker opens its own

    def __del__(self):
        for file in self.files.values():
            os.close(file)

    def _file(self, number):
        if number not in self.files:
            file = os.open(self.paths[number], os.O_RDONLY)
            if len(self.files) == OPEN_FILES:
                os.close(self.files.pop(next(iter(self.files))))
            self.files[number] = file
        return self.files[number]

    def read(self, index):
        """The bytes of an image. Raises ValueError where the archive ends before them."""
        size = int(self.sizes[index])
        # A position of its own: the workers share the file, and with it its position.
        data = os.pread(self._file(self.archives[index]), size, int(self.offsets[index]))
        if len(data) < size:
            raise ValueError("the archive has become shorter")
        return data

    def name(self, index):
        return f"{self.paths[self.archives[index]]}:{os.fsdecode(self.names[index])}"


def _index(paths, part):
    """The index of archives as a dict of arrays: read where there is one, else made and written."""
    folder = os.path.dirname(os.path.realpath(paths[0]))
    used = [*paths, os.path.join(folder, DEVKIT)] if needs_devkit(paths[0]) else paths
    if not os.path.exists(used[-1]):
        raise ValueError(f"no {used[-1]}: it has the classes of the images in {paths[0]}")
    stats = [(os.path.basename(path), os.stat(path)) for path in used]
    stamp = json.dumps([FORMAT, [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]])
    key = hashlib.sha256(f"{folder} {stamp}".encode(errors="surrogateescape")).hexdigest()[:16]
    cache = os.path.join(os.path.dirname(torch.hub.get_dir()), "archives")
    places = [f"{folder}/{part}.index.npz", f"{cache}/{part}-{key}.index.npz"]
    for place in places:
        if index := _read(place, stamp):
            return index
    made = None
    for place in places:
        try:
            with _locked(place):
                if index := _read(place, stamp):  # another process has made it meanwhile
                    return index
                if os.path.exists(place):
                    print(f"{place} is damaged, or of other archives: it is made anew", flush=True)
                made = made or make_index(used, part) | {"stamp": np.array(stamp)}
                _write(place, made)
                return made
        except OSError as error:
            reason = error
    raise ValueError(f"cannot write {' or '.join(places)}: {reason}: set TORCH_HOME to a folder")


def _read(place, stamp):
    """The index in a file; None if there is none, or it is damaged or of other archives."""
    with contextlib.suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        with np.load(place) as file:
            index = {name: file[name] for name in file.files}
        return index if index["stamp"] == stamp else None


@contextlib.contextmanager
def _locked(place):
    """Keep other processes from making the same index, as far as the file system has locks."""
    os.makedirs(os.path.dirname(place), exist_ok=True)
    folder, name = os.path.split(place)
    with open(os.path.join(folder, f".{name}.lock"), "a") as lock:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(place, index):
    """Write the whole index or nothing."""
    for left in glob.glob(f"{glob.escape(place)}.*.tmp"):  # of a process that was killed
        try_remove(left)
    new = temporary(place)
    try:
        with open(new, "wb") as file:
            np.savez(file, **index)
            sync(file)
        os.replace(new, place)
    finally:
        try_remove(new)
