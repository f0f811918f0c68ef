"""What a check and a repair do beside the ordinary: repairs that fail, leftovers, further numbers, rounding."""

import os
import shutil

import numpy as np
import pytest
import zarr

from gtrace.errors import TraceError
from gtrace.trace import create_trace, open_trace
from gtrace.trace.check import check_trace, repair_trace

GROUP = "rank00000/weight_grad"


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "run.zarr"
    with create_trace(path) as writer:
        for step in range(3):
            writer.append(step, "gone", np.full(5, 7.0 + step), numbers={"second_moment": 5.0 + step})
            if step != 1:
                writer.append(step, "kept", np.full(4, 0.1 * (step + 1)), numbers={"second_moment": 2.0 + step})
            writer.commit(step, loss=1.0 + step, lr=0.5)
    return path


def damage(path, entry="gone"):
    (chunk,) = (path / GROUP / entry).glob("c.0*")
    os.truncate(chunk, chunk.stat().st_size - 1)


def change(path, name, function):
    """Change a table and leave its checksums right."""
    array = zarr.open_array(path / GROUP / name, mode="r+")
    array[:] = function(array[:])


def names(path):
    return sorted(os.listdir(path.parent))


def test_a_tensor_of_which_nothing_is_right_is_left_out_and_all_numbers_of_the_other_stay(path):
    damage(path)
    repair = repair_trace(path)
    assert (repair.report.wrong, repair.report.gradients) == (3, 5)
    with open_trace(path) as trace:
        (info,) = trace.tensors
        assert (info.name, trace.steps("kept").tolist()) == ("kept", [0, 2])
        assert trace.statistics("kept")["second_moment"].tolist() == [2.0, 4.0]
        assert trace.scalars()["loss"].tolist() == [1.0, 2.0, 3.0]
        assert trace.scalars()["lr"].tolist() == [0.5] * 3
        assert np.isnan(trace.scalars()["clip_norm"]).all()
        told = trace.attrs["repaired"]
        assert told["lost"] == 3
        assert all("gone" in fault for fault in told["faults"])
    assert "index" in zarr.open_array(path / GROUP / "kept", mode="r").attrs
    assert zarr.open_array(path / GROUP / "kept", mode="r").attrs["index"] == 0
    assert check_trace(path).clean


def test_each_damaged_trace_stays(path, tmp_path):
    shutil.copytree(path, tmp_path / "whole")
    for number in ("", "2", "3"):
        damage(path)
        assert repair_trace(path).backup == path.with_name(f"run.zarr.damaged{number}")
        shutil.rmtree(path)
        shutil.copytree(tmp_path / "whole", path)
    shutil.rmtree(tmp_path / "whole")
    assert names(path) == ["run.zarr", "run.zarr.damaged", "run.zarr.damaged2", "run.zarr.damaged3"]


def test_a_repair_that_cannot_be_moved_in_leaves_the_trace_where_it_was(path, monkeypatch):
    damage(path)
    rename = os.rename

    def fails(source, target):
        if "repair" in os.path.basename(source):
            raise OSError(28, "No space left on device")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(TraceError, match="the repaired trace cannot be written"):
        repair_trace(path)
    assert names(path) == ["run.zarr"]
    assert check_trace(path).wrong == 3


def test_a_repair_that_cannot_be_written_leaves_nothing_beside(path, monkeypatch):
    damage(path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gtrace.trace.zarr.write_file", full)
    with pytest.raises(TraceError, match="the repaired trace cannot be written"):
        repair_trace(path)
    assert names(path) == ["run.zarr"]


def test_files_that_a_killed_writer_did_not_finish(path):
    left = path / GROUP / "kept" / "c.9.0.partial"
    left.write_bytes(b"x")
    report = check_trace(path)
    assert (report.leftovers, report.faults, report.clean) == ((left,), (), False)
    repair = repair_trace(path)
    assert (repair.changed, repair.backup) == (True, None)
    assert not left.exists()
    assert check_trace(path).clean
    with open_trace(path) as trace:
        assert [info.name for info in trace.tensors] == ["gone", "kept"]
        assert trace.status == "complete"


def test_further_numbers_that_are_damaged(path):
    damage(path, "second_moment")
    (fault,) = check_trace(path).faults
    assert "second_moment" in fault.what
    assert fault.stream == GROUP
    repair_trace(path)
    with open_trace(path) as trace:
        assert "second_moment" not in trace.statistics("kept")
        assert trace.read("gone", 2).tolist() == [9.0] * 5


@pytest.mark.parametrize(
    ("table", "factor", "faults"),
    [
        ("norm2", 1 + 1e-8, 0),
        ("norm2", 1 + 1e-4, 5),
        ("norm2", np.array([[np.nan], [1], [1]]), 2),
        ("absmax", 1 + 1e-8, 5),
    ],
)
def test_norms_may_be_summed_in_another_order_and_nothing_else_differ(table, factor, faults, path):
    change(path, table, lambda values: values * factor)
    report = check_trace(path)
    assert [fault.what for fault in report.faults] == [f"stored {table} does not match the values"] * faults
    assert report.wrong == 0


def test_a_checksum_that_is_not_that_of_the_values(path):
    change(path, "crc32c", lambda values: values + np.uint32(1) * (values > 0))
    report = check_trace(path)
    assert report.wrong == report.gradients == 5
    assert all("checksum mismatch with the commit record" in fault.what for fault in report.faults)


def test_a_trace_that_nobody_finished(tmp_path):
    """Its writer is gone; no row waits in a journal."""
    path = tmp_path / "run.zarr"
    writer = create_trace(path)
    assert not check_trace(path).live
    report = check_trace(path)
    assert (report.status, report.unfinished, report.clean) == ("writing", False, False)
    copy = tmp_path / "copy.zarr"
    shutil.copytree(path, copy)
    writer.close()
    assert check_trace(path).clean
    assert repair_trace(copy).backup is None
    assert open_trace(copy).attrs["status"] == "interrupted"
    assert check_trace(copy).clean
