"""PowerSGD: a gradient as the product of two thin matrices."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gtrace.buckets import Blocks, TensorSums
from gtrace.codecs.base import Averaged, EncodedPart, checked_values, parameter
from gtrace.codecs.engine import Composed
from gtrace.codecs.memory import UNITS, saturating
from gtrace.codecs.parts import FLOAT32_MAX
from gtrace.codecs.spec import register
from gtrace.coding.fixed import read_floats
from gtrace.errors import PayloadError
from gtrace.kernels import elementwise as _elementwise
from gtrace.kernels.norms import BLOCK
from gtrace.types import Key, State

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import ArrayLike, NDArray

    from gtrace.codecs.base import Pieces, Rounds
    from gtrace.codecs.parts import Values

_START = Key.derive(0, tensor="powersgd", role="sample")
_ROWS = struct.Struct("<I")


@register
@dataclass(frozen=True)
class PowerSgd(Composed):
    """One step of power iteration with error feedback and a warm start.

    The matrix has the first dimension of the parameter as rows, and the rest as columns. Parameters with fewer than
    two dimensions, and those that two factors do not shorten, are sent in float32. If the shape is not known, the
    matrix is as square as possible, padded with zeros; that usually loses more than the true matrix.
    Workers average P, then Q. The state holds ``residual`` (float32[n]) and ``q`` (float32[columns, rank]), the start
    of the iteration, which is the same on all workers; it is empty for a tensor that is sent exactly.
    """

    name = "powersgd"
    summary = "two thin factors of the gradient as a matrix, with error feedback"
    formula = """M = v + e as a matrix; P <- mean of M Q over the workers, orthonormal; Q <- mean of M' P; all hold P
    Q'; e <- M - P Q'"""
    paper = "Vogels et al., PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization, 2019"
    corrections = (
        "P is made orthonormal by Householder reflections, not by Gram-Schmidt: the same product, with less rounding",
        "a column of Q that becomes zero keeps its last start",
        UNITS,
    )
    about = """The gradient as a matrix of low rank: two thin factors by one step of power iteration that starts from
    the last step's result, with error feedback. Linear layers suit it."""
    sends = """The factors P and Q in float32, each averaged over the workers; vectors, and tensors that factors would
    not shorten, are sent as they are."""
    behavior = """Rows are the parameter's first dimension. Bits 32 rank (rows + columns) / n: they fall with size.
    Error is small where singular values fall fast; the first steps are worse, until the iteration has found its
    directions."""
    related = ("ef", "topk")
    unbiased = False
    stateful = True
    deterministic = True
    linear = True

    rank: int = parameter(2, "columns of each factor", minimum=1, maximum=1 << 16)
    warm: bool = parameter(True, "start from the last Q; otherwise from random numbers at every step")

    def init(self, size: int, shape: tuple[int, ...] | None = None) -> State:
        """No residual, and normal random numbers as the start, the same on every worker."""
        state = State(int(size), {}, shape)
        rows = self._rows(state)
        if not rows:
            return state
        q = _normal((-(-state.size // rows), self.rank), _START)
        return state.with_arrays(residual=np.zeros(state.size, np.float32), q=q)

    def rounds(self, state: State, values: ArrayLike, key: tuple[int, int]) -> Rounds:
        """P (rows x rank), then Q (columns x rank); the values of a tensor that is sent exactly."""
        if "q" not in state.arrays:
            exact = checked_values(state, values)
            mean = yield exact
            return Averaged(mean, exact, state)
        start = state.arrays["q"]
        x = saturating(checked_values(state, values), state.arrays["residual"])
        rows = self._rows(state)
        p = _orthonormal((yield _times([x], rows, start)))
        own = _transposed_times([x], p, len(start))
        q = yield own
        decoded = _product(p, q, x.size)
        after = state.with_arrays(residual=saturating(x, decoded, scale_y=-1.0), q=self._following(q, start))
        return Averaged(decoded, decoded if q is own else _product(p, own, x.size), after)

    def write(self, state: State, x: Values, key: tuple[int, int]) -> tuple[bytes, int]:
        """This worker's P, then Q, row by row in float32."""
        if "q" not in state.arrays:
            return x.astype("<f4").tobytes(), 0
        given, start = _given(state, x), state.arrays["q"]
        p = _times([given], self._rows(state), start)
        q = _transposed_times([given], _orthonormal(p), len(start))
        return p.astype("<f4").tobytes() + q.astype("<f4").tobytes(), 0

    def shared(self, state: State) -> bytes:
        """The number of rows, little-endian uint32; nothing for a tensor that is sent exactly."""
        return _ROWS.pack(self._rows(state)) if "q" in state.arrays else b""

    def read(self, shared: bytes, body: memoryview, flags: int, size: int) -> Values:
        rows = 0
        if shared:
            if len(shared) != _ROWS.size or not any(shared):
                raise PayloadError("shared bytes are not a number of rows")
            (rows,) = _ROWS.unpack(shared)
        columns = -(-size // rows) if rows else 0
        wanted = 4 * (self.rank * (rows + columns) if rows else size)
        if flags or len(body) != wanted:
            raise PayloadError(f"payload body has {len(body)} bytes; expected {wanted}")
        sent = read_floats(body)
        if not rows:
            return sent
        if self.rank > rows or rows > size:
            raise PayloadError(f"a matrix of {rows} rows cannot have {self.rank} factors of {size} values")
        p, q = sent[: rows * self.rank], sent[rows * self.rank :]
        return _product(_orthonormal(p.reshape(rows, -1)), q.reshape(columns, -1), size)

    part_multiple = 1

    def prepare(self, state: State, pieces: Pieces, key: tuple[int, int], sums: TensorSums | None = None) -> State:
        """Store a single worker's factors: ``p``, float64[rows, rank], and ``right``; empty for exact values."""
        if "q" not in state.arrays:
            return state.with_arrays(p=np.empty((0, 0)))
        start = state.arrays["q"]
        p = _orthonormal(_times((_given(kept, x) for kept, x in pieces()), self._rows(state), start))
        return state.with_arrays(p=p, right=_transposed_times((_given(kept, x) for kept, x in pieces()), p, len(start)))

    def settled(self, state: State, prepared: State) -> State:
        if "q" not in state.arrays:
            return state
        return state.with_arrays(q=self._following(prepared.arrays["right"], state.arrays["q"]))

    def encode_part(self, state: State, values: ArrayLike, key: tuple[int, int], start: int) -> EncodedPart:
        """The part of the product; the factors count with the first part."""
        x = checked_values(state, values)
        prepared = self._prepared(state, x).arrays
        if not prepared["p"].size:
            return EncodedPart(x, coded=32 * x.size)
        p, q = prepared["p"], prepared["right"]
        return EncodedPart(_product(p, q, x.size, start), coded=0 if start else 32 * (p.size + q.size))

    def update(self, state: State, values: ArrayLike, decoded: Values) -> State:
        """A single worker's memory: the residual, and Q as the next start."""
        x = checked_values(state, values)
        prepared = self._prepared(state, x)
        if not prepared.arrays["p"].size:
            return state
        after = state.with_arrays(residual=saturating(_given(state, x), decoded, scale_y=-1.0))
        # After all parts of a tensor, settled does the rest.
        return after if prepared is state else self.settled(after, prepared)

    def _prepared(self, state: State, x: Values) -> State:
        """The state with the factors, of which the whole tensor's has none yet."""
        return state if "p" in state.arrays else self.prepare(state, lambda: iter([(state, x)]), _START)

    def _following(self, q: Values, start: Values) -> Values:
        """The start of the next step's iteration."""
        if self.warm:
            return np.where(q.any(axis=0), q, start)
        # The same on all workers, whose starts are the same.
        return _normal(start.shape, Key.hashed(start.astype("<f4").tobytes(), b"powersgd"))

    def _rows(self, state: State) -> int:
        """Rows of the matrix; 0 for a tensor that is sent exactly."""
        shape = state.shape
        rows = math.isqrt(state.size) if shape is None else shape[0] if len(shape) > 1 else 0
        return rows if rows and self.rank * (rows + -(-state.size // rows)) < state.size else 0


def _normal(shape: tuple[int, ...], key: tuple[int, int]) -> Values:
    random = np.empty((2, *shape), np.uint32)
    _elementwise.fill_words(np.uint64(key[0]), np.uint64(key[1]), 0, random.reshape(-1))
    u = (random + 0.5) / 2.0**32
    return (np.sqrt(-2 * np.log(u[0])) * np.cos(2 * math.pi * u[1])).astype(np.float32)


def _orthonormal(p: Values) -> NDArray[np.float64]:
    """A basis of the columns, float64[rows, rank]."""
    return np.linalg.qr(p.astype(np.float64))[0]


def _given(kept: State, x: Values) -> Values:
    """A piece with what is remembered of it."""
    return saturating(x, kept.arrays["residual"]) if "residual" in kept.arrays else x


def _blocks(pieces: Iterable[Values], columns: int) -> Iterator[tuple[slice, NDArray[np.float64]]]:
    """A matrix that arrives in pieces, in fixed blocks of its rows, the last of them filled up with zeros."""
    first, each = 0, max(1, BLOCK // columns)
    for (values,) in Blocks.of(zip(pieces), each * columns):
        block = np.zeros((-(-values.size // columns), columns))
        block.reshape(-1)[: values.size] = values
        yield slice(first, first + len(block)), block
        first += len(block)


def _times(pieces: Iterable[Values], rows: int, q: Values) -> Values:
    """M Q: float32[rows, rank]."""
    p = np.zeros((rows, q.shape[1]))
    for where, block in _blocks(pieces, len(q)):
        p[where] = block @ q
    return _narrowed(p)


def _transposed_times(pieces: Iterable[Values], p: NDArray[np.float64], columns: int) -> Values:
    """M' P: float32[columns, rank]."""
    q = np.zeros((columns, p.shape[1]))
    for where, block in _blocks(pieces, columns):
        q += block.T @ p[where]
    return _narrowed(q)


def _product(p: NDArray[np.float64], q: Values, size: int, start: int = 0) -> Values:
    """Values ``start`` and following of P Q', without the padding: float32[size]."""
    columns, right = len(q), q.T.astype(np.float64)
    each = max(1, BLOCK // columns)
    first = start // columns // each * each
    last = -(-(start + size) // columns)
    rows = [_narrowed(p[k : k + each] @ right).reshape(-1) for k in range(first, max(last, first + 1), each)]
    return np.concatenate(rows)[start - first * columns :][:size].copy()


def _narrowed(x: NDArray[np.float64]) -> Values:
    return np.clip(x, -float(FLOAT32_MAX), float(FLOAT32_MAX)).astype(np.float32)
