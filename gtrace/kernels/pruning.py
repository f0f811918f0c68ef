"""Stochastic pruning: small values become plus or minus a threshold or zero, at random and without bias."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gtrace.kernels._jit import jit
from gtrace.kernels.counter import MASK32, uniform, words

if TYPE_CHECKING:
    from numpy.typing import NDArray

_CHUNK = 1024
_ZERO = np.float32(0.0)


@jit
def prune(
    x: NDArray[np.float32], alpha: np.float32, high: np.uint64, low: np.uint64, start: int, out: NDArray[np.float32]
) -> None:
    """Keep |x| > alpha; else alpha sign(x) with probability |x| / alpha, and zero otherwise; ``alpha`` is positive.

    The quotient, unlike a product of alpha and the uniform, has its digits where alpha is a denormal. A block of
    2^32 elements has words of its own; ``start`` is the number of the first one.
    """
    u = np.empty(_CHUNK, np.float32)
    p = 0
    while p < x.size:
        q = min(p + _CHUNK, x.size)
        add, flip, last = words(high, low, start + p)
        base = np.uint64(start + p) & MASK32
        xb = x[p:q]
        ob = out[p:q]
        for i in range(xb.size):
            u[i] = uniform(base + np.uint64(i), add, flip, last)
        for i in range(xb.size):
            magnitude = abs(xb[i])
            small = alpha if u[i] < magnitude / alpha else _ZERO
            ob[i] = np.copysign(magnitude if magnitude > alpha else small, xb[i])
        p = q


@jit
def cut(x: NDArray[np.float32], alpha: np.float32, out: NDArray[np.float32]) -> None:
    """Keep |x| >= alpha, the rest becomes zero."""
    for i in range(x.size):
        out[i] = x[i] if abs(x[i]) >= alpha else _ZERO
