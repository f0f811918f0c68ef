"""Provably optimal levels: the least sum of w (b - x)(x - a) over all sets of s levels.

Exact levels come from a certified search over the sorted points (see :mod:`gtrace.fitting.search`), levels of
method "sketch" from the same search over two points per bin of a moment sketch.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import numpy as np

from gtrace.errors import UsageError
from gtrace.fitting.search import Points, solve
from gtrace.kernels import interval_sums as _spans
from gtrace.sketch import MomentSketch

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

#: bins of method "sketch": ten bits of mantissa over forty octaves
_SHIFT, _OCTAVES = 42, 40
_BASE = (1023 - _OCTAVES << 10) - 1
_ROWS = (_OCTAVES << 10) + 2
#: a bin whose variance is below this part of its mean square is taken as one value
_ONE_VALUE = 1e-10


def optimal_levels(
    values: ArrayLike | MomentSketch,
    s: int,
    weights: ArrayLike | None = None,
    method: str = "exact",
    lo: float | None = None,
    hi: float | None = None,
    grid: int | None = None,
) -> Floats:
    """Levels with the least expected squared error of stochastic rounding to adjacent levels.

    Args:
        values: real numbers, any shape and order (sorted input is not sorted again), or a MomentSketch. A
            sketch gives levels in units of r, weighted by the squared bucket scales, with the ends 0 and 1.
        s: number of levels, both ends included; at least 2.
        weights: one non-negative weight per value; None for 1.
        method: "exact" for the certified optimum; "sketch" for one pass over unsorted values and a search
            over bins 2^-10 wide, relative to the distance from the median. A sketch always uses its own bins.
        lo: first level; None for the least value. No value may lie below it.
        hi: last level; None for the greatest value. No value may lie above it.
        grid: restrict levels to lo + (hi - lo) {0, 1/grid, ..., 1}.

    Returns:
        float64, ascending: s levels, or all distinct values and both ends where those are not more than s.

    Raises:
        UsageError: no value, a NaN or infinite value or weight, a negative weight, s below 2, values
            outside lo..hi, or options that do not fit together.

    >>> optimal_levels([0.0, 1.0, 2.0, 10.0], 3)
    array([ 0.,  2., 10.])
    """
    s = check_count("s", s, 2)
    if method not in ("exact", "sketch"):
        raise UsageError(f"method: '{method}' is unknown; choose exact or sketch")
    if isinstance(values, MomentSketch):
        if weights is not None:
            raise UsageError("weights: a sketch brings its own; leave them out")
        sketch = values
        points: Points = sketch.remember(("points", lo, hi), lambda: _sketch_points(sketch, lo, hi))
        if grid is None:
            # The levels of one step's fit are the next step's optimum to be compared with.
            levels: Floats = sketch.remember(("optimal", s, lo, hi), lambda: solve(points, s).levels)
            return levels.copy()
    else:
        points = check_values(values, weights, lo, hi)
        points = _binned(points) if method == "sketch" else points.ordered()
    if grid is not None:
        points = _on_grid(points, grid)
    return solve(points, s).levels


def certified_levels(
    values: ArrayLike,
    s: int,
    weights: ArrayLike | None = None,
    lo: float | None = None,
    hi: float | None = None,
) -> tuple[Floats, float, float]:
    """Optimal levels with a proof: what they cost, and what no set of s levels can undercut.

    Args:
        values: real numbers, any shape and order.
        s: number of levels, both ends included; at least 2.
        weights: one non-negative weight per value; None for 1.
        lo: first level; None for the least value.
        hi: last level; None for the greatest value.

    Returns:
        the levels (as :func:`optimal_levels` with method "exact"), their objective, recomputed from
        the values, and a lower bound on the objective of any s levels with these ends. The bound is
        at most 1.1e-10 of the objective below it, rounding included.

    Raises:
        UsageError: as for :func:`optimal_levels`.
    """
    s = check_count("s", s, 2)
    points = check_values(values, weights, lo, hi).ordered()
    solution = solve(points, s)
    value = float(_spans.total_cost(points.x, points.w, solution.levels))
    return solution.levels, value, min(solution.bound, value)


def objective(values: ArrayLike, levels: ArrayLike, weights: ArrayLike | None = None) -> float:
    """Sum of w (b - x)(x - a), with a <= x <= b the levels next to each value x.

    It is the expected squared error of unbiased stochastic rounding, in squared units of the values.

    Args:
        values: real numbers, any shape and order.
        levels: finite, ascending; they span the values.
        weights: one non-negative weight per value; None for 1.

    Raises:
        UsageError: no value, values or weights that are not finite, a negative weight, levels that are not
            ascending, or a value outside them.

    >>> objective([0.0, 1.0, 2.0, 10.0], [0.0, 2.0, 10.0])
    1.0
    """
    grid = np.ascontiguousarray(levels, dtype=np.float64).reshape(-1)
    if grid.size == 0 or not np.isfinite(grid).all() or (np.diff(grid) < 0).any():
        raise UsageError("levels: give at least one finite level, in ascending order")
    points = check_values(values, weights, float(grid[0]), float(grid[-1]))
    return float(_spans.total_cost(points.x, points.w, grid))


def check_count(name: str, count: int, least: int) -> int:
    """An integer argument as int.

    Raises:
        UsageError: it is no integer, or below ``least``.
    """
    try:
        number = operator.index(count)
    except TypeError:
        number = least - 1
    if number < least:
        raise UsageError(f"{name}: {count!r} does not fit; give an integer from {least} up")
    return number


def check_values(values: ArrayLike, weights: ArrayLike | None, lo: float | None, hi: float | None) -> Points:
    """Values, weights and ends as the kernels need them.

    Raises:
        UsageError: see :func:`optimal_levels`; the message names the first offending element.
    """
    array = np.asarray(values)
    if array.dtype.kind not in "fiub":
        raise UsageError(f"values of dtype {array.dtype} have no levels; pass real numbers")
    kind = np.float32 if array.dtype in (np.float16, np.float32) else np.float64
    # kernels are compiled for writable arrays only; a second version for read-only ones is not worth its wait
    x = np.require(array.reshape(-1), dtype=kind, requirements=["C", "W"])
    if x.size == 0:
        raise UsageError("values: there is none; give at least one number")
    bad, descents = _spans.inspect(x)
    if bad:
        at = int(np.flatnonzero(~np.isfinite(x))[0])
        raise UsageError(f"values: element {at} is {x[at]}; remove what is not finite")
    first, last = (x.argmin(), x.argmax()) if descents else (0, x.size - 1)
    least, most = float(x[first]), float(x[last])
    low = least if lo is None else float(lo)
    high = most if hi is None else float(hi)
    if not (np.isfinite(low) and np.isfinite(high) and low <= high):
        raise UsageError(f"levels from {low} to {high}: the ends must be finite and in order")
    if least < low:
        raise UsageError(f"values: element {first} is {least}, below the first level {low}")
    if most > high:
        raise UsageError(f"values: element {last} is {most}, above the last level {high}")
    return Points(x, _check_weights(weights, x.size), low, high, ascending=not descents)


def _check_weights(weights: ArrayLike | None, size: int) -> Floats:
    if weights is None:
        return np.empty(0)
    w = np.require(np.asarray(weights).reshape(-1), dtype=np.float64, requirements=["C", "W"])
    if w.size != size:
        raise UsageError(f"weights: {w.size} of them for {size} values; give one per value")
    wrong = ~(np.isfinite(w) & (w >= 0))
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise UsageError(f"weights: element {at} is {w[at]}; weights are finite and not negative")
    return w


def _on_grid(points: Points, cells: int) -> Points:
    """Points on the grid that order the levels on it as the given ones do: their objectives differ by a constant."""
    cells = check_count("grid", cells, 1)
    low, high = points.low, points.high
    if low == high:
        return points
    at = low + (high - low) * (np.arange(cells + 1) / cells)
    at[-1] = high
    if (np.diff(at) <= 0).any():
        raise UsageError(f"grid: {cells} cells between {low} and {high} are finer than float64; use fewer")
    mass = np.zeros(at.size)
    _spans.split_to_grid(points.x, points.w, at, mass)
    return Points(at, mass, low, high)


def _sketch_points(sketch: MomentSketch, lo: float | None, hi: float | None) -> Points:
    low = 0.0 if lo is None else float(lo)
    high = 1.0 if hi is None else float(hi)
    if not (np.isfinite(low) and np.isfinite(high) and low <= high):
        raise UsageError(f"levels from {low} to {high}: the ends must be finite and in order")
    if sketch.rows.size == 0:
        return Points(np.array([max(low, 0.0)]), np.zeros(1), low, high)
    top = float(sketch.lower[-1] + sketch.sums[-1, 1] / sketch.sums[-1, 0])
    if low > 0 or top > high * (1 + 1e-12):
        raise UsageError(
            f"sketch: its values reach from 0 to {top:g}, the levels from {low:g} to {high:g}; set lo and hi"
        )
    x, w = bin_points(sketch.lower, sketch.upper, sketch.sums[:, :3], sketch.sums[:, 3:], low, high)
    return Points(x, w, low, high)


def bin_points(
    lower: Floats, upper: Floats, sums: Floats, weighted: Floats, low: float, high: float
) -> tuple[Floats, Floats]:
    """Two weighted points in place of the contents of each bin: candidates for levels.

    They have the bin's count, mean and variance (where an equal split would leave the bin, one lies on its edge), so
    contents of one or two values come out as they are. Levels outside a bin are judged exactly, but for a constant;
    a level inside a bin is refined to one of its points, which in the worst case is half a bin off the best place.

    Args:
        lower: float64[k], ascending lower edges of non-empty bins.
        upper: float64[k], their upper edges.
        sums: float64[k, 3], count, sum d and sum d^2 of d = value - lower edge.
        weighted: float64[k, 3], the same weighted; gives the weights of the points.
        low: points below it are moved to it.
        high: points above it are moved to it.

    Returns:
        float64[2k] ascending points and their float64[2k] weights.
    """
    width = upper - lower
    mean = np.clip(sums[:, 1] / sums[:, 0], 0.0, width)
    square = sums[:, 2] / sums[:, 0]
    variance = square - mean * mean
    variance[(sums[:, 0] == 1) | (variance <= _ONE_VALUE * square)] = 0.0
    deviation = np.sqrt(variance)
    left, right = mean - deviation, mean + deviation
    # the points a < b of a law on two values have (mean - a)(b - mean) = variance
    rest = width - mean
    out = left < 0
    left[out], right[out] = 0.0, mean[out] + variance[out] / mean[out]
    out = right > width
    left[out], right[out] = mean[out] - variance[out] / rest[out], width[out]
    x = np.clip(np.column_stack([lower + left, lower + np.clip(right, left, width)]), low, high)
    gap = x[:, 1] - x[:, 0]
    mass = weighted[:, 0]
    up = weighted[:, 1] - mass * (x[:, 0] - lower)
    up = np.clip(np.divide(up, gap, out=np.zeros_like(gap), where=gap > 0), 0.0, mass)
    # two neighbours share an edge only up to rounding
    return np.maximum.accumulate(x.reshape(-1)), np.column_stack([mass - up, up]).reshape(-1)


def _binned(points: Points) -> Points:
    """Points for unsorted values: one pass into bins on both sides of an anchor."""
    x, w, low, high, _ = points
    # bins are finest about the anchor; a median of a few values will do
    anchor = float(np.median(x[:: max(1, x.size // 1024)]))
    scale = max(high - anchor, anchor - low)
    if scale == 0 or not np.isfinite(scale):
        return points.ordered()
    table = np.zeros((2 * _ROWS, 6))
    _spans.fill_bins(x, w, anchor, scale, _BASE, _SHIFT, table)
    edges = (np.arange(_BASE, _BASE + _ROWS + 1) << _SHIFT).view(np.float64).copy()
    edges[0] = 0.0
    sides = []
    for half, reach in ((table[:_ROWS], high - anchor), (table[_ROWS:], anchor - low)):
        rows = np.flatnonzero(half[:, 0])
        sums = half[rows]
        sides.append(bin_points(edges[rows], edges[rows + 1], sums[:, :3], sums[:, 3:], 0.0, reach / scale))
    (above, mass_above), (below, mass_below) = sides
    at = np.clip(anchor + scale * np.concatenate([-below[::-1], above]), low, high)
    return Points(at, np.concatenate([mass_below[::-1], mass_above]), low, high)
