"""A plan: what it costs, what it saves against one codec for all, how firm it is."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from gtrace.planning.plan import WORTH, to_plain
from gtrace.report import figures
from gtrace.report.names import count, listed, natural_order, number
from gtrace.report.section import Cell, Chart, Column, Curve, FigureSpec, Numbers, Panel, Section, Table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gtrace.planning import Plan
    from gtrace.planning.plan import TensorPlan
    from gtrace.report.inputs import Report


#: Bars, and curves, that a figure has at most: of the tensors with the most elements.
MOST_BARS, MOST_CURVES = 40, 8


def frontier(plan: Plan) -> Chart:
    """Error against bits: plans of every budget, every single codec, and this plan."""
    curves = []
    methods = dict.fromkeys(one.codec.partition(":")[0] for one in plan.uniforms)
    for method in methods:
        of = [one for one in plan.uniforms if one.codec.partition(":")[0] == method and one.error > 0]
        if of:
            x, y = tuple(one.bits for one in of), tuple(one.error for one in of)
            curves.append(Curve(f"{method} for all", x, y, method=method, form="points"))
    points = [point for point in plan.frontier if point.error > 0]
    if points:
        curves.append(Curve("a codec for each", tuple(p.bits for p in points), tuple(p.error for p in points)))
    if plan.totals.error > 0:
        curves.append(Curve("this plan", (plan.totals.bits,), (plan.totals.error,), form="points"))
    panel = Panel(tuple(curves), x_label="measured bits per value", y_label="relative error", log_x=True, log_y=True)
    return Chart((panel,), "")


def shown(plan: Plan, most: int) -> list[TensorPlan]:
    """The tensors with the most elements, in natural order."""
    largest = sorted(plan.tensors, key=lambda row: -row.elements)[:most]
    by_name = {row.tensor: row for row in largest}
    return [by_name[name] for name in natural_order(by_name)]


def bits_per_tensor(plan: Plan) -> Chart:
    """Bits of every tensor, one bar each, with their spread over resampled steps."""
    rows = shown(plan, MOST_BARS)
    names = tuple(row.tensor for row in rows)
    bits = tuple(row.bits for row in rows)
    low, high = (), ()
    if plan.confidence is not None:
        low = tuple(row.bits if row.bits_low is None else row.bits_low for row in rows)  # type: ignore[assignment]
        high = tuple(row.bits if row.bits_high is None else row.bits_high for row in rows)  # type: ignore[assignment]
    panel = Panel(
        (Curve("this plan", names, bits, low, high),),
        y_label="measured bits per value",
        log_y=max(bits) > 16,
        bars=True,
        lines=(("all tensors", plan.totals.bits),),
    )
    return Chart((panel,), "")


def bits_by_budget(plan: Plan) -> Chart:
    """Bits of the largest tensors against those of the whole plan."""
    x = tuple(point.bits for point in plan.frontier)
    curves = tuple(Curve(row.tensor, x, row.at_frontier) for row in shown(plan, MOST_CURVES) if row.at_frontier)
    panel = Panel(
        curves,
        x_label="measured bits per value of the plan",
        y_label="of the tensor",
        log_x=True,
        log_y=True,
        marks=(("this plan", plan.totals.bits),),
    )
    return Chart((panel,), "")


#: Share of the resamples in which a choice stays the same that counts as firm.
FIRM = 0.9
#: Budgets in the table of what changes between them.
_BUDGETS = 6
_MOST_NAMED = 3

_OBJECTIVES = {
    "squared": "relative error of the whole gradient",
    "relative": "relative error of the tensors, weighted by their elements",
    "update": "relative error of the optimizer's update",
}


def error_in_words(plan: Plan) -> str:
    """What the error of a plan is, with its weights where there are some."""
    weighted = ", weighted" if plan.provenance.get("weights") else ""
    return _OBJECTIVES.get(plan.objective, f"error ({plan.objective})") + weighted


def plan_verdict(plan: Plan) -> list[str]:
    """Sentences, the answer first."""
    totals = plan.totals
    sentences = [
        f"{plan.name}: {number(totals.bits)} bits per value, {number(totals.ratio)} times smaller than float32, "
        f"{error_in_words(plan)} {number(totals.error)} ({plan.budget})."
    ]
    if plan.uniform is not None:
        sentences.append(_worth(plan))
    else:
        sentences.append("No single codec fits all tensors into this budget.")
    more, less = plan.exchange.more, plan.exchange.less
    said = [] if more is None else [f"one bit more per value leaves {number(100 * more, 2)} % of the error"]
    said += [] if less is None else [f"one bit less makes it {number(less, 2)} times as large"]
    if said:
        sentences.append(f"Exchange rate: {'; '.join(said)}.")
    return [*sentences, *_deciding(plan), *_firm(plan), _exact(plan)]


def _worth(plan: Plan) -> str:
    best = plan.uniform
    assert best is not None
    gain = best.gain
    single = f"{best.codec}, the best single codec here, makes {number(best.error)} at {number(best.bits)} bits"
    if gain is None:
        return f"{single}."
    if all(row.codec == best.codec for row in plan.tensors):
        mixed = f"; a mixed plan of as many bits makes {gain:.0%} less" if gain > WORTH else ""
        return f"One codec for all tensors{mixed}."
    if gain > WORTH:
        return f"{single}; at no more bits a plan makes {gain:.0%} less."
    return f"Not worth a plan: {single}, and at no more bits a plan makes {gain:.1%} less. Take that codec."


def _deciding(plan: Plan) -> list[str]:
    """Which tensors hold most of the error."""
    total = sum(row.error for row in plan.tensors)
    if total <= 0 or len(plan.tensors) < 2:
        return []
    rows = sorted(plan.tensors, key=lambda row: -row.error)
    kept, part = [], 0.0
    for row in rows[:_MOST_NAMED]:
        kept.append(f"{row.tensor} ({row.error / total:.0%})")
        part += row.error / total
        if part > 0.8:
            break
    return [f"Most of the error left is in {listed(kept)}: these decide what more bits buy."]


def _firm(plan: Plan) -> list[str]:
    found = plan.confidence
    if found is None:
        return ["From a single step: how firm the choice is, nobody can say."]
    firm = sum(row.stable is not None and row.stable >= FIRM for row in plan.tensors)
    low, _, high = (max(0.0, value) for value in found.regret)
    sentence = (
        f"Over {found.resamples} resamples of the steps the price of a bit picks the same codec in {FIRM:.0%} of them "
        f"for {firm} of {count(len(plan.tensors), 'tensor')}; the plan's error is {low:.1%} to {high:.1%} above the "
        "least that its bits could reach there"
    )
    if found.gain is not None:
        low, high = found.gain[0], found.gain[-1]
        sentence += f", and it saves {low:.0%} to {high:.0%} against that single codec, each at its own bits"
    return [f"{sentence}."]


def _exact(plan: Plan) -> str:
    totals = plan.totals
    what = "error" if plan.budget.startswith(("--budget", "--ratio", "--step-time")) else "bits"
    least = f"{totals.gap:.2%} above the least {what} that fractions of codecs could reach"
    return f"{'No choice among these codecs is better; it' if totals.optimal else 'It'} is {least}."


def plan_table(plan: Plan, most: int | None = None) -> Table:
    """Every tensor with its codec.

    Args:
        plan: what is shown.
        most: lines at most, those with the most error; None for all.
    """
    bits = sum(row.bits * row.elements for row in plan.tensors)
    error = sum(row.error for row in plan.tensors)
    grouped = any(row.group for row in plan.tensors)
    columns = [
        Column("tensor", numeric=False),
        Column("codec", "what it goes through", numeric=False),
        Column("elements", rank=3),
        Column("bits", "expected measured bits per value: payload, norms and shared bytes"),
        Column("of the bits", "its part of all bits", rank=2),
        Column("of the error", "its part of the plan's error", rank=1),
        Column("stable", "part of the resampled steps on which its codec stays the same", rank=4),
        Column("bits there", "5th to 95th percentile of its bits on resampled steps", rank=5),
    ]
    if grouped:
        columns.append(Column("group", "tensors with the same codec", numeric=False, rank=6))
    kept = set(sorted(range(len(plan.tensors)), key=lambda k: -plan.tensors[k].error)[:most])
    rows = []
    for k, row in enumerate(plan.tensors):
        if k not in kept:
            continue
        unknown = Cell("–", mark="missing")
        cells = [
            Cell(row.tensor),
            Cell(row.codec),
            Cell(f"{row.elements:,}"),
            Cell(number(row.bits)),
            Cell(f"{row.bits * row.elements / bits:.1%}") if bits else unknown,
            Cell(f"{row.error / error:.1%}") if error else unknown,
            unknown if row.stable is None else Cell(f"{row.stable:.0%}", mark="" if row.stable >= FIRM else "quiet"),
            unknown
            if row.bits_low is None or row.bits_high is None
            else Cell(f"{number(row.bits_low, 2)} to {number(row.bits_high, 2)}"),
        ]
        rows.append(tuple(cells + ([Cell(row.group)] if grouped else [])))
    left = len(plan.tensors) - len(rows)
    notes: tuple[str, ...] = (f"Tensors that the plan does not name go through {plan.default}.",)
    if left:
        notes = (f"{count(left, 'tensor')} with less error left out.", *notes)
    return Table("Codec of every tensor", tuple(columns), tuple(rows), notes)


def budget_table(plan: Plan, most: int | None = None) -> Table | None:
    """Bits of every tensor at other budgets; None where there is only one."""
    if len(plan.frontier) < 2:
        return None
    places = np.unique(np.linspace(0, len(plan.frontier) - 1, _BUDGETS).round().astype(int)).tolist()
    columns = [Column("tensor", numeric=False)]
    columns += [
        Column(f"{number(plan.frontier[p].bits, 2)} bits", f"relative error {number(plan.frontier[p].error)}")
        for p in places
    ]
    kept = set(sorted(range(len(plan.tensors)), key=lambda k: -plan.tensors[k].elements)[:most])
    rows = tuple(
        (Cell(row.tensor), *(Cell(number(row.at_frontier[p], 2)) for p in places))
        for k, row in enumerate(plan.tensors)
        if k in kept and row.at_frontier
    )
    errors = ", ".join(f"{number(plan.frontier[p].error, 2)} at {number(plan.frontier[p].bits, 2)}" for p in places)
    return Table(
        "Bits of every tensor at other budgets", tuple(columns), rows, (f"Error by bits: {errors}.",), folded=True
    )


def sections(report: Report, most_layers: int | None = None) -> Iterator[Section]:
    """One section for each plan."""
    for plan in report.plans:
        changing = budget_table(plan, most_layers)
        yield Section(
            kind="Plan",
            name=plan.name,
            sentences=tuple(plan_verdict(plan)),
            blocks=(
                plan_table(plan, most_layers),
                *plan_figures(plan),
                *([] if changing is None else [changing]),
            ),
            place="layers",
            provenance=plan.provenance,
            numbers=partial(_numbers, plan),
        )


def _numbers(plan: Plan) -> Numbers:
    totals = {"record": "plan", "results": plan.name, "budget": plan.budget, **dataclasses.asdict(plan.totals)}
    rows = [{"record": "planned", "results": plan.name, **dataclasses.asdict(row)} for row in plan.tensors]
    return Numbers({"plans": {"verdict": plan_verdict(plan), **to_plain(plan)}}, (totals, *rows))


def plan_figures(plan: Plan) -> list[FigureSpec]:
    """The figures of a plan."""
    found = [
        FigureSpec(
            "plan-frontier",
            "Plans against single codecs",
            "Lower and further left is better. The line is what a codec for each tensor makes at every budget, out of "
            "the same codecs; each point is one codec for all tensors.",
            lambda: figures.charts.draw_chart(frontier(plan)),
            chart=lambda: frontier(plan),
        ),
        FigureSpec(
            "plan-bits",
            "Bits of every tensor",
            "Measured bits per value that each tensor gets; the line is the mean over all values. The thin bars span "
            "the middle 90 % of what the price of a bit picks on resampled steps."
            + (f" The {MOST_BARS} largest tensors." if len(plan.tensors) > MOST_BARS else ""),
            lambda: figures.charts.draw_chart(bits_per_tensor(plan)),
            chart=lambda: bits_per_tensor(plan),
        ),
    ]
    if len(plan.frontier) > 1 and any(row.at_frontier for row in plan.tensors):
        found.append(
            FigureSpec(
                "plan-budgets",
                "What changes between budgets",
                "Bits of the largest tensors against the bits of the whole plan. Where a curve is flat, other tensors "
                "get what is added; 32 bits are exact.",
                lambda: figures.charts.draw_chart(bits_by_budget(plan)),
                chart=lambda: bits_by_budget(plan),
            )
        )
    return found
