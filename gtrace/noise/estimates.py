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

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gtrace.buckets import Blocks
from gtrace.kernels.noise import THREE, three_sums
from gtrace.kernels.norms import power_sum
from gtrace.metrics import ratio

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

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
    sums = np.zeros(THREE)
    for first, middle, last in Blocks.of(map(tuple, pieces)):
        three_sums(first, middle, last, sums)
    return noise_of_sums(sums)


def noise_of_sums(sums: NDArray[np.float64]) -> Noise:
    """:func:`noise_of_steps` from the sums of :func:`gtrace.kernels.noise.three_sums`, float64[3]."""
    second, norm2, sum_norm2 = sums.tolist()
    return Noise(second / 6, (sum_norm2 - norm2) / 6, 1)


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
