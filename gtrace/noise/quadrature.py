"""What noise in gradients has cost after some steps: noise filtered by curvature over a horizon.

Of curvature a few samples of the gradient's noise give the moments, which are enough.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import ArrayLike, NDArray

_ROUNDING = 1e-12
#: Products of this many different samples are needed.
FEWEST = 4


def impulse_weight(
    curvature: ArrayLike,
    steps: int,
    lr: float,
    momentum: float = 0.0,
    schedule: ArrayLike | None = None,
    *,
    nesterov: bool = False,
    averaging: bool = False,
    decay: float = 0.0,
) -> NDArray[np.float64]:
    """Expected loss that gradient noise of variance one a step has cost after some steps, by curvature.

    In a direction of curvature h, noise at one step moves the weight by a_k after k steps more, and independent noise
    at each of T steps costs w_T(h) = h / 2 * (a_1^2 + ... + a_T^2). Without momentum a_k = lr (1 - lr h)^(k-1): over a
    short horizon w = h lr^2 T / 2, over a long one lr / 4 in every direction with any curvature, and flat directions
    never get there. The optimizer is torch's ``SGD``: v <- momentum v + g, x <- x - lr v. ``Adam`` is the same in
    coordinates that are divided by s = (sqrt(v) + eps)^(-1/2), with ``averaging`` and beta1 as its momentum; curvature
    and noise are s H s and s Sigma s there. Weight decay in the gradient is added to the curvature by the caller.

    Args:
        curvature: h, of any shape, not negative; per weight squared.
        steps: T, at least 1.
        lr: learning rate.
        momentum: in [0, 1).
        schedule: (steps,) factors of the learning rate, the first step first; None for a constant rate.
        nesterov: x <- x - lr (g + momentum v) instead.
        averaging: v <- momentum v + (1 - momentum) g instead, as Adam's first moment.
        decay: decoupled weight decay as AdamW's: x <- (1 - lr decay) x before the rest.

    Returns:
        float64 of the shape of ``curvature``; infinite if the steps are unstable beyond what numbers hold.

    Raises:
        ValueError: a number out of range, or a schedule of another length.
    """
    h = np.asarray(curvature, np.float64)
    if (h < 0).any() or not np.isfinite(h).all():
        raise ValueError("curvature must be finite and not negative")
    if steps < 1 or not lr > 0 or not 0 <= momentum < 1 or decay < 0:
        raise ValueError(f"steps {steps}, lr {lr:g}, momentum {momentum:g} or decay {decay:g} is out of range")
    rates = np.full(1, lr) if schedule is None else lr * np.asarray(schedule, np.float64)
    if schedule is not None and rates.shape != (steps,):
        raise ValueError(f"a schedule of {steps} steps has {steps} factors, not {rates.shape}")
    gain = 1 - momentum if averaging else 1.0

    def linear(rate: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(..., 2, 2) and (2,): how a step maps weight and momentum, and what noise of one does to them."""
        new = np.stack([gain * h, np.full_like(h, momentum)], axis=-1)
        kept = np.stack([np.full_like(h, 1 - rate * decay), np.zeros_like(h)], axis=-1)
        push, noise = (momentum, gain * (1 + momentum)) if nesterov else (1.0, gain)
        extra = np.stack([gain * h, np.zeros_like(h)], axis=-1) if nesterov else 0.0
        return np.stack([kept - rate * (push * new + extra), new], axis=-2), np.array([-rate * noise, gain])

    with np.errstate(over="ignore", invalid="ignore"):
        total = _constant(*linear(lr), steps) if schedule is None else _scheduled([linear(r) for r in rates], h.shape)
        weight = 0.5 * h * total
    return np.where(np.isfinite(weight), weight, np.inf)


def _constant(step: NDArray[np.float64], noise: NDArray[np.float64], steps: int) -> NDArray[np.float64]:
    """Sum of squared responses of the weight, by doubling: S_2n = S_n + A^n S_n A^nT, S_(n+1) = b b^T + A S_n A^T."""
    first = np.broadcast_to(np.outer(noise, noise), step.shape)
    total, power = first, step
    for bit in bin(steps)[3:]:
        total = total + power @ total @ power.swapaxes(-1, -2)
        power = power @ power
        if bit == "1":
            total = first + step @ total @ step.swapaxes(-1, -2)
            power = power @ step
    return np.asarray(total[..., 0, 0])


