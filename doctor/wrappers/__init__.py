"""What is wrapped in each process, a file for each subject: wrap(), install(). print() is here."""

import builtins
import functools
import itertools
import re

from ..events import note

NUMBER = r"(?<![\w.])-?\d+(?:\.\d+)?(?:e-?\d+)?(?![\w.]*\w)"
prints = itertools.count()  # lines with numbers


def wrap(owner, name, before=None, after=None, waits=None):
    """Call before(*args) ahead of owner.name, and after(result, *args) behind it.

    Their arguments have torch's names: a script may give them by name.
    waits: what it is, in words, if the call may wait there for other processes.
    """
    real = getattr(owner, name)

    @functools.wraps(real)
    def call(*args, **kwargs):
        doctor_waits_in = waits  # noqa: F841 - process.main_thread() reads it from the stack
        if before:
            look_safely(before, *args, **kwargs)
        result = real(*args, **kwargs)
        if after:
            look_safely(after, result, *args, **kwargs)
        return result

    setattr(owner, name, call)


def look_safely(look, *args, **kwargs):
    """A fault of the doctor must not end the script: it is noted."""
    try:
        return look(*args, **kwargs)
    except StopIteration:  # --steps ends a pass so
        raise
    except Exception as error:
        note("fault", error=f"{type(error).__name__}: {error} ({look.__qualname__})")


def install():
    """Wrap all that is looked at, in this process."""
    import torch

    from .. import cuda
    from . import (
        collectives,
        groups,
        loaders,
        losses,
        models,
        optimizers,
        processes,
        saving,
        shards,
        together,
    )

    if not cuda.count_gpus(torch):
        cuda.use_cpus_for_gpus(torch)
    for subject in (
        processes,
        groups,
        collectives,
        models,
        optimizers,
        losses,
        loaders,
        saving,
        shards,
        together,
    ):
        subject.install(torch)
    wrap(builtins, "print", before=printed)


def printed(*words, file=None, **_):
    """Note the numbers, and an accuracy that no part of all can have."""
    said = " ".join(str(word) for word in words if isinstance(word, (str, int, float)))[:2000]
    numbers = re.findall(NUMBER, said)
    if numbers and file is None and next(prints) < 200:
        note("prints", words=re.split(NUMBER, said), numbers=numbers)
    if any(float(number) > 100 for number in re.findall(r"(\d+\.?\d*) ?%", said)):
        note("above 100 %")
