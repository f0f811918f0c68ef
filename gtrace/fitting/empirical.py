"""A tensor's own law of magnitudes, as what stochastic pruning needs of it: sums over what lies below a threshold."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from gtrace.buckets import as_values
from gtrace.errors import UsageError
from gtrace.sketch import MomentSketch

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

_NEWTON_STEPS = 40


class EmpiricalMagnitudes:
    """Ascending magnitudes with their counts, and running sums of |x| and x^2.

    Of an array the points are its own magnitudes; of a sketch, the means of its bins, which are 0.1% wide: a sparsity
    then is off by at most a 4000th of the share of values in the one bin that the threshold falls into.

    Attributes:
        points: float64[k], ascending, positive.
        mass: float64[k + 1], how many non-zero values are among the first j points.
        first: float64[k + 1], their sum.
        second: float64[k + 1], the sum of their squares.
        zeros: how many values are exactly zero.
        size: how many values there are, zeros included.
    """

    __slots__ = ("_slopes", "first", "mass", "points", "second", "size", "zeros")

    def __init__(self, data: MomentSketch | ArrayLike) -> None:
        """Take the magnitudes of a sketch (norm "none") or an array; non-finite values count as absent.

        Raises:
            UsageError: a sketch with another norm, or values that are not real numbers.
        """
        if isinstance(data, MomentSketch):
            if data.norm != "none":
                raise UsageError(f"pruning: wants a sketch with norm none, not {data.norm}")
            count, low = data.sums[:, 0], data.lower
            first = count * low + data.sums[:, 1]
            second = count * low * low + 2.0 * low * data.sums[:, 1] + data.sums[:, 2]
            # Exactly the lower edge where all values lie on it.
            self.points: NDArray[np.float64] = low + data.sums[:, 1] / count
            self.mass = _running(count)
            self.first, self.second = _running(first), _running(second)
            self.zeros, self.size = data.zeros, data.size
        else:
            x = np.abs(as_values(data))
            x = np.sort(x[np.isfinite(x)]).astype(np.float64)
            self.zeros, self.size = int(np.searchsorted(x, 0.0, side="right")), x.size
            self.points = x[self.zeros :]
            self.mass = np.arange(self.points.size + 1, dtype=np.float64)
            self.first, self.second = _running(self.points), _running(self.points**2)
        self._slopes: NDArray[np.float64] | None = None

    @property
    def zero_share(self) -> float:
        """Fraction of values that are exactly zero; 1 for an empty tensor."""
        return self.zeros / self.size if self.size else 1.0

    @property
    def energy(self) -> float:
        """The sum of squares."""
        return float(self.second[-1])

    def _below(self, alpha: float) -> int:
        return int(np.searchsorted(self.points, alpha, side="right"))

    def sparsity(self, alpha: float) -> float:
        """Expected fraction of zeros after stochastic pruning at ``alpha``, zeros that are there included."""
        k = self._below(alpha)
        if not self.size or not k:
            return self.zero_share
        pruned = max(0.0, float(self.mass[k]) - float(self.first[k]) / alpha)
        return (self.zeros + pruned) / self.size

    def pruned_energy(self, alpha: float) -> float:
        """E ||T(x)||^2 after stochastic pruning at ``alpha``: unbiased, so never below the energy."""
        k = self._below(alpha)
        return float(self.second[-1] - self.second[k]) + alpha * float(self.first[k]) if k else self.energy

    def squared_error(self, alpha: float) -> float:
        """E ||T(x) - x||^2 of stochastic pruning at ``alpha``."""
        k = self._below(alpha)
        return max(0.0, alpha * float(self.first[k]) - float(self.second[k])) if k else 0.0

    def at_threshold(self, alpha: float) -> float:
        """Expected fraction of values that become plus or minus ``alpha``."""
        return float(self.first[self._below(alpha)]) / alpha / self.size if self.size and alpha > 0 else 0.0

    def cosine(self, alpha: float) -> float:
        """||x|| / sqrt(E ||T(x)||^2), what the cosine of a pruned tensor and itself is close to; NaN for zeros."""
        return math.sqrt(self.energy / self.pruned_energy(alpha)) if self.energy else math.nan

    def threshold(self, sparsity: float) -> float:
        """The alpha of an expected fraction of zeros in [0, 1); 0 where there are that many already."""
        if self.zeros > sparsity * self.size or not self.points.size:
            return 0.0
        hinge = self.points * (self.zeros + self.mass[1:]) - self.first[1:]
        k = int(np.searchsorted(hinge - sparsity * self.size * self.points > 0.0, True))
        over = self.zeros + float(self.mass[k]) - sparsity * self.size
        # By rounding alone the sum of very many values may lie on the wrong side.
        return max(float(self.first[k]) / over, float(self.points[k - 1])) if k and over > 0 else float(self.points[0])

    def quantile(self, share: float) -> float:
        """The least magnitude up to which at least ``share`` of the values lie; 0 where zeros are that many."""
        need = share * self.size - self.zeros
        if need <= 0 or not self.points.size:
            return 0.0
        k = int(np.searchsorted(self.mass[1:], need * (1.0 - 1e-12)))
        return float(self.points[min(k, self.points.size - 1)])

    def log_slope(self, alpha: float) -> float:
        """ln of -2 d cosine / d sparsity = n alpha^2 / ||x||^2 cosine^3, which rises with alpha.

        d E||T||^2 = first d alpha and d sparsity = first / (n alpha^2) d alpha.
        """
        return self._scale() + 2.0 * math.log(alpha) - 1.5 * math.log(self.pruned_energy(alpha))

    def at_slope(self, value: float) -> float:
        """The alpha whose :meth:`log_slope` is ``value``."""
        if self._slopes is None:
            pruned = self.second[-1] - self.second[1:] + self.points * self.first[1:]
            self._slopes = self._scale() + 2.0 * np.log(self.points) - 1.5 * np.log(pruned)
        k = int(np.searchsorted(self._slopes, value, side="right"))
        wanted = value - self._scale()
        rest, below = float(self.second[-1] - self.second[k]), float(self.first[k])
        if k == 0:
            return math.exp(0.5 * wanted + 0.75 * math.log(self.energy))
        # ln(alpha) -> the slope is concave and rises by 1/2 to 2: Newton's method from the left cannot overshoot.
        y = math.log(self.points[k - 1])
        for _ in range(_NEWTON_STEPS):
            inner = rest + below * math.exp(y)
            step = (wanted - 2.0 * y + 1.5 * math.log(inner)) / (2.0 - 1.5 * below * math.exp(y) / inner)
            y += step
            if abs(step) < 1e-13 * max(1.0, abs(y)):
                break
        return math.exp(y)

    def _scale(self) -> float:
        return math.log(self.size) + 0.5 * math.log(self.energy)


def _running(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.concatenate([[0.0], np.cumsum(values)])
