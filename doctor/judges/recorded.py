"""What torch's flight recorder has noted of a run that stood still or failed, DDP's calls too."""

from ..recorder import compare
from ..recorder.calls import groups_of
from . import Finding, judge
from .ending import more_batches


@judge("run", compare.SKIPPED.partition("#")[2], certain=True, explains=["hang"])
def gradients_left_out(run):
    """Certain: the sums of DDP are counted, and one rank stands at another call."""
    dumps = {rank: process.calls for rank, process in enumerate(run) if process.calls}
    for group in groups_of(dumps) if len(dumps) == len(run) else []:
        _, row = compare.first_that_differs(group)
        if row and any(call.backward for call in row.values()):
            found = compare.left_out(group)
            if found:
                place = "one-process-has-one-step-more" if more_batches(run) else None
                return Finding(as_noted(run, found.line), found.text, place)
    return None


def as_noted(run, line):
    """A line as events name it, with its folder; the recorder's has none."""
    seen = dict.fromkeys(event["line"] for process in run for event in process.events)
    return next((one for one in seen if one.rpartition("/")[2] == line), line)
