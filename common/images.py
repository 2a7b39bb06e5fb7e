"""Images from folders or archives as uint8 tensors, cropped to one size."""

import functools
import math
import os

import numpy as np
import torch
from filelock import FileLock
from PIL import Image
from torch.nn.functional import interpolate
from torch.utils.data import Dataset
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms.v2 import functional as F

from .archives import find_archives, load_index, read_member
from .decode import decode


def image_folders(data, image_size, evaluate=False):
    """(train_set, val_set) of `data`/train and `data`/val; of the built-in digits if it is None.

    Each is a folder or, where there is none, an archive or several. Both have the classes of the
    training images, in their order. Raises ValueError where they are not what training needs.
    """
    augment = RandomCrop(image_size)
    if data is None:
        data = digits_folder()
        augment = RandomCrop(image_size, scale=(0.5, 1.0), flip=0)  # a mirrored 2 is no 2
    middle = functools.partial(centre_crop, size=image_size)
    train_set, val_set = _images(data, "train", augment), _images(data, "val", middle)
    classes = train_set.classes
    if len(classes) == 1:
        raise ValueError(f"one class in {data}/train, {classes[0]}: one folder level too many?")
    unmatched = {*classes} ^ {*val_set.classes}
    if val_set.may_lack_classes:
        unmatched -= {*classes}
    if unmatched:
        names = " ".join(sorted(unmatched)[:9])
        raise ValueError(f"{data}: classes in only one of train/ and val/: {names}")
    counts = np.bincount(train_set.targets, minlength=len(classes))
    if not counts.all():
        raise ValueError(f"no images in {data}/train/{classes[counts.argmin()]}")
    # Folders are sorted by name, 10 before 2, and the numbers in an archive's KEY.cls as numbers.
    place = {name: target for target, name in enumerate(classes)}
    val_set.targets = np.array([place[name] for name in val_set.classes])[val_set.targets]
    val_set.classes = classes
    return train_set, val_set


def _images(data, part, transform):
    root = f"{data}/{part}"
    archives = [] if os.path.isdir(root) else find_archives(data, part)
    return ImageArchive(archives, part, transform) if archives else ImageFolder(root, transform)


class ImageFolder(Dataset):
    """The images below `root`, which holds a folder per class.

    An item is (transform(image), target): image uint8 [3, height, width], target the index of its
    class in `classes`. If the transform is a RandomCrop, no more than the crop is decoded where the
    decoder can. What begins with a dot does not count. Raises ValueError where there are no images
    and, with the path, for what cannot be decoded; OSError for a folder that cannot be read.
    """

    may_lack_classes = False

    def __init__(self, root, transform):
        self.root, self.transform = root, transform
        if not os.path.isdir(root):
            needs = "--data needs train/ and val/ in it, or train.tar and val.tar, not compressed"
            raise ValueError(f"no folder {root}: {needs}")
        folders = [entry.name for entry in os.scandir(root) if entry.is_dir()]
        self.classes = sorted(name for name in folders if not name.startswith("."))
        if not self.classes:
            raise ValueError(f"no class folders in {root}: put its images into {root}/CLASS/")
        files = [_image_files(root, name) for name in self.classes]
        if not any(files):
            raise ValueError(f"no images ({' '.join(IMG_EXTENSIONS)}) in the folders of {root}")
        # As arrays: a million small objects would be copied into every worker, as their reference
        # counts are written to.
        self.paths = np.array([os.fsencode(file) for part in files for file in part])
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
            raise ValueError(f"cannot read image {self.path(index)}: {error}") from None
        image = crop.resize(image) if crop else self.transform(image)
        return image, int(self.targets[index])


class ImageArchive(ImageFolder):
    """The images in tar archives, as an ImageFolder has those of the unpacked archives.

    archives: their paths; part: train or val. Raises ValueError as load_index() does and, with
    archive and member, for what cannot be decoded.
    """

    def __init__(self, archives, part, transform):
        self.archives, self.transform = archives, transform
        index = load_index(archives, part)
        self.classes = [os.fsdecode(name) for name in index["classes"]]
        self.paths, self.targets, self.places = index["names"], index["targets"], index["places"]
        self.may_lack_classes = bool(index["numbered"])  # a number without an image is not seen

    def path(self, index):
        archive = self.archives[self.places[index, 0]]
        return f"{archive}:{os.fsdecode(self.paths[index])}"

    def read(self, index):
        archive, offset, size = self.places[index].tolist()
        return read_member(self.archives[archive], offset, size)


def _image_files(root, folder):
    """The paths of all images below root/folder, relative to root: of each folder its files first.

    Links are followed; OSError where they lead round in a circle.
    """
    entries = [entry for entry in os.scandir(os.path.join(root, folder)) if entry.name[0] != "."]
    entries.sort(key=lambda entry: entry.name)
    names = [entry.name for entry in entries if not entry.is_dir()]
    files = [f"{folder}/{name}" for name in names if name.lower().endswith(IMG_EXTENSIONS)]
    for entry in entries:
        if entry.is_dir():
            files += _image_files(root, f"{folder}/{entry.name}")
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
    return F.center_crop(F.resize(image, [size * 256 // 224], antialias=True), [size, size])


def digits_folder(parent="data"):
    """1797 handwritten digits of scikit-learn as 64 x 64 PNGs in train/ and val/; returns the path.

    Written at first use, whole or not at all, by one of the processes that ask at the same time.
    Raises ValueError where scikit-learn is missing.
    """
    root = os.path.join(parent, "digits")
    os.makedirs(parent, exist_ok=True)
    with FileLock(os.path.join(parent, ".lock")):
        if os.path.isdir(root):
            return root
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise ValueError("no --data: the digits need pip install scikit-learn") from None
        partial = root + ".partial"
        for i, (pixels, target) in enumerate(zip(*load_digits(return_X_y=True), strict=True)):
            folder = os.path.join(partial, "train" if i % 5 else "val", str(target))
            os.makedirs(folder, exist_ok=True)
            image = Image.fromarray((pixels.reshape(8, 8) * 15.9375).astype(np.uint8))
            image = image.resize((64, 64), Image.Resampling.BICUBIC)
            image.save(os.path.join(folder, f"{i:04d}.png"))
        os.rename(partial, root)
    return root
