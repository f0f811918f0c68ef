"""Reading a Zarr v3 trace, whoever wrote it: metadata and sizes are checked before anything is decoded."""

from __future__ import annotations

import math
import os
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from gtrace.errors import TraceError, printable
from gtrace.trace import format as layout
from gtrace.trace.chunks import CODEC, PIPELINES, ShardReader, decode_chunk, inner_chunks, most_encoded
from gtrace.trace.files import LOCAL
from gtrace.trace.format import StreamKey
from gtrace.trace.journal import MAX_BYTES, NAME, JournalRows, in_journal, parse_journal
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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from gtrace.trace.files import Files
    from gtrace.trace.format import ColumnType, TensorSpec

_TYPES = {c.dtype.name: c.dtype for c in (*layout.STATISTICS.values(), layout.STEP)} | {"float32": layout.VALUES}
_TABLES = frozenset((*layout.STATISTICS, *layout.LENGTHS, *layout.EXTRAS, *layout.SCALARS))


def _read_json(files: Files, folder: str) -> dict[str, Any] | None:
    """The zarr.json of a folder, or None when there is none (a writer died between the two)."""
    path = os.path.join(folder, "zarr.json")
    data = files.read(path, layout.MAX_METADATA_BYTES)
    if data is None:
        return None
    document = parse_json(data, path)
    if not isinstance(document, dict) or document.get("zarr_format") != 3:
        raise TraceError(f"{path}: not Zarr format 3, the only one that is read")
    if not isinstance(document.setdefault("attributes", {}), dict):
        raise TraceError(f"{path}: 'attributes' is no object")
    return document


def _read_group(files: Files, folder: str) -> dict[str, Any] | None:
    document = _read_json(files, folder)
    if document is None:
        return None
    if document.get("node_type") != "group":
        raise TraceError(f"{folder}: an array where a group belongs; not a gtrace trace")
    return dict(document["attributes"])


def _is_group(files: Files, folder: str, tolerate: Callable[[TraceError], None]) -> bool:
    """Whether there is a group; one whose metadata are damaged is one, where that is tolerated."""
    try:
        return _read_group(files, folder) is not None
    except TraceError as error:
        tolerate(error)
        return True


def _read_root(files: Files, folder: str, tolerate: Callable[[TraceError], None]) -> dict[str, Any] | None:
    """Attributes of the trace; only what makes it one where they are damaged and that is tolerated."""
    try:
        return _read_group(files, folder)
    except TraceError as error:
        tolerate(error)
        return {"format": layout.FORMAT, "version": layout.VERSION}


def is_gtrace_zarr(path: Path) -> bool:
    """Whether the folder says that it is a gtrace trace of whatever version."""
    try:
        attrs = _read_group(LOCAL, str(path))
    except TraceError:
        return False
    return attrs is not None and attrs.get("format") == layout.FORMAT


def _naturals(value: object, least: int) -> tuple[int, ...] | None:
    if not isinstance(value, list) or any(type(v) is not int or v < least for v in value):
        return None
    return tuple(value)


