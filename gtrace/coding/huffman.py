"""Canonical Huffman codes over small alphabets, held by both sides or sent with the symbols."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from gtrace.coding.fixed import ends_after, finite, fixed_size, pack_fixed, unpack_fixed, width_for
from gtrace.errors import PayloadError, UsageError
from gtrace.kernels import bits as _bits
from gtrace.kernels import codes as _prefix_codes
from gtrace.kernels import symbols as _symbols

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: longest code in bits; longer ones would exceed the encoder's 64-bit window and save nothing measurable
MAX_LENGTH = 24
_QUICK = 12
_HEAD = struct.Struct("<HHH")
_LENGTH_BITS = 5
#: bits of a float32 that :class:`Floats` codes, sign and exponent, and the lowest ones
_CODED, _RAW = 9, 16
_MIDDLE = 32 - _CODED - _RAW
_SELDOM = 0.25


def huffman_lengths(weights: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Code lengths of the best prefix code of at most ``MAX_LENGTH`` bits for symbols of these weights.

    Args:
        weights: float64[m], not negative. Symbols of weight 0 get no code (length 0); a single symbol
            gets length 1.

    Returns:
        uint8[m].

    >>> huffman_lengths(np.array([0.5, 0.25, 0.25, 0.0])).tolist()
    [1, 2, 2, 0]
    """
    w = np.ascontiguousarray(weights, dtype=np.float64)
    lengths = np.empty(w.size, np.uint8)
    _symbols.limited_lengths(w, MAX_LENGTH, lengths)
    return lengths


def check_lengths(lengths: NDArray[np.uint8]) -> None:
    """Check that there is a prefix code with these lengths, uint8[m], 0 for a symbol without a code.

    Raises:
        UsageError: there is no such code, or it has too many symbols or too long codes.
    """
    used = lengths[lengths > 0].astype(np.int64)
    if lengths.size > 1 << 16 or used.max(initial=0) > MAX_LENGTH:
        raise UsageError(f"Huffman code: at most 65536 symbols and {MAX_LENGTH} bits")
    if int(np.sum(1 << (MAX_LENGTH - used))) > 1 << MAX_LENGTH:
        raise UsageError("Huffman code: these lengths do not form a prefix code")


