"""A folder of checkpoints only goes forward, and neither it nor a user's data is taken for other.

Whatever is there already, and whatever goes wrong: nothing is lost, nothing is wrong in silence.
"""

import builtins
import errno
import io
import os
import re
import shutil
import stat
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SMALL, forked, last_result, load, rows, run
from PIL import Image

from common.arguments import output_file
from common.checkpoint import fingerprint, read_checkpoint
from common.images import ImageFolder, read_image
from tests.runs import Images, opened, parts, read, save, train_a_step, write

NAMES = ["checkpoint.pth", "checkpoint.prev.pth", "model_best.pth"]

# As a process without the rights of root, which may read everything.
UNPRIVILEGED = """
import ctypes, struct, sys, distributed
assert ctypes.CDLL(None).capset(struct.pack("Ii", 0x20080522, 0), bytes(24)) == 0
sys.exit(distributed.main())
"""


@pytest.fixture
def train(work):
    """Runs distributed.py as one process; returns its output."""

    def train(*flags, code=0, cwd=work, start=("distributed.py",)):
        command = [*forked(start[0]), *start[1:], *SMALL, "-j", "0", *flags]
        return run(command, cwd, code=code)

    return train


def content(folder):
    """What is in a folder and below: {path: (kind and content, time of the last change)}."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        state = path.lstat()
        data = path.read_bytes() if stat.S_ISREG(state.st_mode) else stat.S_IFMT(state.st_mode)
        found[str(path.relative_to(folder))] = data, state.st_mtime_ns
    return found


def one_error(output):
    (line,) = output.splitlines()
    assert line.startswith("error: ")
    return line


def finite(checkpoint):
    tensors = [*checkpoint["state_dict"].values()]
    tensors += [state["momentum_buffer"] for state in checkpoint["optimizer"]["state"].values()]
    return all(tensor.isfinite().all() for tensor in tensors)


# A folder only goes forward.


def test_a_new_run_is_refused_where_one_is(train, tmp_path):
    folder = tmp_path / "c"
    train("--max-steps", 3, "--checkpoint-dir", folder)
    before = content(tmp_path)
    error = one_error(train("--checkpoint-dir", folder, code=2))
    assert f"{folder} holds a run" in error
    assert "--resume auto" in error and "another --checkpoint-dir" in error
    assert content(tmp_path) == before
    output = train("--max-steps", 5, "--checkpoint-dir", folder, "--resume", "auto")
    assert f"resumed from {folder}/checkpoint.pth at epoch 0 step 3" in output
    assert load(folder)["step"] == 5 and load(folder, NAMES[1])["step"] == 3


@pytest.mark.parametrize("name", [".", "..", "../../down/here/"])
def test_a_folder_of_the_users_is_left_as_it_is(train, work, tmp_path, name):
    """Among the files that are there already, some with names like those of our own."""
    cwd = tmp_path / "down/here"
    cwd.mkdir(parents=True)
    (cwd / "data").symlink_to(work / "data")
    folder = (cwd / name).resolve()
    (folder / "more").mkdir()
    theirs = ["notes.tmp", "thesis.txt", "checkpoint.pth.tmp", "checkpoint.pth.old", "more/1.pth"]
    for path in theirs:
        (folder / path).write_text(path)
    inode = folder.stat().st_ino
    train("--max-steps", 3, "--checkpoint-dir", name, cwd=cwd)
    before = content(tmp_path)
    assert "holds a run" in one_error(train("--checkpoint-dir", name, cwd=cwd, code=2))
    assert content(tmp_path) == before
    train("--max-steps", 5, "--checkpoint-dir", name, "--resume", "auto", cwd=cwd)
    assert load(folder)["step"] == 5 and folder.stat().st_ino == inode
    assert [(folder / path).read_text() for path in theirs] == theirs
    ours = {*NAMES, "metrics.jsonl", ".lock"}
    assert {path.name for path in folder.iterdir()} - {"data", "here", "more", *theirs} == ours
    assert [path.name for path in tmp_path.parent.glob(f"{tmp_path.name}*")] == [tmp_path.name]


def test_only_our_own_temporary_files_are_removed(tmp_path):
    theirs = ["notes.tmp", "results.csv.2024.tmp", "events.jsonl.1.tmp", "checkpoint.pth.tmp"]
    theirs += ["checkpoint.pth.12.tmp.txt", "old_checkpoint.pth.12.tmp"]
    ours = [f"{name}.12.tmp" for name in (*NAMES, "metrics.jsonl")]
    for name in theirs + ours:
        (tmp_path / name).write_text(name)
    opened(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {".lock", *theirs}


@pytest.mark.parametrize("name", [*NAMES, "metrics.jsonl"])
def test_each_file_of_a_run_makes_the_folder_its_own(tmp_path, name):
    write(tmp_path / "whole", 2)
    folder = tmp_path / "c"
    folder.mkdir()
    late = read(folder, None)  # it looks before the file is there, and opens the folder after
    shutil.copy(tmp_path / "whole" / name, folder / name)
    before = content(folder)
    with pytest.raises(ValueError, match=f"{folder} holds a run .{name}"):
        read(folder, None)
    with pytest.raises(ValueError, match=f"{folder} holds a run .{name}"):
        late.open_folder()
    other = str(tmp_path / "whole/checkpoint.pth")
    with pytest.raises(ValueError, match=f"{folder} holds a run .{name}.*another --checkpoint-dir"):
        opened(folder, other)
    left = content(folder)
    left.pop(".lock")
    assert left == before


def test_a_link_without_a_target_is_a_run_too(tmp_path):
    """Of a disk that is not mounted: what is behind it must not be replaced."""
    (tmp_path / "checkpoint.pth").symlink_to("/not/mounted/checkpoint.pth")
    for resume in (None, "auto"):
        with pytest.raises(ValueError, match=r"checkpoint\.pth"):
            opened(tmp_path, resume)
    assert (tmp_path / "checkpoint.pth").is_symlink()


def test_an_older_checkpoint_goes_on_elsewhere(tmp_path):
    """However it is named: in its own folder it would have to replace the newer one."""
    run = write(tmp_path / "c", 1)
    save(run, 2, 0.0)
    save(run, 3, 0.0)
    (tmp_path / "outside.pth").symlink_to("c/model_best.pth")
    (tmp_path / "also_c").symlink_to("c")
    (tmp_path / "c/copy.pth").write_bytes((tmp_path / "c/model_best.pth").read_bytes())
    before = content(tmp_path)
    older = {"c/checkpoint.prev.pth": 2, "c/model_best.pth": 1, "outside.pth": 1, "c/copy.pth": 1}
    for number, (name, epoch) in enumerate([*older.items(), ("also_c/model_best.pth", 1)]):
        for folder in ("c", "also_c"):
            with pytest.raises(ValueError, match=r"not the newest .* another --checkpoint-dir"):
                opened(tmp_path / folder, f"{tmp_path}/{name}")
        assert content(tmp_path) == before
        run = opened(tmp_path / "new" / str(number), f"{tmp_path}/{name}")
        run.restore(*parts())
        assert run.epoch == epoch
        save(run, epoch + 1)
        assert load(tmp_path / "new" / str(number))["epoch"] == epoch + 1
        shutil.rmtree(tmp_path / "new")
        assert content(tmp_path) == before


@pytest.mark.parametrize(
    "name", ["checkpoint.pth", "model_best.pth", "../link.pth", "../d/" + NAMES[0]]
)
def test_the_newest_goes_on_by_any_of_its_names(tmp_path, name):
    write(tmp_path / "c", 2)  # the second is the best too
    (tmp_path / "link.pth").symlink_to("c/checkpoint.pth")
    (tmp_path / "d").symlink_to("c")
    run = opened(tmp_path / "c", f"{tmp_path}/c/{name}")
    run.restore(*parts())
    save(run, 3)
    assert [load(tmp_path / "c", name)["epoch"] for name in NAMES] == [3, 2, 3]
    assert [row["epoch"] for row in rows(tmp_path / "c")] == [1, 2, 3]


def test_what_is_locked_is_what_is_written(tmp_path, monkeypatch):
    """Though the process goes elsewhere, and a link comes to point elsewhere, meanwhile."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("one")
    monkeypatch.chdir(tmp_path)
    run = read("link")
    monkeypatch.chdir("/")
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("two")
    run.open_folder()
    run.restore(*parts())
    save(run, 1)
    assert sorted(os.listdir(tmp_path / "one")) == sorted(
        [".lock", "checkpoint.pth", "metrics.jsonl", "model_best.pth"]
    )
    assert not os.listdir(tmp_path / "two")


