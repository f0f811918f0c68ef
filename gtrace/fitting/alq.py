"""Levels that minimize the expected variance of stochastic rounding under a law (ALQ)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias, overload

import numpy as np

from gtrace.distributions import TruncatedNormalMixture
from gtrace.errors import UsageError, suggest
from gtrace.fitting.laws import MixtureLaw, as_law
from gtrace.fitting.methods import coordinate_descent, gradient_descent, optimize
from gtrace.fitting.starts import magnitude_count, named_grid, uniform_grid

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from gtrace.fitting.laws import Law, LawLike

Method: TypeAlias = Literal["newton", "cd", "gd"]
METHODS: tuple[Method, ...] = ("newton", "cd", "gd")

#: sweeps and steps that a method may take by default
LIMITS: dict[Method, int] = {"newton": 60, "cd": 3000, "gd": 3000}
_DESCENTS = {"newton": optimize, "cd": coordinate_descent, "gd": gradient_descent}
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

    The objective is :func:`~gtrace.fitting.expected_variance`. It is not convex. ``newton`` looks for its minimum: it
    starts from the best grid among some hundreds of candidates, found by dynamic programming, and goes on by
    tridiagonal Newton steps on a mixture (once more from the companding grid, keeping the better result), by
    dynamic programming in ever narrower windows on a sketch, whose law has no derivatives. ``cd`` is the
    paper's coordinate descent (Eq. 5) and ``gd`` its descent along the gradient without projection (Eq. 7); both
    end in a minimum near their start, ``cd`` after tens of sweeps at 3 bits and hundreds at 5.

    Args:
        law: a sketch of the values, or a mixture.
        bits: 2 to 12, the sign included.
        zero: whether 0 is a level. Without, the grid is mirrored, and values below the first level are
            rounded to plus or minus that level; exact zeros among them.
        weighted: weigh the values of a sketch by the squared norms of their buckets, as the error of the whole
            gradient does. The components of a mixture have their weights already.
        method: "newton", "cd" or "gd".
        start: "uniform", "exponential" (halves), "companding", "global", or levels of your own. By default those
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
    starts: tuple[str | NDArray[np.float64], ...]
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
        # Powers beyond the range of float64 or a law narrower than its grain make levels coincide.
        grid = np.unique(grid[grid > 0] if mirrored else grid)
        fixed = grid.size == (1 if mirrored else 2)
        results.append(_DESCENTS[method](law, grid, mirrored, 0 if fixed else limit))
    levels, objectives = min(results, key=lambda result: result[1][-1])
    return levels, np.asarray(objectives)


def _grid_of_spikes(law: Law, mirrored: bool) -> NDArray[np.float64] | None:
    """The values of a law that is nothing but spikes, and the ends of its support: a grid without error."""
    values = law.spikes()
    # Exact zeros cost a mirrored grid its first level squared: that is worth a fit.
    if values is None or (mirrored and values[0] == 0):
        return None
    grid = np.union1d(values, np.asarray(law.support))
    return grid[grid > 0] if mirrored else grid


def _distinct(levels: NDArray[np.float64], mirrored: bool) -> NDArray[np.float64]:
    """Without the levels that float32, in which they travel, cannot tell from their neighbours."""
    if mirrored:
        levels = np.maximum(levels, _TINY)
    short = levels.astype(np.float32)
    keep = (np.diff(short, prepend=-np.inf) > 0) & (short < short[-1])
    keep[-1] = True
    out: NDArray[np.float64] = levels[keep]
    return out


def _own_grid(start: ArrayLike, count: int, law: LawLike, zero: bool, symmetric: bool) -> NDArray[np.float64]:
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
