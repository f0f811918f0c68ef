"""A plan: what it costs, what it saves against one codec for all, how firm it is."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from gtrace.planning.plan import WORTH, TensorPlan, to_plain
from gtrace.report.analysis.details import rotates
from gtrace.report.analysis.families import method_of
from gtrace.report.analysis.safety import SAFE_SHORTER, shorter_in_words
from gtrace.report.analysis.safety import samples as whole_samples
from gtrace.report.names import count, energy_share, listed, natural_order, number
from gtrace.report.section import FEW_ROWS, NOTHING, Cell, Curve, Numbers, Section, Table, column, value_cell, words
from gtrace.report.sections import charts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gtrace.planning import Plan
    from gtrace.report.section import FigureSpec, Shows


#: Share of the resamples in which a choice stays the same that counts as firm.
FIRM = 0.9
#: Budgets in the table of what changes between them.
_BUDGETS = 6
_MOST_NAMED = 3
#: Bars, and curves, of the tensors with the most elements.
_MOST_BARS, _MOST_CURVES = 40, 8


def what(plan: Plan) -> str:
    """What the plan minimizes, in a word."""
    return "error" if plan.horizon is None else "cost"


def aim(plan: Plan) -> str:
    """What the plan minimizes, with its horizon."""
    return plan.objective if plan.horizon is None else f"cost over {count(plan.horizon.steps, 'step')}"


def plan_verdict(plan: Plan) -> list[str]:
    """Sentences, the answer first."""
    totals = plan.totals
    more, less = plan.exchange.more, plan.exchange.less
    said = [] if more is None else [f"one bit more per value leaves {number(100 * more, 2)}% of the {what(plan)}"]
    said += [] if less is None else [f"one bit less makes it {number(less, 2)} times as large"]
    least = what(plan) if plan.budget.startswith(("--max-bits", "--ratio", "--step-time")) else "bits"
    best = "No choice among these codecs is better: the plan" if totals.optimal else "The plan"
    return [
        _worth(plan),
        f"{plan.name}: {number(totals.bits)} bits per value, {number(totals.ratio)} times fewer than float32; "
        f"{_loses(plan)} ({plan.budget}).",
        *([f"Exchange rate: {'; '.join(said)}."] if said else []),
        *_deciding(plan),
        *_rotated(plan),
        *_firm(plan),
        f"{best} is {totals.gap:.2%} above the least {least} that fractions of codecs could reach.",
    ]


def _loses(plan: Plan) -> str:
    error, horizon = plan.totals.error, plan.horizon
    if horizon is None:
        weighted = ", weighted" if plan.provenance.get("weights") else ""
        if plan.objective == "error":
            return f"loses {energy_share(error, 3)} of gradient energy{weighted}"
        return f"has {energy_share(error, 3)} error ({plan.objective}){weighted}"
    between = f"{whole_samples(horizon.low)} to {whole_samples(horizon.high)}"
    shorter = f" and {shorter_in_words(horizon.shorter)}" if horizon.shorter > SAFE_SHORTER else ""
    return f"its noise costs as if the batch were {samples(plan)} ({between}){shorter}"


def samples(plan: Plan, ratio: float | None = None) -> str:
    """The equivalent batch of a noise ratio, the plan's by default, e.g. "61 of 64"."""
    horizon = plan.horizon
    assert horizon is not None, "a plan by cost has a horizon"
    left = horizon.equivalent if ratio is None else horizon.batch / (1 + ratio)
    return f"{whole_samples(left)} of {whole_samples(horizon.batch)}"


