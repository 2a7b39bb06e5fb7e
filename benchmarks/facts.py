"""What this machine is, and how fast it multiplies and copies.

$ python -m benchmarks.facts
"""

import contextlib
import importlib.util
import platform
import subprocess

import torch

from benchmarks.harness import (
    CORES,
    DEVICE,
    GPU,
    alternate,
    clock,
    make_parser,
    report,
    spread,
)
from benchmarks.roofline import copy, matrix_product

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
CPU = torch.device("cpu")
# What a part of this project needs, and a machine may lack.
PACKAGES = "torchvision sklearn joblib tqdm matplotlib pytest pytest_timeout xdist tensorboard"
PACKAGES += " safetensors nvidia.nvimgcodec torchcodec timm triton amp_C horovod"


def parse_args():
    parser = make_parser("facts", __doc__, rounds=10)
    add = parser.add_argument
    add("--matrix", metavar="N", type=int, default=8192 if GPU else 256, help="rows and columns")
    add("--megabytes", type=int, default=512 if GPU else 128, help="to copy")
    return parser.parse_args()


def main():
    args = parse_args()
    operations, size = 2 * args.matrix**3 / 1e12, args.megabytes * 10**6
    contestants = {  # what is timed, how much of it one call does, and in what unit per second
        f"matrix product, {name}": (matrix_product(dtype, args.matrix), operations, "TFLOP/s")
        for name, dtype in DTYPES.items()
    }
    copies = {"within the device": (copy(size, DEVICE, DEVICE), 2)}  # it reads and writes there
    if GPU:
        for name, pinned in {"pinned": True, "not pinned": False}.items():
            copies[f"CPU to GPU, {name}"] = (copy(size, CPU, DEVICE, pinned), 1)
            copies[f"GPU to CPU, {name}"] = (copy(size, DEVICE, CPU, pinned), 1)
    for name, (function, times) in copies.items():
        contestants[f"copy {name}"] = (function, times * size / 1e9, "GB/s")

    rates = {name: [] for name in contestants}
    for round_number in range(args.rounds + 1):
        for name, (function, amount, _) in alternate(contestants.items(), round_number):
            rates[name].append(amount / seconds(function))
    runs = [
        {"name": name, "rate": spread(rates[name][1:]), "unit": contestants[name][2]}
        for name in contestants
    ]
    columns = {"": "name", "per second": "rate", "unit": "unit"}
    report("facts", args, runs, columns, **facts())


def seconds(function):
    """How long a call takes: the mean of five, that are queued at once."""
    function()  # not measured: the caches were another's
    start = clock()
    for _ in range(5):
        function()
    return (clock() - start) / 5


def facts():
    """What else is to be known of the machine, as a dict."""
    found = {
        "kernel": platform.release(),
        "cores": CORES,
        "packages": {name: is_there(name) for name in PACKAGES.split()},
    }
    if GPU:
        found |= {
            "driver": nvidia_smi("driver_version"),
            "power_limit": nvidia_smi("power.limit"),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "gpus": [gpu(number) for number in range(torch.cuda.device_count())],
        }
    return found


def is_there(package):
    with contextlib.suppress(ModuleNotFoundError):  # of the package that it is a part of
        return importlib.util.find_spec(package) is not None
    return False


def nvidia_smi(field):
    """What it says of the first GPU; None where it cannot be asked."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader", "--id=0"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
        return done.stdout.strip()


def gpu(number):
    properties = torch.cuda.get_device_properties(number)
    return {
        "name": properties.name,
        "uuid": str(properties.uuid),
        "memory_mb": properties.total_memory / 1e6,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
    }


if __name__ == "__main__":
    main()
