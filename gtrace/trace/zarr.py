"""Traces as Zarr v3: reads one from any writer, and writes one row by row or as a whole.

The reader checks metadata and sizes before it decodes anything, supports few codecs, and does not use zarr-python. A
shard is one file with many chunks and an index of them at its end (codec ``sharding_indexed``): for each chunk in
C order its offset and length as little-endian uint64, then the CRC-32C of the index.

The writer does not use it either, and writes the same metadata. A commit of one row appends an entry to the stream's
journal, so it costs one system call, whatever the number of tensors. Every 64th row goes into chunk files with all
that the journal has; so do many rows that are committed at once, without the journal. Such a file is replaced as a
whole, by one with the same rows and perhaps new ones; the chunk of ``step`` is replaced last. The next row that needs
a journal starts a new one. Wherever a writer is killed, each committed row is complete in one place or the other.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import struct
from operator import floordiv, mod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numcodecs.blosc import BITSHUFFLE, Blosc
from numcodecs.zstd import Zstd

from gtrace.errors import TraceError, printable
from gtrace.trace import format as layout
from gtrace.trace.files import (
    FORMAT,
    LOCAL,
    group_document,
    make_group,
    read_node,
    write_beside,
    write_file,
    write_group,
    write_json,
    write_root,
)
from gtrace.trace.format import StreamKey
from gtrace.trace.journal import MAX_BYTES, MOST_ROWS, NAME, JournalRows, JournalWriter, in_journal, parse_journal
from gtrace.trace.rows import checksum_bytes, verify
from gtrace.trace.source import Stream, TraceSource, WholeArray, arrays_of, check_root, refuse, tensor_spec, tolerated

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from gtrace.trace.format import ArrayForm, Beat, ColumnType, Rows, TensorSpec, Tolerate
    from gtrace.trace.remote import Files

#: what is said of a trace that was there a moment ago
GONE = "is gone: it was deleted, moved or replaced while it was being read"
#: Orders of codecs that are read; a checksum covers the compressed bytes.
PIPELINES = (
    ("bytes",),
    ("bytes", "crc32c"),
    ("bytes", "blosc"),
    ("bytes", "blosc", "crc32c"),
    ("bytes", "zstd"),
    ("bytes", "zstd", "crc32c"),
)
_SHARDS = "sharding_indexed"
_LITTLE = {"endian": "little"}
_INDEX_CODECS = [{"name": "bytes", "configuration": _LITTLE}, {"name": "crc32c"}]
#: limit on chunks in a shard: its index then has 1 MiB
_MOST_CHUNKS = 65536
#: offset and length of a missing chunk in the index of a shard
_MISSING = 2**64 - 1

_BLOSC_HEADER = struct.Struct("<4BIII")
_CODECS = {"blosc": Blosc, "zstd": Zstd}
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"

_TYPES = {c.dtype.name: c.dtype for c in (*layout.STATISTICS.values(), layout.STEP)} | {"float32": layout.VALUES}
_SCALARS = dict.fromkeys(layout.SCALARS, layout.SCALAR)
_TABLES = layout.STATISTICS | layout.LENGTHS | layout.EXTRAS | _SCALARS


def _most_encoded(size: int) -> int:
    """Largest size of ``size`` bytes after encoding by any of the codecs; a longer file is not read."""
    return size + size // 64 + 4096


def decode_chunk(encoded: bytes, pipeline: Sequence[str], out: NDArray[Any], where: str) -> None:
    """Decode one chunk into ``out``, a C-contiguous array of the exact size, type and byte order.

    ``pipeline`` has the names of its codecs, one of ``PIPELINES``; ``where`` is file, tensor and step, for messages.

    Raises:
        TraceError: truncated, damaged, or not of the size in the metadata.
    """
    data = memoryview(encoded)
    target = out.reshape(-1).view(np.uint8)
    if pipeline[-1] == "crc32c":
        stored, data = int.from_bytes(data[-4:], "little"), data[:-4]
        verify(checksum_bytes(np.frombuffer(data, np.uint8)), stored, where, "of the chunk")
    kind = next((name for name in _CODECS if name in pipeline), "")
    try:
        # Seen before anything is unpacked: a frame of another size may be a bomb.
        if (_blosc_content if kind == "blosc" else _zstd_content if kind else len)(data) != target.size:
            raise ValueError(f"it does not hold the {target.size} bytes of a chunk")
        if kind:
            _CODECS[kind]().decode(np.frombuffer(data, np.uint8), out=target)
        else:
            target[:] = np.frombuffer(data, np.uint8)
    except (RuntimeError, ValueError, struct.error) as error:
        raise TraceError(f"{where}: truncated or foreign chunk ({kind or 'raw'}, {len(data)} bytes: {error})") from None


def _blosc_content(data: memoryview) -> int | None:
    """Content size in the header of a blosc frame, None if the frame has another length than it says."""
    *_, raw, _, compressed = _BLOSC_HEADER.unpack_from(data)
    return int(raw) if compressed == len(data) else None


def _zstd_content(data: memoryview) -> int | None:
    """Content size in the header of a zstd frame (RFC 8878, 3.1.1.1), None if it is not given."""
    if len(data) < 6 or data[:4] != _ZSTD_MAGIC:
        return None
    descriptor = data[4]
    single_segment = bool(descriptor & 0x20)
    width = (1 if single_segment else 0, 2, 4, 8)[descriptor >> 6]
    start = 5 + (not single_segment) + (0, 1, 2, 4)[descriptor & 3]
    if width == 0 or len(data) < start + width:
        return None
    return int.from_bytes(data[start : start + width], "little") + (256 if width == 2 else 0)


def read_group(files: Files, folder: str, tolerate: Tolerate = refuse) -> dict[str, Any] | None:
    """The attributes of a group, None without one; TraceError for damage, default attributes if that is tolerated."""
    try:
        document = read_node(files.read, folder)
        if document is not None and document.get("node_type") != "group":
            raise TraceError(f"{folder}: is an array instead of a group; not a gtrace trace")
    except TraceError as error:
        tolerate(error)
        return {"format": FORMAT, "version": layout.VERSION}
    return None if document is None else document["attributes"]


def _missing(files: Files, folder: str, what: str) -> TraceError:
    gone = files.size(os.path.join(folder, "zarr.json")) is None
    return TraceError(f"{folder}: {GONE}" if gone else what)


class _ArrayFile:
    """One array, perhaps a forged one: its checked metadata and its chunks."""

    def __init__(self, files: Files, folder: str, document: dict[str, Any], fill: float | None = None) -> None:
        """``fill`` is the fill value of a table."""
        self._files = files
        self._fill = fill
        self.folder = folder
        self.attrs: dict[str, Any] = document["attributes"]
        shape, outer, self.dtype, codecs = self._declared(document)
        self.shape, self.chunks = tuple(shape), tuple(outer)
        #: chunks of a shard along each axis, None without shards
        self._counts: tuple[int, ...] | None = None
        if self._names(codecs) == (_SHARDS,):
            inner, codecs = self._shard(codecs[0].get("configuration"))
            self.chunks, self._counts = tuple(inner), tuple(map(floordiv, outer, inner))
        self._pipeline = self._names(codecs)
        if self._pipeline not in PIPELINES or codecs[0].get("configuration", {"endian": "little"}) != _LITTLE:
            raise self._fault(f"codecs {printable(str(codecs)[:120])} are not read")
        self._bytes = math.prod(self.chunks) * self.dtype.itemsize
        most = layout.MAX_CHUNK_BYTES if fill is None else layout.MAX_TABLE_CHUNK_BYTES
        if self._bytes > most:
            raise self._fault(f"chunks of {self._bytes} bytes; at most {most} are read")
        # The index of the last shard; replaced as a whole, so that several threads may read.
        self._last: tuple[str, NDArray[np.uint64]] | None = None

    def _fault(self, why: str) -> TraceError:
        return TraceError(f"{os.path.join(self.folder, 'zarr.json')}: {why}; damaged or foreign")

    def _declared(self, document: dict[str, Any]) -> tuple[list[int], list[int], np.dtype[Any], list[Any]]:
        """Shape, shape of a chunk or shard, type and codecs, if all else is what every trace has."""
        match document:
            case {
                "node_type": "array",
                "shape": shape,
                "data_type": str(dtype),
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": outer}},
                "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
                "codecs": [*codecs],
            } if dtype in _TYPES and not document.get("storage_transformers"):
                if layout.are_lengths(shape) and layout.are_lengths(outer, 1) and len(shape) == len(outer):
                    return shape, outer, _TYPES[dtype], codecs
        raise self._fault("its node type, data type, shape, chunks or codecs are not those of an array in a trace")

    def demand_form(self, ndim: int, column: ColumnType) -> None:
        if len(self.shape) != ndim or self.dtype != column.dtype:
            raise self._fault(f"not a {ndim}-dimensional array of {column.dtype.name}")

    def _names(self, codecs: list[Any]) -> tuple[str, ...]:
        return tuple(str(codec.get("name"))[:40] if isinstance(codec, dict) else "" for codec in codecs)

    def _shard(self, configuration: Any) -> tuple[list[int], list[Any]]:
        """Shape and codecs of the chunks in a shard."""
        match configuration:
            case {"chunk_shape": inner, "codecs": [*codecs], "index_codecs": index} if index == _INDEX_CODECS:
                place, outer = configuration.get("index_location", "end"), self.chunks
                if place == "end" and layout.are_lengths(inner, 1) and len(inner) == len(outer):
                    counts = math.prod(map(floordiv, outer, inner))
                    if counts <= _MOST_CHUNKS and not any(map(mod, outer, inner)):
                        return inner, codecs
        raise self._fault("its shards are not those of a trace")

    def _file(self, place: tuple[int, ...]) -> str:
        outer = map(floordiv, place, self._counts) if self._counts else place
        return os.path.join(self.folder, "c." + ".".join(map(str, outer)))

    def _locate(self, path: str, place: tuple[int, ...]) -> tuple[int, int] | None:
        """Offset and length of a chunk in its shard's file, None if it is missing.

        TraceError if the index is damaged, or claims more than a chunk can have.
        """
        assert self._counts is not None
        last, count = self._last, math.prod(self._counts)
        if last is None or last[0] != path:
            size, length = self._files.size(path), 16 * count + 4
            if size is None:
                return None
            data = np.frombuffer(self._files.read_range(path, size - length, length), np.uint8)
            stored = int.from_bytes(data[-4:].tobytes(), "little")
            verify(checksum_bytes(data[:-4]), stored, path, "in the index of the shard")
            self._last = last = (path, data[:-4].view("<u8").reshape(-1, 2))
        within = tuple(map(mod, place, self._counts))
        offset, length = last[1][int(np.ravel_multi_index(within, self._counts))].tolist()
        if offset == length == _MISSING:
            return None
        if length > (limit := _most_encoded(self._bytes)):
            raise TraceError(f"{path}: a chunk of {length} bytes, but at most {limit} are possible; damaged or foreign")
        return offset, length

    def chunk(self, place: tuple[int, ...], about: str) -> NDArray[Any] | None:
        """A whole chunk, None if it is missing; ``about`` names the tensor and step, for messages."""
        path = self._file(place)
        if self._counts:
            found = self._locate(path, place)
            encoded = None if found is None else self._files.read_range(path, *found)
        else:
            encoded = self._files.read(path, _most_encoded(self._bytes))
        if encoded is None:
            return None
        out = np.empty(self.chunks, self.dtype)
        decode_chunk(encoded, self._pipeline, out, f"{path}: {about}")
        return out

    def read(self, rows: slice, about: str, columns: slice | None = None) -> NDArray[Any]:
        """Some rows, with all of their columns or some, (rows, 1) without columns; chunks of a table may be missing."""
        wide = len(self.chunks) == 2
        height, width = self.chunks[0], self.chunks[1] if wide else 1
        columns = columns or slice(0, self.shape[1] if wide else 1)
        blocks = range(rows.start // height, -(-rows.stop // height))
        parts = range(columns.start // width, -(-columns.stop // width))
        # Memory is allocated only if files are behind it, whatever the metadata claim.
        needed = parts[:wide] if self._fill is not None else parts if len(parts) > 1 else ()
        for block, part in itertools.product(blocks, needed):
            self._demand((block, part), about if self._fill is None else "")
        # A single chunk is not copied again.
        single = self._fill is None and len(blocks) == len(parts) == 1
        shape = (0, 0) if single else (rows.stop - rows.start, columns.stop - columns.start)
        out = np.empty(shape, self.dtype)
        if self._fill is not None:
            out.fill(self._fill)
        for block, part in itertools.product(blocks, parts):
            place = (block, part)[: len(self.chunks)]
            chunk = self.chunk(place, about)
            if chunk is None:
                # Rows of a table before these tensors appeared have no chunk.
                if self._fill is None:
                    raise self._missing(place, about)
                continue
            top, left = block * height, part * width
            chunk = chunk.reshape(height, width)[max(rows.start - top, 0) : rows.stop - top]
            chunk = chunk[:, max(columns.start - left, 0) : columns.stop - left]
            if single:
                return chunk
            top, left = max(top - rows.start, 0), max(left - columns.start, 0)
            out[top : top + chunk.shape[0], left : left + chunk.shape[1]] = chunk
        return out

    def _demand(self, place: tuple[int, ...], about: str) -> None:
        path = self._file(place)
        if (self._locate(path, place) if self._counts else self._files.size(path)) is None:
            raise self._missing(place, about)

    def _missing(self, place: tuple[int, ...], about: str) -> TraceError:
        what = f"{self._file(place)}: {f'{about}: ' if about else ''}the chunk is missing"
        return _missing(self._files, self.folder, what)


class _ZarrStream(Stream):
    """One stream's folder, cut to the rows that were committed when it was opened."""

    def __init__(self, files: Files, folder: str, key: StreamKey, tolerate: Tolerate) -> None:
        super().__init__(key, folder, tolerate)
        self._files = files
        self._names = self._tables = dict[str, _ArrayFile]()
        # Read the journal first and steps next: while the trace is being written, rows move from the journal into
        # chunks, so everything they refer to exists when it is read later. If either was reached through a link, the
        # listing of the folder refuses the stream.
        where = os.path.join(folder, "step", NAME)
        entries = parse_journal(files.read(where, MAX_BYTES) or b"", key.kind, where, tolerate)
        steps = self._read_steps()
        self._journal = JournalRows(entries, steps.size, where, tolerate)
        late = [entry.record.steps for entry in self._journal.entries]
        self.steps = self._committed(folder, np.concatenate((steps, *late)))
        self._journal.cut(self.steps.size)
        self._accept(self._find_arrays())
        self._journal.set_specs({spec.index: spec for spec in self.specs}, tolerate)
        self._find_present()

    def _find_arrays(self) -> Iterator[TensorSpec]:
        """The tensors in the folder; keeps the tables that it passes."""
        for entry in self._files.folders(self.where):
            place = os.path.join(self.where, entry)
            with tolerated(self.tolerate):
                document = read_node(self._files.read, place)
                if document is None:
                    continue
                if "name" in document["attributes"]:
                    array = _ArrayFile(self._files, place, document)
                    array.demand_form(2, layout.column_of(array.attrs))
                    spec = tensor_spec(place, entry, array.attrs, array.shape[1], array.chunks)
                    self._tensors[spec.index] = array
                    yield spec
                elif entry in _TABLES:
                    self._tables[entry] = _ArrayFile(self._files, place, document, _TABLES[entry].fill)

    def _table(self, name: str, ndim: int, column: ColumnType) -> _ArrayFile:
        if name not in self._tables:
            where = f"{os.path.join(self.where, name)}: missing; the trace is damaged"
            raise _missing(self._files, self.where, where)
        self._tables[name].demand_form(ndim, column)
        return self._tables[name]

    def _read_steps(self) -> NDArray[np.int64]:
        place = os.path.join(self.where, "step")
        parts = [np.empty(0, np.int64)]
        try:
            document = read_node(self._files.read, place)
            if document is None:
                return parts[0]
            self._tables["step"] = _ArrayFile(self._files, place, document, layout.STEP.fill)
            array = self._table("step", 1, layout.STEP)
            while (chunk := array.chunk((len(parts) - 1,), "steps")) is not None:
                parts.append(chunk)
                if (chunk < 0).any():
                    break
        except TraceError as error:
            self.tolerate(error)
            if len(parts) == 1:
                return parts[0]
        return self._committed(place, np.concatenate(parts), array.shape[0])


