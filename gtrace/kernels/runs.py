"""Run-length streams, most significant bit first: non-zero integers as they are, runs of zeros as a length."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gtrace.kernels._jit import inline, jit

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BLOCK = 1024
_0 = np.uint64(0)
_1 = np.uint64(1)
_6 = np.uint64(6)
_63 = np.uint64(63)
_64 = np.uint64(64)

#: what :func:`read` found
GOOD, SHORT, EMPTY_RUN, LONG_RUN, ADJACENT_RUNS, LOWEST_CODE, PADDING = 0, 1, 2, 3, 4, 5, 6


@inline
def _positions(block: NDArray[np.int64], out: NDArray[np.int64]) -> int:
    """Where the block is not zero; returns how often. Without a branch: which one it would take is random."""
    found = 0
    for i in range(block.size):
        out[found] = i
        found += np.int64(block[i] != 0)
    return found


@jit
def measure(q: NDArray[np.int64]) -> tuple[int, int, int, int, int]:
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
    words: NDArray[np.uint64], at: int, hold: np.uint64, held: np.uint64, value: np.uint64, width: np.uint64
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
def write(q: NDArray[np.int64], value_bits: int, run_bits: int, words: NDArray[np.uint64]) -> None:
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
def _peek(words: NDArray[np.uint64], at: np.uint64, width: np.uint64) -> np.uint64:
    """``width`` bits (1 to 64) from bit ``at`` on."""
    k, shift = at >> _6, at & _63
    return ((words[k] << shift) | ((words[k + _1] >> _1) >> (_63 - shift))) >> (_64 - width)


@jit
def read(
    words: NDArray[np.uint64], bits: int, value_bits: int, run_bits: int, size: int, out: NDArray[np.int64]
) -> int:
    """Read ``size`` integers; returns ``GOOD`` or what is wrong.

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
