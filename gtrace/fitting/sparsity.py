"""Thresholds of stochastic pruning for a wanted fraction of zeros, under a law or on the data itself.

Stochastic pruning at alpha keeps |x| > alpha; below, x becomes alpha sign(x) with probability |x| / alpha and else 0.
The expected fraction of zeros is S(alpha) = E[(1 - |x| / alpha)^+].

Source: Chmiel et al., Neural gradients are near-lognormal, 2021, Eq. 5-8. Logarithms are natural here.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import numpy as np
import scipy as sp

from gtrace.buckets import as_values
from gtrace.distributions import LogNormal
from gtrace.errors import UsageError, suggest
from gtrace.kernels.compare import ascending
from gtrace.sketch import MomentSketch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import ArrayLike

    from gtrace.kernels import Floats

    Prunable: TypeAlias = MomentSketch | LogNormal | tuple[float, ...] | ArrayLike

Rule: TypeAlias = Literal["exact", "lognormal", "normal", "topk"]
RULES: tuple[Rule, ...] = get_args(Rule)

_ROOT_2 = math.sqrt(2.0)
_ROOT_2PI = math.sqrt(2.0 * math.pi)
_LN_2 = math.log(2.0)
#: brackets are widened by this, relatively, against rounding
_MARGIN = 1e-9


def sparsity(alpha: ArrayLike, mu: ArrayLike, sigma: ArrayLike) -> Floats:
    """Expected fraction of zeros after stochastic pruning of lognormal magnitudes.

    With a = ln alpha - mu and t = a / sigma it is Phi(t) - exp(sigma^2 / 2 - a) Phi(t - sigma); for large sigma both
    terms are huge or equal in all digits, so up to t = sigma it is formed from scaled complementary error functions.

    Args:
        alpha: threshold, not negative; broadcast with the others.
        mu: mean of ln |x| over non-zero values.
        sigma: standard deviation of ln |x|, not negative.

    Returns:
        S in [0, 1], float64 of the broadcast shape, relative error about 1e-13; if it is close to 1 use
        :func:`unpruned`.

    Raises:
        UsageError: a negative alpha or sigma.

    >>> round(float(sparsity(1.0, 0.0, 1.0)), 12)
    0.238421708135
    """
    a, t, s, beyond = _reduced(alpha, mu, sigma)
    right = sp.special.erfcx(np.maximum(s - t, 0.0) / _ROOT_2)
    left = sp.special.erfcx(np.maximum(-t, 0.0) / _ROOT_2)
    value = np.where(t <= 0, _half_gauss(t) * (left - right), sp.special.ndtr(t) - beyond)
    return _with_points(value, a, s, complement=False)


def unpruned(alpha: ArrayLike, mu: ArrayLike, sigma: ArrayLike) -> Floats:
    """1 - :func:`sparsity` without cancellation: Phi(-t) + exp(sigma^2 / 2 - a) Phi(t - sigma).

    >>> float(unpruned(1e20, 0.0, 1.0)) > 0
    True
    """
    a, t, s, beyond = _reduced(alpha, mu, sigma)
    return _with_points(sp.special.ndtr(-t) + beyond, a, s, complement=True)


def pruning_threshold(s: float, mu: float, sigma: float) -> float:
    """The alpha for which :func:`sparsity` is ``s``.

    Args:
        s: wanted fraction of zeros among the non-zero values, in [0, 1).
        mu: mean of ln |x|.
        sigma: standard deviation of ln |x|, not negative.

    Returns:
        alpha, with an error of ln alpha below 1e-10 for sigma 0.1 to 8 and s from 1e-6 to 1 - 1e-6; 0 for s = 0.

    Raises:
        UsageError: s outside [0, 1), or a law that is not valid.

    >>> round(pruning_threshold(0.8, 0.0, 1.0), 9)
    7.822265231
    """
    law = LogNormal(float(mu), float(sigma))
    s = _checked_sparsity(s)
    return _exp(law.mu + _log_threshold(s, law.sigma)) if s > 0 else 0.0


def threshold(rule: Rule, s: float, data: MomentSketch | LogNormal | ArrayLike) -> float:
    """The alpha at which stochastic pruning of a tensor makes a fraction ``s`` of it zero, by one of four rules.

    ``exact`` solves S(alpha) = s on the data itself. ``lognormal`` (the paper) solves it for a law with the data's mean
    and deviation of ln |x|, ``normal`` for one with the data's second moment, which is what ATP assumes (Ye et al.,
    Accelerating CNN Training by Pruning Activation Gradients, 2019). ``topk`` takes the s-quantile of |x|, which prunes
    too little: of the values below it some survive. Laws are fitted to the non-zero values and solved for
    (s - s0) / (1 - s0), where s0 is the fraction that is zero already.

    Args:
        rule: one of ``RULES``.
        s: wanted fraction of zeros, in [0, 1), existing zeros included.
        data: a sketch with norm "none", an array of any shape, or a law.

    Returns:
        alpha, float64, in gradient units; 0 (prune nothing) if there are already more zeros.

    Raises:
        UsageError: an unknown rule, s outside [0, 1), or a sketch with another norm.
    """
    if rule not in RULES:
        raise UsageError(f"threshold: '{rule}' is unknown; {suggest(str(rule), RULES)}")
    s = _checked_sparsity(s)
    if isinstance(data, LogNormal):
        return _law_threshold(rule, s, data)
    found = EmpiricalMagnitudes(data)
    if rule == "exact":
        return found.threshold(s)
    if rule == "topk":
        return found.quantile(s)
    rest = found.size - found.zeros
    wanted = (s * found.size - found.zeros) / rest if rest else 0.0
    if wanted <= 0:
        return 0.0
    if rule == "normal":
        return math.sqrt(found.energy / rest) * _half_normal_threshold(wanted)
    _, mu, sigma = (data if isinstance(data, MomentSketch) else MomentSketch.of(data, norm="none")).log2_moments()
    return pruning_threshold(wanted, mu * _LN_2, sigma * _LN_2)


def achieved_sparsity(alpha: float, data: MomentSketch | LogNormal | ArrayLike) -> float:
    """Expected fraction of zeros after stochastic pruning of a tensor at ``alpha``, existing zeros included."""
    if isinstance(data, LogNormal):
        return float(sparsity(alpha, data.mu, data.sigma))
    return EmpiricalMagnitudes(data).sparsity(alpha)


def pruned_cosine(alpha: float, data: MomentSketch | LogNormal | ArrayLike) -> float:
    """Cosine of a tensor and its stochastically pruned self: cos^-2 = E ||T(x)||^2 / ||x||^2.

    For a law it is that of infinitely many values, which for heavy tails is above that of finite tensors. NaN
    for a tensor of zeros.
    """
    if isinstance(data, LogNormal):
        return math.exp(-0.5 * log_energy_ratio(math.log(alpha) - data.mu, data.sigma)) if alpha > 0 else 1.0
    return EmpiricalMagnitudes(data).cosine(alpha)


def log_energy_ratio(a: float, sigma: float) -> float:
    """ln(E T^2 / E x^2) of lognormal magnitudes pruned at alpha = exp(mu + a), sigma positive."""
    if sigma == 0:
        return max(0.0, a)
    t = a / sigma
    return float(
        np.logaddexp(sp.special.log_ndtr(2.0 * sigma - t), a - 1.5 * sigma * sigma + sp.special.log_ndtr(t - sigma))
    )


def _law_threshold(rule: Rule, s: float, law: LogNormal) -> float:
    if s == 0:
        return 0.0
    if rule == "topk":
        return float(law.quantile(s))
    if rule == "normal":
        return _exp(law.mu + law.sigma**2) * _half_normal_threshold(s)
    return pruning_threshold(s, law.mu, law.sigma)


def _log_threshold(s: float, sigma: float) -> float:
    """a = ln alpha - mu for S = s in (0, 1), bracketed by S < Phi(t) and two upper bounds."""
    rest = math.log1p(-s)
    if sigma == 0:
        return -rest
    low = sigma * float(sp.special.ndtri(s))
    high = min(0.5 * sigma * sigma - rest, math.log1p(s) - rest - sigma * float(sp.special.ndtri(0.5 * (1.0 - s))))
    margin = _MARGIN * (abs(low) + abs(high) + sigma)
    # The smaller one of S and 1 - S has the digits; relative to the goal both are of order one.
    if s > 0.5:
        return root(lambda a: 1.0 - float(unpruned(_exp(a), 0.0, sigma)) / (1.0 - s), low - margin, high + margin)
    return root(lambda a: float(sparsity(_exp(a), 0.0, sigma)) / s - 1.0, low - margin, high + margin)


def _half_normal_threshold(s: float) -> float:
    """The alpha in sigmas at which stochastic pruning of normal values makes a fraction s in [0, 1) zero."""
    if s <= 0:
        return 0.0
    flat = math.sqrt(2.0 / math.pi)

    def excess(y: float) -> float:
        u = math.exp(y)
        mean = flat * -math.expm1(-0.5 * u * u) / u
        if s > 0.5:
            return 1.0 - (float(sp.special.erfc(u / _ROOT_2)) + mean) / (1.0 - s)
        return (float(sp.special.erf(u / _ROOT_2)) - mean) / s - 1.0

    # S is at most u / sqrt(2 pi), and at least 1 - sqrt(2 / pi) / u.
    low, high = math.log(s * _ROOT_2PI), math.log(flat / (1.0 - s))
    return math.exp(root(excess, low - 1e-3, max(high, low + 1.0) + 1.0))


def root(f: Callable[[float], float], low: float, high: float, close: float = 1e-14) -> float:
    """The root of f between ``low`` and ``high``, where its sign changes: Brent's method, to about ``close``."""
    # Named in full, here and below: its import takes a third of a second, and few commands need it.
    return float(sp.optimize.brentq(f, low, high, xtol=close, rtol=1e-14))


