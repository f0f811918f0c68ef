"""The discrete cosine transform as a prefix: any codec on the coefficients of tiles, DeMo's for one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import scipy as sp

from gtrace.codecs.base import parameter
from gtrace.codecs.parts import FLOAT32_MAX
from gtrace.codecs.spec import register_wrapper
from gtrace.codecs.wrappers import Coordinates
from gtrace.errors import PayloadError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.types import State


@register_wrapper
@dataclass(frozen=True)
class Dct(Coordinates):
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

    def number(self, state: State, key: tuple[int, int]) -> int:
        """Rows of the matrix; 0 for a vector, or without a shape."""
        return state.shape[0] if state.shape is not None and len(state.shape) > 1 else 0

    def turned(self, x: NDArray[np.float32], number: int, *, back: bool = False) -> NDArray[np.float32]:
        """Coefficients in the order of tiles, or values in the tensor's own."""
        rows = number
        if rows and x.size % rows:
            raise PayloadError(f"payload of a transform of {x.size} values has {rows} rows")
        if not x.size:
            return x
        columns = x.size // max(1, rows)
        high, wide = (_tile(length, self.chunk) for length in (max(1, rows), columns))
        down, across = max(1, rows) // high, columns // wide
        if back:
            tiles = sp.fft.idctn(x.reshape(down, across, high, wide).astype(np.float64), axes=(2, 3), norm="ortho")
            out = tiles.transpose(0, 2, 1, 3)
        else:
            tiles = x.reshape(down, high, across, wide).transpose(0, 2, 1, 3).astype(np.float64)
            out = sp.fft.dctn(tiles, axes=(2, 3), norm="ortho")
        return np.clip(out, -FLOAT32_MAX, FLOAT32_MAX).astype(np.float32).reshape(-1)


@lru_cache(maxsize=1024)
def _tile(length: int, most: int) -> int:
    """The largest divisor of a length up to ``most``."""
    return next(size for size in range(min(length, most), 0, -1) if not length % size)
