"""Which of several processes this one is, from what launchers put into the environment."""

import pytest

from gtrace.torch_hooks import processes
from gtrace.torch_hooks.processes import first_of_launch, launch_token, launched_place, spans_machines, started_again

ONE_MACHINE = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
TWO_MACHINES = ONE_MACHINE | {"WORLD_SIZE": "4"}


@pytest.fixture
def environment(monkeypatch):
    for name in (*TWO_MACHINES, *processes._LAUNCH, processes._NAME, "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)

    def put(**words):
        for name, word in words.items():
            monkeypatch.setenv(name, word)

    return put


@pytest.fixture
def token(monkeypatch):
    """The first token of a process whose parent is of this number."""

    def first(parent):
        monkeypatch.setattr(processes, "_counter", iter([0]))
        monkeypatch.setattr(processes.os, "getppid", lambda: parent)
        return launch_token()

    return first


def test_the_place_among_launched_processes(environment, token):
    environment()
    assert launched_place() == (None, 1)
    assert token(1) is None
    assert (spans_machines(), first_of_launch(), started_again()) == (False, False, {})
    # A rank makes the world as large as it must be.
    environment(RANK="3")
    assert launched_place() == (3, 4)
    environment(WORLD_SIZE="8")
    assert launched_place() == (3, 8)


def test_on_one_machine_the_parent_tells_launches_apart(environment, token):
    """Each trace of a process has its own token, and a number that is used again is another process."""
    environment(**ONE_MACHINE)
    assert launch_token() != launch_token()
    assert token(1) == token(1) != token(2)
    assert (spans_machines(), first_of_launch()) == (False, False)
    assert token(1) is not None
    assert processes._process(1).startswith("1@")
    assert processes._process(1) != "1@"
    assert processes._process(0) == "0@"


def test_over_machines_the_parents_differ_and_the_token_does_not(environment, token):
    environment(**TWO_MACHINES)
    assert token(1) == token(2)
    before = token(1)
    environment(MASTER_PORT="2")
    assert token(1) != before
    assert (spans_machines(), first_of_launch()) == (True, True)


@pytest.mark.parametrize("launch", [ONE_MACHINE, TWO_MACHINES])
def test_the_token_stays_when_workers_start_again_and_meet_at_another_port(environment, token, launch):
    environment(**launch, TORCHELASTIC_RUN_ID="job")
    before = token(1)
    environment(MASTER_PORT="2", TORCHELASTIC_RESTART_COUNT="1")
    assert token(1) == before
    environment(TORCHELASTIC_RUN_ID="other")
    assert token(1) != before


def test_a_worker_that_was_started_again(environment):
    environment(**TWO_MACHINES, TORCHELASTIC_RESTART_COUNT="0")
    assert (started_again(), first_of_launch()) == ({}, True)
    environment(TORCHELASTIC_RESTART_COUNT="2")
    assert (started_again(), first_of_launch()) == ({"restart": 2}, False)
