"""What is wrapped in each process, before the script begins. A file for each subject."""

import builtins
import functools
import re
import sys

from ..events import note


def wrap(owner, name, before=None, after=None, waits=None):
    """Call before(*args) ahead of owner.name, and after(result, *args) behind it.

    Their arguments have torch's names: a script may give them by name.
    waits: what it is, in words, if the call may wait there for other processes.
    """
    real = getattr(owner, name)

    @functools.wraps(real)
    def call(*args, **kwargs):
        words = waits  # noqa: F841 - process.main_thread() reads it from the stack
        if before:
            guarded(before, *args, **kwargs)
        result = real(*args, **kwargs)
        if after:
            guarded(after, result, *args, **kwargs)
        return result

    setattr(owner, name, call)


def guarded(look, *args, **kwargs):
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
    from . import collectives, groups, loaders, losses, models, optimizers, processes, saving

    if not torch.cuda.is_available():
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
    ):
        subject.install(torch)
    wrap(builtins, "print", before=percent)


def percent(*words, **_):
    """Note a printed accuracy that no part of all can have."""
    said = " ".join(word for word in words if isinstance(word, str))
    if any(float(number) > 100 for number in re.findall(r"(\d+\.?\d*) ?%", said)):
        note("above 100 %")


def caller():
    """The frame that called the function that calls this one."""
    return sys._getframe(2)
