"""AdaComp: every bin decides on its own what is large enough to be sent."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from gtrace.codecs.base import parameter
from gtrace.codecs.feedback import UNITS, ResidualCodec
from gtrace.codecs.registry import register
from gtrace.codecs.wrapper import saturating
from gtrace.coding import open_envelope, seal
from gtrace.coding.positions import decode_positions, encode_positions
from gtrace.errors import PayloadError
from gtrace.kernels import elementwise as _elementwise

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.types import State

_SCALE = struct.Struct("<f")


@register
@dataclass(frozen=True)
class AdaComp(ResidualCodec):
    """Signs of the values that would reach their bin's largest if the gradient came once more, with memory."""

    name: ClassVar[str] = "adacomp"
    summary: ClassVar[str] = "signs of what nears its bin's largest magnitude, one scale, the rest kept"
    formula: ClassVar[str] = (
        "p = v + e; Q(p_i) = s sign(p_i) where |p_i + v_i| >= the bin's largest |p|, else 0; "
        "s = mean of the bins' largest |p|; e <- p - Q(p)"
    )
    paper: ClassVar[str] = (
        "Chen et al., AdaComp: Adaptive Residual Gradient Compression for Data-Parallel Distributed Training, 2018"
    )
    corrections: ClassVar[tuple[str, ...]] = (
        "values that are zero are never sent, or a bin of zeros would be sent whole",
        UNITS,
    )
    deterministic: ClassVar[bool] = True

    bin_size: int = parameter(500, "values per bin; the paper takes 50 for convolutions, 500 elsewhere", minimum=1)

    def send(self, state: State, x: NDArray[np.float32], key: tuple[int, int]) -> bytes:
        """The scale (float32), then the numbers 2 i + (1 where negative), coded as positions are."""
        del key
        # The gradient once more is what it was without the residual: p + v = 2 p - e.
        again = saturating(x, state.arrays["residual"], 2.0, -1.0)
        chosen = np.empty(x.size, np.bool_)
        total = _elementwise.above_local_peak(x, again, self.bin_size, chosen)
        scale = total / max(1, -(-x.size // self.bin_size))
        positions = np.flatnonzero(chosen)
        numbers = 2 * positions + np.signbit(x[positions])
        body = _SCALE.pack(scale) + encode_positions(numbers, 2 * x.size)
        return seal(body, codec=self.name, size=x.size, shared=b"")

    def decode(self, shared: bytes, payload: bytes, size: int) -> NDArray[np.float32]:
        """The scale with the signs, in their places."""
        body, flags = open_envelope(payload, codec=self.name, size=size, shared=shared)
        if flags or len(body) < _SCALE.size:
            raise PayloadError(f"payload body of {len(body)} bytes is no scale and signs")
        (scale,) = _SCALE.unpack_from(body)
        if not (math.isfinite(scale) and scale >= 0):
            raise PayloadError(f"payload holds the scale {scale}")
        numbers = decode_positions(body[_SCALE.size :], 2 * size)
        positions = numbers >> 1
        if (positions[1:] == positions[:-1]).any():
            raise PayloadError("payload holds both signs of a value")
        out = np.zeros(size, np.float32)
        out[positions] = np.where(numbers & 1, -np.float32(scale), np.float32(scale))
        return out
