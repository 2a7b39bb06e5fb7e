"""Images in tar archives, read where they lie: in place of common/images.py, by one import line.

recipes/archives.diff changes that line. No script reads archives without it.
"""

import contextlib
import copy
import functools
import hashlib
import os
import re
import tarfile
import tempfile

import numpy as np
import torch
from torchvision.datasets import imagenet
from torchvision.datasets.folder import IMG_EXTENSIONS
from tqdm import tqdm

from common.images import (
    ImageFolder,
    PackedNames,
    RandomCrop,
    align_classes,
    centre_crop,
    describe_unread,
    is_image,
    sorted_classes,
)
from common.images import image_folders as folders_alone
from longrun.locks import locked_if_possible

ILSVRC = "ILSVRC2012_img_{}.tar"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
FORMAT = 4  # of the index
DEEPEST = 8  # archives in archives: ImageNet's are one deep


def image_folders(data, image_size, evaluate=False):
    """common.images.image_folders(), where each of train/ and val/ may be archives instead.

    They are train.tar, or train-000000.tar, train-000001.tar, ..., or ILSVRC2012's own.
    """
    if data is None:
        return folders_alone(data, image_size)
    middle = functools.partial(centre_crop, size=image_size)
    if evaluate and not os.path.isdir(f"{data}/train") and not find_archives(data, "train"):
        val_set = _images(data, "val", middle)
        return copy.copy(val_set), val_set
    sets = _images(data, "train", RandomCrop(image_size)), _images(data, "val", middle)
    return align_classes(*sets, data)


def _images(data, part, transform):
    if os.path.isdir(f"{data}/{part}"):
        return ImageFolder(f"{data}/{part}", transform)
    if archives := find_archives(data, part):
        return ImageArchive(archives, part, transform)
    names = f"{part}.tar, {part}-000000.tar, ... or {ILSVRC.format(part)}"
    raise ValueError(f"{data} has no folder {part} and no {names}, not compressed")


