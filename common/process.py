"""What a process settles for itself: signals, device, threads, random numbers."""

import ctypes
import hashlib
import math
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time

import torch

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Stop:
    """Whether this process was asked to stop, by SIGTERM, SIGINT or SIGUSR1.

    The training loop looks at `requested` and stops where all processes can. A launcher passes on
    what the terminal has sent to everybody already, so signals within two seconds are one request.
    A later one ends this process with 128 + its number, whatever the main thread is stuck in:
    Python's handlers run there only, so it is a thread that counts.
    """

    requested = False

    def __init__(self):
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write)  # gets the number of every signal, at once
        threading.Thread(target=self._count, args=[read], daemon=True).start()

    def _count(self, read):
        since = math.inf
        while True:
            number = os.read(read, 1)[0]
            if number in SIGNALS and time.monotonic() - since > 2:
                os._exit(128 + number)
            if number in SIGNALS and not Stop.requested:
                Stop.requested, since = True, time.monotonic()

    @staticmethod
    def ignore():
        """From now on. Some launchers end the others once the first is gone: that hides its 75."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def die_with_parent(launched=True):
    """Let the kernel kill this process when the one that started it is gone (Linux).

    A launcher that is killed by SIGKILL cannot stop its workers: they would train on, and write
    to the folder that the next run uses. Not for a process that outlives the shell it began in.
    """
    if not launched or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    # The imports took seconds, in which it may have gone already, and another process adopted this
    # one. multiprocessing tells its number; torchrun has had a port open on the first node.
    if parent := multiprocessing.parent_process():
        gone = parent.pid != os.getppid()
    else:
        gone = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and _refused()
    if gone:
        os._exit(1)


def _refused():
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        socket.create_connection(place, timeout=5).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)


def kill_timer():
    """Returns a function of seconds: so long after its last call the kernel kills this process.

    For a process that cannot end itself: it was stopped, or runs no Python any more. Linux only.
    """
    if sys.platform != "linux":
        return lambda seconds: None
    libc, timer = ctypes.CDLL("librt.so.1"), ctypes.c_void_p()
    event = (ctypes.c_int * 16)(0, 0, signal.SIGKILL)  # a struct sigevent: its third number
    libc.timer_create(time.CLOCK_MONOTONIC, event, ctypes.byref(timer))
    return lambda s: libc.timer_settime(timer, 0, (ctypes.c_long * 4)(0, 0, s, 0), None)


def own_cores(local_world_size):
    """How many of the cores that this node lets us use are this process's share, at least 1."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    cores = len(affinity(0)) if affinity else os.cpu_count()
    return max(1, cores // local_world_size)


def keep_memory():
    """Let this process keep what it frees for its next allocation (glibc only).

    By default malloc() gives large blocks back to the kernel, and gets them anew, zeroed, by a
    page fault for every 4 KB: on a CPU a seventh of a training step. The peak is the same.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(-4, 0)  # M_MMAP_MAX: nothing outside of the heap,
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: which never shrinks


def pick_device(local_rank, local_world_size, args):
    """The torch.device of this process, made the current one; also settles threads and memory.

    args: `backend` and `sync_bn`, where a script has them. Raises ValueError when the node has
    fewer GPUs than processes (only gloo lets them share one), none where one is needed, or some
    that torch cannot use.
    """
    backend = vars(args).get("backend")
    # Some launchers set OMP_NUM_THREADS=1 and some do not: the same command would be slower, and
    # round its sums differently, under one than under the other. More than 1 is the user's wish.
    threads = os.environ.get("OMP_NUM_THREADS", "")
    wished = threads.isdigit() and int(threads) > (1 if local_world_size > 1 else 0)
    torch.set_num_threads(int(threads) if wished else own_cores(local_world_size))

    count = torch.cuda.device_count()
    if count == 0:
        if backend == "nccl":
            raise ValueError("--backend nccl needs GPUs and this node has none: use gloo")
        if vars(args).get("sync_bn"):
            raise ValueError("--sync-bn needs GPUs: torch has no SyncBatchNorm for CPUs")
        keep_memory()
        return torch.device("cpu")
    if local_world_size > count and backend != "gloo":
        raise ValueError(
            f"{local_world_size} processes on a node with {count} GPUs: start {count}, "
            "or let them share the GPUs with --backend gloo"
        )
    device = torch.device("cuda", local_rank % count)
    try:
        torch.cuda.set_device(device)  # before anything else touches a GPU, or GPU 0 pays for all
    except RuntimeError as error:  # such as a driver older than this torch
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{reason} (CUDA_VISIBLE_DEVICES= in front trains on CPUs)") from None
    if vars(args).get("precision") == "bf16" and torch.cuda.get_device_capability() < (8, 0):
        raise ValueError("this GPU has no bf16, which is the default: add --precision fp16")
    torch.backends.cudnn.benchmark = True
    return device


def position_seed(*position):
    """A 63-bit seed from a few integers, such as (seed, epoch, step, rank)."""
    text = " ".join(map(str, position)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def seed_step(seed, epoch, step, rank):
    """Make the random numbers of a step (dropout) a function of its position alone."""
    value = position_seed(seed, epoch, step, rank)
    torch.default_generator.manual_seed(value)  # torch.manual_seed is 30 times slower without GPU
    for i, generator in enumerate(torch.cuda.default_generators):  # one for each GPU in sight
        generator.manual_seed(value + i - torch.cuda.current_device())
