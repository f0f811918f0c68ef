"""Traces as HDF5: reading one, whoever wrote it, and writing one as a whole.

Only plain data sets of the file are read, of sizes that its bytes can bear.
"""

from __future__ import annotations

import json
import math
import os
import re
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

import h5py
import numpy as np

from gtrace.errors import TraceError, printable
from gtrace.trace import format as layout
from gtrace.trace.files import beside, check_room, move_in, remove, write_error
from gtrace.trace.finished import WholeArray, arrays_of
from gtrace.trace.format import DIMENSION_SUFFIX, StreamKey
from gtrace.trace.journal import hold
from gtrace.trace.sketches import stored_bytes
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
from gtrace.trace.zarr_read import ZarrSource
from gtrace.trace.zarr_write import ZarrSink, start_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from gtrace.trace.format import ColumnType, StreamSource, TensorSpec, TraceSource


#: The filters that are read, all of them part of the library, and the most that each can inflate.
_FILTERS = {h5py.h5z.FILTER_DEFLATE: 1032, h5py.h5z.FILTER_SHUFFLE: 1, h5py.h5z.FILTER_FLETCHER32: 1}

#: What HDF5 1.10 and everything after it reads.
_LIBVER = ("v110", "v110")
#: netCDF's sign for a dimension without coordinates.
_NO_COORDINATES = "This is a netCDF dimension but not a netCDF variable. %10d"
#: What HDF5 writes beside the values of all arrays, and of each tensor.
_SPARE_BYTES = 2 * 1024 * 1024
_ARRAY_BYTES = 16 * 1024
#: Names under which plain copies are stored too; HDF5's and netCDF's own are in capitals or begin with _.
_COPIED = re.compile(r"[a-z][a-z0-9_]*")


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
        return attrs

    def _open_file(self) -> h5py.File:
        try:
            if self._stream is not None:
                return h5py.File(self._stream, "r")
            return h5py.File(self.path, "r", locking=False)
        except (OSError, RuntimeError) as error:
            reason = printable(str(error))
            raise TraceError(f"{self.path}: no HDF5 file, truncated or damaged ({reason})") from None

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
        if self._stream is not None:
            self._stream.close()


def _set_json(node: h5py.Group | h5py.Dataset, name: str, value: Mapping[str, Any]) -> None:
    """Store JSON as text of fixed length, which lies in the object's header, is checksummed and replaced as a whole.

    Text of variable length lies in a heap without a checksum; damaged, the library may search it for ever.
    """
    text = json.dumps(value, allow_nan=False).encode()
    node.attrs.create(name, text, dtype=h5py.string_dtype("utf-8", len(text)))


def _set_attrs(node: h5py.Group | h5py.Dataset, attrs: Mapping[str, Any]) -> None:
    """Store attributes as JSON, and copies of plain ones for whoever looks with another tool."""
    _set_json(node, layout.METADATA, attrs)
    for key, value in attrs.items():
        short = type(value) is int and -(2**63) <= value < 2**63
        plain = short or type(value) is float or (type(value) is str and "\0" not in value)
        if plain and _COPIED.fullmatch(key) and key != layout.METADATA:
            node.attrs[key] = value


def write_hdf5(source: TraceSource, path: Path) -> None:
    """Write a finished trace into a new file.

    Raises:
        OSError: there is no room for it, or it cannot be written.
        TraceError: the trace is damaged.
    """
    # A write that fails damages an HDF5 file, and its library may take the process with it.
    check_room(path.parent, _SPARE_BYTES + sum(map(_stored_bytes, source.streams)))
    with h5py.File(path, "x", libver=_LIBVER, locking=False) as file:
        _set_attrs(file, source.attrs)
        for stream in source.streams:
            if stream.steps.size:
                rank = file.require_group(stream.key.rank_group)
                rank.attrs["rank"] = stream.key.rank
                _write_stream(rank.create_group(stream.key.group), stream)


