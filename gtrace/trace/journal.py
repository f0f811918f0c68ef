"""The journal of a Zarr stream: one file of rows that are committed but not in chunk files yet.

A chunk file holds many rows and can only be replaced as a whole, so writing it at every step would cost as much as
writing it full. Instead, a commit appends one entry here; from time to time the rows go into chunk files, and the
journal starts again. Long rows have their own chunks and are not in it.

The file is a line of JSON (``HEADER``), then entries: ``_ENTRY``, a table of numbers about the step and its tensors
with a checksum, and the values of the short rows that are present, in the order of their tensors' index. The table
holds the checksums of the values.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gtrace.errors import OutputExistsError, TraceError, printable
from gtrace.trace import format as layout
from gtrace.trace.files import lock_file, write_beside
from gtrace.trace.format import Rows
from gtrace.trace.rows import checksum_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from gtrace.trace.format import TensorSpec, Tolerate

#: In the folder of ``step``, so that tools do not list it with the arrays of a group.
NAME = "journal"

#: rows and bytes after which a writer empties the journal into chunk files
MOST_ROWS = 64
_FULL_BYTES = 64 * 1024 * 1024
#: limit of a reader: a full journal and one more row (of chunks that are at most 256 MiB in all)
MAX_BYTES = 512 * 1024 * 1024

_VERSION = 1
_HEADER_BYTES = 1024
#: Magic, CRC-32C of the table, bytes of the table, bytes of the values.
_ENTRY = struct.Struct("<4sIQQ")
_MAGIC = b"gtj1"
#: Row, step, tensors known.
_FIXED = struct.Struct("<qqQ")
#: number of buffers in one system call
_BUFFERS = 1024


def together(row: int, count: int, *, last: bool = False) -> int:
    """How many of ``count`` rows, the first of which is ``row``, a writer commits at once.

    Rows up to a multiple of 64 go into chunk files directly, if they do not cross the end of a chunk of ``step``; of
    others, each goes into the journal. If they are the ``last`` ones, all go into chunk files, which is done at the
    end anyway.

    >>> together(3, 200), together(1000, 200), together(192, 60), together(192, 60, last=True)
    (189, 24, 1, 60)
    """
    end = min(row + count, (row // layout.STEP_ROWS + 1) * layout.STEP_ROWS)
    return end - row if last else max(end // MOST_ROWS * MOST_ROWS - row, 1)


def in_journal(spec: TensorSpec) -> bool:
    """Whether rows of this tensor go through the journal: those with several rows in a chunk."""
    return spec.chunk_rows > 1 and spec.size > 0


def _header(statistics: Sequence[str], first: int) -> bytes:
    names = {"scalars": list(layout.SCALARS), "statistics": list(statistics)}
    return json.dumps({"gtrace_journal": _VERSION, "first": first, **names}).encode() + b"\n"


class JournalWriter:
    """The journal of one stream that is being written, in the folder of the array ``step``.

    The process holds a shared lock on the file while it lives, so that a repair can see whether a writer is alive
    or was killed.
    """

    def __init__(self, folder: str, statistics: Sequence[str]) -> None:
        self._path = os.path.join(folder, NAME)
        self._columns = {name: layout.statistic_column(name) for name in statistics}
        self._descriptor = -1
        self.restart(0)

    @property
    def full(self) -> bool:
        """Whether it is time to empty it."""
        return self._size > _FULL_BYTES

    def restart(self, first: int) -> None:
        """Start again: rows before ``first`` are in chunk files."""
        header = _header(list(self._columns), first)
        # A new file instead of truncating the old one: a reader of the old one finds it complete.
        write_beside(self._path, header)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
        lock_file(descriptor, fcntl.LOCK_SH)
        self.close()
        self._descriptor, self._inode = descriptor, os.fstat(descriptor).st_ino
        self._next = first
        self._size = len(header)
        self._torn = False

    def check_place(self) -> None:
        """FileNotFoundError if the trace was moved or replaced: rows would go to a deleted file, or another trace."""
        if os.stat(self._path).st_ino != self._inode:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._path)

    def append(self, row: int, record: Rows, values: Sequence[NDArray[np.float32]]) -> None:
        """Commit a row. It counts once the whole entry is in the file.

        Args:
            row: number of the row; if it does not follow the last one, rows before it are in chunk files.
            record: its numbers, those of one row.
            values: little-endian values of the tensors that are present and ``in_journal``, by index.

        Raises:
            FileNotFoundError: the trace was deleted, moved or replaced.
        """
        self.check_place()
        if row != self._next:
            self.restart(row)
        self.trim()
        scalars = np.concatenate([record.scalars[name] for name in layout.SCALARS], dtype=layout.SCALAR.dtype)
        tables = [np.ascontiguousarray(record.statistics[name], c.dtype) for name, c in self._columns.items()]
        table = _FIXED.pack(row, record.steps[0], tables[0].size)
        table += b"".join(one.tobytes() for one in (scalars, *tables))
        length = sum(array.nbytes for array in values)
        entry = _ENTRY.pack(_MAGIC, checksum_bytes(table), len(table), length) + table
        self._torn = True
        self._write([memoryview(entry), *(array.view(np.uint8).data for array in values)])
        self._torn = False
        self._size += len(entry) + length
        self._next += 1

    def trim(self) -> None:
        """Cut off what an append that failed has left."""
        if self._torn:
            os.ftruncate(self._descriptor, self._size)
            self._torn = False

    def _write(self, parts: list[memoryview]) -> None:
        place = self._size
        while parts:
            written = os.pwritev(self._descriptor, parts[:_BUFFERS], place)
            if written == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path)
            place += written
            while parts and written >= len(parts[0]):
                written -= len(parts.pop(0))
            if parts and written:
                parts[0] = parts[0][written:]

    def close(self) -> None:
        """Close the file, which releases the lock; its content stays."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def remove(self) -> None:
        """Delete the file: all rows are in chunk files."""
        os.unlink(self._path)
        self.close()


