"""What sparsifiers share: which values are kept, and a payload of their positions and float32 values."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

import numpy as np

from gtrace.codecs.base import Codec, CodedBits, Simulated, parameter
from gtrace.coding import ENVELOPE_BYTES, Floats, decode_floats, open_envelope, seal, width_for
from gtrace.coding.positions import decode_positions, decode_sparse, encode_positions
from gtrace.coding.words import from_words, to_words, word_room
from gtrace.errors import PayloadError
from gtrace.kernels import elias as _elias

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from gtrace.types import State

PositionCoder: TypeAlias = Literal["gaps", "fixed"]

_MAGNITUDE = np.uint32(0x7FFFFFFF)
_LENGTH = struct.Struct("<I")
#: flag of a payload whose values are coded
_CODED = 1


@dataclass(frozen=True)
class SparseCodec(Codec):
    """Some values exactly, the others zero."""

    unbiased: ClassVar[bool] = False

    ratio: float = parameter(0.01, "share of the values that is sent, at least one", minimum=0.0, maximum=1.0)
    coder: PositionCoder = parameter(
        "gaps",
        "positions by their gaps and values' exponents in a Huffman code, or ceil(log2 n) and 32 bits each",
        choices=("gaps", "fixed"),
    )

    def pack(self, x: NDArray[np.float32], positions: NDArray[np.int64]) -> bytes:
        """The payload of float32[n] with these ascending positions kept."""
        if self.coder == "fixed":
            body = _fixed(positions, x.size) + x[positions].astype("<f4").tobytes()
            return seal(body, codec=self.name, size=x.size, shared=b"")
        found = Floats(x[positions])
        places = encode_positions(positions, x.size)
        coded = _LENGTH.pack(len(places)) + places + found.encode()
        if found.coded and len(coded) < len(places) + 4 * positions.size:
            return seal(coded, codec=self.name, size=x.size, shared=b"", flags=_CODED)
        return seal(places + found.values.astype("<f4").tobytes(), codec=self.name, size=x.size, shared=b"")

    def decode(self, shared: bytes, payload: bytes, size: int) -> NDArray[np.float32]:
        """The kept values in their places."""
        positions, values, _ = self._opened(shared, payload, size)
        out = np.zeros(size, np.float32)
        out[positions] = values
        return out

    def simulate(self, state: State, values: ArrayLike, key: tuple[int, int]) -> Simulated:
        """As :meth:`encode` and :meth:`decode`."""
        payload = self.encode(state, values, key)
        positions, sent, coded = self._opened(b"", payload, state.size)
        out = np.zeros(state.size, np.float32)
        out[positions] = sent
        found, body = Floats(sent), 8 * (len(payload) - ENVELOPE_BYTES)
        # Positions are sent in one way whatever codes the values.
        code = found.block.bits if coded else found.block.fixed
        return Simulated(out, len(payload), CodedBits.of(found.block, body - int(code), state.size))

    def _opened(self, shared: bytes, payload: bytes, size: int) -> tuple[NDArray[np.int64], NDArray[np.float32], bool]:
        """Positions, values, and whether those are coded."""
        body, flags = open_envelope(payload, codec=self.name, size=size, shared=shared)
        if flags & ~(_CODED if self.coder == "gaps" else 0):
            raise PayloadError(f"payload has unknown flags {flags:#x}")
        if self.coder == "fixed":
            return *_unfixed(body, size), False
        if not flags:
            return *decode_sparse(body, size), False
        if len(body) < _LENGTH.size:
            raise PayloadError("payload ends before the length of its positions")
        end = _LENGTH.size + int(_LENGTH.unpack_from(body)[0])
        positions = decode_positions(body[_LENGTH.size : end], size)
        return positions, decode_floats(body[end:], positions.size, coded=True), True


def kept(ratio: float, size: int) -> int:
    """How many of ``size`` values a sparsifier keeps.

    >>> [kept(0.01, n) for n in (0, 1, 149, 151, 1000)]
    [0, 1, 1, 2, 10]
    """
    return min(size, max(1, round(ratio * size)))


def magnitudes(x: NDArray[np.float32]) -> NDArray[np.uint32]:
    """|x| as integers in the same order, uint32[n]: they are compared and selected faster than floats."""
    return x.view(np.uint32) & _MAGNITUDE


def largest(ranks: NDArray[np.uint32], count: int) -> NDArray[np.int64]:
    """Positions, ascending, of the ``count`` largest of uint32[n]; of equal ones those that come first.

    >>> largest(np.array([3, 7, 7, 1, 7], np.uint32), 2).tolist()
    [1, 2]
    """
    if count >= ranks.size:
        return np.arange(ranks.size)
    if count == 0:
        return np.empty(0, np.int64)
    threshold = np.partition(ranks, ranks.size - count)[-count]
    found = np.flatnonzero(ranks >= threshold)
    if found.size > count:
        surplus = np.flatnonzero(ranks[found] == threshold)[count - found.size :]
        found = np.delete(found, surplus)
    return found


def _fixed(positions: NDArray[np.int64], size: int) -> bytes:
    """Positions in ``width_for(size)`` bits each, and nothing else: the body's length tells their number."""
    width = width_for(size)
    words = word_room(positions.size * width)
    if width:
        _elias.write_wide(positions, width, words)
    return from_words(words, positions.size * width)


def _unfixed(body: memoryview, size: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Positions and values of a body of :func:`_fixed` and float32 values.

    Raises:
        PayloadError: it is none.
    """
    width = width_for(size)
    count = 8 * len(body) // (32 + width)
    split = -(-count * width // 8)
    if count > size or len(body) != split + 4 * count:
        raise PayloadError(f"payload body of {len(body)} bytes is no positions and values of a tensor of {size}")
    spare = 8 * split - count * width
    if spare and body[split - 1] >> (8 - spare):
        raise PayloadError("padding after the last position is not zero")
    positions = np.zeros(count, np.int64)
    if width and not _elias.read_wide(to_words(body[:split]), width, size, positions):
        raise PayloadError("payload holds positions that are not ascending or lie beyond the tensor")
    values = np.frombuffer(body[split:], "<f4").astype(np.float32)
    if not np.isfinite(values).all():
        raise PayloadError("payload holds a value that is not finite")
    return positions, values
