"""Norms, means and deviations of buckets, with counts from the same pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.kernels._jit import inline, jit
from gtrace.kernels.bits import FLOATS, PIECE, prefetch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.kernels import Floats, Singles

#: GIVEN: scales are known already
L2, LINF, L1, NONE, GIVEN = range(5)
LANES = 64
#: float sums run over blocks of this many elements in index order, whatever the chunks of the caller
BLOCK = 1 << 20
_CHUNK = 1024
#: buckets up to this length, a power of two, are compared across a whole chunk
_SHORT = 64
#: values between those that are compared and those that are fetched
_AHEAD = 1 << 12
#: columns of a bucket's row of moments: mean and deviation of the signed normalized values, and the scale
MEAN, SIGMA, SCALE = range(3)
FLOAT32_MAX = 3.4028234663852886e38
# Results are cast to 32 bits, because numba's have 64, which halves the lanes of a vector.
_ABS = np.int32(0x7FFFFFFF)
_INF = np.int32(0x7F800000)


@inline
def _lane_sum(x: NDArray[np.floating[Any]], lanes: Floats, power: int) -> float:
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
def count_nonfinite(x: Singles) -> int:
    """Number of elements that are NaN or infinite, from their bits."""
    bits = x.view(np.int32)
    count = 0
    for p in range(0, bits.size, BLOCK):
        found = np.int32(0)
        # A slice, because an index that might be negative keeps the loop from becoming vectors.
        block = bits[p : p + BLOCK]
        for k in range(block.size):
            found = np.int32(found + np.int32(np.int32(block[k] & _ABS) >= _INF))
        count += found
    return count


@inline
def _short_maxima(bits: NDArray[np.int32], bucket: int, out: NDArray[np.int32]) -> int:
    """The largest of each ``bucket`` bits of magnitudes, of whole chunks; returns how many buckets that were.

    Neighbors are compared until one of each bucket is left: a loop over a few values would not pay for its start.
    """
    held = np.empty(_CHUNK, np.int32)
    several = _CHUNK // bucket
    chunks = bits.size // _CHUNK
    for c in range(chunks):
        block, target = bits[c * _CHUNK : (c + 1) * _CHUNK], out[c * several : (c + 1) * several]
        for p in range(0, _CHUNK, PIECE):
            prefetch(bits, c * _CHUNK + p + _AHEAD, PIECE, FLOATS)
            bp, hp = block[p : p + PIECE], held[p : p + PIECE]
            for i in range(PIECE):
                hp[i] = np.int32(bp[i] & _ABS)
        width = _CHUNK
        while width > several:
            width //= 2
            for i in range(np.uint64(width)):
                held[i] = max(held[2 * i], held[2 * i + 1])
        for i in range(several):
            target[i] = held[i]
    return chunks * several


@jit
def bucket_scales(x: Singles, bucket: int, norm: int, out: Singles) -> bool:
    """Norm of every bucket of ``bucket`` consecutive elements, rounded to float32 and capped at its maximum.

    The largest |x| of a bucket is never above its scale: squares of float32 are exact in float64, and sums,
    roots and roundings are monotone.

    Returns:
        whether all elements are finite; if not, scales have no meaning.
    """
    lanes = np.zeros(LANES)
    holder = np.empty(1, np.int32)
    n = x.size
    finite, done = True, 0
    if norm == LINF and bucket <= _SHORT and _CHUNK % bucket == 0:
        tops = out.view(np.int32)
        done = _short_maxima(x.view(np.int32), bucket, tops)
        for b in range(done):
            finite &= tops[b] < _INF
    for b in range(done, out.size):
        xb = x[b * bucket : min(n, b * bucket + bucket)]
        if norm == NONE:
            scale = 1.0
            finite &= count_nonfinite(xb) == 0
        elif norm == LINF:
            bits = xb.view(np.int32)
            top = np.int32(0)
            for i in range(bits.size):
                top = max(top, np.int32(bits[i] & _ABS))
            holder[0] = top
            finite &= top < _INF
            scale = np.float64(holder.view(np.float32)[0])
        else:
            scale = 0.0
            for p in range(0, xb.size, BLOCK):
                scale += _lane_sum(xb[p : p + BLOCK], lanes, 2 if norm == L2 else 1)
            finite &= np.isfinite(scale)
            if norm == L2:
                scale = np.sqrt(scale)
        out[b] = np.float32(min(scale, FLOAT32_MAX))
    return finite


@inline
def _centred(x: Singles, centre: float, lanes: Floats, squares: Floats) -> None:
    # Fixed lanes keep the order of the additions, and so the sums, independent of the vector width.
    whole = x.size // LANES
    for b in range(whole):
        xb = x[b * LANES : b * LANES + LANES]
        for k in range(LANES):
            d = np.float64(xb[k]) - centre
            lanes[k] += d
            squares[k] += d * d
    for k in range(whole * LANES, x.size):
        d = np.float64(x[k]) - centre
        lanes[k - whole * LANES] += d
        squares[k - whole * LANES] += d * d


@jit
def bucket_moments(x: Singles, bucket: int, scales: Singles, out: Floats) -> None:
    """Mean and standard deviation (n - 1) of x / scale over each bucket of finite values, and scale, into out[b, 3].

    A bucket of one value has deviation 0; one of scale 0 has zeros. The squares are taken about the mean of
    the bucket, which is still in cache then: about 0 they would cancel where the mean is large.
    """
    lanes = np.empty(LANES)
    squares = np.empty(LANES)
    for b in range(scales.size):
        xb = x[b * bucket : min(x.size, (b + 1) * bucket)]
        scale = np.float64(scales[b])
        out[b, SCALE] = scale
        out[b, MEAN] = 0.0
        out[b, SIGMA] = 0.0
        if scale == 0.0:
            continue
        mean = 0.0
        for _ in range(2):
            total, square = 0.0, 0.0
            for p in range(0, xb.size, BLOCK):
                lanes[:] = 0.0
                squares[:] = 0.0
                _centred(xb[p : p + BLOCK], mean, lanes, squares)
                for k in range(LANES):
                    total += lanes[k]
                    square += squares[k]
            mean += total / xb.size
        out[b, MEAN] = mean / scale
        if xb.size > 1:
            out[b, SIGMA] = np.sqrt(max(0.0, square - total * total / xb.size) / (xb.size - 1)) / scale
