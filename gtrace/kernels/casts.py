"""float32 to bfloat16."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gtrace.kernels._jit import jit

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SIGN = np.uint32(0x8000)
_REST = np.uint32(0x7FFF)
_LARGEST = np.uint32(0x7F7F)
_ONE = np.uint32(1)
_16 = np.uint32(16)


@jit
def to_bfloat16(bits: NDArray[np.uint32], out: NDArray[np.uint16]) -> None:
    """Round the bits of finite float32 to the nearest upper half, ties to even; the largest is finite."""
    for i in range(bits.size):
        # Half of a last place, less one unless the last bit that stays is odd. No finite number overflows 32 bits.
        rounded = (bits[i] + (_REST + ((bits[i] >> _16) & _ONE))) >> _16
        out[i] = (rounded & _SIGN) | min(rounded & _REST, _LARGEST)
