"""Choosing values to send: random words to rank them by, positions above a threshold, bins with their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gtrace.kernels._jit import jit
from gtrace.kernels.counter import MASK32, mix, words

if TYPE_CHECKING:
    from numpy.typing import NDArray


@jit
def fill_words(high: np.uint64, low: np.uint64, out: NDArray[np.uint32]) -> None:
    """The first ``out.size`` 32-bit words of a key's stream."""
    add, flip, last = words(high, low, 0)
    for i in range(out.size):
        out[i] = mix(np.uint64(i) & MASK32, add, flip, last)


@jit
def at_least(ranks: NDArray[np.uint32], threshold: np.uint32, ties: int, out: NDArray[np.int64]) -> int:
    """Positions, ascending, of ranks above a threshold and of the first ``ties`` that equal it.

    Args:
        ranks: uint32[n].
        threshold: the rank that is shared by the last that are chosen.
        ties: how many of those.
        out: int64[k + 1], k positions written; the last element is scratch.

    Returns:
        how many positions there are.
    """
    count = 0
    for i in range(ranks.size):
        equal = ranks[i] == threshold and ties > 0
        # Written always and kept sometimes: no branch to mispredict.
        out[count] = i
        count += ranks[i] > threshold or equal
        ties -= equal
    return count


@jit
def above_local_peak(x: NDArray[np.float32], y: NDArray[np.float32], size: int, chosen: NDArray[np.bool_]) -> float:
    """Mark, bin by bin, where |y| reaches the bin's largest |x| and x is not zero.

    Args:
        x: float32[n].
        y: float32[n].
        size: values per bin.
        chosen: bool[n], written.

    Returns:
        the sum of the bins' largest |x|.
    """
    total = 0.0
    for start in range(0, x.size, size):
        xb = x[start : start + size]
        yb = y[start : start + size]
        out = chosen[start : start + size]
        peak = np.float32(0.0)
        for i in range(xb.size):
            peak = max(peak, abs(xb[i]))
        for i in range(xb.size):
            out[i] = abs(yb[i]) >= peak and xb[i] != 0.0
        total += np.float64(peak)
    return total
