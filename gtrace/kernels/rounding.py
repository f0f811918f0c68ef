"""Stochastic rounding of normalized buckets to levels, and back.

Symbols number the signed values from the most negative one up. With a zero level and m magnitudes there are
2 m - 1 of them, the middle one is zero; without, 2 m.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gtrace.kernels._jit import inline, jit
from gtrace.kernels.counter import MASK32, uniform, words

if TYPE_CHECKING:
    from numpy.typing import NDArray

_CHUNK = 1024
#: a lookup table of the threshold search: exponent and four leading mantissa bits of r, from 1 down to 2^-32
TABLE_SHIFT = 19
TABLE_BASE = (127 - 32) << 4
TABLE_SIZE = (32 << 4) + 2
_ONE = np.float32(1.0)
_TWO = np.float32(2.0)


@inline
def _normalize(
    x: NDArray[np.float32],
    scale: np.float32,
    base: np.uint64,
    key: tuple[np.uint64, np.uint64, np.uint64],
    r: NDArray[np.float32],
    u: NDArray[np.float32],
) -> None:
    add, flip, last = key
    divisor = scale if scale > 0 else _ONE
    for i in range(x.size):
        r[i] = x[i] / divisor
    for i in range(x.size):
        u[i] = uniform(base + np.uint64(i), add, flip, last)


@jit
def round_uniform(
    x: NDArray[np.float32],
    bucket: int,
    scales: NDArray[np.float32],
    steps: int,
    mirrored: bool,
    high: np.uint64,
    low: np.uint64,
    start: int,
    out: NDArray[np.uint16],
) -> None:
    """Round to k / steps, k = 0..steps, or (``mirrored``) to the odd multiples of 1 / steps.

    Elements are numbered from ``start`` on and must not cross a block of 2^32.
    """
    key = words(high, low, start)
    r = np.empty(_CHUNK, np.float32)
    u = np.empty(_CHUNK, np.float32)
    n = x.size
    first = _ONE / np.float32(steps) if mirrored else np.float32(0.0)
    top = (steps - 1) // 2 if mirrored else steps
    grid = np.float32(steps) * (np.float32(0.5) if mirrored else _ONE)
    shift = np.float32(0.5) if mirrored else np.float32(0.0)
    upper = top + 1 if mirrored else top
    lower = top
    for b in range(scales.size):
        p = b * bucket
        end = min(n, p + bucket)
        while p < end:
            q = min(p + _CHUNK, end)
            xb = x[p:q]
            ob = out[p:q]
            _normalize(xb, scales[b], np.uint64(start + p), key, r, u)
            for i in range(xb.size):
                t = max(abs(r[i]) * grid - shift, np.float32(0.0))
                k = np.int32(t)
                k = min(k + np.int32(u[i] < t - np.float32(k)), top)
                positive = r[i] > first * (_TWO * u[i] - _ONE)
                ob[i] = (upper + k) if positive else (lower - k)
            p = q


@jit
def round_levels(
    x: NDArray[np.float32],
    bucket: int,
    scales: NDArray[np.float32],
    levels: NDArray[np.float32],
    mirrored: bool,
    high: np.uint64,
    low: np.uint64,
    start: int,
    out: NDArray[np.uint16],
) -> None:
    """Round to few ascending magnitudes ``levels`` by counting random thresholds passed.

    One uniform u per element moves every threshold l_k + u (l_{k+1} - l_k) at once; exactly the one of the
    element's own cell is random to it. No branches, so all of it is vectorized.
    """
    key = words(high, low, start)
    r = np.empty(_CHUNK, np.float32)
    u = np.empty(_CHUNK, np.float32)
    code = np.empty(_CHUNK, np.int32)
    n = x.size
    m = levels.size
    first = levels[0]
    upper = m if mirrored else m - 1
    lower = m - 1
    for b in range(scales.size):
        p = b * bucket
        end = min(n, p + bucket)
        while p < end:
            q = min(p + _CHUNK, end)
            xb = x[p:q]
            ob = out[p:q]
            _normalize(xb, scales[b], np.uint64(start + p), key, r, u)
            for i in range(xb.size):
                code[i] = 0
            for k in range(m - 1):
                level = levels[k]
                width = levels[k + 1] - level
                for i in range(xb.size):
                    code[i] += np.int32(abs(r[i]) > level + u[i] * width)
            for i in range(xb.size):
                positive = r[i] > first * (_TWO * u[i] - _ONE)
                ob[i] = (upper + code[i]) if positive else (lower - code[i])
            p = q


@jit
def search_table(levels: NDArray[np.float32], table: NDArray[np.int32]) -> None:
    """For each class of r (top bits of its pattern) the cell that the class's lower end lies in."""
    edge = np.empty(1, np.int32)
    value = edge.view(np.float32)
    cell = 0
    for k in range(TABLE_SIZE):
        edge[0] = (TABLE_BASE + k) << TABLE_SHIFT
        low = value[0] if k > 0 else np.float32(0.0)
        while cell + 2 < levels.size and levels[cell + 1] <= low:
            cell += 1
        table[k] = cell


