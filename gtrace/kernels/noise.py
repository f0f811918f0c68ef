"""Sums about noise: of three consecutive gradients, of two encodings of one, and along samples of noise."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gtrace.kernels._jit import inline, jit
from gtrace.kernels.counter import uniform, words
from gtrace.kernels.drawing import PADDING, fractions, prepare, symbols_of
from gtrace.kernels.norms import BLOCK, LANES
from gtrace.kernels.rounding import _TABLE

if TYPE_CHECKING:
    from gtrace.kernels import Floats, Ints, Singles, Words

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
def contrast(values: Singles, contrasts: Floats, scale: Floats, out: Floats) -> float:
    """Weighted sums of gradients in scaled coordinates: ``contrasts @ values * scale`` into ``out``.

    Args:
        values: float32[gradients, n].
        contrasts: float64[sums, gradients].
        scale: float64[n].
        out: float64[sums, n].

    Returns:
        the squared norm of ``out``.
    """
    lanes, energy = np.zeros(LANES), 0.0
    for j in range(contrasts.shape[0]):
        row = out[j]
        for g in range(contrasts.shape[1]):
            weight, own = contrasts[j, g], values[g]
            for i in range(own.size):
                row[i] = (row[i] if g > 0 else 0.0) + weight * np.float64(own[i])
        for p in range(0, row.size, LANES):
            rb, sb = row[p : p + LANES], scale[p : p + LANES]
            for k in range(rb.size):
                rb[k] *= sb[k]
                lanes[k] += rb[k] * rb[k]
        energy += _total(lanes)
    return energy


@inline
def _add_noise(
    x: Singles,
    first: Singles,
    second: Singles,
    near: Singles,
    scale: Floats,
    narrow: float,
    variance: Floats,
    lanes: Floats,
) -> None:
    for p in range(0, x.size, LANES):
        xb, ab, bb = x[p : p + LANES], first[p : p + LANES], second[p : p + LANES]
        nb, sb, vb = near[p : p + LANES], scale[p : p + LANES], variance[p : p + LANES]
        for k in range(xb.size):
            # Errors are float32, like what a memory keeps of them.
            one, other = ab[k] - xb[k], bb[k] - xb[k]
            apart = np.float64(one - other) * sb[k] * narrow
            vb[k] += apart * apart
            lanes[k] += np.float64((one + other) * _HALF) * sb[k] * (np.float64(nb[k]) * sb[k])


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
    _add_noise(x, first, second, near, scale, factor / np.sqrt(2.0), variance, lanes)
    return _total(lanes)


@jit
def noise_of_levels(
    x: Singles,
    bucket: int,
    norms: Singles,
    rules: Ints,
    levels: Singles,
    starts: Ints,
    keys: Words,
    near: Singles,
    scale: Floats,
    factor: float,
    variance: Floats,
    lost: Floats,
) -> None:
    """Encode a gradient twice with each of many level codecs, and compare as :func:`noise_of_two` does.

    Args:
        x, near, scale, factor: as there.
        bucket: values that share a norm.
        norms: float32[ceil(n / bucket)].
        rules: int64[codecs, 3 or more], see :mod:`gtrace.kernels.drawing`.
        levels: ascending magnitudes of all codecs, concatenated.
        starts: int64[codecs + 1], where those of each start.
        keys: uint64[2, 2], of the two encodings, the same for all codecs.
        variance: float64[codecs, n], added to.
        lost: float64[codecs], the inner products.
    """
    number, room = rules.shape[0], levels.size + PADDING * rules.shape[0]
    values, stops, widths = (
        np.empty(2 * levels.size, np.float32),
        np.empty(room, np.float32),
        np.empty(room, np.float32),
    )
    table, deep = np.empty((number, _TABLE), np.uint16), np.empty((number, _TABLE), np.bool_)
    for c in range(number):
        own, first = levels[starts[c] : starts[c + 1]], starts[c] + PADDING * c
        prepare(own, rules[c], values[2 * starts[c] :], stops[first:], widths[first:], table[c], deep[c])
    uniforms, drawn = np.empty((2, _STRIP), np.float32), np.empty((2, _STRIP), np.float32)
    r, magnitudes = np.empty(_STRIP, np.float32), np.empty(_STRIP, np.float32)
    cell, codes = np.empty(_STRIP, np.int32), np.empty(_STRIP, np.uint16)
    lanes, narrow = np.zeros((number, LANES)), factor / np.sqrt(2.0)
    at = 0
    while at < x.size:
        b = at // bucket
        end = min(x.size, (b + 1) * bucket, at + _STRIP)
        xb, norm, size = x[at:end], norms[b], end - at
        fractions(xb, norms, bucket, at, r, magnitudes)
        for draw in range(2):
            add, flip, last = words(keys[draw, 0], keys[draw, 1], 0)
            for i in range(size):
                uniforms[draw, i] = uniform(np.uint64(at + i), add, flip, last)
        for c in range(number):
            own, first, signed = levels[starts[c] : starts[c + 1]], starts[c] + PADDING * c, values[2 * starts[c] :]
            for draw in range(2):
                symbols_of(
                    rules[c],
                    r[:size],
                    magnitudes[:size],
                    uniforms[draw, :size],
                    own,
                    stops[first:],
                    widths[first:],
                    table[c],
                    deep[c],
                    cell[:size],
                    codes[:size],
                )
                for i in range(size):
                    drawn[draw, i] = signed[codes[i]] * norm
            part = variance[c, at:end]
            _add_noise(xb, drawn[0], drawn[1], near[at:end], scale[at:end], narrow, part, lanes[c])
        at = end
    for c in range(number):
        lost[c] = _total(lanes[c])


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
