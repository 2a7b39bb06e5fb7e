"""Images: what is read, what is refused, and how it is cropped."""

import contextlib
import importlib.util
import io
import itertools
import os
import re
import shutil
import struct
import sys
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import ROOT
from PIL import Image, ImageOps
from sklearn.datasets import load_sample_images
from torchvision.transforms import v2

from common import images
from common.images import ImageFolder, RandomCrop, centre_crop, image_folders, make_digits
from tests.unit.child import forked

# scikit-learn's two photographs, 427 x 640 RGB.
CHINA, FLOWER = (Image.fromarray(image) for image in load_sample_images().images)


def as_tensor(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


# All decoders give the pixels of PIL.


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
    """nvImageCodec before PIL, and PIL alone."""
    found = [decoder_module(monkeypatch), decoder_module(monkeypatch, "nvidia.nvimgcodec")]
    assert [module.DECODER for module in found] == ["nvImageCodec", "PIL"]
    return found


def saved(image, kind, **more):
    """The bytes of a file."""
    file = io.BytesIO()
    image.save(file, kind, **more)
    return file.getvalue()


def files_of_every_kind():
    """{name: bytes} of what ImageNet, or a collection like it, holds."""
    small = FLOWER.resize((101, 67))
    plain = saved(small, "JPEG")
    wide = np.random.default_rng(0).integers(0, 1 << 16, (50, 60)).astype(np.uint16)
    kinds = [(mode, "JPEG") for mode in ("L", "RGB", "CMYK")]
    kinds += [(mode, "PNG") for mode in ("1", "L", "P", "RGB", "LA", "RGBA")]
    kinds += [("P", "GIF"), ("RGB", "TIFF"), ("RGB", "WEBP"), ("RGB", "BMP")]
    files = {f"{mode} {kind}": saved(small.convert(mode), kind) for mode, kind in kinds}
    files["16 bits"] = saved(Image.fromarray(wide), "PNG")
    files["progressive"] = saved(small, "JPEG", progressive=True)
    files["444"] = saved(small, "JPEG", subsampling=0, quality=95)
    for kind in ("JPEG", "PNG", "WEBP"):
        for orientation in range(1, 9):
            exif = Image.Exif()
            exif[0x0112] = orientation
            files[f"turned {kind} {orientation}"] = saved(small, kind, exif=exif)
    for kind in ("MPO", "PNG", "GIF", "TIFF", "WEBP"):  # of several frames the first counts
        more = [CHINA.resize(small.size)]
        files[f"two in a {kind}"] = saved(small, kind, save_all=True, append_images=more)
    turned, exif = files["turned JPEG 6"], {}
    profile = b"\xff\xe2\xff\xff" + b"\xff\xda\0" * 21844 + b"\0"  # large, as of colours
    files["its Exif tag comes late"] = turned[:2] + 4 * profile + turned[2:]
    for name, kind, orientation in (("one", 3, 1), ("six", 3, 6), ("long six", 4, 6)):
        tag = struct.pack("<HHHIII", 1, 0x0112, kind, 1, orientation, 0)
        exif[name] = segment(b"Exif\0\0II*\0\x08\0\0\0" + tag)
    exif["XMP"] = segment(b'http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation="6"/>')
    for names in ("six", "long six", "XMP", "XMP, six", "one, XMP", "one, six", "six, one"):
        segments = b"".join(exif[name] for name in names.split(", "))
        files[f"Exif: {names}"] = plain[:2] + segments + plain[2:]
    palette = small.quantize(200)
    files["transparent palette"] = saved(palette, "PNG", transparency=bytes(range(200)))
    return files


def segment(content):
    return b"\xff\xe1" + struct.pack(">H", len(content) + 2) + content


@pytest.mark.filterwarnings("error")
def test_every_decoder_gives_the_same_pixels(decoders):
    """Of the whole image and of any part of it; the size that the part is chosen by is right."""
    for name, data in files_of_every_kind().items():
        with Image.open(io.BytesIO(data)) as file:
            image = ImageOps.exif_transpose(file)
            if name == "transparent palette":  # PIL warns of the direct way
                image = image.convert("RGBA")
            pixels = as_tensor(image.convert("RGB"))
            if name == "16 bits":  # PIL's own conversion cuts at 255
                pixels = torch.from_numpy((np.array(file) >> 8).astype(np.uint8)).expand(3, -1, -1)
        height, width = pixels.shape[1:]
        last, some = (height - 1, width - 1, 1, 1), (5, 9, 17, 31)
        for module in decoders:
            assert module.decode(data).dtype == torch.uint8, name
            assert module.decode(data).equal(pixels), (name, module.DECODER)
            for top, left, h, w in ((0, 0, height, width), (0, 0, 1, 1), last, some):
                choose = Mock(return_value=(top, left, h, w))
                part = module.decode(data, choose)
                choose.assert_called_once_with(height, width)
                assert part.equal(pixels[:, top : top + h, left : left + w]), (name, h, w)


@pytest.mark.parametrize("exif", [b"hi", b"II*\0\x08\0\0\0\1\0\x12\1\2\0\4\0\0\0six\0"])
def test_a_damaged_exif_tag_turns_nothing(exif, decoders):
    """A header that ends early, and an orientation that is a text."""
    data = saved(FLOWER.resize((60, 40)), "JPEG", exif=b"Exif\0\0" + exif)
    with Image.open(io.BytesIO(data)) as image:
        expected = as_tensor(image)
    for module in decoders:
        assert module.decode(data).equal(expected)
        assert module.decode(data, lambda *size: (0, 0, *size)).equal(expected)


def test_damaged_images_are_errors(decoders, capfd):
    """Of bytes that were cut off or changed: the same errors; no decoder crashes."""
    noisy = bytearray(saved(FLOWER, "JPEG"))
    noisy[20000:20512] = np.random.default_rng(0).bytes(512)
    for module, choose in itertools.product(decoders, (None, lambda *size: (0, 0, 9, 9))):
        with pytest.raises(OSError, match=r"^broken data stream when reading image file$"):
            module.decode(bytes(noisy), choose)
    assert "nvimgcodec" not in capfd.readouterr().err
    files = {kind: saved(FLOWER.resize((101, 67)), kind) for kind in ("PNG", "JPEG", "WEBP")}
    for module in decoders:
        for data in (b"", b"hi", files["JPEG"][:-99], files["PNG"][:-99]):
            for choose in (None, lambda *size: (0, 0, 9, 9)):  # far from what is missing, too
                with pytest.raises((ValueError, OSError)):
                    module.decode(data, choose)
        for good in files.values():
            for place in range(8, 1000, 11):
                data = bytearray(good)
                data[place] ^= 0xFF
                with contextlib.suppress(Exception):  # of any type: ImageFolder names the file
                    assert module.decode(bytes(data)).shape[0] == 3


def test_images_too_large_for_pil_are_errors_of_every_decoder(decoders, monkeypatch):
    """A part of one too; its limit can be raised, or taken away."""
    part = Mock(return_value=(0, 0, 9, 9))
    for module, kind in itertools.product(decoders, ("JPEG", "PNG")):
        data = saved(FLOWER.resize((101, 67)), kind)
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
        with pytest.raises(Image.DecompressionBombError, match="6767 pixels"):
            module.decode(data, part)
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
        assert module.decode(data, part).shape == (3, 9, 9)


@pytest.mark.parametrize("kind", [np.uint16, np.int32, np.float32])
def test_pixels_whose_white_is_not_known_are_refused(kind, decoders):
    """As PIL reads them, it would cut at 255."""
    data = saved(Image.fromarray(np.arange(256).reshape(8, 32).astype(kind)), "TIFF")
    for module in decoders:
        with pytest.raises(ValueError, match=r"^what is white in its .* pixels is not known: "):
            module.decode(data)


# Cropping.


def test_crops_are_torchvisions_within_rounding():
    """The same part of the image and the same resizing: pixels differ by at most 2 of 255."""
    whole = as_tensor(CHINA)
    for size in (64, 224):
        pipeline = v2.Compose([v2.Resize(size * 256 // 224, antialias=True), v2.CenterCrop(size)])
        difference = centre_crop(whole, size).int() - pipeline(whole).int()
        assert difference.abs().max() <= 2
        for image in (whole, whole[:, 40:300, 100:350], whole[:, 5:105, 7:217]):
            height, width = image.shape[-2:]
            expected = v2.functional.resize(image, [size, size], antialias=True)
            for flip, theirs in enumerate((expected, expected.flip(-1))):
                all_of_it = RandomCrop(size, (1, 1), (width / height, width / height), flip)
                ours = all_of_it(image)
                assert ours.dtype == torch.uint8 and ours.shape == theirs.shape
                assert (ours.int() - theirs.int()).abs().max() <= 2


def test_random_crop_has_the_distribution_of_random_resized_crop():
    """Means of position and size, read from an image whose pixels are their coordinates."""
    y, x = torch.meshgrid(torch.linspace(0, 255, 300), torch.linspace(0, 255, 400), indexing="ij")
    image = torch.stack([y, x, x]).to(torch.uint8)

    def moments(crop):
        torch.manual_seed(0)
        crops = torch.stack([crop(image) for _ in range(1000)]).float()
        mirrored = (crops[:, 1, 0].diff() < 0).any(1).float().mean()
        assert abs(mirrored - 0.5) < 0.06
        spread = crops.amax((2, 3)) - crops.amin((2, 3))
        return torch.cat([crops.mean((0, 2, 3)), spread.mean(0), spread.std(0)])

    ours = moments(RandomCrop(16))
    theirs = moments(v2.Compose([v2.RandomResizedCrop(16), v2.RandomHorizontalFlip()]))
    assert (ours - theirs).abs().max() < 6, (ours, theirs)


def test_crops_of_a_folder(tmp_path):
    """A JPEG decoded in part, a PNG as a whole; a transform of another type gets the whole image.

    They lie in memory as the batch does: else the worker takes ten times as long to stack it.
    """
    for name in ("a/1.jpg", "b/2.png"):
        (tmp_path / name).parent.mkdir()
        CHINA.save(tmp_path / name, quality=95)
    dataset, crops = ImageFolder(str(tmp_path), lambda image: image), []
    assert [target for _, target in dataset] == [0, 1]
    assert dataset[1][0].equal(as_tensor(CHINA))
    for dataset.transform in (RandomCrop(24), v2.Compose([RandomCrop(24)])):
        torch.manual_seed(0)
        crops.append(torch.stack([image for image, _ in dataset]))
        assert all(image.permute(1, 2, 0).is_contiguous() for image, _ in dataset)
    assert crops[0].equal(crops[1]) and crops[0].shape == (2, 3, 24, 24)


@pytest.mark.parametrize("shape", [(9, 31), (640, 40), (40, 640), (1, 1)])
def test_images_of_any_shape(shape):
    for crop in (RandomCrop(24), partial(centre_crop, size=24)):
        assert crop(as_tensor(CHINA.resize(shape))).shape == (3, 24, 24)


def test_of_a_strip_only_the_middle_is_resized(monkeypatch):
    """The same pixels, within rounding, by a small part of the memory."""
    image = as_tensor(CHINA.resize((40, 4000)))
    before, sizes = centre_crop(image[:, 1900:2100], 224), []
    resize = images.F.resize
    monkeypatch.setattr(
        images.F, "resize", lambda x, *a, **k: sizes.append(x.shape[1]) or resize(x, *a, **k)
    )
    assert (centre_crop(image, 224).int() - before.int()).abs().max() <= 2
    assert sizes == [160]


# Folders.


@pytest.fixture
def folder(tmp_path):
    """The train/ of two classes of two images each, which has a val/ beside it."""
    root = tmp_path / "photos/train"
    for name in ("cat/1.png", "cat/2.JPEG", "dog/1.png", "dog/deeper/späce 2.png"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        CHINA.resize((20, 16)).save(root / name)
    shutil.copytree(root, root.parent / "val")
    return root


def found(root):
    """Its classes and the paths of its images."""
    dataset = ImageFolder(str(root), None)
    names = [os.path.relpath(dataset.path(i), root) for i in range(len(dataset))]
    assert [dataset.classes[t] for t in dataset.targets] == [n.split("/")[0] for n in names]
    return dataset.classes, names


def test_only_files_that_are_shown_count(folder, tmp_path):
    """And links to what lies elsewhere, as on another disk."""
    image = (folder / "cat/1.png").read_bytes()
    hidden = ".git/x", "cat/.ipynb_checkpoints/1.png", "dog/deeper/.thumbs/2.png", "cat/._1.png"
    for name in (*hidden, "cat/notes.txt", "notes.png"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(image)
    (folder / "dog/empty.jpg").mkdir()
    for name in ("cat", "dog/1.png"):
        elsewhere = tmp_path / "elsewhere" / name
        elsewhere.parent.mkdir(parents=True, exist_ok=True)
        (folder / name).rename(elsewhere)
        (folder / name).symlink_to(elsewhere)
    names = ["cat/1.png", "cat/2.JPEG", "dog/1.png", "dog/deeper/späce 2.png"]
    assert found(folder) == (["cat", "dog"], names)


def test_what_is_not_read_is_counted(folder):
    for name in ("cat/a.gif", "cat/b.GIF", "dog/c.avif", "dog/d"):
        (folder / name).write_bytes(b"")
    others = f"4 files in {folder} (.avif, .gif, no ending)"
    assert ImageFolder(str(folder), None).skipped == others
    shutil.copy(folder / "cat/1.png", folder)
    loose = f"5 files in {folder} (.avif, .gif, images in no class, no ending)"
    assert ImageFolder(str(folder), None).skipped == loose
    (folder / "1.png").unlink()
    for kind, message in (("cat/*", "/train/cat; not"), ("dog/**/*", "in the folders of .*; not")):
        for path in folder.glob(f"{kind}.[jJp]*"):
            path.unlink()
        with pytest.raises(ValueError, match=f"^no images .*{message} read: {re.escape(others)}$"):
            image_folders(str(folder.parent), 24)


def test_classes_that_are_numbers_have_their_order(folder):
    """As the numbers of a checkpoint's classes, 0 to 999; one name that is none makes all names."""
    for name in ("cat", "dog"):
        shutil.rmtree(folder / name)
    for name in ("10", "9", "2", "01"):
        (folder / name).mkdir()
        CHINA.resize((20, 16)).save(folder / name / "1.png")
    assert found(folder)[0] == ["01", "2", "9", "10"]
    (folder / "x").mkdir()
    assert ImageFolder(str(folder), None).classes == ["01", "10", "2", "9", "x"]


def test_an_evaluation_needs_no_images_to_train(folder):
    shutil.rmtree(folder)
    train_set, val_set = image_folders(str(folder.parent), 24, evaluate=True)
    assert train_set.paths is val_set.paths and len(val_set) == 4
    transform, train_set.transform = val_set.transform, None  # as a script may do
    assert val_set.transform is transform
    with pytest.raises(ValueError, match=r"no folder .*/train"):
        image_folders(str(folder.parent), 24)


def test_a_long_name_costs_its_own_bytes_alone(folder):
    name = "/".join(["x" * 200] * 15) + "/1.png"
    files = [Path("cat") / name, *(Path(f"dog/{i}.png") for i in range(1000))]
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(b"")
    paths = ImageFolder(str(folder), None).paths
    assert os.fsencode(files[0]) in [*paths] and paths[1] == [*paths][1]
    assert paths.bytes.nbytes < 20_000


def test_a_link_that_leads_back_is_an_error(folder):
    (folder / "dog/link").symlink_to(folder)
    with pytest.raises(OSError, match=r"Too many levels of symbolic links: .*photos/train/dog/l"):
        found(folder)


def move_down(root):
    (root / "train").rename(root / "all")
    (root / "train").mkdir()
    (root / "all").rename(root / "train/all")


def empty(folder):
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        path.unlink()


def without_classes(folder):
    shutil.rmtree(folder)
    folder.mkdir()


ERRORS = [
    (lambda root: without_classes(root / "val"), "^no class folders in .*: put its images into .*"),
    (lambda root: (root / "val/cow").mkdir(), "photos: classes only in val/: 'cow'$"),
    (
        lambda root: [(root / x).mkdir() for x in ("train/caf\xe9", "val/cafe\u0301")],
        r"only in train/: 'caf\\xe9'; only in val/: 'cafe\\u0301'$",
    ),
    (lambda root: shutil.rmtree(root / "val/cat"), "classes only in train/: 'cat'$"),
    (lambda root: empty(root / "train/dog"), "^no images in .*/photos/train/dog$"),
    (lambda root: empty(root / "val"), r"^no images \(.jpg .* in the folders of .*/photos/val$"),
    (move_down, "^one class in .*/photos/train, 'all': one folder level too many"),
]


@pytest.mark.parametrize("spoil, message", ERRORS, ids=[message for _, message in ERRORS])
def test_folders_that_cannot_train(folder, spoil, message):
    spoil(folder.parent)
    with pytest.raises(ValueError, match=message) as error:
        image_folders(str(folder.parent), 32)
    assert "\n" not in str(error.value)


# The digits.


def test_digits_are_written_once_by_processes_that_start_together(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    assert forked(make_digits, str(data), count=2) == [0, 0]
    assert os.listdir(data) == ["digits"]
    train_set, val_set = image_folders(make_digits(str(data)), 64)
    assert (len(train_set), len(val_set)) == (1437, 360)
    assert train_set.classes == val_set.classes == list("0123456789")
