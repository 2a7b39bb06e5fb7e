"""Checks what a launcher has set for this process, or sets it for plain python."""

import os
import socket

from common.loader import die_with_parent

from .messages import print_if_possible

GROUP_OF_ONE = {  # for plain python: what torchrun would set for a single process
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}


def check_launcher():
    """Check the variables by which a launcher's processes meet, and end when torchrun ends.

    For plain python, where none is set, they become those of a group of one process. A restart that
    may fail is warned of. Raises ValueError when only some are set, when torchrun has ended, when
    mpirun or srun has started several processes, each of which would train alone, and when a rank
    is not a number below the number of processes: the others would wait for it in vain.
    """
    set_or_check_group()
    check_ranks()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_torchrun()
    warn_of_restarts()


def set_or_check_group():
    missing = [name for name in GROUP_OF_ONE if name not in os.environ]
    if len(missing) == len(GROUP_OF_ONE):
        for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
            if os.environ.get(name, "1") != "1":
                count = f"{name}={os.environ[name]}"
                raise ValueError(f"{count} but {' '.join(missing)} not set: start with torchrun")
        os.environ.update(GROUP_OF_ONE)
    elif missing:
        raise ValueError(f"{' '.join(missing)} not set though others are: start with torchrun")


def check_ranks():
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        number, count = os.environ[rank], os.environ[size]
        if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
            values = f"{rank}={number} and {size}={count}"
            raise ValueError(f"{values}: ranks count from 0, so {rank} must be below {size}")


def die_with_torchrun():
    """One that is killed by SIGKILL would leave this process training."""
    die_with_parent()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and not store_answers():
        raise ValueError("torchrun has ended: start it again")  # killed during our imports


def warn_of_restarts():
    """torchrun's store keeps the addresses of processes that a restart has ended."""
    shared = os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1"
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if restarts and shared and os.environ["RANK"] == "0":
        print_if_possible(
            "warning: a restart may fail: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun"
        )


def store_answers():
    """Whether torchrun's store is there. It was, before torchrun started this process."""
    try:
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        socket.create_connection(address, timeout=10).close()
    except ConnectionRefusedError:
        return False
    except OSError:  # a slow network, or one that is wrong: init_process_group says which
        pass
    return True
