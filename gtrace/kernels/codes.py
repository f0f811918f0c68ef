"""Streams of prefix codes, least significant bit first: canonical ones, and the fixed one of pruned tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gtrace.kernels._jit import inline, jit
from gtrace.kernels.bits import load64, store64

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.kernels import Bytes, Ints, Symbols, Words

#: bytes beyond the stream that encoders may write into, and :func:`read_pruned` reads
SLACK = 8
#: longest codes of which four fit into a word beside seven bits that wait for their byte
FOURFOLD = 14
#: sums that symbols are counted in, side by side: equal neighbours would wait for each other
TALLIES = 4
#: symbols of one byte that the decoder takes at once, at most; half as many of two bytes
AT_ONCE = 8
#: lookups in one word of a stream, and symbols that are decoded between two copies to the output
_LOOKUPS, _DECODED = 4, 1024
_CODE = np.uint64(0x00FFFFFFFFFFFFFF)
_0, _1, _2, _3, _4 = (np.uint64(k) for k in range(5))
_7, _33, _34, _56 = (np.uint64(k) for k in (7, 33, 34, 56))
_LAST = np.uint64(2**64 - 8)
_LOW32 = np.uint64(0xFFFFFFFF)
_SIGN, _MAGNITUDE = np.uint32(0x80000000), np.uint32(0x7FFFFFFF)


@jit
def prefix_length(symbols: Symbols, lengths: Bytes) -> int:
    """Total number of bits, or -1 when a symbol has no code."""
    total = 0
    missing = False
    for i in range(symbols.size):
        length = np.int64(lengths[symbols[i]])
        missing |= length == 0
        total += length
    return -1 if missing else total


@jit
def tally(symbols: Symbols, tallies: Ints) -> None:
    """Add the count of each symbol to ``tallies``, int64[TALLIES, m]: neighbors go to different rows."""
    whole = symbols.size - symbols.size % TALLIES
    t0, t1, t2, t3 = tallies[0], tallies[1], tallies[2], tallies[3]
    for i in range(0, whole, TALLIES):
        t0[symbols[i]] += 1
        t1[symbols[i + 1]] += 1
        t2[symbols[i + 2]] += 1
        t3[symbols[i + 3]] += 1
    for i in range(whole, symbols.size):
        t0[symbols[i]] += 1


@jit
def rotate_left(symbols: Symbols, width: int, out: Symbols) -> None:
    """Move the highest of ``width`` bits to the end: a sign after its magnitude, so that similar symbols are neighbors.

    The negative of magnitude 0 becomes the positive one.
    """
    top = np.int64(width - 1) & 15  # below 16 for certain: lanes stay narrow
    mask = np.uint16((1 << (width - 1)) - 1)
    one = np.uint16(1)
    for i in range(symbols.size):
        low = symbols[i] & mask
        out[i] = (low << one) | ((symbols[i] >> top) & np.uint16(low != 0))


@jit
def rotate_right(symbols: Symbols, width: int, out: Symbols) -> None:
    """Undo :func:`rotate_left`."""
    top = np.int64(width - 1) & 15
    one = np.uint16(1)
    for i in range(symbols.size):
        out[i] = (symbols[i] >> one) | ((symbols[i] & one) << top)


@jit
def canonical(
    lengths: Bytes,
    table: Words,
    quick_symbol: Symbols,
    quick_length: Bytes,
    first_code: Ints,
    first_index: Ints,
    ordered: Symbols,
) -> None:
    """Build the canonical code of these lengths for :func:`prefix_encode` and :func:`prefix_decode`.

    Args:
        lengths: uint8[m], of a prefix code; 0 for symbols without one.
        table: uint64[m], overwritten: a code's bits, first bit lowest, and in the top byte its length.
        quick_symbol: uint16[2^w], zeros: the symbol that the next w bits of a stream begin with.
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
    out: Bytes, at: int, hold: np.uint64, held: np.uint64, codes: np.uint64, length: np.uint64
) -> tuple[int, np.uint64, np.uint64]:
    """Append up to 57 bits to fewer than 8; whole bytes are out, fewer than 8 bits stay."""
    hold |= codes << held
    held += length
    store64(out, at, hold)
    return at + np.int64(held >> _3), hold >> (held & _LAST), held & _7


