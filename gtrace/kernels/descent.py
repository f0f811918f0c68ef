"""Levels on an empirical law: hinge sums of a sketch, and coordinate descent on them.

With B(t) = sum (t - r)_+ the error of a grid is, up to a constant, sum_j (l_{j+1} - l_{j-1}) B(l_j), so all that
descent needs is B and its slope, the mass below t. A table of both at the lower edges of the bins makes each of them
one binary search.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gtrace.kernels._jit import inline, jit
from gtrace.kernels.sketching import hinge

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: columns of a law table: lower edge, width, mass, sum d, sum d^2 (d = r - lower edge), mass below, B at the edge
LOWER, WIDTH, MASS, FIRST, SECOND, BELOW, HINGE = range(7)
COLUMNS = 7
_GOLDEN = 0.6180339887498949
_GOLDEN_STEPS = 45


@jit
def tabulate(
    lower: NDArray[np.float64],
    upper: NDArray[np.float64],
    sums: NDArray[np.float64],
    first: int,
    zeros: float,
    total: float,
    table: NDArray[np.float64],
) -> None:
    """Fill table[k, 7] from the bins of a sketch, whose columns ``first`` to first + 2 are taken, divided by ``total``.

    ``zeros`` is the mass at r = 0.
    """
    below, area, at = zeros / total, 0.0, 0.0
    for k in range(lower.size):
        area += below * (lower[k] - at)
        at = lower[k]
        mass, d1 = sums[k, first] / total, sums[k, first + 1] / total
        table[k, LOWER] = lower[k]
        table[k, WIDTH] = upper[k] - lower[k]
        table[k, MASS] = mass
        table[k, FIRST] = d1
        table[k, SECOND] = sums[k, first + 2] / total
        table[k, BELOW] = below
        table[k, HINGE] = area
        below += mass
        area += mass * (upper[k] - lower[k]) - d1 + (below - mass) * (upper[k] - lower[k])
        at = upper[k]


@inline
def _find(table: NDArray[np.float64], t: float) -> int:
    """The last bin whose lower edge is not above t; -1 when there is none."""
    low, high = 0, table.shape[0]
    while low < high:
        middle = (low + high) // 2
        if table[middle, LOWER] <= t:
            low = middle + 1
        else:
            high = middle
    return low - 1


@inline
def _area(table: NDArray[np.float64], k: int, t: float, zeros: float) -> float:
    """B(t) for t at or above the lower edge of bin k, and below that of bin k + 1."""
    if k < 0:
        return zeros * t
    row = table[k]
    rest = row[HINGE] + row[BELOW] * (t - row[LOWER])
    if t >= row[LOWER] + row[WIDTH]:
        return rest + row[MASS] * (t - row[LOWER]) - row[FIRST]
    inside, _ = hinge(t, row[LOWER], row[WIDTH], row[MASS], row[FIRST], row[SECOND])
    return rest + inside


@inline
def _below(table: NDArray[np.float64], k: int, t: float, zeros: float) -> float:
    """Mass below t, for t as in :func:`_area`: the slope of B."""
    if k < 0:
        return zeros
    row = table[k]
    if row[MASS] <= 0.0:
        return row[BELOW]
    if t >= row[LOWER] + row[WIDTH]:
        return row[BELOW] + row[MASS]
    u = (t - row[LOWER]) / row[WIDTH]
    m1 = row[FIRST] / (row[MASS] * row[WIDTH])
    m2 = row[SECOND] / (row[MASS] * row[WIDTH] * row[WIDTH])
    c1 = 2.0 * m1 - 1.0
    c2 = 0.5 * (3.0 * (4.0 * m2 - 4.0 * m1 + 1.0) - 1.0)
    part = u + 3.0 * c1 * (u * u - u) + 5.0 * c2 * (2.0 * u * u * u - 3.0 * u * u + u)
    return row[BELOW] + row[MASS] * min(max(part, 0.0), 1.0)


@jit
def hinges(table: NDArray[np.float64], zeros: float, points: NDArray[np.float64], out: NDArray[np.float64]) -> None:
    """Mass below each point and B there, into out[p, 2]; ``zeros`` is the mass at r = 0."""
    for i in range(points.size):
        k = _find(table, points[i])
        out[i, 0] = _below(table, k, points[i], zeros)
        out[i, 1] = _area(table, k, points[i], zeros)


@jit
def sweep(table: NDArray[np.float64], zeros: float, levels: NDArray[np.float64], mirrored: bool) -> float:
    """One sweep of coordinate descent over the free levels, ascending and in place; returns the largest move.

    Between fixed neighbours a and c the best level minimizes (c - a) B(l) - l (B(c) - B(a)); the first level of a
    mirrored grid (l + c) B(l) - l B(c). Both are found by their slope among the bins and by golden section
    inside one. A level moves only when that lowers the error, so the error never rises.
    """
    largest = 0.0
    count = table.shape[0]
    for j in range(0 if mirrored else 1, levels.size - 1):
        first = mirrored and j == 0
        a = 0.0 if first else levels[j - 1]
        c = levels[j + 1]
        at_c = _area(table, _find(table, c), c, zeros)
        tilt = 1.0 if first else 0.0
        factor = c if first else c - a
        target = at_c if first else at_c - _area(table, _find(table, a), a, zeros)
        # The last bin at whose lower edge the error still falls.
        low, high = 0, count
        while low < high:
            k = (low + high) // 2
            edge = table[k, LOWER]
            if (tilt * edge + factor) * table[k, BELOW] + tilt * table[k, HINGE] < target:
                low = k + 1
            else:
                high = k
        k = low - 1
        left = max(a, table[k, LOWER]) if k >= 0 else a
        right = min(c, table[k + 1, LOWER]) if k + 1 < count else c
        x = right - _GOLDEN * (right - left)
        y = left + _GOLDEN * (right - left)
        at_x = (tilt * x + factor) * _area(table, k, x, zeros) - x * target
        at_y = (tilt * y + factor) * _area(table, k, y, zeros) - y * target
        for _ in range(_GOLDEN_STEPS):
            if at_x <= at_y:
                right, y, at_y = y, x, at_x
                x = right - _GOLDEN * (right - left)
                at_x = (tilt * x + factor) * _area(table, k, x, zeros) - x * target
            else:
                left, x, at_x = x, y, at_y
                y = left + _GOLDEN * (right - left)
                at_y = (tilt * y + factor) * _area(table, k, y, zeros) - y * target
        best, at_best = (x, at_x) if at_x <= at_y else (y, at_y)
        old = levels[j]
        at_old = (tilt * old + factor) * _area(table, _find(table, old), old, zeros) - old * target
        if at_best < at_old and a < best < c:
            largest = max(largest, abs(best - old))
            levels[j] = best
    return largest


@jit
def solve_tridiagonal(diagonal: NDArray[np.float64], coupling: NDArray[np.float64], right: NDArray[np.float64]) -> bool:
    """Solve a symmetric tridiagonal system in place of ``right``; false when it is not positive definite.

    ``diagonal`` float64[n] is overwritten by the pivots; coupling float64[n - 1].
    """
    n = diagonal.size
    for i in range(1, n):
        if not diagonal[i - 1] > 0.0:
            return False
        ratio = coupling[i - 1] / diagonal[i - 1]
        diagonal[i] -= ratio * coupling[i - 1]
        right[i] -= ratio * right[i - 1]
    if not diagonal[n - 1] > 0.0:
        return False
    right[n - 1] /= diagonal[n - 1]
    for i in range(n - 2, -1, -1):
        right[i] = (right[i] - coupling[i] * right[i + 1]) / diagonal[i]
    return True
