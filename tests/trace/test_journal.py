"""The journal of a Zarr trace: what it costs, and what happens when an append or a row fails."""

import os

import numpy as np
import pytest
from helpers_trace import check_gradients, loss, write_steps

from gtrace.errors import TraceError
from gtrace.trace import create_trace, open_trace
from gtrace.trace.check import check_trace


def test_a_commit_is_one_system_call_whatever_the_number_of_tensors(tmp_path, monkeypatch):
    calls = []
    for name in ("writev", "pwritev", "replace"):
        original = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, f=original, name=name: (calls.append(name), f(*args))[1])
    with create_trace(tmp_path / "run.zarr") as writer:
        for step in range(10):
            for index in range(30):
                writer.append(step, f"w{index}", np.full(100, step))
            if step > 0:
                calls.clear()
            writer.commit(step, loss=1.0)
            if step > 0:
                assert calls == ["pwritev"]


def test_a_full_journal_is_emptied(tmp_path, monkeypatch):
    monkeypatch.setattr("gtrace.trace.journal._FULL_BYTES", 100_000)
    journal = tmp_path / "run.zarr" / "rank00000" / "weight_grad" / "step" / "journal"
    with create_trace(tmp_path / "run.zarr") as writer:
        sizes = []
        for step in range(40):
            writer.append(step, "w", np.full(5000, step))
            writer.commit(step)
            sizes.append(journal.stat().st_size)
            with open_trace(tmp_path / "run.zarr") as trace:
                assert trace.steps("w").tolist() == list(range(step + 1))
                for past in {0, step // 2, step}:
                    assert set(trace.read("w", past)) == {past}
        assert max(sizes) < 150_000
        assert min(sizes[20:]) < 30_000


def test_a_row_that_is_given_up_leaves_nothing(path):
    """Short and long rows; the tensors are absent at the step that takes its place."""
    with create_trace(path) as writer:
        for step in range(5):
            for name, size in (("short", 10), ("long", 200_000)):
                writer.append(step, name, np.full(size, step))
            if step == 3:
                writer.discard()
                writer.append(step, "other", [3.0])
            writer.commit(step)
    with open_trace(path) as trace:
        assert trace.scalars()["step"].tolist() == list(range(5))
        for name in ("short", "long"):
            assert trace.steps(name).tolist() == [0, 1, 2, 4]
            assert set(trace.read(name, 4)) == {4}
    assert check_trace(path).clean


def test_an_append_to_the_journal_that_was_cut_off_is_made_good(tmp_path, monkeypatch):
    """The disk was full in the middle of it; the entry that follows, shorter or longer, stands where it began."""
    append = os.pwritev

    def half(descriptor, parts, offset):
        monkeypatch.setattr(os, "pwritev", no_room)
        return append(descriptor, [b"".join(parts)[:100]], offset)

    def no_room(*_):
        raise OSError(28, "No space left on device")

    with create_trace(tmp_path / "run.zarr") as writer:
        write_steps(writer, (0, 1))
        monkeypatch.setattr(os, "pwritev", half)
        with pytest.raises(TraceError, match="No space left"):
            write_steps(writer, (2,))
        check_gradients(tmp_path / "run.zarr", (0, 1))
        monkeypatch.setattr(os, "pwritev", append)
        writer.commit(2, loss=loss(2))
        write_steps(writer, (4,))
        with open_trace(tmp_path / "run.zarr") as trace:
            check_gradients(trace, (0, 1, 2, 4))
            assert trace.scalars()["loss"].tolist() == [loss(step) for step in (0, 1, 2, 4)]


def test_nothing_is_left_of_a_long_entry_that_was_cut_off_behind_a_shorter_one(tmp_path, monkeypatch):
    append = os.pwritev

    def no_room(*_):
        raise OSError(28, "No space left on device")

    def all_but_a_byte(descriptor, parts, offset):
        monkeypatch.setattr(os, "pwritev", no_room)
        return append(descriptor, [b"".join(parts)[:-1]], offset)

    with create_trace(tmp_path / "run.zarr") as writer:
        for step in range(3):
            writer.append(step, "short", [step])
            if step < 2:
                writer.append(step, "long", np.full(300, step))
            monkeypatch.setattr(os, "pwritev", all_but_a_byte if step == 1 else append)
            if step == 1:
                with pytest.raises(TraceError, match="No space left"):
                    writer.commit(step)
                writer.discard()
            else:
                writer.commit(step)
        with open_trace(tmp_path / "run.zarr") as trace:
            assert [trace.steps(name).tolist() for name in ("short", "long")] == [[0, 2], [0]]
            assert trace.read("short", 2).tolist() == [2]


def test_a_system_that_takes_no_bytes_has_no_room(tmp_path, monkeypatch):
    with create_trace(tmp_path / "run.zarr") as writer:
        write_steps(writer, (0,))
        answers = iter([0])
        monkeypatch.setattr(os, "pwritev", lambda *_: next(answers))
        with pytest.raises(TraceError, match="No space left"):
            write_steps(writer, (1,))
        monkeypatch.undo()
        writer.discard()
    with open_trace(tmp_path / "run.zarr") as trace:
        assert trace.scalars()["step"].tolist() == [0]
