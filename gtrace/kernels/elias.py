"""Universal codes of integers, least significant bit first: Elias gamma, delta and omega, and Rice codes of gaps.

A code is a prefix for the bit length L of a positive integer, then its low bits. The tables that define the
three codes apart are built by :mod:`gtrace.coding.elias`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from gtrace.kernels._jit import inline, jit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.kernels import Bytes, Ints, Symbols, Words

    Integers: TypeAlias = NDArray[np.integer[Any]]

GAMMA, DELTA, OMEGA = 0, 1, 2
#: integers below 2^SHORT have their whole code in a table
SHORT = 12
#: the decoder looks this many bits up at once
QUICK = 12
#: longest bit length that is coded
LONGEST = 63
_0 = np.uint64(0)
_1 = np.uint64(1)
_6 = np.uint64(6)
_63 = np.uint64(63)
_64 = np.uint64(64)


@inline
def _positive(value: int, origin: int, signed: bool) -> np.uint64:
    """The positive integer of a value: 1 for the origin, then -1, 1, -2, ... (or 1, 2, ...) from it."""
    v = np.int64(value) - origin
    return np.uint64((v << 1) ^ (v >> 63) if signed else v) + _1


@inline
def _bit_length(z: np.uint64) -> int:
    length = 1
    for shift in (32, 16, 8, 4, 2, 1):
        if z >> np.uint64(shift) > _0:
            z >>= np.uint64(shift)
            length += shift
    return length


@inline
def _put(
    words: Words, at: int, hold: np.uint64, held: np.uint64, value: np.uint64, width: np.uint64
) -> tuple[int, np.uint64, np.uint64]:
    """Append ``value``, which has ``width`` bits (1 to 64); the current word is in ``hold`` and in ``words[at]``.

    Stores before it knows whether a word is full: that cannot be predicted, and a wrong prediction costs more.
    """
    full = hold | (value << held)
    after = held + width
    # Two shifts: nothing may be left over, and a shift by 64 is undefined.
    over = (value >> _1) >> (_63 - held)
    words[at] = full
    words[at + 1] = over
    spilled = after >= _64
    return at + np.int64(spilled), over if spilled else full, after & _63


@inline
def _peek(words: Words, at: np.uint64) -> np.uint64:
    """The 64 bits from bit ``at`` on."""
    k, shift = at >> _6, at & _63
    return (words[k] >> shift) | ((words[k + _1] << _1) << (_63 - shift))


@inline
def _low(word: np.uint64, width: np.uint64) -> np.uint64:
    """The low ``width`` bits (0 to 63)."""
    return word & ((_1 << width) - _1)


@jit
def length(values: Integers, origin: int, signed: bool, short: Bytes, long: Ints) -> int:
    """Bits of all codes.

    Args:
        values: any integers; their distance from ``origin`` is below 2^62, and not negative unless ``signed``.
        origin: the value with the shortest code.
        signed: whether values lie on both sides of it.
        short: uint8[2^SHORT], length of the code of each small positive integer.
        long: int64[65], length of the codes of each bit length.
    """
    total = 0
    for i in range(values.size):
        z = _positive(values[i], origin, signed)
        if z < np.uint64(short.size):
            total += np.int64(short[z])
        else:
            total += long[_bit_length(z)]
    return total


@jit
def encode(
    values: Integers,
    origin: int,
    signed: bool,
    codes: NDArray[np.uint32],
    short: Bytes,
    prefixes: Words,
    prefix_bits: Bytes,
    extra_bits: Bytes,
    words: Words,
) -> None:
    """Write all codes; ``words`` has room for one word more than the bits fill.

    Args:
        values, origin, signed, short: as for :func:`length`.
        codes: uint32[2^SHORT], code of each small positive integer.
        prefixes, prefix_bits, extra_bits: per bit length L, what goes before the low bits, its width, and in how
            many bits the low L - 1 bits are written (one more where a zero ends the code).
        words: uint64[].
    """
    hold, held, at = _0, _0, 0
    for i in range(values.size):
        z = _positive(values[i], origin, signed)
        if z < np.uint64(short.size):
            at, hold, held = _put(words, at, hold, held, np.uint64(codes[z]), np.uint64(short[z]))
        else:
            bits = _bit_length(z)
            at, hold, held = _put(words, at, hold, held, prefixes[bits], np.uint64(prefix_bits[bits]))
            low = _low(z, np.uint64(bits - 1))
            at, hold, held = _put(words, at, hold, held, low, np.uint64(extra_bits[bits]))


@inline
def _gamma(words: Words, at: np.uint64) -> tuple[np.uint64, np.uint64]:
    """A gamma code at bit ``at``: the integer and the code's length; 0, 0 when it is longer than any written."""
    word = _peek(words, at)
    if word == _0:
        return _0, _0
    zeros = _0
    while (word >> zeros) & _1 == _0:
        zeros += _1
    if zeros >= np.uint64(LONGEST):
        return _0, _0
    low = _low(_peek(words, at + zeros + _1), zeros)
    return (_1 << zeros) | low, zeros + zeros + _1


@inline
def _delta(words: Words, at: np.uint64) -> tuple[np.uint64, np.uint64]:
    bits, used = _gamma(words, at)
    if bits == _0 or bits > np.uint64(LONGEST):
        return _0, _0
    low = _low(_peek(words, at + used), bits - _1)
    return (_1 << (bits - _1)) | low, used + bits - _1


