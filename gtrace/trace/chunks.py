"""Chunk files that somebody else may have written: few codecs are read, and sizes are known before decoding."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np
from numcodecs.blosc import Blosc
from numcodecs.zstd import Zstd

from gtrace.errors import TraceError
from gtrace.trace.statistics import checksum_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

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
