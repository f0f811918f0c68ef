"""Two codecs at equal measured bits, as one number."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gtrace.report.analysis.bd_rate import bd_rate, envelope
from gtrace.report.analysis.equal_bits import at_bits

if TYPE_CHECKING:
    from collections.abc import Sequence


class Duel(NamedTuple):
    """A codec against another on one trace.

    Attributes:
        error: relative variance over the other's at equal bits, the geometric mean over the bits that both reach; below
            1 the first has less error. NaN where there are no such bits.
        low: least of these bits per coordinate.
        high: most of them; ``low`` where one of the two has a single configuration.
        rate: bits over the other's at equal error, the mean of its logarithm (Bjontegaard); NaN without two curves.
    """

    error: float
    low: float
    high: float
    rate: float


def duel(one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> Duel:
    """Compare two codecs, each given as (bits per coordinate, relative variance) of its configurations.

    Errors are log-interpolated between neighbours by measured bits, however far apart, never extrapolated, and averaged
    over the bits that both curves reach. A codec of one configuration is compared at its own bits.

    >>> round(duel([(2, 0.4), (4, 0.1)], [(2, 0.8), (4, 0.2)]).error, 9)
    0.5
    >>> [round(number, 9) for number in duel([(3, 0.1)], [(2, 0.4), (4, 0.1)])[:3]]
    [0.5, 3, 3]
    """
    first, second = ([(b, v) for b, v in points if v > 0 and math.isfinite(v * b)] for points in (one, other))
    if not first or not second:
        return Duel(math.nan, math.nan, math.nan, math.nan)
    if 1 in (len(first), len(second)):
        knots = [min(points[0][0] for points in (first, second) if len(points) == 1)]
    else:
        low, high = max(min(first)[0], min(second)[0]), min(max(first)[0], max(second)[0])
        knots = sorted({low, high, *(b for b, _ in (*first, *second) if low <= b <= high)}) if low < high else []
    logs = np.array([math.log(_at(first, bits) / _at(second, bits)) for bits in knots])
    if not knots or not np.isfinite(logs).all():
        return Duel(math.nan, math.nan, math.nan, math.nan)
    # Linear between knots, so the trapezoids are the integral.
    mean = float(logs[0]) if len(knots) == 1 else float(np.trapezoid(logs, knots)) / (knots[-1] - knots[0])
    curves = [envelope(*zip(*points, strict=True)) for points in (first, second)]
    return Duel(math.exp(mean), knots[0], knots[-1], 1 + bd_rate(curves[0], curves[1])[0])


def _at(points: Sequence[tuple[float, float]], bits: float) -> float:
    return at_bits([b for b, _ in points], [v for _, v in points], bits, math.inf).variance
