"""Codecs compared where it is fair: at equal measured bits, and by Pareto optimality. Plain numbers only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

#: Measured bits per coordinate at which codecs are compared.
TARGETS: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0)

#: The only configuration of a method stands for a target that it is this close to (relative).
TOLERANCE = 0.02

Outcome = Literal["interpolated", "exact", "near", "all-above", "all-below", "lossless", "unmeasured"]

#: Why a cell of the table at equal bits is what it is.
OUTCOMES: dict[Outcome, str] = {
    "interpolated": "interpolated between the two configurations that bracket these bits",
    "exact": "a configuration has exactly these bits",
    "near": f"the only configuration of this method is within {TOLERANCE:.0%} of these bits",
    "all-above": "every configuration of this method takes more bits",
    "all-below": "every configuration of this method takes fewer bits",
    "lossless": "a bracketing configuration has no error at all, so that no logarithm can be taken",
    "unmeasured": "no configuration of this method has both a measured error and bits",
}


def _sorted_points(bits: Sequence[float], variance: Sequence[float]) -> list[tuple[float, float, int]]:
    """(bits, variance, index) of the points with both numbers, by bits, then by variance."""
    return sorted(
        (b, v, i) for i, (b, v) in enumerate(zip(bits, variance, strict=True)) if math.isfinite(b) and math.isfinite(v)
    )


@dataclass(frozen=True, slots=True)
class AtBits:
    """Relative variance of one method at a number of measured bits.

    Attributes:
        target: bits per coordinate asked for.
        variance: relative variance there, NaN where the method cannot be compared.
        outcome: how it was found or why it is missing, a key of :data:`OUTCOMES`.
        lower: index of the configuration below (or the one that stands for the target), -1 for none.
        upper: index of the configuration above, equal to ``lower`` where one configuration stands alone.
    """

    target: float
    variance: float
    outcome: Outcome
    lower: int = -1
    upper: int = -1


def at_bits(bits: Sequence[float], variance: Sequence[float], target: float) -> AtBits:
    """Relative variance at ``target`` measured bits, log-interpolated and never extrapolated.

    Only the order of the measured bits counts, not that of the nominal ones: the two configurations that
    bracket are those with the largest bits below the target and the smallest above it; of several with the
    same bits the one with less error. The curve may rise or fall between them.

    Args:
        bits: measured bits per coordinate of each configuration of one method; NaN where unknown.
        variance: relative variance of each, same length.
        target: bits per coordinate.
    """
    points = _sorted_points(bits, variance)
    if not points:
        return AtBits(target, math.nan, "unmeasured")
    here = [point for point in points if point[0] == target]
    if here:
        return AtBits(target, here[0][1], "exact", here[0][2], here[0][2])
    under = [point for point in points if point[0] < target]
    over = [point for point in points if point[0] > target]
    if under and over:
        low = min((p for p in under if p[0] == under[-1][0]), key=lambda p: p[1])
        high = over[0]
        if low[1] <= 0 or high[1] <= 0:
            return AtBits(target, math.nan, "lossless", low[2], high[2])
        share = (target - low[0]) / (high[0] - low[0])
        value = math.exp((1 - share) * math.log(low[1]) + share * math.log(high[1]))
        return AtBits(target, value, "interpolated", low[2], high[2])
    if len(points) == 1 and abs(points[0][0] - target) <= TOLERANCE * target:
        return AtBits(target, points[0][1], "near", points[0][2], points[0][2])
    return AtBits(target, math.nan, "all-above" if over else "all-below")


def pareto_front(bits: Sequence[float], variance: Sequence[float]) -> NDArray[np.bool_]:
    """Which points no other point beats: fewer bits at no more error, or less error at no more bits.

    Points with a missing number are never on the front; equal points stand or fall together.

    >>> pareto_front([1, 2, 3, 3], [0.5, 0.6, 0.1, 0.2]).tolist()
    [True, False, True, False]
    """
    on_front = np.zeros(len(bits), dtype=np.bool_)
    best = math.inf
    best_bits = math.nan
    for b, v, i in _sorted_points(bits, variance):
        if v < best or (v == best and b == best_bits):
            on_front[i] = True
            best, best_bits = v, b
    return on_front
