"""Deep Gradient Compression: sparse gradients that carry momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from gtrace.codecs.base import checked_values, parameter
from gtrace.codecs.momentum import averaged
from gtrace.codecs.registry import register
from gtrace.codecs.sparse import SparseCodec, kept, largest, magnitudes
from gtrace.codecs.wrapper import saturating
from gtrace.kernels.norms import power_sum
from gtrace.types import State

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

#: what is sent in the first stage of the warm-up, and by how much less in each of the following
_FIRST, _STAGES = 0.25, 4


@register
@dataclass(frozen=True)
class Dgc(SparseCodec):
    """Momentum correction, factor masking, gradient clipping and warm-up around the largest magnitudes.

    The optimizer behind it must have no momentum: it is in what arrives. The state holds ``velocity`` and
    ``residual`` (float32[n]: momentum, and what of its sum was not sent) and ``step`` (int64[]).
    """

    name: ClassVar[str] = "dgc"
    summary: ClassVar[str] = "the largest sums of momentum exactly, the rest kept; warm-up, clipping, factor masking"
    formula: ClassVar[str] = (
        "u <- beta u + clip(v); e <- e + u; send e_i for the k largest |e_i|, and set their e_i and u_i to 0"
    )
    paper: ClassVar[str] = (
        "Lin et al., Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training, 2018"
    )
    corrections: ClassVar[tuple[str, ...]] = (
        "the threshold is exact, not estimated from a sample",
        "clip limits one tensor's norm on one worker; the paper's limit is the model's, over the root of the workers",
    )
    stateful: ClassVar[bool] = True
    deterministic: ClassVar[bool] = True

    ratio: float = parameter(0.001, "share of the values that is sent, at least one", minimum=0.0, maximum=1.0)
    momentum: float = parameter(0.9, "share of the momentum that stays", minimum=0.0, maximum=1.0)
    masking: bool = parameter(True, "momentum stops where a value was sent")
    clip: float | None = parameter(None, "largest l2 norm of a gradient; none for no clipping", minimum=0.0)
    warmup: int = parameter(0, "steps over which the ratio falls, from 1/4 in four stages, each a quarter", minimum=0)

    def init(self, size: int, shape: tuple[int, ...] | None = None) -> State:
        """Nothing accumulated yet."""
        zeros = np.zeros(size, np.float32)
        return State(int(size), {"velocity": zeros, "residual": zeros, "step": np.zeros((), np.int64)}, shape)

    def ratio_at(self, step: int) -> float:
        """The share that is sent at a step.

        >>> [Dgc(warmup=8).ratio_at(step) for step in (0, 1, 2, 4, 6, 8)]
        [0.25, 0.25, 0.0625, 0.015625, 0.00390625, 0.001]
        """
        if step >= self.warmup:
            return self.ratio
        return max(self.ratio, _FIRST ** (1 + _STAGES * step // self.warmup))

    def encode(self, state: State, values: ArrayLike, key: tuple[int, int]) -> bytes:
        """Positions and values of the sums."""
        del key
        _, total = self._moved(state, values)
        count = kept(self.ratio_at(int(state.arrays["step"])), total.size)
        return self.pack(total, largest(magnitudes(total), count))

    def update(self, state: State, values: ArrayLike, decoded: NDArray[np.float32]) -> State:
        """Clear what was sent, and the momentum there."""
        velocity, total = self._moved(state, values)
        waits = decoded == 0
        return state.with_arrays(
            velocity=velocity * waits if self.masking else velocity,
            residual=total * waits,
            step=np.asarray(state.arrays["step"] + 1, np.int64),
        )

    def _moved(self, state: State, values: ArrayLike) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Momentum and its sum with the new gradient in them."""
        x = checked_values(state, values)
        if self.clip is not None:
            norm = float(power_sum(x, 2)) ** 0.5
            if norm > self.clip:
                x = x * np.float32(self.clip / norm)
        velocity = averaged(state.arrays["velocity"], x, self.momentum, 0.0)
        return velocity, saturating(state.arrays["residual"], velocity)
