"""Provably optimal levels: the least sum of w (b - x)(x - a) over all sets of s levels.

Exact levels come from a certified coarse-to-fine search over the sorted points, levels of method "sketch" from the
same search over two points per bin of a moment sketch. Sorted points are grouped into cells. Over the cells, a shortest
path gives levels (an upper bound), and a shortest path through relaxed costs, in which a level may be at both ends of
its cell at once, bounds every set of levels from below. Cells and intervals on no path below the upper bound hold no
optimal level and are dropped; the rest is split, until the two bounds meet. A price per level replaces the count of
levels: the best cost is convex in the number of levels, so some price makes the cheapest path have the right length,
and no table has one row per level. One pass over the data remains, about 1 ns per point; all else is small.

ADAQUANT, from ZipML's appendix I, needs no search. Start with a level at every distinct value; in each round pair up
neighbouring intervals and merge all pairs but the ceil((1 + gamma) k) that would cost most. What remains costs at most
(1 + 1 / gamma) times the optimum of k intervals, with more intervals than k to spend.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gtrace.errors import UsageError
from gtrace.kernels import interval_sums as _spans
from gtrace.kernels import optimal as _kernels
from gtrace.sketch import MomentSketch, SketchSet

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import ArrayLike, NDArray

    from gtrace.kernels import Floats, Ints


#: bins of method "sketch": ten bits of mantissa over forty octaves
_SHIFT, _OCTAVES = 42, 40
_BASE = (1023 - _OCTAVES << 10) - 1
_ROWS = (_OCTAVES << 10) + 2


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
        float64, ascending: s levels, or all distinct values and both ends if those are not more than s.

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
        if grid is None and lo is None and hi is None:
            levels, sizes = optimal_level_sets(values.alone, (s,))[0]
            return levels[0, : sizes[0]].copy()
        points = _halves(values, lo, hi)
    else:
        points = check_values(values, weights, lo, hi)
        points = _binned(points) if method == "sketch" else points.ordered()
    if grid is not None:
        points = _on_grid(points, grid)
    return solve(points, s)[0]


def optimal_level_sets(sketches: SketchSet, counts: Iterable[int]) -> list[tuple[Floats, Ints]]:
    """:func:`optimal_levels` of several sketches, each for several numbers of levels, which the set remembers.

    Args:
        sketches: give levels from 0 to 1, in units of r.
        counts: numbers of levels, both ends included; each at least 2.

    Returns:
        for each count float64[sketches, count], ascending levels, and int64[sketches], how many of them there are: a
        sketch of fewer values has them as levels. What follows them means nothing.

    Raises:
        UsageError: as for :func:`optimal_levels`.
    """
    keys = [("optimal", check_count("s", count, 2)) for count in counts]

    def search(missing: list[tuple[str, int]]) -> list[tuple[Floats, Ints]]:
        wanted, bins = np.unique([count for _, count in missing]), sketches.bins()
        last = sketches.starts[1:][np.diff(sketches.starts) > 0] - 1
        _check_reach(bins.lower[last] + bins.sums[last, 1] / bins.sums[last, 0], 0.0, 1.0)
        levels, sizes = np.zeros((len(sketches), wanted.sum())), np.empty((len(sketches), wanted.size), np.int64)
        _kernels.search_bins(*bins[:3], sketches.starts, wanted, levels, sizes)
        sets = np.split(levels, np.cumsum(wanted)[:-1], axis=1)
        found = {count: (sets[k], sizes[:, k]) for k, count in enumerate(wanted.tolist())}
        return [found[count] for _, count in missing]

    # The levels of one step's fit are the next step's optimum to be compared with.
    return sketches.remember_each(keys, search)


def certified_levels(
    values: ArrayLike, s: int, weights: ArrayLike | None = None, lo: float | None = None, hi: float | None = None
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
        at most 6e-10 of the objective below it, rounding included.

    Raises:
        UsageError: as for :func:`optimal_levels`.
    """
    s = check_count("s", s, 2)
    points = check_values(values, weights, lo, hi).ordered()
    levels, bound = solve(points, s)
    value = float(_spans.total_cost(points.x, points.w, levels))
    return levels, value, min(bound, value)


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
        UsageError: it is not an integer, or below ``least``.
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
    # Kernels are compiled for writable float64 arrays only: another version of the search takes 20 s to compile.
    x = np.require(array.reshape(-1), dtype=np.float64, requirements=["C", "W"])
    if x.size == 0:
        raise UsageError("values: there is none; give at least one number")
    bad, descents = _spans.inspect(x)
    if bad:
        at = int(np.flatnonzero(~np.isfinite(x))[0])
        raise UsageError(f"values: element {at} is {x[at]}; remove what is not finite")
    first, last = (x.argmin(), x.argmax()) if descents else (0, x.size - 1)
    least, most = float(x[first]), float(x[last])
    low, high = _ends(lo, hi, least, most)
    if least < low:
        raise UsageError(f"values: element {first} is {least}, below the first level {low}")
    if most > high:
        raise UsageError(f"values: element {last} is {most}, above the last level {high}")
    return Points(x, _check_weights(weights, x.size), low, high, ascending=not descents)


