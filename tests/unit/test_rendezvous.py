"""How processes find each other: what the environment must say, and who is waited for."""

import threading
import time

import pytest
import torch.distributed as dist

from common.rendezvous import complete_environment, meet_all_ranks

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
WRONG = {
    "RANK=1": "RANK=1 and WORLD_SIZE=1: ranks count from 0, so RANK must be below WORLD_SIZE",
    "LOCAL_RANK=1": "LOCAL_RANK=1 and LOCAL_WORLD_SIZE=1: .* must be below LOCAL_WORLD_SIZE",
    "WORLD_SIZE=0": "WORLD_SIZE must be an integer of at least 1, not '0'",
    "RANK=-1": "RANK must be an integer of at least 0, not '-1'",
    "RANK=": "RANK must be an integer of at least 0, not ''",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_the_environment_must_say(wrong, monkeypatch):
    for name in ALONE:
        monkeypatch.delenv(name, raising=False)
    complete_environment(ALONE)
    complete_environment(ALONE)
    for name, value in ALONE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(*wrong.split("="))
    with pytest.raises(ValueError, match=WRONG[wrong]):
        complete_environment(ALONE)
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(ValueError, match="LOCAL_RANK not set though others are"):
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
    """Under a new prefix, though what was there before still is; each may come last."""
    for round, delays in enumerate([[0, 0, 0], [0.6, 0, 0], [0, 0.3, 0.6]]):
        stores = meet(3, delays)
        assert not stores[0].check(["address"])
        stores[0].set("address", str(round))
        assert [stores[rank].get("address") for rank in range(3)] == [str(round).encode()] * 3
    # With one more, and one less.
    for world_size in (4, 2):
        stores = meet(world_size, [0] * world_size)
        assert len(stores) == world_size and not stores[1].check(["address"])


@pytest.mark.parametrize("restarted", [False, True])
def test_the_ranks_that_do_not_come_are_named(restarted, store):
    """After a restart the store still has the ids that their predecessors left."""
    if restarted:
        meet(4, [0] * 4)
    found = meet(4, [0, 0], seconds=1)
    assert [str(found[rank]) for rank in (0, 1)] == ["rank 2, 3 did not come within 1 s"] * 2
    assert isinstance(found[0], TimeoutError)


def test_an_address_without_a_store(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    said = str(meet(2, [0], seconds=1)[0])
    assert said.startswith("rank 0 cannot use 127.0.0.1:1 to meet the others: "), said
