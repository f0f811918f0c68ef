"""Small floating-point formats: magnitudes to codes on the bits of a float64, and back by table.

Within one binade the bit pattern of a positive float is linear in its value, so a pattern cut after M bits of mantissa
is the code rounded down, and the cut bits give the position of the value in its cell. Below the smallest normal number
the same holds after that number is added. float32 inputs and powers of two up to 2^300 are exact in float64; so is
this sum for the purpose of rounding: a float32 that is not a tie does not become one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gtrace.kernels._jit import inline, jit
from gtrace.kernels.bits import CHUNK, FLOATS, PIECE, pack_bytes, pack_chunk, prefetch, shift
from gtrace.kernels.counter import MASK32, mix, words

if TYPE_CHECKING:
    from gtrace.kernels import Bytes, Floats, Ints, Singles, Symbols

_DRAWN = 32
#: blocks up to this length, a power of two, have their factors spread over a chunk
_SHORT = 32
#: values between those that are encoded and those that are fetched
_AHEAD = 1 << 13
#: powers of two that are normal float32
_LEAST, _MOST = 2.0**-126, 2.0**127


@inline
def _magnitudes(
    x: Singles,
    start: int,
    stop: int,
    block: int,
    factors: Floats,
    single: bool,
    least: float,
    values: Floats,
    below: Ints,
) -> None:
    """|x| from start to stop times its factor, the smallest normal number added to the subnormal ones.

    Blocks may be short, so only this loop is cut at their ends.
    """
    first = np.uint64(start)
    p = start
    b = start // block
    while p < stop:
        q = min((b + 1) * block, stop)
        factor = factors[b]
        # Unsigned indices need no check for negative ones, and slicing would cost more than a short block.
        if single:
            for i in range(np.uint64(p), np.uint64(q)):
                # The product has at most 48 digits, so this rounds once, as a product of float32 does.
                values[i - first] = np.float64(np.float32(np.float64(abs(x[i])) * factor))
        else:
            for i in range(np.uint64(p), np.uint64(q)):
                values[i - first] = np.float64(abs(x[i])) * factor
        p = q
        b += 1
    for i in range(stop - start):
        small = values[i] < least
        below[i] = np.int64(small)
        values[i] += least if small else 0.0


@inline
def _single_factors(factor: float) -> tuple[np.float32, np.float32]:
    """Two float32 whose product is a factor: a product of float32 with one after the other is rounded once.

    Only powers of two lie beyond float32. Whatever is beyond it after the first one is saturated or zero after both.
    """
    if _LEAST <= factor <= _MOST:
        return np.float32(factor), np.float32(1.0)
    if factor > _MOST:
        return np.float32(2.0**64), np.float32(min(factor * 2.0**-64, _MOST))
    return np.float32(2.0**-64), np.float32(max(factor * 2.0**64, _LEAST))


@inline
def _spread(factors: Floats, block: int, held: Singles, out: Singles) -> bool:
    """The factor of each value of a chunk of whole blocks, or False: one of them lies beyond float32.

    Each pass doubles what the one before has made; both arrays are float32[CHUNK].
    """
    width, inside = CHUNK // block, True
    for b in range(width):
        inside &= _LEAST <= factors[b] <= _MOST
        out[b] = factors[b]
    while inside and width < CHUNK:
        for i in range(width):
            held[i] = out[i]
        for i in range(np.uint64(width)):
            out[2 * i], out[2 * i + 1] = held[i], held[i]
        width *= 2
    return inside


@inline
def _nearest(
    values: Singles,
    sums: Singles,
    x: Singles,
    mantissa: int,
    bias: int,
    top: int,
    sign: int,
    out: Symbols | Bytes,
) -> None:
    """Codes of the magnitudes of x times a factor, ``values``, with the signs of x; ``sums`` is overwritten."""
    normal, small, signs = values.view(np.int32), sums.view(np.int32), x.view(np.int32)
    cut = np.int32(23 - mantissa)
    half, one = np.int32((1 << (22 - mantissa)) - 1 - ((127 - bias) << 23)), np.int32(1)
    least, last = np.int32((128 - bias) << 23), np.int32(31)
    # The last digit of this number is a step of the subnormal ones, so adding it rounds to them.
    coarse = np.float32(2.0 ** (24 - bias - mantissa))
    sums[0] = coarse
    lowest = small[0]
    highest, minus = np.int32(top), np.int32(sign)
    for p in range(0, x.size, PIECE):
        prefetch(x, p + _AHEAD, PIECE, FLOATS)
        prefetch(out, p + CHUNK, PIECE, 2 * FLOATS)
        vp, sp = values[p : p + PIECE], sums[p : p + PIECE]
        for i in range(vp.size):
            sp[i] = vp[i] + coarse
    for i in range(x.size):
        v = normal[i]
        code = shift(np.int32(np.int32(v + half) + np.int32(shift(v, cut) & one)), cut)
        code = np.int32(small[i] - lowest) if v < least else code
        code = min(code, highest)
        out[i] = np.int32(code | np.int32(np.int32(signs[i] >> last) & minus))


@jit
def encode_nearest(
    x: Singles,
    block: int,
    factors: Floats,
    mantissa: int,
    bias: int,
    top: int,
    sign: int,
    width: int,
    packed: Bytes,
    out: Symbols,
) -> None:
    """Codes of the nearest magnitudes, ties to the even code, at most ``top``; negative values have bit ``sign`` set.

    In float32, which has twice the lanes of float64. A product with a power of two is exact, unless it is so large or
    small that its code is the largest or 0.

    Args:
        x: finite or infinite, never NaN.
        block: consecutive values that share a factor.
        factors: factors of |x|, one per block, positive: powers of two, or float32.
        mantissa, bias: of the format.
        top: the largest code.
        sign: the code bit of the sign, 2^(E + M).
        width: 0: codes go into ``out``. Bits of a code: they go into ``packed``, uint8[ceil(n width / 8) + SLACK].
        packed, out: see ``width``.
    """
    values, sums = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
    codes, small = np.empty(CHUNK, np.uint16), np.empty(CHUNK, np.uint8)
    short = block <= _SHORT and CHUNK % block == 0
    for p in range(0, x.size, CHUNK):
        q = min(p + CHUNK, x.size)
        xb, at = x[p:q], p
        if short and xb.size == CHUNK and _spread(factors[p // block :], block, sums, values):
            for i in range(CHUNK):
                values[i] *= abs(xb[i])
            at = q
        while at < q:
            b = at // block
            end = min((b + 1) * block, q)
            first, second = _single_factors(factors[b])
            given, made = x[at:end], values[at - p : end - p]
            for i in range(given.size):
                made[i] = abs(given[i]) * first * second
            at = end
        if width == 0:
            _nearest(values, sums, xb, mantissa, bias, top, sign, out[p:q])
        elif width <= 8:
            _nearest(values, sums, xb, mantissa, bias, top, sign, small)
            pack_bytes(small, q - p, width, packed[p * width // 8 :])
        else:
            _nearest(values, sums, xb, mantissa, bias, top, sign, codes)
            pack_chunk(codes, q - p, width, small, packed[p * width // 8 :])


@jit
def encode_stochastic(
    x: Singles,
    block: int,
    factors: Floats,
    single: bool,
    mantissa: int,
    bias: int,
    top: int,
    sign: int,
    high: np.uint64,
    low: np.uint64,
    start: int,
    out: Symbols,
) -> None:
    """Like :func:`encode_nearest`, to one of the two neighbors: up with the probability that gives the right mean.

    Products are float64, or with ``single`` rounded to float32 first.
    Elements are numbered from ``start`` on and must not cross a block of 2^32. Probabilities are rounded down to 2^-32.
    """
    add, flip, last = words(high, low, start)
    first = np.uint64(start)
    values = np.empty(CHUNK, np.float64)
    bits = values.view(np.int64)
    below = np.empty(CHUNK, np.int64)
    shift = 52 - mantissa
    cut = (np.int64(1) << shift) - 1
    rest = shift - _DRAWN
    offset = np.int64(1023 - bias) << mantissa
    least = 2.0 ** (1 - bias)
    for p in range(0, x.size, CHUNK):
        q = min(p + CHUNK, x.size)
        xb = x[p:q]
        ob = out[p:q]
        _magnitudes(x, p, q, block, factors, single, least, values, below)
        for i in range(xb.size):
            code = (bits[i] >> shift) - offset - (below[i] << mantissa)
            drawn = np.int64(mix((first + np.uint64(p + i)) & MASK32, add, flip, last))
            code += np.int64(drawn < (bits[i] & cut) >> rest)
            code = min(code, top)
            ob[i] = code | (sign if np.signbit(xb[i]) else 0)


@jit
def restore(codes: Symbols, block: int, scales: Floats, levels: Floats, largest: float, out: Singles) -> None:
    """Look signed codes up in ``levels`` and multiply by the block's scale; at most ``largest`` in magnitude."""
    n = codes.size
    for b in range(scales.size):
        p = b * block
        end = min(n, p + block)
        scale = scales[b]
        cb = codes[p:end]
        ob = out[p:end]
        for i in range(cb.size):
            ob[i] = np.float32(max(-largest, min(levels[cb[i]] * scale, largest)))


