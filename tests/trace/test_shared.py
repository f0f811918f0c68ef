"""A trace that several processes write."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import zarr
from helpers_trace import SUFFIXES

from gtrace.capture.options import capture_options
from gtrace.errors import OutputExistsError, TraceError
from gtrace.trace import create_trace, open_trace, shared
from gtrace.trace.check import repair_trace
from gtrace.trace.choose import agreement
from gtrace.trace.convert import pack_trace
from gtrace.trace.files import attributes_of
from gtrace.trace.shared import belongs_to, join_trace, parts, settle


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.zarr"


def write(writer, rank, steps=3, factor=1.0):
    for step in range(steps):
        writer.append(step, "w", np.full(4, factor * (step + 1), np.float32), rank=rank)
        writer.commit(step, rank=rank, loss=1.0)


def join(path, rank=None, writers=2, run="a", **more):
    return join_trace(path, run=run, rank=rank, writers=writers, **more)


def take_part(path, rank, writers=2, **more):
    """Join, write, close: the rank that it got."""
    writer, rank = join(path, rank, writers, **more)
    write(writer, rank)
    writer.close()
    return rank


def test_the_last_process_finishes_the_trace(path):
    first, rank0 = join(path, 0, attrs={"seed": 1, "argv": ["train.py"]})
    second, rank1 = join(path, 1, attrs={"seed": 2})
    write(second, rank1, factor=2.0)
    second.close()
    assert open_trace(path).status == "interrupted"
    assert "consolidated_metadata" not in root(path)
    write(first, rank0)
    first.close()
    trace = open_trace(path)
    assert (trace.status, trace.attrs["seed"], trace.attrs["argv"]) == ("complete", 1, ["train.py"])
    assert [key.rank for key in trace.streams] == [0, 1]
    for rank in (0, 1):
        assert trace.read("w", 2, rank=rank).tolist() == [3.0 * (rank + 1)] * 4
    assert [part["seed"] for part in parts(path)] == [1, 2]
    assert zarr.open_consolidated(str(path), mode="r")["rank00001/weight_grad/w"].shape == (3, 4)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_copies_keep_what_each_process_says_of_itself(path, suffix):
    for rank in (0, 1):
        writer, _ = join(path, rank, attrs={"seed": rank, "capture": {"dropped": {"0": f"{rank}-9"}}})
        write(writer, rank)
        writer.close()
    copy, again = path.with_name(f"copy{suffix}"), path.with_name("again.zarr")
    pack_trace(path, copy)
    pack_trace(copy, again)
    assert parts(again) == parts(path)
    assert [part["seed"] for part in parts(again)] == [0, 1]
    assert zarr.open_consolidated(str(again), mode="r")["rank00001"].attrs["seed"] == 1


def test_a_repair_keeps_it_too_and_says_who_was_killed(path):
    first, second = (join(path, rank, attrs={"seed": rank})[0] for rank in (0, 1))
    write(first, 0)
    first.close()
    write(second, 1)
    for stream in second._sink._streams.values():
        stream._journal.close()  # as if it was killed
    assert repair_trace(path).changed
    assert [(part["rank"], part["status"]) for part in parts(path)] == [(0, "complete"), (1, "interrupted")]
    assert parts(path)[0]["seed"] == 0


def test_a_rank_that_is_taken_gets_a_number_beyond_those_expected(path):
    ranks = [join(path, rank)[1] for rank in (0, 0, 1, 0)]
    assert ranks == [0, 2, 1, 3]
    assert [join(path.with_name("other.zarr"))[1] for _ in range(3)] == [0, 1, 2]


def test_a_trace_of_another_run_stays_unless_forced(path):
    take_part(path, 0, 1)
    with pytest.raises(OutputExistsError, match="already exists"):
        join(path, 0, 1, run="b")
    assert open_trace(path).steps("w").size == 3
    join(path, 0, 1, run="b", force=True)[0].close()
    assert open_trace(path).tensors == ()


def root(path):
    return json.loads((path / "zarr.json").read_text())


def test_a_trace_waits_for_all_that_write_though_as_many_as_expected_are_done(path):
    """Worker 0 was started again; the second worker, of its first life, is done before it."""
    first, again, second = (join(path, rank) for rank in (0, 0, 1))
    for writer, rank in (first, second):
        write(writer, rank)
        writer.close()
    assert root(path)["attributes"]["status"] == "writing"
    assert "consolidated_metadata" not in root(path)
    write(*again)
    again[0].close()
    assert root(path)["attributes"]["status"] == "complete"
    assert "rank" not in root(path)["attributes"]
    gathered = root(path)["consolidated_metadata"]["metadata"]
    assert [name for name in gathered if "/" not in name] == ["rank00000", "rank00001", "rank00002"]


@pytest.mark.parametrize("end", ["interrupted", "complete"])
def test_a_process_that_outlives_the_one_that_started_it(path, end):
    (first, rank0), (second, rank1) = (join(path, rank) for rank in (0, 1))
    write(first, rank0)
    write(second, rank1)
    first.close()
    settle(path, "a", "complete")
    # Its metadata may still change.
    assert "consolidated_metadata" not in root(path)
    assert open_trace(path).status == "interrupted"
    second.close(end)
    assert root(path)["attributes"]["status"] == end


def test_a_part_that_cannot_be_finished_says_so(path, monkeypatch):
    (first, rank0), (second, rank1) = (join(path, rank) for rank in (0, 1))
    write(first, rank0)
    write(second, rank1)

    def no_room(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr("gtrace.trace.shared._SharedSink.cut", no_room)
        with pytest.raises(TraceError, match="No space left"):
            second.close()
    first.close()
    assert [part["status"] for part in parts(path)] == ["complete", "interrupted"]
    assert open_trace(path).steps("w", rank=1).tolist() == [0, 1, 2]


@pytest.mark.parametrize("what", ["join", "close", "settle"])
def test_the_root_changes_under_a_lock_that_nobody_waits_long_for(path, what, monkeypatch):
    monkeypatch.setattr(shared, "_PATIENCE", 0.2)
    writer, rank = join(path, 0, 1)
    write(writer, rank)
    action = {"join": lambda: join(path, 1), "close": writer.close, "settle": lambda: settle(path, "a", "interrupted")}
    before = root(path)
    with shared._locked(path):
        # A trace in the same folder has a lock of its own.
        join(path.with_name("other.zarr"), 0, 1)[0].close()
        with pytest.raises(TraceError, match=r"run\.zarr: cannot be written .another process of this run") as failed:
            action[what]()
        assert isinstance(failed.value.__cause__, TimeoutError)
        assert root(path) == before
    if what == "close":
        assert (open_trace(path).status, root(path)["attributes"]["status"]) == ("complete", "writing")
    (action[what] if what == "join" else action["settle"])()
    assert root(path) != before
    assert sorted(os.listdir(path.parent)) == ["other.zarr", "run.zarr"]
    writer.close()


WRITER = """
import sys, time
import numpy as np
from gtrace.trace.shared import join_trace
path, rank, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
writer, number = join_trace(path, run="a", rank=rank, writers=3, force=True)
print("ready", flush=True)
for step in range(steps):
    for name in ("w", "v"):
        writer.append(step, name, np.full(100, 1000 * rank + step, np.float32), rank=number)
    writer.commit(step, rank=number)
