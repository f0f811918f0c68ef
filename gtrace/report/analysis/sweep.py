"""What a sweep says, as numbers: rows summed up to one point per configuration, per tensor and per step.

Everything that is drawn or printed about a sweep comes from :class:`SweepAnalysis`.

How rows are summed up. A *cell* is one tensor at one step. In each cell a configuration has one error (the
expectation if there is a closed form, otherwise the mean over draws), one number of bits (the mean over
draws of what was really encoded, otherwise the expectation) and one energy. Over cells, relative variance is
``sum w squared_error / sum w energy`` and bits per coordinate ``sum w bits n / sum w n``, so that large tensors and
large gradients count as they do in training; ``w`` is the part of training that the step represents. This is *by
elements*: every element of the model counts the same. *By layers*, every layer does: the geometric mean of the
layers' relative variances. All configurations are summed over the same cells.

What methods are compared by is their *error*: bias and an M-th of the variance, for M workers, over windows of steps
when a codec with memory takes part, with the bits of one coder for all; see :mod:`gtrace.report.analysis.cells`.
For one worker, without windows, it is the relative variance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.errors import UsageError, suggest
from gtrace.report.analysis.cells import CODED, Basis, Sums, divide, over_windows, per_step, read_cells, sums_of
from gtrace.report.analysis.details import ExchangeError, Rotation, TensorFit, compare_rotation, exchanges_of, read_fits
from gtrace.report.analysis.evidence import (
    KEY,
    SIGNIFICANT,
    Phase,
    StepTable,
    compare_families,
    compare_layers,
    compare_mixes,
    log_of_mean,
)
from gtrace.report.analysis.families import (
    LEVEL,
    MOSTLY,
    PREFERRED_BITS,
    SUMMED,
    AtBits,
    BDRate,
    Configuration,
    Family,
    Leader,
    Measure,
    Rates,
    Standing,
    all_at_bits,
    bd_rates,
    choose_targets,
    curves_of,
    decisive,
    errors_at,
    label,
    pareto_front,
    ranked,
)
from gtrace.report.analysis.runs import known_mean
from gtrace.report.analysis.safety import Safety, judge, outlook_on, trace_attrs, whose_gradient, workers_of
from gtrace.report.names import listed
from gtrace.report.statistics import Interval, bootstrap, holm, step_weights, thirds
from gtrace.trace.facts import StepTimes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from gtrace.costs import Cluster
    from gtrace.kernels import Flags, Floats, Ints
    from gtrace.report.analysis.cells import CellTable, Coder
    from gtrace.report.analysis.evidence import LayerChoice, PairedComparison
    from gtrace.sweep import SweepResult


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
        notes: what a reader must know about how the numbers were made, one line each.
        warnings: of the sweep itself.
        provenance: of the sweep.
        fits: levels and what they were fitted to, the largest tensor first; empty where no codec was fitted.
        at_layers: (families, targets) errors of the mixes of ``Family.at``, geometric mean over layers.
        comparisons: the leader at each target against every other family there; see :class:`PairedComparison`.
        phases: thirds of training that have steps; empty for fewer than three steps.
        bd_rates: of every family against qsgdinf; empty without it.
        layer_choices: tensors that another method than the leader suits better.
        layer_best: (tensors,) label of the method with the least error at the decisive target, at equal bits of the
            tensor itself; empty where fewer than two can be compared.
        layer_at: label -> (tensors,) its error there; empty where fewer than two can be compared.
        safety: errors beside the noise of the gradients.
        table: errors that methods are ranked by, step by step, for further comparisons.
        single: errors of single steps and one worker likewise.
        basis: workers, coder and window of the comparison.
        step_at: (families, targets) error of single steps at equal bits, for the same workers.
        coder_leaders: coder -> who leads when every method uses it.
        rotation: whether to rotate, tensor by tensor; None if that cannot be compared.
        exchanges: errors of averages after exchanges; empty unless the sweep measured some.
    """

    name: str
    rows: int
    configurations: tuple[Configuration, ...]
    families: tuple[Family, ...]
    targets: tuple[float, ...]
    tensors: tuple[str, ...]
    elements: Ints
    energy_share: Floats
    steps: Ints
    per_tensor: Floats
    per_step: Floats
    bits_per_step: Floats
    cells: int
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    provenance: dict[str, Any]
    fits: tuple[TensorFit, ...]
    at_layers: Floats
    comparisons: tuple[PairedComparison, ...]
    phases: tuple[Phase, ...]
    bd_rates: tuple[BDRate, ...]
    layer_choices: tuple[LayerChoice, ...]
    layer_best: tuple[str, ...]
    layer_at: dict[str, Floats]
    safety: Safety
    table: StepTable = field(repr=False)
    single: StepTable = field(repr=False)
    basis: Basis
    step_at: Floats
    coder_leaders: dict[Coder, Leader]
    rotation: Rotation | None
    exchanges: tuple[ExchangeError, ...]

    @property
    def measured(self) -> bool:
        """Whether any configuration has an error that is a number."""
        return any(math.isfinite(c.relative_variance) for c in self.configurations)

    @property
    def zero(self) -> bool:
        """Whether errors were measured, but every gradient is zero, so that they relate to nothing."""
        return not self.measured and any(c.cells for c in self.configurations)

    @property
    def trace_attrs(self) -> dict[str, Any]:
        """What the trace says of its run; empty if the results do not hold it."""
        return trace_attrs(self.provenance)

    def timed(self, cluster: Cluster) -> tuple[Cluster, str]:
        """A cluster with the times that the capture of the trace measured; see :meth:`StepTimes.applied`."""
        return StepTimes.of(self.trace_attrs).applied(cluster)

    @property
    def decisive(self) -> int:
        """Index of the target where most methods can be compared, the nearest to three bits of those; or -1."""
        return decisive(self.families, self.targets)

    def ranking(self, target: int) -> list[Family]:
        """The families that can be compared at a target (an index), least variance first."""
        return ranked(self.families, target)

    def leaders(self, target: int) -> list[Family]:
        """The families that nobody beats at a target (an index), least variance first.

        A family is beaten when its error is larger than that of the first by more than :data:`LEVEL`, beyond the noise
        of steps. When there is no confidence interval, it must be larger in :data:`MOSTLY` all of training instead.
        """
        found = self.ranking(target)
        return [f for f in found if f is found[0] or not self._beaten(found[0], f, target)]

    def _beaten(self, first: Family, other: Family, target: int) -> bool:
        found = self.comparison(first.label, other.label, self.targets[target])
        sure = found is None or (found.differs if found.by_elements.known else not found.better < MOSTLY)
        return sure and other.at[target].variance > first.at[target].variance * (1 + LEVEL)

    def lossless(self, family: Family) -> bool:
        """Whether a family has no error at all, as the uncompressed gradient: there is nothing to compare."""
        values = [self.configurations[i].relative_variance for i in family.members]
        return bool(values) and all(value == 0 for value in values)

    @property
    def fitted_at(self) -> list[int]:
        """The steps whose data levels and codes were fitted on; empty where that is every step."""
        refit = self.provenance.get("refit")
        if refit == "once":
            return [int(step) for step in self.steps[:1]]
        return [step for step in self.steps.tolist() if step in refit] if isinstance(refit, (list, tuple)) else []

    def nearest(self, family: Family, bits: float = PREFERRED_BITS) -> int:
        """Index of the family's configuration with the nearest measured bits, -1 where none is known."""
        known = [i for i in family.members if math.isfinite(self.configurations[i].bits)]
        return min(known, key=lambda i: abs(self.configurations[i].bits - bits), default=-1)

    def view(self, families: Sequence[Family] | None = None) -> list[int]:
        """One configuration of each family, for what is shown by layer or by step: the nearest to three bits."""
        return [i for i in map(self.nearest, self.families if families is None else families) if i >= 0]

    def standings(self, bits: float) -> tuple[Standing, ...]:
        """The methods that can be compared at a target, least error first."""
        if bits not in self.targets:
            return ()
        k, found = self.targets.index(bits), []
        for family in self.ranking(k):
            at = family.at[k]
            specs = tuple(dict.fromkeys(self.configurations[i].spec for i in (at.lower, at.upper)))
            found.append(Standing(family.label, at.variance, at.bias, at.bits, at.outcome, specs))
        return tuple(found)

    def comparison(self, one: str, other: str, bits: float) -> PairedComparison | None:
        """How two families (labels, in any order) were compared at a target, None if they were not."""
        wanted = {one, other}
        return next((c for c in self.comparisons if c.bits == bits and {c.first, c.second} == wanted), None)

    def compare(self, pairs: Sequence[tuple[str, str]]) -> tuple[PairedComparison, ...]:
        """Configurations compared as they are, each at its own bits, with Holm's correction over the pairs.

        Args:
            pairs: specs, the numerator first.

        Raises:
            UsageError: a spec is not in the sweep, or was measured on too few cells to be compared.
        """
        place = {c.spec: i for i, c in enumerate(self.configurations) if not c.partial}
        for spec in (spec for pair in pairs for spec in pair):
            if spec not in place:
                raise UsageError(f"{self.name}: no comparable configuration '{spec}'; {suggest(spec, place)}")
        return compare_mixes(self.table, [(a, b, math.nan, [(place[a], 1.0)], [(place[b], 1.0)]) for a, b in pairs])


