"""Which GPU a process uses, how many CPU cores, and how it keeps memory."""

import ctypes
import os

import torch


def own_cores(local_world_size):
    """How many of the cores that this node lets us use are this process's share, at least 1."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    cores = len(affinity(0)) if affinity else os.cpu_count()
    return max(1, cores // local_world_size)


def pick_device(local_rank, local_world_size, args):
    """The torch.device of this process, made the current one; sets its number of CPU threads too.

    args: `backend`, `sync_bn` and `precision`, where a script has them. Raises ValueError when the
    node has fewer GPUs than processes (only gloo lets them share one), none where one is needed, or
    some that torch cannot use.
    """
    flags = vars(args)
    set_threads(local_world_size)
    count = torch.cuda.device_count()
    if count == 0:
        if flags.get("backend") == "nccl":
            raise ValueError("--backend nccl needs GPUs and this node has none: use gloo")
        if flags.get("sync_bn"):
            raise ValueError("--sync-bn needs GPUs: torch has no SyncBatchNorm for CPUs")
        tune_malloc()
        return torch.device("cpu")
    if local_world_size > count and flags.get("backend") != "gloo":
        raise ValueError(
            f"{local_world_size} processes on a node with {count} GPUs: start {count}, "
            "or let them share the GPUs with --backend gloo"
        )
    device = torch.device("cuda", local_rank % count)
    try:
        torch.cuda.set_device(device)  # before anything touches a GPU, or all take memory of GPU 0
    except RuntimeError as error:  # such as a driver older than this torch
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{reason} (CUDA_VISIBLE_DEVICES= in front trains on CPUs)") from None
    if flags.get("precision") == "bf16" and torch.cuda.get_device_capability() < (8, 0):
        raise ValueError("this GPU has no bf16, which is the default: add --precision fp16 or fp32")
    torch.backends.cudnn.benchmark = True
    return device


def set_threads(local_world_size):
    """Let this process compute with its share of the cores, or with OMP_NUM_THREADS threads.

    Some launchers set OMP_NUM_THREADS=1 and some do not: the same command would be slower under
    one than under another, and round its sums differently. So 1 counts only where there is one
    process, and a larger number always: that is the user's wish.
    """
    threads = os.environ.get("OMP_NUM_THREADS", "")
    wished = threads.isdigit() and int(threads) > (1 if local_world_size > 1 else 0)
    torch.set_num_threads(int(threads) if wished else own_cores(local_world_size))


def tune_malloc():
    """Let this process keep what it frees for its next allocation (glibc only).

    By default malloc() gives large blocks back to the kernel, and gets them anew, zeroed, by a
    page fault for every 4 KB: on a CPU a seventh of a training step. The peak is the same.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(-4, 0)  # M_MMAP_MAX: no block outside of the heap,
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: which never shrinks
