"""The host's side of the GPU path, rehearsed on GPUs that compute nothing: rehearsal/cuda.cpp.

All of torch's own code for GPUs runs. This proves what the scripts ask of a GPU and of NCCL, and
what they do when one fails. It proves no number and no speed: those need a GPU, test_gpu.py.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PYTHON, ROOT, last_result, python, run, torchrun

from tests.docs.test_recipes import copy

HERE = ROOT / "tests/gpu/rehearsal"
WHEELS = importlib.util.find_spec("nvidia")  # those that torch's for GPUs brings
HEADERS = [Path(p, "cu13/include") for p in (WHEELS.submodule_search_locations if WHEELS else [])]
HEADERS = [path for path in HEADERS if (path / "driver_types.h").exists()]
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not (HEADERS and shutil.which("g++") and sys.platform == "linux"),
        reason="needs g++ and a torch for CUDA 13 (on Linux)",
    ),
]
# What CUDA's headers take from one that torch's wheels do not bring.
NOTHING = "__device_builtin__ __host__ __device__ CUDARTAPI CUDARTAPI_CDECL CUDART_CB"
NOTHING += " __device_builtin_texture_type__ __device_builtin_surface_type__"
DEFINITIONS = "".join(f"#define {name}\n" for name in NOTHING.split())
for name in ("__align__", "__builtin_align__"):
    DEFINITIONS += f"#define {name}(n) __attribute__((aligned(n)))\n"
# 22 steps an epoch.
FLAGS = "--arch resnet18 --image-size 32 --batch-size 64 -p 1 -j 1".split()


@pytest.fixture(scope="module")
def gpus(tmp_path_factory):
    """The environment of a process that sees so many GPUs, as a function."""
    folder = tmp_path_factory.mktemp("rehearsal")
    (folder / "crt").mkdir()
    (folder / "crt/host_defines.h").write_text(DEFINITIONS)
    library = folder / "libcuda.so.1"
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", f"-Wl,-soname,{library.name}"]
    command += [f"-I{path}" for path in (folder, *HEADERS)]
    subprocess.run([*command, "-o", library, HERE / "cuda.cpp"], check=True, timeout=300)

    def environment(count, **more):
        env = {"LD_PRELOAD": str(library), "PYTHONPATH": f"{HERE}:{ROOT}", "OMP_NUM_THREADS": "1"}
        env |= {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(count)))}
        env |= {"TORCH_BLAS_PREFER_CUBLASLT": "1"}  # cuBLAS itself wants more of a GPU
        return env | {"REHEARSAL_GPUS": str(count), "REHEARSAL_REPORT": "1"} | more

    return environment


@pytest.fixture
def train(work, tmp_path):
    """Runs a command in this environment, in one folder of checkpoints; returns the output."""

    def train(command, env, *flags, code=0):
        command = [*command, *FLAGS, "--checkpoint-dir", tmp_path / "c", *flags]
        return run(command, work, env=env, code=code)

    return train


SLURM = """
SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=1 SLURM_NODEID=0 SLURM_GPUS_ON_NODE=2
SLURM_STEP_TASKS_PER_NODE=1 SLURM_STEP_NODELIST=127.0.0.1 SLURM_CPUS_ON_NODE=2
"""  # of the only task of a step; that srun sets them so is seen in test_slurm.py
SLURM = dict(line.split("=") for line in SLURM.split()) | {"SLURM_JOB_ID": str(os.getpid())}
APEX = {"PYTHONPATH": f"{HERE}:{ROOT / 'tests/apex_doubles/today'}"}
SPAWN, SRUN = python("multiprocessing_distributed.py"), python("distributed_slurm_main.py")
NCCL, FP16 = "processes: 2, nccl, Rehearsal", ["--precision", "fp16", "--sync-bn"]
SCRIPTS = [  # all but Horovod's, whose library would have to be built for CUDA
    (torchrun(2), f"{NCCL}, bf16", {}),
    ([*SPAWN, *FP16], f"{NCCL}, fp16", {}),
    ([*SRUN, "--precision", "fp32"], f"{NCCL}, fp32", SLURM),
    (torchrun(2, "apex_distributed.py"), "nccl, Apex's FusedSGD, Rehearsal, bf16", APEX),
    (torchrun(2, "fsdp_distributed.py"), f"{NCCL}, bf16", {}),
    (python("dataparallel.py"), "processes: 1, nn.DataParallel, Rehearsal", {}),
    ([*torchrun(2), "--backend", "gloo", "--sync-bn"], "processes: 2, gloo, Rehearsal", {}),
]


def test_every_script_goes_on_with_the_run_of_the_one_before(gpus, train):
    """In three precisions. It says no warning, and no process touches a GPU of another."""
    for number, (command, expected, env) in enumerate(SCRIPTS):
        sharing = "gloo" in command
        env = gpus(1 if sharing else 2, **env)
        output = train(command, env, "--resume", "auto", "--max-steps", 2 * number + 2)
        assert expected in output and "warn" not in output.lower(), output
        assert not number or f"checkpoint.pth at epoch 1 step {2 * number}\n" in output
        assert last_result(output) == (1.5, 42, 80)  # as sitecustomize.py says
        used = {}
        for process, device in re.findall(r"process (\d+): launch on (\d)", output):
            used.setdefault(process, []).append(device)
        alone = [["0", "1"]] if "dataparallel" in str(command) else [["0"], ["1"]]
        assert sorted(used.values()) == ([["0"], ["0"]] if sharing else alone), output


def test_copies_cannot_be_compiled(gpus, train):
    """Each copy would run as if there was no such flag."""
    output = train([*python("dataparallel.py"), "--compile"], gpus(2), code=2)
    assert (
        "\nerror: --compile cannot compile copies: use one GPU, or distributed.py\n"
        in f"\n{output}"
    )


def test_the_recipe_of_the_same_bits(gpus, train, tmp_path):
    """On two GPUs, then on one. torch refuses what is not deterministic; the numbers need a GPU."""
    script = copy(tmp_path / "here", "same_bits")
    for count, steps in ((2, 2), (1, 4)):
        env = gpus(count, CUBLAS_WORKSPACE_CONFIG=":4096:8", REHEARSAL_SUMS="1")
        flags = ["--parts", 4, "--max-steps", steps, "--resume", "auto"]
        output = train(torchrun(count, script), env, *flags)
        assert f"processes: {count}, nccl" in output and "warn" not in output.lower(), output
        assert last_result(output) == (1.5, 42, 80)  # as sitecustomize.py says


def test_a_gpu_that_is_full_is_one_line(gpus, train):
    """In the midst of building the model."""
    output = train(python(), gpus(1, REHEARSAL_MEMORY="2"), code=2)
    line = r"(\[W.*OOM.*\n)*"  # torch's own, from 2.14 on
    line += r"error: .*resnet18 .*--image-size 32: \w+Error: CUDA out of memory.*\n"
    assert re.fullmatch(line, output), output


# The minute more that NCCL is given is not waited for.
SOONER = f"""
import runpy
from longrun.watch import Watch

