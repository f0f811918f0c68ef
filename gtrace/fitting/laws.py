"""Laws of r = |v| / norm that levels are fitted to, behind one interface: a moment sketch or a mixture."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, overload

import numpy as np

from gtrace.distributions import TruncatedNormalMixture
from gtrace.errors import UsageError
from gtrace.kernels import descent as _descent
from gtrace.kernels import mixture as _mixture
from gtrace.sketch import MomentSketch

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: what the public functions accept as a law
LawLike: TypeAlias = MomentSketch | TruncatedNormalMixture

# The companding grid looks at a mixture at this many sigmas from each of at most so many components.
_NEARBY = np.linspace(-12.0, 12.0, 97)
_LOOKED_AT = 64
#: groups per octave in which a sketch's density is smoothed for the companding grid
_GROUPS = 8
# Candidates for a grid: at least, per level, at most. A mixture is fitted to the last digit, so its levels must fall
# to the right clusters; a sketch must be fitted in milliseconds.
_MIXTURE_POINTS = (2048, 32, 4096)
_SKETCH_POINTS = (512, 8, 4096)
_ONE_VALUE = 1e-9
_SLOPE = 1e-9


class Derivatives(NamedTuple):
    """The objective at a grid and its derivatives by the free levels, n of them.

    Attributes:
        objective: the mean of (b - r)(r - a), with a and b the levels around r.
        gradient: float64[n].
        diagonal: float64[n], second derivatives.
        coupling: float64[n - 1], mixed derivatives of neighbours; all others are 0.
    """

    objective: float
    gradient: NDArray[np.float64]
    diagonal: NDArray[np.float64]
    coupling: NDArray[np.float64]


class Law(Protocol):
    """A law normalized to weight 1, as the fits see it.

    A grid is float64[m], ascending. Its last level is fixed at the upper end of the support. Mirrored, it has a twin
    below 0 and no level at 0, and all others are free; otherwise the first is fixed at the lower end.
    """

    @property
    def support(self) -> tuple[float, float]:
        """Where the ends of a grid lie."""

    def derivatives(self, levels: NDArray[np.float64], mirrored: bool) -> Derivatives:
        """Objective, gradient and tridiagonal curvature."""

    def objectives(self, grids: NDArray[np.float64], mirrored: bool) -> NDArray[np.float64]:
        """Objectives of many grids, float64[g, m], at once."""

    def sweep(self, levels: NDArray[np.float64], mirrored: bool) -> float:
        """One sweep of coordinate descent in place; returns the largest move."""

    def areas(self, points: NDArray[np.float64]) -> NDArray[np.float64]:
        """B(t) = E (t - r)_+ at ascending points that start at the lower end of the support."""

    @property
    def smooth(self) -> bool:
        """Whether the second derivatives are exact, so that Newton's steps converge by themselves."""

    def spikes(self) -> NDArray[np.float64] | None:
        """The values that the law consists of, ascending, or None when it has a continuous part."""

    def companding(self, shares: NDArray[np.float64]) -> NDArray[np.float64]:
        """Points that divide the integral of density^(1/3) in these shares, the asymptotically best grid."""

    def candidates(self, count: int) -> NDArray[np.float64]:
        """Ascending points, both ends of the support among them, in which a good grid of ``count`` levels is found."""


def as_law(law: LawLike, *, weighted: bool = True, symmetric: bool = True) -> Law | None:
    """Prepare a law for fitting.

    Args:
        law: a sketch, or a mixture, whose components bring their own weights.
        weighted: weigh the values of a sketch by the squared norms of their buckets.
        symmetric: the law of magnitudes; False keeps the signs, which a sketch does not know.

    Returns:
        the law, or None where nothing but zeros has weight: no level fits it better than another.

    Raises:
        UsageError: something else, a sketch of values that were not normalized, or signs asked of a sketch.
    """
    if isinstance(law, TruncatedNormalMixture):
        nothing = symmetric and bool(((law.heights == 0) | ((law.sigmas == 0) & (law.anchors == 0))).all())
        return None if nothing else MixtureLaw(law, symmetric=symmetric)
    if not isinstance(law, MomentSketch):
        raise UsageError(
            f"law: {type(law).__name__} is none; pass a MomentSketch or a TruncatedNormalMixture"
        )
    if law.norm == "none":
        raise UsageError("law: a sketch with norm none has no levels in units of r; build it with l2, linf or l1")
    if not symmetric:
        raise UsageError("law: a sketch knows no signs; symmetric=False needs a mixture")
    return SketchLaw(law, weighted=weighted) if law.sums[:, 3 if weighted else 0].sum() > 0 else None


