"""The numbers of a report for other programs and for pull requests: JSON, CSV, Markdown."""

from __future__ import annotations

import csv
import dataclasses
import io
import re
from typing import TYPE_CHECKING, Any

from gtrace.errors import UsageError
from gtrace.report.comparison import OUTCOMES
from gtrace.report.law_tables import law_tables
from gtrace.report.laws import section_json
from gtrace.report.names import literal
from gtrace.report.tables import Table, configuration_table, equal_bits_table, run_table, shadow_table, trace_table
from gtrace.report.verdict import runs_verdict, sweep_verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from gtrace.report.analysis import SweepAnalysis
    from gtrace.report.inputs import Report
    from gtrace.report.runs import Run, RunLogAnalysis
    from gtrace.report.traces import TraceSummary

_MARKDOWN = re.compile(r"([\\`*_\[\]<>#!|~$&])")


def to_json(report: Report) -> dict[str, Any]:
    """Every number of the report at full precision, in dictionaries, lists and arrays; NaN for missing."""
    return {
        "title": report.title,
        "sweeps": [_sweep_json(sweep) for sweep in report.sweeps],
        "runs": [_run_log_json(run) for run in report.runs],
        "traces": [_trace_json(trace) for trace in report.traces],
    }


def _sweep_json(analysis: SweepAnalysis) -> dict[str, Any]:
    specs = [c.spec for c in analysis.configurations]
    equal_bits = [
        {
            "method": family.method,
            "family": family.label,
            "bits": at.target,
            "relative_variance": at.variance,
            "outcome": at.outcome,
            "why": OUTCOMES[at.outcome],
            "lower": specs[at.lower] if at.lower >= 0 else None,
            "upper": specs[at.upper] if at.upper >= 0 else None,
        }
        for family in analysis.families
        for at in family.at
    ]
    return {
        "name": analysis.name,
        "verdict": sweep_verdict(analysis),
        "rows": analysis.rows,
        "cells": analysis.cells,
        "equal_bits": equal_bits,
        "configurations": [dataclasses.asdict(c) for c in analysis.configurations],
        "tensors": list(analysis.tensors),
        "elements": analysis.elements,
        "steps": analysis.steps,
        "per_tensor": {spec: analysis.per_tensor[k] for k, spec in enumerate(specs)},
        "per_step": {spec: analysis.per_step[k] for k, spec in enumerate(specs)},
        "notes": list(analysis.notes),
        "warnings": list(analysis.warnings),
        "provenance": analysis.provenance,
        "fits": [dataclasses.asdict(fit) for fit in analysis.fits],
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
        "runs": [{**_run_row(run), **dataclasses.asdict(run)} for run in analysis.runs],
        "notes": list(analysis.notes),
        "warnings": list(analysis.warnings),
        "study": analysis.study,
    }


def _run_row(run: Run) -> dict[str, Any]:
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
    }


def to_csv(report: Report) -> str:
    """One line per configuration of every sweep, or per run of every run log, at full precision.

    Raises:
        UsageError: sweeps and run logs together, or neither: their columns have nothing in common.
    """
    if bool(report.sweeps) == bool(report.runs) or report.traces:
        raise UsageError("-o .csv holds one kind of table: pass sweeps alone or run logs alone, no traces")
    rows: list[dict[str, Any]] = []
    for sweep in report.sweeps:
        rows += [{"results": sweep.name, **dataclasses.asdict(c)} for c in sweep.configurations]
    for log in report.runs:
        rows += [{"results": log.name, **_run_row(run)} for run in log.runs]
    buffer = io.StringIO()
    if rows:
        writer = csv.DictWriter(buffer, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: "" if value != value else value for key, value in row.items()} for row in rows)
    return buffer.getvalue()


def to_markdown(report: Report) -> str:
    """Verdicts and tables for a pull request."""
    lines = [f"# {markdown_text(report.title)}", ""]
    for sweep in report.sweeps:
        lines += _section("Sweep", sweep.name, sweep_verdict(sweep))
        if sweep.measured:
            lines += markdown_table(equal_bits_table(sweep))
        if sweep.configurations:
            lines += markdown_table(configuration_table(sweep))
        lines += _notes([*sweep.notes, *(f"Warning: {w}" for w in sweep.warnings)])
    for log in report.runs:
        lines += _section("Training", log.name, runs_verdict(log))
        if log.runs:
            lines += markdown_table(run_table(log))
        if log.has_shadow:
            lines += markdown_table(shadow_table(log))
        lines += _notes([*log.notes, *(f"Warning: {w}" for w in log.warnings)])
    for trace in report.traces:
        lines += [*_section("Trace", trace.name, [trace.sentence]), *markdown_table(trace_table(trace))]
        for laws in trace.laws:
            lines += _section("", laws.title, laws.sentences)
            for table in law_tables(laws):
                lines += markdown_table(table)
    return "\n".join(lines).rstrip("\n") + "\n"


def markdown_text(value: object) -> str:
    r"""``value`` so that Markdown shows it as it is.

    >>> print(markdown_text("a|b<i>_c_"))
    a\|b\<i\>\_c\_
    """
    return _MARKDOWN.sub(r"\\\1", literal(value))


def _section(kind: str, name: str, verdict: Iterable[str]) -> list[str]:
    first, *rest = [markdown_text(sentence) for sentence in verdict]
    return ["## " + f"{kind} {markdown_text(name)}".lstrip(), "", " ".join([f"**{first}**", *rest]), ""]


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