class _ArrayFile:
    """The metadata of one array, checked, and its chunks."""

    def __init__(self, files: Files, folder: str, document: dict[str, Any], most_bytes: int) -> None:
        self._files = files
        self.folder = folder
        self.attrs: dict[str, Any] = document["attributes"]
        if document.get("node_type") != "array":
            self._reject("a group where an array belongs")
        grid, keys = document.get("chunk_grid"), document.get("chunk_key_encoding")
        if not isinstance(grid, dict) or grid.get("name") != "regular":
            self._reject("no regular chunk grid")
        shape = _naturals(document.get("shape"), 0)
        configuration = grid.get("configuration")
        chunks = _naturals(configuration.get("chunk_shape") if isinstance(configuration, dict) else None, 1)
        if shape is None or chunks is None or len(shape) != len(chunks):
            self._reject("its shape and chunk shape do not fit together")
        if keys != {"name": "default", "configuration": {"separator": "."}}:
            self._reject("chunk keys other than c.0.0 are not read")
        dtype = document.get("data_type")
        if not isinstance(dtype, str) or dtype not in _TYPES:
            self._reject(f"data type {printable(str(dtype)[:80])} is not one that a trace holds")
        if document.get("storage_transformers"):
            self._reject("storage transformers are not read")
        self.shape, self.dtype = shape, _TYPES[dtype]
        self._shards, chunks, codecs = self._shard(document.get("codecs"), chunks)
        self.chunks = chunks
        self._pipeline = self._codecs(codecs)
        self._bytes = math.prod(chunks) * self.dtype.itemsize
        if self._bytes > most_bytes:
            self._reject(f"chunks of {self._bytes} bytes; at most {most_bytes} are read")

    def _reject(self, why: str) -> NoReturn:
        raise TraceError(f"{os.path.join(self.folder, 'zarr.json')}: {why}; damaged or foreign")

    def _shard(self, codecs: object, outer: tuple[int, ...]) -> tuple[ShardReader | None, tuple[int, ...], object]:
        """How shards are read, where the array has any; shape and codecs of its chunks."""
        first = codecs[0] if isinstance(codecs, list) and len(codecs) == 1 else None
        if not isinstance(first, dict) or first.get("name") != CODEC:
            return None, outer, codecs
        configuration = first.get("configuration")
        if not isinstance(configuration, dict) or not isinstance(configuration.get("index_codecs"), list):
            self._reject("no configuration of its shards")
        inner = _naturals(configuration.get("chunk_shape"), 1)
        counts = inner_chunks(configuration, outer, inner)
        if isinstance(counts, str) or inner is None:
            self._reject(str(counts))
        return ShardReader(self._files, counts), inner, configuration.get("codecs")

    def _codecs(self, codecs: object) -> tuple[str, ...]:
        if not isinstance(codecs, list) or not all(isinstance(codec, dict) for codec in codecs):
            self._reject("no list of codecs")
        names = tuple(str(codec.get("name"))[:40] for codec in codecs)
        if names not in PIPELINES:
            self._reject(f"codecs {printable(', '.join(names)[:120])} are not on the list of those that are read")
        configuration = codecs[0].get("configuration") or {}
        if not isinstance(configuration, dict) or configuration.get("endian", "little") != "little":
            self._reject("numbers are not little-endian")
        return names

    def _file(self, place: tuple[int, ...]) -> str:
        """The file in which a chunk is."""
        shard = self._shards.shard(place) if self._shards else place
        return os.path.join(self.folder, "c." + ".".join(map(str, shard)))

    def demand(self, place: tuple[int, ...], about: str = "") -> None:
        """Raise TraceError where a chunk is not there."""
        path = self._file(place)
        if self._shards and self._shards.locate(path, place, most_encoded(self._bytes)) is not None:
            return
        if self._shards or not self._files.exists(path):
            raise self._missing(path, about)

    def _missing(self, path: str, about: str) -> TraceError:
        return TraceError(f"{path}: {f'{about}: ' if about else ''}the chunk is missing")

    def demanded(self, place: tuple[int, ...], about: str) -> NDArray[Any]:
        """A whole chunk; TraceError where it is not there."""
        chunk = self.chunk(place, about)
        if chunk is None:
            raise self._missing(self._file(place), about)
        return chunk

    def chunk(self, place: tuple[int, ...], about: str) -> NDArray[Any] | None:
        """A whole chunk, None when it is not there; ``about`` says which tensor and step it is wanted for."""
        path, limit = self._file(place), most_encoded(self._bytes)
        encoded = self._shards.read(path, place, limit) if self._shards else self._files.read(path, limit)
        if encoded is None:
            return None
        out = np.empty(self.chunks, self.dtype)
        decode_chunk(encoded, self._pipeline, out, f"{path}: {about}")
        return out


