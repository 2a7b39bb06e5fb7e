"""What a run prints, for people; metrics.jsonl is for programs."""

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
MAY_CHANGE = {"resume", "evaluate", "workers", "images"}  # without a word, from start to start


class Report:
    """What a run prints: the banner, how its epochs go, what came out of each, and the end.

    place: a Place, which it reads and does not change. Where it is said, call it on rank 0 alone.
    """

    def __init__(self, place, rank, args):
        self.place, self.rank, self.args = place, rank, args
        self.began, self.started = time.perf_counter(), None  # the run; its last epoch
        self.first = self.end = place.step  # of the epoch: the step before its first, and its last
        self.bar = None

    def print_banner(self, checkpoints, train_set, val_set, backend, device):
        """Rank 0: say what is about to happen, before it does. checkpoints: attached, restored."""
        args, place, batch_size = self.args, self.place, self.args.batch_size
        world_size = checkpoints.world_size
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        decoder = getattr(train_set, "decoder", "")
        # A group may have a "scale". Where only the validation is left the last step has used it.
        scaled = place.step < place.steps_per_epoch
        groups = checkpoints.optimizer.param_groups
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
        if not args.evaluate:
            lines.append(f"checkpoints go to {checkpoints.folder}")
            if "warmup_epochs" in args and args.warmup_epochs >= args.epochs:
                only_rises = "--warmup-epochs is not less than --epochs: the rate only rises"
                lines.append(f"warning: {only_rises}")
        lines += checkpoints.damaged
        if checkpoints.path:
            lines.append(f"resumed from {checkpoints.path} at {place}")
        elif args.evaluate or args.resume:
            lines.append("no checkpoint was read")
        before, now = checkpoints.resumed_args, checkpoints.saved_args
        for name in sorted(before.keys() & now.keys() - MAY_CHANGE):
            if before[name] != now[name]:
                lines.append(f"  changed: {name} {before[name]} -> {now[name]}")
        if not args.evaluate and place.finished():
            done = f"{place.global_step()} of {place.total_steps} steps are done"
            lines.append(f"nothing left to train: {done}{', and it was ended early' * place.ended}")
        tell(*lines)

    def start_epoch(self, end):
        """From here on steps are timed, up to step `end`; at a terminal a bar shows them."""
        self.first, self.end, self.started = self.place.step, end, time.perf_counter()
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
        self.title = f"epoch {self.place.epoch + 1}/{self.args.epochs}"
        terminal = sys.stdout and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        if self.rank == 0 and self.first < end and terminal:
            how = {"bar_format": BAR, "leave": False, "file": sys.stdout, "dynamic_ncols": True}
            self.bar = tqdm(desc=self.title, initial=self.first, total=end, **how)

    def speed(self):
        """Images per second of all processes in this epoch."""
        images = (self.place.step - self.first) * self.args.batch_size
        return images / (time.perf_counter() - self.started)

    def print_step(self, meters, lr):
        """Rank 0: a line with the latest values and their means in the epoch, or two in the bar.

        meters: {name: AverageMeter}. lr: the learning rate of the last step.
        """
        speed = f"{self.speed():.0f} img/s"
        if self.bar is None:
            place = f"{self.title} [{self.place.step}/{self.end}]"
            tell("  ".join([place, speed, *map(str, meters.values()), f"lr {lr:.4g}"]))
        else:
            means = [f"{meter.name} {meter.avg:.3f}" for meter in [*meters.values()][:2]]
            self.bar.bar_format = " ".join([BAR, speed, *means])
            self.bar.update(self.place.step - self.bar.n)

    def end_steps(self, waited):
        """The epoch's steps are done: returns how fast, for metrics.jsonl, {} where there was none.

        waited: the seconds in which the device waited for images.
        """
        if self.bar is not None:
            self.bar.close()
            self.bar = None
        if self.place.step == self.first:
            return {}
        seconds = time.perf_counter() - self.started
        speed = {"images_per_second": self.speed(), "data_time": waited / seconds}
        return speed | {"seconds": seconds}

    def print_epoch(self, row, is_best):
        """Rank 0: one line on an epoch that is validated and saved.

        row: as in metrics.jsonl; shown are the scores that it holds, whatever their names.
        """
        place = self.place
        title = f"epoch {place.epoch + (place.step > 0)}/{self.args.epochs}"
        if place.step:
            title += f" step {place.step}"  # --max-steps has cut it
        scores = [
            f"{NAMES.get(key, key)} {value:.{4 if 'loss' in key else 3}f}"
            for key, value in row.items()
            if key not in NO_SCORES and isinstance(value, (int, float))
        ]
        seconds, steps = time.perf_counter() - self.started, self.end - self.first
        ends = ["new best" if is_best else f"best {place.best_acc1:.3f}", duration(seconds)]
        if steps and not place.finished():  # else a resume has only validated
            left = seconds / steps * (place.total_steps - place.global_step())
            ends.append(f"{duration(left)} left")
        if torch.cuda.is_initialized():
            ends.append(f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB")
        tell("  ".join([title, *scores, *ends]))

    def print_end(self):
        """Rank 0, when it trains no more: how a stopped run goes on, or what came out."""
        place = self.place
        if not place.finished():
            where = f"stopped at {place}, saved: --resume auto goes on"
            tell(where)
            if "TORCHELASTIC_RUN_ID" in os.environ:
                tell("torchrun reports every stop as below: that is no error")
                tell_torchrun(where)
            return
        if self.started:
            early = f", after {place.epoch} of {self.args.epochs} epochs" if place.ended else ""
            tell(f"done in {duration(time.perf_counter() - self.began)}{early}")
        path = os.path.join(self.args.checkpoint_dir, "model_best.pth")
        if math.isfinite(place.best_acc1) and os.path.exists(path):
            tell(
                f"best: {place.best_acc1:.3f} in epoch {place.best_epoch}, saved as {path}",
                f"to evaluate it, add to the command: --evaluate --resume {path}",
            )


def duration(seconds):
    """Hours, minutes and seconds, such as 0:02:30."""
    return str(timedelta(seconds=round(seconds)))
