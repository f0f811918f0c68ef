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
from gtrace.kernels.bits import FLOATS, entropy, prefetch
from gtrace.kernels.codes import TALLIES
from gtrace.kernels.compare import (
    ALIVE,
    CHUNK,
    LANED,
    NORM1,
    ZEROS,
    add_error,
    add_sums,
    fold,
    reciprocals,
    sort_pairs,
    spread,
)
from gtrace.kernels.counter import uniform, words
from gtrace.kernels.norms import BLOCK, LANES
from gtrace.kernels.rounding import _TABLE, POWERS, SEARCH, UNIFORM, _fill_table, _padded, _powers, find_cells
from gtrace.kernels.symbols import limited_lengths, packed_bits

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.kernels import Bytes, Flags, Floats, Ints, Patterns, Singles, Symbols, Words

#: columns of a codec's rule: its kind, whether 0 is not a level, the steps of a uniform grid, whether values are paired
#: one by one because a bucket has few for its symbols, and bits of a symbol at fixed width
KIND, MIRRORED, STEPS, WIDE, WIDTH = range(5)
#: columns of lengths in bits: at fixed width, at the entropy, in a Huffman code made for the symbols, in a codec's own
FIXED, ENTROPY, HUFFMAN, CODED = range(4)
#: columns of the two distances
W1, W1_MCGQ = range(2)
#: more than the padding of a codec's levels
PADDING = 8
#: the next chunk's errors are asked for in parts, between the stages of this one, so that none has to wait
_PARTS = 3
_ONE, _TWO, _ZERO = np.float32(1.0), np.float32(2.0), np.float32(0.0)


def floats_at(address: np.uint64, size: int) -> Floats:
    """The float64[size] at an address. Arrays that lie apart reach a kernel as their addresses."""
    return np.ctypeslib.as_array((ctypes.c_double * size).from_address(int(address)))


if not config.DISABLE_JIT:

    @intrinsic
    def _pointer(typing: Any, address: Any) -> Any:
        del typing

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(types.float64)(address), generate  # type: ignore[no-untyped-call]

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
def _empty(counted: Ints, tallies: Ints) -> None:
    """Add up the sums that symbols are counted in."""
    for side in range(TALLIES):
        for k in range(tallies.size):
            tallies[k] += counted[side * tallies.size + k]


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


@inline
def fractions(x: Singles, scales: Singles, bucket: int, start: int, r: Singles, magnitudes: Singles) -> None:
    """x / scale, and its magnitude; the first is value ``start`` of those that buckets count."""
    at = 0
    while at < x.size:
        b = (start + at) // bucket
        end = min(x.size, (b + 1) * bucket - start)
        divisor = scales[b] if scales[b] > 0 else _ONE
        xb, rb, mb = x[at:end], r[at:end], magnitudes[at:end]
        for i in range(xb.size):
            rb[i] = xb[i] / divisor
            mb[i] = abs(rb[i])
        at = end


@inline
def prepare(
    own: Singles, rule: Ints, values: Singles, stops: Singles, widths: Singles, table: Symbols, deep: Flags
) -> None:
    """The signed values of a codec, and its magnitudes with their widths, padded, and with a table for searches."""
    m, mirrored = own.size, rule[MIRRORED]
    for k in range(m):
        values[m - 1 + mirrored + k] = own[k]
    # The symbol of zero has the value of its negative.
    for k in range(m):
        values[m - 1 - k] = -own[k]
    padded, width = _padded(own)
    for k in range(padded.size):
        stops[k], widths[k] = padded[k], width[k]
    if rule[KIND] == SEARCH:
        _fill_table(own, table, deep)


@inline
def symbols_of(
    rule: Ints,
    r: Singles,
    magnitudes: Singles,
    u: Singles,
    own: Singles,
    stops: Singles,
    widths: Singles,
    table: Symbols,
    deep: Flags,
    cell: NDArray[np.int32],
    out: Symbols,
) -> None:
    """The symbols of some values of one bucket by a codec's rule."""
    if rule[KIND] == UNIFORM and not rule[MIRRORED]:
        _uniform_grid(r, u, rule[STEPS], out)
    elif rule[KIND] == POWERS:
        _powers(r.view(np.uint32), u, out)
    else:
        find_cells(rule[KIND], rule[STEPS], magnitudes, u, stops, widths, own.size, table, deep, cell)
        _signed(r, u, own[0] if rule[MIRRORED] else _ZERO, cell, np.int32(own.size - 1), out)


