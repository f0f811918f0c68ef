"""NUQSGD: levels at powers of one half, scaled by the bucket's l2 norm."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from gtrace.codecs.base import parameter
from gtrace.codecs.levels import LevelCodec
from gtrace.codecs.registry import register

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.types import State


@register
@dataclass(frozen=True)
class Nuqsgd(LevelCodec):
    """Exponential levels 1, p, p^2, ... (and 0)."""

    name: ClassVar[str] = "nuqsgd"
    summary: ClassVar[str] = "levels at powers of 1/2, buckets scaled by their l2 norm"
    formula: ClassVar[str] = (
        "Q(v) = ||v_b||_2 sign(v) l, l in {0, p^(m-2), ..., p, 1}, m = 2^(bits-1), rounded stochastically"
    )
    paper: ClassVar[str] = "Ramezani-Kebrya et al., NUQSGD: Provably Communication-Efficient Data-Parallel SGD, 2021"

    bits: int = parameter(4, "2^(bits - 1) magnitudes and a sign", minimum=2, maximum=8)
    zero: bool = parameter(True, "0 is a level; without it the grid is mirrored around 0")
    p: float = parameter(0.5, "ratio of two neighbouring levels", minimum=0.01, maximum=0.99)

    @property
    def has_zero(self) -> bool:
        """Whether 0 is a level."""
        return self.zero

    def levels(self, state: State) -> NDArray[np.float32]:
        """Powers of p, ascending, after a 0 where zero is a level; powers that float32 cannot hold are left out."""
        del state
        return _powers(self.p, self.bits, self.zero)


@lru_cache(maxsize=256)
def _powers(p: float, bits: int, zero: bool) -> NDArray[np.float32]:
    count = 2 ** (bits - 1)
    powers = p ** np.arange(count - (2 if zero else 1), -1, -1, dtype=np.float64)
    powers = powers[powers >= np.finfo(np.float32).tiny]
    levels = np.concatenate([[0.0], powers] if zero else [powers]).astype(np.float32)
    levels.flags.writeable = False
    return levels
