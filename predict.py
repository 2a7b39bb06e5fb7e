"""How fast on N nodes, from what one GPU and the network do: what limits, and what would help.

$ python predict.py --arch resnet50 --images 128 --step-ms 110 --between-gbit 10 --nodes 1 2 4 16

`--nodes 2x8 16x1` compares two ways to have 16 GPUs. Or measure your nodes first, in half a minute:
below torchrun, with `--measure OUT.json`; then `python predict.py OUT.json --nodes 1 2 4 16`. Flags
replace what the file holds. The script needs only Python; measuring torch, a picture matplotlib.

Times are in seconds, sizes in bytes, rates in bytes per second, unless a name says otherwise.
"""

import argparse
import functools
import itertools
import json
import math
import os
import re
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

# Weights of torchvision's models with 1000 classes; of others torchvision itself is asked.
WEIGHTS = {
    "resnet18": 11689512,
    "resnet34": 21797672,
    "resnet50": 25557032,
    "resnet101": 44549160,
    "resnet152": 60192808,
    "mobilenet_v2": 3504872,
    "efficientnet_b0": 5288548,
    "convnext_tiny": 28589128,
    "vgg16": 138357544,
    "vit_b_16": 86567656,
    "vit_l_16": 304326632,
    "swin_t": 28288354,
}
# What is taken where neither a flag nor a file says it; the output names what was.
ASSUMED = {
    "gpus_per_node": 8,
    "between_us": 30.0,
    "within_gbit": 100.0,
    "within_us": 10.0,
    "call_us": 30.0,
    "backend": "nccl",
    "strategy": "ddp",
    "precision": "fp32",
    "bucket_mb": 25.0,
    "units": 16,
    "accumulate": 1,
    "slow_node": 1.0,
}
QUIET = {"strategy", "precision", "bucket_mb", "accumulate", "slow_node", "backend"}
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
MEBI = 2**20
BUCKET = 25 * MEBI  # DDP's own
FIRST_BUCKET = MEBI  # before these, so that sending begins early
NOTABLE = 0.05  # of a step: what takes less is not said to limit
NOT_MODELLED = (
    "kernels of NCCL that slow the backward pass, several networks in one node, other jobs on the "
    "network, other collectives of a step, memory, validation, checkpoints"
)
TABLE = Path(__file__).resolve().parent / "results" / "predict.json"


# ---- The model


@dataclass(frozen=True)
class Setting:
    """What is known of a run.

    images, forward, backward: of one pass of one GPU. rest: the optimizer's step, once a step.
    weights: how many.
    between_*: from one node to another, all its GPUs together. within_*: from one GPU to another of
    the same node. *_latency: of one message. call: of one collective, however small.
    ready: (bytes, share of backward after which it is there) of each gradient; None for weights
    that are spread evenly.
    loader: images per second of a node's loader.
    uneven: standard deviation of a step, as a share of it. slow_node: how many times as long one of
    the nodes computes.
    gather, scatter: how many times as long as a ring these two take (gloo's reduce_scatter is an
    all_reduce); gather_call, scatter_call: what they cost however small.
    failures: of one node in a second. lost: seconds that each costs.
    """

    nodes: int
    gpus: int
    images: float
    forward: float
    backward: float
    rest: float
    weights: float
    between_rate: float
    between_latency: float
    within_rate: float
    within_latency: float
    call: float = 0.0
    gradient_bytes: int = 4
    weight_bytes: int = 4
    strategy: str = "ddp"
    backend: str = "nccl"
    bucket_size: float = BUCKET
    ready: tuple | None = None
    units: int = 16
    accumulate: int = 1
    loader: float = math.inf
    uneven: float = 0.0
    slow_node: float = 1.0
    gather: float = 1.0
    scatter: float = 1.0
    gather_call: float = 0.0
    scatter_call: float = 0.0
    failures: float = 0.0
    lost: float = 0.0

    @property
    def world(self):
        return self.nodes * self.gpus


def ring(s, size, nodes, gpus):
    """Seconds of a reduce_scatter or an all_gather of `size` bytes; an all_reduce is one of each.

    W - 1 steps, in each of which every process sends a W-th to the next: (W - 1) (a + n / (W B)),
    with the latency a and the rate B of the slowest link (Patarasuk and Yuan, "Bandwidth optimal
    all-reduce algorithms for clusters of workstations", 2009; Thakur, Rabenseifner and Gropp,
    "Optimization of collective communication operations in MPICH", 2005). A ring enters and leaves
    each node once, so its processes do not share the link between nodes.

    gloo cuts a W-th into two segments or more, of 1 MiB at most, and has two of them under way:
    while one is sent, the other one travels. A step is then as long as the longer of sending,
    n / (W B), and half of what all segments one after the other would take (gloo/allreduce.cc).
    """
    world = nodes * gpus
    if world == 1:
        return 0.0
    rates = ([s.between_rate] if nodes > 1 else []) + ([s.within_rate] if gpus > 1 else [])
    latency = s.between_latency if nodes > 1 else s.within_latency
    sending = size / world / min(rates)
    if s.backend == "gloo":
        segments = max(2, math.ceil(size / world / MEBI))
        return (world - 1) * max(sending, (sending + segments * latency) / 2)
    return (world - 1) * (latency + sending)