def _notes(table: CellTable, common: Flags, configurations: tuple[Configuration, ...], basis: Basis) -> Iterator[str]:
    """What a reader must know about how the numbers of a sweep came to be, one line each."""
    if not table.measured.any():
        yield from ["The column 'note' of the results says why errors are missing."] * bool(table.specs)
        return
    is_tensor = table.tensor >= 0
    covered = table.covers().any(axis=0)
    holes = int((is_tensor & ~covered).sum())
    if holes:
        yield (
            f"{holes:,} of {int(is_tensor.sum()):,} tensor-steps could not be measured with any codec and "
            "are left out (non-finite gradients, or skipped)."
        )
    yield from _naming("No error that is a number", [c.spec for c in configurations if c.partial and not c.cells])
    partial = [c.spec for c in configurations if c.partial and c.cells]
    if partial:
        yield (
            f"Not compared, because measured on too few of the tensors and steps: {listed(partial)}. "
            "Their lines are summed over what they have."
        )
    # A window is one cell, that of its last step, and holds others.
    if basis.window is None and common.sum() < covered.sum():
        yield (
            f"Compared over the {int(common.sum()):,} tensor-steps, of {int(covered.sum()):,}, "
            "that every compared codec has."
        )
    yield from _sources(table, configurations, basis)


