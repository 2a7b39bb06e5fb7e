"""What is measured, how it is averaged over processes, and how it is shown and kept."""

import math
import sys
import time

import torch
import torch.distributed as dist
from tqdm import tqdm

from .records import add_curves


class AverageMeter:
    """The latest value of something and its running mean."""

    def __init__(self, name):
        self.name = name
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
        return f"{self.name} {self.val:.3f} ({self.avg:.3f})"


class ProgressMeter:
    """Show how an epoch goes: a bar at a terminal, else one line per display().

    `first` and `last` are the steps it starts and ends at; run: as in save_checkpoint(). The meters
    are reset when the epoch starts, and go on when it is resumed. Create one in every process, call
    display() where something should be seen.
    """

    def __init__(self, epoch, first, last, run, meters):
        self.epoch, self.first, self.last, self.run = epoch, first, last, run
        self.meters, self.step, self.seen = meters, first, False
        self.start, self.bar = time.perf_counter(), None
        if first == 0:
            for meter in meters:
                meter.reset()

    def update(self, step, sums):
        """Take in the sums, one for each meter, of the steps since the last update."""
        for meter, total in zip(self.meters, sums, strict=True):
            meter.update(total, step - self.step)
        self.step = step

    def speed(self):
        """Images per second of all processes, since the start."""
        images = (self.step - self.first) * self.run["batch_size"]
        return images / (time.perf_counter() - self.start)

    def display(self, lr):
        self.seen = True
        values = {f"train/{meter.name}": meter.val for meter in self.meters}
        values |= {"lr": lr, "images per second": self.speed()}
        add_curves(self.run, self.epoch, self.step, values)
        parts = f"{self.speed():.0f} img/s", *map(str, self.meters), f"lr {lr:.4g}"
        if not sys.stdout.isatty():
            print(f"epoch {self.epoch} [{self.step}/{self.last}]", *parts, sep="  ", flush=True)
            return
        if self.bar is None:
            form = "{desc} {percentage:3.0f}%|{bar:16}| {n}/{total} [{remaining}] {postfix}"
            span = {"initial": self.first, "total": self.last, "mininterval": 0, "bar_format": form}
            self.bar = tqdm(desc=f"epoch {self.epoch}", file=sys.stdout, dynamic_ncols=True, **span)
        self.bar.set_postfix_str("  ".join(parts), refresh=False)
        self.bar.update(self.step - self.bar.n)

    def close(self, lr, waited):
        """End the epoch; returns what metrics.jsonl is to hold of its training, as a dict.

        `waited`: the seconds spent waiting for images. Where lines were shown, a hint is printed
        when that is more than a fifth.
        """
        if self.bar is not None:
            self.bar.close()
        seconds = time.perf_counter() - self.start
        known = self.step > self.first  # else it was resumed where it had only to be validated
        speed, share = (self.speed(), waited / seconds) if known else (None, None)
        if self.seen and share > 0.2:
            hint = f"hint: {share:.0%} of the epoch was spent waiting for images: more --workers"
            print(f"{hint}, or a faster disk", flush=True)
        row = {"train_loss": self.meters[0].avg, "lr": lr, "images_per_second": speed}
        row |= {"data_time": share, "seconds": seconds}
        return row | {"world_size": self.run["world_size"], "batch_size": self.run["batch_size"]}


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


def gather(share):
    """The shares of all processes, a list by rank. All of them must call it, not only rank 0.

    They travel as pickles, so that they may differ in size: give it tensors on the CPU. Without a
    process group there is one.
    """
    if not dist.is_initialized():
        return [share]
    shares = [None] * dist.get_world_size()
    dist.all_gather_object(shares, share)
    return shares


def preflight(run, device, workers, val_set, checkpoint):
    """Say what is about to happen, before it does. run: as in save_checkpoint()."""
    rate, world_size = run["lr"] * run["batch_size"] / 256, run["world_size"]
    names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    names = f" ({', '.join(sorted(names))})" if device.type == "cuda" else ""
    threads = torch.get_num_threads()
    print(
        f"{run['launcher']}: {_count(world_size, 'process')} on {_count(run['nodes'], 'node')}, "
        f"{run['engine']}, {device.type}{names}, {run['precision']}, "
        f"torch {torch.__version__}\n"
        f"each process: {_count(threads, 'thread')}, {_count(workers, 'loader worker')}\n"
        f"{run['images']} images to train, {len(val_set)} to validate, {run['classes']} classes; "
        f"{run['arch']} at {run['image_size']} px\n"
        f"global batch {run['batch_size']} = {world_size} x {run['batch_size'] // world_size}; "
        f"learning rate {rate:.4g} = {run['lr']:g} x {run['batch_size']} / 256, "
        f"reached after {run['warmup_epochs']:g} epoch{'s' * (run['warmup_epochs'] != 1)}",
        flush=True,
    )
    if not run["evaluate"]:
        print(f"checkpoints go to {run['checkpoint_dir']}", flush=True)
    if not checkpoint and (run["resume"] or run["evaluate"]):
        print("no checkpoint: the weights are as at the start of a training", flush=True)
    if checkpoint:
        place = f"epoch {checkpoint['epoch']} step {checkpoint['step']}"
        print(*checkpoint["damaged"], f"resumed from {checkpoint['path']} at {place}", sep="\n")
        old = {k: v for k, v in checkpoint["args"].items() if run.get(k, v) != v}
        for name in sorted(old.keys() - {"resume", "evaluate", "predictions", "tensorboard"}):
            note = ", same global batches" * (name == "world_size" and "batch_size" not in old)
            print(f"  changed: {name} {old[name]} -> {run[name]}{note}", flush=True)
        steps = run["images"] // run["batch_size"]
        done, epochs = checkpoint["epoch"] * steps + checkpoint["step"], run["epochs"]
        if done >= min(epochs * steps, run["max_steps"] or math.inf) and not run["evaluate"]:
            print(f"nothing left to train: {done} of {epochs * steps} steps are done", flush=True)


def _count(number, what):
    return f"{number} {what}" + ("s" if what[-1] != "s" else "es") * (number != 1)
