"""Prefix codes of level codecs: which lengths symbols get, and how these are sent."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gtrace.coding import MAX_LENGTH, huffman_code, huffman_lengths, pack_fixed, unpack_fixed
from gtrace.errors import PayloadError, UsageError
from gtrace.kernels import symbols as _symbols

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Symbols(NamedTuple):
    """The signed symbols of one level set on one sketch.

    Attributes:
        probabilities: float64[m], of each.
        lengths: uint8[m], of the code that :func:`complete_lengths` makes; 0 for symbols without one.
        fixed: bits per symbol at fixed width.
        entropy: bits per symbol.
        huffman: mean bits per symbol of their Huffman code.
        complete: mean bits per symbol of the code with ``lengths``.
        sent: bits that sending ``lengths`` takes.
    """

    probabilities: NDArray[np.float64]
    lengths: NDArray[np.uint8]
    fixed: float
    entropy: float
    huffman: float
    complete: float
    sent: float


def complete_lengths(probabilities: NDArray[np.float64], count: int) -> NDArray[np.uint8]:
    """Code lengths for symbols of these probabilities among ``count`` values.

    Symbols that the fit gives no chance may still come with the next data. They get a code when that
    lengthens the mean by less than a hundredth; otherwise they get none, and an encoder that meets one
    falls back to fixed width.
    """
    tight = huffman_lengths(probabilities)
    kept = np.empty_like(tight)
    _symbols.complete(probabilities, count, MAX_LENGTH, tight, kept)
    return kept


def pack_lengths(lengths: NDArray[np.uint8]) -> bytes:
    """Code lengths as bytes: u16 symbols, u16 first used, u16 used span, then 5 bits each."""
    used = np.flatnonzero(lengths)
    first, last = (int(used[0]), int(used[-1])) if used.size else (0, -1)
    span = lengths[first : last + 1].astype(np.uint16)
    return struct.pack("<HHH", lengths.size, first, span.size) + pack_fixed(span, 5)


def unpack_lengths(data: bytes, symbols: int) -> NDArray[np.uint8]:
    """Undo :func:`pack_lengths` for a code of so many symbols.

    Raises:
        PayloadError: not such bytes, another number of symbols, or lengths that are no prefix code.
    """
    if len(data) < 6:
        raise PayloadError("code lengths are too short")
    size, first, count = struct.unpack_from("<HHH", data)
    # Before memory is asked for: codes are kept, and six bytes could announce one of 65,535 symbols.
    if size != symbols:
        raise PayloadError("shared bytes hold a code for another number of symbols")
    if first + count > size:
        raise PayloadError("code lengths name symbols beyond the alphabet")
    lengths = np.zeros(size, np.uint8)
    lengths[first : first + count] = unpack_fixed(data[6:], count, 5, 32)
    try:
        huffman_code(lengths.tobytes())
    except UsageError as error:
        raise PayloadError(f"shared bytes: {error}") from None
    return lengths