def all_reduce(s, size, nodes, gpus):
    """Seconds of an all_reduce of `size` bytes: a ring's, or with NCCL a tree's if that is faster.

    A tree goes up and down log2 of the nodes, and a chain in each, and sends every byte twice:
    2 log2(N) a_between + 2 (G - 1) a_within + 2 n / B (Sanders, Speck and Traeff, "Two-tree
    algorithms for full bandwidth broadcast, reduction and scan", 2009; in NCCL since 2.4:
    https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4/). Between two
    nodes one of the trees goes each way with its half, up and down: every byte is sent once
    (https://github.com/NVIDIA/nccl-tests/issues/196).
    """
    if nodes * gpus == 1:
        return 0.0
    seconds = 2 * ring(s, size, nodes, gpus)
    if s.backend == "nccl" and nodes > 1:
        sending = (1 if nodes == 2 else 2) * size / s.between_rate
        if gpus > 1:
            sending = max(sending, 2 * size / s.within_rate)
        latency = math.log2(nodes) * s.between_latency + (gpus - 1) * s.within_latency
        seconds = min(seconds, 2 * latency + sending)
    return seconds


def buckets(s):
    """[(bytes, share of the backward pass after which they can be sent)], as DDP fills them.

    Weight by weight, in the order of their gradients, until each holds bucket_size (DDP's
    bucket_cap_mb; Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
    Training", 2020, section 3.2.3); where that is not given, the first one 1 MiB. Gradients are in
    float32 in them: what sends bf16 makes these of a bucket that is full, so half of it is sent.
    """
    total, share_sent = s.weights * s.gradient_bytes, s.gradient_bytes / 4
    if s.ready:
        scale = total / sum(size for size, _ in s.ready)
        gradients = [(size * scale, share) for size, share in s.ready]
    else:  # not known: parts that are alike
        count = math.ceil(max(50, min(10000, 8 * 4 * s.weights / s.bucket_size)))
        gradients = [(total / count, (number + 1) / count) for number in range(count)]
    first = FIRST_BUCKET if s.bucket_size == BUCKET else s.bucket_size
    found, filled, limit = [], 0.0, first * share_sent
    for size, share in gradients:
        filled += size
        if filled >= limit:
            found.append((filled, share))
            filled, limit = 0.0, s.bucket_size * share_sent
    return found + ([(filled, gradients[-1][1])] if filled else [])


def slowest(s):
    """How many times as long as usual the slowest GPU computes.

    Steps that differ at random, with the standard deviation `uneven`, are as long as the longest of
    all: its expected value is about that of the normal distribution at (W - 3/8) / (W + 1/4)
    (Blom, "Statistical estimates and transformed beta-variables", 1958).
    """

    def longest(count):
        place = statistics.NormalDist().inv_cdf((count - 0.375) / (count + 0.25))
        return 1 + s.uneven * max(0.0, place)

    return max(longest(s.world), s.slow_node * longest(s.gpus))


def ddp_pass(s):
    """Seconds of the last forward and backward pass of a step, with its exchange.

    A bucket is sent when it is full and the one before it is through, while the backward pass goes
    on; the pass ends with the later of both (Li et al., 2020, section 4.2).
    """
    forward, backward = s.forward * slowest(s), s.backward * slowest(s)
    sent = 0.0
    if s.world > 1:
        for size, share in buckets(s):
            sent = max(sent, forward + share * backward)
            sent += s.call + all_reduce(s, size, s.nodes, s.gpus)
    return max(sent, forward + backward)


def sharded_pass(s, scatters):
    """Seconds of one forward and backward pass of FSDP, or of HSDP: gathers and scatters.

    The weights lie in parts on all GPUs (HSDP: of one node) and are gathered unit by unit before
    each forward and each backward computation, the next unit's while this one computes; after the
    backward computation the gradients are reduced to their parts (HSDP: and these between the
    nodes). That is 3 times a ring's half, 1.5 times DDP's bytes (Zhao et al., "PyTorch FSDP:
    Experiences on Scaling Fully Sharded Data Parallel", 2023, sections 3.2 and 3.3; Rajbhandari
    et al., "ZeRO", 2020, section 7). With gloo nothing overlaps: FSDP waits for each on a CPU.

    scatters: whether gradients are reduced in this pass: not before the last of an accumulation.
    """
    nodes, gpus = (1, s.gpus) if s.strategy == "hsdp" else (s.nodes, s.gpus)
    part = s.weights / s.units
    gather = scatter = 0.0
    if nodes * gpus > 1:
        gather = s.gather_call + s.gather * ring(s, part * s.weight_bytes, nodes, gpus)
        scatter = s.scatter_call + s.scatter * ring(s, part * s.gradient_bytes, nodes, gpus)
    if s.strategy == "hsdp" and s.nodes > 1:
        # All GPUs of a node send their part at once, over the one link.
        shared = replace(s, between_rate=s.between_rate / s.gpus)
        scatter += s.call + all_reduce(shared, part * s.gradient_bytes / s.gpus, s.nodes, 1)
    if not scatters:
        scatter = 0.0
    forward = s.forward * slowest(s) / s.units
    backward = s.backward * slowest(s) / s.units
    if s.backend == "gloo":
        return s.units * (forward + backward + 2 * gather + scatter)
    network = computed = 0.0  # until when each is busy
    previous = 0.0  # when the computation before the current one began: a gather may begin then
    for _ in range(s.units):
        network = max(network, previous) + gather
        previous = max(computed, network)
        computed = previous + forward
    waiting = 0  # a unit whose gradients are computed, and not yet sent
    for number in range(s.units):
        if number:  # the last unit of the forward pass is still there
            network = max(network, previous) + gather
        begins = max(computed, network if number else computed)
        if waiting:
            network = max(network, computed) + scatter
        previous, computed, waiting = begins, begins + backward, 1
    return max(computed, max(network, computed) + scatter)