def open_zarr(path: Path | str, tolerate: Tolerate = refuse, files: Files = LOCAL) -> TraceSource:
    """A Zarr trace in a folder or at an address; it keeps no files open.

    ``tolerate`` is called with damage to parts of it; by default it raises. ``files`` reads its files.

    Raises:
        TraceError: it is not a trace, or it is damaged in a way that is not tolerated.
    """
    root = str(path)
    attrs = read_group(files, root, tolerate) or {}
    if not attrs and files.size(os.path.join(root, ".zgroup")) is not None:
        raise TraceError(f"{root}: not a gtrace trace (a Zarr format 2 store; only format 3 is read)")
    check_root(root, attrs)
    streams, ranks = [], {}
    for rank in files.folders(root):
        place = os.path.join(root, rank)
        part = read_group(files, place, tolerate) if rank.startswith("rank") else None
        if part is None:
            continue
        ranks[rank] = part
        for group in files.folders(place):
            key, folder = StreamKey.parse(rank, group), os.path.join(place, group)
            with tolerated(tolerate):
                if key is not None and read_group(files, folder, tolerate) is not None:
                    streams.append(_ZarrStream(files, folder, key, tolerate))
    ended = all(part.get("status") == "complete" for part in ranks.values())
    if attrs.get("status") == "writing" and ended and len(ranks) == attrs.get(WRITERS):
        # The last process to end could not have the lock of the root in time; it did write its own part.
        attrs = {**attrs, "status": "complete"}
    return TraceSource(root, attrs, streams, ranks=ranks)


