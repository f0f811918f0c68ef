"""The journal of a Zarr trace: what it costs, and what happens when an append or a row fails."""

import os
import struct

import numpy as np
import pytest
from helpers_trace import check_gradients, loss, write_steps

from gtrace.errors import TraceError
from gtrace.trace import create_trace, open_trace
from gtrace.trace import format as layout
from gtrace.trace.check import check_trace
from gtrace.trace.format import Record, TensorSpec
from gtrace.trace.journal import _ENTRY, _FIXED, JournalRows, JournalWriter, hold, is_held, parse_journal
from gtrace.trace.rows import checksum_bytes


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


NAMES = list(layout.STATISTICS)
SCALARS = dict.fromkeys(layout.SCALARS, 0.5)


def spec(index, size=3, chunk_rows=64):
    return TensorSpec(index, f"w{index}", f"w{index}", size, chunk_rows, max(size, 1))


def record(step, tensors, absent=()):
    statistics = {name: np.arange(tensors).astype(column.dtype) for name, column in layout.STATISTICS.items()}
    statistics["present"] = np.array([index not in absent for index in range(tensors)], np.uint8)
    return Record(step, SCALARS, statistics)


def values(row, tensors, size=3):
    return [np.full(size, 10 * row + index, np.float32) for index in range(tensors)]


@pytest.fixture
def writer(tmp_path):
    writer = JournalWriter(str(tmp_path), NAMES, 0)
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


def test_what_was_appended_is_read(writer, tmp_path):
    entries, told = parse(filled(writer, tmp_path)[0])
    assert told == []
    assert [(entry.row, entry.record.step) for entry in entries] == [(0, 0), (1, 10), (2, 20)]
    assert [np.frombuffer(entry.values, np.float32).tolist() for entry in entries] == [
        [0, 0, 0, 1, 1, 1],
        [10, 10, 10, 11, 11, 11],
        [20, 20, 20, 21, 21, 21],
    ]
    for name in NAMES:
        assert entries[1].record.statistics[name].tolist() == record(10, 2).statistics[name].tolist()
    assert entries[1].record.scalars == SCALARS


@pytest.mark.parametrize("most", [1, 7, 100])
def test_a_system_that_takes_a_few_bytes_at_a_time(most, writer, tmp_path, monkeypatch):
    whole, _ = filled(writer, tmp_path)
    append = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda file, parts, place: append(file, [b"".join(parts)[:most]], place))
    writer.restart(0)
    assert filled(writer, tmp_path)[0] == whole


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


@pytest.mark.parametrize("change", ["kind", "names", "first", "type", "version"])
def test_a_header_of_something_else(change, writer, tmp_path):
    data, ends = filled(writer, tmp_path)
    header, rest = data[: ends[0]], data[ends[0] :]
    changes = {
        "kind": (b'"crc32c"', b'"n_valid"'),
        "names": (b'"crc32c"', b'"crc32c", "other"'),
        "first": (b'"first": 0', b'"first": "0"'),
        "type": (b'"first": 0', b'"first": true'),
        "version": (b'"gtrace_journal": 1', b'"gtrace_journal": 2'),
    }
    entries, told = parse(header.replace(*changes[change]) + rest)
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


def test_a_table_too_short_for_its_fixed_part(writer, tmp_path):
    header = content(tmp_path)
    for table in (b"", b"\0" * 4, b"\0" * _FIXED.size):
        crc = checksum_bytes(np.frombuffer(table, np.uint8))
        entries, told = parse(header + _ENTRY.pack(b"gtj1", crc, len(table), 0) + table)
        assert (entries, len(told)) == ([], 1)


def rows_of(entries, base):
    told = []
    return JournalRows(entries, base, "here", told.append), [str(error) for error in told]


def steps(rows):
    return [record.step for record in rows.records]


