"""Images: what is read, how it is cropped, in which order it comes."""

import importlib.util
import io
import os
import pickle
import random
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest
import torch
import torchvision.io
from conftest import PYTHON, ROOT, forked, run, torchrun
from PIL import Image, ImageOps
from sklearn.datasets import load_sample_images
from torchvision.transforms import v2

from common.digits import digits_folder
from common.images import ImageFolder, centre_crop, image_folders, random_crop, read_image
from common.loader import Seeded, TrainSampler, make_loader
from common.prefetcher import Prefetcher

CPU = torch.device("cpu")


def photographs():
    """scikit-learn's two photographs, 427 x 640 RGB."""
    return [Image.fromarray(image) for image in load_sample_images().images]


@pytest.fixture(scope="session")
def photo_folder(tmp_path_factory):
    """train/ and val/ with every kind of file that ImageNet, or a collection like it, holds."""
    root = tmp_path_factory.mktemp("photos")
    china, flower = photographs()
    sixteen = (np.asarray(flower.convert("L")).astype(np.uint16) << 8) + 255
    files = {
        "landscape.jpg": china,
        "portrait.jpeg": china.transpose(Image.Transpose.ROTATE_90),
        "odd.JPG": china.resize((333, 77)),
        "tiny.jpg": china.resize((9, 31)),
        "long.jpg": china.resize((640, 40)),
        "gray.jpg": china.convert("L"),
        "cmyk.jpg": china.convert("CMYK"),
        "palette.png": flower.convert("P"),
        "alpha.png": flower.convert("RGBA"),
        "sixteen.png": Image.fromarray(sixteen),
        "bitmap.bmp": flower,
        "tagged.tif": flower,
        "web.webp": flower,
        "really_png.JPEG": flower,
        "name with späce.jpg": flower,
        "turned.jpg": flower,
    }
    turned = Image.Exif()
    turned[0x0112] = 6  # a camera that was held upright
    for part in ("train", "val"):
        for i, (name, image) in enumerate(files.items()):
            folder = root / part / ("china" if i < 7 else "flower")
            folder.mkdir(parents=True, exist_ok=True)
            how = {"exif": turned} if name == "turned.jpg" else {}
            image.save(folder / name, format="PNG" if "really_png" in name else None, **how)
        (root / part / "flower" / "notes.txt").write_text("not an image")
        (root / part / "flower" / "deeper").mkdir()
        flower.save(root / part / "flower" / "deeper" / "below.jpg")
        (root / part / ".hidden").mkdir()
    return root


def test_every_kind_of_file_is_read(photo_folder):
    train_set, val_set = image_folders(str(photo_folder), 32)
    assert len(train_set) == len(val_set) == 17
    assert train_set.classes == ["china", "flower"]
    for dataset in (train_set, val_set):
        for i in range(len(dataset)):
            image, target = dataset[i]
            assert image.shape == (3, 32, 32) and image.dtype == torch.uint8
            assert train_set.classes[target] == dataset.path(i).split("/")[-2].replace(
                "deeper", "flower"
            )
            assert image.float().std() > 5, dataset.path(i)  # a picture, not a blank


def test_pixels_are_those_of_pil(photo_folder):
    for path in sorted((photo_folder / "val").rglob("*.*")):
        if not path.is_file() or path.name in ("notes.txt", "sixteen.png"):
            continue
        with Image.open(path) as file:
            expected = np.asarray(ImageOps.exif_transpose(file).convert("RGB")).astype(int)
        got = read_image(str(path)).permute(1, 2, 0).numpy().astype(int)
        # Decoders differ by rounding; CMYK, which has no exact RGB, by a little more.
        limit = 12 if "cmyk" in path.name else 4
        assert np.abs(got - expected).max() <= limit, path


def test_sixteen_bits_keep_the_upper_eight(photo_folder):
    image = read_image(str(photo_folder / "val/flower/sixteen.png"))
    expected = np.asarray(photographs()[1].convert("L"))
    assert (image.numpy() == expected).all()


