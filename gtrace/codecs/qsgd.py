"""QSGD: a uniform grid, scaled by the bucket's l2 or max norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from gtrace.codecs.base import parameter
from gtrace.codecs.levels import LevelCodec
from gtrace.codecs.registry import register
from gtrace.codecs.rounding import Rule
from gtrace.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.types import Norm, State


@dataclass(frozen=True)
class UniformCodec(LevelCodec):
    """What qsgd and qsgdinf share: ``bits`` and ``zero`` make a uniform grid, ``steps`` one in between."""

    bits: int = parameter(4, "2^(bits - 1) magnitudes and a sign", minimum=2, maximum=15)
    zero: bool = parameter(True, "0 is a level; without it the grid is mirrored around 0")
    steps: int | None = parameter(
        None, "intervals of the grid, as many as the bits can tell apart by default; for grids with 0", minimum=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is not None and not (self.zero and self.steps < 1 << self.bits - 1):
            wanted = f"bits={max(2, self.steps.bit_length() + 1)} or more" if self.zero else "zero=true"
            raise UsageError(f"codec {self.name}: steps={self.steps} goes with {wanted}")

    @property
    def has_zero(self) -> bool:
        """Whether 0 is a level."""
        return self.zero

    @property
    def _steps(self) -> int:
        if self.steps is not None:
            return self.steps
        return (1 << self.bits - 1) - 1 if self.zero else (1 << self.bits) - 1

    def levels(self, state: State) -> NDArray[np.float32]:
        """k / s for k = 0..s, or the odd multiples of 1 / (2^bits - 1)."""
        del state
        steps = self._steps
        first, stride = (0, 1) if self.zero else (1, 2)
        return (np.arange(first, steps + 1, stride) / steps).astype(np.float32)

    def rule(self, state: State) -> Rule:
        """The cell of a uniform grid is computed."""
        del state
        return Rule("uniform", not self.zero, steps=self._steps)


@register
@dataclass(frozen=True)
class Qsgd(UniformCodec):
    """QSGD with the l2 norm."""

    name: ClassVar[str] = "qsgd"
    summary: ClassVar[str] = "uniform levels, buckets scaled by their l2 norm"
    formula: ClassVar[str] = (
        "Q(v) = ||v_b||_2 sign(v) l, l in {0, 1/s, ..., 1}, s = 2^(bits-1) - 1, rounded stochastically"
    )
    paper: ClassVar[str] = (
        "Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding, 2017"
    )

    norm: Norm = parameter("l2", "what a bucket is divided by", choices=("l2", "linf", "l1"))


@register
@dataclass(frozen=True)
class QsgdInf(UniformCodec):
    """QSGD with the max norm."""

    name: ClassVar[str] = "qsgdinf"
    summary: ClassVar[str] = "uniform levels, buckets scaled by their largest magnitude"
    formula: ClassVar[str] = (
        "Q(v) = max|v_b| sign(v) l, l in {0, 1/s, ..., 1}, s = 2^(bits-1) - 1, rounded stochastically"
    )
    paper: ClassVar[str] = "Alistarh et al., QSGD, 2017 (max-norm variant, as in Faghri et al., 2020)"

    norm: Norm = parameter("linf", "what a bucket is divided by", choices=("l2", "linf", "l1"))