def total_weight(sketch: MomentSketch, weighted: bool) -> float:
    """Summed weight of the values that levels round: squared bucket norms, or their number."""
    if weighted:
        return float(sketch.sums[:, 3].sum()) + sketch.zero_weight
    return float(sketch.sums[:, 0].sum()) + sketch.zeros


class MixtureLaw:
    """A mixture of truncated normals; every integral to the last digits, also in narrow cells and far tails."""

    def __init__(self, mixture: TruncatedNormalMixture, *, symmetric: bool = True) -> None:
        self._table = _component_table(mixture, symmetric)
        self.support = (0.0, 1.0) if symmetric else mixture.support
        self.smooth = bool((mixture.sigmas > 0).all())

    def derivatives(self, levels: NDArray[np.float64], mirrored: bool) -> Derivatives:
        """See :meth:`Law.derivatives`."""
        edges = np.concatenate(([0.0], levels)) if mirrored else levels
        cells = self._cells(edges)
        mass, up, down = cells[:, _mixture.MASS], cells[:, _mixture.UP], cells[:, _mixture.DOWN]
        density = np.empty(edges.size - 2)
        _mixture.density(self._table, edges[1:-1], density)
        objective = float(cells[:, _mixture.ERROR].sum())
        gradient = up[:-1] - down[1:]
        diagonal = (edges[2:] - edges[:-2]) * density
        if mirrored:
            # Below the first level the error is l^2 - r^2 = (l - r)(r - 0) + l (l - r).
            objective += float(levels[0] * down[0])
            if levels.size > 1:
                gradient[0] = 2.0 * levels[0] * mass[0] - down[1]
                diagonal[0] = 2.0 * mass[0] + (levels[0] + levels[1]) * density[0]
        return Derivatives(objective, gradient, diagonal, -mass[1:-1])

    def objectives(self, grids: NDArray[np.float64], mirrored: bool) -> NDArray[np.float64]:
        """See :meth:`Law.objectives`."""
        first = np.zeros((grids.shape[0], 1))
        edges = np.concatenate([first, grids], axis=1) if mirrored else np.ascontiguousarray(grids)
        # One call for all: the cell between two grids runs backwards and holds nothing.
        cells = np.zeros((edges.size, 4))
        _mixture.cells(self._table, edges.reshape(-1), cells[:-1])
        cells = cells.reshape(*edges.shape, 4)
        out: NDArray[np.float64] = cells[:, :, _mixture.ERROR].sum(axis=1)
        return out + grids[:, 0] * cells[:, 0, _mixture.DOWN] if mirrored else out

    def sweep(self, levels: NDArray[np.float64], mirrored: bool) -> float:
        """See :meth:`Law.sweep`."""
        return float(_mixture.sweep(self._table, levels, mirrored))

    def areas(self, points: NDArray[np.float64]) -> NDArray[np.float64]:
        """See :meth:`Law.areas`."""
        cells = self._cells(points)
        below = np.cumsum(cells[:, _mixture.MASS]) - cells[:, _mixture.MASS]
        steps = cells[:, _mixture.DOWN] + below * np.diff(points)
        return np.concatenate(([0.0], np.cumsum(steps)))

    def spikes(self) -> NDArray[np.float64] | None:
        """See :meth:`Law.spikes`."""
        present = self._table[self._table[:, _mixture.HEIGHT] > 0]
        if (present[:, _mixture.SIGMA] > 0).any():
            return None
        return np.unique(present[:, _mixture.ANCHOR])

    def companding(self, shares: NDArray[np.float64]) -> NDArray[np.float64]:
        """See :meth:`Law.companding`."""
        low, high = self.support
        rows = np.unique(np.linspace(0, len(self._table) - 1, min(len(self._table), _LOOKED_AT)).astype(int))
        anchors, sigmas = self._table[rows, _mixture.ANCHOR], self._table[rows, _mixture.SIGMA]
        near = anchors[:, None] + sigmas[:, None] * _NEARBY
        octaves = np.geomspace(1e-12, 1.0, 800)
        points = np.concatenate([near.reshape(-1), octaves, -octaves, np.linspace(low, high, 513)])
        points = np.unique(np.clip(points, low, high))
        density = np.empty(points.size)
        _mixture.density(self._table, points, density)
        heights = np.cbrt(density)
        return _divide(points, 0.5 * (heights[1:] + heights[:-1]) * np.diff(points), shares)

    def candidates(self, count: int) -> NDArray[np.float64]:
        """See :meth:`Law.candidates`."""
        points = [self.companding(_shares(_MIXTURE_POINTS, count)), np.asarray(self.support)]
        values = self._table[self._table[:, _mixture.SIGMA] == 0, _mixture.ANCHOR]
        return np.unique(np.concatenate([*points, values]))

    def _cells(self, edges: NDArray[np.float64]) -> NDArray[np.float64]:
        cells = np.empty((edges.size - 1, 4))
        _mixture.cells(self._table, edges, cells)
        return cells


