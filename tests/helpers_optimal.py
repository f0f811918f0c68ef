"""Plain twins of the optimal-levels solver, written for clarity, and the data they are compared on."""

import numpy as np


def naive_objective(values, levels, weights=None):
    """Sum of w (b - x)(x - a), one value at a time, in extended precision."""
    x = np.asarray(values, np.longdouble).reshape(-1)
    w = np.ones(x.size, np.longdouble) if weights is None else np.asarray(weights, np.longdouble)
    grid = np.asarray(levels, np.longdouble)
    if grid.size == 1:
        assert (x == grid[0]).all()
        return 0.0
    k = np.clip(np.searchsorted(grid, x, side="right") - 1, 0, grid.size - 2)
    assert grid[0] <= x.min()
    assert x.max() <= grid[-1]
    return float(np.sum(w * (grid[k + 1] - x) * (x - grid[k])))


def collapse(values, weights, lo, hi):
    """Distinct candidates with both ends, and the summed weight at each."""
    x = np.asarray(values, np.float64).reshape(-1)
    w = np.ones(x.size) if weights is None else np.asarray(weights, np.float64)
    ends = [x.min() if lo is None else lo, x.max() if hi is None else hi]
    points = np.unique(np.concatenate([x, ends]))
    return points, np.bincount(np.searchsorted(points, x), w, points.size)


def quadratic_optimum(values, s, weights=None, lo=None, hi=None, candidates=None):
    """Least objective of at most s levels, by the O(s n^2) recursion over all intervals.

    Costs are sums of terms >= 0, so they are exact to rounding whatever the values' offset and range.
    """
    points, mass = collapse(values, weights, lo, hi)
    places = points if candidates is None else np.asarray(candidates, np.float64)
    n = places.size
    cost = np.zeros((n, n))
    for a in range(n):
        inside = (points > places[a]) & (points < places[-1])
        x, w = points[inside], mass[inside]
        ahead = np.maximum(places[a:, None] - x, 0.0)
        cost[a, a:] = ahead @ (w * (x - places[a]))
    best = cost[0].copy()
    for _ in range(s - 2):
        step = best.copy()
        for b in range(1, n):
            step[b] = min(step[b], np.min(best[:b] + cost[:b, b]))
        best = step
    return float(best[-1])


def monotone_optimum(values, s, weights=None, lo=None, hi=None):
    """Least objective of at most s levels, by divide and conquer over the monotone best predecessor.

    Sums are 80-bit and anchored at the median, so that their differences keep enough digits.
    """
    points, mass = collapse(values, weights, lo, hi)
    n = points.size
    x = (points - points[n // 2]).astype(np.longdouble)
    w = mass.astype(np.longdouble)

    def anchored(terms):
        sums = np.concatenate([[0], np.cumsum(terms)])
        return sums - sums[n // 2]

    m0, m1, m2 = anchored(w), anchored(w * x), anchored(w * x * x)

    def cost(a, b):
        i, j = np.minimum(a + 1, b), b
        return (x[a] + x[b]) * (m1[j] - m1[i]) - (m2[j] - m2[i]) - x[a] * x[b] * (m0[j] - m0[i])

    best = cost(np.zeros(n, np.int64), np.arange(n))
    for _ in range(s - 2):
        best = _monotone_layer(best, cost, n)
    return float(best[-1])


def _monotone_layer(best, cost, n):
    out = best.copy()
    # ranges of targets still to do, each with the range that its best predecessors lie in
    first, last = np.array([1]), np.array([n - 1])
    low, high = np.array([0]), np.array([n - 1])
    while first.size:
        middle = (first + last) // 2
        stop = np.minimum(high, middle - 1)
        sizes = np.maximum(stop - low + 1, 1)
        begin = np.cumsum(sizes) - sizes
        a = np.arange(sizes.sum()) - np.repeat(begin, sizes) + np.repeat(low, sizes)
        v = best[a] + cost(a, np.repeat(middle, sizes))
        least = np.minimum.reduceat(v, begin)
        hit = np.flatnonzero(v == np.repeat(least, sizes))
        owner = np.repeat(np.arange(sizes.size), sizes)[hit]
        argmin = a[hit[np.searchsorted(owner, np.arange(sizes.size))]]
        out[middle] = np.minimum(best[middle], least)
        keep_left, keep_right = first < middle, middle < last
        first, last, low, high = (
            np.concatenate([first[keep_left], (middle + 1)[keep_right]]),
            np.concatenate([(middle - 1)[keep_left], last[keep_right]]),
            np.concatenate([low[keep_left], argmin[keep_right]]),
            np.concatenate([argmin[keep_left], high[keep_right]]),
        )
    return out


def laws(n, seed):
    """Name -> sample of size n: smooth, heavy-tailed, clustered, offset, spiked, rounded and tiny values."""
    rng = np.random.default_rng(seed)
    spiked = rng.standard_t(3, n)
    spiked[rng.random(n) < 0.7] = 0.0
    return {
        "normal": rng.normal(size=n).astype(np.float32),
        "t1": rng.standard_t(1, n).astype(np.float32),
        "t3": rng.standard_t(3, n).astype(np.float32),
        "lognormal3": rng.lognormal(0, 3, n).astype(np.float32),
        "offset": 1e6 + rng.random(n),
        "even": np.arange(n, dtype=np.float64),
        "spiked": spiked.astype(np.float32),
        "rounded": np.round(20 * rng.normal(size=n)).astype(np.float32),
        "denormal": (rng.random(n) * 1e-39).astype(np.float32),
        "clusters": np.concatenate([rng.normal(c, 1e-6, n // 4) for c in (-1e3, 0, 1, 1e6)]),
        "one giant": np.append(rng.normal(size=n - 1) * 1e-3, 1e9),
    }


#: laws whose range is too wide for the differences of prefix sums in :func:`monotone_optimum`
WIDE = ("clusters", "one giant")
