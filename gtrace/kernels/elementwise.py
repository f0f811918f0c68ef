"""One pass over a tensor, value by value: casts, pruning, signs, and the choice of values to send."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gtrace.kernels._jit import inline, jit
from gtrace.kernels.counter import MASK32, mix, uniform, words
from gtrace.kernels.norms import FLOAT32_MAX

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.kernels import Bytes, Flags, Floats, Ints, Singles, Symbols

_SIGN = np.uint32(0x8000)
_REST = np.uint32(0x7FFF)
_LARGEST = np.uint32(0x7F7F)
_ONE = np.uint32(1)
_16 = np.uint32(16)
_CHUNK = 1024
#: up to this number of middles all are counted
_FEW = 96
_ZERO, _MOST = np.float32(0.0), np.float32(FLOAT32_MAX)
_S31 = np.uint64(31)
_S16 = np.uint64(16)


@jit
def add_scaled(x: Singles, y: Singles, a: np.float32, b: np.float32, out: Singles) -> None:
    """a x + b y into ``out``; each product and the sum are float32, and one that overflows is the largest there is."""
    for i in range(out.size):
        out[i] = min(max(a * x[i] + b * y[i], -_MOST), _MOST)


@jit
def round_affine(x: Singles, low: float, width: float, steps: int, out: Symbols) -> None:
    """floor((x - low) steps / width + 1/2) in float64.

    Args:
        x: float32[n], all in [low, low + width].
        low: the least of them.
        width: above 0.
        steps: the highest code.
        out: uint16[n], overwritten.
    """
    top = np.float64(steps)
    for i in range(x.size):
        # A division instead of a product with steps / width, which would move ties by its rounding.
        out[i] = np.int32((np.float64(x[i]) - low) * top / width + 0.5)


@jit
def round_to_integers(
    x: Singles, bucket: int, scales: Singles, steps: int, least: int, count: int, out: Symbols
) -> None:
    """The nearest of ``count`` integers from ``least`` on to x / scale * steps in float32, ties to even.

    Args:
        x: finite float32[n].
        bucket: values per scale.
        scales: float32, at least the bucket's largest magnitude.
        steps: see above.
        least: the first integer, at most 0.
        count: number of integers.
        out: uint16[n], written: the number of the integer, from 0.
    """
    step = np.float32(steps)
    for b in range(scales.size):
        start = b * bucket
        v, target, scale = x[start : start + bucket], out[start : start + bucket], scales[b]
        for i in range(v.size):
            k = int(np.rint(v[i] / scale * step)) - least if scale else -least
            target[i] = k if k < count else count - 1


@inline
def _searched(r: Singles, middles: Singles, half: int, place: NDArray[np.int32], out: Symbols) -> None:
    """How many middles, padded with infinities to 2 ``half``, are below each value, by halving steps of all at once."""
    for i in range(out.size):
        place[i] = 0
    step = np.int32(half)
    while step > 0:
        for i in range(out.size):
            passed = middles[np.uintp(np.int32(place[i] + step - np.int32(1)))] < r[i]
            place[i] = np.int32(place[i] + (step if passed else np.int32(0)))
        step = np.int32(step >> np.int32(1))
    for i in range(out.size):
        out[i] = place[i]


@jit
def round_to_table(x: Singles, bucket: int, scales: Singles, middles: Singles, out: Symbols) -> None:
    """The number of middles between entries of a table that lie below x / scale in float32.

    Args:
        x: finite float32[n].
        bucket: values per scale.
        scales: float32.
        middles: float32[m], ascending.
        out: uint16[n], written.
    """
    r, place, half, one = np.empty(_CHUNK, np.float32), np.empty(_CHUNK, np.int32), 1, np.uint16(1)
    while 2 * half <= middles.size:
        half *= 2
    padded = np.full(2 * half, np.float32(np.inf))
    padded[: middles.size] = middles
    for b in range(scales.size):
        divisor, stop = scales[b] or np.float32(np.inf), min(x.size, (b + 1) * bucket)
        for p in range(b * bucket, stop, _CHUNK):
            v, target = x[p : min(p + _CHUNK, stop)], out[p : min(p + _CHUNK, stop)]
            for i in range(v.size):
                r[i] = v[i] / divisor
                target[i] = 0
            if middles.size > _FEW:
                _searched(r, padded, half, place, target)
                continue
            # A few are all counted: a search would guess wrong at every other step.
            for k in range(middles.size):
                middle = middles[k]
                for i in range(target.size):
                    target[i] += one if r[i] > middle else np.uint16(0)


@jit
def add_by_code(x: Singles, codes: Symbols, sums: Floats, counts: Ints) -> None:
    """Add each value to the sum of its code, in float64 and in their order, and count it."""
    for i in range(x.size):
        code = np.uintp(codes[i])
        sums[code] += np.float64(x[i])
        counts[code] += 1


@jit
def to_bfloat16(bits: NDArray[np.uint32], out: Symbols) -> None:
    """Round the bits of finite float32 to the nearest upper half, ties to even; the largest is finite."""
    for i in range(bits.size):
        # Half of a last place, less one unless the last bit that stays is odd. No finite number overflows 32 bits.
        rounded = (bits[i] + (_REST + ((bits[i] >> _16) & _ONE))) >> _16
        out[i] = (rounded & _SIGN) | min(rounded & _REST, _LARGEST)


@jit
def to_bfloat16_at_random(bits: NDArray[np.uint32], high: np.uint64, low: np.uint64, start: int, out: Symbols) -> None:
    """Round the bits of finite float32 to one of the upper halves around them; the first is element ``start``.

    Up with the lower half over 2^16 as probability, from 16 random bits, so the mean is exact below the largest.
    """
    add, flip, last = words(high, low, start)
    first = np.uint64(start)
    for i in range(bits.size):
        random = np.uint32(mix((first + np.uint64(i)) & MASK32, add, flip, last) >> _S16)
        # A carry beyond the largest exponent gives an infinity, not an overflow.
        rounded = (bits[i] + random) >> _16
        out[i] = (rounded & _SIGN) | min(rounded & _REST, _LARGEST)


@jit
def prune(x: Singles, alpha: np.float32, high: np.uint64, low: np.uint64, start: int, out: Singles) -> None:
    """Keep |x| > alpha; else alpha sign(x) with probability |x| / alpha, and zero otherwise; ``alpha`` is positive.

    The quotient, unlike a product of alpha and the uniform, has its digits where alpha is a denormal. A block of
    2^32 elements has words of its own; ``start`` is the number of the first one.
    """
    u = np.empty(_CHUNK, np.float32)
    p = 0
    while p < x.size:
        q = min(p + _CHUNK, x.size)
        add, flip, last = words(high, low, start + p)
        base = np.uint64(start + p) & MASK32
        xb = x[p:q]
        ob = out[p:q]
        for i in range(xb.size):
            u[i] = uniform(base + np.uint64(i), add, flip, last)
        for i in range(xb.size):
            magnitude = abs(xb[i])
            small = alpha if u[i] < magnitude / alpha else _ZERO
            ob[i] = np.copysign(magnitude if magnitude > alpha else small, xb[i])
        p = q


@jit
def keep_large(x: Singles, alpha: np.float32, out: Singles) -> None:
    """Keep |x| >= alpha; the rest becomes zero."""
    for i in range(x.size):
        out[i] = x[i] if abs(x[i]) >= alpha else _ZERO


@jit
def toss_zeros(x: Singles, high: np.uint64, low: np.uint64, start: int, negative: Flags) -> None:
    """Let a fair coin of the key, one per element from ``start`` on, decide the sign of the zeros of float32[n]."""
    add, flip, last = words(high, low, start)
    first = np.uint64(start)
    for i in range(x.size):
        if x[i] == 0.0:
            negative[i] = mix((first + np.uint64(i)) & MASK32, add, flip, last) >> _S31 != np.uint64(0)


@jit
def two_means(x: Singles, bucket: int, means: Singles) -> None:
    """Per bucket the mean of its values that are not negative and that of its negative ones (0 for none).

    Args:
        x: float32[n].
        bucket: values per bucket.
        means: float32[buckets, 2], written.
    """
    for b in range(means.shape[0]):
        values = x[b * bucket : min((b + 1) * bucket, x.size)]
        upper = 0.0
        lower = 0.0
        below = 0
        for i in range(values.size):
            value = np.float64(values[i])
            upper += max(value, 0.0)
            lower += min(value, 0.0)
            below += value < 0.0
        above = values.size - below
        means[b, 0] = upper / above if above else 0.0
        means[b, 1] = lower / below if below else 0.0


@jit
def restore(bits: Bytes, bucket: int, values: Singles, out: Singles) -> None:
    """Look up each bit in its bucket's two values.

    Args:
        bits: uint8[n], each 0 or 1: packed ones would not be vectorized.
        bucket: values per bucket.
        values: float32[buckets, 2], for the bits 0 and 1.
        out: float32[n], written.
    """
    for b in range(values.shape[0]):
        start, stop = b * bucket, min((b + 1) * bucket, out.size)
        own, target = bits[start:stop], out[start:stop]
        zero, one = values[b, 0], values[b, 1]
        for i in range(target.size):
            target[i] = one if own[i] else zero


@jit
def fill_words(high: np.uint64, low: np.uint64, start: int, out: NDArray[np.uint32]) -> None:
    """The 32-bit words of a key's stream from number ``start`` on; one block of 2^32."""
    add, flip, last = words(high, low, start)
    for i in range(out.size):
        out[i] = mix(np.uint64(start + i) & MASK32, add, flip, last)


@jit
def above_local_peak(x: Singles, y: Singles, size: int, chosen: Flags, total: float) -> float:
    """Mark, bin by bin, the values with |y| at or above the bin's largest |x| and x not zero.

    Args:
        x: float32[n].
        y: float32[n].
        size: values per bin.
        chosen: bool[n], written.
        total: of bins before these.

    Returns:
        ``total`` and the bins' largest |x|, added one by one.
    """
    for start in range(0, x.size, size):
        xb = x[start : start + size]
        yb = y[start : start + size]
        out = chosen[start : start + size]
        peak = np.float32(0.0)
        for i in range(xb.size):
            peak = max(peak, abs(xb[i]))
        for i in range(xb.size):
            out[i] = abs(yb[i]) >= peak and xb[i] != 0.0
        total += np.float64(peak)
    return total