@inline
def _add_chunk(g: Singles, q: Singles, d: Floats, w: Floats, place: int, lanes: Floats) -> None:
    """:func:`~gtrace.kernels.compare.add_sums` of values from any place on."""
    lane, at = place % LANES, 0
    while at < g.size:
        end = min(g.size, LANES - lane) if lane else g.size
        add_sums(g[at:end], q[at:end], d[at:end], w[at:end], lanes[lane:])
        lane, at = 0, end


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
        ends: int64[codecs], overwritten: the places after them.
    """
    key = words(high, low, start)
    add, flip, last = key
    codecs = rules.shape[0]
    r, u, q = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
    magnitudes, d = np.empty(CHUNK, np.float32), np.empty(CHUNK)
    cell, codes = np.empty(CHUNK, np.int32), np.empty(CHUNK, np.uint16)
    # Signed values of each codec, the same times a bucket's scale, and the counts of the bucket.
    values, scaled = np.empty(2 * levels.size, np.float32), np.empty(2 * levels.size, np.float32)
    counted = np.zeros(2 * TALLIES * levels.size, np.int64)
    # Levels and widths with room for padding, and tables for searches.
    room = levels.size + PADDING * codecs
    stops, widths = np.empty(room, np.float32), np.empty(room, np.float32)
    tables, deep = np.empty((codecs, _TABLE), np.uint16), np.empty((codecs, _TABLE), np.bool_)
    for c in range(codecs):
        first = places[c] + PADDING * c
        prepare(
            levels[places[c] : places[c + 1]],
            rules[c],
            values[2 * places[c] :],
            stops[first:],
            widths[first:],
            tables[c],
            deep[c],
        )
        ends[c] = rooms[c]
    p = 0
    while p < x.size:
        stop = min(x.size, p + CHUNK - (start + p) % CHUNK)
        rounded = min(stop, split)
        prefetch(x, stop, CHUNK, FLOATS)
        for i in range(stop - p):
            u[i] = uniform(np.uint64(start + p) + np.uint64(i), add, flip, last)
        fractions(x[p : max(p, rounded)], scales, bucket, p, r, magnitudes)
        gb, qb, db, wb = g[p:stop], q[: stop - p], d[: stop - p], weights[p:stop]
        alive = reciprocals(gb, db)
        for c in range(codecs):
            own, first, base = levels[places[c] : places[c + 1]], places[c] + PADDING * c, 2 * places[c]
            symbols = 2 * own.size - 1 + rules[c, MIRRORED]
            times = scaled[base : base + symbols]
            tally = counted[TALLIES * base : TALLIES * (base + symbols)]
            size = x.size if totals[c] != 0 else 0
            total, part = floats_at(totals[c], size), min(size, CHUNK // _PARTS)
            prefetch(total, stop, part, FLOATS // 2)
            at = p
            while at < rounded:
                end = min(rounded, (at // bucket + 1) * bucket)
                a, b = at - p, end - p
                for k in range(symbols):
                    times[k] = values[base + k] * scales[at // bucket]
                symbols_of(
                    rules[c],
                    r[a:b],
                    magnitudes[a:b],
                    u[a:b],
                    own,
                    stops[first:],
                    widths[first:],
                    tables[c],
                    deep[c],
                    cell[a:b],
                    codes[a:b],
                )
                _decode(codes[a:b], times, q[a:b], tally)
                if not rules[c, WIDE] and (end == split or end % bucket == 0):
                    ends[c], zeros = _pair(tally, times, tallies[base:], bits, counts, ends[c])
                    sums[c, ZEROS] += zeros
                at = end
            prefetch(total, stop + part, part, FLOATS // 2)
            # Values that are not rounded, and those of wide codecs, are pairs of their own.
            alone = p if rules[c, WIDE] else max(p, rounded)
            for i in range(max(p, split), stop):
                q[i - p] = x[i]
            ends[c], zeros = _single(q[alone - p : stop - p], bits, counts, ends[c])
            sums[c, ZEROS] += zeros
            _add_chunk(gb, qb, db, wb, start + p, lanes[c])
            sums[c, ALIVE] += alive
            prefetch(total, stop + 2 * part, part, FLOATS // 2)
            add_error(gb, qb, total[p:stop])
            if (start + stop) % BLOCK == 0:
                fold(lanes[c], sums[c])
        p = stop
    for c in range(codecs):
        base = 2 * places[c]
        symbols = 2 * (places[c + 1] - places[c]) - 1 + rules[c, MIRRORED]
        _empty(counted[TALLIES * base : TALLIES * (base + symbols)], tallies[base : base + symbols])


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
def draw_sets(
    x: Singles,
    g: Singles,
    weights: Floats,
    ordered: Singles,
    norms1: Floats,
    bounds: Ints,
    shapes: Ints,
    scales: Singles,
    scale_bounds: Ints,
    keys: Words,
    rules: Ints,
    levels: Singles,
    places: Ints,
    totals: Words,
    sums: Floats,
    tallies: Ints,
    gaps: Floats,
) -> None:
    """:func:`draw_levels` and :func:`finish_levels` of whole tensors that lie end to end, equally many codecs each.

    Args:
        x, g, weights, ordered, norms1: as there, of all tensors.
        bounds: int64[tensors + 1], where each begins.
        shapes: int64[tensors, 2], ``bucket`` and ``split`` of each.
        scales: float32, of all tensors.
        scale_bounds: int64[tensors + 1], where those of each begin.
        keys: uint64[tensors, 2].
        rules, levels, places, totals, sums, tallies, gaps: as there, of the first tensor's codecs, then of the next's.
    """
    tensors = keys.shape[0]
    each = rules.shape[0] // tensors
    for t in range(tensors):
        a, b, first, last = bounds[t], bounds[t + 1], t * each, (t + 1) * each
        own_scales, base = scales[scale_bounds[t] : scale_bounds[t + 1]], places[first]
        rooms, ends, room = np.empty(each, np.int64), np.empty(each, np.int64), 0
        ascending = own_scales.size < 2 and shapes[t, 1] == b - a
        for c in range(each):
            symbols = 2 * (places[first + c + 1] - places[first + c]) - 1 + rules[first + c, MIRRORED]
            rooms[c] = room
            room += b - a if rules[first + c, WIDE] else b - a - shapes[t, 1] + own_scales.size * symbols
            ascending = ascending and not rules[first + c, WIDE]
        bits, counts = np.empty(room, np.uint32), np.empty(room, np.uint32)
        lanes = np.zeros((each, LANED * LANES))
        draw_levels(
            x[a:b],
            g[a:b],
            weights[a:b],
            shapes[t, 0],
            own_scales,
            shapes[t, 1],
            keys[t, 0],
            keys[t, 1],
            0,
            rules[first:last],
            levels[base : places[last]],
            places[first : last + 1] - base,
            totals[first:last],
            lanes,
            sums[first:last],
            tallies[2 * base : 2 * places[last]],
            bits,
            counts,
            rooms,
            ends,
        )
        finish_levels(
            ordered[a:b], norms1[t], ascending, lanes, sums[first:last], bits, counts, rooms, ends, gaps[first:last]
        )


@jit
def code_lengths(
    tallies: Ints, rules: Ints, places: Ints, codes: Bytes, starts: Ints, adopted: Flags, longest: int, out: Floats
) -> None:
    """Bits of symbols under each coder; the same as :meth:`gtrace.coding.CodedBlock.of` of each.

    Args:
        tallies, rules, places: as in :func:`draw_levels`.
        codes: uint8, lengths of all codecs' own codes.
        starts: int64[codecs + 1], where those of each begin.
        adopted: bool[codecs], whether a codec has one; the others send fixed width.
        longest: bits of a code at most.
        out: float64[codecs, 4], overwritten, see FIXED.
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
        out[c, ENTROPY], out[c, HUFFMAN], out[c, CODED] = 0.0, out[c, FIXED], out[c, FIXED]
        if adopted[c]:
            out[c, CODED] = 0.0
            for k in range(symbols):
                out[c, CODED] += weights[k] * codes[starts[c] + k]
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
