"""FSDP: one process per GPU, started by torchrun; each keeps a shard of weights and momentum.

$ torchrun --standalone --nproc-per-node=4 fsdp_distributed.py --data /path/to/imagenet
"""

import copy
import gc
import math
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from common.images import image_folders
from common.loader import TrainSampler, seed_step, start_loader
from common.metrics import AverageMeter, accuracy, reduce_mean
from common.prefetcher import Prefetcher
from longrun.arguments import ArgumentParser, bounded
from longrun.checkpoint import Checkpoints
from longrun.device import own_cores, set_up_device
from longrun.launcher import check_launcher
from longrun.messages import exit_on_user_error
from longrun.model import build_model
from longrun.report import Report
from longrun.sharded import Shards, blocks, check_shapes, precision_policy
from longrun.signals import StopRequest
from longrun.watch import Watch
from longrun.weights import load_pretrained

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # bf16 needs no loss scaling
# The defaults of flags are ImageNet's. Without --data, these suit the built-in digits.
DIGITS = {"arch": "resnet18", "epochs": 4, "batch_size": 64, "warmup_epochs": 1, "image_size": 32}


def parse_args(local_world_size):
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    positive, not_negative, number = bounded(int, 1), bounded(int, 0), bounded(float, 0)
    add("--data", metavar="DIR", help="holds train/ and val/, a folder per class (default: digits)")
    arch = "a model of torchvision, or your package.module:callable"
    add("-a", "--arch", default="resnet50", help=arch)
    weights = "start from torchvision's weights, or from those in FILE"
    add("--pretrained", nargs="?", const=True, metavar="FILE", help=weights)
    add("--epochs", type=positive, default=90, help="passes over the training images")
    add("-b", "--batch-size", type=positive, default=256, help="images per step, all processes")
    add("--lr", type=number, default=0.1, help="for a batch of 256; it is scaled with the batch")
    add("--warmup-epochs", type=number, default=5, help="in which the rate rises linearly")
    add("--momentum", type=number, default=0.9, help="momentum of SGD")
    add("--weight-decay", "--wd", type=number, default=1e-4, help="decay of all weights")
    add("--label-smoothing", type=bounded(float, 0, 1), default=0.0, help="of the training loss")
    workers = own_cores(local_world_size)
    add("-j", "--workers", type=bounded(int, 0, 1024), default=workers, help="loader processes")
    add("--image-size", type=bounded(int, 1, 4096), default=224, help="side length in pixels")
    add("-p", "--print-freq", type=positive, default=10, help="steps between two lines")
    add("--seed", type=bounded(int, 0, 2**63 - 1), default=0, help="random seed")
    precision = "bf16" if torch.cuda.is_available() else "fp32"
    add("--precision", choices=DTYPES, default=precision, help="of the forward pass")
    add("--compile", action="store_true", help="torch.compile the model")
    add("--sync-bn", action="store_true", help="BatchNorm over the global batch (GPUs only)")
    add("--checkpoint-dir", metavar="DIR", default="checkpoints", help="a new folder for each run")
    add("--checkpoint-freq", type=not_negative, default=0, help="save every N steps of an epoch")
    add("--resume", metavar="PATH", help="a checkpoint, or auto: the newest of the run, if any")
    add("-e", "--evaluate", action="store_true", help="only validate, and write no checkpoint")
    add("--max-steps", type=positive, help="end after N steps in total, resumes included")
    add("--backend", choices=["nccl", "gloo"], help="(default: nccl on GPUs, gloo on CPUs)")
    add("--dist-timeout", type=bounded(int, 1, 10**6), default=600, help="seconds a step may take")
    add("--local-rank", "--local_rank", help="ignored: some launchers pass it")
    args = parser.parse_args()
    # Other defaults, for what is not given: the digits', and of the model the checkpoint's.
    if args.data is None:
        parser.set_defaults(**DIGITS)
    parser.set_defaults(**Checkpoints.saved_flags(args, "arch", "image_size"))
    return parser.parse_args()