@jit
def rounding_error(
    low: Floats, sums: Floats, levels: Floats, scale: float, largest: float, stochastic: bool
) -> tuple[float, float]:
    """Expected squared error of rounding sketched magnitudes to levels times a scale, and the part above the last one.

    Args:
        low: ascending lower edges of the sketch's bins.
        sums: per bin the count, sum d and sum d^2 of the distances from the edge.
        levels: ascending magnitudes, 0 first.
        scale: a power of two, so that levels and midpoints are edges.
        largest: what decoded values saturate at.
        stochastic: round to a neighbour without bias instead of to the nearest level.
    """
    error, clipped = 0.0, 0.0
    top = levels.size - 1
    code = 0
    for i in range(low.size):
        at, n, first, second = low[i], sums[i, 0], sums[i, 1], sums[i, 2]
        while code < top and at >= scale * (levels[code + 1] if stochastic else (levels[code] + levels[code + 1]) / 2):
            code += 1
        value = np.float64(np.float32(min(levels[code] * scale, largest)))
        if stochastic and code < top:
            below, above = at - levels[code] * scale, levels[code + 1] * scale - at
            error += below * above * n + (above - below) * first - second
        else:
            off = at - value
            lost = off * off * n + 2 * off * first + second
            error += lost
            if at >= levels[top] * scale:
                clipped += lost
    return error, clipped
