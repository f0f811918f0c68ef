"""TernGrad: three values, scaled by the bucket's max norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from gtrace.codecs.base import parameter
from gtrace.codecs.levels import LevelCodec
from gtrace.codecs.registry import register

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.types import Norm, State

_LEVELS = np.array([0.0, 1.0], np.float32)


@register
@dataclass(frozen=True)
class TernGrad(LevelCodec):
    """Levels {0, 1} times the largest magnitude, whatever the bits."""

    name: ClassVar[str] = "terngrad"
    summary: ClassVar[str] = "levels 0 and 1, buckets scaled by their largest magnitude"
    formula: ClassVar[str] = "Q(v) = max|v_b| sign(v) b, b = 1 with probability |v| / max|v_b|"
    paper: ClassVar[str] = "Wen et al., TernGrad: Ternary Gradients to Reduce Communication, 2017"
    corrections: ClassVar[tuple[str, ...]] = (
        "clipping comes before the norm and is off by default; clip=2.5 is the paper's setting",
    )

    norm: Norm = parameter("linf", "what a bucket is divided by", choices=("l2", "linf", "l1"))

    def levels(self, state: State) -> NDArray[np.float32]:
        """0 and 1."""
        del state
        return _LEVELS
