"""A file system that fills up while an HDF5 trace is written: HDF5 must not find out itself."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from helpers_trace import check_gradients, write_steps

from gtrace.errors import TraceError
from gtrace.trace import create_trace, open_trace
from gtrace.trace.check import check_trace
from gtrace.trace.files import check_room


class Disk:
    """Blocks that are free, of how many."""

    def __init__(self, monkeypatch):
        self.free, self.all = 10**6, 10**6
        monkeypatch.setattr(
            os, "statvfs", lambda _: SimpleNamespace(f_blocks=self.all, f_bavail=self.free, f_frsize=4096)
        )


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


def test_steps_without_room_are_refused_and_leave_the_file_whole(tmp_path, disk):
    path = tmp_path / "run.h5"
    with create_trace(path) as writer:
        write_steps(writer, range(3))
        size = path.stat().st_size
        disk.free = 100
        for _ in range(3):
            with pytest.raises(TraceError, match="No space left on device"):
                write_steps(writer, (3,))
            writer.discard()
        assert path.stat().st_size == size
        disk.free = 10**6
        write_steps(writer, (4, 5))
        writer.append(6, "late", [1.0])
        disk.free = 100
        with pytest.raises(TraceError, match="No space left on device"):
            writer.commit(6)
        writer.discard()
    assert check_trace(path).faults == ()
    assert os.listdir(tmp_path) == ["run.h5"]
    with open_trace(path) as trace:
        assert trace.status == "interrupted"
        check_gradients(trace, (0, 1, 2, 4, 5))


def test_a_new_tensor_needs_room_for_a_copy(tmp_path, disk):
    path = tmp_path / "run.h5"
    with create_trace(path) as writer:
        write_steps(writer, range(2))
        disk.free = 100
        with pytest.raises(TraceError, match="No space left on device"):
            writer.append(2, "late", [1.0])
        writer.discard()
        assert os.listdir(tmp_path) == ["run.h5"]
    assert check_trace(path).faults == ()


def test_a_file_system_that_has_no_size(tmp_path, disk):
    disk.free = disk.all = 0
    check_room(tmp_path, 10**9)
    disk.all = 10
    with pytest.raises(OSError, match="No space left on device"):
        check_room(tmp_path, 1)
    check_room(tmp_path, 0)
