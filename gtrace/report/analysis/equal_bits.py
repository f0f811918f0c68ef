"""Codecs compared where it is fair: at equal measured bits, and by Pareto optimality. Plain numbers only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from scipy.interpolate import PchipInterpolator

if TYPE_CHECKING:
    from numpy.typing import NDArray


#: A configuration stands for bits that it is this close to (relative) when nothing can be interpolated there.
TOLERANCE = 0.02
#: Measured bits between two neighbors at most, for an interpolation between them. One more nominal bit takes up to 1.3
#: measured ones: the symbols' entropy grows by about one, and so do levels and code lengths, which are sent apart.
WIDEST = 1.5
#: Bit rates of a comparison at most, and families that it needs.
MOST_TARGETS, OVERLAP = 4, 3
#: Errors that differ by less than this part are the same number.
_EQUAL = 1e-9
#: Bits that a reader asks about first, when several targets can be compared equally well.
PREFERRED_BITS = 3.0
#: Bit rates that are easy to read, the easiest first.
_ROUND = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, *map(float, range(1, 33)))
_HALVES = tuple(k / 2 for k in range(3, 17, 2))
_TENTHS = tuple(k / 10 for k in range(3, 80) if k % 5)
Outcome = Literal["interpolated", "exact", "near", "fewer", "wide", "all-above", "all-below", "lossless", "unmeasured"]

#: Why a cell of the table at equal bits is what it is.
OUTCOMES: dict[Outcome, str] = {
    "interpolated": "interpolated between the two configurations that bracket these bits",
    "exact": "a configuration has exactly these bits",
    "near": f"a configuration is within {TOLERANCE:.0%} of these bits",
    "fewer": "a configuration has fewer bits and less error than anything measured at these bits",
    "wide": "not measured near these bits: the neighbors are more than one nominal bit apart",
    "all-above": "every configuration of this method takes more bits",
    "all-below": "every configuration of this method takes fewer bits, and none has less error than the best here",
    "lossless": "a bracketing configuration has no error at all, so that no logarithm can be taken",
    "unmeasured": "no configuration of this method has both a measured error and bits",
}


#: bits of the configurations of a method, and their errors
Rates: TypeAlias = tuple[Sequence[float], Sequence[float]]
#: configurations and their parts
Mix: TypeAlias = list[tuple[int, float]]


def _sorted_points(bits: Sequence[float], variance: Sequence[float]) -> list[tuple[float, float, int]]:
    """(bits, variance, index) of the points with both numbers, by bits, then by variance."""
    return sorted(
        (b, v, i) for i, (b, v) in enumerate(zip(bits, variance, strict=True)) if math.isfinite(b) and math.isfinite(v)
    )


@dataclass(frozen=True, slots=True)
class AtBits:
    """Error of one method at a number of measured bits.

    Attributes:
        target: bits per coordinate asked for.
        variance: error there, over the energy of the gradient; NaN where the method cannot be compared.
        outcome: how it was found or why it is missing, a key of :data:`OUTCOMES`.
        lower: index of the configuration below (or the one that stands for the target), -1 for none.
        upper: index of the configuration above, equal to ``lower`` where one configuration stands alone.
        bits: measured bits that the error belongs to: ``target``, or those of the configuration that stands for it.
        bias: the part of ``variance`` that is bias, which more workers do not shrink; NaN if it was not asked for.
    """

    target: float
    variance: float
    outcome: Outcome
    lower: int = -1
    upper: int = -1
    bits: float = math.nan
    bias: float = math.nan

    @property
    def elsewhere(self) -> bool:
        """Whether the error belongs to other bits than those asked for, to three digits."""
        return abs(self.bits - self.target) > 1e-3 * self.target

    def among(self, members: Sequence[int]) -> AtBits:
        """The same with indices of all configurations, of which ``members`` are those of the method."""
        return self if self.lower < 0 else replace(self, lower=members[self.lower], upper=members[self.upper])

    def mix(self, bits: NDArray[np.float64]) -> Mix:
        """Configurations that stand for the method, with their parts; ``bits`` (C,) of all configurations."""
        if self.lower < 0:
            return []
        if self.lower == self.upper:
            return [(self.lower, 1.0)]
        share = float((self.target - bits[self.lower]) / (bits[self.upper] - bits[self.lower]))
        return [(self.lower, 1 - share), (self.upper, share)]


def at_bits(bits: Sequence[float], variance: Sequence[float], target: float, widest: float = WIDEST) -> AtBits:
    """Error at ``target`` measured bits per coordinate, log-interpolated and never extrapolated.

    Only the order of the measured bits (NaN: unknown) counts, not that of the nominal ones: the two configurations that
    bracket are those with the largest bits below the target and the smallest above it; of several with the same bits
    the one with less error. Neighbours more than ``widest`` bits apart are refused. A configuration with fewer bits and
    less error than that stands for the method instead.
    """
    points = _sorted_points(bits, variance)
    if not points:
        return AtBits(target, math.nan, "unmeasured")
    found = _at(points, target, widest)
    fewer = _best_below(points, target)
    return fewer if fewer is not None and fewer.variance < (1 - _EQUAL) * found.variance else found


def _at(points: list[tuple[float, float, int]], target: float, widest: float) -> AtBits:
    def alone(point: tuple[float, float, int], outcome: Outcome) -> AtBits:
        return AtBits(target, point[1], outcome, point[2], point[2], point[0])

    here = [point for point in points if point[0] == target]
    if here:
        return alone(here[0], "exact")
    under = [point for point in points if point[0] < target]
    over = [point for point in points if point[0] > target]
    if under and over:
        low = min((p for p in under if p[0] == under[-1][0]), key=lambda p: p[1])
        high = over[0]
        if high[0] - low[0] <= widest:
            if low[1] <= 0 or high[1] <= 0:
                return AtBits(target, math.nan, "lossless", low[2], high[2])
            share = (target - low[0]) / (high[0] - low[0])
            value = math.exp((1 - share) * math.log(low[1]) + share * math.log(high[1]))
            return AtBits(target, value, "interpolated", low[2], high[2], target)
    near = min(points, key=lambda p: (abs(p[0] - target), p[1]))
    if abs(near[0] - target) <= TOLERANCE * target:
        return alone(near, "near")
    if under and over:
        return AtBits(target, math.nan, "wide", low[2], high[2])
    return AtBits(target, math.nan, "all-above" if over else "all-below")


def _best_below(points: list[tuple[float, float, int]], target: float) -> AtBits | None:
    best = min((p for p in points if p[0] < target), key=lambda p: (p[1], p[0]), default=None)
    return None if best is None else AtBits(target, best[1], "fewer", best[2], best[2], best[0])


def all_at_bits(curves: Sequence[Rates], target: float) -> list[AtBits]:
    """:func:`at_bits` of several methods, each as (bits, error) of its configurations, held against each other.

    A method that was not measured at the target takes part all the same when it has, at fewer bits, less error than
    every method that was: more bits could only help it.
    """
    found = [at_bits(bits, variance, target) for bits, variance in curves]
    least = min((at.variance for at in found if math.isfinite(at.variance)), default=math.nan)
    for k, (bits, variance) in enumerate(curves):
        fewer = _best_below(_sorted_points(bits, variance), target)
        if math.isnan(found[k].variance) and fewer is not None and fewer.variance < least:
            found[k] = fewer
    return found


def choose_targets(curves: Sequence[Rates]) -> tuple[float, ...]:
    """Up to four bit rates at which the most methods can be compared, ascending; () where nothing was measured.

    Rates where three methods were measured come before those where two were, and round numbers before others. A rate
    where every method loses more than sending nothing, whose error is 1, is of no use to anybody. Each rate adds
    methods that the others do not have, or else has the most methods, or else is near three bits.
    """
    own = sorted({float(f"{b:.{digits}g}") for bits, _ in curves for b in bits if b > 0 for digits in (2, 3)})

    def there(rate: float) -> dict[int, float]:
        found = {k: at_bits(*curve, rate).variance for k, curve in enumerate(curves)}
        return {k: value for k, value in found.items() if value > 0}

    compared = {rate: there(rate) for rate in (*_ROUND, *_HALVES, *_TENTHS, *own)}
    overlap = range(min(OVERLAP, len(curves)), 1, -1)
    for useful, needed in [*((limit, n) for limit in (1.0, math.inf) for n in overlap), (1.0, 1), (math.inf, 1)]:
        fit: list[float] = []
        # Whole bits; halves beside a single one; anything else only when there is nothing yet.
        for pool, enough in ((_ROUND, 2), (_HALVES, 1), (_TENTHS, 1), (own if needed == 1 else (), 1)):
            fit += [t for t in pool if len(compared[t]) >= needed and min(compared[t].values()) <= useful]
            if len(fit) >= enough:
                return _spread({t: set(compared[t]) for t in fit})
    return ()


def _spread(compared: dict[float, set[int]]) -> tuple[float, ...]:
    """Of the rates of ``compared`` the few that show most methods, the most often compared first."""
    chosen: list[float] = []
    seen: set[int] = set()
    while len(chosen) < min(MOST_TARGETS, len(compared)):
        rate = max(
            (t for t in compared if t not in chosen),
            key=lambda t: (len(compared[t] - seen), len(compared[t]), -abs(t - PREFERRED_BITS)),
        )
        chosen.append(rate)
        seen |= compared[rate]
    return tuple(sorted(chosen))


def pareto_front(bits: Sequence[float], variance: Sequence[float]) -> NDArray[np.bool_]:
    """Which points no other point beats: fewer bits at no more error, or less error at no more bits.

    Points with a missing number are never on the front; equal points stand or fall together. What loses more than the
    gradient's own energy is beaten by sending nothing.

    >>> pareto_front([0.5, 1, 2, 3, 3], [1.5, 0.5, 0.6, 0.1, 0.2]).tolist()
    [False, True, False, True, False]
    """
    on_front = np.zeros(len(bits), dtype=np.bool_)
    best, best_bits = math.inf, math.nan
    for b, v, i in _sorted_points(bits, variance):
        if v <= 1 and (v < best or (v == best and b == best_bits)):
            on_front[i] = True
            best, best_bits = v, b
    return on_front


#: Error must fall by this part for more bits to be worth a point of the curve.
WORTH = 1e-3
#: A curve needs this many points to be one.
FEWEST_POINTS = 3


def envelope(bits: Sequence[float], variance: Sequence[float]) -> NDArray[np.float64]:
    """(P, 2) log bits and log variance of the points of a curve that no other point of it beats, bits rising.

    What takes more bits for more or for the same error is never chosen, so it is not part of the curve. Points without
    error have no logarithm.
    """
    kept: list[tuple[float, float]] = []
    for b, v, _ in _sorted_points(bits, variance):
        if b > 0 and v > 0 and (not kept or (v < kept[-1][1] * (1 - WORTH) and b > kept[-1][0])):
            kept.append((b, v))
    return np.log(np.array(kept, dtype=np.float64).reshape(-1, 2))


def bd_rate(
    test: NDArray[np.float64], reference: NDArray[np.float64]
) -> tuple[float, float, float, tuple[float, float], str]:
    """Mean of log rate of ``test`` less that of ``reference`` over the common errors, as a relative change of bits.

    Both curves are interpolated piecewise-cubic (PCHIP, which keeps them monotone) as log bits over log relative
    variance, and the difference is integrated exactly over the range that both reach (Bjontegaard, VCEG-M33, 2001,
    with the interpolation that later practice uses).

    Args:
        test: (P, 2) log bits and log variance, bits rising and variance falling strictly.
        reference: likewise.

    Returns:
        relative change, least and largest relative variance of the common range, the reference's bits at the largest
        and at the least, and why there is no number.
    """
    nan = math.nan
    if min(len(test), len(reference)) < FEWEST_POINTS:
        return nan, nan, nan, (nan, nan), f"fewer than {FEWEST_POINTS} configurations that no other of its own beats"
    low, high = max(test[-1, 1], reference[-1, 1]), min(test[0, 1], reference[0, 1])
    if not high > low:
        return nan, nan, nan, (nan, nan), "no error that both reach"
    rates = [PchipInterpolator(curve[::-1, 1], curve[::-1, 0]) for curve in (test, reference)]
    areas = [float(rate.integrate(low, high)) for rate in rates]
    change = math.expm1((areas[0] - areas[1]) / (high - low))
    ends = (math.exp(float(rates[1](high))), math.exp(float(rates[1](low))))
    return change, math.exp(low), math.exp(high), ends, ""