def lowest(f: Callable[[float], float], low: float, high: float, close: float) -> tuple[float, float]:
    """A point between ``low`` and ``high`` where f has a minimum, to about ``close``, and f there."""
    found = sp.optimize.minimize_scalar(f, bounds=(low, high), method="bounded", options={"xatol": close})
    return float(found.x), float(found.fun)


def _reduced(alpha: ArrayLike, mu: ArrayLike, sigma: ArrayLike) -> tuple[Floats, Floats, Floats, Floats]:
    """a = ln alpha - mu, t = a / sigma, sigma, broadcast, and exp(sigma^2 / 2 - a) Phi(t - sigma).

    A point mass has sigma 1 here and is set afterwards.
    """
    x, m, s = np.broadcast_arrays(*(np.asarray(v, dtype=np.float64) for v in (alpha, mu, sigma)))
    if (x < 0).any() or (s < 0).any():
        raise UsageError("sparsity: alpha and sigma must not be negative")
    with np.errstate(divide="ignore"):
        a = np.log(x) - m
    t = a / np.where(s > 0, s, 1.0)
    inner = _half_gauss(t) * sp.special.erfcx(np.maximum(s - t, 0.0) / _ROOT_2)
    with np.errstate(over="ignore"):
        outer = np.exp(np.where(t > s, 0.5 * s * s - a, 0.0)) * sp.special.ndtr(t - s)
    return a, t, s, np.where(t > s, outer, inner)