class SketchLaw:
    """The law of a sketch's values: what :meth:`MomentSketch.expect` takes for their error, up to the weight."""

    support = (0.0, 1.0)
    smooth = False

    def __init__(self, sketch: MomentSketch, *, weighted: bool = True) -> None:
        first = 3 if weighted else 0
        total = total_weight(sketch, weighted)
        zeros = sketch.zero_weight if weighted else float(sketch.zeros)
        self._zeros = zeros / total
        self._table = np.empty((sketch.rows.size, _descent.COLUMNS))
        _descent.tabulate(sketch.lower, sketch.upper, sketch.sums, first, zeros, total, self._table)
        lower, mass = self._table[:, _descent.LOWER], self._table[:, _descent.MASS]
        first_sum = self._table[:, _descent.FIRST]
        self._mean = float(np.sum(mass * lower + first_sum))
        squares = lower * (mass * lower + 2.0 * first_sum) + self._table[:, _descent.SECOND]
        self._square = float(np.sum(squares))

    def derivatives(self, levels: NDArray[np.float64], mirrored: bool) -> Derivatives:
        """See :meth:`Law.derivatives`; the density at a level is the mean one half-way to its neighbours.

        The density inside one bin would be noise where a bin holds a few values.
        """
        edges = np.concatenate(([0.0], levels)) if mirrored else levels
        middles = 0.5 * (edges[1:] + edges[:-1])
        points = np.empty(2 * edges.size - 1)
        points[0::2] = edges
        points[1::2] = middles
        sums = np.empty((points.size, 2))
        _descent.hinges(self._table, self._zeros, points, sums)
        below, area = sums[0::2, 0], sums[0::2, 1]
        reach = edges[2:] - edges[:-2]
        density = np.diff(sums[1::2, 0]) / np.diff(middles)
        gradient = reach * below[1:-1] - (area[2:] - area[:-2])
        diagonal = reach * density
        objective = float(reach @ area[1:-1]) + self._last_cell(edges[-2])
        if mirrored:
            objective += float(levels[0] * area[1])
            if levels.size > 1:
                gradient[0] += levels[0] * below[1] + area[1]
                diagonal[0] += levels[0] * density[0] + 2.0 * below[1]
        return Derivatives(objective, gradient, diagonal, -np.diff(below[1:-1]))

    def objectives(self, grids: NDArray[np.float64], mirrored: bool) -> NDArray[np.float64]:
        """See :meth:`Law.objectives`."""
        areas = self.areas(grids.reshape(-1)).reshape(grids.shape)
        first = np.zeros((grids.shape[0], 1))
        edges = np.concatenate([first, grids], axis=1) if mirrored else grids
        inner = areas[:, (0 if mirrored else 1) : -1]
        out: NDArray[np.float64] = np.sum((edges[:, 2:] - edges[:, :-2]) * inner, axis=1)
        out += self._last_cell(edges[:, -2])
        return out + grids[:, 0] * areas[:, 0] if mirrored else out

    def sweep(self, levels: NDArray[np.float64], mirrored: bool) -> float:
        """See :meth:`Law.sweep`."""
        return float(_descent.sweep(self._table, self._zeros, levels, mirrored))

    def areas(self, points: NDArray[np.float64]) -> NDArray[np.float64]:
        """See :meth:`Law.areas`."""
        sums = np.empty((points.size, 2))
        _descent.hinges(self._table, self._zeros, points, sums)
        return sums[:, 1]

    def spikes(self) -> NDArray[np.float64] | None:
        """See :meth:`Law.spikes`; values that differ by less than float32 resolves count as one."""
        present = self._table[self._table[:, _descent.MASS] > 0]
        mean = present[:, _descent.FIRST] / present[:, _descent.MASS]
        variance = present[:, _descent.SECOND] / present[:, _descent.MASS] - mean * mean
        if (variance > _ONE_VALUE * present[:, _descent.WIDTH] ** 2).any():
            return None
        values = present[:, _descent.LOWER] + mean
        return np.concatenate(([0.0], values)) if self._zeros > 0 else values

    @overload
    def _last_cell(self, below: np.float64) -> float: ...
    @overload
    def _last_cell(self, below: NDArray[np.float64]) -> NDArray[np.float64]: ...
    def _last_cell(self, below: np.float64 | NDArray[np.float64]) -> float | NDArray[np.float64]:
        """E (1 - r)(r - below): the error if the last cell reached down to 0; each lower level adds to it.

        This order keeps the digits that B(1), which is about 1, would swallow.
        """
        return (1.0 + below) * self._mean - self._square - below

    def companding(self, shares: NDArray[np.float64]) -> NDArray[np.float64]:
        """See :meth:`Law.companding`."""
        lower, mass = self._table[:, _descent.LOWER], self._table[:, _descent.MASS]
        if lower.size == 0:
            return shares.copy()
        keys = np.floor(_GROUPS * np.log2(np.maximum(lower, np.finfo(np.float64).tiny)))
        starts = np.concatenate(([0], np.flatnonzero(np.diff(keys)) + 1))
        ends = np.concatenate((starts[1:], [lower.size])) - 1
        low, high = lower[starts], lower[ends] + self._table[ends, _descent.WIDTH]
        points = np.concatenate(([0.0], np.stack([low, high], axis=1).reshape(-1), [max(1.0, high[-1])]))
        steps = np.zeros(points.size - 1)
        steps[1::2] = np.cbrt(np.add.reduceat(mass, starts) * (high - low) ** 2)
        out: NDArray[np.float64] = np.minimum(_divide(points, steps, shares), 1.0)
        return out

    def candidates(self, count: int) -> NDArray[np.float64]:
        """See :meth:`Law.candidates`."""
        points = [self.companding(_shares(_SKETCH_POINTS, count)), np.asarray(self.support)]
        present = self._table[self._table[:, _descent.MASS] > 0]
        if len(present) <= points[0].size:
            points.append(present[:, _descent.LOWER] + present[:, _descent.FIRST] / present[:, _descent.MASS])
        return np.unique(np.minimum(np.concatenate(points), 1.0))


