"""Figures of a plan: against every single codec, and what every tensor gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gtrace.report.charts import Chart, Curve, Panel, draw_chart
from gtrace.report.names import natural_order

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gtrace.planning import Plan
    from gtrace.planning.plan import TensorPlan

#: Bars, and curves, that a figure has at most: of the tensors with the most elements.
MOST_BARS, MOST_CURVES = 40, 8


def frontier(plan: Plan) -> Figure:
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
    return draw_chart(Chart((panel,), ""))


def shown(plan: Plan, most: int) -> list[TensorPlan]:
    """The tensors with the most elements, in natural order."""
    largest = sorted(plan.tensors, key=lambda row: -row.elements)[:most]
    by_name = {row.tensor: row for row in largest}
    return [by_name[name] for name in natural_order(by_name)]


def bits_per_tensor(plan: Plan) -> Figure:
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
    return draw_chart(Chart((panel,), ""))


def bits_by_budget(plan: Plan) -> Figure:
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
    return draw_chart(Chart((panel,), ""))
