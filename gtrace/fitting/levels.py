"""Levels that minimize the expected variance of stochastic rounding under a law: free levels (ALQ), powers (AMQ)."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Literal, TypeAlias, overload

import numpy as np

from gtrace.buckets import as_levels
from gtrace.distributions import TruncatedNormalMixture
from gtrace.errors import UsageError, suggest
from gtrace.fitting.laws import Law, LawLike, MixtureLaw, SketchLaw, as_law, check_law, sketch_points, total_weight
from gtrace.kernels import descent as _descent
from gtrace.sketch import MomentSketch, SketchSet

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import ArrayLike

    from gtrace.kernels import Floats, Ints

#: grids by name; "global" is the best grid among candidate points, found by dynamic programming
STARTS = ("uniform", "exponential", "companding", "global")


def magnitude_count(bits: int) -> int:
    """Number of magnitudes that a symbol of ``bits`` bits can name besides its sign: 2^(bits - 1).

    Raises:
        UsageError: bits that are not an integer from 2 to 12.
    """
    if bits not in range(2, 13):
        raise UsageError(f"bits: {bits} is not an integer from 2 to 12")
    return 1 << (int(bits) - 1)


def uniform_grid(count: int, zero: bool) -> Floats:
    """Evenly spaced magnitudes up to 1: from 0, or the positive half of an even number of signed levels."""
    if zero:
        return np.linspace(0.0, 1.0, count)
    return np.arange(1, 2 * count, 2) / (2.0 * count - 1.0)


def exponential_grid(count: int, zero: bool, multiplier: float = 0.5) -> Floats:
    """Powers of ``multiplier`` up to 1, after 0 if that is a level; ``count`` magnitudes in all."""
    powers = multiplier ** np.arange(count - (2 if zero else 1), -1.0, -1.0)
    return np.concatenate(([0.0], powers)) if zero else powers


def named_grid(law: Law, name: str, count: int, mirrored: bool) -> Floats:
    """One of :data:`STARTS` with ``count`` levels; fewer if the law has fewer candidates.

    Raises:
        UsageError: unknown name.
    """
    if name in ("uniform", "exponential"):
        make = uniform_grid if name == "uniform" else exponential_grid
        if mirrored:
            return make(count, False)
        low, high = law.support
        half = make(count // 2, False)
        unit = make(count, True) if low >= 0 else 0.5 + 0.5 * np.concatenate((-half[::-1], half))
        return low + (high - low) * unit
    if name == "companding":
        # A mirrored grid without 0 is the positive half of one with twice as many levels.
        ranks = np.arange(count, dtype=np.float64)
        shares = (2.0 * ranks + 1.0) / (2.0 * count - 1.0) if mirrored else ranks / (count - 1.0)
        return law.companding(np.asarray(shares, dtype=np.float64))
    if name == "global":
        points = law.candidates(count)
        areas = law.areas(points)
        if mirrored:
            points, areas = points[points > 0], areas[points > 0]
        chosen = np.empty(min(count, points.size), np.int64)
        _descent.choose(points, areas, mirrored, chosen)
        return points[chosen]
    raise UsageError(f"start: '{name}' is unknown; {suggest(name, STARTS)}")


def expected_variance(law: LawLike, levels: ArrayLike, zero: bool | None = True, weighted: bool = True) -> float:
    """E (b - r)(r - a), with a and b the levels around r: the variance of stochastic rounding, in units of r squared.

    Args:
        law: a sketch of the values, or a mixture; either is normalized to weight 1.
        levels: ascending magnitudes up to the largest value of the law. With ``zero=None`` signed levels
            over the whole support of a mixture.
        zero: whether 0 is a level. If not, the grid is mirrored at 0, and below the first level l the variance
            is l^2 - r^2, for exact zeros too.
        weighted: weight the values of a sketch by the squared norms of their buckets. With norm l2 and no tail, the
            result times the number of values per bucket is the error relative to the squared norm of
            the gradient. A mixture has weights of its own.

    Returns:
        the mean; 0 for a sketch without any weight.

    Raises:
        UsageError: levels that are not ascending magnitudes, do not fit ``zero`` or do not cover the law.
    """
    symmetric = zero is not None
    check_law(law, symmetric=symmetric)
    if isinstance(law, MomentSketch):
        # What is in the last bin is at least its lower edge.
        low, high = 0.0, float(law.lower[-1]) if law.rows.size else 0.0
    else:
        low, high = law.support
    if symmetric:
        grid = as_levels(levels, zero=bool(zero))
        low, high = 0.0, max(high, -low)
    else:
        grid = np.asarray(levels, dtype=np.float64).reshape(-1)
        if grid.size < 2 or not np.isfinite(grid).all() or (np.diff(grid) <= 0).any():
            raise UsageError("levels: give at least two ascending finite numbers")
    covered = grid[-1] >= high and (symmetric or grid[0] <= low)
    if not covered:
        raise UsageError(f"levels: {grid[0]:g} to {grid[-1]:g} do not cover the law's support")
    if isinstance(law, MomentSketch):
        total = total_weight(law, weighted=weighted)
        error, plain, _, _ = law.expect(grid, zero=bool(zero))
        return ((error - law.clip_error) if weighted else plain) / total if total > 0 else 0.0
    return MixtureLaw(law, symmetric=symmetric).gradient(grid, symmetric and not zero)[0]


# A grid of a mixture has settled when no level moves by more than this part of the gap to its nearest neighbour.
_SETTLED = 1e-13
# Newton's next step would be about the square of this.
_NEWTON_SETTLED = 1e-9
_WARM_UP = 3
_HALVINGS = 8
# Limits of rounding errors of an objective: relative, and in units of the last free level.
_RISE, _NOISE = 1e-13, 1e-15


def optimize(law: Law, levels: Floats, mirrored: bool, limit: int) -> tuple[Floats, list[float]]:
    """Newton's steps if the law is smooth; otherwise dynamic programming in narrowing windows, and a few sweeps."""
    if isinstance(law, SketchLaw):
        return law.optimize(levels, mirrored, limit)
    if law.smooth:
        return _newton(law, levels, mirrored, limit)
    levels, objectives = _narrow(law, levels, mirrored, limit)
    levels, polished = coordinate_descent(law, levels, mirrored, min(limit, _descent.POLISH))
    return levels, objectives + polished[1:]


