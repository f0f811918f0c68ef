"""The numbers of a report for other programs: JSON, CSV, JSON lines and Parquet."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from typing import TYPE_CHECKING, Any

from gtrace.errors import UsageError
from gtrace.planning.plan import to_plain
from gtrace.report.analysis.equal_bits import OUTCOMES
from gtrace.report.analysis.notes import averaged_over
from gtrace.report.analysis.runs import RankCosts
from gtrace.report.plain import Record, flat, plain
from gtrace.report.sections.groups import group_json
from gtrace.report.sections.plans import plan_verdict
from gtrace.report.sections.safety import safety_json
from gtrace.report.sections.savings import savings_json, savings_records
from gtrace.report.sections.side_by_side import side_by_side_verdict
from gtrace.report.sections.sweep_words import sweep_verdict
from gtrace.report.sections.traces import section_json
from gtrace.report.sections.training import runs_verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from gtrace.report.analysis.evidence import Phase
    from gtrace.report.analysis.groups import TensorGroup
    from gtrace.report.analysis.results import SweepAnalysis
    from gtrace.report.analysis.run_logs import RunLogAnalysis
    from gtrace.report.analysis.runs import Run
    from gtrace.report.analysis.side_by_side import SideBySide
    from gtrace.report.analysis.traces import TraceSummary
    from gtrace.report.inputs import Report


#: What runs between ranks cost; missing for others.
RANK_FIELDS = tuple(field.name for field in dataclasses.fields(RankCosts))


def table_records(report: Report) -> list[Record]:
    """One record per configuration of every sweep, or per run of every run log, all with the same fields.

    With groups of tensors there is one per group and configuration.

    Raises:
        UsageError: sweeps and run logs together, or neither: their columns have nothing in common.
    """
    if bool(report.sweeps) == bool(report.runs) or report.traces or report.plans:
        raise UsageError(
            "-o .csv and .parquet hold one kind of table: pass sweeps alone or run logs alone, no traces or plans; "
            ".jsonl holds everything"
        )
    tables = csv_tables(report)
    return tables.get("groups") or tables.get("configurations") or tables.get("runs") or []


def csv_tables(report: Report) -> dict[str, list[Record]]:
    """The tables that have rows, by name: ``configurations`` and ``groups`` of sweeps, ``runs``, and ``savings``."""
    found = {
        "configurations": [{"results": s.name, **flat(c)} for s in report.sweeps for c in s.configurations],
        "groups": [row for s, part in zip(report.sweeps, report.groups, strict=False) for row in _groups(part, s.name)],
        "runs": [{"results": log.name, **run_row(run)} for log in report.runs for run in log.runs],
        "savings": [{"results": one.name, **row} for one in report.savings for row in savings_records(one)],
    }
    return {name: rows for name, rows in found.items() if rows}


def _groups(groups: Iterable[TensorGroup], name: str) -> Iterator[Record]:
    for group in groups:
        for c in group.analysis.configurations:
            yield {
                "results": name,
                "group": group.name,
                "group_tensors": len(group.tensors),
                "group_elements": group.elements,
                "group_energy_share": group.energy_share,
                **flat(c),
            }


def to_csv(report: Report) -> str:
    """:func:`table_records` as CSV at full precision, empty for what is not known.

    Raises:
        UsageError: sweeps and run logs together, or neither.
    """
    return csv_text(table_records(report))


def csv_text(rows: list[Record]) -> str:
    """Rows as CSV at full precision, empty for what is not known."""
    buffer = io.StringIO()
    if rows:
        writer = csv.DictWriter(buffer, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: "" if value != value else value for key, value in row.items()} for row in rows)
    return buffer.getvalue()


def to_json_lines(report: Report) -> str:
    """One JSON object a line; ``record`` says what it is and ``results`` where it is from. Missing numbers are null.

    Records: ``verdict``, ``configuration``, ``equal_bits``, ``comparison``, ``bd_rate``, ``phase``, ``layer``,
    ``layer_choice``, ``group``, ``pair``, ``side_by_side``, ``run``, ``seeds``, ``pooled_seeds``, ``saving``,
    ``tensor``.
    """
    return "".join(json.dumps(plain(record), ensure_ascii=False) + "\n" for record in all_records(report))


def to_parquet(report: Report) -> bytes:
    """:func:`table_records` as a Parquet file.

    Raises:
        UsageError: sweeps and run logs together, or neither; neither pyarrow nor pandas is there.
    """
    rows = table_records(report)
    columns = {name: [row[name] for row in rows] for name in rows[0]} if rows else {}
    buffer = io.BytesIO()
    try:
        _write_parquet(columns, buffer)
    except ImportError:
        raise UsageError(
            "-o .parquet needs pyarrow, which is not installed: pip install pyarrow, or take -o .csv or .jsonl"
        ) from None
    return buffer.getvalue()


def _write_parquet(columns: dict[str, list[Any]], buffer: io.BytesIO) -> None:
    """With pyarrow, or with pandas and whatever engine it finds; ImportError where there is neither."""
    try:
        import pyarrow  # type: ignore[import-untyped]
        from pyarrow import parquet
    except ImportError:
        import pandas as pd

        pd.DataFrame(columns).to_parquet(buffer)
        return
    parquet.write_table(pyarrow.table(columns), buffer)


def all_records(report: Report) -> Iterator[Record]:
    """Everything that a report says, the verdicts first."""
    from gtrace.report.sections.section import sections

    for section in sections(report):
        yield {"record": "verdict", "results": section.name, "sentences": list(section.sentences)}
    for sweep in report.sweeps:
        yield from _labelled(sweep.name, _sweep_records(sweep))
    for sweep, part in zip(report.sweeps, report.groups, strict=False):
        yield from ({"record": "group", **row} for row in _groups(part, sweep.name))
    for sweep, named in zip(report.sweeps, report.pairs, strict=False):
        yield from _labelled(sweep.name, ({"record": "pair", **_whose(sweep), **flat(c)} for c in named))
    for pair in report.side_by_side:
        common = {"first_results": pair.first, "same_trace": pair.same_trace}
        yield from _labelled(pair.second, ({"record": "side_by_side", **common, **flat(c)} for c in pair.shared))
    for log in report.runs:
        yield from _labelled(log.name, _run_records(log))
    for pool in report.pools:
        for group in pool.groups:
            yield {
                "record": "pooled_seeds",
                "results": list(pool.logs),
                "workers": pool.workers,
                "averaged": pool.averaged,
                **flat(group),
            }
    for savings in report.savings:
        yield from _labelled(savings.name, ({"record": "saving", **row} for row in savings_records(savings)))
    for trace in report.traces:
        yield from _labelled(trace.name, ({"record": "tensor", **dataclasses.asdict(t)} for t in trace.tensors))
    for plan in report.plans:
        yield {"record": "plan", "results": plan.name, "budget": plan.budget, **dataclasses.asdict(plan.totals)}
        yield from _labelled(plan.name, ({"record": "planned", **dataclasses.asdict(row)} for row in plan.tensors))


def _whose(sweep: SweepAnalysis) -> Record:
    """For how many workers errors are compared, and over how many ranks the gradients were averaged already."""
    return {"workers": sweep.basis.workers, "averaged_over": averaged_over(sweep.provenance)}


def _labelled(name: str, records: Iterable[Mapping[str, Any]]) -> Iterator[Record]:
    for record in records:
        yield {"record": record["record"], "results": name, **record}


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


def _run_records(log: RunLogAnalysis) -> Iterator[Record]:
    for run in log.runs:
        yield {"record": "run", "workers": log.workers, "averaged": log.averaged, **run_row(run)}
    for group in log.groups:
        yield {"record": "seeds", "workers": log.workers, "averaged": log.averaged, **flat(group)}


def run_row(run: Run) -> Record:
    """The ends of a training run."""
    return {
        "run": run.spec,
        "seed": run.seed,
        "steps_done": len(run.steps),
        "final_loss": run.final_loss,
        "final_accuracy": run.final_accuracy,
        "final_eval_loss": run.final_eval_loss,
        "mean_relative_variance": run.mean_relative_variance,
        "bits_per_worker": float(run.sent[-1]) if len(run.sent) else float("nan"),
        "ratio": run.ratio,
        "finished": run.finished,
        "diverged": run.diverged,
        "simulated_seconds": float(run.sim_seconds[-1]) if len(run.sim_seconds) else math.nan,
        **{f"rank_{name}": getattr(run.ranks, name, math.nan) for name in RANK_FIELDS},
    }


def to_json(report: Report) -> dict[str, Any]:
    """Every number of the report at full precision, in dictionaries, lists and arrays; NaN for missing."""
    return {
        "title": report.title,
        "sweeps": [_sweep_json(sweep) for sweep in report.sweeps],
        "groups": [[group_json(group) for group in found] for found in report.groups],
        "runs": [_run_log_json(run) for run in report.runs],
        "traces": [_trace_json(trace) for trace in report.traces],
        "savings": [savings_json(savings) for savings in report.savings],
        "plans": [{"verdict": plan_verdict(plan), **to_plain(plan)} for plan in report.plans],
        "pairs": [[flat(c) for c in found] for found in report.pairs],
        "side_by_side": [_pair_json(pair) for pair in report.side_by_side],
        "pooled_runs": [
            {**dataclasses.asdict(pool), "groups": [flat(group) for group in pool.groups]} for pool in report.pools
        ],
    }


def _pair_json(pair: SideBySide) -> dict[str, Any]:
    return {
        **{field.name: getattr(pair, field.name) for field in dataclasses.fields(pair)},
        "verdict": side_by_side_verdict(pair),
        "shared": [flat(found) for found in pair.shared],
    }


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


def _trace_json(summary: TraceSummary) -> dict[str, Any]:
    return {
        "name": summary.name,
        "tensors": [dataclasses.asdict(tensor) for tensor in summary.tensors],
        "laws": [section_json(section) for section in summary.laws],
    }


def _run_log_json(analysis: RunLogAnalysis) -> dict[str, Any]:
    return {
        "name": analysis.name,
        "verdict": runs_verdict(analysis),
        "task": analysis.task,
        "workers": analysis.workers,
        "averaged": analysis.averaged,
        "runs": [{**run_row(run), **dataclasses.asdict(run)} for run in analysis.runs],
        "notes": list(analysis.notes),
        "warnings": list(analysis.warnings),
        "study": analysis.study,
        "seeds": [flat(group) for group in analysis.groups],
    }
