"""Which images are read in which step, and how batches come from the workers."""

import gc
import os
import pickle
import random
import re
import signal
import time
from collections import namedtuple

import numpy as np
import pytest
import torch
from conftest import PYTHON, ROOT, run, without_launchers
from PIL import Image
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_flatten

from common import batches as memory
from common.loader import TrainSampler, start_loader
from common.prefetcher import Prefetcher
from tests.unit.child import Child

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "image label")
Padded = namedtuple("Padded", "padded lengths sparse turned")


class Items(torch.utils.data.Dataset):
    """What make(i) gives for i = 0, 1, ..., 39."""

    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return self.make(index)


def picture(index, height=4, width=6):
    return torch.full((3, height, width), index, dtype=torch.uint8)


def large(index):
    return picture(index, 160, 160), index


def volume(index):
    return torch.full((4, 90, 90), float(index)), index


def test_random_numbers_depend_on_seed_epoch_and_index_only():
    def draw(index):
        return torch.rand(1).item(), np.random.rand(), random.random(), index

    def drawn(workers, world_size, seed=0, epoch=0):
        found = {}
        for rank in range(world_size):
            sampler = TrainSampler(40, 8, rank, world_size, 0)
            sampler.set_epoch(epoch)
            share = 8 // world_size
            for batch in start_loader(Items(draw), sampler, share, workers, CPU, seed=seed):
                for *numbers, index in torch.stack(batch, dim=1).tolist():
                    found[index] = numbers
        return found

    expected = drawn(0, 1)
    assert sorted(expected) == list(range(40))
    assert len({number for numbers in expected.values() for number in numbers}) == 120
    assert drawn(2, 1) == drawn(0, 4) == drawn(3, 2) == expected
    assert drawn(0, 1, seed=1) != expected and drawn(0, 1, epoch=1) != expected


@pytest.mark.parametrize("length", [64, 67, 16])
def test_global_batches_are_the_same_for_every_world_size(length):
    def batches(world_size, steps=None, epoch=3):
        samplers = [TrainSampler(length, 16, rank, world_size, 7) for rank in range(world_size)]
        for sampler in samplers:
            sampler.set_epoch(epoch, steps)
        assert len({len(sampler) for sampler in samplers}) == 1  # all take as many steps
        keys = [key for keys in zip(*samplers, strict=True) for key in keys]
        return [{*keys[start : start + 16]} for start in range(0, len(keys), 16)]

    expected = batches(1)
    assert len(expected) == length // 16
    assert len(set.union(*expected)) == 16 * len(expected)  # none comes twice
    assert {epoch for batch in expected for epoch, _ in batch} == {3}
    for world_size in (2, 4, 8, 16):
        assert batches(world_size) == expected
        assert batches(world_size, range(1, len(expected))) == expected[1:]
        assert batches(world_size, range(len(expected) - 1)) == expected[:-1]
    if length > 16:
        assert batches(1, epoch=4) != [{(4, i) for _, i in batch} for batch in expected]


def test_a_batch_size_that_does_not_divide():
    with pytest.raises(ValueError, match="a batch of 30 does not divide by 4 processes: try 32"):
        TrainSampler(64, 30, 0, 4, 0)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_batch_stays_what_it_is(workers):
    """However long somebody holds it, and however far ahead the workers are."""
    sampler = TrainSampler(40, 2, 0, 1, 0)
    loader = start_loader(Items(large), sampler, 2, workers, CPU, seed=0)
    sampler.set_epoch(0, range(20, 20))
    assert list(loader) == [] and len(loader) == 0  # after a resume at an epoch's end
    for epoch in range(2):
        sampler.set_epoch(epoch)
        held = list(loader)
        shown = [index for _, index in sampler]
        assert len(held) == 20
        assert torch.cat([target for _, target in held]).tolist() == shown
        assert torch.cat([images[:, 0, 0, 0] for images, _ in held]).tolist() == shown
        assert held[0][0].is_contiguous(memory_format=torch.channels_last)
        prefetched = [images for images, _ in Prefetcher(loader, CPU)]
        expected = Prefetcher([images for images, _ in held], CPU)
        assert all(a.equal(b) for a, b in zip(prefetched, expected, strict=True))


@pytest.mark.parametrize("make", [large, volume])
def test_memory_of_large_tensors_is_used_again(make):
    """Also after an epoch that ended early, and after one of which all was held."""
    loader, places = start_loader(Items(make), range(40), 2, 2, CPU), set()
    pieces = [np.frombuffer(piece, np.uint8)[memory.START :] for piece in loader.collate_fn.pieces]
    pieces = {piece.ctypes.data for piece in pieces}
    for last in (3, 19):
        for number, (tensor, target) in enumerate(loader):
            assert tensor[:, 0, 0, 0].tolist() == target.tolist() == [2 * number, 2 * number + 1]
            assert tensor.untyped_storage().nbytes() == tensor.nbytes  # torch.save() writes it all
            places.add(tensor.data_ptr())
            if number == last:
                break
    assert len(places) <= 8  # of each worker three that are under way, and one held here
    del tensor
    held = [tensor.numpy()[:, 0] for tensor, _ in loader]  # not the tensors themselves
    assert [part[:, 0, 0].tolist() for part in held] == [[i, i + 1] for i in range(0, 40, 2)]
    del held
    places.update(tensor.data_ptr() for tensor, _ in loader)
    assert places <= pieces


