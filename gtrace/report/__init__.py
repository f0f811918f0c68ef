"""Results turned into tables, figures and a page.

``load_report`` and ``make_report`` read results into a :class:`Report`; ``write_html``, ``write_report`` and
``print_report`` put it into words; ``analyze`` and ``analyze_runs`` give the bare numbers. The functions of
``figures`` and ``training`` take those and return matplotlib Figures, and ``draw`` makes any figure of a report by
its name, one of ``figure_names``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gtrace.report.analysis.results import SweepAnalysis
    from gtrace.report.analysis.run_logs import RunLogAnalysis, analyze_runs
    from gtrace.report.analysis.sweep import analyze
    from gtrace.report.files import default_page, to_csv, to_json, to_json_lines, to_parquet, write_html, write_report
    from gtrace.report.html import to_html
    from gtrace.report.inputs import Asked, Report, load_report, make_report, newest_results
    from gtrace.report.sections import answer, draw, figure_names
    from gtrace.report.text import print_report, to_latex, to_markdown

_HOMES = {
    "Asked": "inputs",
    "Report": "inputs",
    "RunLogAnalysis": "analysis.run_logs",
    "SweepAnalysis": "analysis.results",
    "analyze": "analysis.sweep",
    "analyze_runs": "analysis.run_logs",
    "answer": "sections",
    "default_page": "files",
    "draw": "sections",
    "figure_names": "sections",
    "load_report": "inputs",
    "make_report": "inputs",
    "newest_results": "inputs",
    "print_report": "text",
    "to_csv": "files",
    "to_html": "html",
    "to_json": "files",
    "to_json_lines": "files",
    "to_latex": "text",
    "to_markdown": "text",
    "to_parquet": "files",
    "write_html": "files",
    "write_report": "files",
}

__all__ = [
    "Asked",
    "Report",
    "RunLogAnalysis",
    "SweepAnalysis",
    "analyze",
    "analyze_runs",
    "answer",
    "default_page",
    "draw",
    "figure_names",
    "load_report",
    "make_report",
    "newest_results",
    "print_report",
    "to_csv",
    "to_html",
    "to_json",
    "to_json_lines",
    "to_latex",
    "to_markdown",
    "to_parquet",
    "write_html",
    "write_report",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(f"gtrace.report.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'gtrace.report' has no attribute {name!r}")
