"""Runs the script in this process: wrapped, watched by a thread, and its end is noted."""

import faulthandler
import gc
import os
import runpy
import signal
import sys
import threading
import time

from . import below, cuda, notebook
from .events import RECORD, is_users, note, short, users_line
from .files import threads
from .recorder import dump
from .wrappers import install, look_safely


def be_examined():
    """sys.argv: the script, or -m and a module; then its flags."""
    module = sys.argv[1] == "-m"
    sys.argv = sys.argv[1 + module :]
    if RECORD.nodes > 1:  # play machines: on each of them the numbers begin at 0
        size = int(os.environ["WORLD_SIZE"]) // RECORD.nodes
        local = {"LOCAL_WORLD_SIZE": size, "LOCAL_RANK": int(os.environ["RANK"]) % size}
        os.environ |= {name: str(number) for name, number in local.items()}
    sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.abspath(sys.argv[0]))
    below.mark()
    install()
    begin()
    with noted_end():
        if module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        elif notebook.is_one(sys.argv[0]):
            notebook.run(os.path.abspath(sys.argv[0]))
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")


def begin():
    """Open this process's file of events, and watch where it stands."""
    RECORD.open()
    # A launcher ends the others by SIGTERM, and asks for the first one's signal before the doctor
    # can. This handler, which is no Python, notes that it came also where C++ waits; chain: then it
    # ends the process as ever. A handler of the script takes its place.
    terminated = open(f"{RECORD.path}.terminated", "w")  # noqa: SIM115 (for as long as it runs)
    faulthandler.register(signal.SIGTERM, terminated, all_threads=False, chain=True)
    nowhere = os.open(os.devnull, os.O_WRONLY)  # what is forked has the handler, and not the file
    os.register_at_fork(after_in_child=lambda: os.dup2(nowhere, terminated.fileno()))
    gc.freeze()  # collections, ours too, do not look at all of torch
    note("began", gpus=cuda.count_gpus(sys.modules["torch"]), hash=hash("order"))
    threads.start(watch, RECORD.ended)


def watch(ended):
    """A thread: where nothing has happened for a while, note where the process stands."""
    torch = sys.modules["torch"]
    seen, since, cpu, times = -1, 0.0, 0.0, 0
    while not ended.wait(1):
        if RECORD.count != seen:
            seen, since, cpu, times = RECORD.count, time.monotonic(), time.process_time(), 0
        seconds = time.monotonic() - since
        if seconds > RECORD.patience * (times + 1):
            line, waits, reads = main_thread()
            # A busy machine may give it little time; with GPUs, waiting takes time as well.
            computes = time.process_time() - cpu > 0.05 * seconds
            busy = reads or (computes and not torch.cuda.is_initialized())
            times += 1
            alone = not waits and outside()
            facts = {"where": waits, "busy": busy, "computes": computes, "outside": alone}
            note("stands", line=line, times=times, **facts)
            dump.write(f"{RECORD.path}.calls")
            seen = RECORD.count


def outside():
    """Not in a group: mp.spawn's parent, one that has not begun, or has left: none waits for it."""
    return not sys.modules["torch"].distributed.is_initialized()


def main_thread():
    """(its line in the user's code, what it waits in, whether it waits for a loader's workers).

    No frame is kept, nor what it holds.
    """
    frame = sys._current_frames()[threading.main_thread().ident]
    line, waits, reads, inner = users_line(frame), None, False, True
    wrappers = os.path.join(os.path.dirname(__file__), "wrappers", "__init__.py")
    while frame is not None:
        file = frame.f_code.co_filename
        reads |= file.endswith("torch/utils/data/dataloader.py")
        if inner and file == wrappers:
            waits = frame.f_locals.get("doctor_waits_in") or waits  # of wrap(): the outermost call
        inner &= not is_users(file)  # a model's own code, called by DDP, waits for nobody
        frame = frame.f_back
    return line, waits, reads


class noted_end:
    """Around a script: note how it ends."""

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        from .wrappers.collectives import note_unwaited
        from .wrappers.models import frozen
        from .wrappers.optimizers import look_last

        good = error is None or (kind is SystemExit and not error.code)
        if kind is SystemExit and error.__context__:  # mp.spawn ends a failed process so
            error = error.__context__
            kind, trace = type(error), error.__traceback__
        line = "?"
        while trace is not None:
            file = trace.tb_frame.f_code.co_filename
            line = f"{short(file)}:{trace.tb_lineno}" if is_users(file) else line
            trace = trace.tb_next
        RECORD.ended.set()
        if good:
            note_unwaited()
            look_safely(look_last)
        else:
            dump.write(f"{RECORD.path}.calls")
        said = "" if good else f"{kind.__name__}: {error}"
        note("end", line=line, error=said, frozen=frozen(), outside=outside())
