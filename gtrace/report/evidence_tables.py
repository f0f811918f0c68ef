"""Tables on how sure a report is: differences with intervals, thirds of training, training runs over seeds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gtrace.report.evidence import SIGNIFICANT
from gtrace.report.names import MISSING, number, percent, sparkline
from gtrace.report.ranking import decisive_target, ranking
from gtrace.report.statistics import FEWEST_SEEDS, THIRDS
from gtrace.report.tables import Cell, Column, Mark, Table
from gtrace.report.verdict import energy_share, metric_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gtrace.report.analysis import SweepAnalysis
    from gtrace.report.evidence import Comparison
    from gtrace.report.seeds import SeedGroup
    from gtrace.report.side_by_side import SideBySide
    from gtrace.report.statistics import Interval

_MISSING = Cell(MISSING, mark="missing")


def comparison_table(analysis: SweepAnalysis) -> Table:
    """The leader against every other method at the decisive bits, paired over steps."""
    k = decisive_target(analysis)
    bits = analysis.targets[k] if k >= 0 else math.nan
    here = [c for c in analysis.comparisons if c.bits == bits]
    rows = sum(len(ranking(analysis, j)) > 1 for j in range(len(analysis.targets)))
    title = f"Error of the leader over that of the others at {bits:g} bits, paired over steps"
    note = (
        f"p is Holm's, corrected for the {len(analysis.comparisons)} comparisons at all {rows} numbers of bits; "
        f"marked where it is below {SIGNIFICANT:g}."
    )
    return pairs_table(title, here, (note,) if here else ())


def pairs_table(title: str, comparisons: Sequence[Comparison], notes: tuple[str, ...] = ()) -> Table:
    """One line per pair: ratio of errors, with its interval."""
    columns = (
        Column("first / second", "error of the first over that of the second", numeric=False),
        Column("ratio", "of errors summed over all elements and steps"),
        Column("95% interval", "from blocks of consecutive steps drawn again"),
        Column("p", "that there is no difference, corrected for the number of comparisons (Holm)", rank=1),
        Column("steps better", "part of training in which the first has less error", rank=3),
        *(Column(name, f"ratio in the {name} third of training", rank=4) for name in THIRDS),
        Column("by layers", "mean ratio of the layers, each layer alike", rank=2),
    )
    rows = []
    for c in comparisons:
        mark: Mark = "best" if c.differs else ""
        rows.append(
            (
                Cell(f"{c.first} / {c.second}"),
                Cell(number(c.ratio), mark=mark),
                interval_cell(c.by_elements),
                Cell(MISSING, mark="missing") if math.isnan(c.p_holm) else Cell(_p(c.p_holm), mark=mark),
                Cell(percent(c.better)),
                *(Cell(number(c.thirds.get(name, math.nan))) for name in THIRDS),
                Cell(number(math.exp(c.by_layers.estimate)), hint=_span(c.by_layers)),
            )
        )
    reasons = dict.fromkeys(c.by_elements.why for c in comparisons if c.by_elements.why)
    why = (f"No interval: {'; '.join(reasons)}. Such lines describe these steps and prove nothing.",) if reasons else ()
    about = (
        (
            "Ratio: error of the first over that of the second, on the same gradients; below 1 the first is better. "
            "Steps count by the part of training that they stand for."
        ),
        "By layers: each layer alike, at the same configurations; small layers count as much as large ones.",
    )
    return Table(title, columns, tuple(rows), (*about, *notes, *why) if rows else (), "Nothing to compare.")


def interval_cell(interval: Interval) -> Cell:
    """Both ends of an interval of logarithms as ratios, or a dash with the reason."""
    return Cell(_span(interval)) if interval.known else Cell(MISSING, mark="missing", hint=interval.why)


def _span(interval: Interval) -> str:
    _, low, high = interval.exp()
    return f"{number(low)} to {number(high)}" if interval.known else interval.why


def _p(value: float) -> str:
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def phase_table(analysis: SweepAnalysis) -> Table:
    """Error of each method in the thirds of training, at the decisive bits, and a line over the steps."""
    k = decisive_target(analysis)
    bits = analysis.targets[k] if k >= 0 else math.nan
    columns = (
        Column("method", numeric=False),
        *(Column(f"{p.name} {p.first:,}–{p.last:,}", f"{p.steps} captured steps") for p in analysis.phases),
        Column("over steps", "each line on a scale of its own", numeric=False, rank=1),
    )
    place = {f.label: i for i, f in enumerate(analysis.families)}
    rows = []
    for family in ranking(analysis, k) if k >= 0 and analysis.phases else []:
        i = place[family.label]
        values = [float(phase.at[i, k]) for phase in analysis.phases]
        line = analysis.per_step[analysis.nearest(family, bits)].tolist()
        cells = [Cell(energy_share(v)) if math.isfinite(v) else _MISSING for v in values]
        rows.append((Cell(family.label), *cells, Cell(sparkline(line))))
    notes = (
        "Thirds by step number. In each, methods are compared at equal bits of that third.",
        f"Over steps: single steps of the configuration with bits nearest to {bits:g}, from the least to the largest "
        "error.",
    )
    title = f"Error over training at {bits:g} measured bits per value"
    return Table(title, columns, tuple(rows), notes if rows else (), "Too few steps to tell parts of training apart.")


def seed_table(groups: Sequence[SeedGroup], averaged: str, *, neural: bool, notes: Sequence[str] = ()) -> Table:
    """One line per codec: mean over seeds, deviation, interval, and the paired difference to the uncompressed runs."""
    metric = groups[0].metric if groups else "test accuracy"
    columns = (
        Column("codec", numeric=False),
        Column("seeds", rank=2),
        Column(f"mean {metric}", "over seeds"),
        Column("deviation", "standard deviation over seeds", rank=1),
        Column("95% interval", "of the mean, by Student's t", rank=2),
        Column("against none", "mean difference to uncompressed runs with the same seed; pp: percentage points"),
        Column("its 95% interval", "by Student's t over seeds", rank=1),
        Column("float32 / encoded" if neural else "float32 / sent", "bits, mean over seeds", rank=3),
    )
    rows = []
    for group in groups:
        value, off = group.interval, group.difference
        mark: Mark = "best" if group.p_holm < SIGNIFICANT else ""
        rows.append(
            (
                Cell(group.spec),
                Cell(str(len(group.seeds)), hint=", ".join(map(str, group.seeds))),
                Cell(metric_text(metric, group.mean)),
                Cell(metric_text(metric, group.deviation)),
                Cell(
                    f"{metric_text(metric, value.low)} to {metric_text(metric, value.high)}" if value.known else MISSING
                ),
                Cell(_points(metric, off.estimate), mark=mark),
                Cell(f"{_points(metric, off.low)} to {_points(metric, off.high)}" if off.known else MISSING),
                Cell(number(group.ratio)),
            )
        )
    few = any(len(group.seeds) < FEWEST_SEEDS for group in groups)
    said = [f"{averaged}; finished runs only. Differences to the uncompressed runs are paired by seed."]
    if few:
        said.append(f"Fewer than {FEWEST_SEEDS} seeds: no interval; this describes what happened.")
    return Table("Over seeds", columns, tuple(rows), (*said, *notes), "No run was finished.")


def _points(metric: str, value: float) -> str:
    if math.isnan(value):
        return MISSING
    return f"{100 * value:+.2f} pp" if metric == "test accuracy" else f"{value:+.3g}"


def side_by_side_table(pair: SideBySide) -> Table:
    """One line per configuration that two sweeps share."""
    columns = (
        Column("configuration", numeric=False),
        Column(pair.first, f"relative variance in {pair.first}, over what both have"),
        Column(pair.second, f"relative variance in {pair.second}, over what both have"),
        Column("ratio", f"{pair.second} / {pair.first}"),
        Column("95% interval", "of the ratio, over the steps that both have"),
        Column("p", "that there is no difference, corrected for the number of configurations (Holm)", rank=1),
        Column(f"bits {pair.first}", "measured, over the whole sweep", rank=2),
        Column(f"bits {pair.second}", "measured, over the whole sweep", rank=2),
        Column("cells", "tensors at steps that both have", rank=3),
    )
    rows = []
    for c in pair.shared:
        mark: Mark = "best" if c.differs else ""
        rows.append(
            (
                Cell(c.spec),
                Cell(number(c.first)),
                Cell(number(c.second)),
                Cell(number(c.ratio), mark=mark),
                interval_cell(c.by_elements),
                Cell(MISSING if math.isnan(c.p_holm) else _p(c.p_holm), mark=mark),
                Cell(number(c.first_bits)),
                Cell(number(c.second_bits)),
                Cell(f"{c.cells:,}"),
            )
        )
    reasons = dict.fromkeys(c.by_elements.why for c in pair.shared if c.by_elements.why)
    notes = [f"Ratio: relative variance of {pair.second} over that of {pair.first}, of {pair.whose}."]
    if reasons:
        notes.append(f"No interval: {'; '.join(reasons)}.")
    return Table("The same configurations in both", columns, tuple(rows), tuple(notes), "No codec is in both sweeps.")
