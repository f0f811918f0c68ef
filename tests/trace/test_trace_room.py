"""A file system that is full when an HDF5 trace is closed: HDF5 must not find out itself."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from helpers_trace import check_gradients, write_steps

from gtrace.errors import TraceError
from gtrace.trace import create_trace, open_trace
from gtrace.trace.check import check_trace, repair_trace
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


def test_without_room_for_the_file_everything_stays_in_a_folder(tmp_path, disk):
    path = tmp_path / "run.h5"
    writer = create_trace(path)
    write_steps(writer, range(3))
    disk.free = 100
    with pytest.raises(TraceError, match=r"run\.h5: .*No space left on device.*`gtrace check --repair` makes a file"):
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
    disk.free = 10**6
    assert repair_trace(path).backup is None
    assert path.is_file()
    assert os.listdir(tmp_path) == ["run.h5"]
    assert check_trace(path).clean
    with open_trace(path) as trace:
        assert trace.status == "complete"
        check_gradients(trace, range(3))


def test_a_file_system_that_has_no_size(tmp_path, disk):
    disk.free = disk.all = 0
    check_room(tmp_path, 10**9)
    disk.all = 10
    with pytest.raises(OSError, match="No space left on device"):
        check_room(tmp_path, 1)
    check_room(tmp_path, 0)
