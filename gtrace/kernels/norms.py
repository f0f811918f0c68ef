"""Norms of buckets, and what is found on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.kernels._jit import inline, jit

if TYPE_CHECKING:
    from numpy.typing import NDArray

L2, LINF, L1, NONE = 0, 1, 2, 3
LANES = 64
#: float sums run over blocks of this many elements in index order, whatever the chunks of the caller
BLOCK = 1 << 20
FLOAT32_MAX = 3.4028234663852886e38
_ABS = np.uint32(0x7FFFFFFF)
_INF = np.uint32(0x7F800000)


@inline
def _lane_sum(x: NDArray[np.floating[Any]], lanes: NDArray[np.float64], power: int) -> float:
    # Fixed lanes make the order of the additions, and so the sum, independent of the vector width.
    n = x.size
    for k in range(LANES):
        lanes[k] = 0.0
    whole = n // LANES
    if power == 2:
        for b in range(whole):
            xb = x[b * LANES : b * LANES + LANES]
            for k in range(LANES):
                v = np.float64(xb[k])
                lanes[k] += v * v
        for k in range(whole * LANES, n):
            v = np.float64(x[k])
            lanes[k - whole * LANES] += v * v
    else:
        for b in range(whole):
            xb = x[b * LANES : b * LANES + LANES]
            for k in range(LANES):
                lanes[k] += abs(np.float64(xb[k]))
        for k in range(whole * LANES, n):
            lanes[k - whole * LANES] += abs(np.float64(x[k]))
    total = 0.0
    for k in range(LANES):
        total += lanes[k]
    return total


@jit
def power_sum(x: NDArray[np.floating[Any]], power: int) -> float:
    """Sum of |x|^power, power 1 or 2, in float64 and in a fixed order."""
    lanes = np.zeros(LANES)
    total = 0.0
    for p in range(0, x.size, BLOCK):
        total += _lane_sum(x[p : p + BLOCK], lanes, power)
    return total


@jit
def count_nonfinite(x: NDArray[np.float32]) -> int:
    """How many elements are NaN or infinite, read off the bits."""
    bits = x.view(np.uint32)
    count = 0
    for i in range(bits.size):
        count += np.int64((bits[i] & _ABS) >= _INF)
    return count


@jit
def bucket_scales(x: NDArray[np.float32], bucket: int, norm: int, out: NDArray[np.float32]) -> None:
    """Norm of every bucket of ``bucket`` consecutive finite elements, rounded to float32 and capped at its maximum.

    The largest |x| of a bucket is never above its scale: squares of float32 are exact in float64, and sums,
    roots and roundings are monotone.
    """
    lanes = np.zeros(LANES)
    n = x.size
    for b in range(out.size):
        xb = x[b * bucket : min(n, b * bucket + bucket)]
        if norm == NONE:
            scale = 1.0
        elif norm == LINF:
            bits = xb.view(np.uint32)
            top = np.uint32(0)
            for i in range(bits.size):
                top = max(top, bits[i] & _ABS)
            holder = np.empty(1, np.uint32)
            holder[0] = top
            scale = np.float64(holder.view(np.float32)[0])
        else:
            scale = 0.0
            for p in range(0, xb.size, BLOCK):
                scale += _lane_sum(xb[p : p + BLOCK], lanes, 2 if norm == L2 else 1)
            if norm == L2:
                scale = np.sqrt(scale)
        out[b] = np.float32(min(scale, FLOAT32_MAX))
