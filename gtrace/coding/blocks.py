"""Symbols that bring their own code: a Huffman code made for them and sent with them, or fixed width where shorter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gtrace.coding.fixed import fixed_size, pack_fixed, unpack_fixed, width_for
from gtrace.coding.huffman import HuffmanCode, entropy, huffman_lengths, tally
from gtrace.coding.lengths import lengths_size, pack_lengths, unpack_lengths
from gtrace.errors import PayloadError

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: bits of a float32 that :class:`Floats` codes, sign and exponent, and the lowest ones
_CODED, _RAW = 9, 16
_MIDDLE = 32 - _CODED - _RAW
_SELDOM = 0.25


@dataclass(frozen=True, slots=True, eq=False)
class CodedBlock:
    """How some symbols are sent.

    Attributes:
        width: bits of a symbol at fixed width.
        lengths: uint8[m], of the code that is sent along; None at fixed width.
        fixed: bits of all symbols at fixed width.
        entropy: bits at their entropy.
        huffman: bits in a Huffman code of their own, its lengths included; never more than ``fixed``.
    """

    width: int
    lengths: NDArray[np.uint8] | None
    fixed: float
    entropy: float
    huffman: float

    @classmethod
    def of(
        cls,
        tallies: NDArray[np.int64] | NDArray[np.float64],
        weights: NDArray[np.float64] | None = None,
        *,
        coder: str = "huffman",
    ) -> CodedBlock:
        """The shortest block of symbols that occur so often.

        Args:
            tallies: how often each symbol of the alphabet occurs, or is expected to.
            weights: how often each counts when the code is made, as many in all; by default as often as it occurs.
            coder: ``fixed`` never sends a code.
        """
        count, width = float(tallies.sum()), width_for(tallies.size)
        fixed = count * width
        if not fixed:
            return cls(width, None, fixed, 0.0, fixed)
        given = tallies.astype(np.float64) if weights is None else weights
        # Of symbols that are expected, not counted, the rarest mostly stay away.
        lengths = huffman_lengths(np.where(given >= _SELDOM, given, 0.0))
        coded = 8.0 * lengths_size(lengths, 0) + float(tallies @ lengths.astype(np.int64))
        shorter = -(-coded // 8) < -(-fixed // 8)
        sent = lengths if shorter and coder != "fixed" else None
        return cls(width, sent, fixed, count * entropy(given / count), coded if shorter else fixed)

    @classmethod
    def signed(cls, tallies: NDArray[np.int64] | NDArray[np.float64], *, coder: str = "huffman") -> CodedBlock:
        """As :meth:`of`, of symbols whose last bit is a sign; code lengths do not depend on it, but for 0 and 1.

        A sketch knows no signs, and so can foretell how long such a block is.
        """
        weights = np.repeat(tallies.reshape(-1, 2).sum(axis=1) / 2, 2)
        weights[:2] = tallies[:2]
        return cls.of(tallies, weights, coder=coder)

    @property
    def bits(self) -> float:
        """Bits that the block takes."""
        return self.fixed if self.lengths is None else self.huffman

    @property
    def size(self) -> int:
        """Bytes that the block takes."""
        return -(-int(self.bits) // 8)

    def encode(self, symbols: NDArray[np.uint16]) -> bytes:
        """The symbols that were counted, uint16[n]."""
        if self.lengths is None:
            return pack_fixed(symbols, self.width)
        return pack_lengths(self.lengths, 0) + HuffmanCode(self.lengths).encode(symbols)


def decode_block(data: bytes | memoryview, count: int, alphabet: int, *, coded: bool) -> NDArray[np.uint16]:
    """Undo :meth:`CodedBlock.encode`: ``count`` symbols, all below ``alphabet``, that take up all of ``data``.

    Args:
        data: the block.
        count: symbols in it.
        alphabet: how many symbols there are.
        coded: whether a code was sent.

    Raises:
        PayloadError: the bytes are no such block.
    """
    if not coded:
        return unpack_fixed(data, count, width_for(alphabet), alphabet)
    lengths, size = unpack_lengths(data, alphabet)
    return HuffmanCode(lengths).decode(memoryview(data)[size:], count)


def expected_floats(
    magnitudes: NDArray[np.float64], counts: NDArray[np.float64], zeros: float = 0.0
) -> NDArray[np.float64]:
    """What :attr:`Floats.tallies` are where each magnitude is expected so often, with either sign, beside zeros."""
    exponents = np.zeros(1 << (_CODED - 1))
    # frexp's fractions begin at a half; below 2^-126, with denormals, the exponent is 0.
    np.add.at(exponents, np.maximum(np.frexp(magnitudes)[1] + 126, 0) * (magnitudes > 0), counts)
    tallies = np.repeat(exponents / 2, 2)
    tallies[0] += zeros
    return tallies


class Floats:
    """How some float32 are sent: sign and exponent as a :class:`CodedBlock`, the other 23 bits as they are.

    Args:
        values: float32[n].
        coder: ``fixed`` never sends a code.
    """

    def __init__(self, values: NDArray[np.float32], *, coder: str = "huffman") -> None:
        self.values = np.ascontiguousarray(values, np.float32)
        self._heads = _heads(self.values)
        #: int64[512], how often each sign and exponent occurs
        self.tallies = tally(self._heads, 1 << _CODED)
        self.block = CodedBlock.signed(self.tallies, coder=coder)

    @property
    def coded(self) -> bool:
        """Whether a code is sent; without one the values are sent as they are."""
        return self.block.lengths is not None

    @property
    def raw(self) -> int:
        """Bits that no code shortens."""
        return (32 - _CODED) * self.values.size

    @staticmethod
    def size(count: int, block: CodedBlock) -> int:
        """Bytes of so many values with this block."""
        return 4 * count if block.lengths is None else 2 * count + fixed_size(count, _MIDDLE) + block.size

    def encode(self) -> bytes:
        """Little-endian float32; coded: the lowest 16 bits of each, the next 7 of each, then the block."""
        if not self.coded:
            return self.values.astype("<f4").tobytes()
        patterns = self.values.view(np.uint32)
        middle = ((patterns >> np.uint32(_RAW)) & np.uint32((1 << _MIDDLE) - 1)).astype(np.uint16)
        low = patterns.astype(np.uint16).astype("<u2").tobytes()
        return low + pack_fixed(middle, _MIDDLE) + self.block.encode(self._heads)


def decode_floats(data: bytes | memoryview, count: int, *, coded: bool) -> NDArray[np.float32]:
    """Undo :meth:`Floats.encode`: float32[count].

    Raises:
        PayloadError: the bytes are no such values, or one is not finite.
    """
    view = memoryview(data)
    if not coded:
        if len(view) != 4 * count:
            raise PayloadError(f"{len(view)} bytes of values where {4 * count} were expected")
        values = np.frombuffer(view, "<f4").astype(np.float32)
    else:
        low, end = 2 * count, 2 * count + fixed_size(count, _MIDDLE)
        if len(view) < end:
            raise PayloadError(f"{len(view)} bytes cannot hold {count} values")
        patterns = np.frombuffer(view[:low], "<u2").astype(np.uint32)
        patterns |= unpack_fixed(view[low:end], count, _MIDDLE, 1 << _MIDDLE).astype(np.uint32) << np.uint32(_RAW)
        heads = decode_block(view[end:], count, 1 << _CODED, coded=True).astype(np.uint32)
        patterns |= (heads >> np.uint32(1)) << np.uint32(_RAW + _MIDDLE) | heads << np.uint32(31)
        values = patterns.view(np.float32)
    if not np.isfinite(values).all():
        raise PayloadError("a value is not finite")
    return values


def _heads(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Exponent, then sign: of each value, uint16[n] of 9 bits; like magnitudes are neighbours."""
    patterns = values.view(np.uint32)
    exponents = (patterns >> np.uint32(_RAW + _MIDDLE)) << np.uint32(1) | patterns >> np.uint32(31)
    return (exponents & np.uint32((1 << _CODED) - 1)).astype(np.uint16)
