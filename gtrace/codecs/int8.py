"""Eight-bit integers, scaled per block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from gtrace.buckets import bucket_scales
from gtrace.codecs.base import Codec, CodedBits, Simulated, checked_values, coder_parameter, parameter
from gtrace.codecs.registry import register
from gtrace.coding import ENVELOPE_BYTES, Block, decode_block, open_envelope, seal, tally
from gtrace.errors import PayloadError
from gtrace.kernels import rounding as _rounding

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from gtrace.types import State

_STEPS = 127
_CODED = 1
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

    coder: str = coder_parameter()

    def encode(self, state: State, values: ArrayLike, key: tuple[int, int]) -> bytes:
        """The blocks' scales (float32), then a block of codes, 127 for zero; flag 1 says that a code is sent."""
        del key
        scales, codes, block = self._coded(state, values)
        body = scales.astype("<f4").tobytes() + block.encode(codes)
        flags = 0 if block.lengths is None else _CODED
        return seal(body, codec=self.name, size=codes.size, shared=b"", flags=flags)

    def simulate(self, state: State, values: ArrayLike, key: tuple[int, int]) -> Simulated:
        """As :meth:`encode` and :meth:`decode`, the payload's length from how often each code occurs."""
        del key
        scales, codes, block = self._coded(state, values)
        size = ENVELOPE_BYTES + 4 * scales.size + block.size
        return Simulated(self._restored(scales, codes), size, CodedBits.of(block, 32 * scales.size, codes.size))

    def decode(self, shared: bytes, payload: bytes, size: int) -> NDArray[np.float32]:
        """Undo :meth:`encode`."""
        body, flags = open_envelope(payload, codec=self.name, size=size, shared=shared)
        head = 4 * -(-size // (self.block_size or max(1, size)))
        if len(body) < head or flags & ~_CODED:
            raise PayloadError(f"payload body of {len(body)} bytes with flags {flags:#x} is no {size} scaled codes")
        scales = np.frombuffer(body[:head], "<f4").astype(np.float32)
        if not (np.isfinite(scales).all() and (scales >= 0).all()):
            raise PayloadError("payload holds a scale that is negative or not finite")
        return self._restored(scales, decode_block(body[head:], size, _VALUES.size, coded=bool(flags)))

    def _coded(self, state: State, values: ArrayLike) -> tuple[NDArray[np.float32], NDArray[np.uint16], Block]:
        x = checked_values(state, values)
        scales = bucket_scales(x, "linf", self.block_size)
        block = self.block_size or max(1, x.size)
        codes = np.empty(x.size, np.uint16)
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
                ratio += np.float32(_STEPS)
                target[...] = ratio
        return scales, codes, Block.of(tally(codes, _VALUES.size), coder=self.coder)

    def _restored(self, scales: NDArray[np.float32], codes: NDArray[np.uint16]) -> NDArray[np.float32]:
        out = np.empty(codes.size, np.float32)
        _rounding.restore(codes, self.block_size or max(1, codes.size), scales, _VALUES, out)
        return out
