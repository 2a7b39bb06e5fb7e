"""The first hour on a GPU machine: all that is measured here, in parts, the most important first.

$ python -m benchmarks.gpu_hour

A part has a limit of its own and may fail alone. DIR/gpu_hour.json is written anew after each: a
machine that is taken back loses one part, and the same command goes on with what is not measured
yet. Nothing needs a network.
"""

import argparse
import collections
import contextlib
import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.harness import GPU, ROOT, clean_up_on_sigterm, hardware
from longrun.files import atomic_write
from longrun.messages import exit_on_user_error

TESTS = f"pytest {shlex.quote(str(ROOT / 'tests/gpu/test_gpu.py'))} -m gpu -v -p no:cacheprovider"
TESTS += " --durations=20"
OUTCOME = re.compile(r"(\w+\.py::.+?) (PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)\b")
TAIL = 12000  # characters of a part's output that are kept
NAMES = "facts prefetcher steps waiting tests fp16 compile batches strategies loader".split()


def parse_args():
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_hour",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--out", metavar="DIR", type=Path, default=Path("results"), help="for the results")
    text = "these parts, also those that are measured already; without it: all that are not"
    add("--only", metavar="PART", nargs="+", choices=NAMES, help=f"{text}. {', '.join(NAMES)}")
    add("-b", "--batch-size", type=int, default=256, help="images of a step")
    add("--small", action="store_true", help="a rehearsal: everything small, without a GPU too")
    args = parser.parse_args()
    if not (GPU or args.small):
        parser.error("torch sees no GPU here; --small rehearses on CPUs")
    return args


def main():
    args = parse_args()
    clean_up_on_sigterm()
    here, failed = machine(), []
    with exit_on_user_error(rank=0):
        args.out.mkdir(parents=True, exist_ok=True)
        path = args.out / "gpu_hour.json"
        measured = [name for name, part in read(path, args.small).items() if part["end"] == "done"]
        for name, (limit, words) in parts(args).items():
            if name not in (args.only or NAMES) or (name in measured and not args.only):
                continue
            print(f"{name}: {limit} s at most", flush=True)
            part = run_part(name, limit, shlex.split(words), args.out / "gpu_hour.log")
            keep(path, args.small, name, part | {"machine": here})
            counts = collections.Counter(part["tests"].values())
            said = [part["end"], *(f"{count} {outcome}" for outcome, count in counts.items())]
            print(f"{name}: {', '.join(said)}, {part['seconds']:.0f} s", flush=True)
            failed += [name] if part["end"] != "done" else []
    print(f"written to {path}; failed: {', '.join(failed) or 'none'}")
    sys.exit(1 if failed else 0)


def parts(args):
    """{name: (seconds at most, words behind `python -m`)}, in the order of their importance."""
    step, strategies = f"benchmarks.step -b {args.batch_size}", "distributed fsdp dataparallel"
    counts = sorted({1, torch.cuda.device_count() or 1})
    words = {
        "facts": (90, "benchmarks.facts"),
        "prefetcher": (120, f"{TESTS} -k prefetcher"),
        "steps": (300, step),
        "waiting": (90, f"{TESTS} -k waiting"),  # alone: another process would make it wait
        "tests": (540, f"{TESTS} -k 'not prefetcher and not waiting'"),
        "fp16": (240, f"{step} --precision fp16 --rounds 20"),
        "compile": (420, f"{step} --compile --rounds 20"),
        "batches": (360, "benchmarks.batches --compiled 32"),
        "strategies": (
            480,
            f"benchmarks.strategies -b {args.batch_size} --rounds 2 --images 4096 "
            f"--processes {' '.join(map(str, counts))} --only {strategies}",
        ),
        "loader": (300, "benchmarks.loader --rounds 3 --seconds 5 --images 4096"),
    }
    if args.small:
        model = "--arch benchmarks.models:tiny --image-size 32"
        step = f"benchmarks.step {model} -b 2 --rounds 1 --steps 1"
        images = "--images 64 -b 32 --rounds 1"
        words |= {
            "facts": (90, "benchmarks.facts --rounds 2 --matrix 256 --megabytes 16"),
            "steps": (300, step),
            "fp16": (240, f"{step} --precision fp16"),
            "compile": (420, f"{step} --compile"),
            "batches": (
                360,
                f"benchmarks.batches {model} --rounds 1 --steps 1 --batch-sizes 2 --compiled 2",
            ),
            "strategies": (
                480,
                f"benchmarks.strategies {images} {model} --epochs 2 --processes 1 "
                "--only distributed",
            ),
            "loader": (300, f"benchmarks.loader {images} --image-size 32 --seconds 0"),
        }
    return words


