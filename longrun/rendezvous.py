"""How processes that torchrun, or plain python, has started find each other."""

import contextlib
import hashlib
import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist


def complete_environment(alone):
    """Take the values of `alone` if none of its variables is set.

    alone: {name: value} of a group of one process, as torchrun sets them. Raises ValueError when
    only some are set, when mpirun or srun has started several processes, each of which would train
    alone, when a rank is not a number, and when it is not below the number of processes: the others
    would wait for it in vain.
    """
    missing = [name for name in alone if name not in os.environ]
    if len(missing) == len(alone):
        for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
            if os.environ.get(name, "1") != "1":
                count = f"{name}={os.environ[name]}"
                raise ValueError(f"{count} but {' '.join(missing)} not set: start with torchrun")
        os.environ.update(alone)
    elif missing:
        raise ValueError(f"{' '.join(missing)} not set though others are: start with torchrun")
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        number, count = os.environ[rank], os.environ[size]
        if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
            values = f"{rank}={number} and {size}={count}"
            raise ValueError(f"{values}: ranks count from 0, so {rank} must be below {size}")


def meet_all_ranks(rank, world_size, seconds):
    """Wait until every rank is here; returns the store that the environment names.

    Its keys have a new prefix after each restart: torchrun keeps its store when it restarts its
    workers, with the addresses of killed processes. So each rank publishes a random id, and the
    hash of all ids is the prefix. An id may be that of a killed process: so a prefix is used only
    once every rank has confirmed it, and a rank confirms none that was made without its own id.

    Raises TimeoutError, naming the ranks that have not come within so many seconds, and ValueError
    where there is no store at the address.
    """
    # torchrun's store is there before its workers are: where it is not, torchrun was killed.
    from_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    patience = timedelta(seconds=min(seconds, 20) if from_torchrun else seconds)
    deadline, pause = time.monotonic() + seconds, 0.01
    try:
        store, *_ = next(dist.rendezvous("env://", rank, world_size, timeout=patience))
        store.set_timeout(timedelta(seconds=seconds))
        awaited = ids = [f"id {r}" for r in range(world_size)]
        store.set(ids[rank], uuid.uuid4().hex)
        with contextlib.suppress(dist.DistStoreError):  # multi_get waits for all keys: too long
            while time.monotonic() < deadline:
                prefix = hashlib.blake2b(b"".join(store.multi_get(ids)), digest_size=8).hexdigest()
                awaited = [f"{prefix} {r}" for r in range(world_size)]
                store.set(awaited[rank], "")
                if store.check(awaited):
                    return dist.PrefixStore(prefix, store)
                time.sleep(pause)
                pause = min(2 * pause, 1)  # all ask one server
        late = [str(r) for r, key in enumerate(awaited) if not store.check([key])]
    except (RuntimeError, ValueError, OverflowError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise ValueError(f"rank {rank} cannot use {address} to meet the others: {error}") from None
    raise TimeoutError(f"rank {', '.join(late)} did not come within {seconds:g} s")
