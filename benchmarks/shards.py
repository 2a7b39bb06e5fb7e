"""How much memory a process needs to load pretrained weights: the usual ways, and by its own part.

$ python -m benchmarks.shards

Several processes load the transformer of minimal/pretrained.py, made larger, from a file, and
divide it by FSDP. Peak memory is that of each process's own pages, from before the net is made on:
pages of the file that the system keeps for all do not count.
"""

import gc
import os
import re
import socket
import tempfile
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard

from benchmarks.harness import Contestant, clean_up_on_sigterm, make_parser, report
from minimal import pretrained

WAYS = {
    "each process loads the file": "each",
    "rank 0 loads it and sends": "rank 0",
    "each process reads its part": "part",
}


def parse_args():
    parser = make_parser("shards", __doc__, rounds=3)
    add = parser.add_argument
    add("--width", type=int, default=1024, help="numbers of a byte between the blocks")
    add("--processes", type=int, default=4)
    add("--blocks", type=int, default=8, help="of the transformer")
    return parser.parse_args()


def main():
    args = parse_args()
    clean_up_on_sigterm()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        nets = {"small": (64, 1), "large": (args.width, args.blocks)}
        for net, shape in nets.items():
            pretrained.WIDTH, pretrained.BLOCKS = shape
            save_file(pretrained.Net().state_dict(), Path(folder, net))
        whole = Path(folder, "large").stat().st_size / 2**20
        for name, way in WAYS.items():
            peaks = [measured(way, Path(folder), nets, args.processes) for _ in range(args.rounds)]
            row = {"name": name, "whole_mb": whole, "rank_0_mb": max(one[0] for one in peaks)}
            rows.append(row | {"others_mb": max(max(one[1:]) for one in peaks)})
    columns = {"": "name", "weights, MiB": "whole_mb", "peak of rank 0": "rank_0_mb"}
    report("shards", args, rows, columns | {"of the others": "others_mb"}, processes=args.processes)


def measured(way, folder, nets, count):
    """The peaks of all processes in MiB. The processes are new ones: memory is not given back."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = range(count)
    processes = [Contestant(serve, rank, count, way, folder, nets, port) for rank in ranks]
    try:
        return [process.answer() for process in processes]
    finally:
        for process in processes:
            process.__exit__()


def serve(connection, rank, world_size, way, folder, nets, port):
    torch.set_num_threads(1)
    place = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", place, world_size=world_size, rank=rank)
    pretrained.NEW = ["none"]
    for net, shape in nets.items():  # the small one brings in what is imported at first use
        pretrained.WEIGHTS = Path(folder, net)
        pretrained.WIDTH, pretrained.BLOCKS = shape
        gc.collect()
        before = own_mb()
        with Peak() as peak:
            loaded = load(way, rank, world_size)
            dist.barrier()
        del loaded
    connection.send(peak.mb - before)
    connection.recv()  # wait to be killed


def load(way, rank, world_size):
    """The net, divided, with its weights."""
    if way == "each":
        net = pretrained.Net()
        net.load_state_dict(load_file(pretrained.WEIGHTS))
        return divide(net)
    with torch.device("meta"):
        net = pretrained.Net()
    divide(net).to_empty(device="cpu")
    if way == "part":
        pretrained.fill(net, rank, world_size)
    else:
        state = load_file(pretrained.WEIGHTS) if rank == 0 else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(net, state, options=options)
    return net


def divide(net):
    for block in [*net.blocks, net]:
        fully_shard(block)
    return net


class Peak:
    """In its `with` block: the largest own_mb(), looked at a thousand times a second."""

    def __enter__(self):
        self.mb, self.over = own_mb(), threading.Event()
        self.thread = threading.Thread(target=self.look)
        self.thread.start()
        return self

    def look(self):
        while not self.over.wait(0.001):
            self.mb = max(self.mb, own_mb())

    def __exit__(self, *error):
        self.over.set()
        self.thread.join()
        self.mb = max(self.mb, own_mb())


def own_mb():
    """This process's memory in MiB that is no page of a file."""
    status = Path(f"/proc/{os.getpid()}/status").read_text()
    return int(re.search(r"^RssAnon:\s+(\d+) kB", status, re.M)[1]) / 1024


if __name__ == "__main__":
    main()
