"""Reading an HDF5 trace, whoever wrote it: only plain data sets of this file, of sizes that its bytes can bear."""

from __future__ import annotations

import math
import os
import time
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

import h5py
import numpy as np

from gtrace.errors import TraceError, printable
from gtrace.trace import format as layout
from gtrace.trace.format import DIMENSION_SUFFIX, StreamKey
from gtrace.trace.sketches import stored_bytes
from gtrace.trace.superblock import SUPERBLOCK_BYTES, MarkedFile, is_marked, read_superblock
from gtrace.trace.validate import (
    check_indices,
    check_root,
    committed_steps,
    known_columns,
    parse_json,
    present_tensors,
    refuse,
    tensor_spec,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from gtrace.trace.format import ColumnType, TensorSpec


#: The filters that are read, all of them part of the library, and the most that each can inflate.
_FILTERS = {h5py.h5z.FILTER_DEFLATE: 1032, h5py.h5z.FILTER_SHUFFLE: 1, h5py.h5z.FILTER_FLETCHER32: 1}

_LONGEST_STATUS = 64

_ATTEMPTS, _PAUSE = 3, 0.01


@contextmanager
def _reported(where: str) -> Iterator[None]:
    """What HDF5 raises on damaged files, as one error that says where."""
    try:
        yield
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
        raise TraceError(f"{where}: cannot be read ({printable(str(error))}); the trace is damaged") from None


def _children(group: h5py.Group, where: str) -> list[str]:
    """Names in a group.

    Raises:
        TraceError: one is a soft, external or user-defined link, which may lead anywhere.
    """
    names = []
    for name in group:
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            raise TraceError(f"{where}/{printable(name)}: a soft or external link; a trace has none")
        names.append(str(name))
    return names


def _read_json(node: h5py.Group | h5py.Dataset, name: str, where: str) -> dict[str, Any]:
    """A JSON object from an attribute of fixed length; empty where there is no such attribute."""
    if name not in node.attrs:
        return {}
    about = f"{where}: attribute '{name}'"
    found = node.attrs.get_id(name)
    # Text of variable length is not read: in a damaged file the library may search its heap for ever.
    text = h5py.check_string_dtype(found.dtype)
    if found.shape != () or text is None or text.length is None:
        raise TraceError(f"{about} is no text of fixed length; damaged or foreign")
    if text.length > layout.MAX_METADATA_BYTES:
        raise TraceError(f"{about} is too long; damaged or foreign")
    value = parse_json(bytes(node.attrs[name]), about)
    if not isinstance(value, dict):
        raise TraceError(f"{about} is no JSON object; damaged or foreign")
    return value


class _Dataset:
    """A data set, checked, whose first axis is the step."""

    def __init__(
        self, node: object, where: str, column: ColumnType, ndim: int, *, most_bytes: int, file_bytes: int
    ) -> None:
        self.where = where
        self._file_bytes = file_bytes
        if not isinstance(node, h5py.Dataset):
            self._reject("a group where a data set belongs")
        if node.dtype != column.dtype or len(node.shape) != ndim:
            self._reject(f"not a {ndim}-dimensional data set of {column.dtype.name}")
        if node.is_virtual or node.external:
            self._reject("its data lie in other files, which are not read")
        self._inflation = 1
        properties = node.id.get_create_plist()
        for number in range(properties.get_nfilters()):
            code = properties.get_filter(number)[0]
            if code not in _FILTERS:
                self._reject(f"filter {code} is not on the list of those that are read")
            self._inflation *= _FILTERS[code]
        chunk = math.prod(node.chunks or (1,)) * column.dtype.itemsize
        if chunk > most_bytes:
            self._reject(f"chunks of {chunk} bytes; at most {most_bytes} are read")
        self.node = node
        self.shape: tuple[int, ...] = node.shape

    def _reject(self, why: str) -> NoReturn:
        raise TraceError(f"{self.where}: {why}; damaged or foreign")

    def read(self, start: int, stop: int, about: str, columns: int | None = None) -> NDArray[Any]:
        """Rows ``start`` to ``stop``, all of them or their first ``columns``.

        Raises:
            TraceError: they do not fit into what the file holds of this data set, or cannot be read.
        """
        shape = (stop - start, *self.shape[1:]) if columns is None else (stop - start, columns)
        # A few hundred bytes of metadata can claim any shape: memory is asked for only where bytes stand
        # behind it. Columns of tensors that appeared late have no bytes for the rows before.
        stored = shape if columns is None or self.node.chunks is None else (shape[0], min(columns, self.node.chunks[1]))
        needed = math.prod(stored) * self.node.dtype.itemsize
        with _reported(f"{self.where}: {about}"):
            stored_bytes = min(self.node.id.get_storage_size(), self._file_bytes)
            if stop > self.shape[0] or needed > stored_bytes * self._inflation:
                raise TraceError(f"{self.where}: {about}: the rows are missing or truncated; the trace is damaged")
            out = np.empty(shape, self.node.dtype)
            if out.size:
                self.node.read_direct(out, (slice(start, stop), *(slice(0, n) for n in shape[1:])))
            return out

    def piece(self, row: int, start: int, count: int, about: str) -> NDArray[Any]:
        """At most ``count`` elements of one row from ``start``; errors as of :meth:`read`."""
        stop = min(start + count, self.shape[1])
        with _reported(f"{self.where}: {about}"):
            stored = min(self.node.id.get_storage_size(), self._file_bytes) * self._inflation
            if row >= self.shape[0] or start >= stop or stop * self.node.dtype.itemsize > stored:
                raise TraceError(f"{self.where}: {about}: the row is missing or truncated; the trace is damaged")
            out = np.empty(stop - start, self.node.dtype)
            self.node.read_direct(out, (row, slice(start, stop)))
            return out


class Hdf5Stream:
    """One stream's group, clipped to the rows that were committed when it was opened.

    Args:
        group: where it is.
        where: its path, for messages.
        key: which stream it is.
        file_bytes: size of the file.
        tolerate: is told of damage to single tensors and tables; by default it raises.
    """

    def __init__(
        self,
        group: h5py.Group,
        where: str,
        key: StreamKey,
        file_bytes: int,
        tolerate: Callable[[TraceError], None] = refuse,
    ) -> None:
        self.key = key
        self._file_bytes = file_bytes
        self._group = group
        self._where = where
        self._tensors: dict[int, _Dataset] = {}
        self._statistics: dict[str, NDArray[Any]] = {}
        found: list[TensorSpec] = []
        self.specs = found
        names = _children(group, where)
        # Steps first: while the trace is being written, all that they refer to is there when it is looked at later.
        self.steps = np.empty(0, np.int64)
        if "step" in names:
            steps = self._table("step", 1, layout.STEP)
            self.steps = committed_steps(steps.where, steps.read(0, steps.shape[0], "steps"), steps.shape[0], tolerate)
        for entry in names:
            try:
                self._find(entry, found)
            except TraceError as error:
                tolerate(error)
        check_indices(where, found, tolerate)
        # One column more than there are tensors, so that a lost one is noticed, whatever the shape claims.
        self._columns = max((spec.index + 1 for spec in found), default=0) + 1
        self.tensors = present_tensors(where, found, known_columns(self, tolerate), tolerate)

    def _find(self, entry: str, found: list[TensorSpec]) -> None:
        place = f"{self._where}/{printable(entry)}"
        with _reported(place):
            node = self._group[entry]
            if entry.endswith(DIMENSION_SUFFIX) or layout.METADATA not in node.attrs:
                return
            attrs = _read_json(node, layout.METADATA, place)
            column = layout.column_of(attrs)
            dataset = _Dataset(node, place, column, 2, most_bytes=layout.MAX_CHUNK_BYTES, file_bytes=self._file_bytes)
            chunks = node.chunks or (1, dataset.shape[1])
            spec = tensor_spec(place, entry, attrs, dataset.shape[1], chunks)
            found.append(spec)
            self._tensors[spec.index] = dataset

    def _table(self, name: str, ndim: int, column: ColumnType) -> _Dataset:
        where = f"{self._where}/{name}"
        with _reported(where):
            if name not in self._group:
                raise TraceError(f"{where}: missing; the trace is damaged")
            return _Dataset(
                self._group[name],
                where,
                column,
                ndim,
                most_bytes=layout.MAX_TABLE_CHUNK_BYTES,
                file_bytes=self._file_bytes,
            )

    @cached_property
    def scalars(self) -> dict[str, NDArray[np.float64]]:
        """name -> one float64 per committed row, NaN where nothing was said."""
        return {name: self.scalar(name) for name in layout.SCALARS}

    def scalar(self, name: str) -> NDArray[np.float64]:
        """One of the numbers about the steps."""
        rows = self.steps.size
        return self._table(name, 1, layout.SCALAR).read(0, rows, "scalars") if rows else np.empty(0)

    def statistic(self, name: str) -> NDArray[Any]:
        """(committed rows, tensors) of one of the statistics."""
        if name not in self._statistics:
            column = layout.statistic_column(name)
            rows = self.steps.size
            if rows == 0:
                self._statistics[name] = np.empty((0, 0), column.dtype)
            else:
                table = self._table(name, 2, column)
                columns = min(table.shape[1], self._columns)
                self._statistics[name] = table.read(0, rows, "statistics", columns)
        return self._statistics[name]

    def lengths(self, name: str) -> NDArray[Any] | None:
        """(committed rows, tensors) of one of the lengths, None where there is no such data set."""
        return self.statistic(name) if self.key.kind == "neural" and name in self._group else None

    def further(self, name: str) -> NDArray[Any] | None:
        """(committed rows, tensors) of one of the further numbers, None where there is no such data set."""
        return self.statistic(name) if name in self._group else None

    def read_rows(self, spec: TensorSpec, row: int) -> tuple[int, NDArray[Any]]:
        """The rows of the chunk that holds ``row``; of a tensor in several chunks, or of sketches, that row alone."""
        about = f"tensor '{printable(spec.name)}', step {self.steps[row]}"
        if spec.sketched:
            tensor, length = self._tensors[spec.index], spec.chunk_elements
            return row, stored_bytes(lambda part: tensor.piece(row, part * length, length, about), spec, about)[None]
        first, stop = row, row + 1
        if spec.parts == 1 and spec.chunk_rows > 1:
            first = row - row % spec.chunk_rows
            stop = min(first + spec.chunk_rows, self.steps.size)
        return first, self._tensors[spec.index].read(first, stop, about)

    def read_pieces(self, spec: TensorSpec, row: int) -> Iterator[NDArray[np.float32]]:
        """One row, chunk by chunk."""
        about = f"tensor '{printable(spec.name)}', step {self.steps[row]}"
        for start in range(0, spec.size, spec.chunk_elements):
            yield self._tensors[spec.index].piece(row, start, spec.chunk_elements, about)


class Hdf5Source:
    """An HDF5 trace. The library serializes its calls itself, so several threads may read.

    Args:
        path: of the file, or its address.
        tolerate: is told of damage to parts of it; by default it raises.
        stream: what is read of a file that is not on this machine.
    """

    def __init__(
        self, path: Path | str, tolerate: Callable[[TraceError], None] = refuse, stream: BinaryIO | None = None
    ) -> None:
        self.path = str(path)
        self._stream = stream
        self._tolerate = tolerate
        self._marked: MarkedFile | None = None
        # A file that is being written may change under a read: it is read again before it is called damaged.
        for _ in range(_ATTEMPTS - 1 if stream is None else 0):
            try:
                self._load()
                break
            except TraceError:
                time.sleep(_PAUSE)
        else:
            self._load()

    def _load(self) -> None:
        self._file = self._open_file()
        try:
            with _reported(self.path):
                self.attrs = self._read_root()
                self.streams = tuple(sorted(self._find_streams(), key=lambda stream: stream.key.order))
        except TraceError:
            self.close()
            raise

    def _read_root(self) -> dict[str, Any]:
        attrs = _read_json(self._file, layout.METADATA, self.path)
        check_root(self.path, attrs)
        status = self._file.attrs.get_id(layout.STATUS)
        if status.shape != () or status.dtype.kind != "S" or status.dtype.itemsize > _LONGEST_STATUS:
            raise TraceError(f"{self.path}: attribute '{layout.STATUS}' is no short text; damaged or foreign")
        attrs[layout.STATUS] = bytes(self._file.attrs[layout.STATUS]).decode("utf-8", "replace")
        return attrs | _read_json(self._file, layout.CLOSING, self.path)

    def _open_file(self) -> h5py.File:
        try:
            if self._stream is not None:
                return self._open_stream(self._stream)
            if is_marked(read_superblock(self.path)):
                # It is being written, or its writer was killed.
                self._marked = MarkedFile(self.path)
                return h5py.File(self._marked, "r")
            # A lock would keep the trace's writer out, when it is about to open the file.
            return h5py.File(self.path, "r", locking=False)
        except (OSError, RuntimeError) as error:
            self._close_marked()
            reason = printable(str(error))
            raise TraceError(f"{self.path}: no HDF5 file, truncated or damaged ({reason})") from None

    def _open_stream(self, stream: BinaryIO) -> h5py.File:
        stream.seek(0)
        if is_marked(stream.read(SUPERBLOCK_BYTES)):
            raise TraceError(
                f"{self.path}: is open for writing, or its writer was killed; copy it to this machine to read it"
            )
        return h5py.File(stream, "r")

    def _bytes(self) -> int:
        return os.path.getsize(self.path) if self._stream is None else self._stream.seek(0, os.SEEK_END)

    def _find_streams(self) -> list[Hdf5Stream]:
        streams = []
        file_bytes = self._bytes()
        for rank in _children(self._file, self.path):
            if not rank.startswith("rank") or not isinstance(self._file[rank], h5py.Group):
                continue
            for group in _children(self._file[rank], f"{self.path}/{rank}"):
                key = StreamKey.parse(rank, group)
                node = self._file[rank][group]
                if key is not None and isinstance(node, h5py.Group):
                    where = f"{self.path}/{rank}/{group}"
                    try:
                        streams.append(Hdf5Stream(node, where, key, file_bytes, self._tolerate))
                    except TraceError as error:
                        self._tolerate(error)
        return streams

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        self._close_marked()
        if self._stream is not None:
            self._stream.close()

    def _close_marked(self) -> None:
        if self._marked is not None:
            self._marked.close()
