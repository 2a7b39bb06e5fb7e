"""Tries the project with several versions of torch, each in an environment of its own, and writes
results/versions.json: the table in docs/measured.md. An environment takes 6 GB.

$ python tools/versions.py --environments ../torches 2.6.0 2.11.0 2.14.1 2.15.0
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
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("versions", nargs="+", help="of torch; torchvision's follow from them")
    parser.add_argument(
        "--environments", default=tempfile.gettempdir(), help="the folder for them, or of them"
    )
    args = parser.parse_args()
    found = json.loads(RESULTS.read_text())["runs"] if RESULTS.exists() else []
    for version in args.versions:
        row = tried(version, Path(args.environments) / version)
        print(row, flush=True)
        found = [old for old in found if old["torch"] != version] + [row]
        found.sort(key=lambda row: tuple(map(int, row["torch"].split("."))))
        known = {"date": datetime.date.today().isoformat(), "runs": found}
        RESULTS.write_text(json.dumps(known, indent=1) + "\n")


def tried(version, folder):
    """A row of the table: how many tests passed with this torch, and which did not."""
    # A constraint of this machine may exclude the version that is asked for.
    env = os.environ | {"PIP_CONSTRAINT": os.devnull, "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    python = str(folder / "bin/python")
    if not folder.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        needs = [f"-r{ROOT / name}" for name in ("requirements.txt", "requirements-dev.txt")]
        install = [python, "-m", "pip", "install", "--quiet", f"torch=={version}", *needs]
        subprocess.run(install, env=env, cwd=ROOT, check=True)
    row = {"torch": version, "python": ".".join(map(str, sys.version_info[:3]))}
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