def coordinate_descent(law: Law, levels: Floats, mirrored: bool, limit: int) -> tuple[Floats, list[float]]:
    """Move each level in turn to its best place between its neighbors, in at most ``limit`` sweeps."""
    levels = levels.copy()
    objectives = [law.gradient(levels, mirrored)[0]]
    settled = _SETTLED if isinstance(law, MixtureLaw) else _descent.SETTLED
    for _ in range(limit):
        before = levels.copy()
        law.sweep(levels, mirrored)
        objectives.append(law.gradient(levels, mirrored)[0])
        if _descent.largest_move(before, levels, mirrored) <= settled:
            break
    return levels, objectives


def gradient_descent(law: Law, levels: Floats, mirrored: bool, limit: int) -> tuple[Floats, list[float]]:
    """Move all levels at once along the gradient, none by more than half the gap to its nearest neighbor.

    The paper does not give the rate. One rate for all levels would be slow: gradients differ by orders of magnitude.
    So each level has its own, which grows while the sign of its gradient stays and halves when it changes. The error
    may rise for some steps; then the descent continues from the best grid so far, at lower rates.
    """
    if isinstance(law, SketchLaw):
        return law.descend(levels, mirrored, limit)
    objective, slopes = law.gradient(levels, mirrored)
    objectives, best = [objective], (objective, levels, slopes)
    rates, since = np.ones(slopes.size), 0
    free = slice(0 if mirrored else 1, -1)
    for _ in range(limit):
        gaps = _gaps(levels, mirrored)
        most = _descent.HALF_GAP * np.minimum(gaps[:-1], gaps[1:])
        before, old = levels, slopes
        levels = levels.copy()
        levels[free] -= np.sign(old) * np.minimum(rates * np.abs(old), most)
        objective, slopes = law.gradient(levels, mirrored)
        objectives.append(objective)
        if _descent.largest_move(before, levels, mirrored) <= _descent.SETTLED:
            break
        turned = np.sign(slopes) * np.sign(old)
        rates *= np.where(turned > 0, _descent.FASTER, np.where(turned < 0, 0.5, 1.0))
        np.minimum(rates, _descent.FASTEST, out=rates)
        since += 1
        if objective < best[0]:
            best, since = (objective, levels, slopes), 0
        elif since == _descent.PATIENCE:
            _, levels, slopes = best
            rates, since = rates * _descent.SLOWER, 0
    if objective > best[0]:
        levels = best[1]
        objectives.append(best[0])
    return levels, objectives


