"""Workers, processes where that is safe: the same rows; whatever ends them, nothing finished is lost or left behind."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from helpers_sweep import rows_of, write_trace

import gtrace
from gtrace.errors import TraceError
from gtrace.sweep.engine import Replay, Workers, spread
from gtrace.trace import Trace, open_trace

FORKED = multiprocessing.get_context("fork")


def apart(function):
    """Call a function in a process without the threads of a test runner; with processes, sweeps have no other."""
    here, there = FORKED.Pipe()

    def run():
        assert len(sys._current_frames()) == 1, threading.enumerate()
        there.send(function())

    process = FORKED.Process(target=run)
    process.start()
    there.close()
    found = here.recv()
    process.join()
    return found


def collected(tasks, function, workers, size=lambda _: 1, **more):
    """The results, and the error that ended the work."""
    found, error = [], None
    try:
        spread(tasks, function, found.append, workers, size, **more)
    except BaseException as caught:  # noqa: BLE001
        error = caught
    return found, error


def four(task):
    for k in range(4):
        time.sleep(0.01)
        yield task, k, os.getpid()


@pytest.mark.parametrize("fork", [True, False])
def test_every_task_runs_once(fork):
    found, _ = apart(lambda: collected(range(7), four, Workers(3, fork)))
    assert all([k for one, k, _ in found if one == task] == [0, 1, 2, 3] for task in range(7))
    assert len({process for *_, process in found}) == (3 if fork else 1)


@pytest.mark.parametrize(("sizes", "before"), [([100, 99, 1], True), ([3, 2, 1], False)])
def test_a_small_task_runs_before_workers_are_forked(sizes, before):
    found, parent = apart(lambda: (collected(sizes, four, Workers(2, fork=True), int)[0], os.getpid()))
    assert ({process for size, _, process in found if size == 1} == {parent}) == before
    assert parent not in {process for size, _, process in found if size > 1}


def test_a_task_that_starts_a_thread_is_not_followed_by_a_fork():
    """A pool of threads in a plugin's module would have none in a forked process, and wait for ever."""

    def function(task):
        if task == 1:
            threading.Thread(target=time.sleep, args=(3,), daemon=True).start()
        yield os.getpid()

    found, parent = apart(
        lambda: (collected([100, 99, 1], function, Workers(2, fork=True), lambda task: task)[0], os.getpid())
    )
    assert found == [parent] * 3


class OddError(Exception):
    """One that cannot be unpickled."""

    def __init__(self, one, other):
        super().__init__(f"{one} {other}")


def raised(error):
    raise error


ENDS = {
    "gtrace": (lambda _: raised(TraceError("a.zarr: damaged")), "TraceError: a.zarr: damaged"),
    "bug": (lambda _: {}["a"], "KeyError: 'a'"),
    "odd": (lambda _: raised(OddError(1, 2)), "RuntimeError: OddError: 1 2"),
    "killed": (
        lambda _: os.kill(os.getpid(), signal.SIGKILL),
        "TraceError: sweep: a worker process was killed by SIGKILL",
    ),
    "Ctrl-C": (lambda parent: os.kill(parent, signal.SIGINT), "KeyboardInterrupt: "),
}


@pytest.mark.parametrize("how", ENDS)
def test_what_ends_the_work_ends_workers_after_their_step(how):
    end, words = ENDS[how]

    def work():
        parent, begun = os.getpid(), multiprocessing.get_context("fork").Event()

        def task(number):
            yield number, os.getpid()
            if number:
                for _ in range(1000):
                    time.sleep(0.01)
                    yield number, os.getpid()
                    begun.set()
            begun.wait(20)
            time.sleep(0.1)
            end(parent)

        found, error = collected(range(2), task, Workers(2, fork=True))
        notes = "".join(getattr(error, "__notes__", ()))
        return found, f"{type(error).__name__}: {error}", notes, [lives(process) for _, process in found]

    found, said, notes, living = apart(work)
    assert said.startswith(words)
    assert (", in task" in notes) == (how in ("bug", "odd"))
    assert {number for number, _ in found} == {0, 1}
    assert len(found) < 500
    assert not any(living)


