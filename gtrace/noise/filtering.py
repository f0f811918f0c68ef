"""What noise in gradients has cost after some steps: noise filtered by curvature over a horizon."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy import linalg, stats

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import ArrayLike, NDArray

_ROUNDING = 1e-12
#: directions of noise that curvature can be estimated from
_FEWEST = 3


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
        low: lower end of the 95% interval over gradients.
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
    Fisher, close to the Gauss-Newton matrix for losses that are likelihoods; its eigenvectors are X^T c with c from the
    Gram matrix X X^T, so three small sums over the elements are enough, and tensors and chunks add up.

    Args:
        gram: (m, m) X X^T, m at least 4.
        codec_gram: (m, m) X S_q X^T with S_q the codec's covariance: diag(variance of each element), or e e^T averaged
            over drawn errors e.
        codec_variance: tr S_q, the codec's variance over all elements.
        weight: w_T(h) for an array of curvatures, e.g. of :func:`impulse_weight`.
        samples: that each of the m gradients is the mean of.
        batch: samples of the gradient that is encoded.
        weight_decay: L2, added to the curvature of every direction.

    Returns:
        The ratio with its interval over the m gradients; NaN if the gradients do not differ.

    Raises:
        ValueError: fewer than four gradients.
    """
    if len(gram) < _FEWEST + 1:
        raise ValueError(f"curvature needs at least {_FEWEST + 1} gradients at the same weights, not {len(gram)}")
    # Orthonormal contrasts of m gradients are m - 1 independent samples of their noise.
    contrasts = linalg.null_space(np.ones((1, len(gram)))).T * math.sqrt(samples / batch)
    noise, codec = (contrasts @ matrix @ contrasts.T for matrix in (gram, codec_gram))
    if np.trace(noise) * batch / samples <= _ROUNDING * np.trace(gram):
        return FilteredRatio(math.nan, math.nan, math.nan)
    return ratio_along(noise, codec, codec_variance, weight, batch=batch, weight_decay=weight_decay)


def ratio_along(
    gram: NDArray[np.float64],
    codec_gram: NDArray[np.float64],
    codec_variance: float,
    weight: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    *,
    batch: float,
    weight_decay: float = 0.0,
) -> FilteredRatio:
    """r_W from samples of the noise itself: rows of D with expectation zero and the covariance of the gradient.

    The curvature along a direction is estimated from the other directions, for the gradient's noise and the codec's
    alike: a sample of noise always lies in the space that it spans itself, and would look too expensive there.

    Args:
        gram: (n, n) D D^T, n at least 3.
        codec_gram: (n, n) D S_q D^T.
        codec_variance: as in :func:`filtered_ratio`.
        weight: as in :func:`filtered_ratio`.
        batch: samples of the gradient that is encoded.
        weight_decay: L2, added to the curvature of every direction.

    Returns:
        The ratio with its interval over the n directions; NaN without noise.

    Raises:
        ValueError: fewer than three directions.
    """
    n = len(gram)
    if n < _FEWEST:
        raise ValueError(f"curvature needs at least {_FEWEST} directions of noise, not {n}")
    flat = float(weight(np.array([weight_decay]))[0])
    costs = np.zeros((n, 2))
    for own in range(n):
        rest = np.delete(np.arange(n), own)
        curvature, vectors = principal(gram[np.ix_(rest, rest)], batch)
        extra = weight(curvature + weight_decay) - flat
        along = np.einsum("ij,ik,kj->j", vectors, codec_gram[np.ix_(rest, rest)], vectors)
        costs[own] = (
            extra @ along + flat * codec_variance,
            extra @ (gram[own, rest] @ vectors) ** 2 + flat * gram[own, own],
        )
    codec, noise = costs.mean(axis=0)
    if not noise > 0:
        return FilteredRatio(math.nan, math.nan, math.nan)
    ratio = codec / noise
    if not ratio > 0:
        return FilteredRatio(max(ratio, 0.0), 0.0, 0.0)
    spread = float(np.std(costs @ [1, -ratio], ddof=1)) / math.sqrt(n) / codec
    width = math.exp(float(stats.t.ppf(0.975, n - 1)) * spread)
    return FilteredRatio(float(ratio), float(ratio / width), float(ratio * width))


def principal(gram: NDArray[np.float64], batch: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Curvatures and directions of the empirical Fisher of n samples of noise.

    Args:
        gram: (n, n) D D^T.
        batch: samples behind the gradient that has this noise.

    Returns:
        (k,) curvatures, and (n, k) coefficients C: the eigenvectors are D^T C.
    """
    values, vectors = np.linalg.eigh(gram)
    there = values > _ROUNDING * max(float(values[-1]), 0.0)
    return batch * values[there] / len(gram), vectors[:, there] / np.sqrt(values[there])