writer.close()
"""


def test_processes_at_once_and_one_of_them_killed(path):
    create_trace(path).close()  # an old trace that all of them want to replace
    command = [sys.executable, "-c", WRITER, str(path)]
    processes = [
        subprocess.Popen([*command, str(rank), str(steps)], stdout=subprocess.PIPE)
        for rank, steps in ((0, 100), (1, 10**6), (2, 100))
    ]
    for place in (0, 2):
        assert processes[place].wait(60) == 0
    processes[1].stdout.readline()
    while not any(info.rank == 1 for info in open_trace(path).tensors):
        time.sleep(0.01)
    processes[1].send_signal(signal.SIGKILL)
    processes[1].wait()
    for process in processes:
        process.stdout.close()
    settle(path, "a", "interrupted")
    trace = open_trace(path)
    assert trace.status == "interrupted"
    assert [key.rank for key in trace.streams] == [0, 1, 2]
    for rank in range(3):
        steps = trace.steps("v", rank=rank)
        assert steps.size == (100 if rank != 1 else steps.size) > 0
        for step in steps[-5:]:
            assert set(trace.read("v", int(step), rank=rank)) == {1000.0 * rank + step}


COPIES = ["Replicate()", "Shard(dim=0)"]


@pytest.mark.parametrize(
    ("attrs", "expected"),
    [
        ([{"placements": ["Shard(dim=0)"], "place": [rank]} for rank in (0, 1)], (0, 0, None, None)),
        ([{"placements": COPIES, "place": [k // 2, k % 2]} for k in range(4)], (4, 2, 1, "w")),
        ([{}, {"restart": 1}], (0, 0, None, None)),
    ],
    ids=["parts of a tensor", "copies of parts", "processes that were started again"],
)
def test_what_is_compared(attrs, expected, path):
    """Of ranks that recorded the same but at their last step, with these attributes."""
    for rank, about in enumerate(attrs):
        writer, number = join(path, rank)
        for step in range(2):
            writer.append(step, "w", np.full(2, step * rank, np.float32), rank=number, stage="reduced", **about)
            writer.commit(step, rank=number)
        writer.close()
    assert agreement(open_trace(path), "reduced") == expected


def test_processes_of_several_machines_join_one_trace(path):
    """Each machine has its own process that launches; none of them knows the run's word."""
    for rank, launcher in enumerate(["here", "there", "there"]):
        writer, number = join_trace(path, run="token", rank=rank, writers=3, launcher=launcher)
        writer.append(0, "w", [1.0], rank=number)
        writer.commit(0, rank=number)
        assert all(belongs_to(path, word) for word in ("token", "here", launcher))
        assert not belongs_to(path, "elsewhere")
        writer.close()
        # The end on one machine is not the end of the run.
        settle(path, "here", "interrupted")
        assert open_trace(path).status == ("interrupted" if rank < 2 else "complete")
    assert open_trace(path).attrs["launchers"] == ["here", "there"]


def test_a_later_launch_of_the_same_name_does_not_join(path):
    for rank in (0, 1):
        write(*join(path, rank, first=True))
    before = open_trace(path).fingerprint
    for rank, writers in ((0, 2), (1, 3)):
        with pytest.raises(OutputExistsError):
            join(path, rank, writers, first=True)
    assert open_trace(path).fingerprint == before
    # One that was started again joins.
    assert join(path, 0)[1] == 2
    for rank in (1, 0):
        assert join(path, rank, first=True, force=True)[1] == rank


@pytest.mark.parametrize("run", ["token", "another"])
def test_a_process_of_the_same_run_may_begin_between_two_looks(path, monkeypatch, run):
    def looked(place):
        # The other one makes the trace after this look.
        monkeypatch.setattr("gtrace.capture.options.attributes_of", attributes_of)
        join(place, rank=0, run="token")

    monkeypatch.setattr("gtrace.capture.options.attributes_of", looked)
    if run == "token":
        assert capture_options(path, run=run).path == path
    else:
        with pytest.raises(OutputExistsError):
            capture_options(path, run=run)
