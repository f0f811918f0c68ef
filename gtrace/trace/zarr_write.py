"""Writing a trace as Zarr v3: zarr-python makes the metadata, the chunk files are encoded and put here.

A chunk file is replaced as a whole, so it holds every row that it held before, or those and new ones. The
chunk of ``step`` is replaced last in a commit. Whatever a killed writer leaves, rows up to the last step
are complete.
"""

from __future__ import annotations

import functools
import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np
from numcodecs.blosc import BITSHUFFLE, Blosc

from gtrace.trace import format as layout
from gtrace.trace.files import beside, check_place, clear_leftovers, move_in, remove, write_beside
from gtrace.trace.names import DIMENSION_SUFFIX
from gtrace.trace.statistics import checksum_bytes
from gtrace.trace.zarr_read import is_gtrace_zarr

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from gtrace.trace.format import Column, StreamKey, TensorSpec
    from gtrace.trace.storage import Record

_LEVEL = 5
_FIRST_ROWS = 1024


@functools.cache
def _document(dtype: str | None, fill: float = 0, ndim: int = 1) -> str:
    """The zarr.json that zarr-python writes for an array of this type, or for a group."""
    # zarr-python runs an event loop in a thread and cannot do so any more while the interpreter exits.
    # Documents made once at the start, with shapes and attributes filled in later, keep ``close`` free of it.
    import zarr
    from zarr.codecs import BloscCodec, Crc32cCodec
    from zarr.storage import MemoryStore

    files: dict[str, Any] = {}
    store = MemoryStore(files)
    if dtype is None:
        zarr.create_group(store)
    else:
        codec = BloscCodec(
            typesize=np.dtype(dtype).itemsize, cname="lz4", clevel=_LEVEL, shuffle="bitshuffle", blocksize=0
        )
        zarr.create_array(
            store,
            shape=(1,) * ndim,
            chunks=(1,) * ndim,
            dtype=dtype,
            fill_value=fill,
            compressors=[codec, Crc32cCodec()],
            dimension_names=["step"] * ndim,
            chunk_key_encoding={"name": "default", "separator": "."},
        )
    return bytes(files["zarr.json"].to_bytes()).decode()


def write_json(folder: str, document: Mapping[str, Any]) -> None:
    """Store the zarr.json of a folder."""
    text = json.dumps(document, allow_nan=False)
    write_beside(os.path.join(folder, "zarr.json"), text.encode())


