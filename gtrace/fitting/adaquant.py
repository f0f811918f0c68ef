"""ADAQUANT: near-optimal levels by greedy merging, in nearly linear time and without a search.

From ZipML's appendix I. Start with a level at every distinct value; in each round pair up neighbouring
intervals and merge all pairs but the ceil((1 + gamma) k) that would cost most. What remains costs at most
(1 + 1 / gamma) times the optimum of k intervals, with more intervals than k to spend.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from gtrace.errors import UsageError
from gtrace.fitting.optimal import check_count, check_values

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


def adaquant(
    values: ArrayLike,
    k: int,
    gamma: float,
    delta: float,
    lo: float | None = None,
    hi: float | None = None,
) -> NDArray[np.float64]:
    """Levels whose objective is at most (1 + 1/gamma) times that of the best k intervals (k + 1 levels).

    Args:
        values: real numbers, any shape and order.
        k: number of intervals to compare with, at least 1.
        gamma: how many more intervals may be spent, above 0: the levels form at most
            max(2 (1 + gamma) k + delta, 2 ceil((1 + gamma) k) + 1) intervals.
        delta: slack on that number, at least 1; with less the rounds could go on for ever.
        lo: first level; None for the paper's 0 when all values lie in [0, 1], else for the least value.
        hi: last level; None for the paper's 1 when all values lie in [0, 1], else for the greatest value.

    Returns:
        float64, ascending: a subset of the distinct values and both ends.

    Raises:
        UsageError: no value, values that are not finite or lie outside lo..hi, k, gamma or delta out of range.

    >>> adaquant([0.0, 0.1, 0.2, 0.9, 1.0], k=1, gamma=1.0, delta=1.0)
    array([0. , 0.1, 0.2, 0.9, 1. ])
    """
    k = check_count("k", k, 1)
    if not (math.isfinite(gamma) and gamma > 0):
        raise UsageError(f"gamma: {gamma} must be finite and above 0")
    if not (math.isfinite(delta) and delta >= 1):
        raise UsageError(f"delta: {delta} must be finite and at least 1; below, merging may never end")
    points = check_values(values, None, lo, hi)
    low, high = points.low, points.high
    if low >= 0 and high <= 1:
        low, high = 0.0 if lo is None else low, 1.0 if hi is None else high
    x, counts = np.unique(points.x.astype(np.float64), return_counts=True)
    mass = counts.astype(np.float64)
    if low < x[0]:
        x, mass = np.concatenate([[low], x]), np.concatenate([[0.0], mass])
    if high > x[-1]:
        x, mass = np.concatenate([x, [high]]), np.concatenate([mass, [0.0]])
    return _merge(x, mass, (1 + gamma) * k, delta)


def _merge(x: NDArray[np.float64], mass: NDArray[np.float64], spare: float, delta: float) -> NDArray[np.float64]:
    """The rounds, on distinct points and their weights; ``spare`` is (1 + gamma) k."""
    # (1 + 0.1) 10 is 11 and a bit in floating point
    kept = math.ceil(spare - 1e-9)
    # per interval, over the points strictly inside: sum w, sum w (x - left), sum w (right - x), and its cost
    inner, up, down, cost = np.zeros((4, x.size - 1))
    while inner.size > 2 * spare + delta and inner.size // 2 > kept:
        pairs = inner.size // 2
        first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
        middle = mass[1 : 2 * pairs : 2]
        left = np.diff(x)[first]
        right = np.diff(x)[second]
        pair_cost = cost[first] + right * up[first] + middle * left * right + cost[second] + left * down[second]
        merged = np.sort(np.argpartition(pair_cost, pairs - kept)[: pairs - kept])
        into = 2 * merged
        up[into] += left[merged] * (middle[merged] + inner[into + 1]) + up[into + 1]
        down[into] = right[merged] * (middle[merged] + inner[into]) + down[into] + down[into + 1]
        inner[into] += middle[merged] + inner[into + 1]
        cost[into] = pair_cost[merged]
        inner, up, down, cost = (np.delete(a, into + 1) for a in (inner, up, down, cost))
        x, mass = np.delete(x, into + 1), np.delete(mass, into + 1)
    return x
