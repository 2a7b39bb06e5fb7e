"""Images/s of each script that can run here, as ImageNet epochs: a table and a picture.

$ python -m benchmarks.strategies
"""

import contextlib
import importlib.util
import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch

from benchmarks.drawing import draw, import_pyplot
from benchmarks.harness import (
    CORES,
    GPU,
    IMAGENET_IMAGES,
    ROOT,
    add_model_flags,
    add_photograph_flags,
    alternate,
    clean_up_on_sigterm,
    make_parser,
    report,
)
from benchmarks.photographs import photographs

TORCHRUN = "torchrun --standalone --nproc-per-node={processes} {script}"
STRATEGIES = {  # by their names for start.sh: script, launcher, command
    "dataparallel": ("dataparallel.py", "python", "python {script}"),
    "distributed": ("distributed.py", "torchrun", TORCHRUN),
    "multiprocessing": (
        "multiprocessing_distributed.py",
        "mp.spawn",
        "python {script} --nprocs={processes}",
    ),
    "slurm": (
        "distributed_slurm_main.py",
        "srun",
        "srun -K -N1 --gres gpu:{processes} python {script} --nprocs={processes}",
    ),
    "horovod": (
        "horovod_distributed.py",
        "horovodrun",
        "horovodrun -np {processes} python {script}",
    ),
    "apex": ("apex_distributed.py", "torchrun", TORCHRUN),
    "fsdp": ("fsdp_distributed.py", "torchrun", TORCHRUN),
}
BOUNDS = ["loader", "compute"]  # what bounds the speed


def parse_args():
    parser = make_parser("strategies", __doc__, rounds=3, batch_size=256)
    add_photograph_flags(parser)
    add_model_flags(parser)
    add = parser.add_argument
    most = torch.cuda.device_count() or CORES
    powers = [2**i for i in range(most.bit_length())]
    names = list(STRATEGIES)
    add("--processes", type=int, nargs="+", default=powers, help="how many")
    add("--only", nargs="+", choices=names, default=names, help="of those that can run here")
    add("--bounds", nargs="+", choices=BOUNDS, default=BOUNDS, help="of the speed")
    add("--loader-arch", default="benchmarks.models:tiny", help="the model where loading bounds")
    add("--epochs", type=int, default=4, help="the first does not count")
    return parser.parse_args()


def main():
    args = parse_args()
    clean_up_on_sigterm()
    pyplot = import_pyplot()  # an error now is better than one after the measurements
    names = [name for name in args.only if can_run(name)]
    cases = [
        (bound, processes, name)
        for bound, processes, name in itertools.product(args.bounds, args.processes, names)
        if name != "dataparallel" or processes == (torch.cuda.device_count() or 1)
    ]
    data = Path(args.data or photographs(args.images)).resolve()
    flags = {
        "loader": ["--data", data, "--arch", args.loader_arch, "--image-size", 224],
        "compute": ["--arch", args.arch, "--image-size", args.image_size],
    }
    more_flags = ["-b", args.batch_size, "--epochs", args.epochs, "--checkpoint-dir", "run"]
    speeds = {case: [] for case in cases}
    with contextlib.ExitStack() as stack:
        folders = {
            "loader": stack.enter_context(copy_of_scripts(resident=False)),
            "compute": stack.enter_context(copy_of_scripts(resident=True)),
        }
        env = os.environ | stack.enter_context(slurm_cluster("slurm" in names))
        env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
        order = [case for i in range(args.rounds) for case in alternate(cases, i)]
        for number, (bound, processes, name) in enumerate(order, 1):
            script, _, template = STRATEGIES[name]
            command = template.format(script=script, processes=processes).split()
            command += map(str, [*flags[bound], *more_flags])
            speed = train(command, folders[bound], env)
            speeds[bound, processes, name].append(speed)
            print(f"{number}/{len(order)}", bound, processes, name, f"{speed:.0f} images/s")
            sys.stdout.flush()

    runs = []
    for (bound, processes, name), values in speeds.items():
        script, launcher, _ = STRATEGIES[name]
        run = {
            "strategy": name,
            "script": script,
            "launcher": launcher,
            "processes": processes,
            "bound": bound,
            "images_per_second": median(values),
            "seconds_per_epoch": IMAGENET_IMAGES / median(values),
            "all": values,
            "spread": f"{min(values):.0f} to {max(values):.0f}",
        }
        runs.append(run)
    columns = {
        "": "strategy",
        "processes": "processes",
        "bound by": "bound",
        "images/s": "images_per_second",
        "lowest, highest": "spread",
        "s / epoch": "seconds_per_epoch",
    }
    settings = {"epoch_images": IMAGENET_IMAGES}
    for bound in args.bounds:
        settings[bound] = shlex.join(map(str, flags[bound])).replace(str(data), "DIR")
    report("strategies", args, runs, columns, **settings)
    draw(pyplot, runs, args.out / "strategies.png", torch.cuda.is_available())


def train(command, folder, env):
    """Run a training; returns images per second: the median of its epochs but the first."""
    shutil.rmtree(f"{folder}/run", ignore_errors=True)  # a script refuses a folder with a run
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        output = done.stdout[-2000:] + done.stderr[-2000:]
        sys.exit(f"error: {shlex.join(command)}\n{output}")
    with open(f"{folder}/run/metrics.jsonl") as file:
        speeds = [json.loads(line)["images_per_second"] for line in file]
    return round(median(speeds[1:]), 1)  # rounded here, so that picture and tables agree


@contextlib.contextmanager
def copy_of_scripts(resident):
    """A temporary folder with the scripts; with `resident`, ResidentLoader is their loader."""
    Path("data").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for path in ROOT.glob("*.py"):
            shutil.copy(path, folder)
        for package in ("common", "longrun", "benchmarks"):
            shutil.copytree(ROOT / package, Path(folder, package))
        os.symlink(Path("data").resolve(), Path(folder, "data"))
        if resident:
            with open(Path(folder, "common", "loader.py"), "a") as file:
                file.write("\nfrom benchmarks.resident import ResidentLoader as start_loader\n")
        yield folder


def can_run(name):
    if name == "apex":
        return GPU and importlib.util.find_spec("amp_C") is not None
    if name == "slurm" and "SLURM_CONF" not in os.environ:
        return os.getuid() == 0 and shutil.which("slurmctld", path="/usr/sbin:/sbin")
    return name != "horovod" or importlib.util.find_spec("horovod") is not None


@contextlib.contextmanager
def slurm_cluster(needed):
    """Yield the environment variables with which srun finds a cluster.

    That is the one of this machine, or else one that is started here and stopped at the end.
    """
    if not needed or "SLURM_CONF" in os.environ:
        yield {}
        return
    script = ROOT / "tests/cluster/slurm/cluster.sh"
    with tempfile.TemporaryDirectory() as folder:
        cluster = f"{folder}/two"
        subprocess.run([script, "start", cluster], check=True, stdout=subprocess.DEVNULL)
        try:
            yield {"SLURM_CONF": f"{cluster}/slurm.conf"}
        finally:
            subprocess.run([script, "stop", cluster], check=True)


if __name__ == "__main__":
    main()
