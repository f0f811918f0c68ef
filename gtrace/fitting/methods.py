"""Ways to lower the error of a grid from a start: each returns the grid and the objective at every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gtrace.fitting.laws import MixtureLaw
from gtrace.kernels import descent as _descent

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.fitting.laws import Law

# A grid has settled when no level moves by more than this part of the gap to its nearest neighbour. A sketch places
# a level no finer than a search inside a bin does.
_SETTLED, _SETTLED_ROUGH = 1e-13, 1e-9
# Newton's next step would be about the square of this.
_NEWTON_SETTLED = 1e-9
_WARM_UP = 3
_HALVINGS = 8
# What rounding may do to an objective: relative, and in units of the last free level.
_RISE, _NOISE = 1e-13, 1e-15
_HALF_GAP = 0.499
_FASTER, _FASTEST, _SLOWER, _PATIENCE = 1.5, 1e100, 0.1, 10
# Windows reach half-way to the neighbours at first, and then ever less.
_WINDOW = np.arange(-4, 5) / 4.0
_WIDEST, _NARROWEST = 0.45, 1e-6
_POLISH = 5


def optimize(
    law: Law, levels: NDArray[np.float64], mirrored: bool, limit: int
) -> tuple[NDArray[np.float64], list[float]]:
    """Newton's steps where the law is smooth; else dynamic programming in narrowing windows, and a few sweeps."""
    if isinstance(law, MixtureLaw) and law.smooth:
        return _newton(law, levels, mirrored, limit)
    levels, objectives = _narrow(law, levels, mirrored, limit)
    levels, polished = coordinate_descent(law, levels, mirrored, min(limit, _POLISH))
    return levels, objectives + polished[1:]


def coordinate_descent(
    law: Law, levels: NDArray[np.float64], mirrored: bool, limit: int
) -> tuple[NDArray[np.float64], list[float]]:
    """Each level in turn to its best place between its neighbours, in at most ``limit`` sweeps."""
    levels = levels.copy()
    objectives = [law.gradient(levels, mirrored)[0]]
    settled = _SETTLED if isinstance(law, MixtureLaw) else _SETTLED_ROUGH
    for _ in range(limit):
        before = levels.copy()
        law.sweep(levels, mirrored)
        objectives.append(law.gradient(levels, mirrored)[0])
        if _descent.largest_move(before, levels, mirrored) <= settled:
            break
    return levels, objectives


def gradient_descent(
    law: Law, levels: NDArray[np.float64], mirrored: bool, limit: int
) -> tuple[NDArray[np.float64], list[float]]:
    """All levels at once along the gradient, none by more than half the gap to its nearest neighbour.

    The paper leaves the rate open. One for all levels would crawl: gradients differ by orders of magnitude. So each
    level has its own, which grows while the sign of its gradient stays and halves when it turns. The error
    may rise for some steps; then the descent goes on from the best grid met, at lower rates.
    """
    objective, slopes = law.gradient(levels, mirrored)
    objectives, best = [objective], (objective, levels, slopes)
    rates, since = np.ones(slopes.size), 0
    free = slice(0 if mirrored else 1, -1)
    for _ in range(limit):
        most = _HALF_GAP * _room(levels, mirrored)
        before, old = levels, slopes
        levels = levels.copy()
        levels[free] -= np.sign(old) * np.minimum(rates * np.abs(old), most)
        objective, slopes = law.gradient(levels, mirrored)
        objectives.append(objective)
        if _descent.largest_move(before, levels, mirrored) <= _SETTLED_ROUGH:
            break
        turned = np.sign(slopes) * np.sign(old)
        rates *= np.where(turned > 0, _FASTER, np.where(turned < 0, 0.5, 1.0))
        np.minimum(rates, _FASTEST, out=rates)
        since += 1
        if objective < best[0]:
            best, since = (objective, levels, slopes), 0
        elif since == _PATIENCE:
            _, levels, slopes = best
            rates, since = rates * _SLOWER, 0
    if objective > best[0]:
        levels = best[1]
        objectives.append(best[0])
    return levels, objectives


def _newton(
    law: MixtureLaw, levels: NDArray[np.float64], mirrored: bool, limit: int
) -> tuple[NDArray[np.float64], list[float]]:
    """Newton's steps after a few sweeps; a sweep wherever a step would not lower the error."""
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


def _newton_step(law: MixtureLaw, levels: NDArray[np.float64], mirrored: bool) -> NDArray[np.float64] | None:
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


def _narrow(
    law: Law, levels: NDArray[np.float64], mirrored: bool, limit: int
) -> tuple[NDArray[np.float64], list[float]]:
    """Dynamic programming over a few points around each level, again and again, ever closer to them.

    Needs no derivatives, which a law of single values does not have, and moves all levels together, which
    coordinate descent does not.
    """
    grids = [levels]
    points = np.empty((levels.size, _WINDOW.size))
    scale = _WIDEST
    for _ in range(limit):
        _descent.windows(levels, mirrored, scale * _WINDOW, points)
        areas = law.areas(points.reshape(-1)).reshape(points.shape)
        levels = levels.copy()
        at_the_rim = _descent.choose_near(points, areas, mirrored, levels)
        grids.append(levels)
        if not at_the_rim:
            scale *= 0.5
        if scale < _NARROWEST:
            break
    return levels, law.objectives(np.stack(grids), mirrored).tolist()


def _gaps(levels: NDArray[np.float64], mirrored: bool) -> NDArray[np.float64]:
    """Gaps between neighbours; of a mirrored grid also that of the first level to 0."""
    return np.diff(levels, prepend=0.0) if mirrored else np.diff(levels)


def _room(levels: NDArray[np.float64], mirrored: bool) -> NDArray[np.float64]:
    """The gap of each free level to its nearest neighbour."""
    gaps = _gaps(levels, mirrored)
    return np.minimum(gaps[:-1], gaps[1:])
