"""Code lengths as bytes: what a receiver needs to build a Huffman code."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np

from gtrace.coding.fixed import fixed_size, pack_fixed, unpack_fixed
from gtrace.coding.huffman import check_lengths
from gtrace.errors import PayloadError, UsageError
from gtrace.kernels import symbols as _symbols

if TYPE_CHECKING:
    from numpy.typing import NDArray

_HEAD = struct.Struct("<HHH")
_BITS = 5


def lengths_size(lengths: NDArray[np.uint8], outside: int) -> int:
    """Bytes that :func:`pack_lengths` takes."""
    return int(_symbols.packed_bits(lengths, outside)) // 8


def pack_lengths(lengths: NDArray[np.uint8], outside: int) -> bytes:
    """Code lengths as bytes.

    u16 last symbol of the alphabet, u16 first and u16 last symbol of the span that holds all lengths but ``outside``
    (1 and 0 for none); then 5 bits for ``outside`` and for each symbol of the span.
    """
    used = np.flatnonzero(lengths != outside)
    first, last = (int(used[0]), int(used[-1])) if used.size else (1, 0)
    sent = np.concatenate([[outside], lengths[first : last + 1]]).astype(np.uint16)
    return _HEAD.pack(lengths.size - 1, first, last) + pack_fixed(sent, _BITS)


def unpack_lengths(data: bytes | memoryview, symbols: int) -> tuple[NDArray[np.uint8], int]:
    """Undo :func:`pack_lengths` for a code of so many symbols: uint8[symbols], and the bytes that were read.

    Raises:
        PayloadError: no such bytes, a code of another number of symbols, or lengths that are no prefix code.
    """
    if len(data) < _HEAD.size:
        raise PayloadError("code lengths are too short")
    size, first, last = _HEAD.unpack_from(data)
    # Before memory is asked for: six bytes could announce a code of 65,536 symbols.
    if size + 1 != symbols:
        raise PayloadError("code lengths are those of another number of symbols")
    if last > size or first > last + 1:
        raise PayloadError("code lengths name symbols beyond the alphabet")
    count = last + 1 - first
    end = _HEAD.size + fixed_size(1 + count, _BITS)
    sent = unpack_fixed(memoryview(data)[_HEAD.size : end], 1 + count, _BITS, 1 << _BITS)
    lengths = np.full(symbols, sent[0], np.uint8)
    lengths[first : last + 1] = sent[1:]
    try:
        check_lengths(lengths)
    except UsageError as error:
        raise PayloadError(f"code lengths: {error}") from None
    if data[:end] != pack_lengths(lengths, int(sent[0])):
        raise PayloadError("code lengths have a longer span than they need")
    return lengths, end
