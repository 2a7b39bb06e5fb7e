#!/usr/bin/env bash
# Installs Horovod 0.28.1, its last release, for the torch (>= 2.1) of the active environment:
#
#   tools/install_horovod.sh
#
# A plain `pip install horovod` does not compile against torch >= 2.1: it forces C++14. With NCCL
# where a GPU and a complete CUDA toolkit are, elsewhere for CPUs with Gloo. Takes a few minutes;
# run again, it proves what is there. Needs a C++20 compiler. cmake and what else the build needs
# are fetched by pip into a temporary folder.
set -euo pipefail
version=0.28.1

say() { printf 'install_horovod: %s\n' "$*"; }
fail() {
    say "$*" >&2
    exit 2
}

# torch's own NCCL comes first: a process should not load two of them.
probe_cuda='
import glob, importlib.util, os, re, subprocess, torch
from torch.utils.cpp_extension import CUDA_HOME

def probe():
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    if not CUDA_HOME:
        return "no CUDA toolkit"
    for name in "bin/nvcc", "include/cuda_runtime.h", "lib*/libcudart_static.a":
        if not glob.glob(os.path.join(CUDA_HOME, name)):
            return f"{CUDA_HOME} lacks {name}"
    about = subprocess.run([f"{CUDA_HOME}/bin/nvcc", "--version"], capture_output=True, text=True)
    if f"release {torch.version.cuda.split(chr(46))[0]}." not in about.stdout:
        return f"{CUDA_HOME} is not of CUDA {torch.version.cuda}, as torch is"
    wheel = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.nccl")
    folders = list(wheel.submodule_search_locations) if wheel else []
    for folder in filter(None, [*folders, os.environ.get("HOROVOD_NCCL_HOME"), CUDA_HOME, "/usr"]):
        found = glob.glob(f"{folder}/lib*/libnccl.so*") + glob.glob(f"{folder}/lib/*/libnccl.so*")
        if found and os.path.exists(f"{folder}/include/nccl.h"):
            return "\n".join(["complete", CUDA_HOME, f"{folder}/include", min(found)])
    return "no NCCL headers and library"

print(probe())'

# Prints "NCCL" or "Gloo" where this version is installed for this torch.
installed() {
    python -c "
import contextlib, os
with contextlib.redirect_stdout(open(os.devnull, 'w')):  # built without torch, it prints
    import horovod, horovod.torch as hvd
assert horovod.__version__ == '$version'
hvd.init()
print('NCCL' if hvd.nccl_built() else 'Gloo')" 2>/dev/null
}

prove() {
    say "proving it: an allreduce by two processes, started by horovodrun"
    PATH="$scripts:$PATH" timeout 120 horovodrun -np 2 python -c '
import torch, horovod.torch as hvd
hvd.init()
device = "cpu"
if hvd.nccl_built() and torch.cuda.device_count() > 1:
    device = f"cuda:{hvd.local_rank()}"
mean = hvd.allreduce(torch.full((3,), float(hvd.rank()), dtype=torch.float64, device=device))
assert hvd.size() == 2 and mean.tolist() == [0.5] * 3, (hvd.size(), mean)
print(f"rank {hvd.rank()} of 2: the mean of 0 and 1 is {mean[0].item()} ({device})")
hvd.shutdown()' </dev/null || fail "the two processes failed: the lines above say why"
    say "Horovod $version with $1 works, torch $torch"
}

command -v python >/dev/null || fail "needs a Python environment with torch: activate it first"
torch=$(python -c 'import torch; print(torch.__version__)' 2>/dev/null) ||
    fail "needs torch in the active environment: pip install torch, then start this again"
python -c 'import sys, torch; sys.exit([*map(int, torch.__version__.split(".")[:2])] < [2, 1])' ||
    fail "is for torch >= 2.1, here is $torch: pip install horovod==$version does for that one"
