"""What a sweep says, as numbers: rows summed up to one point per configuration, per tensor and per step.

Everything that is drawn or printed about a sweep comes from :class:`SweepAnalysis`. Nothing here formats.

How rows are summed up. A *cell* is one tensor at one step. In each cell a configuration has one error (the
expectation where there is a closed form, otherwise the mean over draws), one number of bits (the mean over
draws of what was really encoded, otherwise the expectation) and one energy. Over cells, relative variance is
``sum squared_error / sum energy`` and bits per coordinate ``sum bits n / sum n``, so that large tensors and
large gradients count as they do in training. All configurations are summed over the same cells.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gtrace.report.cells import CellTable, read_cells
from gtrace.report.comparison import TARGETS, AtBits, at_bits, pareto_front
from gtrace.report.families import Labels, label
from gtrace.report.fits import TensorFit, read_fits
from gtrace.report.names import listed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from gtrace.sweep import SweepResult

Source = Literal["measured", "expected", "mixed", "none"]


@dataclass(frozen=True, slots=True)
class Configuration:
    """One codec with one set of parameters, summed over tensors and steps.

    Attributes:
        spec: canonical spec string.
        method: codec name.
        family: method, and the parameters that tell it from other families of the same method.
        setting: the parameter that trades bits for error, short (``b3``), empty where there is none.
        nominal_bits: NaN where the codec has none.
        cells: cells that were summed over.
        partial: measured on too few cells to be compared with the others; summed over its own.
        relative_variance: sum of squared errors / sum of energies.
        error_source: ``expected`` (closed form) or ``measured`` (from draws), ``mixed``, ``none``.
        bits: bits per coordinate, payload and shared bytes.
        bits_source: ``measured`` (encoded bytes), ``expected`` (no draws), ``mixed``, ``none``.
        bits_fixed: with fixed-width symbols.
        bits_entropy: at the entropy of the symbols.
        bits_huffman: with a Huffman code.
        ratio_float32: 32 / bits, the ratio of totals.
        step_ratio_float32: mean over steps of each step's own ratio, as papers also report it; never below the
            ratio of totals where steps have equal sizes.
        cosine: of decoded and original, mean over cells weighted by elements.
        w1_normalized: Wasserstein-1 of the values over the mean absolute value.
        optimal_variance: relative variance of the best levels of the same number under the same scale, over the
            same cells; NaN where a cell lacks it.
        times_optimal: relative_variance / optimal_variance, NaN where there is nothing to divide by.
        model_variance: relative variance that a parametric law promised for the levels it gave, NaN without one.
        fitted_on: which data levels and codes came from: ``itself``, ``previous``, ``step N``; empty for none.
        pareto: no other configuration takes fewer bits at no more error, or makes less error at no more bits.
    """

    spec: str
    method: str
    family: str
    setting: str
    nominal_bits: float
    cells: int
    partial: bool
    relative_variance: float
    error_source: Source
    bits: float
    bits_source: Source
    bits_fixed: float
    bits_entropy: float
    bits_huffman: float
    ratio_float32: float
    step_ratio_float32: float
    cosine: float
    w1_normalized: float
    optimal_variance: float
    times_optimal: float
    model_variance: float
    fitted_on: str
    pareto: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """The configurations of a method that differ in their rate alone; what is compared at equal bits.

    Attributes:
        label: name of the family.
        method: codec name.
        members: indices into :attr:`SweepAnalysis.configurations`, by measured bits; partial ones left out.
        at: one entry per target; ``lower`` and ``upper`` index the configurations of the analysis.
    """

    label: str
    method: str
    members: tuple[int, ...]
    at: tuple[AtBits, ...]


@dataclass(frozen=True, slots=True)
class SweepAnalysis:
    """A sweep summed up.

    Attributes:
        name: of the file, for headings.
        rows: rows of the sweep.
        configurations: in the order of families and measured bits.
        families: in the order of their first appearance.
        targets: bits per coordinate of the comparison.
        tensors: names, in natural order; the whole model's own row is not among them unless it is alone.
        elements: (tensors,) number of elements.
        energy_share: (tensors,) part of the total energy over the compared cells.
        steps: (steps,) ascending.
        per_tensor: (configurations, tensors) relative variance summed over steps, NaN where not measured.
        per_step: (configurations, steps) relative variance summed over tensors, NaN where not measured.
        bits_per_step: (configurations, steps) measured bits per coordinate over all tensors, NaN where not known.
        cells: cells that are compared.
        notes: what a reader must know about how the numbers came to be, one line each.
        warnings: of the sweep itself.
        provenance: of the sweep.
        fits: levels and what they were fitted to, the largest tensor first; empty where no codec was fitted.
    """

    name: str
    rows: int
    configurations: tuple[Configuration, ...]
    families: tuple[Family, ...]
    targets: tuple[float, ...]
    tensors: tuple[str, ...]
    elements: NDArray[np.int64]
    energy_share: NDArray[np.float64]
    steps: NDArray[np.int64]
    per_tensor: NDArray[np.float64]
    per_step: NDArray[np.float64]
    bits_per_step: NDArray[np.float64]
    cells: int
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    provenance: dict[str, Any]
    fits: tuple[TensorFit, ...]

    @property
    def measured(self) -> bool:
        """Whether any configuration has an error that is a number."""
        return any(math.isfinite(c.relative_variance) for c in self.configurations)

    def nearest(self, family: Family, bits: float) -> int:
        """Index of the family's configuration with the nearest measured bits, -1 where none is known."""
        known = [i for i in family.members if math.isfinite(self.configurations[i].bits)]
        return min(known, key=lambda i: abs(self.configurations[i].bits - bits), default=-1)


