"""Stochastic rounding of normalized buckets to levels, and back.

Symbols number the signed values from the most negative one up. With a zero level and m magnitudes there are
2 m - 1 of them, the middle one is zero; without, 2 m.

Integers are cast to 32 bits after every operation: numba widens them to 64, which halves the lanes of a vector.

Values go through in chunks that stay in the cache. In each, a rule makes symbols, and a sink takes them: as they are,
packed at a fixed width, or decoded again on the spot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.kernels._jit import inline, jit
from gtrace.kernels.bits import (
    CHUNK,
    FLOATS,
    PIECE,
    SLACK,
    load64,
    pack_bytes,
    pack_chunk,
    prefetch,
    readable,
    unpack_chunk,
)
from gtrace.kernels.codes import tally
from gtrace.kernels.counter import moved, uniform, words
from gtrace.kernels.norms import GIVEN, bucket_scales

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.kernels import Bytes, Flags, Ints, Singles, Symbols

    Key = tuple[np.uint64, np.uint64, np.uint64]

#: rules: the cell of a uniform grid is computed; among few levels random thresholds are counted; among many a table
#: leads to the cell; a power of two is read off the bits
UNIFORM, COUNT, SEARCH, POWERS = range(4)
#: sinks
SYMBOLS, PACKED, VALUES = range(3)
#: a lookup table of the search: exponent and six leading mantissa bits of r, from 1 down to 2^-32
_SHIFT = 17
_BASE = np.int32((127 - 32) << 6)
_TABLE = (32 << 6) + 2
#: up to this number of values no table is used
_FEW = 8
#: values whose norms are taken before they are rounded, while the memory fetches as many of the next ones
_SPAN = 1 << 13
#: widest symbols that are decoded two at a time
_TWIN = 5
_NAN = np.float32(np.nan)
_ONE = np.float32(1.0)
_TWO = np.float32(2.0)
_ZERO = np.float32(0.0)
_INF = np.float32(np.inf)
_U1 = np.uint64(1)


@inline
def _magnitudes(x: Singles, scale: np.float32, key: Key, r: Singles, u: Singles) -> None:
    """|x| / scale, and the uniform of each value."""
    divisor = scale if scale > 0 else _ONE
    for p in range(0, x.size, PIECE):
        prefetch(x, p + _SPAN, PIECE, FLOATS)
        add, flip, last = moved(key, p)
        xp, rp, up = x[p : p + PIECE], r[p : p + PIECE], u[p : p + PIECE]
        for i in range(xp.size):
            rp[i] = abs(xp[i] / divisor)
            up[i] = uniform(np.uint64(i), add, flip, last)


@inline
def _uniform_grid(x: Singles, scale: np.float32, key: Key, steps: int, out: Symbols | Bytes) -> None:
    """To the multiples of 1 / steps."""
    divisor = scale if scale > 0 else _ONE
    grid, top = np.float32(steps), np.int32(steps)
    for p in range(0, x.size, PIECE):
        prefetch(x, p + _SPAN, PIECE, FLOATS)
        add, flip, last = moved(key, p)
        xp, op = x[p : p + PIECE], out[p : p + PIECE]
        for i in range(xp.size):
            t = abs(xp[i] / divisor) * grid
            k = np.int32(t)
            k = np.int32(k + np.int32(uniform(np.uint64(i), add, flip, last) < t - np.float32(k)))
            op[i] = np.int32(top + (k if xp[i] > 0 else np.int32(-k)))


@inline
def _odd_cells(r: Singles, u: Singles, steps: int, cell: NDArray[np.int32]) -> None:
    """The cells between odd multiples of 1 / steps; below the first one the sign is random."""
    grid, top = np.float32(steps) * np.float32(0.5), np.int32((steps - 1) // 2)
    for i in range(cell.size):
        t = max(r[i] * grid - np.float32(0.5), _ZERO)
        k = np.int32(t)
        cell[i] = min(np.int32(k + np.int32(u[i] < t - np.float32(k))), top)


@inline
def _count(r: Singles, u: Singles, levels: Singles, widths: Singles, cell: NDArray[np.int32]) -> None:
    """Number of thresholds l_k + u (l_{k+1} - l_k) that each value passes; only that of its own cell is random to it.

    Four at a time, so that a value is loaded once for them. ``levels`` ends in infinities up to a multiple of four.
    """
    for i in range(cell.size):
        cell[i] = 0
    for k in range(0, levels.size, 4):
        l0, l1, l2, l3 = levels[k], levels[k + 1], levels[k + 2], levels[k + 3]
        w0, w1, w2, w3 = widths[k], widths[k + 1], widths[k + 2], widths[k + 3]
        for i in range(cell.size):
            two = np.int32(np.int32(r[i] > l0 + u[i] * w0) + np.int32(r[i] > l1 + u[i] * w1))
            more = np.int32(np.int32(r[i] > l2 + u[i] * w2) + np.int32(r[i] > l3 + u[i] * w3))
            cell[i] = np.int32(cell[i] + np.int32(two + more))


@inline
def _search(
    r: Singles,
    u: Singles,
    levels: Singles,
    widths: Singles,
    table: Symbols,
    deep: Flags,
    bits: NDArray[np.int32],
    cell: NDArray[np.int32],
) -> None:
    """The cell of each value by the top bits of r, ``bits``; unsigned places spare the check for negative ones."""
    for i in range(cell.size):
        cell[i] = max(np.int32(0), min(np.int32(np.int32(bits[i] >> np.int32(_SHIFT)) - _BASE), np.int32(_TABLE - 1)))
    for i in range(cell.size):
        place = np.uint64(cell[i])
        value = r[i]
        c = np.uint64(table[place])
        c += np.uint64(levels[c + _U1] <= value)
        if deep[place]:
            while levels[c + _U1] <= value:
                c += _U1
        # A value on its level, a zero above all, is done: beside tiny levels the product is denormal and slow.
        drawn = u[i] if value > levels[c] else _ZERO
        cell[i] = np.int32(c) + np.int32(value > levels[c] + drawn * widths[c])


@inline
def find_cells(
    rule: int,
    steps: int,
    r: Singles,
    u: Singles,
    levels: Singles,
    widths: Singles,
    count: int,
    table: Symbols,
    deep: Flags,
    cell: NDArray[np.int32],
) -> None:
    """The cell of each magnitude among ``count`` levels, which are padded: computed, by counting or by searching."""
    if rule == UNIFORM:
        _odd_cells(r, u, steps, cell)
    elif rule == COUNT:
        _count(r, u, levels[: -(-(count - 1) // 4) * 4], widths, cell)
    else:
        _search(r, u, levels, widths, table, deep, r.view(np.int32), cell)


@inline
def _fill_table(levels: Singles, table: Symbols, deep: Flags) -> None:
    """For each class of r the cell that its lower end lies in, and whether more than one level lies inside."""
    edge = np.empty(1, np.int32)
    value = edge.view(np.float32)
    cell = 0
    for k in range(table.size):
        edge[0] = (np.int64(_BASE) + k) << _SHIFT
        low = value[0] if k > 0 else _ZERO
        before = cell
        while cell + 2 < levels.size and levels[cell + 1] <= low:
            cell += 1
        table[k] = cell
        deep[k] = False
        if k > 0:
            deep[k - 1] = cell - before > 1


@inline
def _signed(
    x: Singles, scale: np.float32, u: Singles, first: np.float32, cell: NDArray[np.int32], last: np.int32, out: Symbols
) -> None:
    """Symbols of magnitudes; below a first one that is not zero the sign is random too."""
    if first > 0:
        divisor = scale if scale > 0 else _ONE
        over = np.int32(last + 1)
        for i in range(x.size):
            positive = x[i] / divisor > first * (_TWO * u[i] - _ONE)
            out[i] = np.int32(over + cell[i]) if positive else np.int32(last - cell[i])
    else:
        for i in range(x.size):
            out[i] = np.int32(last + (cell[i] if x[i] > 0 else np.int32(-cell[i])))


@inline
def _powers(bits: NDArray[np.uint32], u: Singles, out: Symbols) -> None:
    """Round each value to one of the two powers of two around it (natural compression), on the bits alone.

    Magnitudes are 0 for zero, e = 1..254 for 2^(e - 127), and 255 for the largest float32, which ends the cell above
    2^127. Below 2^-126 the two neighbours are 0 and 2^-126.
    """
    middle = np.int32(255)
    for i in range(bits.size):
        magnitude = bits[i] & np.uint32(0x7FFFFFFF)
        mantissa = np.float32(np.int32(magnitude & np.uint32(0x7FFFFF))) * np.float32(2.0**-23)
        code = np.int32(magnitude >> np.uint32(23))
        code = np.int32(code + np.int32(u[i] < mantissa))
        out[i] = np.int32(middle + (np.int32(-code) if bits[i] >> np.uint32(31) else code))


@jit
def quantize(
    x: Singles,
    bucket: int,
    norm: int,
    scales: Singles,
    rule: int,
    mirrored: bool,
    steps: int,
    levels: Singles,
    high: np.uint64,
    low: np.uint64,
    start: int,
    sink: int,
    symbols: Symbols,
    width: int,
    packed: Bytes,
    values: Singles,
    decoded: Singles,
    tallies: Ints,
) -> bool:
    """Round every value of every bucket by a rule, and hand the symbols to a sink.

    Args:
        x: float32[n].
        bucket: values that share a scale.
        norm: of kernels.norms: fills ``scales`` just before the values are rounded, which are in the cache then. GIVEN:
            the scales are there, and x is finite.
        scales: float32[ceil(n / bucket)].
        rule: UNIFORM: to k / steps, or (``mirrored``) to the odd ones of them. COUNT, SEARCH: to the ascending
            magnitudes ``levels``; with ``mirrored`` 0 is none of them. POWERS: to powers of two, without scales.
        mirrored, steps, levels: of the rule.
        high, low: key.
        start: place of the first value in its tensor; values must not cross a block of 2^32.
        sink: SYMBOLS: into ``symbols``, uint16[n]. PACKED: ``width`` bits each into ``packed``, uint8[ceil(n width / 8)
            + SLACK]. VALUES: the ``values`` of each symbol times the scale into ``decoded``, float32[n],
            and how often each occurs added to ``tallies``, int64[TALLIES, m]. Those of a UNIFORM rule are the float32
            next to k / steps.
        symbols, width, packed, values, decoded, tallies: of the sinks.

    Returns:
        whether all values are finite; if not, rounding stopped there.
    """
    key, even = words(high, low, start), steps if rule == UNIFORM and not mirrored else 0
    narrow = even > 0 and sink == PACKED and width <= 8
    r, u = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
    cell = np.empty(CHUNK, np.int32)
    codes, scratch = np.empty(CHUNK, np.uint16), np.empty(CHUNK, np.uint8)
    ends, widths = _padded(levels)
    first, last = levels[0] if mirrored and levels.size else _ZERO, np.int32(levels.size - 1)
    if rule == UNIFORM:
        first, last = _ONE / np.float32(steps), np.int32((steps - 1) // 2)
    searched = _TABLE if rule == SEARCH else 0
    table, deep = np.empty(searched, np.uint16), np.empty(searched, np.bool_)
    _fill_table(levels, table, deep)
    # Whole buckets at a time that stay in the cache between their norm and the rounding, and that end on a byte.
    several = max(1, _SPAN // bucket)
    several *= 1 if several * bucket % 8 == 0 else 8
    for group in range(0, scales.size, several):
        own = scales[group : group + several]
        begin, finish = group * bucket, min((group + several) * bucket, x.size)
        if norm != GIVEN and not bucket_scales(x[begin:finish], bucket, norm, own):
            return False
        for p in range(begin, finish, CHUNK):
            stop = min(p + CHUNK, finish)
            at = p
            while at < stop:
                b = at // bucket
                end = min(stop, (b + 1) * bucket)
                xb, scale, here = x[at:end], scales[b], moved(key, start + at)
                ob = symbols[at:end] if sink == SYMBOLS else codes[at - p : end - p]
                if narrow:
                    _uniform_grid(xb, scale, here, steps, scratch[at - p : end - p])
                elif even:
                    _uniform_grid(xb, scale, here, steps, ob)
                elif rule == POWERS:
                    _magnitudes(xb, _ONE, here, r, u)
                    _powers(xb.view(np.uint32), u, ob)
                else:
                    cb = cell[: xb.size]
                    _magnitudes(xb, scale, here, r, u)
                    find_cells(rule, steps, r, u, ends, widths, levels.size, table, deep, cb)
                    _signed(xb, scale, u, first, cb, last, ob)
                if sink == VALUES:
                    _look_up(ob, even, values, scale, decoded[at:end])
                    tally(ob, tallies)
                at = end
            if narrow:
                pack_bytes(scratch, stop - p, width, packed[p * width // 8 :])
            elif sink == PACKED:
                pack_chunk(codes, stop - p, width, scratch, packed[p * width // 8 :])
    return True


@inline
def _padded(levels: Singles) -> tuple[Singles, Singles]:
    """Levels and their widths, with infinities up to a multiple of four: thresholds that nothing passes."""
    m = levels.size
    ends = np.full(-(-m // 4) * 4 + 4, _INF)
    widths = np.zeros(ends.size, np.float32)
    for k in range(m - 1):
        ends[k], widths[k] = levels[k], levels[k + 1] - levels[k]
    return ends, widths


@inline
def _look_up(codes: Symbols, steps: int, values: Singles, scale: np.float32, out: Singles) -> None:
    """values[code] * scale; few values are chosen by comparisons, which are vectorized, many are looked up.

    With ``steps`` they are computed: k / steps times the scale.
    """
    last = values.size - 1
    if steps:
        grid, top = np.float32(steps), np.int32(steps)
        for i in range(codes.size):
            out[i] = np.float32(np.int32(np.int32(codes[i]) - top)) / grid * scale
        return
    if last >= _FEW:
        for i in range(codes.size):
            out[i] = values[codes[i]] * scale
        return
    v0, v1, v2, v3 = values[0], values[min(1, last)], values[min(2, last)], values[min(3, last)]
    v4, v5, v6, v7 = values[min(4, last)], values[min(5, last)], values[min(6, last)], values[last]
    for i in range(codes.size):
        code = np.int32(codes[i])
        value = v1 if code >= np.int32(1) else v0
        value = v2 if code >= np.int32(2) else value
        value = v3 if code >= np.int32(3) else value
        value = v4 if code >= np.int32(4) else value
        value = v5 if code >= np.int32(5) else value
        value = v6 if code >= np.int32(6) else value
        value = v7 if code >= np.int32(7) else value
        out[i] = value * scale


@jit
def restore(symbols: Symbols, bucket: int, scales: Singles, values: Singles, out: Singles) -> None:
    """Look symbols up in ``values`` (signed levels) and multiply by the bucket's scale."""
    n = symbols.size
    for b in range(scales.size):
        p = b * bucket
        end = min(n, p + bucket)
        _look_up(symbols[p:end], 0, values, scales[b], out[p:end])