def _sources(table: CellTable, configurations: tuple[Configuration, ...], basis: Basis) -> Iterator[str]:
    """What errors are when they are not those of single steps of one worker; and bits when they are not measured."""
    if basis.window is not None:
        yield (
            f"Some codecs have memory, so all are compared by the error of what has arrived over "
            f"{basis.steps_in_words}. The memory's part of it counts as bias."
        )
        without = [c.spec for c in configurations if c.cells and math.isnan(c.error)]
        yield from _naming("Not measured over several steps, so not compared", without)
    if basis.workers > 1:
        unknown = [c.spec for c in configurations if c.cells and not c.bias_known]
        said = "Bias not known, so all of the error counts as bias, which is the most it can be"
        yield from _naming(said, unknown, len(configurations))
    expected = [c.spec for c in configurations if c.bits_source in ("expected", "mixed")]
    said = f"Bits {CODED[basis.coder]} are computed, not counted on encoded bytes"
    yield from _naming(said, expected, len(configurations))
    lacking = [c.spec for c in configurations if math.isnan(c.bits) and c.cells]
    yield from _naming("No bits known, so not compared at equal bits", lacking)
    drawn = [c.spec for c in configurations if c.error_source in ("measured", "mixed")]
    said = "Error of the draws, rounding noise included, if there is no closed form"
    yield from _naming(said, drawn, len(configurations))
    unreadable = [spec for spec, found in zip(table.specs, table.parameters, strict=True) if found is None]
    yield from _naming("Parameters could not be read from the results", unreadable)


def _naming(sentence: str, specs: Sequence[str], every: int | None = None) -> Iterator[str]:
    """The sentence and the specs it is about, nothing if there are none; ``every`` spec is "all codecs"."""
    if specs:
        yield f"{sentence}: {'all codecs' if len(specs) == every else listed(specs)}."


