"""Images in archives: the same as in folders, to the bit, and nothing is unpacked."""

import contextlib
import gzip
import io
import os
import pickle
import re
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, Job, forked, last_result, load, run, same_state, torchrun
from PIL import Image
from scipy.io import savemat

from common import archives as module
from common.checkpoint import fingerprint
from common.images import image_folders
from common.loader import make_loader

PARTS = ("train", "val")
CPU = torch.device("cpu")
DEVKIT = "ILSVRC2012_devkit_t12"


@pytest.fixture(scope="module")
def folders(work, tmp_path_factory):
    """A few digits as JPEGs, named as ImageNet's: `root`/train/CLASS/NAME.JPEG."""
    root = tmp_path_factory.mktemp("folders")
    number = 0
    for part, count in zip(PARTS, (12, 5), strict=True):
        for digit in range(10):
            source = work / "data/digits" / part / str(digit)
            wnid = f"n{digit:08d}"
            (root / part / wnid).mkdir(parents=True)
            for path in sorted(source.iterdir())[:count]:
                # The order of ImageNet's validation images has nothing to do with their classes.
                number += 1
                name = f"ILSVRC2012_val_{number * 37 % 51:08d}" if part == "val" else number
                name = name if part == "val" else f"{wnid}_{number}"
                with Image.open(path) as image:
                    image.convert("RGB").save(root / part / wnid / f"{name}.JPEG", quality=95)
        number = 0
    return root


@pytest.fixture(scope="module")
def nested(folders, tmp_path_factory):
    """The same with folders in a class, and with what does not count."""
    root = tmp_path_factory.mktemp("nested") / "data"
    shutil.copytree(folders, root)
    folder = root / "train/n00000003"
    (folder / "a b").mkdir()
    first, *_, last = sorted(folder.glob("*.JPEG"))
    first.rename(folder / "a b/ä.JPEG")
    last.rename(folder / "a.JPEG")
    for name in (".hidden.JPEG", "notes.txt"):
        (folder / name).write_text("no image")
    return root


def tar(*arguments):
    subprocess.run(["tar", *map(str, arguments)], check=True)


def pack(path, files, mode="w"):
    """Write an archive. files: {name: bytes}."""
    with tarfile.open(path, mode) as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def images(folders, part):
    """{CLASS/NAME: bytes}"""
    root = folders / part
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.JPEG")}


def as_tar_does(folders, root):
    for part in PARTS:
        tar("-cf", root / f"{part}.tar", "-C", folders / part, ".")


def with_its_folder(folders, root):
    """And an image twice, of which tar packs a link."""
    first, second = sorted((folders / "train/n00000001").iterdir())[:2]
    second.unlink()
    os.link(first, second)
    for part in PARTS:
        tar("-cf", root / f"{part}.tar", "-C", folders, part)


def as_shards(folders, root):
    for part in PARTS:
        files = list(images(folders, part).items())
        for number in range(3):
            pack(root / f"{part}-{number:06d}.tar", dict(files[number::3]))


def as_downloaded(folders, root):
    """ImageNet's three files: archives of classes, one without classes, and a devkit."""
    wnids = sorted(os.listdir(folders / "train"))
    classes = {}
    for wnid in reversed(wnids):
        pack(root / "inner", {Path(k).name: v for k, v in images(folders, f"train/{wnid}").items()})
        classes[f"{wnid}.tar"] = (root / "inner").read_bytes()
    (root / "inner").unlink()
    pack(root / "ILSVRC2012_img_train.tar", classes)
    val = images(folders, "val")
    truth = {Path(name).name: name.partition("/")[0] for name in val}
    pack(root / "ILSVRC2012_img_val.tar", {Path(name).name: val[name] for name in val})
    write_devkit(root, wnids, [truth[name] for name in sorted(truth)])


def write_devkit(root, wnids, truth):
    """In its real format. Its numbers of classes are in no order, and some are of no image."""
    kind = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("gloss", "O")]
    kind += [("num_children", "O"), ("children", "O"), ("wordnet_height", "O")]
    kind += [("num_train_images", "O")]
    numbers = {wnid: (i * 7 + 3) % len(wnids) + 1 for i, wnid in enumerate(wnids)}
    table = [(numbers[w], w, "a, b", "c", 0, np.array([]), 0, 12) for w in sorted(wnids)]
    table += [(len(wnids) + 1, "n99999999", "d", "e", 2, np.array([1, 2]), 1, 0)]
    mat = io.BytesIO()
    savemat(mat, {"synsets": np.array(table, kind).reshape(-1, 1)})
    lines = "".join(f"{numbers[wnid]}\n" for wnid in truth).encode()
    files = {"meta.mat": mat.getvalue(), "ILSVRC2012_validation_ground_truth.txt": lines}
    files = {f"{DEVKIT}/data/{name}": data for name, data in files.items()}
    pack(root / f"{DEVKIT}.tar.gz", files, "w:gz")