#: attribute of the root: expected number of writing processes
WRITERS = "writers"
_LEVEL = 5
#: length with which arrays are declared at first
_FIRST_ROWS = 1024
_SHARD_BYTES = 128 * 1024 * 1024


def _array_document(form: ArrayForm, *, plain: bool) -> dict[str, Any]:
    """The metadata of an array, as zarr-python writes them, without a shape."""
    dtype, fill = form.column
    blosc = {"typesize": dtype.itemsize, "cname": "lz4", "clevel": _LEVEL, "shuffle": "bitshuffle", "blocksize": 0}
    return {
        "shape": [],
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(form.chunks)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": "NaN" if math.isnan(fill) else fill,
        "codecs": [
            {"name": "bytes"} | ({"configuration": _LITTLE} if dtype.itemsize > 1 else {}),
            *([] if plain else [{"name": "blosc", "configuration": blosc}]),
            {"name": "crc32c"},
        ],
        "attributes": dict(form.attributes),
        "dimension_names": list(form.dimensions),
        "zarr_format": 3,
        "node_type": "array",
        "storage_transformers": [],
    }


def _make_stream(root: str, key: StreamKey, process: Mapping[str, Any]) -> str:
    """Make the groups of a stream; returns its folder. ``process`` are the attributes of its rank's group."""
    rank = os.path.join(root, key.rank_group)
    if not os.path.isdir(rank):
        make_group(rank, {**process, "rank": key.rank})
    folder = os.path.join(rank, key.group)
    make_group(folder, key._asdict())
    return folder