def _newton(law: MixtureLaw, levels: Floats, mirrored: bool, limit: int) -> tuple[Floats, list[float]]:
    """Newton's steps after a few sweeps; a sweep instead of a step that would not lower the error."""
    objective = law.gradient(levels, mirrored)[0]
    objectives = [objective]
    for step in range(limit):
        before = levels
        trial = _newton_step(law, levels, mirrored) if step >= _WARM_UP else None
        if trial is None:
            levels = levels.copy()
            law.sweep(levels, mirrored)
        else:
            levels = trial
        objectives.append(law.gradient(levels, mirrored)[0])
        if _descent.largest_move(before, levels, mirrored) <= _NEWTON_SETTLED:
            break
    return levels, objectives


def _newton_step(law: MixtureLaw, levels: Floats, mirrored: bool) -> Floats | None:
    objective, slopes = law.gradient(levels, mirrored)
    step = -slopes
    diagonal, coupling = law.curvature(levels, mirrored)
    if not _descent.solve_tridiagonal(diagonal, coupling, step) or not np.isfinite(step).all():
        return None
    full = np.zeros(levels.size)
    full[0 if mirrored else 1 : -1] = step
    slack = _RISE * objective + _NOISE * float(np.abs(levels[-2]))
    for halving in range(_HALVINGS):
        trial = levels + 0.5**halving * full
        ascending = bool((_gaps(trial, mirrored) > 0).all())
        if ascending and law.gradient(trial, mirrored)[0] <= objective + slack:
            return trial
    return None


def _narrow(law: Law, levels: Floats, mirrored: bool, limit: int) -> tuple[Floats, list[float]]:
    """Repeat dynamic programming over a few points around each level, closer each time.

    It needs no derivatives, which a law of single values does not have, and moves all levels together, unlike
    coordinate descent.
    """
    grids = [levels]
    points = np.empty((levels.size, _descent.WINDOW.size))
    scale = _descent.WIDEST
    for _ in range(limit):
        _descent.windows(levels, mirrored, scale * _descent.WINDOW, points)
        areas = law.areas(points.reshape(-1)).reshape(points.shape)
        levels = levels.copy()
        at_the_rim = _descent.choose_near(points, areas, mirrored, levels)
        grids.append(levels)
        if not at_the_rim:
            scale *= 0.5
        if scale < _descent.NARROWEST:
            break
    return levels, law.objectives(np.stack(grids), mirrored).tolist()


def _gaps(levels: Floats, mirrored: bool) -> Floats:
    """Gaps between neighbors; for a mirrored grid also that of the first level to 0."""
    return np.diff(levels, prepend=0.0) if mirrored else np.diff(levels)


Method: TypeAlias = Literal["newton", "cd", "gd"]
METHODS: tuple[Method, ...] = ("newton", "cd", "gd")

#: default limits of sweeps and steps of each method
LIMITS: dict[Method, int] = {"newton": 60, "cd": 3000, "gd": 3000}
_DESCENTS = {"newton": optimize, "cd": coordinate_descent, "gd": gradient_descent}


