"""What it costs in accuracy to send less: DDP's communication hooks, and an optimizer in parts.

$ python -m benchmarks.communication

Two processes train the net of minimal/distributed.py on the digits, from the same weights and in
the same order for each way, with several seeds. What is sent in a step is counted, not timed.
"""

import socket
from statistics import mean, stdev

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import Contestant, clean_up_on_sigterm, make_parser, report
from minimal.distributed import build_net

WAYS = ["plain", "bf16", "fp16", "PowerSGD, rank 1", "PowerSGD, rank 4", "ZeroRedundancyOptimizer"]
EPOCHS, BATCH_SIZE, LR = 5, 64, 0.05
WARM_UP = 20  # steps before PowerSGD begins


def main():
    args = make_parser("communication", __doc__, rounds=20).parse_args()
    clean_up_on_sigterm()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rows = []
    with Contestant(serve, 0, port) as one, Contestant(serve, 1, port) as other:
        for way in WAYS:
            found = []
            for seed in range(args.rounds):
                other.connection.send((way, seed))
                found.append(one.ask((way, seed)))
                other.answer()
            rows.append(row_of(way, found))
    plain = rows[0]
    for row in rows:
        row["as_plain"] = row["weights"] == plain["weights"]
        row["points"] = against(row, plain, "all", lambda a, b: a - b)
        row["percent"] = against(row, plain, "losses", lambda a, b: 100 * (a / b - 1))
    columns = {
        "": "name",
        "correct (%)": "correct",
        "against plain": "points",
        "loss against plain (%)": "percent",
        "KiB sent in a step": "sent_kib",
        "optimizer, KiB in a process": "state_kib",
        "weights as plain": "as_plain",
    }
    report("communication", args, rows, columns, epochs=EPOCHS)


def row_of(way, found):
    """A row: means over the seeds."""
    correct = [one["correct"] for one in found]
    return {
        "name": way,
        "correct": mean(correct),
        "all": correct,
        "losses": [one["loss"] for one in found],
        "sent_kib": found[0]["sent"] / 1024,
        "state_kib": found[0]["state"] / 1024,
        "weights": [one["weights"] for one in found],
    }


def against(row, plain, key, difference):
    """The mean over the seeds, and the standard error of that mean, in words."""
    found = [difference(a, b) for a, b in zip(row[key], plain[key], strict=True)]
    error = stdev(found) / len(found) ** 0.5 if len(found) > 1 else 0.0
    return f"{mean(found):+.2f} ± {error:.2f}"


def serve(connection, rank, port):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=2, rank=rank)
    while True:
        connection.send(trained(*connection.recv(), rank))


def trained(way, seed, rank):
    """{correct: %, loss, sent: bytes of gradients in the last step, state: bytes, weights}"""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    target = torch.tensor(digits.target)
    training = torch.arange(len(target)) % 5 < 4
    torch.manual_seed(seed)
    net = build_net()
    model = DistributedDataParallel(net)
    sent = Sent()
    add_hook(model, way)
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)
    if "Zero" in way:
        kind = torch.optim.SGD
        optimizer = ZeroRedundancyOptimizer(net.parameters(), kind, lr=LR, momentum=0.9)
    numbers = training.nonzero().flatten()
    with sent:
        for _ in range(EPOCHS):
            order = numbers[torch.randperm(len(numbers))]  # the same in both: same seed
            for batch in order.split(BATCH_SIZE):
                if len(batch) < BATCH_SIZE:
                    continue
                mine = batch[rank::2]
                loss = nn.functional.cross_entropy(model(images[mine]), target[mine])
                optimizer.zero_grad()
                sent.bytes = 0
                loss.backward()
                optimizer.step()
    if way in ("plain", "ZeroRedundancyOptimizer"):  # the hook of DDP itself is in C++
        sent.bytes = sum(w.numel() * w.element_size() for w in net.parameters())
    state = optimizer.optim.state if "Zero" in way else optimizer.state
    tensors = [t for values in state.values() for t in values.values() if torch.is_tensor(t)]
    for buffer in net.buffers():
        dist.broadcast(buffer, src=0)
    net.eval()
    with torch.no_grad():
        output = net(images[~training])
    return {
        "correct": 100 * (output.argmax(1) == target[~training]).float().mean().item(),
        "loss": nn.functional.cross_entropy(output, target[~training]).item(),
        "sent": sent.bytes,
        "state": sum(t.numel() * t.element_size() for t in tensors),
        "weights": sum(w.double().sum().item() for w in net.parameters()),
    }


class Sent:
    """In its `with` block: counts the bytes that a process gives to all_reduce."""

    bytes = 0

    def __enter__(self):
        self.real = dist.all_reduce

        def all_reduce(tensor, *args, **kwargs):
            self.bytes += tensor.numel() * tensor.element_size()
            return self.real(tensor, *args, **kwargs)

        dist.all_reduce = all_reduce
        return self

    def __exit__(self, *error):
        dist.all_reduce = self.real


def add_hook(model, way):
    if way == "bf16":
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif way == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif way.startswith("PowerSGD"):
        rank = int(way.rpartition(" ")[2])
        state = powerSGD_hook.PowerSGDState(None, rank, start_powerSGD_iter=WARM_UP)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


if __name__ == "__main__":
    main()
