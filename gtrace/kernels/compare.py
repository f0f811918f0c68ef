"""Compares a decoded tensor with the exact one, in one pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gtrace.kernels._jit import inline, jit
from gtrace.kernels.norms import BLOCK, LANES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.kernels import Floats, Singles

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
#: bits of a digit of the radix sort
_DIGIT = 8
_DIGITS = 32 // _DIGIT
_RADIX = 1 << _DIGIT
_SHIFT = np.uint32(13)
_S31 = np.uint32(31)
_EDGE = np.uint32(0x7FFFE000)
_SIGN, _MAGNITUDE, _EVERY = np.uint32(0x80000000), np.uint32(0x7FFFFFFF), np.uint32(0xFFFFFFFF)
_ONE = np.uint32(1)


@inline
def divisors(g: Singles, out: Floats) -> int:
    """|g| into ``out``, infinite where g is zero, so that a relative error there is 0; number of others."""
    alive = 0
    for i in range(g.size):
        a = abs(np.float64(g[i]))
        out[i] = a if a != 0.0 else np.inf
        alive += np.int64(a != 0.0)
    return alive


@inline
def add_sums(g: Singles, q: Singles, d: Floats, w: Floats, lanes: Floats) -> None:
    """Add the first sums of values to their lanes, float64[LANED LANES], those of each sum together.

    The first value belongs to the first lane. ``d`` is from :func:`divisors`; ``w`` has weights, or none.
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
                er += error / db[j * LANES + k]
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
            lanes[2 * LANES + k] += error / db[k]
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
        out[ALIVE] += divisors(gb, d)
        add_sums(gb, qb, d, w[p : p + CHUNK], lanes)
        zeros = 0
        for i in range(qb.size):
            zeros += np.int64(qb[i] == 0.0)
        out[ZEROS] += zeros
        if (p + CHUNK) % BLOCK == 0:
            fold(lanes, out)
    fold(lanes, out)


@jit
def sort_pairs(bits: NDArray[np.uint32], counts: NDArray[np.uint32]) -> None:
    """Sort the bits of finite float32 values by value, and their counts with them: a radix sort."""
    n = bits.size
    places = np.zeros((_DIGITS, _RADIX), np.int64)
    for i in range(n):
        # Negative values descend by their bits.
        key = bits[i] ^ (_EVERY if bits[i] >> _S31 else _SIGN)
        bits[i] = key
        for digit in range(_DIGITS):
            places[digit, (key >> np.uint32(_DIGIT * digit)) & np.uint32(_RADIX - 1)] += 1
    other_bits, other_counts = np.empty(n, np.uint32), np.empty(n, np.uint32)
    # An even number of passes, so that the result is in the arrays that were given.
    for digit in range(_DIGITS):
        at, shift = 0, np.uint32(_DIGIT * digit)
        place = places[digit]
        for k in range(_RADIX):
            count = place[k]
            place[k] = at
            at += count
        for i in range(n):
            k = (bits[i] >> shift) & np.uint32(_RADIX - 1)
            other_bits[place[k]] = bits[i]
            other_counts[place[k]] = counts[i]
            place[k] += 1
        bits, other_bits = other_bits, bits
        counts, other_counts = other_counts, counts
    for i in range(n):
        bits[i] ^= _SIGN if bits[i] >> _S31 else _EVERY


@jit
def extent(x: Singles) -> tuple[int, int, int]:
    """How many values are negative, and the bits of the least and of the largest magnitude that is not zero.

    Those of zeros alone differ.
    """
    patterns = x.view(np.uint32)
    negative, least, most = 0, _EVERY, np.uint32(0)
    for i in range(x.size):
        size = patterns[i] & _MAGNITUDE
        negative += np.int64(x[i] < 0.0)
        # A zero becomes the largest number there is.
        least, most = min(least, np.uint32(size - _ONE)), max(most, size)
    return negative, np.int64(least) + 1, np.int64(most)


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
def spread(
    a: Singles, bits: NDArray[np.uint32], counts: NDArray[np.uint32], scale: float, other: float
) -> tuple[float, float]:
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
