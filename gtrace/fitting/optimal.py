"""Provably optimal levels: the least sum of w (b - x)(x - a) over all sets of s levels.

Exact levels come from a certified coarse-to-fine search. Sorted points are grouped into cells. Over the cells, a
shortest path gives levels (an upper bound), and a shortest path through relaxed costs, in which a level may
be at both ends of its cell at once, bounds every set of levels from below. Cells and intervals on no path below
the upper bound hold no optimal level and are dropped; the rest is split, until the two bounds meet. A price per
level replaces the count of levels: the best cost is convex in the number of levels, so some price makes the
cheapest path have the right length, and the work does not grow with it. One pass over the data remains, about
1 ns per point, and no table of the size of the data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gtrace.errors import UsageError
from gtrace.kernels import optimal as _kernels
from gtrace.sketch import MomentSketch

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

#: first cells per level
_CELLS_PER_LEVEL = 4
#: with more intervals than these left, cells are split into two and not into four
_MANY_INTERVALS = 100_000
#: the search ends when its bounds are this close; what rounding can do to the lower one is taken off it
_CLOSE = 1e-12
_ROUNDING = 1e-10
#: two path lengths this close are equal; and a limit on the tries to hit a number of steps
_SAME = 1e-14
_MOST_TURNS = 200
#: beyond these magnitudes squares leave float64's range, so points and weights are scaled by a power of two
_LARGE, _SMALL = 1e100, 1e-100
#: bins of method "sketch": ten bits of mantissa over forty octaves
_SHIFT, _OCTAVES = 42, 40
_BASE = (1023 - _OCTAVES << 10) - 1
_ROWS = (_OCTAVES << 10) + 2
#: a bin whose variance is below this part of its mean square is taken as one value
_ONE_VALUE = 1e-10


class _Points(NamedTuple):
    """Points and the two end levels: ``x`` (n,) float32 or float64, ``w`` (n,) float64 or empty for unit weights."""

    x: NDArray[np.floating]
    w: Floats
    low: float
    high: float
    ascending: bool = True

    def ordered(self) -> _Points:
        if self.ascending:
            return self
        if self.w.size == 0:
            return self._replace(x=np.sort(self.x), ascending=True)
        order = np.argsort(self.x, kind="stable")
        return self._replace(x=self.x[order], w=self.w[order], ascending=True)


class _Solution(NamedTuple):
    levels: Floats
    bound: float


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
            over bins 2^-10 wide, relative to the distance from 0 or from the median. A sketch always uses
            its own bins.
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
    s = _check_count(s)
    if method not in ("exact", "sketch"):
        raise UsageError(f"method: '{method}' is unknown; choose exact or sketch")
    if isinstance(values, MomentSketch):
        if weights is not None:
            raise UsageError("weights: a sketch brings its own; leave them out")
        points = _sketch_points(values, lo, hi)
    else:
        points = _checked(values, weights, lo, hi)
        points = _binned(points) if method == "sketch" else points.ordered()
    if grid is not None:
        points = _on_grid(points, grid)
    return _solve(points, s).levels


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
    s = _check_count(s)
    points = _checked(values, weights, lo, hi).ordered()
    solution = _solve(points, s)
    value = float(_kernels.total_cost(points.x, points.w, solution.levels))
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
    points = _checked(values, weights, float(grid[0]), float(grid[-1]))
    return float(_kernels.total_cost(points.x, points.w, grid))


def _check_count(s: int) -> int:
    if int(s) != s or s < 2:
        raise UsageError(f"s: {s} is no number of levels; give an integer from 2 up (both ends count)")
    return int(s)


def _checked(values: ArrayLike, weights: ArrayLike | None, lo: float | None, hi: float | None) -> _Points:
    array = np.asarray(values)
    if array.dtype.kind not in "fiub":
        raise UsageError(f"values of dtype {array.dtype} have no levels; pass real numbers")
    kind = np.float32 if array.dtype in (np.float16, np.float32) else np.float64
    # kernels are compiled for writable arrays only; a second version for read-only ones is not worth its wait
    x = np.require(array.reshape(-1), dtype=kind, requirements=["C", "W"])
    if x.size == 0:
        raise UsageError("values: there is none; give at least one number")
    bad, descents = _kernels.inspect(x)
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
    return _Points(x, _checked_weights(weights, x.size), low, high, ascending=not descents)


def _checked_weights(weights: ArrayLike | None, size: int) -> Floats:
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


def _on_grid(points: _Points, cells: int) -> _Points:
    """Points on the grid that order the levels on it as the given ones do: their objectives differ by a constant."""
    if int(cells) != cells or cells < 1:
        raise UsageError(f"grid: {cells} is no number of cells; give an integer from 1 up")
    low, high = points.low, points.high
    if low == high:
        return points
    at = low + (high - low) * (np.arange(int(cells) + 1) / int(cells))
    at[-1] = high
    if (np.diff(at) <= 0).any():
        raise UsageError(f"grid: {cells} cells between {low} and {high} are finer than float64; use fewer")
    mass = np.zeros(at.size)
    _kernels.split_to_grid(points.x, points.w, at, mass)
    return _Points(at, mass, low, high)


def _sketch_points(sketch: MomentSketch, lo: float | None, hi: float | None) -> _Points:
    low = 0.0 if lo is None else float(lo)
    high = 1.0 if hi is None else float(hi)
    if sketch.rows.size == 0:
        return _Points(np.array([low]), np.zeros(1), low, high)
    top = float(sketch.lower[-1] + sketch.sums[-1, 1] / sketch.sums[-1, 0])
    if low > 0 or top > high * (1 + 1e-12):
        raise UsageError(
            f"sketch: its values reach from 0 to {top:g}, the levels from {low:g} to {high:g}; set lo and hi"
        )
    x, w = bin_points(sketch.lower, sketch.upper, sketch.sums[:, :3], sketch.sums[:, 3:], low, high)
    return _Points(x, w, low, high)


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
    return x.reshape(-1), np.column_stack([mass - up, up]).reshape(-1)


def _binned(points: _Points) -> _Points:
    """Points for unsorted values: one pass into bins on both sides of an anchor."""
    x, w, low, high, _ = points
    sample = x[:: max(1, x.size // 1024)]
    anchor = 0.0 if low == 0 or np.count_nonzero(sample == 0) > 1 else float(np.median(sample))
    scale = max(high - anchor, anchor - low)
    if scale == 0 or not np.isfinite(scale):
        return points.ordered()
    table = np.zeros((2, _ROWS, 6))
    _kernels.fill_bins(x, w, anchor, scale, _BASE, _SHIFT, table)
    edges = (np.arange(_BASE, _BASE + _ROWS + 1) << _SHIFT).view(np.float64).copy()
    edges[0] = 0.0
    edges *= scale
    parts = []
    for side, sign in ((1, -1.0), (0, 1.0)):
        rows = np.flatnonzero(table[side, :, 0])[:: int(sign)]
        sums = table[side, rows] * np.array([1.0, scale, scale * scale] * 2)
        near, far = anchor + sign * edges[rows], anchor + sign * edges[rows + 1]
        if sign < 0:
            sums = _mirrored(sums, near - far)
            near, far = far, near
        parts.append(bin_points(near, far, sums[:, :3], sums[:, 3:], low, high))
    return _Points(np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts]), low, high)


def _mirrored(sums: Floats, width: Floats) -> Floats:
    """Moments about the other edge of bins of this width."""
    out = sums.copy()
    for k in (0, 3):
        n, d1, d2 = sums[:, k], sums[:, k + 1], sums[:, k + 2]
        out[:, k + 1] = n * width - d1
        out[:, k + 2] = n * width * width - 2 * width * d1 + d2
    return out


def _solve(points: _Points, s: int) -> _Solution:
    """The certified search: optimal levels, and a lower bound on the objective."""
    few = _distinct(points.x, points.low, points.high, s)
    if few is not None:
        return _Solution(few, 0.0)
    x, w = points.x, points.w
    if w.size and not w.all():
        x, w = x[w > 0], w[w > 0]
        few = _distinct(x, points.low, points.high, s)
        if few is not None:
            return _Solution(few, 0.0)
    original = x
    x, low, high, exponent = _scaled(x, points.low, points.high)
    w, weight_exponent = _scaled_weights(w)
    search = _Search(x, w, low, high, s)
    search.run()
    levels = original[search.places].astype(np.float64)
    levels[0], levels[-1] = points.low, points.high
    bound = min(search.lower, search.upper) * (1 - _ROUNDING)
    with np.errstate(over="ignore"):
        return _Solution(levels, max(0.0, float(np.ldexp(bound, 2 * exponent + weight_exponent))))


def _inner(x: NDArray[np.floating], low: float, high: float) -> tuple[int, int]:
    """First and one past the last of the sorted points strictly between the end levels, which span them."""
    # the ends are compared as float64: rounded to the points' float32 they could fall on a point
    start = int(np.searchsorted(x, x[0], side="right")) if float(x[0]) == low else 0
    stop = int(np.searchsorted(x, x[-1], side="left")) if float(x[-1]) == high else x.size
    return start, stop


def _distinct(x: NDArray[np.floating], low: float, high: float, s: int) -> Floats | None:
    """All distinct values with the ends, if they are at most s; else None."""
    found = [low]
    at, _ = _inner(x, low, high)
    while at < x.size and len(found) <= s:
        found.append(float(x[at]))
        at = int(np.searchsorted(x, x[at], side="right"))
    if found[-1] < high:
        found.append(high)
    return np.array(found) if len(found) <= s else None


def _scaled(
    x: NDArray[np.floating], low: float, high: float
) -> tuple[NDArray[np.floating], float, float, int]:
    """The points times 2^-exponent, so that squares of distances stay inside float64; mostly as they are."""
    most = max(abs(low), abs(high))
    if most < _LARGE and high - low > _SMALL:
        return x, low, high, 0
    exponent = int(np.frexp(most if most >= _LARGE else high - low)[1])
    scaled = np.ldexp(x.astype(np.float64), -exponent)
    return scaled, float(np.ldexp(low, -exponent)), float(np.ldexp(high, -exponent)), exponent


def _scaled_weights(w: Floats) -> tuple[Floats, int]:
    if w.size == 0 or _SMALL < w.max() < _LARGE:
        return w, 0
    exponent = int(np.frexp(w.max())[1])
    return np.ldexp(w, -exponent), exponent


class _Search:
    """State of the coarse-to-fine search; see the module's first lines.

    Attributes:
        upper: cost of the best levels so far.
        lower: bound on the cost of any levels.
        places: int64[s], the points that are the best levels so far (those of the ends mean nothing).
    """

    def __init__(self, x: NDArray[np.floating], w: Floats, low: float, high: float, s: int) -> None:
        self.x, self.w, self.intervals = x, w, s - 1
        self.nodes = np.empty((-(-x.size // _kernels.NODE), _kernels.COLUMNS))
        _kernels.sum_nodes(x, w, self.nodes)
        self.first = self._first_points(low, high, s)
        k = self.first.size - 1
        self.cells = np.empty((k, _kernels.COLUMNS))
        _kernels.first_cells(x, w, self.nodes, self.first, low, high, self.cells)
        self.live = np.arange(k)
        self.low = np.zeros(k, np.int64)
        self.high = np.maximum(self.live - 1, 0)
        self.jumps = self._sum_jumps()
        path = np.unique(np.rint(np.linspace(0, k - 1, s)).astype(np.int64))
        self.upper = float(_kernels.path_cost(self.cells, self.jumps, path))
        self.places = self._places(path)
        self.lower = 0.0
        # the cost of n intervals is near c / n^2, so one more saves about 2 c / n^3
        self.penalty = 2 * self.upper / self.intervals

    def _first_points(self, low: float, high: float, s: int) -> Ints:
        """The first point of every first cell, then the number of points; the end levels have cells of their own."""
        x = self.x
        start, stop = _inner(x, low, high)
        want = _CELLS_PER_LEVEL * s
        weight = np.empty(self.nodes.shape[0])
        _kernels.spread(x, self.nodes, weight)
        cuts = np.empty(2 * want, np.int64)
        share, count = 0.0, 0
        if stop - start > cuts.size:
            # in a heavy tail a few points have most of the spread: lower the share until the rest is cut too
            share = float(weight[start // _kernels.NODE : -(-stop // _kernels.NODE)].sum()) / want
            for _ in range(64):
                count, total = _kernels.cut(x, self.w, weight, start, stop, share, cuts)
                if count >= want // 2:
                    break
                share = min(share / 4, total / want)
        if share == 0.0 or count > cuts.size:
            cuts = np.empty(max(count, stop - start if share == 0.0 else 0), np.int64)
            count, _ = _kernels.cut(x, self.w, weight, start, stop, share, cuts)
        return np.concatenate([[0, start], cuts[:count], [stop, x.size]]).astype(np.int64)

    def _sum_jumps(self) -> Floats:
        jumps = np.empty((self.cells.shape[0] // _kernels.JUMP, _kernels.COLUMNS))
        _kernels.sum_jumps(self.cells, jumps)
        return jumps

    def _places(self, path: Ints) -> Ints:
        return np.minimum(self.first[path], self.x.size - 1)

    def run(self) -> None:
        """Refine until the bounds meet or every live cell is one value (then they met up to rounding)."""
        while self._step():
            pass

    def _step(self) -> bool:
        cells, live, low, high = self.cells, self.live, self.low, self.high
        rank = np.full(cells.shape[0], -1)
        rank[live] = np.arange(live.size)
        sizes = high - low + 1
        start = np.cumsum(sizes) - sizes
        table = np.empty(int(sizes.sum()))
        count = np.empty(live.size, np.int64)
        slope = np.empty(live.size)
        limit = self.upper * (1 + _CLOSE)
        _kernels.exact_lengths(
            cells, self.jumps, rank, live, low, high, start, limit, self.penalty, count, table, slope
        )
        self._improve(high, start, count, table)
        width = cells[live, _kernels.RIGHT] - cells[live, _kernels.LEFT]
        np.minimum(slope, np.divide(self.penalty, width, out=slope.copy(), where=width > 0), out=slope)
        forward, backward = np.empty(live.size), np.empty(live.size)
        _kernels.bound_lengths(
            cells, self.jumps, rank, live, high, start, self.penalty, count, slope, table, forward
        )
        price = self.penalty * self.intervals
        self.lower = max(self.lower, float(forward[-1]) - price)
        limit = self.upper * (1 + _CLOSE) + price
        low_kept, high_kept = np.empty_like(low), np.empty_like(high)
        _kernels.prune(high, start, count, table, forward, limit, backward, low_kept, high_kept)
        keep = forward + backward <= limit
        if self.lower >= self.upper * (1 - _CLOSE) or not width[keep].any():
            return False
        again = forward + backward + self.penalty - slope * width <= limit
        # in halves the next table is a quarter as long
        quarters = int((high_kept - low_kept + 1)[keep].sum()) < _MANY_INTERVALS
        self.cells, self.first, self.live, self.low, self.high = _kernels.refine(
            self.x, self.w, self.nodes, cells, self.first, live, keep, again, low_kept, high_kept, quarters
        )
        self.jumps = self._sum_jumps()
        return True

    def _improve(self, high: Ints, start: Ints, count: Ints, table: Floats) -> None:
        """Look for better levels at the left ends of the cells, and set the price that makes them come out."""
        if high.size <= self.intervals + 1:
            path = np.arange(high.size)
            self.penalty = 2 * self.upper / self.intervals
        else:
            path, self.penalty = _cheapest_path(high, start, count, table, self.intervals, self.penalty)
        cost = float(_kernels.path_cost(self.cells, self.jumps, self.live[path]))
        if cost <= self.upper:
            self.upper = cost
            self.places = self._places(self.live[path])


class _Path(NamedTuple):
    ranks: Ints
    cost: float
    penalty: float

    @property
    def steps(self) -> int:
        return self.ranks.size - 1


def _cheapest_path(
    high: Ints, start: Ints, count: Ints, table: Floats, steps: int, penalty: float
) -> tuple[Ints, float]:
    """The cheapest path of this many steps (fewer where more save nothing), and a price for which it is shortest.

    The cost is convex in the number of steps, so the price where a longer and a shorter path are equally
    good either brings out a path in between or shows that all numbers in between lie on their line.
    """
    short: _Path | None = None
    long: _Path | None = None
    for turn in range(_MOST_TURNS):
        ranks, cost = _kernels.shortest_path(high, start, count, table, penalty)
        path = _Path(ranks, cost, penalty)
        if path.steps == steps or (path.steps < steps and penalty == 0):
            # one more step saves at most the whole cost, so no higher price is needed; it would cost the bound digits
            return path.ranks, min(penalty, cost)
        if short and long and penalty == _crossing(short, long):
            on_line = short.cost + penalty * short.steps
            if cost + penalty * path.steps >= on_line * (1 - _SAME):
                return _exchange(short.ranks, long.ranks, steps), penalty
        if path.steps < steps:
            short = path
        else:
            long = path
        if short and long:
            penalty = _crossing(short, long)
            middle = float(np.sqrt(short.penalty * long.penalty))
            if turn % 2 and long.penalty < middle < short.penalty:
                # where the cost falls by powers of ten per step the crossings creep
                penalty = middle
        elif turn < _MOST_TURNS // 4:
            penalty *= (path.steps / steps) ** 3
        else:
            penalty = 0.0 if short else 8 * penalty
    return (short or path).ranks, penalty


def _crossing(short: _Path, long: _Path) -> float:
    return max(0.0, (short.cost - long.cost) / (long.steps - short.steps))


def _exchange(short: Ints, long: Ints, steps: int) -> Ints:
    """A path of ``steps`` steps, from two shortest ones of fewer and of more.

    Where an interval of one path contains one of the other, the paths can be crossed over; interval costs
    are Monge, so the two crossed paths together cost no more than the two given ones.
    """
    ahead = steps - (short.size - 1)
    at = max(i for i in range(short.size) if i + ahead < long.size and short[i] <= long[i + ahead])
    return np.concatenate([long[: at + ahead + 1], short[at + 1 :]])
