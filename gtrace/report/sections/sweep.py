"""A sweep as a section: which words, tables and figures it has, in which order, and its numbers for other programs."""

from __future__ import annotations

import dataclasses
import math
import shlex
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtrace.report import figures
from gtrace.report.analysis.details import MOST_NAMED, MOST_TENSORS, TensorFit, common_count, levels_on
from gtrace.report.analysis.equal_bits import OUTCOMES, PREFERRED_BITS
from gtrace.report.analysis.safety import averaged_over
from gtrace.report.names import count
from gtrace.report.section import Block, FigureSpec, Numbers, Record, Section, Verdict, flat
from gtrace.report.sections import charts, checks, sweep_tables
from gtrace.report.sections.sweep_words import compared_in_words, groups_in_words, side_by_side_verdict, sweep_verdict
from gtrace.report.verdict import verdict_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gtrace.report.analysis.evidence import PairedComparison, Phase
    from gtrace.report.analysis.families import Configuration
    from gtrace.report.analysis.savings import Savings
    from gtrace.report.analysis.side_by_side import SideBySide
    from gtrace.report.analysis.sweep import SweepAnalysis
    from gtrace.report.analysis.tensors import TensorGroup
    from gtrace.report.inputs import Report


#: nominal bits up to which a sweep is worth its time
MOST_BITS = 8


def sections(report: Report, most_layers: int | None) -> Iterator[Section]:
    """One section for each sweep."""
    for analysis, pairs, groups in zip_longest(report.sweeps, report.pairs, report.groups):
        first, *others = sweep_verdict(analysis)
        others += checks.safety_sentences(analysis) + checks.over_noise_sentence(analysis)
        others += checks.exchange_sentence(analysis.exchanges)
        others += checks.rotation_sentences(analysis.rotation)
        named = [f"{pair.first} has {compared_in_words(pair)}." for pair in pairs or ()]
        methods = count(len({c.method for c in analysis.configurations}), "method")
        made = {key: value for key, value in analysis.provenance.items() if key != "tensors"}
        savings = report.savings_of(analysis)
        yield Section(
            kind="Sweep",
            name=analysis.name,
            sentences=(*named, first, *groups_in_words(groups or ()), *others),
            blocks=(*_answers(analysis, pairs or (), groups or (), savings), *_details(analysis, most_layers)),
            place="choose",
            notes=analysis.notes,
            warnings=analysis.warnings,
            facts=(
                f"{methods} in {count(len(analysis.configurations), 'configuration')}, "
                f"{count(len(analysis.tensors), 'tensor')} with {count(int(analysis.elements.sum()), 'element')}, "
                f"{count(len(analysis.steps), 'step')}; {count(analysis.cells, 'tensor-step')} compared"
            ),
            provenance={"results": analysis.name, "rows": analysis.rows, **made},
            numbers=partial(_numbers, analysis, pairs, groups),
            verdict=(verdict := verdict_of(analysis, savings)),
            brief=sweep_tables.choice_table(analysis, savings),
            following=_following(analysis, verdict),
        )


def _following(analysis: SweepAnalysis, verdict: Verdict) -> str:
    """The command that makes a verdict better: bits by layer, the noise that is not known, or what was not measured."""
    path = analysis.provenance.get("trace")
    if not isinstance(path, str) or not Path(path).exists():
        return ""
    trace = shlex.quote(path)
    if analysis.provenance.get("kind") == "neural":
        return f"gtrace plan formats {trace} --kind neural"
    if verdict.answer == "compress":
        return f"gtrace plan {trace} --max-bits {verdict.bits:.3g}"
    bits = [c.nominal_bits for c in analysis.configurations if math.isfinite(c.nominal_bits)]
    if verdict.answer == "nothing is safe" and max(bits, default=0) < MOST_BITS:
        return f"gtrace sweep {trace} --methods qsgdinf --bits {max(bits, default=1) + 1:.0f}-{MOST_BITS}"
    if verdict.answer == "not measured":
        return f"gtrace sweep {trace}"
    return f"gtrace sweep {trace} --methods bf16" if verdict.answer == "do not compress" and not verdict.codec else ""


