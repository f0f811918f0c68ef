"""The papers' laws: truncated normals with the mean and deviation of a gradient's buckets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gtrace.buckets import as_values, bucket_scales, clip_values
from gtrace.distributions import TruncatedNormalMixture
from gtrace.errors import UsageError
from gtrace.kernels import norms as _norms

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from gtrace.types import SummarySpec


def bucket_moments(values: ArrayLike, spec: SummarySpec) -> NDArray[np.float64]:
    """Mean, standard deviation and norm of every bucket of a tensor.

    Args:
        values: any shape; taken as float32 in C order. NaN and infinite values count as 0.
        spec: norm, bucket size, tail and clip, as for :meth:`gtrace.sketch.MomentSketch.from_spec`; an exact tail
            is left out.

    Returns:
        float64[buckets, 3]: mean and standard deviation (n - 1, 0 for a single value) of the bucket's signed
        values divided by its norm, and the norm, rounded to float32 as it is sent. Zeros for a zero bucket.

    Raises:
        UsageError: values that are not real numbers.
    """
    x = as_values(values)
    finite = np.isfinite(x)
    if not finite.all():
        x = np.where(finite, x, np.float32(0))
    if spec.clip is not None:
        x, _, _ = clip_values(x, spec.clip)
    bucket = spec.bucket_size or max(1, x.size)
    if spec.tail == "exact":
        x = x[: x.size - x.size % bucket]
    scales = bucket_scales(x, spec.norm, spec.bucket_size)
    out = np.empty((scales.size, 3))
    _norms.bucket_moments(x, bucket, scales, out)
    return out


def moment_mixture(
    moments: ArrayLike,
    components: int | None = 20,
    seed: int = 0,
    mean_only: bool = False,
    weighted: bool = True,
) -> TruncatedNormalMixture:
    """The law that ALQ and AMQ assume: normals truncated to [-1, 1] with the moments of a gradient's buckets.

    Args:
        moments: float64[buckets, 3] as :func:`bucket_moments` returns; of several tensors, one below the other.
        components: how many buckets, drawn uniformly, become a component each; None for all of them.
        seed: of the draw.
        mean_only: one component instead, with the mean of all means and of all deviations (the papers' ALQ-N and
            AMQ-N).
        weighted: weigh components by the squared norms of their buckets; else all alike.

    Returns:
        the mixture. Zero buckets have no law and are left out; where there are no others, a point mass at 0.

    Raises:
        UsageError: an array of another shape, or fewer than one component.
    """
    rows = np.asarray(moments, dtype=np.float64)
    if rows.ndim != 2 or rows.shape[1] != 3:
        raise UsageError(f"moments: an array of shape {rows.shape}; give mean, deviation and norm per bucket")
    if components is not None and components < 1:
        raise UsageError(f"components: {components} is below 1; give a positive number or none")
    rows = rows[rows[:, _norms.SCALE] > 0]
    if len(rows) == 0:
        return TruncatedNormalMixture([0.0], [0.0], [1.0])
    if mean_only:
        mean, sigma, _ = rows.mean(axis=0)
        return TruncatedNormalMixture([mean], [sigma], [1.0])
    if components is not None and components < len(rows):
        chosen = np.random.default_rng(seed).choice(len(rows), components, replace=False)
        rows = rows[np.sort(chosen)]
    scales = rows[:, _norms.SCALE] / rows[:, _norms.SCALE].max()
    weights = scales**2 if weighted else np.ones(len(rows))
    return TruncatedNormalMixture(rows[:, _norms.MEAN], rows[:, _norms.SIGMA], weights)