def analyze(
    result: SweepResult,
    name: str = "sweep",
    targets: Sequence[float] | None = None,
    batch: float = math.nan,
    *,
    workers: int | None = None,
    coder: Coder = "huffman",
    horizon: int | None = None,
) -> SweepAnalysis:
    """Sum a sweep up.

    Args:
        result: any number of rows, also none; missing numbers are NaN.
        name: what the sweep is called in headings.
        targets: measured bits per coordinate at which methods are compared; None takes those where most can be.
        batch: samples of a step over all workers; NaN takes what the trace says.
        workers: whose average is compared; None takes those of the run that was captured.
        coder: that turns symbols into bits, for all methods.
        horizon: number of steps over which costs of noise are predicted; None takes the rest of the training.
    """
    own = read_cells(result)
    table = own.under_coder(coder)
    sums, _, partial = sums_of(table)
    steps = per_step(table)
    windows = over_windows(table, steps)
    chosen = workers or workers_of(result.provenance)
    split, basis = steps, Basis(chosen, coder)
    known = np.isfinite(windows.error)
    if (table.memory & ~partial & known.any(axis=1)).any():
        lengths = table.columns["window"][known]
        split, basis = windows, Basis(chosen, coder, (int(lengths.min()), int(lengths.max())))
    compared = replace(table, squared_error=split.at(chosen), energy=split.energy)
    ranked_sums, common, partial = sums_of(compared)
    parts = {
        "error": ranked_sums.relative(compared.squared_error, compared.energy),
        "error_bias": ranked_sums.relative(split.bias, split.energy),
        "bias": sums.relative(steps.bias, steps.energy),
        "variance": sums.relative(steps.variance, steps.energy),
        "window_error": ranked_sums.relative(windows.error, windows.energy),
        "window_variance": ranked_sums.relative(windows.variance, windows.energy),
        "bias_known": np.logical_and.reduce(np.isfinite(table.columns["relative_bias"]) | ~sums.used, axis=1),
        "bits_measured": sums.ratio(own.bits, table.n, strict=True),
    }
    labels, numbers = label(table.specs, table.methods, table.parameters), _numbers(sums)
    order = _order(table, labels[0], numbers["bits"])
    bits, errors = numbers["bits"][order], parts["error"][order]
    layer_bits = sums.by(table.tensor, len(table.tensors), "bits")[order]
    single, ranked_steps = (_step_table(each, order, bits, layer_bits) for each in (sums, ranked_sums))
    ranked_steps = replace(ranked_steps, noun="step" if basis.window is None else "window")
    configurations = _configurations(sums, partial, order, labels, numbers | parts, single)
    families, wanted = _families(configurations, bits, errors, targets)
    of_one_step = np.array([c.bias + c.variance / chosen for c in configurations])
    outlook = outlook_on(result, table.steps, batch, horizon, chosen)
    layer_at, layer_best, layer_choices = compare_layers(ranked_steps, families, wanted, table.tensors)
    energy = _energy_share(table, common)
    named = list(zip(table.tensors, table.elements.tolist(), energy.tolist(), strict=True))
    return SweepAnalysis(
        name=name,
        rows=len(result),
        configurations=configurations,
        families=families,
        targets=wanted,
        tensors=tuple(table.tensors),
        elements=table.elements,
        energy_share=energy,
        steps=table.steps,
        per_tensor=single.layer_variance,
        per_step=single.relative(),
        bits_per_step=sums.by(table.step, len(table.steps), "bits")[order],
        cells=int(common.sum()) if not partial.all() else 0,
        notes=tuple(_notes(table, common, configurations, basis)),
        warnings=result.warnings,
        provenance=result.provenance,
        fits=read_fits(result),
        exchanges=exchanges_of(result),
        at_layers=_at_layers(ranked_steps, families, len(wanted)),
        comparisons=compare_families(ranked_steps, families, wanted),
        phases=_phases(sums, ranked_sums, order, families, wanted),
        bd_rates=bd_rates(families, configurations),
        layer_choices=layer_choices,
        layer_best=layer_best,
        layer_at=layer_at,
        safety=judge(sums, order, result.provenance, outlook),
        table=ranked_steps,
        single=single,
        basis=basis,
        step_at=errors_at(families, bits, of_one_step, wanted),
        rotation=compare_rotation(single, families, configurations, named, wanted, coder),
        coder_leaders=_coder_leaders(own, sums, order, errors, families, wanted),
    )


