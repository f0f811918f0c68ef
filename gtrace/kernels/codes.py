"""Streams of a canonical prefix code, least significant bit first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gtrace.kernels._jit import inline, jit
from gtrace.kernels._words import load64, store64

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: bytes beyond the stream that :func:`prefix_encode` may write into
SLACK = 8
#: longest codes of which four fit into a word beside seven bits that wait for their byte
FOURFOLD = 14
#: symbols that the decoder takes at once, at most
AT_ONCE = 4
_CODE = np.uint64(0x00FFFFFFFFFFFFFF)
_0 = np.uint64(0)
_1 = np.uint64(1)
_3 = np.uint64(3)
_7 = np.uint64(7)
_8 = np.uint64(8)
_56 = np.uint64(56)
_LAST = np.uint64(2**64 - 8)


@jit
def prefix_length(symbols: NDArray[np.uint16], lengths: NDArray[np.uint8]) -> int:
    """Total number of bits, or -1 when a symbol has no code."""
    total = 0
    missing = False
    for i in range(symbols.size):
        length = np.int64(lengths[symbols[i]])
        missing |= length == 0
        total += length
    return -1 if missing else total


@jit
def tally(symbols: NDArray[np.uint16], tallies: NDArray[np.int64]) -> None:
    """Add how often each symbol occurs to ``tallies``, int64[4, m]: neighbours go to different rows, as in VALUES."""
    whole = symbols.size // 4 * 4
    for i in range(0, whole, 4):
        tallies[0, symbols[i]] += 1
        tallies[1, symbols[i + 1]] += 1
        tallies[2, symbols[i + 2]] += 1
        tallies[3, symbols[i + 3]] += 1
    for i in range(whole, symbols.size):
        tallies[0, symbols[i]] += 1


@jit
def rotate_left(symbols: NDArray[np.uint16], width: int, out: NDArray[np.uint16]) -> None:
    """Move the highest of ``width`` bits to the end: a sign behind its magnitude, so that like symbols are neighbours.

    The negative of magnitude 0 becomes the positive one.
    """
    top = np.uint16(width - 1)
    mask = np.uint16((1 << (width - 1)) - 1)
    one = np.uint16(1)
    for i in range(symbols.size):
        low = symbols[i] & mask
        out[i] = (low << one) | ((symbols[i] >> top) & np.uint16(low != 0))


@jit
def rotate_right(symbols: NDArray[np.uint16], width: int, out: NDArray[np.uint16]) -> None:
    """Undo :func:`rotate_left`."""
    top = np.uint16(width - 1)
    one = np.uint16(1)
    for i in range(symbols.size):
        out[i] = (symbols[i] >> one) | ((symbols[i] & one) << top)


@jit
def canonical(
    lengths: NDArray[np.uint8],
    table: NDArray[np.uint64],
    quick_symbol: NDArray[np.uint16],
    quick_length: NDArray[np.uint8],
    first_code: NDArray[np.int64],
    first_index: NDArray[np.int64],
    ordered: NDArray[np.uint16],
) -> None:
    """The canonical code of these lengths, as :func:`prefix_encode` and :func:`prefix_decode` want it.

    Args:
        lengths: uint8[m], of a prefix code; 0 for symbols without one.
        table: uint64[m], overwritten: a code's bits, first bit lowest, and in the top byte its length.
        quick_symbol: uint16[2^w], zeros: by the bits that a stream goes on with, the symbol they begin with.
        quick_length: uint8[2^w], zeros: its length, 0 for more than w bits.
        first_code: int64[longest + 2], zeros: by length, the first code.
        first_index: int64[longest + 2], zeros: by length, where its symbols start in ``ordered``.
        ordered: uint16, overwritten: symbols with a code by length.
    """
    last = first_code.size - 1
    count = np.zeros(last + 1, np.int64)
    for k in range(lengths.size):
        if lengths[k] > 0:
            count[lengths[k]] += 1
    for length in range(1, last + 1):
        first_index[length] = first_index[length - 1] + count[length - 1]
        if length > 1:
            first_code[length] = (first_code[length - 1] + count[length - 1]) << 1
    used = first_index.copy()
    for k in range(lengths.size):
        length = np.int64(lengths[k])
        table[k] = np.uint64(length) << _56
        if length == 0:
            continue
        ordered[used[length]] = k
        number = first_code[length] + used[length] - first_index[length]
        used[length] += 1
        code = np.int64(0)
        for _ in range(length):
            code = (code << 1) | (number & 1)
            number >>= 1
        table[k] |= np.uint64(code)
        if 1 << length <= quick_symbol.size:
            quick_symbol[code :: 1 << length] = k
            quick_length[code :: 1 << length] = length


@inline
def _flush(
    out: NDArray[np.uint8], at: int, hold: np.uint64, held: np.uint64, codes: np.uint64, length: np.uint64
) -> tuple[int, np.uint64, np.uint64]:
    """Append up to 57 bits to fewer than 8; whole bytes are out, fewer than 8 bits stay."""
    hold |= codes << held
    held += length
    store64(out, at, hold)
    return at + np.int64(held >> _3), hold >> (held & _LAST), held & _7


@jit
def prefix_encode(symbols: NDArray[np.uint16], table: NDArray[np.uint64], longest: int, out: NDArray[np.uint8]) -> int:
    """Write codes of at most 24 bits, first bit of a code first; returns the number of bits.

    Codes are joined two or four at a time, so that the one thing that must wait for the one before, finding its
    place, happens once for all of them.

    Args:
        symbols: uint16[n].
        table: uint64[m], a code's bits and, in the top byte, its length.
        longest: length of the longest code.
        out: as many bytes as the codes take, and SLACK; the unused bits of the last byte are zero.
    """
    hold, held, at = _0, _0, 0
    whole = symbols.size // 4 * 4
    for i in range(0, whole, 4):
        a, b = table[symbols[i]], table[symbols[i + 1]]
        c, d = table[symbols[i + 2]], table[symbols[i + 3]]
        first, second = a >> _56, c >> _56
        left, right = (a & _CODE) | ((b & _CODE) << first), (c & _CODE) | ((d & _CODE) << second)
        first += b >> _56
        second += d >> _56
        if longest <= FOURFOLD:
            at, hold, held = _flush(out, at, hold, held, left | (right << first), first + second)
        else:
            at, hold, held = _flush(out, at, hold, held, left, first)
            at, hold, held = _flush(out, at, hold, held, right, second)
    for i in range(whole, symbols.size):
        entry = table[symbols[i]]
        at, hold, held = _flush(out, at, hold, held, entry & _CODE, entry >> _56)
    if held > _0:
        out[at] = hold
    return 8 * at + np.int64(held)


@jit
def fill_at_once(
    quick_symbol: NDArray[np.uint16],
    quick_length: NDArray[np.uint8],
    together: NDArray[np.uint64],
    count: NDArray[np.uint8],
    used: NDArray[np.uint8],
) -> None:
    """For all bits that a stream can go on with, the symbols whose codes lie wholly in them.

    Args:
        quick_symbol, quick_length: the symbol and length of the code that the bits begin with; length 0 for none
            that lies wholly in them.
        together: up to AT_ONCE symbols, 16 bits each, the first one lowest.
        count: how many.
        used: bits of their codes.
    """
    width = 0
    while 1 << width < quick_symbol.size:
        width += 1
    for bits in range(quick_symbol.size):
        rest, at, found, joined = bits, 0, 0, _0
        while found < AT_ONCE:
            length = np.int64(quick_length[rest])
            if length == 0 or at + length > width:
                break
            joined |= np.uint64(quick_symbol[rest]) << np.uint64(16 * found)
            rest >>= length
            at += length
            found += 1
        together[bits], count[bits], used[bits] = joined, found, at


@jit
def prefix_decode(
    data: NDArray[np.uint8],
    together: NDArray[np.uint64],
    count: NDArray[np.uint8],
    taken: NDArray[np.uint8],
    first_code: NDArray[np.int64],
    first_index: NDArray[np.int64],
    ordered: NDArray[np.uint16],
    out: NDArray[np.uint16],
) -> int:
    """Read ``out.size`` symbols of a canonical prefix code.

    Args:
        data: the bit stream.
        together, count, taken: what :func:`fill_at_once` made; where it found nothing the decoder walks.
        first_code: per length, the first canonical code; entry L + 1 ends the table.
        first_index: per length, where its symbols start in ``ordered``.
        ordered: symbols by (length, symbol).

    Returns:
        the number of bits read, or -1 when the stream ends early or holds no code.
    """
    total = np.int64(data.size) * 8
    used = np.int64(0)
    done = 0
    mask = np.uint64(together.size - 1)
    longest = first_code.size - 2
    bytes_out = out.view(np.uint8)
    while done < out.size:
        # While whole words can be read and written, several symbols at once, and several times from one word.
        while done + 3 * AT_ONCE <= out.size and used + 64 <= total:
            word = load64(data, used >> 3) >> np.uint64(used & 7)
            start = done
            for _ in range(3):
                bits = word & mask
                store64(bytes_out, 2 * done, together[bits])
                done += np.int64(count[bits])
                used += np.int64(taken[bits])
                word >>= np.uint64(taken[bits])
            if done == start:
                break
        if done == out.size:
            break
        # One symbol, bit by bit.
        word, at = _0, used >> 3
        for k in range(min(8, int(data.size - at))):
            word |= np.uint64(data[at + k]) << np.uint64(8 * k)
        word >>= np.uint64(used & 7)
        code, length, found = np.int64(0), np.int64(0), False
        while length < longest and not found:
            code = (code << 1) | np.int64(word & _1)
            word >>= _1
            length += 1
            offset = code - first_code[length]
            if offset >= 0 and offset < first_index[length + 1] - first_index[length]:
                out[done] = ordered[first_index[length] + offset]
                found = True
        used += length
        if not found or used > total:
            return -1
        done += 1
    return used