def _answers(
    analysis: SweepAnalysis,
    pairs: tuple[PairedComparison, ...],
    groups: tuple[TensorGroup, ...],
    savings: Savings | None,
) -> Iterator[Block]:
    if pairs:
        title = "Error of the first configuration over that of the second, paired over steps"
        note = f"Each at its own bits. p is Holm's, corrected for the {count(len(pairs), 'pair')} named."
        yield sweep_tables.pairs_table(title, pairs, (note,))
    if analysis.measured:
        yield sweep_tables.equal_bits_table(analysis)
    if analysis.safety.known:
        yield checks.safety_table(analysis, savings)
    if analysis.exchanges:
        yield checks.exchange_table(analysis.exchanges)
    if groups:
        yield sweep_tables.group_table(groups)
    if analysis.comparisons:
        yield sweep_tables.comparison_table(analysis)
        if analysis.phases:
            yield sweep_tables.phase_table(analysis)


def _details(analysis: SweepAnalysis, most_layers: int | None) -> Iterator[Block]:
    if not analysis.configurations:
        return
    yield sweep_tables.configuration_table(analysis)
    yield from sweep_figures(analysis)
    if analysis.safety.known:
        yield checks.noise_table(analysis, most_layers)
    layers = sweep_tables.layer_tables(analysis)
    if layers is not None:
        yield layers
    if analysis.rotation is not None:
        yield checks.rotation_table(
            analysis.rotation, {analysis.tensors[t] for t in sweep_tables.most_energy(analysis, most_layers)}
        )
    if analysis.measured and len(analysis.tensors) > 1:
        yield sweep_tables.layer_table(analysis, most_layers)


def sweep_figures(analysis: SweepAnalysis) -> Iterator[FigureSpec]:
    """The figures of a sweep that have something to show."""
    if any(c.bits > 0 and c.relative_variance > 0 and not c.partial for c in analysis.configurations):
        yield FigureSpec(
            "rate-distortion",
            "Error against measured bits",
            "Lower and further left is better. Each point is one configuration, summed over tensors and "
            "steps; its bar spans the middle 80 % of the steps, each by itself. Circled points are "
            "Pareto-optimal. What has no error at all, or no known bits, cannot be drawn." + _noise_in_words(analysis),
            lambda: figures.sweep.rate_distortion(analysis),
            chart=lambda: charts.rate_distortion(analysis),
            place="first",
        )
    if (analysis.per_step > 0).any():
        yield charts.charted(
            "variance-over-steps",
            "Error over training",
            f"For each method the configuration with measured bits nearest to {PREFERRED_BITS:g}, which are "
            "beside its name. Methods at different bits are not to be ranked here." + _noise_in_words(analysis),
            lambda: charts.error_over_steps(analysis),
            place="training",
        )
    if (analysis.per_tensor > 0).any():
        yield FigureSpec(
            "layers",
            "Error per layer",
            "Every tensor with every configuration, summed over steps. Darker is worse; grey has no value."
            + (" Rows are named by block, or every few." if len(analysis.tensors) > MOST_NAMED else ""),
            lambda: figures.sweep.layer_heatmap(analysis),
            chart=lambda: charts.layers(analysis),
            place="layers",
        )
    if len(analysis.steps) > 1 and (analysis.bits_per_step > 0).any():
        marked = "Points below: levels and codes were fitted to that step." if analysis.fitted_at else ""
        yield charts.charted(
            "bits-over-steps",
            "Bits over training",
            "The configurations of the figure before, payload and shared bytes of all tensors. A method whose "
            f"bits grow needs more of them as the gradients change. {marked}".rstrip(),
            lambda: charts.bits_over_steps(analysis),
            folded=True,
            place="training",
        )
    if any(c.relative_variance > 0 and c.w1_normalized > 0 for c in analysis.configurations):
        yield charts.charted(
            "wasserstein",
            "Wasserstein distance against variance",
            "Each point is one configuration. Lower and further left is better. The Wasserstein distance compares "
            "the values before and after as two heaps, whoever holds which; the variance compares them one by "
            "one. Points far below the others keep the distribution better than their error says.",
            lambda: charts.wasserstein(analysis),
            folded=True,
            place="details",
        )
    yield from _fit_figures(analysis)


def _noise_in_words(analysis: SweepAnalysis) -> str:
    if not analysis.safety.known:
        return ""
    return (
        " Dashed: the noise that gradients have without any codec, that of one worker, and that of the average over "
        f"{analysis.safety.workers} workers."
    )