@overload
def alq_levels(
    law: LawLike,
    bits: int,
    zero: bool | None = True,
    weighted: bool = True,
    method: Method = "newton",
    start: str | ArrayLike | None = None,
    history: Literal[False] = False,
    *,
    sweeps: int | None = None,
) -> Floats: ...
@overload
def alq_levels(
    law: LawLike,
    bits: int,
    zero: bool | None = True,
    weighted: bool = True,
    method: Method = "newton",
    start: str | ArrayLike | None = None,
    *,
    history: Literal[True],
    sweeps: int | None = None,
) -> tuple[Floats, Floats]: ...
def alq_levels(
    law: LawLike,
    bits: int,
    zero: bool | None = True,
    weighted: bool = True,
    method: Method = "newton",
    start: str | ArrayLike | None = None,
    history: bool = False,
    *,
    sweeps: int | None = None,
) -> Floats | tuple[Floats, Floats]:
    """Fit 2^(bits - 1) magnitudes to a law of r.

    The objective is :func:`~gtrace.fitting.expected_variance`. It is not convex. ``newton`` searches its minimum: it
    starts from the best grid among some hundreds of candidates, found by dynamic programming, and continues by
    tridiagonal Newton steps on a mixture (once more from the companding grid, keeping the better result), by
    dynamic programming in ever narrower windows on a sketch, whose law has no derivatives. ``cd`` is the
    paper's coordinate descent (Eq. 5) and ``gd`` its descent along the gradient without projection (Eq. 7); both
    end in a minimum near their start, ``cd`` after tens of sweeps at 3 bits and hundreds at 5.

    Args:
        law: a sketch of the values, or a mixture.
        bits: 2 to 12, the sign included.
        zero: whether 0 is a level. If not, the grid is mirrored, and values below the first level are
            rounded to plus or minus that level, exact zeros too. None fits all 2^bits signed levels between
            the ends of the support of a mixture, without constraints on 0 and symmetry.
        weighted: weight the values of a sketch by the squared norms of their buckets, like the error of the whole
            gradient does. The components of a mixture have their weights already.
        method: "newton", "cd" or "gd".
        start: "uniform", "exponential" (halves), "companding", "global", or your own levels. By default those
            named above for newton, else "uniform".
        history: also return the objective: at the start, then after each sweep or step.
        sweeps: stop after this many sweeps or steps; by default when the levels have settled.

    Returns:
        the levels, float64, ascending, the last one 1 and the first 0 exactly with ``zero``; with ``history`` the
        pair (levels, float64 objectives). They are distinct in float32 too. There are fewer levels
        if the law has fewer values: then each value is a level. A law without any weight
        keeps its start.

    Raises:
        UsageError: an unknown law, method or start, or bits out of range.
    """
    if method not in METHODS:
        raise UsageError(f"method: '{method}' is unknown; {suggest(str(method), METHODS)}")
    if sweeps is not None and sweeps < 0:
        raise UsageError(f"sweeps: {sweeps} is negative")
    plain = method == "newton" and start is None and sweeps is None and not history
    if isinstance(law, MomentSketch) and zero is not None and plain:
        levels, sizes = alq_level_sets(law.alone, (bits,), zero, weighted)[0]
        return levels[0, : sizes[0]].copy()
    mirrored = zero is not None and not zero
    count = magnitude_count(bits) * (2 if zero is None else 1)
    prepared = as_law(law, weighted=weighted, symmetric=zero is not None)
    given = start if start is None or isinstance(start, str) else _own_grid(start, count, law, zero)
    limit = LIMITS[method] if sweeps is None else sweeps
    if prepared is not None:
        levels, objectives = _fit(prepared, count, mirrored, method, given, limit)
        # Payloads hold float32, which cannot distinguish some levels from their neighbors.
        levels = levels[: _descent.distinct_levels(levels, mirrored)]
    else:
        levels = given if isinstance(given, np.ndarray) else uniform_grid(count, not mirrored)
        objectives = np.zeros(1)
    return (levels, objectives) if history else levels


def alq_level_sets(
    sketches: SketchSet, bits: Iterable[int], zero: bool = True, weighted: bool = True
) -> list[tuple[Floats, Ints]]:
    """:func:`alq_levels` of several sketches, each for several numbers of bits, which the set remembers.

    Args:
        sketches: of the values.
        bits: each 2 to 12, the sign included.
        zero: as for :func:`alq_levels`.
        weighted: as for :func:`alq_levels`.

    Returns:
        for each number of bits float64[sketches, 2^(bits - 1)], ascending levels, and int64[sketches], how many of
        them there are. What follows them means nothing.

    Raises:
        UsageError: as for :func:`alq_levels`.
    """
    column = 1 if weighted else 0

    def fit(missing: list[tuple[str, int, bool, bool]]) -> list[tuple[Floats, Ints]]:
        wanted, bins = sorted({each for _, each, _, _ in missing}), sketches.bins()
        totals, zeros = sketches.totals[column], bins.numbers[:, column].copy()
        found: dict[int, tuple[Floats, Ints]] = {}
        for size, group in groupby(wanted, lambda each: sketch_points(magnitude_count(each))):
            own = [*group]
            counts = np.array([*map(magnitude_count, own)])
            levels, sizes = np.zeros((len(sketches), counts.sum())), np.empty((len(sketches), counts.size), np.int64)
            bounds, limit = sketches.starts, LIMITS["newton"]
            _descent.fit_bins(
                *bins[:3], bounds, 3 * column, zeros, totals, size, counts, not zero, limit, levels, sizes
            )
            sets = np.split(levels, np.cumsum(counts)[:-1], axis=1)
            for place, k in np.argwhere(sizes == 0).tolist():
                # No weight, or values that are levels.
                grid, _ = alq_levels(sketches[place], own[k], zero, weighted, history=True)
                sets[k][place, : grid.size], sizes[place, k] = grid, grid.size
            found |= {each: (sets[k], sizes[:, k]) for k, each in enumerate(own)}
        return [found[each] for _, each, _, _ in missing]

    check_law(sketches[0])
    for each in bits:
        magnitude_count(each)
    return sketches.remember_each([("alq", each, zero, weighted) for each in bits], fit)


