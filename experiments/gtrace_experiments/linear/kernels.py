"""Stochastic gradients of linear models at low precision, one epoch at a time (ZipML, Eq. 2).

Each step is x <- prox(x - rate Q4(g(Q1(a), Q2(a), ..., Q3(x)))), with samples a rounded by column, the model x and
the gradient g by row. Every rounding draws from its own stream: row ``step`` or ``sample * draws + draw`` of a key,
with the element's index as the counter.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gtrace.kernels._jit import inline, jit
from gtrace.kernels.counter import mix, uniform, words

if TYPE_CHECKING:
    from numpy.typing import NDArray

LEAST_SQUARES, LOGISTIC, HINGE = 0, 1, 2
FULL, NAIVE, DOUBLE, SYMMETRIZED, POLYNOMIAL = 0, 1, 2, 3, 4
NO_REFETCH, BOUNDS, SKETCHES = 0, 1, 2
NO_PROX, L1, L2, BALL = 0, 1, 2, 3
#: rows of ``Streams``
SAMPLES, MODEL, GRADIENT, SIGNS = 0, 1, 2, 3

_ROW = 32
_WORD = np.uint64(32)


class Samples(NamedTuple):
    """The training set, and how each of its values is rounded.

    Attributes:
        values: float32[K, n].
        targets: float64[K]; labels are -1 and 1.
        index: uint16[K, n], the level at or below each value; [0, 0] where samples are not quantized.
        part: float32[K, n], probability of the level above it.
        levels: float64[n, L], ascending in every row, padded with the last one.
        reach: float64[n, L], how far a value can be from the level it was rounded to.
    """

    values: NDArray[np.float32]
    targets: NDArray[np.float64]
    index: NDArray[np.uint16]
    part: NDArray[np.float32]
    levels: NDArray[np.float64]
    reach: NDArray[np.float64]


class Rule(NamedTuple):
    """What a step does.

    Attributes:
        loss: LEAST_SQUARES, LOGISTIC or HINGE.
        sampling: FULL, NAIVE, DOUBLE, SYMMETRIZED or POLYNOMIAL.
        draws: quantizations of each sample; at least 1.
        model_steps: positive levels of the model; 0 leaves it exact.
        gradient_steps: positive levels of the gradient; 0 leaves it exact.
        refetch: for HINGE, NO_REFETCH, BOUNDS or SKETCHES.
        rows: of a sketch.
        quantile: how many standard deviations a sketched margin must be away from 1.
        center: margin at which the polynomial is centred.
        radius: half width of the interval on which it holds.
        coefficients: float64[degree + 1], of Chebyshev polynomials of (margin - center) / radius.
        prox: NO_PROX, L1, L2 or BALL.
        strength: of the penalty, or radius of the ball.
    """

    loss: int
    sampling: int
    draws: int
    model_steps: int
    gradient_steps: int
    refetch: int
    rows: int
    quantile: float
    center: float
    radius: float
    coefficients: NDArray[np.float64]
    prox: int
    strength: float


class Streams(NamedTuple):
    """Keys of one epoch: uint64[4] high and low words, in the order SAMPLES, MODEL, GRADIENT, SIGNS."""

    high: NDArray[np.uint64]
    low: NDArray[np.uint64]


@inline
def _stream(streams: Streams, which: int, row: int) -> tuple[np.uint64, np.uint64, np.uint64]:
    return words(streams.high[which], streams.low[which], row << _ROW)


@inline
def _draw(samples: Samples, k: int, draw: int, rule: Rule, streams: Streams, out: NDArray[np.float64]) -> None:
    """One quantization of sample k."""
    add, flip, last = _stream(streams, SAMPLES, k * rule.draws + draw)
    index, part = samples.index[k], samples.part[k]
    for i in range(out.size):
        up = uniform(np.uint64(i), add, flip, last) < part[i]
        out[i] = samples.levels[i, index[i] + up]


@inline
def _bound(samples: Samples, k: int, drawn: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """How far the product of y and sample k can be from that of y and its quantization."""
    total = 0.0
    for i in range(y.size):
        below = samples.index[k, i]
        level = below if drawn[i] == samples.levels[i, below] else below + 1
        total += samples.reach[i, level] * abs(y[i])
    return total


@inline
def _dot(a: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    total = 0.0
    for i in range(y.size):
        total += a[i] * y[i]
    return total


@inline
def _slope(loss: int, z: float, target: float) -> float:
    """Derivative of the loss with respect to the product z of sample and model."""
    if loss == LEAST_SQUARES:
        return z - target
    if loss == LOGISTIC:
        return -target / (1.0 + math.exp(target * z))
    return -target if target * z < 1.0 else 0.0


@inline
def _estimate(
    samples: Samples,
    k: int,
    rule: Rule,
    streams: Streams,
    y: NDArray[np.float64],
    work: NDArray[np.float64],
) -> float:
    """The polynomial of the margin without bias: the Chebyshev recurrence with a fresh quantization in each step."""
    c, target = rule.coefficients, samples.targets[k]
    before, now, total = 0.0, 1.0, c[0]
    for j in range(1, c.size):
        _draw(samples, k, j, rule, streams, work)
        u = (target * _dot(work, y) - rule.center) / rule.radius
        before, now = now, u if j == 1 else 2.0 * u * now - before
        total += c[j] * now
    return total


@inline
def _sketched(
    samples: Samples, k: int, rule: Rule, streams: Streams, step: int, y: NDArray[np.float64]
) -> tuple[float, float]:
    """Product of sample k and y from random projections onto signs, and its deviation at a margin of 1."""
    a = samples.values[k]
    add, flip, last = _stream(streams, SIGNS, step)
    total, a2, y2 = 0.0, 0.0, 0.0
    blocks = (y.size + 31) // 32
    for row in range(rule.rows):
        pa, py = 0.0, 0.0
        for block in range(blocks):
            signs = mix(np.uint64(row * blocks + block), add, flip, last)
            for i in range(32 * block, min(32 * block + 32, y.size)):
                sign = 1.0 if signs & np.uint64(1) else -1.0
                signs >>= np.uint64(1)
                pa += sign * a[i]
                py += sign * y[i]
        total += pa * py
    for i in range(y.size):
        a2 += np.float64(a[i]) * a[i]
        y2 += y[i] * y[i]
    return total / rule.rows, math.sqrt((a2 * y2 + 1.0) / rule.rows)


@inline
def _round_row(v: NDArray[np.float64], steps: int, streams: Streams, which: int, row: int) -> None:
    """Round a vector in place to multiples of its norm over ``steps``."""
    norm = math.sqrt(_dot(v, v))
    if norm == 0.0 or not math.isfinite(norm):
        return
    add, flip, last = _stream(streams, which, row)
    for i in range(v.size):
        r = abs(v[i]) / norm * steps
        below = math.floor(r)
        level = below + (uniform(np.uint64(i), add, flip, last) < r - below)
        v[i] = math.copysign(level * norm / steps, v[i])


@jit
def batch_gradient(
    samples: Samples,
    rule: Rule,
    streams: Streams,
    chosen: NDArray[np.int64],
    step: int,
    x: NDArray[np.float64],
    gradient: NDArray[np.float64],
    counts: NDArray[np.int64],
) -> None:
    """The mean gradient of some samples, quantized in everything but itself.

    Args:
        samples: the training set.
        rule: what a step does.
        streams: keys of the epoch.
        chosen: int64[B], rows of the samples.
        step: number of this step in its epoch; the row of the model's and the sketches' streams.
        x: float64[n], the model.
        gradient: float64[n], written.
        counts: int64[2], added to: samples fetched again, and samples of HINGE on the wrong side of the hinge.
    """
    n = x.size
    y = x.copy()
    if rule.model_steps:
        _round_row(y, rule.model_steps, streams, MODEL, step)
    outer, inner = np.empty(n), np.empty(n)
    gradient[:] = 0.0
    for k in chosen:
        target, exact = samples.targets[k], samples.values[k]
        sampling, slope, twin = rule.sampling, 0.0, 0.0
        if sampling != FULL:
            _draw(samples, k, 0, rule, streams, outer)
        if sampling == FULL:
            slope = _slope(rule.loss, _dot(exact, y), target)
        elif sampling == POLYNOMIAL:
            slope = target * _estimate(samples, k, rule, streams, y, inner)
        else:
            if sampling == NAIVE:
                inner[:] = outer
            else:
                _draw(samples, k, 1, rule, streams, inner)
            z = _dot(inner, y)
            slope = _slope(rule.loss, z, target)
            if sampling == SYMMETRIZED:
                slope, twin = 0.5 * slope, 0.5 * _slope(rule.loss, _dot(outer, y), target)
            if rule.refetch != NO_REFETCH:
                slack = 0.0
                if rule.refetch == BOUNDS:
                    slack = _bound(samples, k, inner, y)
                else:
                    z, deviation = _sketched(samples, k, rule, streams, step, y)
                    slope, slack = _slope(rule.loss, z, target), rule.quantile * deviation
                if abs(1.0 - target * z) <= slack:
                    counts[0] += 1
                    sampling = FULL
                    slope = _slope(rule.loss, _dot(exact, y), target)
        if rule.loss == HINGE and sampling != POLYNOMIAL:
            counts[1] += (slope + twin != 0.0) != (target * _dot(exact, y) < 1.0)
        if sampling == FULL:
            for i in range(n):
                gradient[i] += slope * exact[i]
        elif sampling == SYMMETRIZED:
            for i in range(n):
                gradient[i] += slope * outer[i] + twin * inner[i]
        else:
            for i in range(n):
                gradient[i] += slope * outer[i]
    for i in range(n):
        gradient[i] /= chosen.size


@jit
def descend(x: NDArray[np.float64], gradient: NDArray[np.float64], rate: float, prox: int, strength: float) -> None:
    """One proximal step in place: argmin_y ||y - (x - rate gradient)||^2 / 2 + rate R(y).

    Args:
        x: float64[n], the model, changed.
        gradient: float64[n].
        rate: step size.
        prox: R: NO_PROX, L1 (strength ||y||_1), L2 (strength ||y||^2 / 2) or BALL (||y|| <= strength).
        strength: see ``prox``.
    """
    for i in range(x.size):
        x[i] -= rate * gradient[i]
    if prox == L1:
        for i in range(x.size):
            x[i] = math.copysign(max(abs(x[i]) - rate * strength, 0.0), x[i])
    elif prox == L2:
        for i in range(x.size):
            x[i] /= 1.0 + rate * strength
    elif prox == BALL:
        norm = math.sqrt(_dot(x, x))
        if norm > strength:
            for i in range(x.size):
                x[i] *= strength / norm


@jit
def epoch(
    samples: Samples,
    rule: Rule,
    streams: Streams,
    order: NDArray[np.int64],
    batch: int,
    rate: float,
    x: NDArray[np.float64],
    total: NDArray[np.float64],
    counts: NDArray[np.int64],
) -> None:
    """Steps over all samples in an order, ``batch`` at a time.

    Args:
        samples: the training set.
        rule: what a step does.
        streams: keys of the epoch.
        order: int64[K], rows of the samples.
        batch: samples of a step; the last step may have fewer.
        rate: step size.
        x: float64[n], the model, changed.
        total: float64[n], the model after every step is added to it.
        counts: int64[2], see :func:`batch_gradient`.
    """
    gradient = np.empty(x.size)
    for step in range((order.size + batch - 1) // batch):
        chosen = order[step * batch : min((step + 1) * batch, order.size)]
        batch_gradient(samples, rule, streams, chosen, step, x, gradient, counts)
        if rule.gradient_steps:
            _round_row(gradient, rule.gradient_steps, streams, GRADIENT, step)
        descend(x, gradient, rate, rule.prox, rule.strength)
        for i in range(x.size):
            total[i] += x[i]
