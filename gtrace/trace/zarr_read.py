"""Reading a Zarr v3 trace, whoever wrote it: metadata and sizes are checked before anything is decoded."""

from __future__ import annotations

import math
import os
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from gtrace.errors import TraceError
from gtrace.trace import format as layout
from gtrace.trace.checks import (
    check_indices,
    check_root,
    committed_steps,
    parse_json,
    present_tensors,
    tensor_spec,
)
from gtrace.trace.chunks import PIPELINES, decode_chunk, most_encoded
from gtrace.trace.files import folders, read_regular
from gtrace.trace.format import StreamKey
from gtrace.trace.names import printable
from gtrace.trace.sketched import stored_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from gtrace.trace.format import Column, TensorSpec

_TYPES = {c.dtype.name: c.dtype for c in (*layout.STATISTICS.values(), layout.STEP)} | {"float32": layout.VALUES}
_TABLES = frozenset((*layout.STATISTICS, *layout.LENGTHS, *layout.SCALARS))


def _read_json(folder: str) -> dict[str, Any] | None:
    """The zarr.json of a folder, or None when there is none (a writer died between the two)."""
    path = os.path.join(folder, "zarr.json")
    data = read_regular(path, layout.MAX_METADATA_BYTES)
    if data is None:
        return None
    document = parse_json(data, path)
    if not isinstance(document, dict) or document.get("zarr_format") != 3:
        raise TraceError(f"{path}: not Zarr format 3, the only one that is read")
    if not isinstance(document.setdefault("attributes", {}), dict):
        raise TraceError(f"{path}: 'attributes' is no object")
    return document


def _read_group(folder: str) -> dict[str, Any] | None:
    document = _read_json(folder)
    if document is None:
        return None
    if document.get("node_type") != "group":
        raise TraceError(f"{folder}: an array where a group belongs; not a gtrace trace")
    return dict(document["attributes"])


def is_gtrace_zarr(path: Path) -> bool:
    """Whether the folder says that it is a gtrace trace of whatever version."""
    try:
        attrs = _read_group(str(path))
    except TraceError:
        return False
    return attrs is not None and attrs.get("format") == layout.FORMAT


def _naturals(value: object, least: int) -> tuple[int, ...] | None:
    if not isinstance(value, list) or any(type(v) is not int or v < least for v in value):
        return None
    return tuple(value)


class _ArrayFile:
    """The metadata of one array, checked, and its chunks."""

    def __init__(self, folder: str, document: dict[str, Any], most_bytes: int) -> None:
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
        self.shape, self.chunks, self.dtype = shape, chunks, _TYPES[dtype]
        self._pipeline = self._codecs(document.get("codecs"))
        self._bytes = math.prod(chunks) * self.dtype.itemsize
        if self._bytes > most_bytes:
            self._reject(f"chunks of {self._bytes} bytes; at most {most_bytes} are read")

    def _reject(self, why: str) -> NoReturn:
        raise TraceError(f"{os.path.join(self.folder, 'zarr.json')}: {why}; damaged or foreign")

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

    def encoded_chunk(self, key: str) -> bytes | None:
        """The file of a chunk, None when there is none."""
        return read_regular(os.path.join(self.folder, key), most_encoded(self._bytes))

    def decode(self, encoded: bytes, key: str, about: str) -> NDArray[Any]:
        """A whole chunk; ``about`` says which tensor and step it is wanted for."""
        out = np.empty(self.chunks, self.dtype)
        decode_chunk(encoded, self._pipeline, out, f"{os.path.join(self.folder, key)}: {about}")
        return out

    def chunk(self, key: str, about: str) -> NDArray[Any] | None:
        """A whole chunk, None when there is no file."""
        encoded = self.encoded_chunk(key)
        return None if encoded is None else self.decode(encoded, key, about)


