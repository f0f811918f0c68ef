"""MCGQ: systematic sampling of a gradient's magnitudes, and the run-length stream of the counts.

The stream has its most significant bit first: non-zero integers as they are, runs of zeros as a length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gtrace.kernels._jit import inline, jit
from gtrace.kernels.counter import uniform, words
from gtrace.kernels.norms import FLOAT32_MAX

if TYPE_CHECKING:
    from gtrace.kernels import Ints, Singles, Words

_BLOCK = 1024
_SPLIT = 134217729.0  # 2^27 + 1
_0 = np.uint64(0)
_1 = np.uint64(1)
_6 = np.uint64(6)
_63 = np.uint64(63)
_64 = np.uint64(64)

#: results of :func:`read`
GOOD, SHORT, EMPTY_RUN, LONG_RUN, ADJACENT_RUNS, LOWEST_CODE, PADDING = 0, 1, 2, 3, 4, 5, 6


@jit
def offset(high: np.uint64, low: np.uint64) -> float:
    """The uniform number of a key's first element, k / 2^24."""
    add, flip, last = words(high, low, 0)
    return np.float64(uniform(np.uint64(0), add, flip, last))


@jit
def absolute_sum(x: Singles) -> float:
    """Sum of |x| in float64, one after the other; not finite exactly when an element is not."""
    total = 0.0
    for i in range(x.size):
        total += abs(np.float64(x[i]))
    return total


@inline
def _product(a: float, b: float) -> tuple[float, float]:
    """a b as an unevaluated sum of two float64, exactly (Dekker)."""
    p = a * b
    t = _SPLIT * a
    a_high = t - (t - a)
    a_low = a - a_high
    t = _SPLIT * b
    b_high = t - (t - b)
    b_low = b - b_high
    return p, ((a_high * b_high - p) + a_high * b_low + a_low * b_high) + a_low * b_low


@inline
def _beyond(samples: float, part: float, total: float, k: float, xi: float) -> bool:
    """Whether samples part / total > k + xi, decided exactly.

    The sign of samples part - k total - xi total: the six halves of the products are added up as a
    non-overlapping expansion (Shewchuk), whose sign is that of its largest component.
    """
    terms = np.empty(6)
    terms[0], terms[1] = _product(samples, part)
    terms[2], terms[3] = _product(-k, total)
    terms[4], terms[5] = _product(-xi, total)
    for used in range(1, 6):
        carried = terms[used]
        for j in range(used):
            a, b = carried, terms[j]
            carried = a + b
            back = carried - a
            terms[j] = (a - (carried - back)) + (b - back)
        terms[used] = carried
    for j in range(5, -1, -1):
        if terms[j] != 0.0:
            return terms[j] > 0.0
    return False


@jit
def counts(x: Singles, total: float, samples: float, xi: float, out: Ints) -> None:
    """sign(x_k) (D_k - D_{k-1}) with D_k = ceil(samples S_k / total - xi), exact for the float64 sums S_k.

    Args:
        x: finite, not all zero.
        total: result of :func:`absolute_sum` for it.
        samples: a whole number, at most 2^48.
        xi: in [0, 1).
        out: int64[n].
    """
    rate = samples / total
    # Rounding moves samples S / total - xi by less than samples 2^-51; within the window it must not decide.
    window = max(2.0**-30, samples * 2.0**-50)
    sums = np.empty(_BLOCK)
    hits = np.empty(_BLOCK + 1)
    running = 0.0
    last = 0.0
    for p in range(0, x.size, _BLOCK):
        xb = x[p : min(x.size, p + _BLOCK)]
        ob = out[p : min(x.size, p + _BLOCK)]
        # The sum is sequential by definition; everything after it runs in vectors over a block in the cache.
        for i in range(xb.size):
            running += abs(np.float64(xb[i]))
            sums[i] = running
        ends = hits[1:]
        near = 0
        for i in range(xb.size):
            t = sums[i] * rate - xi
            up = np.ceil(t)
            near += np.int64(up - t < window) + np.int64(up - t > 1.0 - window)
            ends[i] = min(max(up, 0.0), samples)
        if near > 0:
            for i in range(xb.size):
                t = sums[i] * rate - xi
                k = np.rint(t)
                if abs(t - k) <= window:
                    up = k + 1.0 if _beyond(samples, sums[i], total, k, xi) else k
                    ends[i] = min(max(up, 0.0), samples)
        hits[0] = last
        for i in range(xb.size):
            hit = ends[i] - hits[i]
            ob[i] = np.int64(hit if xb[i] > 0 else -hit)
        last = ends[xb.size - 1]


@jit
def magnitude_sum(q: Ints) -> float:
    """Sum of |q|, exact below 2^53 and without overflow above."""
    total = 0.0
    for i in range(q.size):
        total += abs(np.float64(q[i]))
    return total


@jit
def restore(q: Ints, unit: float, out: Singles) -> None:
    """q times ``unit``, rounded once, into ``out`` (float32)."""
    for i in range(q.size):
        out[i] = np.float32(np.float64(q[i]) * unit)


@jit
def accumulate(held: Singles, x: Singles, out: Singles) -> None:
    """held + x into ``out``, stopping at the largest float32."""
    for i in range(x.size):
        total = np.float64(held[i]) + np.float64(x[i])
        out[i] = np.float32(min(max(total, -FLOAT32_MAX), FLOAT32_MAX))


@inline
def _positions(block: Ints, out: Ints) -> int:
    """Where the block is not zero; returns how often. Without a branch: which one it would take is random."""
    found = 0
    for i in range(block.size):
        out[found] = i
        found += np.int64(block[i] != 0)
    return found


