"""Charts drawn: curves and bars on panels with one legend, and names beside the curves.

A name covers neither another one nor the data.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from matplotlib.ticker import PercentFormatter

from gtrace.report.figures.style import MUTED, PAPER, log_ticks, log_values, looks_of, new_figure, say_empty, styled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    from gtrace.kernels import Floats
    from gtrace.report.figures.style import Look
    from gtrace.report.section import Chart, Panel


class Label(NamedTuple):
    """A name to write near the end of the curve with the points ``x``, ``y`` (data units)."""

    text: str
    colour: str
    x: Floats
    y: Floats


#: Height of a line and mean width of a character, in units of the font size; DejaVu Sans is wide.
_LINE, _CHARACTER = 1.25, 0.6
_FONT = 8.0
#: Inches for a list of names.
_LIST_WIDTH = 2.4
#: Distance of a label from its point, in points.
_GAP = 7.0

#: Places around a point, best first: horizontal and vertical, in label sizes from the point.
_PLACES = np.array([(1, 0), (1, 1), (1, -1), (0, 1), (0, -1), (-1, 1), (-1, -1), (-1, 0)])


def _figure_of(axes: Axes) -> Figure:
    figure = axes.get_figure(root=True)
    assert figure is not None
    return figure


def list_curves(axes: Axes, curves: Sequence[tuple[Line2D, Label]]) -> None:
    """Name many curves in a list beside the axes, in the order of their ends, where names at curves would collide."""
    figure = _figure_of(axes)
    shown = sorted((pair for pair in curves if len(pair[1].y)), key=lambda pair: -float(pair[1].y[-1]))
    figure.set_size_inches(figure.get_figwidth() + _LIST_WIDTH, figure.get_figheight())
    figure.legend(
        [line for line, _ in shown],
        [label.text for _, label in shown],
        labelcolor=[label.colour for _, label in shown],
        loc="outside right upper",
        frameon=False,
        fontsize=_FONT,
        handlelength=3.4,
    )


def make_room(axes: Axes, labels: Sequence[Label]) -> None:
    """Widen the horizontal axis so that the longest label fits to the right of the data."""
    figure = _figure_of(axes)
    figure.draw_without_rendering()
    needed = (max(len(label.text) for label in labels) * _CHARACTER * _FONT + 2 * _GAP) * figure.dpi / 72
    share = min(needed / axes.get_window_extent().width, 0.45)
    low, high = axes.get_xlim()
    if axes.get_xscale() == "log":
        axes.set_xlim(low, high * (high / low) ** (share / (1 - share)))
    else:
        axes.set_xlim(low, high + (high - low) * share / (1 - share))


def label_curves(axes: Axes, labels: Sequence[Label], *, room: bool = False) -> None:
    """Write each label near its curve's end, or further back along the curve where the end is crowded.

    Call it last: limits and layout must be final, since overlaps are judged in pixels; ``room`` widens the axes first.
    """
    if not labels:
        return
    if room:
        make_room(axes, labels)
    figure = _figure_of(axes)
    figure.draw_without_rendering()
    pixel = figure.dpi / 72
    frame = axes.get_window_extent()
    curves = [np.asarray(axes.transData.transform(np.column_stack([label.x, label.y]))) for label in labels]
    crowd = np.concatenate([np.empty((0, 2)), *(_dense(curve, 4 * pixel) for curve in curves)])
    taken: list[tuple[Floats, Floats]] = []
    for label, curve in zip(labels, curves, strict=True):
        if not len(curve):
            continue
        size = np.array([len(label.text) * _CHARACTER, _LINE]) * _FONT * pixel
        # (points back from the end, places, 2)
        low = curve[::-1][:12, None] + _PLACES * _GAP * pixel + (_PLACES - 1) * size / 2
        high = low + size
        over = np.maximum(frame.min - low, 0) + np.maximum(high - frame.max, 0)
        cost = 200 * over.sum(axis=-1) / size[1]
        for left, right in taken:
            shared = np.maximum(np.minimum(high, right) - np.maximum(low, left), 0)
            cost += 60 * shared.prod(axis=-1) / size.prod()
        cost += 3 * ((crowd > low[:, :, None]) & (crowd < high[:, :, None])).all(axis=-1).sum(axis=-1)
        cost += 0.4 * np.arange(len(_PLACES)) + 1.5 * np.arange(len(cost))[:, None]
        back, rank = np.unravel_index(cost.argmin(), cost.shape)
        taken.append((low[back, rank], high[back, rank]))
        dx, dy = _PLACES[rank].tolist()
        at = len(label.x) - 1 - back
        ha, va = {1: "left", 0: "center", -1: "right"}[dx], {0: "center", 1: "bottom", -1: "top"}[dy]
        point, away = (label.x[at], label.y[at]), (dx * _GAP, dy * _GAP)
        write_name(axes, label.text, label.colour, point, away, ha=ha, va=va, annotation_clip=False)


def write_name(
    axes: Axes, name: str, colour: str, at: tuple[float, float], away: tuple[float, float], pad: float = 0.6, **how: Any
) -> None:
    """A name ``away`` from a point, in typographic points, that takes no room from the axes."""
    box = {"facecolor": PAPER, "edgecolor": "none", "alpha": 0.75, "pad": pad}
    how |= {"fontsize": _FONT, "fontweight": "bold", "color": colour, "bbox": box, "zorder": 6}
    axes.annotate(name, at, xytext=away, textcoords="offset points", **how).set_in_layout(False)


def _dense(curve: Floats, every: float) -> Floats:
    """The curve with points put in between, so that a label on a straight piece counts as a collision."""
    pieces = [curve[:1]]
    for start, end in pairwise(curve):
        number = int(min(max(np.hypot(*(end - start)) / every, 1), 400))
        pieces.append(start + (end - start) * np.linspace(0, 1, number + 1)[1:, None])
    return np.concatenate(pieces)


#: Inches of a panel beside others, of one alone, and of each.
_WIDTH, _ALONE, _HEIGHT = 4.3, 6.2, 3.4
#: A curve of more points than this has markers at some of them only.
_MARKED = 12


def draw_chart(chart: Chart) -> Figure:
    """A matplotlib figure of a chart; curves of the same name look the same in all panels.

    A name's look is fixed by its first appearance. One legend is beside the panels.
    """
    methods: dict[str, str] = {}
    for curve in (curve for panel in chart.panels for curve in panel.curves):
        methods[curve.label] = curve.method or methods.get(curve.label, "")
    looks = looks_of(methods)
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
                axes.axhline(value, color=MUTED, linewidth=1.0, linestyle=(0, (4, 2)), zorder=1)
                axes.annotate(
                    name, (1.0, value), xycoords=("axes fraction", "data"), xytext=(-2, 2), textcoords="offset points",
                    ha="right", va="bottom", fontsize=7.5, color=MUTED, zorder=1.5,
                    bbox={"facecolor": PAPER, "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
                )  # fmt: skip
            for name, value in panel.marks:
                axes.axvline(value, color=MUTED, linewidth=1.0, linestyle=(0, (1, 2)), zorder=1)
                axes.annotate(
                    name, (value, 1.0), xycoords=("data", "axes fraction"), xytext=(-2, -2), textcoords="offset points",
                    ha="right", va="top", rotation=90, fontsize=7.5, color=MUTED,
                )  # fmt: skip
            if panel.percent and panel.curves:
                axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
            axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
        if handles:
            figure.legend(list(handles.values()), list(handles), loc="outside right upper", frameon=False, fontsize=8.0)
    return figure


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
    # Curves that share no category are placed on it, not beside each other.
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
