"""How wrong predict.py is: on a cluster in a box, and on speeds that others have published.

$ python -m benchmarks.predict

What predict.py measures on two nodes with two processes each is all that it is told; then every
other setting is predicted and run. The processes of the box compute nothing: a layer's forward and
backward sleep as long as a GPU would take, so that two cores can be sixteen GPUs. What is sent is
sent: by DDP and FSDP of torch, with gloo.
"""

import contextlib
import sys
import time
from dataclasses import dataclass, replace
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import predict
from benchmarks import published
from benchmarks.box import Box, Ranks, missing
from benchmarks.harness import clean_up_on_sigterm, make_parser, report

IMAGES = 32  # that a process is said to take at once
LAYERS, UNITS = 16, 4  # a unit of FSDP has several layers
# A model of the box: MiB of a layer's float32 weights, and seconds of a forward and backward pass.
MODELS = {"short": (0.5, 0.3), "long": (0.5, 1.0), "large": (1.5, 0.3)}
FITTED = (2, 2)  # nodes, and processes on each, on which predict.py measures
PATIENCE = 120  # seconds for one setting


@dataclass(frozen=True)
class Job:
    """One setting of the box. between: Mbit/s; latency: ms; loader: images/s of a process."""

    nodes: int
    gpus: int
    between: float = 200
    model: str = "short"
    strategy: str = "ddp"
    precision: str = "fp32"
    bucket_mb: float = 2.0
    accumulate: int = 1
    slow_node: float = 1.0
    loader: float = 0.0
    latency: float = 0.0
    loss: float = 0.0

    @property
    def name(self):
        usual = Job(self.nodes, self.gpus)
        parts = [f"{self.nodes} x {self.gpus}", self.strategy.upper(), f"{self.between:g} Mbit/s"]
        words = {
            "model": f"{self.model} model",
            "precision": "gradients in bf16",
            "bucket_mb": f"buckets of {self.bucket_mb:g} MiB",
            "accumulate": f"{self.accumulate} passes",
            "slow_node": f"a node {self.slow_node:g} times slower",
            "loader": f"a loader of {self.loader:g} images/s",
            "latency": f"{self.latency:g} ms",
            "loss": f"{self.loss:.2%} lost",
        }
        parts += [text for key, text in words.items() if getattr(self, key) != getattr(usual, key)]
        return ", ".join(parts)


def settings():
    """All jobs: the layouts, each with what is usual, then what is special."""
    layouts = [(4, 1), (8, 1), (16, 1), (2, 4), (4, 2), (4, 4)]
    usual = [
        dict(between=100),
        dict(between=400),
        dict(between=400, model="long"),
        dict(between=200, model="large", bucket_mb=25.0),
        dict(between=100, precision="bf16"),
        dict(between=200, strategy="fsdp"),
    ]
    jobs = [Job(*layout, **one) for layout in layouts for one in usual]
    jobs += [Job(*layout, strategy="hsdp", between=100) for layout in [(2, 4), (4, 2), (4, 4)]]
    jobs += [Job(*layout, accumulate=4, between=100) for layout in [(4, 1), (2, 4), (8, 1)]]
    jobs += [Job(*layout, slow_node=1.5, between=400) for layout in [(8, 1), (4, 2)]]
    jobs += [Job(*layout, loader=45.0, between=400) for layout in [(4, 1), (8, 1), (2, 4)]]
    jobs += [Job(4, 1, bucket_mb=0.5, between=400), Job(8, 1, bucket_mb=0.5, between=400)]
    far = dict(latency=2.0, between=200)
    jobs += [Job(4, 1, **far), Job(8, 1, **far), Job(4, 2, **far), Job(2, 4, **far)]
    jobs += [Job(4, 1, loss=0.0005, **far)]
    return jobs


def quick():
    """Six of them, for a test."""
    return [
        Job(4, 1, between=100),
        Job(4, 1, between=400, model="long"),
        Job(4, 1, between=100, precision="bf16"),
        Job(4, 1, between=400, strategy="fsdp"),
        Job(4, 1, between=400, loader=45.0),
        Job(4, 1, between=400, slow_node=1.5),
    ]


def parse_args():
    parser = make_parser("predict", __doc__, rounds=5)
    add = parser.add_argument
    add("--quick", action="store_true", help="six settings, in a minute")
    add("--published", action="store_true", help="only what others have published: no box")
    return parser.parse_args()


