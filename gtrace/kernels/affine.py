"""Uniform codes between the least and the greatest value."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gtrace.kernels._jit import jit

if TYPE_CHECKING:
    from numpy.typing import NDArray


@jit
def round_affine(x: NDArray[np.float32], low: float, width: float, steps: int, out: NDArray[np.uint16]) -> None:
    """floor((x - low) steps / width + 1/2) in float64.

    Args:
        x: float32[n], all in [low, low + width].
        low: the least of them.
        width: above 0.
        steps: the highest code.
        out: uint16[n], overwritten.
    """
    top = np.float64(steps)
    for i in range(x.size):
        # A division and no product with steps / width, whose rounding would move ties.
        out[i] = np.int32((np.float64(x[i]) - low) * top / width + 0.5)