@inline
def _fill_values(values: Singles, width: int, table: Singles) -> None:
    """The values of one symbol, or of two neighbors, by their bits; NaN for a symbol without a value."""
    mask = (1 << width) - 1
    each = 2 if width <= _TWIN else 1
    for k in range(table.size // each):
        for j in range(each):
            symbol = (k >> (j * width)) & mask
            table[each * k + j] = values[symbol] if symbol < values.size else _NAN


@inline
def _look_up_packed(data: Bytes, width: int, table: Singles, found: Singles) -> None:
    """The values of symbols, eight at a time; ``data`` has SLACK bytes beyond them."""
    bits = np.uint64(width)
    twice = bits + bits
    if width <= _TWIN:
        mask = np.uint64((1 << (2 * width)) - 1)
        twins, out = table.view(np.uint64), found.view(np.uint64)
        for g in range(found.size // 8):
            v = load64(data, g * width)
            out[4 * g] = twins[v & mask]
            v >>= twice
            out[4 * g + 1] = twins[v & mask]
            v >>= twice
            out[4 * g + 2] = twins[v & mask]
            out[4 * g + 3] = twins[(v >> twice) & mask]
    else:
        mask = np.uint64((1 << width) - 1)
        half, shift = 4 * width // 8, np.uint64(4 * width % 8)
        for g in range(found.size // 8):
            v, w = load64(data, g * width), load64(data, g * width + half) >> shift
            found[8 * g], found[8 * g + 4] = table[v & mask], table[w & mask]
            v >>= bits
            w >>= bits
            found[8 * g + 1], found[8 * g + 5] = table[v & mask], table[w & mask]
            v >>= bits
            w >>= bits
            found[8 * g + 2], found[8 * g + 6] = table[v & mask], table[w & mask]
            found[8 * g + 3], found[8 * g + 7] = table[(v >> bits) & mask], table[(w >> bits) & mask]


@inline
def _scaled(found: Singles, p: int, bucket: int, scales: Singles, out: Singles) -> bool:
    """The values of a chunk, which begins at value p, times the scales of their buckets; whether none was NaN."""
    good = True
    at = p
    while at < p + found.size:
        b = at // bucket
        end = min(p + found.size, (b + 1) * bucket)
        scale, fb, ob = scales[b], found[at - p : end - p], out[at:end]
        for i in range(ob.size):
            good &= fb[i] == fb[i]
            ob[i] = fb[i] * scale
        at = end
    return good


@inline
def _evenly_spaced(values: Singles) -> bool:
    """Whether value k of n + 1 is the float32 next to (2 k - n) / n, and the middle one, if there is one, -0."""
    n = values.size - 1
    even = n > 0
    for k in range(values.size):
        value = np.float32(n - 2 * k) / np.float32(-n)
        even &= values[k] == value and np.signbit(values[k]) == np.signbit(value)
    return even


@inline
def _even_values(codes: NDArray[Any], p: int, bucket: int, scales: Singles, last: int, out: Singles) -> bool:
    """The evenly spaced values of a chunk of symbols, up to ``last``, as :func:`_scaled` has them."""
    top, grid = np.int32(0), np.float32(-last)
    at = p
    while at < p + codes.size:
        b = at // bucket
        end = min(p + codes.size, (b + 1) * bucket)
        scale, cb, ob = scales[b], codes[at - p : end - p], out[at:end]
        for i in range(ob.size):
            code = np.int32(cb[i])
            top = max(top, code)
            ob[i] = np.float32(np.int32(np.int32(last) - np.int32(code + code))) / grid * scale
        at = end
    return top <= last


@jit
def restore_packed(data: Bytes, width: int, bucket: int, scales: Singles, values: Singles, out: Singles) -> bool:
    """Like :func:`restore`, from symbols packed in ``width`` bits, 1 to 16; values of uniform grids are computed.

    Returns:
        whether every symbol is an index into ``values``, which are finite; if not, decoding stopped there.
    """
    even, last = _evenly_spaced(values), np.empty(2 * CHUNK + SLACK, np.uint8)
    found, narrow, codes = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.uint8), np.empty(CHUNK, np.uint16)
    table = np.empty(0 if even else (1 << (2 * width)) * 2 if width <= _TWIN else 1 << width, np.float32)
    if not even:
        _fill_values(values, width, table)
    for p in range(0, out.size, CHUNK):
        size = min(CHUNK, out.size - p)
        source = readable(data, p * width // 8, width, last)
        if even:
            unpack_chunk(source, width, narrow, codes)
            if width <= 8:
                good = _even_values(narrow[:size], p, bucket, scales, values.size - 1, out)
            else:
                good = _even_values(codes[:size], p, bucket, scales, values.size - 1, out)
        else:
            _look_up_packed(source, width, table, found[: -(-size // 8) * 8])
            good = _scaled(found[:size], p, bucket, scales, out)
        if not good:
            return False
    return True
