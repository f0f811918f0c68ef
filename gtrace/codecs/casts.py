"""Shorter floating point: float16 and bfloat16."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from gtrace.codecs.base import checked_values
from gtrace.codecs.chunked import Part, PartwiseCodec
from gtrace.codecs.registry import register
from gtrace.coding import open_envelope, seal
from gtrace.errors import PayloadError
from gtrace.kernels import elementwise as _elementwise

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from gtrace.types import State

_SATURATES = "values beyond the format's range become its largest finite number, not infinity"


@dataclass(frozen=True)
class CastCodec(PartwiseCodec):
    """A 16-bit format; a method says how float32 becomes its bits and back."""

    unbiased: ClassVar[bool] = False
    deterministic: ClassVar[bool] = True
    corrections: ClassVar[tuple[str, ...]] = (_SATURATES,)

    @staticmethod
    @abstractmethod
    def narrowed(x: NDArray[np.float32]) -> NDArray[np.uint16]:
        """float32[n] as uint16[n], nearest even, saturating."""

    @staticmethod
    @abstractmethod
    def widened(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
        """uint16[n] as float32[n], exactly."""

    def encode(self, state: State, values: ArrayLike, key: tuple[int, int]) -> bytes:
        """Sixteen bits a value."""
        del key
        x = checked_values(state, values)
        return seal(self.narrowed(x).astype("<u2").tobytes(), codec=self.name, size=x.size, shared=b"")

    def encode_part(self, state: State, values: ArrayLike, key: tuple[int, int], start: int) -> Part:
        """The part's values."""
        del start
        return Part(self.encode(state, values, key), head=16 * state.size)

    def decode(self, shared: bytes, payload: bytes, size: int) -> NDArray[np.float32]:
        """Undo :meth:`encode`."""
        body, flags = open_envelope(payload, codec=self.name, size=size, shared=shared)
        if len(body) != 2 * size or flags:
            raise PayloadError(f"payload body of {len(body)} bytes where {2 * size} were expected")
        out = self.widened(np.frombuffer(body, "<u2").astype(np.uint16))
        if not np.isfinite(out).all():
            raise PayloadError("payload holds a value that is not finite")
        return out


@register
@dataclass(frozen=True)
class Fp16(CastCodec):
    """IEEE 754 half precision: 5 bits of exponent, 10 of mantissa, subnormals kept."""

    name: ClassVar[str] = "fp16"
    summary: ClassVar[str] = "float16, rounded to nearest even"
    formula: ClassVar[str] = "Q(v) = the nearest of the float16 numbers, up to 65504 in magnitude"
    paper: ClassVar[str] = "IEEE 754-2008, binary16"

    @staticmethod
    def narrowed(x: NDArray[np.float32]) -> NDArray[np.uint16]:
        """float32[n] as the bits of float16[n]."""
        largest = np.float32(np.finfo(np.float16).max)
        return np.clip(x, -largest, largest).astype(np.float16).view(np.uint16)

    @staticmethod
    def widened(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
        """The bits of float16[n] as float32[n]."""
        return bits.view(np.float16).astype(np.float32)


@register
@dataclass(frozen=True)
class Bf16(CastCodec):
    """bfloat16: float32 with 7 bits of mantissa."""

    name: ClassVar[str] = "bf16"
    summary: ClassVar[str] = "bfloat16, rounded to nearest even"
    formula: ClassVar[str] = "Q(v) = the nearest of the float32 numbers with 7 bits of mantissa"
    paper: ClassVar[str] = "Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019"

    @staticmethod
    def narrowed(x: NDArray[np.float32]) -> NDArray[np.uint16]:
        """The upper halves of float32[n]."""
        out = np.empty(x.size, np.uint16)
        _elementwise.to_bfloat16(x.view(np.uint32), out)
        return out

    @staticmethod
    def widened(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
        """Upper halves, filled up with zeros."""
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
