"""Arrays and groups of a Zarr v3 trace on disk: zarr-python makes the metadata, chunks are encoded here."""

from __future__ import annotations

import functools
import json
import math
import os
from typing import TYPE_CHECKING, Any

import numpy as np
from numcodecs.blosc import BITSHUFFLE, Blosc

from gtrace.trace import format as layout
from gtrace.trace.files import write_beside, write_file
from gtrace.trace.shards import CODEC, MOST_CHUNKS, write_shard
from gtrace.trace.statistics import checksum_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from gtrace.trace.format import Column

_LEVEL = 5
_SHARD_BYTES = 128 * 1024 * 1024


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
        column: Column,
        chunks: tuple[int, ...],
        dimensions: tuple[str, ...],
        attributes: Mapping[str, Any],
    ) -> None:
        self.folder = folder
        self.entry = os.path.basename(folder)
        self.chunks = chunks
        self.column = column
        self._codec = Blosc("lz4", _LEVEL, BITSHUFFLE)
        self.document = json.loads(array_document(column.dtype.name, column.fill, len(chunks)))
        self.document["chunk_grid"]["configuration"]["chunk_shape"] = list(chunks)
        self.document["dimension_names"] = list(dimensions)
        self.document["attributes"] = dict(attributes)

    def set_shape(self, *shape: int) -> None:
        """Store the metadata with this shape."""
        os.makedirs(self.folder, exist_ok=True)
        self.document["shape"] = list(shape)
        write_json(self.folder, self.document)

    def encode(self, values: NDArray[Any]) -> tuple[bytes, bytes]:
        """A whole chunk, C-contiguous, as it is stored: what the codec makes of it, and a checksum of that."""
        encoded = self._codec.encode(values)
        return encoded, checksum_bytes(encoded).to_bytes(4, "little")

    def put_new_chunk(self, key: str, values: NDArray[Any]) -> None:
        """Write a chunk file that no committed row is in: whoever dies meanwhile leaves one that nobody reads."""
        write_file(os.path.join(self.folder, key), *self.encode(values))

    def put_chunk(self, key: str, values: NDArray[Any]) -> None:
        """Replace one chunk file; ``values`` is a whole chunk, C-contiguous."""
        write_beside(os.path.join(self.folder, key), *self.encode(values))


class ShardedArray(Array):
    """An array of known length that is written once, in shards of at most 128 MiB or one row of chunks.

    Args:
        folder: to be made.
        column: type and fill value.
        shape: of the array.
        chunks: shape of a chunk.
        dimensions: names of the axes.
        attributes: of the array.
    """

    def __init__(
        self,
        folder: str,
        column: Column,
        shape: tuple[int, ...],
        chunks: tuple[int, ...],
        dimensions: tuple[str, ...],
        attributes: Mapping[str, Any],
    ) -> None:
        super().__init__(folder, column, chunks, dimensions, attributes)
        parts = max(-(-shape[1] // chunks[1]), 1) if len(shape) == 2 else 1
        band = math.prod(chunks) * parts * column.dtype.itemsize
        most = min(_SHARD_BYTES // band, MOST_CHUNKS // parts, -(-shape[0] // chunks[0]))
        self._bands, self._parts = max(most, 1), parts
        codec = {
            "chunk_shape": list(chunks),
            "codecs": self.document["codecs"],
            "index_codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}},
                {"name": "crc32c"},
            ],
            "index_location": "end",
        }
        self.document["codecs"] = [{"name": CODEC, "configuration": codec}]
        whole = [self._bands * chunks[0], *(width * parts for width in chunks[1:])]
        self.document["chunk_grid"]["configuration"]["chunk_shape"] = whole
        self.set_shape(*shape)

    def write(self, blocks: Iterable[NDArray[Any] | None]) -> None:
        """Write all rows.

        Args:
            blocks: (rows of a chunk or, at the end, fewer; elements) each; None where there are no values. Chunks
                beyond the elements are left out.
        """
        shard: list[bytes | None] = []
        number = 0
        for block in blocks:
            shard += [None] * self._parts if block is None else self._encode_block(block)
            if len(shard) == self._bands * self._parts:
                self._put_shard(number, shard)
                number, shard = number + 1, []
        if shard:
            self._put_shard(number, shard + [None] * (self._bands * self._parts - len(shard)))

    def _encode_block(self, block: NDArray[Any]) -> list[bytes | None]:
        height, width = self.chunks[0], self.chunks[1] if len(self.chunks) == 2 else 1
        out: list[bytes | None] = []
        for part in range(self._parts):
            piece = block[:, part * width : (part + 1) * width]
            if piece.shape[1] == 0:
                out.append(None)
                continue
            chunk = np.full((height, width), self.column.fill, self.column.dtype)
            chunk[: piece.shape[0], : piece.shape[1]] = piece
            out.append(b"".join(self.encode(chunk)))
        return out

    def _put_shard(self, number: int, chunks: list[bytes | None]) -> None:
        write_shard(os.path.join(self.folder, f"c.{number}" + ".0" * (len(self.chunks) - 1)), chunks)
