"""Writing a trace as HDF5.

Rows are written in SWMR mode: the library orders its writes so that a file cut off at any moment opens with
all that was flushed. New data sets cannot be made safely in that mode, nor in any other mode while the file
is in its place: a tensor that appears is added to a copy beside it, which takes the file's place at the
next commit.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
from h5py import h5f, h5p, h5s

from gtrace.trace import format as layout
from gtrace.trace.files import beside, check_place, check_room, clear_leftovers, move_in
from gtrace.trace.format import DIMENSION_SUFFIX
from gtrace.trace.journal import hold
from gtrace.trace.superblock import unmark
from gtrace.trace.zarr_read import is_gtrace_zarr

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from gtrace.trace.format import ColumnType, Record, StreamKey, TensorSpec

#: What HDF5 1.10 and everything after it reads.
_LIBVER = ("v110", "v110")

#: netCDF's sign for a dimension without coordinates.
_NO_COORDINATES = "This is a netCDF dimension but not a netCDF variable. %10d"

#: The status changes while readers may look: text of a fixed length stays in its place.
_STATUS = h5py.string_dtype("utf-8", 16)

#: Room that must be left on the disk for what HDF5 writes beside the values (tables, indices, the last attributes),
#: and for each tensor's columns. HDF5 does not survive a write that fails: the file is damaged, and its library may
#: take the process with it.
_SPARE_BYTES = 2 * 1024 * 1024
_TENSOR_BYTES = 16 * 1024

#: Names under which plain copies are stored too; HDF5's and netCDF's own are in capitals or begin with _.
_COPIED = re.compile(r"[a-z][a-z0-9_]*")


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
        if plain and _COPIED.fullmatch(key) and key not in (layout.METADATA, layout.CLOSING, layout.STATUS):
            node.attrs[key] = value


def _open_for_rows(path: str) -> h5py.File:
    """Open in SWMR mode at once: switching it on later leaves a moment at which nobody could open the file."""
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_libver_bounds(h5f.LIBVER_V110, h5f.LIBVER_V110)
    # Whoever reads the file at this moment must not keep the writer out; writers do not share a file.
    access.set_file_locking(False, True)
    # No chunk cache: a row goes to the file at once and takes no memory.
    access.set_cache(0, 1, 0, 0.0)
    return h5py.File(h5f.open(os.fsencode(path), h5f.ACC_RDWR | h5f.ACC_SWMR_WRITE, access))


def _put_row(dataset: h5py.Dataset, row: int, values: NDArray[Any]) -> None:
    """Write one row, lengthening the data set when it is too short; h5py's ``dataset[row] =`` is much slower."""
    shape = list(dataset.id.shape)
    width = values.size if len(shape) == 2 else 1
    if row >= shape[0] or (len(shape) == 2 and width > shape[1]):
        shape[0] = max(shape[0], row + 1)
        if len(shape) == 2:
            shape[1] = max(shape[1], width)
        dataset.id.set_extent(tuple(shape))
    if values.size == 0:
        return
    where = dataset.id.get_space()
    count = (1, width)[: len(shape)]
    where.select_hyperslab((row, 0)[: len(shape)], count)
    dataset.id.write(h5s.create_simple(count), where, values)


class _Stream:
    """Handles of one stream's data sets in the file that is open now."""

    def __init__(self, group: h5py.Group) -> None:
        self.group = group
        self._datasets: dict[str, h5py.Dataset] = {}

    def __getitem__(self, entry: str) -> h5py.Dataset:
        if entry not in self._datasets:
            self._datasets[entry] = self.group[entry]
        return self._datasets[entry]


