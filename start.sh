#!/usr/bin/env bash
# One launch command per strategy:
#
#   ./start.sh                       train with distributed.py on the built-in digits
#   ./start.sh NAME [flags]          NAME: dataparallel, distributed, launch, multiprocessing,
#                                    apex, horovod, slurm, fsdp
#   ./start.sh test [pytest flags]   run the tests; with --all those that take long too, as CI does
#
#   NGPU=2 ./start.sh distributed                     how many processes (one per GPU, or 2)
#   CUDA_VISIBLE_DEVICES=4,5 ./start.sh distributed   which GPUs
#   NNODES=2 NGPU=4 NCPU=32 ./start.sh slurm          how many nodes; GPUs and cores of each.
#     In an interactive shell of srun it hangs without a word: use one of salloc.
set -euo pipefail
cd "$(dirname "$0")"

# Prints, in its last line, the number of GPUs. Exit code 3: there is no torch >= 2.6, or no
# torchvision. 2.7.0 does not count: its NCCL hangs at random.
probe() {
    python -c 'import importlib.util, sys
if None in map(importlib.util.find_spec, ("torch", "torchvision")):
    sys.exit(3)
import torch, torchvision
version = torch.__version__.partition("+")[0]
if tuple(map(int, version.split(".")[:2])) < (2, 6) or version == "2.7.0":
    sys.exit(3)
print(torch.cuda.device_count())' 2>&1
}
# Sets gpus, or fails where torch is missing. One that is there and broken ends this script: another
# one might be as useless, below the same PYTHONPATH.
find_torch() {
    local said code=0
    said=$(probe) || code=$?
    gpus=${said##*$'\n'}
    case $code in
        0) ;;
        3 | 127) return 1 ;; # 127: no python
        *)
            echo "$said" >&2
            echo "error: $(command -v python) has torch, but cannot import it: see above" >&2
            exit 2
            ;;
    esac
}
run() {
    printf '+ %s\n' "$*" >&2
    exec "$@"
}

# Prints which of these modules are missing, and fails if any is.
has() {
    python -c 'import importlib.util, sys
missing = [name for name in sys.argv[1:] if not importlib.util.find_spec(name)]
if missing:
    sys.exit("missing: " + " ".join(missing))' "$@"
}
# What is missing, and how pip gets it: into .venv. In an environment of yours that is for you to do.
install() {
    if [ ! "$(dirname "$(command -v python)")" -ef .venv/bin ]; then
        echo "error: your Python has no $1: run python -m pip install ${*:2}" >&2
        exit 2
    fi
    python -m pip install "${@:2}"
}

# Your Python if it has torch; else, where no environment is active, .venv, made at first use.
torch="torch >= 2.6 with torchvision"
if ! find_torch; then
    if [ -z "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ]; then
        export PATH="$PWD/.venv/bin:$PATH"
        if [ ! -x .venv/bin/python ]; then
            echo "Making .venv with torch and torchvision: several GB, this once." >&2
            python3 -m venv .venv || { rm -rf .venv; exit 2; }
        fi
    fi
    find_torch || { install "$torch" -r requirements.txt && find_torch; } ||
        { echo "error: .venv has no $torch: see above, or remove it" >&2; exit 2; }
fi
has sklearn tqdm || install "scikit-learn and tqdm" scikit-learn tqdm
has nvidia.nvimgcodec 2>/dev/null ||
    echo "hint: images are read faster with nvidia.nvimgcodec: see requirements.txt" >&2
NGPU=${NGPU:-$((gpus > 0 ? gpus : 2))}
[[ $NGPU =~ ^[1-9][0-9]*$ ]] || { echo "error: NGPU=$NGPU: it is the number of processes" >&2; exit 2; }

name=${1:-distributed}
[ $# -eq 0 ] || shift
case $name in
    # Else torchrun sets the same for more than one process, and says so in five lines.
    distributed | launch | apex | fsdp) [ "$NGPU" -eq 1 ] || export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" ;;
esac
case $name in
    dataparallel) run python dataparallel.py "$@" ;;
    distributed) run torchrun --standalone --nproc-per-node="$NGPU" distributed.py "$@" ;;
    launch) run python -m torch.distributed.launch --nproc_per_node="$NGPU" distributed.py "$@" ;;
    multiprocessing) run python multiprocessing_distributed.py --nprocs="$NGPU" "$@" ;;
    apex) run torchrun --standalone --nproc-per-node="$NGPU" apex_distributed.py "$@" ;;
    fsdp) run torchrun --standalone --nproc-per-node="$NGPU" fsdp_distributed.py "$@" ;;
    horovod)
        command -v horovodrun >/dev/null || { echo "error: needs Horovod: run tools/install_horovod.sh" >&2; exit 2; }
        run horovodrun -np "$NGPU" python horovod_distributed.py "$@"
        ;;
    slurm) run srun -K -N"${NNODES:-1}" --gres "gpu:$NGPU" -c "${NCPU:-$(nproc)}" python distributed_slurm_main.py "$@" ;;
    test)
        has pytest pytest_timeout xdist matplotlib tensorboard kubernetes_validate pyte safetensors markdown_it ||
            install "packages for the tests" -r requirements-dev.txt
        # Three files of tests at a time: a test that waits leaves its core to another.
        run python -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
        ;;
    *)
        echo "error: no NAME: $name" >&2
        sed -n '2,12s/^# \{0,1\}//p' "$0" >&2
        exit 2
        ;;
esac
