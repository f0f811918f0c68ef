"""Bytes as the 64-bit words that bit kernels read and write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: zero words behind a stream, so that a kernel may look ahead before it knows that the stream has ended
_AHEAD = 4


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