def lives(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


def test_workers_die_with_their_parent():
    here, there = FORKED.Pipe()

    def task(_):
        there.send(os.getpid())
        time.sleep(60)
        yield 0

    parent = FORKED.Process(target=collected, args=(range(2), task, Workers(2, fork=True)))
    parent.start()
    workers = [here.recv(), here.recv()]
    assert all(map(lives, workers))
    parent.kill()
    parent.join()
    until = time.monotonic() + 30
    while any(map(lives, workers)) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(map(lives, workers))


def test_a_sweep_has_the_same_store_with_any_number_of_workers(tmp_path):
    path = write_trace(tmp_path / "run.zarr", steps=(0, 1, 2, 3, 7))
    codecs = [
        "alq:bits=3",
        "ef:topk:ratio=0.1",
        "qsgd:bits=3,scope=model",
        "prune:sparsity=0.8,allocation=heterogeneous",
    ]

    def stored(jobs):
        found = gtrace.run_sweep(path, codecs, draws=2, jobs=jobs)
        return rows_of(found), found.warnings, found.details

    with open_trace(path) as trace:
        assert apart(lambda: Workers.of(trace, 2).processes)
    assert not Workers.of(Trace.from_arrays({"a": [1.0]}), 2).fork
    alone = stored(1)
    assert repr(apart(lambda: stored(2))) == repr(apart(lambda: stored(3))) == repr(alone)


def test_where_nothing_is_compiled_other_processes_go_through_a_step_with_one_method_each(tmp_path, monkeypatch):
    trace = open_trace(write_trace(tmp_path / "t.zarr"))
    specs, seen = ["qsgd:bits=2", "qsgd:bits=3", "topk", "signsgd"], tmp_path / "seen"
    plain = rows_of(gtrace.run_sweep(trace, specs, jobs=1))
    seen.touch()

    def replay(gradients, jobs, *rest):
        wanted = jobs[0].wanted[0][1]
        if len(wanted) == 1:
            with seen.open("a") as file:
                file.write(f"{wanted[0][0]} {wanted[0][1]} {len(jobs[0].wanted)}\n")
        else:
            end = time.monotonic() + 60
            while len(seen.read_text().splitlines()) < 5 and time.monotonic() < end:
                time.sleep(0.01)
        return Replay(gradients, jobs, *rest)

    monkeypatch.setattr("gtrace.sweep.engine.Replay", replay)
    monkeypatch.setattr("gtrace.sweep.engine.nothing_compiled", lambda: True)
    assert apart(lambda: rows_of(gtrace.run_sweep(trace, specs, jobs=3))) == plain
    # First its draws alone; topk has no other rows.
    every = ["qsgd:bits=3 (-1, 0) 1", "qsgd:bits=3 (0,) 1", "signsgd (-1, 0) 1", "signsgd (0,) 1", "topk (0,) 1"]
    assert sorted(seen.read_text().splitlines()) == every


def test_where_nothing_is_compiled_a_sweep_that_lacks_what_noise_costs_gets_it(tmp_path, monkeypatch):
    monkeypatch.setattr("gtrace.sweep.engine.nothing_compiled", lambda: True)
    trace = open_trace(write_trace(tmp_path / "t.zarr", steps=range(6)))

    def costs(jobs, noise):
        found = gtrace.run_sweep(trace, ["qsgd"], output=tmp_path / "t.db", jobs=jobs, noise=noise).details
        return {tensor for tensor, _, what in found if what.startswith("cost qsgd")}

    assert costs(1, noise=False) == set()
    assert apart(lambda: costs(2, noise=True)) == {info.name for info in trace.tensors}


@pytest.mark.parametrize(("room", "most"), [(1, 1), (2, 2), (9, 3)])
def test_tasks_at_work_fit_into_the_room(room, most):
    def span(_):
        begin = time.monotonic()
        time.sleep(0.05)
        yield begin, time.monotonic()

    found, _ = apart(lambda: collected(range(6), span, Workers(3, fork=True), room=room))
    assert len(found) == 6
    assert max(sum(begin <= at < end for begin, end in found) for at, _ in found) <= most