def _scheduled(
    steps: Sequence[tuple[NDArray[np.float64], NDArray[np.float64]]], shape: tuple[int, ...]
) -> NDArray[np.float64]:
    """The same for steps that differ, from the last one back: how the weight at the end answers to each."""
    answer = np.broadcast_to(np.array([1.0, 0.0]), (*shape, 2))
    total = np.zeros(shape)
    for step, noise in reversed(steps):
        total = total + (answer @ noise) ** 2
        answer = np.squeeze(answer[..., None, :] @ step, -2)
    return total


class FilteredRatio(NamedTuple):
    """What a codec's noise costs over what the gradient's own noise costs, at a horizon.

    Attributes:
        ratio: r_W; the equivalent batch is B / (1 + r_W).
        low: lower end of what the moments of curvature allow.
        high: upper end.
    """

    ratio: float
    low: float
    high: float


def filtered_ratio(
    gram: NDArray[np.float64],
    codec_gram: NDArray[np.float64],
    codec_variance: float,
    weight: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    *,
    samples: float,
    batch: float,
    weight_decay: float = 0.0,
) -> FilteredRatio:
    """r_W = tr(W S_q) / tr(W S_g): a codec's noise over the gradient's, each filtered by curvature.

    X holds m gradients at the same weights in its rows. Their covariance times the samples of one is the empirical
    Fisher, close to the Gauss-Newton matrix for losses that are likelihoods. Three small sums over the elements are
    enough, and tensors and chunks add up; see :func:`bounded_ratio`.

    Args:
        gram: (m, m) X X^T, m at least 5.
        codec_gram: (m, m) X S_q X^T with S_q the codec's covariance: diag(variance of each element), or e e^T averaged
            over drawn errors e.
        codec_variance: tr S_q, the codec's variance over all elements.
        weight: w_T(h) for an array of curvatures, e.g. of :func:`impulse_weight`.
        samples: that each of the m gradients is the mean of.
        batch: samples of the gradient that is encoded.
        weight_decay: L2, added to the curvature of every direction.

    Returns:
        The ratio between two bounds; NaN if the gradients do not differ.

    Raises:
        ValueError: fewer than five gradients.
    """
    if len(gram) < FEWEST + 1:
        raise ValueError(f"curvature needs at least {FEWEST + 1} gradients at the same weights, not {len(gram)}")
    # Orthonormal contrasts of m gradients are m - 1 independent samples of their noise.
    contrasts = contrasts_of(np.ones((1, len(gram)))) * math.sqrt(samples / batch)
    noise, codec = (contrasts @ matrix @ contrasts.T for matrix in (gram, codec_gram))
    if np.trace(noise) * batch / samples <= _ROUNDING * np.trace(gram):
        return FilteredRatio(math.nan, math.nan, math.nan)
    return bounded_ratio(noise, codec, codec_variance, weight, batch=batch, weight_decay=weight_decay)


def contrasts_of(design: NDArray[np.float64]) -> NDArray[np.float64]:
    """Orthonormal rows, float64[n - rank, n], that are orthogonal to every row of float64[m, n]."""
    _, values, rows = np.linalg.svd(design)
    zero = np.finfo(np.float64).eps * max(design.shape) * values.max(initial=0)
    found: NDArray[np.float64] = rows[int((values > zero).sum()) :]
    return found


def bounded_ratio(
    gram: NDArray[np.float64],
    codec_gram: NDArray[np.float64],
    codec_variance: float,
    weight: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    *,
    batch: float,
    weight_decay: float = 0.0,
) -> FilteredRatio:
    """r_W from few samples of the noise, whose own directions would all look too steep.

    n samples d of covariance F / B show a curvature that is too large by about tr(F) / n in each of their directions.
    Sums over different samples have no such bias (Kong and Valiant 2017): tr(F S_q) is the mean of B d' S_q d,
    tr(F F S_q) that of B^2 (d' S_q e) (e' d), and so on. From the moments 0 to 3 of curvature follow two quadratures of
    tr(W S_q), by Gauss and Radau, one above and one below it while the moments are exact; the same for the gradient.

    Args:
        gram: (n, n) D D^T, n at least 4.
        codec_gram: (n, n) D S_q D^T.
        codec_variance: tr S_q.
        weight: w_T(h) for an array of curvatures, e.g. of :func:`~gtrace.noise.impulse_weight`.
        batch: samples of the gradient that is encoded.
        weight_decay: L2, added to the curvature of every direction.

    Returns:
        The ratio whose equivalent batch is the geometric mean of those of both quadratures, which are its ends; NaN if
        the samples show no curvature.

    Raises:
        ValueError: fewer than four samples.
    """
    of_codec = moments(gram, codec_gram, codec_variance, batch)
    of_noise = noise_moments(gram, batch)
    return between(*(filtered_costs(one, weight, weight_decay) for one in (of_codec, of_noise)))


