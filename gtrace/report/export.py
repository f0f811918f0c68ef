"""The numbers of a report for other programs and for pull requests: JSON and Markdown."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

from gtrace.planning.plan import to_plain
from gtrace.report.comparison import OUTCOMES
from gtrace.report.groups import group_json
from gtrace.report.laws import section_json
from gtrace.report.names import literal
from gtrace.report.noise_safety import safety_json
from gtrace.report.notes import averaged_over
from gtrace.report.plans import plan_verdict
from gtrace.report.records import flat, run_row
from gtrace.report.records import to_csv as to_csv
from gtrace.report.savings_tables import savings_json
from gtrace.report.sections import sections
from gtrace.report.verdict import runs_verdict, side_by_side_verdict, sweep_verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from gtrace.report.analysis import SweepAnalysis
    from gtrace.report.evidence import Phase
    from gtrace.report.inputs import Report
    from gtrace.report.runs import RunLogAnalysis
    from gtrace.report.side_by_side import SideBySide
    from gtrace.report.tables import Table
    from gtrace.report.traces import TraceSummary

_MARKDOWN = re.compile(r"([\\`*_\[\]<>#!|~$&])")


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


def to_markdown(report: Report) -> str:
    """Verdicts and tables for a pull request."""
    lines = [f"# {markdown_text(report.title)}", ""]
    for section in sections(report):
        lines += _section(section.heading, section.sentences)
        for table in section.tables:
            lines += markdown_table(table)
        lines += _notes([*section.notes, *(f"Warning: {w}" for w in section.warnings)])
    return "\n".join(lines).rstrip("\n") + "\n"


def markdown_text(value: object) -> str:
    r"""``value`` so that Markdown shows it as it is.

    >>> print(markdown_text("a|b<i>_c_"))
    a\|b\<i\>\_c\_
    """
    return _MARKDOWN.sub(r"\\\1", literal(value))


def _section(heading: str, verdict: Iterable[str]) -> list[str]:
    first, *rest = [markdown_text(sentence) for sentence in verdict]
    return [f"## {markdown_text(heading)}", "", " ".join([f"**{first}**", *rest]), ""]


def markdown_table(table: Table) -> list[str]:
    """The lines of a table, its heading and its notes."""

    def line(cells: Iterable[str]) -> str:
        return f"| {' | '.join(cells)} |"

    def rows() -> Iterator[str]:
        for row in table.rows:
            cells = []
            for cell in row:
                shown = markdown_text(cell.text)
                shown = f"**{shown}**" if cell.mark == "best" and shown else shown
                cells.append(f"{shown} ({markdown_text(cell.detail)})" if cell.detail else shown)
            yield line(cells)

    return [
        f"### {markdown_text(table.title)}",
        "",
        line(markdown_text(column.heading) for column in table.columns),
        line("---:" if column.numeric else "---" for column in table.columns),
        *rows(),
        "",
        *_notes(table.notes),
    ]


def _notes(notes: Iterable[str]) -> list[str]:
    lines = [f"- {markdown_text(note)}" for note in notes]
    return [*lines, ""] if lines else []