class ImageArchive(ImageFolder):
    """The images in tar archives, as an ImageFolder has those of the unpacked archives.

    archives: their paths; part: train or val. Raises ValueError as load_index() does and, with
    archive and member, for what cannot be decoded.
    """

    def __init__(self, archives, part, transform):
        self.archives, self.transform = archives, transform
        index = load_index(archives, part)
        self.classes = [os.fsdecode(name) for name in index["classes"]]
        self.paths = PackedNames(index["names"].tobytes().split(b"\0"))
        self.targets, self.places = index["targets"], index["places"]
        self.may_lack_classes = bool(index["numbered"])  # a number without an image is not seen
        self.skipped = str(index["skipped"])

    def path(self, index):
        archive = self.archives[self.places[index, 0]]
        return f"{archive}:{os.fsdecode(self.paths[index])}"

    def read(self, index):
        archive, offset, size = self.places[index].tolist()
        return read_member(self.archives[archive], offset, size)


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
    are archives CLASS.tar. `classes`: names; `numbered`: whether they are those in KEY.cls;
    `skipped`: in words, what else there is. For each of n images, as arrays: `names`, all bytes of
    CLASS/NAME with zeros between, `targets` [n] and `places` [n, 3]: archive (an index of `paths`),
    offset and size in bytes, for read_member().

    It is made once and kept in a cache folder below TORCH_HOME. Of several processes that need it,
    one makes it and the others wait. Raises ValueError for archives that are incomplete, damaged or
    have no classes, and where the cache cannot be written.
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
    with locked_if_possible(f"{place}.lock"):
        with contextlib.suppress(Exception), np.load(place) as file:  # none yet, or it is damaged
            return dict(file)
        index = make_index(paths, part)
        partial = f"{place}.{os.getpid()}"
        try:
            with open(partial, "wb") as file:
                np.savez(file, **index)
            os.replace(partial, place)
        finally:
            with contextlib.suppress(OSError):  # it is there after an error alone
                os.remove(partial)
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
    images, classes, kinds, others = [], set(), set(), []
    for number, path in enumerate(paths):
        members, texts, more = _scan(path)
        others += more
        files = [name for name in members if not name.endswith("/")]
        labels = _numbers(path, files, texts)
        if files:
            kinds.add(bool(labels))  # whether the classes are those in KEY.cls
        if os.path.basename(path) == ILSVRC.format("val"):
            labels = _devkit_labels(path, {*files})
        tops = {name.partition("/")[0] for name in members}
        start = len(part) + 1 if tops == {part} else 0  # tar -cf train.tar train
        for name in labels or members:
            *folders, file = name[start:].split("/")
            folders = [labels[name]] if labels else folders
            classes.update(folders[:1])
            if folders and file:
                images.append((folders, file, (number, *members[name])))
            elif file:
                others.append(file)
    if len(kinds) > 1:
        raise ValueError(f"{paths[0]} and those that follow: only some have a KEY.cls for KEY.jpg")
    if not images:
        raise ValueError(
            f"{paths[0]} has no images in classes: make it of a folder with a folder per class "
            f"(tar -cf {part}.tar -C {part} .), or put a KEY.cls beside each KEY.jpg"
        )
    numbered = kinds == {True}
    classes = sorted_classes(classes)
    target = {name: i for i, name in enumerate(classes)}
    images.sort(key=lambda image: (target[image[0][0]], *image))
    names = ["/".join([*folders, file]) for folders, file, _ in images]
    return {
        "skipped": np.array(describe_unread(others, " to ".join([paths[0], *paths[1:][-1:]]))),
        "classes": np.array([os.fsencode(name) for name in classes]),
        "numbered": np.array(numbered),
        "names": np.frombuffer(os.fsencode("\0".join(names)), np.uint8),
        "targets": np.array([target[folders[0]] for folders, *_ in images]),
        "places": np.array([place for *_, place in images]),
    }


def _scan(path):
    """What is in an archive: ({name: (offset, size)} of images and folders, texts, others).

    texts: {KEY: text in KEY.cls}; others: names of other files, but for a WebDataset's metadata.
    """
    print(f"indexing {path!r}, once", flush=True)
    members, texts, others = {}, {}, []
    size = os.path.getsize(path)
    bar = tqdm(total=size, unit="B", unit_scale=True, disable=None)
    with open(path, "rb") as file, bar:
        for name, offset, length in _members(file, path, size):
            bar.update(offset - bar.n)
            key, kind = os.path.splitext(name)
            if name.endswith("/"):
                members[name] = offset, length
            elif kind.lower() == ".cls":
                text = os.pread(file.fileno(), min(length, 50), offset)
                text = text.decode(errors="replace").strip()
                if texts.setdefault(key, text) != text:
                    raise ValueError(f"{path}: {key}.cls is {texts[key]!r} and {text!r}")
            elif name in members:
                raise ValueError(f"{path} has {name!r} twice: make it again, with one of them")
            elif is_image(name):
                members[name] = offset, length
            elif kind.lower() not in (".json", ".txt"):
                others.append(name)
    return members, texts, others