def _fit_figures(analysis: SweepAnalysis) -> Iterator[FigureSpec]:
    n, specs = common_count(analysis.fits), {c.spec for c in analysis.configurations}
    drawn = [fit for fit in analysis.fits if levels_on(fit, specs, n)]
    others = drawn[1 : 1 + MOST_TENSORS]
    how = (
        f"Above, how the magnitudes r of the gradient lie on a logarithmic axis, and the part of the squared norm "
        f"that they hold; below, the {n} levels of each method, 0 at the left end. Every method with {n} levels is "
        "shown, so that they can be compared; methods that scale differently have panels of their own."
    )

    def levels(name: str, whose: str, which: str, fits: list[TensorFit]) -> FigureSpec:
        return FigureSpec(
            name,
            f"Levels over the density of {whose}",
            f"{how} The largest {which}.",
            lambda: figures.sweep.levels_over_density(analysis, fits),
            chart=lambda: charts.levels_over_density(analysis, fits),
            folded=fits is others,
            place="details",
        )

    if drawn:
        yield levels("levels", "the gradient", f"tensor, at step {drawn[0].step:,}", drawn[:1])
    if others:
        yield levels("levels-of-other-tensors", "other tensors", "tensors after the first", others)
    descents = [fit for fit in analysis.fits if fit.convergence is not None][:MOST_TENSORS]
    if descents:
        yield charts.charted(
            "convergence",
            "Convergence of coordinate descent",
            "How far the objective is from the best one found, after each sweep over the levels, from uniform, "
            "exponential and companding starts. The dotted line is one part in a million: arrived. A curve that "
            "ends above it is caught in a local optimum.",
            lambda: charts.convergence(descents),
            place="details",
        )


def _numbers(
    analysis: SweepAnalysis, pairs: tuple[PairedComparison, ...] | None, groups: tuple[TensorGroup, ...] | None
) -> Numbers:
    """Every number of a sweep, of the pairs and of the groups that the reader named; None if nobody named any."""
    json: dict[str, Any] = {"sweeps": _json(analysis)}
    rows = {"configurations": [{"results": analysis.name, **_flat(c)} for c in analysis.configurations]}
    group_rows: list[Record] = []
    if groups is not None:
        json["groups"] = []
        for group in groups:
            found = [flat(c) for c in group.analysis.configurations]
            numbers: dict[str, Any] = {"elements": group.elements, "energy_share": group.energy_share}
            about = {"group": group.name, "group_tensors": len(group.tensors)}
            about |= {f"group_{name}": value for name, value in numbers.items()}
            group_rows += [{**about, **record} for record in found]
            numbers |= {"verdict": sweep_verdict(group.analysis), "configurations": found}
            numbers["notes"] = list(group.analysis.notes)
            json["groups"].append({"group": group.name, "tensors": list(group.tensors), **numbers})
        rows["groups"] = [{"results": analysis.name, **row} for row in group_rows]
    if pairs is not None:
        json["pairs"] = [flat(c) for c in pairs]
    whose = {"workers": analysis.basis.workers, "averaged_over": averaged_over(analysis.provenance)}
    records = [
        *_records(analysis, whose),
        *({"record": "group", **row} for row in group_rows),
        *({"record": "pair", **whose, **flat(pair)} for pair in pairs or ()),
    ]
    return Numbers(json, records, rows)


def _flat(c: Configuration) -> Record:
    """A configuration with the name that papers have for its relative variance."""
    return {**flat(c), "vnmse": c.relative_variance}


def _equal_bits(sweep: SweepAnalysis) -> Iterator[Record]:
    specs = [c.spec for c in sweep.configurations]
    for f, family in enumerate(sweep.families):
        for k, at in enumerate(family.at):
            yield {
                "method": family.method,
                "family": family.label,
                "bits": at.target,
                "error": at.variance,
                "bias": at.bias,
                "error_bits": at.bits,
                "error_by_layers": sweep.at_layers[f, k],
                "error_of_single_steps": sweep.step_at[f, k],
                "outcome": at.outcome,
                "why": OUTCOMES[at.outcome],
                "lower": specs[at.lower] if at.lower >= 0 else None,
                "upper": specs[at.upper] if at.upper >= 0 else None,
            }


