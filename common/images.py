"""Images from folders, checked, as uint8 tensors cropped to one size; the built-in digits."""

import copy
import functools
import math
import os
import shutil
import tempfile
from unicodedata import normalize

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import interpolate
from torch.utils.data import Dataset
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms.v2 import functional as F

from .decode import DECODER, decode


def image_folders(data, image_size, evaluate=False):
    """(train_set, val_set) of `data`/train and `data`/val; of the built-in digits if it is None.

    Both have the classes of the training images, in their order. With `evaluate` a missing train/
    is no error: both are then those of val/. Raises ValueError for images that cannot be used.
    """
    augment = RandomCrop(image_size)
    if data is None:
        data = make_digits()
        augment = RandomCrop(image_size, scale=(0.5, 1.0), flip=0)  # a mirrored 2 is no 2
    middle = functools.partial(centre_crop, size=image_size)
    if evaluate and not os.path.isdir(f"{data}/train"):
        val_set = ImageFolder(f"{data}/val", middle)
        return copy.copy(val_set), val_set  # two: a script may give the first a transform
    sets = ImageFolder(f"{data}/train", augment), ImageFolder(f"{data}/val", middle)
    return align_classes(*sets, data)


def align_classes(train_set, val_set, data):
    """(train_set, val_set), the targets of val_set numbered as those of train_set.

    Raises ValueError where their classes differ, one has no images in train/, or there is but one.
    """
    classes = train_set.classes
    if len(classes) == 1:
        raise ValueError(f"one class in {data}/train, {classes[0]!r}: one folder level too many?")
    only = {"train": {*classes} - {*val_set.classes}, "val": {*val_set.classes} - {*classes}}
    if val_set.may_lack_classes:
        only["train"] = set()
    if names := only["train"] | only["val"]:
        # Two ways to write é, as Macs do and others, look alike: then \u0301 is shown.
        show = ascii if len({normalize("NFC", name) for name in names}) < len(names) else repr
        lists = {part: ", ".join(map(show, sorted(found)[:9])) for part, found in only.items()}
        told = [f"only in {part}/: {text}" for part, text in lists.items() if text]
        raise ValueError(f"{data}: classes {'; '.join(told)}")
    counts = np.bincount(train_set.targets, minlength=len(classes))
    if not counts.all():
        message = f"no images in {data}/train/{classes[counts.argmin()]}"
        raise ValueError(f"{message}; not read: {train_set.skipped}".removesuffix("; not read: "))
    place = {name: target for target, name in enumerate(classes)}
    val_set.targets = np.array([place[name] for name in val_set.classes])[val_set.targets]
    val_set.classes = classes
    return train_set, val_set


class ImageFolder(Dataset):
    """The images below `root`, which holds a folder per class.

    An item is (transform(image), target): image uint8 [3, height, width], target the index of its
    class in `classes`: sorted by name, or as numbers where all are. If the transform is a
    RandomCrop, no more than the crop is decoded where the decoder can. What begins with a dot does
    not count. `skipped` says in words how many other files there are. Raises ValueError where there
    are no images and, with the path, for what cannot be decoded; OSError for a folder that cannot
    be read.
    """

    may_lack_classes = False
    decoder = DECODER

    def __init__(self, root, transform):
        self.root, self.transform = root, transform
        if not os.path.isdir(root):
            raise ValueError(f"no folder {root}: train/ and val/ must hold a folder per class")
        entries = [entry for entry in os.scandir(root) if not entry.name.startswith(".")]
        self.classes = sorted_classes(entry.name for entry in entries if entry.is_dir())
        if not self.classes:
            raise ValueError(f"no class folders in {root}: put its images into {root}/CLASS/")
        found = [_files(root, name) for name in self.classes]
        files = [[x for x in part if is_image(x)] for part in found]
        others = [x for part in found for x in part if not is_image(x)]
        others += [entry.name for entry in entries if not entry.is_dir()]
        self.skipped = describe_unread(others, root)
        if not any(files):
            kinds = " ".join(IMG_EXTENSIONS)
            message = f"no images ({kinds}) in the folders of {root}; not read: {self.skipped}"
            raise ValueError(message.removesuffix("; not read: "))
        self.paths = PackedNames(os.fsencode(file) for part in files for file in part)
        self.targets = np.repeat(np.arange(len(files)), [len(part) for part in files])

    def __len__(self):
        return len(self.targets)

    def path(self, index):
        return os.path.join(self.root, os.fsdecode(self.paths[index]))

    def read(self, index):
        with open(self.path(index), "rb") as file:
            return file.read()

    def __getitem__(self, index):
        crop = self.transform if type(self.transform) is RandomCrop else None
        try:
            image = decode(self.read(index), crop and crop.choose_part)
        except Exception as error:
            raise ValueError(f"cannot read image {self.path(index)!r}: {error}") from None
        image = crop.resize(image) if crop else self.transform(image)
        return image, int(self.targets[index])


class PackedNames:
    """A list of bytes that workers share: as two arrays, for a million small objects would be
    copied into every worker, as their reference counts are written to.
    """

    def __init__(self, names):
        names = list(names)
        self.bytes = np.frombuffer(b"".join(names), np.uint8)
        self.ends = np.cumsum([len(name) for name in names], dtype=np.int64)

    def __len__(self):
        return len(self.ends)

    def __getitem__(self, index):
        start = self.ends[index - 1] if index else 0
        return self.bytes[start : self.ends[index]].tobytes()

    def __iter__(self):
        data, start = self.bytes.tobytes(), 0
        for end in self.ends.tolist():
            yield data[start:end]
            start = end


