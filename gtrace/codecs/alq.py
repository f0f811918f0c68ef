"""ALQ: levels that minimize the expected variance, by coordinate descent or by gradient descent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from gtrace.codecs.adaptive import AdaptiveCodec
from gtrace.codecs.base import parameter
from gtrace.codecs.registry import register
from gtrace.fitting import alq_levels

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from gtrace.distributions import TruncatedNormalMixture
    from gtrace.sketch import MomentSketch

_PAPER = "Faghri et al., Adaptive Gradient Quantization for Data-Parallel SGD, 2020"
_FORMULA = "Q(v) = ||v_b||_2 sign(v) l, rounded stochastically; l minimizes E[(l+ - r)(r - l)] over r = |v| / ||v_b||"
_CORRECTIONS = (
    "the law of |r| is p(r) + p(-r); the paper's formulas hold for even densities only",
    "the objective is not convex: uniform, exponential and companding starts are tried and the best is kept",
    (
        "coordinate descent takes 65 sweeps at 4 bits and 240 at 5 from a uniform start, not fewer than 10; "
        "method=newton finishes with Newton steps, method=cd is the paper's"
    ),
    "the law is the data's own by default; law=truncnorm is the paper's mixture of truncated normals",
    "no constant is added to a norm: the reference's 1e-7 biases small gradients",
)


@dataclass(frozen=True)
class CoordinateCodec(AdaptiveCodec):
    """ALQ by coordinate descent."""

    method: Literal["newton", "cd"] = parameter(
        "newton", "coordinate descent finished by Newton steps, or the paper's alone", choices=("newton", "cd")
    )

    def fit_to(self, law: MomentSketch | TruncatedNormalMixture) -> NDArray[np.float64]:
        """Coordinate descent from several starts."""
        return alq_levels(law, self.bits, self.zero, self.weighted, method=self.method)


@dataclass(frozen=True)
class GradientCodec(AdaptiveCodec):
    """ALQ by the projection-free gradient descent of Eq. 7."""

    def fit_to(self, law: MomentSketch | TruncatedNormalMixture) -> NDArray[np.float64]:
        """Gradient descent."""
        return alq_levels(law, self.bits, self.zero, self.weighted, method="gd")


@register
@dataclass(frozen=True)
class Alq(CoordinateCodec):
    """ALQ: coordinate descent on the variance, buckets weighted by their squared norm."""

    name: ClassVar[str] = "alq"
    summary: ClassVar[str] = "levels of least variance by coordinate descent, buckets weighted by squared norm"
    formula: ClassVar[str] = _FORMULA
    paper: ClassVar[str] = f"{_PAPER}, Eq. 5"
    corrections: ClassVar[tuple[str, ...]] = _CORRECTIONS


@register
@dataclass(frozen=True)
class AlqN(CoordinateCodec):
    """ALQ-N: the same on the normalized variance."""

    name: ClassVar[str] = "alq-n"
    summary: ClassVar[str] = "as alq, every bucket weighted alike"
    formula: ClassVar[str] = _FORMULA
    paper: ClassVar[str] = f"{_PAPER}, Eq. 5 with equal weights"
    corrections: ClassVar[tuple[str, ...]] = _CORRECTIONS
    weighted: ClassVar[bool] = False


@register
@dataclass(frozen=True)
class AlqG(GradientCodec):
    """ALQG: gradient descent instead of coordinate descent."""

    name: ClassVar[str] = "alqg"
    summary: ClassVar[str] = "as alq, by gradient descent"
    formula: ClassVar[str] = _FORMULA
    paper: ClassVar[str] = f"{_PAPER}, Eq. 7"
    corrections: ClassVar[tuple[str, ...]] = _CORRECTIONS[:1] + _CORRECTIONS[3:]


@register
@dataclass(frozen=True)
class AlqGN(GradientCodec):
    """ALQG-N: gradient descent on the normalized variance."""

    name: ClassVar[str] = "alqg-n"
    summary: ClassVar[str] = "as alq-n, by gradient descent"
    formula: ClassVar[str] = _FORMULA
    paper: ClassVar[str] = f"{_PAPER}, Eq. 7 with equal weights"
    corrections: ClassVar[tuple[str, ...]] = _CORRECTIONS[:1] + _CORRECTIONS[3:]
    weighted: ClassVar[bool] = False