def _members(file, path, size, folder="", base=0, depth=0):
    """Yield (name, offset, size) of all files and folders in a tar file of so many bytes.

    It begins at byte `base` of the file on disk, which the offsets count from. Archives in it are
    folders: of a file x in C.tar the name is C/x. Names of folders end in a slash. What begins with
    a dot does not count.
    """
    for archive, member in _headers(file, path):
        name = os.path.join(folder, os.path.normpath(member.name).lstrip("/"))
        stem, kind = os.path.splitext(name)
        if "\0" in name:  # a pax header can hold it, a file system cannot
            raise ValueError(f"{path}: {name!r} has a zero byte in its name: pack it again")
        offset = base + member.offset_data
        if member.issparse():
            raise ValueError(f"{path}: {name!r} is sparse: pack without --sparse")
        if not 0 <= member.size <= size - member.offset_data:  # tarfile would believe it
            raise ValueError(f"{path} is damaged or incomplete: {name!r} is beyond its end")
        if "/." in f"/{name}":
            continue
        if member.isdir():
            yield f"{name}/", offset, 0
        elif not member.isreg():
            if kind.lower() in (".cls", ".tar", *IMG_EXTENSIONS):
                remedy = "pack with tar --dereference --hard-dereference"
                raise ValueError(f"{path}: {name!r} is not a regular file: {remedy}")
        elif kind.lower() == ".tar":
            if depth == DEEPEST:
                raise ValueError(f"{path}: more than {DEEPEST} archives in each other: unpack some")
            yield f"{stem}/", offset, 0
            inner = archive.extractfile(member)
            yield from _members(inner, f"{path}:{name}", member.size, stem, offset, depth + 1)
        else:
            yield name, offset, member.size


def _headers(file, path):
    """Yield (archive, member) for all members of a tar file. Raises ValueError where it is none."""
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            while member := archive.next():
                archive.members.clear()  # else it keeps them all
                yield archive, member
    except (tarfile.TarError, ValueError, MemoryError) as error:  # a name of -1 or 2**60 bytes
        reason = str(error) or "not enough memory for a name"
        raise ValueError(f"{path} is damaged, compressed, or no tar archive: {reason}") from None
    _check_end(file, archive.offset, path)


def _check_end(file, end, path):
    """tarfile takes damage for the end. The real end is zeros alone; a half copy has none."""
    file.seek(end)
    rest = file.read(512)
    good = len(rest) == 512
    while good and rest:
        good, rest = not rest.strip(b"\0"), file.read(1 << 20)
    if not good:
        reason = f"incomplete, or several archives in one, or damaged, at byte {end}"
        raise ValueError(f"{path} is {reason}: copy it again, or join with tar --concatenate")


def _numbers(path, images, texts):
    """{name: number of the class} of images as their KEY.cls have it; {} if there are none."""
    keys = {name: os.path.splitext(name)[0] for name in images}
    if texts.keys().isdisjoint(keys.values()):
        return {}
    for key in keys.values():
        if not (texts.get(key, "").isdecimal() and len(texts[key]) < 19):
            wrong = f"is {texts[key]!r}" if key in texts else "is missing"
            raise ValueError(f"{path}: {key}.cls {wrong}: it must have the number of a class")
    return {name: str(int(texts[key])) for name, key in keys.items()}


def _devkit_labels(path, images):
    """{name: WordNet id} of ILSVRC2012's images to validate, of the devkit beside their archive.

    By the number in ILSVRC2012_val_00000001.JPEG. Raises ValueError unless each is there once.
    """
    root = os.path.dirname(path)
    devkit = os.path.join(root, DEVKIT)
    if not os.path.exists(devkit):
        raise ValueError(f"no {devkit}: it has the classes of the images in {path}")
    with tempfile.TemporaryDirectory() as folder:  # torchvision writes beside the devkit
        try:
            os.symlink(os.path.abspath(devkit), os.path.join(folder, DEVKIT))
            imagenet.parse_devkit_archive(folder)
            _, labels = imagenet.load_meta_file(folder)
        except Exception as error:  # of many types; or there is no scipy
            reason = str(error).replace(folder, root)
            raise ValueError(f"cannot read {devkit}: {reason}") from None
    label_of = {f"ILSVRC2012_val_{i:08d}.JPEG": label for i, label in enumerate(labels, 1)}
    for wrong, names in (
        ("lacks", label_of.keys() - images),
        ("has also", images - label_of.keys()),
    ):
        if names:
            some = " ".join(map(repr, sorted(names)[:5]))
            raise ValueError(f"{path} {wrong} {len(names)} images of {len(labels)}, such as {some}")
    return label_of
