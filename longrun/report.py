"""What a run prints: the banner, how an epoch goes, what came out of it, and the end."""

import math
import os
import sys
import time
from datetime import timedelta

import torch
from tqdm import tqdm

from .messages import tell, tell_torchrun

BAR = "{desc} {bar} {n}/{total} {remaining}"
NAMES = {"val_loss": "loss", "acc1": "acc@1", "acc5": "acc@5"}  # of scores, as they are printed
NO_SCORES = {"epoch", "step", "train_loss", "lr", "world_size", "batch_size"}
NO_SCORES |= {"images_per_second", "data_time", "seconds"}


class ProgressMeter:
    """Show how an epoch goes: a bar at a terminal, else one line per display().

    run: a Run that stands where the epoch begins or is resumed; `end`: the step it ends at. The
    meters start anew when the epoch does. Create one in every process, for it updates run.meters;
    call display() on rank 0.
    """

    def __init__(self, run, end):
        self.run, self.first, self.end = run, run.step, end
        self.shown, self.start = run.step, time.perf_counter()
        if run.step == 0:
            for meter in run.meters.values():
                meter.reset()
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
        self.title = f"epoch {run.epoch + 1}/{run.args.epochs}"
        self.bar = None
        terminal = sys.stdout and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        if run.rank == 0 and run.step < end and terminal:
            how = {"bar_format": BAR, "leave": False, "file": sys.stdout, "dynamic_ncols": True}
            self.bar = tqdm(desc=self.title, initial=run.step, total=end, **how)
        run.progress = self

    def update(self, sums):
        """Take in the sums, one for each meter, of the steps since the last update."""
        for meter, total in zip(self.run.meters.values(), sums, strict=True):
            meter.add(total, self.run.step - self.shown)
        self.shown = self.run.step

    def speed(self):
        """Images per second of all processes, since the start."""
        images = (self.shown - self.first) * self.run.args.batch_size
        return images / (time.perf_counter() - self.start)

    def display(self, lr):
        """A line has the latest values and their means in the epoch, the bar two of the means."""
        speed, meters = f"{self.speed():.0f} img/s", list(self.run.meters.values())
        if self.bar is None:
            place = f"{self.title} [{self.run.step}/{self.end}]"
            tell("  ".join([place, speed, *map(str, meters), f"lr {lr:.4g}"]))
        else:
            means = [f"{meter.name} {meter.avg:.3f}" for meter in meters[:2]]
            self.bar.bar_format = " ".join([BAR, speed, *means])
            self.bar.update(self.run.step - self.bar.n)

    def close(self, waited):
        """End the epoch; returns what metrics.jsonl is to hold of its speed, {} after no step.

        waited: the seconds in which the device waited for images.
        """
        if self.bar is not None:
            self.bar.close()
        if self.run.step == self.first:
            return {}
        seconds = time.perf_counter() - self.start
        speed = {"images_per_second": self.speed(), "data_time": waited / seconds}
        return speed | {"seconds": seconds}


def print_epoch(run, row, is_best):
    """Rank 0: one line on an epoch that is validated and saved.

    row: as in metrics.jsonl; shown are the scores that it holds, whatever their names.
    """
    title = f"epoch {run.epoch + (run.step > 0)}/{run.args.epochs}"
    if run.step:
        title += f" step {run.step}"  # --max-steps has cut it
    scores = [
        f"{NAMES.get(key, key)} {value:.{4 if 'loss' in key else 3}f}"
        for key, value in row.items()
        if key not in NO_SCORES and isinstance(value, (int, float))
    ]
    progress, best = run.progress, "new best" if is_best else f"best {run.best_acc1:.3f}"
    seconds, steps = time.perf_counter() - progress.start, progress.shown - progress.first
    ends = [best, duration(seconds)]
    if steps and not run.finished():  # else a resume has only validated
        left = seconds / steps * (run.total_steps - run.global_step())
        ends.append(f"{duration(left)} left")
    if torch.cuda.is_initialized():
        ends.append(f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB")
    tell("  ".join([title, *scores, *ends]))


def print_end(run):
    """Rank 0, when it trains no more: how a run that was stopped goes on, or what came out."""
    if not run.finished():
        where = f"stopped at {run.place()}, saved: --resume auto goes on"
        tell(where)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            tell("torchrun reports every stop as below: that is no error")
            tell_torchrun(where)
        return
    if run.progress:
        early = f", after {run.epoch} of {run.args.epochs} epochs" if run.ended else ""
        tell(f"done in {duration(time.perf_counter() - run.began)}{early}")
    path = os.path.join(run.args.checkpoint_dir, "model_best.pth")
    if math.isfinite(run.best_acc1) and os.path.exists(path):
        tell(
            f"best: {run.best_acc1:.3f} in epoch {run.best_epoch}, saved as {path}",
            f"to evaluate it, add to the command: --evaluate --resume {path}",
        )


def duration(seconds):
    """Hours, minutes and seconds, such as 0:02:30."""
    return str(timedelta(seconds=round(seconds)))


def print_banner(run, train_set, val_set, backend, device):
    """Rank 0: say what is about to happen, before it does. run: a Run to which all is attached."""
    args, world_size, batch_size = run.args, run.world_size, run.args.batch_size
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    decoder = getattr(train_set, "decoder", "")
    # A group may have a "scale". Where only the validation is left the last step has used it.
    scaled = run.step < run.steps_per_epoch
    rates = [g["lr"] * (g.get("scale", 1) if scaled else 1) for g in run.optimizer.param_groups]
    rate = ", ".join([*dict.fromkeys(f"{rate:.4g}" for rate in rates)][:4])  # each once
    if "lr" in args and rate == f"{args.lr * batch_size / 256:.4g}":
        rate += f" = {args.lr:g} x {batch_size} / 256"
    to_train = "" if args.evaluate else f"{len(train_set)} items to train, "
    lines = [
        f"{os.path.basename(sys.argv[0])}: processes: {world_size}, {backend}, {where}, "
        f"{args.precision}, torch {torch.__version__}",
        f"each process: threads: {torch.get_num_threads()}, loader workers: {args.workers}"
        f"{decoder and f', images decoded by {decoder}'}",
        f"{to_train}{len(val_set)} to validate, {len(run.classes)} classes; {args.arch}",
        f"global batch {batch_size} = {world_size} x {batch_size // world_size}; "
        f"learning rate {rate}",
    ]
    skipped = dict.fromkeys(getattr(data, "skipped", None) for data in (train_set, val_set))
    lines += [f"warning: not read: {files}" for files in skipped if files]
    if not args.evaluate:
        lines.append(f"checkpoints go to {run.folder}")
        if "warmup_epochs" in args and args.warmup_epochs >= args.epochs:
            lines.append("warning: --warmup-epochs is not less than --epochs: the rate only rises")
    lines += run.damaged
    if run.path:
        lines.append(f"resumed from {run.path} at {run.place()}")
    elif args.evaluate or args.resume:
        lines.append("no checkpoint was read")
    before, now = run.resumed_args, run.saved_args
    for name in sorted(before.keys() & now.keys() - {"resume", "evaluate", "workers", "images"}):
        if before[name] != now[name]:
            lines.append(f"  changed: {name} {before[name]} -> {now[name]}")
    if not args.evaluate and run.finished():
        done = f"{run.global_step()} of {run.total_steps} steps are done"
        lines.append(f"nothing left to train: {done}{', and it was ended early' * run.ended}")
    tell(*lines)
