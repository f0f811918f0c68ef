"""The discrete cosine transform as a prefix: any codec on the coefficients of tiles, as in DeMo."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from scipy import fft

from gtrace.codecs.base import Codec, CodedBits, Simulated, checked_values, parameter
from gtrace.codecs.parts import FLOAT32_MAX
from gtrace.codecs.spec import register_wrapper
from gtrace.codecs.wrappers import Wrapper
from gtrace.coding import open_envelope, seal
from gtrace.errors import PayloadError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from gtrace.codecs.base import Rounds
    from gtrace.types import State

_ROWS = struct.Struct("<I")


@register_wrapper
@dataclass(frozen=True)
class Dct(Wrapper):
    """A cosine transform of tiles around any codec: ``dct:chunk=64:topk:chunk=4096,ratio=0.01``.

    A matrix is cut into tiles of at most ``chunk`` rows and columns, a vector into pieces; each tile's coefficients
    follow each other, so a codec with chunks of a tile's size chooses in each tile. Tensors of more dimensions are
    matrices with their first one as rows. The transform is orthonormal: errors are those of the codec inside.
    """

    name = "dct"
    summary = "a cosine transform of tiles before any codec, undone after it"
    formula = "T'(Q(T v)), T the orthonormal DCT-II of tiles of chunk x chunk values"
    paper = "Peng et al., DeMo: Decoupled Momentum Optimization, 2024"
    corrections = (
        "tensors of more than two dimensions are matrices, the first dimension by the rest",
        "the momentum that it goes with is ef:decay=; the sign of the sum belongs to the optimizer",
    )
    about = "Momentum of neighbouring weights is correlated, so few coefficients of a cosine transform hold its energy."
    sends = "The number of rows (u32; 0 for a vector), then the body of the payload of the codec inside."
    behavior = "Pays off for sparsifiers where rows and columns have an order; on shuffled weights it does nothing."
    related = ("rotate", "topk", "ef")

    chunk: int = parameter(64, "a tile's rows and columns at most; their largest divisor up to it", minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        # Coordinates are the same on every worker and at every step.
        object.__setattr__(self, "deterministic", self.inner.deterministic)

    @property
    def wire_name(self) -> str:
        """The wrapper's own name: a receiver that does not transform back must refuse the payload."""
        return self.name

    def given(self, state: State, values: ArrayLike) -> NDArray[np.float32]:
        """The coefficients, tile by tile."""
        return self._transformed(checked_values(state, values), _rows(state))

    def encode(self, state: State, values: ArrayLike, key: tuple[int, int]) -> bytes:
        """The number of rows, then the inner body."""
        shared = self.shared(state)
        payload = super().encode(state, values, key)
        body, flags = open_envelope(payload, codec=self.inner.wire_name, size=state.size, shared=shared)
        return seal(_ROWS.pack(_rows(state)) + body, codec=self.name, size=state.size, shared=shared, flags=flags)

    def decode(self, shared: bytes, payload: bytes, size: int) -> NDArray[np.float32]:
        """Undo :meth:`encode`."""
        body, flags = open_envelope(payload, codec=self.name, size=size, shared=shared)
        rows = _ROWS.unpack_from(body)[0] if len(body) >= _ROWS.size else None
        if rows is None or (rows and size % rows):
            raise PayloadError(f"payload of a transform of {size} values has no number of rows that fits")
        inner = seal(bytes(body[_ROWS.size :]), codec=self.inner.wire_name, size=size, shared=shared, flags=flags)
        return self._transformed(self.inner.decode(shared, inner, size), rows, back=True)

    def simulate(self, state: State, values: ArrayLike, key: tuple[int, int]) -> Simulated:
        """The inner codec's result for the coefficients, transformed back."""
        found = super().simulate(state, values, key)
        bits = 8 * _ROWS.size / max(1, state.size)
        coded = found.coded and CodedBits(*(each + bits for each in found.coded))
        decoded = self._transformed(found.values, _rows(state), back=True)
        return Simulated(decoded, found.payload_bytes + _ROWS.size, coded)

    def update(self, state: State, values: ArrayLike, decoded: NDArray[np.float32]) -> State:
        """Update the inner codec, in its own coordinates."""
        if not self.inner.stateful:
            return state
        return super().update(state, values, self._transformed(decoded, _rows(state)))

    def rounds(self, state: State, values: ArrayLike, key: tuple[int, int]) -> Rounds:
        """The inner codec's rounds, transformed back at the end."""
        ended = yield from super().rounds(state, values, key)
        decoded, own = (self._transformed(array, _rows(state), back=True) for array in (ended.decoded, ended.own))
        return ended._replace(decoded=decoded, own=own)

    def aggregate(self, decoded: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
        """The mean: a vote over signs means nothing once they are transformed back."""
        return Codec.aggregate(self, decoded)

    def _transformed(self, x: NDArray[np.float32], rows: int, *, back: bool = False) -> NDArray[np.float32]:
        """float32[n] in the order of tiles, or back in the tensor's own."""
        if not x.size:
            return x
        columns = x.size // max(1, rows)
        high, wide = (_tile(length, self.chunk) for length in (max(1, rows), columns))
        down, across = max(1, rows) // high, columns // wide
        if back:
            tiles = fft.idctn(x.reshape(down, across, high, wide).astype(np.float64), axes=(2, 3), norm="ortho")
            out = tiles.transpose(0, 2, 1, 3)
        else:
            tiles = x.reshape(down, high, across, wide).transpose(0, 2, 1, 3).astype(np.float64)
            out = fft.dctn(tiles, axes=(2, 3), norm="ortho")
        return np.clip(out, -FLOAT32_MAX, FLOAT32_MAX).astype(np.float32).reshape(-1)


def _rows(state: State) -> int:
    """Rows of the matrix; 0 for a vector, or without a shape."""
    return state.shape[0] if state.shape is not None and len(state.shape) > 1 else 0


@lru_cache(maxsize=1024)
def _tile(length: int, most: int) -> int:
    """The largest divisor of a length up to ``most``."""
    return next(size for size in range(min(length, most), 0, -1) if not length % size)
