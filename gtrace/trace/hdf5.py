"""Traces as HDF5: reads one from any writer, and writes a finished trace as one file.

Only plain data sets are read, of sizes that the file's bytes can hold.
"""

from __future__ import annotations

import json
import math
import os
import re
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

import h5py
import numpy as np

from gtrace.errors import TraceError, printable
from gtrace.trace import format as layout
from gtrace.trace.files import (
    MAX_METADATA_BYTES,
    check_room,
    move_in,
    new_beside,
    parse_json,
    start_folder,
    words_of,
    write_error,
)
from gtrace.trace.format import DIMENSION_SUFFIX, StreamKey
from gtrace.trace.journal import hold
from gtrace.trace.source import Stream, TraceSource, WholeArray, arrays_of, check_root, refuse, tensor_spec, tolerated
from gtrace.trace.zarr import ZarrSink, open_zarr

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from gtrace.trace.format import Beat, ColumnType, TensorSpec, Tolerate


#: The filters that are read, all of them part of the library, and the factor by which each can inflate data at most.
_FILTERS = {h5py.h5z.FILTER_DEFLATE: 1032, h5py.h5z.FILTER_SHUFFLE: 1, h5py.h5z.FILTER_FLETCHER32: 1}

#: library version bound: HDF5 1.10 and later can read the file
_LIBVER = ("v110", "v110")
#: netCDF's marker of a dimension without coordinates.
_NO_COORDINATES = "This is a netCDF dimension but not a netCDF variable. %10d"
#: estimated bytes that HDF5 adds to the values, for all arrays and per tensor
_SPARE_BYTES = 2 * 1024 * 1024
_ARRAY_BYTES = 16 * 1024
#: attribute names that are also stored as plain copies; HDF5's and netCDF's own are in capitals or begin with _
_COPIED = re.compile(r"[a-z][a-z0-9_]*")


@contextmanager
def _reported(where: str) -> Iterator[None]:
    """Turn HDF5's errors on damaged files into one error that names the place, without HDF5's words."""
    try:
        yield
    except TraceError:
        raise
    except Exception as error:  # noqa: BLE001 - damaged bytes make the library raise anything
        raise TraceError(f"{where}: cannot be read: {words_of(error) or 'truncated or damaged'}") from None


def _children(group: h5py.Group, where: str) -> list[str]:
    """Names in a group; TraceError for a soft, external or user-defined link, which could lead anywhere."""
    names = []
    for name in group:
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            raise TraceError(f"{where}/{printable(name)}: soft and external links are not followed; damaged or foreign")
        names.append(str(name))
    return names


def _read_json(node: h5py.Group | h5py.Dataset, name: str, where: str) -> dict[str, Any]:
    """A JSON object from an attribute of fixed length; empty if there is no such attribute."""
    if name not in node.attrs:
        return {}
    about = f"{where}: attribute '{name}'"
    found = node.attrs.get_id(name)
    # Text of variable length is not read: in a damaged file the library may search its heap forever.
    text = h5py.check_string_dtype(found.dtype)
    if found.shape != () or text is None or not 0 <= (text.length or -1) <= MAX_METADATA_BYTES:
        raise TraceError(f"{about} is not text of fixed length, or too long; damaged or foreign")
    value = parse_json(bytes(node.attrs[name]), about)
    if not isinstance(value, dict):
        raise TraceError(f"{about} is not a JSON object; damaged or foreign")
    return value


class _Dataset:
    """A checked data set with the step as its first axis."""

    def __init__(
        self, node: object, where: str, column: ColumnType, ndim: int, *, most_bytes: int, file_bytes: int
    ) -> None:
        self.where = where
        match node:
            case h5py.Dataset(dtype=column.dtype, ndim=found, is_virtual=False, external=None) if found == ndim:
                pass
            case _:
                self._reject(f"not a {ndim}-dimensional data set of {column.dtype.name} with its data in this file")
        self._inflation = 1
        properties = node.id.get_create_plist()
        for number in range(properties.get_nfilters()):
            code = properties.get_filter(number)[0]
            if code not in _FILTERS:
                self._reject(f"filter {code} is not among those that are read")
            self._inflation *= _FILTERS[code]
        chunk = math.prod(node.chunks or (1,)) * column.dtype.itemsize
        if chunk > most_bytes:
            self._reject(f"chunks of {chunk} bytes; at most {most_bytes} are read")
        self.node = node
        self.shape: tuple[int, ...] = node.shape
        self._file_bytes = file_bytes

    def _reject(self, why: str) -> NoReturn:
        raise TraceError(f"{self.where}: {why}; damaged or foreign")

    @cached_property
    def _most(self) -> int:
        """The largest number of bytes that the data set, and the file, can hold."""
        return int(min(self.node.id.get_storage_size(), self._file_bytes)) * self._inflation

    def read(self, rows: slice, about: str, columns: slice | None = None) -> NDArray[Any]:
        """Some rows, with all of their columns or some; TraceError if the data set's bytes cannot hold them."""
        part = (rows,) if len(self.shape) == 1 else (rows, columns or slice(0, self.shape[1]))
        shape = tuple(cut.stop - cut.start for cut in part)
        # A few hundred bytes of metadata can claim any shape, so memory is allocated only if bytes
        # are behind it. Columns of tensors that appeared late have no bytes for earlier rows.
        least = shape
        if columns is not None and self.node.chunks is not None:
            least = shape[0], columns.start + min(shape[1], self.node.chunks[1])
        with _reported(f"{self.where}: {about}"):
            if rows.stop > self.shape[0] or math.prod(least) * self.node.dtype.itemsize > self._most:
                raise TraceError(f"{self.where}: {about}: the rows are missing or truncated; the trace is damaged")
            out = np.empty(shape, self.node.dtype)
            if out.size:
                self.node.read_direct(out, part)
            return out


