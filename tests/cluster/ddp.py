"""What the other launchers and engines must equal: two processes of distributed.py, by torchrun."""

import zlib

from conftest import run, torchrun

from tests.launched import FLAGS

# In every process: by themselves they would take as many as they find cores of their own.
TWO_THREADS = {"OMP_NUM_THREADS": "2"}


def ddp(work, *more):
    """The folder of such a run, which nothing has disturbed; `more`: flags."""
    folder = work / f"ddp-{zlib.crc32(' '.join(map(str, more)).encode())}"
    if not folder.exists():
        command = [*torchrun(2), *FLAGS, *more, "--checkpoint-dir", folder]
        run(command, work, env=TWO_THREADS)
    return folder
