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
    script = Path(script)
    events = Path(folder or script.parent) / "events"
    events.mkdir()
    settings = {"folder": str(events), "script": str(script), "nodes": nodes, "steps": steps}
    env = {"DOCTOR": json.dumps(settings | {"patience": 600, "launched": True})}
    command = ROOT / "doctor/__main__.py"
    _, output = run_ranks(command, [script, *flags], ranks, script.parent, env)
    runs = read(events, {})
    found = [(one, line_of(script, one.line)) for one in findings(runs)]
    assert not any(run.faults for run in runs), [run.faults for run in runs]
    return runs, found, output


def line_of(script, place):
    """The text at "train.py:48", a place as the doctor gives it."""
    file, _, number = place.rpartition(":")
    return (script.parent / file).read_text().splitlines()[int(number) - 1]