def _make_stream(file: h5py.File, key: StreamKey) -> h5py.Group:
    rank = file.require_group(key.rank_group)
    rank.attrs["rank"] = key.rank
    group = rank.create_group(key.group)
    _set_attrs(group, key._asdict())
    step = _make_table(group, "step", layout.STEP, (layout.STEP_ROWS,))
    step.make_scale("step")
    tensor = group.create_dataset("tensor", shape=(0,), maxshape=(None,), chunks=(layout.STEP_ROWS,), dtype="u1")
    tensor.make_scale(_NO_COORDINATES % 0)
    for name in layout.SCALARS:
        _make_table(group, name, layout.SCALAR, (layout.STEP_ROWS,)).dims[0].attach_scale(step)
    for name, column in layout.statistics_of(key.kind).items():
        _make_statistic(group, name, column)
    return group


def _make_statistic(group: h5py.Group, name: str, column: ColumnType) -> None:
    table = _make_table(group, name, column, layout.table_chunking(64))
    table.dims[0].attach_scale(group["step"])
    table.dims[1].attach_scale(group["tensor"])


def _make_table(group: h5py.Group, name: str, column: ColumnType, chunks: tuple[int, ...]) -> h5py.Dataset:
    return group.create_dataset(
        name,
        shape=(0,) * len(chunks),
        maxshape=(None,) * len(chunks),
        chunks=chunks,
        dtype=column.dtype,
        fillvalue=column.fill,
    )


def _make_tensor(group: h5py.Group, spec: TensorSpec) -> None:
    dataset = group.create_dataset(
        spec.entry,
        shape=(0, spec.size),
        maxshape=(None, spec.size or None),
        chunks=(spec.chunk_rows, spec.chunk_elements),
        dtype=spec.column.dtype,
        fillvalue=spec.column.fill,
    )
    _set_attrs(dataset, spec.attrs)
    elements = group.create_dataset(spec.entry + DIMENSION_SUFFIX, shape=(spec.size,), dtype="u1", track_times=False)
    elements.make_scale(_NO_COORDINATES % spec.size)
    dataset.dims[0].attach_scale(group["step"])
    dataset.dims[1].attach_scale(elements)
    group["tensor"].resize((spec.index + 1,))


