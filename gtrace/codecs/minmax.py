"""MQGrad's quantizer: codes that are uniform from a tensor's least value to its greatest."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from gtrace.codecs.base import Codec, checked_values, parameter
from gtrace.codecs.registry import register
from gtrace.coding import fixed_size, open_envelope, pack_fixed, seal, unpack_fixed
from gtrace.errors import PayloadError
from gtrace.kernels import affine as _affine
from gtrace.kernels import rounding as _rounding

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from gtrace.types import State

_RANGE = struct.Struct("<ff")


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

    @property
    def whole_tensor(self) -> bool:
        """The range is that of all values."""
        return True

    def encode(self, state: State, values: ArrayLike, key: tuple[int, int]) -> bytes:
        """The least and the greatest value (float32), then codes of ``bits`` bits; the envelope's flags name bits."""
        del key
        x = checked_values(state, values)
        low, high = (float(x.min()), float(x.max())) if x.size else (0.0, 0.0)
        codes = np.zeros(x.size, np.uint16)
        if high > low:
            _affine.round_affine(x, low, high - low, self._steps, codes)
        body = _RANGE.pack(low, high) + pack_fixed(codes, self.bits)
        return seal(body, codec=self.name, size=x.size, shared=b"", flags=self.bits)

    def decode(self, shared: bytes, payload: bytes, size: int) -> NDArray[np.float32]:
        """Undo :meth:`encode`."""
        body, bits = open_envelope(payload, codec=self.name, size=size, shared=shared)
        if bits != self.bits:
            raise PayloadError(f"payload of {bits} bits a code where {self.bits} were expected")
        if len(body) != _RANGE.size + fixed_size(size, self.bits):
            expected = _RANGE.size + fixed_size(size, self.bits)
            raise PayloadError(f"payload body of {len(body)} bytes where {expected} were expected")
        low, high = _RANGE.unpack_from(body)
        if not (np.isfinite(low) and np.isfinite(high) and low <= high):
            raise PayloadError(f"payload holds a range from {low:g} to {high:g}")
        codes = unpack_fixed(body[_RANGE.size :], size, self.bits, self._steps + 1)
        levels = (low + np.arange(self._steps + 1) * (high - low) / self._steps).astype(np.float32)
        out = np.empty(size, np.float32)
        _rounding.restore(codes, max(1, size), np.ones(min(1, size), np.float32), levels, out)
        return out

    @property
    def _steps(self) -> int:
        """The highest code."""
        return (1 << self.bits) - 1
