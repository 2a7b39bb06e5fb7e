"""Images in archives: the same as in folders, to the bit, and nothing is unpacked."""

import gzip
import io
import os
import re
import shutil
import subprocess
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat
from torch.utils.data import DataLoader
from torchvision.datasets import imagenet

from common.images import image_folders as plain
from recipes import archives as module
from recipes.archives import image_folders
from tests.unit.child import forked

PARTS = ("train", "val")
DEVKIT = "ILSVRC2012_devkit_t12"
WNIDS = [f"n{number:08d}" for number in range(10)]


@pytest.fixture
def data(tmp_path, monkeypatch):
    """An empty folder; indexes are kept beside it. Any devkit is taken for the real one."""
    monkeypatch.setitem(imagenet.ARCHIVE_META, "devkit", (f"{DEVKIT}.tar.gz", None))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Small JPEGs, named as ImageNet's: `folders`/train/CLASS/NAME.JPEG; and what else may be."""
    root = tmp_path_factory.mktemp("folders")
    noise = np.random.default_rng(0)
    for part, count in zip(PARTS, (12, 5), strict=True):
        for number in range(10 * count):
            wnid = WNIDS[number // count]
            (root / part / wnid).mkdir(parents=True, exist_ok=True)
            # The order of ImageNet's validation images has nothing to do with their classes.
            name = (
                f"{wnid}_{number}"
                if part == "train"
                else f"ILSVRC2012_val_{number * 37 % 50 + 1:08d}"
            )
            image = Image.fromarray(noise.integers(0, 256, (16, 20, 3), dtype=np.uint8))
            image.save(root / part / wnid / f"{name}.JPEG")
    folder = root / "train/n00000003"
    (folder / "a b").mkdir()
    min(folder.glob("*.JPEG")).rename(folder / "a b/ä.JPEG")
    min(folder.glob("*.JPEG")).rename(folder / "a.JPEG")
    for name in (".hidden.jpg", "notes.txt", "notes.cls", "notes.CLS"):
        (folder / name).write_text("neither an image nor a class")
    return root


def tar(*arguments):
    subprocess.run(["tar", *map(str, arguments)], check=True)


def pack(path, files, mode="w"):
    """Write an archive to a path or a BytesIO. files: {name: bytes}."""
    opened = {"fileobj": path} if isinstance(path, io.BytesIO) else {"name": path}
    with tarfile.open(mode=mode, **opened) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def images(folders, part):
    """{CLASS/NAME: bytes}"""
    root = folders / part
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.JPEG")}


def as_tar_does(folders, root):
    for part in PARTS:
        tar("-cf", root / f"{part}.tar", "-C", folders / part, ".")


def with_its_folder(folders, root):
    for part in PARTS:
        tar("-cf", root / f"{part}.tar", "-C", folders, part)


@pytest.fixture
def archives(folders, data):
    as_tar_does(folders, data)
    return data


def as_shards(folders, root):
    for part in PARTS:
        files = list(images(folders, part).items())
        for number in range(3):
            pack(root / f"{part}-{number:06d}.tar", dict(files[number::3]))


def as_downloaded(folders, root):
    """ImageNet's three files: archives of classes, one without classes, and a devkit."""
    classes = {}
    for wnid in reversed(WNIDS):
        inner = io.BytesIO()
        pack(inner, images(folders, f"train/{wnid}"))
        classes[f"{wnid}.tar"] = inner.getvalue()
    pack(root / "ILSVRC2012_img_train.tar", classes)
    val = {Path(name): content for name, content in images(folders, "val").items()}
    pack(root / "ILSVRC2012_img_val.tar", {path.name: val[path] for path in val})
    write_devkit(root, [str(path.parent) for path in sorted(val, key=lambda path: path.name)])


def write_devkit(root, truth):
    """In its real format. Its numbers of classes are in no order, and some are of no image."""
    numbers = {wnid: (i * 7 + 3) % len(WNIDS) + 1 for i, wnid in enumerate(WNIDS)}
    table = [(number, wnid, "a, b", "gloss", 0) for wnid, number in numbers.items()]
    table.append((len(WNIDS) + 1, "n99999999", "c", "gloss", 2))
    kind = [(f, "O") for f in ("ILSVRC2012_ID", "WNID", "words", "gloss", "num_children")]
    mat = io.BytesIO()
    savemat(mat, {"synsets": np.array(table, kind).reshape(-1, 1)})
    lines = "".join(f"{numbers[wnid]}\n" for wnid in truth).encode()
    files = {"meta.mat": mat.getvalue(), "ILSVRC2012_validation_ground_truth.txt": lines}
    files = {f"{DEVKIT}/data/{name}": content for name, content in files.items()}
    pack(root / f"{DEVKIT}.tar.gz", files, "w:gz")


def numbered(files):
    """{name: bytes} of a WebDataset: each image under a KEY, with the number of its class."""
    found = {"stray.cls": b"of no image"}
    for key, (name, content) in enumerate(files.items()):
        number = int(name[1:9])
        found |= {f"{key}.jpg": content, f"{key}.cls": b"%d\n" % number, f"{key}.json": b"{}"}
    return found


def drawn(dataset):
    """All items as bytes and targets, with the same random numbers each time."""
    torch.manual_seed(0)
    return [(image.numpy().tobytes(), target) for image, target in dataset]


@pytest.mark.parametrize("make", [as_tar_does, with_its_folder, as_shards, as_downloaded])
def test_archives_are_the_folders(make, folders, data):
    """The same images in the same order: pixels, classes, and the names that ranks compare.

    No file is written beside them.
    """
    make(folders, data)
    before = sorted(os.listdir(data))
    pairs = zip(image_folders(str(data), 24), plain(str(folders), 24), strict=True)
    for archive, folder in pairs:
        assert archive.classes == folder.classes and len(archive) == len(folder) >= 50
        assert archive.targets.tolist() == folder.targets.tolist()
        assert [*archive.paths] == [*folder.paths]
        assert re.fullmatch(rf"{data}/.*\.tar:{os.fsdecode(folder.paths[40])}", archive.path(40))
        assert drawn(archive) == drawn(folder)
        assert {image.shape for image, _ in archive} == {(3, 24, 24)}
    loaded = torch.cat([batch for batch, _ in DataLoader(archive, 16, num_workers=2)])
    assert loaded.equal(torch.stack([image for image, _ in folder]))  # the last ones: to validate
    assert sorted(os.listdir(data)) == before


@pytest.mark.parametrize("numbers", ["train", "val", "train and val"])
def test_web_datasets_have_the_classes_that_folders_have(folders, data, numbers):
    """Both have the order of numbers: 0 1 2 ... 10 11."""
    files = images(folders, "val") | {f"n0000001{i}/x": b"no image" for i in range(2)}
    for part in PARTS:
        named = {f"{int(name[1:9])}/{i}.jpg": files[name] for i, name in enumerate(files)}
        pack(data / f"{part}.tar", numbered(files) if part in numbers else named)
    order = [str(i) for i in range(12)]
    for dataset in image_folders(str(data), 24):
        assert dataset.classes == order and len(dataset) == len(files)
        for index, name in enumerate(dataset.paths):
            assert order[dataset.targets[index]] == name.decode().partition("/")[0]
            assert dataset.read(index) == named[name.decode()]


def test_a_class_without_images_to_validate(folders, data):
    """A folder is a class without any, too. A KEY.cls cannot show one."""
    source = shutil.copytree(folders, data / "copy")
    for path in (source / "val/n00000009").iterdir():
        path.unlink()
    as_tar_does(source, data)
    train_set, val_set = image_folders(str(data), 24)
    assert train_set.classes == val_set.classes == WNIDS and len(val_set) == 45
    for part in PARTS:
        pack(data / f"{part}.tar", numbered(images(source, part)))
    train_set, val_set = image_folders(str(data), 24)
    assert train_set.classes == val_set.classes == [str(i) for i in range(10)]
    assert {*val_set.targets} == {*range(9)}


def test_a_folder_comes_before_an_archive(folders, archives):
    shutil.copytree(folders / "val", archives / "val")
    pack(archives / "val.tar", {})
    _, val_set = image_folders(str(archives), 24)
    assert len(val_set) == 50 and val_set.path(0).startswith(f"{archives}/val/")


def test_an_evaluation_needs_no_archive_to_train(archives):
    (archives / "train.tar").unlink()
    train_set, val_set = image_folders(str(archives), 24, evaluate=True)
    assert train_set.transform is val_set.transform and len(train_set) == len(val_set) == 50
    with pytest.raises(ValueError, match=r"no train\.tar, train-000000\.tar, "):
        image_folders(str(archives), 24)


def cut(path, number, more):
    """At so many bytes after the beginning of a member."""
    with tarfile.open(path) as archive:
        os.truncate(path, archive.getmembers()[number].offset + more)


def flip_a_header(path):
    data = path.read_bytes()
    place = data.index(b"ustar", len(data) // 2)
    path.write_bytes(data[: place - 150] + b"\xff" * 30 + data[place - 120 :])


def compress(path):
    path.write_bytes(gzip.compress(path.read_bytes()))


def pack_a_link(root):
    (root / "n1").mkdir()
    (root / "n1/a.jpg").symlink_to("b.jpg")
    tar("-cf", root / "train.tar", "-C", root, "n1")


def shards(root, *numbers):
    for number in numbers:
        shutil.copy(root / "train.tar", root / f"train-{number}.tar")
    (root / "train.tar").unlink()


def label(root, *, file="train.tar", **labels):
    """Make an archive of images KEY.jpg. labels: KEY and the text of KEY.cls, or None."""
    files = {f"{key}.cls": text.encode() for key, text in labels.items() if text}
    pack(root / file, {f"{key}.jpg": b"" for key in labels} | files)


def mix(root):
    """Let the first of two shards be a WebDataset's."""
    shards(root, "0", "1")
    label(root, file="train-0.tar", a="0")


def as_imagenets(root, *of_the_devkit):
    """Let val.tar be ImageNet's, beside a devkit with the classes of these images."""
    (root / "val.tar").rename(root / "ILSVRC2012_img_val.tar")
    if of_the_devkit:
        write_devkit(root, of_the_devkit)


def lack(root, number, more=""):
    """Let val.tar be ImageNet's, without one image, and with another one."""
    files = {f"ILSVRC2012_val_{i:08d}.JPEG": b"" for i in range(1, 51) if i != number}
    files |= {more: b""} if more else {}
    pack(root / "ILSVRC2012_img_val.tar", files)
    (root / "val.tar").unlink()
    write_devkit(root, [WNIDS[0]] * 50)


def long_name(path, size):
    """Let it begin with a GNU header for a long name, of so many bytes."""
    member = tarfile.TarInfo("././@LongLink")
    member.type = tarfile.GNUTYPE_LONGNAME
    path.write_bytes(member.tobuf() + path.read_bytes())
    write_size(path, 0, size)


def resize(path, size):
    """Let the header of the first image say another size."""
    with tarfile.open(path) as archive:
        member = next(member for member in archive if member.isreg() and "JPEG" in member.name)
    write_size(path, member.offset, size)


def write_size(path, offset, size):
    """As GNU tar writes large numbers."""
    data = bytearray(path.read_bytes())
    header = memoryview(data)[offset : offset + 512]
    header[124:136] = (size % 2**96).to_bytes(12, "big")
    header[124] |= 0x80
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    path.write_bytes(data)


def pack_twice(path, name):
    with tarfile.open(path, "w") as archive:
        for content in (b"1", b"2"):
            member = tarfile.TarInfo(name)
            member.size = 1
            archive.addfile(member, io.BytesIO(content))


def zeros_inside(path):
    """More than tar ever pads with; then it goes on."""
    data = path.read_bytes()
    path.write_bytes(data + bytes(1 << 21) + data)


def pack_sparsely(root):
    (root / "n1").mkdir()
    with open(root / "n1/a.jpg", "wb") as file:
        file.truncate(1 << 20)
    tar("-cf", root / "train.tar", "--sparse", "-C", root, "n1")


def name_with_a_zero(path):
    member = tarfile.TarInfo("n1/a.jpg")
    member.pax_headers = {"path": "n1/a\0b.jpg"}
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(member, io.BytesIO())


def nest(path, depth):
    """Archives in each other, so many; a class with an image in the innermost."""
    pack(path, {"a.jpg": b""})
    for _ in range(depth):
        pack(path, {"n.tar": path.read_bytes()})


NO_TAR = "is damaged, compressed, or no tar archive: "
ERRORS = [
    (
        lambda r: cut(r / "train.tar", 60, 612),
        "/train.tar is damaged or inc.*: 'n.*' is beyond its",
    ),
    (lambda r: cut(r / "train.tar", 60, 0), r"/train.tar is incomplete, .* at byte \d+: "),
    (lambda r: flip_a_header(r / "val.tar"), r"/val.tar is incomplete, .* damaged, at byte \d+: "),
    (lambda r: compress(r / "train.tar"), f"/train.tar {NO_TAR}"),
    (
        lambda r: (r / "val.tar").rename(r / "val.tar.zst"),
        "/data has no folder val and no val.tar, val-000000.tar, .*val.tar, not compressed$",
    ),
    (pack_a_link, "/train.tar: 'n1/a.jpg' is not a regular file: pack with tar --dereference"),
    (lambda r: pack(r / "train-0.tar", {}), " both train.tar and train-0.tar: move one of them"),
    (lambda r: shards(r, "00", "02"), ": number train-00.tar train-02.tar from 0"),
    (lambda r: label(r, a=None), "/train.tar has no images in classes: .*tar -cf train.tar -C tr"),
    (lambda r: label(r, a="0", b=None), "/train.tar: b.cls is missing: it must have the number"),
    (lambda r: label(r, a="0", b="x"), "/train.tar: b.cls is 'x': it must have the number of a"),
    (lambda r: label(r, a="0", b="1" * 60), "train.tar: b.cls is '1{50}': it must have the number"),
    (
        lambda r: name_with_a_zero(r / "train.tar"),
        r"train.tar: 'n1/a\\x00b.jpg' has a zero byte in",
    ),
    (lambda r: nest(r / "train.tar", 40), "n.tar: more than 8 archives in each other: unpack"),
    (mix, "/train-0.tar and those that follow: only some have a KEY.cls for KEY.jpg"),
    (as_imagenets, f"^no /.*/{DEVKIT}.tar.gz: it has the classes of the images in /.*_val.tar$"),
    (lambda r: as_imagenets(r, "n00000000"), "_val.tar lacks 1 images of 1, such as 'ILSVRC2012_"),
    (
        lambda r: lack(r, 3),
        "_val.tar lacks 1 images of 50, such as '.*_00000003.JPEG'$",
    ),
    (
        lambda r: lack(r, 51, "ILSVRC2012_val_00000001 (1).JPEG"),
        r"_val.tar has also 1 images of 50, such as 'ILSVRC2012_val_00000001 \(1\).JPEG'$",
    ),
    (lambda r: (r / f"{DEVKIT}.tar.gz").write_bytes(b"") or as_imagenets(r), "^cannot read /.*gz"),
    (lambda r: resize(r / "train.tar", 2**60), "train.tar is .* 'n0.*' is beyond its end$"),
    (lambda r: resize(r / "train.tar", -512), "train.tar is .* 'n0.*' is beyond its end$"),
    (lambda r: long_name(r / "train.tar", 2**60), f"/train.tar {NO_TAR}not enough memory for a"),
    (lambda r: long_name(r / "train.tar", -512), f"/train.tar {NO_TAR}"),
    (lambda r: pack_twice(r / "train.tar", "n1/a.jpg"), "/train.tar has 'n1/a.jpg' twice: make it"),
    (lambda r: pack_twice(r / "train.tar", "a.cls"), "/train.tar: a.cls is '1' and '2'$"),
    (lambda r: zeros_inside(r / "train.tar"), r"/train.tar is incomplete, .* at byte \d+: "),
    (pack_sparsely, "/train.tar: 'n1/a.jpg' is sparse: pack without --sparse$"),
]


@pytest.mark.parametrize("spoil, message", ERRORS, ids=[message for _, message in ERRORS])
def test_bad_archives_are_refused(spoil, message, archives):
    spoil(archives)
    with pytest.raises(ValueError, match=message) as error:
        image_folders(str(archives), 24)
    assert "\n" not in str(error.value)


def test_a_bad_image_is_named_with_its_archive(archives):
    files = {f"{wnid}/x.jpg": b"none" for wnid in WNIDS}
    pack(archives / "train.tar", files | {"n00000003/y.gif": b"", "loose.jpg": b""})
    train_set, _ = image_folders(str(archives), 24)
    assert train_set.skipped == f"2 files in {archives}/train.tar (.gif, images in no class)"
    message = f"cannot read image '{archives}/train.tar:n00000003/x.jpg': its format is not known"
    with pytest.raises(ValueError, match=re.escape(message)):
        train_set[3]


# The index.


def indexed(data):
    train_set, val_set = image_folders(str(data), 24)
    assert (len(train_set), len(val_set)) == (120, 50)
    return train_set


def test_an_index_is_used_only_if_it_is_good(archives, capsys):
    pixels = drawn(indexed(archives))
    assert capsys.readouterr().out.count("indexing") == 2
    indexed(archives)
    assert capsys.readouterr().out == ""
    (index,) = archives.parent.glob("cache/archives/train-*.npz")
    good = index.read_bytes()
    middle = len(good) // 2
    index.write_bytes(good[:middle] + b"other" + good[middle + 5 :])
    assert drawn(indexed(archives)) == pixels
    assert capsys.readouterr().out == f"indexing '{archives}/train.tar', once\n"
    os.utime(archives / "train.tar", ns=(0, 0))  # it may be another one
    indexed(archives)
    assert "indexing" in capsys.readouterr().out


def test_processes_that_start_together_make_an_index_once(archives, monkeypatch, capfd):
    make = module.make_index
    monkeypatch.setattr(module, "make_index", lambda *args: time.sleep(0.5) or make(*args))
    assert forked(indexed, archives, count=3) == [0, 0, 0]
    assert capfd.readouterr().out.count("indexing") == 2


def test_an_index_that_cannot_be_written(archives, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", f"{archives}/train.tar")
    with pytest.raises(ValueError, match=r"set TORCH_HOME to a folder that can be written$"):
        indexed(archives)