def _fit(
    law: Law, count: int, mirrored: bool, method: Method, start: str | Floats | None, limit: int
) -> tuple[Floats, Floats]:
    starts: tuple[str | Floats, ...]
    if start is not None:
        starts = (start,)
    elif method != "newton":
        starts = ("uniform",)
    else:
        grid = _grid_of_spikes(law, mirrored)
        if grid is not None and grid.size <= count:
            return grid, np.asarray([law.gradient(grid, mirrored)[0]])
        starts = ("global", "companding") if isinstance(law, MixtureLaw) else ("global",)
    results = []
    for choice in starts:
        grid = named_grid(law, choice, count, mirrored) if isinstance(choice, str) else choice
        # Powers beyond the range of float64, or a very narrow law, make levels coincide.
        grid = np.unique(grid[grid > 0] if mirrored else grid)
        fixed = grid.size == (1 if mirrored else 2)
        results.append(_DESCENTS[method](law, grid, mirrored, 0 if fixed else limit))
    levels, objectives = min(results, key=lambda result: result[1][-1])
    return levels, np.asarray(objectives)


def _grid_of_spikes(law: Law, mirrored: bool) -> Floats | None:
    """The values of a law of single values, and the ends of its support: a grid without error."""
    values = law.spikes()
    # Exact zeros cost a mirrored grid its first level squared, so such a law is fitted.
    if values is None or (mirrored and values[0] == 0):
        return None
    grid = np.union1d(values, np.asarray(law.support))
    return grid[grid > 0] if mirrored else grid


def _own_grid(start: ArrayLike, count: int, law: LawLike, zero: bool | None) -> Floats:
    """Check levels to start from.

    Raises:
        UsageError: another number of levels, not ascending, or other ends than the law's.
    """
    grid = np.array(start, dtype=np.float64).reshape(-1)
    low, high = law.support if isinstance(law, TruncatedNormalMixture) and zero is None else (0.0, 1.0)
    mirrored = zero is not None and not zero
    good = grid.size == count and np.isfinite(grid).all() and (np.diff(grid) > 0).all()
    if not good or grid[-1] != high or (grid[0] <= 0 if mirrored else grid[0] != low):
        first = "a first one above 0" if mirrored else f"first {low:g}"
        raise UsageError(f"start: give {count} ascending levels, {first} and last {high:g}")
    return grid


AmqMethod: TypeAlias = Literal["search", "gd"]
AMQ_METHODS: tuple[AmqMethod, ...] = ("search", "gd")

#: the multiplier if all are equally good
DEFAULT = 0.5
# Range of the search: log(p / (1 - p)) from -14 (p = 8e-7) to 9 (p = 0.99988).
_LOGITS = np.linspace(-14.0, 9.0, 300)
_CLOSER = 8
_INSIDE = np.arange(1, 10) / 10.0
_BEST = 4
_STEPS = 100
_CLOSE = 1e-15


def amq_multiplier(
    law: LawLike,
    bits: int,
    zero: bool = True,
    weighted: bool = True,
    method: AmqMethod = "search",
    *,
    start: float = DEFAULT,
    rate: float = 0.1,
    steps: int = 200,
) -> float:
    """Fit p of the 2^(bits - 1) magnitudes 1, p, p^2, ... to a law of r; the last of them is 0 with ``zero``.

    The objective is :func:`~gtrace.fitting.expected_variance` of :func:`amq_levels`. It has several minima.
    ``search`` covers the whole range of p, then finds the best few to the last digits by the root of the
    derivative. ``gd`` is the paper's descent from ``start`` along half the derivative (App. B.3.3), which may
    end far from the minimum.

    Args:
        law: a sketch of the values, or a mixture.
        bits: 2 to 12, the sign included.
        zero: whether 0 is a level; then there is one power less.
        weighted: weight the values of a sketch by the squared norms of their buckets.
        method: "search" or "gd".
        start: p that ``gd`` starts from.
        rate: its learning rate.
        steps: number of steps.

    Returns:
        p, between 0 and 1; ``start`` if the levels do not depend on it (2 bits with 0) or the law has only
        zeros.

    Raises:
        UsageError: an unknown law or method, bits out of range, or a start outside (0, 1).
    """
    if method not in AMQ_METHODS:
        raise UsageError(f"method: '{method}' is unknown; {suggest(str(method), AMQ_METHODS)}")
    if not 0.0 < start < 1.0:
        raise UsageError(f"start: {start} is not between 0 and 1")
    count = magnitude_count(bits)
    prepared = as_law(law, weighted=weighted)
    if prepared is None or count - (1 if zero else 0) < 2:
        return float(start)
    objective = _Powers(prepared, count, zero)
    if method == "search":
        return _search(objective, float(start))
    p = float(start)
    for _ in range(steps):
        p = min(max(p - rate * 0.5 * objective.slope(p), objective.least), 1.0 - 1e-9)
    return p