def main():
    args = parse_args()
    clean_up_on_sigterm()
    rows = []
    if not args.published:
        if lacks := missing():
            sys.exit(f"error: the box {lacks}")
        jobs = quick() if args.quick else settings()
        models = sorted({job.model for job in jobs})
        links = sorted({(job.between, job.latency, job.loss) for job in jobs})
        measured = fit(links, models)
        for group, own in grouped(jobs):
            rows += run_group(group, own, measured, args.rounds)
        if not args.quick:
            rows.append(killed(measured, args.rounds))
    others = published.rows()
    columns = {
        "": "name",
        "limited by": "limit",
        "measured (s)": "measured_s",
        "predicted (s)": "predicted_s",
        "error": "percent",
    }
    for row in rows:
        row["percent"] = f"{row['error']:+.1%}"
    report("predict", args, rows, columns, published=others)
    summary("the box", [row["error"] for row in rows])
    summary("published", [row["error"] for row in others])


def summary(name, errors):
    sizes = sorted(map(abs, errors))
    if sizes:
        print(f"{name}: {len(sizes)} settings, median {median(sizes):.1%}, largest {sizes[-1]:.1%}")


# ---- What is measured


def fit(links, models):
    """{link: what predict.py measures of it}, and {model: of it}, on the cluster FITTED."""
    nodes, gpus = FITTED
    found = {}
    for far in sorted({link[1:] for link in links}):
        rates = [link[0] for link in links if link[1:] == far]
        with contextlib.ExitStack() as stack:
            box = ranks = None
            for rate in rates:
                link = (rate, *far)
                if box is None or any(far):
                    stack.close()
                    box = stack.enter_context(Box(nodes, *link))
                    ranks = stack.enter_context(Ranks(box, gpus, serve))
                else:
                    box.set_rate(rate)
                found[link] = ask(ranks, ("network", gpus))
                print("measured:", link, short(found[link]), flush=True)
            if not any(far):
                for model in models:
                    found[model] = ask(ranks, ("step", model))
    return found


def short(values):
    return {key: float(f"{value:.3g}") for key, value in values.items()}


def grouped(jobs):
    """[((nodes, gpus, latency, loss), its jobs)]: a box is made once for each."""
    groups = {}
    for job in jobs:
        groups.setdefault((job.nodes, job.gpus, job.latency, job.loss), []).append(job)
    return groups.items()


def run_group(group, jobs, measured, rounds):
    nodes, gpus, latency, loss = group
    rows = []
    with Box(nodes, jobs[0].between, latency, loss) as box, Ranks(box, gpus, serve) as ranks:
        for job in jobs:
            if not latency and not loss:
                box.set_rate(job.between)
            seconds = median(ask(ranks, ("train", job, rounds)))
            rows.append(row_of(job, predicted(job, measured), seconds))
            print(rows[-1]["name"], f"{rows[-1]['error']:+.1%}", flush=True)
    return rows


def predicted(job, measured):
    """The Setting of a job, of what was measured on another cluster."""
    values = dict(predict.ASSUMED) | measured[job.between, job.latency, job.loss]
    values |= measured[job.model] | {"images": IMAGES, "backend": "gloo", "units": UNITS}
    values |= {"bucket_mb": job.bucket_mb, "slow_node": job.slow_node}
    values |= {"strategy": job.strategy, "accumulate": job.accumulate, "gather": "fp32"}
    values |= {"precision": job.precision}
    if job.loader:
        values["loader"] = job.gpus * job.loader
    return predict.setting(values, job.nodes, job.gpus)


def row_of(job, setting, seconds):
    """A row of the table; error: of the predicted images per second."""
    expected = predict.step_seconds(setting)
    return {
        "name": job.name,
        "nodes": job.nodes,
        "gpus": job.gpus,
        "world": job.nodes * job.gpus,
        "strategy": job.strategy,
        "limit": predict.limited_by(setting),
        "fitted": (job.nodes, job.gpus) == FITTED,
        "measured_s": seconds,
        "predicted_s": expected,
        "error": seconds / expected - 1,
    }


def killed(measured, rounds, steps=30, every=10, kills=(13, 27)):
    """A row: a node is killed twice, and all start again from the last of the saved steps."""
    job = Job(4, 1, between=400)
    restart = train_with_kills(replace(job, nodes=2), steps=8, every=4, kills=(5,))["restart"]
    found = train_with_kills(job, steps, every, kills)
    setting = predicted(job, measured)
    alone = (steps - 1) * predict.step_seconds(setting)
    lost = restart + every / 2 * predict.step_seconds(setting)
    failing = replace(setting, failures=len(kills) / alone / job.nodes, lost=lost)
    row = row_of(job, setting, found["seconds"] / (steps - 1))
    expected = job.nodes * job.gpus * IMAGES / predict.speed(failing)
    error = row["measured_s"] / expected - 1
    name = f"{job.name}, a node killed {len(kills)} times"
    return row | {"name": name, "predicted_s": expected, "error": error, "limit": "failures"}