def _worth(plan: Plan) -> str:
    best, gain = plan.uniform, plan.gain
    if best is None:
        return "No single codec fits all tensors into this budget; this plan does."
    one_for_all = all(row.codec == best.codec for row in plan.tensors)
    if plan.horizon is not None and best.planned is not None:
        over = f"over {count(plan.horizon.steps, 'step')}"
        single = f"{best.codec} for all costs as if the batch were {samples(plan, best.error)}"
        each = f"a codec for each tensor as if it were {samples(plan, best.planned)}, at {number(best.bits)} bits each"
        head = "One codec for all tensors" if one_for_all else "Worth a plan" if plan.worth else "Not worth a plan"
        take = "" if one_for_all or plan.worth else " Take the single codec."
        return f"{head}: {over}, {single}; {each}.{take}"
    single = f"the best single codec, {best.codec} (error {energy_share(best.error, 3)} at {number(best.bits)} bits)"
    gain = 0.0 if gain is None else gain
    if one_for_all:
        mixed = f"; with a codec for each tensor the error drops {gain:.0%} at equal bits" if gain > WORTH else ""
        return f"One codec for all tensors, {best.codec}{mixed}."
    if gain > WORTH:
        return f"Error drops {gain:.0%} at equal bits against {single}."
    return f"Not worth a plan: error drops only {gain:.1%} at equal bits against {single}. Take that codec."


def _deciding(plan: Plan) -> Iterator[str]:
    total = sum(row.error for row in plan.tensors)
    if total <= 0 or len(plan.tensors) < 2:
        return
    kept, part = [], 0.0
    for row in sorted(plan.tensors, key=lambda row: -row.error)[:_MOST_NAMED]:
        kept.append(f"{row.tensor} ({row.error / total:.0%})")
        part += row.error / total
        if part > 0.8:
            break
    yield f"Most of the {what(plan)} left is in {listed(kept)}: these decide what more bits buy."


def _rotated(plan: Plan) -> Iterator[str]:
    rows = [row for row in plan.tensors if rotates(method_of(row.codec))]
    if rows:
        held = sum(row.elements for row in rows) / max(1, sum(row.elements for row in plan.tensors))
        methods = listed(dict.fromkeys(method_of(row.codec) for row in rows))
        whole = count(len(plan.tensors), "tensor")
        yield f"A rotation pays on {len(rows)} of {whole}, with {number(100 * held, 2)}% of the values ({methods})."


def _firm(plan: Plan) -> Iterator[str]:
    found = plan.confidence
    if found is None:
        yield "Stability unknown: a single step was measured."
        return
    firm = sum(row.stable is not None and row.stable >= FIRM for row in plan.tensors)
    low, _, high = (max(0.0, value) for value in found.regret)
    yield (
        f"Stability: resampling the steps {found.resamples} times, {firm} of {count(len(plan.tensors), 'tensor')} kept "
        f"their codec in at least {FIRM:.0%} of cases."
    )
    yield f"There the plan's {what(plan)} is {low:.1%} to {high:.1%} above the least that its bits could reach."
    if found.gain is not None:
        low, high = found.gain[0], found.gain[-1]
        yield f"There it saves {low:.0%} to {high:.0%} against the best single codec, each at its own bits."


def brief_table(plan: Plan) -> Table:
    """The tensors with the most error, and all others in one row."""
    order = sorted(plan.tensors, key=lambda row: (row.error, row.bits * row.elements), reverse=True)
    shown = order if len(order) <= FEW_ROWS else order[: FEW_ROWS - 1]
    rest = order[len(shown) :]
    if rest:
        used = {row.codec for row in rest}
        codec = rest[0].codec if len(used) == 1 else count(len(used), "codec")
        elements = sum(row.elements for row in rest)
        bits, error = _moved(rest) / elements, sum(row.error for row in rest)
        name = count(len(rest), "other tensor")
        shown.append(dataclasses.replace(rest[0], tensor=name, codec=codec, elements=elements, bits=bits, error=error))
    columns: list[Shows[TensorPlan]] = [
        words("tensor", lambda row: row.tensor),
        words("codec", lambda row: row.codec),
        column("bits", lambda row: number(row.bits)),
        *_parts(plan),
    ]
    return Table.of(f"Tensors with the most {what(plan)}", shown, columns)