class Hdf5Sink:
    """A new HDF5 trace. It holds no rows in memory: they go to the file as they come."""

    def __init__(self, path: Path, attrs: Mapping[str, Any], *, force: bool) -> None:
        check_place(path, force=force, is_trace=is_gtrace_zarr)
        self._path = path
        self._beside = beside(path, "partial")
        self._file: h5py.File | None = None
        #: whether the open file is the copy beside its place
        self._staged = False
        self._streams: dict[StreamKey, _Stream] = {}
        self._specs: dict[StreamKey, list[TensorSpec]] = {}
        self._rows: dict[StreamKey, int] = {}
        self._attrs = dict(attrs)
        self._held: int | None = None
        clear_leftovers(path)
        try:
            with h5py.File(self._beside, "w", libver=_LIBVER, locking=False) as file:
                _set_attrs(file, {key: value for key, value in attrs.items() if key != layout.STATUS})
                file.attrs.create(layout.STATUS, attrs[layout.STATUS], dtype=_STATUS)
            move_in(self._beside, path, force=force)
        finally:
            self._beside.unlink(missing_ok=True)

    def _open(self) -> h5py.File:
        if self._file is None:
            self._file = _open_for_rows(str(self._path))
            self._hold()
        return self._file

    def _hold(self) -> None:
        """Hold the lock that says that this process writes the file; it ends with the process."""
        if self._held is not None:
            os.close(self._held)
        self._held = hold(self._path)

    def _stage(self) -> h5py.File:
        """The file in which data sets can be made: the copy beside, made when there is none."""
        if self._file is not None and self._staged:
            return self._file
        self._drop()
        check_room(self._path.parent, _SPARE_BYTES + self._path.stat().st_size)
        shutil.copyfile(self._path, self._beside)
        # Closing the file took the mark off, unless something else in this process has it open.
        unmark(self._beside)
        self._file = h5py.File(self._beside, "r+", libver=_LIBVER, rdcc_nbytes=0, locking=False)
        self._staged = True
        return self._file

    def _drop(self) -> None:
        """Close the open file, with what it holds."""
        if self._file is not None:
            self._file.flush()
            self._file.close()
        self._file = None
        self._staged = False
        self._streams = {}

    def _stream(self, key: StreamKey) -> _Stream:
        if key not in self._streams:
            group = self._open().get(f"{key.rank_group}/{key.group}")
            if group is None:
                group = _make_stream(self._stage(), key)
            self._streams[key] = _Stream(group)
        return self._streams[key]

    def add_tensor(self, stream: StreamKey, spec: TensorSpec) -> None:
        """Make the tensor's data set, in the copy beside."""
        self._stage()
        _make_tensor(self._stream(stream).group, spec)
        self._specs.setdefault(stream, []).append(spec)

    def write_row(self, stream: StreamKey, spec: TensorSpec, row: int, values: NDArray[Any]) -> None:
        """Write the row to the file; as long as ``step`` is shorter no reader looks at it."""
        chunk = spec.chunk_rows * spec.chunk_elements * spec.column.dtype.itemsize * spec.parts
        check_room(self._path.parent, _SPARE_BYTES + chunk)
        _put_row(self._stream(stream)[spec.entry], row, values)

    def discard(self, stream: StreamKey, row: int, specs: Sequence[TensorSpec]) -> None:
        """Cut the data sets to the rows before; what is there already is not changed."""
        for spec in specs:
            dataset = self._stream(stream)[spec.entry].id
            if dataset.shape[0] > row:
                dataset.set_extent((row, spec.size))

    def commit(self, stream: StreamKey, row: int, record: Record) -> None:
        """Flush the rows, then write and flush ``step``; move the copy beside in where there is one."""
        check_room(self._path.parent, _SPARE_BYTES + _TENSOR_BYTES * record.statistics["present"].size)
        further = [name for name in record.statistics if name in layout.EXTRAS]
        if further and row == 0:
            self._stage()
            for name in further:
                _make_statistic(self._stream(stream).group, name, layout.EXTRAS[name])
        datasets = self._stream(stream)
        for name, values in record.statistics.items():
            _put_row(datasets[name], row, values)
        for name, value in record.scalars.items():
            _put_row(datasets[name], row, np.array([value], layout.SCALAR.dtype))
        for spec in self._specs.get(stream, ()):
            # Absent tensors grow along: arrays that share a dimension have one length.
            dataset = datasets[spec.entry].id
            if dataset.shape[0] <= row:
                dataset.set_extent((row + 1, spec.size))
        file = self._open()
        file.flush()
        _put_row(datasets["step"], row, np.array([record.step], layout.STEP.dtype))
        file.flush()
        self._rows[stream] = row + 1
        if self._staged:
            self._drop()
            os.replace(self._beside, self._path)
            # At once: a reader in this process that came first would keep it from being opened for writing.
            self._open()

    def close(self, attrs: Mapping[str, Any]) -> None:
        """Leave out what was not committed, store the final attributes and clear the mark of an open file."""
        if self._staged:
            self._drop()
            self._beside.unlink()
        file = self._open()
        for stream, specs in self._specs.items():
            self._cut(stream, specs)
        closing = {key: value for key, value in attrs.items() if key != layout.STATUS and self._attrs.get(key) != value}
        if closing:
            _set_json(file, layout.CLOSING, closing)
            file.flush()
        file.attrs.modify(layout.STATUS, np.array(attrs[layout.STATUS], _STATUS))
        self._drop()
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def _cut(self, stream: StreamKey, specs: Sequence[TensorSpec]) -> None:
        """Cut tensors to the committed rows: a row that was begun and not committed had lengthened them."""
        rows = self._rows.get(stream, 0)
        group = self._open().get(f"{stream.rank_group}/{stream.group}", {})
        for spec in specs:
            # What only the copy beside knew went with it.
            if spec.entry in group and group[spec.entry].shape[0] > rows:
                group[spec.entry].id.set_extent((rows, spec.size))