def test_rows_that_are_in_chunks_too_are_left_out(writer, tmp_path):
    """A writer was killed between the last chunk file and the new journal."""
    entries = parse(filled(writer, tmp_path)[0])[0]
    rows, told = rows_of(entries, 1)
    assert (steps(rows), told) == ([10, 20], [])
    rows.set_specs({0: spec(0), 1: spec(1)}, pytest.fail)
    assert rows.values(spec(1), 2).tolist() == [21, 21, 21]
    rows.cut(2)
    assert steps(rows) == [10]
    rows, _ = rows_of(entries, 1)
    rows.cut(0)
    assert steps(rows) == []
    assert steps(rows_of(entries, 3)[0]) == []


def test_rows_between_chunks_and_journal_that_are_missing(writer, tmp_path):
    writer.restart(5)
    writer.append(5, record(5, 1), values(5, 1))
    entries = parse(content(tmp_path))[0]
    rows, told = rows_of(entries, 3)
    assert steps(rows) == []
    assert told == ["here: begins at row 5, but chunks end at row 3; the trace is damaged"]
    assert steps(rows_of(entries, 5)[0]) == [5]


def test_long_empty_and_absent_tensors_have_no_values_here(writer, tmp_path):
    specs = {0: spec(0), 1: spec(1, 10**6, 1), 2: spec(2, 0), 3: spec(3), 4: spec(4, 2)}
    about = record(0, 5, absent=(3,))
    writer.append(0, about, [np.full(3, 1, np.float32), np.full(2, 2, np.float32)])
    rows, _ = rows_of(parse(content(tmp_path))[0], 0)
    rows.set_specs(specs, pytest.fail)
    assert rows.values(specs[0], 0).tolist() == [1, 1, 1]
    assert rows.values(specs[4], 0).tolist() == [2, 2]
    for index in (1, 2, 3):
        with pytest.raises(TraceError, match=f"tensor 'w{index}', row 0: missing"):
            rows.values(specs[index], 0)


def test_values_of_another_size_and_tensors_without_metadata(writer, tmp_path):
    entries = parse(filled(writer, tmp_path)[0])[0]
    for specs, words in (
        ({0: spec(0), 1: spec(1, 4)}, "row 0: sizes of values and tensors differ; damaged"),
        ({0: spec(0), 1: spec(1, 2)}, "row 0: sizes of values and tensors differ; damaged"),
        ({0: spec(0)}, "the metadata of tensor number 1 is missing; damaged"),
    ):
        rows, told = rows_of(entries[:1], 0)
        rows.set_specs(specs, lambda error, told=told: told.append(str(error)))
        assert told == [f"here: {words}"]
        if len(specs) == 1:
            # What comes before the unknown one is where it is.
            assert rows.values(specs[0], 0).tolist() == [0, 0, 0]
            rows, told = rows_of(entries[:1], 0)
            rows.set_specs({0: spec(0, 100)}, lambda error, told=told: told.append(str(error)))
            with pytest.raises(TraceError, match="missing"):
                rows.values(spec(0, 100), 0)
        else:
            with pytest.raises(TraceError, match="missing"):
                rows.values(specs[0], 0)


def test_descriptors_and_locks(tmp_path):
    place = tmp_path / "journal"
    before = len(os.listdir("/proc/self/fd"))
    writer = JournalWriter(str(tmp_path), NAMES, 0)
    assert is_held(place)
    for first in range(3):
        writer.restart(first)
        assert is_held(place)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    writer.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert place.exists()
    assert not is_held(place)
    descriptor = hold(place)
    assert is_held(place)
    os.close(descriptor)
    assert not is_held(place)
    writer = JournalWriter(str(tmp_path), NAMES, 0)
    writer.remove()
    assert len(os.listdir("/proc/self/fd")) == before
    assert not place.exists()
    assert hold(place) is None
    assert not is_held(place)
    writer.close()


def test_sizes_that_claim_everything(writer, tmp_path):
    data, ends = filled(writer, tmp_path)
    for table, length in ((2**63, 2**63), (2**64 - 1, 1), (0, 2**64 - 1)):
        head = struct.pack("<4sIQQ", b"gtj1", 0, table, length)
        assert len(parse(data[: ends[2]] + head + data[ends[2] + _ENTRY.size :])[0]) == 2