def _half_gauss(t: Floats) -> Floats:
    """phi(t) sqrt(pi / 2) = exp(-t^2 / 2) / 2."""
    return 0.5 * np.exp(-0.5 * t * t)


def _with_points(value: Floats, a: Floats, sigma: Floats, *, complement: bool) -> Floats:
    """Set the closed form of point masses (sigma 0), and keep rounding within [0, 1]."""
    kept = np.exp(-np.maximum(a, 0.0))
    return np.clip(np.where(sigma > 0, value, kept if complement else 1.0 - kept), 0.0, 1.0)


def _checked_sparsity(s: float) -> float:
    s = float(s)
    if not 0.0 <= s < 1.0:
        raise UsageError(f"sparsity: {s:g} is out of range; it must be at least 0 and below 1")
    return s


def _exp(a: float) -> float:
    return float(np.exp(np.minimum(a, 709.0)))


class EmpiricalMagnitudes:
    """Ascending magnitudes with their counts, and running sums of |x| and x^2.

    For an array the points are its own magnitudes; for a sketch, the means of its bins, which are 0.1% wide: the
    sparsity is then off by at most a 4000th of the share of values in the bin of the threshold.

    Attributes:
        points: float64[k], ascending, positive.
        mass: float64[k + 1], number of non-zero values among the first j points.
        first: float64[k + 1], their sum.
        second: float64[k + 1], the sum of their squares.
        zeros: number of values that are exactly zero.
        size: number of values, zeros included.
    """

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
            # Exactly the lower edge if all values lie on it.
            self.points: Floats = low + data.sums[:, 1] / count
            self.mass = _running(count)
            self.first, self.second = _running(first), _running(second)
            self.zeros, self.size = data.zeros, data.size
        else:
            x = np.abs(as_values(data))
            x = ascending(x[np.isfinite(x)]).astype(np.float64)
            self.zeros, self.size = int(np.searchsorted(x, 0.0, side="right")), x.size
            self.points = x[self.zeros :]
            self.mass = np.arange(self.points.size + 1, dtype=np.float64)
            self.first, self.second = _running(self.points), _running(self.points**2)

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
        """Expected fraction of zeros after stochastic pruning at ``alpha``, existing zeros included."""
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
        """||x|| / sqrt(E ||T(x)||^2), close to the cosine of a pruned tensor with itself; NaN for zeros."""
        return math.sqrt(self.energy / self.pruned_energy(alpha)) if self.energy else math.nan

    def threshold(self, sparsity: float) -> float:
        """The alpha for an expected fraction of zeros in [0, 1); 0 if there are already that many."""
        if self.zeros > sparsity * self.size or not self.points.size:
            return 0.0
        hinge = self.points * (self.zeros + self.mass[1:]) - self.first[1:]
        k = int(np.searchsorted(hinge - sparsity * self.size * self.points > 0.0, True))
        over = self.zeros + float(self.mass[k]) - sparsity * self.size
        # The rounded sum of very many values may be on the wrong side.
        return max(float(self.first[k]) / over, float(self.points[k - 1])) if k and over > 0 else float(self.points[0])

    def quantile(self, share: float) -> float:
        """The least magnitude up to which at least ``share`` of the values lie; 0 if zeros are that many."""
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
        k = int(np.searchsorted(self._slopes, value, side="right"))
        wanted = value - self._scale()
        rest, below = float(self.second[-1] - self.second[k]), float(self.first[k])
        if k == 0:
            return math.exp(0.5 * wanted + 0.75 * math.log(self.energy))
        # ln(alpha) -> the slope is concave and rises by 1/2 to 2: Newton's method from the left cannot overshoot.
        y = math.log(self.points[k - 1])
        for _ in range(40):
            inner = rest + below * math.exp(y)
            step = (wanted - 2.0 * y + 1.5 * math.log(inner)) / (2.0 - 1.5 * below * math.exp(y) / inner)
            y += step
            if abs(step) < 1e-13 * max(1.0, abs(y)):
                break
        return math.exp(y)

    @cached_property
    def _slopes(self) -> Floats:
        """:meth:`log_slope` at each point."""
        pruned = self.second[-1] - self.second[1:] + self.points * self.first[1:]
        return self._scale() + 2.0 * np.log(self.points) - 1.5 * np.log(pruned)

    def _scale(self) -> float:
        return math.log(self.size) + 0.5 * math.log(self.energy)


