"""A disk that fills up under a sweep, and a store of which a part is gone: what was committed survives."""

import multiprocessing
import os
import resource
import signal

import pytest

from gtrace.errors import TraceError
from gtrace.sweep import ResultStore


def row(step):
    place = {"tensor": "layer.weight", "step": step, "codec": "qsgd", "draw": 0}
    return place | {"energy": float(step), "note": "n" * 500}


def _fill(path, told):
    """Add rows until the file may not grow any further, which stands in for a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    store = ResultStore.create(path, {}, "f", force=False)
    step = 0
    try:
        while True:
            store.add([{**row(step), "note": f"{step}" * 100}])
            step += 1
    except TraceError as error:
        told.send((step, str(error)))
    store.close()


def test_a_disk_that_fills_up_keeps_what_was_committed(tmp_path):
    path = tmp_path / "out.db"
    forked = multiprocessing.get_context("fork")
    here, there = forked.Pipe()
    child = forked.Process(target=_fill, args=(path, there))
    child.start()
    committed, message = here.recv()
    child.join()
    assert child.exitcode == 0
    assert committed > 10
    assert message.startswith(f"{path}: cannot be written (")
    assert "what was finished before is kept" in message
    assert ResultStore.load(path)["step"].tolist() == list(range(committed))
    # With room again the sweep goes on where it was.
    store = ResultStore.create(path, {}, "f", force=False)
    assert len(store.done()) == committed
    store.add([row(committed)])
    store.close()
    assert ResultStore.load(path)["step"].tolist() == list(range(committed + 1))


def _write_for_ever(path, told):
    store = ResultStore.create(path, {}, "f", force=False)
    step = 0
    while True:
        store.add([row(step)])
        told.send(step)
        step += 1


def test_a_sweep_that_is_stopped_goes_on_and_one_that_is_killed_leaves_its_rows(tmp_path):
    path = tmp_path / "out.db"
    forked = multiprocessing.get_context("fork")
    here, there = forked.Pipe()
    child = forked.Process(target=_write_for_ever, args=(path, there))
    child.start()
    for stop in range(3):
        while (done := here.recv()) < 20 * (stop + 1):
            pass
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        found = ResultStore.load(path)["step"].tolist()
        assert found == list(range(len(found)))
        assert len(found) > done
        os.kill(child.pid, signal.SIGCONT)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    while here.poll():
        done = here.recv()
    found = ResultStore.load(path)["step"].tolist()
    assert found == list(range(len(found)))
    assert len(found) > done
    # Its lock went with it.
    ResultStore.create(path, {}, "f", force=False).close()


def test_a_store_of_which_the_end_is_gone_is_refused(tmp_path):
    path = tmp_path / "out.db"
    store = ResultStore.create(path, {}, "f", force=False)
    store.add([row(step) for step in range(200)])
    store.close()
    whole = path.read_bytes()
    for keep in (len(whole) - 4096, len(whole) // 2, 5000, 100):
        path.write_bytes(whole[:keep])
        with pytest.raises(TraceError, match="or a damaged one"):
            ResultStore.load(path)
        assert path.read_bytes() == whole[:keep]


@pytest.mark.parametrize("begun", [False, True])
def test_a_sweep_that_was_killed_before_it_had_tables_goes_on(begun, tmp_path):
    path = tmp_path / "out.db"
    path.touch()
    if begun:
        ResultStore._connect(path).close()
        assert path.stat().st_size
    store = ResultStore.create(path, {}, "f", force=False)
    store.add([row(0)])
    store.close()
    assert len(ResultStore.load(path)) == 1
