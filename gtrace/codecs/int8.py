"""Eight-bit integers, scaled per block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from gtrace.buckets import bucket_scales
from gtrace.codecs.base import Codec, checked_values, parameter
from gtrace.codecs.registry import register
from gtrace.coding import open_envelope, seal
from gtrace.errors import PayloadError
from gtrace.kernels import rounding as _rounding

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from gtrace.types import State

_STEPS = 127
#: what the codes -127..127 stand for, in units of the block's largest magnitude
_VALUES = (np.arange(-_STEPS, _STEPS + 1) / _STEPS).astype(np.float32)


@register
@dataclass(frozen=True)
class Int8(Codec):
    """Linear codes from -127 to 127, rounded to nearest; the code -128 is not used."""

    name: ClassVar[str] = "int8"
    summary: ClassVar[str] = "8-bit integers, blocks scaled by their largest magnitude"
    formula: ClassVar[str] = "Q(v) = a round(127 v / a) / 127, a = the block's largest |v|, ties to even"
    paper: ClassVar[str] = "Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022 (with linear codes)"
    corrections: ClassVar[tuple[str, ...]] = (
        "the paper's codes are dynamic (an exponent and a fraction); these are linear, as in most int8 all-reduces",
    )
    unbiased: ClassVar[bool] = False
    deterministic: ClassVar[bool] = True

    block_size: int | None = parameter(
        2048, "consecutive values that share a scale; none for the whole tensor", minimum=1, optional=True
    )

    def encode(self, state: State, values: ArrayLike, key: tuple[int, int]) -> bytes:
        """The blocks' scales (float32), then a byte a value, two's complement."""
        del key
        x = checked_values(state, values)
        scales = bucket_scales(x, "linf", self.block_size)
        block = self.block_size or max(1, x.size)
        codes = np.empty(x.size, np.int8)
        with np.errstate(divide="ignore", invalid="ignore"):
            # A block of zeros divides by zero; its codes are set to zero below.
            whole = x.size - x.size % block
            parts = [(x[:whole].reshape(-1, block), codes[:whole].reshape(-1, block), scales[: whole // block, None])]
            if whole < x.size:
                parts.append((x[None, whole:], codes[None, whole:], scales[-1:, None]))
            for source, target, scale in parts:
                ratio = source / scale
                ratio *= np.float32(_STEPS)
                np.rint(ratio, out=ratio)
                ratio[scale[:, 0] == 0] = 0
                target[...] = ratio
        return seal(scales.astype("<f4").tobytes() + codes.tobytes(), codec=self.name, size=x.size, shared=b"")

    def decode(self, shared: bytes, payload: bytes, size: int) -> NDArray[np.float32]:
        """Undo :meth:`encode`."""
        body, flags = open_envelope(payload, codec=self.name, size=size, shared=shared)
        block = self.block_size or max(1, size)
        head = 4 * -(-size // block)
        if len(body) != head + size or flags:
            raise PayloadError(f"payload body of {len(body)} bytes where {head + size} were expected")
        scales = np.frombuffer(body[:head], "<f4").astype(np.float32)
        codes = np.frombuffer(body[head:], np.int8)
        if not (np.isfinite(scales).all() and (scales >= 0).all()):
            raise PayloadError("payload holds a scale that is negative or not finite")
        if size and codes.min() < -_STEPS:
            raise PayloadError("payload holds the code -128, which stands for nothing")
        out = np.empty(size, np.float32)
        symbols = (codes.astype(np.int16) + np.int16(_STEPS)).astype(np.uint16)
        _rounding.restore(symbols, block, scales, _VALUES, out)
        return out
