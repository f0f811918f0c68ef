"""Parametric laws in closed form: truncated normal mixtures of normalized coordinates, lognormal magnitudes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import scipy as sp

from gtrace.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

_ROOT_2 = float(np.sqrt(2.0))
_ROOT_2PI = float(np.sqrt(2.0 * np.pi))
# Squares of what is left in sigmas stay within the range of float64.
_POINT = 1e-150
_DISTANT = 1e-12


class TruncatedNormalMixture:
    """A mixture of normals, each truncated to the same interval and normalized on it.

    This is the law that ALQ and AMQ fit their levels to: one component per bucket of a gradient divided by the
    bucket's norm. Everything follows from differences of the normal distribution function, which are
    taken relative to each component's highest point: a mean many sigmas outside the support neither
    underflows nor divides by zero. A component with sigma 0 is a point mass at its mean or the nearest end; so
    is one whose sigma is below 1e-150 or a 10^12th of its mean's distance from the support.

    Attributes:
        means: float64[k].
        sigmas: float64[k], not negative.
        weights: float64[k], scaled to add up to 1.
        support: the interval, within [-1, 1].
        anchors: float64[k], the point of the support nearest to each mean, where the component is densest.
        offsets: float64[k], distance of the anchors above the means in sigmas; 0 for a mean in the support.
        heights: float64[k], the weighted density of each component at its anchor; the weight of a point mass.

    >>> law = TruncatedNormalMixture([0.0], [0.01], [1.0])
    >>> [float(p) for p in law.cdf([-1.0, 0.0, 1.0])]
    [0.0, 0.5, 1.0]
    """

    __slots__ = ("_totals", "anchors", "heights", "means", "offsets", "sigmas", "support", "weights")

    def __init__(
        self, means: ArrayLike, sigmas: ArrayLike, weights: ArrayLike, support: tuple[float, float] = (-1.0, 1.0)
    ) -> None:
        """Check and normalize.

        Raises:
            UsageError: lengths that differ, values that are not finite, a negative sigma or weight, no weight at
                all, or a support that is not an interval within [-1, 1].
        """
        given = (np.asarray(one, dtype=np.float64).reshape(-1) for one in (means, sigmas, weights))
        self.means, self.sigmas, self.weights = given
        low, high = float(support[0]), float(support[1])
        self.support = (low, high)
        if not self.means.size == self.sigmas.size == self.weights.size > 0:
            raise UsageError(
                f"mixture: {self.means.size} means, {self.sigmas.size} sigmas and {self.weights.size} weights; "
                "give one of each per component, and at least one component"
            )
        for name, array in (("means", self.means), ("sigmas", self.sigmas), ("weights", self.weights)):
            if not np.isfinite(array).all():
                at = int(np.flatnonzero(~np.isfinite(array))[0])
                raise UsageError(f"mixture: {name}[{at}] is {array[at]}; give finite numbers")
        if (self.sigmas < 0).any() or (self.weights < 0).any() or not self.weights.sum() > 0:
            raise UsageError("mixture: sigmas and weights must not be negative, nor all weights zero")
        if not -1.0 <= low < high <= 1.0:
            raise UsageError(f"mixture: support ({low:g}, {high:g}) is not an interval within [-1, 1]")
        self.weights = self.weights / self.weights.sum()
        self.anchors = np.clip(self.means, low, high)
        away = np.abs(self.anchors - self.means)
        normal = self.sigmas > np.maximum(_POINT, away * _DISTANT)
        self.sigmas = np.where(normal, self.sigmas, 0.0)
        self.means = np.where(normal, self.means, self.anchors)
        self.offsets = (self.anchors - self.means) / np.where(normal, self.sigmas, 1.0)
        mass = _scaled_mass(self._standard(low), self._standard(high), self.offsets)
        self._totals = np.where(normal, mass, 1.0)
        self.heights = self.weights / np.where(normal, self.sigmas * _ROOT_2PI * self._totals, 1.0)

    def __repr__(self) -> str:
        return f"TruncatedNormalMixture({self.means.size} components, support={self.support})"

    def density(self, r: ArrayLike) -> NDArray[np.float64]:
        """Density at signed points, of any shape; point masses have none."""
        x = np.asarray(r, dtype=np.float64)[..., None]
        u = self._standard(x)
        inside = (x >= self.support[0]) & (x <= self.support[1]) & (self.sigmas > 0)
        fall = np.where(inside, -0.5 * u * (u + 2.0 * self.offsets), -np.inf)
        return np.sum(self.heights * np.exp(fall), axis=-1)

    def cdf(self, r: ArrayLike) -> NDArray[np.float64]:
        """Probability of values up to signed points, of any shape."""
        x = np.asarray(r, dtype=np.float64)[..., None]
        low, high = self.support
        mass = _scaled_mass(self._standard(low), self._standard(np.clip(x, low, high)), self.offsets) / self._totals
        return np.sum(self.weights * np.where(self.sigmas > 0, mass, self.means <= x), axis=-1)

    def _standard(self, x: ArrayLike) -> NDArray[np.float64]:
        """Points in sigmas from the anchors; 0 for point masses."""
        normal = self.sigmas > 0
        return (np.asarray(x) - self.anchors) / np.where(normal, self.sigmas, np.inf)


def _scaled_mass(x: NDArray[np.float64], y: NDArray[np.float64], offset: NDArray[np.float64]) -> NDArray[np.float64]:
    """(Phi(y + offset) - Phi(x + offset)) exp(offset^2 / 2) without cancellation in either tail, for x <= y."""
    # By symmetry, work where the interval leans to the right.
    flip = x + y + 2.0 * offset < 0
    low, high = np.where(flip, -y, x), np.where(flip, -x, y)
    lean = np.where(flip, -offset, offset)

    def beyond(u: NDArray[np.float64]) -> NDArray[np.float64]:
        z = np.maximum(u + lean, 0.0)
        return 0.5 * np.exp(-0.5 * u * (u + 2.0 * lean)) * sp.special.erfcx(z / _ROOT_2)

    centre = low + lean < 0.5
    near = np.where(centre, 0.5 * lean * lean, 0.0)
    middle = 0.5 * (sp.special.erf((high + lean) / _ROOT_2) - sp.special.erf((low + lean) / _ROOT_2)) * np.exp(near)
    return np.where(centre, middle, beyond(np.where(centre, 0.0, low)) - beyond(high))


@dataclass(frozen=True, slots=True)
class LogNormal:
    """The lognormal law of magnitudes: ln |x| is normal. Logarithms are natural.

    Attributes:
        mu: mean of ln |x|.
        sigma: standard deviation of ln |x|, not negative; 0 is a point mass at exp(mu).
        size: number of values that follow the law, its weight among tensors; 0 for unknown.

    Raises:
        UsageError: parameters that are not finite, or a negative sigma or size.

    >>> law = LogNormal(0.0, 1.0)
    >>> float(law.cdf(1.0)), float(law.quantile(0.5))
    (0.5, 1.0)
    """

    mu: float
    sigma: float
    size: int = 0

    def __post_init__(self) -> None:
        if not (np.isfinite(self.mu) and np.isfinite(self.sigma)):
            raise UsageError(f"lognormal: mu {self.mu} and sigma {self.sigma} must be finite")
        if self.sigma < 0 or self.size < 0:
            raise UsageError(f"lognormal: sigma {self.sigma:g} and size {self.size} must not be negative")

    def density(self, x: ArrayLike) -> NDArray[np.float64]:
        """Density at points of any shape; 0 at and below 0. A point mass (sigma 0) has none."""
        values = np.asarray(x, dtype=np.float64)
        if self.sigma == 0:
            return np.zeros(values.shape)
        inside = values > 0
        safe = np.where(inside, values, 1.0)
        u = (np.log(safe) - self.mu) / self.sigma
        return np.where(inside, np.exp(-0.5 * u * u) / (safe * self.sigma * _ROOT_2PI), 0.0)

    def cdf(self, x: ArrayLike) -> NDArray[np.float64]:
        """Probability of magnitudes up to points of any shape."""
        return sp.special.ndtr(self._standard(x))

    def quantile(self, p: ArrayLike) -> NDArray[np.float64]:
        """The points below which fractions of any shape lie; 0 at 0 and infinite at 1 unless sigma is 0."""
        z = sp.special.ndtri(np.asarray(p, dtype=np.float64))
        return np.exp(self.mu + (self.sigma * z if self.sigma else np.zeros_like(z)))

    def _standard(self, x: ArrayLike) -> NDArray[np.float64]:
        """Points as numbers of sigmas that their logarithm lies above mu."""
        values = np.asarray(x, dtype=np.float64)
        with np.errstate(divide="ignore"):
            off = np.log(np.maximum(values, 0.0)) - self.mu
        return off / self.sigma if self.sigma else np.where(off >= 0, np.inf, -np.inf)
