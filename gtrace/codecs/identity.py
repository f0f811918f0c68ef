"""No compression: the yardstick, and what training without a codec sends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from gtrace.codecs.base import ExpectingCodec, checked_values
from gtrace.codecs.chunked import Part, PartwiseCodec
from gtrace.codecs.registry import register
from gtrace.coding import open_envelope, seal
from gtrace.errors import PayloadError
from gtrace.types import Expectation, State, SummarySpec

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from gtrace.sketch import MomentSketch


@register
@dataclass(frozen=True)
class Identity(PartwiseCodec, ExpectingCodec):
    """float32 as it is."""

    name: ClassVar[str] = "none"
    summary: ClassVar[str] = "float32, uncompressed"
    formula: ClassVar[str] = "Q(v) = v"
    paper: ClassVar[str] = "-"
    deterministic: ClassVar[bool] = True

    @property
    def needs(self) -> SummarySpec:
        """Any sketch will do; only zeros are read from it."""
        return SummarySpec("none", None)

    def encode(self, state: State, values: ArrayLike, key: tuple[int, int]) -> bytes:
        """The values, little-endian."""
        del key
        x = checked_values(state, values)
        return seal(x.astype("<f4").tobytes(), codec=self.name, size=x.size, shared=b"")

    def encode_part(self, state: State, values: ArrayLike, key: tuple[int, int], start: int) -> Part:
        """The part's values."""
        del start
        return Part(self.encode(state, values, key), head=32 * state.size)

    def decode(self, shared: bytes, payload: bytes, size: int) -> NDArray[np.float32]:
        """Undo :meth:`encode`."""
        body, flags = open_envelope(payload, codec=self.name, size=size, shared=shared)
        if len(body) != 4 * size or flags:
            raise PayloadError(f"payload body of {len(body)} bytes where {4 * size} were expected")
        return np.frombuffer(body, "<f4").astype(np.float32)

    def expect(self, state: State, sketch: MomentSketch) -> Expectation:
        """No error, 32 bits."""
        del state
        return Expectation(
            squared_error=0.0,
            sparsity=sketch.zeros / max(1, sketch.size),
            bits_fixed=32.0,
            bits_entropy=32.0,
            bits_huffman=32.0,
            bits_payload=32.0,
        )
