"""Error feedback: what a codec lost of one gradient is added to the next one."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from gtrace.codecs.base import Codec, checked_values
from gtrace.codecs.registry import register_wrapper
from gtrace.codecs.wrapper import Wrapper, saturating
from gtrace.types import State

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

#: said by every codec with a residual: papers write the residual of the step, codecs see gradients
UNITS = "the residual is kept in gradient units; the papers' holds steps, the same while the learning rate is constant"


@register_wrapper
@dataclass(frozen=True)
class ErrorFeedback(Wrapper):
    """Error feedback around any codec: ``ef:topk:ratio=0.01``.

    The state holds ``residual`` (float32[n]) and the inner codec's arrays. Payloads are the inner codec's. A codec
    whose error exceeds the gradient itself lets the residual grow without end: unbiased ones with few bits in large
    buckets do, and scaled random choice; take smaller buckets, or ``randomk:scale=false``.
    """

    name: ClassVar[str] = "ef"
    summary: ClassVar[str] = "error feedback around any codec: what was lost is sent with the next gradient"
    formula: ClassVar[str] = "send Q(v + e); e <- v + e - Q(v + e)"
    paper: ClassVar[str] = (
        "Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression Schemes, 2019"
    )
    corrections: ClassVar[tuple[str, ...]] = (UNITS,)
    unbiased: ClassVar[bool] = False
    stateful: ClassVar[bool] = True

    def init(self, size: int, shape: tuple[int, ...] | None = None) -> State:
        """No residual yet."""
        return super().init(size, shape).with_arrays(residual=np.zeros(size, np.float32))

    def given(self, state: State, values: ArrayLike) -> NDArray[np.float32]:
        """The values with the residual added."""
        return corrected(state, values)

    def remembered(self, given: NDArray[np.float32], decoded: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
        """What did not arrive."""
        return {"residual": saturating(given, decoded, scale_y=-1.0)}


@dataclass(frozen=True)
class ResidualCodec(Codec):
    """A method with error feedback of its own. The state holds ``residual``, float32[n]."""

    corrections: ClassVar[tuple[str, ...]] = (UNITS,)
    unbiased: ClassVar[bool] = False
    stateful: ClassVar[bool] = True

    def init(self, size: int, shape: tuple[int, ...] | None = None) -> State:
        """No residual yet."""
        return State(int(size), {"residual": np.zeros(size, np.float32)}, shape)

    @abstractmethod
    def send(self, state: State, x: NDArray[np.float32], key: tuple[int, int]) -> bytes:
        """The payload of values and residual, float32[n]."""

    def encode(self, state: State, values: ArrayLike, key: tuple[int, int]) -> bytes:
        """Add the residual and send."""
        return self.send(state, corrected(state, values), key)

    def update(self, state: State, values: ArrayLike, decoded: NDArray[np.float32]) -> State:
        """Keep what did not arrive."""
        return state.with_arrays(residual=saturating(corrected(state, values), decoded, scale_y=-1.0))


def corrected(state: State, values: ArrayLike) -> NDArray[np.float32]:
    """values + residual, float32[n].

    Raises:
        UsageError: as :func:`~gtrace.codecs.base.checked_values`.
    """
    return saturating(checked_values(state, values), state.arrays["residual"])