KINDS = [as_tar_does, with_its_folder, as_shards, as_downloaded]


@pytest.mark.parametrize("make", KINDS)
def test_archives_are_the_folders(make, folders, nested, tmp_path, monkeypatch):
    """The same images in the same order: pixels, classes, and the names that ranks compare."""
    monkeypatch.setattr(module, "OPEN_FILES", 2)  # of three shards
    source = folders if make is as_downloaded else shutil.copytree(nested, tmp_path / "copy")
    root = tmp_path / "archives"
    root.mkdir()
    make(source, root)
    before = set(os.listdir(root))
    pairs = zip(image_folders(str(root), 24), image_folders(str(source), 24), strict=True)
    for archive, folder in pairs:
        assert archive.classes == folder.classes and len(archive) == len(folder) > 40
        assert archive.targets.tolist() == folder.targets.tolist()
        assert fingerprint(archive) == fingerprint(folder)
        for copy in (archive, pickle.loads(pickle.dumps(archive))):
            assert [draw(copy, i) for i in range(len(copy))] == expected(folder)
            assert len(copy.archives.files) <= 2
        for i, name in enumerate(folder.paths):
            assert archive.path(i).startswith(f"{root}/")
            assert archive.path(i).endswith(f".tar:{os.fsdecode(name)}")
    loader = make_loader(archive, range(len(archive)), 16, 2, CPU)  # the last one: to validate
    assert torch.cat([batch for batch, _ in loader]).equal(torch.stack([i for i, _ in folder]))
    locks = {f".{part}.index.npz.lock" for part in PARTS}
    assert set(os.listdir(root)) - before == locks | {f"{part}.index.npz" for part in PARTS}


def draw(dataset, i):
    torch.manual_seed(i)
    image, target = dataset[i]
    return image.numpy().tobytes(), target


def expected(folder):
    return [draw(folder, i) for i in range(len(folder))]


def test_web_dataset(folders, tmp_path):
    """Classes are the numbers in KEY.cls, in the order of numbers; what else is there is left."""
    (tmp_path / "folder").mkdir()
    for part in PARTS:
        shards = [{}, {}]
        for i, (name, data) in enumerate(images(folders, part).items()):
            shard = shards[i % 2]
            shard |= {f"{i:04d}.jpg": data, f"{i:04d}.cls": f"{int(name[1:9]) + 2}\n".encode()}
            shard[f"{i:04d}.json"] = b"{}"
        for number in (0, 1):
            extra = {f"{number}/x.cls": str(number).encode(), f"{number}/x.jpg": data}
            pack(tmp_path / f"{part}-{number:04d}.tar", shards[number] | extra)
            tar("-rf", tmp_path / f"{part}-{number:04d}.tar", "-C", tmp_path, "folder")
    for dataset, folder in zip(
        image_folders(str(tmp_path), 24), image_folders(str(folders), 24), strict=True
    ):
        assert dataset.classes == [str(i) for i in range(12)]
        assert len(dataset) == len(folder) + 2 and (np.diff(dataset.targets) >= 0).all()
        got = [(dataset.archives.read(i), dataset[i][1] - 2) for i in range(2, len(dataset))]
        paths = [folder.path(i) for i in range(len(folder))]
        files = [(Path(p).read_bytes(), t) for p, t in zip(paths, folder.targets, strict=True)]
        assert sorted(got) == sorted(files)


FLAGS = (
    "--arch tests.nets:normed --image-size 24 --batch-size 24 --epochs 2 --checkpoint-freq 2 -j 1"
)


def test_archives_train_as_folders_and_resume_after_a_kill(folders, tmp_path):
    """ImageNet as it is downloaded, by --data alone."""
    as_downloaded(folders, tmp_path)
    flags = [*FLAGS.split(), "--data"]
    whole = [*forked(ranks=2), *flags, folders, "--checkpoint-dir", tmp_path / "whole"]
    output = run(whole, ROOT)
    assert "120 images to train, 50 to validate, 10 classes" in output
    archives = [*torchrun(2), *flags, tmp_path, "--checkpoint-dir", tmp_path / "parts"]
    archives += ["--resume", "auto"]
    job = Job([*archives, "--print-freq", 1], ROOT)
    job.wait_for(r"epoch 0 \[4/5\]")
    job.kill()
    job.wait(60)
    resumed = run([*archives, "--predictions", tmp_path / "p.csv"], ROOT)
    assert "resumed from" in resumed and "indexing" not in resumed
    assert same_state(load(tmp_path / "whole"), load(tmp_path / "parts"))
    assert last_result(resumed) == last_result(output)
    lines = (tmp_path / "p.csv").read_text().splitlines()[1:]
    assert len(lines) == 50
    assert re.match(rf"{tmp_path}/ILSVRC2012_img_val.tar:(n\d+)/[\w.]+,\1,", lines[7])


