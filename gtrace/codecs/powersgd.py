"""PowerSGD: a gradient as the product of two thin matrices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from gtrace.codecs.base import parameter
from gtrace.codecs.feedback import UNITS, ResidualCodec, corrected
from gtrace.codecs.registry import register
from gtrace.codecs.wrapper import FLOAT32_MAX
from gtrace.coding import open_envelope, seal
from gtrace.errors import PayloadError
from gtrace.kernels import select as _select
from gtrace.types import Key

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from gtrace.types import State

_START = Key.derive(0, tensor="powersgd", role="sample")


@register
@dataclass(frozen=True)
class PowerSgd(ResidualCodec):
    """One step of power iteration with error feedback and a warm start.

    A codec sees a flat tensor. It is laid out in rows of a matrix that is as square as possible, or has ``rows``
    rows (give the first dimension of the weight, so that rows are what they were); a short last row is filled with
    zeros, which are not sent. A tensor that two factors would not shorten is sent in float32, as the paper does with
    vectors. The state holds ``residual`` (float32[n]) and ``q`` (float32[columns, rank]), the start of the iteration.
    """

    name: ClassVar[str] = "powersgd"
    summary: ClassVar[str] = "two thin factors of the gradient as a matrix, with error feedback"
    formula: ClassVar[str] = "M = v + e as a matrix; P = orthonormal(M Q); Q <- M' P; send P, Q: P Q'; e <- M - P Q'"
    paper: ClassVar[str] = (
        "Vogels et al., PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization, 2019"
    )
    corrections: ClassVar[tuple[str, ...]] = (
        "the paper averages P, then Q, over the workers; here each sends its own, and their products are averaged",
        "a column of Q that becomes zero keeps its last start",
        UNITS,
    )

    rank: int = parameter(2, "columns of each factor", minimum=1, maximum=1 << 16)
    rows: int | None = parameter(
        None, "rows of the matrix; none for about the square root of the size", minimum=1, optional=True
    )
    warm: bool = parameter(True, "start from the last Q; otherwise from random numbers at every step")

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "deterministic", self.warm)

    def init(self, size: int) -> State:
        """No residual, and a start of normal random numbers, the same on every worker."""
        state = super().init(size)
        return state.with_arrays(q=self._random(size, _START)) if self.warm and self._thin(size) else state

    def send(self, state: State, x: NDArray[np.float32], key: tuple[int, int]) -> bytes:
        """P (rows x rank), then Q (columns x rank), row by row in float32."""
        if not self._thin(x.size):
            return seal(x.astype("<f4").tobytes(), codec=self.name, size=x.size, shared=b"")
        start = state.arrays["q"] if self.warm else self._random(x.size, key)
        p, q = self._factors(x, start)
        return seal(p.astype("<f4").tobytes() + q.astype("<f4").tobytes(), codec=self.name, size=x.size, shared=b"")

    def decode(self, shared: bytes, payload: bytes, size: int) -> NDArray[np.float32]:
        """Undo :meth:`encode`."""
        body, flags = open_envelope(payload, codec=self.name, size=size, shared=shared)
        rows, columns = self._shape(size)
        thin = self._thin(size)
        wanted = 4 * (self.rank * (rows + columns) if thin else size)
        if flags or len(body) != wanted:
            raise PayloadError(f"payload body of {len(body)} bytes where {wanted} were expected")
        sent = np.frombuffer(body, "<f4").astype(np.float32)
        if not np.isfinite(sent).all():
            raise PayloadError("payload holds a value that is not finite")
        if not thin:
            return sent
        p = sent[: rows * self.rank].reshape(rows, self.rank).astype(np.float64)
        q = sent[rows * self.rank :].reshape(columns, self.rank).astype(np.float64)
        return _narrowed(p @ q.T).reshape(-1)[:size].copy()

    def update(self, state: State, values: ArrayLike, decoded: NDArray[np.float32]) -> State:
        """Keep what did not arrive, and Q as the next start."""
        following = super().update(state, values, decoded)
        if "q" not in state.arrays:
            return following
        old = state.arrays["q"]
        _, q = self._factors(corrected(state, values), old)
        return following.with_arrays(q=np.where(q.any(axis=0), q, old))

    def _shape(self, size: int) -> tuple[int, int]:
        rows = self.rows or max(1, math.isqrt(size))
        return rows, -(-size // rows)

    def _thin(self, size: int) -> bool:
        return self.rank * sum(self._shape(size)) < size

    def _random(self, size: int, key: tuple[int, int]) -> NDArray[np.float32]:
        """Normal random numbers, float32[columns, rank]."""
        _, columns = self._shape(size)
        random = np.empty((2, columns, self.rank), np.uint32)
        _select.fill_words(np.uint64(key[0]), np.uint64(key[1]), random.reshape(-1))
        u = (random + 0.5) / 2.0**32
        normal: NDArray[np.float32] = (np.sqrt(-2 * np.log(u[0])) * np.cos(2 * math.pi * u[1])).astype(np.float32)
        return normal

    def _factors(self, x: NDArray[np.float32], start: NDArray[np.float32]) -> tuple[NDArray[np.float32], ...]:
        rows, columns = self._shape(x.size)
        matrix = np.zeros((rows, columns), np.float64)
        matrix.reshape(-1)[: x.size] = x
        p = np.linalg.qr(matrix @ start.astype(np.float64))[0].astype(np.float32)
        return p, _narrowed(matrix.T @ p.astype(np.float64))


def _narrowed(x: NDArray[np.float64]) -> NDArray[np.float32]:
    return np.clip(x, -float(FLOAT32_MAX), float(FLOAT32_MAX)).astype(np.float32)