class _Hdf5Stream(Stream):
    """One stream's group, cut to the rows that were committed when it was opened."""

    def __init__(self, group: h5py.Group, where: str, key: StreamKey, file_bytes: int, tolerate: Tolerate) -> None:
        super().__init__(key, where, tolerate)
        self._file_bytes = file_bytes
        self._group = group
        self._names = _children(group, where)
        if "step" in self._names:
            steps = self._table("step", 1, layout.STEP)
            self.steps = self._committed(steps.where, steps.read(slice(0, steps.shape[0]), "steps"))
        self._accept(self._find())
        self._find_present()

    def _find(self) -> Iterator[TensorSpec]:
        for entry in self._names:
            place = f"{self.where}/{printable(entry)}"
            with tolerated(self.tolerate), _reported(place):
                node = self._group[entry]
                if entry.endswith(DIMENSION_SUFFIX) or layout.METADATA not in node.attrs:
                    continue
                attrs = _read_json(node, layout.METADATA, place)
                dataset = self._table(entry, 2, layout.column_of(attrs), layout.MAX_CHUNK_BYTES)
                spec = tensor_spec(place, entry, attrs, dataset.shape[1], node.chunks or (1, dataset.shape[1]))
                self._tensors[spec.index] = dataset
                yield spec

    def _table(
        self, name: str, ndim: int, column: ColumnType, most_bytes: int = layout.MAX_TABLE_CHUNK_BYTES
    ) -> _Dataset:
        where = f"{self.where}/{printable(name)}"
        with _reported(where):
            if name not in self._names:
                raise TraceError(f"{where}: missing; the trace is damaged")
            node = self._group[name]
            return _Dataset(node, where, column, ndim, most_bytes=most_bytes, file_bytes=self._file_bytes)


def open_hdf5(path: Path | str, tolerate: Tolerate = refuse, stream: BinaryIO | None = None) -> TraceSource:
    """An HDF5 trace; arguments and errors are those of :func:`gtrace.trace.zarr.open_zarr`.

    ``stream`` is the open file of a trace at an address. The library serializes its calls, so several threads may read.
    """
    with ExitStack() as held:
        with _reported(str(path)):
            if stream is None:
                size = os.path.getsize(path)
                file = h5py.File(path, "r", locking=False)
            else:
                held.enter_context(stream)
                size = stream.seek(0, os.SEEK_END)
                file = h5py.File(stream, "r")
            held.enter_context(file)
            attrs = _read_json(file, layout.METADATA, str(path))
            check_root(str(path), attrs)
            streams, ranks = [], {}
            for rank in _children(file, str(path)):
                if not rank.startswith("rank") or not isinstance(file[rank], h5py.Group):
                    continue
                with tolerated(tolerate):
                    ranks[rank] = _read_json(file[rank], layout.METADATA, f"{path}/{rank}")
                for group in _children(file[rank], f"{path}/{rank}"):
                    key, node = StreamKey.parse(rank, group), file[rank][group]
                    if key is None or not isinstance(node, h5py.Group):
                        continue
                    with tolerated(tolerate):
                        streams.append(_Hdf5Stream(node, f"{path}/{rank}/{group}", key, size, tolerate))
        return TraceSource(str(path), attrs, streams, held.pop_all(), ranks)


def _set_attrs(node: h5py.Group | h5py.Dataset, attrs: Mapping[str, Any]) -> None:
    """Store attributes as JSON, and plain ones also as copies for other tools."""
    # Text of fixed length is in the object's header, with a checksum, and replaced as a whole. That of variable length
    # is in a heap without a checksum; if it is damaged, the library may search it forever.
    text = json.dumps(attrs, allow_nan=False).encode()
    node.attrs.create(layout.METADATA, text, dtype=h5py.string_dtype("utf-8", len(text)))
    for key, value in attrs.items():
        short = type(value) is int and -(2**63) <= value < 2**63
        plain = short or type(value) is float or (type(value) is str and "\0" not in value)
        if plain and _COPIED.fullmatch(key) and key != layout.METADATA:
            node.attrs[key] = value


