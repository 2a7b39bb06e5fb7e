"""What a run reports: on the screen, and in metrics.jsonl."""

import math
import os
import sys
import time
from datetime import timedelta

import torch
from tqdm import tqdm

from .arguments import is_terminal, paint, tell, tell_torchrun
from common.decode import DECODERS

BAR = "{desc} {bar} {n}/{total} {remaining}"
# What print_epoch() shows of a row under another name, and what it does not show as a score.
NAMES = {"val_loss": "loss", "acc1": "acc@1", "acc5": "acc@5"}
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
        has_bar = run.rank == 0 and is_terminal(sys.stdout) and run.step < end
        self.bar = make_bar(self.title, end, run.step) if has_bar else None
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
        run, speed = self.run, f"{self.speed():.0f} img/s"
        meters = [meter for name, meter in run.meters.items() if says_something(name, run)]
        if self.bar is None:
            parts = [f"{self.title} [{run.step}/{self.end}]", speed, *map(str, meters)]
            tell("  ".join([*parts, f"lr {lr:.4g}"]))
            return
        means = [f"{meter.name} {meter.avg:.3f}" for meter in meters[:2]]
        self.bar.bar_format = " ".join([BAR, speed, *means])
        self.bar.ncols = terminal_columns() - 3
        self.bar.update(run.step - self.bar.n)

    def close(self, waited):
        """End the epoch; returns what metrics.jsonl is to hold of its speed, {} after no step.

        waited: the seconds in which the device waited for images. More than a fifth of an epoch
        that took a minute or more brings a hint: a shorter one mostly waits for the first images.
        """
        if self.bar is not None:
            self.bar.close()
        if self.run.step == self.first:
            return {}
        speed, seconds = self.speed(), time.perf_counter() - self.start
        share = waited / seconds
        if self.run.rank == 0 and share > 0.2 and seconds >= 60:
            hint = f"hint: {share:.0%} of the epoch was spent waiting for images"
            tell(paint(f"{hint}: try more --workers or a faster disk", "yellow"))
        return {"images_per_second": speed, "data_time": share, "seconds": seconds}


def says_something(score, run):
    """False for acc@5 with five classes or fewer: it is always 100."""
    return score != "acc@5" or len(run.classes) > 5


def make_bar(title, total, first=0):
    """A tqdm that leaves nothing on the screen when it is closed."""
    # With room for the ^C that a terminal shows; of 0 rows tqdm would show nothing.
    how = {"ncols": terminal_columns() - 3, "nrows": 24}
    how |= {"bar_format": BAR, "leave": False, "file": sys.stdout}
    return tqdm(desc=title, initial=first, total=total, **how)


def terminal_columns():
    """The width of the terminal that stdout is, 80 where it does not tell."""
    return os.get_terminal_size(sys.stdout.fileno()).columns or 80


def with_bar(batches, rank):
    """Iterate over the batches of a validation; rank 0 shows a bar, if it has a terminal."""
    if rank > 0 or not is_terminal(sys.stdout):
        yield from batches
        return
    with make_bar("validation", len(batches)) as bar:
        for batch in batches:
            yield batch
            bar.update()