# What is replaced was read: it is good, or damaged in its contents.


def test_a_damaged_newest_is_kept(tmp_path):
    write(tmp_path, 2)
    newest, previous = tmp_path / NAMES[0], tmp_path / NAMES[1]
    bad = newest.read_bytes()[:-100]
    newest.unlink()  # not in place: model_best.pth may be the same file
    newest.write_bytes(bad)
    run = opened(tmp_path)
    run.restore(*parts())
    (kept,) = tmp_path.glob("checkpoint.damaged*.pth")
    assert kept.read_bytes() == bad and load(tmp_path)["epoch"] == 1
    assert newest.samefile(previous)
    save(run, 2)
    assert [load(tmp_path, name)["epoch"] for name in NAMES] == [2, 1, 2]
    assert kept.read_bytes() == bad
    assert opened(tmp_path).epoch == 2


@pytest.mark.parametrize("resume", ["auto", "checkpoint.pth"])
def test_a_checkpoint_that_may_not_be_read_is_not_damaged(train, tmp_path, resume):
    folder = tmp_path / "c"
    for more in ([], ["--resume", "auto"]):
        train("--max-steps", 3 + len(more), "--checkpoint-dir", folder, *more)
    newest, previous = folder / NAMES[0], folder / NAMES[1]
    before = content(folder)
    newest.chmod(0)
    (folder / NAMES[2]).chmod(0)
    path = resume if resume == "auto" else newest
    flags = ["--checkpoint-dir", folder, "--resume", path]
    error = one_error(train(*flags, code=2, start=("-c", UNPRIVILEGED)))
    assert f"Permission denied: '{newest}'" in error and "damaged" not in error
    newest.chmod(0o644)
    assert content(folder) == before and load(folder)["step"] == 5
    assert not previous.samefile(newest)