def train_with_kills(job, steps, every, kills):
    """{seconds: from the first step's end to the last one's, restart: of them}."""
    first = last = death = restart = None
    done, left, gaps = 0, list(kills), []
    with Box(job.nodes, job.between) as box:
        while done < steps:
            with Ranks(box, job.gpus, steps_from, job, done, steps) as ranks:
                last = None
                while done < steps:
                    done, moment = ranks.answer(PATIENCE)
                    first = first or moment
                    gaps += [moment - last] if last else []
                    if death and restart is None:
                        restart = moment - death
                    last = moment
                    if left and done == left[0]:
                        ranks.processes[-1].kill()
                        left.pop(0)
                        death = death or time.monotonic()
                        done -= done % every
                        break
    return {"seconds": last - first, "restart": restart - median(gaps)}


# ---- In the box


class Sleep(torch.autograd.Function):
    """A layer that computes nothing, for `seconds`: a third forward, two thirds backward."""

    @staticmethod
    def forward(ctx, data, weight, seconds):
        ctx.shape, ctx.seconds = weight.shape, seconds
        time.sleep(seconds / 3)
        return data.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds * 2 / 3)
        return gradient, torch.full(ctx.shape, 1e-3), None


class Layer(nn.Module):
    def __init__(self, mebibytes, seconds):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(int(mebibytes * predict.MEBI / 4)))
        self.seconds = seconds

    def forward(self, data):
        return Sleep.apply(data, self.weight, self.seconds)


def sleeping(model, times=1.0):
    mebibytes, seconds = MODELS[model]
    layers = [Layer(mebibytes, times * seconds / LAYERS) for _ in range(LAYERS)]
    size = LAYERS // UNITS
    return nn.Sequential(*[nn.Sequential(*layers[i : i + size]) for i in range(0, LAYERS, size)])


def loss_of(model):
    return model(torch.ones(1)).sum()


def ask(ranks, request):
    ranks.connection.send(request)
    return ranks.answer(PATIENCE)


def serve(rank, connection):
    """Answer requests, on all ranks the same, until killed."""
    dist.init_process_group("gloo")
    clock = predict.Clock(dist, torch, torch.device("cpu"))
    while True:
        request = [connection.recv() if rank == 0 else None]
        dist.broadcast_object_list(request)
        kind, *what = request[0]
        if kind == "network":
            answer = predict.network(clock, rank, dist.get_world_size(), *what)
        elif kind == "step":
            answer = predict.one_step(clock, sleeping(*what), loss_of, seconds=2.0)
        else:
            answer = train(rank, *what)
        if rank == 0:
            connection.send(answer)


def steps_from(rank, connection, job, first, last):
    """Train from one step to another; rank 0 tells each that is done, and when."""
    dist.init_process_group("gloo")
    step = trainer(rank, job)
    for number in range(first, last):
        step()
        if rank == 0:
            connection.send((number + 1, time.monotonic()))
    time.sleep(PATIENCE)  # until it is killed: what is sent last is still to be read


def train(rank, job, rounds):
    """Seconds of each step, without the first ones: until what a loader has ahead is used up."""
    step, times = trainer(rank, job), []
    first = 10 if job.loader else 2
    for _ in range(rounds + first):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return times[first:]


def trainer(rank, job):
    """A function that makes one step of the job."""
    slow = job.slow_node if rank // job.gpus == job.nodes - 1 else 1.0
    net = sleeping(job.model, slow)
    if job.strategy == "ddp":
        model = DistributedDataParallel(net, bucket_cap_mb=job.bucket_mb)
        if job.precision == "bf16":
            model.register_comm_hook(None, bf16_compress_hook)
    else:
        hsdp = job.strategy == "hsdp"
        shape = (job.nodes, job.gpus) if hsdp else (job.nodes * job.gpus,)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "parts")[-len(shape) :])
        for unit in net:
            fully_shard(unit, mesh=mesh)
        model = fully_shard(net, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), 1e-9, momentum=0.9)
    batches = iter(loader(job.loader)) if job.loader else None

    def step():
        for number in range(job.accumulate):
            if batches:
                next(batches)
            last = number == job.accumulate - 1
            quiet = contextlib.nullcontext()
            if job.strategy != "ddp":
                model.set_requires_gradient_sync(last)
            elif not last:
                quiet = model.no_sync()
            with quiet:
                loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def loader(speed):
    """Batches without end, made in the background at `speed` images/s, two of them ahead."""
    import queue
    import threading

    made = queue.Queue(2)

    def make():
        due = time.monotonic()
        while True:
            due = max(due + IMAGES / speed, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
            made.put(None)

    threading.Thread(target=make, daemon=True).start()
    while True:
        yield made.get()


if __name__ == "__main__":
    main()
