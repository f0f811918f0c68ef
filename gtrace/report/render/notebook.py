"""What a notebook shows of a value: the answer first, in the page's styles, without a script.

A front end that drops styles shows the same tables.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from gtrace.planning import Plan
from gtrace.report.analysis.history import RunHistory, energy_shares, run_lines, spark
from gtrace.report.inputs import make_report
from gtrace.report.names import count, number
from gtrace.report.render.html import TEMPLATES, report_facts, source
from gtrace.report.section import FEW_ROWS, Cell, Column, Table, Verdict
from gtrace.report.sections import sections
from gtrace.trace import Trace

if TYPE_CHECKING:
    from gtrace.report.analysis.history import TensorHistory
    from gtrace.report.section import Shown
    from gtrace.sweep import SweepResult

#: Sentences of a plan.
_LEADING = 2


def to_notebook(value: Trace | SweepResult | Plan | Verdict) -> str:
    """HTML for the last line of a cell: the answer, a table of at most eight rows, and what to do next."""
    if isinstance(value, Verdict):
        shown: dict[str, Any] = {"lines": value.lines}
    elif isinstance(value, Trace):
        shown = _trace(value)
    else:
        plans, sweeps = ([value], []) if isinstance(value, Plan) else ([], [value.selected])
        shown = _results(plans, sweeps)
    # The one thing that is not escaped: the program's own styles.
    css = Markup(source("notebook.css"))  # noqa: S704
    return TEMPLATES.get_template("notebook.html").render(css=css, **shown)


def _results(plans: list[Plan], sweeps: list[SweepResult]) -> dict[str, Any]:
    report = make_report(sweeps, plans=plans)
    main = next(sections(report))
    last = [f"{count(len(main.warnings), 'warning')}: see .warnings"] if main.warnings else []
    return {
        "title": report.title if sweeps else main.heading,
        "facts": list(report_facts(report)),
        "lines": () if main.verdict is None else main.verdict.lines,
        "sentences": main.sentences[:_LEADING] if main.verdict is None else (),
        "table": main.brief,
        "last": last,
    }


def _trace(trace: Trace) -> dict[str, Any]:
    run = RunHistory(trace, trace.tensors)
    first, *rest = run_lines(trace, run)
    shares = energy_shares(run.tensors)
    ordered = sorted(zip(run.tensors, shares, strict=True), key=lambda row: -row[1])
    columns: list[tuple[Column, Any]] = [
        (Column("tensor", numeric=False), lambda row: row[0].info.name),
        (Column("shape", numeric=False), lambda row: row[0].shape),
        (Column("steps"), lambda row: f"{row[0].steps.size:,}"),
        (Column("energy", "share of the squared norms of all gradients"), lambda row: f"{row[1]:.1%}"),
        (Column("norm first"), lambda row: _norm(row[0], 0)),
        (Column("norm last"), lambda row: _norm(row[0], -1)),
        (Column("norm over steps", numeric=False), lambda row: spark(row[0].shown_norms)),
    ]
    left = ordered[FEW_ROWS:]
    last = [f"{count(len(left), 'more tensor')}, {sum(share for _, share in left):.1%} of the energy"] if left else []
    command = "" if trace.location is None else f", or gtrace sweep {shlex.quote(trace.path)}"
    last.append(f"next: gtrace.sweep(trace){command}")
    table = Table.of("Tensors with the most energy", ordered[:FEW_ROWS], columns)
    return {"title": first[1], "lines": rest, "quiet": True, "table": table, "last": last}


def _norm(row: TensorHistory, place: int) -> Shown:
    return Cell("NaN") if row.nonfinite[place] else number(row.norms[place])
