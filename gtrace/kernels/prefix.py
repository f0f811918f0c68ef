"""The prefix code of pruned tensors, least significant bit first: ``0``, ``10`` and a sign, ``11`` and a float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gtrace.kernels._jit import jit
from gtrace.kernels._words import load64, store64

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: bytes beyond the stream that are written and read
SLACK = 8
_0, _1, _2, _3, _4 = (np.uint64(k) for k in range(5))
_7 = np.uint64(7)
_33 = np.uint64(33)
_34 = np.uint64(34)
_LOW32 = np.uint64(0xFFFFFFFF)
_BYTES = np.uint64(2**64 - 8)
_SIGN = np.uint32(0x80000000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
#: bits of a zero, of plus or minus alpha, of any other value
ZERO_BITS, ALPHA_BITS, OTHER_BITS = 1, 3, 34


@jit
def prefix_bits(bits: NDArray[np.uint32], alpha: np.uint32) -> int:
    """Length of the code of values given by their float32 patterns."""
    total = 0
    for i in range(bits.size):
        magnitude = bits[i] & _MAGNITUDE
        total += ZERO_BITS if magnitude == 0 else (ALPHA_BITS if magnitude == alpha else OTHER_BITS)
    return total


@jit
def write_prefix(bits: NDArray[np.uint32], alpha: np.uint32, out: NDArray[np.uint8]) -> None:
    """Write the code; ``out`` holds its bytes and SLACK more, unused bits of the last one are zero.

    Without branches: which of the three codes comes is random, and wrong guesses would cost more than all of it.
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
        # fewer than 8 bits stay, so that 34 more always fit
        hold |= code << held
        held += length
        store64(out, at, hold)
        at += np.int64(held >> _3)
        hold >>= held & _BYTES
        held &= _7
    if held > _0:
        out[at] = hold


@jit
def read_prefix(data: NDArray[np.uint8], size: int, alpha: np.uint32, out: NDArray[np.uint32]) -> int:
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