def hold(path: str | os.PathLike[str]) -> int | None:
    """A descriptor with a shared lock on a file or folder that this process writes; None if it cannot be opened."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    lock_file(descriptor, fcntl.LOCK_SH)
    return descriptor


def is_held(path: str | os.PathLike[str]) -> bool:
    """Whether a living process is writing the file or folder."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return False
    try:
        return not lock_file(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


def being_written(place: Path | str) -> bool:
    """Whether a living process of this machine is writing the trace."""
    if isinstance(place, str):
        return False
    return is_held(place) or any(is_held(path) for path in place.glob(f"rank*/*/step/{NAME}"))


def refuse_living(place: Path) -> None:
    """OutputExistsError, instead of replacing it, if a living process of this machine is writing the trace."""
    if being_written(place):
        raise OutputExistsError(
            f"{place}: a running program is writing it, so it is kept; end that program or choose another place"
        )


class JournalEntry(NamedTuple):
    """One row of a journal: its number, and those of its commit.

    ``values`` are the little-endian float32 values of its short rows, concatenated, and not verified yet.
    """

    row: int
    record: Rows
    values: memoryview


def parse_journal(data: bytes, kind: str, where: str, tolerate: Tolerate) -> list[JournalEntry]:
    """The complete entries of a journal; an unfinished one at the end, left by a killed writer, is skipped.

    ``tolerate`` is called with damage, which ends the list; it may raise.
    """
    if not data:
        return []
    end = data.find(b"\n", 0, _HEADER_BYTES) + 1
    try:
        header = json.loads(data[:end])
        first, names = header["first"], header["statistics"]
        usual = list(layout.statistics_of(kind))
        known = names[: len(usual)] == usual and set(names[len(usual) :]) <= set(layout.EXTRAS)
        if type(first) is not int or not known or data[:end] != _header(names, first):
            raise ValueError("another header")
    except (ValueError, KeyError, TypeError, RecursionError):
        tolerate(TraceError(f"{where}: not a journal of version {_VERSION}; damaged, foreign or from a newer gtrace"))
        return []
    columns = {name: layout.statistic_column(name) for name in names}
    entries: list[JournalEntry] = []
    view, place = memoryview(data), end
    while len(data) - place >= _ENTRY.size:
        magic, crc, table_bytes, value_bytes = _ENTRY.unpack_from(data, place)
        start = place + _ENTRY.size
        row = first + len(entries)
        if magic != _MAGIC:
            tolerate(TraceError(f"{where}: damaged from row {row} on"))
            break
        if table_bytes + value_bytes > len(data) - start:
            break
        table = view[start : start + table_bytes]
        record = _read_table(table, crc, row, columns)
        if record is None:
            tolerate(TraceError(f"{where}: checksum mismatch at row {row}; damaged from there on"))
            break
        place = start + table_bytes + value_bytes
        entries.append(JournalEntry(row, record, view[start + table_bytes : place]))
    return entries


def _read_table(table: memoryview, crc: int, row: int, columns: Mapping[str, layout.ColumnType]) -> Rows | None:
    """The record in the table of an entry, None if it is damaged."""
    head = _FIXED.size + 8 * len(layout.SCALARS)
    if len(table) < head or checksum_bytes(np.frombuffer(table, np.uint8)) != crc:
        return None
    found, step, tensors = _FIXED.unpack_from(table)
    if found != row or step < 0 or len(table) != head + tensors * sum(c.dtype.itemsize for c in columns.values()):
        return None
    scalars = np.frombuffer(table, layout.SCALAR.dtype, len(layout.SCALARS), _FIXED.size)
    statistics, place = {}, head
    for name, column in columns.items():
        statistics[name] = np.frombuffer(table, column.dtype, tensors, place)[None]
        place += tensors * column.dtype.itemsize
    return Rows(np.array([step]), dict(zip(layout.SCALARS, scalars[:, None], strict=True)), statistics)


class JournalRows:
    """The rows of a journal that chunk files do not have, by row number; those have the first ``base`` rows.

    ``tolerate`` is called if rows between the two are missing; it may raise.
    """

    def __init__(self, entries: Sequence[JournalEntry], base: int, where: str, tolerate: Tolerate) -> None:
        self.base = base
        self._where = where
        self.entries = [entry for entry in entries if entry.row >= base]
        if self.entries and self.entries[0].row != base:
            first, self.entries = self.entries[0].row, []
            tolerate(TraceError(f"{where}: begins at row {first}, but chunks end at row {base}; the trace is damaged"))
        self._places: list[dict[int, tuple[int, int]]] = []

    def cut(self, rows: int) -> None:
        """Drop this row and later ones."""
        self.entries = self.entries[: max(rows - self.base, 0)]

    def set_specs(self, specs: Mapping[int, TensorSpec], tolerate: Tolerate) -> None:
        """Find each tensor's values, once the tensors by index are known.

        ``tolerate`` is called with an unknown tensor, or sizes that do not fit; it may raise.
        """
        for entry in self.entries:
            places, end, size = {}, 0, len(entry.values)
            for index in np.flatnonzero(entry.record.statistics["present"]).tolist():
                spec = specs.get(index)
                if spec is None:
                    tolerate(TraceError(f"{self._where}: the metadata of tensor number {index} is missing; damaged"))
                    end = -1
                    break
                if in_journal(spec):
                    places[index] = (end, end + spec.size * layout.VALUES.itemsize)
                    end = places[index][1]
            if end not in (size, -1):
                places = {}
                tolerate(TraceError(f"{self._where}: row {entry.row}: sizes of values and tensors differ; damaged"))
            self._places.append({index: place for index, place in places.items() if place[1] <= size})

    def values(self, spec: TensorSpec, row: int) -> NDArray[np.float32]:
        """Values of a tensor that is ``in_journal`` and present in this row."""
        place = self._places[row - self.base].get(spec.index)
        if place is None:
            raise TraceError(
                f"{self._where}: tensor '{printable(spec.name)}', row {row}: missing; the trace is damaged"
            )
        start, stop = place
        return np.frombuffer(self.entries[row - self.base].values[start:stop], layout.VALUES)
