"""Images: what is read, what is refused, and how it is cropped."""

import importlib.util
import io
import multiprocessing
import os
import pickle
import shutil
import struct
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT
from PIL import Image, ImageOps
from sklearn.datasets import load_sample_images
from torchvision.transforms import v2

from common.images import (
    ImageFolder,
    centre_crop,
    digits_folder,
    image_folders,
    random_crop,
    read_image,
)

# scikit-learn's two photographs, 427 x 640 RGB.
CHINA, FLOWER = (Image.fromarray(image) for image in load_sample_images().images)


# Both decoders give the pixels of PIL.


def decoder_module(monkeypatch, *missing):
    """common/decode.py as it is imported where these modules are missing."""
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    spec = importlib.util.spec_from_file_location("fresh", ROOT / "common/decode.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def decoders(monkeypatch):
    both = decoder_module(monkeypatch), decoder_module(monkeypatch, "torchcodec.decoders")
    assert [module.DECODER for module in both] == ["torchcodec", "PIL"]
    return both


def files_of_every_kind():
    """{name: bytes} of what ImageNet, or a collection like it, holds."""
    china, flower = CHINA.resize((101, 67)), FLOWER.resize((101, 67))
    wide = np.random.default_rng(0).integers(0, 1 << 16, (50, 60)).astype(np.uint16)
    kinds = {f"{m} {f}": (flower.convert(m), f) for m in ("L", "RGB") for f in ("JPEG", "PNG")}
    kinds |= {"CMYK JPEG": (flower.convert("CMYK"), "JPEG"), "TIFF": (china, "TIFF")}
    kinds |= {f"{mode} PNG": (flower.convert(mode), "PNG") for mode in ("1", "P", "LA", "RGBA")}
    kinds |= {"WEBP": (china, "WEBP"), "GIF": (flower.convert("P"), "GIF")}
    kinds |= {"16 bits": (Image.fromarray(wide), "PNG"), "BMP": (flower, "BMP")}
    files = {}
    for name, (image, kind) in kinds.items():
        for orientation in range(9) if name in ("RGB JPEG", "RGB PNG", "WEBP") else [0]:
            exif = Image.Exif()
            exif[0x0112] = orientation
            file = io.BytesIO()
            image.save(file, kind, **({"exif": exif} if orientation else {}))
            files[f"{name} {orientation}"] = file.getvalue()
    for kind in ("MPO", "PNG"):  # a phone's picture with a second one: the first counts
        file = io.BytesIO()
        china.save(file, kind, save_all=True, append_images=[flower])
        files[f"two in a {kind}"] = file.getvalue()
    return files


def test_every_decoder_gives_the_same_pixels(decoders):
    fast, slow = decoders
    for name, data in files_of_every_kind().items():
        pixels = fast.decode(data)
        assert pixels.dtype == torch.uint8 and pixels.equal(slow.decode(data)), name
        with Image.open(io.BytesIO(data)) as file:
            expected = np.array(ImageOps.exif_transpose(file).convert("RGB")).transpose(2, 0, 1)
            if name.startswith("16"):  # PIL's own conversion cuts at 255
                expected = np.array(file)[None].repeat(3, 0) >> 8
        assert (pixels.numpy() == expected).all(), name


def test_damaged_images_are_errors(decoders):
    """Of bytes that were cut off or changed; no decoder crashes."""
    files = files_of_every_kind()
    for module in decoders:
        for data in (b"", b"hi", files["RGB JPEG 0"][:-99], files["RGB PNG 0"][:-99]):
            with pytest.raises((ValueError, OSError)):
                module.decode(data)
        for place in range(8, 1000, 7):
            for name in ("RGB PNG 0", "16 bits 0", "P PNG 0", "RGB JPEG 0", "WEBP 0"):
                data = bytearray(files[name])
                data[place % len(data)] ^= 0xFF
                try:
                    image = module.decode(bytes(data))
                except Exception as error:
                    assert str(error)
                else:
                    assert image.dtype == torch.uint8 and len(image) == 3


def tiff(pixels, kind=1):
    """A grey TIFF file of little-endian pixels; kind: 1 unsigned, 2 signed, 3 floating point."""
    height, width = pixels.shape
    data = pixels.tobytes()
    numbers = {256: width, 257: height, 258: 8 * pixels.itemsize, 259: 1, 262: 1, 273: 8, 277: 1}
    numbers |= {278: height, 279: len(data), 339: kind}
    fields = b"".join(struct.pack("<HHII", tag, 4, 1, x) for tag, x in numbers.items())
    head = struct.pack("<2sHI", b"II", 42, 8 + len(data))
    return head + data + struct.pack("<H", len(numbers)) + fields + struct.pack("<I", 0)


def retag(data, tag, old, new):
    """The same TIFF file with another number."""
    return data.replace(*(struct.pack("<HHII", tag, 4, 1, x) for x in (old, new)))


GREY = np.arange(256, dtype=np.uint8).reshape(8, 32)
DEEP = GREY.astype(np.uint16) * 257  # the same in 16 bits
TWELVE = DEEP.reshape(-1, 2).astype(int) >> 4  # pairs of 12 bits, in three bytes
PACKED = np.stack([TWELVE[:, 0] >> 4, TWELVE[:, 0] << 4 | TWELVE[:, 1] >> 8, TWELVE[:, 1]], axis=1)
RIGHT = {
    "8.tif": tiff(GREY),
    "8.pgm": b"P5 32 8 255\n" + GREY.tobytes(),
    "16.tif": tiff(DEEP),
    "16.ppm": b"P6 32 8 65535\n" + np.stack([DEEP] * 3, axis=-1).astype(">u2").tobytes(),
}
NO_BYTES = {
    "16.pgm": b"P5 32 8 65535\n" + DEEP.astype(">u2").tobytes(),
    "12.pgm": b"P5 32 8 4095\n" + (DEEP >> 4).astype(">u2").tobytes(),
    "12.tif": retag(retag(tiff(PACKED.astype(np.uint8).reshape(8, 48)), 258, 8, 12), 256, 48, 32),
    "32.tif": tiff(DEEP.astype(np.uint32) * 65537),
    "negative.tif": retag(tiff(0xFFFF - DEEP), 262, 1, 0),
    "signed.tif": tiff(DEEP.astype(np.int16), kind=2),
    "float.tif": tiff(GREY.astype(np.float32) / 255, kind=3),
}


@pytest.mark.parametrize("name", [*RIGHT, *NO_BYTES])
def test_pixels_of_any_depth_are_right_or_refused(tmp_path, name):
    path = tmp_path / name
    path.write_bytes((RIGHT | NO_BYTES)[name])
    with Image.open(path) as file:
        assert file.size == (32, 8)  # the file itself is whole
    try:
        image = read_image(str(path))
    except ValueError as error:
        assert name in NO_BYTES and str(error).startswith(f"cannot read image {path}: ")
    else:
        assert image.shape == (3, 8, 32) and image.dtype == torch.uint8
        assert np.abs(image.numpy().astype(int) - GREY).max() <= 1


def test_an_animation_is_refused_by_its_name(tmp_path):
    frames = [Image.fromarray(np.full((8, 8, 3), value, np.uint8)) for value in (0, 90, 200)]
    for name, kind in (("moving.jpg", "GIF"), ("pages.tif", "TIFF"), ("moving.webp", "WEBP")):
        frames[0].save(tmp_path / name, kind, save_all=True, append_images=frames[1:])
        with pytest.raises(
            ValueError, match=f"cannot read image {tmp_path}/{name}: it has several"
        ):
            read_image(str(tmp_path / name))
    frames[1].save(tmp_path / "still.jpg", "GIF")
    assert read_image(str(tmp_path / "still.jpg")).float().mean() == pytest.approx(90, abs=1)


# Cropping.


def as_tensor(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def test_crops_are_torchvisions_within_rounding():
    """The same part of the image and the same resizing: pixels differ by at most 2 of 255."""
    whole = as_tensor(CHINA)
    for size in (64, 224):
        pipeline = v2.Compose([v2.Resize(size * 256 // 224, antialias=True), v2.CenterCrop(size)])
        difference = centre_crop(whole, size).int() - pipeline(whole).int()
        assert difference.abs().max() <= 2
        for image in (whole, whole[:, 40:300, 100:350], whole[:, 5:105, 7:217]):
            height, width = image.shape[-2:]
            expected = v2.functional.resize(image, [size, size], antialias=True).int()
            how = {"scale": (1, 1), "ratio": (width / height, width / height)}  # all of it
            for flip in (0, 1):
                ours = random_crop(image, size, **how, flip=flip)
                assert ours.dtype == torch.uint8 and ours.shape == expected.shape
                assert (ours.int() - (expected.flip(-1) if flip else expected)).abs().max() <= 2


def test_random_crop_has_the_distribution_of_random_resized_crop():
    """Means of position and size, read from an image whose pixels are their coordinates."""
    y, x = torch.meshgrid(torch.linspace(0, 255, 300), torch.linspace(0, 255, 400), indexing="ij")
    image = torch.stack([y, x, x]).to(torch.uint8)

    def moments(crop):
        torch.manual_seed(0)
        crops = torch.stack([crop(image) for _ in range(1500)]).float()
        spread = crops.amax((2, 3)) - crops.amin((2, 3))
        return torch.cat([crops.mean((0, 2, 3)), spread.mean(0), spread.std(0)])

    ours = moments(lambda image: random_crop(image, 16, flip=0))
    theirs = moments(v2.RandomResizedCrop(16, antialias=True))
    assert (ours - theirs).abs().max() < 5, (ours, theirs)


def test_mirroring_and_images_of_any_shape():
    image = torch.arange(64, dtype=torch.uint8).expand(3, 64, 64)
    torch.manual_seed(0)
    falling = [bool((random_crop(image, 8)[0, 0].int().diff() < 0).any()) for _ in range(400)]
    assert 150 < sum(falling) < 250
    assert not any((random_crop(image, 8, flip=0)[0, 0].int().diff() < 0).any() for _ in range(50))
    for shape in ((9, 31), (640, 40), (40, 640), (1, 1)):
        for crop in (random_crop, centre_crop):
            assert crop(as_tensor(CHINA.resize(shape)), 24).shape == (3, 24, 24)


# Folders.


@pytest.fixture
def folder(tmp_path):
    """Two classes of two images each."""
    root = tmp_path / "photos/train"
    for name in ("cat/1.png", "cat/2.JPEG", "dog/1.png", "dog/deeper/späce 2.png"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        CHINA.resize((20, 16)).save(root / name)
    return root


EXPECTED = ["cat", "dog"], ["cat/1.png", "cat/2.JPEG", "dog/1.png", "dog/deeper/späce 2.png"]


def found(root):
    dataset = ImageFolder(str(root), None)
    names = [os.path.relpath(dataset.path(i), root) for i in range(len(dataset))]
    assert [dataset.classes[t] for t in dataset.targets] == [n.split("/")[0] for n in names]
    return dataset.classes, names


def test_only_regular_files_that_are_shown_count(folder):
    assert found(folder) == EXPECTED
    image = (folder / "cat/1.png").read_bytes()
    hidden = ".git/x", "cat/.ipynb_checkpoints/1.png", "dog/deeper/.thumbs/2.png", "cat/._1.png"
    for name in (*hidden, "cat/notes.txt", "notes.png"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(image)
    os.mkfifo(folder / "cat/pipe.jpg")
    (folder / "cat/to_pipe.jpg").symlink_to("pipe.jpg")
    (folder / "cat/to_device.jpg").symlink_to("/dev/zero")
    (folder / "dog/empty.jpg").mkdir()
    assert found(folder) == EXPECTED


@pytest.mark.parametrize("target", [".", "..", "cat", "dog/deeper", "link"])
@pytest.mark.parametrize("place", ["link", "dog/link"])
def test_no_image_counts_twice(folder, place, target):
    """A link that leads to where the walk comes by is an error, or counts nothing."""
    path = folder / place
    path.symlink_to(folder / target if target == "cat" else target)
    try:
        classes, names = found(folder)
    except (ValueError, OSError) as error:
        assert "photos" in str(error) and "\n" not in str(error)
        assert target != "." or f"{path} is a link to {path.parent}: " in str(error)
    else:  # a loop is no folder, and dog/dog/deeper is not there
        assert (classes, names) == EXPECTED


def test_links_to_images_elsewhere_are_followed(folder, tmp_path):
    """As one has them whose images lie on another disk; one that is not mounted is an error."""
    shutil.move(folder / "cat", tmp_path / "elsewhere")
    (folder / "cat").symlink_to(tmp_path / "elsewhere")
    shutil.move(folder / "dog/1.png", tmp_path / "1.png")
    (folder / "dog/1.png").symlink_to(tmp_path / "1.png")
    assert found(folder) == EXPECTED
    (folder / "cat/gone.jpg").symlink_to("/not/mounted/gone.jpg")
    with pytest.raises(ValueError, match=r"cat/gone\.jpg is a link to nothing"):
        found(folder)


def test_items_are_crops_of_one_size(folder):
    shutil.copytree(folder, folder.parent / "val")
    for dataset in image_folders(str(folder.parent), 32):
        for copy in (dataset, pickle.loads(pickle.dumps(dataset))):
            assert len(copy) == 4 and copy.classes == EXPECTED[0]
            for image, target in copy:
                assert image.shape == (3, 32, 32) and image.dtype == torch.uint8
                assert image.float().std() > 5 and type(target) is int
        dataset.transform = lambda image: image
        assert dataset[1][0].equal(read_image(dataset.path(1)))
    (folder / "cat/2.JPEG").write_bytes(b"hi")
    train_set, _ = image_folders(str(folder.parent), 32)
    with pytest.raises(ValueError, match=f"^cannot read image {folder}/cat/2.JPEG: its format"):
        train_set[1]


def move_down(root):
    for part in ("train", "val"):
        (root / part).rename(root / "all")
        (root / part).mkdir()
        (root / "all").rename(root / part / "all")


def empty(folder):
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        path.unlink()


ERRORS = [
    (lambda root: shutil.rmtree(root / "val"), "^no folder .*/val: --data needs train/ and val/ "),
    (lambda root: shutil.rmtree(root), "^no folder .*/train: --data needs train/ and val/ in it"),
    (
        lambda root: (root / "val/cat").rename(root / "val/cow"),
        "only one of train/ and val/: cat c",
    ),
    (lambda root: (root / "val/cow").mkdir(), "photos: classes in only one of .* val/: cow$"),
    (lambda root: shutil.rmtree(root / "val/cat"), "classes in only one of train/ and val/: cat$"),
    (lambda root: empty(root / "train/dog"), "^no images in .*/photos/train/dog$"),
    (lambda root: empty(root / "val"), r"^no images \(.jpg .* in the folders of .*/photos/val$"),
    (move_down, "^one class in .*/photos/train, all: one folder level too many\\?$"),
]


@pytest.mark.parametrize("spoil, message", ERRORS, ids=[message for _, message in ERRORS])
def test_folders_that_cannot_train(folder, spoil, message):
    shutil.copytree(folder, folder.parent / "val")
    spoil(folder.parent)
    with pytest.raises(ValueError, match=message) as error:
        image_folders(str(folder.parent), 32)
    assert "\n" not in str(error.value)


def test_a_class_without_images_to_validate(folder):
    shutil.copytree(folder, folder.parent / "val")
    empty(folder.parent / "val/cat")
    train_set, val_set = image_folders(str(folder.parent), 32)
    assert val_set.classes == train_set.classes and val_set.targets.tolist() == [1, 1]


# The digits.


def test_digits_are_written_once_by_processes_that_start_together(tmp_path):
    partial = tmp_path / "data/digits.partial/train/3"
    partial.mkdir(parents=True)
    (partial / "x.png").write_text("of a process that was killed")
    data = (str(tmp_path / "data"),)
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=digits_folder, args=data) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert sorted(os.listdir(tmp_path / "data")) == [".lock", "digits"]
    train_set, val_set = image_folders(str(tmp_path / "data/digits"), 64)
    assert (len(train_set), len(val_set)) == (1437, 360)
    assert train_set.classes == val_set.classes == list("0123456789")
