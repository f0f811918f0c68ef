"""Choosing values to send: random words to rank them by, and bins with thresholds of their own."""

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
