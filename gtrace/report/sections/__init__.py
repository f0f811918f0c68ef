"""The sections of a report. A new one is a module of this package, and an entry of :data:`SECTIONS`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gtrace.errors import UsageError, suggest
from gtrace.report.figures import FIGURES
from gtrace.report.inputs import RUN_SUFFIX, SWEEP_SUFFIX, Report, make_report
from gtrace.report.sections import plans, savings, sweep, traces, training
from gtrace.sweep.store import SweepResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from matplotlib.figure import Figure

    from gtrace.report.section import FigureSpec, Section, Verdict

#: Name -> the sections of that name in a report, with this many lines of tables of layers (None: all). In their order.
SECTIONS: dict[str, Callable[[Report, int | None], Iterator[Section]]] = {
    "sweeps": sweep.sections,
    "side_by_side": lambda report, _: map(sweep.side_by_side_section, report.side_by_side),
    "runs": lambda report, _: map(training.runs_section, report.runs),
    "pooled_runs": lambda report, _: (training.pooled_section(*pool) for pool in report.pools),
    "savings": lambda report, most: (savings.savings_section(found, most) for found in report.savings),
    "traces": lambda report, _: map(traces.trace_section, report.traces),
    "plans": lambda report, most: (plans.plan_section(plan, most) for plan in report.plans),
}


def sections(report: Report, most_layers: int | None = None) -> Iterator[Section]:
    """The sections of a report in their order, with at most this many lines in tables of layers; None for all."""
    for found in SECTIONS.values():
        yield from found(report, most_layers)


def answer(report: Report | SweepResult) -> Verdict | None:
    """The verdict on a sweep, or on the first sweep of a report; None without one. A notebook shows it as a table."""
    report = make_report([report]) if isinstance(report, SweepResult) else report
    return next((section.verdict for section in sections(report) if section.verdict is not None), None)


def figure_names(report: Report | None = None) -> list[str]:
    """Names of the figures that a report has something to draw for; without a report, of all there are."""
    return list(FIGURES) if report is None else list(figure_specs(report))


def draw(report: Report, name: str) -> Figure:
    """One figure of a report, made by its name.

    Args:
        report: as ``load_report`` and ``make_report`` return it.
        name: one of :func:`figure_names`; what comes before the figure's own name there may be left out
            where one figure alone is meant (``distribution`` for ``weight-distribution``).

    Raises:
        UsageError: no figure has this name, this report has nothing to draw for it, or several are meant.
    """
    specs = figure_specs(report)
    if name in specs:
        return specs[name].draw()
    several = [whole for whole in specs if whole.endswith(f"-{name}")] if name in FIGURES else []
    if len(several) == 1:
        return specs[several[0]].draw()
    if several:
        raise UsageError(f"figure '{name}': several of this report are called so; choose {', '.join(several)}")
    if not specs:
        raise UsageError(f"figure '{name}': these results have nothing to draw")
    if name == "savings" and not report.savings:
        raise UsageError("figure 'savings': needs --cluster with a compute time, e.g. 8x25Gbit/s,180ms.")
    if name in FIGURES:
        raise UsageError(f"figure '{name}': these results have nothing for it; they have {', '.join(specs)}")
    raise UsageError(f"figure '{name}': no such figure; {suggest(name, specs)}")


def figure_specs(report: Report) -> dict[str, FigureSpec]:
    """Every figure of a report by its name; the input's name is before it if there are several of a sort."""
    named: dict[str, FigureSpec] = {}
    for found in SECTIONS.values():
        own = list(found(report, None))
        for section in own:
            name = section.name.removesuffix(SWEEP_SUFFIX).removesuffix(RUN_SUFFIX)
            slug = re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("._-") or "results"
            for figure in section.figures:
                stem = f"{slug}-{figure.name}" if len(own) > 1 else figure.name
                name, again = stem, 2
                while name in named:
                    name, again = f"{stem}-{again}", again + 1
                named[name] = figure
    return named