scripts=$(python -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
mapfile -t cuda < <(python -c "$probe_cuda" 2>/dev/null)
backend=Gloo
[ "${cuda[0]:-}" != complete ] || backend=NCCL

if [ "$(installed)" = "$backend" ]; then
    say "Horovod $version with $backend is installed"
    prove "$backend"
    exit
fi

cxx=${CXX:-$(command -v g++ || command -v c++ || command -v clang++)} ||
    fail "needs a C++ compiler: apt-get install g++ (or name yours in CXX)"
"$cxx" -std=c++20 -x c++ -fsyntax-only - <<<'#include <concepts>' 2>/dev/null ||
    fail "needs a compiler of C++20, which $cxx is not: GCC >= 10 or clang >= 10 (name it in CXX)"
include=$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')
[ -e "$include/Python.h" ] ||
    fail "needs Python's headers, $include/Python.h: apt-get install python3-dev"

tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
if [ $backend = NCCL ]; then
    say "building Horovod $version with NCCL for torch $torch, CUDA in ${cuda[1]}"
else
    say "building Horovod $version with Gloo for torch $torch; not NCCL: ${cuda[0]:-no CUDA}"
fi

# Not the environment's own: setuptools 81 and cmake 4 no longer build what is of 2023.
say "fetching cmake, ninja, setuptools and the source"
pip=(python -m pip --disable-pip-version-check)
"${pip[@]}" install --quiet --target "$tmp/tools" 'setuptools<81' wheel 'cmake<4' ninja ||
    fail "needs cmake and ninja, which pip could not get: the lines above say why"
# Python 3.12 has distutils, which horovodrun imports, only from setuptools. Before PYTHONPATH is
# set: what pip sees there it would not install.
"${pip[@]}" install --quiet cloudpickle psutil pyyaml packaging 'cffi>=1.4' \
    'setuptools; python_version >= "3.12"'
export PATH="$tmp/tools/bin:$PATH" PYTHONPATH="$tmp/tools${PYTHONPATH:+:$PYTHONPATH}"
"${pip[@]}" download --quiet --no-deps --no-build-isolation --no-binary horovod \
    --dest "$tmp" "horovod==$version"
mkdir "$tmp/source"
tar xf "$tmp/horovod-$version.tar.gz" -C "$tmp/source" --strip-components=1

# Whatever standard the build asks for, the last one on the command line counts. -g0: without what
# a debugger reads, which takes a third of the time. Not where nvcc calls: it chooses its own.
cat >"$tmp/c++" <<WRAPPER
#!/bin/sh
case " \$* " in
    *" -D__CUDACC__ "*) exec "$cxx" "\$@" ;;
esac
exec "$cxx" "\$@" -std=c++20 -g0
WRAPPER
chmod +x "$tmp/c++"
export CXX="$tmp/c++" CPLUS_INCLUDE_PATH="$include${CPLUS_INCLUDE_PATH:+:$CPLUS_INCLUDE_PATH}"
export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
export HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1
export CMAKE_GENERATOR=Ninja HOROVOD_CMAKE="$tmp/tools/bin/cmake"
sed -i "s/make_args.append('VERBOSE=1')/pass/; s/\['-j8'\]/[]/" "$tmp/source/setup.py"  # are make's
if [ $backend = NCCL ]; then
    mkdir "$tmp/nccl"
    ln -s "${cuda[3]}" "$tmp/nccl/libnccl.so"  # torch's wheel has it under its full name only
    export HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_LINK=SHARED HOROVOD_CUDA_HOME="${cuda[1]}"
    export HOROVOD_NCCL_INCLUDE="${cuda[2]}" HOROVOD_NCCL_LIB="$tmp/nccl"
    # Kernels for the GPUs that are here, instead of minutes for every one that nvcc knows.
    HOROVOD_BUILD_CUDA_CC_LIST=$(python -c '
import torch
found = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
print(",".join(sorted({f"{major}{minor}" for major, minor in found})))')
    export HOROVOD_BUILD_CUDA_CC_LIST
    sed -i 's/CMAKE_CUDA_STANDARD 11/CMAKE_CUDA_STANDARD 17/' \
        "$tmp/source/horovod/common/ops/cuda/CMakeLists.txt"  # nvcc of CUDA 13 knows none older
else
    # It takes any nvcc or CUDA folder for a toolkit, and has no setting against that.
    sed -i 's/^check_language(CUDA)/set(CMAKE_CUDA_COMPILER FALSE)/
        s/^    find_package(CUDAToolkit)$/    unset(CUDAToolkit_BIN_DIR)/' \
        "$tmp/source/CMakeLists.txt"
    sed -i 's/^string(TOUPPER .* Pytorch_CUDA)/set(Pytorch_CUDA FALSE)/' \
        "$tmp/source/cmake/Modules/FindPytorch.cmake"
    # Who waits for the others spins, on a core that their arithmetic or the exchange needs.
    sed -i 's/this_thread::yield()/this_thread::sleep_for(std::chrono::microseconds(100))/' \
        "$tmp/source/horovod/torch/mpi_ops_v2.cc"
fi

say "compiling, some minutes"
if ! "${pip[@]}" install -v --no-deps --no-build-isolation --force-reinstall "$tmp/source" 2>&1 |
    tee "$tmp/log" | sed -unE 's|^ *(\[[0-9]+/[0-9]+\]) .*/([^/]+)$|\1 \2|p'; then
    grep -B2 -A8 -m3 -E 'error|Error' "$tmp/log" >&2 || tail -n 40 "$tmp/log" >&2
    fail "the build failed: the lines above are from its output"
fi
unset PYTHONPATH
[ "$(installed)" = "$backend" ] ||
    fail "it built, but does not load: $(python -c 'import horovod.torch' 2>&1 | tail -n 1)"
prove "$backend"