@jit
def measure(q: Ints) -> tuple[int, int, int, int, int]:
    """Least and largest of the values and 0, number of non-zeros, of maximal runs of zeros, longest such run."""
    where = np.empty(_BLOCK + 1, np.int64)
    low, high, nonzero, runs, longest = 0, 0, 0, 0, 0
    last = -1
    for p in range(0, q.size, _BLOCK):
        qb = q[p : min(q.size, p + _BLOCK)]
        for i in range(qb.size):
            low = min(low, qb[i])
            high = max(high, qb[i])
        found = _positions(qb, where)
        for j in range(found):
            gap = p + where[j] - last - 1
            longest = max(longest, gap)
            runs += np.int64(gap > 0)
            last = p + where[j]
        nonzero += found
    gap = q.size - last - 1
    return low, high, nonzero, runs + np.int64(gap > 0), max(longest, gap)


@inline
def _put(
    words: Words, at: int, hold: np.uint64, held: np.uint64, value: np.uint64, width: np.uint64
) -> tuple[int, np.uint64, np.uint64]:
    """Append the low ``width`` bits (1 to 64) of ``value``; the word under way is in ``hold`` and in ``words[at]``.

    Stores before it knows whether a word is full: that cannot be predicted, and a wrong guess costs more.
    """
    left = value << (_64 - width)
    full = hold | (left >> held)
    after = held + width
    # Two shifts: nothing may be left over, and a shift by 64 is undefined.
    over = (left << _1) << (_63 - held)
    words[at] = full
    words[at + 1] = over
    spilled = after >= _64
    return at + np.int64(spilled), over if spilled else full, after & _63


@jit
def write(q: Ints, value_bits: int, run_bits: int, words: Words) -> None:
    """Write each non-zero in ``value_bits`` of two's complement, each run as a zero and its length in ``run_bits``.

    ``words`` has room for one word more than the bits fill; the first bit is the highest of a word.
    """
    where = np.empty(_BLOCK + 1, np.int64)
    wide, long = np.uint64(value_bits), np.uint64(run_bits)
    mask = ~_0 >> (_64 - wide)
    together = value_bits + run_bits + value_bits <= 64
    hold, held, at = _0, _0, 0
    last = -1
    for p in range(0, q.size, _BLOCK):
        qb = q[p : min(q.size, p + _BLOCK)]
        found = _positions(qb, where)
        for j in range(found):
            gap = np.uint64(p + where[j] - last - 1)
            last = p + where[j]
            value = np.uint64(qb[where[j]]) & mask
            if together:
                # run and value in one piece, so that nothing depends on whether there is a run
                width = wide + (wide + long if gap > _0 else _0)
                at, hold, held = _put(words, at, hold, held, (gap << wide) | value, width)
            else:
                if gap > _0:
                    at, hold, held = _put(words, at, hold, held, _0, wide)
                    at, hold, held = _put(words, at, hold, held, gap, long)
                at, hold, held = _put(words, at, hold, held, value, wide)
    gap = np.uint64(q.size - last - 1)
    if gap > _0:
        at, hold, held = _put(words, at, hold, held, _0, wide)
        at, hold, held = _put(words, at, hold, held, gap, long)


@inline
def _peek(words: Words, at: np.uint64, width: np.uint64) -> np.uint64:
    """``width`` bits (1 to 64) from bit ``at`` on."""
    k, shift = at >> _6, at & _63
    return ((words[k] << shift) | ((words[k + _1] >> _1) >> (_63 - shift))) >> (_64 - width)


@jit
def read(words: Words, bits: int, value_bits: int, run_bits: int, size: int, out: Ints) -> int:
    """Read ``size`` integers; returns ``GOOD`` or the kind of fault.

    Args:
        words: the stream, the first bit highest, and zeros for at least 192 bits beyond it.
        bits: length of the stream, a multiple of 8; it must end with the last symbol's byte.
        value_bits: 1 to 64.
        run_bits: 0 to 64.
        size: how many integers.
        out: zeros (int64[size]), or empty to check the stream alone.
    """
    wide = np.uint64(value_bits)
    long = np.uint64(max(run_bits, 1))
    long_mask = ~_0 if run_bits > 0 else _0
    skip = np.uint64(run_bits)
    total = np.uint64(bits)
    lowest = _1 << (wide - _1)
    sign = _64 - wide
    keep = out.size == size
    at = _0
    done = 0
    while done < size:
        # A run and the value behind it at once. One branch, never taken before the end: zeros come at random,
        # and each wrong guess would cost more than everything else here.
        first = _peek(words, at, wide)
        zero = first == _0
        length = _peek(words, at + wide, long) & long_mask
        behind = _peek(words, at + wide + skip, wide)
        gap = length if zero else _0
        code = behind if zero else first
        at += wide + (wide + skip if zero else _0)
        if (gap >= np.uint64(size - done)) | (at > total) | (code == _0) | (code == lowest) | (zero & (gap == _0)):
            left = np.uint64(size - done)
            if gap >= left:
                at -= wide  # there is no value behind it
            if at > total:
                return SHORT
            if gap >= left:
                if gap > left:
                    return LONG_RUN
                break
            if zero & (gap == _0):
                return EMPTY_RUN
            return ADJACENT_RUNS if code == _0 else LOWEST_CODE
        done += np.int64(gap)
        if keep:
            out[done] = np.int64(code << sign) >> np.int64(sign)
        done += 1
    if total - at >= np.uint64(8) or (total > at and _peek(words, at, total - at) != _0):
        return PADDING
    return GOOD