def main():
    gc.freeze()  # what is imported: each collection of garbage, also at the exit, is 0.2 s shorter
    # Who am I? torchrun sets these variables for each process; plain python is a group of one.
    with exit_on_user_error(rank=0):  # all print, for none knows its rank yet
        check_launcher()  # an error for wrong ones; it also ends this process when torchrun ends
    rank = int(os.environ["RANK"])  # my number among all processes
    local_rank = int(os.environ["LOCAL_RANK"])  # my number on this machine: it chooses the GPU
    world_size = int(os.environ["WORLD_SIZE"])  # how many processes there are
    local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])  # and on this machine

    # Find what a user can get wrong before any process waits for another.
    with exit_on_user_error(local_rank):  # one line from each node, and exit code 2
        args = parse_args(local_world_size)
        checkpoints = Checkpoints(args, rank, world_size)  # locks their folder, reads one
        device = set_up_device(local_rank, local_world_size, args)
        if device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
            raise ValueError("fully_shard on CPUs needs torch 2.7 or newer")

        # Data. Each process reads its own part of each batch and of the validation set. Workers are
        # forked here, before NCCL or gloo has threads: a fork would copy the locks that these hold.
        # Training images are cropped and flipped at random: `seed`, epoch and image decide how.
        train_set, val_set = image_folders(args.data, args.image_size, args.evaluate)
        train_sampler = TrainSampler(len(train_set), args.batch_size, rank, world_size, args.seed)
        val_sampler = range(rank, len(val_set), world_size)  # every image in one part, none twice
        # Where training begins or goes on: an error if the checkpoint is of another task.
        progress = checkpoints.start_progress(train_set, train_sampler.steps_per_epoch)
        report = Report(progress, rank, world_size, args)
        local_batch_size = args.batch_size // world_size
        train_loader = start_loader(
            train_set, train_sampler, local_batch_size, args.workers, device, seed=args.seed
        )
        val_loader = start_loader(val_set, val_sampler, local_batch_size, args.workers, device)

        # Model. `net` is whole, on the CPU: it is saved and loaded. `model` trains and validates.
        torch.manual_seed(args.seed)
        # An example of what the model takes, to try it: two images, for BatchNorm needs two.
        example = torch.zeros(min(2, local_batch_size), 3, args.image_size, args.image_size)
        net = build_model(args, len(train_set.classes), torch.device("cpu"), example)
        load_pretrained(net, checkpoints)  # those of --pretrained, if the run is new
        check_shapes(net)

    # From here on, an error ends this process with a line that names its rank, epoch and step. So
    # does what takes more than --dist-timeout after watch.beat().
    watch = Watch(rank, progress, args.dist_timeout)
    backend = args.backend or ("nccl" if device.type == "cuda" else "gloo")
    watch.beat()
    dist.init_process_group(
        backend,
        timeout=timedelta(seconds=args.dist_timeout),
        device_id=device if backend == "nccl" else None,  # NCCL would guess it from the rank
    )
    watch.beat()
    # Prefetchers bring batches to the device. Images are uint8 RGB until then: they normalise them.
    train_batches = Prefetcher(train_loader, device)
    val_batches = Prefetcher(val_loader, device)

    optimizer = torch.optim.SGD(
        net.parameters(),
        lr=args.lr * args.batch_size / 256,  # train() sets it before each step
        momentum=args.momentum,
        weight_decay=args.weight_decay,
    )
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")

    # Strategy. `shards` has the optimizer that trains; the one above is saved and loaded.
    model = divide(net, device, args)
    shards = Shards(net, optimizer, model)

    if args.compile:
        model.compile(dynamic=False)  # all batches have one size
    meters = {name: AverageMeter(name) for name in ("loss", "acc@1", "acc@5")}
    with exit_on_user_error(rank):
        # What checkpoints hold. Anything with a state_dict() can be added: scheduler=scheduler.
        checkpoints.attach(net, optimizer, scaler, meters)
        checkpoints.restore()  # if there is one to resume from, it fills them
        checkpoints.check_ranks_agree(train_set, val_set, device, reduce_mean)  # nodes may differ
        if rank == 0 and not args.evaluate:
            checkpoints.discard_leftovers()  # removes what a killed run has left half-done
    shards.scatter()  # rank 0's weights go to all processes, in shards
    if rank == 0:
        report.print_banner(backend, device, train_set, val_set, optimizer, checkpoints.describe())
    if args.evaluate:
        validate(val_batches, model, watch, rank, world_size, args)
    stop = StopRequest()  # from here on, signals are requests to stop: there is something to save

    # The epochs that are left, none with --evaluate, and a range of the steps to do in each.
    # --max-steps may cut the last epoch short. Of a resumed one only the validation may be left.
    for epoch, steps in progress.remaining():
        train_sampler.set_epoch(epoch, steps)  # a new order
        timing, stopped = train(
            train_batches, shards, checkpoints, report, stop, watch, rank, world_size
        )
        if progress.step < steps.stop:
            break  # stopped by a signal, and saved

        # Each process has BatchNorm statistics of its own: rank 0's are validated and saved.
        watch.beat()
        for buffer in model.buffers():
            data = buffer.flatten().clone()  # gloo sends tensors with gaps wrongly
            dist.broadcast(data.view(torch.uint8), src=0)  # bytes: no backend sends int16
            buffer.copy_(data.view_as(buffer))
        val_loss, acc1, acc5 = validate(val_batches, model, watch, rank, world_size, args)
        shards.gather()
        progress.end_epoch()
        is_best = progress.record_score(acc1)  # on all ranks. To stop early: progress.stop_early()
        if rank == 0:
            row = {
                "epoch": progress.epoch,  # epochs completed
                "step": progress.step,  # 0, unless --max-steps has cut this epoch
                "train_loss": meters["loss"].avg,
                "val_loss": val_loss,
                "acc1": acc1,
                "acc5": acc5,
                "lr": optimizer.param_groups[0]["lr"],
                "world_size": world_size,
                "batch_size": args.batch_size,
            }
            checkpoints.save(row | timing, is_best)
            report.print_epoch(row | timing, is_best)
        if stopped:
            break

    if rank == 0 and not args.evaluate:
        report.print_end()  # how it goes on, or the best and how to evaluate it
    stop.ignore()  # a signal from here on could only hide the exit code
    watch.beat()
    del model, shards
    gc.collect()  # DDP's threads must end before the interpreter does, or gloo aborts
    dist.barrier()
    dist.destroy_process_group()
    # 75 is EX_TEMPFAIL: the run was stopped and saved, and can be started again.
    return 0 if progress.finished() else 75


