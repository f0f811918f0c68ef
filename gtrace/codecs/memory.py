"""Memories: what a worker adds to the next gradient, inside a method or as a prefix of any codec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from gtrace.codecs.base import parameter
from gtrace.codecs.parts import FLOAT32_MAX, Memory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import ArrayLike, NDArray

    Arrays = Mapping[str, NDArray[Any]]

#: a note of every codec with a residual: papers write the residual of the step, codecs see gradients
UNITS = "the residual is kept in gradient units; the papers' holds steps, the same while the learning rate is constant"


def saturating(x: ArrayLike, y: ArrayLike, scale_x: float = 1.0, scale_y: float = 1.0) -> NDArray[np.float32]:
    """scale_x x + scale_y y in float32, float32[n]; an overflow becomes the largest finite number."""
    a, b = np.asarray(x, np.float32), np.asarray(y, np.float32)
    with np.errstate(over="ignore"):
        out: NDArray[np.float32] = (a if scale_x == 1.0 else a * np.float32(scale_x)) + (
            b if scale_y == 1.0 else b * np.float32(scale_y)
        )
    return np.clip(out, -FLOAT32_MAX, FLOAT32_MAX, out=out)


def averaged(
    momentum: NDArray[np.float32], x: NDArray[np.float32], beta: float, dampening: float
) -> NDArray[np.float32]:
    """beta m + (1 - dampening) x, float32[n]."""
    return saturating(momentum, x, beta, 1.0 - dampening)


@dataclass(frozen=True)
class Residual(Memory):
    """What did not arrive is added to the next gradient. Kept as ``residual``, float32[n]."""

    keeps: ClassVar[bool] = True
    unbiased: ClassVar[bool] = False

    def start(self, size: int) -> dict[str, NDArray[Any]]:
        return {"residual": np.zeros(size, np.float32)}

    def given(self, arrays: Arrays, x: NDArray[np.float32]) -> NDArray[np.float32]:
        return saturating(x, arrays["residual"])

    def after(
        self, arrays: Arrays, x: NDArray[np.float32], given: NDArray[np.float32], decoded: NDArray[np.float32]
    ) -> dict[str, NDArray[Any]]:
        return {"residual": saturating(given, decoded, scale_y=-1.0)}


@dataclass(frozen=True)
class Accumulated(Memory):
    """Coordinates that were not sent wait and grow; the others start again. Kept as ``accumulated``, float32[n]."""

    keeps: ClassVar[bool] = True
    unbiased: ClassVar[bool] = False

    def start(self, size: int) -> dict[str, NDArray[Any]]:
        return {"accumulated": np.zeros(size, np.float32)}

    def given(self, arrays: Arrays, x: NDArray[np.float32]) -> NDArray[np.float32]:
        return saturating(arrays["accumulated"], x)

    def after(
        self, arrays: Arrays, x: NDArray[np.float32], given: NDArray[np.float32], decoded: NDArray[np.float32]
    ) -> dict[str, NDArray[Any]]:
        return {"accumulated": np.where(decoded != 0, np.float32(0), given)}


@dataclass(frozen=True)
class MomentumAverage(Memory):
    """m <- beta m + (1 - beta) v is sent instead of v. Kept as ``momentum``, float32[n]."""

    keeps: ClassVar[bool] = True
    unbiased: ClassVar[bool] = False

    beta: float = parameter(0.9, "share of the momentum that stays", minimum=0.0, maximum=1.0)

    @property
    def left_out(self) -> float:
        """The share of a new gradient that is left out."""
        return self.beta

    def start(self, size: int) -> dict[str, NDArray[Any]]:
        return {"momentum": np.zeros(size, np.float32)}

    def given(self, arrays: Arrays, x: NDArray[np.float32]) -> NDArray[np.float32]:
        return averaged(arrays["momentum"], x, self.beta, self.left_out)

    def after(
        self, arrays: Arrays, x: NDArray[np.float32], given: NDArray[np.float32], decoded: NDArray[np.float32]
    ) -> dict[str, NDArray[Any]]:
        return {"momentum": given}


@dataclass(frozen=True)
class MomentumSum(MomentumAverage):
    """m <- beta m + (1 - dampening) v is sent instead of v."""

    dampening: float = parameter(0.0, "share of a new gradient that is left out", minimum=0.0, maximum=1.0)

    @property
    def left_out(self) -> float:
        return self.dampening
