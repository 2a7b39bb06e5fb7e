"""How a run is shown: what is about to happen, and how each epoch goes."""

import os
import sys
import time

import torch
from tqdm import tqdm

BAR = "{desc} {percentage:3.0f}%|{bar:16}| {n}/{total} [{remaining}] {postfix}"


class ProgressMeter:
    """Show how an epoch goes: a bar at a terminal, else one line per display().

    run: a Run that stands where the epoch begins or is resumed; `end`: the step it ends at. The
    meters start anew when the epoch does. Create one in every process, for it updates run.meters;
    call display() where something should be seen.
    """

    def __init__(self, run, end):
        self.run, self.first, self.end = run, run.step, end
        self.shown, self.bar = run.step, None
        self.displayed, self.start = False, time.perf_counter()
        if run.step == 0:
            for meter in run.meters:
                meter.reset()

    def update(self, sums):
        """Take in the sums, one for each meter, of the steps since the last update."""
        for meter, total in zip(self.run.meters, sums, strict=True):
            meter.add(total, self.run.step - self.shown)
        self.shown = self.run.step

    def speed(self):
        """Images per second of all processes, since the start."""
        images = (self.shown - self.first) * self.run.args["batch_size"]
        return images / (time.perf_counter() - self.start)

    def display(self, lr):
        run, self.displayed = self.run, True
        values = {f"train/{meter.name}": meter.val for meter in run.meters}
        run.draw(values | {"lr": lr, "images per second": self.speed()})
        parts = [f"{self.speed():.0f} img/s", *map(str, run.meters), f"lr {lr:.4g}"]
        if not (sys.stdout and sys.stdout.isatty()):
            print(f"epoch {run.epoch} [{run.step}/{self.end}]", *parts, sep="  ", flush=True)
            return
        if self.bar is None:
            self.bar = tqdm(
                desc=f"epoch {run.epoch}",
                initial=self.first,
                total=self.end,
                file=sys.stdout,
                mininterval=0,
                dynamic_ncols=True,
                bar_format=BAR,
            )
        self.bar.set_postfix_str("  ".join(parts), refresh=False)
        self.bar.update(run.step - self.bar.n)

    def close(self, waited):
        """End the epoch; returns what metrics.jsonl is to hold of its speed, as a dict.

        waited: the seconds in which the device waited for images. Where the epoch was shown, more
        than a fifth of its time brings a hint.
        """
        if self.bar is not None:
            self.bar.close()
        seconds = time.perf_counter() - self.start
        share = waited / seconds
        if self.displayed and share > 0.2:
            print(
                f"hint: {share:.0%} of the epoch was spent waiting for images: more --workers, "
                "or a faster disk",
                flush=True,
            )
        return {"images_per_second": self.speed(), "data_time": share, "seconds": seconds}


def print_banner(run, train_set, val_set, workers, backend, device):
    """Say what is about to happen, before it does. run: a Run that is restored."""
    args = run.args
    world_size, batch_size = args["world_size"], args["batch_size"]
    where = device.type
    if where == "cuda":
        where = torch.cuda.get_device_name(device)
    lines = [
        f"{os.path.basename(sys.argv[0])}: processes: {world_size}, {backend}, {where}, "
        f"{args['precision']}, torch {torch.__version__}",
        f"each process: threads: {torch.get_num_threads()}, loader workers: {workers}",
        f"{len(train_set)} images to train, {len(val_set)} to validate, "
        f"{len(run.classes)} classes; {args['arch']} at {args['image_size']} px",
        f"global batch {batch_size} = {world_size} x {batch_size // world_size}; "
        f"learning rate {args['lr'] * batch_size / 256:.4g} = {args['lr']:g} x {batch_size} / 256, "
        f"epochs of warm-up: {args['warmup_epochs']:g}",
    ]
    if not args["evaluate"]:
        lines.append(f"checkpoints go to {run.folder}")
        if args["warmup_epochs"] >= args["epochs"]:
            lines.append("warning: --warmup-epochs is not less than --epochs: the rate only rises")
    lines += run.damaged
    if run.path:
        lines.append(f"resumed from {run.path} at {run.place()}")
    elif args["evaluate"] or args["resume"]:
        weights = "those of torchvision" if args["pretrained"] else "random"
        if args["pretrained"] and len(run.classes) != 1000:
            weights += ", but for the head: it is random"
        lines.append(f"no checkpoint: the weights are {weights}")
    before = run.resumed_args
    changed = {name for name in before.keys() & args.keys() if before[name] != args[name]}
    for name in sorted(changed - {"resume", "evaluate", "predictions", "tensorboard"}):
        note = ", same global batches" * (name == "world_size" and "batch_size" not in changed)
        lines.append(f"  changed: {name} {before[name]} -> {args[name]}{note}")
    done, total = run.global_step(), run.total_steps
    if not args["evaluate"] and done >= total:
        lines.append(f"nothing left to train: {done} of {total} steps are done")
    print(*lines, sep="\n", flush=True)