def divide(net, device, args):
    """A copy of it: a process keeps its shard of each block, and gathers a block to compute it."""
    model = copy.deepcopy(net).to(memory_format=torch.contiguous_format)  # FSDP takes no other
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model) if args.sync_bn else model
    # Of the default group: a mesh with a group of its own may use NCCL, whatever --backend says.
    mesh = DeviceMesh.from_group(dist.group.WORLD, device.type)
    policy = precision_policy(net, DTYPES[args.precision])
    for block in [*blocks(model), model]:  # the model last: it takes what is in no block
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return model


def train(batches, shards, checkpoints, report, stop, watch, rank, world_size):
    """Train an epoch from progress.step on, to its end or until a signal stops it.

    Returns how fast it was, a dict for metrics.jsonl, {} where no step was left; and whether all
    processes are to stop.
    """
    args, progress, meters = checkpoints.args, checkpoints.progress, checkpoints.meters
    device, optimizer, scaler = batches.device, shards.optimizer, checkpoints.scaler
    model = shards.model
    if progress.step == 0:
        for meter in meters.values():
            meter.reset()  # those of a resumed epoch go on
    counted = progress.step  # the meters have counted the steps up to here
    end = progress.step + len(batches)
    report.start_epoch(end)
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # of loss, acc@1 and acc@5
    stopped = False
    model.train()
    watch.beat()
    for images, target in batches:
        watch.beat()
        seed_step(args.seed, progress.epoch, progress.step, rank)  # dropout is the same if resumed
        lr = learning_rate(args, progress.epoch + progress.step / progress.steps_per_epoch)
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("scale", 1)  # a group with "scale": 0.1 learns slower
        with torch.autocast(device.type, DTYPES[args.precision], args.precision != "fp32"):
            output = model(images)
            loss = cross_entropy(output, target, label_smoothing=args.label_smoothing)

        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

        progress.step += 1
        acc1, acc5 = accuracy(output, target)
        # float64 adds float32 numbers without rounding: a resumed run has the same averages.
        sums += torch.stack([loss.detach(), acc1, acc5]).float()
        at_end = progress.step == end
        # A complete epoch is saved before its validation, so a crash there loses only that.
        # One that --max-steps cuts is saved after its validation.
        complete = progress.step == progress.steps_per_epoch
        due = args.checkpoint_freq > 0 and progress.step % args.checkpoint_freq == 0
        save_now = complete or (due and not at_end)
        # Not in every step: to read numbers, the CPU waits for the GPU and for all processes.
        if save_now or at_end or progress.step % args.print_freq == 0:
            asked = torch.full_like(sums[:1], stop.requested.is_set())
            means = reduce_mean(torch.cat([sums, asked]), world_size)
            loss_sum, acc1_sum, acc5_sum, asked = means.tolist()
            sums.zero_()
            if not math.isfinite(loss_sum):
                raise FloatingPointError(f"the loss is {loss_sum}")
            for meter, total in zip(meters.values(), [loss_sum, acc1_sum, acc5_sum], strict=True):
                meter.add(total, progress.step - counted)
            counted = progress.step
            stopped = asked > 0  # one process that was asked to stop is enough
            if rank == 0:
                report.print_step(meters, optimizer.param_groups[0]["lr"])
            if save_now or (stopped and not at_end):
                shards.gather()  # all processes send their shards; rank 0 writes them
                if rank == 0:
                    checkpoints.save()
            if stopped:
                break
    watch.rest()
    return report.end_steps(batches.waited()), stopped


