"""Laws of r = |v| / norm for fitting levels, behind one interface: a moment sketch or a mixture."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from gtrace.distributions import TruncatedNormalMixture
from gtrace.errors import UsageError
from gtrace.kernels import descent as _descent
from gtrace.kernels import mixture as _mixture
from gtrace.kernels import norms as _norms
from gtrace.sketch import MomentSketch

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from gtrace.kernels import Floats
    from gtrace.types import SummarySpec

#: types that the public functions accept as a law
LawLike: TypeAlias = MomentSketch | TruncatedNormalMixture
#: a law as the fits see it; both have the methods of a :class:`MixtureLaw` but for its curvature
Law: TypeAlias = "MixtureLaw | SketchLaw"

# The companding grid samples a mixture at this many sigmas from each component, for at most this many components.
_NEARBY = np.linspace(-12.0, 12.0, 97)
_LOOKED_AT = 64


def check_law(law: LawLike, *, symmetric: bool = True) -> None:
    """Refuse a law that levels cannot be fitted to.

    Raises:
        UsageError: not a sketch or a mixture, a sketch of values that were not normalized, or signs
            asked of a sketch.
    """
    if isinstance(law, TruncatedNormalMixture):
        return
    if not isinstance(law, MomentSketch):
        raise UsageError(f"law: not {type(law).__name__}; pass a MomentSketch or TruncatedNormalMixture")
    if law.norm == "none":
        raise UsageError("law: a sketch with norm none has no levels in units of r; build it with l2, linf or l1")
    if not symmetric:
        raise UsageError("law: a sketch has no signs; zero=None needs a mixture")


def as_law(law: LawLike, *, weighted: bool = True, symmetric: bool = True) -> Law | None:
    """Prepare a law for fitting.

    Args:
        law: a sketch, or a mixture, whose components bring their own weights.
        weighted: weight the values of a sketch by the squared norms of their buckets.
        symmetric: the law of magnitudes; False keeps the signs, which a sketch does not have.

    Returns:
        the law, or None if only zeros have weight: then all levels fit equally well.

    Raises:
        UsageError: see :func:`check_law`.
    """
    check_law(law, symmetric=symmetric)
    if isinstance(law, MomentSketch):
        if not law.sums[:, 3 if weighted else 0].any():
            return None
        # The same for any number of levels.
        return law.remember(("law", weighted), lambda: SketchLaw(law, weighted=weighted))
    at_zero = (law.sigmas == 0) & (law.anchors == 0)
    nothing = symmetric and not law.weights[~at_zero].any()
    return None if nothing else MixtureLaw(law, symmetric=symmetric)


def total_weight(sketch: MomentSketch, *, weighted: bool) -> float:
    """Summed weight of the values that levels round: squared bucket norms, or their number."""
    if weighted:
        return float(sketch.sums[:, 3].sum()) + sketch.zero_weight
    return float(sketch.sums[:, 0].sum()) + sketch.zeros


class MixtureLaw:
    """A mixture of truncated normals; every integral to the last digits, also in narrow cells and far tails.

    It is normalized to weight 1. A grid is float64[m], ascending. Its last level is fixed at the upper end of the
    support. A mirrored grid has a twin below 0 and no level at 0, and all other levels are free; otherwise the first is
    fixed at the lower end.
    """

    def __init__(self, mixture: TruncatedNormalMixture, *, symmetric: bool = True) -> None:
        self._table = _component_table(mixture, symmetric)
        self.support = (0.0, 1.0) if symmetric else mixture.support
        #: without point masses
        self.smooth = bool((mixture.sigmas > 0).all())

    def gradient(self, levels: Floats, mirrored: bool) -> tuple[float, Floats]:
        """The objective, the mean of (b - r)(r - a) with a and b around r, and its slope for each free level."""
        cells = self._cells(levels, mirrored)
        down = cells[:, _mixture.DOWN]
        objective = float(cells[:, _mixture.ERROR].sum())
        slopes = cells[:-1, _mixture.UP] - down[1:]
        if mirrored:
            # Below the first level the error is l^2 - r^2 = (l - r) r + l (l - r).
            objective += float(levels[0] * down[0])
            if levels.size > 1:
                slopes[0] = 2.0 * levels[0] * cells[0, _mixture.MASS] - down[1]
        return objective, slopes

    def curvature(self, levels: Floats, mirrored: bool) -> tuple[Floats, Floats]:
        """Second derivatives by the n free levels, float64[n], and by neighbours, float64[n - 1]; others are 0."""
        mass = self._cells(levels, mirrored)[:, _mixture.MASS]
        edges = _edges(levels, mirrored)
        density = np.empty(edges.size - 2)
        _mixture.density(self._table, edges[1:-1], density)
        diagonal = (edges[2:] - edges[:-2]) * density
        if mirrored and levels.size > 1:
            diagonal[0] = 2.0 * mass[0] + (levels[0] + levels[1]) * density[0]
        return diagonal, -mass[1:-1]

    def objectives(self, grids: Floats, mirrored: bool) -> Floats:
        """Objectives of many grids, float64[g, m], at once."""
        first = np.zeros((grids.shape[0], 1))
        edges = np.concatenate([first, grids], axis=1) if mirrored else np.ascontiguousarray(grids)
        # One call for all: the cell between two grids runs backwards and holds nothing.
        cells = np.zeros((edges.size, 4))
        _mixture.cells(self._table, edges.reshape(-1), cells[:-1])
        cells = cells.reshape(*edges.shape, 4)
        out: Floats = cells[:, :, _mixture.ERROR].sum(axis=1)
        return out + grids[:, 0] * cells[:, 0, _mixture.DOWN] if mirrored else out

    def sweep(self, levels: Floats, mirrored: bool) -> float:
        """One sweep of coordinate descent in place; returns the largest move."""
        return float(_mixture.sweep(self._table, levels, mirrored))

    def areas(self, points: Floats) -> Floats:
        """B(t) = E (t - r)_+ at points of the support."""
        edges, where = np.unique(np.append(points, self.support[0]), return_inverse=True)
        cells = self._cells(edges, mirrored=False)
        below = np.cumsum(cells[:, _mixture.MASS]) - cells[:, _mixture.MASS]
        steps = cells[:, _mixture.DOWN] + below * np.diff(edges)
        return np.concatenate(([0.0], np.cumsum(steps)))[where[:-1]]

    def spikes(self) -> Floats | None:
        """The values of a law that consists of single values, ascending, or None if it has a continuous part."""
        present = self._table[self._table[:, _mixture.HEIGHT] > 0]
        if (present[:, _mixture.SIGMA] > 0).any():
            return None
        return np.unique(present[:, _mixture.ANCHOR])

    def companding(self, shares: Floats) -> Floats:
        """Points that divide the integral of density^(1/3) in these shares: the limit of grids with many levels."""
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
        total = np.concatenate(([0.0], np.cumsum(0.5 * (heights[1:] + heights[:-1]) * np.diff(points))))
        if not total[-1] > 0:
            return low + (high - low) * shares
        # A small slope makes every share have one point, even without mass.
        total = total / total[-1] + _descent.SLOPE * np.arange(total.size) / (total.size - 1.0)
        return np.interp(shares * (1.0 + _descent.SLOPE), total, points)

    def candidates(self, count: int) -> Floats:
        """Ascending points, both ends of the support among them, that hold a good grid of ``count`` levels."""
        # A mixture is fitted to the last digit, so its levels must fall to the right clusters.
        size = max(2048, min(32 * count, 4096))
        points = self.companding(np.arange(size) / (size - 1.0))
        spikes = self._table[self._table[:, _mixture.SIGMA] == 0, _mixture.ANCHOR]
        return np.unique(np.concatenate([points, np.asarray(self.support), spikes]))

    def _cells(self, levels: Floats, mirrored: bool) -> Floats:
        edges = _edges(levels, mirrored)
        cells = np.empty((edges.size - 1, 4))
        _mixture.cells(self._table, edges, cells)
        return cells


class SketchLaw:
    """The law of a sketch's values, the same as in :meth:`MomentSketch.expect` up to the weight."""

    support = (0.0, 1.0)

    def __init__(self, sketch: MomentSketch, *, weighted: bool = True) -> None:
        first = 3 if weighted else 0
        total = total_weight(sketch, weighted=weighted)
        zeros = sketch.zero_weight if weighted else float(sketch.zeros)
        self._zeros = zeros / total
        self._table = np.empty((sketch.rows.size, _descent.COLUMNS))
        self._single = _descent.tabulate(sketch.lower, sketch.upper, sketch.sums, first, zeros, total, self._table)

    @cached_property
    def _moments(self) -> tuple[float, float]:
        """E r and E r^2."""
        lower, mass = self._table[:, _descent.LOWER], self._table[:, _descent.MASS]
        moment = self._table[:, _descent.FIRST]
        squares = lower * (mass * lower + 2.0 * moment) + self._table[:, _descent.SECOND]
        return float(np.sum(mass * lower + moment)), float(np.sum(squares))

    def optimize(self, levels: Floats, mirrored: bool, limit: int) -> tuple[Floats, list[float]]:
        """The grid of least error near another one; also the objective at the start and after each round and sweep."""
        levels = levels.copy()
        grids = np.empty((limit + 1 + _descent.POLISH, levels.size))
        count = np.array([levels.size])
        sizes, rounds, sweeps = _descent.fit_sets(self._table, self._zeros, 0, count, mirrored, limit, levels, grids)
        objectives = self.objectives(grids[:rounds], mirrored).tolist()
        objectives += [self.gradient(grid, mirrored)[0] for grid in grids[rounds : rounds + sweeps]]
        return levels[: sizes[0]], objectives

    def descend(self, levels: Floats, mirrored: bool, limit: int) -> tuple[Floats, list[float]]:
        """See :func:`gtrace.fitting.levels.gradient_descent`."""
        edges, errors = np.array(_edges(levels, mirrored)), np.empty(limit + 2)
        count = _descent.descend(self._table, self._zeros, *self._moments, edges, mirrored, limit, errors)
        return edges[1:] if mirrored else edges, errors[:count].tolist()

    def gradient(self, levels: Floats, mirrored: bool) -> tuple[float, Floats]:
        """See :meth:`MixtureLaw.gradient`."""
        edges = _edges(levels, mirrored)
        bins, slopes = np.full(edges.size, -1), np.empty(edges.size - 2)
        error = _descent.gradient(self._table, self._zeros, *self._moments, edges, mirrored, bins, slopes)
        return error, slopes

    def objectives(self, grids: Floats, mirrored: bool) -> Floats:
        """See :meth:`MixtureLaw.objectives`."""
        areas = self.areas(grids.reshape(-1)).reshape(grids.shape)
        first = np.zeros((grids.shape[0], 1))
        edges = np.concatenate([first, grids], axis=1) if mirrored else grids
        inner = areas[:, (0 if mirrored else 1) : -1]
        out: Floats = np.sum((edges[:, 2:] - edges[:, :-2]) * inner, axis=1)
        mean, square = self._moments
        out += (1.0 + edges[:, -2]) * mean - square - edges[:, -2]
        return out + grids[:, 0] * areas[:, 0] if mirrored else out

    def sweep(self, levels: Floats, mirrored: bool) -> float:
        """See :meth:`MixtureLaw.sweep`."""
        return float(_descent.sweep(self._table, self._zeros, levels, mirrored))

    def areas(self, points: Floats) -> Floats:
        """See :meth:`MixtureLaw.areas`."""
        sums = np.empty((points.size, 2))
        _descent.hinges(self._table, self._zeros, points, sums)
        return np.ascontiguousarray(sums[:, 1])

    def spikes(self) -> Floats | None:
        """See :meth:`MixtureLaw.spikes`; values that float32 cannot distinguish count as one."""
        if not self._single:
            return None
        mass = self._table[:, _descent.MASS]
        held = self._table[mass > 0]
        means = held[:, _descent.LOWER] + held[:, _descent.FIRST] / held[:, _descent.MASS]
        values: Floats = np.minimum(means, 1.0)
        return np.concatenate(([0.0], values)) if self._zeros > 0 else values

    def companding(self, shares: Floats) -> Floats:
        """See :meth:`MixtureLaw.companding`; the mass of a bin is spread half-way to the values beside it."""
        out = np.empty(shares.size)
        _descent.compand(self._table, shares, out)
        return out

    def candidates(self, count: int) -> Floats:
        """See :meth:`MixtureLaw.candidates`; beside each point the nearest mean of a bin, the level of a lone value."""
        return _descent.candidates(self._table, sketch_points(count))


