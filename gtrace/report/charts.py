"""Charts as plain data; :func:`gtrace.report.figures.charts.draw_chart` draws them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

#: how a curve is drawn: a line with markers at its points, points alone (also in the place of bars), a line alone, or
#: steps
Form: TypeAlias = Literal["line", "points", "plain", "steps"]


@dataclass(frozen=True, slots=True)
class Curve:
    """One curve.

    Attributes:
        label: its name in the legend.
        x: positions; numbers, or names of categories, for bars.
        y: values, as many; NaN where there is none.
        low: lower ends of intervals around them; empty for none.
        high: upper ends.
        method: codec whose look it has; empty for the next of the palette.
        form: how it is drawn.
    """

    label: str
    x: tuple[float | str, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    method: str = ""
    form: Form = "line"


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes.

    Attributes:
        curves: in the order of the legend.
        title: above it.
        x_label: of the horizontal axis.
        y_label: of the vertical one.
        log_x: logarithmic.
        log_y: logarithmic.
        bars: x are names of categories, and every curve has a bar at each, from 0 on, or a point with an interval.
        lines: horizontal lines, name to value, such as what full precision reaches.
        marks: vertical lines, name to position, such as where the learning rate falls.
    """

    curves: tuple[Curve, ...]
    title: str = ""
    x_label: str = ""
    y_label: str = ""
    log_x: bool = False
    log_y: bool = False
    bars: bool = False
    lines: tuple[tuple[str, float], ...] = ()
    marks: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure of one or several panels.

    Attributes:
        panels: from left to right.
        caption: one or two sentences that say what to see.
        columns: panels in a row.
    """

    panels: tuple[Panel, ...]
    caption: str
    columns: int = 2
