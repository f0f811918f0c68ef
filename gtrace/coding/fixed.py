"""Fixed-width symbols, and bytes as the 64-bit words that bit kernels read and write."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import numpy as np

from gtrace.errors import PayloadError
from gtrace.kernels import bits as _bits
from gtrace.kernels import codes as _codes
from gtrace.kernels.norms import count_nonfinite

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: zero words after a stream, so that a kernel may read ahead
_AHEAD = 4


def finite(values: NDArray[np.float32], least: float = -math.inf) -> NDArray[np.float32]:
    """Decoded values, unchanged.

    Raises:
        PayloadError: a value is not finite, or below ``least``.
    """
    if count_nonfinite(values) or (least > -math.inf and (values < least).any()):
        raise PayloadError("payload holds a value that is not finite, or negative where none can be")
    return values


def read_floats(data: bytes | memoryview, least: float = -math.inf) -> NDArray[np.float32]:
    """Little-endian bytes as float32[n], each finite and at least ``least``; PayloadError otherwise."""
    return finite(np.frombuffer(data, "<f4").astype(np.float32), least)


def width_for(symbols: int) -> int:
    """Bits that number ``symbols`` different symbols; 0 for a single one.

    >>> [width_for(n) for n in (1, 2, 3, 7, 8, 9)]
    [0, 1, 2, 3, 3, 4]
    """
    return max(0, symbols - 1).bit_length()


def fixed_size(count: int, width: int) -> int:
    """Bytes of ``count`` symbols of ``width`` bits."""
    return -(-count * width // 8)


def pack_fixed(symbols: NDArray[np.uint16], width: int) -> bytes:
    """Write symbols (uint16, below 2^width) in ``width`` bits each; the last byte is padded with zeros.

    >>> pack_fixed(np.array([1, 2, 3], np.uint16), 4).hex()
    '2103'
    """
    out = packed_room(symbols.size, width)
    if width:
        _bits.pack(symbols, width, out)
    return out[: fixed_size(symbols.size, width)].tobytes()


def packed_room(count: int, width: int) -> NDArray[np.uint8]:
    """An array for ``count`` packed symbols; kernels write whole words, so it is longer than :func:`fixed_size`."""
    return np.empty(fixed_size(count, width) + _bits.SLACK, np.uint8)


def unpack_fixed(data: bytes | memoryview, count: int, width: int, symbols: int) -> NDArray[np.uint16]:
    """Read ``count`` symbols of ``width`` bits.

    Raises:
        PayloadError: ``data`` is too short or too long, its padding is not zero, or a symbol is not below
            ``symbols``.
    """
    raw = checked_fixed(data, count, width)
    if width == 0:
        return np.zeros(count, np.uint16)
    out = np.empty(count, np.uint16)
    check_symbol(_bits.unpack(raw, width, out), symbols)
    return out


def check_symbol(largest: int, symbols: int) -> None:
    """Raise :class:`PayloadError` if the largest symbol is not below ``symbols``."""
    if largest >= symbols:
        raise PayloadError(f"a symbol lies outside the {symbols} that this codec has")


def checked_fixed(data: bytes | memoryview, count: int, width: int) -> NDArray[np.uint8]:
    """The bytes of ``count`` symbols of ``width`` bits as an array.

    Raises:
        PayloadError: too short or too long, or padding that is not zero.
    """
    raw = np.frombuffer(data, np.uint8)
    if raw.size != fixed_size(count, width):
        raise PayloadError(f"{raw.size} bytes of symbols where {fixed_size(count, width)} were expected")
    if not ends_after(raw, count * width):
        raise PayloadError("padding after the last symbol is not zero")
    return raw


def sign_last(codes: NDArray[np.uint16], width: int) -> NDArray[np.uint16]:
    """Codes of ``width`` bits with their first bit, a sign, moved behind the others; there is no negative zero.

    >>> sign_last(np.array([0b011, 0b111, 0b100], np.uint16), 3).tolist()
    [6, 7, 0]
    """
    out = np.empty_like(codes)
    _codes.rotate_left(codes, width, out)
    return out


def sign_first(codes: NDArray[np.uint16], width: int) -> NDArray[np.uint16]:
    """Undo :func:`sign_last`."""
    out = np.empty_like(codes)
    _codes.rotate_right(codes, width, out)
    return out


def ends_after(data: bytes | memoryview | NDArray[np.uint8], bits: int) -> bool:
    """Whether bytes end with a stream of this many bits, the rest of the last byte zero; False for less than none."""
    return bits >= 0 and -(-bits // 8) == len(data) and not (bits % 8 and data[-1] >> bits % 8)


def word_room(bits: int) -> NDArray[np.uint64]:
    """Words for a stream of ``bits`` bits and the one more that writing kernels touch; not cleared."""
    return np.empty(bits // 64 + 2, np.uint64)


def from_words(words: NDArray[np.uint64], bits: int, first: Literal["low", "high"] = "low") -> bytes:
    """The first ``bits`` bits as bytes, padded with zeros.

    Args:
        words: uint64[], written by a kernel.
        bits: length of the stream.
        first: whether the first bit is the lowest or the highest of a word (and of a byte).
    """
    used = words[: -(-bits // 64)]
    return used.astype("<u8" if first == "low" else ">u8", copy=False).tobytes()[: -(-bits // 8)]


def to_words(data: bytes | memoryview, first: Literal["low", "high"] = "low") -> NDArray[np.uint64]:
    """Undo :func:`from_words`; at least 192 zero bits follow the stream."""
    padded = np.zeros(len(data) // 8 + _AHEAD, np.uint64)
    padded.view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
    return padded.view("<u8" if first == "low" else ">u8").astype(np.uint64, copy=False)
