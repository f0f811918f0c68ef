"""Memories: what a worker adds to the next gradient, inside a method or as a prefix of any codec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from gtrace.buckets import as_values, bucket_scales
from gtrace.codecs.base import parameter
from gtrace.codecs.parts import Memory, zeros
from gtrace.errors import UsageError
from gtrace.kernels.elementwise import add_scaled

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from gtrace.codecs.parts import Arrays, Values

#: values of a residual that share a scale
_GROUP = 256
#: a note of every codec with a residual: papers write the residual of the step, codecs see gradients
UNITS = "the residual is kept in gradient units; the papers' holds steps, the same while the learning rate is constant"


def saturating(x: ArrayLike, y: ArrayLike, scale_x: float = 1.0, scale_y: float = 1.0) -> Values:
    """scale_x x + scale_y y in float32, float32[n]; an overflow becomes the largest finite number.

    Raises:
        UsageError: they differ in size.
    """
    a, b = as_values(x), as_values(y)
    if a.size != b.size:
        raise UsageError(f"a gradient has {a.size} values, and what is remembered of it {b.size}")
    out = np.empty_like(a)
    add_scaled(a, b, np.float32(scale_x), np.float32(scale_y), out)
    return out


@dataclass(frozen=True)
class Residual(Memory):
    """What did not arrive is added to the next gradient. Kept as ``residual``, float32[n]."""

    zeros: ClassVar[tuple[str, ...]] = ("residual",)

    def given(self, arrays: Arrays, x: Values) -> Values:
        return saturating(x, arrays["residual"])

    def after(self, arrays: Arrays, x: Values, given: Values, decoded: Values) -> Arrays:
        return {"residual": saturating(given, decoded, scale_y=-1.0)}


@dataclass(frozen=True)
class FadingResidual(Residual):
    """A residual that fades, follows a moving average, is kept in few bits, or starts again now and then.

    Kept as ``residual``: float32[n], or int8[n] with a float32 scale for each group of 256 in ``scales``; and the
    number of steps as ``step``, if it is needed.
    """

    beta: float = parameter(
        0.0, "e <- beta e + (1 - beta) (what was lost): a moving average of errors (LoCo)", minimum=0.0, maximum=1.0
    )
    decay: float = parameter(1.0, "what is added of e, as DeMo's and SparseLoCo's momentum", minimum=0.0, maximum=1.0)
    reset: int | None = parameter(
        None, "number of steps after which e is forgotten; none for never", minimum=1, optional=True
    )
    memory_bits: int | None = parameter(
        None, "bits in which e is kept, rounded to nearest in groups of 256; none for float32", minimum=2, maximum=8
    )

    @property
    def part_multiple(self) -> int:
        return 1 if self.memory_bits is None else _GROUP

    def start(self, size: int) -> Arrays:
        coarse = {"residual": zeros(size, np.int8), "scales": zeros(-(-size // _GROUP))}
        kept = super().start(size) if self.memory_bits is None else coarse
        return kept if self.reset is None else {**kept, "step": np.zeros((), np.int64)}

    def given(self, arrays: Arrays, x: Values) -> Values:
        return saturating(x, self._residual(arrays), scale_y=self.decay)

    def after(self, arrays: Arrays, x: Values, given: Values, decoded: Values) -> Arrays:
        lost = saturating(given, decoded, scale_y=-1.0)
        if self.beta:
            lost = saturating(self._residual(arrays), lost, self.beta, 1.0 - self.beta)
        if self.reset is None:
            return self._stored(lost)
        step = np.asarray(arrays["step"] + 1, np.int64)
        return {**self._stored(lost if step % self.reset else np.zeros_like(lost)), "step": step}

    def _stored(self, residual: Values) -> Arrays:
        if self.memory_bits is None:
            return {"residual": residual}
        top = (1 << self.memory_bits - 1) - 1
        scales = bucket_scales(residual, "linf", _GROUP)
        each = np.repeat(scales, _GROUP)[: residual.size]
        codes = np.divide(residual, each, out=np.zeros(residual.size, np.float32), where=each > 0)
        return {"residual": np.rint(codes * np.float32(top)).astype(np.int8), "scales": scales}

    def _residual(self, arrays: Arrays) -> Values:
        kept: NDArray[Any] = arrays["residual"]
        if self.memory_bits is None:
            return kept
        top = np.float32((1 << self.memory_bits - 1) - 1)
        return kept.astype(np.float32) / top * np.repeat(arrays["scales"], _GROUP)[: kept.size]


@dataclass(frozen=True)
class Accumulated(Memory):
    """Coordinates that were not sent wait and grow; the others start again. Kept as ``accumulated``, float32[n]."""

    zeros: ClassVar[tuple[str, ...]] = ("accumulated",)

    def given(self, arrays: Arrays, x: Values) -> Values:
        return saturating(arrays["accumulated"], x)

    def after(self, arrays: Arrays, x: Values, given: Values, decoded: Values) -> Arrays:
        return {"accumulated": np.where(decoded != 0, np.float32(0), given)}


@dataclass(frozen=True)
class MomentumAverage(Memory):
    """m <- beta m + (1 - beta) v is sent instead of v. Kept as ``momentum``, float32[n]."""

    zeros: ClassVar[tuple[str, ...]] = ("momentum",)

    beta: float = parameter(0.9, "share of the momentum that stays", minimum=0.0, maximum=1.0)

    def given(self, arrays: Arrays, x: Values) -> Values:
        return saturating(arrays["momentum"], x, self.beta, 1.0 - self.beta)

    def after(self, arrays: Arrays, x: Values, given: Values, decoded: Values) -> Arrays:
        return {"momentum": given}


@dataclass(frozen=True)
class MomentumSum(MomentumAverage):
    """m <- beta m + (1 - dampening) v is sent instead of v."""

    dampening: float = parameter(0.0, "share of a new gradient that is left out", minimum=0.0, maximum=1.0)

    def given(self, arrays: Arrays, x: Values) -> Values:
        return saturating(arrays["momentum"], x, self.beta, 1.0 - self.dampening)


@dataclass(frozen=True)
class Estimate(Memory):
    """Both ends follow the gradient: the change of their estimate is sent and added.

    Kept as ``estimate``, float32[n], on both ends; with momentum the sender also keeps ``momentum``, float32[n].
    """

    momentum: float = parameter(
        0.0, "share of m that stays; the estimate then follows m instead of the gradient", minimum=0.0, maximum=1.0
    )

    def given(self, arrays: Arrays, x: Values) -> Values:
        return self.inside(arrays, self._followed(arrays, x))

    def after(self, arrays: Arrays, x: Values, given: Values, decoded: Values) -> Arrays:
        kept: Arrays = {"estimate": decoded}
        if not self.momentum:
            return kept
        # Not the gradient's own memory: training writes the average there.
        return {**kept, "momentum": self._followed(arrays, x) if "momentum" in arrays else x.copy()}

    def received(self, arrays: Arrays, values: Values) -> tuple[Values, Arrays]:
        estimate = saturating(values, arrays["estimate"]) if "estimate" in arrays else values
        return estimate, {"estimate": estimate}

    def inside(self, arrays: Arrays, received: Values) -> Values:
        return saturating(received, arrays["estimate"], scale_y=-1.0) if "estimate" in arrays else received

    def _followed(self, arrays: Arrays, x: Values) -> Values:
        share = self.momentum
        return saturating(arrays["momentum"], x, share, 1.0 - share) if "momentum" in arrays else x
