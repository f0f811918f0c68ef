"""How much to prune each tensor so that, at a fixed mean sparsity, gradients keep the most of their direction."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from gtrace.distributions import LogNormal
from gtrace.errors import UsageError
from gtrace.fitting.empirical import EmpiricalMagnitudes
from gtrace.fitting.sparsity import log_energy_ratio, pruning_threshold, root, sparsity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from gtrace.sketch import MomentSketch

    #: a tensor, its sketch, a law, or (sigma, size) or (mu, sigma, size) of a law
    Prunable: TypeAlias = MomentSketch | LogNormal | tuple[float, ...] | ArrayLike


class _Magnitudes(Protocol):
    """What the dual needs of one tensor's magnitudes; slopes are ln(-2 d cosine / d sparsity)."""

    @property
    def zero_share(self) -> float: ...
    def sparsity(self, alpha: float) -> float: ...
    def threshold(self, sparsity: float) -> float: ...
    def log_slope(self, alpha: float) -> float: ...
    def at_slope(self, value: float) -> float: ...


class _Population:
    """Infinitely many lognormal magnitudes, in units of exp(mu): the slope does not depend on mu."""

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


def allocate_sparsity(tensors: Sequence[Prunable], s: float) -> NDArray[np.float64]:
    """The sparsity of each tensor that maximizes their mean cosine, at a fixed mean sparsity.

    Both means are weighted by size. The cosine of a stochastically pruned tensor with itself is a concave function of
    its sparsity, for any distribution, so there is one optimum, where all have the same slope. One root finding over
    that slope has inside it, for each tensor, another over its threshold.

    Args:
        tensors: sketches with norm "none", arrays of any shape, :class:`~gtrace.distributions.LogNormal` laws, or
            tuples (sigma, size) and (mu, sigma, size) of such laws. Laws stand for infinitely many values and count by
            their size; where none has a size all count alike.
        s: the mean sparsity, in [0, 1), zeros that are there included.

    Returns:
        float64[n]. A tensor is never asked for fewer zeros than it has; where there are more than ``s`` already these
        fractions are returned, and a tensor that is empty or all zeros has 1.

    Raises:
        UsageError: s outside [0, 1), no tensors, or laws with and without a size.

    >>> [round(float(v), 4) for v in allocate_sparsity([(1.0, 400), (1.5, 200), (2.0, 100), (2.5, 50)], 0.7)]
    [0.5726, 0.7813, 0.9111, 0.9718]
    """
    if not 0.0 <= s < 1.0:
        raise UsageError(f"sparsity: {s:g} is out of range; it must be at least 0 and below 1")
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

    def at(slope: float) -> NDArray[np.float64]:
        for k in live:
            out[k] = laws[k].sparsity(laws[k].at_slope(slope))
        return out

    alike = [laws[k].log_slope(laws[k].threshold(s)) for k in live if out[k] < s]
    low, high = min(alike) - 1e-9, max(alike) + 1e-9
    while float(weights @ at(low)) > s:
        low -= 4.0
    while float(weights @ at(high)) < s:
        high += 4.0
    return at(root(lambda slope: float(weights @ at(slope)) - s, low, high))


def _prepared(tensor: Prunable) -> tuple[_Magnitudes, float]:
    if isinstance(tensor, tuple) and len(tensor) in (2, 3):
        mu, sigma, size = (0.0, *tensor)[-3:]
        tensor = LogNormal(float(mu), float(sigma), int(size))
    if isinstance(tensor, LogNormal):
        return _Population(tensor.sigma), tensor.size
    found = EmpiricalMagnitudes(tensor)
    return found, found.size
