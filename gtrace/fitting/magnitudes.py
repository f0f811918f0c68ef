"""Fits laws to the magnitudes of a gradient and measures Kolmogorov-Smirnov distances, from one sort.

Everything here is about |g| without its zeros, following Chmiel et al., "Neural gradients are near-lognormal" (ICLR
2021), Section 3 and Table 1: a zero is not a tiny number, and a sign says nothing about a magnitude. Laws of signed
values (normal, Laplace, Cauchy) are therefore fitted to the magnitudes themselves; half-normal and half-Laplace
(the exponential law) are the laws of |g| if g followed those laws around zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import scipy as sp

from gtrace.errors import UsageError, suggest
from gtrace.kernels.compare import ascending

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import ArrayLike

    from gtrace.kernels import Floats, Ints, Singles

    Function = Callable[[Floats], Floats]

#: Natural logarithm of 2: natural units over log2 units.
LN2 = math.log(2.0)
#: number of elements with logarithms in memory at a time
_BLOCK = 1 << 16
#: up to this size every element is used; above it, only those that can hold the largest distance
_SMALL = 4096


def _normal_density(z: Floats) -> Floats:
    return np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)


class _Standard(NamedTuple):
    """A law with location 0 and scale 1; of ln x, not of x, if it is logarithmic."""

    cdf: Function
    quantile: Function
    density: Function
    logarithmic: bool = False


# Named in full where they are called, so that scipy.special is loaded then and not at every start.
_NORMAL = _Standard(lambda z: sp.special.ndtr(z), lambda p: sp.special.ndtri(p), _normal_density)  # noqa: PLW0108
_LAPLACE = _Standard(
    lambda z: np.where(z < 0, 0.5 * np.exp(-np.abs(z)), 1 - 0.5 * np.exp(-np.abs(z))),
    lambda p: np.where(p < 0.5, np.log(2 * p), -np.log(2 * (1 - p))),
    lambda z: 0.5 * np.exp(-np.abs(z)),
)
_STANDARDS = {
    "lognormal": _NORMAL._replace(logarithmic=True),
    "normal": _NORMAL,
    "half-normal": _Standard(
        lambda z: np.maximum(2 * sp.special.ndtr(z) - 1, 0),
        lambda p: sp.special.ndtri((1 + p) / 2),
        lambda z: 2 * _normal_density(z),
    ),
    "laplace": _LAPLACE,
    "half-laplace": _Standard(lambda z: -np.expm1(-z), lambda p: -np.log1p(-p), lambda z: np.exp(-z)),
    "loglaplace": _LAPLACE._replace(logarithmic=True),
    "cauchy": _Standard(
        lambda z: 0.5 + np.arctan(z) / math.pi,
        lambda p: np.tan(math.pi * (p - 0.5)),
        lambda z: 1 / (math.pi * (1 + z * z)),
    ),
    "uniform": _Standard(lambda z: np.clip(z, 0, 1), lambda p: p, lambda z: np.where((z >= 0) & (z <= 1), 1.0, 0.0)),
}
#: The laws, in the order in which tables list them.
LAWS = tuple(_STANDARDS)


@dataclass(frozen=True, slots=True)
class FittedLaw:
    """A law with fitted parameters.

    Attributes:
        name: one of :data:`LAWS`.
        location: its center (normal: mean; Laplace, Cauchy: median; uniform: lower end; half laws: 0);
            of ln x for the logarithmic laws.
        scale: its width (normal: standard deviation; half-normal: root mean square; Laplace: mean deviation;
            Cauchy: half the interquartile range; uniform: length); of ln x for the logarithmic laws.
    """

    name: str
    location: float
    scale: float

    def __post_init__(self) -> None:
        if self.name not in _STANDARDS:
            raise UsageError(f"law: '{self.name}' is unknown; {suggest(self.name, LAWS)}")

    @property
    def logarithmic(self) -> bool:
        """Whether the parameters are those of ln x."""
        return _STANDARDS[self.name].logarithmic

    def cdf(self, x: ArrayLike) -> Floats:
        """P(X <= x) at positive float64[n]; nan when the law has no width."""
        return _STANDARDS[self.name].cdf(self._standardized(x))

    def quantile(self, p: ArrayLike) -> Floats:
        """The x with P(X <= x) = p, for p strictly between 0 and 1."""
        z = self.location + self.scale * _STANDARDS[self.name].quantile(np.asarray(p, np.float64))
        return np.exp(z) if self.logarithmic else z

    def density(self, x: ArrayLike) -> Floats:
        """The density per unit of x at positive float64[n]."""
        y = _STANDARDS[self.name].density(self._standardized(x)) / self.scale
        return y / np.asarray(x, np.float64) if self.logarithmic else y

    def _standardized(self, x: ArrayLike) -> Floats:
        y = np.asarray(x, np.float64)
        if self.logarithmic:
            y = np.log(y)
        with np.errstate(divide="ignore", invalid="ignore"):
            z: Floats = (y - self.location) / (self.scale or math.nan)
        return z


@dataclass(frozen=True, slots=True)
class Magnitudes:
    """The sorted magnitudes of one gradient, for fits, distances, quantiles and histograms.

    Attributes:
        sorted: float32[n], finite non-zero magnitudes, ascending.
        zeros: number of values that are exactly zero.
        nonfinite: number of values that are NaN or infinite; they are left out.
    """

    sorted: Singles
    zeros: int = 0
    nonfinite: int = 0

    @classmethod
    def of(cls, values: ArrayLike) -> Magnitudes:
        """The magnitudes |g| of any array of real numbers, without zeros and non-finite values; sorts once.

        >>> Magnitudes.of([0.5, -2.0, 0.0]).sorted.tolist()
        [0.5, 2.0]
        """
        given = np.asarray(values)
        if given.dtype.kind not in "fiub":
            raise UsageError(f"values of dtype {given.dtype} have no magnitude to fit; pass real numbers")
        x = np.abs(given.astype(np.float32, copy=False)).reshape(-1)
        # NaN sorts last, after infinity: both ends are cut off by position.
        x = ascending(x)
        low = int(np.searchsorted(x, np.float32(0), side="right"))
        high = int(np.searchsorted(x, np.float32(np.inf), side="left"))
        return cls(x[low:high], low, x.size - high)

    @property
    def count(self) -> int:
        """Number of magnitudes."""
        return int(self.sorted.size)

    def quantiles(self, p: ArrayLike) -> Floats:
        """Quantiles of the magnitudes at p (float64[q] in [0, 1]), linear between order statistics; nan without any."""
        at = np.asarray(p, np.float64)
        if not self.count:
            return np.full(at.shape, math.nan)
        place = at * (self.count - 1)
        below = np.floor(place).astype(np.int64)
        above = np.minimum(below + 1, self.count - 1)
        low = self.sorted[below].astype(np.float64)
        return low + (place - below) * (self.sorted[above] - low)

    def histogram(self, edges: ArrayLike) -> Ints:
        """Number of magnitudes in each [e_k, e_{k+1}), for ascending edges (float64[m + 1]); int64[m]."""
        return np.diff(np.searchsorted(self.sorted, np.asarray(edges, np.float32))).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Fit:
    """The fitted laws of the magnitudes of one gradient.

    Attributes:
        count: non-zero finite elements.
        zeros: elements that are exactly zero.
        nonfinite: elements left out.
        mu: mean of ln |g|; nan without any element.
        sigma: population standard deviation of ln |g|.
        laws: the fitted laws by name.
        ks: Kolmogorov-Smirnov distance to each of them: the largest gap between the distribution functions. nan if
            all magnitudes are equal, so that a law has no width. Parameters are fitted to the same data, so it
            gives no p-value.
    """

    count: int
    zeros: int
    nonfinite: int
    mu: float
    sigma: float
    laws: dict[str, FittedLaw]
    ks: dict[str, float]

    @property
    def mu_log2(self) -> float:
        """Mean of log2 |g|."""
        return self.mu / LN2

    @property
    def sigma_log2(self) -> float:
        """Population standard deviation of log2 |g|, the sigma by which float formats are chosen."""
        return self.sigma / LN2

    @property
    def best(self) -> str:
        """The law at the least distance; an empty string without any."""
        known = {name: distance for name, distance in self.ks.items() if distance == distance}
        return min(known, key=known.__getitem__) if known else ""


def fit_magnitudes(values: ArrayLike | Magnitudes) -> Fit:
    """Fit every law to the magnitudes of a gradient and measure its distance from them.

    Parameters are those of maximum likelihood: normal, mean and standard deviation; half-normal, root mean square;
    lognormal, mean and standard deviation of ln x; Laplace, median and mean distance from it; half-Laplace, mean;
    loglaplace, the same as Laplace of ln x; uniform, smallest and largest. The likelihood of a Cauchy law has no
    closed maximum, so the usual estimators are used: median and half the interquartile range.

    Args:
        values: real numbers of any shape, taken as float32; or sorted magnitudes.

    >>> fit = fit_magnitudes(np.exp(2 * sp.special.ndtri((np.arange(1000) + 0.5) / 1000)))
    >>> fit.best, round(fit.sigma, 2), fit.ks["lognormal"] < 0.01 < fit.ks["normal"]
    ('lognormal', 2.0, True)
    """
    magnitudes = values if isinstance(values, Magnitudes) else Magnitudes.of(values)
    x = magnitudes.sorted
    laws = _fitted(magnitudes) if x.size else {name: FittedLaw(name, math.nan, math.nan) for name in LAWS}
    ks = {name: ks_distance(x, law) for name, law in laws.items()}
    lognormal = laws["lognormal"]
    return Fit(x.size, magnitudes.zeros, magnitudes.nonfinite, lognormal.location, lognormal.scale, laws, ks)


def ks_distance(x: Singles, law: FittedLaw) -> float:
    """Kolmogorov-Smirnov distance of sorted magnitudes to a law, exact; nan without any, or for a law without width.

    Both distribution functions ascend, so the values at two order statistics bound the gap between them. Most
    of a large tensor is excluded with about the square root of its elements.
    """
    n = x.size
    if not n or not law.scale > 0:
        return math.nan
    if n <= _SMALL:
        return _largest_gap(law.cdf(x), np.arange(n), n)
    marks = np.unique(np.linspace(0, n - 1, math.isqrt(n)).astype(np.int64))
    at = law.cdf(x[marks])
    largest = _largest_gap(at, marks, n)
    bound = np.maximum((marks[1:] + 1) / n - at[:-1], at[1:] - marks[:-1] / n)
    inside = np.flatnonzero(np.repeat(bound > largest, np.diff(marks)))
    for k in range(0, inside.size, _BLOCK):
        part = inside[k : k + _BLOCK]
        largest = max(largest, _largest_gap(law.cdf(x[part]), part, n))
    return largest


def _largest_gap(cdf: Floats, ranks: Ints, n: int) -> float:
    return float(max(((ranks + 1) / n - cdf).max(), (cdf - ranks / n).max()))


def _fitted(magnitudes: Magnitudes) -> dict[str, FittedLaw]:
    """Every law with its parameters, from at least one magnitude."""
    x = magnitudes.sorted
    low_quartile, median, high_quartile = magnitudes.quantiles([0.25, 0.5, 0.75]).tolist()
    log_median = float(np.log(np.array([median]))[0])
    mean, deviation, distance = _moments(x, median, lambda block: block)
    log_mean, log_deviation, log_distance = _moments(x, log_median, np.log)
    first, last = float(x[0]), float(x[-1])
    if first == last:
        # Rounding must not give a width to equal values.
        deviation = distance = log_deviation = log_distance = 0.0
    parameters = {
        "lognormal": (log_mean, log_deviation),
        "normal": (mean, deviation),
        "half-normal": (0.0, math.hypot(mean, deviation)),
        "laplace": (median, distance),
        "half-laplace": (0.0, mean),
        "loglaplace": (log_median, log_distance),
        "cauchy": (median, (high_quartile - low_quartile) / 2),
        "uniform": (first, last - first),
    }
    return {name: FittedLaw(name, *parameters[name]) for name in LAWS}


def _moments(x: Singles, median: float, function: Function) -> tuple[float, float, float]:
    """Mean, standard deviation and mean distance from the median of function(x), a block at a time.

    Sums are about the median: it lies within one deviation of the mean, so they do not cancel.
    """
    total = squares = distances = 0.0
    for k in range(0, x.size, _BLOCK):
        d = function(x[k : k + _BLOCK].astype(np.float64)) - median
        total += float(d.sum())
        squares += float(d @ d)
        distances += float(np.abs(d).sum())
    shift = total / x.size
    return median + shift, math.sqrt(max(squares / x.size - shift * shift, 0.0)), distances / x.size
