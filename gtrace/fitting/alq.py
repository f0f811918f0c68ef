"""Levels that minimize the expected variance of stochastic rounding under a law (ALQ)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias, overload

import numpy as np

from gtrace.distributions import TruncatedNormalMixture
from gtrace.errors import UsageError, suggest
from gtrace.fitting.laws import as_law
from gtrace.fitting.starts import magnitude_count, named_grid, uniform_grid
from gtrace.kernels import descent as _descent

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from gtrace.fitting.laws import Derivatives, Law, LawLike

Method: TypeAlias = Literal["newton", "cd", "gd"]
METHODS: tuple[Method, ...] = ("newton", "cd", "gd")

#: sweeps and steps that a method may take by default
LIMITS = {"newton": 60, "cd": 3000, "gd": 3000}
# A grid has settled when no level moves by more than this part of the gap to its nearest neighbour. Newton's last
# step is squared by the next one; a sketch places a level no finer than a search inside a bin does.
_SETTLED = {"newton": 1e-9, "cd": 1e-13, "gd": 1e-9}
_SETTLED_ROUGH = {"newton": 1e-5, "cd": 1e-9, "gd": 1e-9}
_WARM_UP = 3
_POLISH = 5
_HALVINGS = 6
# A step may close this part of a gap between two levels, no more.
_CLOSING = 0.9
_HALF_GAP = 0.499
_FASTER = 1.5
_FASTEST = 1e100
# What rounding may do to an objective: relative, and in units of the last free level.
_RISE = 1e-13
_NOISE = 1e-15
# The smallest first level of a grid without 0: exact zeros alone would drive it to 0.
_TINY = float(np.finfo(np.float32).tiny)


@overload
def alq_levels(
    law: LawLike,
    bits: int,
    zero: bool = True,
    weighted: bool = True,
    method: Method = "newton",
    start: str | ArrayLike | None = None,
    history: Literal[False] = False,
    *,
    sweeps: int | None = None,
    symmetric: bool = True,
) -> NDArray[np.float64]: ...


@overload
def alq_levels(
    law: LawLike,
    bits: int,
    zero: bool = True,
    weighted: bool = True,
    method: Method = "newton",
    start: str | ArrayLike | None = None,
    *,
    history: Literal[True],
    sweeps: int | None = None,
    symmetric: bool = True,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]: ...


def alq_levels(
    law: LawLike,
    bits: int,
    zero: bool = True,
    weighted: bool = True,
    method: Method = "newton",
    start: str | ArrayLike | None = None,
    history: bool = False,
    *,
    sweeps: int | None = None,
    symmetric: bool = True,
) -> NDArray[np.float64] | tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Fit 2^(bits - 1) magnitudes to a law of r.

    The objective is :func:`~gtrace.fitting.expected_variance`. It is not convex. ``newton`` finds the minimum: from
    the grid that dynamic programming finds among some hundred candidates, and from the companding
    grid, by tridiagonal Newton steps, of which it returns the better result. ``cd`` is the paper's coordinate
    descent (Eq. 5) and ``gd`` its descent along the gradient without projection (Eq. 7); both end in the local
    minimum near their start, ``cd`` after tens of sweeps at 3 bits and hundreds at 5.

    Args:
        law: a sketch of the values, or a mixture.
        bits: 2 to 12, the sign included.
        zero: whether 0 is a level. Without, the grid is mirrored, and values below the first level are
            rounded to plus or minus that level; exact zeros among them.
        weighted: weigh the values of a sketch by the squared norms of their buckets, as the error of the whole
            gradient does. The components of a mixture have their weights already.
        method: "newton", "cd" or "gd".
        start: "uniform", "exponential" (halves), "companding", "global", or levels of your own. By default the two
            named above for newton, else "uniform".
        history: also return the objective: at the start, then after each sweep or step.
        sweeps: stop after so many sweeps or steps; by default when the levels have settled.
        symmetric: False fits all 2^bits signed levels between the ends of the support of a mixture, with 0 and
            symmetry left to themselves; ``zero`` then has no meaning.

    Returns:
        the levels, float64, ascending, the last one 1 and the first 0 exactly with ``zero``; with ``history`` the
        pair (levels, float64 objectives). They are distinct in float32 too. There are fewer levels than asked for
        where the law has fewer values: it then consists of spikes, and each is a level. A law without any weight
        keeps its start.

    Raises:
        UsageError: a law, bits, method or start that is none of these.
    """
    if method not in METHODS:
        raise UsageError(f"method: '{method}' is unknown; {suggest(str(method), METHODS)}")
    if sweeps is not None and sweeps < 0:
        raise UsageError(f"sweeps: {sweeps} is negative")
    mirrored = symmetric and not zero
    count = magnitude_count(bits) * (1 if symmetric else 2)
    prepared = as_law(law, weighted=weighted, symmetric=symmetric)
    given = start if start is None or isinstance(start, str) else _own_grid(start, count, law, zero, symmetric)
    limit = LIMITS[method] if sweeps is None else sweeps
    if prepared is not None:
        levels, objectives = _fit(prepared, count, mirrored, method, given, limit)
        levels = _distinct(levels, mirrored)
    else:
        levels = given if isinstance(given, np.ndarray) else uniform_grid(count, zero)
        objectives = np.zeros(1)
    return (levels, objectives) if history else levels


