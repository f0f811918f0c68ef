"""How many bits a method saves on average at equal error: the Bjontegaard difference of rates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.interpolate import PchipInterpolator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from gtrace.report.analysis.families import Configuration, Family


#: Method that the others are compared with.
REFERENCE = "qsgdinf"
#: Error must fall by this part for more bits to be worth a point of the curve.
WORTH = 1e-3
#: A curve needs this many points to be one.
FEWEST_POINTS = 3


@dataclass(frozen=True, slots=True)
class BDRate:
    """Mean difference of rates of a family against a reference at equal error, over the errors that both reach.

    Attributes:
        family: label.
        reference: label of the family that it is compared with.
        change: relative change of bits per coordinate, -0.2 for a fifth fewer than the reference; NaN for none.
        low: least error of the common range, NaN where the ranges do not overlap.
        high: largest relative variance of it.
        bits: (2,) measured bits of the reference at ``high`` and ``low``.
        why: why there is no number, empty where there is one.
    """

    family: str
    reference: str
    change: float
    low: float
    high: float
    bits: tuple[float, float]
    why: str = ""


def bd_rates(families: Sequence[Family], configurations: Sequence[Configuration]) -> tuple[BDRate, ...]:
    """BD-rate of every other family against the :data:`REFERENCE` family with most configurations; () without it."""
    references = [f for f in families if f.method == REFERENCE]
    if not references:
        return ()
    reference = max(references, key=lambda f: len(f.members))

    def curve(family: Family) -> NDArray[np.float64]:
        points = [configurations[i] for i in family.members]
        return envelope([c.bits for c in points], [c.error for c in points])

    base = curve(reference)
    return tuple(
        BDRate(family.label, reference.label, *bd_rate(curve(family), base))
        for family in families
        if family is not reference
    )


def envelope(bits: Sequence[float], variance: Sequence[float]) -> NDArray[np.float64]:
    """(P, 2) log bits and log variance of the points of a curve that no other point of it beats, bits rising.

    What takes more bits for more or for the same error is never chosen, so it is no part of the curve. Points without
    error have no logarithm.
    """
    points = sorted(
        (b, v) for b, v in zip(bits, variance, strict=True) if math.isfinite(b) and math.isfinite(v) and b > 0 and v > 0
    )
    kept: list[tuple[float, float]] = []
    for b, v in points:
        if not kept or (v < kept[-1][1] * (1 - WORTH) and b > kept[-1][0]):
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
