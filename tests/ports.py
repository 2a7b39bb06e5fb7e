"""Ports for what a test starts, that nobody else is given between the choice and the use."""

import itertools
import os
import re
import socket

# Below those that the kernel gives out, from 32768 on; above Slurm's scripts' own, 10000 to 29999.
FIRST, EACH, WORKERS = 30100, 800, 3
turns = itertools.count(os.getpid())  # another run of the tests begins elsewhere


def free_port():
    """The next one that is free, of those of this worker of pytest's."""
    worker = int(re.sub(r"\D", "", os.environ.get("PYTEST_XDIST_WORKER", "")) or 0) % WORKERS
    for turn in itertools.islice(turns, EACH):
        port = FIRST + EACH * worker + turn % EACH
        try:
            with socket.create_server(("", port)):
                return port
        except OSError:
            continue  # somebody has it
    raise OSError("no free port")