def _edges(levels: Floats, mirrored: bool) -> Floats:
    """The levels; for a mirrored grid with the 0 in front, below which it repeats."""
    return np.concatenate(([0.0], levels)) if mirrored else levels


def sketch_points(count: int) -> int:
    """How many points of a sketch a start of ``count`` levels is chosen from: it must be fitted in milliseconds."""
    return max(512, min(8 * count, 4096))


def _component_table(mixture: TruncatedNormalMixture, symmetric: bool) -> Floats:
    """Rows for the kernels; with ``symmetric`` the law of |r|: each component on its two halves, one reflected."""
    low, high = mixture.support
    ends = np.broadcast_to(np.asarray(mixture.support), (mixture.means.size, 2))
    columns = [mixture.anchors, mixture.sigmas, mixture.heights, mixture.offsets]
    rows = np.concatenate([np.stack(columns, axis=1), ends], axis=1)
    if not symmetric:
        return rows
    point = mixture.sigmas == 0
    right = rows[np.where(point, mixture.anchors >= 0, high > 0)]
    right[:, _mixture.LOW] = max(low, 0.0)
    left = rows[np.where(point, mixture.anchors < 0, low < 0)]
    left[:, [_mixture.ANCHOR, _mixture.OFFSET]] *= -1.0
    left[:, _mixture.LOW], left[:, _mixture.HIGH] = max(-high, 0.0), -low
    return np.concatenate([right, left])