def _gathered(key: StreamKey, arrays: Iterable[_Array], process: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a stream and its arrays, by path; ``process`` are the attributes of its rank's group."""
    group = f"{key.rank_group}/{key.group}"
    return {
        key.rank_group: group_document({**process, "rank": key.rank}),
        group: group_document(key._asdict()),
        **{f"{group}/{array.entry}": array.document for array in arrays},
    }


class _Array:
    """One array on disk with the step as its first axis, in a stream's folder; ``plain`` does not compress chunks."""

    def __init__(self, folder: str, form: ArrayForm, *, plain: bool = False) -> None:
        self.folder = os.path.join(folder, form.entry)
        self.entry = form.entry
        self.chunks = form.chunks
        self.column = form.column
        #: declared number of columns
        self.columns = form.columns
        self._codec = None if plain else Blosc("lz4", _LEVEL, BITSHUFFLE)
        self.document = _array_document(form, plain=plain)

    def set_rows(self, rows: int) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.folder)
        self.document["shape"] = [rows, self.columns][: len(self.chunks)]
        write_json(self.folder, self.document)

    def place(self, block: int, part: int) -> str:
        return os.path.join(self.folder, f"c.{block}.{part}" if len(self.chunks) == 2 else f"c.{block}")

    def encode(self, values: NDArray[Any]) -> tuple[bytes | memoryview, bytes]:
        """A whole chunk, C-contiguous, encoded, with its checksum."""
        encoded = values.reshape(-1).view(np.uint8) if self._codec is None else self._codec.encode(values)
        check = checksum_bytes(encoded).to_bytes(4, "little")
        return (encoded.data if isinstance(encoded, np.ndarray) else encoded), check


