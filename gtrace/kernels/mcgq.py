"""MCGQ: systematic sampling of a gradient's magnitudes, and the run-length stream of the counts.

The stream has its most significant bit first: non-zero integers as they are, runs of zeros as a length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gtrace.kernels._jit import inline, jit, jit_slp
from gtrace.kernels.counter import uniform, words
from gtrace.kernels.norms import LANES

if TYPE_CHECKING:
    from gtrace.kernels import Floats, Ints, Singles, Words

#: values that are sampled at a time
BLOCK = 1024
#: values that are added up one after the other, while other chains of as many are
CHAIN = 128
_EXPONENT = np.int64(0x7FF << 52)
# Added to an integer below 2^51, this puts it into the lowest bits: there is no instruction for vectors in AVX2.
_INTEGER = 1.5 * 2.0**52
_INTEGER_BITS = np.int64(0x4338 << 48)
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


@jit_slp
def absolute_sum(x: Singles, running: float, starts: Floats) -> float:
    """Sum of |x| in float64, one after the other; not finite exactly when an element is not.

    Adding to a sum depends on the sum only through its last bit, as long as its exponent stays. So several chains of
    values are added up side by side, each to an even and to an odd number of the exponent of the sum before all of
    them, and put together in order; only if the exponent changes, values are added one by one.

    Args:
        x: float32[n].
        running: the sum of what comes before.
        starts: float64[ceil(n / CHAIN)], overwritten: the sums before each chain.
    """
    held = np.empty(1)
    bits = held.view(np.int64)
    for p in range(0, x.size, 4 * CHAIN):
        total = running
        stop = min(p + 4 * CHAIN, x.size)
        ahead = starts[p // CHAIN :]
        held[0] = running
        bits[0] &= _EXPONENT
        even = held[0]
        bits[0] += 1
        odd = held[0]
        if stop == p + 4 * CHAIN:
            x0, x1 = x[p : p + CHAIN], x[p + CHAIN : p + 2 * CHAIN]
            x2, x3 = x[p + 2 * CHAIN : p + 3 * CHAIN], x[p + 3 * CHAIN : stop]
            e0 = e1 = e2 = e3 = even
            o0 = o1 = o2 = o3 = odd
            for i in range(CHAIN):
                v0, v1 = np.float64(abs(x0[i])), np.float64(abs(x1[i]))
                v2, v3 = np.float64(abs(x2[i])), np.float64(abs(x3[i]))
                e0 += v0
                o0 += v0
                e1 += v1
                o1 += v1
                e2 += v2
                o2 += v2
                e3 += v3
                o3 += v3
            for k, (e, o) in enumerate(((e0, o0), (e1, o1), (e2, o2), (e3, o3))):
                ahead[k] = held[0] = total
                total += o - odd if bits[0] & 1 else e - even
        if stop < p + 4 * CHAIN or not total < 2 * even:
            total = running
            for q in range(p, stop, CHAIN):
                ahead[(q - p) // CHAIN] = total
                for i in range(q, min(q + CHAIN, stop)):
                    total += np.float64(abs(x[i]))
        running = total
    return running


@inline
def _running_sums(x: Singles, starts: Floats, out: Floats) -> None:
    """The running sums of |x|, float32[BLOCK], in chains that do not wait for each other."""
    x0, x1, x2, x3 = x[:CHAIN], x[CHAIN : 2 * CHAIN], x[2 * CHAIN : 3 * CHAIN], x[3 * CHAIN : 4 * CHAIN]
    x4, x5, x6, x7 = x[4 * CHAIN : 5 * CHAIN], x[5 * CHAIN : 6 * CHAIN], x[6 * CHAIN : 7 * CHAIN], x[7 * CHAIN :]
    s0, s1, s2, s3 = starts[0], starts[1], starts[2], starts[3]
    s4, s5, s6, s7 = starts[4], starts[5], starts[6], starts[7]
    for i in range(CHAIN):
        s0 += np.float64(abs(x0[i]))
        s1 += np.float64(abs(x1[i]))
        s2 += np.float64(abs(x2[i]))
        s3 += np.float64(abs(x3[i]))
        s4 += np.float64(abs(x4[i]))
        s5 += np.float64(abs(x5[i]))
        s6 += np.float64(abs(x6[i]))
        s7 += np.float64(abs(x7[i]))
        out[i], out[CHAIN + i], out[2 * CHAIN + i], out[3 * CHAIN + i] = s0, s1, s2, s3
        out[4 * CHAIN + i], out[5 * CHAIN + i], out[6 * CHAIN + i], out[7 * CHAIN + i] = s4, s5, s6, s7


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


@inline
def _hits(samples: float, part: float, total: float, rate: float, window: float, xi: float) -> float:
    """ceil(samples part / total - xi), from 0 to ``samples``; decided exactly within ``window`` of an integer."""
    t = part * rate - xi
    up, k = np.ceil(t), np.rint(t)
    if abs(t - k) <= window:
        up = k + 1.0 if _beyond(samples, part, total, k, xi) else k
    return min(max(up, 0.0), samples)


@jit
def counts(x: Singles, total: float, starts: Floats, samples: float, xi: float, out: Ints) -> None:
    """sign(x_k) (D_k - D_{k-1}) with D_k = ceil(samples S_k / total - xi), exact for the float64 sums S_k.

    Args:
        x: finite, not all zero; or a part of such values.
        total: their sum.
        starts: from :func:`absolute_sum` for x.
        samples: a whole number, at most 2^48.
        xi: in [0, 1).
        out: int64[n].
    """
    rate = samples / total
    # Rounding moves samples S / total - xi by less than samples 2^-51; within the window it must not decide.
    window = max(2.0**-30, samples * 2.0**-50)
    sums = np.empty(BLOCK)
    hits = np.empty(BLOCK + 1)
    signed = np.empty(BLOCK)
    whole = signed.view(np.int64)
    padded, after = np.zeros(BLOCK, np.float32), np.zeros(BLOCK // CHAIN)
    last = _hits(samples, starts[0], total, rate, window, xi)
    for p in range(0, x.size, BLOCK):
        size = min(x.size - p, BLOCK)
        xb, ob, before = x[p : p + size], out[p : p + size], starts[p // CHAIN :]
        if size < BLOCK:
            for i in range(size):
                padded[i] = xb[i]
            for i in range(before.size):
                after[i] = before[i]
            _running_sums(padded, after, sums)
        else:
            _running_sums(xb, before, sums)
        ends = hits[1:]
        near = 0
        for i in range(xb.size):
            t = sums[i] * rate - xi
            up = np.ceil(t)
            near += np.int64(up - t < window) + np.int64(up - t > 1.0 - window)
            ends[i] = min(max(up, 0.0), samples)
        if near > 0:
            for i in range(xb.size):
                ends[i] = _hits(samples, sums[i], total, rate, window, xi)
        hits[0] = last
        for i in range(xb.size):
            hit = ends[i] - hits[i]
            signed[i] = (hit if xb[i] > 0 else -hit) + _INTEGER
        for i in range(xb.size):
            ob[i] = whole[i] - _INTEGER_BITS
        last = ends[xb.size - 1]


@jit
def magnitude_sum(q: Ints) -> float:
    """Sum of |q|, exact below 2^53 and without overflow above."""
    sums, whole = np.zeros(LANES), q.size - q.size % LANES
    for p in range(0, whole, LANES):
        for k in range(LANES):
            sums[k] += abs(np.float64(q[p + k]))
    for k in range(q.size - whole):
        sums[k] += abs(np.float64(q[whole + k]))
    return sums.sum()


@jit
def restore(q: Ints, unit: float, out: Singles) -> None:
    """q times ``unit``, rounded once, into ``out`` (float32)."""
    for i in range(q.size):
        out[i] = np.float32(np.float64(q[i]) * unit)


@inline
def _positions(block: Ints, out: Ints) -> int:
    """Where the block is not zero; returns how often. Without a branch: which one it would take is random."""
    found = 0
    for i in range(block.size):
        out[found] = i
        found += np.int64(block[i] != 0)
    return found


@jit
def measure(q: Ints, behind: int) -> tuple[int, int, int, int, int, int]:
    """Least and largest of the values and 0, number of non-zeros, of maximal runs of zeros, longest such run.

    ``behind`` zeros come before the values; a run at the end is left out, and its length returned last.
    """
    where = np.empty(BLOCK + 1, np.int64)
    low, high, nonzero, runs, longest = 0, 0, 0, 0, 0
    last = -1 - behind
    for p in range(0, q.size, BLOCK):
        qb = q[p : min(q.size, p + BLOCK)]
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
    return low, high, nonzero, runs, longest, q.size - last - 1


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
    where = np.empty(BLOCK + 1, np.int64)
    wide, long = np.uint64(value_bits), np.uint64(run_bits)
    mask = ~_0 >> (_64 - wide)
    together = value_bits + run_bits + value_bits <= 64
    hold, held, at = _0, _0, 0
    last = -1
    for p in range(0, q.size, BLOCK):
        qb = q[p : min(q.size, p + BLOCK)]
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