def analyze(result: SweepResult, name: str = "sweep", targets: Sequence[float] = TARGETS) -> SweepAnalysis:
    """Sum a sweep up.

    Args:
        result: any number of rows, also none; missing numbers are NaN.
        name: what the sweep is called in headings.
        targets: measured bits per coordinate at which methods are compared.
    """
    table = read_cells(result)
    common, partial = _common_cells(table)
    measured = table.measured
    used = np.where(partial[:, None], measured, table.used(common))
    sums = _Sums(table, used)
    order, labels, configurations = _configurations(table, sums, partial)
    families = _families(configurations, tuple(float(t) for t in targets))
    return SweepAnalysis(
        name=name,
        rows=len(result),
        configurations=configurations,
        families=families,
        targets=tuple(float(t) for t in targets),
        tensors=tuple(table.tensors),
        elements=table.elements,
        energy_share=_energy_share(table, common),
        steps=table.steps,
        per_tensor=sums.relative_variance_by(table.tensor, len(table.tensors))[order],
        per_step=sums.relative_variance_by(table.step, len(table.steps))[order],
        bits_per_step=sums.bits_by_step()[order],
        cells=int(common.sum()) if not partial.all() else 0,
        notes=_notes(table, common, configurations, labels),
        warnings=result.warnings,
        provenance=result.provenance,
        fits=read_fits(result),
    )


def _common_cells(table: CellTable) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
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


def _divide(top: NDArray[np.float64], bottom: NDArray[np.float64], where: NDArray[np.bool_]) -> NDArray[np.float64]:
    out = np.full(len(top), np.nan)
    np.divide(top, bottom, out=out, where=where)
    return out