class _OpenRows(_Array):
    """An array that keeps its last row of chunks in memory until it is flushed."""

    #: index of the row of chunks in memory; -1 without one
    block = -1
    _dirty = False
    _rows: NDArray[Any] = np.empty((0, 0))
    #: the first row of the last call, and the row of chunks that it was added to, once that is full
    _first = -1
    _earlier: tuple[int, NDArray[Any]] | None = None

    def put_rows(self, row: int, values: NDArray[Any]) -> None:
        """Take rows; those before ``row`` are committed."""
        self._first, self._earlier = row, None
        height = self.chunks[0]
        while len(values):
            block, offset = divmod(row, height)
            if block != self.block or self.columns > self._rows.shape[1]:
                self._make_room(block)
            part = values[: height - offset]
            self._rows[offset : offset + len(part), : part.shape[1]] = part
            self._dirty = True
            row, values = row + len(part), values[len(part) :]

    def _make_room(self, block: int) -> None:
        width = self.chunks[1] if len(self.chunks) == 2 else 1
        # A table has a chunk for each band of rows, also before its first tensor.
        shape = (self.chunks[0], max(-(-self.columns // width), 1) * width)
        if block != self.block:
            self.flush()
            if self._first > self.block * self.chunks[0] and self._first // self.chunks[0] == self.block:
                # It has committed rows: needed again if those of this call are discarded.
                self._earlier, self._rows = (self.block, self._rows), np.empty((0, 0))
            self.block = block
            # One buffer for all chunks: fresh memory costs more than the work on it.
            self._rows = self._rows if self._rows.shape == shape else np.empty(shape, self.column.dtype)
            self._rows.fill(self.column.fill)
        else:
            more = (shape[0], shape[1] - self._rows.shape[1])
            self._rows = np.hstack((self._rows, np.full(more, self.column.fill, self.column.dtype)))

    def open_row(self, row: int) -> NDArray[Any]:
        values: NDArray[Any] = self._rows[row % self.chunks[0]]
        return values

    def discard(self, rows: range) -> None:
        block, offset = divmod(rows.start, self.chunks[0])
        if self._earlier is not None and self._first == rows.start:
            (self.block, self._rows), self._earlier = self._earlier, None
        elif block < self.block:
            self.block, self._dirty = -1, False
        if block == self.block:
            self._rows[offset : offset + len(rows)] = self.column.fill
            self._dirty = True

    def flush(self) -> None:
        """Replace the chunk files of the last rows if some rows are not in them."""
        width = self.chunks[1] if len(self.chunks) == 2 else 1
        for part in range(self._rows.shape[1] // width if self._dirty else 0):
            columns = np.ascontiguousarray(self._rows[:, part * width : (part + 1) * width])
            write_beside(self.place(self.block, part), *self.encode(columns))
        self._dirty = False


class _LongRows(_Array):
    """A tensor with rows in chunks of their own. A row is invisible before its commit, so it is written at once.

    A writer that dies in between leaves files that nobody reads.
    """

    def put_rows(self, row: int, values: NDArray[Any]) -> None:
        """Write rows; chunks beyond the last byte of a sketch are not written."""
        length = self.chunks[1]
        end = values.shape[1] if self.column.dtype == layout.BYTES else self.columns
        for number, one in enumerate(values, row):
            for part, start in enumerate(range(0, end, length)):
                piece = np.ascontiguousarray(one[start : start + length], self.column.dtype)
                if piece.size < length:
                    piece = np.concatenate((piece, np.full(length - piece.size, self.column.fill, self.column.dtype)))
                write_file(self.place(number, part), *self.encode(piece))

    def discard(self, rows: range) -> None:
        for row, part in itertools.product(rows, range(-(-self.columns // self.chunks[1]))):
            Path(self.place(row, part)).unlink(missing_ok=True)

    def flush(self) -> None:
        """Nothing to do: rows are already written."""


class ZarrStreamSink:
    """One stream's folder. Arrays are declared longer than the committed rows and cut to them at the end.

    It holds one chunk of at most 256 KiB per tensor and the last rows of the tables. Rows become visible with the call
    of ``commit``; several at once are as many as :func:`gtrace.trace.journal.together` allows.
    """

    def __init__(self, root: str, key: StreamKey, *, plain: bool) -> None:
        self._folder = _make_stream(root, key, {})
        self._plain = plain
        self._rows = _FIRST_ROWS
        self._committed = 0
        self._specs: list[TensorSpec] = []
        self._tensors: list[_OpenRows | _LongRows] = []
        self._tables: dict[str, _OpenRows] = {}

    def add_tensor(self, spec: TensorSpec) -> None:
        """Make room for a tensor; its index is the next one of the stream."""
        kind = _LongRows if spec.chunk_rows == 1 else _OpenRows
        array = kind(self._folder, spec.form, plain=self._plain)
        array.set_rows(self._rows)
        self._specs.append(spec)
        self._tensors.append(array)

    def write_rows(self, spec: TensorSpec, row: int, values: NDArray[Any]) -> None:
        """Take consecutive rows, the first of which is ``row``: (rows, elements), float32 or bytes.

        A row that is too short is padded. The values are copied or written on return.
        """
        self._grow(row + len(values))
        if spec.chunk_rows == 1 or len(values) > 1:
            self.check_place()
        if spec.size:
            self._tensors[spec.index].put_rows(row, values)

    def check_place(self) -> None:
        """See that the journal is in its place; FileNotFoundError if it was deleted, moved or replaced."""
        if self._committed:
            self._journal.check_place()

    def discard(self, rows: range, specs: Sequence[TensorSpec]) -> None:
        """Forget these tensors' rows since the last commit: they will be absent, or written again."""
        for array in (*(self._tensors[spec.index] for spec in specs), *self._tables.values()):
            array.discard(rows)
        if self._committed:
            self._journal.trim()

    def commit(self, row: int, rows: Rows) -> None:
        """Make these rows, the first of which is ``row``, durable and then, as the last step, visible."""
        end = row + len(rows.steps)
        self._grow(end)
        self._make_tables(rows.statistics)
        # Made with the first rows even if they need none: it shows that the writer lives.
        journal = self._journal
        if end % MOST_ROWS and len(rows.steps) == 1:
            if journal.full:
                self._flush()
                journal.restart(row)
            present = np.flatnonzero(rows.statistics["present"]).tolist()
            short = [self._tensors[index] for index in present if in_journal(self._specs[index])]
            journal.append(row, rows, [array.open_row(row) for array in short if isinstance(array, _OpenRows)])
            self._put_tables(row, rows)
        else:
            journal.check_place()
            # Chunks of every table end at multiples of 64 rows, so up to one of these none stays unwritten.
            self._put_tables(row, rows)
            self._flush()
        self._committed = end

    def _put_tables(self, row: int, rows: Rows) -> None:
        for name, table in rows.statistics.items():
            self._tables[name].put_rows(row, table)
        for name, values in rows.scalars.items():
            # A missing chunk reads as NaN: values that a run never records cost no file.
            if not np.isnan(values).all() or self._tables[name].block >= 0:
                self._tables[name].put_rows(row, values[:, None])
        self._tables["step"].put_rows(row, rows.steps[:, None])

    @functools.cached_property
    def _journal(self) -> JournalWriter:
        names = [name for name in self._tables if name != "step" and name not in layout.SCALARS]
        return JournalWriter(os.path.join(self._folder, "step"), names)

    def _flush(self, beat: Beat = layout.go_on) -> None:
        # ``step`` comes last.
        for array in (*self._tensors, *self._tables.values()):
            array.flush()
            beat()

    def _grow(self, rows: int) -> None:
        if rows > self._rows:
            self._rows *= 2
            self._set_rows()

    def _make_tables(self, statistics: Iterable[str]) -> None:
        count = len(self._tensors)
        if not self._tables:
            tables = {form.entry: _OpenRows(self._folder, form) for form in layout.table_forms(statistics, count)}
            for table in tables.values():
                table.set_rows(self._rows)
            self._tables = tables
        for table in (self._tables[name] for name in statistics):
            if table.columns != count:
                table.columns = count
                table.set_rows(self._rows)

    def _set_rows(self, beat: Beat = layout.go_on) -> None:
        for array in (*self._tensors, *self._tables.values()):
            array.set_rows(self._rows)
            beat()

    def close(self, beat: Beat) -> list[_Array]:
        """Cut the arrays to the committed rows; returns them."""
        if self._tables:
            self._flush(beat)
        self._rows = self._committed
        self._set_rows(beat)
        if self._tables:
            self._journal.remove()
        return [*self._tensors, *self._tables.values()]


class ZarrSink:
    """A newly started Zarr trace."""

    def __init__(self, path: Path, *, plain: bool = False) -> None:
        self._path = path
        self._plain = plain
        self._streams: dict[StreamKey, ZarrStreamSink] = {}

    def stream(self, key: StreamKey) -> ZarrStreamSink:
        """A new stream."""
        made = self._streams[key] = ZarrStreamSink(str(self._path), key, plain=self._plain)
        return made

    def close(self, attrs: Mapping[str, Any], beat: Beat = layout.go_on) -> None:
        """Cut the arrays to the committed rows and store the final attributes."""
        self.check_place()
        # First, as long as there is room: if the disk is full, rows stay in journals.
        write_group(str(self._path), {**attrs, "status": "interrupted"})
        write_root(str(self._path), attrs, self.cut(beat))

    def check_place(self) -> None:
        """See that the trace is in its place; FileNotFoundError if it was deleted, moved or replaced."""
        for stream in self._streams.values():
            stream.check_place()

    def cut(self, beat: Beat) -> dict[str, Any]:
        """Cut the arrays to the committed rows; returns the metadata of everything that this sink wrote, by path."""
        gathered: dict[str, Any] = {}
        for key, stream in self._streams.items():
            gathered |= _gathered(key, stream.close(beat), {})
        return gathered


def write_zarr(source: TraceSource, root: str, *, sharded: bool) -> None:
    """Write a finished trace, in shards of at most 128 MiB or in a writer's chunks; TraceError for damage."""
    make_group(root, source.attrs)
    gathered: dict[str, Any] = {}
    for stream in source.streams:
        if stream.steps.size:
            process = source.ranks.get(stream.key.rank_group, {})
            folder = _make_stream(root, stream.key, process)
            arrays = [_write_array(folder, array, sharded=sharded) for array in arrays_of(stream)]
            gathered |= _gathered(stream.key, arrays, process)
    write_root(root, source.attrs, gathered)


def _write_array(folder: str, whole: WholeArray, *, sharded: bool) -> _Array:
    form, array = whole.form, _Array(folder, whole.form)
    height, width = form.chunks[0], form.chunks[1] if len(form.chunks) == 2 else 1
    parts = max(-(-form.columns // width), 1)
    bands = 1
    if sharded:
        # Rows of chunks in a shard, at least one.
        band = height * width * parts * form.column.dtype.itemsize
        bands = max(min(_SHARD_BYTES // band, _MOST_CHUNKS // parts, -(-whole.rows // height)), 1)
        codec = {
            "chunk_shape": list(form.chunks),
            "codecs": array.document["codecs"],
            "index_codecs": _INDEX_CODECS,
            "index_location": "end",
        }
        array.document["codecs"] = [{"name": _SHARDS, "configuration": codec}]
        outer = [bands * height, parts * width][: len(form.chunks)]
        array.document["chunk_grid"]["configuration"]["chunk_shape"] = outer
    array.set_rows(whole.rows)
    blocks = (_encode_block(array, block, parts) for block in whole.blocks)
    number = 0
    while chunks := list(itertools.chain.from_iterable(itertools.islice(blocks, bands))):
        if sharded:
            _write_shard(array.place(number, 0), chunks + [None] * (bands * parts - len(chunks)))
        for part, chunk in enumerate(() if sharded else chunks):
            if chunk is not None:
                write_file(array.place(number, part), chunk)
        number += 1
    return array


def _encode_block(array: _Array, block: NDArray[Any] | None, parts: int) -> list[bytes | None]:
    height, width = array.chunks[0], array.chunks[1] if len(array.chunks) == 2 else 1
    out: list[bytes | None] = [None] * parts
    if block is not None:
        block = block.reshape(len(block), -1)
        for part in range(min(parts, -(-block.shape[1] // width))):
            piece = block[:, part * width : (part + 1) * width]
            chunk = np.full((height, width), array.column.fill, array.column.dtype)
            chunk[: piece.shape[0], : piece.shape[1]] = piece
            out[part] = b"".join(array.encode(chunk))
    return out


def _write_shard(path: str, chunks: Sequence[bytes | None]) -> None:
    """Write a new file with these chunks, in C order; writes nothing if all of them are missing."""
    if not any(chunk is not None for chunk in chunks):
        return
    index = np.full((len(chunks), 2), _MISSING, "<u8")
    place = 0
    with open(path, "xb") as file:
        for number, chunk in enumerate(chunks):
            if chunk is not None:
                file.write(chunk)
                index[number] = place, len(chunk)
                place += len(chunk)
        file.write(index.tobytes())
        file.write(checksum_bytes(index.reshape(-1).view(np.uint8)).to_bytes(4, "little"))
