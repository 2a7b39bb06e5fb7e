"""Runs a command, and ends every process below it: when it ends, and when its parent is gone.

The parent holds the other end of this process's stdin: the kernel closes that, however the parent
dies.
"""

import contextlib
import select
import signal
import subprocess
import sys

from doctor.files.ends import CHILD_SUBREAPER, PDEATHSIG, end_processes, prctl

GRACE = 10  # seconds in which a benchmark that is told to end removes its temporary folders


def main():
    prctl(CHILD_SUBREAPER, 1)  # a process below that loses its parent has this one for its parent
    process = subprocess.Popen(
        sys.argv[1:],
        stdin=subprocess.DEVNULL,
        preexec_fn=lambda: prctl(PDEATHSIG, signal.SIGKILL),  # should this process be killed
    )
    parent_is_gone = False
    while process.poll() is None and not parent_is_gone:
        parent_is_gone, _, _ = select.select([sys.stdin], [], [], 0.1)
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    if left := end_processes([]):
        print("could not be ended: processes", *left)
    code = process.wait()
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
