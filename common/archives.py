"""Images in tar archives, read where they lie."""

import contextlib
import functools
import hashlib
import os
import re
import tarfile
import tempfile

import numpy as np
import torch
from filelock import FileLock
from torchvision.datasets import imagenet
from torchvision.datasets.folder import IMG_EXTENSIONS
from tqdm import tqdm

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
    devkit = os.path.join(os.path.dirname(paths[0]), DEVKIT)
    files = [*paths, devkit] if os.path.exists(devkit) else paths
    key = [(os.path.realpath(f), os.stat(f).st_size, os.stat(f).st_mtime_ns) for f in files]
    key = hashlib.sha256(repr([FORMAT, IMG_EXTENSIONS, part, key]).encode()).hexdigest()
    folder = os.path.join(os.path.dirname(torch.hub.get_dir()), "archives")
    place = f"{folder}/{part}-{key[:16]}.npz"
    try:
        os.makedirs(folder, exist_ok=True)
        open(f"{place}.lock", "a").close()
    except OSError as error:
        raise ValueError(f"{error}: set TORCH_HOME to a folder that can be written") from None
    with FileLock(f"{place}.lock"):
        with contextlib.suppress(Exception), np.load(place) as file:  # none yet, or it is damaged
            return dict(file)
        index = make_index(paths, part)
        partial = f"{place}.{os.getpid()}"
        with open(partial, "wb") as file:
            np.savez(file, **index)
        os.replace(partial, place)
        return index


def read_member(path, offset, size):
    """The bytes of a member: fewer where the archive has become shorter."""
    # With its offset: forked workers share the file, and with it the file's position.
    return os.pread(_open(path).fileno(), size, offset)


@functools.lru_cache(maxsize=256)  # a process may often open 1024
def _open(path):
    return open(path, "rb", buffering=0)


def make_index(paths, part):
    """Make what load_index() returns. Raises ValueError.

    Sorted as image folders are: the files of a folder by name, then its folders.
    """
    images, classes, kinds = [], set(), set()
    for number, path in enumerate(paths):
        members, texts = _scan(path)
        files = [name for name in members if not name.endswith("/")]
        labels = _numbers(path, files, texts)
        if files:
            kinds.add(bool(labels))  # whether the classes are those in KEY.cls
        if os.path.basename(path) == ILSVRC.format("val"):
            labels = _devkit_labels(path, files)
        tops = {name.partition("/")[0] for name in members}
        start = len(part) + 1 if tops == {part} else 0  # tar -cf train.tar train
        for name in labels or members:
            *folders, file = name[start:].split("/")
            folders = [labels[name]] if labels else folders
            classes.update(folders[:1])
            if folders and file:
                images.append((folders, file, (number, *members[name])))
    if len(kinds) > 1:
        raise ValueError(f"{paths[0]} and those that follow: only some have a KEY.cls for KEY.jpg")
    if not images:
        raise ValueError(
            f"{paths[0]} has no images in classes: make it of a folder with a folder per class "
            f"(tar -cf {part}.tar -C {part} .), or put a KEY.cls beside each KEY.jpg"
        )
    numbered = kinds == {True}
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
    """({name: (offset, size)} of its images and folders, {KEY: text in KEY.cls}) of an archive."""
    print(f"indexing {path}, once", flush=True)
    members, texts = {}, {}
    bar = tqdm(total=os.path.getsize(path), unit="B", unit_scale=True, disable=None)
    with open(path, "rb") as file, bar:
        for name, offset, size in _members(file, path):
            bar.update(offset - bar.n)
            key, kind = os.path.splitext(name)
            if kind.lower() == ".cls":
                text = os.pread(file.fileno(), min(size, 50), offset)
                texts[key] = text.decode(errors="replace").strip()
            else:
                members[name] = offset, size
    return members, texts


def _members(file, path, folder="", base=0):
    """Yield (name, offset, size) of all images, KEY.cls and folders in a tar file.

    It begins at byte `base` of the file on disk, which the offsets count from. Archives in it are
    folders: of a file x in C.tar the name is C/x. Names of folders end in a slash. What begins
    with a dot does not count.
    """
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            while member := archive.next():
                archive.members.clear()  # else it keeps them all
                name = os.path.join(folder, os.path.normpath(member.name).lstrip("/"))
                offset = base + member.offset_data
                stem, kind = os.path.splitext(name)
                kind = kind.lower()
                if "/." in f"/{name}":
                    continue
                if member.isdir():
                    yield f"{name}/", offset, 0
                elif kind == ".tar" and member.isreg():
                    yield f"{stem}/", offset, 0
                    inner = archive.extractfile(member)
                    yield from _members(inner, f"{path}:{name}", stem, offset)
                elif kind in (".cls", *IMG_EXTENSIONS):
                    if not member.isreg():
                        remedy = "pack with tar --dereference --hard-dereference"
                        raise ValueError(f"{path}: {name} is not a regular file: {remedy}")
                    yield name, offset, member.size
            _check_end(file, archive.offset, path)
    except tarfile.TarError as error:
        raise ValueError(f"{path} is damaged, compressed, or no tar archive: {error}") from None


def _check_end(file, end, path):
    """tarfile takes damage for the end. The real end is zeros alone; a half copy has none."""
    file.seek(end)
    rest = file.read(1 << 20)
    if len(rest) < 512 or any(rest):
        reason = f"incomplete, or several archives in one, or damaged, at byte {end}"
        raise ValueError(f"{path} is {reason}: copy it again, or join with tar --concatenate")


def _numbers(path, images, texts):
    """{name: number of the class} of images as their KEY.cls have it; {} if there are none."""
    keys = {name: os.path.splitext(name)[0] for name in images}
    if texts.keys().isdisjoint(keys.values()):
        return {}
    for key in keys.values():
        if not texts.get(key, "").isdecimal():
            wrong = f"is {texts[key]!r}" if key in texts else "is missing"
            raise ValueError(f"{path}: {key}.cls {wrong}: it must have the number of a class")
    return {name: str(int(texts[key])) for name, key in keys.items()}


def _devkit_labels(path, images):
    """{name: WordNet id} of ILSVRC2012's images to validate, of the devkit beside their archive."""
    devkit = os.path.join(os.path.dirname(path), DEVKIT)
    if not os.path.exists(devkit):
        raise ValueError(f"no {devkit}: it has the classes of the images in {path}")
    try:
        with tempfile.TemporaryDirectory() as folder:  # torchvision writes beside the devkit
            os.symlink(os.path.abspath(devkit), os.path.join(folder, DEVKIT))
            imagenet.parse_devkit_archive(folder)
            _, labels = imagenet.load_meta_file(folder)
        return dict(zip(sorted(images), labels, strict=True))
    except Exception as error:  # of many types; or there is no scipy
        raise ValueError(f"cannot read {devkit}: {error}") from None