def example(index):
    """An item of everything that a data set may have."""
    return {
        "image": picture(index),
        "tokens": torch.arange(index, index + 5),
        "volume": torch.full((300, 50), index, dtype=torch.float64),
        "mask": picture(index, 160, 160)[0] > 20,
        "grey": picture(index)[:1],
        "number": index * 0.5,
        "name": f"number {index}",
        "pair": Pair(torch.full((3, 4, 6), index / 2), [index, torch.tensor([])]),
    }


@pytest.mark.parametrize("workers, sampler, device", [(0, range(40), CPU), (2, None, "cpu")])
def test_items_of_any_kind_reach_the_device(workers, sampler, device):
    """Images are normalised, and all else is what the data set gave, in the same containers.

    On GPUs: tests/gpu.
    """
    loader = start_loader(Items(example), sampler, 8, workers, device)
    mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    for number, batch in enumerate(Prefetcher(loader, device)):
        numbers = torch.arange(number * 8, number * 8 + 8)
        items = [example(int(i)) for i in numbers]
        assert list(batch) == list(items[0])
        images = (torch.stack([item["image"] for item in items]) / 255 - mean) / std
        torch.testing.assert_close(batch["image"], images, atol=1e-5, rtol=1e-5)
        assert batch["image"].is_contiguous(memory_format=torch.channels_last)
        for name in ("tokens", "volume", "mask", "grey"):
            assert batch[name].equal(torch.stack([item[name] for item in items])), name
        assert batch["number"].equal(numbers.double() / 2)
        assert batch["name"] == [item["name"] for item in items]
        image, (label, empty) = batch["pair"]
        assert type(batch["pair"]) is Pair and label.equal(numbers) and empty.shape == (8, 0)
        assert image.equal(torch.stack([item["pair"].image for item in items]))
    assert number == 4


IMAGES = torch.full((2, 3, 4, 4), 255, dtype=torch.uint8)


@pytest.mark.parametrize(
    "batch, inputs",
    [
        (IMAGES, 1),
        ([IMAGES, IMAGES], 1),
        (Pair(IMAGES, {"mask": IMAGES, "name": "a"}), 1),
        (([IMAGES, IMAGES], IMAGES), 2),  # two views
        ({"image": IMAGES, "pair": (IMAGES, IMAGES)}, 3),  # where none is said to be the first
        ([None, "name", IMAGES], 0),
    ],
)
def test_only_the_first_item_is_normalised(batch, inputs):
    """The others are targets, such as masks in colours."""
    (loaded,) = Prefetcher([batch], CPU)
    (leaves, form), (before, form_before) = tree_flatten(loaded), tree_flatten(batch)
    assert form == form_before
    assert all(leaf.dtype == torch.float32 for leaf in leaves[:inputs])
    assert all(now is old for now, old in zip(leaves[inputs:], before[inputs:], strict=True))


def test_waited_is_the_time_for_images_of_the_last_epoch(monkeypatch):
    """Not that for steps, nor that for the end."""
    now = 0.0

    def batches(*seconds):
        nonlocal now
        for wait in seconds:
            now += wait
            yield torch.ones(2)
        now += 100

    monkeypatch.setattr("time.perf_counter", lambda: now)
    prefetcher = Prefetcher(batches(1, 2), CPU)
    assert prefetcher.waited() == 0.0
    for _ in prefetcher:
        now += 10
    assert prefetcher.waited() == 3
    prefetcher.loader = batches()
    assert list(prefetcher) == [] and prefetcher.waited() == 0.0


def of_unlike_length(items):
    """What a user's collate_fn may return: tensors of several kinds, and lists."""
    padded = pad_sequence(items, batch_first=True, padding_value=-1)
    return Padded(padded, [len(item) for item in items], padded.to_sparse(), padded.t()[::2])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_collate_fn_of_the_users(workers):
    def make(index):
        return torch.arange(9000.0 * (index % 3 + 1))

    loader = start_loader(Items(make), range(40), 8, workers, CPU, collate_fn=of_unlike_length)
    for number, batch in enumerate(list(loader)):
        expected = of_unlike_length([make(i) for i in range(number * 8, number * 8 + 8)])
        assert type(batch) is Padded and batch.lengths == expected.lengths
        assert batch.padded.equal(expected.padded) and batch.turned.equal(expected.turned)
        assert batch.sparse.to_dense().equal(expected.padded)
    assert number == 4


