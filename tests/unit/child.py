"""Code in a fork of the tests' process, which has torch already: its import takes 2 s of CPU."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading


class Child:
    """Runs `code`, a text. output: a file with all that it and its descendants write."""

    def __init__(self, code):
        read, write = os.pipe()
        self.process = multiprocessing.get_context("fork").Process(target=_run, args=[code, write])
        self.process.start()
        os.close(write)
        self.output = open(read)  # noqa: SIM115

    def wait(self):
        """(the exit code, the output that was not read yet), once nobody can write any more."""
        late = threading.Timer(60, self.kill)
        late.start()
        with self.output:
            output = self.output.read()
        self.process.join()
        late.cancel()
        return self.process.exitcode, output

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def forked(function, *args, count=1):
    """The exit codes of so many processes that call the function at the same time."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=function, args=args) for _ in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    return [process.exitcode for process in processes]


def _run(code, write):
    os.setsid()
    os.dup2(write, 1)
    os.dup2(write, 2)
    os.close(write)
    sys.stdout = sys.__stdout__ = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    try:
        exec(code, {})
    except Exception:  # as the interpreter does
        sys.excepthook(*sys.exc_info())
        os._exit(1)
