"""A report as sections of words and tables, in the order in which a terminal, Markdown and LaTeX show them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gtrace.report.names import count
from gtrace.report.sections.groups import group_table, groups_in_words
from gtrace.report.sections.plans import budget_table, plan_table, plan_verdict
from gtrace.report.sections.safety import noise_table, safety_sentences, safety_table
from gtrace.report.sections.savings import savings_table, savings_verdict
from gtrace.report.sections.side_by_side import side_by_side_table, side_by_side_verdict
from gtrace.report.sections.sweep_tables import (
    comparison_table,
    configuration_table,
    equal_bits_table,
    layer_table,
    pairs_table,
    phase_table,
)
from gtrace.report.sections.sweep_words import compared_in_words, sweep_verdict
from gtrace.report.sections.traces import law_tables, trace_table
from gtrace.report.sections.training import rank_table, run_table, runs_verdict, seed_table, seeds_verdict, shadow_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gtrace.planning import Plan
    from gtrace.report.analysis.evidence import Comparison
    from gtrace.report.analysis.groups import TensorGroup
    from gtrace.report.analysis.results import SweepAnalysis
    from gtrace.report.analysis.run_logs import RunLogAnalysis
    from gtrace.report.analysis.savings import Savings
    from gtrace.report.analysis.traces import TraceSummary
    from gtrace.report.inputs import Report
    from gtrace.report.tables import Table


@dataclass(frozen=True, slots=True)
class Section:
    """Words and tables on one input.

    Attributes:
        kind: what it is about, empty for a part of the section before.
        name: of the input.
        sentences: the verdict, the answer first.
        tables: in the order of their weight.
        notes: what a reader must know.
        warnings: of the measurement itself.
    """

    kind: str
    name: str
    sentences: tuple[str, ...]
    tables: tuple[Table, ...]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def heading(self) -> str:
        """Kind and name."""
        return f"{self.kind} {self.name}".lstrip()


def sections(report: Report, most_layers: int | None = None) -> Iterator[Section]:
    """The sections of a report: sweeps, sweeps side by side, training, training put together, savings, traces, plans.

    Args:
        report: what to show.
        most_layers: lines of the table of layers at most; None for all.
    """
    for place, sweep in enumerate(report.sweeps):
        named = report.pairs[place] if report.pairs else ()
        grouped = report.groups[place] if report.groups else ()
        yield _sweep(sweep, most_layers, named, grouped, report.savings_of(sweep))
    for pair in report.side_by_side:
        name = f"{pair.second} against {pair.first}"
        yield Section("Sweep", name, tuple(side_by_side_verdict(pair)), (side_by_side_table(pair),))
    for log in report.runs:
        yield _run_log(log)
    for pool in report.pools:
        yield Section(
            "Training",
            f"put together: {', '.join(pool.logs)}",
            tuple(seeds_verdict(pool.groups, pool.averaged, neural=pool.neural)) or ("No run was finished.",),
            (seed_table(pool.groups, pool.averaged, neural=pool.neural, notes=pool.notes),),
        )
    for savings in report.savings:
        yield savings_section(savings, most_layers)
    for trace in report.traces:
        yield from _trace(trace)
    for plan in report.plans:
        yield _plan(plan, most_layers)


def savings_section(savings: Savings, most: int | None = None) -> Section:
    """What codecs save between ranks; ``most`` as of :func:`gtrace.report.sections.savings.savings_table`."""
    heading = f"{savings.title} {savings.name}"
    return Section("", heading, tuple(savings_verdict(savings)), (savings_table(savings, most),))


def _sweep(
    sweep: SweepAnalysis,
    most_layers: int | None,
    named: tuple[Comparison, ...],
    groups: tuple[TensorGroup, ...],
    savings: Savings | None,
) -> Section:
    sentences = [*sweep_verdict(sweep), *safety_sentences(sweep)]
    tables = []
    if named:
        sentences = [f"{c.first} has {compared_in_words(c)}." for c in named] + sentences
        title = "Error of the first configuration over that of the second, paired over steps"
        note = f"Each at its own bits. p is Holm's, corrected for the {count(len(named), 'pair')} named."
        tables.append(pairs_table(title, named, (note,)))
    if sweep.measured:
        tables.append(equal_bits_table(sweep))
    if sweep.safety.known:
        tables.append(safety_table(sweep, savings))
    if groups:
        sentences = [*sentences, *groups_in_words(groups)]
        tables.append(group_table(groups))
    if sweep.comparisons:
        tables.append(comparison_table(sweep))
        if sweep.phases:
            tables.append(phase_table(sweep))
    if sweep.measured and len(sweep.tensors) > 1:
        tables.append(layer_table(sweep, most_layers))
        if sweep.safety.known:
            tables.append(noise_table(sweep, most_layers))
    if sweep.configurations:
        tables.append(configuration_table(sweep))
    return Section("Sweep", sweep.name, tuple(sentences), tuple(tables), sweep.notes, sweep.warnings)


def _run_log(log: RunLogAnalysis) -> Section:
    tables = [run_table(log)] if log.runs else []
    if log.several_seeds:
        tables.append(seed_table(log.groups, log.averaged, neural=log.neural))
    if log.has_ranks:
        tables.append(rank_table(log))
    if log.has_shadow:
        tables.append(shadow_table(log))
    return Section("Training", log.name, tuple(runs_verdict(log)), tuple(tables), log.notes, log.warnings)


def _trace(trace: TraceSummary) -> Iterator[Section]:
    yield Section("Trace", trace.name, (trace.sentence,), (trace_table(trace),))
    for laws in trace.laws:
        yield Section("", laws.title, tuple(laws.sentences), tuple(law_tables(laws)))


def _plan(plan: Plan, most_layers: int | None) -> Section:
    other = budget_table(plan, most_layers)
    tables = (plan_table(plan, most_layers), *([] if other is None else [other]))
    return Section("Plan", plan.name, tuple(plan_verdict(plan)), tables)
