"""Shortest paths over cells of points: the search for optimal levels.

For a level y in cell a and the next one z in cell b, the cost C(y, z) is convex in either end, and it grows by more
than both parts when both ends move outwards. So with the span between the cells, of the ends right(a) and left(b),

    C(y, z) >= COST + DOWN (right(a) - y) + UP (z - left(b)).

Moving a term slope(a) (y - left(a)) from the interval on the left of a level to the one on its right changes no
path, and with slope near the derivative it makes the gap of that bound second order in the size of the cells.
A path's length is its cost plus ``penalty`` per interval; the penalty replaces a count of levels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gtrace.kernels._jit import inline, jit
from gtrace.kernels.interval_sums import (
    CHILDREN,
    COLUMNS,
    COST,
    DOWN,
    LEFT,
    MASS,
    RIGHT,
    UP,
    join,
    split_points,
    store,
    sum_points,
)

if TYPE_CHECKING:
    from gtrace.kernels import Flags, Floats, Ints
    from gtrace.kernels.interval_sums import Points


#: cells summed up in one row, to pass over them in one step
JUMP = 16
#: means "no path"; finite, so that sums of two still compare
NEVER = 8e307


@jit
def sum_jumps(cells: Floats, jumps: Floats) -> None:
    """The spans of every JUMP consecutive cells, whole ones only."""
    for j in range(jumps.shape[0]):
        top = (j + 1) * JUMP - 1
        right = cells[top, RIGHT]
        left, mass, up, down, cost = right, 0.0, 0.0, 0.0, 0.0
        for c in range(top, j * JUMP - 1, -1):
            left, mass, up, down, cost = join(right, left, mass, up, down, cost, cells[c])
        store(jumps[j], left, right, mass, up, down, cost)


@inline
def _between(cells: Floats, jumps: Floats, a: int, b: int) -> tuple[float, float, float, float, float]:
    """The span of the cells a+1..b-1 up to the left end of cell b."""
    right = cells[b, LEFT]
    left, mass, up, down, cost = right, 0.0, 0.0, 0.0, 0.0
    c = b - 1
    while c > a:
        if (c + 1) % JUMP == 0 and c - JUMP >= a:
            left, mass, up, down, cost = join(right, left, mass, up, down, cost, jumps[c // JUMP])
            c -= JUMP
        else:
            left, mass, up, down, cost = join(right, left, mass, up, down, cost, cells[c])
            c -= 1
    return left, mass, up, down, cost


@jit
def path_cost(cells: Floats, jumps: Floats, path: Ints) -> float:
    """The objective with the levels at the left ends of the cells in ``path``."""
    total = 0.0
    for t in range(1, path.size):
        a, b = path[t - 1], path[t]
        right = cells[b, LEFT]
        left, mass, up, down, cost = _between(cells, jumps, a, b)
        left, mass, up, down, cost = join(right, left, mass, up, down, cost, cells[a])
        total += cost
    return total


@jit
def exact_lengths(
    cells: Floats, jumps: Floats, live: Ints, low: Ints, high: Ints, limit: float, penalty: float
) -> tuple[Ints, Ints, Ints, Floats, Floats]:
    """Costs between the left ends of live cells, and the derivative of the cost at every level.

    Args:
        cells: float64[k, 6].
        jumps: float64[k // JUMP, 6].
        live: int64[r], ascending numbers of the cells that can hold a level; the first and last are the ends.
        low: int64[r], lowest rank that may precede each live cell.
        high: int64[r], highest one.
        limit: intervals that cost more than this are left out, and all longer ones with them.
        penalty: expected price of one level; it only steers ``slope``.

    Returns:
        rank: int64[k], the place of a cell among the live ones, -1 for the others.
        start: int64[r], where the row of each live cell starts in ``table``.
        count: int64[r], the lengths of the rows.
        table: entry start[r] + t belongs to the interval from rank high[r] - t to rank r.
        slope: float64[r], sum w (x - y) over the best interval that ends at each cell and starts at y.
    """
    rank = np.full(cells.shape[0], -1, np.int64)
    start = np.empty(live.size, np.int64)
    entries = 0
    for r in range(live.size):
        rank[live[r]] = r
        start[r] = entries
        entries += high[r] - low[r] + 1
    table, count, slope = np.empty(entries), np.empty(live.size, np.int64), np.empty(live.size)
    value = np.empty(live.size)
    value[0] = 0.0
    slope[0] = 0.0
    count[0] = 0
    for r in range(1, live.size):
        b = live[r]
        right = cells[b, LEFT]
        left, mass, up, down, cost = _between(cells, jumps, live[high[r]], b)
        best, best_slope = NEVER, 0.0
        t = 0
        for c in range(live[high[r]], live[low[r]] - 1, -1):
            q = rank[c]
            gap = left - cells[c, RIGHT]
            if q >= 0 and cost + gap * down > limit:
                break
            tilt = up + gap * mass
            left, mass, up, down, cost = join(right, left, mass, up, down, cost, cells[c])
            if q >= 0:
                table[start[r] + t] = cost
                t += 1
                if value[q] + cost < best:
                    best = value[q] + cost
                    best_slope = tilt
        count[r] = t
        value[r] = best + penalty if t else NEVER
        slope[r] = best_slope
    return rank, start, count, table, slope


@jit
def shortest_path(high: Ints, start: Ints, count: Ints, table: Floats, penalty: float) -> tuple[Ints, float]:
    """The ranks on the path of least cost + penalty * intervals through a table of costs, and its cost alone."""
    n = high.size
    value = np.empty(n)
    back = np.zeros(n, np.int64)
    steps = np.zeros(n, np.int64)
    value[0] = 0.0
    for r in range(1, n):
        best, top, t_best = NEVER, high[r], -1
        row = table[start[r] : start[r] + count[r]]
        for t in range(row.size):
            v = value[top - t] + row[t]
            if v < best:
                best = v
                t_best = t
        if t_best < 0:
            value[r] = NEVER
            continue
        back[r] = top - t_best
        steps[r] = steps[back[r]] + 1
        value[r] = best + penalty
    path = np.empty(steps[n - 1] + 1, np.int64)
    cost = 0.0
    r = n - 1
    for t in range(path.size - 1, -1, -1):
        path[t] = r
        if t:
            cost += table[start[r] + high[r] - back[r]]
        r = back[r]
    return path, cost


@jit
def bound_lengths(
    cells: Floats,
    jumps: Floats,
    rank: Ints,
    live: Ints,
    high: Ints,
    start: Ints,
    penalty: float,
    count: Ints,
    slope: Floats,
    table: Floats,
    forward: Floats,
) -> None:
    """Lower bounds for any two points of two live cells, over the same intervals as :func:`exact_lengths`.

    ``slope`` times the width of a cell must not exceed ``penalty``: then a second level inside one cell never
    lowers a bound. ``forward`` gets the shortest bound from the first cell to each one.
    """
    forward[0] = 0.0
    for r in range(1, live.size):
        b = live[r]
        right = cells[b, LEFT]
        width = cells[b, RIGHT] - right
        left, mass, up, down, cost = _between(cells, jumps, live[high[r]], b)
        best = NEVER
        t = 0
        c = live[high[r]]
        while t < count[r]:
            q = rank[c]
            if q >= 0:
                edge = cells[c, RIGHT]
                gap = left - edge
                # a level in c may sit at either end, whichever is cheaper; the same for one in b
                v = cost + gap * down + penalty
                v += min(slope[q], down) * (edge - cells[c, LEFT])
                v += min(0.0, up + gap * mass - slope[r]) * width
                table[start[r] + t] = v
                t += 1
                best = min(best, v + forward[q])
            left, mass, up, down, cost = join(right, left, mass, up, down, cost, cells[c])
            c -= 1
        forward[r] = best


@jit
def prune(
    high: Ints,
    start: Ints,
    count: Ints,
    table: Floats,
    forward: Floats,
    limit: float,
    backward: Floats,
    low_kept: Ints,
    high_kept: Ints,
) -> None:
    """Shortest bounds from each live cell to the last one, and the intervals on paths within ``limit``.

    ``low_kept`` and ``high_kept`` get the range of ranks from which such an interval leads to each cell.
    """
    n = high.size
    # the sums of a path add up in another order here: a cell within the limit must keep an interval to it
    loose = limit * (1.0 + 1e-14)
    backward[:] = NEVER
    backward[n - 1] = 0.0
    low_kept[:] = 0
    high_kept[:] = 0
    for r in range(n - 1, 0, -1):
        rest = backward[r]
        if rest + forward[r] > limit:
            continue
        low_kept[r] = n
        for t in range(count[r]):
            a = high[r] - t
            v = rest + table[start[r] + t]
            backward[a] = min(backward[a], v)
            if v + forward[a] <= loose:
                low_kept[r] = a
                high_kept[r] = max(high_kept[r], a)


@jit
def bound_paths(
    cells: Floats,
    jumps: Floats,
    rank: Ints,
    live: Ints,
    high: Ints,
    start: Ints,
    penalty: float,
    count: Ints,
    table: Floats,
    slope: Floats,
    limit: float,
) -> tuple[float, bool, Flags, Flags, Ints, Ints]:
    """A lower bound on all paths through points of the live cells, and the cells on paths within ``limit``.

    Takes what :func:`exact_lengths` returned, and overwrites ``table`` and ``slope``.

    Returns:
        the shortest bound, whether a kept cell is wider than one value, keep and again as :func:`refine` takes them,
        low_kept and high_kept as :func:`prune` gives them.
    """
    n = live.size
    width = np.empty(n)
    for r in range(n):
        width[r] = cells[live[r], RIGHT] - cells[live[r], LEFT]
        if width[r] > 0.0:
            slope[r] = min(slope[r], penalty / width[r])
    forward, backward = np.empty(n), np.empty(n)
    bound_lengths(cells, jumps, rank, live, high, start, penalty, count, slope, table, forward)
    low_kept, high_kept = np.empty(n, np.int64), np.empty(n, np.int64)
    prune(high, start, count, table, forward, limit, backward, low_kept, high_kept)
    keep, again = np.empty(n, np.bool_), np.empty(n, np.bool_)
    wide = False
    for r in range(n):
        bound = forward[r] + backward[r]
        keep[r] = bound <= limit
        again[r] = bound + penalty - slope[r] * width[r] <= limit
        wide |= keep[r] and width[r] != 0.0
    return forward[n - 1], wide, keep, again, low_kept, high_kept


@jit
def refine(
    x: Points,
    w: Floats,
    nodes: Floats,
    cells: Floats,
    first: Ints,
    live: Ints,
    keep: Flags,
    again: Flags,
    low: Ints,
    high: Ints,
) -> tuple[Floats, Ints, Ints, Ints, Ints]:
    """Split the kept cells into up to CHILDREN each, and merge the cells between them.

    Args:
        x: sorted points.
        w: their weights, or empty.
        nodes: float64[ceil(n / NODE), 6].
        cells: float64[k, 6].
        first: int64[k + 1], the first point of each cell, then the number of points.
        live: int64[r].
        keep: bool[r], which live cells remain.
        again: bool[r], cells that may hold two levels.
        low: int64[r], ranks of kept cells: the lowest that may precede each one.
        high: int64[r], the highest one.

    Returns:
        cells, first, live, low and high of the finer cells.
    """
    k = cells.shape[0]
    kept = 0
    for r in range(live.size):
        kept += keep[r]
    new_cells = np.empty((min(k, 2 * kept + 1) + kept * CHILDREN, COLUMNS))
    new_first = np.empty(new_cells.shape[0] + 1, np.int64)
    new_live = np.empty(kept * CHILDREN, np.int64)
    born = np.zeros(live.size + 1, np.int64)  # rank of each live cell's first child
    cuts = np.empty(CHILDREN, np.int64)
    n, m, r = 0, 0, 0
    after_dead = False
    for c in range(k):
        alive = r < live.size and live[r] == c
        if alive and not keep[r]:
            born[r] = m
            r += 1
            alive = False
        if not alive:
            if after_dead:
                row = new_cells[n - 1]
                right = cells[c, RIGHT]
                left, mass, up, down, cost = join(
                    right,
                    cells[c, LEFT],
                    cells[c, MASS],
                    cells[c, UP],
                    cells[c, DOWN],
                    cells[c, COST],
                    row,
                )
                store(row, left, right, mass, up, down, cost)
            else:
                new_cells[n] = cells[c]
                new_first[n] = first[c]
                n += 1
            after_dead = True
            continue
        after_dead = False
        born[r] = m
        r += 1
        if cells[c, LEFT] == cells[c, RIGHT]:
            new_cells[n] = cells[c]
            new_first[n] = first[c]
            new_live[m] = n
            n += 1
            m += 1
            continue
        mean = cells[c, LEFT] + cells[c, UP] / cells[c, MASS]
        pieces = split_points(x, first[c], first[c + 1], mean, cuts)
        cuts[pieces] = first[c + 1]
        at = first[c]
        for t in range(pieces + 1):
            new_first[n] = at
            sum_points(x, w, nodes, at, cuts[t], new_cells[n])
            new_live[m] = n
            n += 1
            m += 1
            at = cuts[t]
    new_first[n] = first[k]
    born[live.size] = m
    new_low = np.zeros(m, np.int64)
    new_high = np.zeros(m, np.int64)
    for r in range(1, live.size):
        for j in range(born[r], born[r + 1]):
            new_low[j] = born[low[r]]
            new_high[j] = j - 1 if again[r] and j > born[r] else born[high[r] + 1] - 1
    return new_cells[:n].copy(), new_first[: n + 1].copy(), new_live[:m].copy(), new_low, new_high
