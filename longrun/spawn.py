"""The two ends of mp.spawn: what runs in each child, and the parent that waits for all of them."""

import logging
import os
import signal
import sys
from multiprocessing.connection import wait

import torch.multiprocessing as mp

from common.loader import SIGNALS, die_with_parent

from .messages import flush_stdout


def run_child(index, main, *args):
    """What mp.spawn starts: run main(index, *args) and exit with what it returns.

    It ends with the parent: one that was killed would leave its children training.
    """
    die_with_parent()
    try:
        code = main(index, *args)
    except Exception:  # mp.spawn would keep it to itself until all processes have ended
        try:
            sys.excepthook(*sys.exc_info())
        finally:  # an orderly exit would wait for loader workers, which ignore SIGTERM
            os._exit(1)
    flush_stdout()  # a child of mp.spawn calls nothing else at its exit
    sys.exit(code)


def supervise(context, rank=0):
    """Wait for all children, pass signals on to them; returns the exit code of one that failed.

    When one fails the others have three seconds to end by themselves. Those that a signal has
    killed are named, and the exit code is then 1. `rank`: the first child's. Afterwards the parent
    ignores signals: what follows is its exit.
    """

    def pass_on(number, frame):  # each stops by itself, where all can
        for process in context.processes:
            if process.is_alive():
                os.kill(process.pid, number)

    for number in SIGNALS:  # a SIGHUP that nohup ignores, the children ignore too
        signal.signal(number, pass_on)
    logging.getLogger(mp.spawn.__module__).setLevel("ERROR")  # it would announce its every kill
    running, codes = dict(context.sentinels), [None]
    try:
        while running and not any(codes):
            for sentinel in wait(running):  # a killed one takes a moment to end
                context.processes[running.pop(sentinel)].join()
            codes = [process.exitcode for process in context.processes]  # None: it is running
        context.join(grace_period=3)  # ends the others, and says that one has failed
    except mp.ProcessExitedException as error:
        # Where one is killed the others fail too, and join() may name any of those that have ended.
        killed = [index for index, code in enumerate(codes) if code is not None and code < 0]
        for index in killed:
            name = signal.Signals(-codes[index]).name
            print(f"rank {rank + index} failed: killed by {name}", file=sys.stderr, flush=True)
        return 1 if killed else max(error.exit_code, 1)
    finally:
        # A signal from here on could only hide the exit code: Python gives up its handlers long
        # before the process ends, and `srun -K` sends SIGTERM as soon as another task has ended.
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    return 0