def test_a_batch_that_cannot_be_sent_ends_the_loader():
    """multiprocessing itself would print an error, and the process would wait for ever."""
    pair = namedtuple("Local", "image label")  # a class that no other process can import
    with pytest.raises((pickle.PicklingError, AttributeError), match="Local"):
        list(start_loader(Items(lambda i: pair(*large(i))), range(40), 2, 1, CPU))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_second_iteration_ends_the_first(workers):
    """Workers have one epoch at a time: the loops would share its batches, or read some twice."""
    batches = Prefetcher(start_loader(Items(large), range(40), 8, workers, CPU), CPU)
    first = iter(batches)
    next(first)
    next(iter(batches))  # as to look at an example
    with pytest.raises(RuntimeError, match=r"^a new iteration began"):
        next(first)
    assert [len(images) for images, _ in batches] == [8] * 5


def test_what_cannot_train_is_said():
    with pytest.raises(ValueError, match=r"^40 images do not fill one batch of 64$"):
        list(TrainSampler(40, 64, 0, 1, 0))


def test_loaders_that_are_gone_leave_no_open_files():
    """One for each fold of a cross-validation: torch itself lets go of its files."""

    def opened():
        for _ in start_loader(Items(large), range(40), 8, 2, CPU):
            pass
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    first = opened()
    assert [opened() for _ in range(3)][-1] <= first


START = """
import os, resource, time, torch
from longrun.messages import exit_on_user_error
from common.loader import start_loader

class Slow(list):
    def __getitem__(self, index):
        os.kill(os.getppid(), 9)
        time.sleep(60)

def start(workers, items):
    return start_loader(items, range(len(items)), 2, workers, torch.device("cpu"))
"""
ITEMS = """
items = [torch.full((3, 160, 160), i, dtype=torch.uint8) for i in range(40)]
"""
CROWDED = """
files, most = len(os.listdir("/proc/self/fd")) + 5, resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
batches = list(start(2, items))
print(sum(images.sum(dtype=torch.int64) for images in batches) // 76800, flush=True)
with exit_on_user_error(0):
    start(9, items)
"""


def test_a_crowded_machine(tmp_path):
    """Little /dev/shm, few open files, and a long path of temporary files."""
    folder = tmp_path / ("a" * 100)
    folder.mkdir()
    little = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    little += ['mount -t tmpfs -o size=64k none /dev/shm && exec "$@"', "sh"]
    env = {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "PYTHONWARNINGS": "ignore"}
    output = run(
        [*little, PYTHON, "-c", START + ITEMS + CROWDED], tmp_path, env=env, timeout=150, code=2
    )
    total, line = output.splitlines()
    assert total == "tensor(780)"
    reason = "No space left on device (of processes, open files or /dev/shm)"
    assert line == f"error: 9 workers: {reason}: give fewer, or 0"


NOTEBOOK = """
loader = start(2, items)
print(len(list(loader)))
other = start(2, items)
os.kill(other._iterator._workers[0].pid, 9)
list(other)
"""


def test_a_loader_that_nobody_lets_go_of_does_not_keep_its_process():
    """In a notebook it is a global, alive when the interpreter exits; so it is after an error."""
    output = run([PYTHON, "-c", START + ITEMS + NOTEBOOK], ROOT, timeout=150, code=1)
    assert output.startswith("20\n")
    assert re.search("killed by signal|exited unexpectedly", output.splitlines()[-1])


def test_a_worker_that_reads_for_long_ends_with_its_process():
    """torch's own workers look for their parent between two batches only."""
    began = time.monotonic()
    assert Child(f"{START}list(start(1, Slow(range(40))))").wait() == (-signal.SIGKILL, "")
    assert time.monotonic() - began < 50  # until the last of them has ended


FORKS = """
import os, runpy, sys
import torch.distributed as dist
os.register_at_fork(before=lambda: print("fork"))
dist.init_process_group = lambda *_, **__: print("meet") or os._exit(0)
flags = "--data {root}/data -a tests.nets:plain --image-size 24 -b 2 -j 1 --evaluate"
sys.argv = ["distributed.py", *flags.split()]
runpy.run_path("distributed.py", run_name="__main__")
"""


def test_workers_are_forked_before_gloo_has_threads(tmp_path, monkeypatch):
    """A fork would copy the locks that these threads hold, and wait for them without end."""
    for name in ("train/a", "train/b", "val/a", "val/b"):
        (tmp_path / "data" / name).mkdir(parents=True)
        Image.new("RGB", (24, 24)).save(tmp_path / "data" / name / "x.png")
    monkeypatch.setattr(os, "environ", without_launchers(os.environ) | {"OMP_NUM_THREADS": "1"})
    monkeypatch.chdir(ROOT)
    code, output = Child(FORKS.replace("{root}", str(tmp_path))).wait()
    # Between them nvImageCodec says what it does not find, where it is loaded first.
    assert (code, re.findall("^(?:fork|meet)$", output, re.M)) == (0, ["fork", "fork", "meet"])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_without_items(workers):
    """A validation would divide by zero, after an epoch; now its loader is not even made."""
    with pytest.raises(ValueError, match="has no items"):
        start_loader([], None, 2, workers, "cpu")
