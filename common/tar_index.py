"""Where each image lies in tar archives, and of which class it is."""

import io
import os
import re
import tarfile
import time
import zlib

import numpy as np
from torchvision.datasets.folder import IMG_EXTENSIONS

ILSVRC = "ILSVRC2012_img_{}.tar"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
SECONDS = 10  # between two lines about progress


def needs_devkit(path):
    return os.path.basename(path) == ILSVRC.format("val")


def compressed(path):
    plain = re.sub(r"\.(tar\.\w+|t[gbx]z2?|tzst)$", "", path)
    plain = plain if plain.endswith(".tar") else f"{plain}.tar"
    return f"{path} is compressed, so no image can be read alone: unpack it to a plain {plain}"


def make_index(paths, part):
    """The index of archives as a dict of arrays: see Archives.

    Sorted as image folders are: the files of a folder by name, then its folders. After ILSVRC2012's
    archive to validate, which has no classes, `paths` has the devkit. Raises ValueError.
    """
    devkit = paths[-1] if needs_devkit(paths[0]) else None
    entries, classes, numbered = [], set(), devkit is None
    for number, path in enumerate(paths[:1] if devkit else paths):
        try:
            found = _scan(path)
            labels = _devkit_labels(devkit, found) if devkit else _labels(path, found)
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error}") from None
        numbered = numbered and bool(labels)
        for name, where in _with_class(found, labels, part):
            label, slash, _ = name.partition("/")
            if slash or not where:
                classes.add(label)
            if slash and where:
                entries.append((name, number, *where))
    if not entries:
        raise ValueError(
            f"{paths[0]} has no images in classes: make it of a folder with a folder per class "
            f"(tar -cf {part}.tar -C {part} .), or put a KEY.cls beside each KEY.jpg"
        )
    classes = [str(i) for i in range(1 + max(map(int, classes)))] if numbered else sorted(classes)
    target = {name: i for i, name in enumerate(classes)}

    def position(entry):
        folder, _, file = entry[0].rpartition("/")
        return target[folder.partition("/")[0]], folder.split("/"), file, entry[1]

    entries.sort(key=position)
    names, archives, offsets, sizes = zip(*entries, strict=True)
    return {
        "classes": np.array([os.fsencode(name) for name in classes]),
        "names": np.array([os.fsencode(name) for name in names]),
        "targets": np.array([target[name.partition("/")[0]] for name in names]),
        "archives": np.array(archives, np.int32),
        "offsets": np.array(offsets, np.int64),
        "sizes": np.array(sizes, np.int64),
    }


def _with_class(found, labels, part):
    """[(CLASS/NAME, where)] of what _scan() has found; of folders where is None."""
    if labels:
        images = [(name, where) for name, where in found.items() if where]
        return [(f"{labels[name]}/{os.path.basename(name)}", where) for name, where in images]
    if {name.partition("/")[0] for name in found} == {part}:  # tar -cf train.tar train
        return [(n.removeprefix(f"{part}/"), where) for n, where in found.items() if n != part]
    return list(found.items())


def _scan(path):
    """What lies in an archive, as _members() has it, with lines about the progress."""
    print(f"indexing {path}, once", flush=True)
    with open(path, "rb") as file:
        start = file.read(6)
        if start.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")):
            raise ValueError(compressed(path))
        file.seek(0)
        return _members(file, path, Progress(path))


class Progress:
    """A line now and then: how much of a file is read."""

    def __init__(self, path):
        self.path, self.size, self.printed = path, os.path.getsize(path), time.monotonic()

    def update(self, position):
        if time.monotonic() > self.printed + SECONDS:
            self.printed = time.monotonic()
            print(f"indexing {self.path}: {position / self.size:.0%}", flush=True)