def between(codec: tuple[float, float], noise: tuple[float, float]) -> FilteredRatio:
    """The ratio of a codec's costs to those of the gradient's noise, each by both quadratures."""
    ends = sorted(own / other if other > 0 else math.nan for own, other in zip(codec, noise, strict=True))
    return FilteredRatio(math.sqrt(math.prod(1 + end for end in ends)) - 1, *ends)


def moments(
    gram: NDArray[np.float64], codec_gram: NDArray[np.float64], codec_variance: float, batch: float
) -> NDArray[np.float64]:
    """float64[4]: tr(F^k S_q) for k from 0 to 3, without bias; arguments as in :func:`bounded_ratio`.

    Raises:
        ValueError: fewer than four samples.
    """
    n = len(gram)
    if n < FEWEST:
        raise ValueError(f"moments of curvature need at least {FEWEST} samples of noise, not {n}")
    g, q = (matrix - np.diag(np.diag(matrix)) for matrix in (gram, codec_gram))
    two, three = n * (n - 1), n * (n - 1) * (n - 2)
    found = [codec_variance, np.trace(codec_gram) / n, (q * g).sum() / two, (q * (g @ g)).sum() / three]
    return np.array(batch ** np.arange(4.0) * found)


def noise_moments(gram: NDArray[np.float64], batch: float) -> NDArray[np.float64]:
    """float64[4]: tr(F^k S_g) for k from 0 to 3, without bias; arguments as in :func:`bounded_ratio`."""
    n = len(gram)
    g = gram - np.diag(np.diag(gram))
    squares = g @ g
    # Of all closed walks of four steps, those over four different samples.
    walks = (squares**2).sum() - 2 * (np.diag(squares) ** 2).sum() + (g**4).sum()
    two, three, four = n * (n - 1), n * (n - 1) * (n - 2), n * (n - 1) * (n - 2) * (n - 3)
    found = [np.trace(gram) / n, (g * g).sum() / two, (g * squares).sum() / three, walks / four]
    return np.array(batch ** np.arange(4.0) * found)


def filtered_costs(
    moments: NDArray[np.float64], weight: Callable[[NDArray[np.float64]], NDArray[np.float64]], weight_decay: float
) -> tuple[float, float]:
    """Integrals of w from moments 0 to 3: with a node at no curvature, and without; NaN without curvature."""
    if not moments[1] > 0:
        return math.nan, math.nan
    radau, gauss = (
        float(np.dot(weight(np.array(nodes) + weight_decay), shares_of(moments, nodes)))
        for nodes in ((0.0, _steepest(moments)), gauss_nodes(moments))
    )
    return radau, gauss


def _steepest(moments: NDArray[np.float64]) -> float:
    """The curvature whose share, beside no curvature, has moments 1 and 2; all of it if few samples deny the rest."""
    m0, m1, m2, _ = moments.tolist()
    return float(max(m2 / m1, m1 / m0))


def shares_of(moments: NDArray[np.float64], nodes: tuple[float, float]) -> NDArray[np.float64]:
    """How much of moment 0 is at each of two nodes, if moment 1 is right; float64[..., 4] gives float64[..., 2]."""
    low, high = nodes
    steep = (moments[..., 1] - low * moments[..., 0]) / (high - low)
    return np.stack([moments[..., 0] - steep, steep], axis=-1)


def gauss_nodes(moments: NDArray[np.float64]) -> tuple[float, float]:
    """The two curvatures that moments 0 to 3 are those of; the first is 0 if there are no such two."""
    m0, m1, m2, m3 = moments.tolist()
    spread = m0 * m2 - m1**2
    if spread > 0:
        # The nodes are the roots of the second orthogonal polynomial h^2 + c1 h + c0.
        c0, c1 = (m1 * m3 - m2**2) / spread, (m1 * m2 - m0 * m3) / spread
        root = c1**2 - 4 * c0
        if root > 0 and c0 >= 0 and c1 <= 0:
            return (-c1 - math.sqrt(root)) / 2, (-c1 + math.sqrt(root)) / 2
    return 0.0, _steepest(moments)