def _moved(rows: Sequence[TensorPlan]) -> float:
    return sum(row.bits * row.elements for row in rows)


def _parts(plan: Plan, bits_are: str = "", error_is: str = "") -> list[Shows[TensorPlan]]:
    bits, error = _moved(plan.tensors) or math.nan, sum(row.error for row in plan.tensors) or math.nan
    return [
        column("of the bits", lambda row: value_cell(row.bits * row.elements / bits, ".1%"), bits_are, 2),
        column(f"of the {what(plan)}", lambda row: value_cell(row.error / error, ".1%"), error_is, 1),
    ]


def plan_table(plan: Plan, most: int | None = None) -> Table:
    """Every tensor with its codec; of ``most`` those with the most error."""

    def stable(row: TensorPlan) -> Cell:
        if row.stable is None:
            return NOTHING
        return Cell(f"{row.stable:.0%}", mark="" if row.stable >= FIRM else "quiet")

    def spread(row: TensorPlan) -> Cell:
        if row.bits_low is None or row.bits_high is None:
            return NOTHING
        return Cell(f"{number(row.bits_low, 2)} to {number(row.bits_high, 2)}")

    meaning = "expected measured bits per value: payload, norms and shared bytes"
    columns: list[Shows[TensorPlan]] = [
        words("tensor", lambda row: row.tensor),
        words("codec", lambda row: row.codec, "what it goes through"),
        column("elements", lambda row: f"{row.elements:,}", rank=3),
        column("bits", lambda row: number(row.bits), meaning),
        *_parts(plan, "its part of all bits", f"its part of the plan's {what(plan)}"),
        column("stable", stable, "part of the resampled steps on which its codec stays the same", 4),
        column("bits there", spread, "5th to 95th percentile of its bits on resampled steps", 5),
    ]
    if any(row.group for row in plan.tensors):
        columns.append(words("group", lambda row: row.group, "tensors with the same codec", 6))
    rows = _most(plan, most, lambda row: row.error)
    left = len(plan.tensors) - len(rows)
    notes = [f"{count(left, 'tensor')} with less {what(plan)} left out."] if left else []
    notes.append(f"Tensors that the plan does not name go through {plan.default}.")
    return Table.of("Codec of every tensor", rows, columns, notes=tuple(notes))


def _most(plan: Plan, most: int | None, by: Callable[[TensorPlan], float]) -> list[TensorPlan]:
    """The tensors with the largest numbers, in the plan's order; None for all."""
    kept = set(sorted(range(len(plan.tensors)), key=lambda k: -by(plan.tensors[k]))[:most])
    return [row for k, row in enumerate(plan.tensors) if k in kept]


def budget_table(plan: Plan, most: int | None = None) -> Table | None:
    """Bits of every tensor at other budgets; None if there is only one."""
    if len(plan.frontier) < 2:
        return None
    places = np.unique(np.linspace(0, len(plan.frontier) - 1, _BUDGETS).round().astype(int)).tolist()
    at = [plan.frontier[p] for p in places]
    columns: list[Shows[TensorPlan]] = [words("tensor", lambda row: row.tensor)]
    for place, p in zip(places, at, strict=True):
        show = partial(lambda place, row: number(row.at_frontier[place], 2), place)
        columns.append(column(f"{number(p.bits, 2)} bits", show, f"relative {what(plan)} {number(p.error)}"))
    rows = [row for row in _most(plan, most, lambda row: row.elements) if row.at_frontier]
    errors = ", ".join(f"{number(p.error, 2)} at {number(p.bits, 2)}" for p in at)
    notes = (f"{what(plan).capitalize()} by bits: {errors}.",)
    return Table.of("Bits of every tensor at other budgets", rows, columns, notes=notes, folded=True)