def sorted_classes(names):
    """Names of classes, sorted: as numbers where all are, so that 10 comes after 9."""
    names = sorted(names)
    return sorted(names, key=int) if all(x.isascii() and x.isdecimal() for x in names) else names


def is_image(name):
    return name.lower().endswith(IMG_EXTENSIONS)


def describe_unread(names, place):
    """How many files are not read, where, and of which endings, in words; "" for none.

    Images among them lie beside the folders of the classes, not in one.
    """
    kinds = {os.path.splitext(name)[1].lower() or "no ending" for name in names}
    if any(map(is_image, names)):
        kinds = kinds.difference(IMG_EXTENSIONS) | {"images in no class"}
    count = f"{len(names)} file{'s' * (len(names) > 1)}"
    return f"{count} in {place} ({', '.join(sorted(kinds)[:9])})" if names else ""


def _files(root, folder):
    """The paths of all files below root/folder, relative to root: of each folder its files first.

    Links are followed; OSError where they lead round in a circle.
    """
    entries = [entry for entry in os.scandir(os.path.join(root, folder)) if entry.name[0] != "."]
    entries.sort(key=lambda entry: entry.name)
    files = [f"{folder}/{entry.name}" for entry in entries if not entry.is_dir()]
    for entry in entries:
        if entry.is_dir():
            files += _files(root, f"{folder}/{entry.name}")
    return files


class RandomCrop:
    """Crop a random part of an image, resize it to [3, size, size], and mirror it at random.

    `scale` bounds the part's share of the area, `ratio` its width / height; `flip` is the
    probability of the mirror image. This is the crop of "Going Deeper with Convolutions" (Szegedy
    et al., 2014) as torchvision's RandomResizedCrop has it, whose get_params() would take a
    fortieth of a worker's time.
    """

    def __init__(self, size, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3), flip=0.5):
        self.size, self.scale, self.ratio, self.flip = size, scale, ratio, flip

    def __call__(self, image):
        top, left, height, width = self.choose_part(*image.shape[1:])
        return self.resize(image[:, top : top + height, left : left + width])

    def choose_part(self, height, width):
        """The part of an image of this size: (top, left, height, width) in pixels."""
        scale, ratio = self.scale, self.ratio
        for x, y in torch.rand(10, 2).tolist():
            area = height * width * (scale[0] + x * (scale[1] - scale[0]))
            aspect = ratio[0] * (ratio[1] / ratio[0]) ** y
            w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < w <= width and 0 < h <= height:
                break
        else:  # a very long or high image: nearly all of it
            w, h = min(width, round(height * ratio[1])), min(height, round(width / ratio[0]))
        y, x = torch.rand(2).tolist()
        return int(y * (height - h + 1)), int(x * (width - w + 1)), h, w

    def resize(self, part):
        # Dense and as r g b r g b: torch then resizes bytes in half the time, and the batch that
        # the worker stacks of such images takes an eighth. contiguous(channels_last) would not do:
        # for a batch of one it may leave strides from which torch makes r r g g b b.
        part = part.permute(1, 2, 0).contiguous()[None].permute(0, 3, 1, 2)
        size = (self.size, self.size)
        image = interpolate(part, size, mode="bilinear", antialias=True)[0]
        return image.flip(-1) if torch.rand(()) < self.flip else image


def centre_crop(image, size):
    """The middle [3, size, size] of the image, after its shorter side became size * 256 / 224."""
    most = 4 * min(image.shape[1:])
    if max(image.shape) > most:  # a strip of 16 x 20000, resized, would take half a gigabyte
        image = F.center_crop(image, [min(side, most) for side in image.shape[1:]])
    return F.center_crop(F.resize(image, [size * 256 // 224], antialias=True), [size, size])


def make_digits(parent="data"):
    """1797 handwritten digits of scikit-learn as 64 x 64 PNGs in train/ and val/; returns the path.

    Written at first use, whole or not at all; of processes that ask together, one is the first.
    Raises ValueError where scikit-learn is missing.
    """
    root = os.path.join(parent, "digits")
    if os.path.isdir(root):
        return root
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ValueError("the built-in digits need pip install scikit-learn") from None
    os.makedirs(parent, exist_ok=True)
    partial = tempfile.mkdtemp(prefix="digits.", dir=parent)  # of this process alone
    os.chmod(partial, 0o755)  # mkdtemp lets nobody else read
    for i, (pixels, target) in enumerate(zip(*load_digits(return_X_y=True), strict=True)):
        folder = os.path.join(partial, "train" if i % 5 else "val", str(target))
        os.makedirs(folder, exist_ok=True)
        image = Image.fromarray((pixels.reshape(8, 8) * 15.9375).astype(np.uint8))
        image = image.resize((64, 64), Image.Resampling.BICUBIC)
        image.save(os.path.join(folder, f"{i:04d}.png"))
    try:
        os.rename(partial, root)
    except OSError:  # another process was faster: it is there
        shutil.rmtree(partial)
    return root
