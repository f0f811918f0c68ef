"""AMQ: levels at powers of a multiplier that is fitted to the gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from gtrace.codecs.adaptive import AdaptiveCodec
from gtrace.codecs.base import parameter
from gtrace.codecs.registry import register
from gtrace.errors import PayloadError
from gtrace.fitting import amq_levels, amq_multiplier

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.distributions import TruncatedNormalMixture
    from gtrace.sketch import MomentSketch
    from gtrace.types import State

_PAPER = "Faghri et al., Adaptive Gradient Quantization for Data-Parallel SGD, 2020"
_FORMULA = "Q(v) = ||v_b||_2 sign(v) l, l in {0, p^(m-2), ..., p, 1}; p minimizes E[(l+ - r)(r - l)]"
_CORRECTIONS = (
    (
        "the objective has several minima: a grid of starts and a bracketed search find the least, "
        "the paper's gradient steps (method=gd) can end at 2.6 times it"
    ),
    "the law of |r| is p(r) + p(-r); the paper's formula holds for even densities only",
    "the paper's grid has no 0: that is zero=false here",
)


@dataclass(frozen=True)
class MultiplierCodec(AdaptiveCodec):
    """Powers of a fitted p."""

    method: Literal["search", "gd"] = parameter(
        "search", "search for the least minimum, or the paper's gradient steps", choices=("search", "gd")
    )

    def fit_to(self, law: MomentSketch | TruncatedNormalMixture) -> NDArray[np.float64]:
        """The powers of the best multiplier, after a 0 where zero is a level."""
        p = amq_multiplier(law, self.bits, self.zero, self.weighted, method=self.method)
        return amq_levels(float(np.float32(p)), self.bits, self.zero)

    def fitted(self, state: State) -> NDArray[np.float32] | None:
        """The multiplier alone, the last level but one; none where 0 and 1 are all levels."""
        levels = super().fitted(state)
        return None if levels is None or (self.zero and self.bits == 2) else levels[-2:-1]

    def with_fitted(self, state: State, fitted: NDArray[np.float32]) -> State:
        """The powers of the multiplier."""
        if not (fitted.size == 1 and 0 < fitted[0] < 1):
            raise PayloadError("shared bytes hold no multiplier between 0 and 1")
        return super().with_fitted(state, self._grid(amq_levels(float(fitted[0]), self.bits, self.zero)))


@register
@dataclass(frozen=True)
class Amq(MultiplierCodec):
    """AMQ: buckets weighted by their squared norm."""

    name: ClassVar[str] = "amq"
    summary: ClassVar[str] = "levels at powers of a fitted multiplier, buckets weighted by squared norm"
    formula: ClassVar[str] = _FORMULA
    paper: ClassVar[str] = f"{_PAPER}, Eq. 8"
    corrections: ClassVar[tuple[str, ...]] = _CORRECTIONS


@register
@dataclass(frozen=True)
class AmqN(MultiplierCodec):
    """AMQ-N: every bucket weighted alike."""

    name: ClassVar[str] = "amq-n"
    summary: ClassVar[str] = "as amq, every bucket weighted alike"
    formula: ClassVar[str] = _FORMULA
    paper: ClassVar[str] = f"{_PAPER}, Eq. 8 with equal weights"
    corrections: ClassVar[tuple[str, ...]] = _CORRECTIONS
    weighted: ClassVar[bool] = False