class Failing(io.FileIO):
    """A file on a disk that fails."""

    error = OSError(errno.EIO, os.strerror(errno.EIO))

    def read(self, *_):
        raise self.error

    readinto = readall = read


@pytest.mark.parametrize(
    ("error", "last"),
    [(Failing.error, 1), (MemoryError("no memory"), 1), (MemoryError("no memory"), 2)],
    ids=["disk", "memory", "memory, for its parts"],
)
def test_a_checkpoint_that_cannot_be_read_is_not_damaged(tmp_path, monkeypatch, error, last):
    """A double of the disk: to have a real one fail takes a kernel's module.

    The file is opened as a whole, then part by part; the last time it is opened, it fails.
    """
    write(tmp_path, 2)
    before = content(tmp_path)
    newest = str(tmp_path / NAMES[0])
    really_open, openings = builtins.open, []

    def failing_open(path, *rest, **more):
        openings.append(path)
        fails = openings.count(newest) == last and path == newest
        return Failing(path) if fails else really_open(path, *rest, **more)

    for module in (builtins, io):
        monkeypatch.setattr(module, "open", failing_open)
    monkeypatch.setattr(Failing, "error", error)
    with pytest.raises((OSError, MemoryError)) as raised:
        opened(tmp_path)
    monkeypatch.undo()
    assert newest in str(raised.value) or raised.type is MemoryError
    after = content(tmp_path)
    assert after == before and read_checkpoint(newest)["epoch"] == 2


# What is saved is finite.


def test_a_run_that_diverges_keeps_what_is_good(train, work, tmp_path):
    folder = tmp_path / "c"
    train("--max-steps", 32, "--checkpoint-dir", folder)
    before = content(folder)
    flags = ["--lr", "1e30", "--checkpoint-dir", folder]
    output = train(*flags, "--resume", "auto", code=2)
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and output.splitlines()[-1] == errors[0] and "Traceback" not in output
    assert re.search(r"the loss is (nan|inf).*epoch 1 step \d.*--lr", errors[0])
    after = content(folder)
    for name in (NAMES[0], NAMES[2], "metrics.jsonl"):
        assert after[name][0] == before[name][0]
    # And from the beginning, where each step is saved; two processes say it once.
    flags = [*SMALL, "-j", "0", "--lr", "1e30", "--checkpoint-freq", "1"]
    flags += ["--checkpoint-dir", tmp_path / "new"]
    output = run([*forked(ranks=2), *flags], work, code=2)
    assert output.count("error: ") == 1 and "Traceback" not in output, output
    assert not (tmp_path / "new/model_best.pth").exists()
    for path in (tmp_path / "new").glob("*.pth"):
        assert finite(load(tmp_path / "new", path.name))


@pytest.mark.parametrize("number", ["inf", "nan", "-1"])
def test_an_infinite_rate_is_none(train, tmp_path, number):
    error = one_error(train(f"--lr={number}", "--checkpoint-dir", tmp_path / "c", code=2))
    assert f"--lr: {number} is not a number" in error and not (tmp_path / "c").exists()