def bucket_moments(values: ArrayLike, spec: SummarySpec) -> Floats:
    """Mean, standard deviation and norm of every bucket of a tensor.

    Args:
        values: any shape; taken as float32 in C order. NaN and infinite values count as 0.
        spec: norm, bucket size, tail and clip, as for :meth:`gtrace.sketch.MomentSketch.from_spec`; an exact tail
            is left out.

    Returns:
        float64[buckets, 3]: mean and standard deviation (n - 1, 0 for a single value) of the bucket's signed
        values divided by its norm, and the norm, rounded to float32 as it is sent. Zeros for a zero bucket.

    Raises:
        UsageError: values that are not real numbers.
    """
    found = MomentSketch.from_spec(values, spec._replace(bucket_moments=True)).bucket_moments
    assert found is not None
    return found


def moment_mixture(
    moments: ArrayLike, components: int | None = 20, seed: int = 0, mean_only: bool = False, weighted: bool = True
) -> TruncatedNormalMixture:
    """The law that ALQ and AMQ assume: normals truncated to [-1, 1] with the moments of a gradient's buckets.

    Args:
        moments: float64[buckets, 3] from :func:`bucket_moments`; rows of several tensors may be concatenated.
        components: number of buckets, drawn uniformly, that become a component each; None for all of them.
        seed: seed of the draw.
        mean_only: one component instead, with the mean of all means and of all deviations (the papers' ALQ-N and
            AMQ-N).
        weighted: weight components by the squared norms of their buckets; otherwise equally.

    Returns:
        the mixture. Zero buckets have no law and are left out; without others, a point mass at 0.

    Raises:
        UsageError: an array of another shape, or fewer than one component.
    """
    rows = np.asarray(moments, dtype=np.float64)
    if rows.ndim != 2 or rows.shape[1] != 3:
        raise UsageError(f"moments: an array of shape {rows.shape}; give mean, deviation and norm per bucket")
    if components is not None and components < 1:
        raise UsageError(f"components: {components} is below 1; give a positive number or none")
    rows = rows[rows[:, _norms.SCALE] > 0]
    if len(rows) == 0:
        return TruncatedNormalMixture([0.0], [0.0], [1.0])
    if mean_only:
        mean, sigma, _ = rows.mean(axis=0)
        return TruncatedNormalMixture([mean], [sigma], [1.0])
    if components is not None and components < len(rows):
        chosen = np.random.default_rng(seed).choice(len(rows), components, replace=False)
        rows = rows[np.sort(chosen)]
    scales = rows[:, _norms.SCALE] / rows[:, _norms.SCALE].max()
    weights = scales**2 if weighted else np.ones(len(rows))
    return TruncatedNormalMixture(rows[:, _norms.MEAN], rows[:, _norms.SIGMA], weights)
