"""Accumulation: coordinates that were not sent wait and grow; those that were start anew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from gtrace.codecs.base import checked_values
from gtrace.codecs.registry import register_wrapper
from gtrace.codecs.wrapper import Wrapper, saturating

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from gtrace.types import State


@register_wrapper
@dataclass(frozen=True)
class Accumulate(Wrapper):
    """MCGQ's accumulation around any codec: ``accumulate:topk:ratio=0.01``.

    It is no residual: what arrived is not subtracted, the coordinates that arrived are cleared. The paper's method is
    ``mcgq:accumulate=true``, which scales by the norm of the current gradient; around ``mcgq`` the codec sees, and
    scales by, the accumulated one. The state holds ``accumulated`` (float32[n]) and the inner codec's arrays.
    Payloads are the inner codec's.
    """

    name: ClassVar[str] = "accumulate"
    summary: ClassVar[str] = "gradients add up until their coordinate is sent, then it is cleared"
    formula: ClassVar[str] = "a <- a + v; send Q(a); a <- 0 where Q(a) is not 0"
    paper: ClassVar[str] = "Mordido, Van Keirsbilck, Keller, Monte Carlo Gradient Quantization, 2020 (Algorithm 4)"
    unbiased: ClassVar[bool] = False
    stateful: ClassVar[bool] = True

    def init(self, size: int, shape: tuple[int, ...] | None = None) -> State:
        """Nothing accumulated yet."""
        return super().init(size, shape).with_arrays(accumulated=np.zeros(size, np.float32))

    def remembered(self, given: NDArray[np.float32], decoded: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
        """What did not arrive; the rest is cleared."""
        return {"accumulated": np.where(decoded != 0, np.float32(0), given)}

    def given(self, state: State, values: ArrayLike) -> NDArray[np.float32]:
        """The accumulated gradient."""
        return saturating(state.arrays["accumulated"], checked_values(state, values))
