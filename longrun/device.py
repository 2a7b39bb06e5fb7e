"""Which GPU and how many CPU cores a process uses."""

import os
import socket

import joblib
import torch


def own_cores(local_world_size):
    """How many of the cores that this node lets us use are this process's share, at least 1.

    joblib counts them, for a container sees all cores of its node, and may be allowed a few.
    """
    return max(1, joblib.cpu_count() // local_world_size)


def set_up_device(local_rank, local_world_size, args):
    """The torch.device of this process.

    Makes it the current one, sets the number of CPU threads, and lets cuDNN look for the fastest
    algorithms for the size of the batches. args: `backend`, `sync_bn` and `precision`, where a
    script has them. A process may see all GPUs of its node, or one of its own. Raises ValueError
    when there are fewer GPUs than processes (only gloo lets them share one), none where one is
    needed, or some that torch cannot use, or not in bf16.
    """
    flags = vars(args)
    set_threads(local_world_size)
    count = torch.cuda.device_count()
    if count == 0:
        if flags.get("backend") == "nccl":
            raise ValueError("--backend nccl needs GPUs and this node has none: use gloo")
        if flags.get("sync_bn"):
            raise ValueError("--sync-bn needs GPUs: torch has no SyncBatchNorm for CPUs")
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % count)
    try:
        torch.cuda.set_device(device)  # before anything touches a GPU, or all take memory of GPU 0
    except RuntimeError as error:  # such as a driver older than this torch
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{reason} (CUDA_VISIBLE_DEVICES= in front trains on CPUs)") from None
    shared = local_world_size > count and flags.get("backend") != "gloo"
    if shared and not (count == 1 and _claim_gpu()):
        share = ", or let them share the GPUs with --backend gloo" * ("backend" in flags)
        raise ValueError(
            f"{local_world_size} processes on a node with {count} GPUs: start {count}{share}"
        )
    if flags.get("precision") == "bf16" and torch.cuda.get_device_capability() < (8, 0):
        remedy = "add --precision fp32, or fp16 where --help has it"
        raise ValueError(f"this GPU has no bf16, which is the default: {remedy}")
    torch.backends.cudnn.benchmark = True
    return device


def _claim_gpu():
    """Take the one GPU that this process sees; returns whether it was free on this node.

    The first of this user's processes that has a GPU takes a socket of its name, which is free
    again when that process ends. They need not have one parent: horovodrun's have not.
    """
    global _gpu
    _gpu = socket.socket(socket.AF_UNIX)
    try:
        _gpu.bind(f"\0gpu {torch.cuda.get_device_properties(0).uuid} {os.getuid()}")
        return True
    except OSError:
        return False


def set_threads(local_world_size):
    """Let this process compute with its share of the cores, or with OMP_NUM_THREADS threads.

    Some launchers set OMP_NUM_THREADS=1 and some do not: the same command would be slower under
    one than under another, and round its sums differently. So 1 counts only where there is one
    process. A larger number is the user's wish, up to the cores of the machine: with 100000
    OpenMP crashes.
    """
    threads = os.environ.get("OMP_NUM_THREADS", "")
    wished = threads.isdecimal() and int(threads) > (1 if local_world_size > 1 else 0)
    cores = min(int(threads), os.cpu_count()) if wished else own_cores(local_world_size)
    torch.set_num_threads(cores)
