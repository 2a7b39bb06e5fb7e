"""DistributedDataParallel: one process per GPU, started by torchrun; gradients are averaged.

$ torchrun --standalone --nproc-per-node=4 distributed.py --data /path/to/imagenet
"""

import gc
import math
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from common.checkpoint import check_same, load_checkpoint, open_folder, restore, save_checkpoint
from common.data import DIGITS, IMAGENET, Seeded, TrainSampler, image_folders, make_loader
from common.errors import ArgumentParser, at_least, end_on_error, user_errors
from common.metrics import AverageMeter, ProgressMeter, accuracy, gather, preflight, reduce_mean
from common.model import build_model
from common.prefetcher import Prefetcher
from common.process import Stop, die_with_parent, own_cores, pick_device, seed_step
from common.records import new_file, save_predictions
from common.rendezvous import fresh_store

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def parse_args():
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", metavar="DIR", help="train/ and val/, a folder per class (the digits)")
    add("-a", "--arch", help="torchvision's or a.b:callable (resnet50; resnet18)")
    add("--pretrained", action="store_true", help="start from torchvision's weights")
    add("--epochs", type=at_least(1), help="passes over the images (90; 4)")
    add("-b", "--batch-size", type=at_least(1), help="images a step, all processes (256; 64)")
    add("--lr", type=at_least(0, float), help="learning rate at batch 256, scaled with it (0.1)")
    add("--warmup-epochs", type=at_least(0, float), help="epochs in which it rises to that (5; 1)")
    add("--momentum", type=at_least(0, float), default=0.9, help="of SGD")
    add("--weight-decay", "--wd", type=at_least(0, float), default=1e-4, help="of SGD")
    add("--label-smoothing", type=at_least(0, float), default=0.0, help="of the loss")
    add("-j", "--workers", type=at_least(0), help="loader processes of each (a share of the cores)")
    add("--image-size", type=at_least(1), help="pixels (224; 64)")
    add("-p", "--print-freq", type=at_least(1), default=10, help="steps from line to line")
    add("--seed", type=int, default=0, help="of all random numbers")
    add("--precision", choices=DTYPES, default="bf16" if torch.cuda.is_available() else "fp32")
    add("--compile", action="store_true", help="torch.compile the model")
    add("--sync-bn", action="store_true", help="BatchNorm over the global batch (GPUs only)")
    add("--checkpoint-dir", metavar="DIR", default="checkpoints", help="renamed if it holds a run")
    add("--checkpoint-freq", type=at_least(0), default=0, help="save every N steps too (0: no)")
    add("--resume", metavar="PATH", help="or auto: the newest good one in --checkpoint-dir")
    add("-e", "--evaluate", action="store_true", help="validate once; writes no checkpoint")
    add("--predictions", type=new_file, metavar="CSV", help="those of a validation, to this file")
    add("--tensorboard", action="store_true", help="curves, beside the checkpoints")
    add("--max-steps", type=at_least(1), help="end after N steps, all resumes counted")
    add("--backend", choices=["nccl", "gloo"], help="(nccl; on CPUs gloo)")
    add("--dist-timeout", type=at_least(1), default=600, help="seconds until a stuck run ends")
    add("--local-rank", "--local_rank", help="ignored: some launchers pass it")
    parser.set_defaults(**(IMAGENET if parser.parse_args().data else DIGITS))
    return parser.parse_args()


