"""Starts the launcher that --by gives, as "srun -n2 python", and ends it if the doctor is killed.

files/record.py sees that here, as a shell would not, and ends all that was started. And
files/programs.py keeps the files that the launcher's words name, before it starts. This file is run
alone.
"""

import ctypes
import os
import signal
import subprocess
import sys

C, PDEATHSIG = ctypes.CDLL(None), 1


def end_with_this():
    """The words are not to go on without it."""
    if sys.platform == "linux":
        C.prctl(PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    code = subprocess.Popen(sys.argv[1:], preexec_fn=end_with_this).wait()
    if code < 0:  # it was ended by a signal: so is this
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)
