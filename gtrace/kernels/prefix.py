"""The prefix code of pruned tensors, least significant bit first: ``0``, ``10`` and a sign, ``11`` and a float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gtrace.kernels._jit import jit

if TYPE_CHECKING:
    from numpy.typing import NDArray

_8 = np.uint64(8)
_255 = np.uint64(255)
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
    """Write the code; ``out`` holds exactly its bytes, unused bits are zero."""
    hold = np.uint64(0)
    held = np.uint64(0)
    at = 0
    for i in range(bits.size):
        magnitude = bits[i] & _MAGNITUDE
        if magnitude == 0:
            held += np.uint64(1)
        elif magnitude == alpha:
            hold |= (np.uint64(1) | (np.uint64(bits[i] >> np.uint32(31)) << np.uint64(2))) << held
            held += np.uint64(3)
        else:
            hold |= (np.uint64(3) | (np.uint64(bits[i]) << np.uint64(2))) << held
            held += np.uint64(34)
        # fewer than 8 bits stay, so that 34 more always fit
        while held >= _8:
            out[at] = hold & _255
            hold >>= _8
            held -= _8
            at += 1
    if at < out.size:
        out[at] = hold & _255


@jit
def read_prefix(data: NDArray[np.uint8], alpha: np.uint32, out: NDArray[np.uint32]) -> int:
    """Read ``out.size`` values; returns the bits read, or -1 for a stream that ends early or no encoder writes."""
    hold = np.uint64(0)
    held = 0
    at = 0
    used = 0
    for i in range(out.size):
        while held <= 48 and at < data.size:
            hold |= np.uint64(data[at]) << np.uint64(held)
            held += 8
            at += 1
        length = ZERO_BITS
        value = np.uint32(0)
        if hold & np.uint64(1):
            if hold & np.uint64(2):
                length = OTHER_BITS
                value = np.uint32((hold >> np.uint64(2)) & np.uint64(0xFFFFFFFF))
                magnitude = value & _MAGNITUDE
                if magnitude == 0 or magnitude == alpha:
                    return -1
            else:
                length = ALPHA_BITS
                value = alpha | (_SIGN if hold & np.uint64(4) else np.uint32(0))
        if length > held:
            return -1
        out[i] = value
        hold >>= np.uint64(length)
        held -= length
        used += length
    return used
