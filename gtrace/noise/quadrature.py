"""Cost of noise from moments of curvature, for a few samples of the gradient's noise."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

_ROUNDING = 1e-12
#: Products of this many different samples are needed.
FEWEST = 4


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
