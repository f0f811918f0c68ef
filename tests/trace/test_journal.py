"""The journal of a Zarr trace: what it costs, and what happens when an append or a row fails."""

import os
import struct

import numpy as np
import pytest
from helpers_trace import check_gradients, loss, write_steps

from gtrace.errors import TraceError
from gtrace.trace import create_trace, open_trace
from gtrace.trace import format as layout
from gtrace.trace.format import Rows, TensorSpec
from gtrace.trace.journal import _ENTRY, JournalRows, JournalWriter, hold, is_held, parse_journal


def test_a_commit_is_one_system_call_whatever_the_number_of_tensors(tmp_path, monkeypatch):
    calls = []
    for name in ("writev", "pwritev", "replace"):
        original = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, f=original, name=name: (calls.append(name), f(*args))[1])
    with create_trace(tmp_path / "run.zarr") as writer:
        for step in range(10):
            for index in range(30):
                writer.append(step, f"w{index}", np.full(100, step))
            calls.clear()
            writer.commit(step, loss=1.0)
            assert calls == ["pwritev"] or step == 0


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


NAMES = list(layout.STATISTICS)
SCALARS = dict.fromkeys(layout.SCALARS, np.array([0.5]))


def spec(index, size=3, chunk_rows=64):
    return TensorSpec(index, f"w{index}", f"w{index}", size, chunk_rows, max(size, 1))


def record(step, tensors, absent=()):
    statistics = {name: np.arange(tensors).astype(column.dtype) for name, column in layout.STATISTICS.items()}
    statistics["present"] = np.array([index not in absent for index in range(tensors)], np.uint8)
    return Rows(np.array([step]), SCALARS, {name: table[None] for name, table in statistics.items()})


def values(row, tensors, size=3):
    return [np.full(size, 10 * row + index, np.float32) for index in range(tensors)]


@pytest.fixture
def writer(tmp_path):
    writer = JournalWriter(str(tmp_path), NAMES)
    yield writer
    writer.close()


def content(tmp_path):
    return (tmp_path / "journal").read_bytes()


def parse(data, kind="weight"):
    """The entries, and what was said about damage."""
    told = []
    return parse_journal(data, kind, "here", told.append), [str(error) for error in told]


def filled(writer, tmp_path, rows=3, tensors=2):
    """A journal and the offsets at which its entries end; the first is that of the header."""
    ends = [len(content(tmp_path))]
    for row in range(rows):
        writer.append(row, record(10 * row, tensors), values(row, tensors))
        ends.append(len(content(tmp_path)))
    return content(tmp_path), ends


def test_a_system_that_takes_a_few_bytes_at_a_time(writer, tmp_path, monkeypatch):
    whole, _ = filled(writer, tmp_path)
    append = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda file, parts, place: append(file, [b"".join(parts)[:7]], place))
    writer.restart(0)
    assert filled(writer, tmp_path)[0] == whole
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(OSError, match="No space left"):
        writer.append(3, record(30, 2), values(3, 2))


def test_more_tensors_than_one_system_call_takes(writer, tmp_path):
    tensors = os.sysconf("SC_IOV_MAX") + 100
    writer.append(0, record(0, tensors), values(0, tensors))
    ((entry,), told) = parse(content(tmp_path))
    assert told == []
    assert np.frombuffer(entry.values, np.float32).tolist() == [float(n) for n in range(tensors) for _ in range(3)]


def test_an_entry_that_is_not_whole_is_none(writer, tmp_path):
    data, ends = filled(writer, tmp_path)
    for length in range(ends[0], len(data)):
        entries, told = parse(data[:length])
        assert (len(entries), told) == (sum(end <= length for end in ends[1:]), [])
    assert parse(b"") == ([], [])


def test_every_flipped_byte_of_header_and_tables_ends_the_journal_there(writer, tmp_path):
    data, ends = filled(writer, tmp_path)
    for place in range(len(data)):
        before = max(sum(end <= place for end in ends) - 1, 0)
        offset = place - ends[before]
        if place >= ends[before + 1] - 2 * 3 * 4:
            continue  # a value of a gradient, which has its own checksum
        entries, told = parse(data[:place] + bytes([data[place] ^ 0x11]) + data[place + 1 :])
        if offset == 16 and place >= ends[0]:
            # Fewer bytes of values than there are: their tensors tell.
            rows, told = rows_of(entries, 0)
            rows.set_specs({0: spec(0), 1: spec(1)}, lambda error, told=told: told.append(str(error)))
            assert f"row {before}: sizes of values and tensors differ" in told[0]
            continue
        assert len(entries) == before
        # An entry that now claims more bytes than there are looks unfinished; everything else is damage.
        assert told or (place >= ends[0] and 8 <= offset < _ENTRY.size)


@pytest.mark.parametrize("new", [b'"n_valid"', b'"crc32c", "other"', b'"first": true', b'"gtrace_journal": 2'])
def test_a_header_of_something_else(new, writer, tmp_path):
    old = {b'"f': b'"first": 0', b'"g': b'"gtrace_journal": 1'}.get(new[:2], b'"crc32c"')
    entries, told = parse(filled(writer, tmp_path)[0].replace(old, new, 1))
    assert entries == []
    assert told == ["here: not a journal of version 1; damaged, foreign or from a newer gtrace"]


@pytest.mark.parametrize(
    ("row", "about"),
    [
        (1, record(3, 2)),
        (0, record(-1, 2)),
        (0, record(3, 2)._replace(statistics=record(3, 2).statistics | {NAMES[-1]: np.zeros(3)})),
    ],
    ids=["another row", "a step below 0", "a table of another length"],
)
def test_a_table_that_contradicts_itself_though_its_checksum_is_right(row, about, writer, tmp_path):
    writer._next = row
    writer.append(row, about, values(0, 2))
    assert parse(content(tmp_path)) == ([], ["here: checksum mismatch at row 0; damaged from there on"])


def rows_of(entries, base):
    told = []
    return JournalRows(entries, base, "here", told.append), [str(error) for error in told]


def test_rows_between_chunks_and_journal_that_are_missing(writer, tmp_path):
    writer.restart(5)
    writer.append(5, record(5, 1), values(5, 1))
    rows, told = rows_of(parse(content(tmp_path))[0], 3)
    assert rows.entries == []
    assert told == ["here: begins at row 5, but chunks end at row 3; the trace is damaged"]


def test_descriptors_and_locks(tmp_path):
    place = tmp_path / "journal"
    before = len(os.listdir("/proc/self/fd"))
    for end in (JournalWriter.close, JournalWriter.remove):
        writer = JournalWriter(str(tmp_path), NAMES)
        writer.restart(1)
        assert is_held(place)
        assert len(os.listdir("/proc/self/fd")) == before + 1
        end(writer)
        assert len(os.listdir("/proc/self/fd")) == before
        assert not is_held(place)
        assert place.exists() == (end is JournalWriter.close)
        descriptor = hold(place)
        assert is_held(place) == (descriptor is not None) == place.exists()
        if descriptor is not None:
            os.close(descriptor)


def test_sizes_that_claim_everything(writer, tmp_path):
    data, ends = filled(writer, tmp_path)
    for table, length in ((2**63, 2**63), (2**64 - 1, 1), (0, 2**64 - 1)):
        head = struct.pack("<4sIQQ", b"gtj1", 0, table, length)
        assert len(parse(data[: ends[2]] + head + data[ends[2] + _ENTRY.size :])[0]) == 2
