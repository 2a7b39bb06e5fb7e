"""What a run prints, for people; metrics.jsonl is for programs."""

import math
import os
import sys
import time
from datetime import timedelta

import torch
from tqdm import tqdm

from .messages import print_if_possible, tell_torchrun

BAR = "{desc} {bar} {n}/{total} {remaining}"
NAMES = {"val_loss": "loss", "acc1": "acc@1", "acc5": "acc@5"}  # of scores, as they are printed
NO_SCORES = {"epoch", "step", "train_loss", "lr", "world_size", "batch_size"}
NO_SCORES |= {"images_per_second", "data_time", "seconds"}


class Report:
    """What a run prints: the banner, how its epochs go, what came out of each, and the end.

    progress: a Progress: read, never changed. Where it is said, call it on rank 0 alone.
    """

    def __init__(self, progress, rank, world_size, args):
        self.progress, self.rank, self.world_size, self.args = progress, rank, world_size, args
        self.began, self.started = time.perf_counter(), None  # the run; its last epoch
        self.first = self.end = progress.step  # of the epoch: before its first step, its last
        self.bar = None

    def print_banner(self, backend, device, train_set, val_set, optimizer, more):
        """Rank 0: say what is about to happen, before it does.

        optimizer: read for its learning rates, once a checkpoint has filled it. more: lines that
        follow, such as those of Checkpoints.describe().
        """
        args, progress, batch_size = self.args, self.progress, self.args.batch_size
        world_size = self.world_size
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        decoder = getattr(train_set, "decoder", "")
        # A group may have a "scale". Where only the validation is left the last step has used it.
        scaled = not progress.lacks_validation()
        groups = optimizer.param_groups
        rates = [group["lr"] * (group.get("scale", 1) if scaled else 1) for group in groups]
        rate = ", ".join([*dict.fromkeys(f"{rate:.4g}" for rate in rates)][:4])  # each once
        if "lr" in args and rate == f"{args.lr * batch_size / 256:.4g}":
            rate += f" = {args.lr:g} x {batch_size} / 256"
        to_train = "" if args.evaluate else f"{len(train_set)} items to train, "
        lines = [
            f"{os.path.basename(sys.argv[0])}: processes: {world_size}, {backend}, {where}, "
            f"{args.precision}, torch {torch.__version__}",
            f"each process: threads: {torch.get_num_threads()}, loader workers: {args.workers}"
            f"{decoder and f', images decoded by {decoder}'}",
            f"{to_train}{len(val_set)} to validate, {len(train_set.classes)} classes; {args.arch}",
            f"global batch {batch_size} = {world_size} x {batch_size // world_size}; "
            f"learning rate {rate}",
        ]
        skipped = dict.fromkeys(getattr(data, "skipped", None) for data in (train_set, val_set))
        lines += [f"warning: not read: {files}" for files in skipped if files]
        if not args.evaluate and "warmup_epochs" in args and args.warmup_epochs >= args.epochs:
            only_rises = "--warmup-epochs is not less than --epochs: the rate only rises"
            lines.append(f"warning: {only_rises}")
        lines += more
        if not args.evaluate and progress.finished():
            done = f"{progress.global_step()} of {progress.total_steps} steps are done"
            early = ", and it was ended early" if progress.ended else ""
            lines.append(f"nothing left to train: {done}{early}")
        print_if_possible(*lines)

    def start_epoch(self, end):
        """From here on steps are timed, up to step `end`; at a terminal a bar shows them."""
        self.first, self.end, self.started = self.progress.step, end, time.perf_counter()
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
        self.title = f"epoch {self.progress.epoch + 1}/{self.args.epochs}"
        terminal = sys.stdout and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        if self.rank == 0 and self.first < end and terminal:
            how = {"bar_format": BAR, "leave": False, "file": sys.stdout, "dynamic_ncols": True}
            self.bar = tqdm(desc=self.title, initial=self.first, total=end, **how)

    def speed(self):
        """Images per second of all processes in this epoch."""
        images = (self.progress.step - self.first) * self.args.batch_size
        return images / (time.perf_counter() - self.started)

    def print_step(self, meters, lr):
        """Rank 0: a line with the latest values and their means in the epoch, or two in the bar.

        meters: {name: AverageMeter}. lr: the learning rate of the last step.
        """
        speed = f"{self.speed():.0f} img/s"
        if self.bar is None:
            where = f"{self.title} [{self.progress.step}/{self.end}]"
            print_if_possible("  ".join([where, speed, *map(str, meters.values()), f"lr {lr:.4g}"]))
        else:
            means = [f"{meter.name} {meter.avg:.3f}" for meter in [*meters.values()][:2]]
            self.bar.bar_format = " ".join([BAR, speed, *means])
            self.bar.update(self.progress.step - self.bar.n)

    def end_steps(self, waited):
        """The epoch's steps are done: returns how fast, for metrics.jsonl, {} where there was none.

        waited: the seconds in which the device waited for images.
        """
        if self.bar is not None:
            self.bar.close()
            self.bar = None
        if self.progress.step == self.first:
            return {}
        seconds = time.perf_counter() - self.started
        speed = {"images_per_second": self.speed(), "data_time": waited / seconds}
        return speed | {"seconds": seconds}

    def print_epoch(self, row, is_best):
        """Rank 0: one line on an epoch that is validated and saved.

        row: as in metrics.jsonl; shown are the scores that it holds, whatever their names.
        """
        progress = self.progress
        title = f"epoch {progress.epoch + (progress.step > 0)}/{self.args.epochs}"
        if progress.step:
            title += f" step {progress.step}"  # --max-steps has cut it
        scores = [
            f"{NAMES.get(key, key)} {value:.{4 if 'loss' in key else 3}f}"
            for key, value in row.items()
            if key not in NO_SCORES and isinstance(value, (int, float))
        ]
        seconds, steps = time.perf_counter() - self.started, self.end - self.first
        ends = ["new best" if is_best else f"best {progress.best_acc1:.3f}", duration(seconds)]
        if steps and not progress.finished():  # else a resume has only validated
            left = seconds / steps * (progress.total_steps - progress.global_step())
            ends.append(f"{duration(left)} left")
        if torch.cuda.is_initialized():
            ends.append(f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB")
        print_if_possible("  ".join([title, *scores, *ends]))

    def print_end(self):
        """Rank 0, when it trains no more: how a stopped run goes on, or what came out."""
        progress = self.progress
        if not progress.finished():
            where = f"stopped at {progress}, saved: --resume auto goes on"
            print_if_possible(where)
            if "TORCHELASTIC_RUN_ID" in os.environ:
                print_if_possible("torchrun reports every stop as below: that is no error")
                tell_torchrun(where)
            return
        if self.started:
            epochs = f", after {progress.epoch} of {self.args.epochs} epochs"
            early = epochs if progress.ended else ""
            print_if_possible(f"done in {duration(time.perf_counter() - self.began)}{early}")
        path = os.path.join(self.args.checkpoint_dir, "model_best.pth")
        if math.isfinite(progress.best_acc1) and os.path.exists(path):
            print_if_possible(
                f"best: {progress.best_acc1:.3f} in epoch {progress.best_epoch}, saved as {path}",
                f"to evaluate it, add to the command: --evaluate --resume {path}",
            )


def duration(seconds):
    """Hours, minutes and seconds, such as 0:02:30."""
    return str(timedelta(seconds=round(seconds)))