def write_hdf5(source: TraceSource, path: Path, beat: Beat = layout.go_on) -> None:
    """Write a finished trace into a new file; OSError without room, or if ``beat`` ends it; TraceError for damage."""
    # A failed write damages an HDF5 file, and the library may crash the process.
    check_room(path.parent, _SPARE_BYTES + sum(map(_stored_bytes, source.streams)))
    with h5py.File(path, "x", libver=_LIBVER, locking=False) as file:
        _set_attrs(file, source.attrs)
        for stream in source.streams:
            if stream.steps.size:
                name = stream.key.rank_group
                if name not in file:
                    _set_attrs(file.create_group(name), {**source.ranks.get(name, {}), "rank": stream.key.rank})
                _write_stream(file[name].create_group(stream.key.group), stream, beat)


def _stored_bytes(stream: Stream) -> int:
    """Upper bound on the bytes of a stream, without HDF5's own bytes for each array."""
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


def _write_stream(group: h5py.Group, stream: Stream, beat: Beat) -> None:
    _set_attrs(group, stream.key._asdict())
    scales = {"tensor": _make_scale(group, "tensor", len(stream.tensors))}
    # Dimension scales come first, because other arrays refer to them: ``step``, and each tensor's elements.
    for array in sorted(arrays_of(stream), key=lambda array: array.form.entry != "step"):
        dataset = _write_array(group, array, beat)
        if array.form.entry == "step":
            dataset.make_scale("step")
            scales["step"] = dataset
            continue
        for axis, dimension in enumerate(array.form.dimensions):
            if dimension not in scales:
                scales[dimension] = _make_scale(group, dimension, dataset.shape[axis])
            dataset.dims[axis].attach_scale(scales[dimension])


def _make_scale(group: h5py.Group, name: str, length: int) -> h5py.Dataset:
    """A dimension without coordinates, as netCDF stores it."""
    scale = group.create_dataset(name, shape=(length,), dtype="u1", track_times=False)
    scale.make_scale(_NO_COORDINATES % length)
    return scale


def _write_array(group: h5py.Group, array: WholeArray, beat: Beat) -> h5py.Dataset:
    form = array.form
    height, ndim = form.chunks[0], len(form.chunks)
    dataset = group.create_dataset(
        form.entry,
        shape=(array.rows, form.columns)[:ndim],
        # In HDF5 a chunk cannot be longer than an array of fixed length.
        maxshape=(None,) * ndim,
        chunks=form.chunks,
        dtype=form.column.dtype,
        fillvalue=form.column.fill,
    )
    if form.attributes:
        _set_attrs(dataset, form.attributes)
    for number, block in enumerate(array.blocks):
        if not beat():
            raise OSError("interrupted")
        start = number * height
        if ndim == 1:
            # Readers count the bytes of tables, so fill values are written too.
            dataset[start : start + height] = form.column.fill if block is None else block
        elif block is not None and block.size:
            if block.shape == form.chunks:
                # Bypass the library's cache.
                dataset.id.write_direct_chunk((start, 0), np.ascontiguousarray(block).data)
            else:
                dataset[start : start + len(block), : block.shape[1]] = block
    return dataset


class Hdf5Sink(ZarrSink):
    """A trace that becomes an HDF5 file when it is closed; until then it is a Zarr folder under the same name.

    An HDF5 file that is written step by step is not safe if its writer dies. Zarr with its journal is: what a killed
    writer leaves reads like any other trace, and ``gtrace trace check --repair`` turns it into a file.
    """

    def __init__(self, path: Path, attrs: Mapping[str, Any], *, force: bool) -> None:
        start_folder(path, attrs, force=force)
        # It is read only once more, and soon: compression would cost more than it saves.
        super().__init__(path, plain=True)
        self._held = hold(path)

    def close(self, attrs: Mapping[str, Any], beat: Beat = layout.go_on) -> None:
        """Finish the folder, and put a file with the same content in its place.

        Raises:
            TraceError: there is not enough room, or ``beat`` wants no more; the folder stays, with all committed steps.
        """
        try:
            with new_beside(self._path, "partial") as new:
                super().close(attrs, beat)
                write_hdf5(open_zarr(self._path), new, beat)
                move_in(new, self._path, force=True)
        except (OSError, RuntimeError) as error:
            failure = write_error(self._path, error)
            raise TraceError(
                f"{failure}; committed steps are kept as a folder; `gtrace trace check --repair` makes it a file"
            ) from error
        finally:
            if self._held is not None:
                os.close(self._held)