def _ends(lo: float | None, hi: float | None, least: float, most: float) -> tuple[float, float]:
    low, high = least if lo is None else float(lo), most if hi is None else float(hi)
    if not (np.isfinite(low) and np.isfinite(high) and low <= high):
        raise UsageError(f"levels from {low} to {high}: the ends must be finite and in order")
    return low, high


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


def _halves(sketch: MomentSketch, lo: float | None, hi: float | None) -> Points:
    low, high = _ends(lo, hi, 0.0, 1.0)
    if sketch.rows.size == 0:
        return Points(np.array([max(low, 0.0)]), np.zeros(1), low, high)
    _check_reach(sketch.lower[-1:] + sketch.sums[-1:, 1] / sketch.sums[-1:, 0], low, high)
    x, w = bin_points(sketch.lower, sketch.upper, sketch.sums, low, high)
    return Points(x, w, low, high)


def _check_reach(tops: Floats, low: float, high: float) -> None:
    """Check that levels from ``low`` to ``high`` span magnitudes up to ``tops``."""
    top = tops.max(initial=0.0)
    if low > 0 or top > high * (1 + 1e-12):
        raise UsageError(
            f"sketch: its values reach from 0 to {top:g}, the levels from {low:g} to {high:g}; set lo and hi"
        )


def bin_points(lower: Floats, upper: Floats, sums: Floats, low: float, high: float) -> tuple[Floats, Floats]:
    """Two weighted points for each bin that replace its contents: candidates for levels.

    They have the bin's count, mean and variance (where an equal split would leave the bin, one lies on its edge), so
    contents of one or two values come out as they are. Levels outside a bin are judged exactly, but for a constant;
    a level inside a bin is refined to one of its points, which in the worst case is half a bin off the best place.

    Args:
        lower: float64[k], ascending lower edges of non-empty bins.
        upper: float64[k], their upper edges.
        sums: float64[k, 6], count, sum d and sum d^2 of d = value - lower edge, then the same weighted, which gives
            the weights of the points.
        low: points below it are moved to it.
        high: points above it are moved to it.

    Returns:
        float64 ascending points, one for a bin of one value, and their float64 weights.
    """
    x, w = np.empty(2 * lower.size), np.empty(2 * lower.size)
    count = _spans.halve_bins(lower, upper, sums, low, high, x, w)
    return x[:count], w[:count]


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
        sides.append(bin_points(edges[rows], edges[rows + 1], half[rows], 0.0, reach / scale))
    (above, mass_above), (below, mass_below) = sides
    at = np.clip(anchor + scale * np.concatenate([-below[::-1], above]), low, high)
    return Points(at, np.concatenate([mass_below[::-1], mass_above]), low, high)


def adaquant(
    values: ArrayLike, k: int, gamma: float, delta: float, lo: float | None = None, hi: float | None = None
) -> Floats:
    """Levels whose objective is at most (1 + 1/gamma) times that of the best k intervals (k + 1 levels).

    Args:
        values: real numbers, any shape and order.
        k: number of intervals to compare with, at least 1.
        gamma: how many more intervals may be spent, above 0: the levels form at most
            max(2 (1 + gamma) k + delta, 2 ceil((1 + gamma) k) + 1) intervals.
        delta: slack on that number, at least 1; with less the rounds could go on for ever.
        lo: first level; None for the paper's 0 when all values lie in [0, 1], else for the least value.
        hi: last level; None for the paper's 1 when all values lie in [0, 1], else for the greatest value.

    Returns:
        float64, ascending: a subset of the distinct values and both ends.

    Raises:
        UsageError: no value, values that are not finite or lie outside lo..hi, k, gamma or delta out of range.

    >>> adaquant([0.0, 0.1, 0.2, 0.9, 1.0], k=1, gamma=1.0, delta=1.0)
    array([0. , 0.1, 0.2, 0.9, 1. ])
    """
    k = check_count("k", k, 1)
    if not (math.isfinite(gamma) and gamma > 0):
        raise UsageError(f"gamma: {gamma} must be finite and above 0")
    if not (math.isfinite(delta) and delta >= 1):
        raise UsageError(f"delta: {delta} must be finite and at least 1; below, merging may never end")
    points = check_values(values, None, lo, hi)
    low, high = points.low, points.high
    if low >= 0 and high <= 1:
        low, high = 0.0 if lo is None else low, 1.0 if hi is None else high
    x, counts = np.unique(points.x.astype(np.float64), return_counts=True)
    mass = counts.astype(np.float64)
    if low < x[0]:
        x, mass = np.concatenate([[low], x]), np.concatenate([[0.0], mass])
    if high > x[-1]:
        x, mass = np.concatenate([x, [high]]), np.concatenate([mass, [0.0]])
    return _merge(x, mass, (1 + gamma) * k, delta)


