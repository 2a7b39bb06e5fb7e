"""Tries the project with several versions of torch and Python, each in an environment of its own,
and writes results/versions.json: the table in docs/measured.md. An environment takes 6 GB.

$ python tools/versions.py --environments ../torches 2.6.0 2.11.0 2.14.1 2.15.0 3.13/2.14.1
"""

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results/versions.json"
TESTS = {
    "unit": ["tests/unit"],
    # Each full script is started as start.sh does it, and on the cluster of the Slurm tests.
    "full": [
        "tests/docs/test_docs.py::test_start",
        "tests/cluster/test_slurm.py::test_a_killed_process_ends_the_step_and_the_next_goes_on",
    ],
    "minimal": [
        "tests/docs/test_minimal.py::test_trains_and_saves_what_the_plain_net_loads",
        "tests/docs/test_libraries.py::test_trains",
    ],
    "doctor": ["tests/docs/test_doctor_facts.py", "tests/docs/test_doctor_ends.py"],
}


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    about = "of torch, or of Python and torch: 3.13/2.14.1; torchvision's follows from torch's"
    parser.add_argument("versions", nargs="+", help=about)
    parser.add_argument(
        "--environments", default=tempfile.gettempdir(), help="the folder for them, or of them"
    )
    args = parser.parse_args()
    found = json.loads(RESULTS.read_text())["runs"] if RESULTS.exists() else []
    for version in args.versions:
        row = tried(version, Path(args.environments) / version.replace("/", "-"))
        print(row, flush=True)
        found = [old for old in found if which(old) != which(row)] + [row]
        found.sort(key=which)
        known = {"date": datetime.date.today().isoformat(), "runs": found}
        RESULTS.write_text(json.dumps(known, indent=1) + "\n")


def which(row):
    """(Python, torch) as numbers, without Python's third."""
    python, torch = (tuple(map(int, row[name].split("."))) for name in ("python", "torch"))
    return python[:2], torch


def tried(version, folder):
    """A row of the table: how many tests passed with these versions, and which did not."""
    wanted, _, version = version.rpartition("/")
    # A constraint of this machine may exclude the version that is asked for.
    env = os.environ | {"PIP_CONSTRAINT": os.devnull, "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    python = str(folder / "bin/python")
    if not folder.exists():
        own = shutil.which(f"python{wanted}") if wanted else sys.executable
        if own is None:
            sys.exit(f"error: there is no python{wanted}")
        subprocess.run([own, "-m", "venv", folder], check=True)
        needs = [f"-r{ROOT / name}" for name in ("requirements.txt", "requirements-dev.txt")]
        install = [python, "-m", "pip", "install", "--quiet", f"torch=={version}", *needs]
        subprocess.run(install, env=env, cwd=ROOT, check=True)
    asked = [python, "-c", "import platform; print(platform.python_version())"]
    said = subprocess.run(asked, env=env, capture_output=True, text=True, check=True).stdout
    row = {"torch": version, "python": said.strip()}
    return row | {title: outcome(python, tests, env) for title, tests in TESTS.items() if tests}


def outcome(python, tests, env):
    """The counts of pytest's last line, and the names of what failed."""
    command = [python, "-m", "pytest", "-q", "-rf", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    failed = re.findall(r"^(?:FAILED|ERROR) \S+::(.*?)(?: - .*)?$", done.stdout, re.M)
    print(done.stdout[-20000:] if failed else "", flush=True)
    counts = re.findall(r"\d+ (?:passed|failed|errors?)", lines[-1] if lines else "")
    return ", ".join(counts) + "".join(f"; not {name}" for name in failed) or "none ran"


if __name__ == "__main__":
    main()
