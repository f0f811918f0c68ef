"""Level codecs that share their scales encode a tensor together: values and uniforms are prepared once for all of them.

Values go through in chunks that stay in the cache. In each, every codec makes symbols, decodes and counts them on the
spot, and adds to the sums that compare decoded with exact values. The counts of a bucket's symbols are pairs of a
decoded value and how often it occurs, so that only pairs are sorted.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import carray, types
from numba.core import config
from numba.extending import intrinsic, overload

from gtrace.kernels._jit import inline, jit
from gtrace.kernels.bits import entropy
from gtrace.kernels.codes import TALLIES
from gtrace.kernels.compare import (
    ALIVE,
    CHUNK,
    NORM1,
    ZEROS,
    add_error,
    add_sums,
    divisors,
    fold,
    sort_pairs,
    spread,
)
from gtrace.kernels.counter import uniform, words
from gtrace.kernels.norms import BLOCK, LANES
from gtrace.kernels.rounding import _TABLE, COUNT, POWERS, SEARCH, UNIFORM, _count, _fill_table, _padded, _search
from gtrace.kernels.symbols import limited_lengths, packed_bits

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.kernels import Floats, Ints, Singles, Symbols, Words

    Patterns = NDArray[np.uint32]

#: columns of a codec's rule: its kind, whether 0 is no level, the steps of a uniform grid, whether values are paired
#: one by one because a bucket has few for its symbols, and bits of a symbol at fixed width
KIND, MIRRORED, STEPS, WIDE, WIDTH = range(5)
#: columns of lengths in bits: at fixed width, at the entropy, in a Huffman code made for the symbols
FIXED, ENTROPY, HUFFMAN = range(3)
#: columns of the two distances
W1, W1_MCGQ = range(2)
#: more than the padding of a codec's levels
PADDING = 8
_ONE, _TWO, _ZERO, _HALF = np.float32(1.0), np.float32(2.0), np.float32(0.0), np.float32(0.5)


def floats_at(address: np.uint64, size: int) -> Floats:
    """The float64[size] at an address. Arrays that lie apart reach a kernel as their addresses."""
    return np.ctypeslib.as_array((ctypes.c_double * size).from_address(int(address)))


if not config.DISABLE_JIT:

    @intrinsic
    def _pointer(typing: Any, address: Any) -> Any:
        del typing

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(types.float64)(address), generate

    overload(floats_at, inline="always")(
        lambda address, size: lambda address, size: carray(_pointer(address), (size,))  # type: ignore[call-arg]
    )


@inline
def _uniform_grid(r: Singles, u: Singles, steps: int, out: Symbols) -> None:
    """To the multiples of 1 / steps; see :mod:`gtrace.kernels.rounding` on casts."""
    grid, top = np.float32(steps), np.int32(steps)
    for i in range(out.size):
        t = abs(r[i]) * grid
        k = np.int32(t)
        k = np.int32(k + np.int32(u[i] < t - np.float32(k)))
        out[i] = np.int32(top + (k if r[i] > 0 else np.int32(-k)))


@inline
def _odd_grid(r: Singles, u: Singles, steps: int, out: Symbols) -> None:
    """To the odd multiples of 1 / steps, of either sign."""
    first, grid = _ONE / np.float32(steps), np.float32(steps) * _HALF
    top = np.int32((steps - 1) // 2)
    over = np.int32(top + 1)
    for i in range(out.size):
        t = max(abs(r[i]) * grid - _HALF, _ZERO)
        k = np.int32(t)
        k = min(np.int32(k + np.int32(u[i] < t - np.float32(k))), top)
        out[i] = np.int32(over + k) if r[i] > first * (_TWO * u[i] - _ONE) else np.int32(top - k)


@inline
def _powers(bits: Patterns, u: Singles, out: Symbols) -> None:
    """To the two powers of two around a value, on its bits."""
    middle = np.int32(255)
    for i in range(out.size):
        magnitude = bits[i] & np.uint32(0x7FFFFFFF)
        mantissa = np.float32(np.int32(magnitude & np.uint32(0x7FFFFF))) * np.float32(2.0**-23)
        code = np.int32(magnitude >> np.uint32(23))
        code = np.int32(code + np.int32(u[i] < mantissa))
        out[i] = np.int32(middle + (np.int32(-code) if bits[i] >> np.uint32(31) else code))


@inline
def _signed(r: Singles, u: Singles, first: np.float32, cell: NDArray[np.int32], last: np.int32, out: Symbols) -> None:
    """Symbols of magnitudes; below a first one that is not zero the sign is random too."""
    over = np.int32(last + 1)
    if first > 0:
        for i in range(out.size):
            out[i] = np.int32(over + cell[i]) if r[i] > first * (_TWO * u[i] - _ONE) else np.int32(last - cell[i])
    else:
        for i in range(out.size):
            out[i] = np.int32(last + (cell[i] if r[i] > 0 else np.int32(-cell[i])))


@inline
def _decode(codes: Symbols, values: Singles, q: Singles, tallies: Ints) -> None:
    """The value of each symbol, counted on the way; see :func:`gtrace.kernels.codes.tally`."""
    whole = codes.size - codes.size % TALLIES
    m = values.size
    t0, t1, t2, t3 = tallies[:m], tallies[m : 2 * m], tallies[2 * m : 3 * m], tallies[3 * m : 4 * m]
    for i in range(0, whole, TALLIES):
        c0, c1, c2, c3 = codes[i], codes[i + 1], codes[i + 2], codes[i + 3]
        t0[c0] += 1
        t1[c1] += 1
        t2[c2] += 1
        t3[c3] += 1
        q[i], q[i + 1], q[i + 2], q[i + 3] = values[c0], values[c1], values[c2], values[c3]
    for i in range(whole, codes.size):
        t0[codes[i]] += 1
        q[i] = values[codes[i]]


@inline
def _pair(tallies: Ints, values: Singles, total: Ints, bits: Patterns, counts: Patterns, at: int) -> tuple[int, int]:
    """Turn a bucket's counts into pairs from place ``at`` on, add them to the tensor's, and clear them.

    Returns:
        the place after the last pair, and how many values are zero.
    """
    m, zeros, patterns = values.size, 0, values.view(np.uint32)
    for k in range(m):
        count = tallies[k] + tallies[m + k] + tallies[2 * m + k] + tallies[3 * m + k]
        if count:
            tallies[k], tallies[m + k], tallies[2 * m + k], tallies[3 * m + k] = 0, 0, 0, 0
            total[k] += count
            bits[at], counts[at] = patterns[k], count
            at += 1
            if values[k] == 0.0:
                zeros += count
    return at, zeros


@jit
def draw_levels(
    x: Singles,
    g: Singles,
    weights: Floats,
    bucket: int,
    scales: Singles,
    split: int,
    high: np.uint64,
    low: np.uint64,
    start: int,
    rules: Ints,
    levels: Singles,
    places: Ints,
    totals: Words,
    lanes: Floats,
    sums: Floats,
    tallies: Ints,
    bits: Patterns,
    counts: Patterns,
    rooms: Ints,
    ends: Ints,
) -> None:
    """Encode, decode and compare values with many level codecs.

    Args:
        x: float32[n], finite, what is encoded.
        g: float32[n], what decoded values are compared with.
        weights: float64[n] of squared errors, or float64[0].
        bucket: values that share a scale.
        scales: float32[ceil(split / bucket)].
        split: number of values that are rounded; the others are sent exactly.
        high, low: key.
        start: place of the first value in its tensor; values must not cross a block of 2^32.
        rules: int64[codecs, 5], see KIND.
        levels: float32, ascending magnitudes of all codecs, end to end.
        places: int64[codecs + 1], where those of each begin.
        totals: uint64[codecs], address of the float64[n] to which a codec's errors are added; 0 for none.
        lanes: float64[codecs, LANED LANES], sums of an unfinished block.
        sums: float64[codecs, SUMS], of finished blocks, as :func:`~gtrace.kernels.compare.compare` has them.
        tallies: int64, added to: counts of the signed symbols of all codecs; those of a codec begin at twice the place
            of its levels.
        bits, counts: uint32, the distinct decoded values of each bucket, as bits, and how often each occurs.
        rooms: int64[codecs], where those of each codec begin.
        ends: int64[codecs], overwritten: where they end.
    """
    key = words(high, low, start)
    add, flip, last = key
    codecs = rules.shape[0]
    r, u, q = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
    magnitudes, patterns = np.empty(CHUNK, np.float32), r.view(np.uint32)
    d, cell, codes = np.empty(CHUNK), np.empty(CHUNK, np.int32), np.empty(CHUNK, np.uint16)
    # Signed values of each codec, the same times a bucket's scale, and the counts of the bucket.
    values, scaled = np.empty(2 * levels.size, np.float32), np.empty(2 * levels.size, np.float32)
    counted = np.zeros(2 * TALLIES * levels.size, np.int64)
    # Levels and widths with room for padding, and tables of those that are searched.
    stops, widths = (
        np.empty(levels.size + PADDING * codecs, np.float32),
        np.empty(levels.size + PADDING * codecs, np.float32),
    )
    searched = 0
    for c in range(codecs):
        searched = max(searched, (c + 1) * np.int64(rules[c, KIND] == SEARCH))
    table, deep = np.empty((searched, _TABLE), np.uint16), np.empty((searched, _TABLE), np.bool_)
    for c in range(codecs):
        own = levels[places[c] : places[c + 1]]
        m, mirrored = own.size, rules[c, MIRRORED]
        for k in range(m):
            values[2 * places[c] + m - 1 - k] = -own[k]
            values[2 * places[c] + m - 1 + mirrored + k] = own[k]
        if not mirrored:
            # The symbol of zero is that of its negative.
            values[2 * places[c] + m - 1] = -own[0]
        padded, width = _padded(own)
        first = places[c] + PADDING * c
        stops[first : first + padded.size] = padded
        widths[first : first + padded.size] = width
        if rules[c, KIND] == SEARCH:
            _fill_table(own, table[c], deep[c])
        ends[c] = rooms[c]
    p = 0
    while p < x.size:
        stop = min(x.size, p + CHUNK - (start + p) % CHUNK)
        rounded = min(stop, split)
        for i in range(stop - p):
            u[i] = uniform(np.uint64(start + p) + np.uint64(i), add, flip, last)
        at = p
        while at < rounded:
            end = min(rounded, (at // bucket + 1) * bucket)
            scale = scales[at // bucket]
            divisor = scale if scale > 0 else _ONE
            xb, rb = x[at:end], r[at - p : end - p]
            for i in range(xb.size):
                rb[i] = xb[i] / divisor
            at = end
        for i in range(CHUNK):
            magnitudes[i] = abs(r[i])
        gb, qb, db, wb = g[p:stop], q[: stop - p], d[: stop - p], weights[p:stop]
        alive = divisors(gb, db)
        for c in range(codecs):
            kind, mirrored = rules[c, KIND], rules[c, MIRRORED]
            m, first = places[c + 1] - places[c], places[c] + PADDING * c
            base, symbols = 2 * places[c], 2 * m - 1 + mirrored
            lowest = levels[places[c]] if mirrored else _ZERO
            own, times = values[base : base + symbols], scaled[base : base + symbols]
            tally, total = counted[TALLIES * base : TALLIES * (base + symbols)], tallies[base : base + symbols]
            zeros = 0
            at = p
            while at < rounded:
                end = min(rounded, (at // bucket + 1) * bucket)
                scale = scales[at // bucket]
                a, b = at - p, end - p
                if at % bucket == 0 or at == p:
                    for k in range(symbols):
                        times[k] = own[k] * scale
                rb, ub, cb, ob = r[a:b], u[a:b], cell[a:b], codes[a:b]
                if kind == UNIFORM and mirrored:
                    _odd_grid(rb, ub, rules[c, STEPS], ob)
                elif kind == UNIFORM:
                    _uniform_grid(rb, ub, rules[c, STEPS], ob)
                elif kind == POWERS:
                    _powers(patterns[a:b], ub, ob)
                else:
                    mb = magnitudes[a:b]
                    if kind == COUNT:
                        filled = -(-(m - 1) // 4) * 4
                        _count(mb, ub, stops[first : first + filled], widths[first:], cb)
                    else:
                        _search(mb, ub, stops[first:], widths[first:], table[c], deep[c], mb.view(np.int32), cb)
                    _signed(rb, ub, lowest, cb, np.int32(m - 1), ob)
                _decode(ob, times, q[a:b], tally)
                if rules[c, WIDE]:
                    ends[c], none = _single(q[a:b], bits, counts, ends[c])
                    zeros += none
                elif end == split or end % bucket == 0:
                    ends[c], none = _pair(tally, times, total, bits, counts, ends[c])
                    zeros += none
                at = end
            while at < stop:
                q[at - p] = x[at]
                at += 1
            if stop > split:
                tail = max(split, p)
                ends[c], none = _single(q[tail - p : stop - p], bits, counts, ends[c])
                zeros += none
            lane = (start + p) % LANES
            head = min(stop - p, LANES - lane) if lane else 0
            if head:
                add_sums(gb[:head], qb[:head], db[:head], wb[:head], lanes[c, lane:])
            add_sums(gb[head:], qb[head:], db[head:], wb[head:], lanes[c])
            sums[c, ZEROS] += zeros
            sums[c, ALIVE] += alive
            if totals[c]:
                add_error(gb, qb, floats_at(totals[c], x.size)[p:stop])
            if (start + stop) % BLOCK == 0:
                fold(lanes[c], sums[c])
        p = stop
    for c in range(codecs):
        m, base = places[c + 1] - places[c], 2 * places[c]
        symbols = 2 * m - 1 + rules[c, MIRRORED]
        for k in range(symbols):
            for side in range(TALLIES):
                tallies[base + k] += counted[TALLIES * base + side * symbols + k]


@inline
def _single(q: Singles, bits: Patterns, counts: Patterns, at: int) -> tuple[int, int]:
    """A pair for each value, from place ``at`` on; see :func:`_pair`."""
    patterns, zeros = q.view(np.uint32), 0
    for i in range(q.size):
        bits[at + i] = patterns[i]
        counts[at + i] = np.uint32(1)
        zeros += np.int64(q[i] == 0.0)
    return at + q.size, zeros


@jit
def finish_levels(
    ordered: Singles,
    norm1: float,
    ascending: bool,
    lanes: Floats,
    sums: Floats,
    bits: Patterns,
    counts: Patterns,
    rooms: Ints,
    ends: Ints,
    gaps: Floats,
) -> None:
    """Add the last block to the sums of :func:`draw_levels`, and measure the distances of a whole tensor.

    Args:
        ordered: float32[n], the exact values, ascending.
        norm1: sum of their magnitudes.
        ascending: whether the pairs of each codec are in order.
        lanes, sums, bits, counts, rooms, ends: as there.
        gaps: float64[codecs, 2], overwritten: ``w1`` and ``w1_mcgq``.
    """
    for c in range(rooms.size):
        fold(lanes[c], sums[c])
        own, often = bits[rooms[c] : ends[c]], counts[rooms[c] : ends[c]]
        if not ascending:
            sort_pairs(own, often)
        decoded1 = sums[c, NORM1]
        gaps[c, W1], gaps[c, W1_MCGQ] = spread(ordered, own, often, 1.0 / norm1, 1.0 / decoded1)
        if not (norm1 > 0.0 and decoded1 > 0.0):
            gaps[c, W1_MCGQ] = np.nan


@jit
def code_lengths(tallies: Ints, rules: Ints, places: Ints, longest: int, out: Floats) -> None:
    """Bits of symbols under each coder; the same as :meth:`gtrace.coding.CodedBlock.of` of each.

    Args:
        tallies, rules, places: as in :func:`draw_levels`.
        longest: bits of a code at most.
        out: float64[codecs, 3], overwritten, see FIXED.
    """
    for c in range(rules.shape[0]):
        base = 2 * places[c]
        symbols = 2 * (places[c + 1] - places[c]) - 1 + rules[c, MIRRORED]
        weights, lengths, shares = np.empty(symbols), np.empty(symbols, np.uint8), np.empty(symbols)
        count, coded = 0, 0
        for k in range(symbols):
            often = tallies[base + k]
            count += often
            weights[k] = often
        out[c, FIXED] = np.float64(count) * rules[c, WIDTH]
        out[c, ENTROPY], out[c, HUFFMAN] = 0.0, out[c, FIXED]
        if not out[c, FIXED]:
            continue
        limited_lengths(weights, longest, lengths)
        for k in range(symbols):
            coded += tallies[base + k] * np.int64(lengths[k])
            shares[k] = weights[k] / np.float64(count)
        coded += packed_bits(lengths, 0)
        out[c, ENTROPY] = np.float64(count) * entropy(shares)
        if -(-coded // 8) < np.ceil(out[c, FIXED] / 8.0):
            out[c, HUFFMAN] = coded
