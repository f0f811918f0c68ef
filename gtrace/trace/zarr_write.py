"""Writing a trace as Zarr v3: zarr-python makes the metadata, the chunk files are encoded and put here.

A commit appends one entry to the stream's journal, so it costs one system call, whatever the number of tensors. Every
64 rows the journal is emptied into chunk files. Such a file is replaced as a whole, so it holds every row that it held
before, or those and new ones; the chunk of ``step`` is replaced last, and then the journal. Whatever a killed writer
leaves, each committed row is complete in the one place or the other.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numcodecs.blosc import BITSHUFFLE, Blosc

from gtrace.trace import format as layout
from gtrace.trace.files import beside, check_place, clear_leftovers, move_in, remove, write_beside, write_file
from gtrace.trace.format import DIMENSION_SUFFIX
from gtrace.trace.journal import MOST_ROWS, JournalWriter, in_journal
from gtrace.trace.rows import checksum_bytes
from gtrace.trace.zarr_read import is_gtrace_zarr

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from gtrace.trace.format import ColumnType, Record, StreamKey, TensorSpec


_LEVEL = 5


@functools.cache
def array_document(dtype: str | None, fill: float = 0, ndim: int = 1) -> str:
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
    """Put a zarr.json into a folder."""
    text = json.dumps(document, allow_nan=False)
    write_beside(os.path.join(folder, "zarr.json"), text.encode())


def write_root(folder: str, attributes: Mapping[str, Any], gathered: Mapping[str, Any]) -> None:
    """Store the attributes of the trace, and with them the metadata of everything in it where they are not too long."""
    root = group_document(attributes)
    whole = root | {"consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": gathered}}
    write_json(folder, whole if len(json.dumps(whole)) < layout.MAX_METADATA_BYTES else root)


def group_document(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a group."""
    return {**json.loads(array_document(None)), "attributes": dict(attributes)}


def make_group(folder: str, attributes: Mapping[str, Any]) -> None:
    """Make a folder with the metadata of a group."""
    os.mkdir(folder)
    write_json(folder, group_document(attributes))


class Array:
    """One array on disk whose first axis is the step."""

    def __init__(
        self,
        folder: str,
        column: ColumnType,
        chunks: tuple[int, ...],
        dimensions: tuple[str, ...],
        attributes: Mapping[str, Any],
    ) -> None:
        self.folder = folder
        self.entry = os.path.basename(folder)
        self.chunks = chunks
        self.column = column
        self._codec: Blosc | None = Blosc("lz4", _LEVEL, BITSHUFFLE)
        self.document = json.loads(array_document(column.dtype.name, column.fill, len(chunks)))
        self.document["chunk_grid"]["configuration"]["chunk_shape"] = list(chunks)
        self.document["dimension_names"] = list(dimensions)
        self.document["attributes"] = dict(attributes)

    def set_shape(self, *shape: int) -> None:
        """Store the metadata with this shape."""
        os.makedirs(self.folder, exist_ok=True)
        self.document["shape"] = list(shape)
        write_json(self.folder, self.document)

    def leave_plain(self) -> None:
        """Compress no chunks."""
        self._codec = None
        self.document["codecs"] = [codec for codec in self.document["codecs"] if codec["name"] != "blosc"]

    def encode(self, values: NDArray[Any]) -> tuple[bytes | memoryview, bytes]:
        """A whole chunk, C-contiguous, as it is stored: what the codec makes of it, and a checksum of that."""
        if self._codec is None:
            plain = values.reshape(-1).view(np.uint8)
            return plain.data, checksum_bytes(plain).to_bytes(4, "little")
        encoded = self._codec.encode(values)
        return encoded, checksum_bytes(encoded).to_bytes(4, "little")

    def put_new_chunk(self, key: str, values: NDArray[Any]) -> None:
        """Write a chunk file that no committed row is in: whoever dies meanwhile leaves one that nobody reads."""
        write_file(os.path.join(self.folder, key), *self.encode(values))

    def put_chunk(self, key: str, values: NDArray[Any]) -> None:
        """Replace one chunk file; ``values`` is a whole chunk, C-contiguous."""
        write_beside(os.path.join(self.folder, key), *self.encode(values))


_FIRST_ROWS = 1024


