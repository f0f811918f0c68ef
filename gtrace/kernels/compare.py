"""Compares a decoded tensor with the exact one, in one pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gtrace.kernels._jit import jit
from gtrace.kernels.norms import BLOCK, LANES

if TYPE_CHECKING:
    from gtrace.kernels import Floats, Singles

#: squared error, |error|, |error| / |g| over non-zero g, g q, q^2, zeros of q, non-zeros of g
SUMS = 7
#: bins of one sign that :func:`tally` counts into
BINS = 255 << 10
_CHUNK = 1024
_SHIFT = np.uint32(13)
_S31 = np.uint32(31)
_EDGE = np.uint32(0x7FFFE000)


@jit
def compare(g: Singles, q: Singles, out: Floats) -> None:
    """Sums over all elements into ``out`` (float64[7], see SUMS), over fixed blocks in index order."""
    lanes = np.zeros((SUMS, LANES))
    e2, e1, er, gq, qq, zeros, alive = lanes[0], lanes[1], lanes[2], lanes[3], lanes[4], lanes[5], lanes[6]
    for j in range(SUMS):
        out[j] = 0.0
    for start in range(0, g.size, BLOCK):
        stop = min(g.size, start + BLOCK)
        lanes[:] = 0.0
        for p in range(start, stop, LANES):
            gb = g[p : min(p + LANES, stop)]
            qb = q[p : min(p + LANES, stop)]
            for k in range(gb.size):
                a, b = np.float64(gb[k]), np.float64(qb[k])
                error = abs(b - a)
                some = a != 0.0
                e2[k] += error * error
                e1[k] += error
                er[k] += (error / abs(a)) if some else 0.0
                gq[k] += a * b
                qq[k] += b * b
                zeros[k] += 1.0 if b == 0.0 else 0.0
                alive[k] += 1.0 if some else 0.0
        for j in range(SUMS):
            total = 0.0
            for k in range(LANES):
                total += lanes[j, k]
            out[j] += total


@jit
def add_error(g: Singles, q: Singles, total: Floats) -> None:
    """Add q - g to ``total``, element by element."""
    for i in range(total.size):
        total[i] += np.float64(q[i]) - np.float64(g[i])


@jit
def tally(x: Singles, table: Floats) -> None:
    """Count finite values into bins of their top bits: sign, exponent and ten bits of mantissa.

    Args:
        x: float32[n].
        table: float64[2, BINS, 2], added to: for each sign and bin the count, and the sum of |x| - lower edge.
    """
    edge = np.empty(_CHUNK, np.uint32)
    low = edge.view(np.float32)
    bits = x.view(np.uint32)
    for p in range(0, x.size, _CHUNK):
        xb = x[p : p + _CHUNK]
        bb = bits[p : p + _CHUNK]
        for i in range(bb.size):
            edge[i] = bb[i] & _EDGE
        for i in range(bb.size):
            row = table[np.int64(bb[i] >> _S31), np.int64(edge[i] >> _SHIFT)]
            row[0] += 1.0
            row[1] += np.float64(abs(xb[i])) - np.float64(low[i])


def edges() -> Floats:
    """float64[BINS + 1], the edges of the bins of :func:`tally`; the last one is 2^128."""
    patterns = (np.arange(BINS, dtype=np.uint32) << _SHIFT).view(np.float32)
    return np.append(patterns.astype(np.float64), 2.0**128)


@jit
def distance(a: Singles, b: Singles, scale_a: float, scale_b: float) -> float:
    """Mean |a scale_a - b scale_b| over all elements, in a fixed order."""
    lanes = np.zeros(LANES)
    for p in range(0, a.size, LANES):
        ab = a[p : p + LANES]
        bb = b[p : p + LANES]
        for k in range(ab.size):
            lanes[k] += abs(np.float64(ab[k]) * scale_a - np.float64(bb[k]) * scale_b)
    total = 0.0
    for k in range(LANES):
        total += lanes[k]
    return total / max(1, a.size)


@jit
def adam_weights(g: Singles, v: Singles, decay: float, correction: float, eps: float, out: Floats) -> None:
    """1 / d^2 into ``out``, where d = sqrt((decay v + (1 - decay) g^2) / correction) + eps.

    0 if d is 0 or not a number: such an element has no update.
    """
    for i in range(out.size):
        x = np.float64(g[i])
        d = np.sqrt((decay * np.float64(v[i]) + (1.0 - decay) * x * x) / correction) + eps
        w = 1.0 / (d * d)
        out[i] = w if w < np.inf else 0.0


@jit
def weighted_sums(g: Singles, q: Singles, w: Floats) -> tuple[float, float]:
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
