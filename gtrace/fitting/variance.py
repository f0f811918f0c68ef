"""The expected variance of a grid under a law: what every fit of levels minimizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gtrace.buckets import as_levels
from gtrace.errors import UsageError
from gtrace.fitting.laws import MixtureLaw, check_law, total_weight
from gtrace.sketch import MomentSketch

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from gtrace.fitting.laws import LawLike


def expected_variance(
    law: LawLike, levels: ArrayLike, zero: bool = True, weighted: bool = True, *, symmetric: bool = True
) -> float:
    """E (b - r)(r - a), with a and b the levels around r: the variance of stochastic rounding, in units of r squared.

    Args:
        law: a sketch of the values, or a mixture; either is normalized to weight 1.
        levels: ascending magnitudes; they reach up to the largest value of the law. With ``symmetric=False``
            signed levels over the whole support of a mixture.
        zero: whether 0 is a level. Without, the grid is mirrored at 0, and below the first level l the variance
            is l^2 - r^2, for exact zeros too.
        weighted: weigh the values of a sketch by the squared norms of their buckets. With norm l2 and no tail the
            result times the number of values per bucket is then the error relative to the squared norm of
            the gradient. A mixture has weights of its own.
        symmetric: whether levels are magnitudes.

    Returns:
        the mean; 0 for a sketch without any weight.

    Raises:
        UsageError: levels that are not ascending magnitudes, do not fit ``zero`` or do not cover the law.
    """
    check_law(law, symmetric=symmetric)
    if isinstance(law, MomentSketch):
        total = total_weight(law, weighted=weighted)
        error, plain, _, _ = law.expect(levels, zero=zero)
        return ((error - law.clip_error) if weighted else plain) / total if total > 0 else 0.0
    low, high = law.support
    if symmetric:
        grid = as_levels(levels, zero=zero)
        low, high = 0.0, max(high, -low)
    else:
        grid = np.asarray(levels, dtype=np.float64).reshape(-1)
        if grid.size < 2 or not np.isfinite(grid).all() or (np.diff(grid) <= 0).any():
            raise UsageError("levels: give at least two ascending finite numbers")
    covered = grid[-1] >= high and (symmetric or grid[0] <= low)
    if not covered:
        raise UsageError(f"levels: {grid[0]:g} to {grid[-1]:g} do not cover the law's support")
    return MixtureLaw(law, symmetric=symmetric).gradient(grid, symmetric and not zero)[0]