@pytest.mark.parametrize("name, number", [("weight", "nan"), ("weight", "inf"), ("mean", "nan")])
def test_weights_that_are_not_finite_are_not_saved(tmp_path, name, number):
    run = write(tmp_path, 2)
    train_a_step(run)
    run.net.register_buffer("running_mean", torch.zeros(3))
    with torch.no_grad():
        broken = run.net[0].weight if name == "weight" else run.net.running_mean
        broken.flatten()[0] = float(number)
    before = content(tmp_path)
    with pytest.raises(FloatingPointError, match=name):
        save(run, 3)
    assert content(tmp_path) == before


# The same classes and images, whoever reads them.


@pytest.mark.parametrize("evaluate", [False, True])
@pytest.mark.parametrize("resume", ["auto", "checkpoint.pth"])
def test_other_classes_are_refused(tmp_path, resume, evaluate):
    write(tmp_path, 1)
    path = resume if resume == "auto" else f"{tmp_path}/{resume}"
    for classes, expected in (
        ("0123456x89", "class 7 is '7' there and 'x' in --data"),
        ("0132456789", "class 2 is '2' there and '3' in --data"),
        ("012345678", "has 10 classes, --data 9"),
    ):
        with pytest.raises(ValueError, match=re.escape(expected)):
            read(tmp_path, path, Images(classes=classes), evaluate=evaluate)
    assert read(tmp_path, path, Images(), evaluate=evaluate).epoch == 1


@pytest.fixture(scope="module")
def renamed(work):
    """The digits, of which the seven is a class of another name at the same place."""
    shutil.copytree(work / "data/digits", work / "renamed")
    for part in ("train", "val"):
        (work / "renamed" / part / "7").rename(work / "renamed" / part / "7seven")
    return work / "renamed"


def test_a_renamed_class_is_said(train, renamed, tmp_path):
    flags = ["--checkpoint-dir", tmp_path / "c", "--resume", "auto"]
    train("--max-steps", 3, *flags)
    before = content(tmp_path)
    for more in ([], ["--evaluate"]):
        error = one_error(train(*flags, "--data", renamed, *more, code=2))
        assert "class 7 is '7' there and '7seven' in --data" in error
    assert content(tmp_path) == before


# Two nodes, which have the same paths and disks of their own.
NODES = """
import os, sys, distributed
*sys.argv, first, second = sys.argv
sys.argv += ["--data", first if os.environ["RANK"] == "0" else second]
sys.exit(distributed.main())
"""


@pytest.mark.parametrize("difference", ["class", "train", "val"])
def test_nodes_with_other_images_are_told(work, renamed, tmp_path, difference):
    """Though the numbers of classes and of steps are the same on both."""
    other = renamed
    if difference != "class":
        other = tmp_path / "other"
        shutil.copytree(work / "data/digits", other)
        min((other / difference / "3").iterdir()).unlink()
    flags = [*SMALL, "-j", "0", "--checkpoint-dir", tmp_path / "c"]
    command = [*forked("-c", ranks=2), NODES, *flags, work / "data/digits", other]
    output = run(command, work, code=2)
    part = "val" if difference == "val" else "train"
    expected = f"error: rank 1 has not the same images and classes in {part}/ as rank 0"
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert errors and all(error.startswith(expected) for error in errors), output
    assert "Traceback" not in output and not list((tmp_path / "c").glob("*.pth"))


def test_what_is_compared_is_names_of_any_data_set():
    """A data set need not be of files; those of files hold their names as it suits them."""
    numbers = [fingerprint(Images(80)), fingerprint(Images(81)), fingerprint(Images(classes="ab"))]
    for paths in (["a", "b"], ["a", "c"], ["ab", ""], [Path("a"), Path("c/d")]):
        dataset = Images(80)
        dataset.paths = paths
        numbers.append(fingerprint(dataset))
    assert len(set(numbers)) == len(numbers)
    assert fingerprint(range(5)) != fingerprint(range(6))


# Images are what they look like, or an error.