@jit
def prefix_encode(symbols: Symbols, table: Words, longest: int, out: Bytes) -> int:
    """Write codes of at most 24 bits, first bit of a code first; returns the number of bits.

    Codes are joined two or four at a time, because finding the place of a code must wait for the one before:
    this happens once for all of them.

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
    quick_symbol: Symbols, quick_length: Bytes, size: int, together: Words, count: Bytes, used: Bytes
) -> None:
    """For all possible next bits of a stream, the symbols with codes completely inside them.

    Args:
        quick_symbol, quick_length: the symbol and length of the code that the bits begin with; length 0 for none
            that lies wholly in them.
        size: bytes of a symbol in ``together``, 1 or 2.
        together: up to AT_ONCE / size symbols, the first one lowest.
        count: how many.
        used: bits of their codes.
    """
    width = 0
    while 1 << width < quick_symbol.size:
        width += 1
    for bits in range(quick_symbol.size):
        rest, at, found, joined = bits, 0, 0, _0
        while found < AT_ONCE // size:
            length = np.int64(quick_length[rest])
            if length == 0 or at + length > width:
                break
            joined |= np.uint64(quick_symbol[rest]) << np.uint64(8 * size * found)
            rest >>= length
            at += length
            found += 1
        together[bits], count[bits], used[bits] = joined, found, at


@jit
def prefix_decode(
    data: Bytes,
    size: int,
    together: Words,
    count: Bytes,
    taken: Bytes,
    first_code: Ints,
    first_index: Ints,
    ordered: Symbols,
    out: Symbols,
) -> int:
    """Read ``out.size`` symbols of a canonical prefix code.

    Args:
        data: the bit stream.
        size, together, count, taken: as in :func:`fill_at_once`; without an entry the decoder reads bit by bit.
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
    most = _LOOKUPS * AT_ONCE
    held = np.empty(2 * _DECODED, np.uint8)
    doubles = held.view(np.uint16)
    while done < out.size:
        # While whole words can be read, several symbols at once, and several times from one word.
        room = min(_DECODED, out.size - done) - most
        filled, start = 0, -1
        while filled <= room and used + 64 <= total and filled > start:
            start = filled
            word = load64(data, used >> 3) >> np.uint64(used & 7)
            for _ in range(_LOOKUPS):
                bits = word & mask
                store64(held, size * filled, together[bits])
                filled += np.int64(count[bits])
                used += np.int64(taken[bits])
                word >>= np.uint64(taken[bits])
        ob = out[done : done + filled]
        for i in range(ob.size):
            ob[i] = held[i] if size == 1 else doubles[i]
        done += filled
        if filled > room > 0 or done == out.size:
            continue
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


@jit
def pruned_bits(bits: NDArray[np.uint32], alpha: np.uint32) -> int:
    """Length of the code of values given by float32 patterns: ``0``, ``10`` and a sign, ``11`` and a float32."""
    total = 0
    for i in range(bits.size):
        magnitude = bits[i] & _MAGNITUDE
        total += 1 if magnitude == 0 else (3 if magnitude == alpha else 34)
    return total


@jit
def part_pruned(bits: NDArray[np.uint32], alpha: np.uint32, symbols: Symbols, exact: NDArray[np.uint32]) -> int:
    """The symbol of each value: 0 for zero, 2 and 3 for plus and minus alpha, 1 for any other.

    Args:
        bits: uint32[n], float32 patterns.
        alpha: the threshold's.
        symbols: uint16[n], written.
        exact: uint32[n]; the others are written to its front.

    Returns:
        how many they are.
    """
    at = _0
    for i in range(bits.size):
        magnitude = bits[i] & _MAGNITUDE
        other = (magnitude != 0) & (magnitude != alpha)
        symbols[i] = 1 if other else (0 if magnitude == 0 else (3 if bits[i] & _SIGN else 2))
        exact[at] = bits[i]
        at += np.uint64(other)
    return np.int64(at)


@jit
def write_pruned(bits: NDArray[np.uint32], alpha: np.uint32, out: Bytes) -> None:
    """Write the code; ``out`` holds its bytes and SLACK more, unused bits of the last one are zero.

    Without branches: the three codes come at random, and wrong branch predictions would cost more than all of it.
    """
    hold, held, at = _0, _0, 0
    for i in range(bits.size):
        magnitude = bits[i] & _MAGNITUDE
        pattern = np.uint64(bits[i]) << _2
        other = magnitude != alpha
        code = (_3 | pattern) if other else (_1 | ((pattern >> _33) << _2))
        length = _34 if other else _3
        code = code if magnitude else _0
        length = length if magnitude else _1
        at, hold, held = _flush(out, at, hold, held, code, length)
    if held > _0:
        out[at] = hold


@jit
def read_pruned(data: Bytes, size: int, alpha: np.uint32, out: NDArray[np.uint32]) -> int:
    """Read ``out.size`` values from ``size`` bytes, which SLACK further ones follow.

    Returns:
        the bits read, or -1 for a stream that ends early or that no encoder writes.
    """
    total = np.uint64(8 * size)
    used = _0
    good = True
    for i in range(out.size):
        if used >= total:
            return -1
        word = load64(data, np.int64(used >> _3)) >> (used & _7)
        some, other = word & _1 != _0, word & _2 != _0
        pattern = np.uint32((word >> _2) & _LOW32)
        magnitude = pattern & _MAGNITUDE
        good &= not (some and other) or ((magnitude != 0) and (magnitude != alpha))
        coded = np.uint32(alpha | (_SIGN if word & _4 != _0 else np.uint32(0)))
        coded = pattern if other else coded
        length = _34 if other else _3
        out[i] = coded if some else np.uint32(0)
        used += length if some else _1
    return np.int64(used) if good and used <= total else -1
