"""Values and levels as arrays, checked; buckets of values and their scales."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from gtrace.errors import UsageError
from gtrace.kernels import moments as _moments
from gtrace.kernels import norms as _norms
from gtrace.kernels import sketching as _sketching

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

_NORM_CODES: dict[str, int] = {
    "l2": _norms.L2,
    "linf": _norms.LINF,
    "l1": _norms.L1,
    "none": _norms.NONE,
}


def as_values(values: ArrayLike) -> NDArray[np.float32]:
    """Any array of real numbers as contiguous 1-D float32; no copy when it is that already.

    Raises:
        UsageError: complex or non-numeric values.
    """
    array = np.asarray(values)
    if array.dtype.kind not in "fiub":
        raise UsageError(f"values of dtype {array.dtype} cannot be compressed; pass real numbers")
    return np.ascontiguousarray(array, dtype=np.float32).reshape(-1)


def as_levels(levels: ArrayLike, *, zero: bool) -> NDArray[np.float64]:
    """Check a set of magnitudes: finite, ascending, not negative, 0 first exactly when ``zero``.

    Raises:
        UsageError: they are not.
    """
    grid = np.ascontiguousarray(levels, dtype=np.float64).reshape(-1)
    if _sketching.are_levels(grid) and (grid[0] == 0) == zero:
        return grid
    if grid.size == 0 or not np.isfinite(grid).all():
        raise UsageError("levels: give at least one finite magnitude")
    if (np.diff(grid) <= 0).any() or grid[0] < 0:
        raise UsageError("levels: magnitudes must be ascending, distinct and not negative")
    if zero and grid[0] != 0:
        raise UsageError(f"levels: with zero=True the first level must be 0, not {grid[0]:g}")
    if not zero and grid[0] == 0:
        raise UsageError("levels: with zero=False 0 is no level; drop it or pass zero=True")
    return grid


def bucket_scales(x: NDArray[np.float32], norm: str, bucket_size: int | None) -> NDArray[np.float32]:
    """float32 norms of the buckets of a finite float32[n]; none for n = 0, and one for bucket_size None."""
    bucket = bucket_size or max(1, x.size)
    scales = np.empty(-(-x.size // bucket), np.float32)
    _norms.bucket_scales(x, bucket, _NORM_CODES[norm], scales)
    return scales


def whole_scale(norm: str, norm1: float, energy: float, largest: float) -> NDArray[np.float32]:
    """float32[1], the norm of one bucket that holds a whole tensor, from its sums; as :func:`bucket_scales` has it."""
    value = {"l2": math.sqrt(energy), "linf": largest, "l1": norm1, "none": 1.0}[norm]
    return np.array([min(value, _norms.FLOAT32_MAX)], np.float32)


def bucket_moments(x: NDArray[np.float32], bucket: int, scales: NDArray[np.float32]) -> NDArray[np.float64]:
    """float64[buckets, 3]: mean and standard deviation of each bucket's values over its norm, and the norm."""
    out = np.empty((scales.size, 3))
    _moments.bucket_moments(x, bucket, scales, out)
    return out


def dead_values(scales: NDArray[np.float32], bucket: int, size: int) -> int:
    """How many of ``size`` values lie in buckets whose norm is zero."""
    zero = np.flatnonzero(scales == 0)
    return int(np.sum(np.minimum((zero + 1) * bucket, size) - zero * bucket))


def clip_values(x: NDArray[np.float32], sigmas: float) -> tuple[NDArray[np.float32], int, float]:
    """Clip a finite tensor at ``sigmas`` standard deviations (about 0, the deviation about its mean).

    Returns:
        the clipped float32[n], how many values changed, and the sum of the squared changes.
    """
    if x.size == 0:
        return x, 0, 0.0
    limit = min(sigmas * float(np.std(x, dtype=np.float64)), _norms.FLOAT32_MAX)
    out = np.clip(x, np.float32(-limit), np.float32(limit))
    change = out.astype(np.float64) - x
    return out, int(np.count_nonzero(change)), float(change @ change)
