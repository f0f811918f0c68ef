"""The numbers of a sweep for other programs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from gtrace.report.analysis.equal_bits import OUTCOMES
from gtrace.report.analysis.notes import averaged_over
from gtrace.report.plain import Record, flat
from gtrace.report.sections.groups import group_json, group_rows
from gtrace.report.sections.safety import safety_json
from gtrace.report.sections.section import Numbers
from gtrace.report.sections.sweep_words import sweep_verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gtrace.report.analysis.evidence import PairedComparison, Phase
    from gtrace.report.analysis.groups import TensorGroup
    from gtrace.report.analysis.results import SweepAnalysis


def sweep_numbers(
    analysis: SweepAnalysis, pairs: tuple[PairedComparison, ...] | None, groups: tuple[TensorGroup, ...] | None
) -> Numbers:
    """Every number of a sweep, of the pairs and of the groups that the reader named; None if nobody named any."""
    json: dict[str, Any] = {"sweeps": _sweep_json(analysis)}
    rows = {"configurations": [{"results": analysis.name, **flat(c)} for c in analysis.configurations]}
    if groups is not None:
        json["groups"] = [group_json(group) for group in groups]
        rows["groups"] = [{"results": analysis.name, **row} for row in group_rows(groups)]
    if pairs is not None:
        json["pairs"] = [flat(c) for c in pairs]
    return Numbers(json, _records(analysis, pairs or (), groups or ()), rows)


def _records(
    analysis: SweepAnalysis, pairs: tuple[PairedComparison, ...], groups: tuple[TensorGroup, ...]
) -> Iterator[Record]:
    yield from _sweep_records(analysis)
    for row in group_rows(groups):
        yield {"record": "group", **row}
    for pair in pairs:
        yield {"record": "pair", **_whose(analysis), **flat(pair)}


def _whose(sweep: SweepAnalysis) -> Record:
    """For how many workers errors are compared, and over how many ranks the gradients were averaged already."""
    return {"workers": sweep.basis.workers, "averaged_over": averaged_over(sweep.provenance)}


def _sweep_records(sweep: SweepAnalysis) -> Iterator[Record]:
    specs = [c.spec for c in sweep.configurations]
    for c in sweep.configurations:
        yield {"record": "configuration", **flat(c)}
    for f, family in enumerate(sweep.families):
        for k, at in enumerate(family.at):
            yield {
                "record": "equal_bits",
                "family": family.label,
                "bits": at.target,
                **_whose(sweep),
                "coder": sweep.basis.coder,
                "window": sweep.basis.window,
                "error": at.variance,
                "bias": at.bias,
                "error_bits": at.bits,
                "error_by_layers": sweep.at_layers[f, k],
                "error_of_single_steps": sweep.step_at[f, k],
                "outcome": at.outcome,
                "lower": specs[at.lower] if at.lower >= 0 else None,
                "upper": specs[at.upper] if at.upper >= 0 else None,
            }
    for comparison in sweep.comparisons:
        yield {"record": "comparison", **_whose(sweep), **flat(comparison)}
    for rate in sweep.bd_rates:
        yield {"record": "bd_rate", **flat(rate)}
    for phase in sweep.phases:
        for i, spec in enumerate(specs):
            yield {
                "record": "phase",
                "phase": phase.name,
                "first_step": phase.first,
                "last_step": phase.last,
                "spec": spec,
                "relative_variance": phase.relative_variance[i],
                "bits": phase.bits[i],
            }
    for t, tensor in enumerate(sweep.tensors):
        for i, spec in enumerate(specs):
            yield {
                "record": "layer",
                "tensor": tensor,
                "elements": sweep.elements[t],
                "energy_share": sweep.energy_share[t],
                "best": sweep.layer_best[t] or None,
                "spec": spec,
                "relative_variance": sweep.per_tensor[i, t],
                "bits": sweep.per_tensor_bits[i, t],
            }
    for choice in sweep.layer_choices:
        yield {"record": "layer_choice", **flat(choice)}


def _sweep_json(analysis: SweepAnalysis) -> dict[str, Any]:
    specs = [c.spec for c in analysis.configurations]
    equal_bits = [
        {
            "method": family.method,
            "family": family.label,
            "bits": at.target,
            "error": at.variance,
            "bias": at.bias,
            "error_bits": at.bits,
            "error_by_layers": analysis.at_layers[f, k],
            "error_of_single_steps": analysis.step_at[f, k],
            "outcome": at.outcome,
            "why": OUTCOMES[at.outcome],
            "lower": specs[at.lower] if at.lower >= 0 else None,
            "upper": specs[at.upper] if at.upper >= 0 else None,
        }
        for f, family in enumerate(analysis.families)
        for k, at in enumerate(family.at)
    ]
    return {
        "name": analysis.name,
        "verdict": sweep_verdict(analysis),
        "rows": analysis.rows,
        "cells": analysis.cells,
        **dataclasses.asdict(analysis.basis),
        "coder_leaders": {coder: found._asdict() for coder, found in analysis.coder_leaders.items()},
        "equal_bits": equal_bits,
        "configurations": [flat(c) for c in analysis.configurations],
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
        "safety": safety_json(analysis),
        "layer_best": dict(zip(analysis.tensors, analysis.layer_best, strict=True)),
    }


def _phase_json(phase: Phase, analysis: SweepAnalysis) -> dict[str, Any]:
    at = {
        family.label: {f"{target:g}": phase.at[f, k] for k, target in enumerate(analysis.targets)}
        for f, family in enumerate(analysis.families)
    }
    return {
        "name": phase.name,
        "first_step": phase.first,
        "last_step": phase.last,
        "steps": phase.steps,
        "relative_variance": {c.spec: phase.relative_variance[i] for i, c in enumerate(analysis.configurations)},
        "equal_bits": at,
    }
