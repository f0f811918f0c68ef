"""Levels on an empirical law: hinge sums of a sketch, coordinate descent and dynamic programming on them.

With B(t) = sum (t - r)_+ the error of a grid is, up to a constant, sum_j (l_{j+1} - l_{j-1}) B(l_j), so all that a
fit needs is B and its slope, the mass below t. A table of both at the lower edges of the bins makes each of them one
binary search.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gtrace.kernels._jit import inline, jit
from gtrace.kernels.optimal import Intervals, best_before, cheapest_path, trace
from gtrace.kernels.sketching import hinge

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.kernels import Floats, Ints

#: columns of a law table: lower edge, width, mass, sum d, sum d^2 (d = r - lower edge), mass below, B at the edge
LOWER, WIDTH, MASS, FIRST, SECOND, BELOW, HINGE = range(7)
COLUMNS = 7
_GOLDEN = 0.6180339887498949
_GOLDEN_STEPS = 45
_LEAST_PIVOT = 1e-3
#: places of candidates around a level, relative to half the gap to its neighbors; windows are narrowed from
#: ``WIDEST`` to ``NARROWEST`` of that, and at most ``POLISH`` sweeps follow
WINDOW = np.arange(-4, 5) / 4.0
WIDEST, NARROWEST = 0.45, 1e-6
POLISH = 5
#: Below this part of the gap windows are narrowed even if a level has reached the end of its own: an error depends on
#: the square of that.
FINE = 1e-3
#: most levels of grids that are found together, layer by layer; more of them are found by a price per level
LAYERS = 32
#: A grid of a sketch has settled when no level moves by more than this part of the gap to its nearest neighbour. A
#: sketch places a level no finer than a search inside a bin does.
SETTLED = 1e-9
#: values with a variance below this part of a bin's squared width count as one value: float32 resolves no more
ONE_VALUE = 1e-9
#: weight of an even law beside the shares of a companding grid
SLOPE = 1e-9
#: gradient descent: the longest step, of the gap to the nearest neighbor; what changes rates, and after how many steps
HALF_GAP, FASTER, FASTEST, SLOWER, PATIENCE = 0.499, 1.5, 1e100, 0.1, 10
#: smallest first level of a grid without 0: exact zeros alone would drive it to 0
_TINY = float(np.finfo(np.float32).tiny)


@jit
def tabulate(lower: Floats, upper: Floats, sums: Floats, first: int, zeros: float, total: float, table: Floats) -> bool:
    """Fill table[k, 7] from the bins of a sketch, columns ``first`` to ``first`` + 2, divided by ``total``.

    ``zeros`` is the part of ``total`` at r = 0. Returns whether every bin holds a single value.
    """
    single = True
    below, area, at = zeros / total, 0.0, 0.0
    for k in range(lower.size):
        width = upper[k] - lower[k]
        mass, d1 = sums[k, first] / total, sums[k, first + 1] / total
        area += below * (lower[k] - at)
        table[k, LOWER] = lower[k]
        table[k, WIDTH] = width
        table[k, MASS] = mass
        table[k, FIRST] = d1
        table[k, SECOND] = sums[k, first + 2] / total
        table[k, BELOW] = below
        table[k, HINGE] = area
        area += (below + mass) * width - d1
        below += mass
        at = upper[k]
        held = mass if mass > 0.0 else 1.0
        single &= not table[k, SECOND] / held - (d1 / held) * (d1 / held) > ONE_VALUE * width * width
    return single


@inline
def _mean(table: Floats, k: int) -> float:
    """The mean of a bin."""
    mass = table[k, MASS]
    return min(table[k, LOWER] + table[k, FIRST] / (mass if mass > 0.0 else 1.0), 1.0)


@jit
def compand(table: Floats, shares: Floats, out: Floats) -> None:
    """Points that divide the integral of density^(1/3) in these ascending shares, into ``out``.

    The mass of a bin is spread half-way to the values beside it.
    """
    bins = table.shape[0]
    edges, total = np.empty(bins + 1), np.zeros(bins + 1)
    edges[0], edges[bins] = 0.0, 1.0
    for k in range(1, bins):
        edges[k] = 0.5 * (_mean(table, k) + _mean(table, k - 1))
    for k in range(bins):
        width = edges[k + 1] - edges[k]
        if k == bins - 1:
            width = min(width, 2.0 * (_mean(table, k) - edges[k]))
        total[k + 1] = total[k] + np.cbrt(table[k, MASS] * width * width)
    whole = total[bins]
    # A small slope makes every share have one point, even without mass.
    for k in range(bins + 1):
        total[k] = (total[k] / whole if whole > 0.0 else 0.0) + SLOPE * k / bins
    k = 0
    for i in range(shares.size):
        share = shares[i] * (1.0 + SLOPE)
        while k < bins and total[k + 1] <= share:
            k += 1
        out[i] = edges[k]
        if not whole > 0.0:
            out[i] = shares[i]
        elif k < bins and total[k] < share:
            out[i] += (edges[k + 1] - edges[k]) / (total[k + 1] - total[k]) * (share - total[k])


@inline
def _insert(out: Floats, count: int, value: float) -> int:
    """Put a value in its place among the first ``count``, which ascend, unless it is there; returns how many follow."""
    at = count
    while at > 0 and out[at - 1] > value:
        at -= 1
    if at > 0 and out[at - 1] == value:
        return count
    for k in range(count, at, -1):
        out[k] = out[k - 1]
    out[at] = value
    return count + 1


@jit
def candidates(table: Floats, size: int) -> Floats:
    """Ascending points that hold a good grid: ``size`` of :func:`compand`, and beside each the nearest mean of a bin.

    A lone value has its level there. Both ends are among them.
    """
    shares, points = np.arange(size) / (size - 1.0), np.empty(size)
    compand(table, shares, points)
    bins = table.shape[0]
    thinned = bins > 2 * size
    means = np.empty(size if thinned else bins)
    k = 0
    for i in range(means.size):
        while thinned and k < bins and _mean(table, k) < points[i]:
            k += 1
        means[i] = _mean(table, max(k, 1) - 1 if thinned else i)
    out = np.empty(size + means.size + 2)
    out[0] = 0.0
    count, i, k = 1, 0, 0
    while i < size or k < means.size:
        if k == means.size or (i < size and points[i] <= means[k]):
            count = _insert(out, count, points[i])
            i += 1
        else:
            count = _insert(out, count, means[k])
            k += 1
    return out[: _insert(out, count, 1.0)]


@inline
def find_near(table: Floats, t: float, k: int) -> int:
    """The last bin with a lower edge not above t, -1 without one; it is looked for near the bin ``k``, -1 or more."""
    low, high, step = k + 1, table.shape[0], 1
    if k >= 0 and table[k, LOWER] > t:
        high = k
        while high >= step and table[high - step, LOWER] > t:
            high -= step
            step *= 2
        low = max(0, high - step)
    else:
        while low + step <= high and table[low + step - 1, LOWER] <= t:
            low += step
            step *= 2
        high = min(high, low + step - 1)
    while low < high:
        middle = (low + high) // 2
        if table[middle, LOWER] <= t:
            low = middle + 1
        else:
            high = middle
    return low - 1


@inline
def _area(table: Floats, k: int, t: float, zeros: float) -> float:
    """B(t), with k the last bin with a lower edge not above t."""
    if k < 0:
        return zeros * t
    ahead = t - table[k, LOWER]
    width, mass = table[k, WIDTH], table[k, MASS]
    before = table[k, HINGE] + table[k, BELOW] * ahead
    if ahead >= width:
        return before + mass * ahead - table[k, FIRST]
    inside, _ = hinge(t, table[k, LOWER], width, mass, table[k, FIRST], table[k, SECOND])
    return before + inside


@inline
def _below(table: Floats, k: int, t: float, zeros: float) -> float:
    """The slope of B at t, that is the mass below t, for k as in :func:`_area`."""
    if k < 0:
        return zeros
    mass, width = table[k, MASS], table[k, WIDTH]
    u = (t - table[k, LOWER]) / width
    if u >= 1.0 or mass <= 0.0:
        return table[k, BELOW] + mass
    c1 = 2.0 * table[k, FIRST] / (mass * width) - 1.0
    m2 = table[k, SECOND] / (mass * width * width)
    c2 = 0.5 * (3.0 * (4.0 * m2 - 2.0 * c1 - 1.0) - 1.0)
    part = u + 3.0 * c1 * (u * u - u) + 5.0 * c2 * (2.0 * u * u * u - 3.0 * u * u + u)
    return table[k, BELOW] + mass * min(max(part, 0.0), 1.0)


@jit
def hinges(table: Floats, zeros: float, points: Floats, out: Floats) -> None:
    """Mass below each point and B there, into out[p, 2]; ``zeros`` is the mass at r = 0."""
    k = -1
    for i in range(points.size):
        k = find_near(table, points[i], k)
        out[i, 0] = _below(table, k, points[i], zeros)
        out[i, 1] = _area(table, k, points[i], zeros)


@jit
def sweep(table: Floats, zeros: float, levels: Floats, mirrored: bool) -> float:
    """One sweep of coordinate descent over the free levels, ascending and in place; returns the largest move.

    Between fixed neighbors a and c the best level minimizes (c - a) B(l) - l (B(c) - B(a)); the first level of a
    mirrored grid minimizes (l + c) B(l) - l B(c). The slope of either finds the bin, and a golden section search the
    point in it. A level moves only if that lowers the error, so the error never rises.
    """
    largest = 0.0
    count = table.shape[0]
    for j in range(0 if mirrored else 1, levels.size - 1):
        first = mirrored and j == 0
        a = 0.0 if first else levels[j - 1]
        c = levels[j + 1]
        tilt = 1.0 if first else 0.0
        factor = c if first else c - a
        target = _area(table, find_near(table, c, -1), c, zeros)
        if not first:
            target -= _area(table, find_near(table, a, -1), a, zeros)
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
        at_old = (tilt * old + factor) * _area(table, find_near(table, old, -1), old, zeros) - old * target
        if at_best < at_old and a < best < c:
            largest = max(largest, abs(best - old))
            levels[j] = best
    return largest


@inline
def _priced(points: Floats, areas: Floats, mirrored: bool, chosen: Ints) -> bool:
    """The best grid for a price per level that makes it one of as many levels as ``chosen`` has room for.

    Cells are priced by what they cost more than the cells of all candidates between their ends, and those that alone
    cost more than a whole grid of equally many candidates in each cell are left out.

    Returns:
        whether there is one; some candidates may save nothing.
    """
    ahead = 1 if mirrored else 0
    n, steps = points.size + ahead, chosen.size - 1 + ahead
    # A mirrored grid has no level at 0; the cell from there to its first level costs twice the level by its area.
    at, area, fine, none = np.zeros(n), np.zeros(n), np.zeros(n), np.zeros(n)
    at[ahead:], area[ahead:] = points, areas
    for j in range(1, n):
        fine[j] = fine[j - 1] + _cell(at, area, none, mirrored, j - 1, j)
    limit, i = 0.0, 0
    for t in range(1, steps + 1):
        j = t * (n - 1) // steps
        limit += _cell(at, area, fine, mirrored, i, j)
        i = j
    low, start, count = 0, np.zeros(n, np.int64), np.zeros(n, np.int64)
    for j in range(1, n):
        while _cell(at, area, fine, mirrored, low, j) > limit:
            low += 1
        start[j], count[j] = start[j - 1] + count[j - 1], j - low
    table = np.empty(start[n - 1] + count[n - 1])
    for j in range(1, n):
        for t in range(count[j]):
            table[start[j] + t] = _cell(at, area, fine, mirrored, j - 1 - t, j)
    value, back = np.empty(n), np.empty(n, np.int64)
    rows = Intervals(np.arange(n) - 1, start, count, table)
    path, _ = cheapest_path(rows, steps, 2.0 * limit / steps, value, back)
    if path.size != steps + 1:
        return False
    for k in range(chosen.size):
        chosen[k] = path[k + ahead] - ahead
    return True


@inline
def _cell(at: Floats, area: Floats, fine: Floats, mirrored: bool, i: int, j: int) -> float:
    """The price of the cell from candidate i to j: what it costs more than ``fine`` says; see :func:`_priced`."""
    whole = 2.0 * at[j] * area[j] if mirrored and i == 0 else (at[j] - at[i]) * (area[i] + area[j])
    return max(0.0, whole - (fine[j] - fine[i]))


@jit
def choose(points: Floats, areas: Floats, mirrored: bool, chosen: Ints) -> None:
    """The best grid among ascending candidates, by dynamic programming.

    Args:
        points: float64[n], the ends of the grid among them; its first end only unless ``mirrored``.
        areas: float64[n], B at the points.
        mirrored: the grid has no level at 0 and is mirrored there.
        chosen: int64[m], m <= n, overwritten with the indices of the chosen points, the last of which is n - 1.

    """
    if chosen.size <= LAYERS or not _priced(points, areas, mirrored, chosen):
        trace(best_before(points, areas, mirrored, chosen.size), chosen)


@jit
def largest_move(before: Floats, after: Floats, mirrored: bool) -> float:
    """The largest move of a free level, as a part of the gap to its nearest neighbour."""
    largest = 0.0
    for j in range(0 if mirrored else 1, after.size - 1):
        move = abs(after[j] - before[j])
        room = min(after[j] - (after[j - 1] if j else 0.0), after[j + 1] - after[j])
        if room > 0.0:
            largest = max(largest, move / room)
        elif move > 0.0:
            largest = np.inf
    return largest


@jit
def gradient(
    table: Floats, zeros: float, mean: float, square: float, edges: Floats, mirrored: bool, bins: Ints, slopes: Floats
) -> float:
    """The error of a grid, and its derivatives by the inner edges into ``slopes``.

    Args:
        table, zeros, mean, square, edges, mirrored: as for :func:`descend`.
        bins: int64[m], overwritten with the bins of the edges; where to look for them first, -1 or more.
        slopes: float64[m - 2], overwritten.
    """
    sums = np.empty((edges.size, 2))
    for j in range(edges.size):
        bins[j] = find_near(table, edges[j], bins[j])
        sums[j, 0], sums[j, 1] = _below(table, bins[j], edges[j], zeros), _area(table, bins[j], edges[j], zeros)
    error, below = 0.0, edges[edges.size - 2]
    for j in range(slopes.size):
        reach = edges[j + 2] - edges[j]
        slopes[j] = reach * sums[j + 1, 0] - (sums[j + 2, 1] - sums[j, 1])
        error += reach * sums[j + 1, 1]
    # The error if the last cell reached down to 0, in an order that keeps the digits which would be lost in B(1).
    error += (1.0 + below) * mean - square - below
    if mirrored:
        error += edges[1] * sums[1, 1]
        if slopes.size:
            slopes[0] += edges[1] * sums[1, 0] + sums[1, 1]
    return error


@jit
def descend(
    table: Floats, zeros: float, mean: float, square: float, edges: Floats, mirrored: bool, limit: int, errors: Floats
) -> int:
    """:func:`gtrace.fitting.levels.gradient_descent` on the law of a sketch.

    Args:
        table: float64[k, 7], the law.
        zeros: the mass at r = 0.
        mean, square: E r and E r^2.
        edges: float64[m], the levels; of a mirrored grid after a 0. Overwritten with the best ones.
        mirrored: the grid has no level at 0 and is mirrored there.
        limit: of steps.
        errors: float64[limit + 2], overwritten: the error at the start, after each step, and of the best grid if the
            last step's is worse.

    Returns:
        how many errors there are.
    """
    free, bins = edges.size - 2, np.full(edges.size, -1)
    slopes, old, best_slopes, rates = np.empty(free), np.empty(free), np.empty(free), np.ones(free)
    before, best_edges = edges.copy(), edges.copy()
    error = best = errors[0] = gradient(table, zeros, mean, square, edges, mirrored, bins, slopes)
    _copy(slopes, best_slopes)
    count, since, first = 1, 0, 1 if mirrored else 0
    for _ in range(limit):
        _copy(edges, before)
        _copy(slopes, old)
        for j in range(free):
            most = HALF_GAP * min(before[j + 1] - before[j], before[j + 2] - before[j + 1])
            edges[j + 1] = before[j + 1] - np.sign(old[j]) * min(rates[j] * abs(old[j]), most)
        error = errors[count] = gradient(table, zeros, mean, square, edges, mirrored, bins, slopes)
        count += 1
        if largest_move(before[first:], edges[first:], mirrored) <= SETTLED:
            break
        for j in range(free):
            turned = np.sign(slopes[j]) * np.sign(old[j])
            rates[j] = min(rates[j] * (FASTER if turned > 0.0 else 0.5 if turned < 0.0 else 1.0), FASTEST)
        since += 1
        if error < best:
            best, since = error, 0
            _copy(edges, best_edges)
            _copy(slopes, best_slopes)
        elif since == PATIENCE:
            _copy(best_edges, edges)
            _copy(best_slopes, slopes)
            since = 0
            for j in range(free):
                rates[j] *= SLOWER
    if error > best:
        _copy(best_edges, edges)
        errors[count] = best
        count += 1
    return count


@jit
def windows(levels: Floats, mirrored: bool, places: Floats, points: Floats) -> None:
    """Points around each level into points[m, q], at the places -1..1 between the levels below and above it.

    The last level stays, and so does the first unless ``mirrored``.
    """
    m = levels.size
    for j in range(m):
        below = levels[j] - (levels[j - 1] if j else 0.0)
        above = levels[j + 1] - levels[j] if j + 1 < m else 0.0
        if j == m - 1 or (j == 0 and not mirrored):
            below = above = 0.0
        for q in range(places.size):
            points[j, q] = levels[j] + (below if places[q] < 0.0 else above) * places[q]


@jit
def choose_near(points: Floats, areas: Floats, mirrored: bool, levels: Floats) -> bool:
    """The best grid whose level j is one of points[j, :], by dynamic programming.

    Args:
        points: float64[m, q]; a level that stays has q times the same.
        areas: float64[m, q], B at the points.
        mirrored: see :func:`choose`.
        levels: float64[m], overwritten with the grid.

    Returns:
        whether a level has moved to the first or last of its points.
    """
    m, q = points.shape
    came = np.zeros((m, q), np.int32)
    cost = np.zeros(q)
    if mirrored:
        for i in range(q):
            cost[i] = 2.0 * points[0, i] * areas[0, i]
    following = np.empty(q)
    for j in range(1, m):
        before, below = points[j - 1], areas[j - 1]
        for k in range(q):
            best, where, point, area = np.inf, np.uintp(0), points[j, k], areas[j, k]
            # Unsigned places spare the check for negative ones.
            for i in range(np.uintp(q)):
                width = point - before[i]
                value = cost[i] + width * (below[i] + area) if width > 0.0 else np.inf
                where = i if value < best else where
                best = min(value, best)
            following[k] = best
            came[j, k] = where
        cost, following = following, cost
    k = 0
    for i in range(q):
        if cost[i] < cost[k]:
            k = i
    at_the_rim = False
    for j in range(m - 1, -1, -1):
        place = points[j, k]
        if place != levels[j] and (place == points[j, 0] or place == points[j, q - 1]):
            at_the_rim = True
        levels[j] = place
        k = came[j, k]
    return at_the_rim


@jit
def solve_tridiagonal(diagonal: Floats, coupling: Floats, right: Floats) -> bool:
    """Solve a symmetric tridiagonal system into ``right``; it is first made positive definite if needed.

    ``diagonal`` float64[n] is overwritten by the pivots; ``coupling`` is float64[n - 1]. A pivot that is negative
    or very small is turned round or raised, so that the solution is a direction of descent for minus a
    gradient. False when a diagonal entry is not positive.
    """
    n = diagonal.size
    for i in range(n):
        entry = diagonal[i]
        if not entry > 0.0:
            return False
        if i > 0:
            ratio = coupling[i - 1] / diagonal[i - 1]
            diagonal[i] -= ratio * coupling[i - 1]
            right[i] -= ratio * right[i - 1]
        diagonal[i] = max(abs(diagonal[i]), _LEAST_PIVOT * entry)
    for i in range(n - 1, -1, -1):
        right[i] /= diagonal[i]
        if i < n - 1:
            right[i] -= coupling[i] / diagonal[i] * right[i + 1]
    return True


@inline
def _narrow(table: Floats, zeros: float, levels: Floats, mirrored: bool, limit: int, grids: Floats) -> int:
    """Dynamic programming over a few points around each level, closer each time; returns how many ``grids`` it wrote.

    It needs no derivatives, which a law of single values does not have, and moves all levels together, unlike
    coordinate descent.
    """
    points, areas = np.empty((levels.size, WINDOW.size)), np.empty((levels.size, WINDOW.size))
    count, scale = 0, WIDEST
    for _ in range(limit):
        windows(levels, mirrored, scale * WINDOW, points)
        k = -1
        for j in range(levels.size):
            for q in range(WINDOW.size):
                k = find_near(table, points[j, q], k)
                areas[j, q] = _area(table, k, points[j, q], zeros)
        if not choose_near(points, areas, mirrored, levels) or scale < FINE:
            scale *= 0.5
        if grids.size:
            _copy(levels, grids[count])
        count += 1
        if scale < NARROWEST:
            break
    return count


@inline
def _copy(values: Floats, out: Floats) -> None:
    """An assignment of a slice takes ten times as long to compile: it names the shapes that differ."""
    for k in range(values.size):
        out[k] = values[k]


@jit
def distinct_levels(levels: Floats, mirrored: bool) -> int:
    """Keep the levels that float32, their type in payloads, distinguishes from their neighbors; returns how many."""
    last = levels.size - 1
    count, before = 0, -np.inf
    least = _TINY if mirrored else -np.inf
    end = np.float64(np.float32(max(levels[last], least)))
    for j in range(levels.size):
        level = max(levels[j], least)
        short = np.float64(np.float32(level))
        if j == last or (short > before and short < end):
            levels[count] = level
            count += 1
        before = short
    return count


@inline
def _polish(table: Floats, zeros: float, levels: Floats, mirrored: bool, limit: int, grids: Floats) -> int:
    """Sweeps of descent until levels settle; how many. Each is recorded in ``grids`` if that is not empty."""
    before = np.empty(levels.size)
    for swept in range(limit):
        _copy(levels, before)
        sweep(table, zeros, levels, mirrored)
        if grids.size:
            _copy(levels, grids[swept])
        if largest_move(before, levels, mirrored) <= SETTLED:
            return swept + 1
    return limit


@inline
def _starts(
    table: Floats, zeros: float, size: int, counts: Ints, mirrored: bool
) -> tuple[Floats, Floats, NDArray[np.int32]]:
    """The candidates, B there, and how the best grids of few levels among them came about; empty for a size of 0."""
    if not size:
        return np.empty(0), np.empty(0), np.empty((0, 0), np.int32)
    points = candidates(table, size)
    if mirrored:
        positive = 0
        while points[positive] <= 0.0:
            positive += 1
        points = points[positive:]
    areas = np.empty(points.size)
    k, most = -1, 0
    for i in range(points.size):
        k = find_near(table, points[i], k)
        areas[i] = _area(table, k, points[i], zeros)
    for c in range(counts.size):
        most = max(most, min(counts[c], points.size)) if counts[c] <= LAYERS else most
    return points, areas, best_before(points, areas, mirrored, most)


@jit
def fit_sets(
    table: Floats, zeros: float, size: int, counts: Ints, mirrored: bool, limit: int, levels: Floats, grids: Floats
) -> tuple[Ints, int, int]:
    """Grids of least error for several numbers of levels.

    Each starts from the best grid among :func:`candidates`, found by dynamic programming, then from ever closer points
    around its levels; a few sweeps of coordinate descent follow.

    Args:
        table: float64[k, 7], the law.
        zeros: the mass at r = 0.
        size: number of candidates; 0 to start from ``levels`` as they are.
        counts: int64[c], numbers of levels.
        mirrored: the grids have no level at 0 and are mirrored there.
        limit: of rounds, and of sweeps up to ``POLISH``.
        levels: float64[sum of counts], overwritten with the grids, laid end to end at the sums of the counts.
        grids: float64[limit + 1 + POLISH, counts[0]], overwritten with the first grid at the start, after each round
            and after each sweep; or empty.

    Returns:
        how many levels each grid has, and how many of the first grid's ``grids`` come from the start and the rounds,
        and from sweeps.
    """
    sizes = counts.copy()
    points, areas, came = _starts(table, zeros, size, counts, mirrored)
    rounds, sweeps = 0, 0
    start = 0
    for c in range(counts.size):
        if size:
            sizes[c] = min(counts[c], points.size)
            chosen = np.empty(sizes[c], np.int64)
            if sizes[c] <= came.shape[0]:
                trace(came, chosen)
            else:
                choose(points, areas, mirrored, chosen)
            for j in range(sizes[c]):
                levels[start + j] = points[chosen[j]]
        own = levels[start : start + sizes[c]]
        record = grids[: grids.shape[0] if c == 0 else 0, : own.size]
        most = 0 if own.size == (1 if mirrored else 2) else limit
        if record.size:
            _copy(own, record[0])
        done = 1 + _narrow(table, zeros, own, mirrored, most, record[1:])
        swept = _polish(table, zeros, own, mirrored, min(most, POLISH), record[done:])
        if c == 0:
            rounds, sweeps = done, swept
        sizes[c] = distinct_levels(own, mirrored)
        start += counts[c]
    return sizes, rounds, sweeps


@jit
def fit_bins(
    lower: Floats,
    upper: Floats,
    sums: Floats,
    starts: Ints,
    first: int,
    zeros: Floats,
    totals: Floats,
    size: int,
    counts: Ints,
    mirrored: bool,
    limit: int,
    levels: Floats,
    sizes: Ints,
) -> None:
    """:func:`fit_sets` of several sketches.

    Args:
        lower, upper, sums: bins of all sketches, end to end.
        starts: int64[sketches + 1], where those of each begin.
        first, zeros, totals: see :func:`tabulate`; float64[sketches].
        size, counts, mirrored, limit: as for :func:`fit_sets`.
        levels: float64[sketches, sum of counts], overwritten: the sets of each sketch end to end, as far as they have
            levels.
        sizes: int64[sketches, c], overwritten: how many levels each set has; 0 for a sketch without weight, or of
            perhaps no more single values than levels, whose fit is another.
    """
    none = np.empty((0, 0))
    for t in range(sizes.shape[0]):
        a, b, held = starts[t], starts[t + 1], 0
        for k in range(a, b):
            held += sums[k, first] > 0.0
        sizes[t] = 0
        if not held:
            continue
        table = np.empty((b - a, COLUMNS))
        single = tabulate(lower[a:b], upper[a:b], sums[a:b], first, zeros[t], totals[t], table)
        if not single or held > counts.max():
            sizes[t] = fit_sets(table, zeros[t] / totals[t], size, counts, mirrored, limit, levels[t], none)[0]
