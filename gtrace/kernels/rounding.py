"""Stochastic rounding of normalized buckets to levels, and back.

Symbols number the signed values from the most negative one up. With a zero level and m magnitudes there are
2 m - 1 of them, the middle one is zero; without, 2 m.

Integers are cast to 32 bits after every operation: numba widens them to 64, which halves the lanes of a vector.

Values go through in chunks that stay in the cache. In each, a rule makes symbols, and a sink takes them: as they are,
packed at a fixed width, or decoded again on the spot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gtrace.kernels._jit import inline, jit
from gtrace.kernels.bits import CHUNK, pack_chunk, unpack_chunk
from gtrace.kernels.codes import tally
from gtrace.kernels.counter import MASK32, uniform, words

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
_ONE = np.float32(1.0)
_TWO = np.float32(2.0)
_ZERO = np.float32(0.0)
_INF = np.float32(np.inf)
_U1 = np.uint64(1)


@inline
def _magnitudes(x: Singles, scale: np.float32, base: np.uint64, key: Key, r: Singles, u: Singles) -> None:
    """|x| / scale, and the uniform of each value."""
    add, flip, last = key
    divisor = scale if scale > 0 else _ONE
    for i in range(x.size):
        r[i] = abs(x[i] / divisor)
        u[i] = uniform(base + np.uint64(i), add, flip, last)


@inline
def _uniform_grid(x: Singles, scale: np.float32, base: np.uint64, key: Key, steps: int, out: Symbols) -> None:
    add, flip, last = key
    divisor = scale if scale > 0 else _ONE
    grid, top = np.float32(steps), np.int32(steps)
    for i in range(x.size):
        t = abs(x[i] / divisor) * grid
        k = np.int32(t)
        k = np.int32(k + np.int32(uniform(base + np.uint64(i), add, flip, last) < t - np.float32(k)))
        out[i] = np.int32(top + (k if x[i] > 0 else np.int32(-k)))


@inline
def _uniform_values(x: Singles, scale: np.float32, base: np.uint64, key: Key, steps: int, out: Singles) -> None:
    """The values of :func:`_uniform_grid`, k / steps times the scale, without symbols in between."""
    add, flip, last = key
    divisor = scale if scale > 0 else _ONE
    grid = np.float32(steps)
    for i in range(x.size):
        t = abs(x[i] / divisor) * grid
        k = np.int32(t)
        k = np.int32(k + np.int32(uniform(base + np.uint64(i), add, flip, last) < t - np.float32(k)))
        out[i] = np.float32(k if x[i] > 0 else np.int32(-k)) / grid * scale


@inline
def _odd_grid(x: Singles, scale: np.float32, base: np.uint64, key: Key, steps: int, out: Symbols) -> None:
    """To the odd multiples of 1 / steps, of either sign."""
    add, flip, last = key
    divisor = scale if scale > 0 else _ONE
    first, grid, half = _ONE / np.float32(steps), np.float32(steps) * np.float32(0.5), np.float32(0.5)
    top = np.int32((steps - 1) // 2)
    over = np.int32(top + 1)
    for i in range(x.size):
        r = x[i] / divisor
        u = uniform(base + np.uint64(i), add, flip, last)
        t = max(abs(r) * grid - half, _ZERO)
        k = np.int32(t)
        k = min(np.int32(k + np.int32(u < t - np.float32(k))), top)
        out[i] = np.int32(over + k) if r > first * (_TWO * u - _ONE) else np.int32(top - k)


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
def _powers(x: Singles, base: np.uint64, key: Key, out: Symbols) -> None:
    """Round each value to one of the two powers of two around it (natural compression), on the bits alone.

    Magnitudes are 0 for zero, e = 1..254 for 2^(e - 127), and 255 for the largest float32, which ends the cell above
    2^127. Below 2^-126 the two neighbours are 0 and 2^-126.
    """
    add, flip, last = key
    middle = np.int32(255)
    bits = x.view(np.uint32)
    for i in range(x.size):
        magnitude = bits[i] & np.uint32(0x7FFFFFFF)
        mantissa = np.float32(np.int32(magnitude & np.uint32(0x7FFFFF))) * np.float32(2.0**-23)
        code = np.int32(magnitude >> np.uint32(23))
        code = np.int32(code + np.int32(uniform((base + np.uint64(i)) & MASK32, add, flip, last) < mantissa))
        out[i] = np.int32(middle + (np.int32(-code) if bits[i] >> np.uint32(31) else code))


@jit
def quantize(
    x: Singles,
    bucket: int,
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
) -> None:
    """Round every value of every bucket by a rule, and hand the symbols to a sink.

    Args:
        x: float32[n], finite.
        bucket: values that share a scale.
        scales: float32[ceil(n / bucket)].
        rule: UNIFORM: to k / steps, or (``mirrored``) to the odd ones of them. COUNT, SEARCH: to the ascending
            magnitudes ``levels``; with ``mirrored`` 0 is none of them. POWERS: to powers of two, without scales.
        mirrored, steps, levels: of the rule.
        high, low: key.
        start: place of the first value in its tensor; values must not cross a block of 2^32.
        sink: SYMBOLS: into ``symbols``, uint16[n]. PACKED: ``width`` bits each into ``packed``, uint8[ceil(n width / 8)
            + SLACK]. VALUES: the ``values`` of each symbol times the scale into ``decoded``, float32[n],
            and how often each occurs added to ``tallies``, int64[TALLIES, m] (empty: not counted). Those of a UNIFORM
            rule are the float32 next to k / steps.
        symbols, width, packed, values, decoded, tallies: of the sinks.
    """
    key = words(high, low, start)
    r, u = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
    bits, cell = r.view(np.int32), np.empty(CHUNK, np.int32)
    codes, scratch = np.empty(CHUNK, np.uint16), np.empty(CHUNK, np.uint8)
    ends, widths = _padded(levels)
    counted = -(-(levels.size - 1) // 4) * 4
    first, last = levels[0] if mirrored and levels.size else _ZERO, np.int32(levels.size - 1)
    searched = _TABLE if rule == SEARCH else 0
    table, deep = np.empty(searched, np.uint16), np.empty(searched, np.bool_)
    _fill_table(levels, table, deep)
    if sink == VALUES and rule == UNIFORM and not mirrored and not tallies.size:
        for b in range(scales.size):
            p, end = b * bucket, min((b + 1) * bucket, x.size)
            _uniform_values(x[p:end], scales[b], np.uint64(start + p), key, steps, decoded[p:end])
        return
    for p in range(0, x.size, CHUNK):
        stop = min(p + CHUNK, x.size)
        at = p
        while at < stop:
            b = at // bucket
            end = min(stop, (b + 1) * bucket)
            xb, scale, base = x[at:end], scales[b], np.uint64(start + at)
            ob = symbols[at:end] if sink == SYMBOLS else codes[at - p : end - p]
            if rule == UNIFORM and mirrored:
                _odd_grid(xb, scale, base, key, steps, ob)
            elif rule == UNIFORM:
                _uniform_grid(xb, scale, base, key, steps, ob)
            elif rule == POWERS:
                _powers(xb, base, key, ob)
            else:
                cb = cell[: xb.size]
                _magnitudes(xb, scale, base, key, r, u)
                if rule == COUNT:
                    _count(r, u, ends[:counted], widths, cb)
                else:
                    _search(r, u, ends, widths, table, deep, bits, cb)
                _signed(xb, scale, u, first, cb, last, ob)
            if sink == VALUES:
                _look_up(ob, values, scale, decoded[at:end])
            at = end
        if sink == PACKED:
            pack_chunk(codes, stop - p, width, scratch, packed[p * width // 8 :])
        elif tallies.size:
            tally(codes[: stop - p], tallies)


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
def _look_up(codes: Symbols, values: Singles, scale: np.float32, out: Singles) -> None:
    """values[code] * scale; few values are chosen by comparisons, which are vectorized, many are looked up."""
    last = values.size - 1
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
        _look_up(symbols[p:end], values, scales[b], out[p:end])


@jit
def restore_packed(data: Bytes, width: int, bucket: int, scales: Singles, values: Singles, out: Singles) -> int:
    """Like :func:`restore`, from symbols packed in ``width`` bits, 1 to 16.

    Returns:
        the largest symbol. If it is not an index into ``values``, decoding stopped there.
    """
    codes, scratch = np.empty(CHUNK, np.uint16), np.empty(CHUNK, np.uint8)
    top = 0
    for p in range(0, out.size, CHUNK):
        stop = min(p + CHUNK, out.size)
        top = max(top, unpack_chunk(data[p * width // 8 :], width, stop - p, scratch, codes))
        if top >= values.size:
            return top
        at = p
        while at < stop:
            b = at // bucket
            end = min(stop, (b + 1) * bucket)
            _look_up(codes[at - p : end - p], values, scales[b], out[at:end])
            at = end
    return top