def amq_levels(multiplier: float, bits: int, zero: bool = True) -> Floats:
    """The magnitudes of a multiplier, float64, ascending, without powers too small for float32.

    >>> [float(level) for level in amq_levels(0.5, 3)]
    [0.0, 0.25, 0.5, 1.0]
    """
    grid = exponential_grid(magnitude_count(bits), zero, multiplier)
    keep = grid >= np.finfo(np.float32).tiny
    keep[0] |= zero
    return grid[keep]


class _Powers:
    """The objective as a function of p alone."""

    def __init__(self, law: Law, count: int, zero: bool) -> None:
        self._law, self._count, self._zero = law, count, zero
        self._powers = np.arange(count - (2 if zero else 1), 0, -1.0)
        #: below, the smallest level would leave the range of float64
        self.least = max(1e-9, float(1e-300 ** (1.0 / self._powers[0])))

    def errors(self, multipliers: Floats) -> Floats:
        """The objective at each p."""
        grids = np.zeros((multipliers.size, self._count))
        grids[:, (1 if self._zero else 0) : -1] = multipliers[:, None] ** self._powers
        grids[:, -1] = 1.0
        return self._law.objectives(grids, not self._zero)

    def slope(self, p: float) -> float:
        """Its derivative, through the levels."""
        grid = np.zeros(self._count)
        grid[1 if self._zero else 0 :] = p ** np.append(self._powers, 0.0)
        return float(self._law.gradient(grid, not self._zero)[1] @ (self._powers * p ** (self._powers - 1.0)))


def _search(objective: _Powers, start: float) -> float:
    tried = 1.0 / (1.0 + np.exp(-_LOGITS))
    tried = tried[tried > objective.least]
    errors = objective.errors(tried)
    # Narrow minima lie on the broad ones: search closer on both sides of the best places.
    best = np.argsort(errors, kind="stable")[:_CLOSER]
    left = np.unique(np.concatenate([np.maximum(best - 1, 0), np.minimum(best, tried.size - 2)]))
    between = tried[left, None] + np.diff(tried)[left, None] * _INSIDE
    tried, order = np.unique(np.concatenate([tried, between.reshape(-1)]), return_index=True)
    errors = np.concatenate([errors, objective.errors(between.reshape(-1))])[order]
    padded = np.pad(errors, 1, constant_values=np.inf)
    dips = np.flatnonzero((errors <= padded[:-2]) & (errors <= padded[2:]))
    dips = dips[np.argsort(errors[dips], kind="stable")[:_BEST]]
    low, high = tried[np.maximum(dips - 1, 0)], tried[np.minimum(dips + 1, tried.size - 1)]
    found = [_root(objective, *bracket) for bracket in zip(low, tried[dips], high, strict=True)]
    candidates = np.asarray([start, *found, *tried[dips]], dtype=np.float64)
    return float(candidates[int(np.argmin(objective.errors(candidates)))])


def _root(objective: _Powers, low: float, p: float, high: float) -> float:
    """A minimum between low and high: secants of the derivative, or bisection if they leave the bracket."""
    at = objective.slope(p)
    old, at_old = low, objective.slope(low)
    for step in range(_STEPS):
        if at == 0.0:
            break
        if at < 0.0:
            low = p
        else:
            high = p
        secant = p - at * (p - old) / (at - at_old) if at != at_old else low
        following = secant if low < secant < high and step % 4 < 3 else 0.5 * (low + high)
        if abs(following - p) <= _CLOSE * p or not low < following < high:
            break
        old, at_old, p = p, at, following
        at = objective.slope(p)
    return p