def decoder_module(monkeypatch, *missing):
    """common/decode.py as it is imported where these are missing."""
    if "torchcodec" in missing:
        monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)
    if "torchvision" in missing:
        monkeypatch.delattr(torchvision.io, "decode_image")
    spec = importlib.util.spec_from_file_location("fresh", ROOT / "common/decode.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def files_of_every_kind():
    """{name: bytes}, each of which every decoder reads to the same pixels."""
    china, flower = (image.resize((101, 67)) for image in photographs())
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
    return files


def test_every_decoder_gives_the_same_pixels(monkeypatch):
    """TorchCodec is there (requirements.txt); torchvision's is deprecated, and will be gone."""
    files = files_of_every_kind()
    first = decoder_module(monkeypatch)
    assert first.DECODER == "torchcodec"
    pixels = {name: first.decode(data) for name, data in files.items()}
    second = decoder_module(monkeypatch, "torchcodec")
    assert second.DECODER == "torchvision"
    with pytest.warns(DeprecationWarning):
        assert all(second.decode(data).equal(pixels[name]) for name, data in files.items())
    third = decoder_module(monkeypatch, "torchcodec", "torchvision")
    assert third.DECODER == "PIL"
    assert all(third.decode(data).equal(pixels[name]) for name, data in files.items())
    for module in (first, third):
        for data in (b"", b"hi", files["RGB JPEG 0"][:-99], files["RGB PNG 0"][:-99]):
            with pytest.raises((ValueError, OSError, SyntaxError)):
                module.decode(data)


def test_photographs_train(photo_folder, work, tmp_path):
    flags = ["--data", photo_folder, "--arch", "resnet18", "--image-size", "64", "--epochs", "1"]
    more = ["--batch-size", "4", "--checkpoint-dir", tmp_path / "c"]
    env = {"PYTHONWARNINGS": "error::DeprecationWarning"}  # whatever will be gone is not needed
    output = run([*torchrun(2), *flags, *more], work, env=env)
    assert "17 images to train, 17 to validate, 2 classes" in output
    assert "[4/4]" in output


@pytest.mark.parametrize("damage", ["truncated", "empty", "text"])
def test_an_unreadable_image_stops_the_run_with_its_path(photo_folder, work, tmp_path, damage):
    data = tmp_path / "data"
    subprocess.run(["cp", "-r", photo_folder, data], check=True)
    bad = data / "train/china/landscape.jpg"
    content = bad.read_bytes()
    bad.write_bytes(
        {"truncated": content[: len(content) // 2], "empty": b"", "text": b"hi"}[damage]
    )
    with pytest.raises(ValueError, match=f"cannot read image {bad}"):
        read_image(str(bad))
    flags = f"--data {data} --arch tests.nets:plain --image-size 24 --batch-size 16 --epochs 1"
    script = [*forked(), *flags.split(), "--checkpoint-dir", tmp_path / "c"]
    output = run(script, work, code=1)
    last = output.strip().splitlines()[-1]
    assert last.startswith("rank 0 failed at epoch 0 step 0: ") and str(bad) in last


def test_crop_is_torchvisions_within_rounding():
    """Same part of the image, same resizing: pixels differ by at most 2 of 255."""
    image = torch.from_numpy(np.array(photographs()[0])).permute(2, 0, 1)
    for size in (64, 224):
        ours = centre_crop(image, size)
        pipeline = v2.Compose([v2.Resize(size * 256 // 224, antialias=True), v2.CenterCrop(size)])
        assert (ours.int() - pipeline(image).int()).abs().max() <= 2


def test_random_crop_resizes_and_mirrors_as_torchvision_does():
    """Pixels differ by at most 2 of 255, whatever part of a photograph is taken."""
    whole = torch.from_numpy(np.array(photographs()[0])).permute(2, 0, 1)
    for image in (whole, whole[:, 40:300, 100:350], whole[:, 5:105, 7:217]):
        height, width = image.shape[-2:]
        for size in (64, 224):
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


def test_mirroring():
    image = torch.arange(64, dtype=torch.uint8).expand(3, 64, 64)
    torch.manual_seed(0)
    falling = [bool((random_crop(image, 8)[0, 0].int().diff() < 0).any()) for _ in range(400)]
    assert 150 < sum(falling) < 250
    assert not any((random_crop(image, 8, flip=0)[0, 0].int().diff() < 0).any() for _ in range(50))


class Draws(torch.utils.data.Dataset):
    """What each random number generator gives, as an image."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        draws = torch.rand(1).item(), np.random.rand(), random.random()
        return (torch.tensor(draws) * 255).to(torch.uint8).view(3, 1, 1), index


def test_random_numbers_depend_on_seed_epoch_and_index_only():
    def drawn(workers, world_size, seed=0, epoch=0):
        images = {}
        for rank in range(world_size):
            sampler = TrainSampler(40, 8, rank, world_size, 0)
            sampler.set_epoch(epoch)
            loader = make_loader(Seeded(Draws(), seed), sampler, 8 // world_size, workers, CPU)
            for batch, targets in loader:
                images |= {
                    int(t): i.flatten().tolist() for i, t in zip(batch, targets, strict=True)
                }
        return images

    expected = drawn(0, 1)
    assert len(expected) == 40 and len({tuple(v) for v in expected.values()}) > 35
    assert drawn(2, 1) == drawn(0, 4) == drawn(3, 2) == expected
    assert drawn(0, 1, seed=1) != expected and drawn(0, 1, epoch=1) != expected


@pytest.mark.parametrize("length", [64, 67, 16])
def test_global_batches_are_the_same_for_every_world_size(length):
    def batches(world_size, first=0, end=None, epoch=3):
        samplers = [TrainSampler(length, 16, rank, world_size, 7) for rank in range(world_size)]
        for sampler in samplers:
            sampler.set_epoch(epoch, first, end)
        keys = [list(sampler) for sampler in samplers]
        assert all(len(k) == len(s) for k, s in zip(keys, samplers, strict=True))
        share = 16 // world_size
        steps = range(len(keys[0]) // share)
        return [{i for k in keys for i in k[s * share : (s + 1) * share]} for s in steps]

    expected = batches(1)
    assert len(expected) == length // 16
    assert Counter(key for batch in expected for key in batch).most_common(1)[0][1] == 1
    assert {epoch for batch in expected for epoch, _ in batch} == {3}
    for world_size in (2, 4, 8, 16):
        assert batches(world_size) == expected
        assert batches(world_size, first=1) == expected[1:]
        assert batches(world_size, end=len(expected) - 1) == expected[:-1]
    if length > 16:
        assert batches(1, epoch=4) != [{(4, i) for _, i in batch} for batch in expected]


def test_workers_live_on_and_the_data_set_can_be_pickled(work):
    dataset, _ = image_folders(str(work / "data/digits"), 16)
    assert len(pickle.loads(pickle.dumps(dataset))) == len(dataset)
    sampler = TrainSampler(len(dataset), 64, 0, 1, 0)
    loader = make_loader(Seeded(dataset, 0), sampler, 64, 2, CPU)
    pids = [[worker.pid for worker in loader._iterator._workers]]  # forked at once, not late
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert sum(len(target) for _, target in loader) == 1408
        pids.append([worker.pid for worker in loader._iterator._workers])
    assert pids[0] == pids[1] == pids[2]


def test_a_loader_that_nobody_lets_go_of_does_not_keep_its_process(work):
    """In a notebook or a module it is a global, alive when the interpreter exits."""
    lines = ["import torch", "from common.images import image_folders"]
    lines += ["from common.loader import make_loader", f"root = '{work}/data/digits'"]
    lines += ["digits, _ = image_folders(root, 24)", "device = torch.device('cpu')"]
    lines += ["loader = make_loader(digits, range(96), 48, 2, device)", "print(len(list(loader)))"]
    output = run([PYTHON, "-c", "\n".join(lines)], ROOT, timeout=60)
    assert output == "2\n"


def test_prefetcher_normalises_once():
    images = torch.randint(0, 256, (5, 3, 8, 8), dtype=torch.uint8)
    target = torch.arange(5)
    (got, got_target), *rest = Prefetcher([(images, target)], CPU)
    normalise = v2.Compose(
        [
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    assert not rest and got_target.equal(target)
    torch.testing.assert_close(got, normalise(images), atol=1e-5, rtol=1e-5)
    assert list(Prefetcher([], CPU)) == []


def test_memory_of_a_batch_is_used_again_on_cpus():
    """New memory costs a page fault for every 4 KB, until pick_device() has settled it.

    Not at once: small objects take a piece of the block that was freed, a few times over.
    """
    lines = ["import torch", "from argparse import Namespace", "from resource import getrusage"]
    lines += ["from common.device import pick_device", "faults = [getrusage(0).ru_minflt]"]
    lines += ["for part in range(3):", "    for batch in range(20): torch.ones(16 << 20)"]
    lines += ["    faults.append(getrusage(0).ru_minflt)", "    pick_device(0, 1, Namespace())"]
    lines += ["print(*faults)"]
    output = run([PYTHON, "-c", "\n".join(lines)], ROOT, env={"CUDA_VISIBLE_DEVICES": ""})
    start, before, soon, later = map(int, output.split())
    assert (later - soon) * 10 < before - start


def test_digits_are_written_once_by_processes_that_start_together(tmp_path):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import common.digits as d; "
    code += "import time; time.sleep(max(0, float(sys.argv[1]) - time.time())); d.digits_folder()"
    command = [sys.executable, "-c", code, str(time.time() + 8)]
    started = [subprocess.Popen(command, cwd=tmp_path) for _ in range(4)]
    assert [process.wait(timeout=90) for process in started] == [0] * 4
    assert sorted(os.listdir(tmp_path / "data")) == [".lock", "digits"]
    train_set, val_set = image_folders(str(tmp_path / "data/digits"), 64)
    assert (len(train_set), len(val_set)) == (1437, 360)


def test_a_half_written_digits_folder_is_not_used(tmp_path):
    partial = tmp_path / "data/digits.partial/train/3"
    partial.mkdir(parents=True)
    (partial / "x.png").write_text("of a process that was killed")
    root = digits_folder(str(tmp_path / "data"))
    assert sorted(os.listdir(tmp_path / "data")) == [".lock", "digits"]
    assert len(ImageFolder(os.path.join(root, "train"), None)) == 1437
