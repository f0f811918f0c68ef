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

    from gtrace.codecs.base import Simulated
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

    def init(self, size: int) -> State:
        """Nothing accumulated yet."""
        return super().init(size).with_arrays(accumulated=np.zeros(size, np.float32))

    def view(self, state: State, values: ArrayLike) -> ArrayLike:
        """The accumulated gradient, as the codec inside will see it."""
        return self.inner.view(self.inner_state(state), self._grown(state, values))

    def encode(self, state: State, values: ArrayLike, key: tuple[int, int]) -> bytes:
        """The inner payload of the accumulated gradient."""
        return self.inner.encode(self.inner_state(state), self._grown(state, values), key)

    def simulate(self, state: State, values: ArrayLike, key: tuple[int, int]) -> Simulated:
        """As the codec inside does it, of the accumulated gradient."""
        return self.inner.simulate(self.inner_state(state), self._grown(state, values), key)

    def update(self, state: State, values: ArrayLike, decoded: NDArray[np.float32]) -> State:
        """Clear what arrived, keep the rest."""
        grown = self._grown(state, values)
        state = self.with_inner(state, self.inner.update(self.inner_state(state), grown, decoded))
        return state.with_arrays(accumulated=np.where(decoded != 0, np.float32(0), grown))

    def _grown(self, state: State, values: ArrayLike) -> NDArray[np.float32]:
        return saturating(state.arrays["accumulated"], checked_values(state, values))
