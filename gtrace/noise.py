"""Gradient noise: the variance between gradients of several batches, estimated without bias from the gradients.

Of n independent gradients g_1, ..., g_n with the same expectation, two numbers are enough: S = sum ||g_i||^2 and
T = ||sum g_i||^2. Products of different gradients have the expectation ||E g||^2, products of one with itself have
||E g||^2 + tr Cov(g), so

    ||E g||^2  is estimated by  (T - S) / (n (n - 1)),
    tr Cov(g)  is estimated by  (S - T / n) / (n - 1),

both without bias, whatever the law of the gradients (McCandlish et al. 2018, appendix A.1, for batches of two sizes;
n batches of one size here). Over tensors and steps these add up, and a ratio is one of sums.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy import stats

from gtrace.kernels.norms import power_sum
from gtrace.metrics import Blocks, ratio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import ArrayLike, NDArray

_ROUNDING = 1e-12


class Moments(NamedTuple):
    """Second moments of n gradients.

    Attributes:
        number: n.
        norm2: S, the sum of their squared norms.
        sum_norm2: T, the squared norm of their sum.
    """

    number: int
    norm2: float
    sum_norm2: float


class Noise(NamedTuple):
    """Gradient noise of one tensor at one step, in squared gradient units.

    Attributes:
        variance: estimate of tr Cov of the gradient that a codec gets to see; never negative.
        signal: estimate of the squared norm of its expectation; may be negative if that is small.
        freedom: number of independent differences behind the estimates.
    """

    variance: float
    signal: float
    freedom: int


def moments(pieces: Iterable[Sequence[NDArray[np.float32]]], number: int) -> Moments:
    """Second moments of ``number`` gradients that arrive piece by piece.

    Args:
        pieces: the same piece of every gradient, ``number`` float32 arrays of one length each.
        number: of gradients, at least 1.
    """
    norm2 = sum_norm2 = 0.0
    for piece in pieces:
        total = np.zeros(piece[0].size)
        for values in piece:
            norm2 += float(power_sum(values, 2))
            total += values
        sum_norm2 += float(total @ total)
    return Moments(number, norm2, sum_norm2)


def noise_between(found: Moments) -> Noise:
    """Noise of one of the gradients, which are those of a codec: one per worker, or several batches of one size.

    Raises:
        ValueError: fewer than two gradients.
    """
    n, norm2, sum_norm2 = found
    if n < 2:
        raise ValueError(f"noise cannot be estimated from {n} gradients; give at least 2")
    # By the inequality of Cauchy and Schwarz S >= T / n; rounding may say otherwise.
    return Noise(max(0.0, norm2 - sum_norm2 / n) / (n - 1), (sum_norm2 - norm2) / (n * (n - 1)), n - 1)


def noise_of_sum(found: Moments, energy: float | None = None) -> Noise:
    """Noise of the sum of the gradients: what a codec gets after accumulation of micro-batches.

    A loss that was divided by n makes them n times smaller and their sum the mean; either way the sum is what counts.

    Args:
        found: of the micro-batches.
        energy: squared norm of the codec's input, if the sum was scaled afterwards, e.g. by clipping;
            None for the sum itself.

    Raises:
        ValueError: fewer than two gradients.
    """
    one = noise_between(found)
    scale = 1.0 if energy is None or not found.sum_norm2 else energy / found.sum_norm2
    return Noise(found.number * one.variance * scale, found.number**2 * one.signal * scale, one.freedom)


def noise_of_steps(pieces: Iterable[Sequence[NDArray[np.float32]]]) -> Noise:
    """Noise of one gradient of three at consecutive steps, if nothing better is known.

    The second difference (g_1 - 2 g_2 + g_3) / sqrt(6) has the covariance of the noise, and a drift of the expected
    gradient that is linear over the three steps drops out. What is left of a drift counts as noise, so the estimate
    errs upwards; batches drawn without replacement make it smaller, as they make the noise.

    Args:
        pieces: the same piece of each of the three gradients, one after the other, float32 arrays of one length each.
            How long they are does not matter to the last bit.
    """
    blocks = Blocks()
    sums = np.zeros(3)
    for piece in pieces:
        for block in blocks.add(*piece):
            sums += _of_three(*block)
    for block in blocks.rest():
        sums += _of_three(*block)
    second, norm2, sum_norm2 = sums.tolist()
    return Noise(second / 6, (sum_norm2 - norm2) / 6, 1)


def _of_three(*block: NDArray[np.float32]) -> tuple[float, float, float]:
    """Squared norms of a block's second difference, of the three, and of their sum."""
    first, middle, last = (values.astype(np.float64) for values in block)
    ends = first + last
    second, total = ends - 2.0 * middle, ends + middle
    return float(second @ second), sum(float(power_sum(values, 2)) for values in block), float(total @ total)