def step_seconds(s):
    """Seconds of one step, of `accumulate` passes of which the last exchanges the gradients.

    The loader works meanwhile: the longer of both counts. All wait for the slowest node.
    """
    alone = (s.forward + s.backward) * slowest(s)
    if s.strategy == "ddp":
        seconds = (s.accumulate - 1) * alone + ddp_pass(s)
    else:
        seconds = (s.accumulate - 1) * sharded_pass(s, False) + sharded_pass(s, True)
    seconds += s.rest * slowest(s)
    return max(seconds, s.gpus * s.images * s.accumulate / s.loader)


def speed(s):
    """Images per second of all GPUs.

    What failures cost: each loses the restart and half of what lies between two checkpoints, and
    some node fails `nodes` times as often as one (Young, "A first order approximation to the
    optimum checkpoint interval", 1974).
    """
    useful = 1 / (1 + s.nodes * s.failures * s.lost)
    return useful * s.world * s.images * s.accumulate / step_seconds(s)


def computing(s):
    """Seconds of the same step on one GPU that waits for nothing."""
    return s.accumulate * (s.forward + s.backward) + s.rest


def linear(s):
    """The share of the images per second that as many GPUs alone would have."""
    return speed(s) * computing(s) / (s.world * s.images * s.accumulate)


def limited_by(s):
    """What makes a step longer than computing: that which alone would make it longest.

    Or failures, where they take more than all that.
    """
    free = replace(
        s,
        between_rate=math.inf,
        within_rate=math.inf,
        between_latency=0.0,
        within_latency=0.0,
        call=0.0,
        gather_call=0.0,
        scatter_call=0.0,
        loader=math.inf,
        uneven=0.0,
        slow_node=1.0,
    )
    alone = {
        "loader": replace(free, loader=s.loader),
        "network": replace(free, between_rate=s.between_rate, within_rate=s.within_rate),
        "latency": replace(
            free,
            between_latency=s.between_latency,
            within_latency=s.within_latency,
            call=s.call,
            gather_call=s.gather_call,
            scatter_call=s.scatter_call,
        ),
        "uneven steps": replace(free, uneven=s.uneven),
        "slow node": replace(free, slow_node=s.slow_node),
    }
    longer = step_seconds(s) / computing(s) - 1
    if s.nodes * s.failures * s.lost > max(NOTABLE, longer):
        return "failures"
    if longer <= NOTABLE:
        return "computing"
    return max(alone, key=lambda name: step_seconds(alone[name]))


def remedies(s):
    """{what one could do: the setting then}. Those that change the training say so."""
    found = {
        "twice the images per GPU": replace(
            s, images=2 * s.images, forward=2 * s.forward, backward=2 * s.backward
        ),
        "4 passes a step (accumulation)": replace(s, accumulate=4 * s.accumulate),
    }
    if s.gradient_bytes == 4 and s.world > 1:
        found["gradients in bf16"] = replace(s, gradient_bytes=2)
    if s.nodes > 1:
        found["a network twice as fast"] = replace(s, between_rate=2 * s.between_rate)
    if s.gpus > 1:
        found["a network in each node twice as fast"] = replace(s, within_rate=2 * s.within_rate)
    if s.strategy == "fsdp" and s.nodes > 1:
        found["HSDP"] = replace(s, strategy="hsdp")
    if s.strategy == "ddp" and s.bucket_size < 100 * MEBI:
        found["buckets of 100 MiB"] = replace(s, bucket_size=100 * MEBI)
    if s.loader < math.inf:
        found["twice the loader workers"] = replace(s, loader=2 * s.loader)
    if s.failures:
        found["half as much lost by a failure (checkpoints, restart)"] = replace(s, lost=s.lost / 2)
    if s.slow_node > 1:
        found["another node for the slow one"] = replace(s, slow_node=1.0)
    return found


def gains(s):
    """[(what would help, by which share)], most first; only what gives 2 % or more."""
    found = [(name, speed(changed) / speed(s) - 1) for name, changed in remedies(s).items()]
    return sorted((one for one in found if one[1] >= 0.02), key=lambda one: -one[1])


def network_for(s, share):
    """The bytes per second between nodes with which it has this share of linear, or None."""
    if linear(replace(s, between_rate=math.inf)) < share:
        return None
    low, high = 0.0, 1.0
    while linear(replace(s, between_rate=high)) < share:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        enough = linear(replace(s, between_rate=middle)) >= share
        low, high = (low, middle) if enough else (middle, high)
    return high


# ---- The command


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ValueError(f"{message} (see --help)")