def member(path, number):
    with tarfile.open(path) as archive:
        return archive.getmembers()[number]


def cut_in_a_member(root):
    os.truncate(root / "train.tar", member(root / "train.tar", 60).offset_data + 100)


def cut_after_a_member(root):
    os.truncate(root / "train.tar", member(root / "train.tar", 60).offset)


def cut(path, count):
    os.truncate(path, path.stat().st_size - count)


def flip_a_header(root):
    with open(root / "val.tar", "r+b") as file:
        file.seek(member(root / "val.tar", 20).offset + 100)
        file.write(b"\xff" * 30)


def join(root):
    data = (root / "val.tar").read_bytes()
    (root / "val.tar").write_bytes(data + data)


def compress(root):
    data = (root / "train.tar").read_bytes()
    (root / "train.tar").write_bytes(gzip.compress(data, 1))


def compress_and_rename(root):
    (root / "val.tar").rename(root / "val.tar.zst")


def without_classes(root):
    pack(root / "train.tar", {"a.jpg": b"", "b.jpg": b""})


def without_a_class(root):
    pack(root / "train.tar", {"a.jpg": b"", "a.cls": b"1", "b.jpg": b""})


def class_of_words(root):
    pack(root / "train.tar", {"a.jpg": b"", "a.cls": b"cat"})


def text(root):
    (root / "train.tar").write_text("no archive" * 200)


def empty(root):
    (root / "val.tar").write_text("")


def link(root):
    (root / "n1").mkdir()
    (root / "n1/a.jpg").symlink_to("b.jpg")
    tar("-cf", root / "train.tar", "-C", root, "n1")


def gap(root):
    (root / "train.tar").rename(root / "train-000000.tar")
    shutil.copy(root / "train-000000.tar", root / "train-000002.tar")


def alone(root):
    (root / "val.tar").rename(root / "ILSVRC2012_img_val.tar")


def devkit_of_others(root):
    alone(root)
    write_devkit(root, ["n00000000"], ["n00000000"])


def damaged_devkit(root):
    devkit_of_others(root)
    cut(root / f"{DEVKIT}.tar.gz", 200)


ERRORS = {
    cut_in_a_member: r"/train.tar is damaged, or no archive: unexpected end of data$",
    cut_after_a_member: r"/train.tar is not complete, or damaged at byte \d+: copy it again$",
    flip_a_header: r"/val.tar is not complete, or damaged at byte \d+: copy it again$",
    join: r"/val.tar is several archives in one: join them with tar --concatenate$",
    compress: r"/train.tar is compressed.*: unpack it to a plain /.*/train.tar$",
    compress_and_rename: r"/val.tar.zst is compressed.*: unpack it to a plain /.*/val.tar$",
    without_classes: r"/train.tar has no images in classes: .*tar -cf train.tar -C train .*KEY.cls",
    without_a_class: r"/train.tar: there is no b.cls beside b.jpg$",
    class_of_words: r"/train.tar: a.cls is 'cat', not the number of a class$",
    text: r"/train.tar is damaged, or no archive: ",
    empty: r"/val.tar is damaged, or no archive: empty file$",
    link: r"/train.tar: n1/a.jpg is no plain file: pack with tar --dereference$",
    gap: r" has train-000002.tar, but no train shard 1$",
    alone: rf"^no /.*/{DEVKIT}.tar.gz: it has the classes of the images in /.*_val.tar$",
    devkit_of_others: r"t12.tar.gz has the classes of 1 images, not 50$",
    damaged_devkit: r"t12.tar.gz is damaged, or no devkit: ",
}


@pytest.fixture
def archives(folders, tmp_path):
    as_tar_does(folders, tmp_path)
    return tmp_path


@pytest.mark.parametrize("damage", ERRORS, ids=lambda function: function.__name__)
def test_bad_archives_are_refused(damage, archives):
    damage(archives)
    with pytest.raises(ValueError, match=ERRORS[damage]) as error:
        image_folders(str(archives), 24)
    assert "\n" not in str(error.value)