def _running(values: Floats) -> Floats:
    return np.concatenate([[0.0], np.cumsum(values)])


class _Population:
    """Infinitely many lognormal magnitudes, in units of exp(mu): the slope does not depend on mu.

    For an allocation it has the methods of :class:`EmpiricalMagnitudes`.
    """

    zero_share = 0.0

    def __init__(self, sigma: float) -> None:
        self._sigma = sigma

    def sparsity(self, alpha: float) -> float:
        return float(sparsity(alpha, 0.0, self._sigma))

    def threshold(self, sparsity: float) -> float:
        return pruning_threshold(sparsity, 0.0, self._sigma)

    def log_slope(self, alpha: float) -> float:
        a = math.log(alpha)
        return 2.0 * (a - self._sigma**2) - 1.5 * log_energy_ratio(a, self._sigma)

    def at_slope(self, value: float) -> float:
        # By ln alpha the slope rises by at least 1/2 and at most 2.
        start = self._sigma**2
        off = value - self.log_slope(math.exp(start))
        ends = sorted((start + 0.5 * off, start + 2.0 * off))
        return math.exp(root(lambda a: self.log_slope(math.exp(a)) - value, ends[0] - 1e-9, ends[1] + 1e-9))


def allocate_sparsity(tensors: Sequence[Prunable], s: float) -> Floats:
    """The sparsity of each tensor that maximizes their mean cosine, at a fixed mean sparsity.

    Both means are weighted by size. The cosine of a stochastically pruned tensor with itself is a concave function of
    its sparsity, for any distribution, so there is one optimum, at which all slopes are equal. The root finding for
    that slope contains, for each tensor, another one for its threshold.

    Args:
        tensors: sketches with norm "none", arrays of any shape, :class:`~gtrace.distributions.LogNormal` laws, or
            tuples (sigma, size) and (mu, sigma, size) of such laws. A law means infinitely many values, weighted by
            its size; without sizes all have equal weight.
        s: the mean sparsity, in [0, 1), existing zeros included.

    Returns:
        float64[n]. A tensor is never asked for fewer zeros than it has; if there are already more than ``s``, these
        fractions are returned, and a tensor that is empty or all zeros has 1.

    Raises:
        UsageError: s outside [0, 1), no tensors, or laws with and without a size.

    >>> [round(float(v), 4) for v in allocate_sparsity([(1.0, 400), (1.5, 200), (2.0, 100), (2.5, 50)], 0.7)]
    [0.5726, 0.7813, 0.9111, 0.9718]
    """
    s = _checked_sparsity(s)
    if not len(tensors):
        raise UsageError("allocation: there are no tensors")
    laws, sizes = zip(*(_prepared(tensor) for tensor in tensors), strict=True)
    weights = np.array(sizes, np.float64)
    if any(isinstance(law, _Population) and not size for law, size in zip(laws, sizes, strict=True)):
        if weights.any() or not all(isinstance(law, _Population) for law in laws):
            raise UsageError("allocation: give every law its size, or none")
        weights[:] = 1.0
    if not weights.any():
        return np.ones(weights.size)
    weights /= weights.sum()
    out = np.array([law.zero_share for law in laws])
    live = [k for k, share in enumerate(out) if share < 1.0]
    if float(weights @ out) >= s or not live:
        return out

    def at(slope: float) -> Floats:
        for k in live:
            out[k] = laws[k].sparsity(laws[k].at_slope(slope))
        return out

    slopes = [laws[k].log_slope(laws[k].threshold(s)) for k in live if out[k] < s]
    low, high = min(slopes) - 1e-9, max(slopes) + 1e-9
    while float(weights @ at(low)) > s:
        low -= 4.0
    while float(weights @ at(high)) < s:
        high += 4.0
    return at(root(lambda slope: float(weights @ at(slope)) - s, low, high))


def _prepared(tensor: Prunable) -> tuple[EmpiricalMagnitudes | _Population, float]:
    if isinstance(tensor, tuple) and len(tensor) in (2, 3):
        mu, sigma, size = (0.0, *tensor)[-3:]
        tensor = LogNormal(float(mu), float(sigma), int(size))
    if isinstance(tensor, LogNormal):
        return _Population(tensor.sigma), tensor.size
    found = EmpiricalMagnitudes(tensor)
    return found, found.size