class HuffmanCode:
    """A canonical prefix code, defined by its lengths alone.

    Args:
        lengths: uint8[m], 0 for a symbol without a code.

    Raises:
        UsageError: the lengths do not form a prefix code.
    """

    def __init__(self, lengths: NDArray[np.uint8]) -> None:
        self.lengths = np.require(lengths, np.uint8, ["C", "W"])
        check_lengths(self.lengths)
        self._longest = longest = int(self.lengths.max(initial=0))
        self._codes = np.empty(self.lengths.size, np.uint64)
        self._quick = np.zeros(1 << _QUICK, np.uint16), np.zeros(1 << _QUICK, np.uint8)
        self._first_code, self._first_index = np.zeros(longest + 2, np.int64), np.zeros(longest + 2, np.int64)
        self._ordered = np.empty(np.count_nonzero(self.lengths), np.uint16)
        first = self._first_code, self._first_index
        _prefix_codes.canonical(self.lengths, self._codes, *self._quick, *first, self._ordered)

    def bits(self, symbols: NDArray[np.uint16]) -> int:
        """Length of the encoded symbols in bits; -1 when one of them has no code."""
        return int(_prefix_codes.prefix_length(symbols, self.lengths))

    def encode(self, symbols: NDArray[np.uint16]) -> bytes:
        """Encode uint16[n]; the last byte is padded with zeros.

        Raises:
            UsageError: a symbol has no code.
        """
        total = self.bits(symbols)
        if total < 0:
            raise UsageError("Huffman code: a symbol to be sent has no code")
        out = np.empty(-(-total // 8) + _prefix_codes.SLACK, np.uint8)
        _prefix_codes.prefix_encode(symbols, self._codes, self._longest, out)
        return out[: -_prefix_codes.SLACK].tobytes()

    @cached_property
    def _at_once(self) -> tuple[int, NDArray[np.uint64], NDArray[np.uint8], NDArray[np.uint8]]:
        """The table with several symbols per entry for decoding; an encoder never needs it."""
        entries, size = 1 << _QUICK, 1 if self.lengths.size <= 1 << 8 else 2
        together, count = np.empty(entries, np.uint64), np.empty(entries, np.uint8)
        used = np.empty(entries, np.uint8)
        _prefix_codes.fill_at_once(*self._quick, size, together, count, used)
        return size, together, count, used

    def decode(self, data: bytes | memoryview, count: int) -> NDArray[np.uint16]:
        """Decode ``count`` symbols, which must use all of ``data``.

        Raises:
            PayloadError: too short (checked before memory is taken), too long, or not this code.
        """
        raw = np.frombuffer(data, np.uint8)
        if raw.size * 8 < count:
            raise PayloadError(f"{raw.size} bytes cannot hold {count} Huffman codes")
        out = np.empty(count, np.uint16)
        used = int(
            _prefix_codes.prefix_decode(raw, *self._at_once, self._first_code, self._first_index, self._ordered, out)
        )
        if not ends_after(raw, used):
            raise PayloadError("the Huffman stream ends early, is too long or holds no code")
        return out


def tally(symbols: NDArray[np.uint16], alphabet: int) -> NDArray[np.int64]:
    """How often each of ``alphabet`` symbols occurs, int64[alphabet]; symbols must be below it.

    >>> tally(np.array([2, 0, 2], np.uint16), 4).tolist()
    [1, 0, 2, 0]
    """
    tallies = np.zeros((4, alphabet), np.int64)
    _prefix_codes.tally(symbols, tallies)
    return tallies.sum(axis=0)


@lru_cache(maxsize=512)
def huffman_code(lengths: bytes) -> HuffmanCode:
    """The code of these lengths, one byte per symbol; codes are cached, because building their tables takes time."""
    return HuffmanCode(np.frombuffer(lengths, np.uint8))


def pack_lengths(lengths: NDArray[np.uint8], outside: int) -> bytes:
    """Code lengths as bytes.

    u16 last symbol of the alphabet, u16 first and u16 last symbol of the span that holds all lengths but ``outside``
    (1 and 0 for none); then 5 bits for ``outside`` and for each symbol of the span.
    """
    used = np.flatnonzero(lengths != outside)
    first, last = (int(used[0]), int(used[-1])) if used.size else (1, 0)
    sent = np.concatenate([[outside], lengths[first : last + 1]]).astype(np.uint16)
    return _HEAD.pack(lengths.size - 1, first, last) + pack_fixed(sent, _LENGTH_BITS)


def unpack_lengths(data: bytes | memoryview, symbols: int) -> tuple[NDArray[np.uint8], int]:
    """Undo :func:`pack_lengths` for a code of ``symbols`` symbols: uint8[symbols], and the number of bytes read.

    Raises:
        PayloadError: bytes of another form, a code of another number of symbols, or lengths without a prefix code.
    """
    if len(data) < _HEAD.size:
        raise PayloadError("code lengths are too short")
    size, first, last = _HEAD.unpack_from(data)
    # Check before allocating: six bytes could announce a code of 65,536 symbols.
    if size + 1 != symbols:
        raise PayloadError("code lengths are those of another number of symbols")
    if last > size or first > last + 1:
        raise PayloadError("code lengths name symbols beyond the alphabet")
    count = last + 1 - first
    end = _HEAD.size + fixed_size(1 + count, _LENGTH_BITS)
    sent = unpack_fixed(memoryview(data)[_HEAD.size : end], 1 + count, _LENGTH_BITS, 1 << _LENGTH_BITS)
    lengths = np.full(symbols, sent[0], np.uint8)
    lengths[first : last + 1] = sent[1:]
    try:
        check_lengths(lengths)
    except UsageError as error:
        raise PayloadError(f"code lengths: {error}") from None
    if data[:end] != pack_lengths(lengths, int(sent[0])):
        raise PayloadError("code lengths have a longer span than they need")
    return lengths, end


@dataclass(frozen=True, slots=True, eq=False)
class CodedBlock:
    """How a block of symbols is sent.

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
        """The shortest block for symbols with these counts.

        Args:
            tallies: count, or expected count, of each symbol of the alphabet.
            weights: weights for making the code, with the same sum; by default the tallies.
            coder: ``fixed`` never sends a code.
        """
        count, width = float(tallies.sum()), width_for(tallies.size)
        fixed = count * width
        if not fixed:
            return cls(width, None, fixed, 0.0, fixed)
        given = tallies.astype(np.float64) if weights is None else weights
        # If counts are expected ones, the rarest symbols will mostly not occur.
        lengths = huffman_lengths(np.where(given >= _SELDOM, given, 0.0))
        coded = _symbols.packed_bits(lengths, 0) + float(tallies @ lengths.astype(np.int64))
        shorter = -(-coded // 8) < -(-fixed // 8)
        sent = lengths if shorter and coder != "fixed" else None
        return cls(width, sent, fixed, count * _bits.entropy(given / count), coded if shorter else fixed)

    @classmethod
    def signed(cls, tallies: NDArray[np.int64] | NDArray[np.float64], *, coder: str = "huffman") -> CodedBlock:
        """Like :meth:`of`, for symbols with a sign as the last bit; code lengths ignore the sign, except for 0 and 1.

        A sketch has no signs, and so it can predict the length of such a block.
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
        PayloadError: the bytes are not such a block.
    """
    if not coded:
        return unpack_fixed(data, count, width_for(alphabet), alphabet)
    lengths, size = unpack_lengths(data, alphabet)
    return HuffmanCode(lengths).decode(memoryview(data)[size:], count)


def expected_floats(
    magnitudes: NDArray[np.float64], counts: NDArray[np.float64], zeros: float = 0.0
) -> NDArray[np.float64]:
    """:attr:`Floats.tallies` for expected counts of magnitudes, either sign with the same probability, and zeros."""
    # frexp's fractions begin at a half; below 2^-126, with denormals, the exponent is 0.
    exponents = np.maximum(np.frexp(magnitudes)[1] + 126, 0) * (magnitudes > 0)
    tallies = np.repeat(np.bincount(exponents, counts, 1 << (_CODED - 1)) / 2, 2)
    tallies[0] += zeros
    return tallies


class Floats:
    """The coding of float32 values: sign and exponent as a :class:`CodedBlock`, the other 23 bits unchanged.

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
        """Whether a code is sent; otherwise the values are sent unchanged."""
        return self.block.lengths is not None

    @property
    def raw(self) -> int:
        """Number of bits that no code shortens."""
        return (32 - _CODED) * self.values.size

    @staticmethod
    def size(count: int, block: CodedBlock) -> int:
        """Bytes of ``count`` values with this block."""
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
        PayloadError: the bytes are not such values, or one is not finite.
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
    return finite(values)


def _heads(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Exponent, then sign, of each value, uint16[n] of 9 bits; similar magnitudes are neighbors."""
    patterns = values.view(np.uint32)
    exponents = (patterns >> np.uint32(_RAW + _MIDDLE)) << np.uint32(1) | patterns >> np.uint32(31)
    return (exponents & np.uint32((1 << _CODED) - 1)).astype(np.uint16)