class _TensorArray(Array):
    """The rows of one tensor; those of the last chunk stay in memory until the chunk is full."""

    def __init__(self, folder: str, spec: TensorSpec) -> None:
        super().__init__(
            folder,
            spec.column,
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

    def put_row(self, row: int, values: NDArray[Any]) -> None:
        if self._spec.size == 0:
            return
        block, offset = divmod(row, self._spec.chunk_rows)
        if self._spec.chunk_rows == 1:
            self._put_long_row(block, values)
            return
        if self._rows is None or block != self._block:
            self.flush()
            # The same memory for every chunk: fresh memory costs more than what is done with it.
            self._rows = np.empty(self.chunks, layout.VALUES) if self._rows is None else self._rows
            self._rows.fill(np.nan)
            self._block = block
        self._rows[offset, : values.size] = values
        self._dirty = True

    def _put_long_row(self, block: int, values: NDArray[Any]) -> None:
        # Not visible before its commit, so it can be written at once and needs no memory.
        dtype, fill = self._spec.column
        length = self._spec.chunk_elements
        # Of a sketch no chunk is written beyond its last byte.
        for part in range(-(-values.size // length) if self._spec.sketched else self._spec.parts):
            piece = np.ascontiguousarray(values[part * length : (part + 1) * length], dtype)
            if piece.size < length:
                piece = np.concatenate((piece, np.full(length - piece.size, fill, dtype)))
            self.put_new_chunk(f"c.{block}.{part}", piece)

    def discard(self, row: int) -> None:
        """Take back a row that was put there."""
        block, offset = divmod(row, self._spec.chunk_rows)
        if self._spec.chunk_rows == 1:
            for part in range(self._spec.parts):
                Path(self.folder, f"c.{block}.{part}").unlink(missing_ok=True)
        elif self._rows is not None and block == self._block:
            self._rows[offset] = np.nan
            self._dirty = True

    def open_row(self, row: int) -> NDArray[np.float32]:
        """A row of the last chunk, which was put there."""
        assert self._rows is not None
        values: NDArray[np.float32] = self._rows[row % self._spec.chunk_rows]
        return values

    @property
    def in_journal(self) -> bool:
        """Whether its rows go through the journal."""
        return in_journal(self._spec)

    def flush(self) -> None:
        """Write the last chunk where it has rows that its file lacks."""
        if self._dirty and self._rows is not None:
            self.put_chunk(f"c.{self._block}.0", self._rows)
            self._dirty = False


class _Table(Array):
    """A small array over steps, or over steps and tensors, with its last rows in memory."""

    def __init__(self, folder: str, column: ColumnType, chunks: tuple[int, ...], dimensions: tuple[str, ...]) -> None:
        super().__init__(folder, column, chunks, dimensions, {})
        self._block = -1
        self._rows = np.empty((0, 0), column.dtype)
        self._dirty = False

    def set_rows(self, rows: int, tensors: int) -> None:
        self.set_shape(rows, *((tensors,) if len(self.chunks) == 2 else ()))

    def put_row(self, row: int, values: NDArray[Any]) -> None:
        """Set one row; values of 1-D arrays are arrays of length 1. The row before is in a file, or in this chunk."""
        block, offset = divmod(row, self.chunks[0])
        width = self.chunks[1] if len(self.chunks) == 2 else 1
        parts = -(-values.size // width)
        if block != self._block:
            self._rows = np.full((self.chunks[0], parts * width), self.column.fill, self.column.dtype)
            self._block = block
        elif parts * width > self._rows.shape[1]:
            more = (self.chunks[0], parts * width - self._rows.shape[1])
            self._rows = np.hstack((self._rows, np.full(more, self.column.fill, self.column.dtype)))
        self._rows[offset, : values.size] = values
        self._dirty = True

    def flush(self) -> None:
        """Write the chunks of the last rows where their files lack some."""
        if not self._dirty:
            return
        width = self.chunks[1] if len(self.chunks) == 2 else 1
        for part in range(self._rows.shape[1] // width):
            columns = np.ascontiguousarray(self._rows[:, part * width : (part + 1) * width])
            self.put_chunk(f"c.{self._block}.{part}" if len(self.chunks) == 2 else f"c.{self._block}", columns)
        self._dirty = False


class _StreamFolder:
    """One stream's folder. Arrays are longer than the committed rows at first and cut to them at the end."""

    def __init__(self, folder: str, *, plain: bool) -> None:
        self._folder = folder
        self._plain = plain
        self._rows = _FIRST_ROWS
        self._committed = 0
        self._tensors: list[_TensorArray] = []
        self._tables: dict[str, _Table] = {}
        self._width = -1
        self._said: set[str] = set()

    def add_tensor(self, spec: TensorSpec) -> None:
        array = _TensorArray(os.path.join(self._folder, spec.entry), spec)
        if self._plain:
            array.leave_plain()
        array.set_rows(self._rows)
        self._tensors.append(array)

    def write_row(self, index: int, row: int, values: NDArray[Any]) -> None:
        self._grow(row)
        self._tensors[index].put_row(row, values)

    def discard(self, index: int, row: int) -> None:
        self._tensors[index].discard(row)

    def commit(self, row: int, record: Record) -> None:
        self._grow(row)
        self._make_tables(record.statistics)
        journal = self._journal
        # Every table's chunk ends at a multiple of 64 rows, so none is left behind unwritten.
        if journal.first < row and (row % MOST_ROWS == 0 or journal.full):
            self._empty_journal()
        present = np.flatnonzero(record.statistics["present"]).tolist()
        short = [self._tensors[index] for index in present if self._tensors[index].in_journal]
        journal.append(row, record, [tensor.open_row(row) for tensor in short])
        self._committed = row + 1
        for name, values in record.statistics.items():
            self._tables[name].put_row(row, values)
        for name, value in record.scalars.items():
            # A chunk that is not there reads as NaN: what a run never says costs no file.
            if name in self._said or not np.isnan(value):
                self._said.add(name)
                self._tables[name].put_row(row, np.array([value]))
        self._tables["step"].put_row(row, np.array([record.step]))

    @functools.cached_property
    def _journal(self) -> JournalWriter:
        names = [name for name in self._tables if name != "step" and name not in layout.SCALARS]
        return JournalWriter(os.path.join(self._folder, "step"), names, 0)

    def _empty_journal(self) -> None:
        """Put all committed rows into chunk files."""
        for tensor in self._tensors:
            tensor.flush()
        # The last of them is ``step``.
        for table in self._tables.values():
            table.flush()
        self._journal.restart(self._committed)

    def _grow(self, row: int) -> None:
        while row >= self._rows:
            self._rows *= 2
            self._set_shapes(self._rows)

    def _make_tables(self, statistics: Iterable[str]) -> None:
        if not self._tables:
            chunks = layout.table_chunking(len(self._tensors))
            for name in statistics:
                folder = os.path.join(self._folder, name)
                self._tables[name] = _Table(folder, layout.statistic_column(name), chunks, ("step", "tensor"))
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
        if self._tables:
            self._empty_journal()
        self._set_shapes(self._committed)
        if self._tables:
            self._journal.remove()
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
        (layout.BYTES.name, 0, 2),
    ):
        array_document(dtype, fill, ndim)


class ZarrSink:
    """A Zarr trace that was just started. It holds one chunk of at most 256 KiB per tensor and the last rows of the
    tables.
    """

    def __init__(self, path: Path, *, plain: bool = False) -> None:
        self._root = str(path)
        self._plain = plain
        self._streams: dict[StreamKey, _StreamFolder] = {}

    def _stream(self, key: StreamKey) -> _StreamFolder:
        if key not in self._streams:
            rank = os.path.join(self._root, key.rank_group)
            if not os.path.isdir(rank):
                make_group(rank, {"rank": key.rank})
            folder = os.path.join(rank, key.group)
            make_group(folder, key._asdict())
            self._streams[key] = _StreamFolder(folder, plain=self._plain)
        return self._streams[key]

    def add_tensor(self, stream: StreamKey, spec: TensorSpec) -> None:
        """Make the tensor's folder and metadata."""
        self._stream(stream).add_tensor(spec)

    def write_row(self, stream: StreamKey, spec: TensorSpec, row: int, values: NDArray[Any]) -> None:
        """Copy a short row into the tensor's open chunk, write a long one."""
        self._stream(stream).write_row(spec.index, row, values)

    def discard(self, stream: StreamKey, row: int, specs: Sequence[TensorSpec]) -> None:
        """Take the rows out of the open chunks, and delete chunks of their own."""
        for spec in specs:
            self._stream(stream).discard(spec.index, row)

    def commit(self, stream: StreamKey, row: int, record: Record) -> None:
        """Append the row to the journal; empty that first where it is full."""
        self._stream(stream).commit(row, record)

    def close(self, attrs: Mapping[str, Any]) -> None:
        """Cut the arrays to the committed rows and store the final attributes.

        Metadata change no more, so they are gathered in the root's, where zarr-python and xarray look for them.
        """
        try:
            gathered = self.cut()
        except OSError:
            # The disk is full: rows stay in journals. What the trace says about itself may still find room.
            write_json(self._root, group_document({**attrs, "status": "interrupted"}))
            raise
        write_root(self._root, attrs, gathered)

    def cut(self) -> dict[str, Any]:
        """Cut the arrays to the committed rows; returns the metadata of everything that this sink wrote, by path."""
        gathered: dict[str, Any] = {}
        for key, stream in self._streams.items():
            gathered[key.rank_group] = group_document({"rank": key.rank})
            gathered[f"{key.rank_group}/{key.group}"] = group_document(key._asdict())
            for entry, document in stream.close().items():
                gathered[f"{key.rank_group}/{key.group}/{entry}"] = document
        return gathered