def group_document(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The zarr.json of a group."""
    return {**json.loads(_document(None)), "attributes": dict(attributes)}


def make_group(folder: str, attributes: Mapping[str, Any]) -> None:
    """A new group's folder."""
    os.mkdir(folder)
    write_json(folder, group_document(attributes))


class _Array:
    """One array on disk whose first axis is the step."""

    def __init__(
        self,
        folder: str,
        column: Column,
        chunks: tuple[int, ...],
        dimensions: tuple[str, ...],
        attributes: Mapping[str, Any],
    ) -> None:
        self._folder = folder
        self.entry = os.path.basename(folder)
        self._chunks = chunks
        self._column = column
        self._codec = Blosc("lz4", _LEVEL, BITSHUFFLE)
        self.document = json.loads(_document(column.dtype.name, column.fill, len(chunks)))
        self.document["chunk_grid"]["configuration"]["chunk_shape"] = list(chunks)
        self.document["dimension_names"] = list(dimensions)
        self.document["attributes"] = dict(attributes)

    def set_shape(self, *shape: int) -> None:
        """Store the metadata with this shape."""
        os.makedirs(self._folder, exist_ok=True)
        self.document["shape"] = list(shape)
        write_json(self._folder, self.document)

    def put_chunk(self, key: str, values: NDArray[Any]) -> None:
        """Replace one chunk file; ``values`` is a whole chunk, C-contiguous."""
        encoded = self._codec.encode(values)
        write_beside(os.path.join(self._folder, key), encoded, checksum_bytes(encoded).to_bytes(4, "little"))


class _TensorArray(_Array):
    """The rows of one tensor; those of the last chunk stay in memory until the chunk is full."""

    def __init__(self, folder: str, spec: TensorSpec) -> None:
        super().__init__(
            folder,
            layout.Column(layout.VALUES, float("nan")),
            (spec.chunk_rows, spec.chunk_elements),
            ("step", spec.entry + DIMENSION_SUFFIX),
            spec.attrs,
        )
        self._spec = spec
        self._block = -1
        self._rows: NDArray[np.float32] | None = None
        self._dirty = False

    def set_rows(self, rows: int) -> None:
        self.set_shape(rows, self._spec.size)

    def put_row(self, row: int, values: NDArray[np.float32]) -> None:
        if self._spec.size == 0:
            return
        block, offset = divmod(row, self._spec.chunk_rows)
        if self._spec.chunk_rows == 1:
            self._put_long_row(block, values)
            return
        if self._rows is None or block != self._block:
            self._rows = np.full(self._chunks, np.nan, layout.VALUES)
            self._block = block
        self._rows[offset, : values.size] = values
        self._dirty = True

    def _put_long_row(self, block: int, values: NDArray[np.float32]) -> None:
        # Not visible before its commit, so it can be written at once and needs no memory.
        length = self._spec.chunk_elements
        for part in range(self._spec.parts):
            piece = np.ascontiguousarray(values[part * length : (part + 1) * length], layout.VALUES)
            if piece.size < length:
                piece = np.concatenate((piece, np.full(length - piece.size, np.nan, layout.VALUES)))
            self.put_chunk(f"c.{block}.{part}", piece)

    def flush(self) -> None:
        if self._dirty and self._rows is not None:
            self.put_chunk(f"c.{self._block}.0", self._rows)
            self._dirty = False


class _Table(_Array):
    """A small array over steps, or over steps and tensors, with its last rows in memory."""

    def __init__(self, folder: str, column: Column, chunks: tuple[int, ...], dimensions: tuple[str, ...]) -> None:
        super().__init__(folder, column, chunks, dimensions, {})
        self._block = -1
        self._rows = np.empty((0, 0), column.dtype)

    def set_rows(self, rows: int, tensors: int) -> None:
        self.set_shape(rows, *((tensors,) if len(self._chunks) == 2 else ()))

    def put_row(self, row: int, values: NDArray[Any]) -> None:
        """Set one row and write the chunks that hold it; values of 1-D arrays are arrays of length 1."""
        block, offset = divmod(row, self._chunks[0])
        width = self._chunks[1] if len(self._chunks) == 2 else 1
        parts = -(-values.size // width)
        if block != self._block:
            self._rows = np.full((self._chunks[0], parts * width), self._column.fill, self._column.dtype)
            self._block = block
        elif parts * width > self._rows.shape[1]:
            more = (self._chunks[0], parts * width - self._rows.shape[1])
            self._rows = np.hstack((self._rows, np.full(more, self._column.fill, self._column.dtype)))
        self._rows[offset, : values.size] = values
        for part in range(parts):
            columns = np.ascontiguousarray(self._rows[:, part * width : (part + 1) * width])
            self.put_chunk(f"c.{block}.{part}" if len(self._chunks) == 2 else f"c.{block}", columns)


class _Stream:
    """One stream's folder. Arrays are longer than the committed rows at first and cut to them at the end."""

    def __init__(self, folder: str, kind: str) -> None:
        self._folder = folder
        self._kind = kind
        self._rows = _FIRST_ROWS
        self._committed = 0
        self._tensors: list[_TensorArray] = []
        self._tables: dict[str, _Table] = {}
        self._width = -1
        self._said: set[str] = set()

    def add_tensor(self, spec: TensorSpec) -> None:
        array = _TensorArray(os.path.join(self._folder, spec.entry), spec)
        array.set_rows(self._rows)
        self._tensors.append(array)

    def write_row(self, index: int, row: int, values: NDArray[np.float32]) -> None:
        self._grow(row)
        self._tensors[index].put_row(row, values)

    def commit(self, row: int, record: Record) -> None:
        self._grow(row)
        self._make_tables()
        for tensor in self._tensors:
            tensor.flush()
        for name, values in record.statistics.items():
            self._tables[name].put_row(row, values)
        for name, value in record.scalars.items():
            # A chunk that is not there reads as NaN: what a run never says costs no file.
            if name in self._said or not np.isnan(value):
                self._said.add(name)
                self._tables[name].put_row(row, np.array([value]))
        self._tables["step"].put_row(row, np.array([record.step]))
        self._committed = row + 1

    def _grow(self, row: int) -> None:
        while row >= self._rows:
            self._rows *= 2
            self._set_shapes(self._rows)

    def _make_tables(self) -> None:
        if not self._tables:
            chunks = layout.table_chunking(len(self._tensors))
            for name, column in layout.statistics_of(self._kind).items():
                folder = os.path.join(self._folder, name)
                self._tables[name] = _Table(folder, column, chunks, ("step", "tensor"))
            for name in (*layout.SCALARS, "step"):
                folder = os.path.join(self._folder, name)
                column = layout.STEP if name == "step" else layout.SCALAR
                self._tables[name] = _Table(folder, column, (layout.STEP_ROWS,), ("step",))
        if self._width != len(self._tensors):
            self._width = len(self._tensors)
            for table in self._tables.values():
                table.set_rows(self._rows, self._width)

    def _set_shapes(self, rows: int) -> None:
        for tensor in self._tensors:
            tensor.set_rows(rows)
        for table in self._tables.values():
            table.set_rows(rows, self._width)

    def close(self) -> dict[str, Any]:
        """Cut the arrays to the committed rows; returns the metadata of each by its name."""
        self._set_shapes(self._committed)
        return {array.entry: array.document for array in (*self._tensors, *self._tables.values())}


def start_folder(path: Path, attrs: Mapping[str, Any], *, force: bool) -> None:
    """Put a trace without rows in its place, at once; errors as of ``check_place`` and ``move_in``."""
    check_place(path, force=force, is_trace=is_gtrace_zarr)
    prepare_documents()
    clear_leftovers(path)
    started = beside(path, "partial")
    try:
        make_group(str(started), attrs)
        move_in(started, path, force=force)
    finally:
        remove(started)


def prepare_documents() -> None:
    """Make every document that a writer will need, while zarr-python still can."""
    columns = (layout.STEP, layout.SCALAR)
    for dtype, fill, ndim in (
        *((c.dtype.name, c.fill, 1) for c in columns),
        *((c.dtype.name, c.fill, 2) for c in layout.statistics_of("neural").values()),
        (layout.VALUES.name, float("nan"), 2),
    ):
        _document(dtype, fill, ndim)


def write_root(root: str, attrs: Mapping[str, Any], gathered: Mapping[str, Any]) -> None:
    """Store the root's attributes, and with them the metadata of everything below it, where that is not too long."""
    document = group_document(attrs)
    whole = document | {"consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": gathered}}
    write_json(root, whole if len(json.dumps(whole)) < layout.MAX_METADATA_BYTES else document)


class ZarrSink:
    """A Zarr trace that was just started. It holds one chunk of at most 256 KiB per tensor and the last rows of the
    tables.
    """

    def __init__(self, path: Path) -> None:
        self._root = str(path)
        self._streams: dict[StreamKey, _Stream] = {}

    def _stream(self, key: StreamKey) -> _Stream:
        if key not in self._streams:
            rank = os.path.join(self._root, key.rank_group)
            if not os.path.isdir(rank):
                make_group(rank, {"rank": key.rank})
            folder = os.path.join(rank, key.group)
            make_group(folder, key._asdict())
            self._streams[key] = _Stream(folder, key.kind)
        return self._streams[key]

    def add_tensor(self, stream: StreamKey, spec: TensorSpec) -> None:
        """Make the tensor's folder and metadata."""
        self._stream(stream).add_tensor(spec)

    def write_row(self, stream: StreamKey, spec: TensorSpec, row: int, values: NDArray[np.float32]) -> None:
        """Copy a short row into the tensor's open chunk, write a long one."""
        self._stream(stream).write_row(spec.index, row, values)

    def commit(self, stream: StreamKey, row: int, record: Record) -> None:
        """Write the open chunks, the tables, and ``step`` last."""
        self._stream(stream).commit(row, record)

    def close(self, attrs: Mapping[str, Any]) -> None:
        """Cut the arrays to the committed rows and store the final attributes.

        Metadata change no more, so they are gathered in the root's, where zarr-python and xarray look for them.
        """
        write_root(self._root, attrs, self.cut())

    def cut(self) -> dict[str, Any]:
        """Cut the arrays to the committed rows; returns the metadata of everything that this sink wrote, by path."""
        gathered: dict[str, Any] = {}
        for key, stream in self._streams.items():
            gathered[key.rank_group] = group_document({"rank": key.rank})
            gathered[f"{key.rank_group}/{key.group}"] = group_document(key._asdict())
            for entry, document in stream.close().items():
                gathered[f"{key.rank_group}/{key.group}/{entry}"] = document
        return gathered
