"""Sums about noise: of three consecutive gradients, of two encodings of one, and along samples of noise."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gtrace.kernels._jit import inline, jit
from gtrace.kernels.norms import BLOCK, LANES

if TYPE_CHECKING:
    from gtrace.kernels import Floats, Singles

#: sums of :func:`three_sums`
THREE = 3
_STRIP = 1024
_HALF = np.float32(0.5)


@inline
def _total(lanes: Floats) -> float:
    """The sum of fixed lanes, which are then empty again."""
    total = 0.0
    for k in range(LANES):
        total += lanes[k]
        lanes[k] = 0.0
    return total


@jit
def three_sums(a: Singles, b: Singles, c: Singles, out: Floats) -> None:
    """Add ||a - 2 b + c||^2, ||a||^2 + ||b||^2 + ||c||^2 and ||a + b + c||^2 to float64[3], over fixed blocks."""
    lanes = np.zeros((THREE, LANES))
    bent, norms, whole = lanes[0], lanes[1], lanes[2]
    for start in range(0, a.size, BLOCK):
        stop = min(a.size, start + BLOCK)
        for p in range(start, stop, LANES):
            ab, bb, cb = a[p : min(p + LANES, stop)], b[p : min(p + LANES, stop)], c[p : min(p + LANES, stop)]
            for k in range(ab.size):
                first, middle, last = np.float64(ab[k]), np.float64(bb[k]), np.float64(cb[k])
                ends = first + last
                second, total = ends - 2.0 * middle, ends + middle
                bent[k] += second * second
                norms[k] += first * first + middle * middle + last * last
                whole[k] += total * total
        for j in range(THREE):
            out[j] += _total(lanes[j])


@jit
def noise_of_two(
    x: Singles, first: Singles, second: Singles, near: Singles, scale: Floats, factor: float, variance: Floats
) -> float:
    """Compare two encodings of a gradient, float32[n] each.

    Args:
        x: the gradient.
        first, second: as they arrived; the same array twice has no variance.
        near: another gradient of the same weights.
        scale: float64[n], of each element's coordinate.
        factor: of the gradients, outside of ``scale``.
        variance: float64[n], half the squared difference of the two is added to it.

    Returns:
        the inner product of their mean error and ``near``, without ``factor``.
    """
    lanes = np.zeros(LANES)
    narrow = factor / np.sqrt(2.0)
    for p in range(0, x.size, LANES):
        xb, ab, bb = x[p : p + LANES], first[p : p + LANES], second[p : p + LANES]
        nb, sb, vb = near[p : p + LANES], scale[p : p + LANES], variance[p : p + LANES]
        for k in range(xb.size):
            # Errors are float32, like what a memory keeps of them.
            one, other = ab[k] - xb[k], bb[k] - xb[k]
            apart = np.float64(one - other) * sb[k] * narrow
            vb[k] += apart * apart
            lanes[k] += np.float64((one + other) * _HALF) * sb[k] * (np.float64(nb[k]) * sb[k])
    return _total(lanes)


@jit
def weighted_grams(samples: Floats, weights: Floats, out: Floats) -> None:
    """Add samples diag(weights[row]) samples^T to the upper triangle of each ``out[row]``.

    In one pass without weighted copies, and on one thread: BLAS would start as many as there are processors.

    Args:
        samples: float64[n, elements].
        weights: float64[rows, elements].
        out: float64[rows, n, n].
    """
    lanes, products = np.zeros(LANES), np.empty(_STRIP)
    for start in range(0, samples.shape[1], _STRIP):
        stop = min(samples.shape[1], start + _STRIP)
        for j in range(samples.shape[0]):
            left = samples[j, start:stop]
            for k in range(j, samples.shape[0]):
                right = samples[k, start:stop]
                for i in range(left.size):
                    products[i] = left[i] * right[i]
                for row in range(weights.shape[0]):
                    own = weights[row, start:stop]
                    for p in range(0, own.size, LANES):
                        wb, pb = own[p : p + LANES], products[p : p + LANES]
                        for i in range(wb.size):
                            lanes[i] += wb[i] * pb[i]
                    out[row, j, k] += _total(lanes)
