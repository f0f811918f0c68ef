"""Two sweeps of the same codecs, in words and as a table."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import TYPE_CHECKING, Any

from gtrace.report.names import count, listed, number
from gtrace.report.section import NOTHING, Cell, Numbers, Section, Shows, Table, column, flat, words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gtrace.report.analysis.evidence import PairedComparison
    from gtrace.report.analysis.side_by_side import ConfigurationRatio, SideBySide
    from gtrace.report.statistics import Interval


def ratio_columns(ratio: str, interval: str, compared: str) -> list[Shows[Any]]:
    """A ratio of errors, its interval and its p-value; what the first two mean, and what Holm's correction counts."""
    meaning = f"that there is no difference, corrected for the number of {compared} (Holm)"

    def ends(found: PairedComparison | ConfigurationRatio) -> Cell:
        known = found.by_elements
        return Cell(span(known)) if known.known else dataclasses.replace(NOTHING, hint=known.why)

    def p(found: PairedComparison | ConfigurationRatio) -> Cell:
        text = "<0.001" if found.p_holm < 0.001 else f"{found.p_holm:.3f}"
        return NOTHING if math.isnan(found.p_holm) else Cell(text, mark="best" if found.differs else "")

    return [
        column("ratio", lambda found: Cell(number(found.ratio), mark="best" if found.differs else ""), ratio),
        column("95% interval", ends, interval),
        column("p", p, meaning, 1),
    ]


def span(interval: Interval) -> str:
    """Both ends of an interval of logarithms as ratios, or why there is none."""
    _, low, high = interval.exp()
    return f"{number(low)} to {number(high)}" if interval.known else interval.why


def side_by_side_table(pair: SideBySide) -> Table:
    """One line per configuration that two sweeps share."""
    reasons = dict.fromkeys(c.by_elements.why for c in pair.shared if c.by_elements.why)
    notes = [f"Ratio: relative variance of {pair.second} over that of {pair.first}, of {pair.whose}."]
    if reasons:
        notes.append(f"No interval: {'; '.join(reasons)}.")
    over, bits = "over what both have", "measured, over the whole sweep"
    ratio, steps = f"{pair.second} / {pair.first}", "of the ratio, over the steps that both have"
    columns: list[Shows[ConfigurationRatio]] = [
        words("configuration", lambda c: c.spec),
        column(pair.first, lambda c: number(c.first), f"relative variance in {pair.first}, {over}"),
        column(pair.second, lambda c: number(c.second), f"relative variance in {pair.second}, {over}"),
        *ratio_columns(ratio, steps, "configurations"),
        column(f"bits {pair.first}", lambda c: number(c.first_bits), bits, 2),
        column(f"bits {pair.second}", lambda c: number(c.second_bits), bits, 2),
        column("cells", lambda c: f"{c.cells:,}", "tensors at steps that both have", 3),
    ]
    empty = "No codec is in both sweeps."
    return Table.of("The same configurations in both", pair.shared, columns, notes=tuple(notes), empty=empty)


def side_by_side_verdict(pair: SideBySide) -> Iterator[str]:
    """How much more or less error the same codecs make in a second sweep, and what only one of them has."""
    known = sorted(c.ratio for c in pair.shared if math.isfinite(c.ratio))
    if not pair.shared:
        yield "No codec is in both sweeps."
    elif not known:
        yield f"{count(len(pair.shared), 'configuration')} in both, none with errors to compare."
    else:
        middle = math.sqrt(known[(len(known) - 1) // 2] * known[len(known) // 2])
        yield (
            f"{count(len(pair.shared), 'configuration')} in both: {pair.second} has {number(middle)} times the error "
            f"of {pair.first} in the median, {number(known[0])} to {number(known[-1])} times."
        )
        if pair.paired:
            sure = sum(c.differs for c in pair.shared)
            none = sum(not c.by_elements.known for c in pair.shared)
            unsure = f"; {none} have too few steps to compare" if none else ""
            yield (
                f"Paired on {count(pair.tensors, 'tensor')} and {count(pair.steps, 'step')} that both have: "
                f"{sure} differ beyond the noise of steps{unsure}."
            )
        else:
            yield "No tensor at any step is in both, so these are ratios of sums over different gradients."
    if pair.same_trace is False:
        yield "The sweeps are of different traces: the ratios hold the difference of the runs as well."
    for name, specs in ((pair.first, pair.only_first), (pair.second, pair.only_second)):
        if specs:
            yield f"Only in {name}: {listed(specs)}."


def side_by_side_section(pair: SideBySide) -> Section:
    """A further sweep against the first."""
    return Section(
        kind="Sweep",
        name=f"{pair.second} against {pair.first}",
        sentences=tuple(side_by_side_verdict(pair)),
        blocks=(side_by_side_table(pair),),
        place="choose",
        together=True,
        numbers=partial(_numbers, pair),
    )


def _numbers(pair: SideBySide) -> Numbers:
    shared = [flat(found) for found in pair.shared]
    fields = {field.name: getattr(pair, field.name) for field in dataclasses.fields(pair)}
    common = {"first_results": pair.first, "same_trace": pair.same_trace}
    return Numbers(
        {"side_by_side": {**fields, "verdict": list(side_by_side_verdict(pair)), "shared": shared}},
        tuple({"record": "side_by_side", "results": pair.second, **common, **row} for row in shared),
    )
