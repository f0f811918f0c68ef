"""Systematic sampling of a gradient's magnitudes: how often each coordinate is hit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gtrace.kernels._jit import inline, jit
from gtrace.kernels.counter import uniform, words
from gtrace.kernels.norms import FLOAT32_MAX

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BLOCK = 1024
_SPLIT = 134217729.0  # 2^27 + 1


@jit
def offset(high: np.uint64, low: np.uint64) -> float:
    """The uniform number of a key's first element, k / 2^24."""
    add, flip, last = words(high, low, 0)
    return np.float64(uniform(np.uint64(0), add, flip, last))


@jit
def absolute_sum(x: NDArray[np.float32]) -> float:
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
def counts(x: NDArray[np.float32], total: float, samples: float, xi: float, out: NDArray[np.int64]) -> None:
    """sign(x_k) (D_k - D_{k-1}) with D_k = ceil(samples S_k / total - xi), exact for the float64 sums S_k.

    Args:
        x: finite, not all zero.
        total: what :func:`absolute_sum` gave for it.
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
def magnitude_sum(q: NDArray[np.int64]) -> float:
    """Sum of |q|, exact below 2^53 and without overflow above."""
    total = 0.0
    for i in range(q.size):
        total += abs(np.float64(q[i]))
    return total


@jit
def restore(q: NDArray[np.int64], unit: float, out: NDArray[np.float32]) -> None:
    """q times ``unit``, rounded once, into ``out`` (float32)."""
    for i in range(q.size):
        out[i] = np.float32(np.float64(q[i]) * unit)


@jit
def accumulate(held: NDArray[np.float32], x: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """held + x into ``out``, stopping at the largest float32."""
    for i in range(x.size):
        total = np.float64(held[i]) + np.float64(x[i])
        out[i] = np.float32(min(max(total, -FLOAT32_MAX), FLOAT32_MAX))