def plan_section(plan: Plan, most_layers: int | None) -> Section:
    """A plan, with at most this many lines in tables of layers; None for all."""
    changing = budget_table(plan, most_layers)
    return Section(
        kind="Plan",
        name=plan.name,
        sentences=tuple(plan_verdict(plan)),
        blocks=(plan_table(plan, most_layers), *plan_figures(plan), *([changing] if changing else [])),
        place="layers",
        provenance=plan.provenance,
        brief=brief_table(plan),
        numbers=partial(_numbers, plan),
    )


def _numbers(plan: Plan) -> Numbers:
    totals = {"record": "plan", "results": plan.name, "budget": plan.budget, **dataclasses.asdict(plan.totals)}
    rows = [{"record": "planned", "results": plan.name, **dataclasses.asdict(row)} for row in plan.tensors]
    return Numbers({"plans": {"verdict": plan_verdict(plan), **to_plain(plan)}}, (totals, *rows))


def plan_figures(plan: Plan) -> Iterator[FigureSpec]:
    """The figures of a plan."""
    bits = "measured bits per value"
    curves: list[Curve] = []
    for method in dict.fromkeys(one.codec.partition(":")[0] for one in plan.uniforms):
        of = [one for one in plan.uniforms if one.codec.partition(":")[0] == method]
        x, y = [one.bits for one in of], [one.error for one in of]
        curves += charts.thinned(f"{method} for all", x, y, method=method, form="points")
    curves += charts.thinned("a codec for each", [p.bits for p in plan.frontier], [p.error for p in plan.frontier])
    curves += charts.thinned("this plan", [plan.totals.bits], [plan.totals.error], form="points")
    y_label = "relative error" if plan.horizon is None else f"noise ratio at {count(plan.horizon.steps, 'step')}"
    yield charts.charted(
        "plan-frontier",
        "Plans against single codecs",
        "Lower and further left is better. The line is what a codec for each tensor makes at every budget, out of "
        "the same codecs; each point is one codec for all tensors.",
        charts.one_panel(curves, "", bits, y_label, log_x=True, log_y=True),
    )
    rows = _largest(plan, _MOST_BARS)
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    if plan.confidence is not None:
        low = tuple(row.bits if row.bits_low is None else row.bits_low for row in rows)
        high = tuple(row.bits if row.bits_high is None else row.bits_high for row in rows)
    own = Curve("this plan", tuple(row.tensor for row in rows), tuple(row.bits for row in rows), low, high)
    all_of = ("all tensors", plan.totals.bits)
    yield charts.charted(
        "plan-bits",
        "Bits of every tensor",
        "Measured bits per value that each tensor gets; the line is the mean over all values. The thin bars span "
        "the middle 90 % of what the price of a bit picks on resampled steps."
        + (f" The {_MOST_BARS} largest tensors." if len(plan.tensors) > _MOST_BARS else ""),
        charts.one_panel((own,), y_label=bits, log_y=max(own.y, default=0.0) > 16, bars=True, lines=(all_of,)),
    )
    budgets = tuple(point.bits for point in plan.frontier)
    named = [row for row in _largest(plan, _MOST_CURVES) if row.at_frontier]
    if len(plan.frontier) > 1 and any(row.at_frontier for row in plan.tensors):
        lines = tuple(Curve(row.tensor, budgets, row.at_frontier) for row in named)
        labels, marks = ("", f"{bits} of the plan", "of the tensor"), (("this plan", plan.totals.bits),)
        yield charts.charted(
            "plan-budgets",
            "What changes between budgets",
            "Bits of the largest tensors against the bits of the whole plan. Where a curve is flat, other tensors "
            "get what is added; 32 bits are exact.",
            charts.one_panel(lines, *labels, log_x=True, log_y=True, marks=marks),
        )


def _largest(plan: Plan, most: int) -> list[TensorPlan]:
    by_name = {row.tensor: row for row in sorted(plan.tensors, key=lambda row: -row.elements)[:most]}
    return [by_name[name] for name in natural_order(by_name)]
