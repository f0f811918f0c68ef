"""Results turned into tables, figures and a page.

``load_report`` and ``make_report`` read results into a :class:`Report`; ``write_html``, ``write_report`` and
``print_report`` put it into words; ``analyze`` and ``analyze_runs`` give the bare numbers. The functions of
``figures`` and ``training`` take those and return matplotlib Figures, and ``draw`` makes any figure of a report by
its name, one of ``figure_names``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gtrace.report.analysis.runs import RunLogAnalysis as RunLogAnalysis
    from gtrace.report.analysis.runs import analyze_runs as analyze_runs
    from gtrace.report.analysis.sweep import SweepAnalysis as SweepAnalysis
    from gtrace.report.analysis.sweep import analyze as analyze
    from gtrace.report.files import default_page as default_page
    from gtrace.report.files import to_csv as to_csv
    from gtrace.report.files import to_json as to_json
    from gtrace.report.files import to_json_lines as to_json_lines
    from gtrace.report.files import to_parquet as to_parquet
    from gtrace.report.files import write_html as write_html
    from gtrace.report.files import write_report as write_report
    from gtrace.report.html import to_html as to_html
    from gtrace.report.inputs import Asked as Asked
    from gtrace.report.inputs import Report as Report
    from gtrace.report.inputs import load_report as load_report
    from gtrace.report.inputs import make_report as make_report
    from gtrace.report.inputs import newest_results as newest_results
    from gtrace.report.sections import answer as answer
    from gtrace.report.sections import draw as draw
    from gtrace.report.sections import figure_names as figure_names
    from gtrace.report.text import print_report as print_report
    from gtrace.report.text import to_latex as to_latex
    from gtrace.report.text import to_markdown as to_markdown

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

__all__ = sorted(" ".join(_HOMES.values()).split())  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _HOMES.items() if name in names.split()), None)
    if home is None:
        raise AttributeError(f"module 'gtrace.report' has no attribute {name!r}")
    return getattr(importlib.import_module(f"gtrace.report.{home}"), name)