def _step_table(sums: Sums, order: Ints, bits: Floats, layer_bits: Floats) -> StepTable:
    table, weights = sums.table, sums.weights
    tensors, steps = len(table.tensors), len(table.steps)
    # Sums are weighted by the part of training that a step represents, which these are to be without.
    totals = (sums.totals(values, table.step, steps) for values in (table.squared_error, table.energy))
    whole_error, whole_energy = (divide(total, weights, weights > 0)[order] for total in totals)
    return StepTable(
        steps=table.steps,
        weights=weights,
        whole_error=whole_error,
        whole_energy=whole_energy,
        error=sums.by_cell(table.squared_error, tensors, steps)[order],
        energy=sums.by_cell(table.energy, tensors, steps)[order],
        bits=bits,
        layer_variance=sums.by(table.tensor, tensors, "error")[order],
        layer_bits=layer_bits,
    )


def _at_layers(table: StepTable, families: Sequence[Family], targets: int) -> Floats:
    """(families, targets) geometric mean over layers, of the mix of configurations that stands for each family."""
    out = np.full((len(families), targets), np.nan)
    logs = np.log(np.where(table.layer_variance > 0, table.layer_variance, np.nan))
    for f, family in enumerate(families):
        for k, at in enumerate(family.at):
            mix = at.mix(table.bits)
            values = np.sum([part * logs[c] for c, part in mix], axis=0) if mix else np.zeros(0)
            known = values[np.isfinite(values)]
            if math.isfinite(at.variance) and len(known):
                out[f, k] = math.exp(float(known.mean()))
    return out


def _phases(
    sums: Sums, ranked_sums: Sums, order: Ints, families: Sequence[Family], targets: Sequence[float]
) -> tuple[Phase, ...]:
    """The thirds of training, each summed up like the whole: bits of all cells, errors of those that are ranked by."""
    found, steps = [], sums.table.steps
    for name, mask in thirds(steps):
        inside = steps[mask].tolist()
        # One group, the steps of this third.
        group = np.where(mask[sums.table.step], 0, -1)
        variance = ranked_sums.by(group, 1, "error")[order, 0]
        bits = sums.by(group, 1, "bits")[order, 0]
        at = errors_at(families, bits, variance, targets)
        found.append(Phase(name, inside[0], inside[-1], len(inside), variance, bits, at))
    return tuple(found)


def _order(table: CellTable, families: Sequence[str], bits: Floats) -> Ints:
    """(C,) configurations by family, and by bits within it."""
    first = {family: k for k, family in enumerate(dict.fromkeys(families))}
    known = np.where(np.isfinite(bits), bits, math.inf).tolist()
    order = sorted(range(len(known)), key=lambda c: (first[families[c]], known[c], table.specs[c]))
    return np.array(order, dtype=np.int64)


def _numbers(sums: Sums) -> dict[str, NDArray[Any]]:
    """Field of a configuration -> (C,) its values."""
    table = sums.table
    variance = sums.relative(table.squared_error, table.energy)
    bits = sums.ratio(table.bits, table.n, strict=True)
    numbers = {name: _summed(name, measure, sums) for name, measure in SUMMED.items()}
    optimal = numbers["optimal_variance"]
    return numbers | {
        "relative_variance": variance,
        "times_optimal": divide(variance, optimal, optimal > 0),
        "bits": bits,
        "ratio_float32": divide(np.full(len(bits), 32.0), bits, bits > 0),
        "step_ratio_float32": sums.step_ratio(),
        "cells": sums.used.sum(axis=1),
    }


def _configurations(
    sums: Sums,
    partial: Flags,
    order: Ints,
    labels: tuple[Sequence[str], Sequence[str]],
    numbers: Mapping[str, NDArray[Any]],
    single: StepTable,
) -> tuple[Configuration, ...]:
    table = sums.table
    numbers = {**numbers, "partial": partial}
    front = pareto_front(numbers["bits"].tolist(), np.where(partial, np.nan, numbers["error"]).tolist())
    error_source = sums.source(~table.error_drawn, table.error_drawn)
    bits_source = sums.source(np.isfinite(table.bits) & ~table.bits_drawn, table.bits_drawn)
    layers = np.log(np.where(single.layer_variance > 0, single.layer_variance, np.nan))
    return tuple(
        Configuration(
            spec=table.specs[c],
            method=table.methods[c],
            family=labels[0][c],
            setting=labels[1][c],
            nominal_bits=table.nominal_bits[c],
            layers_variance=math.exp(known_mean(layers[k])),
            error_source=error_source[c],
            bits_source=bits_source[c],
            fitted_on=table.fitted_on[c],
            pareto=bool(front[c]),
            in_steps=single.interval(single.log_ratio([(k, 1.0)])),
            **{name: values[c].item() for name, values in numbers.items()},
        )
        for k, c in enumerate(order.tolist())
    )