def test_a_bad_image_is_named_with_its_archive(archives):
    pack(archives / "train.tar", {f"n{i:08d}/x.jpg": b"none" for i in range(10)})
    train_set, _ = image_folders(str(archives), 24)
    message = f"cannot read image {archives}/train.tar:n00000003/x.jpg: its format is not known"
    with pytest.raises(ValueError, match=re.escape(message)):
        train_set[3]
    os.truncate(archives / "train.tar", 600)
    with pytest.raises(ValueError, match=r"x\.jpg: the archive has become shorter"):
        train_set[3]


def indexed(root):
    train_set, val_set = image_folders(str(root), 24)
    assert (len(train_set), len(val_set)) == (120, 50)
    return train_set


def test_an_index_is_used_only_if_it_is_good(archives, capsys):
    pixels = [draw(indexed(archives), i) for i in range(5)]
    assert capsys.readouterr().out.count("indexing") == 2
    indexed(archives)
    assert capsys.readouterr().out == ""
    index = archives / "train.index.npz"
    for damage in ("truncated", "of others", "old"):
        if damage == "truncated":
            cut(index, 2000)
        elif damage == "of others":
            shutil.copy(archives / "val.index.npz", index)
        else:
            os.utime(archives / "train.tar", ns=(0, 0))
        assert [draw(indexed(archives), i) for i in range(5)] == pixels
        said = capsys.readouterr().out.splitlines()
        assert said[0] == f"{index} is damaged, or of other archives: it is made anew"
        assert said[1:] == [f"indexing {archives}/train.tar, once"]


def test_processes_that_start_together_make_an_index_once(archives, monkeypatch, capfd):
    make = module.make_index

    def slow(*arguments):
        time.sleep(1)
        return make(*arguments)

    monkeypatch.setattr(module, "make_index", slow)
    children = [fork(lambda: indexed(archives)) for _ in range(3)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert capfd.readouterr().out.count("indexing") == 2


def fork(function):
    child = os.fork()
    if child == 0:
        try:
            function()
        except BaseException as error:
            print(error, flush=True)
            os._exit(1)
        os._exit(0)
    return child


@pytest.mark.parametrize("moment", ["sync", "replace"])
def test_killed_while_it_writes_the_index(moment, archives, monkeypatch):
    """Before it is on the disk, and before it has its name: the next start does it all again."""

    def die(*arguments):
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patched:
        patched.setattr(*{"sync": (module, "sync"), "replace": (module.os, "replace")}[moment], die)
        assert os.waitpid(fork(lambda: indexed(archives)), 0)[1] == signal.SIGKILL
    assert not (archives / "train.index.npz").exists()
    assert list(archives.glob("train.index.npz.*.tmp"))
    indexed(archives)
    assert (archives / "train.index.npz").exists() and not list(archives.glob("*.tmp"))


@contextlib.contextmanager
def nobody():
    """Not root, who may write everywhere."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_the_index_of_a_folder_that_is_read_only(archives, monkeypatch, capsys):
    with tempfile.TemporaryDirectory() as folder:
        root, cache = Path(folder, "data"), Path(folder, "cache")
        root.mkdir()
        for part in PARTS:
            shutil.copy(archives / f"{part}.tar", root)
        for path, mode in ((folder, 0o755), (root, 0o555), (cache, 0o777)):
            os.makedirs(path, exist_ok=True)
            os.chmod(path, mode)
        monkeypatch.setenv("TORCH_HOME", str(cache))
        with nobody():
            for lines in (2, 0):
                indexed(root)
                assert capsys.readouterr().out.count("indexing") == lines
            assert len(list(cache.rglob("*.index.npz"))) == 2
            monkeypatch.setenv("TORCH_HOME", str(root))
            with pytest.raises(ValueError, match=r"cannot write .* set TORCH_HOME to a folder"):
                indexed(root)
        os.chmod(root, 0o755)
        assert sorted(os.listdir(root)) == ["train.tar", "val.tar"]


def test_a_class_without_images(folders, tmp_path):
    """As in folders: an error in train, none in val, where its folder is there."""
    source = shutil.copytree(folders, tmp_path / "copy")
    for part in ("val", "train"):
        for path in (source / part / "n00000009").iterdir():
            path.unlink()
        as_tar_does(source, tmp_path)
        if part == "val":
            train_set, val_set = image_folders(str(tmp_path), 24)
            assert train_set.classes == val_set.classes and len(val_set) == 45
    with pytest.raises(ValueError, match=r"^no images in .*/train/n00000009$"):
        image_folders(str(tmp_path), 24)


def test_a_folder_comes_before_an_archive(folders, archives):
    shutil.copytree(folders / "val", archives / "val")
    pack(archives / "val.tar", {})
    _, val_set = image_folders(str(archives), 24)
    assert len(val_set) == 50 and val_set.path(0).startswith(f"{archives}/val/")