class _Sums:
    """Weighted sums of a :class:`CellTable` over the cells in use."""

    def __init__(self, table: CellTable, used: NDArray[np.bool_]) -> None:
        self._table = table
        self._used = used
        self.cells: NDArray[np.int64] = used.sum(axis=1)

    def ratio(self, values: NDArray[np.float64], weights: NDArray[np.float64], *, strict: bool) -> NDArray[np.float64]:
        """``sum values weights / sum weights`` per configuration.

        Args:
            values: (configurations, cells).
            weights: the same shape.
            strict: a missing value in a cell in use makes the sum NaN; otherwise the cell is left out.
        """
        known = np.isfinite(values) & np.isfinite(weights)
        mask = self._used & known
        top = np.where(mask, values * np.where(mask, weights, 0), 0).sum(axis=1)
        bottom = np.where(mask, weights, 0).sum(axis=1)
        incomplete = (self._used & ~known).any(axis=1) if strict else np.zeros(len(top), dtype=np.bool_)
        return _divide(top, bottom, (bottom > 0) & ~incomplete)

    def relative_variance(self) -> NDArray[np.float64]:
        table = self._table
        top = np.where(self._used, table.squared_error, 0).sum(axis=1)
        bottom = np.where(self._used, table.energy, 0).sum(axis=1)
        return _divide(top, bottom, bottom > 0)

    def relative_variance_by(self, group: NDArray[np.int64], groups: int) -> NDArray[np.float64]:
        """(configurations, groups) relative variance of each group's cells; a negative group is left out."""
        table = self._table
        out = np.full((len(table.specs), groups), np.nan)
        for c in range(len(table.specs)):
            mask = self._used[c] & (group >= 0)
            top = np.bincount(group[mask], weights=table.squared_error[c, mask], minlength=groups)
            bottom = np.bincount(group[mask], weights=table.energy[c, mask], minlength=groups)
            np.divide(top, bottom, out=out[c], where=bottom > 0)
        return out

    def bits_by_step(self) -> NDArray[np.float64]:
        """(configurations, steps) bits per coordinate; NaN for a step without cells or whose bits are not known."""
        table = self._table
        out = np.full((len(table.specs), len(table.steps)), np.nan)
        for c in range(len(table.specs)):
            mask = self._used[c]
            steps, n = table.step[mask], table.n[c, mask]
            total = np.bincount(steps, weights=n, minlength=len(table.steps))
            sent = np.bincount(steps, weights=table.bits[c, mask] * n, minlength=len(table.steps))
            np.divide(sent, total, out=out[c], where=total > 0)
        return out

    def step_ratio(self) -> NDArray[np.float64]:
        """Mean over steps of float32 bits over measured bits, NaN where a cell's bits are not known."""
        out = np.full(len(self._table.specs), np.nan)
        for c, bits in enumerate(self.bits_by_step()):
            there = bits[np.unique(self._table.step[self._used[c]])]
            if len(there) and (there > 0).all():
                out[c] = float(np.mean(32 / there))
        return out

    def source(self, closed: NDArray[np.bool_], drawn: NDArray[np.bool_]) -> list[Source]:
        """Where numbers came from: masks (configurations, cells) of closed forms and of draws."""
        has_closed = np.logical_or.reduce(self._used & closed, axis=1)
        has_drawn = np.logical_or.reduce(self._used & drawn, axis=1)
        names: tuple[Source, ...] = ("none", "expected", "measured", "mixed")
        return [names[k] for k in (has_closed + 2 * has_drawn).tolist()]


def _configurations(
    table: CellTable, sums: _Sums, partial: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], Labels, tuple[Configuration, ...]]:
    labels = label(table.specs, table.methods, table.parameters)
    variance = sums.relative_variance()
    bits = sums.ratio(table.bits, table.n, strict=True)
    others = {
        name: sums.ratio(getattr(table, name), table.n, strict=False)
        for name in ("bits_fixed", "bits_entropy", "bits_huffman", "cosine")
    }
    # w1 over mean |g|: numerator and denominator are summed apart, as for the whole model's gradient.
    weights = table.mean_abs * table.n
    w1 = sums.ratio(table.w1_normalized, weights, strict=False)
    # What one cell lacks would make the sums of different cells, so nothing is left out here.
    optimal = sums.ratio(table.optimal_variance, table.energy, strict=True)
    model = sums.ratio(table.model_variance, table.energy, strict=True)
    times = _divide(variance, optimal, optimal > 0)
    step_ratio = sums.step_ratio()
    compared = np.where(partial, np.nan, variance)
    front = pareto_front(bits.tolist(), compared.tolist())
    error_source = sums.source(~table.error_drawn, table.error_drawn)
    bits_source = sums.source(np.isfinite(table.bits) & ~table.bits_drawn, table.bits_drawn)
    first = {family: k for k, family in enumerate(dict.fromkeys(labels.families))}
    order = sorted(
        range(len(table.specs)),
        key=lambda c: (
            first[labels.families[c]],
            bits[c] if math.isfinite(bits[c]) else math.inf,
            table.specs[c],
        ),
    )
    configurations = tuple(
        Configuration(
            spec=table.specs[c],
            method=table.methods[c],
            family=labels.families[c],
            setting=labels.settings[c],
            nominal_bits=table.nominal_bits[c],
            cells=int(sums.cells[c]),
            partial=bool(partial[c]),
            relative_variance=float(variance[c]),
            error_source=error_source[c],
            bits=float(bits[c]),
            bits_source=bits_source[c],
            bits_fixed=float(others["bits_fixed"][c]),
            bits_entropy=float(others["bits_entropy"][c]),
            bits_huffman=float(others["bits_huffman"][c]),
            ratio_float32=32 / float(bits[c]) if bits[c] > 0 else math.nan,
            step_ratio_float32=float(step_ratio[c]),
            cosine=float(others["cosine"][c]),
            w1_normalized=float(w1[c]),
            optimal_variance=float(optimal[c]),
            times_optimal=float(times[c]),
            model_variance=float(model[c]),
            fitted_on=table.fitted_on[c],
            pareto=bool(front[c]),
        )
        for c in order
    )
    return np.array(order, dtype=np.int64), labels, configurations