def _members(file, path, progress, base=0):
    """{name: (offset, size)} of the images and KEY.cls in a tar file, and {name: None} of folders.

    Of a file x in an archive C.tar in it the name is C/x. base: where in the file on disk `file`
    begins. What begins with a dot does not count.
    """
    found = {}
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            while member := archive.next():
                archive.members.clear()  # else it keeps them all
                progress.update(base + member.offset)
                name, offset = _plain(member.name), base + member.offset_data
                if "/." in f"/{name}":
                    continue
                if member.isdir():
                    found[name] = None
                elif name.endswith(".tar") and member.isreg():
                    inner, label = archive.extractfile(member), name.removesuffix(".tar")
                    inside = _members(inner, f"{path}:{name}", progress, offset)
                    found |= {label: None} | {f"{label}/{key}": inside[key] for key in inside}
                elif name.lower().endswith((*IMG_EXTENSIONS, ".cls")):
                    if member.isreg() and not member.issparse():
                        found[name] = offset, member.size
                    elif member.islnk() and found.get(_plain(member.linkname)):
                        found[name] = found[_plain(member.linkname)]
                    else:
                        raise ValueError(
                            f"{path}: {name} is no plain file: pack with tar --dereference"
                        )
            _check_end(file, archive.offset, path)
    except tarfile.TarError as error:
        raise ValueError(f"{path} is damaged, or no archive: {error}") from None
    return found


def _plain(name):
    return os.path.normpath(name).lstrip("/")


def _check_end(file, end, path):
    """tarfile takes damage for an archive's end, which are 512 zeros, and so ends many a copy."""
    file.seek(end)
    if file.read(512) != bytes(512):
        raise ValueError(f"{path} is not complete, or damaged at byte {end}: copy it again")
    while block := file.read(512):
        if block[257:262] == b"ustar":
            raise ValueError(f"{path} is several archives in one: join them with tar --concatenate")


def _labels(path, found):
    """{name: class} of an archive's images that have a KEY.cls each; {} where none has."""
    keys = [name.removesuffix(".cls") for name in found if name.endswith(".cls")]
    labels = {}
    with open(path, "rb") as file:
        for key in keys:
            offset, size = found.pop(f"{key}.cls")
            text = os.pread(file.fileno(), size, offset).decode(errors="replace").strip()
            if not text.isdecimal():
                raise ValueError(f"{path}: {key}.cls is {text[:50]!r}, not the number of a class")
            labels[key] = int(text)
    if not labels:
        return {}

    def label(name):
        folder, file = os.path.split(name)
        key = os.path.join(folder, file.partition(".")[0])
        if key not in labels:
            raise ValueError(f"{path}: there is no {key}.cls beside {name}")
        return labels[key]

    return {name: label(name) for name, where in found.items() if where}


def _devkit_labels(devkit, found):
    """{name: WordNet id} of ILSVRC2012's images to validate."""
    try:
        from scipy.io import loadmat
    except ImportError:
        raise ValueError(f"{devkit} needs pip install scipy to be read") from None
    folder = f"{DEVKIT.removesuffix('.tar.gz')}/data"
    try:
        with tarfile.open(devkit) as archive:
            meta = archive.extractfile(f"{folder}/meta.mat").read()
            truth = archive.extractfile(f"{folder}/ILSVRC2012_validation_ground_truth.txt").read()
        synsets = np.atleast_1d(loadmat(io.BytesIO(meta), squeeze_me=True)["synsets"])
        names = dict(zip(synsets["ILSVRC2012_ID"].tolist(), synsets["WNID"].tolist(), strict=True))
        labels = [names[int(number)] for number in truth.split()]
    except (tarfile.TarError, OSError, EOFError, LookupError, ValueError, zlib.error) as error:
        raise ValueError(f"{devkit} is damaged, or no devkit: {error}") from None
    images = sorted(name for name, where in found.items() if where)
    if len(images) != len(labels):
        raise ValueError(f"{devkit} has the classes of {len(labels)} images, not {len(images)}")
    return dict(zip(images, labels, strict=True))
