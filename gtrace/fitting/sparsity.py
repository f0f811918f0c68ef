"""Thresholds of stochastic pruning for a wanted fraction of zeros, under a law or on the data itself.

Stochastic pruning at alpha keeps |x| > alpha; below, x becomes alpha sign(x) with probability |x| / alpha and else 0.
The expected fraction of zeros is S(alpha) = E[(1 - |x| / alpha)^+].

Source: Chmiel et al., Neural gradients are near-lognormal, 2021, Eq. 5-8. Logarithms are natural here.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import numpy as np

from gtrace.distributions import LogNormal
from gtrace.errors import UsageError, suggest
from gtrace.fitting.empirical import EmpiricalMagnitudes
from gtrace.sketch import MomentSketch

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import ArrayLike, NDArray

Rule: TypeAlias = Literal["exact", "lognormal", "normal", "topk"]
RULES: tuple[Rule, ...] = get_args(Rule)

_ROOT_2 = math.sqrt(2.0)
_ROOT_2PI = math.sqrt(2.0 * math.pi)
_LN_2 = math.log(2.0)
#: brackets are widened by this, relatively, against rounding
_MARGIN = 1e-9


def sparsity(alpha: ArrayLike, mu: ArrayLike, sigma: ArrayLike) -> NDArray[np.float64]:
    """Expected fraction of zeros after stochastic pruning of lognormal magnitudes.

    With a = ln alpha - mu and t = a / sigma it is Phi(t) - exp(sigma^2 / 2 - a) Phi(t - sigma); for large sigma both
    terms are huge or equal in all digits, so up to t = sigma it is formed from scaled complementary error functions.

    Args:
        alpha: threshold, not negative; broadcast with the others.
        mu: mean of ln |x| over non-zero values.
        sigma: standard deviation of ln |x|, not negative.

    Returns:
        S in [0, 1], float64 of the broadcast shape, relative error about 1e-13; where it is close to 1 use
        :func:`unpruned`.

    Raises:
        UsageError: a negative alpha or sigma.

    >>> round(float(sparsity(1.0, 0.0, 1.0)), 12)
    0.238421708135
    """
    from scipy.special import erfcx, ndtr

    a, t, s = _reduced(alpha, mu, sigma)
    low = _half_gauss(t)
    right = erfcx(np.maximum(s - t, 0.0) / _ROOT_2)
    left = erfcx(np.maximum(-t, 0.0) / _ROOT_2)
    inner = np.where(t <= 0, low * (left - right), ndtr(t) - low * right)
    with np.errstate(over="ignore"):
        outer = ndtr(t) - np.exp(np.where(t > s, 0.5 * s * s - a, 0.0)) * ndtr(t - s)
    return _with_points(np.where(t > s, outer, inner), a, s, complement=False)


def unpruned(alpha: ArrayLike, mu: ArrayLike, sigma: ArrayLike) -> NDArray[np.float64]:
    """1 - :func:`sparsity` without cancellation: Phi(-t) + exp(sigma^2 / 2 - a) Phi(t - sigma).

    >>> float(unpruned(1e20, 0.0, 1.0)) > 0
    True
    """
    from scipy.special import erfcx, ndtr

    a, t, s = _reduced(alpha, mu, sigma)
    inner = _half_gauss(t) * erfcx(np.maximum(s - t, 0.0) / _ROOT_2)
    outer = np.exp(np.where(t > s, 0.5 * s * s - a, 0.0)) * ndtr(t - s)
    return _with_points(ndtr(-t) + np.where(t > s, outer, inner), a, s, complement=True)


def pruning_threshold(s: float, mu: float, sigma: float) -> float:
    """The alpha at which :func:`sparsity` is ``s``.

    Args:
        s: wanted fraction of zeros among the non-zero values, in [0, 1).
        mu: mean of ln |x|.
        sigma: standard deviation of ln |x|, not negative.

    Returns:
        alpha, with an error of ln alpha below 1e-10 for sigma 0.1 to 8 and s from 1e-6 to 1 - 1e-6; 0 for s = 0.

    Raises:
        UsageError: s outside [0, 1), or a law that is none.

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
        s: wanted fraction of zeros, in [0, 1), those that are there included.
        data: a sketch with norm "none", an array of any shape, or a law.

    Returns:
        alpha, float64, in gradient units; 0 (prune nothing) where there are more zeros already.

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
    """Expected fraction of zeros after stochastic pruning of a tensor at ``alpha``, zeros that are there included."""
    if isinstance(data, LogNormal):
        return float(sparsity(alpha, data.mu, data.sigma))
    return EmpiricalMagnitudes(data).sparsity(alpha)


