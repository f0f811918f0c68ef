"""Truncated normal mixtures on a grid of levels: integrals over its cells, and coordinate descent.

A component is one row of a float64[k, 6] table: mean, sigma, density at its reference point, that point in
standard units, and the interval that it lives on. A row with sigma 0 is a point mass of that "density" at its mean.

Cells are integrated by Gauss-Legendre panels and not by differences of the error function: the
differences lose every digit in the narrow cells of fine grids and in far tails, the panels lose none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gtrace.kernels._jit import inline, jit

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: columns of a component table
MEAN, SIGMA, HEIGHT, PEAK, LOW, HIGH = range(6)
#: columns of a cell: mass, sum (r - a), sum (b - r), sum (b - r)(r - a)
MASS, UP, DOWN, ERROR = range(4)

# Twelve points integrate exp(-z^2/2) times a quadratic over two standard units, or over a fall of the exponent
# by 8, to the last digit of a float64.
_X, _W = np.polynomial.legendre.leggauss(12)
_OFFSETS = (1.0 + _X) / 2.0
_SHARES = _W / 2.0
_POINTS = 12
_NEGLIGIBLE = 45.0
_UNDERFLOW = 720.0
_CLOSE = 4e-16


@inline
def cell(table: NDArray[np.float64], a: float, b: float) -> tuple[float, float, float, float]:
    """Mass, sum (r - a), sum (b - r) and sum (b - r)(r - a) of the law over [a, b)."""
    mass, up, down, error = 0.0, 0.0, 0.0, 0.0
    width = b - a
    for k in range(table.shape[0]):
        mean, sigma, height, peak = table[k, MEAN], table[k, SIGMA], table[k, HEIGHT], table[k, PEAK]
        if sigma == 0.0:
            if a <= mean < b:
                mass += height
                up += height * (mean - a)
                down += height * (b - mean)
                error += height * (mean - a) * (b - mean)
            continue
        left = max(a, table[k, LOW])
        right = min(b, table[k, HIGH])
        if right <= left:
            continue
        alpha = (left - mean) / sigma
        beta = (right - mean) / sigma
        origin = min(max(0.0, alpha), beta)
        if 0.5 * (origin - peak) * (origin + peak) > _UNDERFLOW:
            continue
        # From the highest point of the density outwards, on both sides, until nothing is left of it.
        for side in range(2):
            sign = 1.0 - 2.0 * side
            end = beta if side == 0 else -alpha
            start = sign * origin
            z = start
            while z < end and 0.5 * (z - start) * (z + start) < _NEGLIGIBLE:
                following = min(z + 2.0 / max(1.0, 0.25 * abs(z)), end)
                step = following - z
                for i in range(_POINTS):
                    ahead = step * _OFFSETS[i]
                    t = z + ahead
                    share = height * sigma * step * _SHARES[i] * np.exp(-0.5 * (t - peak) * (t + peak))
                    if side == 0:
                        over = (left - a) + sigma * ((z - alpha) + ahead)
                        under = width - over
                    else:
                        under = (b - right) + sigma * ((z + beta) + ahead)
                        over = width - under
                    mass += share
                    up += share * over
                    down += share * under
                    error += share * over * under
                z = following
    return mass, up, down, error


@inline
def _density(table: NDArray[np.float64], r: float) -> float:
    total = 0.0
    for k in range(table.shape[0]):
        sigma, peak = table[k, SIGMA], table[k, PEAK]
        if sigma > 0.0 and table[k, LOW] <= r <= table[k, HIGH]:
            z = (r - table[k, MEAN]) / sigma
            total += table[k, HEIGHT] * np.exp(-0.5 * (z - peak) * (z + peak))
    return total


@jit
def density(table: NDArray[np.float64], points: NDArray[np.float64], out: NDArray[np.float64]) -> None:
    """Density of the law, point masses left out, at each of the points."""
    for i in range(points.size):
        out[i] = _density(table, points[i])


@jit
def cells(table: NDArray[np.float64], edges: NDArray[np.float64], out: NDArray[np.float64]) -> None:
    """Integrals over the cells between ascending ``edges`` (float64[m + 1]) into out[m, 4]."""
    for j in range(edges.size - 1):
        mass, up, down, error = cell(table, edges[j], edges[j + 1])
        out[j, MASS] = mass
        out[j, UP] = up
        out[j, DOWN] = down
        out[j, ERROR] = error


@inline
def _best(table: NDArray[np.float64], a: float, c: float, start: float, mirrored: bool) -> float:
    """The best level between the fixed neighbours a and c: the root of an increasing function."""
    low, high, level = a, c, start
    for _ in range(200):
        mass, up, _d, _e = cell(table, a, level)
        _m, _u, down, _f = cell(table, level, c)
        if mirrored:
            slope = 2.0 * level * mass - down
            rise = 2.0 * mass + (level + c) * _density(table, level)
        else:
            slope = up - down
            rise = (c - a) * _density(table, level)
        if slope == 0.0:
            break
        if slope > 0.0:
            high = level
        else:
            low = level
        following = level - slope / rise if rise > 0.0 else low
        if not low < following < high:
            following = 0.5 * (low + high)
        if abs(following - level) <= _CLOSE * level or not low < following < high:
            break
        level = following
    return level


@jit
def sweep(table: NDArray[np.float64], levels: NDArray[np.float64], mirrored: bool) -> float:
    """One sweep of coordinate descent over the free levels, ascending and in place; returns the largest move.

    The last level stays, and the first one unless the grid is mirrored. A level whose two cells hold no
    mass stays too.
    """
    largest = 0.0
    for j in range(0 if mirrored else 1, levels.size - 1):
        first = mirrored and j == 0
        a = 0.0 if first else levels[j - 1]
        level = _best(table, a, levels[j + 1], levels[j], first)
        largest = max(largest, abs(level - levels[j]))
        levels[j] = level
    return largest
