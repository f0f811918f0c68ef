"""Compares a decoded tensor with the exact one, in one pass; and order among values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gtrace.kernels._jit import inline, jit
from gtrace.kernels.codes import TALLIES
from gtrace.kernels.norms import BLOCK, LANES

if TYPE_CHECKING:
    from gtrace.kernels import Floats, Ints, Patterns, Singles

#: squared error, |error|, |error| / |g| over non-zero g, g q, q^2, |q|, weighted squared error; then zeros of q and
#: non-zeros of g
SUMS = 9
#: those that are kept in lanes, and the places of the norm and of the weighted error
LANED, NORM1, WEIGHTED = 7, 5, 6
ZEROS, ALIVE = LANED, LANED + 1
#: blocks of LANES values that are added in one go, while the sums are in registers
_AHEAD = 4
_STEP = _AHEAD * LANES
#: values that are compared at a time; they stay in the cache
CHUNK = 1024
#: bins of one sign that :func:`tally` counts into
BINS = 255 << 10
#: bits of a digit of the radix sort, of few keys and of _MANY
_SHORT, _LONG, _MANY = 8, 11, 1 << 12
#: values that are sorted in two halves of their bits
_APART = 1 << 18
_SHIFT = np.uint32(13)
_S31 = np.uint32(31)
_EDGE = np.uint32(0x7FFFE000)
_SIGN, _EVERY = np.uint32(0x80000000), np.uint32(0xFFFFFFFF)
_ZERO, _ONE = np.uint32(0), np.uint32(1)
#: 2^32 by the golden ratio
_SCATTER = np.uint32(0x9E3779B1)


@inline
def reciprocals(g: Singles, out: Floats) -> int:
    """1 / |g| into ``out``, 0 where g is zero, so that a relative error there is 0; number of others."""
    alive = 0
    for i in range(g.size):
        a = abs(np.float64(g[i]))
        out[i] = 1.0 / a if a != 0.0 else 0.0
        alive += np.int64(a != 0.0)
    return alive


@inline
def add_sums(g: Singles, q: Singles, d: Floats, w: Floats, lanes: Floats) -> None:
    """Add the first sums of values to their lanes, float64[LANED LANES], those of each sum together.

    The first value belongs to the first lane. ``d`` is from :func:`reciprocals`; ``w`` has weights, or none.
    """
    whole = g.size // _STEP * _STEP
    for p in range(0, whole, _STEP):
        gb, qb, db = g[p : p + _STEP], q[p : p + _STEP], d[p : p + _STEP]
        for k in range(LANES):
            e2, e1, er = lanes[k], lanes[LANES + k], lanes[2 * LANES + k]
            gq, qq, q1 = lanes[3 * LANES + k], lanes[4 * LANES + k], lanes[5 * LANES + k]
            for j in range(_AHEAD):
                a, b = np.float64(gb[j * LANES + k]), np.float64(qb[j * LANES + k])
                error = abs(b - a)
                e2 += error * error
                e1 += error
                er += error * db[j * LANES + k]
                gq += a * b
                qq += b * b
                q1 += abs(b)
            lanes[k], lanes[LANES + k], lanes[2 * LANES + k] = e2, e1, er
            lanes[3 * LANES + k], lanes[4 * LANES + k], lanes[5 * LANES + k] = gq, qq, q1
    for p in range(whole, g.size, LANES):
        gb, qb, db = g[p : p + LANES], q[p : p + LANES], d[p : p + LANES]
        for k in range(gb.size):
            a, b = np.float64(gb[k]), np.float64(qb[k])
            error = abs(b - a)
            lanes[k] += error * error
            lanes[LANES + k] += error
            lanes[2 * LANES + k] += error * db[k]
            lanes[3 * LANES + k] += a * b
            lanes[4 * LANES + k] += b * b
            lanes[5 * LANES + k] += abs(b)
    for p in range(0, w.size, LANES):
        gb, qb, wb = g[p : p + LANES], q[p : p + LANES], w[p : p + LANES]
        for k in range(wb.size):
            e = np.float64(qb[k]) - np.float64(gb[k])
            lanes[WEIGHTED * LANES + k] += wb[k] * e * e


@inline
def fold(lanes: Floats, out: Floats) -> None:
    """Add the lanes of each sum to ``out``, and clear them."""
    for j in range(LANED):
        total = 0.0
        for k in range(LANES):
            total += lanes[j * LANES + k]
            lanes[j * LANES + k] = 0.0
        out[j] += total


@jit
def compare(g: Singles, q: Singles, w: Floats, out: Floats) -> None:
    """Sums over all elements into ``out`` (float64[9], see SUMS), over fixed blocks in index order.

    Args:
        g, q: float32[n].
        w: float64[n], weights; without them float64[0], and the weighted error is 0.
        out: overwritten.
    """
    lanes, d = np.zeros(LANED * LANES), np.empty(CHUNK)
    out[:] = 0.0
    for p in range(0, g.size, CHUNK):
        gb, qb = g[p : p + CHUNK], q[p : p + CHUNK]
        out[ALIVE] += reciprocals(gb, d)
        add_sums(gb, qb, d, w[p : p + CHUNK], lanes)
        zeros = 0
        for i in range(qb.size):
            zeros += np.int64(qb[i] == 0.0)
        out[ZEROS] += zeros
        if (p + CHUNK) % BLOCK == 0:
            fold(lanes, out)
    fold(lanes, out)


@jit
def sort_pairs(bits: Patterns, counts: Patterns) -> None:
    """Sort the bits of finite float32 values by value, and their counts with them, as :func:`ascending` does."""
    _to_keys(bits)
    _by_digits(bits, counts, np.empty_like(bits), np.empty_like(counts), 32)
    _from_keys(bits)


@jit
def ascending(values: Singles) -> Singles:
    """float32[n] in the order of their bits: a radix sort; -0 comes before 0, NaN after infinity.

    Many are first brought together with those of the same first digit, so that the rest stays in a cache.
    """
    bits = values.view(np.uint32)
    keys, none = np.empty(bits.size, np.uint32), np.empty(0, np.uint32)
    if bits.size < _APART:
        keys[:] = bits
        _to_keys(keys)
        _by_digits(keys, none, np.empty(bits.size, np.uint32), none, 32)
        _from_keys(keys)
        return keys.view(np.float32)
    places, shift = np.zeros((1 << _LONG) + 1, np.uint32), np.uint32(2 * _LONG)
    for i in range(bits.size):
        places[((bits[i] ^ (_EVERY if bits[i] >> _S31 else _SIGN)) >> shift) + _ONE] += _ONE
    most = np.int64(places.max())
    for k in range(1, places.size):
        places[k] += places[k - 1]
    starts = places.copy()
    for i in range(bits.size):
        key = bits[i] ^ (_EVERY if bits[i] >> _S31 else _SIGN)
        keys[places[key >> shift]] = key
        places[key >> shift] += _ONE
    room = np.empty(most, np.uint32)
    for k in range(starts.size - 1):
        part = keys[starts[k] : starts[k + 1]]
        if part.size > 1:
            _by_digits(part, none, room[: part.size], none, 2 * _LONG)
    _from_keys(keys)
    return keys.view(np.float32)


@inline
def _to_keys(bits: Patterns) -> None:
    """Bits of float32 values to whole numbers in their order."""
    for i in range(bits.size):
        # Negative values descend by their bits.
        bits[i] ^= _EVERY if bits[i] >> _S31 else _SIGN


@inline
def _from_keys(keys: Patterns) -> None:
    for i in range(keys.size):
        keys[i] ^= _SIGN if keys[i] >> _S31 else _EVERY


@inline
def _by_digits(keys: Patterns, often: Patterns, other: Patterns, other_often: Patterns, below: int) -> None:
    """Sort by the lowest ``below`` bits, with counts or without; the other arrays are room for as many."""
    width = _LONG if keys.size >= _MANY else _SHORT
    digits, mask = -(-below // width), np.uint32((1 << width) - 1)
    places = np.zeros((digits, 1 << width), np.uint32)
    for i in range(keys.size):
        key = keys[i]
        for digit in range(digits):
            places[digit, key & mask] += _ONE
            key >>= np.uint32(width)
    for digit in range(digits):
        at, place, shift = np.uint32(0), places[digit], np.uint32(width * digit)
        for k in range(place.size):
            at, place[k] = at + place[k], at
        for i in range(keys.size):
            k = (keys[i] >> shift) & mask
            other[place[k]] = keys[i]
            if often.size:
                other_often[place[k]] = often[i]
            place[k] += _ONE
        keys, other, often, other_often = other, keys, other_often, often
    if digits % 2:
        other[:] = keys
        other_often[:] = often


@jit
def largest(ranks: Patterns, count: int, out: Ints) -> None:
    """Positions, ascending, of the ``count`` largest of each row of uint32[rows, n]; of equal ones those first.

    Args:
        ranks: as above.
        count: 1 to n.
        out: int64[rows count + 1], overwritten; the room for one more saves a branch.
    """
    width = _LONG if ranks.shape[1] >= _MANY else _SHORT
    often, mask, at = np.empty(1 << width, np.int64), np.uint32((1 << width) - 1), np.uint64(0)
    for row in range(ranks.shape[0]):
        own, limit, left = ranks[row], np.uint32(0), count
        # Digit by digit: the number that only ``left`` of those with the same first digits reach.
        for digit in range(31 // width, -1, -1):
            shift, above = np.uint32(width * digit), np.uint64(width * (digit + 1))
            often[:] = 0
            for i in range(own.size):
                if np.uint64(own[i]) >> above == np.uint64(limit) >> above:
                    often[(own[i] >> shift) & mask] += 1
            k = often.size - 1
            while often[k] < left:
                left -= often[k]
                k -= 1
            limit |= np.uint32(k) << shift
        for i in range(own.size):
            same = own[i] == limit and left > 0
            left -= np.int64(same)
            out[at] = row * own.size + i
            at += np.uint64(same or own[i] > limit)


@jit
def distinct(x: Singles, bits: Patterns, counts: Patterns) -> int:
    """The distinct values, ascending, as bits, and how often each occurs; -0 is 0.

    Args:
        x: finite float32[n].
        bits, counts: uint32[m], overwritten.

    Returns:
        how many there are, or -1 if more than m.
    """
    patterns, width, found = x.view(np.uint32), 2, 0
    while 1 << width < 4 * bits.size:
        width += 1
    # equal neighbours would wait for each other's sum
    held, often = np.full(1 << width, _EVERY, np.uint32), np.zeros((1 << width, TALLIES), np.uint32)
    shift, mask = np.uint32(32 - width), np.uint32((1 << width) - 1)
    for i in range(x.size):
        key = patterns[i] if patterns[i] != _SIGN else _ZERO
        at = np.uint32(key * _SCATTER) >> shift
        while held[at] != key:
            if held[at] == _EVERY:
                if found == bits.size:
                    return -1
                held[at] = bits[found] = key
                found += 1
            else:
                at = np.uint32(at + _ONE) & mask
        often[at, i % TALLIES] += _ONE
    for k in range(found):
        at = np.uint32(bits[k] * _SCATTER) >> shift
        while held[at] != bits[k]:
            at = np.uint32(at + _ONE) & mask
        counts[k] = often[at].sum()
    sort_pairs(bits[:found], counts[:found])
    return found


@jit
def nonzeros(x: Singles, out: Singles) -> None:
    """Copy the values that are not zero, in order. ``out`` has room for one more, which saves a branch."""
    at = np.uint64(0)
    for i in range(x.size):
        out[at] = x[i]
        at += np.uint64(x[i] != 0.0)


@jit
def distances(a: Singles, b: Singles, negative: int, scale: float, other: float) -> tuple[float, float]:
    """Mean |a - b| and mean |a scale - b other|, in a fixed order.

    Args:
        a: float32[n], ascending.
        b: float32[m], ascending; if it is shorter, zeros are missing.
        negative: number of values of b before its zeros.
        scale, other: factors.
    """
    lanes = np.zeros(2 * LANES)
    last = negative + a.size - b.size
    _add_gaps(a[:negative], b[:negative], 0, scale, other, lanes)
    _add_gaps_to(a[negative:last], 0.0, negative, scale, other, lanes)
    _add_gaps(a[last:], b[negative:], last, scale, other, lanes)
    return _mean(lanes[:LANES], a.size), _mean(lanes[LANES:], a.size)


@jit
def spread(a: Singles, bits: Patterns, counts: Patterns, scale: float, other: float) -> tuple[float, float]:
    """As :func:`distances`, with the distinct values of b, ascending, as bits, and how often each occurs, uint32[m]."""
    lanes, values, at = np.zeros(2 * LANES), bits.view(np.float32), 0
    for k in range(values.size):
        end = at + np.int64(counts[k])
        _add_gaps_to(a[at:end], np.float64(values[k]), at, scale, other, lanes)
        at = end
    return _mean(lanes[:LANES], a.size), _mean(lanes[LANES:], a.size)


@inline
def _mean(lanes: Floats, size: int) -> float:
    total = 0.0
    for k in range(lanes.size):
        total += lanes[k]
    return total / max(1, size)


@inline
def _add_gaps(a: Singles, b: Singles, start: int, scale: float, other: float, lanes: Floats) -> None:
    """Add |a - b| and |a scale - b other| to two rows of lanes; the first value is number ``start``."""
    p = 0
    while p < a.size:
        first = (start + p) % LANES
        ab, bb, row = a[p : p + LANES - first], b[p : p + LANES - first], lanes[first:]
        for i in range(ab.size):
            u, v = np.float64(ab[i]), np.float64(bb[i])
            row[i] += abs(u - v)
            row[LANES + i] += abs(u * scale - v * other)
        p += ab.size


@inline
def _add_gaps_to(a: Singles, b: float, start: int, scale: float, other: float, lanes: Floats) -> None:
    """:func:`_add_gaps` with the same b for all."""
    scaled, p = b * other, 0
    while p < a.size:
        first = (start + p) % LANES
        if first == 0 and p + _STEP <= a.size:
            ab = a[p : p + _STEP]
            for i in range(LANES):
                plain, other_sum = lanes[i], lanes[LANES + i]
                for j in range(_AHEAD):
                    u = np.float64(ab[j * LANES + i])
                    plain += abs(u - b)
                    other_sum += abs(u * scale - scaled)
                lanes[i], lanes[LANES + i] = plain, other_sum
            p += _STEP
            continue
        ab, row = a[p : p + LANES - first], lanes[first:]
        for i in range(ab.size):
            u = np.float64(ab[i])
            row[i] += abs(u - b)
            row[LANES + i] += abs(u * scale - scaled)
        p += ab.size


@jit
def add_error(g: Singles, q: Singles, total: Floats) -> None:
    """Add q - g to ``total``, element by element."""
    for i in range(total.size):
        total[i] += np.float64(q[i]) - np.float64(g[i])


@jit
def add_values(g: Singles, total: Floats) -> None:
    """Add float32[n] to float64[n]; numpy converts a buffer at a time for that, which takes three times as long."""
    for i in range(total.size):
        total[i] += np.float64(g[i])


@jit
def tally(x: Singles, table: Floats) -> None:
    """Count finite values into bins of their top bits: sign, exponent and ten bits of mantissa.

    Args:
        x: float32[n].
        table: float64[2, BINS, 2], added to: for each sign and bin the count, and the sum of |x| - lower edge.
    """
    edge = np.empty(CHUNK, np.uint32)
    low = edge.view(np.float32)
    bits = x.view(np.uint32)
    for p in range(0, x.size, CHUNK):
        xb = x[p : p + CHUNK]
        bb = bits[p : p + CHUNK]
        for i in range(bb.size):
            edge[i] = bb[i] & _EDGE
        for i in range(bb.size):
            row = table[np.int64(bb[i] >> _S31), np.int64(edge[i] >> _SHIFT)]
            row[0] += 1.0
            row[1] += np.float64(abs(xb[i])) - np.float64(low[i])


def edges() -> Floats:
    """float64[BINS + 1], the edges of the bins of :func:`tally`; the last one is 2^128."""
    patterns = (np.arange(BINS, dtype=np.uint32) << _SHIFT).view(np.float32)
    return np.append(patterns.astype(np.float64), 2.0**128)


@jit
def adam_weights(g: Singles, v: Singles, decay: float, correction: float, eps: float, out: Floats) -> None:
    """1 / d^2 into ``out``, where d = sqrt((decay v + (1 - decay) g^2) / correction) + eps.

    0 if d is 0 or not a number: such an element has no update.
    """
    for i in range(out.size):
        x = np.float64(g[i])
        d = np.sqrt((decay * np.float64(v[i]) + (1.0 - decay) * x * x) / correction) + eps
        w = 1.0 / (d * d)
        out[i] = w if w < np.inf else 0.0


@jit
def weighted_sums(g: Singles, q: Singles, w: Floats) -> tuple[float, float]:
    """sum w (q - g)^2 and sum w g^2, over fixed blocks in index order."""
    lanes = np.zeros((2, LANES))
    error, energy = lanes[0], lanes[1]
    errors, energies = 0.0, 0.0
    for start in range(0, g.size, BLOCK):
        stop = min(g.size, start + BLOCK)
        lanes[:] = 0.0
        for p in range(start, stop, LANES):
            gb = g[p : min(p + LANES, stop)]
            qb = q[p : min(p + LANES, stop)]
            wb = w[p : min(p + LANES, stop)]
            for k in range(gb.size):
                a = np.float64(gb[k])
                e = np.float64(qb[k]) - a
                error[k] += wb[k] * e * e
                energy[k] += wb[k] * a * a
        total = 0.0
        for k in range(LANES):
            total += error[k]
        errors += total
        total = 0.0
        for k in range(LANES):
            total += energy[k]
        energies += total
    return errors, energies