def run_part(name, limit, words, log):
    """Run `python -m words` for so many seconds at most; returns what is to be kept, as a dict.

    log: a file that its output is added to.
    """
    start, began = time.monotonic(), datetime.datetime.now().astimezone()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, open(log, "ab") as file:
        command = [sys.executable, "-m", *words]
        if words[0] != "pytest":
            command += ["--out", folder]
        file.write(f"\n==== {name}: {shlex.join(['python', '-m', *words])}\n".encode())
        file.flush()
        first = file.tell()
        code = run_below_keeper(command, limit, file, folder)
        output = log.read_bytes()[first:].decode(errors="replace")
        results = results_in(folder)
    return {
        "end": {0: "done", None: "over its limit"}.get(code, "failed"),
        "exit_code": code,
        "seconds": round(time.monotonic() - start, 1),
        "limit": limit,
        "command": shlex.join(["python", "-m", *words]).replace(f"{ROOT}/", ""),
        "began": began.isoformat(timespec="seconds"),
        "tests": {test: outcome.lower() for test, outcome in OUTCOME.findall(output)},
        "results": results,
        "tail": output[-TAIL:],
    }


def run_below_keeper(command, limit, output, folder):
    """The exit code of a command that no process outlives; None if it took more than `limit` s.

    Neither the command nor what it has started outlives this process. What those that are killed
    leave behind is left in `folder`.
    """
    path = os.environ.get("PYTHONPATH")
    more = {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{path}" if path else str(ROOT),
        "PYTHONUNBUFFERED": "1",  # else the output of what is killed would be lost
        "TMPDIR": folder,
    }
    keeper = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.keeper", *command],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=os.environ | more,
        start_new_session=True,  # Ctrl-C is for this process
    )
    try:
        return keeper.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        keeper.stdin.close()
        keeper.wait()


def results_in(folder):
    """{name of the benchmark: what it wrote}."""
    found = {}
    for path in Path(folder).glob("*.json"):
        with contextlib.suppress(ValueError):  # half a file, of one that was killed
            found[path.stem] = json.loads(path.read_text())
    return found


def machine():
    """Which one this is: its name, what it has, and the names that GPUs have for themselves."""
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "host": platform.node(),
        "hardware": hardware(),
        "gpus": [str(gpu.uuid) for gpu in gpus],
        "torch": torch.__version__,
    }


def read(path, small):
    """The parts that are in the file already, by their names."""
    with contextlib.suppress(FileNotFoundError):
        try:
            hour = json.loads(path.read_text())
            was_small, parts = hour["small"], hour["parts"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path} is not of this command: choose another --out") from None
        if was_small != small:
            kind = "a rehearsal (--small)" if was_small else "no rehearsal (no --small)"
            raise ValueError(f"{path} holds {kind}: choose another --out")
        return parts
    return {}


def keep(path, small, name, part):
    """Put a part into the file. One that was measured well stays, with what came later."""
    parts = read(path, small)  # anew: another process may have added to it
    if part["end"] != "done" and parts.get(name, part)["end"] == "done":
        part = parts[name] | {"later": part}
    hour = {"small": small, "parts": parts | {name: part}}
    with atomic_write(path) as file:
        file.write(json.dumps(hour, indent=1).encode() + b"\n")


if __name__ == "__main__":
    main()
