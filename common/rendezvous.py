"""How processes that torchrun, or plain python, has started find each other."""

import hashlib
import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist


def complete_environment(alone):
    """Take the values of `alone` if none of its variables is set.

    alone: {name: value} of a group of one process, as torchrun sets them; a number there is also
    the least that is allowed. Raises ValueError when only some are set, or one is no number.
    """
    missing = [name for name in alone if name not in os.environ]
    if len(missing) == len(alone):
        os.environ.update(alone)
    elif missing:
        raise ValueError(f"{' '.join(missing)} not set though others are: start with torchrun")
    for name, least in alone.items():
        value = os.environ[name]
        if least.isdigit() and not (value.isdigit() and int(value) >= int(least)):
            raise ValueError(f"{name}={value} is no number of at least {least}")


def restart_safe_store(rank, world_size, seconds):
    """The store that the environment names, with a new prefix for its keys after each restart.

    torchrun keeps its store when it restarts its workers (2.15): it still holds addresses of killed
    processes. So each rank publishes a random id, and the hash of all ids is the prefix of the keys
    from then on. A prefix that every rank has confirmed is made of the ids of living ranks only.

    Raises TimeoutError, naming the ranks that have not come after so many seconds, and ValueError
    where there is no store at the address.
    """
    # torchrun's store is there before its workers are: where it is not, torchrun was killed.
    from_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    patience = timedelta(seconds=min(seconds, 20) if from_torchrun else seconds)
    try:
        store, *_ = next(dist.rendezvous("env://", rank, world_size, timeout=patience))
        store.set_timeout(timedelta(seconds=seconds))
    except (RuntimeError, ValueError, OverflowError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise ValueError(f"rank {rank} cannot use {address} to meet the others: {error}") from None
    store.set(f"id {rank}", uuid.uuid4().hex)
    prefix = None
    while True:
        here = [store.check([f"id {r}"]) for r in range(world_size)]  # get() would wait
        ids = [store.get(f"id {r}") if here[r] else b"" for r in range(world_size)]
        before, prefix = prefix, hashlib.blake2b(b"".join(ids), digest_size=8).hexdigest()
        if prefix != before:
            deadline = time.monotonic() + seconds  # a rank has come: wait for the others anew
        store.set(f"{prefix} {rank}", "")
        if store.check([f"{prefix} {r}" for r in range(world_size)]):
            return dist.PrefixStore(prefix, store)
        if time.monotonic() > deadline:
            late = [str(r) for r in range(world_size) if not store.check([f"{prefix} {r}"])]
            raise TimeoutError(f"no sign of rank {', '.join(late)} for {seconds:g} s")
        time.sleep(0.05)
