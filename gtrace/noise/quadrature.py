"""Cost of noise from moments of curvature, for a few samples of the gradient's noise."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from gtrace.noise.filtering import FilteredRatio

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

#: Products of this many different samples are needed.
_FEWEST = 4


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
    n = len(gram)
    if n < _FEWEST:
        raise ValueError(f"moments of curvature need at least {_FEWEST} samples of noise, not {n}")
    g, q = (matrix - np.diag(np.diag(matrix)) for matrix in (gram, codec_gram))
    two, three, four = n * (n - 1), n * (n - 1) * (n - 2), n * (n - 1) * (n - 2) * (n - 3)
    squares = g @ g
    # Of all closed walks of four steps, those over four different samples.
    walks = (squares**2).sum() - 2 * (np.diag(squares) ** 2).sum() + (g**4).sum()
    powers = batch ** np.arange(4.0)
    of_codec = powers * [codec_variance, np.trace(codec_gram) / n, (q * g).sum() / two, (q * squares).sum() / three]
    of_noise = powers * [np.trace(gram) / n, (g * g).sum() / two, (g * squares).sum() / three, walks / four]
    costs = [_quadratures(moments, weight, weight_decay) for moments in (of_codec, of_noise)]
    ends = sorted(own / noise if noise > 0 else math.nan for own, noise in zip(*costs, strict=True))
    return FilteredRatio(math.sqrt(math.prod(1 + end for end in ends)) - 1, *ends)


def _quadratures(
    moments: NDArray[np.float64], weight: Callable[[NDArray[np.float64]], NDArray[np.float64]], weight_decay: float
) -> tuple[float, float]:
    """Integrals of w from moments 0 to 3: with a node at no curvature, and without; the first twice if they fail."""
    m0, m1, m2, m3 = moments
    if not (m1 > 0 and m2 > 0):
        return math.nan, math.nan

    def integral(nodes: list[float], shares: list[float]) -> float:
        return float(np.dot(weight(np.array(nodes) + weight_decay), shares))

    steep = m1**2 / m2
    radau = integral([0.0, m2 / m1], [m0 - steep, steep])
    spread = m0 * m2 - m1**2
    if spread <= 0:
        return radau, radau
    # The nodes are the roots of the second orthogonal polynomial h^2 + c1 h + c0.
    c0, c1 = (m1 * m3 - m2**2) / spread, (m1 * m2 - m0 * m3) / spread
    root = c1**2 - 4 * c0
    if root <= 0 or c0 < 0 or c1 > 0:
        return radau, radau
    low, high = (-c1 - math.sqrt(root)) / 2, (-c1 + math.sqrt(root)) / 2
    share = (m0 * high - m1) / (high - low)
    return radau, integral([low, high], [share, m0 - share])
