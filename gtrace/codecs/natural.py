"""Natural compression: every value goes to one of the two powers of two around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from gtrace.codecs.base import parameter
from gtrace.codecs.levels import LevelCodec
from gtrace.codecs.registry import register
from gtrace.codecs.rounding import Rule

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.types import Norm, State

_LEVELS = np.concatenate([[0.0], 2.0 ** np.arange(-126, 128, dtype=np.float64), [np.finfo(np.float32).max]]).astype(
    np.float32
)


@register
@dataclass(frozen=True)
class Natural(LevelCodec):
    """Stochastic rounding to powers of two; no scale is sent."""

    name: ClassVar[str] = "natural"
    summary: ClassVar[str] = "values rounded to powers of two, no scale"
    formula: ClassVar[str] = "Q(v) = sign(v) 2^e or sign(v) 2^(e+1), 2^e <= |v| < 2^(e+1), rounded stochastically"
    paper: ClassVar[str] = "Horvath et al., Natural Compression for Distributed Deep Learning, 2022"
    corrections: ClassVar[tuple[str, ...]] = (
        "values above 2^127 are rounded between 2^127 and the largest float32, so nothing overflows",
        "values below 2^-126 are rounded between 0 and 2^-126",
    )

    norm: Norm = parameter("none", "no scale", choices=("none",))
    bucket_size: int | None = parameter(None, "without meaning here: no scale is taken", optional=True, maximum=0)

    def levels(self, state: State) -> NDArray[np.float32]:
        """0, the normal powers of two of float32, and its largest value: 256 magnitudes."""
        del state
        return _LEVELS

    def rule(self, state: State) -> Rule:
        """The cell of a power of two is in the value's exponent."""
        del state
        return Rule("powers")