def print_epoch(run, row, is_best):
    """Rank 0: one line on an epoch that is validated and saved.

    row: as in metrics.jsonl; shown are val_loss and the scores that it holds, whatever their names,
    then train_loss. A terminal that is too narrow gets the first score alone, and no train_loss.
    """
    title = f"epoch {run.epoch + (run.step > 0)}/{run.args.epochs}"
    if run.step:
        title += f" step {run.step}"  # --max-steps has cut it
    scores = [
        f"{NAMES.get(key, key)} {value:.{4 if 'loss' in key else 3}f}"
        for key, value in row.items()
        if key not in NO_SCORES
        and isinstance(value, (int, float))
        and says_something(NAMES.get(key, key), run)
    ]
    progress, best = run.progress, "new best" if is_best else f"best {run.best_acc1:.3f}"
    seconds, steps = time.perf_counter() - progress.start, progress.shown - progress.first
    ends = [best, duration(seconds)]
    if steps and not run.finished():  # else a resume has only validated
        left = seconds / steps * (run.total_steps - run.global_step())
        ends.append(f"{duration(left)} left")
    if torch.cuda.is_initialized():
        ends.append(f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB")
    mean = [f"train_loss {row['train_loss']:.4f}"] if "train_loss" in row else []
    line = "  ".join([title, *scores, *ends, *mean])
    if is_terminal(sys.stdout) and len(line) > terminal_columns():
        line = "  ".join([title, *scores[:2], *ends])
    tell(line.replace("new best", paint("new best", "green")))


def print_end(run):
    """Rank 0, when it trains no more: how a run that was stopped goes on, or what came out."""
    if not run.finished():
        where = f"stopped at {run.place()}, saved: --resume auto goes on"
        tell(paint(where, "bold"))
        if "TORCHELASTIC_RUN_ID" in os.environ:
            tell("torchrun reports every stop as below: that is no error\n")
            tell_torchrun(where)
        return
    if run.progress:
        early = f", after {run.epoch} of {run.args.epochs} epochs" if run.ended else ""
        tell(f"done in {duration(time.perf_counter() - run.began)}{early}")
    path = os.path.join(run.args.checkpoint_dir, "model_best.pth")
    if math.isfinite(run.best_acc1) and os.path.exists(path):
        best = f"best: {run.best_acc1:.3f} in epoch {run.best_epoch}, saved as {path}"
        tell(
            paint(best, "green"), f"to evaluate it, add to the command: --evaluate --resume {path}"
        )


def duration(seconds):
    """Hours, minutes and seconds, such as 0:02:30."""
    return str(timedelta(seconds=round(seconds)))


def print_banner(run, train_set, val_set, example, backend, device):
    """Say what is about to happen, before it does.

    run: a Run to which all is attached; example: a batch of one of what the model takes.
    """
    args, world_size, batch_size = run.args, run.world_size, run.args.batch_size
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    shape = f" of {list(example.shape[1:])}" if torch.is_tensor(example) else ""
    decoder = f", images decoded by {DECODERS[0]}" if hasattr(train_set, "paths") else ""
    rates = sorted({float(group["lr"]) for group in run.given})
    rate = ", ".join(f"{rate:.4g}" for rate in rates)
    if "lr" in args and rates == [args.lr * batch_size / 256]:
        rate += f" = {args.lr:g} x {batch_size} / 256"
    lines = [
        f"{os.path.basename(sys.argv[0])}: processes: {world_size}, {backend}, {where}, "
        f"{args.precision}, torch {torch.__version__}",
        f"each process: threads: {torch.get_num_threads()}, "
        f"loader workers: {args.workers}{decoder}",
        f"{len(train_set)} items{shape} to train, {len(val_set)} to validate, "
        f"{len(run.classes)} classes; {args.arch}",
        f"global batch {batch_size} = {world_size} x {batch_size // world_size}; "
        f"learning rate {rate}",
    ]
    if not args.evaluate:
        lines.append(f"checkpoints go to {run.folder}")
        if "warmup_epochs" in args and args.warmup_epochs >= args.epochs:
            text = "warning: --warmup-epochs is not less than --epochs: the rate only rises"
            lines.append(paint(text, "yellow"))
    lines += [paint(text, "yellow") for text in run.damaged]
    if run.path:
        lines.append(f"resumed from {run.path} at {run.place()}")
    elif args.evaluate or args.resume:
        lines.append("no checkpoint was read")
    before, now = run.resumed_args, run.saved_args
    for name in sorted(before.keys() & now.keys() - {"resume", "evaluate", "workers"}):
        if before[name] != now[name]:
            lines.append(f"  changed: {name} {before[name]} -> {now[name]}")
    if not args.evaluate and run.finished():
        done = f"{run.global_step()} of {run.total_steps} steps are done"
        early = ", and it was ended early" if run.ended else ""
        lines.append(f"nothing left to train: {done}{early}")
    tell(*lines)
