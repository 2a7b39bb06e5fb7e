"""Images in tar archives, read where they lie."""

import contextlib
import functools
import hashlib
import json
import os
import re
import tarfile
import tempfile
import zipfile
from types import SimpleNamespace

import numpy as np
import torch
from torchvision.datasets import imagenet
from torchvision.datasets.folder import IMG_EXTENSIONS
from tqdm import tqdm

from .report import locked, whole_file

ILSVRC = "ILSVRC2012_img_{}.tar"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
FORMAT = 2  # of the index


def find_archives(data, part):
    """The archives of `part`, train or val, in the folder `data`: a list of paths, [] for none.

    They are PART.tar, or PART-000000.tar, PART-000001.tar, ..., or ILSVRC2012's own. Raises
    ValueError for more than one of these, and for missing shards.
    """
    files = sorted(os.listdir(data)) if os.path.isdir(data) else []
    names = [name for name in (f"{part}.tar", ILSVRC.format(part)) if name in files]
    found = sorted((int(m[1]), f) for f in files if (m := re.fullmatch(rf"{part}-(\d+)\.tar", f)))
    shards = [name for _, name in found]
    if [number for number, _ in found] != list(range(len(found))):
        raise ValueError(f"{data}: number {' '.join(shards)} from 0 without gaps")
    names += shards
    if len(names) > max(1, len(shards)):
        raise ValueError(f"{data} has both {names[0]} and {names[1]}: move one of them away")
    return [os.path.join(data, name) for name in names]


def load_index(paths, part):
    """Where the images in some archives are, in the order that image folders have: a dict.

    Members are CLASS/NAME.jpg, or KEY.jpg beside a KEY.cls with the number of the class, or they
    are archives CLASS.tar. `classes`: names; `numbered`: whether they are those in KEY.cls. For
    each of n images, as arrays: `names` [n], the bytes CLASS/NAME, `targets` [n] and `places`
    [n, 3]: archive (an index of `paths`), offset and size in bytes, for read_member().

    It is made once and kept in a cache folder below TORCH_HOME. Of several processes that need it,
    one makes it and the others wait. Raises ValueError for archives that are incomplete or have no
    classes.
    """
    files, devkit = list(paths), None
    if os.path.basename(paths[0]) == ILSVRC.format("val"):
        devkit = os.path.join(os.path.dirname(paths[0]), DEVKIT)
        if not os.path.exists(devkit):
            raise ValueError(f"no {devkit}: it has the classes of the images in {paths[0]}")
        files.append(devkit)
    key = [(os.path.realpath(f), os.stat(f).st_size, os.stat(f).st_mtime_ns) for f in files]
    key = hashlib.sha256(json.dumps([FORMAT, IMG_EXTENSIONS, part, key]).encode()).hexdigest()
    folder = os.path.join(os.path.dirname(torch.hub.get_dir()), "archives")
    place = f"{folder}/{part}-{key[:16]}.npz"
    try:
        os.makedirs(folder, exist_ok=True)
        open(f"{place}.lock", "a").close()
    except OSError as error:
        raise ValueError(f"{error}: set TORCH_HOME to a folder that can be written") from None
    with locked(f"{place}.lock"):
        damaged = ValueError, EOFError, zipfile.BadZipFile
        with contextlib.suppress(FileNotFoundError, *damaged), np.load(place) as file:
            return dict(file)
        index = make_index(paths, part, devkit)
        with whole_file(place) as file:
            np.savez(file, **index)
        return index


def read_member(path, offset, size):
    """The bytes of a member. Raises ValueError where the archive ends before them."""
    # With its offset: forked workers share the file, and with it the file's position.
    data = os.pread(_open(path).fileno(), size, offset)
    if len(data) < size:
        raise ValueError("the archive has become shorter")
    return data


@functools.lru_cache(maxsize=256)  # a process may often open 1024
def _open(path):
    return open(path, "rb", buffering=0)


