"""Records the terminal of the README: a mistake is put into minimal/distributed.py, run, and named
by the doctor. Writes results/recording.json, from which tools/generate.py draws
docs/recording.svg.

$ python tools/record.py
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MISTAKE = "bugs/validation_not_shared.diff"
COMMANDS = [
    f"grep '^[-+] ' {MISTAKE}",
    f"patch minimal/distributed.py \\\n    {MISTAKE}",
    "torchrun --standalone --nproc-per-node=2 \\\n    minimal/distributed.py | tail -1",
    "python doctor \\\n    minimal/distributed.py | grep docs/bugs",
]


def record():
    """[{"command", "output": [line]}] of a copy of the project. Exits if a command fails."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}  # which torchrun sets too, with a warning
    parts = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("minimal", "bugs", "doctor"):
            shutil.copytree(ROOT / name, Path(folder) / name)
        for command in COMMANDS:
            words = ["bash", "-o", "pipefail", "-c", f"{{ {command}\n}} 2>&1"]
            done = subprocess.run(words, cwd=folder, env=env, stdout=subprocess.PIPE, text=True)
            if done.returncode and "doctor" not in command:  # it ends with 1: it has found one
                sys.exit(f"error: {command} ended with {done.returncode}:\n{done.stdout}")
            parts.append({"command": command, "output": done.stdout.splitlines()})
    return parts


if __name__ == "__main__":
    lines = [json.dumps(part) for part in record()]
    (ROOT / "results/recording.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")
