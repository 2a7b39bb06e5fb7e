"""What a run reports: on the screen, and in metrics.jsonl."""

import contextlib
import json
import math
import os
import shutil
import sys
import time

import torch
from tqdm import tqdm

from .decode import DECODERS

BAR = "{desc} {percentage:3.0f}%|{bar}| {n}/{total} [{remaining}{postfix}]"


class ProgressMeter:
    """Show how an epoch goes: a bar at a terminal, else one line per display().

    run: a Run that stands where the epoch begins or is resumed; `end`: the step it ends at. The
    meters start anew when the epoch does. Create one in every process, for it updates run.meters;
    call display() on rank 0.
    """

    def __init__(self, run, end):
        self.run, self.first, self.end = run, run.step, end
        self.shown, self.bar, self.start = run.step, None, time.perf_counter()
        # The fifth best of five classes is always right.
        hidden = {"acc@5"} if len(run.classes) <= 5 else set()
        self.visible = [meter for name, meter in run.meters.items() if name not in hidden]
        if run.step == 0:
            for meter in run.meters.values():
                meter.reset()

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
        """A line has the latest values and their means in the epoch, the bar only the means."""
        run, speed = self.run, self.speed()
        if not (sys.stdout and sys.stdout.isatty()):
            parts = [f"{speed:.0f} img/s", *map(str, self.visible), f"lr {lr:.4g}"]
            print(f"epoch {run.epoch} [{run.step}/{self.end}]", *parts, sep="  ", flush=True)
            return
        if self.bar is None:
            self.bar = tqdm(
                desc=f"epoch {run.epoch}",
                initial=self.first,
                total=self.end,
                file=sys.stdout,
                mininterval=0,
                # tqdm would show nothing at a terminal that does not tell its size.
                ncols=shutil.get_terminal_size().columns - 1,
                nrows=24,
                bar_format=BAR,
            )
        parts = [f"{meter.name} {meter.avg:.3f}" for meter in self.visible]
        parts = [f"{speed:.0f} img/s", *parts, f"lr {lr:.4g}"]
        self.bar.set_postfix_str("  ".join(parts), refresh=False)
        self.bar.update(run.step - self.bar.n)

    def close(self, waited):
        """End the epoch; returns what metrics.jsonl is to hold of its speed, {} after no step.

        waited: the seconds in which the device waited for images. More than a fifth of the epoch
        brings a hint.
        """
        if self.bar is not None:
            self.bar.close()
        if self.run.step == self.first:
            return {}
        seconds = time.perf_counter() - self.start
        share = waited / seconds
        if self.run.rank == 0 and share > 0.2:
            print(
                f"hint: {share:.0%} of the epoch was spent waiting for images: try more "
                "--workers or a faster disk",
                flush=True,
            )
        return {"images_per_second": self.speed(), "data_time": share, "seconds": seconds}


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
            lines.append("warning: --warmup-epochs is not less than --epochs: the rate only rises")
    lines += run.damaged
    if run.path:
        lines.append(f"resumed from {run.path} at {run.place()}")
    elif args.evaluate or args.resume:
        weights = "those of torchvision" if flags.get("pretrained") else "random"
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
    print(*lines, sep="\n", flush=True)


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