def make_index(paths, part, devkit=None):
    """Make what load_index() returns. Raises ValueError.

    Sorted as image folders are: the files of a folder by name, then its folders. devkit: the file
    with the classes of ILSVRC2012's images to validate.
    """
    contents = [_scan(path) for path in paths]
    labelled = [os.path.splitext(name)[0] in c.labels for c in contents for name in c.images]
    numbered = not devkit and any(labelled)
    images, classes = [], set()
    for number, content in enumerate(contents):
        start = 0
        if devkit:
            labels = _devkit_labels(devkit, content.images)
        elif numbered:
            labels = {name: _number(paths[number], name, content.labels) for name in content.images}
        else:
            labels = {}
            folders = {name.partition("/")[0] for name in [*content.images, *content.folders]}
            start = len(part) + 1 if folders == {part} else 0  # tar -cf train.tar train
            classes |= {name[start:].partition("/")[0] for name in content.folders} - {""}
        for name, where in content.images.items():
            name = f"{labels[name]}/{os.path.basename(name)}" if labels else name[start:]
            *folders, file = name.split("/")
            if folders:
                images.append((folders, file, (number, *where)))
    if not images:
        raise ValueError(
            f"{paths[0]} has no images in classes: make it of a folder with a folder per class "
            f"(tar -cf {part}.tar -C {part} .), or put a KEY.cls beside each KEY.jpg"
        )
    classes |= {folders[0] for folders, *_ in images}
    classes = sorted(classes, key=int if numbered else None)
    target = {name: i for i, name in enumerate(classes)}
    images.sort(key=lambda image: (target[image[0][0]], *image))
    names = ["/".join([*folders, file]) for folders, file, _ in images]
    return {
        "classes": np.array([os.fsencode(name) for name in classes]),
        "numbered": np.array(numbered),
        "names": np.array([os.fsencode(name) for name in names]),
        "targets": np.array([target[folders[0]] for folders, *_ in images]),
        "places": np.array([place for *_, place in images]),
    }


def _scan(path):
    """What an archive holds: images {name: (offset, size)}, folders and labels {KEY: bytes}."""
    print(f"indexing {path}, once", flush=True)
    contents = SimpleNamespace(images={}, folders=set(), labels={})
    size = os.path.getsize(path)
    with open(path, "rb") as file, tqdm(total=size, unit="B", unit_scale=True, disable=None) as bar:
        _add_members(contents, file, path, bar)
    return contents


def _add_members(contents, file, path, bar, folder="", base=0):
    """Add what a tar file holds, which begins at byte `base` of the one on disk.

    Of a file x in an archive C.tar in it the name is C/x. What begins with a dot does not count.
    """
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            while member := archive.next():
                archive.members.clear()  # else it keeps them all
                bar.update(base + member.offset - bar.n)
                name = os.path.join(folder, os.path.normpath(member.name).lstrip("/"))
                offset = base + member.offset_data
                stem, kind = os.path.splitext(name)
                kind = kind.lower()
                if "/." in f"/{name}":
                    pass
                elif member.isdir():
                    contents.folders.add(name)
                elif kind == ".tar" and member.isreg():
                    contents.folders.add(stem)
                    inner = archive.extractfile(member)
                    _add_members(contents, inner, f"{path}:{name}", bar, stem, offset)
                elif kind == ".cls" and member.isreg():
                    contents.labels[stem] = archive.extractfile(member).read(50)
                elif kind in IMG_EXTENSIONS and member.isreg():
                    contents.images[name] = offset, member.size
                elif kind in (".cls", *IMG_EXTENSIONS):
                    remedy = "pack with tar --dereference --hard-dereference"
                    raise ValueError(f"{path}: {name} is not a regular file: {remedy}")
            _check_end(file, archive.offset, path)
    except tarfile.TarError as error:
        raise ValueError(f"{path} is damaged, compressed, or no tar archive: {error}") from None


def _check_end(file, end, path):
    """tarfile takes damage for an archive's end, which is zeros alone, and so ends many a copy."""
    file.seek(end)
    rest = file.read(1 << 20)
    if len(rest) < 512 or any(rest):
        reason = f"incomplete, or several archives in one, or damaged, at byte {end}"
        raise ValueError(f"{path} is {reason}: copy it again, or join with tar --concatenate")


def _number(path, name, labels):
    """The class of an image as its KEY.cls has it."""
    key = os.path.splitext(name)[0]
    if key not in labels:
        raise ValueError(f"{path}: there is no {key}.cls beside {name}")
    text = labels[key].decode(errors="replace").strip()
    if not text.isdecimal():
        raise ValueError(f"{path}: {key}.cls is {text!r}, not the number of a class")
    return int(text)


def _devkit_labels(devkit, images):
    """{name: WordNet id} of ILSVRC2012's images to validate, as torchvision reads them."""
    try:
        with tempfile.TemporaryDirectory() as folder:  # torchvision writes beside the devkit
            os.symlink(os.path.abspath(devkit), os.path.join(folder, DEVKIT))
            imagenet.parse_devkit_archive(folder)
            _, labels = imagenet.load_meta_file(folder)
    except Exception as error:  # of many types; or there is no scipy
        raise ValueError(f"cannot read {devkit}: {error}") from None
    if len(images) != len(labels):
        raise ValueError(f"{devkit} has the classes of {len(labels)} images, not {len(images)}")
    return dict(zip(sorted(images), labels, strict=True))
