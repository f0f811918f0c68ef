"""Which of several processes this one is, from what launchers put into the environment; what comes before its end."""

import os
import signal

import pytest
from helpers_capture import run_python, write_script

from gtrace.torch_hooks import processes
from gtrace.torch_hooks.processes import (
    before_abrupt_exit,
    first_of_launch,
    launch_token,
    spans_machines,
    started_again,
)

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


def test_on_one_machine_the_parent_tells_launches_apart(environment, token):
    """Each trace of a process has its own token, and a number that is used again is another process."""
    environment(**ONE_MACHINE)
    assert launch_token() != launch_token()
    assert token(1) == token(1) != token(2)
    assert (spans_machines(), first_of_launch()) == (False, False)


def test_over_machines_the_parents_differ_and_the_token_does_not(environment, token):
    environment(**TWO_MACHINES)
    assert token(1) == (before := token(2))
    environment(MASTER_PORT="2", TORCHELASTIC_RESTART_COUNT="0")
    assert token(1) != before
    assert (spans_machines(), first_of_launch(), started_again()) == (True, True, {})


@pytest.mark.parametrize("launch", [ONE_MACHINE, TWO_MACHINES])
def test_the_token_stays_when_workers_start_again_and_meet_at_another_port(environment, token, launch):
    environment(**launch, TORCHELASTIC_RUN_ID="job")
    before = token(1)
    environment(MASTER_PORT="2", TORCHELASTIC_RESTART_COUNT="2")
    assert token(1) == before
    assert (started_again(), first_of_launch()) == ({"restart": 2}, False)
    environment(TORCHELASTIC_RUN_ID="other")
    assert token(1) != before


SCRIPT = """
    import ctypes, os, signal, sys, time
    sys.modules["torch"] = sys  # what watches signals begins with torch
    from gtrace.torch_hooks.processes import before_abrupt_exit

    def finish(code):
        print("finish", code, flush=True)
        return 5

    def stuck():
        # As in a collective: no handler of Python's runs any more.
        lock = ctypes.create_string_buffer(64)
        for _ in range(2):
            ctypes.CDLL(None).pthread_mutex_lock(lock)

    late = [False]
    with before_abrupt_exit(finish, lambda: late[0]):
        {body}
    print("after", flush=True)
    """


@pytest.mark.parametrize(
    ("body", "code", "lines"),
    [
        ("os._exit(3)", 5, ["finish 3"]),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", -signal.SIGTERM, ["finish 143"]),
        ("os.kill(os.getpid(), signal.SIGHUP); time.sleep(60)", -signal.SIGHUP, ["finish 129"]),
        ("os.system(f'(sleep 0.2; kill {os.getpid()}) &'); stuck()", -signal.SIGTERM, ["finish 143"]),
        ("late[0] = True; os.kill(os.getpid(), signal.SIGTERM); print('end', flush=True)", -signal.SIGTERM, ["end"]),
        ("pass", 0, ["after"]),
        ("os._exit(3) if os.fork() == 0 else print(os.wait()[1] >> 8)", 0, ["3", "after"]),
        ("os.kill(os.getpid(), signal.SIGTERM) if os.fork() == 0 else print(os.wait()[1])", 0, ["15", "after"]),
        ("os.fork() or os.kill(os.getpid(), signal.SIGTERM); os.wait(); time.sleep(0.7)", 0, ["after"]),
        ("signal.signal(15, lambda *_: print('own')); os.kill(os.getpid(), 15)", 0, ["own", "after"]),
    ],
)
def test_what_comes_before_the_end(tmp_path, body, code, lines):
    script = write_script(tmp_path / "script.py", SCRIPT.format(body=body))
    result = run_python(script, cwd=tmp_path)
    assert (result.returncode, result.stdout.split("\n")[:-1], result.stderr) == (code, lines, "")


def test_an_error_in_finish_cannot_keep_the_process_alive(tmp_path):
    script = write_script(tmp_path / "script.py", SCRIPT.format(body="os._exit(3)").replace("return 5", "1 / 0"))
    assert run_python(script, cwd=tmp_path).returncode == 3


def test_everything_is_put_back():
    def there():
        return os._exit, *map(signal.getsignal, (signal.SIGTERM, signal.SIGHUP)), signal.set_wakeup_fd(-1)

    before = there()
    with before_abrupt_exit(lambda code: code):
        assert os._exit is not before[0]
    assert there() == before
