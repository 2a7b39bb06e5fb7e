"""Training from a stream of tar shards, of which every process and loader worker reads some.

$ torchrun --standalone --nproc-per-node=2 minimal/stream.py
"""

import gc
import io
import os
import random
import tarfile
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

EPOCHS = 5
BATCH_SIZE = 72  # images in a step, over all processes
LANES = 24  # shards that are read at a time, over all processes: more than all loader workers
WORKERS = 2  # of a loader, in each process
SAVE_EVERY = 8  # steps
DATA = Path("stream")  # train/*.tar and val/*.tar; on several nodes where all of them see it
SAVED = Path("stream.pth")  # so too


def build_net():  # takes images, float32 [n, 1, 8, 8]; gives a score for each digit, [n, 10]
    conv = nn.Sequential(nn.Conv2d(1, 64, kernel_size=3), nn.ReLU())
    return nn.Sequential(conv, nn.Flatten(), nn.Linear(64 * 6 * 6, 10))


def write_shards():  # of the digits: KEY.npy is an image, KEY.cls its class
    digits, draw = load_digits(), random.Random(0)
    folder = Path(f"{DATA}.unfinished")
    for part, rest in (("train", range(4)), ("val", [4])):  # every fifth is for validation
        (folder / part).mkdir(parents=True, exist_ok=True)
        left = iter([i for i in range(1797) if i % 5 in rest])
        while some := list(islice(left, draw.randint(12, 24))):  # yours differ in length too
            with tarfile.open(folder / part / f"{some[0]:04d}.tar", "w") as archive:
                for i in some:
                    image = io.BytesIO()
                    np.save(image, digits.images[i].astype(np.uint8))
                    for kind, data in ("npy", image.getvalue()), ("cls", b"%d" % digits.target[i]):
                        info = tarfile.TarInfo(f"{i:04d}.{kind}")
                        info.size = len(data)
                        archive.addfile(info, io.BytesIO(data))
    os.replace(folder, DATA)  # whole, or not there


def count(path):  # the images of a shard, by its headers; or what is wrong with it
    try:
        with open(path, "rb") as file, tarfile.open(fileobj=file, mode="r:") as archive:
            names = archive.getnames()
            file.seek(archive.offset)
            rest = file.read()
    except (tarfile.TarError, OSError) as error:
        return f"{path} is damaged, or no tar archive: {error}"
    if len(rest) < 1024 or rest.strip(b"\0"):  # tarfile takes damage for the end, which is zeros
        return f"{path} is damaged, or incomplete"
    images = [name[:-4] for name in names if name.endswith(".npy")]
    if sorted(names) != sorted(f"{key}.{kind}" for key in images for kind in ("npy", "cls")):
        return f"{path} must have KEY.npy and KEY.cls for each image, and nothing else"
    return len(images)


def read(path):  # a shard at once, in one go: [(image, class)]
    with tarfile.open(path, "r:") as archive:
        files = {member.name: archive.extractfile(member).read() for member in archive}
    images = [name for name in files if name.endswith(".npy")]
    return [(np.load(io.BytesIO(files[n])), int(files[n[:-4] + ".cls"])) for n in images]


class Stream(IterableDataset):
    """Gives for each step what this reader has of it: (images, classes), perhaps none.

    The order of an epoch depends on (epoch, shards) alone: shuffled shards are dealt to LANES,
    each read one after another, and the lanes give an image by turns. So a step number is all
    the state, and who reads which lane may change.
    """

    def __init__(self, counts, rank, world_size, shuffle):
        self.counts, self.rank, self.world_size = counts, rank, world_size
        self.shuffle, self.epoch, self.step = shuffle, 0, 0

    def __iter__(self):
        worker, workers = get_worker_info(), max(WORKERS, 1)
        reader = self.rank * workers + (worker.id if worker else 0)
        paths = sorted(self.counts)
        if self.shuffle:
            random.Random(self.epoch).shuffle(paths)
        lanes = [paths[lane::LANES] for lane in range(LANES)]
        turns = self.turns([sum(self.counts[path] for path in lane) for lane in lanes])
        given = Counter(islice(turns, self.step * BATCH_SIZE))  # before this step, by each lane
        mine = range(reader, LANES, self.world_size * workers)
        mine = {lane: self.images(lanes[lane], given[lane]) for lane in mine}
        while step := list(islice(turns, BATCH_SIZE)):
            items = [next(mine[lane]) for lane in step if lane in mine]
            images = np.array([image for image, _ in items], np.float32).reshape(-1, 1, 8, 8)
            target = torch.tensor([target for _, target in items], dtype=torch.int64)
            yield torch.from_numpy(images) / 16, target

    def turns(self, lengths):  # the lane of each image of the epoch
        for number in range(max(lengths)):
            yield from (lane for lane, length in enumerate(lengths) if number < length)

    def images(self, paths, skip):  # of a lane, from one on
        for path in paths:
            if skip >= self.counts[path]:  # not even opened
                skip -= self.counts[path]
                continue
            items = read(path)
            if self.shuffle:
                random.Random(f"{self.epoch} {path}").shuffle(items)
            yield from items[skip:]
            skip = 0


