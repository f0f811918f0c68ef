"""Elias codes: integers of any size in a number of bits that grows with their magnitude, without a table to send."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from gtrace.coding.fixed import ends_after, from_words, to_words, word_room
from gtrace.errors import PayloadError, UsageError
from gtrace.kernels import elias as _elias

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

EliasKind: TypeAlias = Literal["gamma", "delta", "omega"]
ELIAS: tuple[EliasKind, ...] = ("gamma", "delta", "omega")
#: values lie closer to the origin than this
REACH = 2**62


class _Tables(NamedTuple):
    """The tables of a code; see :mod:`gtrace.kernels.elias`."""

    by_length: NDArray[np.int64]
    codes: NDArray[np.uint32]
    short: NDArray[np.uint8]
    prefixes: NDArray[np.uint64]
    prefix_bits: NDArray[np.uint8]
    extra_bits: NDArray[np.uint8]
    quick_integer: NDArray[np.uint16]
    quick_length: NDArray[np.uint8]


def _prefix(kind: str, length: int) -> tuple[int, int, int]:
    """The prefix before the low bits of an integer of a bit length: code, its length, number of low bits."""
    if kind == "gamma":
        return 1 << (length - 1), length, length - 1
    if kind == "delta":
        # The length in gamma code, its first bit the lowest.
        low = length.bit_length() - 1
        return (1 << low) | ((length - (1 << low)) << (low + 1)), 2 * low + 1, length - 1
    if length == 1:
        return 0, 1, 0
    code, bits = 1, 1  # the leading one of the integer itself
    group = length - 1
    while group > 1:
        high = group.bit_length() - 1
        code = (code << (high + 1)) | ((group - (1 << high)) << 1) | 1
        bits += high + 1
        group = high
    return code, bits, length  # the zero that ends an omega code is the highest of the low bits


@lru_cache(maxsize=len(ELIAS))
def _tables(kind: str) -> _Tables:
    prefixes = np.zeros(65, np.uint64)
    prefix_bits, extra_bits = np.zeros((2, 65), np.uint8)
    for length in range(1, _elias.LONGEST + 1):
        prefixes[length], prefix_bits[length], extra_bits[length] = _prefix(kind, length)
    by_length = prefix_bits.astype(np.int64) + extra_bits
    count = 1 << _elias.SHORT
    codes, short = np.zeros(count, np.uint32), np.zeros(count, np.uint8)
    quick_integer = np.zeros(1 << _elias.QUICK, np.uint16)
    quick_length = np.zeros(1 << _elias.QUICK, np.uint8)
    for length in range(1, _elias.SHORT + 1):
        first, last = 1 << (length - 1), 1 << length
        low = np.arange(first, dtype=np.uint64)
        codes[first:last] = (low << np.uint64(prefix_bits[length])) | prefixes[length]
        short[first:last] = by_length[length]
        if by_length[length] <= _elias.QUICK:
            for z in range(first, last):
                quick_integer[int(codes[z]) :: 1 << int(short[z])] = z
                quick_length[int(codes[z]) :: 1 << int(short[z])] = short[z]
    return _Tables(by_length, codes, short, prefixes, prefix_bits, extra_bits, quick_integer, quick_length)


@dataclass(frozen=True)
class EliasCode:
    """An Elias code of integers around an origin.

    The origin is written as the positive integer 1, then -1, +1, -2, +2, ... from it as 2, 3, 4, 5, ... (with
    ``signed=False`` +1, +2, ... as 2, 3, ...). A code is written first bit first; the bits of a group below its
    leading one are written lowest first.

    Args:
        kind: "gamma" (2 log2 z + 1 bits), "delta" (log2 z + 2 log2 log2 z), "omega" (recursive).
        origin: the value with the shortest code.
        signed: whether values lie on both sides of the origin.
        symbols: values are 0 to symbols - 1 and decoded as uint16 (at most 65536); None: any integers, int64.

    Raises:
        UsageError: an origin too far from zero.

    >>> code = EliasCode("gamma")
    >>> code.bits([0, -1, 2]), code.decode(code.encode([0, -1, 2]), 3).tolist()
    (9, [0, -1, 2])
    """

    kind: EliasKind
    origin: int = 0
    signed: bool = True
    symbols: int | None = None

    def __post_init__(self) -> None:
        if abs(self.origin) >= REACH // 2:
            raise UsageError(f"Elias code: the origin {self.origin} is too far from zero")

    def bits(self, values: ArrayLike) -> int:
        """Length of the encoded values in bits.

        Raises:
            UsageError: values that are not integers, or that have no code.
        """
        return self._length(self._checked(values))

    def bits_by_length(self, counts: NDArray[np.int64]) -> int:
        """Bits of ``counts[L]`` positive integers of each bit length L (int64[65])."""
        return int(counts @ _tables(self.kind).by_length)

    def expected_bits(self, probabilities: ArrayLike) -> float:
        """Mean bits per symbol when symbol k = 0, 1, ... has probability ``probabilities[k]`` (float64[m]).

        Counts instead of probabilities give the bits of all.

        Infinite when a symbol without a code has a positive probability.
        """
        p = np.asarray(probabilities, np.float64)
        if not self.signed and (p[: self.origin] > 0).any():
            return float("inf")
        away = np.arange(p.size) - self.origin
        integers = np.where(away < 0, -2 * away, 2 * away + 1) if self.signed else np.maximum(away, 0) + 1
        return float(p @ _tables(self.kind).by_length[np.frexp(integers.astype(np.float64))[1]])

    def encode(self, values: ArrayLike) -> bytes:
        """Encode integers; the last byte is padded with zeros.

        Raises:
            UsageError: values that are not integers, or that have no code.
        """
        v = self._checked(values)
        t = _tables(self.kind)
        total = self._length(v)
        words = word_room(total)
        _elias.encode(v, self.origin, self.signed, t.codes, t.short, t.prefixes, t.prefix_bits, t.extra_bits, words)
        return from_words(words, total)

    def decode(self, data: bytes | memoryview, count: int) -> NDArray[Any]:
        """Decode ``count`` values, which must use all of ``data``.

        Returns:
            int64[count], or uint16[count] if ``symbols`` is given.

        Raises:
            PayloadError: too short (checked before memory is taken), too long, or not this code.
        """
        size = len(data)
        if 8 * size < count:
            raise PayloadError(f"{size} bytes cannot hold {count} Elias codes")
        t = _tables(self.kind)
        out: NDArray[Any] = np.empty(count, np.int64 if self.symbols is None else np.uint16)
        code = ELIAS.index(self.kind), self.origin, self.signed, self.symbols or 0
        used = int(_elias.decode(to_words(data), 8 * size, *code, t.quick_integer, t.quick_length, out))
        if not ends_after(data, used):
            raise PayloadError("the Elias stream ends early, is too long or holds a code that no encoder writes")
        return out

    def _length(self, values: NDArray[Any]) -> int:
        t = _tables(self.kind)
        return int(_elias.length(values, self.origin, self.signed, t.short, t.by_length))

    def _checked(self, values: ArrayLike) -> NDArray[Any]:
        v = as_integers(values)
        if v.size:
            low, high = int(v.min()), int(v.max())
            if self.symbols is not None and not (low >= 0 and high < self.symbols):
                raise UsageError(f"Elias code: values {low} to {high}, but only {self.symbols} symbols")
            least = self.origin if not self.signed else self.origin - REACH + 1
            if low < least or high >= self.origin + REACH:
                raise UsageError(
                    f"Elias code: values {low} to {high}; they must be {least} to {self.origin + REACH - 1}"
                )
        return v


def as_integers(values: ArrayLike) -> NDArray[Any]:
    """Integers as a flat array, uint16 as it is and everything else as int64.

    Raises:
        UsageError: values that are not integers, or beyond int64.
    """
    array = np.asarray(values)
    if array.size == 0:
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iub":
        raise UsageError(f"values of dtype {array.dtype} cannot be coded; pass integers")
    if array.dtype == np.uint64 and array.max() > np.iinfo(np.int64).max:
        raise UsageError("values beyond 2^63 - 1 cannot be coded")
    kind = np.uint16 if array.dtype == np.uint16 else np.int64
    return np.ascontiguousarray(array, dtype=kind).reshape(-1)
