"""How processes find each other: what the environment must say, and who is waited for."""

import os
import threading
import time

import pytest
import torch.distributed as dist
from conftest import without_launchers

from longrun.rendezvous import complete_environment, meet_all_ranks

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
WRONG = {
    "RANK=1": "RANK=1 and WORLD_SIZE=1: ranks count from 0, so RANK must be below WORLD_SIZE",
    "RANK=": "RANK= and WORLD_SIZE=1: ranks count from 0",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_the_environment_must_say(wrong, monkeypatch):
    environment = without_launchers(os.environ)
    monkeypatch.setattr(os, "environ", environment)
    complete_environment(ALONE)
    assert environment.items() >= ALONE.items()
    complete_environment(ALONE)
    environment |= [wrong.split("=")]
    with pytest.raises(ValueError, match=WRONG[wrong]):
        complete_environment(ALONE)
    del environment["LOCAL_RANK"]
    with pytest.raises(ValueError, match="LOCAL_RANK not set though others are"):
        complete_environment(ALONE)


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_processes_of_other_launchers_do_not_train_alone(name, monkeypatch):
    clean = without_launchers(os.environ)
    monkeypatch.setattr(os, "environ", clean | {name: "1"})
    complete_environment(ALONE)
    monkeypatch.setattr(os, "environ", clean | {name: "4"})
    with pytest.raises(ValueError, match=f"^{name}=4 but RANK .* not set: start with torchrun$"):
        complete_environment(ALONE)


@pytest.fixture
def store(monkeypatch):
    """As torchrun's, which outlives its workers."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return store


def meet(world_size, delays, seconds=20):
    """{rank: the store that it got, or the error}; rank i comes after delays[i] seconds."""
    found = {}

    def come(rank, delay):
        time.sleep(delay)
        try:
            found[rank] = meet_all_ranks(rank, world_size, seconds)
        except (ValueError, OSError) as error:
            found[rank] = error

    threads = [threading.Thread(target=come, args=item) for item in enumerate(delays)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_all_ranks_meet_after_each_restart(store):
    """Under a new prefix, though what was there before still is. Any may come last; and there may
    be one more, or one less.
    """
    for round, delays in enumerate([[0, 0, 0], [0.6, 0, 0], [0, 0.3, 0.6], [0] * 4, [0] * 2]):
        stores = meet(len(delays), delays)
        assert not stores[0].check(["address"])
        stores[0].set("address", str(round))
        assert {store.get("address") for store in stores.values()} == {str(round).encode()}


@pytest.mark.parametrize("restarted", [False, True])
def test_the_ranks_that_do_not_come_are_named(restarted, store):
    """After a restart the store still has the ids that their predecessors left."""
    if restarted:
        meet(4, [0] * 4)
    found = meet(4, [0, 0], seconds=1)
    assert [str(found[rank]) for rank in (0, 1)] == ["rank 2, 3 did not come within 1 s"] * 2
    assert isinstance(found[0], TimeoutError)


@pytest.mark.parametrize("port", ["taken", "70000"])
def test_an_address_where_no_store_can_be(port, store, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    if port != "taken":
        monkeypatch.setenv("MASTER_PORT", port)
    said = str(meet(1, [0], seconds=1)[0])
    assert said.startswith("rank 0 cannot use 127.0.0.1:") and " to meet the others: " in said
    assert ("EADDRINUSE" in said) == (port == "taken")
