"""Tries the project with several versions of torch, each in an environment of its own, and writes
results/versions.json: the table in docs/measured.md. Each takes 6 GB while it is tried, and about
ten minutes on two cores.

$ python tools/versions.py 2.6.0 2.11.0 2.14.1 2.15.0
"""

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results/versions.json"
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node=2"
FLAGS = "--epochs 1 --checkpoint-dir"
FULL = {  # each full script but those of Slurm, Apex and Horovod, and its launcher
    "distributed": TORCHRUN,
    "dataparallel": "",
    "multiprocessing_distributed": "",
    "fsdp_distributed": TORCHRUN,
}
MINIMAL = {  # and each minimal script
    "one_gpu": "",
    "dataparallel": "",
    "distributed": TORCHRUN,
    "multiprocessing_distributed": "",
    "fsdp_distributed": TORCHRUN,
    "by_hand": TORCHRUN,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("versions", nargs="+", help="of torch; torchvision's follow from them")
    args = parser.parse_args()
    found = json.loads(RESULTS.read_text())["runs"] if RESULTS.exists() else []
    for version in args.versions:
        row = tried(version)
        print(row, flush=True)
        found = [old for old in found if old["torch"] != version] + [row]
        found.sort(key=lambda row: tuple(map(int, row["torch"].split("."))))
        known = {"date": datetime.datetime.now().isoformat(timespec="seconds"), "runs": found}
        RESULTS.write_text(json.dumps(known, indent=1) + "\n")


def tried(version):
    """A row of the table: what passed with this torch, and what did not."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = f"{folder}/bin/python"
        install = [python, "-m", "pip", "install", "-q", f"torch=={version}", "torchvision"]
        # A constraint of this machine may exclude the version that is asked for.
        env = os.environ | {"PIP_CONSTRAINT": os.devnull, "PATH": f"{folder}/bin:/usr/bin:/bin"}
        needs = [f"-r{ROOT / name}" for name in ("requirements.txt", "requirements-dev.txt")]
        done = subprocess.run([*install, *needs], env=env, cwd=ROOT)
        row = {"torch": version, "python": ".".join(map(str, sys.version_info[:3]))}
        if done.returncode:
            return row | {"unit": "cannot be installed", "scripts": "-", "minimal": "-"}
        row["unit"] = unit_tests(python, env)
        for title, scripts, where in (
            ("scripts", FULL, ROOT),
            ("minimal", MINIMAL, ROOT / "minimal"),
        ):
            failed = [x for x in scripts if not runs(python, scripts[x], where / f"{x}.py", env)]
            row[title] = f"{len(scripts) - len(failed)} of {len(scripts)}"
            row[title] += f" (not {', '.join(failed)})" if failed else ""
    return row


def unit_tests(python, env):
    command = [python, "-m", "pytest", "-q", "tests/unit"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1200)
    print(done.stdout[-3000:], flush=True)
    counts = re.findall(r"\d+ (?:failed|passed|errors?)", done.stdout.rpartition("\n\n")[2])
    return ", ".join(counts) or "ended early"


def runs(python, launcher, script, env):
    """Whether a script trains the digits for an epoch, or its own epochs, and ends with 0."""
    with tempfile.TemporaryDirectory() as work:
        flags = [*FLAGS.split(), f"{work}/c"] if script.parent == ROOT else []
        command = [python, *launcher.split(), script, *flags]
        done = subprocess.run(
            command, cwd=work, env=env, capture_output=True, text=True, timeout=600
        )
        if done.returncode:
            print(script, done.stdout[-1000:], done.stderr[-3000:], flush=True)
        return done.returncode == 0


if __name__ == "__main__":
    main()
