"""What another run of the same script shows: with one process, or started again."""

from ..run import names
from . import Finding

BATCH = "the-batch-size-is-per-process"
REPEATED = "the-resumed-run-repeats-an-epoch"


def batch_per_process(run, alone):
    """A hint, for the learning rate may be chosen for it."""
    for row, (one, *_) in zip(run.rounds("trained"), alone.rounds("trained"), strict=False):
        step, single = (len(p["items"]) // p["read"] for p in (row[0], one))
        if step * len(run) > 1.5 * single:
            text = f"a step takes {step * len(run)} items; with one process {single}"
            return Finding(row[0]["made"], text, BATCH, certain=False)
    return None


def epoch_repeated(run, again):
    """Certain where the last order of items comes again."""
    before = [names(one) for one in run[0].passes if one["trained"]]
    after = [one for one in again[0].passes if one["trained"]]
    if after and before[1:] and before[0] != names(after[0]) == before[-1]:
        text = "the run that resumes begins with the epoch that was done"
        return Finding(after[0]["line"], text, REPEATED, certain=True)
    return None
