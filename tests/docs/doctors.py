"""What the doctor finds in a script whose processes are forked here: nothing imports torch again.

What it wraps, records and judges is the same. How it starts and ends a run is tested elsewhere.
"""

import json
from pathlib import Path

from conftest import ROOT

from doctor.judges import findings
from doctor.run import read
from tests.docs.ranks import run_ranks


def looked_at(script, *flags, ranks=2, nodes=1, steps=None, folder=None):
    """(the Runs, [(Finding, what stands in its line)], the output)."""
    _, output, runs = recorded(script, *flags, ranks=ranks, nodes=nodes, steps=steps, folder=folder)
    return runs, named(runs, script), output


def recorded(script, *flags, ranks=2, nodes=1, steps=None, folder=None):
    """(exit codes, output, the Runs): of a script whose calls are recorded."""
    script = Path(script)
    events = Path(folder or script.parent) / "events"
    events.mkdir()
    settings = {"folder": str(events), "script": str(script), "nodes": nodes, "steps": steps}
    env = {"DOCTOR": json.dumps(settings | {"patience": 600, "launched": True})}
    command = ROOT / "doctor/__main__.py"
    codes, output = run_ranks(command, [script, *flags], ranks, script.parent, env)
    runs = read(events, {})
    assert not any(run.faults for run in runs), [run.faults for run in runs]
    return codes, output, runs


def named(runs, script):
    """[(Finding, what stands in its line)]"""
    return [(one, line_of(Path(script), one.line)) for one in findings(runs)]


def line_of(script, place):
    """The text at "train.py:48", a place as the doctor gives it."""
    file, _, number = place.rpartition(":")
    return (script.parent / file).read_text().splitlines()[int(number) - 1]