def main():
    # Who am I? The launcher told; plain python is a group of one.
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    if os.environ.keys().isdisjoint(names):
        os.environ.update(zip(names, ["0", "0", "1", "1", "127.0.0.1", "0"], strict=True))
    rank, local_rank, world_size, local_world_size = (int(os.environ.get(n, 0)) for n in names[:4])
    launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "python"
    die_with_parent(launcher != "python")
    stop = Stop()

    # What a user can get wrong is found before any process waits for another.
    with user_errors(local_rank):
        if missing := [name for name in names if name not in os.environ]:
            raise ValueError(f"{' '.join(missing)} not set though others are: start with torchrun")
        args = parse_args()
        device = pick_device(local_rank, local_world_size, args)
        train_set, val_set = image_folders(args.data, args.image_size)
        train_sampler = TrainSampler(len(train_set), args.batch_size, rank, world_size, args.seed)
        checkpoint = load_checkpoint(args, train_set)
        torch.manual_seed(args.seed)
        net = build_model(args, len(train_set.classes), device)
        if rank == 0 and not args.evaluate:
            open_folder(args, checkpoint)

    backend = args.backend or ("nccl" if device.type == "cuda" else "gloo")
    timeout = timedelta(seconds=args.dist_timeout)
    gpu = device if backend == "nccl" else None  # told, not guessed from the rank
    store = fresh_store(rank, world_size, timeout)
    end_on_error(rank, world_size, args)
    dist.init_process_group(backend, None, timeout, world_size, rank, store, device_id=gpu)

    # Data. Each process reads its own share; of the validation set every image is in one share.
    share = args.batch_size // world_size
    workers = own_cores(local_world_size) if args.workers is None else args.workers
    train_loader = make_loader(Seeded(train_set, args.seed), train_sampler, share, workers, device)
    val_sampler = range(rank, len(val_set), world_size)
    val_loader = make_loader(val_set, val_sampler, share, workers, device)

    # Model. `net` is the plain module: it is saved, loaded and evaluated.
    criterion = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    hyper = {"lr": args.lr, "momentum": args.momentum, "weight_decay": args.weight_decay}
    optimizer = torch.optim.SGD(net.parameters(), **hyper, fused=True)
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")

    # Strategy. DDP copies rank 0's weights to all now, and averages gradients in backward().
    model = nn.SyncBatchNorm.convert_sync_batchnorm(net) if args.sync_bn else net
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    model.broadcast_buffers = False  # not in every forward(): once, before validation

    if args.compile:
        model.compile()
    meters = [AverageMeter("loss"), AverageMeter("acc@1"), AverageMeter("acc@5")]
    nodes = check_same(checkpoint, rank, local_rank, world_size, device, reduce_mean)
    parts = net, optimizer, scaler, meters  # what a checkpoint holds, and of which run it is
    run = vars(args) | {"launcher": launcher, "engine": backend, "nodes": nodes}
    run |= {"world_size": world_size, "images": len(train_set), "classes": len(train_set.classes)}
    epoch, step, best_acc1 = restore(checkpoint, parts)  # step == steps: not validated yet
    steps = train_sampler.steps  # of an epoch
    last_step = min(args.epochs * steps, args.max_steps or sys.maxsize)  # over all epochs
    stopping = False
    if rank == 0:
        preflight(run, device, workers, val_set, checkpoint)
    if args.evaluate:
        validate(val_loader, net, device, rank, world_size, args)
        last_step = step = 0

    while (step == steps or epoch * steps + step < last_step) and not stopping:
        end = min(steps, last_step - epoch * steps)
        train_sampler.set_epoch(epoch, step, end)  # another order in each epoch
        batches = Prefetcher(train_loader, device)
        progress = ProgressMeter(epoch, step, end, run, meters)
        sums = torch.zeros(4, dtype=torch.float64, device=device)  # loss, acc@1, acc@5, stop
        model.train()
        for images, target in batches:
            seed_step(args.seed, epoch, step, rank)
            lr = learning_rate(args, epoch + step / steps)
            for group in optimizer.param_groups:
                group["lr"] = lr
            with torch.autocast(device.type, DTYPES[args.precision], args.precision != "fp32"):
                output = model(images)
                loss = criterion(output, target)

            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

            step += 1
            # Sums of 24-bit numbers are exact in float64: an interruption leaves no trace in them.
            sums[:3] += torch.stack([loss.detach(), *accuracy(output, target)]).float()
            save_now = step == steps or (step < end and step % (args.checkpoint_freq or steps) == 0)
            # Not every step: reading a number makes the CPU wait for the GPU, and this for all.
            if step % args.print_freq == 0 or step == end or save_now:
                sums[3] = stop.requested  # if one process is to stop, all do
                *values, stopping = reduce_mean(sums, world_size).tolist()
                progress.update(step, values)
                sums.zero_()
                if rank == 0:
                    progress.display(lr)
                    if save_now or (stopping and step < end):
                        save_checkpoint(run, (epoch, step, best_acc1), parts)
                if stopping:
                    break
        row = progress.close(optimizer.param_groups[0]["lr"], batches.waited())
        if step < end:
            break

        for buffer in net.buffers():  # rank 0's BatchNorm statistics are the model's
            dist.broadcast(buffer, src=0)
        val_loss, acc1, acc5 = validate(val_loader, net, device, rank, world_size, args)
        best_acc1, is_best = max(acc1, best_acc1), acc1 > best_acc1
        if step == steps:
            epoch, step = epoch + 1, 0
        if rank == 0:
            row |= {"epoch": epoch, "step": step, "val_loss": val_loss, "acc1": acc1, "acc5": acc5}
            save_checkpoint(run, (epoch, step, best_acc1), parts, is_best, row)

    unfinished = epoch * steps + step < last_step
    if rank == 0 and unfinished:
        print(f"stopped at epoch {epoch} step {step}, saved: --resume auto goes on", flush=True)
    stop.ignore()
    del model
    gc.collect()  # DDP's threads must end before the interpreter does, or gloo aborts
    dist.barrier()
    dist.destroy_process_group()
    return 75 if unfinished else 0  # EX_TEMPFAIL: try again


def learning_rate(args, epoch):
    """After `epoch` epochs, a float: linear warm-up to the peak, then half a cosine to zero."""
    peak = args.lr * args.batch_size / 256
    if epoch < args.warmup_epochs:
        return peak * max(epoch, 0.01) / args.warmup_epochs
    done = (epoch - args.warmup_epochs) / (args.epochs - args.warmup_epochs)
    return peak * (1 + math.cos(math.pi * done)) / 2


@torch.no_grad()
def validate(loader, net, device, rank, world_size, args):
    """Mean loss, acc@1 and acc@5 over the data set, in which every image counts once."""
    sums = torch.zeros(4, dtype=torch.float64, device=device)  # loss, acc@1, acc@5, images
    found = torch.zeros(0, 2, device=device)  # of each image: confidence and class
    net.eval()
    for images, target in Prefetcher(loader, device):
        with torch.autocast(device.type, DTYPES[args.precision], args.precision != "fp32"):
            output = net(images)  # DDP would wait here for processes with no batch left
        loss = cross_entropy(output.float(), target)
        values = [loss, *accuracy(output, target), torch.ones_like(loss)]
        sums += torch.stack(values) * len(target)
        found = torch.cat([found, torch.stack(output.float().softmax(1).max(1), 1)])

    # Shares differ in size: divide once, after the reduction, not per batch or process.
    *values, count = reduce_mean(sums, world_size).tolist()
    assert round(count * world_size) == len(loader.dataset), "images lost or counted twice"
    loss, acc1, acc5 = (value / count for value in values)
    shares = gather(found.cpu()) if args.predictions else None
    if rank == 0:
        print(f" * loss {loss:.4f}  acc@1 {acc1:.3f}  acc@5 {acc5:.3f}", flush=True)
    if rank == 0 and shares:
        save_predictions(args.predictions, loader.dataset, shares)
    return loss, acc1, acc5


if __name__ == "__main__":
    sys.exit(main())
