"""One bit a value: packing signs, and the reconstruction values of buckets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gtrace.kernels._jit import jit
from gtrace.kernels.counter import MASK32, mix, words

if TYPE_CHECKING:
    from numpy.typing import NDArray

_S31 = np.uint64(31)


@jit
def toss_zeros(
    x: NDArray[np.float32], high: np.uint64, low: np.uint64, start: int, negative: NDArray[np.bool_]
) -> None:
    """Let a fair coin of the key, one per element from ``start`` on, decide the sign of the zeros of float32[n]."""
    add, flip, last = words(high, low, start)
    first = np.uint64(start)
    for i in range(x.size):
        if x[i] == 0.0:
            negative[i] = mix((first + np.uint64(i)) & MASK32, add, flip, last) >> _S31 != np.uint64(0)


@jit
def two_means(x: NDArray[np.float32], bucket: int, means: NDArray[np.float32]) -> None:
    """Per bucket the mean of its values that are not negative and that of its negative ones (0 for none).

    Args:
        x: float32[n].
        bucket: values per bucket.
        means: float32[buckets, 2], written.
    """
    for b in range(means.shape[0]):
        values = x[b * bucket : min((b + 1) * bucket, x.size)]
        upper = 0.0
        lower = 0.0
        below = 0
        for i in range(values.size):
            value = np.float64(values[i])
            upper += max(value, 0.0)
            lower += min(value, 0.0)
            below += value < 0.0
        above = values.size - below
        means[b, 0] = upper / above if above else 0.0
        means[b, 1] = lower / below if below else 0.0


@jit
def restore(bits: NDArray[np.uint8], bucket: int, values: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """Look up each bit, least significant first, in its bucket's two values.

    Args:
        bits: uint8[ceil(n / 8)].
        bucket: values per bucket.
        values: float32[buckets, 2], for the bits 0 and 1.
        out: float32[n], written.
    """
    for b in range(values.shape[0]):
        start = b * bucket
        target = out[start : min(start + bucket, out.size)]
        zero, one = values[b, 0], values[b, 1]
        for i in range(target.size):
            at = start + i
            target[i] = one if (bits[at >> 3] >> (at & 7)) & 1 else zero
