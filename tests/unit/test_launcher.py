"""What the environment must say of the processes of a launch."""

import os
import socket

import pytest
from conftest import without_launchers

from longrun.launcher import check_launcher

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
WRONG = {
    "RANK=1": "RANK=1 and WORLD_SIZE=1: ranks count from 0, so RANK must be below WORLD_SIZE",
    "RANK=": "RANK= and WORLD_SIZE=1: ranks count from 0",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_the_environment_must_say(wrong, monkeypatch):
    environment = without_launchers(os.environ)
    monkeypatch.setattr(os, "environ", environment)
    check_launcher()
    assert environment.items() >= ALONE.items()
    check_launcher()
    environment |= [wrong.split("=")]
    with pytest.raises(ValueError, match=WRONG[wrong]):
        check_launcher()
    del environment["LOCAL_RANK"]
    with pytest.raises(ValueError, match="LOCAL_RANK not set though others are"):
        check_launcher()


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_processes_of_other_launchers_do_not_train_alone(name, monkeypatch):
    clean = without_launchers(os.environ)
    monkeypatch.setattr(os, "environ", clean | {name: "1"})
    check_launcher()
    monkeypatch.setattr(os, "environ", clean | {name: "4"})
    with pytest.raises(ValueError, match=f"^{name}=4 but RANK .* not set: start with torchrun$"):
        check_launcher()


@pytest.mark.parametrize(
    "more, warned",
    [
        ({}, True),
        ({"TORCHELASTIC_MAX_RESTARTS": "0"}, False),
        ({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, False),
        ({"RANK": "1", "WORLD_SIZE": "2"}, False),  # once is enough
    ],
)
def test_restarts_that_may_fail(more, warned, monkeypatch, capsys):
    """Processes that a restart has ended are still in the store that torchrun would share."""
    group = ALONE | {"MASTER_ADDR": "a", "MASTER_PORT": "1", "TORCHELASTIC_MAX_RESTARTS": "1"}
    monkeypatch.setattr(os, "environ", without_launchers(os.environ) | group | more)
    check_launcher()
    line = "warning: a restart may fail: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun\n"
    assert capsys.readouterr().out == line * warned


def test_torchrun_that_was_killed_during_the_imports(monkeypatch):
    """Its store is gone with it: its workers would wait for each other there."""
    monkeypatch.setattr("longrun.launcher.die_with_parent", lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as store:
        port = str(store.getsockname()[1])
        group = ALONE | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        group |= {"TORCHELASTIC_RUN_ID": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        monkeypatch.setattr(os, "environ", without_launchers(os.environ) | group)
        check_launcher()
    with pytest.raises(ValueError, match="torchrun has ended"):
        check_launcher()
