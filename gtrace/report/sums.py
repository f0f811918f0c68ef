"""Cells of a sweep summed up: which are compared, and weighted sums over them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.report.cells import CellTable

Source = Literal["measured", "expected", "mixed", "none"]
_SOURCES: tuple[Source, ...] = ("none", "expected", "measured", "mixed")


def common_cells(table: CellTable) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """(cells,) the cells that are compared, and (configurations,) which configurations are left out.

    Sums over different cells are not comparable. Starting with the best covered configuration, each further
    one may shrink the common set, but not below half of it: one codec that was interrupted early, or that
    fails on most tensors, must not take the others' data away.
    """
    covers = table.covers()
    configurations, cells = covers.shape
    partial = np.ones(configurations, dtype=np.bool_)
    common = np.ones(cells, dtype=np.bool_)
    coverage = covers.sum(axis=1)
    enough = coverage.max(initial=0) / 2
    for c in np.argsort(-coverage, kind="stable"):
        smaller = common & covers[c]
        if coverage[c] and smaller.sum() >= enough:
            common, partial[c] = smaller, False
    if table.whole_model[~partial].any() and not table.whole_model[~partial].all():
        # A whole-model row holds every tensor of its step, so a step with a hole cannot be compared with it.
        common = table.in_whole_steps(common)
    return common, partial


def divide(top: NDArray[np.float64], bottom: NDArray[np.float64], where: NDArray[np.bool_]) -> NDArray[np.float64]:
    """``top / bottom`` where it is wanted, NaN elsewhere; any shape."""
    out = np.full(top.shape, np.nan)
    np.divide(top, bottom, out=out, where=where)
    return out


class Sums:
    """Weighted sums of a :class:`CellTable` over the cells in use.

    Args:
        table: C configurations, K cells.
        used: (C, K) which cells each configuration is summed over.
        weights: (S,) part of training that each step stands for.
    """

    def __init__(self, table: CellTable, used: NDArray[np.bool_], weights: NDArray[np.float64]) -> None:
        self._table = table
        self._used = used
        self._by_step = weights
        self._weights = weights[table.step]
        self.cells: NDArray[np.int64] = used.sum(axis=1)

    def ratio(self, values: NDArray[np.float64], weights: NDArray[np.float64], *, strict: bool) -> NDArray[np.float64]:
        """``sum values weights / sum weights`` per configuration.

        Args:
            values: (C, K).
            weights: the same shape; the weights of steps come on top.
            strict: a missing value in a cell in use makes the sum NaN; otherwise the cell is left out.
        """
        known = np.isfinite(values) & np.isfinite(weights)
        mask = self._used & known
        bottom_terms = np.where(mask, weights * self._weights, 0)
        top = np.where(mask, values * bottom_terms, 0).sum(axis=1)
        bottom = bottom_terms.sum(axis=1)
        incomplete = (self._used & ~known).any(axis=1) if strict else np.zeros(len(top), dtype=np.bool_)
        return divide(top, bottom, (bottom > 0) & ~incomplete)

    def relative_variance(self) -> NDArray[np.float64]:
        """(C,) sum of squared errors over sum of energies."""
        return self.relative(self._table.squared_error, self._table.energy)

    def relative(self, error: NDArray[np.float64], energy: NDArray[np.float64]) -> NDArray[np.float64]:
        """(C,) sum of errors (C, K) over sum of energies, where the cells in use have both."""
        used = self._used & np.isfinite(error) & np.isfinite(energy)
        top = np.where(used, error * self._weights, 0).sum(axis=1)
        bottom = np.where(used, energy * self._weights, 0).sum(axis=1)
        return divide(top, bottom, bottom > 0)

    def totals(self, values: NDArray[np.float64], group: NDArray[np.int64], groups: int) -> NDArray[np.float64]:
        """(C, groups) weighted sums of ``values`` (C, K) over the cells in use; a negative group is left out."""
        out = np.zeros((len(self._used), groups))
        for c, used in enumerate(self._used):
            mask = used & (group >= 0)
            out[c] = np.bincount(group[mask], weights=(values[c] * self._weights)[mask], minlength=groups)
        return out

    def relative_variance_by(self, group: NDArray[np.int64], groups: int) -> NDArray[np.float64]:
        """(C, groups) relative variance of each group's cells; a negative group is left out."""
        bottom = self.totals(self._table.energy, group, groups)
        return divide(self.totals(self._table.squared_error, group, groups), bottom, bottom > 0)

    def bits_by(self, group: NDArray[np.int64], groups: int) -> NDArray[np.float64]:
        """(C, groups) bits per coordinate of each group's cells, NaN where a cell's bits are not known."""
        bottom = self.totals(self._table.n, group, groups)
        return divide(self.totals(self._table.bits * self._table.n, group, groups), bottom, bottom > 0)

    def by_cell(self, values: NDArray[np.float64], tensors: int, steps: int) -> NDArray[np.float64]:
        """(C, tensors, steps) ``values`` (C, K) of the cells in use as they are, NaN for holes."""
        c, k = np.nonzero(self._used & (self._table.tensor >= 0))
        out = np.full((len(values), tensors, steps), np.nan)
        out[c, self._table.tensor[k], self._table.step[k]] = values[c, k]
        return out

    def step_ratio(self) -> NDArray[np.float64]:
        """(C,) mean over steps of float32 bits over measured bits, NaN where a cell's bits are not known."""
        table = self._table
        out = np.full(len(table.specs), np.nan)
        total = self.totals(32.0 * table.n, table.step, len(table.steps))
        sent = self.totals(table.bits * table.n, table.step, len(table.steps))
        for c in range(len(table.specs)):
            there = total[c] > 0
            if there.any() and (sent[c, there] > 0).all():
                out[c] = float(np.average(total[c, there] / sent[c, there], weights=self._by_step[there]))
        return out

    def source(self, closed: NDArray[np.bool_], drawn: NDArray[np.bool_]) -> list[Source]:
        """Where numbers came from: masks (C, K) of closed forms and of draws."""
        has_closed = np.logical_or.reduce(self._used & closed, axis=1)
        has_drawn = np.logical_or.reduce(self._used & drawn, axis=1)
        return [_SOURCES[k] for k in (has_closed + 2 * has_drawn).tolist()]