def _summed(name: str, measure: Measure, sums: Sums) -> Floats:
    """(C,) the mean of a column over the cells in use."""
    table, values, mean_abs = sums.table, sums.table.columns[name], sums.table.columns["mean_abs"]
    if measure.absolute:
        values = divide(values, mean_abs, mean_abs > 0)
    if measure.of == "energy":
        # What one cell lacks would make the sums of different cells, so nothing is left out here.
        return sums.ratio(values, table.energy, strict=True)
    # Numerator and denominator are summed apart, as for the whole model's gradient.
    weights = mean_abs * table.n if measure.of == "magnitude" else table.n
    return sums.ratio(values, weights, strict=False)


def _families(
    configurations: Sequence[Configuration], bits: Floats, errors: Floats, targets: Sequence[float] | None
) -> tuple[tuple[Family, ...], tuple[float, ...]]:
    """Configurations that can be compared, by family, at equal bits; and these bits, chosen if there are none."""
    families = []
    for name, method in {c.family: c.method for c in configurations}.items():
        members = tuple(i for i, c in enumerate(configurations) if c.family == name and not c.partial)
        families.append(Family(name, method, members, ()))
    curves = curves_of(families, bits, errors)
    wanted = choose_targets(curves) if targets is None else tuple(float(t) for t in targets)
    biased = [c.error_bias / c.error if c.error > 0 else 0.0 for c in configurations]

    def whole(at: AtBits, members: Sequence[int]) -> AtBits:
        placed = at.among(members)
        mix = placed.mix(bits)
        return replace(placed, bias=at.variance * sum(part * biased[c] for c, part in mix)) if mix else at

    found = zip(families, *(all_at_bits(curves, target) for target in wanted), strict=True)
    return tuple(replace(family, at=tuple(whole(at, family.members) for at in own)) for family, *own in found), wanted


def _coder_leaders(
    table: CellTable, sums: Sums, order: Ints, errors: Floats, families: Sequence[Family], targets: Sequence[float]
) -> dict[Coder, Leader]:
    """Coder -> who leads when all use it, at the decisive target or, where it compares nothing, at one of its own."""
    k = decisive(families, targets)
    found: dict[Coder, Leader] = {}
    for coder in CODED if k >= 0 else ():
        bits = sums.ratio(table.under_coder(coder).bits, table.n, strict=True)[order]
        curves = curves_of(families, bits, errors)
        own = (_leader(curves, families, rate) for rate in choose_targets(curves))
        same = _leader(curves, families, targets[k])
        known = [same] if same else [leader for leader in own if leader]
        if known:
            found[coder] = max(known, key=lambda leader: (leader.among, -abs(leader.target - PREFERRED_BITS)))
    return found


def _leader(curves: Sequence[Rates], families: Sequence[Family], target: float) -> Leader | None:
    """Who has the least error; None when fewer than two can be compared, or when nobody beats sending nothing."""
    found = zip(all_at_bits(curves, target), families, strict=True)
    known = [(at.variance, family.label) for at, family in found if math.isfinite(at.variance)]
    if len(known) < 2 or min(known)[0] > 1:
        return None
    return Leader(min(known)[1], target, min(known)[0], len(known))


def _energy_share(table: CellTable, common: Flags) -> Floats:
    energy = np.where(common, np.nan_to_num(table.energy).max(axis=0, initial=0), 0)
    mask = table.tensor >= 0
    per_tensor = np.bincount(table.tensor[mask], weights=energy[mask], minlength=len(table.tensors))
    total = per_tensor.sum()
    return per_tensor / total if total > 0 else np.full(len(per_tensor), np.nan)