def tiff(pixels, kind=1):
    """A grey TIFF file of little-endian pixels; kind: 1 unsigned, 2 signed, 3 floating point."""
    height, width = pixels.shape
    data = pixels.tobytes()
    numbers = {256: width, 257: height, 258: 8 * pixels.itemsize, 259: 1, 262: 1, 273: 8, 277: 1}
    numbers |= {278: height, 279: len(data), 339: kind}
    fields = b"".join(struct.pack("<HHII", tag, 4, 1, x) for tag, x in numbers.items())
    return (
        struct.pack("<2sHI", b"II", 42, 8 + len(data))
        + data
        + struct.pack("<H", len(numbers))
        + fields
        + struct.pack("<I", 0)
    )


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
    "12.tif": tiff(PACKED.astype(np.uint8).reshape(8, 48))
    .replace(struct.pack("<HHII", 258, 4, 1, 8), struct.pack("<HHII", 258, 4, 1, 12))
    .replace(struct.pack("<HHII", 256, 4, 1, 48), struct.pack("<HHII", 256, 4, 1, 32)),
    "32.tif": tiff(DEEP.astype(np.uint32) * 65537),
    "negative.tif": tiff(0xFFFF - DEEP).replace(
        struct.pack("<HHII", 262, 4, 1, 1), struct.pack("<HHII", 262, 4, 1, 0)
    ),
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
        with pytest.raises(ValueError, match=f"cannot read image {tmp_path}/{name}: "):
            read_image(str(tmp_path / name))
    frames[1].save(tmp_path / "still.jpg", "GIF")
    assert read_image(str(tmp_path / "still.jpg")).float().mean() == pytest.approx(90, abs=1)


@pytest.fixture
def folder(tmp_path):
    """Two classes of two images each."""
    root = tmp_path / "photos"
    for name in ("cat/1.png", "cat/2.png", "dog/1.png", "dog/deeper/2.png"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(root / name)
    return root


def found(root):
    dataset = ImageFolder(str(root), None)
    names = [os.path.relpath(dataset.path(i), root) for i in range(len(dataset))]
    assert [dataset.classes[t] for t in dataset.targets] == [n.split("/")[0] for n in names]
    return dataset.classes, names


def test_a_link_to_nothing_is_said(folder):
    (folder / "cat/gone.jpg").symlink_to("/not/mounted/gone.jpg")
    with pytest.raises(ValueError, match=r"cat/gone\.jpg is a link to nothing"):
        found(folder)


EXPECTED = ["cat", "dog"], ["cat/1.png", "cat/2.png", "dog/1.png", "dog/deeper/2.png"]


def test_only_regular_files_that_are_shown_count(folder):
    assert found(folder) == EXPECTED
    image = (folder / "cat/1.png").read_bytes()
    for name in (
        ".git/x",
        "cat/.ipynb_checkpoints/1.png",
        "dog/deeper/.thumbs/2.png",
        "cat/._1.png",
    ):
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
    """As one has them whose images lie on another disk."""
    shutil.move(folder / "cat", tmp_path / "elsewhere")
    (folder / "cat").symlink_to(tmp_path / "elsewhere")
    shutil.move(folder / "dog/1.png", tmp_path / "1.png")
    (folder / "dog/1.png").symlink_to(tmp_path / "1.png")
    assert found(folder) == EXPECTED


# An empty text is no path, and a path that is no file stays what it is.


@pytest.mark.parametrize("flag", ["--resume", "--checkpoint-dir", "--data", "--predictions"])
@pytest.mark.parametrize("more", [[], ["--evaluate"]])
def test_an_empty_path_is_an_error(train, work, tmp_path, flag, more):
    (tmp_path / "data").symlink_to(work / "data")
    before = content(tmp_path)
    error = one_error(train(flag, "", *more, cwd=tmp_path, code=2))
    assert flag in error and content(tmp_path) == before


def test_predictions_go_through_a_link(train, tmp_path):
    (tmp_path / "old.csv").write_text("old")
    (tmp_path / "link.csv").symlink_to("old.csv")
    (tmp_path / "new_link.csv").symlink_to("new.csv")
    for link, name in (("link.csv", "old.csv"), ("new_link.csv", "new.csv")):
        assert last_result(train("--evaluate", "--predictions", tmp_path / link))
        assert (tmp_path / link).is_symlink() and (tmp_path / name).read_text().count("\n") == 361


def special_files(folder):
    os.mkfifo(folder / "pipe")
    (folder / "link_to_pipe").symlink_to("pipe")
    (folder / "folder").mkdir()
    yield from ("pipe", "link_to_pipe", "folder")
    try:
        os.mknod(folder / "device", stat.S_IFCHR | 0o666, os.makedev(1, 3))  # as /dev/null is
    except PermissionError:
        return  # only root makes devices, and only root can replace them
    yield "device"


def test_predictions_replace_regular_files_only(train, tmp_path):
    """As root above all, who could replace /dev/null."""
    for name in special_files(tmp_path):
        before = content(tmp_path)
        error = one_error(train("--evaluate", "--predictions", tmp_path / name, code=2))
        assert f"{tmp_path}/{name} is not a regular file" in error
        assert content(tmp_path) == before
    with pytest.raises(Exception, match="/dev/null is not a regular file"):
        output_file("/dev/null")
