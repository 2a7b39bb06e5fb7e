"""What a run reports: on the screen, and in metrics.jsonl."""

import contextlib
import fcntl
import json
import math
import os
import sys
import time

import torch
from tqdm import tqdm

from .arguments import paint, tell, tell_torchrun
from .decode import DECODERS

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
        self.shown, self.seconds, self.start = run.step, 0.0, time.perf_counter()
        # The fifth best of five classes is always right.
        hidden = {"acc@5"} if len(run.classes) <= 5 else set()
        self.visible = [meter for name, meter in run.meters.items() if name not in hidden]
        if run.step == 0:
            for meter in run.meters.values():
                meter.reset()
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
        self.title = f"epoch {run.epoch + 1}/{run.args.epochs}"
        shown = run.rank == 0 and terminal_columns() > 0 and run.step < end
        self.bar = make_bar(self.title, end, run.step) if shown else None
        run.progress.append(self)

    def update(self, sums):
        """Take in the sums, one for each meter, of the steps since the last update."""
        for meter, total in zip(self.run.meters.values(), sums, strict=True):
            meter.add(total, self.run.step - self.shown)
        self.shown = self.run.step

    def images(self):
        """How many images were trained, by all processes."""
        return (self.shown - self.first) * self.run.args.batch_size

    def speed(self):
        """Images per second of all processes, since the start."""
        return self.images() / (self.seconds or time.perf_counter() - self.start)

    def display(self, lr):
        """A line has the latest values and their means in the epoch, the bar two of the means."""
        run, speed = self.run, f"{self.speed():.0f} img/s"
        if self.bar is None:
            parts = [speed, *map(str, self.visible), f"lr {lr:.4g}"]
            tell("  ".join([f"{self.title} [{run.step}/{self.end}]", *parts]))
            return
        means = [f"{m.name} {m.avg:.{3 if m.avg < 10 else 2}f}" for m in self.visible[:2]]
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
        self.seconds = time.perf_counter() - self.start
        share = waited / self.seconds
        if self.run.rank == 0 and share > 0.2 and self.seconds >= 60:
            hint = f"hint: {share:.0%} of the epoch was spent waiting for images"
            tell(paint(f"{hint}: try more --workers or a faster disk", "yellow"))
        return {"images_per_second": self.speed(), "data_time": share, "seconds": self.seconds}

    def left(self):
        """Seconds that the rest of the run takes, if it goes on as in this epoch; 0 if unknown."""
        if self.run.finished() or not self.images():
            return 0.0
        a_step = (time.perf_counter() - self.start) / (self.shown - self.first)
        return a_step * (self.run.total_steps - self.run.global_step())


def make_bar(title, total, first=0):
    """A tqdm that leaves nothing on the screen when it is closed."""
    columns = terminal_columns() - 3  # room for the ^C that a terminal shows
    more = dict(ncols=columns, nrows=24, bar_format=BAR, mininterval=0.1, leave=False)
    return tqdm(desc=title, initial=first, total=total, file=sys.stdout, **more)


def with_bar(batches, rank):
    """Iterate over the batches of a validation; rank 0 shows a bar, if it has a terminal."""
    if rank > 0 or not terminal_columns():
        yield from batches
        return
    with make_bar("validation", len(batches)) as bar:
        for batch in batches:
            yield batch
            bar.update()


