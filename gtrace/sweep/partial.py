"""The sketch of a tensor that arrives in parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gtrace.buckets import Bins
from gtrace.kernels.compare import weighted_sums
from gtrace.kernels.norms import power_sum
from gtrace.sketch import MomentSketch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.types import SummarySpec


class PartialSketch:
    """The sketch of a finite tensor that arrives in parts, to the last bit that of the tensor as a whole.

    ``spec`` asks for no clipping and no moments of buckets, and parts, but for the last, are multiples of its bucket
    size; ``scale``, float32[1], is the norm of all values where the tensor is one bucket.
    """

    def __init__(self, spec: SummarySpec, scale: NDArray[np.float32] | None = None) -> None:
        self._spec = spec
        self._bins = Bins(spec.norm, spec.bucket_size, scale)
        self._exact = np.empty(0, np.float32)
        self._weights: NDArray[np.float64] | None = None

    def add(self, values: NDArray[np.float32], weights: NDArray[np.float64] | None = None) -> None:
        """The next part, finite float32[n]; with every part, or with none, its ``weights``, float64[n]."""
        rest = values.size % (self._spec.bucket_size or 1) if self._spec.tail == "exact" else 0
        split = values.size - rest
        self._bins.add(values[:split], None if weights is None else weights[:split])
        self._exact = values[split:].copy()
        self._weights = None if weights is None else weights[split:].copy()

    def finish(self) -> MomentSketch:
        """The sketch."""
        exact, weights = self._exact, self._weights
        return MomentSketch.of_bins(
            self._spec,
            self._bins,
            exact=exact.size,
            exact_energy=float(power_sum(exact, 2)) if weights is None else weighted_sums(exact, exact, weights)[1],
            exact_zeros=exact.size - int(np.count_nonzero(exact)),
            weighted=weights is not None,
        )