@jit
def round_many(
    x: NDArray[np.float32],
    bucket: int,
    scales: NDArray[np.float32],
    levels: NDArray[np.float32],
    table: NDArray[np.int32],
    mirrored: bool,
    high: np.uint64,
    low: np.uint64,
    start: int,
    out: NDArray[np.uint16],
) -> None:
    """Round to many ascending magnitudes: the cell is looked up by the top bits of r and then walked to."""
    key = words(high, low, start)
    r = np.empty(_CHUNK, np.float32)
    u = np.empty(_CHUNK, np.float32)
    magnitude = np.empty(_CHUNK, np.float32)
    bits = magnitude.view(np.int32)
    n = x.size
    m = levels.size
    first = levels[0]
    upper = m if mirrored else m - 1
    lower = m - 1
    for b in range(scales.size):
        p = b * bucket
        end = min(n, p + bucket)
        while p < end:
            q = min(p + _CHUNK, end)
            xb = x[p:q]
            ob = out[p:q]
            _normalize(xb, scales[b], np.uint64(start + p), key, r, u)
            for i in range(xb.size):
                magnitude[i] = abs(r[i])
            for i in range(xb.size):
                a = magnitude[i]
                k = max(0, min((bits[i] >> TABLE_SHIFT) - TABLE_BASE, TABLE_SIZE - 1))
                c = table[k]
                while c < m - 2 and levels[c + 1] <= a:
                    c += 1
                # A value on its level, a zero above all, is done: beside tiny levels the product is denormal and slow.
                if a > levels[c]:
                    c += np.int32(a > levels[c] + u[i] * (levels[c + 1] - levels[c]))
                positive = r[i] > first * (_TWO * u[i] - _ONE)
                ob[i] = (upper + c) if positive else (lower - c)
            p = q


@jit
def round_powers(x: NDArray[np.float32], high: np.uint64, low: np.uint64, start: int, out: NDArray[np.uint16]) -> None:
    """Round each value to one of the two powers of two around it (natural compression), on the bits alone.

    Magnitude codes are 0 for zero, e = 1..254 for 2^(e - 127), and 255 for the largest float32, which ends
    the cell above 2^127. Below 2^-126 the two neighbours are 0 and 2^-126.
    """
    add, flip, last = words(high, low, start)
    base = np.uint64(start)
    bits = x.view(np.uint32)
    for i in range(x.size):
        magnitude = bits[i] & np.uint32(0x7FFFFFFF)
        mantissa = np.float32(np.int32(magnitude & np.uint32(0x7FFFFF))) * np.float32(2.0**-23)
        code = np.int32(magnitude >> np.uint32(23))
        code += np.int32(uniform((base + np.uint64(i)) & MASK32, add, flip, last) < mantissa)
        out[i] = (255 - code) if bits[i] >> np.uint32(31) else (255 + code)


@jit
def restore(
    symbols: NDArray[np.uint16],
    bucket: int,
    scales: NDArray[np.float32],
    values: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:
    """Look symbols up in ``values`` (signed levels) and multiply by the bucket's scale."""
    n = symbols.size
    for b in range(scales.size):
        p = b * bucket
        end = min(n, p + bucket)
        scale = scales[b]
        sb = symbols[p:end]
        ob = out[p:end]
        for i in range(sb.size):
            ob[i] = values[sb[i]] * scale
