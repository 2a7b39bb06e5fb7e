"""Start-up, memory and time per image, of which none is read, with up to 1.28 million files.

$ python -m benchmarks.scale
"""

import collections
import multiprocessing
import os
import shutil
import tarfile
import tempfile
from pathlib import Path

import torch
from PIL import Image
from torchvision import datasets

import common.images
import recipes.archives
from benchmarks.harness import (
    CORES,
    Contestant,
    clean_up_on_sigterm,
    clock,
    make_parser,
    report,
    spread,
)
from benchmarks.loader import one_pixel, our_loader, usual_loader
from common.images import ImageFolder

CONTESTANTS = ["usual recipe", "ours", "ours, an archive"]


def parse_args():
    parser = make_parser("scale", __doc__, rounds=3, batch_size=256)
    add = parser.add_argument
    counts = [10_000, 100_000, 1_280_000]
    add("--files", type=int, nargs="+", default=counts, help="how many, in ascending order")
    add("--classes", type=int, default=1000, help="folders for them")
    add("-j", "--workers", type=int, default=CORES, help="loader processes")
    return parser.parse_args()


def main():
    args = parse_args()
    clean_up_on_sigterm()
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for files in args.files:
            make_files(Path(folder), files, args.classes)
            make_archive(Path(folder), files, args.classes)
            answers = {name: [] for name in CONTESTANTS}
            for _ in range(args.rounds):
                for name in CONTESTANTS:
                    with Contestant(read_all, name, f"{folder}/train", args) as contestant:
                        answers[name].append(contestant.answer())
            for name, values in answers.items():
                spreads = {key: spread([value[key] for value in values]) for key in values[0]}
                runs.append({"name": name, "files": files, "index_s": ""} | spreads)
    columns = {
        "": "name",
        "files": "files",
        "index (s)": "index_s",
        "start (s)": "start_s",
        "us / image": "us_per_image",
        "MB of a worker's own": "worker_private_mb",
    }
    report("scale", args, runs, columns)


def make_files(folder, files, classes):
    """Fill folder/train/CLASS/ up to this number of files, which are links to a few tiny images."""
    for number in range(classes):
        path = folder / "train" / f"n{number:08d}"
        path.mkdir(parents=True, exist_ok=True)
        source = folder / f"{number // 20}.jpg"  # ext4 allows 65000 links to a file
        if not source.exists():
            Image.new("RGB", (8, 8)).save(source)
        for i in range(len(os.listdir(path)), files // classes):
            os.link(source, f"{path}/{path.name}_{i}.JPEG")


def make_archive(folder, files, classes):
    """Write folder/train.tar with as many members as make_files() makes files."""
    data = (folder / "0.jpg").read_bytes()
    padded = data + bytes(-len(data) % tarfile.BLOCKSIZE)
    with open(folder / "train.tar", "wb") as archive:
        for number in range(classes):
            for i in range(files // classes):
                member = tarfile.TarInfo(f"n{number:08d}/n{number:08d}_{i}.JPEG")
                member.size = len(data)
                archive.write(member.tobuf())
                archive.write(padded)
        archive.write(bytes(2 * tarfile.BLOCKSIZE))


def read_all(connection, name, root, args):
    """A contestant: get each path and class once from the workers; no image is read."""
    image, answer = torch.zeros(3, 1, 1), {}
    start = clock()
    if name == "ours, an archive":
        common.images.decode = lambda data, choose: image
        recipes.archives.read_member = lambda *place: b""
        torch.hub.set_dir(str(Path(root).with_name("hub")))  # the index is kept beside it
        shutil.rmtree(Path(root).with_name("archives"), ignore_errors=True)
        recipes.archives.ImageArchive([f"{root}.tar"], "train", one_pixel)
        answer["index_s"], start = clock() - start, clock()
        dataset = recipes.archives.ImageArchive([f"{root}.tar"], "train", one_pixel)
    elif name == "ours":
        ImageFolder.read = lambda dataset, index: b""
        common.images.decode = lambda data, choose: image
        dataset = ImageFolder(root, one_pixel)
    else:
        dataset = datasets.ImageFolder(root, one_pixel, loader=lambda path: image)
    answer["start_s"] = clock() - start
    usual = name == "usual recipe"
    batches = usual_loader(dataset, args) if usual else our_loader(dataset, args)[0]
    last = len(dataset) // args.batch_size
    start = clock()
    for number, _ in enumerate(batches, 1):
        if number == last:  # now: after it, the workers of the usual recipe end
            answer["us_per_image"] = 1e6 * (clock() - start) / len(dataset)
            memory = worker_memory()
    answer["worker_private_mb"] = memory["Private_Clean"] + memory["Private_Dirty"]
    answer["worker_pss_mb"] = memory["Pss"]
    connection.send(answer)


def worker_memory():
    """{kind: MB} of memory, as the kernel counts it: the mean of this process's workers."""
    workers = multiprocessing.active_children()
    memory = collections.Counter()
    for process in workers:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        for line in lines[1:]:
            kind, kilobytes, _ = line.split()
            memory[kind.removesuffix(":")] += int(kilobytes) * 1.024 / 1000 / len(workers)
    return memory


if __name__ == "__main__":
    main()
