"""The certified coarse-to-fine search for optimal levels.

Sorted points are grouped into cells. Over the cells, a shortest path gives levels (an upper bound), and a shortest
path through relaxed costs, in which a level may be at both ends of its cell at once, bounds every set of levels
from below. Cells and intervals on no path below the upper bound hold no optimal level and are dropped; the rest
is split, until the two bounds meet. A price per level replaces the count of levels: the best cost is convex in
the number of levels, so some price makes the cheapest path have the right length, and no table has one row
per level. One pass over the data remains, about 1 ns per point; all else is small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gtrace.kernels import interval_sums as _spans
from gtrace.kernels import optimal as _kernels

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

#: first cells per level
_CELLS_PER_LEVEL = 4
#: the search ends when its bounds are this close; what rounding can do to the lower one is taken off it
_CLOSE = 1e-12
_ROUNDING = 1e-10
#: two path lengths this close are equal; and limits on the tries to hit a number of steps, or of cells
_SAME = 1e-14
_MOST_TURNS = 200
_MOST_SHARES = 64
#: beyond these magnitudes squares leave float64's range, so points and weights are scaled by a power of two
_LARGE, _SMALL = 1e100, 1e-100


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


class Solution(NamedTuple):
    """Levels (float64, ascending) and a lower bound on the objective of any other levels of the same number."""

    levels: Floats
    bound: float


def solve(points: Points, s: int) -> Solution:
    """The certified search: optimal levels, and a lower bound on the objective."""
    few = _distinct(points.x, points.low, points.high, s)
    if few is not None:
        return Solution(few, 0.0)
    x, w = points.x, points.w
    if w.size and not w.all():
        x, w = x[w > 0], w[w > 0]
        few = _distinct(x, points.low, points.high, s)
        if few is not None:
            return Solution(few, 0.0)
    original = x
    x, low, high, exponent = _scaled(x, points.low, points.high)
    w, weight_exponent = _scaled_weights(w)
    search = _Search(x, w, low, high, s)
    search.run()
    levels = original[search.places].astype(np.float64)
    levels[0], levels[-1] = points.low, points.high
    bound = min(search.lower, search.upper) * (1 - _ROUNDING)
    with np.errstate(over="ignore"):
        return Solution(levels, max(0.0, float(np.ldexp(bound, 2 * exponent + weight_exponent))))


def _inner(x: NDArray[np.floating], low: float, high: float) -> tuple[int, int]:
    """First and one past the last of the sorted points strictly between the end levels, which span them."""
    if x.size == 0:
        return 0, 0
    # the ends are compared as float64: rounded to the points' float32 they could fall on a point
    start = int(np.searchsorted(x, x[0], side="right")) if float(x[0]) == low else 0
    stop = int(np.searchsorted(x, x[-1], side="left")) if float(x[-1]) == high else x.size
    return start, stop


def _distinct(x: NDArray[np.floating], low: float, high: float, s: int) -> Floats | None:
    """All distinct values with the ends, if they are at most s; else None."""
    found = np.empty(s + 2)
    found[0] = low
    start, _ = _inner(x, low, high)
    count = 1 + _spans.distinct(x, start, found[1:-1])
    if found[count - 1] < high:
        found[count] = high
        count += 1
    return found[:count].copy() if count <= s else None


def _scaled(x: NDArray[np.floating], low: float, high: float) -> tuple[NDArray[np.floating], float, float, int]:
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
        self.nodes = np.empty((-(-x.size // _spans.NODE), _spans.COLUMNS))
        _spans.sum_nodes(x, w, self.nodes)
        self.first = self._first_points(low, high, s)
        k = self.first.size - 1
        self.cells = np.empty((k, _spans.COLUMNS))
        _spans.first_cells(x, w, self.nodes, self.first, low, high, self.cells)
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
        _spans.spread(x, self.nodes, weight)
        cuts = np.empty(2 * want, np.int64)
        share, count = 0.0, cuts.size + 1
        if stop - start > cuts.size:
            # where few points have most of the spread, lower the share until the rest is cut finely, too
            share = float(weight[start // _spans.NODE : -(-stop // _spans.NODE)].sum()) / want
            for _ in range(_MOST_SHARES):
                count, total = _spans.cut(x, self.w, weight, start, stop, share, cuts)
                if count >= want // 2:
                    break
                share = min(share / 4, total / want)
        if count > cuts.size:
            cuts = np.empty(stop - start, np.int64)
            count, _ = _spans.cut(x, self.w, weight, start, stop, share, cuts)
        return np.concatenate([[0, start], cuts[:count], [stop, x.size]]).astype(np.int64)

    def _sum_jumps(self) -> Floats:
        jumps = np.empty((self.cells.shape[0] // _kernels.JUMP, _spans.COLUMNS))
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
        limit = self.upper * (1 + _CLOSE)
        rank, start, count, table, slope = _kernels.exact_lengths(
            cells, self.jumps, live, low, high, limit, self.penalty
        )
        self._improve(high, start, count, table)
        price = self.penalty * self.intervals
        limit = self.upper * (1 + _CLOSE) + price
        bound, wide, keep, again, low_kept, high_kept = _kernels.bound_paths(
            cells, self.jumps, rank, live, high, start, self.penalty, count, table, slope, limit
        )
        self.lower = max(self.lower, bound - price)
        if self.lower >= self.upper * (1 - _CLOSE) or not wide:
            return False
        self.cells, self.first, self.live, self.low, self.high = _kernels.refine(
            self.x, self.w, self.nodes, cells, self.first, live, keep, again, low_kept, high_kept
        )
        self.jumps = self._sum_jumps()
        return True

    def _improve(self, high: Ints, start: Ints, count: Ints, table: Floats) -> None:
        """Look for better levels at the left ends of the cells, and set the price that makes them come out."""
        if high.size <= self.intervals + 1:
            path = np.arange(high.size)
            self.penalty = 2 * self.upper / self.intervals
        else:
            price = self.penalty or self.upper / self.intervals
            path, self.penalty = _cheapest_path(high, start, count, table, self.intervals, price)
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
            # the cost of n steps is near c / n^2 and the price near 1 / n^3, or far steeper in heavy tails
            penalty *= (path.steps / steps) ** (3 * 2 ** min(turn // 2, 5))
        else:
            penalty = 0.0
    if short is None:
        return path.ranks[np.rint(np.linspace(0, path.steps, steps + 1)).astype(np.int64)], penalty
    return short.ranks, penalty


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
