"""Chunk files that somebody else may have written: few codecs are read, and sizes are known before decoding.

A shard of Zarr v3 is one file that holds many chunks, and an index of them at its end. The layout is that of the codec
``sharding_indexed``: chunks in any order, then for each chunk of the shard in C order its offset and length as
little-endian uint64, then the CRC-32C of those.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
from numcodecs.blosc import Blosc
from numcodecs.zstd import Zstd

from gtrace.errors import TraceError
from gtrace.trace.rows import checksum_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from gtrace.trace.files import Files


#: Orders of codecs that are read; what stands before the last two is the array's plain bytes.
PIPELINES = (
    ("bytes",),
    ("bytes", "crc32c"),
    ("bytes", "blosc"),
    ("bytes", "blosc", "crc32c"),
    ("bytes", "zstd"),
    ("bytes", "zstd", "crc32c"),
)

_BLOSC_HEADER = struct.Struct("<4BIII")
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


def most_encoded(size: int) -> int:
    """Bytes that ``size`` bytes can take when encoded by any of the codecs; a longer file is not read."""
    return size + size // 64 + 4096


def decode_chunk(encoded: bytes, pipeline: Sequence[str], out: NDArray[Any], where: str) -> None:
    """Decode one chunk into ``out``, a C-contiguous array of the exact size.

    Args:
        encoded: the chunk file.
        pipeline: names of its codecs, one of ``PIPELINES``.
        out: where the values go; its type and byte order are the stored ones.
        where: file, tensor and step, for messages.

    Raises:
        TraceError: truncated, damaged, or not of the size that the metadata promises.
    """
    data = memoryview(encoded)
    if pipeline[-1] == "crc32c":
        if len(data) < 4:
            raise TraceError(f"{where}: truncated chunk ({len(data)} bytes)")
        stored = int.from_bytes(data[-4:], "little")
        data = data[:-4]
        if checksum_bytes(np.frombuffer(data, np.uint8)) != stored:
            raise TraceError(f"{where}: checksum mismatch; the chunk is damaged or truncated")
    target = out.reshape(-1).view(np.uint8)
    if "blosc" in pipeline:
        _check_blosc(data, target.size, where)
        _decompress(Blosc(), data, target, where)
    elif "zstd" in pipeline:
        if _zstd_content(data) != target.size:
            raise TraceError(f"{where}: a zstd frame that does not hold the {target.size} bytes of a chunk")
        _decompress(Zstd(), data, target, where)
    elif len(data) != target.size:
        raise TraceError(f"{where}: truncated chunk ({len(data)} of {target.size} bytes)")
    else:
        target[:] = np.frombuffer(data, np.uint8)


def _decompress(codec: Blosc | Zstd, data: memoryview, target: NDArray[np.uint8], where: str) -> None:
    try:
        codec.decode(np.frombuffer(data, np.uint8), out=target)
    except (RuntimeError, ValueError) as error:
        raise TraceError(f"{where}: the chunk cannot be decompressed ({error})") from None


def _check_blosc(data: memoryview, size: int, where: str) -> None:
    if len(data) < _BLOSC_HEADER.size:
        raise TraceError(f"{where}: truncated chunk ({len(data)} bytes)")
    *_, raw, _, compressed = _BLOSC_HEADER.unpack_from(data)
    if raw != size or compressed != len(data):
        raise TraceError(
            f"{where}: truncated or foreign chunk (blosc header: {compressed} bytes for {raw}; "
            f"found {len(data)} for {size})"
        )


def _zstd_content(data: memoryview) -> int | None:
    """Content size in the header of a zstd frame (RFC 8878, 3.1.1.1), None where there is none."""
    if len(data) < 6 or data[:4] != _ZSTD_MAGIC:
        return None
    descriptor = data[4]
    single_segment = bool(descriptor & 0x20)
    width = (1 if single_segment else 0, 2, 4, 8)[descriptor >> 6]
    start = 5 + (not single_segment) + (0, 1, 2, 4)[descriptor & 3]
    if width == 0 or len(data) < start + width:
        return None
    return int.from_bytes(data[start : start + width], "little") + (256 if width == 2 else 0)


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
