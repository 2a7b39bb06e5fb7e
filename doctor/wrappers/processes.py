"""Processes that the script starts by mp.spawn or Process(target=...): they are looked at, too."""

import functools
import multiprocessing.process
import multiprocessing.spawn
import os
import sys

from ..events import RECORD, note
from . import wrap

started = []  # something, in a process that the script has started


class Early:
    """Wraps in a process that starts anew, before it reads the script (unpickling calls exec)."""

    def __reduce__(self):
        here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        code = f"import runpy; runpy.run_path({here!r})['load']()\n"
        return exec, (code + "import doctor.wrappers; doctor.wrappers.install()",)


class Inside:
    """What such a process calls instead of its target.

    helps: a process that has joined a group has started it, as async_save does. It may have a group
    with the helpers of the others, and is no rank: nothing of it is noted.
    """

    def __init__(self, target, helps):
        self.target, self.helps = target, helps

    def __call__(self, *args, **kwargs):
        from ..process import begin, noted_end

        if self.helps:
            RECORD.pid = None
            return self.target(*args, **kwargs)
        started.append(self)
        begin()
        with noted_end():
            return self.target(*args, **kwargs)


def joins():
    """A process is about to join a group."""
    if RECORD.launched and started:
        end_for_another_start()


def end_for_another_start():
    """command.py starts the script again, without a launcher.

    Each process of torchrun would start so many, and all of them would meet on one port.
    """
    note("spawns")
    RECORD.ended.set()  # its end is no end of the script
    os._exit(0)


def exits(status):
    """Some scripts end so on purpose, past what a library would do at the end: nobody tells it."""
    from ..process import noted_end

    if status == 0 and os.getpid() == RECORD.pid and not RECORD.ended.is_set():
        noted_end().__exit__(None, None, None)


def install(torch):
    base = multiprocessing.process.BaseProcess
    real, prepared = base.start, multiprocessing.spawn.get_preparation_data

    def start(self):
        target = getattr(self, "_target", None)
        worker = str(getattr(target, "__module__", "")).startswith("torch.utils.data")
        if target and not worker:
            self._target = Inside(target, helps=torch.distributed.is_initialized())
        return real(self)

    def spawns(fn, args=(), nprocs=1, *_, **__):
        if RECORD.launched and nprocs > 1 and not torch.distributed.is_initialized():
            end_for_another_start()

    base.start = functools.wraps(real)(start)
    multiprocessing.spawn.get_preparation_data = lambda name: {"doctor": Early(), **prepared(name)}
    wrap(os, "_exit", before=exits)
    # torch.multiprocessing.spawn is a function of this module, which hides the module.
    wrap(sys.modules["torch.multiprocessing.spawn"], "start_processes", before=spawns)
    wrap(torch.multiprocessing, "start_processes", before=spawns)