def _shares(few: tuple[int, int, int], count: int) -> NDArray[np.float64]:
    least, per_level, most = few
    return np.linspace(0.0, 1.0, max(least, min(per_level * count, most)))


def _divide(
    points: NDArray[np.float64], steps: NDArray[np.float64], shares: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Where the cumulative ``steps`` between ascending points reach these shares of their sum."""
    total = np.concatenate(([0.0], np.cumsum(steps)))
    if not total[-1] > 0:
        return points[0] + (points[-1] - points[0]) * shares
    # A slope of its own lets every share be reached at one place, also where there is no mass.
    total = total / total[-1] + _SLOPE * np.linspace(0.0, 1.0, total.size)
    out: NDArray[np.float64] = np.interp(shares * (1.0 + _SLOPE), total, points)
    return out


def _component_table(mixture: TruncatedNormalMixture, symmetric: bool) -> NDArray[np.float64]:
    """Rows for the kernels; with ``symmetric`` the law of |r|: each component on its two halves, one reflected."""
    low, high = mixture.support
    size = mixture.means.size
    rows = np.stack(
        [
            mixture.anchors,
            mixture.sigmas,
            mixture.heights,
            mixture.offsets,
            np.full(size, low),
            np.full(size, high),
        ],
        axis=1,
    )
    if not symmetric:
        return rows
    point = mixture.sigmas == 0
    right = rows[np.where(point, mixture.anchors >= 0, high > 0)]
    right[:, _mixture.LOW] = max(low, 0.0)
    left = rows[np.where(point, mixture.anchors < 0, low < 0)]
    left[:, [_mixture.ANCHOR, _mixture.OFFSET]] *= -1.0
    left[:, _mixture.LOW], left[:, _mixture.HIGH] = max(-high, 0.0), -low
    return np.concatenate([right, left])
