"""What is measured, how it is averaged over processes, and how it is shown and kept."""

import sys
import time

import torch
import torch.distributed as dist
from tqdm import tqdm


class AverageMeter:
    """The latest value of something and its running mean."""

    def __init__(self, name, digits=3):
        self.name, self.digits = name, digits
        self.reset()

    def reset(self):
        self.val, self.sum, self.count = 0.0, 0.0, 0

    def update(self, total, n=1):
        """Take in n observations whose sum is `total`."""
        self.val = total / n
        self.sum += total
        self.count += n

    @property
    def avg(self):
        return self.sum / max(self.count, 1)

    def __str__(self):
        return f"{self.name} {self.val:.{self.digits}f} ({self.avg:.{self.digits}f})"


class ProgressMeter:
    """Show how an epoch goes: a bar at a terminal, else one line per display().

    `first` and `last` are the steps it starts and ends at, `batch_size` is that of all processes.
    The meters are reset when the epoch starts, and go on when it is resumed. Create one in every
    process, call display() where something should be seen.
    """

    def __init__(self, epoch, first, last, batch_size, meters):
        self.epoch, self.first, self.last = epoch, first, last
        self.batch_size, self.meters = batch_size, meters
        self.start, self.bar = time.perf_counter(), None
        if first == 0:
            for meter in meters:
                meter.reset()

    def display(self, step, lr):
        speed = (step - self.first) * self.batch_size / (time.perf_counter() - self.start)
        parts = "  ".join([f"{speed:.0f} img/s", *map(str, self.meters), f"lr {lr:.4g}"])
        if not sys.stdout.isatty():
            print(f"epoch {self.epoch} [{step}/{self.last}]  {parts}", flush=True)
            return
        if self.bar is None:
            tqdm.monitor_interval = 0  # no thread of its own beside those that fork loader workers
            form = "{desc} {percentage:3.0f}%|{bar:16}| {n}/{total} [{remaining}] {postfix}"
            span = {"desc": f"epoch {self.epoch}", "initial": self.first, "total": self.last}
            self.bar = tqdm(**span, bar_format=form, file=sys.stdout, dynamic_ncols=True)
        self.bar.set_postfix_str(parts, refresh=False)
        self.bar.update(step - self.bar.n)

    def close(self, step, waited):
        """End the epoch at `step`; returns the part of its metrics.jsonl row that is about speed.

        `waited`: the seconds spent waiting for images.
        """
        if self.bar is not None:
            self.bar.close()
        seconds = time.perf_counter() - self.start
        speed = (step - self.first) * self.batch_size / seconds
        row = {"images_per_second": speed, "data_time": waited / seconds, "seconds": seconds}
        return row | {"batch_size": self.batch_size}


@torch.no_grad()
def accuracy(output, target, topk=(1, 5)):
    """For each k, the percentage of rows whose target is among the k highest scores.

    output: scores [n, classes]; target: int64 [n]. Returns a float64 scalar tensor for each k, on
    their device. With fewer than k classes it is top-`classes`.
    """
    k = min(max(topk), output.shape[1])
    hits = output.topk(k, dim=1).indices.eq(target.unsqueeze(1))
    return [hits[:, :k].sum(dtype=torch.float64) * 100 / len(target) for k in topk]


def reduce_mean(tensor, world_size):
    """The mean of a tensor over all processes. All of them must call it, not only rank 0."""
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor / world_size


def preflight(args, run, device, backend, workers, val_set, checkpoint):
    """Say what is about to happen, before it does. `run`: as in save_checkpoint()."""
    rate, world_size = args.lr * args.batch_size / 256, run["world_size"]
    name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    processes = f"{world_size} process{'es' * (world_size > 1)} on {device.type}{name}"
    print(
        f"{processes}, {backend}, {args.precision}, torch {torch.__version__}; in each "
        f"{torch.get_num_threads()} threads, {workers} loader workers\n"
        f"{run['images']} images to train, {len(val_set)} to validate, {len(val_set.classes)} "
        f"classes; {args.arch} at {args.image_size} px\n"
        f"global batch {args.batch_size} = {world_size} x {args.batch_size // world_size}; "
        f"learning rate {rate:.4g} = {args.lr:g} x {args.batch_size} / 256, "
        f"reached after {args.warmup_epochs:g} epochs",
        flush=True,
    )
    if checkpoint:
        place = f"epoch {checkpoint['epoch']} step {checkpoint['step']}"
        print(*checkpoint["damaged"], f"resumed from {checkpoint['path']} at {place}", sep="\n")
        old = {k: v for k, v in checkpoint["args"].items() if run.get(k, v) != v}
        for name in sorted(old.keys() - {"resume", "evaluate"}):
            note = ", same global batches" * (name == "world_size" and "batch_size" not in old)
            print(f"  changed: {name} {old[name]} -> {run[name]}{note}", flush=True)
