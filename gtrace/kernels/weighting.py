"""Errors of which every element counts as much as it moves the optimizer's update."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gtrace.kernels._jit import jit
from gtrace.kernels.norms import BLOCK, LANES

if TYPE_CHECKING:
    from numpy.typing import NDArray


@jit
def adam_weights(
    g: NDArray[np.float32],
    v: NDArray[np.float32],
    decay: float,
    correction: float,
    eps: float,
    out: NDArray[np.float64],
) -> None:
    """1 / d^2 into ``out``, where d = sqrt((decay v + (1 - decay) g^2) / correction) + eps.

    0 where d is 0 or no number: such an element has no update.
    """
    for i in range(out.size):
        x = np.float64(g[i])
        d = np.sqrt((decay * np.float64(v[i]) + (1.0 - decay) * x * x) / correction) + eps
        w = 1.0 / (d * d)
        out[i] = w if w < np.inf else 0.0


@jit
def weighted_sums(g: NDArray[np.float32], q: NDArray[np.float32], w: NDArray[np.float64]) -> tuple[float, float]:
    """sum w (q - g)^2 and sum w g^2, over fixed blocks in index order."""
    lanes = np.zeros((2, LANES))
    error, energy = lanes[0], lanes[1]
    errors, energies = 0.0, 0.0
    for start in range(0, g.size, BLOCK):
        stop = min(g.size, start + BLOCK)
        lanes[:] = 0.0
        for p in range(start, stop, LANES):
            gb = g[p : min(p + LANES, stop)]
            qb = q[p : min(p + LANES, stop)]
            wb = w[p : min(p + LANES, stop)]
            for k in range(gb.size):
                a = np.float64(gb[k])
                e = np.float64(qb[k]) - a
                error[k] += wb[k] * e * e
                energy[k] += wb[k] * a * a
        total = 0.0
        for k in range(LANES):
            total += error[k]
        errors += total
        total = 0.0
        for k in range(LANES):
            total += energy[k]
        energies += total
    return errors, energies