class ZarrStream:
    """One stream's folder, clipped to the rows that were committed when it was opened."""

    def __init__(self, folder: str, key: StreamKey) -> None:
        self.key = key
        self._folder = folder
        self._tables: dict[str, _ArrayFile] = {}
        self._tensors: dict[int, _ArrayFile] = {}
        self._statistics: dict[str, NDArray[Any]] = {}
        # Steps first: while the trace is being written, all that they refer to is there when it is looked at later.
        self.steps = self._read_steps()
        found: list[TensorSpec] = []
        for entry in folders(folder):
            place = os.path.join(folder, entry)
            document = _read_json(place)
            if document is None:
                continue
            if "name" in document["attributes"]:
                array = _ArrayFile(place, document, layout.MAX_CHUNK_BYTES)
                if len(array.shape) != 2:
                    raise TraceError(f"{place}: a tensor has to be (step, element); damaged or foreign")
                spec = tensor_spec(place, entry, array.attrs, array.shape[1], array.chunks)
                if array.dtype != spec.column.dtype:
                    raise TraceError(f"{place}: a tensor has to be {spec.column.dtype.name}; damaged or foreign")
                found.append(spec)
                self._tensors[spec.index] = array
            elif entry in _TABLES:
                self._tables[entry] = _ArrayFile(place, document, layout.MAX_TABLE_CHUNK_BYTES)
        check_indices(folder, found)
        # One column more than there are tensors, so that a lost one is noticed, whatever the shape claims.
        self._columns = len(found) + 1
        self.tensors = present_tensors(folder, found, self.statistic("present"))

    def _table(self, name: str, ndim: int, column: Column) -> _ArrayFile:
        array = self._tables.get(name)
        if array is None or len(array.shape) != ndim or array.dtype != column.dtype:
            raise TraceError(f"{os.path.join(self._folder, name)}: missing or of another type; the trace is damaged")
        return array

    def _read_steps(self) -> NDArray[np.int64]:
        place = os.path.join(self._folder, "step")
        document = None if os.path.islink(place) else _read_json(place)
        if document is None:
            return np.empty(0, np.int64)
        self._tables["step"] = _ArrayFile(place, document, layout.MAX_TABLE_CHUNK_BYTES)
        array = self._table("step", 1, layout.STEP)
        parts: list[NDArray[Any]] = []
        while (chunk := array.chunk(f"c.{len(parts)}", "steps")) is not None:
            parts.append(chunk)
            if (chunk < 0).any():
                break
        stored = np.concatenate(parts) if parts else np.empty(0, np.int64)
        return committed_steps(array.folder, stored, array.shape[0])

    @cached_property
    def scalars(self) -> dict[str, NDArray[np.float64]]:
        """name -> one float64 per committed row, NaN where nothing was said."""
        rows = self.steps.size
        out = {name: np.full(rows, np.nan) for name in layout.SCALARS}
        if rows:
            for name, values in out.items():
                array = self._table(name, 1, layout.SCALAR)
                height = array.chunks[0]
                for block in range(-(-rows // height)):
                    chunk = array.chunk(f"c.{block}", name)
                    if chunk is not None:
                        values[block * height : (block + 1) * height] = chunk[: rows - block * height]
        return out

    def statistic(self, name: str) -> NDArray[Any]:
        """(committed rows, tensors) of one of the statistics."""
        if name not in self._statistics:
            column = layout.statistics_of(self.key.kind)[name]
            self._statistics[name] = self._read_statistic(name, column)
        return self._statistics[name]

    def lengths(self, name: str) -> NDArray[Any] | None:
        """(committed rows, tensors) of one of the lengths, None where there is no such array."""
        return self.statistic(name) if self.key.kind == "neural" and name in self._tables else None

    def _read_statistic(self, name: str, column: Column) -> NDArray[Any]:
        rows = self.steps.size
        if rows == 0:
            return np.empty((0, 0), column.dtype)
        array = self._table(name, 2, column)
        height, width = array.chunks
        columns = min(array.shape[1], self._columns)
        blocks, parts = -(-rows // height), -(-columns // width)
        # Memory is asked for only where files stand behind it, whatever the metadata claims.
        for block in range(blocks if parts else 0):
            if not os.path.isfile(os.path.join(array.folder, f"c.{block}.0")):
                raise TraceError(f"{os.path.join(array.folder, f'c.{block}.0')}: the chunk is missing")
        bands = []
        for part in range(parts):
            last = array.chunk(f"c.{blocks - 1}.{part}", name)
            if last is None:
                break
            band = np.full((blocks * height, width), column.fill, column.dtype)
            band[-height:] = last
            for block in range(blocks - 1):
                # Rows from before these tensors appeared have no chunk.
                chunk = array.chunk(f"c.{block}.{part}", name)
                if chunk is not None:
                    band[block * height : (block + 1) * height] = chunk
            bands.append(band[:rows])
        if not bands:
            return np.empty((rows, 0), column.dtype)
        return np.hstack(bands)[:, :columns]

    def read_rows(self, spec: TensorSpec, row: int) -> tuple[int, NDArray[Any]]:
        """The rows of the chunk that holds ``row``; of a tensor in several chunks, or of sketches, that row alone."""
        array = self._tensors[spec.index]
        about = f"tensor '{printable(spec.name)}', step {self.steps[row]}"
        if spec.sketched:
            return row, stored_bytes(lambda part: self._read_part(spec, row, part, about), spec, about)[None]
        block, offset = divmod(row, spec.chunk_rows)
        if spec.parts == 1:
            chunk = array.chunk(f"c.{block}.0", about)
            if chunk is None:
                raise TraceError(f"{os.path.join(array.folder, f'c.{block}.0')}: {about}: the chunk is missing")
            return block * spec.chunk_rows, chunk[:, : spec.size]
        # Memory is asked for only where files stand behind it, whatever the metadata claims.
        for part in range(spec.parts):
            if not os.path.isfile(os.path.join(array.folder, f"c.{block}.{part}")):
                raise TraceError(f"{os.path.join(array.folder, f'c.{block}.{part}')}: {about}: the chunk is missing")
        values = np.empty(spec.size, np.float32)
        length = spec.chunk_elements
        for part in range(spec.parts):
            chunk = array.chunk(f"c.{block}.{part}", about)
            assert chunk is not None
            values[part * length : (part + 1) * length] = chunk[offset, : spec.size - part * length]
        return row, values[None]

    def read_pieces(self, spec: TensorSpec, row: int) -> Iterator[NDArray[np.float32]]:
        """One row, chunk by chunk."""
        about = f"tensor '{printable(spec.name)}', step {self.steps[row]}"
        for part in range(spec.parts):
            yield self._read_part(spec, row, part, about)[: spec.size - part * spec.chunk_elements]

    def _read_part(self, spec: TensorSpec, row: int, part: int, about: str) -> NDArray[Any]:
        block, offset = divmod(row, spec.chunk_rows)
        array = self._tensors[spec.index]
        chunk = array.chunk(f"c.{block}.{part}", about)
        if chunk is None:
            raise TraceError(f"{os.path.join(array.folder, f'c.{block}.{part}')}: {about}: the chunk is missing")
        return np.ascontiguousarray(chunk[offset])


class ZarrSource:
    """A Zarr trace on disk. It holds no files open, so there is nothing to close."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        attrs = _read_group(self.path)
        if attrs is None:
            old = " (a Zarr format 2 store; only format 3 is read)" if (path / ".zgroup").exists() else ""
            raise TraceError(f"{self.path}: not a gtrace trace{old}; `gtrace capture SCRIPT` makes one")
        check_root(self.path, attrs)
        self.attrs = attrs
        streams = []
        for rank in folders(self.path):
            rank_folder = os.path.join(self.path, rank)
            if not rank.startswith("rank") or _read_group(rank_folder) is None:
                continue
            for group in folders(rank_folder):
                key = StreamKey.parse(rank, group)
                folder = os.path.join(rank_folder, group)
                if key is not None and _read_group(folder) is not None:
                    streams.append(ZarrStream(folder, key))
        self.streams = tuple(sorted(streams, key=lambda stream: stream.key.order))

    def close(self) -> None:
        """Nothing is held open."""
