"""Measures of how a decoded gradient differs from the exact one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from gtrace.buckets import as_values
from gtrace.errors import UsageError
from gtrace.kernels import compare as _compare
from gtrace.kernels import norms as _norms

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True)
class Comparison:
    """One decoded tensor against the exact one. NaN where a ratio has no denominator.

    Attributes:
        squared_error: ||q - g||^2, in squared gradient units.
        relative_variance: squared_error / ||g||^2.
        mean_abs_error: mean |q - g|, in gradient units.
        mean_relative_error: mean |q - g| / |g| over the non-zero g.
        cosine: of the angle between q and g.
        snr_db: 10 log10(||g||^2 / squared_error); infinite without error.
        w1: Wasserstein-1 distance of the two value distributions, mean |sort(q) - sort(g)|, in gradient units;
            at most mean_abs_error, and blind to permutations.
        w1_normalized: w1 / mean |g|.
        w1_mcgq: Wasserstein-1 of g / ||g||_1 and q / ||q||_1.
        sparsity: fraction of q that is exactly zero.
    """

    squared_error: float
    relative_variance: float
    mean_abs_error: float
    mean_relative_error: float
    cosine: float
    snr_db: float
    w1: float
    w1_normalized: float
    w1_mcgq: float
    sparsity: float


class Reference:
    """An exact gradient, prepared once for comparisons with many decoded ones.

    Args:
        values: finite real numbers, any shape, taken as float32.
    """

    def __init__(self, values: ArrayLike) -> None:
        self.values = as_values(values)
        self.energy = float(_norms.power_sum(self.values, 2))
        self.norm1 = float(_norms.power_sum(self.values, 1))

    @property
    def size(self) -> int:
        """Number of values."""
        return self.values.size

    @property
    def mean_abs(self) -> float:
        """Mean |g|, in gradient units."""
        return self.norm1 / max(1, self.size)

    @cached_property
    def _sorted(self) -> NDArray[np.float32]:
        return np.sort(self.values)

    def compare(self, decoded: ArrayLike) -> Comparison:
        """Measure a decoded tensor.

        Raises:
            UsageError: another number of elements.
        """
        q = as_values(decoded)
        if q.size != self.values.size:
            raise UsageError(f"compare: {q.size} decoded values against {self.values.size} exact ones")
        sums = np.empty(_compare.SUMS)
        _compare.compare(self.values, q, sums)
        error, absolute, relative, inner, energy, zeros, alive = sums.tolist()
        n = max(1, q.size)
        norm1 = float(_norms.power_sum(q, 1))
        ordered = np.sort(q)
        w1 = float(_compare.distance(self._sorted, ordered, 1.0, 1.0))
        w1_mcgq = math.nan
        if self.norm1 > 0 and norm1 > 0:
            w1_mcgq = float(_compare.distance(self._sorted, ordered, 1.0 / self.norm1, 1.0 / norm1))
        return Comparison(
            squared_error=error,
            relative_variance=ratio(error, self.energy),
            mean_abs_error=absolute / n,
            mean_relative_error=ratio(relative, alive),
            cosine=ratio(inner, math.sqrt(self.energy) * math.sqrt(energy)),
            snr_db=snr_db(self.energy, error),
            w1=w1,
            w1_normalized=ratio(w1, self.mean_abs),
            w1_mcgq=w1_mcgq,
            sparsity=zeros / n,
        )


def ratio(numerator: float, denominator: float) -> float:
    """numerator / denominator; NaN where the denominator is zero."""
    return numerator / denominator if denominator else math.nan


def snr_db(energy: float, error: float) -> float:
    """Signal-to-noise ratio in decibels; infinite without error, NaN without a signal."""
    if energy <= 0:
        return math.nan
    return 10 * math.log10(energy / error) if error > 0 else math.inf
