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
    from gtrace.report.analysis import SweepAnalysis, analyze
    from gtrace.report.export import to_json, to_markdown
    from gtrace.report.gallery import draw, figure_names
    from gtrace.report.html import to_html
    from gtrace.report.inputs import Report, load_report, make_report, newest_results
    from gtrace.report.latex import to_latex
    from gtrace.report.records import to_csv, to_json_lines, to_parquet
    from gtrace.report.runs import RunLogAnalysis, analyze_runs
    from gtrace.report.text import print_report
    from gtrace.report.write import default_page, write_html, write_report

_HOMES = {
    "Report": "inputs",
    "RunLogAnalysis": "runs",
    "SweepAnalysis": "analysis",
    "analyze": "analysis",
    "analyze_runs": "runs",
    "default_page": "write",
    "draw": "gallery",
    "figure_names": "gallery",
    "load_report": "inputs",
    "make_report": "inputs",
    "newest_results": "inputs",
    "print_report": "text",
    "to_csv": "records",
    "to_html": "html",
    "to_json": "export",
    "to_json_lines": "records",
    "to_latex": "latex",
    "to_markdown": "export",
    "to_parquet": "records",
    "write_html": "write",
    "write_report": "write",
}

__all__ = [
    "Report",
    "RunLogAnalysis",
    "SweepAnalysis",
    "analyze",
    "analyze_runs",
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