def terminal_columns():
    """The width of the terminal that stdout is; 0 where it is none, or does not tell its size."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
            columns, rows = os.get_terminal_size(sys.stdout.fileno())
            return columns if rows else 0
    return 0


def print_epoch(run, row, is_best):
    """Rank 0: one line on an epoch that is validated and saved.

    row: as in metrics.jsonl; shown are val_loss and the scores that it holds, whatever their names,
    then train_loss. A terminal that is too narrow gets the first score alone, and no train_loss.
    """
    progress = run.progress[-1]
    hidden = NO_SCORES | ({"acc5"} if len(run.classes) <= 5 else set())
    title = f"epoch {run.epoch + (run.step > 0)}/{run.args.epochs}"
    if run.step:
        title += f" step {run.step}"  # --max-steps has cut it
    scores = [
        f"{NAMES.get(key, key)} {value:.{4 if 'loss' in key else 3}f}"
        for key, value in row.items()
        if key not in hidden and isinstance(value, (int, float))
    ]
    best = "new best" if is_best else f"best {run.best_acc1:.3f}"
    ends = [best, duration(time.perf_counter() - progress.start)]
    if left := progress.left():
        ends.append(f"{duration(left)} left")
    if torch.cuda.is_initialized():
        ends.append(f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB")
    mean = [f"train_loss {row['train_loss']:.4f}"] if "train_loss" in row else []
    line = "  ".join([title, *scores, *ends, *mean])
    if 0 < terminal_columns() < len(line):
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
    if images := sum(progress.images() for progress in run.progress):
        took = duration(time.perf_counter() - run.began)
        speed = images / sum(progress.seconds for progress in run.progress)
        tell(f"done in {took}, {speed:.0f} img/s while training")
    path = os.path.join(run.folder, "model_best.pth")
    if os.path.exists(path) and math.isfinite(run.best_acc1):
        path = min(path, os.path.relpath(path), key=len)
        when = f" in epoch {run.best_epoch}" if run.best_epoch else ""  # an old checkpoint has none
        tell(paint(f"best: {run.best_acc1:.3f}{when}, saved as {path}", "green"))
        tell(f"to evaluate it, add to the command: --evaluate --resume {path}")


def duration(seconds):
    """Such as 4.5 s, 12 min, 3.4 h or 12 days."""
    unit, number = "s", seconds
    for larger, length in (("min", 60), ("h", 60), ("days", 24)):
        if number >= 99.5:
            unit, number = larger, number / length
    return f"{number:.{0 if number >= 9.95 else 1}f} {unit}"


def print_banner(run, train_set, val_set, example, workers, backend, device):
    """Say what is about to happen, before it does.

    run: a Run to which all is attached; example: a batch of one of what the model takes.
    """
    args, flags = run.args, vars(run.args)
    world_size, batch_size = run.world_size, args.batch_size
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    shape = f" of {list(example.shape[1:])}" if torch.is_tensor(example) else ""
    decoder = f", images decoded by {DECODERS[0]}" if hasattr(train_set, "paths") else ""
    rates, lr = sorted({float(group["lr"]) for group in run.given}), flags.get("lr", math.nan)
    rate = f"learning rate {', '.join(f'{rate:.4g}' for rate in rates)}"
    if any("initial_lr" in group for group in run.given):
        rate = "learning rate: a scheduler's"
    elif rates == [lr * batch_size / 256]:
        rate += f" = {lr:g} x {batch_size} / 256"
    lines = [
        f"{os.path.basename(sys.argv[0])}: processes: {world_size}, {backend}, {where}, "
        f"{args.precision}, torch {torch.__version__}",
        f"each process: threads: {torch.get_num_threads()}, loader workers: {workers}{decoder}",
        f"{len(train_set)} items{shape} to train, {len(val_set)} to validate, "
        f"{len(run.classes)} classes; {args.arch}",
        f"global batch {batch_size} = {world_size} x {batch_size // world_size}; {rate}",
    ]
    if not args.evaluate:
        lines.append(f"checkpoints go to {run.folder}")
        if flags.get("warmup_epochs", 0) >= args.epochs:
            text = "warning: --warmup-epochs is not less than --epochs: the rate only rises"
            lines.append(paint(text, "yellow"))
    lines += [paint(text, "yellow") for text in run.damaged]
    if run.path:
        lines.append(f"resumed from {run.path} at {run.place()}")
    elif args.evaluate or args.resume:
        source = "torchvision" if flags.get("pretrained") else flags.get("weights")  # a recipe's
        weights = f"those of {source}" if source else "random"
        if flags.get("pretrained") and len(run.classes) != 1000:
            weights += ", except in the head: it is random"
        lines.append(f"no checkpoint: the weights are {weights}")
    before, now = run.resumed_args, run.saved_args
    changed = {name for name in before.keys() & now.keys() if before[name] != now[name]}
    for name in sorted(changed - {"resume", "evaluate"}):
        note = ", same global batches" * (name == "world_size" and "batch_size" not in changed)
        lines.append(f"  changed: {name} {before[name]} -> {now[name]}{note}")
    if not args.evaluate and run.finished():
        why = f"{run.global_step()} of {run.total_steps} steps are done"
        if run.ended:
            why = "run.end() has ended it; more --epochs continue it, until the next such end"
        lines.append(f"nothing left to train: {why}")
    tell(*lines)


@contextlib.contextmanager
def whole_file(path, keep=None):
    """A new binary file that takes the place of `path` when the block ends: all of it, or nothing.

    keep: where the old file goes. Raises OSError, and leaves the old file, where it cannot be
    written.
    """
    new = f"{path}.{os.getpid()}.tmp"
    try:
        with open(new, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if keep and os.path.exists(path):
            os.replace(path, keep)
        os.replace(new, path)
        directory = os.open(os.path.dirname(path), os.O_RDONLY)
        with contextlib.suppress(OSError):  # not every file system can: the file itself is there
            os.fsync(directory)
        os.close(directory)
    except (OSError, RuntimeError) as error:  # a full disk makes torch.save raise either
        if "DataLoader worker" in str(error):  # a worker has died meanwhile: no matter of this file
            raise
        kept = "; the one before it is untouched" if os.path.exists(path) else ""
        raise OSError(f"cannot write {path}: {error}{kept}") from error
    finally:
        with contextlib.suppress(OSError):  # it is gone already, or the disk is
            os.remove(new)


@contextlib.contextmanager
def locked(path):
    """Run the block in one process at a time, by a lock on a file that may be new.

    Where that cannot be written, or the file system has no locks, nobody waits.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            fcntl.flock(stack.enter_context(open(path, "a")), fcntl.LOCK_EX)
        yield


def json_line(row):
    """A dict as a line of JSON, which has no NaN and no infinity: they become null."""
    lost = [key for key, x in row.items() if isinstance(x, float) and not math.isfinite(x)]
    return json.dumps(row | dict.fromkeys(lost)) + "\n"


def append_line(folder, line):
    """Add a line to metrics.jsonl, and have it on the disk."""
    with open(os.path.join(folder, "metrics.jsonl"), "a") as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def cut_lines(folder, epoch, step):
    """Cut from metrics.jsonl what lies beyond a position: it will be written again."""
    path = os.path.join(folder, "metrics.jsonl")
    if os.path.exists(path):
        with open(path, "rb") as file:
            lines = list(file)
        kept = [line for line in lines if not is_beyond(line, epoch, step)]
        if kept != lines:
            with whole_file(path) as file:
                file.writelines(kept)


def is_beyond(line, epoch, step):
    try:
        row = json.loads(line)
        return (row["epoch"], row["step"]) > (epoch, step)
    except (ValueError, TypeError, KeyError):
        return not line.endswith(b"\n")  # half a line, where a process was killed
