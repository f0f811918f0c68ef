"""Momentum before compression: workers send their averaged gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from gtrace.codecs.base import checked_values, parameter
from gtrace.codecs.registry import register_wrapper
from gtrace.codecs.wrapper import Wrapper, saturating

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from gtrace.codecs.base import Simulated
    from gtrace.types import State


@register_wrapper
@dataclass(frozen=True)
class Momentum(Wrapper):
    """Momentum on every worker, in front of any codec: ``momentum:beta=0.9:signsgd``.

    The optimizer behind it must then have none of its own. The state holds ``momentum`` (float32[n]) and the
    inner codec's arrays. Payloads are the inner codec's.
    """

    name: ClassVar[str] = "momentum"
    summary: ClassVar[str] = "momentum on the worker, before any codec"
    formula: ClassVar[str] = "m <- beta m + (1 - dampening) v; send Q(m)"
    paper: ClassVar[str] = "Bernstein et al., signSGD: Compressed Optimisation for Non-Convex Problems, 2018 (Signum)"
    unbiased: ClassVar[bool] = False
    stateful: ClassVar[bool] = True

    beta: float = parameter(0.9, "share of the momentum that stays", minimum=0.0, maximum=1.0)
    dampening: float = parameter(0.0, "share of a new gradient that is left out", minimum=0.0, maximum=1.0)

    def init(self, size: int) -> State:
        """No momentum yet."""
        return super().init(size).with_arrays(momentum=np.zeros(size, np.float32))

    def view(self, state: State, values: ArrayLike) -> ArrayLike:
        """The momentum, as the codec inside will see it."""
        return self.inner.view(self.inner_state(state), self._moved(state, values))

    def encode(self, state: State, values: ArrayLike, key: tuple[int, int]) -> bytes:
        """The inner payload of the new momentum."""
        return self.inner.encode(self.inner_state(state), self._moved(state, values), key)

    def simulate(self, state: State, values: ArrayLike, key: tuple[int, int]) -> Simulated:
        """As the codec inside does it, of the new momentum."""
        return self.inner.simulate(self.inner_state(state), self._moved(state, values), key)

    def update(self, state: State, values: ArrayLike, decoded: NDArray[np.float32]) -> State:
        """Keep the new momentum."""
        moved = self._moved(state, values)
        state = self.with_inner(state, self.inner.update(self.inner_state(state), moved, decoded))
        return state.with_arrays(momentum=moved)

    def _moved(self, state: State, values: ArrayLike) -> NDArray[np.float32]:
        return averaged(state.arrays["momentum"], checked_values(state, values), self.beta, self.dampening)


def averaged(
    momentum: NDArray[np.float32], x: NDArray[np.float32], beta: float, dampening: float
) -> NDArray[np.float32]:
    """beta m + (1 - dampening) x, float32[n]."""
    return saturating(momentum, x, beta, 1.0 - dampening)
