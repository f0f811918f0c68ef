"""The largest magnitudes of a gradient, with and without memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gtrace.codecs.base import checked_values
from gtrace.codecs.feedback import UNITS, ResidualCodec
from gtrace.codecs.registry import register
from gtrace.codecs.sparse import SparseCodec, kept, largest, magnitudes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    from gtrace.types import State

_TIES = "of equal magnitudes the first in the tensor are sent, so that their number is always the same"


@register
@dataclass(frozen=True)
class TopK(SparseCodec):
    """The k largest magnitudes exactly, the rest zero."""

    name: ClassVar[str] = "topk"
    summary: ClassVar[str] = "the largest magnitudes exactly, the rest zero"
    formula: ClassVar[str] = "Q(v_i) = v_i for the k largest |v_i|, else 0; k = max(1, round(ratio n))"
    paper: ClassVar[str] = "Alistarh et al., The Convergence of Sparsified Gradient Methods, 2018"
    corrections: ClassVar[tuple[str, ...]] = (_TIES,)
    deterministic: ClassVar[bool] = True

    def encode(self, state: State, values: ArrayLike, key: tuple[int, int]) -> bytes:
        """Positions and values."""
        del key
        x = checked_values(state, values)
        return self.pack(x, largest(magnitudes(x), kept(self.ratio, x.size)))


@register
@dataclass(frozen=True)
class MemSgd(SparseCodec, ResidualCodec):
    """Top-k with memory: what is not sent is added to the next gradient."""

    name: ClassVar[str] = "mem-sgd"
    summary: ClassVar[str] = "the largest magnitudes exactly, the rest kept for the next step"
    formula: ClassVar[str] = "p = v + e; Q(p_i) = p_i for the k largest |p_i|, else 0; e <- p - Q(p)"
    paper: ClassVar[str] = "Stich, Cordonnier and Jaggi, Sparsified SGD with Memory, 2018"
    corrections: ClassVar[tuple[str, ...]] = (_TIES, UNITS)
    deterministic: ClassVar[bool] = True

    def send(self, state: State, x: NDArray[np.float32], key: tuple[int, int]) -> bytes:
        """Positions and values."""
        del state, key
        return self.pack(x, largest(magnitudes(x), kept(self.ratio, x.size)))
