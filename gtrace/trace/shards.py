"""Shards of Zarr v3: one file that holds many chunks, and an index of them at its end.

The layout is that of the codec ``sharding_indexed``: chunks in any order, then for each chunk of the shard in C order
its offset and length as little-endian uint64, then the CRC-32C of those.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.errors import TraceError
from gtrace.trace.statistics import checksum_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from gtrace.trace.files import Files

CODEC = "sharding_indexed"
#: Chunks of a shard that a reader takes: the index then has 1 MiB.
MOST_CHUNKS = 65536

_MISSING = 2**64 - 1
_INDEX_CODECS = ("bytes", "crc32c")


def inner_chunks(
    configuration: Mapping[str, Any], outer: tuple[int, ...], inner: tuple[int, ...] | None
) -> tuple[int, ...] | str:
    """How many chunks a shard has along each axis, or what is wrong with the codec's configuration.

    Args:
        configuration: of the codec.
        outer: shape of a shard.
        inner: shape of a chunk, None where it is none.
    """
    names = [codec.get("name") for codec in configuration.get("index_codecs", ()) if isinstance(codec, dict)]
    if tuple(names) != _INDEX_CODECS or configuration.get("index_location", "end") != "end":
        return "an index of shards that is not at their end, or not with codecs bytes and crc32c"
    settings = configuration["index_codecs"][0].get("configuration") or {}
    if not isinstance(settings, dict) or settings.get("endian", "little") != "little":
        return "an index of shards that is not little-endian"
    if inner is None or len(inner) != len(outer) or any(a % b for a, b in zip(outer, inner, strict=True)):
        return "chunks that do not divide their shard"
    counts = tuple(a // b for a, b in zip(outer, inner, strict=True))
    if math.prod(counts) > MOST_CHUNKS:
        return f"shards of {math.prod(counts)} chunks; at most {MOST_CHUNKS} are read"
    return counts


class ShardReader:
    """Chunks of an array's shards; the index of the last shard is kept.

    Args:
        files: how files are read.
        counts: chunks of a shard along each axis.
    """

    def __init__(self, files: Files, counts: tuple[int, ...]) -> None:
        self._files = files
        self.counts = counts
        # Replaced as a whole, so that several threads may read.
        self._last: tuple[str, NDArray[np.uint64]] | None = None

    def shard(self, place: tuple[int, ...]) -> tuple[int, ...]:
        """The shard in which a chunk lies."""
        return tuple(a // b for a, b in zip(place, self.counts, strict=True))

    def locate(self, path: str, place: tuple[int, ...], limit: int) -> tuple[int, int] | None:
        """Offset and length of a chunk in its shard's file, None where there is none.

        Raises:
            TraceError: the index is damaged, or claims more than ``limit`` bytes or than the file has.
        """
        last = self._last
        if last is None or last[0] != path:
            index = self._read_index(path)
            if index is None:
                return None
            self._last = last = (path, index)
        within = tuple(a % b for a, b in zip(place, self.counts, strict=True))
        offset, length = (int(number) for number in last[1][int(np.ravel_multi_index(within, self.counts))])
        if offset == _MISSING and length == _MISSING:
            return None
        if length > limit:
            raise TraceError(f"{path}: a chunk of {length} bytes where at most {limit} can belong; damaged or foreign")
        return offset, length

    def read(self, path: str, place: tuple[int, ...], limit: int) -> bytes | None:
        """The encoded chunk, None where there is none; errors as of :meth:`locate`."""
        found = self.locate(path, place, limit)
        return None if found is None else self._files.read_range(path, *found)

    def _read_index(self, path: str) -> NDArray[np.uint64] | None:
        length = 16 * math.prod(self.counts) + 4
        with self._files.opened(path) as file:
            if file is None:
                return None
            if file.size < length:
                raise TraceError(f"{path}: truncated: {file.size} bytes, and the index of the shard alone has {length}")
            data = file.read(file.size - length, length)
        if checksum_bytes(np.frombuffer(data, np.uint8)[:-4]) != int.from_bytes(data[-4:], "little"):
            raise TraceError(f"{path}: checksum mismatch in the index of the shard; damaged or truncated")
        index: NDArray[np.uint64] = np.frombuffer(data, "<u8", 2 * math.prod(self.counts)).reshape(-1, 2)
        return index


def write_shard(path: str, chunks: Sequence[bytes | None]) -> None:
    """Write a new file with these chunks, given in C order; nothing where none of them is there."""
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
