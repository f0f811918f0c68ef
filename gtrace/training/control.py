"""A bit policy at work in one run: what it is shown, and the exchange that follows its choice."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.codecs import Identity
from gtrace.training.policy import Observation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from gtrace.codecs import Codec
    from gtrace.training.exchange import Exchange
    from gtrace.training.policy import BitPolicy


class BitControl:
    """Asks a policy before every exchange.

    Args:
        policy: that chooses.
        codec: whose bits it chooses.
        exchange: that uses the codec.

    Attributes:
        seconds: simulated, of the step before; whoever knows them writes them here.
    """

    def __init__(self, policy: BitPolicy, codec: Codec, exchange: Exchange) -> None:
        self.seconds = math.nan
        self._policy, self._codec, self._exchange = policy, codec, exchange
        self._bits = 0

    def before(self, step: int, loss: float, gradients: Sequence[Mapping[str, NDArray[np.float32]]]) -> dict[str, Any]:
        """Choose the bits of a step; returns what the run log says about it.

        Args:
            step: number of the step.
            loss: mean of the workers'.
            gradients: per worker, tensor -> float32 of any shape.
        """

        def rms() -> list[float]:
            return [self._rms(tensors) for tensors in gradients]

        self._use(self._policy.choose(Observation(step, loss, self.seconds, rms)))
        return {"codec_bits": self._bits, **self._policy.record()}

    def _use(self, bits: int) -> None:
        if bits and bits != self._bits:
            self._bits = bits
            self._exchange.use(self._codec.at_bits(bits))

    def _rms(self, tensors: Mapping[str, NDArray[np.float32]]) -> float:
        """Of all values that go through the codec; NaN where there are none."""
        choose = self._exchange.rules.choose
        chosen = [array for name, array in tensors.items() if choose(name, array.size) != Identity()]
        count = sum(array.size for array in chosen)
        energy = sum(float(np.vdot(wide := array.astype(np.float64), wide)) for array in chosen)
        return math.sqrt(energy / count) if count else math.nan

    def warning(self) -> str:
        """That of the policy."""
        return self._policy.warning()

    def state_dict(self) -> dict[str, Any]:
        """Everything that later choices depend on: numbers and arrays."""
        return {"seconds": self.seconds, "bits": self._bits, "policy": self._policy.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Undo :meth:`state_dict`, before the exchange is loaded."""
        self.seconds = saved["seconds"]
        self._policy.load_state_dict(saved["policy"])
        self._use(saved["bits"])
