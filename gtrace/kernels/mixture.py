"""Truncated normal mixtures on a grid of levels: integrals over its cells, and coordinate descent.

A component is one row of a float64[k, 6] table: the point of its interval where its density is highest, sigma, the
density there, how many sigmas that point lies above the mean, and the interval. With u = (r - anchor) / sigma
its density is height * exp(-u (u + 2 offset) / 2), which neither overflows nor cancels however far outside the
interval the mean lies. A row with sigma 0 is a point mass of that "height" at its anchor.

Cells are integrated by Gauss-Legendre panels and not by differences of the error function: in the narrow cells of
fine grids and in far tails such differences lose most digits, the panels none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gtrace.kernels._jit import inline, jit

if TYPE_CHECKING:
    from gtrace.kernels import Floats

#: columns of a component table
ANCHOR, SIGMA, HEIGHT, OFFSET, LOW, HIGH = range(6)
#: columns of a cell [a, b): mass, sum (r - a), sum (b - r), sum (b - r)(r - a)
MASS, UP, DOWN, ERROR = range(4)

# Twelve points integrate a normal density times a quadratic to the last digit of a float64 over two sigmas,
# and over a fall of the exponent by 8.
_X, _W = np.polynomial.legendre.leggauss(12)
_PLACES = (1.0 + _X) / 2.0
_SHARES = _W / 2.0
_POINTS = 12
_NEGLIGIBLE = 45.0
_UNDERFLOW = 720.0
_CLOSE = 4e-16
_STEPS = 200


@inline
def _cell(table: Floats, a: float, b: float) -> tuple[float, float, float, float]:
    """The four integrals over [a, b); all zero for b <= a."""
    mass, up, down, error = 0.0, 0.0, 0.0, 0.0
    width = b - a
    for k in range(table.shape[0]):
        anchor, sigma, offset = table[k, ANCHOR], table[k, SIGMA], table[k, OFFSET]
        if sigma == 0.0:
            if a <= anchor < b:
                height = table[k, HEIGHT]
                mass += height
                up += height * (anchor - a)
                down += height * (b - anchor)
                error += height * (anchor - a) * (b - anchor)
            continue
        left = max(a, table[k, LOW])
        right = min(b, table[k, HIGH])
        if right <= left:
            continue
        alpha = (left - anchor) / sigma
        beta = (right - anchor) / sigma
        origin = min(max(0.0, alpha), beta)
        if 0.5 * origin * (origin + 2.0 * offset) > _UNDERFLOW:
            continue
        scale = table[k, HEIGHT] * sigma
        # Outwards from the highest point of the density in the cell, on both sides, until nothing is left of it.
        for side in range(2):
            sign = 1.0 - 2.0 * side
            tilt = sign * offset
            start = sign * origin
            end = beta if side == 0 else -alpha
            u = start
            while u < end and 0.5 * (u - start) * (u + start + 2.0 * tilt) < _NEGLIGIBLE:
                following = min(u + 2.0 / max(1.0, 0.25 * abs(u + tilt)), end)
                step = following - u
                for i in range(_POINTS):
                    ahead = step * _PLACES[i]
                    t = u + ahead
                    share = scale * step * _SHARES[i] * np.exp(-0.5 * t * (t + 2.0 * tilt))
                    if side == 0:
                        over = (left - a) + sigma * ((u - alpha) + ahead)
                        under = width - over
                    else:
                        under = (b - right) + sigma * ((u + beta) + ahead)
                        over = width - under
                    mass += share
                    up += share * over
                    down += share * under
                    error += share * over * under
                u = following
    return mass, up, down, error


@inline
def _density(table: Floats, r: float) -> float:
    total = 0.0
    for k in range(table.shape[0]):
        if table[k, SIGMA] > 0.0 and table[k, LOW] <= r <= table[k, HIGH]:
            u = (r - table[k, ANCHOR]) / table[k, SIGMA]
            total += table[k, HEIGHT] * np.exp(-0.5 * u * (u + 2.0 * table[k, OFFSET]))
    return total


@jit
def density(table: Floats, points: Floats, out: Floats) -> None:
    """Density of the law, point masses left out, at each of the points."""
    for i in range(points.size):
        out[i] = _density(table, points[i])


@jit
def cells(table: Floats, edges: Floats, out: Floats) -> None:
    """The four integrals over [edges[j], edges[j + 1]) into out[m, 4] for m + 1 edges; zeros where edges fall."""
    for j in range(edges.size - 1):
        mass, up, down, error = _cell(table, edges[j], edges[j + 1])
        out[j, MASS] = mass
        out[j, UP] = up
        out[j, DOWN] = down
        out[j, ERROR] = error


@inline
def _best(table: Floats, a: float, c: float, start: float, mirrored: bool) -> float:
    """The best level between the fixed neighbours a and c: the root of an increasing function.

    Newton's steps from ``start``, or bisection if they leave the bracket.
    """
    low, high, level = a, c, start
    for _ in range(_STEPS):
        mass, up, _down, _error = _cell(table, a, level)
        _mass, _up, down, _error = _cell(table, level, c)
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
        if abs(following - level) <= _CLOSE * abs(level) or not low < following < high:
            break
        level = following
    return level


@jit
def sweep(table: Floats, levels: Floats, mirrored: bool) -> float:
    """One sweep of coordinate descent over the free levels, ascending and in place; returns the largest move.

    The last level stays, and the first one unless the grid is mirrored at 0. A level between two cells without
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