def learning_rate(args, epoch):
    """The rate after `epoch` epochs, a fraction too: linear warm-up, then half a cosine to zero."""
    peak = args.lr * args.batch_size / 256
    if epoch < args.warmup_epochs:
        return peak * min(1.0, max(epoch, 0.01) / args.warmup_epochs)  # not 0 in the first step
    done = (epoch - args.warmup_epochs) / (args.epochs - args.warmup_epochs)
    return peak * (1 + math.cos(math.pi * done)) / 2


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # all would wait for one that compiles
def validate(batches, net, watch, rank, world_size, args):
    """Mean loss, acc@1 and acc@5 over the data set: every image counts exactly once."""
    device, dataset = batches.device, batches.loader.dataset
    sums = torch.zeros(4, dtype=torch.float64, device=device)  # of loss, acc@1, acc@5 and images
    net.eval()
    watch.beat()
    for images, target in batches:
        watch.beat()
        with torch.autocast(device.type, DTYPES[args.precision], args.precision != "fp32"):
            output = net(images)  # gathers weights from all processes
        loss = cross_entropy(output.float(), target)
        acc1, acc5 = accuracy(output, target)
        sums += torch.stack([loss, acc1, acc5, torch.ones_like(loss)]) * len(target)

    # All processes gather a block together. One that has a batch less takes part once more.
    longest = math.ceil(math.ceil(len(dataset) / world_size) / batches.loader.batch_size)
    if len(batches) < longest:
        with torch.autocast(device.type, DTYPES[args.precision], args.precision != "fp32"):
            net(batches.load(dataset[0][0][None]))

    # Batches and parts differ in size: add up first, divide once by the number of all images.
    loss_sum, acc1_sum, acc5_sum, count = reduce_mean(sums, world_size).tolist()
    watch.rest()
    if round(count * world_size) != len(dataset):
        raise RuntimeError("images lost or counted twice")
    loss, acc1, acc5 = loss_sum / count, acc1_sum / count, acc5_sum / count
    if rank == 0 and args.evaluate:  # else print_epoch() says it
        print(f" * loss {loss:.4f}  acc@1 {acc1:.3f}  acc@5 {acc5:.3f}", flush=True)
    return loss, acc1, acc5


if __name__ == "__main__":
    sys.exit(main())
