"""Charts drawn: curves and bars on panels, with one legend beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import PercentFormatter

from gtrace.report.figures.style import MUTED, PAPER, log_ticks, look, new_figure, say_empty, series, styled
from gtrace.report.figures.sweep import log_values

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gtrace.report.figures.style import Look
    from gtrace.report.section import Chart, Panel


#: Inches of a panel beside others, of one alone, and of each.
_WIDTH, _ALONE, _HEIGHT = 4.3, 6.2, 3.4
#: A curve of more points than this has markers at some of them only.
_MARKED = 12


def draw_chart(chart: Chart) -> Figure:
    """A matplotlib figure of a chart; curves of the same name look the same in all panels.

    A name's look is fixed by its first appearance. One legend stands beside the panels.
    """
    looks = _looks(chart)
    columns = min(chart.columns, len(chart.panels))
    rows = -(-len(chart.panels) // columns)
    with styled():
        figure = new_figure((_WIDTH * columns if columns > 1 else _ALONE) + 2.0, _HEIGHT * rows)
        handles: dict[str, Artist] = {}
        for place, panel in enumerate(chart.panels):
            axes = figure.add_subplot(rows, columns, place + 1)
            if panel.curves:
                (_bars if panel.bars else _curves)(axes, panel, looks)
            else:
                say_empty(axes)
            for name, value in panel.lines:
                _reference(axes, name, value)
            for name, value in panel.marks:
                _mark(axes, name, value)
            if panel.percent and panel.curves:
                axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
            axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
        if handles:
            figure.legend(list(handles.values()), list(handles), loc="outside right upper", frameon=False, fontsize=8.0)
    return figure


def _looks(chart: Chart) -> dict[str, Look]:
    names = dict.fromkeys(curve.label for panel in chart.panels for curve in panel.curves)
    methods = {curve.label: curve.method for panel in chart.panels for curve in panel.curves if curve.method}
    free = iter(series(len(names)))
    # Several curves of one method differ in marker and dashes.
    seen: dict[str, int] = {}
    looks = {}
    for name in names:
        method = methods.get(name, "")
        looks[name] = look(method, seen.get(method, 0)) if method else next(free)
        seen[method] = seen.get(method, 0) + 1
    return looks


def _curves(axes: Axes, panel: Panel, looks: dict[str, Look]) -> None:
    for curve in panel.curves:
        own = looks[curve.label]
        x, y = np.asarray(curve.x, np.float64), np.asarray(curve.y, np.float64)
        how = own.curve() | {"markevery": max(1, len(x) // _MARKED)}
        if curve.form == "points":
            how |= {"linestyle": "none", "markevery": 1}
        elif curve.form != "line":
            how |= {"marker": "none", "drawstyle": "steps-post" if curve.form == "steps" else "default"}
        axes.plot(x, y, **how, label=curve.label)
        if curve.low:
            axes.fill_between(x, curve.low, curve.high, color=own.line, alpha=0.15, linewidth=0)
    if panel.log_x:
        axes.set_xscale("log")
        log_ticks(axes.xaxis)
    elif all(float(place).is_integer() for curve in panel.curves for place in curve.x):
        # Of bits or steps there are no halves.
        axes.locator_params(axis="x", integer=True)
    if panel.log_y:
        log_values(axes)


def _bars(axes: Axes, panel: Panel, looks: dict[str, Look]) -> None:
    categories = list(dict.fromkeys(name for curve in panel.curves for name in curve.x))
    # Curves that share no category stand on it, not beside each other.
    alone = sum(len(curve.x) for curve in panel.curves) == len(categories)
    width = 0.8 / (1 if alone else max(1, len(panel.curves)))
    if panel.log_y:
        axes.set_yscale("log")
    for k, curve in enumerate(panel.curves):
        beside = 0.0 if alone else (k - (len(panel.curves) - 1) / 2) * width
        x = np.array([categories.index(name) for name in curve.x]) + beside
        y = np.asarray(curve.y, np.float64)
        own = looks[curve.label]
        if curve.form == "points" or panel.log_y:  # a logarithmic axis has no 0 for a bar to begin at
            axes.plot(x, y, **own.curve() | {"linestyle": "none"}, label=curve.label)
        else:
            # Variants of a method share its colour and differ in dashes, which bars do not have.
            pale = bool(curve.method) and own.dash != "-"
            axes.bar(x, y, width * 0.92, color=own.line, alpha=0.5 if pale else 1.0, label=curve.label)
        if curve.low:
            middle = (np.asarray(curve.low) + np.asarray(curve.high)) / 2
            axes.errorbar(x, middle, np.asarray(curve.high) - middle, fmt="none", ecolor="#1b2330", elinewidth=1.0)
    axes.set_xticks(range(len(categories)), [str(name) for name in categories])
    longest = max((len(str(name)) for name in categories), default=0)
    if longest * len(categories) > 48:
        for label in axes.get_xticklabels():
            label.set(rotation=40, ha="right", rotation_mode="anchor")
    axes.grid(visible=False, axis="x")
    if panel.log_y:
        log_ticks(axes.yaxis)


def _reference(axes: Axes, name: str, value: float) -> None:
    axes.axhline(value, color=MUTED, linewidth=1.0, linestyle=(0, (4, 2)), zorder=1)
    axes.annotate(
        name, (1.0, value), xycoords=("axes fraction", "data"), xytext=(-2, 2), textcoords="offset points",
        ha="right", va="bottom", fontsize=7.5, color=MUTED, zorder=1.5,
        bbox={"facecolor": PAPER, "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
    )  # fmt: skip


def _mark(axes: Axes, name: str, value: float) -> None:
    axes.axvline(value, color=MUTED, linewidth=1.0, linestyle=(0, (1, 2)), zorder=1)
    axes.annotate(
        name, (value, 1.0), xycoords=("data", "axes fraction"), xytext=(-2, -2), textcoords="offset points",
        ha="right", va="top", rotation=90, fontsize=7.5, color=MUTED,
    )  # fmt: skip