def pooled(several: Sequence[Noise]) -> Noise | None:
    """The mean of several estimates of the same noise, weighted by degrees of freedom; None without any."""
    freedom = sum(noise.freedom for noise in several)
    if not freedom:
        return None
    variance = sum(noise.variance * noise.freedom for noise in several) / freedom
    return Noise(variance, sum(noise.signal * noise.freedom for noise in several) / freedom, freedom)


def added(parts: Sequence[Noise | None]) -> Noise | None:
    """The noise of concatenated tensors; None if one of them is unknown, or without any."""
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    variance, signal = sum(part.variance for part in known), sum(part.signal for part in known)
    return Noise(variance, signal, min(part.freedom for part in known))


def averaged(noise: Noise, workers: int) -> Noise:
    """The noise of the average over ``workers`` that each have an independent gradient of this noise."""
    return noise._replace(variance=noise.variance / workers)


def noise_ratio(error: Any, bias: float, noise: Noise) -> Any:
    """Variance that a codec adds over the variance that is there; averaging over workers shrinks both.

    Args:
        error: E ||Q(g) - g||^2 of a codec, or float64[k] of several.
        bias: ||E Q(g) - g||, which averaging does not shrink and which does not count here.
        noise: of the gradient that was encoded.

    Returns:
        NaN if there is no noise to relate to.
    """
    variance = error - bias**2
    # What is left of a difference by rounding: all of the error of a codec without randomness is bias.
    return ratio(np.where(variance > _ROUNDING * error, variance, 0.0)[()], noise.variance)


def equivalent_batch(batch: float, ratio: float) -> float:
    """The batch size whose gradients in full precision are as noisy as compressed ones of ``batch`` samples.

    The covariance of a gradient falls as one over the batch size, and an unbiased codec adds ``ratio`` times as much.
    """
    return batch / (1.0 + ratio)


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
    """r_W = tr(W G_q) / tr(W G_g): a codec's noise over the gradient's, each filtered by curvature.

    X holds m gradients at the same weights in its rows. Their covariance times the samples of one is the empirical
    Fisher, close to the Gauss-Newton matrix for losses that are likelihoods; its eigenvectors are X^T c with c from the
    Gram matrix X X^T, so three small sums over the elements are enough, and tensors and chunks add up.

    Args:
        gram: (m, m) X X^T, m at least 3.
        codec_gram: (m, m) X S X^T with S the codec's covariance: diag(variance of each element), or e e^T averaged
            over drawn errors e.
        codec_variance: tr S, the codec's variance over all elements.
        weight: w_T(h) for an array of curvatures, e.g. of :func:`impulse_weight`.
        samples: that each of the m gradients is the mean of.
        batch: samples of the gradient that is encoded.
        weight_decay: L2, added to the curvature of every direction.

    Returns:
        The ratio with a jackknife interval over the m gradients; NaN if the gradients do not differ.

    Raises:
        ValueError: fewer than three gradients.
    """
    m = len(gram)
    if m < 3:
        raise ValueError(f"curvature needs at least 3 gradients at the same weights, not {m}")

    def ratio(rows: NDArray[np.int64]) -> float:
        centered = np.eye(rows.size) - 1 / rows.size
        k, q = (centered @ matrix[np.ix_(rows, rows)] @ centered for matrix in (gram, codec_gram))
        values, vectors = np.linalg.eigh(k)
        there = values > _ROUNDING * max(values[-1], 0.0)
        values, vectors = values[there], vectors[:, there]
        if not values.size:
            return math.nan
        curvature = samples * values / (rows.size - 1)
        along = np.einsum("ij,ik,kj->j", vectors, q, vectors) / values
        flat = float(weight(np.array([weight_decay]))[0])
        filtered = weight(curvature + weight_decay)
        return float(((filtered - flat) @ along + flat * codec_variance) / (filtered @ curvature / batch))

    everything = np.arange(m)
    estimate = ratio(everything)
    without = np.log([ratio(np.delete(everything, k)) for k in range(m)])
    spread = math.sqrt((m - 1) / m * float(((without - without.mean()) ** 2).sum()))
    width = math.exp(float(stats.t.ppf(0.975, m - 1)) * spread)
    return FilteredRatio(estimate, estimate / width, estimate * width)
