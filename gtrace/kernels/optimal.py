"""Shortest paths over cells of points: the search for optimal levels.

For a level y in cell a and the next one z in cell b, let u = right(a) - y and v = z - left(b), and take the span
between the cells, from right(a) to left(b), of width D. Its points, and then those of a and of b, cost

    C(y, z) >= COST + DOWN u + UP v + MASS u v + D mass(a) (u - k(a))_+ + D mass(b) (v - k(b))_+,

where k(a) is what lies between right(a) and the mean of the points of a, and k(b) between left(b) and the mean of those
of b. It is least where u is 0, k(a) or the width of a, and v likewise. Moving a term slope(a) (y - left(a)) from the
interval on the left of a level to the one on its right changes no path, and where slope is the derivative of the best
path that ends at y, the gap of the bound is second order in the size of the cells, and small.
A path's length is its cost plus ``penalty`` per interval; the penalty replaces a count of levels.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gtrace.kernels._jit import inline, jit
from gtrace.kernels.interval_sums import (
    CHILDREN,
    COLUMNS,
    COST,
    DOWN,
    LEFT,
    MASS,
    NODE,
    RIGHT,
    UP,
    append,
    cut,
    distinct,
    first_cells,
    halve_bins,
    inner,
    join,
    split_points,
    spread,
    store,
    sum_nodes,
    sum_points,
    total_cost,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.kernels import Flags, Floats, Ints
    from gtrace.kernels.interval_sums import Points


#: means "no path"; finite, so that sums of two still compare
NEVER = 8e307
#: first cells per level
CELLS_PER_LEVEL = 4
#: limit on the tries to hit a number of steps
_MOST_TURNS = 200
_MOST_SHARES = 64
#: beyond these magnitudes squares leave float64's range, so points and weights are scaled by a power of two
LARGE, SMALL = 1e100, 1e-100
#: the search ends when its bounds are this close
_CLOSE = 1e-12
#: two path lengths this close are equal
_SAME = 1e-14
#: most points that dynamic programming is tried with, and most points times levels
FEW, _PLACES = 1024, 1 << 15
#: what its rounding may hide of a cost: in a path of s levels half an ulp of its sums s + ``_ROUNDED`` times
_ROUNDED, _HALF_ULP, _LOOSE = 8, 2.0**-53, 5e-10
#: where fewer points may come before one, this many are tried: the processor then guesses right how many there are
_NEAR = 6
#: an interval's parts, see :func:`exact_lengths`
TILT, AHEAD = range(2)
#: what :func:`bound_lengths` needs of a cell
ENDS, WIDE, KINK, RISE, FALL, INSIDE = range(6)
ONE = np.uintp(1)


class Ordered(NamedTuple):
    """Sorted points between two end levels.

    Attributes:
        x: the points.
        w: their weights, or empty.
        nodes: float64[ceil(n / NODE), 6], see :func:`~gtrace.kernels.interval_sums.sum_nodes`.
        weight: float64[nodes], see :func:`~gtrace.kernels.interval_sums.spread`.
        low, high: the end levels.
    """

    x: Points
    w: Floats
    nodes: Floats
    weight: Floats
    low: float
    high: float


class Cells(NamedTuple):
    """Cells of points, and those that can hold a level.

    Attributes:
        spans: float64[k, 6].
        first: int64[k + 1], the first point of each cell, then the number of points.
        live: int64[r], ascending numbers of the cells that can hold a level; the first and last are the ends.
        low: int64[r], lowest rank that may precede each live cell.
        high: int64[r], highest one.
    """

    spans: Floats
    first: Ints
    live: Ints
    low: Ints
    high: Ints


class Intervals(NamedTuple):
    """Intervals between live cells, by rank; entry start[r] + t is the one from rank high[r] - t to rank r.

    Attributes:
        high: int64[r], highest rank that may precede each live cell.
        start: int64[r], where the row of each one starts in ``table``.
        count: int64[r], the lengths of the rows.
        table: float64[entries], their costs.
    """

    high: Ints
    start: Ints
    count: Ints
    table: Floats


@inline
def path_cost(cells: Floats, path: Ints) -> float:
    """The objective with the levels at the left ends of the cells in ``path``."""
    total = 0.0
    for t in range(1, path.size):
        right = cells[path[t], LEFT]
        left, mass, up, down, cost = right, 0.0, 0.0, 0.0, 0.0
        for c in range(path[t] - 1, path[t - 1] - 1, -1):
            left, mass, up, down, cost = join(right, left, mass, up, down, cost, cells, np.uintp(c))
        total += cost
    return total


@inline
def exact_lengths(own: Cells, limit: float) -> tuple[Intervals, Floats]:
    """Costs between the left ends of live cells; intervals above ``limit`` are left out, and all longer ones with them.

    The cells between a level and the nearest one that may precede it move on with the rows. Their span is put together
    of two: from any cell up to some middle one, and from there on.

    Returns:
        the intervals, and float64[2, entries], UP and DOWN of the span between the two cells of each.
    """
    cells, _, live, low, high = own
    start = np.empty(live.size, np.int64)
    entries = 0
    for r in range(live.size):
        start[r] = entries
        entries += high[r] - low[r] + 1
    table, parts, count = np.empty(entries), np.empty((2, entries)), np.empty(live.size, np.int64)
    count[0] = 0
    ahead = np.empty((cells.shape[0], COLUMNS))
    first = middle = end = -1
    m_left = m_mass = m_up = m_down = m_cost = 0.0
    for r in range(1, live.size):
        b, begin = live[r], live[high[r]] + 1
        right = cells[b, LEFT]
        if first <= begin <= middle:
            for k in range(end, b):
                m_mass, m_up, m_down, m_cost = append(
                    cells[k + 1, LEFT], m_left, m_mass, m_up, m_down, m_cost, cells, np.uintp(k)
                )
        else:
            m_left, m_mass, m_up, m_down, m_cost = right, 0.0, 0.0, 0.0, 0.0
            for k in range(b - 1, begin - 1, -1):
                m_left, m_mass, m_up, m_down, m_cost = join(
                    right, m_left, m_mass, m_up, m_down, m_cost, cells, np.uintp(k)
                )
                store(ahead[k], m_left, right, m_mass, m_up, m_down, m_cost)
            first, middle = begin, b
            m_left, m_mass, m_up, m_down, m_cost = right, 0.0, 0.0, 0.0, 0.0
        end = b
        left, mass, up, down, cost = m_left, m_mass, m_up, m_down, m_cost
        if begin < middle:
            left, mass, up, down, cost = join(right, left, mass, up, down, cost, ahead, np.uintp(begin))
        # Unsigned places spare the check for negative ones.
        q, last, entry = np.uintp(high[r]), np.uintp(low[r]), np.uintp(start[r])
        c = np.uintp(live[q])
        while True:
            gap = left - cells[c, RIGHT]
            if cost + gap * down > limit:
                break
            parts[TILT, entry], parts[AHEAD, entry] = up + gap * mass, down
            left, mass, up, down, cost = join(right, left, mass, up, down, cost, cells, c)
            table[entry] = cost
            entry += ONE
            if q == last:
                break
            q -= ONE
            c -= ONE
            while c != np.uintp(live[q]):
                left, mass, up, down, cost = join(right, left, mass, up, down, cost, cells, c)
                c -= ONE
        count[r] = np.int64(entry) - start[r]
    return Intervals(high, start, count, table), parts


@inline
def shortest_path(rows: Intervals, penalty: float, value: Floats, back: Ints) -> tuple[Ints, float]:
    """The ranks on the path of least cost + penalty * intervals, and its cost alone.

    ``value`` and ``back`` get the least cost of a path to each rank, prices included, and the rank before it.
    """
    high, start, count, table = rows
    n = high.size
    steps = np.zeros(n, np.int64)
    value[0], back[0] = 0.0, 0
    for r in range(1, n):
        best, top, t_best = NEVER, high[r], -1
        q, entry = np.uintp(top), np.uintp(start[r])
        for t in range(count[r]):
            v = value[q] + table[entry]
            t_best = t if v < best else t_best
            best = min(v, best)
            q -= ONE
            entry += ONE
        if t_best < 0:
            value[r], back[r] = NEVER, top
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


@inline
def slopes_of(cells: Floats, live: Ints, rows: Intervals, tilts: Floats, value: Floats, back: Ints) -> Floats:
    """The derivative, by its last level, of what the best path to each live cell costs: float64[r].

    The level before the last one is where a parabola through three left ends has its least value: the ends alone are
    too far apart.
    """
    high, start, count, table = rows
    slope = np.zeros(live.size)
    for r in range(1, live.size):
        if value[r] >= NEVER:
            continue
        q, nth = back[r], high[r] - back[r]
        entry = start[r] + nth
        slope[r] = tilts[entry]
        if not 0 < nth < count[r] - 1:
            continue
        x0, x1, x2 = cells[live[q - 1], LEFT], cells[live[q], LEFT], cells[live[q + 1], LEFT]
        f0, f1, f2 = value[q - 1] + table[entry + 1], value[q] + table[entry], value[q + 1] + table[entry - 1]
        fall, rise = (f1 - f0) / (x1 - x0), (f2 - f1) / (x2 - x1)
        if f0 < NEVER and f2 < NEVER and rise > fall:
            y = min(max(x1 - 0.5 * (fall * (x2 - x1) + rise * (x1 - x0)) / (rise - fall), x0), x2)
            here = cells[live[q], RIGHT]
            side = 1 if y > here else -1
            part = (y - here) / (cells[live[q + side], RIGHT] - here)
            slope[r] += (tilts[entry - side] - tilts[entry]) * part
    return slope


@inline
def bound_lengths(
    lefts: Floats, about: Floats, rows: Intervals, parts: Floats, slope: Floats, penalty: float, forward: Floats
) -> None:
    """Lower bounds for any two points of two live cells; they replace what :func:`exact_lengths` found.

    Args:
        lefts: float64[r], left ends of the cells.
        about: float64[6, r], see ENDS: right ends, widths, what lies between the right end and the mean of the points,
            UP, DOWN and COST.
        rows, parts: from there; the table is overwritten.
        slope: float64[r]; times the width of a cell it must not exceed ``penalty``: then a second level inside one cell
            never lowers a bound.
        penalty: price of a level.
        forward: float64[r], overwritten with the shortest bound from the first cell to each one.
    """
    high, start, count, table = rows
    ends, widths, kinks = about[ENDS], about[WIDE], about[KINK]
    rises, falls, costs = about[RISE], about[FALL], about[INSIDE]
    tilts, aheads = parts[TILT], parts[AHEAD]
    forward[0] = 0.0
    for r in range(1, high.size):
        own, width, left, fall = slope[r], widths[r], lefts[r], falls[r]
        kink = width - kinks[r]
        first, q = start[r], high[r]
        for t in range(count[r]):
            i, j = np.uintp(first + t), np.uintp(q - t)
            gap, wide, near = left - ends[j], widths[j], kinks[j]
            tilt, ahead = tilts[i] - own, aheads[i] - slope[j]
            # what lies in between is the whole without the cell that it leaves
            least = table[i] - (aheads[i] * wide + gap * rises[j] + costs[j])
            mass = (tilts[i] + aheads[i]) / gap
            # the level in the later cell at its mean, and at its right end
            middle, far = tilt * kink, tilt * width + gap * fall
            none = min(0.0, middle, far)
            some = min(0.0, middle + mass * near * kink, far + mass * near * width)
            whole = min(0.0, middle + mass * wide * kink, far + mass * wide * width)
            v = min(none, ahead * near + some, ahead * wide + gap * rises[j] + whole)
            table[i] = least + slope[j] * wide + penalty + v
        best = NEVER
        for t in range(count[r]):
            best = min(best, table[np.uintp(first + t)] + forward[np.uintp(q - t)])
        forward[r] = best


@inline
def prune(rows: Intervals, forward: Floats, limit: float, backward: Floats, low_kept: Ints, high_kept: Ints) -> None:
    """Shortest bounds from each live cell to the last one, and the intervals on paths within ``limit``.

    ``low_kept`` and ``high_kept`` get the range of ranks from which such an interval leads to each cell.
    """
    high, start, count, table = rows
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
        lowest, highest = n, 0
        a, entry = np.uintp(high[r]), np.uintp(start[r])
        for _ in range(count[r]):
            v = rest + table[entry]
            backward[a] = min(backward[a], v)
            if v + forward[a] <= loose:
                lowest = np.int64(a)
                highest = max(highest, lowest)
            a -= ONE
            entry += ONE
        low_kept[r], high_kept[r] = lowest, highest


@inline
def bound_paths(
    own: Cells, rows: Intervals, slope: Floats, parts: Floats, penalty: float, limit: float
) -> tuple[float, bool, Flags, Flags, Ints, Ints]:
    """A lower bound on all paths through points of the live cells, and the cells on paths within ``limit``.

    Takes what :func:`exact_lengths` returned, and overwrites the table and ``slope``.

    Returns:
        the shortest bound, whether a kept cell is wider than one value, keep and again as :func:`refine` takes them,
        low_kept and high_kept as :func:`prune` gives them.
    """
    cells, live = own.spans, own.live
    n = live.size
    lefts, about = np.empty(n), np.empty((6, n))
    width = about[WIDE]
    for r in range(n):
        c = live[r]
        lefts[r], about[ENDS, r] = cells[c, LEFT], cells[c, RIGHT]
        width[r] = cells[c, RIGHT] - cells[c, LEFT]
        about[KINK, r] = min(cells[c, DOWN] / cells[c, MASS], width[r]) if width[r] > 0.0 else 0.0
        about[RISE, r], about[FALL, r], about[INSIDE, r] = cells[c, UP], cells[c, DOWN], cells[c, COST]
        if width[r] > 0.0:
            slope[r] = min(slope[r], penalty / width[r])
    forward, backward = np.empty(n), np.empty(n)
    bound_lengths(lefts, about, rows, parts, slope, penalty, forward)
    low_kept, high_kept = np.empty(n, np.int64), np.empty(n, np.int64)
    prune(rows, forward, limit, backward, low_kept, high_kept)
    keep, again = np.empty(n, np.bool_), np.empty(n, np.bool_)
    wide = False
    for r in range(n):
        bound = forward[r] + backward[r]
        keep[r] = bound <= limit
        again[r] = bound + penalty - slope[r] * width[r] <= limit
        wide |= keep[r] and width[r] != 0.0
    return forward[n - 1], wide, keep, again, low_kept, high_kept


@inline
def refine(points: Ordered, old: Cells, keep: Flags, again: Flags, low: Ints, high: Ints) -> Cells:
    """Split the kept cells into up to CHILDREN each, and merge the cells between them.

    Args:
        points: the points.
        old: cells.
        keep: bool[r], which live cells remain.
        again: bool[r], cells that may hold two levels.
        low: int64[r], ranks of kept cells: the lowest that may precede each one.
        high: int64[r], the highest one.
    """
    x, w, nodes = points.x, points.w, points.nodes
    cells, first, live = old.spans, old.first, old.live
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
                right = cells[c, RIGHT]
                own = cells[c, LEFT], cells[c, MASS], cells[c, UP], cells[c, DOWN], cells[c, COST]
                left, mass, up, down, cost = join(right, *own, new_cells, np.uintp(n - 1))
                store(new_cells[n - 1], left, right, mass, up, down, cost)
            else:
                for j in range(COLUMNS):
                    new_cells[n, j] = cells[c, j]
                new_first[n] = first[c]
                n += 1
            after_dead = True
            continue
        after_dead = False
        born[r] = m
        r += 1
        if cells[c, LEFT] == cells[c, RIGHT]:
            for j in range(COLUMNS):
                new_cells[n, j] = cells[c, j]
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
    return Cells(new_cells[:n].copy(), new_first[: n + 1].copy(), new_live[:m].copy(), new_low, new_high)


@inline
def _evenly(last: int, size: int) -> Ints:
    """At most ``size`` whole numbers from 0 to ``last``, evenly spaced and distinct."""
    out = np.empty(size, np.int64)
    step = last / (size - 1)
    count = 0
    for t in range(size):
        place = np.int64(np.rint(t * step)) if t < size - 1 else last
        if count == 0 or place > out[count - 1]:
            out[count] = place
            count += 1
    return out[:count].copy()


@inline
def _crossing(short: Ints, short_cost: float, long: Ints, long_cost: float) -> float:
    return max(0.0, (short_cost - long_cost) / (long.size - short.size))


@inline
def exchange(short: Ints, long: Ints, steps: int) -> Ints:
    """A path of ``steps`` steps, from two shortest ones of fewer and of more.

    Where an interval of one path contains one of the other, the paths can be crossed over; interval costs
    are Monge, so the two crossed paths together cost no more than the two given ones.
    """
    ahead = steps - (short.size - 1)
    at = 0
    for i in range(min(short.size, long.size - ahead)):
        if short[i] <= long[i + ahead]:
            at = i
    path = np.empty(steps + 1, np.int64)
    for i in range(path.size):
        path[i] = long[i] if i <= at + ahead else short[i - ahead]
    return path


@inline
def cheapest_path(rows: Intervals, steps: int, penalty: float, value: Floats, back: Ints) -> tuple[Ints, float]:
    """The cheapest path of this many steps (fewer where more save nothing), and a price for which it is shortest.

    The cost is convex in the number of steps, so the price where a longer and a shorter path are equally
    good either brings out a path in between or shows that all numbers in between lie on their line. ``value`` and
    ``back`` are those of the last :func:`shortest_path`.
    """
    short = long = ranks = np.empty(0, np.int64)
    short_cost = long_cost = short_price = long_price = 0.0
    for turn in range(_MOST_TURNS):
        ranks, cost = shortest_path(rows, penalty, value, back)
        taken = ranks.size - 1
        if taken == steps or (taken < steps and penalty == 0.0):
            # one more step saves at most the whole cost, so no higher price is needed; it would cost the bound digits
            return ranks, min(penalty, cost)
        if short.size and long.size and penalty == _crossing(short, short_cost, long, long_cost):
            on_line = short_cost + penalty * (short.size - 1)
            if cost + penalty * taken >= on_line * (1.0 - _SAME):
                return exchange(short, long, steps), penalty
        if taken < steps:
            short, short_cost, short_price = ranks, cost, penalty
        else:
            long, long_cost, long_price = ranks, cost, penalty
        if short.size and long.size:
            penalty = _crossing(short, short_cost, long, long_cost)
            # where the cost falls by powers of ten per step the crossings creep
            part = 0.5 if turn % 4 == 3 else (steps + 1 - short.size) / (long.size - short.size)
            guess = short_price * (long_price / short_price) ** part
            if turn % 2 and long_price < guess < short_price:
                penalty = guess
        elif turn < _MOST_TURNS // 4:
            # the cost of n steps is near c / n^2 and the price near 1 / n^3, or far steeper in heavy tails
            penalty *= (taken / steps) ** np.float64(3 * 2 ** min(turn // 2, 5))
        else:
            penalty = 0.0
    if short.size == 0:
        return ranks[_evenly(ranks.size - 1, steps + 1)], penalty
    return short, penalty


@inline
def first_points(points: Ordered, want: int) -> Ints:
    """The first point of about ``want`` cells, then the number of points; the end levels have cells of their own."""
    x, w, _, weight, low, high = points
    start, stop = inner(x, low, high)
    cuts = np.empty(2 * want, np.int64)
    share, count = 0.0, cuts.size + 1
    if stop - start > cuts.size:
        # where few points have most of the spread, lower the share until the rest is cut finely, too
        for b in range(start // NODE, (stop + NODE - 1) // NODE):
            share += weight[b]
        share /= want
        for _ in range(_MOST_SHARES):
            count, total = cut(x, w, weight, start, stop, share, cuts)
            if count >= want // 2:
                break
            share = min(share / 4.0, total / want)
    if count > cuts.size:
        cuts = np.empty(stop - start, np.int64)
        count, total = cut(x, w, weight, start, stop, share, cuts)
    first = np.empty(count + 4, np.int64)
    first[0] = 0
    first[1] = start
    for i in range(count):
        first[i + 2] = cuts[i]
    first[count + 2] = stop
    first[count + 3] = x.size
    return first


@inline
def divide(points: Ordered, want: int) -> Cells:
    """About ``want`` first cells, all live."""
    first = first_points(points, want)
    cells = np.empty((first.size - 1, COLUMNS))
    first_cells(points.x, points.w, points.nodes, first, points.low, points.high, cells)
    live = np.arange(cells.shape[0])
    return Cells(cells, first, live, np.zeros(live.size, np.int64), np.maximum(live - 1, 0))


@inline
def _note(first: Ints, path: Ints, last: int, places: Ints) -> int:
    """The points that are the levels of a path, into ``places``; returns how many."""
    for t in range(path.size):
        places[t] = min(first[path[t]], last)
    return path.size


@inline
def best_before(points: Floats, areas: Floats, mirrored: bool, m: int) -> NDArray[np.int32]:
    """int32[m, n]: the best point before each one, in a grid of 1 to m levels that ends there.

    See :func:`gtrace.kernels.descent.choose`. A cell costs (b - a)(B(a) + B(b)) up to a sum that telescopes. That cost
    is Monge, so the best predecessor of a point rises with the point and with the number of levels. Points far apart
    come first in each layer, then those between them: a layer takes O(n log n), and later ones less.
    """
    n = points.size
    came = np.zeros((m, n), np.int32)
    cost, following = np.full(n, np.inf), np.empty(n)
    for j in range(n if mirrored else 1):
        cost[j] = 2.0 * points[j] * areas[j] if mirrored else 0.0
    for k in range(1, m):
        following[:] = np.inf
        step = 1
        while step * k * k * 4 < n:
            step *= 2
        widest = step
        while step > 0:
            # the first pass visits every ``step``-th point from the right, each further one those in between
            stride = step if step == widest else 2 * step
            j = k - 1 + step + (n - k - step) // stride * stride
            while j >= k:
                low = max(k - 1, int(came[k - 1, j]))
                if j - step >= k and step < widest:
                    low = max(low, int(came[k, j - step]))
                high = min(j - 1, int(came[k, j + step])) if j + step < n else j - 1
                if high - low < _NEAR <= j:
                    low = min(low, j - _NEAR)
                    high = low + _NEAR - 1
                best, where, point, area = np.inf, np.uintp(k - 1), points[j], areas[j]
                # Unsigned places spare the check for negative ones.
                for i in range(np.uintp(low), np.uintp(high + 1)):
                    value = cost[i] + (point - points[i]) * (areas[i] + area)
                    where = i if value < best else where
                    best = min(value, best)
                following[j] = best
                came[k, j] = where
                j -= stride
            step //= 2
        cost, following = following, cost
    return came


@inline
def trace(came: NDArray[np.int32], chosen: Ints) -> None:
    """The best grid of as many levels as ``chosen`` has room for."""
    j = came.shape[1] - 1
    for k in range(chosen.size - 1, -1, -1):
        chosen[k] = j
        j = came[k, j]


@inline
def _add(total: float, lost: float, value: float) -> tuple[float, float]:
    """A sum and what rounding has lost of it so far, which the next value makes up for (Kahan)."""
    value -= lost
    after = total + value
    return after, (after - total) - value


@inline
def _layers(points: Ordered, most: int) -> tuple[NDArray[np.int32], float]:
    """:func:`best_before` among all points with the end levels, and twice its largest sum; ``most`` may be 0."""
    if not most:
        return np.empty((0, 0), np.int32), 0.0
    x, w, _, _, low, high = points
    n = x.size
    at, areas = np.empty(n + 2), np.empty(n + 2)
    at[0], at[n + 1], areas[n + 1] = low, high, 0.0
    above = above_lost = area = area_lost = 0.0
    # What lies above each point, as magnitudes crowd at 0: sums from there on would be far above what levels cost.
    for i in range(n, -1, -1):
        at[i] = np.float64(x[i - 1]) if i else low
        area, area_lost = _add(area, area_lost, above * (at[i + 1] - at[i]))
        areas[i] = area
        if i:
            above, above_lost = _add(above, above_lost, w[i - 1] if w.size else 1.0)
    return best_before(at, areas, False, most), 2.0 * (high - low) * area


@inline
def search(points: Ordered, s: int, per_level: int, places: Ints) -> tuple[int, float, float]:
    """The search for ``s`` levels; see :func:`search_sets`, which calls it.

    Returns:
        how many ``places`` it wrote, what the levels cost, and a bound on the cost of any levels.
    """
    intervals, last = s - 1, points.x.size - 1
    own = divide(points, per_level * s)
    path = _evenly(own.live.size - 1, s)
    upper, lower = path_cost(own.spans, path), 0.0
    found = _note(own.first, path, last, places)
    if intervals == 1:
        return found, upper, upper
    # the cost of n intervals is near c / n^2, so one more saves about 2 c / n^3
    penalty = 2.0 * upper / intervals
    while True:
        rows, parts = exact_lengths(own, upper * (1.0 + _CLOSE))
        value, back = np.empty(own.live.size), np.empty(own.live.size, np.int64)
        # better levels at the left ends of the cells, and the price that makes them come out
        if own.live.size <= intervals + 1:
            penalty = 2.0 * upper / intervals
            shortest_path(rows, penalty, value, back)
            path = np.arange(own.live.size)
        else:
            penalty = penalty if penalty != 0.0 else upper / intervals
            path, penalty = cheapest_path(rows, intervals, penalty, value, back)
        slope = slopes_of(own.spans, own.live, rows, parts[TILT], value, back)
        path = own.live[path]
        cost = path_cost(own.spans, path)
        if cost <= upper:
            upper = cost
            found = _note(own.first, path, last, places)
        total = penalty * intervals
        limit = upper * (1.0 + _CLOSE) + total
        bound, wide, keep, again, low_kept, high_kept = bound_paths(own, rows, slope, parts, penalty, limit)
        lower = max(lower, bound - total)
        # every live cell may be one value; then the bounds have met up to rounding
        if lower >= upper * (1.0 - _CLOSE) or not wide:
            return found, upper, lower
        own = refine(points, own, keep, again, low_kept, high_kept)


@jit
def search_sets(
    x: Points,
    w: Floats,
    low: float,
    high: float,
    counts: Ints,
    few: int,
    per_level: int,
    places: Ints,
    found: Ints,
    costs: Floats,
) -> None:
    """Dynamic programming over few points, and else :func:`search`, for each number of levels.

    What rounding may hide decides: with sums far above the cost, the search takes over.

    Args:
        x: sorted points, more distinct ones than levels.
        w: their weights, above 0, or empty.
        low: the first level.
        high: the last level.
        counts: int64[c], numbers of levels.
        few: most points that dynamic programming is tried with.
        per_level: first cells per level of the search.
        places: int64[sum of counts], overwritten: the points that are the levels of each set, the sets laid end to
            end. Those of the ends mean nothing.
        found: int64[c], overwritten: how many levels each set has.
        costs: float64[c, 2], overwritten: cost of the levels, and a bound on the cost of any levels.
    """
    nodes = np.empty(((x.size + NODE - 1) // NODE, COLUMNS))
    sum_nodes(x, w, nodes)
    weight = np.empty(nodes.shape[0])
    spread(x, nodes, weight)
    points, at = Ordered(x, w, nodes, weight, low, high), 0
    most = 0
    for s in counts:
        most = max(most, s) if x.size <= few and x.size * s <= _PLACES else most
    came, sums = _layers(points, most)
    levels = np.empty(most)
    for c in range(counts.size):
        s = counts[c]
        own = places[at : at + s]
        at += s
        if s <= came.shape[0]:
            trace(came, own)
            for t in range(s):
                own[t] = min(max(own[t] - 1, 0), x.size - 1)
                levels[t] = x[own[t]]
            levels[0], levels[s - 1] = low, high
            cost = total_cost(x, w, levels[:s])
            lost = (s + _ROUNDED) * _HALF_ULP * sums
            if lost <= _LOOSE * cost:
                found[c], costs[c, 0], costs[c, 1] = s, cost, cost - lost
                continue
        found[c], costs[c, 0], costs[c, 1] = search(points, s, per_level, own)


@jit
def search_bins(
    lower: Floats,
    upper: Floats,
    sums: Floats,
    starts: Ints,
    counts: Ints,
    levels: Floats,
    sizes: Ints,
) -> None:
    """Levels from 0 to 1 of several sketches, each in several numbers.

    What has no more values than levels gets its values; see :func:`gtrace.fitting.optimal.solve`.

    Args:
        lower, upper, sums: bins of all sketches, end to end.
        starts: int64[sketches + 1], where those of each begin.
        counts: int64[c], ascending numbers of levels.
        levels: float64[sketches, sum of counts], overwritten: the sets of each sketch end to end, as far as they have
            levels.
        sizes: int64[sketches, c], overwritten: how many levels each set has.
    """
    every, heavy = np.empty(counts[-1] + 1), np.empty(counts[-1] + 1)
    rest, places, found, costs = (
        np.empty_like(counts),
        np.empty(counts.sum(), np.int64),
        np.empty_like(counts),
        np.empty((counts.size, 2)),
    )
    for t in range(sizes.shape[0]):
        a, b = starts[t], starts[t + 1]
        x, w = np.empty(2 * (b - a)), np.empty(2 * (b - a))
        size = halve_bins(lower[a:b], upper[a:b], sums[a:b], 0.0, 1.0, x, w)
        all_values = distinct(x[:size], 0.0, 1.0, every)
        kept, most = 0, 0.0
        for i in range(size):
            if w[i] > 0.0:
                x[kept], w[kept] = x[i], w[i]
                most = max(most, w[i])
                kept += 1
        heavy_values = distinct(x[:kept], 0.0, 1.0, heavy)
        if not SMALL < most < LARGE:
            exponent = math.frexp(most)[1]
            for i in range(kept):
                w[i] = math.ldexp(w[i], -exponent)
        left, at = 0, 0
        for c in range(counts.size):
            sizes[t, c] = all_values if all_values <= counts[c] else heavy_values
            if sizes[t, c] <= counts[c]:
                values = every if all_values <= counts[c] else heavy
                levels[t, at : at + sizes[t, c]] = values[: sizes[t, c]]
            else:
                rest[left] = counts[c]
                left += 1
            at += counts[c]
        if left:
            search_sets(x[:kept], w[:kept], 0.0, 1.0, rest[:left], FEW, CELLS_PER_LEVEL, places, found, costs)
        at = from_place = taken = 0
        for c in range(counts.size):
            if sizes[t, c] > counts[c]:
                sizes[t, c] = found[taken]
                own = levels[t, at : at + sizes[t, c]]
                for k in range(own.size):
                    own[k] = x[places[from_place + k]]
                own[0], own[own.size - 1] = 0.0, 1.0
                from_place += counts[c]
                taken += 1
            at += counts[c]