def _stored_bytes(stream: StreamSource) -> int:
    """Bytes that a stream takes at most, but for what HDF5 needs for each array."""
    rows = stream.steps.size
    present = stream.statistic("present")
    values = sum(
        int(np.count_nonzero(present[:, spec.index]))
        * min(spec.size, 2 * spec.chunk_elements if spec.sketched else spec.size)
        * spec.column.dtype.itemsize
        for spec in stream.tensors
    )
    tables = len(layout.STATISTICS | layout.LENGTHS | layout.EXTRAS) * len(stream.tensors) + len(layout.SCALARS) + 1
    return values + tables * 8 * rows + _ARRAY_BYTES * len(stream.tensors)


def _write_stream(group: h5py.Group, stream: StreamSource) -> None:
    _set_attrs(group, stream.key._asdict())
    scales = {"tensor": _make_scale(group, "tensor", len(stream.tensors))}
    # The scales that the others refer to come first: ``step``, and of each tensor its elements.
    for array in sorted(arrays_of(stream), key=lambda array: array.entry != "step"):
        dataset = _write_array(group, array)
        if array.entry == "step":
            dataset.make_scale("step")
            scales["step"] = dataset
            continue
        for axis, dimension in enumerate(array.dimensions):
            if dimension not in scales:
                scales[dimension] = _make_scale(group, dimension, array.shape[axis])
            dataset.dims[axis].attach_scale(scales[dimension])


def _make_scale(group: h5py.Group, name: str, length: int) -> h5py.Dataset:
    """A dimension without coordinates, as netCDF has it."""
    scale = group.create_dataset(name, shape=(length,), dtype="u1", track_times=False)
    scale.make_scale(_NO_COORDINATES % length)
    return scale


def _write_array(group: h5py.Group, array: WholeArray) -> h5py.Dataset:
    dataset = group.create_dataset(
        array.entry,
        shape=array.shape,
        # HDF5 has no chunks that are longer than an array that cannot grow.
        maxshape=(None,) * len(array.shape),
        chunks=array.chunks,
        dtype=array.column.dtype,
        fillvalue=array.column.fill,
    )
    if array.attributes:
        _set_attrs(dataset, array.attributes)
    for number, block in enumerate(array.blocks):
        start = number * array.chunks[0]
        if len(array.shape) == 1:
            # Readers ask for the bytes of tables, also of those that say nothing.
            dataset[start : start + array.chunks[0]] = array.column.fill if block is None else block
        elif block is not None and block.size:
            if block.shape == array.chunks:
                # Without a detour through the library's cache.
                dataset.id.write_direct_chunk((start, 0), np.ascontiguousarray(block).data)
            else:
                dataset[start : start + len(block), : block.shape[1]] = block
    return dataset


class Hdf5Sink(ZarrSink):
    """A trace that becomes an HDF5 file when it is closed; until then it is a Zarr trace in a folder of this name.

    HDF5 files that are written step by step are not safe against the death of their writer. Zarr with its journal is:
    what a killed writer leaves is read as any other trace, and ``gtrace check --repair`` makes the file of it.
    """

    def __init__(self, path: Path, attrs: Mapping[str, Any], *, force: bool) -> None:
        start_folder(path, attrs, force=force)
        # It is read once more, soon: compression would cost more than it saves.
        super().__init__(path, plain=True)
        self._path = path
        self._held = hold(path)

    def close(self, attrs: Mapping[str, Any]) -> None:
        """Finish the folder, and put a file with the same content in its place.

        Raises:
            TraceError: there is no room for the file; the folder stays, with everything that was committed.
        """
        new = beside(self._path, "partial")
        try:
            super().close(attrs)
            write_hdf5(ZarrSource(self._path), new)
            move_in(new, self._path, force=True)
        except (OSError, RuntimeError) as error:
            told = write_error(self._path, error)
            raise TraceError(
                f"{told}; what was committed is there as a folder, which `gtrace check --repair` makes a file"
            ) from error
        finally:
            remove(new)
            if self._held is not None:
                os.close(self._held)