def _records(sweep: SweepAnalysis, whose: Record) -> Iterator[Record]:
    specs = [c.spec for c in sweep.configurations]
    yield from ({"record": "configuration", **_flat(c)} for c in sweep.configurations)
    basis = {**whose, "coder": sweep.basis.coder, "window": sweep.basis.window}
    for row in _equal_bits(sweep):
        del row["method"], row["why"]
        yield {"record": "equal_bits", **basis, **row}
    yield from ({"record": "comparison", **whose, **flat(c)} for c in sweep.comparisons)
    yield from ({"record": "bd_rate", **flat(rate)} for rate in sweep.bd_rates)
    for phase in sweep.phases:
        steps = {"phase": phase.name, "first_step": phase.first, "last_step": phase.last}
        for i, spec in enumerate(specs):
            numbers = {"relative_variance": phase.relative_variance[i], "bits": phase.bits[i]}
            yield {"record": "phase", **steps, "spec": spec, **numbers}
    for t, tensor in enumerate(sweep.tensors):
        about = {"tensor": tensor, "elements": sweep.elements[t], "energy_share": sweep.energy_share[t]}
        about["best"] = sweep.layer_best[t] or None
        for i, spec in enumerate(specs):
            numbers = {"relative_variance": sweep.per_tensor[i, t], "bits": sweep.per_tensor_bits[i, t]}
            yield {"record": "layer", **about, "spec": spec, **numbers}
    yield from ({"record": "layer_choice", **flat(choice)} for choice in sweep.layer_choices)
    yield from ({"record": "rotation", **row} for row in checks.rotation_rows(sweep.rotation))


def _json(analysis: SweepAnalysis) -> dict[str, Any]:
    specs = [c.spec for c in analysis.configurations]
    return {
        "name": analysis.name,
        "verdict": sweep_verdict(analysis),
        "rows": analysis.rows,
        "cells": analysis.cells,
        **dataclasses.asdict(analysis.basis),
        "coder_leaders": {coder: found._asdict() for coder, found in analysis.coder_leaders.items()},
        "equal_bits": list(_equal_bits(analysis)),
        "configurations": [_flat(c) for c in analysis.configurations],
        "tensors": list(analysis.tensors),
        "elements": analysis.elements,
        "steps": analysis.steps,
        "per_tensor": {spec: analysis.per_tensor[k] for k, spec in enumerate(specs)},
        "per_step": {spec: analysis.per_step[k] for k, spec in enumerate(specs)},
        "notes": list(analysis.notes),
        "warnings": list(analysis.warnings),
        "provenance": analysis.provenance,
        "fits": [dataclasses.asdict(fit) for fit in analysis.fits],
        "step_weights": analysis.step_weights,
        "averaged_over": averaged_over(analysis.provenance),
        "comparisons": [flat(c) for c in analysis.comparisons],
        "phases": [_phase_json(phase, analysis) for phase in analysis.phases],
        "bd_rates": [dataclasses.asdict(rate) for rate in analysis.bd_rates],
        "layer_choices": [flat(choice) for choice in analysis.layer_choices],
        "safety": checks.safety_json(analysis),
        "rotation": checks.rotation_rows(analysis.rotation),
        "layer_best": dict(zip(analysis.tensors, analysis.layer_best, strict=True)),
    }


def _phase_json(phase: Phase, analysis: SweepAnalysis) -> dict[str, Any]:
    targets = [f"{target:g}" for target in analysis.targets]
    at = {family.label: dict(zip(targets, phase.at[f], strict=True)) for f, family in enumerate(analysis.families)}
    specs = [c.spec for c in analysis.configurations]
    return {
        "name": phase.name,
        "first_step": phase.first,
        "last_step": phase.last,
        "steps": phase.steps,
        "relative_variance": dict(zip(specs, phase.relative_variance, strict=True)),
        "equal_bits": at,
    }


def side_by_side_section(pair: SideBySide) -> Section:
    """A further sweep against the first."""
    return Section(
        kind="Sweep",
        name=f"{pair.second} against {pair.first}",
        sentences=tuple(side_by_side_verdict(pair)),
        blocks=(sweep_tables.side_by_side_table(pair),),
        place="choose",
        together=True,
        numbers=partial(_pair_numbers, pair),
    )


def _pair_numbers(pair: SideBySide) -> Numbers:
    shared = [flat(found) for found in pair.shared]
    fields = {field.name: getattr(pair, field.name) for field in dataclasses.fields(pair)}
    common = {"first_results": pair.first, "same_trace": pair.same_trace}
    return Numbers(
        {"side_by_side": {**fields, "verdict": list(side_by_side_verdict(pair)), "shared": shared}},
        tuple({"record": "side_by_side", "results": pair.second, **common, **row} for row in shared),
    )
