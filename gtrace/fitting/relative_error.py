"""Expected relative error of rounding to a set of magnitudes, exact under a law of |x|.

|Q(x) - x| / x is linear in x and 1 / x inside a cell of the grid, so its mean is a finite sum of partial moments. Those
are taken as tails relative to the nearest boundary, which neither overflow nor cancel for wide laws.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Law: TypeAlias = Literal["lognormal", "normal"]

_ROOT_2 = math.sqrt(2.0)
_LN2 = math.log(2.0)
#: log2 of a half-normal |z|: mean and standard deviation
NORMAL_MU = -(np.euler_gamma + _LN2) / (2.0 * _LN2)
NORMAL_SIGMA = math.pi / (2.0 * _ROOT_2 * _LN2)


class Magnitudes(Protocol):
    """A law of |x|, or one for each of several shifts; points are float64[p], results float64[shifts, p]."""

    def mass(self, low: NDArray[np.float64], high: NDArray[np.float64]) -> NDArray[np.float64]:
        """P(low < x < high)."""

    def ratio(
        self, power: int, unit: NDArray[np.float64], low: NDArray[np.float64], high: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """E[(x / unit)^power; low < x < high], power 1 or -1."""


@dataclass(frozen=True, slots=True)
class LogNormalMagnitudes:
    """log2 x is normal.

    Attributes:
        mu: float64[shifts, 1], means of log2 x.
        sigma: its standard deviation, positive.
    """

    mu: NDArray[np.float64]
    sigma: float

    def mass(self, low: NDArray[np.float64], high: NDArray[np.float64]) -> NDArray[np.float64]:
        """P(low < x < high), from the tail that is nearer."""
        from scipy.special import ndtr

        a, b = self._standard(low), self._standard(high)
        right = a > 0
        out: NDArray[np.float64] = ndtr(np.where(right, -a, b)) - ndtr(np.where(right, -b, a))
        return out

    def ratio(
        self, power: int, unit: NDArray[np.float64], low: NDArray[np.float64], high: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """E[(x / unit)^power; low < x < high]."""
        spread = self.sigma * _LN2
        at_low, at_high = self._tail(power, unit, low), self._tail(power, unit, high)
        shift = power * spread
        left, right = self._standard(high) <= shift, self._standard(low) >= shift
        # The whole mean is needed only where the interval holds the peak of the tilted law; there it is moderate.
        exponent = np.minimum(0.5 * spread * spread - shift * self._standard(unit), 700.0)
        middle = np.exp(exponent) - at_low - at_high
        return np.where(right, at_low - at_high, np.where(left, at_high - at_low, middle))

    def _standard(self, points: NDArray[np.float64]) -> NDArray[np.float64]:
        with np.errstate(divide="ignore"):
            out: NDArray[np.float64] = (np.log2(points) - self.mu) / self.sigma
        return out

    def _tail(self, power: int, unit: NDArray[np.float64], point: NDArray[np.float64]) -> NDArray[np.float64]:
        """The part of E[(x / unit)^power] beyond ``point``, seen from the tilted law's peak; 0 at 0 and infinity."""
        from scipy.special import erfcx

        inner = (point > 0) & np.isfinite(point)
        at = np.where(inner, point, unit)
        t = self._standard(at)
        tilted = np.abs(t - power * self.sigma * _LN2) / _ROOT_2
        tail = 0.5 * (at / unit) ** float(power) * np.exp(-0.5 * t * t) * erfcx(tilted)
        return np.where(inner, tail, 0.0)


@dataclass(frozen=True, slots=True)
class HalfNormalMagnitudes:
    """x is the magnitude of a normal number with mean 0.

    Attributes:
        deviation: float64[shifts, 1], its standard deviations.
    """

    deviation: NDArray[np.float64]

    def mass(self, low: NDArray[np.float64], high: NDArray[np.float64]) -> NDArray[np.float64]:
        """P(low < x < high)."""
        from scipy.special import erf, erfc

        a, b = low / (self.deviation * _ROOT_2), high / (self.deviation * _ROOT_2)
        out: NDArray[np.float64] = np.where(a > 0.5, erfc(a) - erfc(b), erf(b) - erf(a))
        return out

    def ratio(
        self, power: int, unit: NDArray[np.float64], low: NDArray[np.float64], high: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """E[(x / unit)^power; low < x < high]; with power -1 low must be positive."""
        from scipy.special import exp1

        a, b = 0.5 * (low / self.deviation) ** 2, 0.5 * (high / self.deviation) ** 2
        if power > 0:
            out: NDArray[np.float64] = math.sqrt(2 / math.pi) * self.deviation / unit * (np.exp(-a) - np.exp(-b))
            return out
        inverse: NDArray[np.float64] = unit / (self.deviation * math.sqrt(2 * math.pi)) * (exp1(a) - exp1(b))
        return inverse


def magnitudes(law: Law, mu: NDArray[np.float64], sigma: float) -> Magnitudes:
    """The law with these means of log2 x (float64[shifts]); ``normal`` has no spread of its own to choose."""
    if law == "normal":
        return HalfNormalMagnitudes(2.0 ** (mu[:, None] - NORMAL_MU))
    return LogNormalMagnitudes(mu[:, None], sigma)


def nearest_error(levels: NDArray[np.float64], law: Magnitudes) -> NDArray[np.float64]:
    """E |Q(x) - x| / x for rounding to the nearest of ``levels`` (float64[m], 0 first); float64[shifts]."""
    own = levels[1:]
    low = (levels[:-1] + own) / 2
    high = np.append(low[1:], np.inf)
    above = law.mass(own, high) - law.ratio(-1, own, own, high)
    below = law.ratio(-1, own, low, own) - law.mass(low, own)
    flushed = law.mass(np.zeros(1), low[:1])
    out: NDArray[np.float64] = (above + below).sum(axis=1) + flushed[:, 0]
    return out


def stochastic_error(levels: NDArray[np.float64], law: Magnitudes) -> NDArray[np.float64]:
    """E |Q(x) - x| / x for unbiased rounding to a neighbour, saturating above the last level; float64[shifts]."""
    low, high, top = levels[1:-1], levels[2:], levels[-1:]
    width = (high - low) / high
    inner = (1 + low / high) * law.mass(low, high) - law.ratio(1, high, low, high) - law.ratio(-1, low, low, high)
    first, zero, end = levels[1:2], np.zeros(1), np.full(1, np.inf)
    bottom = 2 * (law.mass(zero, first) - law.ratio(1, first, zero, first))
    clipped = law.mass(top, end) - law.ratio(-1, top, top, end)
    out: NDArray[np.float64] = (2 * inner / width).sum(axis=1) + bottom[:, 0] + clipped[:, 0]
    return out


def point_error(levels: NDArray[np.float64], x: NDArray[np.float64], *, stochastic: bool) -> NDArray[np.float64]:
    """E |Q(x) - x| / x at single magnitudes, float64[n]: the laws without spread."""
    cell = np.clip(np.searchsorted(levels, x, side="right") - 1, 0, levels.size - 2)
    down, up = x - levels[cell], levels[cell + 1] - x
    inside = 2 * down * up / (down + up) if stochastic else np.minimum(down, up)
    out: NDArray[np.float64] = np.where(up < 0, -up, inside) / x
    return out