def _fit(
    law: Law,
    count: int,
    mirrored: bool,
    method: Method,
    start: str | NDArray[np.float64] | None,
    limit: int,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    if method == "newton" and start is None:
        grid = _grid_of_spikes(law, mirrored)
        if grid is not None and grid.size <= count:
            return grid, np.asarray([law.derivatives(grid, mirrored).objective])
    default = ("global", "companding") if method == "newton" else ("uniform",)
    starts = default if start is None else (start,)
    descend = {"newton": _newton, "cd": _coordinates, "gd": _gradient}[method]
    best: tuple[NDArray[np.float64], list[float]] | None = None
    for choice in starts:
        grid = named_grid(law, choice, count, mirrored) if isinstance(choice, str) else choice.copy()
        fixed = grid.size == (1 if mirrored else 2)
        result = descend(law, grid, mirrored, 0 if fixed else limit)
        if best is None or result[1][-1] < best[1][-1]:
            best = result
    assert best is not None
    return best[0], np.asarray(best[1])


def _newton(
    law: Law, levels: NDArray[np.float64], mirrored: bool, limit: int
) -> tuple[NDArray[np.float64], list[float]]:
    """Newton's steps after a few sweeps; a sweep wherever a step would not lower the error."""
    at = law.derivatives(levels, mirrored)
    objectives = [at.objective]
    tolerance = _tolerance(law, "newton")
    for step in range(limit):
        taken = _newton_step(law, levels, mirrored, at) if step >= _WARM_UP else None
        before = levels
        if taken is None:
            levels = levels.copy()
            law.sweep(levels, mirrored)
            at = law.derivatives(levels, mirrored)
        else:
            levels, at = taken
        objectives.append(at.objective)
        if _move(before, levels, mirrored) <= tolerance:
            break
    if not law.smooth and limit:
        polished, more = _coordinates(law, levels, mirrored, _POLISH)
        levels, objectives = polished, objectives + more[1:]
    return levels, objectives


def _newton_step(
    law: Law, levels: NDArray[np.float64], mirrored: bool, at: Derivatives
) -> tuple[NDArray[np.float64], Derivatives] | None:
    step = -at.gradient
    if not _descent.solve_tridiagonal(at.diagonal.copy(), at.coupling, step):
        return None
    full = np.zeros(levels.size)
    full[0 if mirrored else 1 : -1] = step
    if not np.isfinite(full).all():
        return None
    lower = 0.0 if mirrored else levels[0]
    gaps, closing = np.diff(levels, prepend=lower), -np.diff(full, prepend=0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = min(1.0, float(np.min(np.where(closing > 0, _CLOSING * gaps / closing, 1.0))))
    slack = _RISE * at.objective + _NOISE * abs(levels[-1 if levels.size == 1 else -2])
    for _ in range(_HALVINGS):
        trial = levels + share * full
        reached = law.derivatives(trial, mirrored)
        if reached.objective <= at.objective + slack and (np.diff(trial) > 0).all():
            return trial, reached
        share *= 0.5
    return None


def _coordinates(
    law: Law, levels: NDArray[np.float64], mirrored: bool, limit: int
) -> tuple[NDArray[np.float64], list[float]]:
    """Coordinate descent: each level in turn to its best place between its neighbours."""
    objectives = [law.derivatives(levels, mirrored).objective]
    for _ in range(limit):
        before = levels.copy()
        law.sweep(levels, mirrored)
        objectives.append(law.derivatives(levels, mirrored).objective)
        if _move(before, levels, mirrored) <= _tolerance(law, "cd"):
            break
    return levels, objectives


def _gradient(
    law: Law, levels: NDArray[np.float64], mirrored: bool, limit: int
) -> tuple[NDArray[np.float64], list[float]]:
    """All levels at once along the gradient, none by more than half the gap to its nearest neighbour.

    The paper leaves the rate open. One for all levels would crawl: gradients differ by orders of magnitude. So each
    level has its own, which grows while the sign of its gradient stays and halves when it turns. The error
    may rise for a step; the best grid met is returned.
    """
    at = law.derivatives(levels, mirrored)
    objectives, best, tolerance = [at.objective], (at.objective, levels), _tolerance(law, "gd")
    rates = np.ones(at.gradient.size)
    free = slice(0 if mirrored else 1, -1)
    for _ in range(limit):
        gaps = np.diff(levels, prepend=0.0) if mirrored else np.diff(levels)
        most = _HALF_GAP * np.minimum(gaps[:-1], gaps[1:])
        before, old = levels, at.gradient
        levels = levels.copy()
        levels[free] -= np.sign(old) * np.minimum(rates * np.abs(old), most)
        at = law.derivatives(levels, mirrored)
        objectives.append(at.objective)
        if at.objective < best[0]:
            best = (at.objective, levels)
        if _move(before, levels, mirrored) <= tolerance:
            break
        turned = np.sign(at.gradient) * np.sign(old)
        rates *= np.where(turned > 0, _FASTER, np.where(turned < 0, 0.5, 1.0))
        np.minimum(rates, _FASTEST, out=rates)
    return best[1], objectives


def _move(before: NDArray[np.float64], after: NDArray[np.float64], mirrored: bool) -> float:
    """The largest move of a level, as a part of the gap to its nearest neighbour."""
    gaps = np.diff(after, prepend=0.0) if mirrored else np.diff(after)
    free = slice(0 if mirrored else 1, -1)
    return float(np.max(np.abs(after - before)[free] / np.minimum(gaps[:-1], gaps[1:]), initial=0.0))


def _grid_of_spikes(law: Law, mirrored: bool) -> NDArray[np.float64] | None:
    """The values of a law that is nothing but spikes, and the ends of its support: a grid without error."""
    values = law.spikes()
    # Exact zeros cost a mirrored grid its first level squared: that is worth a fit.
    if values is None or (mirrored and values[0] == 0):
        return None
    grid = np.union1d(values, law.support)
    above: NDArray[np.float64] = grid[grid > 0]
    return above if mirrored else grid


def _tolerance(law: Law, method: Method) -> float:
    return (_SETTLED if law.smooth else _SETTLED_ROUGH)[method]


def _distinct(levels: NDArray[np.float64], mirrored: bool) -> NDArray[np.float64]:
    """Without the levels that float32, in which they travel, cannot tell from their neighbours."""
    if mirrored:
        levels = np.maximum(levels, _TINY)
    short = levels.astype(np.float32)
    keep = (np.diff(short, prepend=-np.inf) > 0) & (short < short[-1])
    keep[-1] = True
    return levels[keep]


def _own_grid(
    start: ArrayLike, count: int, law: LawLike, zero: bool, symmetric: bool
) -> NDArray[np.float64]:
    """Check levels to start from.

    Raises:
        UsageError: another number of levels, not ascending, or other ends than the law's.
    """
    grid = np.array(start, dtype=np.float64).reshape(-1)
    low, high = law.support if isinstance(law, TruncatedNormalMixture) and not symmetric else (0.0, 1.0)
    mirrored = symmetric and not zero
    good = grid.size == count and np.isfinite(grid).all() and (np.diff(grid) > 0).all()
    if not good or grid[-1] != high or (grid[0] <= 0 if mirrored else grid[0] != low):
        first = "a first one above 0" if mirrored else f"first {low:g}"
        raise UsageError(f"start: give {count} ascending levels, {first} and last {high:g}")
    return grid