def number(lowest, kind=float):
    """A number as people write it: 25e6, 25M, 25,000,000."""

    def convert(text):
        plain = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
        times = {"K": 10**3, "M": 10**6, "B": 10**9}.get(plain[-1:].upper(), 1)
        value = kind(plain if times == 1 else plain[:-1]) * times
        if not lowest <= value < math.inf:
            raise argparse.ArgumentTypeError(f"must be {lowest:g} or more, not {text}")
        return value

    convert.__name__ = kind.__name__
    return convert


def layout_of(text):
    """(nodes, GPUs of each) of "2x8"; (2, None) of "2"."""
    nodes, times, gpus = text.partition("x")
    if not (nodes.strip("0").isdigit() and (gpus.strip("0").isdigit() or not times)):
        raise argparse.ArgumentTypeError(f"{text} is neither a number of nodes nor like 2x8")
    return int(nodes), (int(gpus) if times else None)


def parse_args(words=None):
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    add, some, count = parser.add_argument, number(1e-9), number(1, int)
    add("file", nargs="?", metavar="OUT.json", help="what --measure wrote")
    row = dict(type=layout_of, nargs="+", metavar="N")
    add("--nodes", "--nnodes", **row, help="a row for each, also 2x8 16x1; default: 1 2 4 8")
    add("--gpus-per-node", "--nproc-per-node", type=count, metavar="G", help="default: 8")
    add("--arch", metavar="NAME", help="a model of torchvision, for its number of weights")
    add("--weights", type=number(1000), metavar="N", help="how many, as 25M, in place of --arch")
    add("--gradient-mb", type=some, help="the gradients as sent, in MB, in place of both")
    add("--images", type=some, help="that one GPU takes at once, in one pass")
    add("--step-ms", type=some, help="of one GPU alone: forward, backward, optimizer")
    add("--forward-ms", type=some, help="of these; default: a third")
    add("--between-gbit", type=some, help="Gbit/s of a node's network, for all its GPUs together")
    add("--between-us", type=number(0), help="latency, microseconds; default: 30")
    add("--within-gbit", type=some, help="Gbit/s between two GPUs of a node; default: 100")
    add("--within-us", type=number(0), help="latency, microseconds; default: 10")
    add("--call-us", type=number(0), help="a collective of any size, microseconds; default: 30")
    add("--backend", choices=["nccl", "gloo"], help="default: nccl")
    add("--strategy", choices=["ddp", "fsdp", "hsdp"], help="default: ddp")
    add("--precision", choices=BYTES, help="in which gradients are sent; default: fp32")
    add("--gather", choices=BYTES, help="in which FSDP gathers weights; default: --precision")
    add("--bucket-mb", type=some, help="DDP's bucket_cap_mb; default: 25")
    add("--units", type=count, help="parts that FSDP gathers one by one; default: 16")
    add("--accumulate", type=count, help="passes a step, of which the last sends; default: 1")
    add("--loader", type=some, help="images/s of one node's loader; default: no limit")
    add("--uneven-percent", type=number(0), help="standard deviation of a step; default: 0")
    add("--slow-node", type=number(1), metavar="X", help="one node computes X times as long")
    add("--epoch-images", type=count, help="also print the seconds of an epoch")
    add("--fails-days", type=some, help="in how many days one node fails once")
    add("--lost-minutes", type=some, help="a failure costs; default: 30")
    add("--plot", metavar="FILE", help="a picture; without matplotlib, bars of text")
    add("--measure", metavar="OUT.json", help="below torchrun: measure, and write the file")
    add("--model", metavar="MODULE:FUNCTION", help="--measure: gives (net, loss), see measure()")
    add("--batches", metavar="MODULE:FUNCTION", help="--measure: gives a node's loader, a process")
    return parser.parse_args(words)


def main(words=None):
    try:
        args = parse_args(words)
        if args.measure:
            measure(args)
        else:
            show(*report(args))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":  # torchrun sets it: one line from each node
            time.sleep(30)  # the first of the node ends all; else this process has the error alone
        print("error:", (str(error) or type(error).__name__).splitlines()[0], file=sys.stderr)
        return 2
    return 0


def show(*lines):
    encoding = sys.stdout.encoding or "ascii"
    text = "\n".join(lines).encode(encoding, "backslashreplace").decode(encoding)
    print(text, flush=True)


def report(args):
    """The lines of the output: the table, what it says, and what it does not know."""
    values, assumed = gather_values(args)
    settings = [setting(values, *layout) for layout in values["nodes"]]
    one = replace(settings[0], nodes=1, gpus=1, loader=math.inf, slow_node=1.0, uneven=0.0)
    one = replace(one, failures=0.0)
    rows = [("1 GPU", one), *((layout(s), s) for s in settings if s.world > 1)]
    heads = ["", "images/s", "of linear", "ms/step", "limited by", "would help most"]
    if args.epoch_images:
        heads.insert(4, "s/epoch")
    table = [heads]
    for name, s in rows:
        remedies = gains(s) if s.world > 1 else []
        cells = [name, digits(speed(s)), f"{linear(s):.0%}", digits(1000 * step_seconds(s))]
        cells += [limited_by(s), f"{remedies[0][0]} (+{remedies[0][1]:.0%})" if remedies else "-"]
        if args.epoch_images:
            cells.insert(4, digits(args.epoch_images / speed(s)))
        table.append(cells)
    lines = list(aligned(table))
    if args.plot:
        lines += ["", *plot(rows, args.plot)]
    lines += ["", *explain(rows[-1][1])]
    for name, s in rows:
        if s.nodes > 1 and linear(s) < 0.9 and (rate := network_for(s, 0.9)):
            given = f"you have {digits(8 * s.between_rate / 1e9)}"
            lines.append(f"{name}: for 90% of linear {digits(8 * rate / 1e9)} Gbit/s; {given}.")
    if assumed:
        lines.append("Assumed, for nothing said it: " + ", ".join(assumed) + ".")
    if several := [s for _, s in rows if s.world > 1]:
        lines.append(known_error(several))
    lines.append(f"Not modelled: {NOT_MODELLED}.")
    return lines


