"""MQGrad's quantizer: codes that are uniform from a tensor's least value to its greatest."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from gtrace.codecs.base import Codec, CodedBits, Simulated, checked_values, coder_parameter, parameter
from gtrace.codecs.registry import register
from gtrace.coding import ENVELOPE_BYTES, Block, decode_block, open_envelope, seal, tally
from gtrace.errors import PayloadError
from gtrace.kernels import elementwise as _elementwise
from gtrace.kernels import rounding as _rounding

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from gtrace.types import State

_RANGE = struct.Struct("<ff")
#: flag beside the bits: a Huffman code is sent
_CODED = 0x100


@register
@dataclass(frozen=True)
class MinMax(Codec):
    """2^bits codes, the ends on the tensor's least and greatest value, rounded to nearest.

    A constant tensor decodes to itself. Zero is a level only by chance.
    """

    name: ClassVar[str] = "minmax"
    summary: ClassVar[str] = "uniform codes from a tensor's least value to its greatest, rounded to nearest"
    formula: ClassVar[str] = (
        "q = floor((v - min) (2^bits - 1) / (max - min) + 1/2), Q(v) = min + q (max - min) / (2^bits - 1)"
    )
    paper: ClassVar[str] = (
        "Cui et al., MQGrad: Reinforcement Learning of Gradient Quantization in Parameter Server, 2018"
    )
    corrections: ClassVar[tuple[str, ...]] = (
        "the paper names TensorFlow's quantizer alone; these are its codes with both ends of the range on a code",
    )
    unbiased: ClassVar[bool] = False
    deterministic: ClassVar[bool] = True

    bits: int = parameter(8, "of a code", minimum=1, maximum=16)
    coder: str = coder_parameter()

    @property
    def whole_tensor(self) -> bool:
        """The range is that of all values."""
        return True

    def encode(self, state: State, values: ArrayLike, key: tuple[int, int]) -> bytes:
        """The least and the greatest value (float32), then a block of codes; the envelope's flags name bits."""
        del key
        low, high, codes, block = self._coded(state, values)
        flags = self.bits | (0 if block.lengths is None else _CODED)
        body = _RANGE.pack(low, high) + block.encode(codes)
        return seal(body, codec=self.name, size=codes.size, shared=b"", flags=flags)

    def simulate(self, state: State, values: ArrayLike, key: tuple[int, int]) -> Simulated:
        """As :meth:`encode` and :meth:`decode`, the payload's length from how often each code occurs."""
        del key
        low, high, codes, block = self._coded(state, values)
        size = ENVELOPE_BYTES + _RANGE.size + block.size
        return Simulated(self._restored(low, high, codes), size, CodedBits.of(block, 8 * _RANGE.size, codes.size))

    def decode(self, shared: bytes, payload: bytes, size: int) -> NDArray[np.float32]:
        """Undo :meth:`encode`."""
        body, flags = open_envelope(payload, codec=self.name, size=size, shared=shared)
        if flags & ~_CODED != self.bits:
            raise PayloadError(f"payload has the flags {flags:#x}, those of another codec than {self}")
        if len(body) < _RANGE.size:
            raise PayloadError(f"payload body of {len(body)} bytes holds no range")
        low, high = _RANGE.unpack_from(body)
        if not (np.isfinite(low) and np.isfinite(high) and low <= high):
            raise PayloadError(f"payload holds a range from {low:g} to {high:g}")
        codes = decode_block(body[_RANGE.size :], size, self._steps + 1, coded=bool(flags & _CODED))
        return self._restored(low, high, codes)

    def _coded(self, state: State, values: ArrayLike) -> tuple[float, float, NDArray[np.uint16], Block]:
        x = checked_values(state, values)
        low, high = (float(x.min()), float(x.max())) if x.size else (0.0, 0.0)
        codes = np.zeros(x.size, np.uint16)
        if high > low:
            _elementwise.round_affine(x, low, high - low, self._steps, codes)
        return low, high, codes, Block.of(tally(codes, self._steps + 1), coder=self.coder)

    def _restored(self, low: float, high: float, codes: NDArray[np.uint16]) -> NDArray[np.float32]:
        levels = (low + np.arange(self._steps + 1) * (high - low) / self._steps).astype(np.float32)
        out = np.empty(codes.size, np.float32)
        _rounding.restore(codes, max(1, codes.size), np.ones(min(1, codes.size), np.float32), levels, out)
        return out

    @property
    def _steps(self) -> int:
        """The highest code."""
        return (1 << self.bits) - 1
