"""What is judged of a job that was looked at. The first judge that answers tells it."""

JUDGES = []
STANDS = "doctor.md#it-stands-still"


def judge(ask):
    JUDGES.append(ask)
    return ask


def findings(sight):
    """[Finding]: what explains most, or that nothing hangs."""
    from . import states, waits  # noqa: F401 - fill JUDGES, in this order

    return [next(filter(None, (ask(sight) for ask in JUDGES)))]
