"""The numbers about a row that are stored beside it."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numcodecs.checksum32 import CRC32C

from gtrace.trace.format import VALUES

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Elements that are looked at together: their squares stay in the processor's cache.
_BLOCK = 1 << 15


class RowStatistics(NamedTuple):
    """What a trace keeps about one tensor at one step.

    Attributes:
        norm2: sum of squares of the finite values, float64 sums over blocks of 2^15 elements in index order.
        absmax: largest magnitude of the finite values; 0 when there is none.
        zeros: values that are 0 or -0.
        nonfinite: values that are NaN or infinite.
        crc32c: CRC-32C of the little-endian float32 bytes.
    """

    norm2: float
    absmax: float
    zeros: int
    nonfinite: int
    crc32c: int


def checksum_bytes(data: bytes | NDArray[np.uint8], before: int = 0) -> int:
    """CRC-32C (Castagnoli) of bytes, or of those with the checksum ``before`` and these after them."""
    return int(CRC32C.checksum(data, before))


def checksum(values: NDArray[np.float32]) -> int:
    """CRC-32C of the little-endian bytes of a contiguous float32 array."""
    return checksum_bytes(np.ascontiguousarray(values, VALUES).view(np.uint8))


class _Scratch(threading.local):
    """Memory for one block, one of each per thread: fresh memory would cost more than the sums."""

    def __init__(self) -> None:
        self.squares = np.empty(_BLOCK)
        self.zero = np.empty(_BLOCK, np.bool_)


_scratch = _Scratch()


def row_statistics(values: NDArray[np.float32]) -> RowStatistics:
    """Statistics of a contiguous 1-D float32 array."""
    norm2, absmax, zeros, nonfinite = 0.0, 0.0, 0, 0
    zero = _scratch.zero
    # A signaling NaN is no reason to warn: it is counted.
    with np.errstate(invalid="ignore"):
        for start in range(0, values.size, _BLOCK):
            block = values[start : start + _BLOCK]
            zeros += int(np.count_nonzero(np.equal(block, 0.0, out=zero[: block.size])))
            total = _sum_of_squares(block)
            # Squares of finite float32 values never overflow float64, so a finite sum proves all of them finite.
            if not math.isfinite(total):
                nonfinite += block.size
                block = block[np.isfinite(block)]
                nonfinite -= block.size
                total = _sum_of_squares(block)
            norm2 += total
            if block.size:
                absmax = max(absmax, float(np.maximum.reduce(block)), -float(np.minimum.reduce(block)))
    return RowStatistics(norm2, absmax, zeros, nonfinite, checksum(values))


def _sum_of_squares(block: NDArray[np.float32]) -> float:
    room = _scratch.squares[: block.size]
    # Cast and multiplied apart: in one call, numpy would do both through a small buffer.
    room[...] = block
    np.multiply(room, room, out=room)
    return float(np.add.reduce(room))
