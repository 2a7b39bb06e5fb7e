"""All nodes of a job of Slurm: a step beside it looks at each."""

import subprocess
import sys

from ..events import HERE
from ..words import say


def reports(args):
    """[(what was seen on a node, its name)]; ValueError with srun's words if there is none."""
    nodes = output(["squeue", "--noheader", "--jobs", args.slurm, "--format", "%D"])
    look = [sys.executable, HERE, "--attach", "--out", "-", "--slurm-job", args.slurm]
    look += ["--seconds", str(args.seconds)] + ["--nonblocking"] * args.nonblocking
    # --overlap: beside the job's own step; its memory and processors are shared, not asked for.
    step = ["srun", "--jobid", args.slurm, "--overlap", "--nodes", nodes.strip() or "1"]
    step += ["--ntasks-per-node=1", "--mem=0", "--cpus-per-task=1", "--input=none"]
    lines = output([*step, *look]).splitlines()
    found = [(line, f"node {n}") for n, line in enumerate(lines) if line.startswith("{")]
    if not found:
        raise ValueError(say("no node of job {job} has answered", job=args.slurm))
    return found


def output(words):
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode and not done.stdout.strip():
        raise ValueError(f"{words[0]}: {done.stderr.strip() or done.returncode}")
    return done.stdout
