"""Results turned into tables, figures and a page.

``load_report`` and ``make_report`` read results into a :class:`Report`; ``write_html``, ``write_report`` and
``print_report`` put it into words; ``analyze`` and ``analyze_runs`` give the bare numbers. ``draw`` makes any figure
of a report by its name, one of ``figure_names``, as a matplotlib Figure.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gtrace.report.analysis.runs import RunLogAnalysis, analyze_runs
    from gtrace.report.analysis.sweep import SweepAnalysis, analyze
    from gtrace.report.files import default_page, to_csv, to_json, to_json_lines, to_parquet, write_html, write_report
    from gtrace.report.html import to_html
    from gtrace.report.inputs import Asked, Report, load_report, make_report, newest_results
    from gtrace.report.sections import answer, draw, figure_names
    from gtrace.report.text import print_report, to_latex, to_markdown

__all__ = ["Asked", "Report", "RunLogAnalysis", "SweepAnalysis", "analyze", "analyze_runs", "answer", "default_page"]
__all__ += ["draw", "figure_names", "load_report", "make_report", "newest_results", "print_report", "to_csv", "to_html"]
__all__ += ["to_json", "to_json_lines", "to_latex", "to_markdown", "to_parquet", "write_html", "write_report"]

#: module -> what comes from it
_HOMES = {
    "analysis.runs": "RunLogAnalysis analyze_runs",
    "analysis.sweep": "SweepAnalysis analyze",
    "files": "default_page to_csv to_json to_json_lines to_parquet write_html write_report",
    "html": "to_html",
    "inputs": "Asked Report load_report make_report newest_results",
    "sections": "answer draw figure_names",
    "text": "print_report to_latex to_markdown",
}


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _HOMES.items() if name in names.split()), None)
    if home is None:
        raise AttributeError(f"module 'gtrace.report' has no attribute {name!r}")
    return getattr(importlib.import_module(f"gtrace.report.{home}"), name)
