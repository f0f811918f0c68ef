"""What a sweep says, as numbers: rows summed up to one point per configuration, per tensor and per step.

Everything that is drawn or printed about a sweep comes from :class:`SweepAnalysis`. Nothing here formats.

How rows are summed up. A *cell* is one tensor at one step. In each cell a configuration has one error (the
expectation if there is a closed form, otherwise the mean over draws), one number of bits (the mean over
draws of what was really encoded, otherwise the expectation) and one energy. Over cells, relative variance is
``sum w squared_error / sum w energy`` and bits per coordinate ``sum w bits n / sum w n``, so that large tensors and
large gradients count as they do in training; ``w`` is the part of training that the step represents. This is *by
elements*: every element of the model counts the same. *By layers*, every layer does: the geometric mean of the
layers' relative variances. All configurations are summed over the same cells.

What methods are compared by is their *error*: bias and an M-th of the variance, for M workers, over windows of steps
when a codec with memory takes part, with the bits of one coder for all; see :mod:`gtrace.report.analysis.results`.
For one worker, without windows, it is the relative variance.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.report.analysis.cells import CODERS, CellTable, Coder, Sums, common_cells, divide, read_cells
from gtrace.report.analysis.details import compare_rotation, exchanges_of, read_fits
from gtrace.report.analysis.equal_bits import PREFERRED_BITS, AtBits, Rates, all_at_bits, choose_targets, pareto_front
from gtrace.report.analysis.evidence import KEY, Phase, StepTable, compare_families, compare_layers, log_of_mean
from gtrace.report.analysis.families import (
    SUMMED,
    Configuration,
    Family,
    Leader,
    Measure,
    bd_rates,
    curves_of,
    decisive,
    errors_at,
    label,
)
from gtrace.report.analysis.results import SweepAnalysis, over_windows, per_step, ranked_by, sweep_notes
from gtrace.report.analysis.runs import known_mean
from gtrace.report.analysis.safety import Outlook, judge, outlook_of, trace_attrs, workers_of
from gtrace.report.statistics import bootstrap, step_weights, thirds
from gtrace.sweep.noise_cost import noise_costs
from gtrace.trace import OptimizerFacts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from gtrace.sweep import SweepResult


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
    sums, _, partial = _sums(table)
    steps = per_step(table)
    windows = over_windows(table, steps)
    chosen = workers or workers_of(result.provenance)
    compared, split, basis = ranked_by(table, steps, windows, partial, chosen, coder)
    ranked_sums, common, partial = _sums(compared)
    parts = {
        "error": ranked_sums.relative(compared.squared_error, compared.energy),
        "error_bias": ranked_sums.relative(split.bias, split.energy),
        "bias": sums.relative(steps.bias, steps.energy),
        "variance": sums.relative(steps.variance, steps.energy),
        "window_error": ranked_sums.relative(windows.error, windows.energy),
        "window_variance": ranked_sums.relative(windows.variance, windows.energy),
        "bias_known": np.logical_and.reduce(np.isfinite(table.relative_bias) | ~sums.used, axis=1),
        "bits_measured": sums.ratio(own.bits, table.n, strict=True),
    }
    order, configurations = _configurations(sums, partial, parts)
    bits, errors = (np.array([getattr(c, name) for c in configurations]) for name in ("bits", "error"))
    layer_bits = sums.bits_by(table.tensor, len(table.tensors))[order]
    single, ranked_steps = (_step_table(each, order, bits, layer_bits) for each in (sums, ranked_sums))
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
        bits_per_step=sums.bits_by(table.step, len(table.steps))[order],
        cells=int(common.sum()) if not partial.all() else 0,
        notes=sweep_notes(table, common, configurations, basis),
        warnings=result.warnings,
        provenance=result.provenance,
        fits=read_fits(result),
        exchanges=exchanges_of(result),
        step_weights=sums.weights,
        per_tensor_bits=single.layer_bits,
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


def outlook_on(
    result: SweepResult, steps: NDArray[np.int64], batch: float, horizon: int | None, workers: int | None = None
) -> Outlook:
    """:func:`outlook_of` a sweep with these ``steps``, ascending.

    Without a horizon it is the rest of the training; without workers, those of the run that was captured.
    """
    length = OptimizerFacts.of(trace_attrs(result.provenance)).length
    left = None if length is None or not len(steps) or length <= steps[0] else length - int(steps[0])
    of = workers or workers_of(result.provenance)
    return outlook_of(noise_costs(result), workers=of, batch=batch, horizon=horizon, left=left)


def _sums(table: CellTable) -> tuple[Sums, NDArray[np.bool_], NDArray[np.bool_]]:
    """Sums over what is compared, and the masks of :func:`common_cells`; a step that no codec measured weighs 0."""
    common, partial = common_cells(table)
    used = np.where(partial[:, None], table.measured, table.used(common))
    weights = np.zeros(len(table.steps))
    there = np.unique(table.step[used.any(axis=0)])
    weights[there] = step_weights(table.steps[there])
    return Sums(table, used, weights), common, partial


def _log(values: NDArray[np.float64]) -> NDArray[np.float64]:
    out = np.full(values.shape, np.nan)
    np.log(values, out=out, where=values > 0)
    return out


def _step_table(
    sums: Sums, order: NDArray[np.int64], bits: NDArray[np.float64], layer_bits: NDArray[np.float64]
) -> StepTable:
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
        layer_variance=sums.relative_variance_by(table.tensor, tensors)[order],
        layer_bits=layer_bits,
    )


def _at_layers(table: StepTable, families: Sequence[Family], targets: int) -> NDArray[np.float64]:
    """(families, targets) geometric mean over layers, of the mix of configurations that stands for each family."""
    out = np.full((len(families), targets), np.nan)
    logs = _log(table.layer_variance)
    for f, family in enumerate(families):
        for k, at in enumerate(family.at):
            mix = at.mix(table.bits)
            values = np.sum([part * logs[c] for c, part in mix], axis=0) if mix else np.zeros(0)
            known = values[np.isfinite(values)]
            if math.isfinite(at.variance) and len(known):
                out[f, k] = math.exp(float(known.mean()))
    return out


def _phases(
    sums: Sums, ranked_sums: Sums, order: NDArray[np.int64], families: Sequence[Family], targets: Sequence[float]
) -> tuple[Phase, ...]:
    """The thirds of training, each summed up like the whole: bits of all cells, errors of those that are ranked by."""
    found, steps = [], sums.table.steps
    for name, mask in thirds(steps):
        inside = steps[mask].tolist()
        # One group, the steps of this third.
        group = np.where(mask[sums.table.step], 0, -1)
        variance = ranked_sums.relative_variance_by(group, 1)[order, 0]
        bits = sums.bits_by(group, 1)[order, 0]
        at = errors_at(families, bits, variance, targets)
        found.append(Phase(name, inside[0], inside[-1], len(inside), variance, bits, at))
    return tuple(found)


def _configurations(
    sums: Sums, partial: NDArray[np.bool_], parts: Mapping[str, NDArray[Any]]
) -> tuple[NDArray[np.int64], tuple[Configuration, ...]]:
    table, weights = sums.table, sums.weights
    families, settings = label(table.specs, table.methods, table.parameters)
    variance = sums.relative(table.squared_error, table.energy)
    bits = sums.ratio(table.bits, table.n, strict=True)
    numbers = {name: _summed(name, measure, sums) for name, measure in SUMMED.items()}
    optimal, cells = numbers["optimal_variance"], sums.used.sum(axis=1)
    layer_logs = _log(sums.relative_variance_by(table.tensor, len(table.tensors)))
    numbers |= {
        "relative_variance": variance,
        "times_optimal": divide(variance, optimal, optimal > 0),
        "layers_variance": np.array([math.exp(known_mean(logs)) for logs in layer_logs]),
        "bits": bits,
        "ratio_float32": divide(np.full(len(bits), 32.0), bits, bits > 0),
        "step_ratio_float32": sums.step_ratio(),
        **parts,
    }
    top, bottom = (sums.totals(v, table.step, len(table.steps)) for v in (table.squared_error, table.energy))
    # Logs of relative variances, and what each step adds to them.
    in_steps, there = np.full(top.shape, np.nan), weights > 0
    for c in range(len(top)):
        parts_of_log = (log_of_mean(v[c, there] / weights[there], weights[there]) for v in (top, bottom))
        in_steps[c, there] = np.subtract(*parts_of_log)
    compared = np.where(partial, np.nan, parts["error"])
    front = pareto_front(bits.tolist(), compared.tolist())
    error_source = sums.source(~table.error_drawn, table.error_drawn)
    bits_source = sums.source(np.isfinite(table.bits) & ~table.bits_drawn, table.bits_drawn)
    first = {family: k for k, family in enumerate(dict.fromkeys(families))}
    known = np.where(np.isfinite(bits), bits, math.inf).tolist()
    order = sorted(range(len(known)), key=lambda c: (first[families[c]], known[c], table.specs[c]))
    configurations = tuple(
        Configuration(
            spec=table.specs[c],
            method=table.methods[c],
            family=families[c],
            setting=settings[c],
            nominal_bits=table.nominal_bits[c],
            cells=int(cells[c]),
            partial=bool(partial[c]),
            error_source=error_source[c],
            bits_source=bits_source[c],
            fitted_on=table.fitted_on[c],
            pareto=bool(front[c]),
            in_steps=bootstrap(in_steps[c], weights, KEY),
            **{name: values[c].item() for name, values in numbers.items()},
        )
        for c in order
    )
    return np.array(order, dtype=np.int64), configurations


def _summed(name: str, measure: Measure, sums: Sums) -> NDArray[np.float64]:
    """(C,) the mean of a column over the cells in use."""
    table, values = sums.table, sums.table.columns[name]
    if measure.absolute:
        values = divide(values, table.mean_abs, table.mean_abs > 0)
    if measure.of == "energy":
        # What one cell lacks would make the sums of different cells, so nothing is left out here.
        return sums.ratio(values, table.energy, strict=True)
    # Numerator and denominator are summed apart, as for the whole model's gradient.
    weights = table.mean_abs * table.n if measure.of == "magnitude" else table.n
    return sums.ratio(values, weights, strict=False)


def _families(
    configurations: Sequence[Configuration],
    bits: NDArray[np.float64],
    errors: NDArray[np.float64],
    targets: Sequence[float] | None,
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
    table: CellTable,
    sums: Sums,
    order: NDArray[np.int64],
    errors: NDArray[np.float64],
    families: Sequence[Family],
    targets: Sequence[float],
) -> dict[str, Leader]:
    """Coder -> who leads when all use it, at the decisive target or, where it compares nothing, at one of its own."""
    k = decisive(families, targets)
    found: dict[str, Leader] = {}
    for coder in CODERS if k >= 0 else ():
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


def _energy_share(table: CellTable, common: NDArray[np.bool_]) -> NDArray[np.float64]:
    energy = np.where(common, np.nan_to_num(table.energy).max(axis=0, initial=0), 0)
    mask = table.tensor >= 0
    per_tensor = np.bincount(table.tensor[mask], weights=energy[mask], minlength=len(table.tensors))
    total = per_tensor.sum()
    return per_tensor / total if total > 0 else np.full(len(per_tensor), np.nan)