def _merge(x: Floats, mass: Floats, spare: float, delta: float) -> Floats:
    """The rounds, on distinct points and their weights; ``spare`` is (1 + gamma) k."""
    # (1 + 0.1) 10 is 11 and a bit in floating point
    kept = math.ceil(spare - 1e-9)
    # per interval, over the points strictly inside: sum w, sum w (x - left), sum w (right - x), and its cost
    inner, up, down, cost = np.zeros((4, x.size - 1))
    while inner.size > 2 * spare + delta and inner.size // 2 > kept:
        pairs = inner.size // 2
        first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
        middle = mass[1 : 2 * pairs : 2]
        left = np.diff(x)[first]
        right = np.diff(x)[second]
        pair_cost = cost[first] + right * up[first] + middle * left * right + cost[second] + left * down[second]
        merged = np.sort(np.argpartition(pair_cost, pairs - kept)[: pairs - kept])
        into = 2 * merged
        up[into] += left[merged] * (middle[merged] + inner[into + 1]) + up[into + 1]
        down[into] = right[merged] * (middle[merged] + inner[into]) + down[into] + down[into + 1]
        inner[into] += middle[merged] + inner[into + 1]
        cost[into] = pair_cost[merged]
        inner, up, down, cost = (np.delete(a, into + 1) for a in (inner, up, down, cost))
        x, mass = np.delete(x, into + 1), np.delete(mass, into + 1)
    return x


#: what rounding can do to the lower of the search's bounds is taken off it
_ROUNDING = 1e-10


class Points(NamedTuple):
    """Points and the two end levels: ``x`` (n,) float32 or float64, ``w`` (n,) float64 or empty for unit weights."""

    x: NDArray[np.floating]
    w: Floats
    low: float
    high: float
    ascending: bool = True

    def ordered(self) -> Points:
        """The same points sorted, weights along with them; itself when it is sorted already."""
        if self.ascending:
            return self
        if self.w.size == 0:
            return self._replace(x=np.sort(self.x), ascending=True)
        order = np.argsort(self.x, kind="stable")
        return self._replace(x=self.x[order], w=self.w[order], ascending=True)


def solve(points: Points, s: int) -> tuple[Floats, float]:
    """The certified search: s optimal levels, ascending, and a lower bound on the objective of any others."""
    held = _distinct(points, s)
    if held.size > s and points.w.size and not points.w.all():
        heavy = points.w > 0
        points = points._replace(x=points.x[heavy], w=points.w[heavy])
        held = _distinct(points, s)
    if held.size <= s:
        return held, 0.0
    x, low, high, exponent = _scaled(points.x, points.low, points.high)
    w, weight_exponent = points.w, 0
    if w.size and not _kernels.SMALL < w.max() < _kernels.LARGE:
        weight_exponent = int(np.frexp(w.max())[1])
        w = np.ldexp(w, -weight_exponent)
    places, size, costs = np.empty(s, np.int64), np.empty(1, np.int64), np.empty((1, 2))
    few, per_level = _kernels.FEW, _kernels.CELLS_PER_LEVEL
    _kernels.search_sets(x, w, low, high, np.array([s]), few, per_level, places, size, costs)
    bound = costs.min() * (1 - _ROUNDING)
    if exponent or weight_exponent:
        with np.errstate(over="ignore"):
            bound = np.ldexp(bound, 2 * exponent + weight_exponent)
    levels = points.x[places[: size[0]]].astype(np.float64)
    levels[0], levels[-1] = points.low, points.high
    return levels, max(0.0, float(bound))


def _distinct(points: Points, most: int) -> Floats:
    """All distinct values with the ends, or ``most`` + 1 of them."""
    found = np.empty(most + 1)
    return found[: _spans.distinct(points.x, points.low, points.high, found)].copy()


def _scaled(x: NDArray[np.floating], low: float, high: float) -> tuple[NDArray[np.floating], float, float, int]:
    """The points times 2^-exponent, so that squares of distances stay inside float64; mostly as they are."""
    most = max(abs(low), abs(high))
    if most < _kernels.LARGE and high - low > _kernels.SMALL:
        return x, low, high, 0
    exponent = int(np.frexp(most if most >= _kernels.LARGE else high - low)[1])
    scaled = np.ldexp(x.astype(np.float64), -exponent)
    return scaled, float(np.ldexp(low, -exponent)), float(np.ldexp(high, -exponent)), exponent