@inline
def _omega(words: Words, at: np.uint64) -> tuple[np.uint64, np.uint64]:
    value, used = _1, _0
    while True:
        word = _peek(words, at + used)
        if word & _1 == _0:
            return value, used + _1
        if value >= np.uint64(LONGEST):
            return _0, _0
        group = value
        value = (_1 << group) | _low(word >> _1, group)
        used += group + _1


@jit
def decode(
    words: Words,
    bits: int,
    kind: int,
    origin: int,
    signed: bool,
    symbols: int,
    quick_integer: Symbols,
    quick_length: Bytes,
    out: Integers,
) -> int:
    """Read ``out.size`` codes.

    Args:
        words: the stream and zeros for at least 192 bits beyond it.
        bits: its length; reading stops there.
        kind: ``GAMMA``, ``DELTA`` or ``OMEGA``.
        origin, signed: as for :func:`length`.
        symbols: values must be at least 0 and below this; 0 for no such limit.
        quick_integer, quick_length: the integer and length of the code that the next QUICK bits begin with;
            length 0 for a longer code.
        out: int64[] or uint16[].

    Returns:
        the number of bits read, or -1 when the stream ends early, holds a code that no encoder writes, or a value
        outside the alphabet.
    """
    total = np.uint64(bits)
    mask = np.uint64(quick_integer.size - 1)
    at = _0
    for i in range(out.size):
        quick = _peek(words, at) & mask
        used = np.uint64(quick_length[quick])
        z = np.uint64(quick_integer[quick])
        if used == _0:
            if kind == GAMMA:
                z, used = _gamma(words, at)
            elif kind == DELTA:
                z, used = _delta(words, at)
            else:
                z, used = _omega(words, at)
            if used == _0:
                return -1
        at += used
        if at > total:
            return -1
        u = np.int64(z - _1)
        value = ((u >> 1) ^ -(u & 1) if signed else u) + origin
        if symbols > 0 and (value < 0 or value >= symbols):
            return -1
        out[i] = value
    return np.int64(at)


@jit
def gap_lengths(positions: Ints, low: int, by_length: Ints, rice: Ints) -> None:
    """The bits that coding the gaps between ascending positions would take.

    Args:
        positions: int64[m], ascending, not negative.
        low: the first Rice parameter to try.
        by_length: int64[65], zeros; becomes the number of gaps (counted from 1) of each bit length.
        rice: int64[k], zeros; becomes the bits of all gaps with the parameters low, low + 1, ...
    """
    last = -1
    for i in range(positions.size):
        gap = positions[i] - last
        last = positions[i]
        by_length[_bit_length(np.uint64(gap))] += 1
        for k in range(rice.size):
            rice[k] += ((gap - 1) >> (low + k)) + 1 + low + k


@jit
def write_rice(positions: Ints, k: int, words: Words) -> None:
    """Gaps less one: the quotient by 2^k as zeros, a one, then k bits; room for one word more than they fill."""
    hold, held, at = _0, _0, 0
    wide = np.uint64(k)
    last = -1
    for i in range(positions.size):
        gap = np.uint64(positions[i] - last - 1)
        last = positions[i]
        zeros = gap >> wide
        while zeros > _0:
            piece = min(zeros, _64)
            at, hold, held = _put(words, at, hold, held, _0, piece)
            zeros -= piece
        at, hold, held = _put(words, at, hold, held, (_low(gap, wide) << _1) | _1, wide + _1)


@jit
def read_rice(words: Words, bits: int, k: int, size: int, out: Ints) -> int:
    """Undo :func:`write_rice`; returns the bits read, or -1 when the stream ends early or a position is not below size.

    ``words`` has zeros for at least 192 bits beyond the stream.
    """
    total = np.uint64(bits)
    wide = np.uint64(k)
    at = _0
    last = -1
    for i in range(out.size):
        word = _peek(words, at)
        zeros = _0
        while word == _0:
            zeros += _64
            if at + zeros >= total:
                return -1
            word = _peek(words, at + zeros)
        while word & _1 == _0:
            word >>= _1
            zeros += _1
        at += zeros + _1
        low = _low(_peek(words, at), wide)
        at += wide
        if at > total or zeros > np.uint64(size) >> wide:
            return -1
        last += np.int64((zeros << wide) | low) + 1
        if last >= size:
            return -1
        out[i] = last
    return np.int64(at)


@jit
def write_wide(positions: Ints, width: int, words: Words) -> None:
    """Each position in ``width`` bits (1 to 63); room for one word more than they fill."""
    hold, held, at = _0, _0, 0
    for i in range(positions.size):
        at, hold, held = _put(words, at, hold, held, np.uint64(positions[i]), np.uint64(width))


@jit
def read_wide(words: Words, width: int, size: int, out: Ints) -> bool:
    """Undo :func:`write_wide`; false when the positions are not ascending or not below ``size``."""
    last = -1
    good = True
    for i in range(out.size):
        position = np.int64(_low(_peek(words, np.uint64(i * width)), np.uint64(width)))
        good &= (position > last) & (position < size)
        last = position
        out[i] = position
    return good


@jit
def add_up(gaps: Ints, size: int) -> bool:
    """Turn gaps, each from 1 on, into positions in place; false when one is not below ``size``."""
    last = -1
    for i in range(gaps.size):
        if gaps[i] > size - 1 - last:
            return False
        last += gaps[i]
        gaps[i] = last
    return True
