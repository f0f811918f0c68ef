"""Gradient Dropping: what reaches a threshold is sent, the rest waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from gtrace.codecs.base import parameter
from gtrace.codecs.feedback import UNITS, ResidualCodec
from gtrace.codecs.registry import register
from gtrace.codecs.sparse import SparseCodec, kept, magnitudes
from gtrace.kernels import elementwise as _elementwise

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.types import State


@register
@dataclass(frozen=True)
class Dropping(SparseCodec, ResidualCodec):
    """A threshold on the magnitudes, from all of them or from a sample, with memory."""

    name: ClassVar[str] = "dropping"
    summary: ClassVar[str] = "magnitudes from a threshold on exactly, the rest kept for the next step"
    formula: ClassVar[str] = "p = v + e; Q(p_i) = p_i where |p_i| >= t, else 0; t = the ratio's quantile; e <- p - Q(p)"
    paper: ClassVar[str] = "Aji and Heafield, Sparse Communication for Distributed Gradient Descent, 2017"
    corrections: ClassVar[tuple[str, ...]] = (
        "values that equal the threshold are sent: dropping them would never send a constant tensor",
        "each tensor has a threshold of its own",
        "the threshold is exact by default; the paper's comes from a sample of 0.1% of the values (sample=0.001)",
        UNITS,
    )

    sample: float = parameter(1.0, "share of the values that set the threshold", minimum=0.0, maximum=1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "deterministic", self.sample >= 1)

    def send(self, state: State, x: NDArray[np.float32], key: tuple[int, int]) -> bytes:
        """Positions and values; zeros are never sent."""
        del state
        ranks = magnitudes(x)
        if not x.size:
            return self.pack(x, np.empty(0, np.int64))
        seen = ranks
        if self.sample < 1:
            words = np.empty(kept(self.sample, x.size), np.uint32)
            _elementwise.fill_words(np.uint64(key[0]), np.uint64(key[1]), words)
            seen = ranks[(words * np.float64(x.size / 2**32)).astype(np.int64)]
        count = kept(self.ratio, seen.size)
        threshold = max(1, int(np.partition(seen, seen.size - count)[-count]))
        return self.pack(x, np.flatnonzero(ranks >= np.uint32(threshold)))
