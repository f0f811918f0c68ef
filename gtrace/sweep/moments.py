"""How much each element of a gradient moves Adam's update, from the second moments that a trace holds."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.errors import TraceError
from gtrace.metrics import update_weights
from gtrace.trace.format import SECOND_MOMENT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from gtrace.trace import TensorInfo, Trace


class SecondMoments:
    """Adam's running means of squared gradients of one tensor, as its steps found them.

    Args:
        trace: where they are.
        info: of the gradient.
    """

    def __init__(self, trace: Trace, info: TensorInfo) -> None:
        self._trace = trace
        self._gradient = info

    @cached_property
    def _found(self) -> tuple[TensorInfo, dict[int, float]] | None:
        """Their own entry in the trace, and the step of the optimizer at each of its steps."""
        own = self._gradient
        names = (own.name, own.name.removeprefix(f"opt{own.optimizer}/"))
        for info in self._trace.tensors:
            place = (info.kind, info.optimizer, info.rank)
            if place != (SECOND_MOMENT, own.optimizer, own.rank) or info.name not in names:
                continue
            if info.size == own.size and not info.sketches:
                numbers = self._trace.statistics(info.name, **self._place)
                unknown = np.full(numbers["step"].size, math.nan)
                counts = numbers.get("optimizer_step", unknown).tolist()
                return info, dict(zip(numbers["step"].tolist(), counts, strict=True))
        return None

    @property
    def _place(self) -> dict[str, Any]:
        return {"kind": SECOND_MOMENT, "optimizer": self._gradient.optimizer, "rank": self._gradient.rank}

    def known(self, step: int) -> bool:
        """Whether they are there at a step."""
        return self._found is not None and step in self._found[1]

    def weights(self, step: int, values: NDArray[np.float32]) -> NDArray[np.float64]:
        """1 / d^2 of each element of the step's gradient, finite float32[n], where they are known."""
        assert self._found is not None
        return self._of(step, values, self._trace.read(self._found[0].name, step, **self._place))

    def pieces(self, step: int, chunk: int, values: Iterator[NDArray[np.float32]]) -> Iterator[NDArray[np.float64]]:
        """The same, ``chunk`` elements at a time."""
        assert self._found is not None
        moments = self._trace.read_chunks(self._found[0].name, step, chunk, **self._place)
        for part, found in zip(values, moments, strict=True):
            yield self._of(step, part, found)

    def _of(self, step: int, values: NDArray[np.float32], moments: NDArray[np.float32]) -> NDArray[np.float64]:
        assert self._found is not None
        steps = self._found[1]
        decay, eps = self._number("decay", 1.0, 1.0), self._number("eps", 0.0, math.inf)
        return update_weights(values, moments, decay, eps, steps[step])

    def _number(self, name: str, default: float, most: float) -> float:
        assert self._found is not None
        info = self._found[0]
        value = info.attrs.get(name, default)
        if isinstance(value, (int, float)) and 0.0 <= value <= most:
            return float(value)
        raise TraceError(f"{self._trace.path}: {name} of the second moments of {info.name} is no number that can be")