real = Watch.__init__

def init(watch, rank, run, seconds):
    real(watch, rank, run, seconds)
    assert watch.seconds == seconds + 60
    watch.seconds -= 60

Watch.__init__ = init
runpy.run_path({str(ROOT / "distributed.py")!r}, run_name="__main__")
"""


def test_a_gpu_that_hangs_in_training_is_noticed(gpus, train):
    """In a launch, which waits when the queue is full, as in a synchronisation."""
    env = gpus(1, REHEARSAL_HANG="launch:6000")
    output = train([PYTHON, "-c", SOONER], env, "--dist-timeout", 15, code=1)
    end = r"rank 0 failed at epoch 1 step \d+: no progress for 15 s; see the stack"
    assert re.search(end, output), output


def test_nccl_fails_in_one_process_and_the_other_waits(gpus, train):
    """NCCL ends the one by itself, after 15 seconds, and it is said where that was."""
    output = train(torchrun(2), gpus(2, REHEARSAL_HANG="ncclAllReduce:80:1"), code=1)
    assert re.search(r"error on rank 1|\[?[Rr]ank ?1\b.*NCCL", output), output
    assert re.search(r"Fatal Python error: Aborted\n.* in train\n", output, re.DOTALL)


STEPS = """
import ctypes, runpy, common.loader
count, seen, real = ctypes.CDLL(None).rehearsal_count, [], common.loader.seed_step

def seed_step(*position):
    seen.append(count(b"wait"))
    real(*position)

common.loader.seed_step = seed_step
try:
    runpy.run_path("distributed.py", run_name="__main__")
except SystemExit:
    print("waits", seen[13:20], "and where it prints", seen[20])
"""


def test_a_step_does_not_wait_for_the_gpu(gpus, work, tmp_path):
    """Where it prints, it does: for the numbers to come back. DDP measures ten steps."""
    flags = [*FLAGS, "--data", work / "data/digits", "-p", "20", "--max-steps", "22"]
    command = [PYTHON, "-c", STEPS, *flags, "--checkpoint-dir", tmp_path / "c"]
    output = run(command, ROOT, env=gpus(1))
    assert "waits [0, 0, 0, 0, 0, 0, 0] and where it prints 2\n" in output
