"""The judges of a job that was looked at, of states.py and waits.py: the first to answer tells."""

JUDGES = []
STANDS = "doctor.md#it-stands-still"


def judge(ask):
    JUDGES.append(ask)
    return ask


def findings(sight):
    """[Answer]: what explains most, or that nothing hangs."""
    from . import states, waits  # noqa: F401 - fill JUDGES, in this order

    return [next(filter(None, (ask(sight) for ask in JUDGES)))]