def steps_of(stream):  # batches of this process: its workers give a part each, in turn
    parts = iter(DataLoader(stream, batch_size=None, num_workers=WORKERS))
    for step in zip(*[parts] * max(WORKERS, 1), strict=True):
        yield [torch.cat(tensors) for tensors in zip(*step, strict=True)]


def main():
    rank = int(os.environ["RANK"])  # my number among all processes
    local_rank = int(os.environ["LOCAL_RANK"])  # my number on this machine: it chooses the GPU
    world_size = int(os.environ["WORLD_SIZE"])  # how many processes there are
    if world_size * max(WORKERS, 1) > LANES:
        raise SystemExit(f"{world_size} processes with {WORKERS} workers: more than LANES {LANES}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(local_rank)  # "cuda" is now this process's own GPU
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    torch.manual_seed(rank)  # else all processes would draw the same random numbers

    if rank == 0 and not DATA.exists():
        write_shards()
    dist.barrier()
    saved = torch.load(SAVED, map_location="cpu") if SAVED.exists() else {"epoch": 0, "step": 0}
    paths = sorted(str(path) for path in DATA.glob("*/*.tar"))
    found = [None] * world_size  # each counts some shards; all must see the same
    counted = {path: count(path) for path in paths[rank::world_size]}
    dist.all_gather_object(found, (paths, saved["epoch"], saved["step"], counted))
    if any(one[:3] != found[0][:3] for one in found):
        raise SystemExit("the processes differ in the shards or in SAVED that they see")
    counts = {path: n for one in found for path, n in one[3].items()}
    for wrong in (n for n in counts.values() if isinstance(n, str)):
        raise SystemExit(wrong)
    train, val = (
        {p: counts[p] for p in paths if Path(p).parent.name == s} for s in ("train", "val")
    )
    if len(train) < LANES or not sum(train.values()) or not sum(val.values()):
        raise SystemExit(
            f"{len(train)} shards in {DATA}/train, LANES {LANES}: or no image in a part"
        )
    order = {"shards": train, "batch": BATCH_SIZE, "lanes": LANES}
    if saved["step"] and saved["order"] != order:
        raise SystemExit(f"{SAVED} is in the middle of an epoch of other shards, batch or lanes")

    net = build_net().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    if "net" in saved:
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        if rank == 0:
            done = f"{saved['epoch']} of {EPOCHS} epochs and {saved['step']} steps"
            print(f"{SAVED}: goes on after {done}")
    model = DistributedDataParallel(net)  # averages the gradients in backward()
    train_stream = Stream(train, rank, world_size, shuffle=True)
    val_stream = Stream(val, rank, world_size, shuffle=False)

    def save(epoch, step):  # the state of the stream with that of the model
        if rank == 0:
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"epoch": epoch, "step": step, "order": order}
            torch.save(state, f"{SAVED}.unfinished")
            os.replace(f"{SAVED}.unfinished", SAVED)  # whole, or not there

    step = saved["step"]
    for epoch in range(saved["epoch"], EPOCHS):
        train_stream.epoch, train_stream.step = epoch, step
        for images, target in steps_of(train_stream):
            # Of all processes; the last step is smaller, and some may have no image in it.
            batch = min(BATCH_SIZE, sum(train.values()) - step * BATCH_SIZE)
            output = model(images.to(device))
            total = nn.functional.cross_entropy(output, target.to(device), reduction="sum")
            loss = total * world_size / batch  # for DDP divides by world_size
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % SAVE_EVERY == 0:
                save(epoch, step)

        correct = torch.zeros(2, device=device)  # and images
        with torch.no_grad():
            for images, target in steps_of(val_stream):
                output = net(images.to(device))
                correct[0] += (output.argmax(dim=1) == target.to(device)).sum()
                correct[1] += len(target)
        dist.all_reduce(correct)  # the sums over all processes
        if rank == 0:
            print(f"epoch {epoch}: {100 * (correct[0] / correct[1]).item():.1f} % correct")
        step = 0
        save(epoch + 1, step)
    del model
    gc.collect()  # ends its threads: else gloo may abort when Python ends
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