def pruned_cosine(alpha: float, data: MomentSketch | LogNormal | ArrayLike) -> float:
    """Cosine of a tensor and its stochastically pruned self: cos^-2 = E ||T(x)||^2 / ||x||^2.

    Of a law it is that of infinitely many values, which for heavy tails is above what finite tensors have. NaN
    for a tensor of zeros.
    """
    if isinstance(data, LogNormal):
        return math.exp(-0.5 * log_energy_ratio(math.log(alpha) - data.mu, data.sigma)) if alpha > 0 else 1.0
    return EmpiricalMagnitudes(data).cosine(alpha)


def log_energy_ratio(a: float, sigma: float) -> float:
    """ln(E T^2 / E x^2) of lognormal magnitudes pruned at alpha = exp(mu + a), sigma positive."""
    from scipy.special import log_ndtr

    if sigma == 0:
        return max(0.0, a)
    t = a / sigma
    return float(np.logaddexp(log_ndtr(2.0 * sigma - t), a - 1.5 * sigma * sigma + log_ndtr(t - sigma)))


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
    from scipy.special import ndtri

    rest = math.log1p(-s)
    if sigma == 0:
        return -rest
    low = sigma * float(ndtri(s))
    high = min(0.5 * sigma * sigma - rest, math.log1p(s) - rest - sigma * float(ndtri(0.5 * (1.0 - s))))
    margin = _MARGIN * (abs(low) + abs(high) + sigma)
    # The smaller one of S and 1 - S has the digits; relative to the goal both are of order one.
    if s > 0.5:
        return root(lambda a: 1.0 - float(unpruned(_exp(a), 0.0, sigma)) / (1.0 - s), low - margin, high + margin)
    return root(lambda a: float(sparsity(_exp(a), 0.0, sigma)) / s - 1.0, low - margin, high + margin)


def _half_normal_threshold(s: float) -> float:
    """The alpha in sigmas at which stochastic pruning of normal values makes a fraction s in [0, 1) zero."""
    from scipy.special import erf, erfc

    if s <= 0:
        return 0.0
    flat = math.sqrt(2.0 / math.pi)

    def excess(y: float) -> float:
        u = math.exp(y)
        mean = flat * -math.expm1(-0.5 * u * u) / u
        if s > 0.5:
            return 1.0 - (float(erfc(u / _ROOT_2)) + mean) / (1.0 - s)
        return (float(erf(u / _ROOT_2)) - mean) / s - 1.0

    # S is at most u / sqrt(2 pi), and at least 1 - sqrt(2 / pi) / u.
    low, high = math.log(s * _ROOT_2PI), math.log(flat / (1.0 - s))
    return math.exp(root(excess, low - 1e-3, max(high, low + 1.0) + 1.0))


def root(f: Callable[[float], float], low: float, high: float) -> float:
    """Where f, which changes its sign between ``low`` and ``high``, is 0: Brent's method, to about 1e-14."""
    from scipy.optimize import brentq

    return float(brentq(f, low, high, xtol=1e-14, rtol=1e-14))


def _reduced(
    alpha: ArrayLike, mu: ArrayLike, sigma: ArrayLike
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """a = ln alpha - mu, t = a / sigma and sigma, broadcast; a point mass has sigma 1 here and is set afterwards."""
    x, m, s = np.broadcast_arrays(*(np.asarray(v, dtype=np.float64) for v in (alpha, mu, sigma)))
    if (x < 0).any() or (s < 0).any():
        raise UsageError("sparsity: alpha and sigma must not be negative")
    with np.errstate(divide="ignore"):
        a = np.log(x) - m
    return a, a / np.where(s > 0, s, 1.0), s


def _half_gauss(t: NDArray[np.float64]) -> NDArray[np.float64]:
    """phi(t) sqrt(pi / 2) = exp(-t^2 / 2) / 2."""
    return 0.5 * np.exp(-0.5 * t * t)


def _with_points(
    value: NDArray[np.float64], a: NDArray[np.float64], sigma: NDArray[np.float64], *, complement: bool
) -> NDArray[np.float64]:
    """Put the closed form of point masses (sigma 0) where they belong, and keep rounding within [0, 1]."""
    kept = np.exp(-np.maximum(a, 0.0))
    return np.clip(np.where(sigma > 0, value, kept if complement else 1.0 - kept), 0.0, 1.0)


def _checked_sparsity(s: float) -> float:
    s = float(s)
    if not 0.0 <= s < 1.0:
        raise UsageError(f"sparsity: {s:g} is out of range; it must be at least 0 and below 1")
    return s


def _exp(a: float) -> float:
    return float(np.exp(np.minimum(a, 709.0)))
