"""Faults around a writer: it is stopped, a second one comes, links lie where its files go, the disk is full."""

import multiprocessing
import os
import shutil
import signal
from types import SimpleNamespace

import pytest
from helpers_trace import STEPS, check_gradients, write_steps, write_trace

from gtrace.errors import OutputExistsError, TraceError
from gtrace.trace import create_trace, open_trace
from gtrace.trace.check import check_trace, repair_trace


def _write(path, steps, told):
    with create_trace(path) as writer:
        for step in range(steps):
            write_steps(writer, [step])
            told.send(step)
    told.send("closed")


def test_a_writer_that_is_stopped_and_goes_on(path):
    """As by Ctrl-Z, or a batch system that suspends a job: readers see what is committed and never wait."""
    forked = multiprocessing.get_context("fork")
    here, there = forked.Pipe()
    child = forked.Process(target=_write, args=(path, 60, there))
    child.start()
    for stop in range(4):
        while (done := here.recv()) < 10 * (stop + 1):
            pass
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        with open_trace(path) as trace:
            steps = trace.steps("fc.bias").tolist()
            assert steps == list(range(len(steps)))
            assert len(steps) > done
            check_gradients(trace, steps)
        report = check_trace(path)
        assert report.live
        assert report.faults == ()
        os.kill(child.pid, signal.SIGCONT)
    child.join()
    with open_trace(path) as trace:
        assert trace.status == "complete"
        check_gradients(trace, range(60))


def test_a_trace_that_is_being_written_is_never_replaced(path, tmp_path):
    with create_trace(path) as first:
        write_steps(first, STEPS[:3])
        for force in (False, True):
            with pytest.raises(OutputExistsError, match="is still writing|is writing" if force else "already exists"):
                create_trace(path, force=force)
        write_steps(first, STEPS[3:])
    with open_trace(path) as trace:
        assert trace.status == "complete"
        check_gradients(trace, STEPS)
    assert os.listdir(tmp_path) == [path.name]
    with create_trace(path, force=True) as second:
        write_steps(second, STEPS[:2])
    check_gradients(path, STEPS[:2])


@pytest.mark.parametrize("how", ["deleted", "moved", "replaced"])
def test_a_trace_that_is_gone_takes_no_more(how, tmp_path):
    path = tmp_path / "run.zarr"
    writer = create_trace(path)
    write_steps(writer, STEPS[:2])
    path.rename(tmp_path / "moved.zarr") if how != "deleted" else shutil.rmtree(path)
    if how == "replaced":
        with create_trace(path) as second:
            write_steps(second, STEPS[:3])
    for action in (lambda: write_steps(writer, STEPS[2:4]), writer.close):
        with pytest.raises(TraceError, match="is gone: it was deleted, moved or replaced"):
            action()
    assert path.exists() == (how == "replaced")
    for place, count in (("moved.zarr", 2), ("run.zarr", 3)):
        if (tmp_path / place).exists():
            with open_trace(tmp_path / place) as trace:
                check_gradients(trace, STEPS[:count])
                assert tuple(trace.scalars()["step"]) == STEPS[:count]
                assert (trace.status == "complete") == (place == "run.zarr")


def test_a_link_in_the_place_of_an_unfinished_file_is_not_written_through(tmp_path):
    """The names of the chunks to come are known beforehand."""
    victim = tmp_path / "thesis.txt"
    victim.write_text("years of work")
    path = tmp_path / "run.zarr"
    writer = create_trace(path)
    write_steps(writer, STEPS[:1])
    (path / "rank00000" / "weight_grad" / "embed%2Fweight" / "c.1.0").symlink_to(victim)
    with pytest.raises(TraceError, match="cannot be written"):
        write_steps(writer, STEPS[1:3])
    writer.discard()
    writer.close()
    assert victim.read_text() == "years of work"
    with open_trace(path) as trace:
        assert trace.steps("fc.bias").tolist()[0] == STEPS[0]


def test_repair_and_force_touch_nothing_behind_a_link(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "thesis.txt").write_text("years of work")
    path = write_trace(tmp_path / "run.zarr")
    (path / "rank00000" / "weight_grad" / "more").symlink_to(outside)
    (tmp_path / ".run.zarr.gtrace-partial-1").symlink_to(outside)
    os.utime(tmp_path / ".run.zarr.gtrace-partial-1", (0, 0), follow_symlinks=False)
    with create_trace(path, force=True) as writer:
        write_steps(writer, STEPS[:1])
    assert (outside / "thesis.txt").read_text() == "years of work"
    assert not os.path.lexists(tmp_path / ".run.zarr.gtrace-partial-1")


@pytest.fixture
def disk(monkeypatch):
    """Blocks that are free, of a million."""
    disk = SimpleNamespace(f_blocks=10**6, f_bavail=10**6, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: disk)
    return disk


def test_without_room_for_the_file_everything_stays_in_a_folder(tmp_path, disk):
    path = tmp_path / "run.h5"
    writer = create_trace(path)
    write_steps(writer, range(3))
    disk.f_bavail = 100
    with pytest.raises(TraceError, match=r"No space left on device.*`gtrace trace check --repair` makes it a file"):
        writer.close()
    assert os.listdir(tmp_path) == ["run.h5"]
    with open_trace(path) as trace:
        assert trace.status == "complete"
        check_gradients(trace, range(3))
    report = check_trace(path)
    assert (report.faults, report.unfinished, report.clean) == ((), True, False)
    with pytest.raises(TraceError, match="No space left on device"):
        repair_trace(path)
    assert path.is_dir()
    disk.f_bavail = 10**6
    assert repair_trace(path).backup is None
    assert path.is_file()
    assert os.listdir(tmp_path) == ["run.h5"]
    assert check_trace(path).clean
    with open_trace(path) as trace:
        assert trace.status == "complete"
        check_gradients(trace, range(3))
