"""Canonical Huffman codes over small alphabets."""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from gtrace.errors import PayloadError, UsageError
from gtrace.kernels import bits as _bits
from gtrace.kernels import codes as _prefix_codes
from gtrace.kernels import symbols as _symbols

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: longest code in bits; longer ones would cost the encoder its 64-bit window and save nothing measurable
MAX_LENGTH = 24
_QUICK = 12


def entropy(probabilities: NDArray[np.float64]) -> float:
    """Shannon entropy in bits per symbol; zero probabilities count nothing.

    >>> entropy(np.array([0.5, 0.25, 0.25, 0.0]))
    1.5
    """
    return float(_bits.entropy(np.asarray(probabilities, dtype=np.float64)))


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
        UsageError: there is none, or it has too many symbols or too long codes.
    """
    used = lengths[lengths > 0].astype(np.int64)
    if lengths.size > 1 << 16 or used.max(initial=0) > MAX_LENGTH:
        raise UsageError(f"Huffman code: at most 65536 symbols and {MAX_LENGTH} bits")
    if int(np.sum(1 << (MAX_LENGTH - used))) > 1 << MAX_LENGTH:
        raise UsageError("Huffman code: these lengths are no prefix code")


class HuffmanCode:
    """A canonical prefix code, defined by its lengths alone.

    Args:
        lengths: uint8[m], 0 for a symbol without a code.

    Raises:
        UsageError: the lengths are no prefix code.
    """

    def __init__(self, lengths: NDArray[np.uint8]) -> None:
        self.lengths = np.ascontiguousarray(lengths, dtype=np.uint8)
        check_lengths(self.lengths)
        longest = int(self.lengths.max(initial=0))
        self._longest = longest
        self._codes = np.empty(self.lengths.size, np.uint64)
        self._quick = np.zeros(1 << _QUICK, np.uint16), np.zeros(1 << _QUICK, np.uint8)
        self._first_code, self._first_index = np.zeros(longest + 2, np.int64), np.zeros(longest + 2, np.int64)
        self._ordered = np.empty(np.count_nonzero(self.lengths), np.uint16)
        _prefix_codes.canonical(
            self.lengths,
            self._codes,
            self._quick[0],
            self._quick[1],
            self._first_code,
            self._first_index,
            self._ordered,
        )

    def bits(self, symbols: NDArray[np.uint16]) -> int:
        """Length of the encoded symbols in bits; -1 when one of them has no code."""
        return int(_prefix_codes.prefix_length(symbols, self.lengths))

    def expected_bits(self, probabilities: NDArray[np.float64]) -> float:
        """Mean bits per symbol; infinite when a symbol without a code has a positive probability."""
        return mean_length(self.lengths, probabilities)

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
    def _at_once(self) -> tuple[NDArray[np.uint64], NDArray[np.uint8], NDArray[np.uint8]]:
        """What the decoder looks several symbols up in; an encoder never needs it."""
        size = 1 << _QUICK
        found = np.empty(size, np.uint64), np.empty(size, np.uint8), np.empty(size, np.uint8)
        _prefix_codes.fill_at_once(self._quick[0], self._quick[1], *found)
        return found

    def decode(self, data: bytes | memoryview, count: int) -> NDArray[np.uint16]:
        """Decode ``count`` symbols that take up all of ``data``.

        Raises:
            PayloadError: too short (checked before memory is taken), too long, or not this code.
        """
        raw = np.frombuffer(data, np.uint8)
        if raw.size * 8 < count:
            raise PayloadError(f"{raw.size} bytes cannot hold {count} Huffman codes")
        out = np.empty(count, np.uint16)
        used = int(
            _prefix_codes.prefix_decode(
                raw,
                *self._at_once,
                self._first_code,
                self._first_index,
                self._ordered,
                out,
            )
        )
        if used < 0 or -(-used // 8) != raw.size or (used % 8 and raw[-1] >> (used % 8)):
            raise PayloadError("the Huffman stream ends early, is too long or holds no code")
        return out


def tally(symbols: NDArray[np.uint16], alphabet: int) -> NDArray[np.int64]:
    """How often each of ``alphabet`` symbols occurs, int64[alphabet]; symbols must be below it.

    >>> tally(np.array([2, 0, 2], np.uint16), 4).tolist()
    [1, 0, 2, 0]
    """
    tallies = np.zeros((4, alphabet), np.int64)
    _prefix_codes.tally(symbols, tallies)
    found: NDArray[np.int64] = tallies.sum(axis=0)
    return found


def mean_length(lengths: NDArray[np.uint8], probabilities: NDArray[np.float64]) -> float:
    """Mean bits per symbol of a code of these lengths; infinite when a symbol without one has a chance."""
    return float(_symbols.mean_length(lengths, probabilities))


@lru_cache(maxsize=512)
def huffman_code(lengths: bytes) -> HuffmanCode:
    """The code of these lengths, one byte a symbol; codes in use are kept, their tables take time to build."""
    return HuffmanCode(np.frombuffer(lengths, np.uint8))