def layout(s):
    return f"{s.nodes} x {s.gpus} GPUs"


def digits(value):
    """At least three of them."""
    return f"{value:,.{max(0, 2 - math.floor(math.log10(value)))}f}"


def aligned(table):
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    last = len(widths) - 2  # from here on it is text
    for row in table:
        cells = [
            cell.ljust(width) if i == 0 or i >= last else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def explain(s):
    """What the remedies would give for the last row."""
    yield "Linear: as many GPUs of which none waits."
    found = gains(s) if s.world > 1 else []
    if found:
        batch = f"{s.world * s.images * s.accumulate:,.0f}"
        yield f"{layout(s)}: {', '.join(f'{name} {gain:+.0%}' for name, gain in found)}."
        yield f"(More images a step change the training: now {batch}. Mind the learning rate.)"


def gather_values(args):
    """({name: value} of flags, file and ASSUMED; what was assumed, as texts)."""
    given = {key: value for key, value in vars(args).items() if value is not None}
    values = (read(args.file) if args.file else {}) | given
    values.setdefault("nodes", [(nodes, None) for nodes in (1, 2, 4, 8)])
    assumed = []
    for name, value in ASSUMED.items():
        if name not in values:
            values[name] = value
            needed = name not in QUIET and (name != "units" or values["strategy"] != "ddp")
            if name == "gpus_per_node":
                needed = any(gpus is None for _, gpus in values["nodes"])
            if name in ("within_gbit", "within_us"):
                needed = any((gpus or values["gpus_per_node"]) > 1 for _, gpus in values["nodes"])
            if name == "between_us":
                needed = any(nodes > 1 for nodes, _ in values["nodes"])
            if needed:
                assumed.append(f"--{name.replace('_', '-')} {value:g}")
    asked = [(nodes, gpus or values["gpus_per_node"]) for nodes, gpus in values["nodes"]]
    values["nodes"] = sorted(set(asked), key=lambda layout: (math.prod(layout), layout))
    most = max(nodes for nodes, _ in asked)
    if args.forward_ms and not args.step_ms:
        raise ValueError("--forward-ms needs --step-ms")
    if args.file and args.images and not args.step_ms:
        measured = read(args.file).get("images", args.images)
        if measured != args.images:
            raise ValueError(
                f"{args.file} was measured with {measured:g} images: of {args.images:g} give "
                "--step-ms too, or measure again"
            )
    if args.step_ms:  # not the file's
        values.pop("forward_s", None)
    if "step_ms" not in values and "forward_s" not in values:
        raise ValueError("how long is a step? give --step-ms, or a file of --measure")
    given_ways = [name for name in ("arch", "weights", "gradient_mb") if name in given]
    if len(given_ways) > 1:
        raise ValueError("give one of --arch, --weights and --gradient-mb")
    if given_ways:
        values.pop("ready", None)
    if "gradient_mb" in given:
        values["weights"] = args.gradient_mb * 1e6 / BYTES[values["precision"]]
    elif "arch" in given:
        values["weights"] = count_weights(args.arch)
    elif "weights" not in values:
        raise ValueError("how large is the model? give --arch, --weights or --gradient-mb")
    if "images" not in values:
        raise ValueError("how many images does one GPU take in a step? give --images")
    if "lost_minutes" in given and "fails_days" not in given:
        raise ValueError("--lost-minutes needs --fails-days")
    if not args.file and most > 1 and "between_gbit" not in values:
        raise ValueError("how fast is the network? give --between-gbit, or --nodes 1")
    if "between_gbit" not in values:
        if most > 1:
            raise ValueError(f"{args.file} was measured on one node: give --between-gbit as well")
        values["between_gbit"] = math.inf
    return values, assumed


def setting(values, nodes, gpus):
    """The Setting of these values on so many nodes of so many GPUs."""
    if "forward_s" in values:
        forward, backward, rest = (values[f"{part}_s"] for part in ("forward", "backward", "rest"))
    else:
        # Each layer's backward has two products for the one of its forward.
        step = values["step_ms"] / 1000
        forward = values.get("forward_ms", values["step_ms"] / 3) / 1000
        backward, rest = step - forward, 0.0
        if backward <= 0:
            raise ValueError("--forward-ms is not less than --step-ms")
    ready = values.get("ready")
    days = values.get("fails_days", math.inf)
    return Setting(
        nodes=nodes,
        gpus=gpus,
        images=values["images"],
        forward=forward,
        backward=backward,
        rest=rest,
        weights=values["weights"],
        between_rate=values["between_gbit"] * 1e9 / 8,
        between_latency=values["between_us"] / 1e6,
        within_rate=values["within_gbit"] * 1e9 / 8,
        within_latency=values["within_us"] / 1e6,
        call=values["call_us"] / 1e6,
        gradient_bytes=BYTES[values["precision"]],
        weight_bytes=BYTES[values.get("gather", values["precision"])],
        strategy=values["strategy"],
        backend=values["backend"],
        bucket_size=values["bucket_mb"] * MEBI,
        ready=tuple(map(tuple, ready)) if ready else None,
        units=values["units"],
        accumulate=values["accumulate"],
        loader=values.get("loader", math.inf),
        uneven=values.get("uneven_percent", 0.0) / 100,
        slow_node=values["slow_node"],
        gather=values.get("gather_factor", 1.0),
        scatter=values.get("scatter_factor", 1.0),
        gather_call=values.get("gather_call_us", values["call_us"]) / 1e6,
        scatter_call=values.get("scatter_call_us", values["call_us"]) / 1e6,
        failures=1 / (days * 86400),
        lost=60 * values.get("lost_minutes", 30.0),
    )


def read(path):
    """What --measure wrote. Raises ValueError for another file."""
    try:
        values = json.loads(Path(path).read_text())["measured"]
        ready = [number for pair in values["ready"] for number in pair]
        numbers = [value for key, value in values.items() if key not in ("backend", "ready")]
        needed = values["weights"], values["gpus_per_node"], values["forward_s"]
        if values["backend"] not in ("nccl", "gloo") or min(needed) <= 0:
            raise ValueError
        if not all(map(math.isfinite, numbers + ready)) or min(numbers + ready) < 0:
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is no file of --measure") from None
    except FileNotFoundError:
        if not path.isdigit():
            raise
        raise ValueError(f"{path}: several layouts are written as --nodes 2x8 16x1") from None
    return values


def count_weights(arch):
    if arch in WEIGHTS:
        return WEIGHTS[arch]
    try:
        import torch
        from torchvision.models import get_model
    except ImportError as error:
        known = ", ".join(WEIGHTS)
        raise ValueError(f"{error}: known without it are {known}; or give --weights") from None
    with torch.device("meta"):
        return sum(weight.numel() for weight in get_model(arch, weights=None).parameters())


# ---- What it cannot know


def known_error(settings):
    """One sentence: the errors that were measured on settings like these, or that none were."""
    unknown = "How wrong this may be is not measured: "
    try:
        rows = json.loads(TABLE.read_text())["runs"]
    except (OSError, ValueError, KeyError):
        return f"{unknown}results/predict.json, the table of errors, is not beside this script."
    kinds = {(s.strategy, limited_by(s)) for s in settings}
    alike = [row for row in rows if (row["strategy"], row["limit"]) in kinds and not row["fitted"]]
    if not alike:
        names = ", ".join(sorted(f"{a.upper()} limited by {b}" for a, b in kinds))
        return f"{unknown}of the {len(rows)} settings of the table none is {names}."
    asked = max(s.world for s in settings)
    nearest = min((row["world"] for row in alike), key=lambda world: abs(world - asked))
    most = max(row["world"] for row in alike)
    # The largest cluster is less well predicted: it, or all smaller ones.
    alike = [row for row in alike if (row["world"] == most) == (nearest == most)]
    errors, worlds = [row["error"] for row in alike], {row["world"] for row in alike}
    return (
        f"On {len(errors)} measured settings of these kinds the error of images/s was "
        f"{statistics.median(map(abs, errors)):.1%} (median), from {min(errors):+.1%} to "
        f"{max(errors):+.1%} (+: too fast): gloo, {' and '.join(map(str, sorted(worlds)))} "
        f"processes on one machine's CPUs; not on GPUs."
        + (f" Nothing above {most} was measured." if asked > most else "")
    )


# ---- Pictures


def plot(rows, path):
    """Write a picture of images/s, beside the linear ones. Without matplotlib: lines of text."""
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot
    except ImportError:
        yield f"(no {path}: a picture needs matplotlib)"
        yield from bars(rows)
        return
    sizes = [s.world for _, s in rows]
    figure, axis = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    alone = speed(rows[0][1])
    axis.plot(sizes, [alone * world for world in sizes], "--", color="#888888", label="linear")
    axis.plot(sizes, [speed(s) for _, s in rows], "o-", color="#0072B2", label="predicted")
    for _, s in rows[1:]:
        how = dict(textcoords="offset points", xytext=(4, -12), fontsize=8)
        axis.annotate(limited_by(s), (s.world, speed(s)), **how)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xticks(sizes, list(map(str, sizes)))
    axis.set_xlabel("GPUs")
    axis.set_ylabel("images/s")
    axis.grid(alpha=0.3)
    axis.legend()
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:  # a kind of file that it does not know
        raise ValueError(f"--plot {path}: {error}") from None
    yield f"drawn: {path}"


def bars(rows):
    """The share of linear of each row, as a bar."""
    for name, s in rows:
        share = linear(s)
        yield f"{name:>14} |{'#' * round(40 * share):<40}| {share:.0%}"


# ---- Measuring, below torchrun


SIZES = [4096, 65536, MEBI, 4 * MEBI, 16 * MEBI, 64 * MEBI]  # bytes of an all_reduce
LONGEST = 1.5  # seconds of a collective: no larger size is tried then


def measure(args):
    """Write to args.measure what one node, the network and the loader do; every rank calls it.

    The net is --arch of torchvision, which takes --images random ones of 224 pixels, or what the
    function of --model returns: (net, loss), where loss(model) runs the forward pass on a batch of
    your own and returns the loss as a tensor. --batches returns the loader of one process.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if missing := [name for name in names if name not in os.environ]:
        raise ValueError(f"--measure runs below torchrun: {missing[0]} is not set")
    rank, world, local_rank, gpus = (int(os.environ[name]) for name in names)
    import torch
    import torch.distributed as dist

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    net, loss = net_and_loss(args, device)
    batches = load(args.batches)() if args.batches else None
    if rank == 0:
        open(args.measure, "a").close()  # if it cannot be written, that is known now
    backend = args.backend or ("nccl" if cuda else "gloo")
    # By a ring each byte crosses the network as often as network() counts. By a tree NCCL sends
    # less between two nodes, and the network would seem faster than it is for more of them.
    os.environ.setdefault("NCCL_ALGO", "Ring")
    dist.init_process_group(backend)
    clock = Clock(dist, torch, device)
    measured = {"backend": backend, "gpus_per_node": gpus}
    if args.images:  # else the first prediction asks
        measured["images"] = args.images
    measured |= network(clock, rank, world, gpus) if world > 1 else {}
    measured |= one_step(clock, net, loss)
    if batches is not None:
        measured["loader"] = gpus * clock.mean(loader_speed(batches))
    if rank == 0:
        how = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "processes": world}
        how |= {"device": torch.cuda.get_device_name() if cuda else "CPU"}
        text = json.dumps({"measured": measured, "how": how}, indent=1)
        Path(f"{args.measure}.tmp").write_text(text + "\n")
        os.replace(f"{args.measure}.tmp", args.measure)  # whole, or not there
        show(f"written: {args.measure}. Now: python predict.py {args.measure} --nodes 1 2 4 8")
    dist.destroy_process_group()


def load(name):
    """The function that MODULE:FUNCTION names."""
    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())
    import importlib

    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{name} is no MODULE:FUNCTION: {error}") from None


def net_and_loss(args, device):
    import torch

    if args.model:
        net, loss = load(args.model)()
        return net.to(device), loss
    if not (args.arch and args.images):
        raise ValueError("which model? give --arch and --images, or --model MODULE:FUNCTION")
    from torchvision.models import get_model

    # As the full scripts train: channels_last, the fastest algorithms, and bf16 on GPUs.
    layout = {"memory_format": torch.channels_last}
    torch.backends.cudnn.benchmark = True
    net = get_model(args.arch, weights=None).to(device, **layout)
    images = torch.rand(int(args.images), 3, 224, 224, device=device).to(**layout)
    target = torch.zeros(len(images), dtype=torch.int64, device=device)

    def loss(model):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            return torch.nn.functional.cross_entropy(model(images), target)

    return net, loss


class Clock:
    """Times that are the same on all ranks, and what they are of."""

    def __init__(self, dist, torch, device):
        self.dist, self.torch, self.device = dist, torch, device

    def now(self):
        """Seconds, once the device has finished its work."""
        if self.device.type == "cuda":
            self.torch.cuda.synchronize()
        return time.perf_counter()

    def mark(self):
        """A moment in the work of the device; between() tells how far two are apart."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = self.torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first, second):
        """Seconds."""
        if self.device.type != "cuda":
            return second - first
        self.torch.cuda.synchronize()
        return first.elapsed_time(second) / 1000

    def agreed(self, value, how):
        value = self.torch.tensor(float(value), dtype=self.torch.float64, device=self.device)
        self.dist.all_reduce(value, op=how)
        return value.item()

    def longest(self, value):
        return self.agreed(value, self.dist.ReduceOp.MAX)

    def mean(self, value):
        return self.agreed(value, self.dist.ReduceOp.SUM) / self.dist.get_world_size()

    def collective(self, call, takes_part=True):
        """Seconds of a call, one behind the other, on the slowest rank: the median of three."""
        times = []
        count = 2
        for repeat in range(5):
            self.dist.barrier()
            start = self.now()
            if takes_part:
                for _ in range(count):
                    call()
            seconds = self.longest((self.now() - start) / count if takes_part else 0.0)
            if repeat == 1:  # the first was to warm up
                count = max(1, min(200, round(0.25 / seconds)))
            times.append(seconds)
            if repeat >= 1 and seconds > LONGEST:
                break
        return statistics.median(times[2:] or times[-1:])


def network(clock, rank, world, gpus):
    """{between_gbit, between_us, within_gbit, within_us, call_us} and a factor and a call of two.

    Latency and rate of a ring are those of all_reduce over SIZES, of all processes and of those of
    a node: of the smallest, and of the step between the two largest. The latency of a message and
    the cost of a call are told apart by the smallest one on two processes alone. all_gather and
    reduce_scatter are held against that ring: gather_factor, gather_call_us, and so on.
    """
    dist, torch, device = clock.dist, clock.torch, clock.device
    nodes = world // gpus
    groups = [range(first, first + gpus) for first in range(0, world, gpus)]
    mine = next(group for group in groups if rank in group)
    within = [dist.new_group(list(group)) for group in groups][groups.index(mine)]
    pair_ranks = [0, gpus] if nodes > 1 else [0, 1]
    pair = dist.new_group(pair_ranks)

    def curve(group, sizes=SIZES, takes_part=True):
        found = []
        for size in sizes:
            data = torch.zeros(size // 4, device=device)

            def call(data=data):
                dist.all_reduce(data, group=group)

            found.append((size, clock.collective(call, takes_part)))
            if found[-1][1] > LONGEST / 4:
                break
        return found

    values = {}
    start, slope = fit(curve(None))
    rate = 2 * (world - 1) / world / slope
    (_, of_two), *_ = curve(pair, SIZES[:1], rank in pair_ranks)
    latency = start / 4  # half for each: two processes cannot tell latency and call apart
    if world > 2:
        latency = max(0.0, (start - of_two) / (2 * (world - 2)))
    call = max(0.0, of_two - 2 * latency)
    kind = "between" if nodes > 1 else "within"
    values |= {f"{kind}_gbit": rate * 8 / 1e9, f"{kind}_us": latency * 1e6, "call_us": call * 1e6}
    if nodes > 1 and gpus > 1:
        start, slope = fit(curve(within))
        values["within_gbit"] = 2 * (gpus - 1) / gpus / slope * 8 / 1e9
        values["within_us"] = max(0.0, start - call) / (2 * (gpus - 1)) * 1e6

    # Newer versions of torch have other names for these two, and warn of the older ones.
    gathers = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatters = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    for name in ("gather", "scatter"):
        points = []
        for size in (4096, 4 * MEBI):  # of all parts together
            part = torch.zeros(size // 4 // world, device=device)
            whole = torch.zeros(world * len(part), device=device)
            what = (gathers, whole, part) if name == "gather" else (scatters, part, whole)
            points.append((4 * len(whole), clock.collective(functools.partial(*what))))
        start, slope = fit(points)
        values[f"{name}_factor"] = slope * rate * world / (world - 1)
        values[f"{name}_call_us"] = max(0.0, start - (world - 1) * latency) * 1e6
    return values


def fit(points):
    """(seconds of the smallest size, seconds per byte between the two largest) of (size, seconds).

    In between neither latency nor rate may be what counts.
    """
    (_, start), *_ = points
    (size, seconds), (larger, longer) = points[-2:]
    slope = (longer - seconds) / (larger - size)
    return start, slope if slope > 0 else longer / larger  # where they differ at random alone


def one_step(clock, net, loss, seconds=4.0):
    """{weights, forward_s, backward_s, rest_s, uneven_percent, ready} of a step that sends nothing.

    ready: [bytes as float32, share of the backward pass] of each gradient, in their order.
    """
    torch = clock.torch
    trained = [weight for weight in net.parameters() if weight.requires_grad]
    optimizer = torch.optim.SGD(trained, 1e-9, momentum=0.9)
    seen, times, shares = [], [], []
    hooks = [
        weight.register_post_accumulate_grad_hook(
            lambda weight: seen.append((4 * weight.numel(), clock.mark()))
        )
        for weight in trained
    ]
    limit = time.perf_counter() + seconds
    for number in range(100):
        seen.clear()
        marks = [clock.mark()]
        value = loss(net)
        marks.append(clock.mark())
        value.backward()
        marks.append(clock.mark())
        optimizer.step()
        optimizer.zero_grad()
        marks.append(clock.mark())
        parts = [clock.between(a, b) for a, b in itertools.pairwise(marks)]
        if number > 1:  # the first two are to warm up
            times.append(parts)
            shares.append([(s, clock.between(marks[1], mark) / parts[1]) for s, mark in seen])
        late = clock.longest(time.perf_counter() > limit)
        if number >= 4 and late:
            break
    for hook in hooks:
        hook.remove()
    forward, backward, rest = (statistics.median(part) for part in zip(*times, strict=True))
    whole = [sum(parts) for parts in times]
    middle = statistics.median(whole)
    deviation = 1.4826 * statistics.median(abs(value - middle) for value in whole)
    ready = [
        [part[0][0], min(1.0, statistics.median(share for _, share in part))]
        for part in zip(*shares, strict=True)
    ]
    return {
        "weights": sum(size for size, _ in ready) // 4,
        "forward_s": clock.mean(forward),
        "backward_s": clock.mean(backward),
        "rest_s": clock.mean(rest),
        "uneven_percent": 100 * clock.mean(deviation / middle),
        "ready": ready,
    }


def loader_speed(batches, seconds=4.0):
    """Images per second of a loader, from its third batch on."""
    images, start = 0, time.perf_counter()
    for number, batch in enumerate(batches):
        now = time.perf_counter()
        if number > 1:
            images += len(batch[0] if isinstance(batch, (tuple, list)) else batch)
        else:
            start = now
        if now - start > seconds:
            break
    if not images:
        raise ValueError("--batches gives fewer than three batches")
    return images / (now - start)


if __name__ == "__main__":
    sys.exit(main())
