"""Spans: cancellation-free sums over stretches of sorted points.

A *span* is a stretch of the line with the points in it, as one row (LEFT, RIGHT, MASS, UP, DOWN, COST):
its ends, sum w, sum w (x - LEFT), sum w (RIGHT - x) and sum w (x - LEFT)(RIGHT - x). COST is what rounding its
points to its ends costs. All four sums have terms >= 0, and joining two spans only adds products of such terms,
so nothing ever cancels: the relative error stays near 1e-16 per joining step for 1e6 + U(0, 1) as for heavy
tails. Prefix sums, whose differences cancel, are not used anywhere.

A *cell* is a span between two of its own points: a candidate place for a level.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gtrace.kernels._jit import inline, jit

if TYPE_CHECKING:
    from gtrace.kernels import Floats, Ints, Singles

    Points = Singles | Floats

LEFT, RIGHT, MASS, UP, DOWN, COST = range(6)
COLUMNS = 6
#: points summed up in one row of the lowest level
NODE = 64
#: most parts that a cell is split into
CHILDREN = 3
_CHUNK = 4096
#: a bin with a variance below this part of its mean square is treated as one value
ONE_VALUE = 1e-10


@jit
def inspect(x: Points) -> tuple[int, int]:
    """Number of elements that are NaN or infinite, and number of those below their predecessor."""
    bad, descents = 0, 0
    for i in range(x.size):
        bad += not (abs(x[i]) < np.inf)
    for i in range(1, x.size):
        descents += x[i] < x[i - 1]
    return bad, descents


@inline
def _first(x: Points, v: float, start: int, stop: int, above: bool) -> int:
    """The first of the sorted points start..stop-1 that is ``above`` v, or at least v; else ``stop``."""
    while start < stop:
        middle = (start + stop) // 2
        at = x[np.uintp(middle)]
        before = at <= v if above else at < v
        start, stop = (middle + 1, stop) if before else (start, middle)
    return start


@inline
def inner(x: Points, low: float, high: float) -> tuple[int, int]:
    """First and one past the last of the sorted points strictly between the end levels, which span them.

    The ends are compared as float64: rounded to float32 they could fall on a point.
    """
    start, stop = 0, x.size
    if x.size and np.float64(x[0]) == low:
        start = _first(x, low, 0, x.size, True)
    if x.size and np.float64(x[x.size - 1]) == high:
        stop = _first(x, high, 0, x.size, False)
    return start, stop


@jit
def distinct(x: Points, low: float, high: float, found: Floats) -> int:
    """Write the distinct values of sorted points and both ends into ``found``, as many as fit; returns how many.

    ``found`` has room for the first end.
    """
    found[0] = low
    at, _ = inner(x, low, high)
    count = 1
    while at < x.size and count < found.size:
        found[count] = x[at]
        count += 1
        # most values occur once, and some a million times
        left, right, step = at + 1, x.size, 1
        while left < right and x[min(left + step, right) - 1] == x[at]:
            left = min(left + step, right)
            step *= 2
        at = _first(x, np.float64(x[at]), left, min(left + step, right), True)
    if count < found.size and found[count - 1] < high:
        found[count] = high
        count += 1
    return count


@jit
def total_cost(x: Points, w: Floats, levels: Floats) -> float:
    """Sum of w (b - x)(x - a) with a <= x <= b adjacent levels; x in any order, between the first and last level.

    ``w`` is empty for unit weights. Sums run over short fixed chunks: 1e-12 relative at a billion points.
    """
    total = 0.0
    last = levels.size - 1
    a, b = levels[0], levels[min(1, last)]
    for p in range(0, x.size, _CHUNK):
        part = 0.0
        for i in range(p, min(p + _CHUNK, x.size)):
            v = np.float64(x[i])
            if v < a or v > b:
                low, high = 0, last
                while high - low > 1:
                    middle = (low + high) // 2
                    if levels[middle] <= v:
                        low = middle
                    else:
                        high = middle
                a, b = levels[low], levels[high]
            if w.size:
                part += w[i] * (b - v) * (v - a)
            else:
                part += (b - v) * (v - a)
        total += part
    return total


@jit
def split_to_grid(x: Points, w: Floats, grid: Floats, mass: Floats) -> None:
    """Add each point's weight to its two neighbours on an ascending grid, by its distance from them.

    For levels on the grid this changes the objective by a constant only: the chord of t^2 is linear in between.
    """
    last = grid.size - 1
    span = grid[last] - grid[0]
    for i in range(x.size):
        v = np.float64(x[i])
        k = 0
        if span > 0.0:
            k = min(max(int((v - grid[0]) / span * last), 0), last - 1)
        while k > 0 and grid[k] > v:
            k -= 1
        while k < last - 1 and grid[k + 1] < v:
            k += 1
        weight = w[i] if w.size else 1.0
        up = weight * ((v - grid[k]) / (grid[k + 1] - grid[k]))
        mass[k] += weight - up
        mass[k + 1] += up


@jit
def fill_bins(x: Points, w: Floats, anchor: float, scale: float, base: int, shift: int, table: Floats) -> None:
    """Add points to bins of r = |x - anchor| / scale, keyed by the leading bits of its float64 pattern.

    Row k of a half of table[2 rows, 6] starts at the float64 whose pattern above ``shift`` bits is base + k, row 0 at
    zero; the second half takes the points below the anchor. A bin holds count, sum d and sum d^2 of d = r - lower
    edge, and the same weighted. Loops without branches come first: they are vectorized, the last one scatters.
    """
    rows = table.shape[0] // 2
    r = np.empty(_CHUNK)
    r_bits = r.view(np.int64)
    edge = np.empty(_CHUNK)
    edge_bits = edge.view(np.int64)
    row = np.empty(_CHUNK, np.int64)
    for p in range(0, x.size, _CHUNK):
        xb = x[p : min(p + _CHUNK, x.size)]
        for i in range(xb.size):
            v = (np.float64(xb[i]) - anchor) / scale
            row[i] = rows if v < 0.0 else 0
            r[i] = abs(v)
        for i in range(xb.size):
            key = min((r_bits[i] >> shift) - base, rows - 1)
            edge_bits[i] = ((key + base) << shift) if key > 0 else 0
            row[i] += max(key, 0)
        for i in range(xb.size):
            d = r[i] - edge[i]
            weight = w[p + i] if w.size else 1.0
            cell = table[row[i]]
            cell[0] += 1.0
            cell[1] += d
            cell[2] += d * d
            cell[3] += weight
            cell[4] += weight * d
            cell[5] += weight * d * d


@jit
def halve_bins(lower: Floats, upper: Floats, sums: Floats, low: float, high: float, x: Floats, w: Floats) -> int:
    """Replace the contents of each bin by two weighted points, or by one where both are equal; returns how many.

    See :func:`gtrace.fitting.optimal.bin_points`.
    """
    before, count = -np.inf, 0
    for k in range(lower.size):
        n, d1, d2, mass, tilt = sums[k, 0], sums[k, 1], sums[k, 2], sums[k, 3], sums[k, 4]
        edge, width = lower[k], upper[k] - lower[k]
        mean, square = min(max(d1 / n, 0.0), width), d2 / n
        variance = square - mean * mean
        if n == 1.0 or variance <= ONE_VALUE * square:
            variance = 0.0
        left, right = mean - np.sqrt(variance), mean + np.sqrt(variance)
        # the points a < b of a law on two values have (mean - a)(b - mean) = variance
        if left < 0.0:
            left, right = 0.0, mean + variance / mean
        if right > width:
            left, right = mean - variance / (width - mean), width
        a = min(max(edge + left, low), high)
        b = min(max(edge + min(max(right, left), width), low), high)
        up = 0.0
        if b > a:
            up = min(max((tilt - mass * (a - edge)) / (b - a), 0.0), mass)
        # two neighbours share an edge only up to rounding
        a = max(before, a)
        before = max(a, b)
        x[count], w[count] = a, mass - up
        count += 1
        if before > a or up > 0.0:
            x[count], w[count] = before, up
            count += 1
    return count


@inline
def join(
    right: float, left: float, mass: float, up: float, down: float, cost: float, rows: Floats, c: int
) -> tuple[float, float, float, float, float]:
    """The span left..right extended to the left end of row ``c``, which lies on its left: left, and the four sums.

    ``c`` is unsigned; a row that is an array of its own would take longer than the sums.
    """
    gap_left = left - rows[c, LEFT]
    gap_right = right - rows[c, RIGHT]
    cost += gap_left * down + rows[c, COST] + gap_right * rows[c, UP]
    up += gap_left * mass + rows[c, UP]
    down += rows[c, DOWN] + rows[c, MASS] * gap_right
    return rows[c, LEFT], mass + rows[c, MASS], up, down, cost


@inline
def append(
    right: float, left: float, mass: float, up: float, down: float, cost: float, rows: Floats, c: int
) -> tuple[float, float, float, float]:
    """The sums of the span from ``left`` to the left end of row ``c``, extended by that row and up to ``right``."""
    gap, gap_left, gap_right = right - rows[c, LEFT], rows[c, LEFT] - left, right - rows[c, RIGHT]
    below = rows[c, DOWN] + rows[c, MASS] * gap_right
    cost += gap * up + rows[c, COST] + gap_right * rows[c, UP] + gap_left * below
    return mass + rows[c, MASS], up + gap_left * rows[c, MASS] + rows[c, UP], down + gap * mass + below, cost


@inline
def store(row: Floats, left: float, right: float, mass: float, up: float, down: float, cost: float) -> None:
    """Write a span."""
    row[LEFT] = left
    row[RIGHT] = right
    row[MASS] = mass
    row[UP] = up
    row[DOWN] = down
    row[COST] = cost


@inline
def sum_nodes(x: Points, w: Floats, nodes: Floats) -> None:
    """The spans of every NODE consecutive points of sorted ``x``, into nodes[ceil(n / NODE), 6]."""
    for b in range(nodes.shape[0]):
        start = b * NODE
        stop = min(start + NODE, x.size)
        xb = x[start:stop]
        left, right = np.float64(xb[0]), np.float64(xb[xb.size - 1])
        mass, up, down, cost = 0.0, 0.0, 0.0, 0.0
        if w.size:
            wb = w[start:stop]
            for i in range(xb.size):
                v = np.float64(xb[i])
                rise = wb[i] * (v - left)
                mass += wb[i]
                up += rise
                down += wb[i] * (right - v)
                cost += rise * (right - v)
        else:
            mass = np.float64(xb.size)
            for i in range(xb.size):
                v = np.float64(xb[i])
                up += v - left
                down += right - v
                cost += (v - left) * (right - v)
        store(nodes[b], left, right, mass, up, down, cost)


@inline
def sum_points(x: Points, w: Floats, nodes: Floats, start: int, stop: int, row: Floats) -> None:
    """The span of the points start..stop-1 into ``row``."""
    right = np.float64(x[stop - 1])
    left = right
    mass, up, down, cost = 0.0, 0.0, 0.0, 0.0
    p = stop
    while p > start:
        if p % NODE == 0 and p - NODE >= start:
            p -= NODE
            left, mass, up, down, cost = join(right, left, mass, up, down, cost, nodes, np.uintp(p // NODE))
            continue
        at, p = np.uintp(p), max(start, (p - 1) // NODE * NODE)
        while at > np.uintp(p):
            at -= np.uintp(1)
            v = np.float64(x[at])
            weight = w[at] if w.size else 1.0
            cost += (left - v) * down
            up += (left - v) * mass
            mass += weight
            down += weight * (right - v)
            left = v
    store(row, left, right, mass, up, down, cost)


@inline
def spread(x: Points, nodes: Floats, weight: Floats) -> None:
    """Integral of the cube root of the density over each node and the gap after it, into weight[nodes].

    Levels of that density are asymptotically optimal, so equal shares of it make good first cells.
    """
    for b in range(nodes.shape[0]):
        stop = min((b + 1) * NODE, x.size - 1)
        width = np.float64(x[stop]) - nodes[b, LEFT]
        weight[b] = (nodes[b, MASS] * width * width) ** (1.0 / 3.0)


@inline
def _run_start(x: Points, at: int, start: int, stop: int) -> int:
    """The start of a run of equal values near ``at``, inside start..stop; ``stop`` when there is only one run."""
    if x[at - 1] != x[at]:
        return at
    v = np.float64(x[at])
    first = _first(x, v, start, at, False)
    return first if first > start else _first(x, v, at, stop, True)


@inline
def split_points(x: Points, start: int, stop: int, mean: float, cuts: Ints) -> int:
    """Where to cut a cell of at least two values, into cuts[CHILDREN - 1]; returns how many cuts.

    In the middle between its ends, which finds inner gaps, and at its mean if that is elsewhere, which closes in on a
    value with most of the mass. Cuts by numbers of points would need many rounds for either.
    """
    left, right = np.float64(x[start]), np.float64(x[stop - 1])
    middle = left + 0.5 * (right - left)
    low, high = min(mean, middle), min(max(mean, middle), right)
    if high - low <= 0.125 * (right - left):
        low = high = middle
    cuts[0] = _run_start(x, min(_first(x, low, start, stop, True), stop - 1), start, stop)
    if low == high:
        return 1
    cuts[1] = _run_start(x, min(_first(x, high, cuts[0], stop, True), stop - 1), start, stop)
    return 2 if cuts[0] < cuts[1] < stop else 1


@inline
def _append(cuts: Ints, count: int, at: int) -> int:
    """Write the next cut if it fits, and count it."""
    if count < cuts.size:
        cuts[count] = at
    return count + 1


@inline
def cut(x: Points, w: Floats, weight: Floats, start: int, stop: int, share: float, cuts: Ints) -> tuple[int, float]:
    """Cut the points start..stop-1 into cells of about ``share`` of the spread; equal values stay together.

    Args:
        x: sorted points.
        w: their weights, or empty.
        weight: float64[nodes], the spread of each node. A node above ``share`` is opened: its points count.
        start: the first point.
        stop: one past the last point.
        share: spread of one cell; 0 for a cell per value.
        cuts: overwritten with the first points of all cells but the first, as many as fit.

    Returns:
        the number of cuts, also of those that did not fit, and the spread of all points.
    """
    count, before = 0, start
    total, current = 0.0, 0.0
    last = x.size - 1
    p = start
    while p < stop:
        node = p // NODE
        step = 1
        if p % NODE == 0 and p + NODE <= stop and weight[node] <= share:
            step = NODE
            g = weight[node]
        else:
            gap = np.float64(x[min(p + 1, last)]) - np.float64(x[p])
            mass = w[p] if w.size else 1.0
            g = (mass * gap * gap) ** (1.0 / 3.0)
        if g >= share and current > 0.0:
            # The last value before a wide gap gets a cell of its own: levels are tried at left ends, and one just
            # there saves much.
            at = _run_start(x, p, before, stop)
            if before < at <= p:
                count = _append(cuts, count, at)
                before, current = at, 0.0
        p += step
        total += g
        current += g
        if current >= share and p < stop:
            at = _run_start(x, p, before, stop)
            if before < at < stop:
                count = _append(cuts, count, at)
                before, current = at, 0.0
                p = max(p, at)
    return count, total


@inline
def first_cells(x: Points, w: Floats, nodes: Floats, first: Ints, low: float, high: float, cells: Floats) -> None:
    """The cells first[c]..first[c+1]-1 into cells[c, 6]; an empty first or last one is the level low or high."""
    for c in range(cells.shape[0]):
        if first[c] < first[c + 1]:
            sum_points(x, w, nodes, first[c], first[c + 1], cells[c])
        else:
            end = low if c == 0 else high
            store(cells[c], end, end, 0.0, 0.0, 0.0, 0.0)
