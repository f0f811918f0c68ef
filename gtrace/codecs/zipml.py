"""ZipML: provably optimal levels for the data, scaled by the bucket's max norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gtrace.codecs.adaptive import AdaptiveCodec
from gtrace.codecs.base import parameter
from gtrace.codecs.registry import register
from gtrace.distributions import TruncatedNormalMixture
from gtrace.fitting import alq_levels, optimal_levels

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from gtrace.sketch import MomentSketch
    from gtrace.types import Norm


@register
@dataclass(frozen=True)
class ZipMl(AdaptiveCodec):
    """Optimal levels by dynamic programming on the moment sketch."""

    name: ClassVar[str] = "zipml"
    summary: ClassVar[str] = "optimal levels for the data, buckets scaled by their largest magnitude"
    formula: ClassVar[str] = (
        "Q(v) = max|v_b| sign(v) l, rounded stochastically; l minimizes sum max|v_b|^2 (l+ - r)(r - l) exactly"
    )
    paper: ClassVar[str] = "Zhang et al., The ZipML Framework for Training Models with End-to-End Low Precision, 2017"
    corrections: ClassVar[tuple[str, ...]] = (
        "the dynamic program runs over the bins of a one-pass sketch, which makes it fit for every training step",
        "without 0 as a level, and under a parametric law, the best of several local searches stands in for it",
    )

    norm: Norm = parameter("linf", "what a bucket is divided by", choices=("l2", "linf", "l1"))

    def fit_to(self, law: MomentSketch | TruncatedNormalMixture) -> NDArray[np.float64]:
        """The optimum over all level sets."""
        if self.zero and not isinstance(law, TruncatedNormalMixture):
            return optimal_levels(law, 2 ** (self.bits - 1), method="sketch")
        return alq_levels(law, self.bits, self.zero, self.weighted, method="newton")