def _families(configurations: tuple[Configuration, ...], targets: tuple[float, ...]) -> tuple[Family, ...]:
    families = []
    for name in dict.fromkeys(c.family for c in configurations):
        members = tuple(i for i, c in enumerate(configurations) if c.family == name and not c.partial)
        bits = [configurations[i].bits for i in members]
        variance = [configurations[i].relative_variance for i in members]
        at = []
        for target in targets:
            local = at_bits(bits, variance, target)
            ends = (members[local.lower], members[local.upper]) if local.lower >= 0 else (-1, -1)
            at.append(AtBits(local.target, local.variance, local.outcome, *ends))
        method = next(c.method for c in configurations if c.family == name)
        families.append(Family(name, method, members, tuple(at)))
    return tuple(families)


def _energy_share(table: CellTable, common: NDArray[np.bool_]) -> NDArray[np.float64]:
    energy = np.where(common, np.nan_to_num(table.energy).max(axis=0, initial=0), 0)
    mask = table.tensor >= 0
    per_tensor = np.bincount(table.tensor[mask], weights=energy[mask], minlength=len(table.tensors))
    total = per_tensor.sum()
    return per_tensor / total if total > 0 else np.full(len(per_tensor), np.nan)


def _notes(
    table: CellTable, common: NDArray[np.bool_], configurations: tuple[Configuration, ...], labels: Labels
) -> tuple[str, ...]:
    if not table.measured.any():
        return ("The column 'note' of the results says why errors are missing.",) if table.specs else ()
    notes = []
    is_tensor = table.tensor >= 0
    covered = table.covers().any(axis=0)
    holes = int((is_tensor & ~covered).sum())
    if holes:
        notes.append(
            f"{holes:,} of {int(is_tensor.sum()):,} tensor-steps could not be measured with any codec and "
            "are left out (non-finite gradients, or skipped)."
        )
    empty = [c.spec for c in configurations if c.partial and not c.cells]
    if empty:
        notes.append(f"No error that is a number: {listed(empty)}.")
    partial = [c.spec for c in configurations if c.partial and c.cells]
    if partial:
        notes.append(
            f"Not compared, because measured on too few of the tensors and steps: {listed(partial)}. "
            "Their lines are summed over what they have."
        )
    if common.sum() < covered.sum():
        notes.append(
            f"Compared over the {int(common.sum()):,} tensor-steps, of {int(covered.sum()):,}, "
            "that every compared codec has."
        )
    expected = [c.spec for c in configurations if c.bits_source in ("expected", "mixed")]
    if expected:
        which = "all codecs" if len(expected) == len(configurations) else listed(expected)
        notes.append(f"Bits are expectations, not encoded bytes, where there were no draws: {which}.")
    lacking = [c.spec for c in configurations if math.isnan(c.bits) and c.cells]
    if lacking:
        notes.append(f"No bits known, so not compared at equal bits: {listed(lacking)}.")
    drawn = [c.spec for c in configurations if c.error_source in ("measured", "mixed")]
    if drawn:
        which = "all codecs" if len(drawn) == len(configurations) else listed(drawn)
        notes.append(f"Error of the draws, rounding noise included, where there is no closed form: {which}.")
    if labels.unreadable:
        notes.append(f"Parameters could not be read from the results: {listed(labels.unreadable)}.")
    return tuple(notes)