class ZarrStream:
    """One stream's folder, clipped to the rows that were committed when it was opened.

    Args:
        files: how files are read.
        folder: where it is.
        key: which stream it is.
        tolerate: is told of damage to single tensors, tables and the journal; by default it raises.
    """

    def __init__(
        self, files: Files, folder: str, key: StreamKey, tolerate: Callable[[TraceError], None] = refuse
    ) -> None:
        self.key = key
        self._files = files
        self._folder = folder
        self._tables: dict[str, _ArrayFile] = {}
        self._tensors: dict[int, _ArrayFile] = {}
        self._statistics: dict[str, NDArray[Any]] = {}
        # The journal first and steps next: while the trace is being written rows move from it into chunks, and all
        # that they refer to is there when it is looked at later.
        where = os.path.join(folder, "step", NAME)
        journal = None if files.is_link(os.path.dirname(where)) else files.read(where, MAX_BYTES)
        steps = self._read_steps(tolerate)
        self._base = steps.size
        self._journal = JournalRows(
            parse_journal(journal or b"", key.kind, where, tolerate), self._base, where, tolerate
        )
        self.steps = committed_steps(folder, np.concatenate((steps, self._journal.steps())), None, tolerate)
        self._base = min(self._base, self.steps.size)
        self._journal.cut(self.steps.size)
        found: list[TensorSpec] = []
        self.specs = found
        for entry in files.folders(folder):
            place = os.path.join(folder, entry)
            try:
                self._find(place, entry, found)
            except TraceError as error:
                tolerate(error)
        check_indices(folder, found, tolerate)
        self._journal.set_specs({spec.index: spec for spec in found}, tolerate)
        # One column more than there are tensors, so that a lost one is noticed, whatever the shape claims.
        self._columns = max((spec.index + 1 for spec in found), default=0) + 1
        self.tensors = present_tensors(folder, found, known_columns(self, tolerate), tolerate)

    def _find(self, place: str, entry: str, found: list[TensorSpec]) -> None:
        document = _read_json(self._files, place)
        if document is None:
            return
        if "name" in document["attributes"]:
            array = _ArrayFile(self._files, place, document, layout.MAX_CHUNK_BYTES)
            if len(array.shape) != 2:
                raise TraceError(f"{place}: a tensor has to be (step, element); damaged or foreign")
            spec = tensor_spec(place, entry, array.attrs, array.shape[1], array.chunks)
            if array.dtype != spec.column.dtype:
                raise TraceError(f"{place}: a tensor has to be {spec.column.dtype.name}; damaged or foreign")
            found.append(spec)
            self._tensors[spec.index] = array
        elif entry in _TABLES:
            self._tables[entry] = _ArrayFile(self._files, place, document, layout.MAX_TABLE_CHUNK_BYTES)

    def _table(self, name: str, ndim: int, column: ColumnType) -> _ArrayFile:
        array = self._tables.get(name)
        if array is None or len(array.shape) != ndim or array.dtype != column.dtype:
            raise TraceError(f"{os.path.join(self._folder, name)}: missing or of another type; the trace is damaged")
        return array

    def _read_steps(self, tolerate: Callable[[TraceError], None]) -> NDArray[np.int64]:
        """Steps of the rows that are in chunks."""
        place = os.path.join(self._folder, "step")
        try:
            document = None if self._files.is_link(place) else _read_json(self._files, place)
            if document is None:
                return np.empty(0, np.int64)
            self._tables["step"] = _ArrayFile(self._files, place, document, layout.MAX_TABLE_CHUNK_BYTES)
            array = self._table("step", 1, layout.STEP)
        except TraceError as error:
            tolerate(error)
            return np.empty(0, np.int64)
        parts: list[NDArray[Any]] = []
        try:
            while (chunk := array.chunk((len(parts),), "steps")) is not None:
                parts.append(chunk)
                if (chunk < 0).any():
                    break
        except TraceError as error:
            tolerate(error)
        stored = np.concatenate(parts) if parts else np.empty(0, np.int64)
        return committed_steps(array.folder, stored, array.shape[0], tolerate)

    @cached_property
    def scalars(self) -> dict[str, NDArray[np.float64]]:
        """name -> one float64 per committed row, NaN where nothing was said."""
        return {name: self.scalar(name) for name in layout.SCALARS}

    def scalar(self, name: str) -> NDArray[np.float64]:
        """One of the numbers about the steps."""
        rows = self._base
        out = np.full(self.steps.size, np.nan)
        out[rows:] = self._journal.scalar(name)
        if rows:
            array = self._table(name, 1, layout.SCALAR)
            height = array.chunks[0]
            for block in range(-(-rows // height)):
                chunk = array.chunk((block,), name)
                if chunk is not None:
                    stop = min((block + 1) * height, rows)
                    out[block * height : stop] = chunk[: stop - block * height]
        return out

    def statistic(self, name: str) -> NDArray[Any]:
        """(committed rows, tensors) of one of the statistics."""
        if name not in self._statistics:
            column = layout.statistic_column(name)
            late = self._journal.statistic(name, column)[:, : self._columns]
            early = self._read_statistic(name, column)
            table = np.full((self.steps.size, max(late.shape[1], early.shape[1])), column.fill, column.dtype)
            table[: self._base, : early.shape[1]] = early
            table[self._base :, : late.shape[1]] = late
            self._statistics[name] = table
        return self._statistics[name]

    def lengths(self, name: str) -> NDArray[Any] | None:
        """(committed rows, tensors) of one of the lengths, None where there is no such array."""
        return self.statistic(name) if self.key.kind == "neural" and name in self._tables else None

    def further(self, name: str) -> NDArray[Any] | None:
        """(committed rows, tensors) of one of the further numbers, None where there is no such array."""
        return self.statistic(name) if name in self._tables or name in self._journal.names else None

    def _read_statistic(self, name: str, column: ColumnType) -> NDArray[Any]:
        rows = self._base
        if rows == 0:
            return np.empty((0, 0), column.dtype)
        array = self._table(name, 2, column)
        height, width = array.chunks
        columns = min(array.shape[1], self._columns)
        blocks, parts = -(-rows // height), -(-columns // width)
        # Memory is asked for only where files stand behind it, whatever the metadata claims.
        for block in range(blocks if parts else 0):
            array.demand((block, 0))
        bands = []
        for part in range(parts):
            last = array.chunk((blocks - 1, part), name)
            if last is None:
                break
            band = np.full((blocks * height, width), column.fill, column.dtype)
            band[-height:] = last
            for block in range(blocks - 1):
                # Rows from before these tensors appeared have no chunk.
                chunk = array.chunk((block, part), name)
                if chunk is not None:
                    band[block * height : (block + 1) * height] = chunk
            bands.append(band[:rows])
        if not bands:
            return np.empty((rows, 0), column.dtype)
        return np.hstack(bands)[:, :columns]

    def read_rows(self, spec: TensorSpec, row: int) -> tuple[int, NDArray[Any]]:
        """The rows of the chunk that holds ``row``; of a tensor in several chunks, or of sketches, that row alone."""
        if row >= self._base and in_journal(spec):
            return row, self._journal.values(spec, row)[None]
        array = self._tensors[spec.index]
        about = f"tensor '{printable(spec.name)}', step {self.steps[row]}"
        if spec.sketched:
            return row, stored_bytes(lambda part: self._read_part(spec, row, part, about), spec, about)[None]
        block, offset = divmod(row, spec.chunk_rows)
        if spec.parts == 1:
            first = block * spec.chunk_rows
            chunk = array.demanded((block, 0), about)
            # Rows that the journal has may be missing in their chunk.
            return first, chunk[: max(self._base - first, 1), : spec.size]
        # Memory is asked for only where files stand behind it, whatever the metadata claims.
        for part in range(spec.parts):
            array.demand((block, part), about)
        values = np.empty(spec.size, np.float32)
        length = spec.chunk_elements
        for part in range(spec.parts):
            chunk = array.demanded((block, part), about)
            values[part * length : (part + 1) * length] = chunk[offset, : spec.size - part * length]
        return row, values[None]

    def read_pieces(self, spec: TensorSpec, row: int) -> Iterator[NDArray[np.float32]]:
        """One row, chunk by chunk."""
        if row >= self._base and in_journal(spec):
            yield self._journal.values(spec, row)
            return
        about = f"tensor '{printable(spec.name)}', step {self.steps[row]}"
        for part in range(spec.parts):
            yield self._read_part(spec, row, part, about)[: spec.size - part * spec.chunk_elements]

    def _read_part(self, spec: TensorSpec, row: int, part: int, about: str) -> NDArray[Any]:
        block, offset = divmod(row, spec.chunk_rows)
        chunk = self._tensors[spec.index].demanded((block, part), about)
        return np.ascontiguousarray(chunk[offset])


class ZarrSource:
    """A Zarr trace. It holds no files open, so there is nothing to close.

    Args:
        path: its folder, or its address.
        tolerate: is told of damage to parts of it; by default it raises.
        files: how files are read there.
    """

    def __init__(self, path: Path | str, tolerate: Callable[[TraceError], None] = refuse, files: Files = LOCAL) -> None:
        self.path = str(path)
        attrs = _read_root(files, self.path, tolerate)
        if attrs is None:
            old = files.exists(os.path.join(self.path, ".zgroup"))
            why = " (a Zarr format 2 store; only format 3 is read)" if old else ""
            raise TraceError(
                f"{self.path}: not a gtrace trace{why}; `gtrace capture SCRIPT` makes one, `gtrace import` from arrays"
            )
        check_root(self.path, attrs)
        self.attrs = attrs
        streams = []
        for rank in files.folders(self.path):
            rank_folder = os.path.join(self.path, rank)
            if not rank.startswith("rank") or not _is_group(files, rank_folder, tolerate):
                continue
            for group in files.folders(rank_folder):
                key = StreamKey.parse(rank, group)
                folder = os.path.join(rank_folder, group)
                try:
                    if key is not None and _is_group(files, folder, tolerate):
                        streams.append(ZarrStream(files, folder, key, tolerate))
                except TraceError as error:
                    tolerate(error)
        self.streams = tuple(sorted(streams, key=lambda stream: stream.key.order))

    def close(self) -> None:
        """Nothing is held open."""