@dataclass(frozen=True, slots=True)
class ConfigurationRatio:
    """One configuration in two sweeps. Ratios are second over first.

    Attributes:
        first: relative variance in the first sweep, over what is paired, or over all of it where nothing is;
            ``second`` in the second.
        first_bits: measured bits per coordinate in the first sweep, over all of it.
        cells: tensors at steps that are paired.
        by_elements: ``ratio`` over what is paired, with its interval over steps.
        p_holm: corrected for all configurations, NaN without one.
    """

    spec: str
    first: float
    second: float
    ratio: float
    first_bits: float
    second_bits: float
    cells: int
    by_elements: Interval
    p_holm: float

    @property
    def differs(self) -> bool:
        """Whether the difference is beyond the noise of steps, corrected for the number of configurations."""
        return self.p_holm < SIGNIFICANT


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Two sweeps.

    Attributes:
        first: name of the sweep in the denominators.
        second: name of the one in the numerators.
        shared: configurations that both have, in the order of the first.
        only_first: specs that the second lacks.
        only_second: specs that the first lacks.
        tensors: names that both have.
        steps: captured steps that both have.
        same_trace: both measured the same trace; None where a sweep does not say which.
        whose: gradients they measured, in words.
    """

    first: str
    second: str
    shared: tuple[ConfigurationRatio, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    tensors: int
    steps: int
    same_trace: bool | None
    whose: str


def compare_sweeps(first: SweepAnalysis, second: SweepAnalysis) -> SideBySide:
    """Configurations that two sweeps share, on the tensors and steps that both have."""
    a = {c.spec: i for i, c in enumerate(first.configurations)}
    b = {c.spec: i for i, c in enumerate(second.configurations)}
    place = {tensor: j for j, tensor in enumerate(second.tensors)}
    tensors = [i for i, tensor in enumerate(first.tensors) if tensor in place]
    others = np.array([place[first.tensors[i]] for i in tensors], dtype=np.int64)
    steps, in_first, in_second = np.intersect1d(first.steps, second.steps, return_indices=True)
    # Indices of tensors and of steps.
    pick = (np.array(tensors, dtype=np.int64), in_first), (others, in_second)
    shared = []
    for spec in (spec for spec in a if spec in b):
        one, two = first.configurations[a[spec]], second.configurations[b[spec]]
        found = _paired([(first.single, a[spec], pick[0]), (second.single, b[spec], pick[1])], steps)
        if found is None:
            found = one.relative_variance, two.relative_variance, 0, Interval(math.nan, why="nothing is in both")
        x, y, cells, interval = found
        ratio = y / x if x > 0 else math.nan
        shared.append(ConfigurationRatio(spec, x, y, ratio, one.bits, two.bits, cells, interval, math.nan))
    corrected = holm([found.by_elements.p for found in shared])
    prints = [sweep.provenance.get("trace_fingerprint") for sweep in (first, second)]
    whose = list(dict.fromkeys(whose_gradient(sweep.provenance) for sweep in (first, second)))
    return SideBySide(
        first=first.name,
        second=second.name,
        shared=tuple(replace(found, p_holm=float(p)) for found, p in zip(shared, corrected, strict=True)),
        only_first=tuple(spec for spec in a if spec not in b),
        only_second=tuple(spec for spec in b if spec not in a),
        tensors=len(tensors),
        steps=len(steps),
        same_trace=None if None in prints else prints[0] == prints[1],
        whose=whose[0] if len(whose) == 1 else f"{whose[1]} over {whose[0]}",
    )


def _paired(
    sides: Sequence[tuple[StepTable, int, tuple[Ints, Ints]]], steps: Ints
) -> tuple[float, float, int, Interval] | None:
    """Relative variances over the cells that both have, how many these are, and the interval of their ratio."""
    cells = [[values[c][np.ix_(*own)] for values in (table.error, table.energy)] for table, c, own in sides]
    known = np.logical_and.reduce([np.isfinite(part) for table in cells for part in table])
    if not known.any():
        return None
    # Steps in rows, each summed over the tensors that both have there.
    error, energy = (np.array([np.where(known, table[k], 0).sum(axis=0) for table in cells]) for k in (0, 1))
    there = known.any(axis=0)
    weights = np.zeros(len(steps))
    weights[there] = step_weights(steps[there])
    top, bottom = error @ weights, energy @ weights
    if not (bottom > 0).all():
        return None
    logs = np.full((2, len(steps)), np.nan)
    for k in range(2):
        logs[k, there] = np.subtract(*(log_of_mean(one[k, there], weights[there]) for one in (error, energy)))
    x, y = (top / bottom).tolist()
    return x, y, int(known.sum()), bootstrap(logs[1] - logs[0], weights, KEY).exp()
