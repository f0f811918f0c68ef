"""Figures of a sweep. Each function takes an analysis and returns a matplotlib Figure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.ticker import FuncFormatter, MaxNLocator

from gtrace.report.labels import Label, label_curves, list_curves, make_room
from gtrace.report.names import literal, number, shorten, shorten_all
from gtrace.report.style import (
    FRONT,
    MISSING_CELL,
    MUTED,
    PAPER,
    Look,
    log_ticks,
    look,
    new_figure,
    plain_number,
    styled,
)
from gtrace.report.tables import VIEW_BITS, configuration_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from gtrace.report.analysis import Family, SweepAnalysis

VARIANCE = "relative variance  ||Q(g) − g||² / ||g||²"
BITS = "measured bits per coordinate"

#: Longest names that fit beside a plot, in characters.
_NAME, _LAYER = 34, 40
#: Names of more families than this collide beside their curves.
_FEW = 12
#: Inches that each of them adds to a figure.
_MORE = 0.09
#: A heat map of more layers does not fit on a screen.
_TALL = 40
#: A curve over many more steps than this has markers at some of them only.
_MARKED = 12


def rate_distortion(analysis: SweepAnalysis) -> Figure:
    """Relative variance against measured bits, one curve per method, with the Pareto front."""
    with styled():
        figure = new_figure(8.2, 4.8 + _MORE * min(max(len(analysis.families) - _FEW, 0), 24))
        axes = figure.add_subplot()
        looks = family_looks(analysis)
        labels, lines = [], []
        for family in analysis.families:
            own = looks[family.label]
            points = [analysis.configurations[i] for i in family.members if _drawable(analysis.configurations[i].bits)]
            points = [c for c in points if _drawable(c.relative_variance)]
            x = np.array([c.bits for c in points])
            y = np.array([c.relative_variance for c in points])
            lines += axes.plot(x, y, **own.curve(), label=family.label)
            labels.append(Label(shorten(literal(family.label), _NAME), own.text, x, y))
        front = sorted(
            (c.bits, c.relative_variance)
            for c in analysis.configurations
            if c.pareto and _drawable(c.bits) and _drawable(c.relative_variance)
        )
        if front:
            x, y = np.array(front).T
            # A staircase, not a line from point to point: between two points nothing better was measured.
            axes.plot(x, y, color=FRONT, linewidth=4, alpha=0.4, zorder=1, drawstyle="steps-post", label="front")
            axes.plot(x, y, "o", markersize=10, mfc="none", mec=MUTED, mew=0.9, zorder=4, label="pareto")
        for target in analysis.targets:
            axes.axvline(target, color=MUTED, linewidth=0.8, linestyle=(0, (1, 3)), zorder=1)
        axes.set_xlabel(BITS)
        axes.set_ylabel(VARIANCE)
        _frame(axes, empty=not any(len(label.x) for label in labels))
        _bits_axis(axes, np.concatenate([np.ones(0), *(label.x for label in labels)]), analysis.targets)
        if front:
            axes.text(
                1,
                1,
                "○ Pareto-optimal, grey: the front\ndotted: bits of the table",
                transform=axes.transAxes,
                ha="right",
                va="top",
                fontsize=7.5,
                color=MUTED,
            )
        if len(labels) > _FEW:
            list_curves(axes, list(zip(lines, labels, strict=True)))
        else:
            label_curves(axes, labels)
        return figure


def variance_over_steps(analysis: SweepAnalysis, near: float = VIEW_BITS) -> Figure:
    """Relative variance over training steps, of each method's configuration nearest to ``near`` bits."""
    with styled():
        figure = new_figure(8.2, 4.2 + _MORE * min(max(len(analysis.families) - _FEW, 0), 24))
        axes = figure.add_subplot()
        looks = family_looks(analysis)
        labels, lines = [], []
        for family in analysis.families:
            i = analysis.nearest(family, near)
            if i < 0:
                continue
            own = looks[family.label]
            values = np.where(analysis.per_step[i] > 0, analysis.per_step[i], np.nan)
            known = np.isfinite(values)
            x, y = analysis.steps[known].astype(np.float64), values[known]
            many = len(x) > _MARKED
            lines += axes.plot(
                x,
                y,
                **own.curve(),
                markevery=max(len(x) // _MARKED, 1),
                linewidth=1.0 if many else 1.6,
                label=family.label,
            )
            chosen = analysis.configurations[i]
            name = f"{shorten(literal(configuration_name(chosen)), _NAME)}, {number(chosen.bits, 2)} bits"
            labels.append(Label(name, own.text, x, y))
        axes.set_xlabel("training step")
        axes.set_ylabel(VARIANCE)
        _frame(axes, empty=not any(len(label.x) for label in labels))
        step_axis(axes, analysis.steps)
        if len(labels) > _FEW:
            list_curves(axes, list(zip(lines, labels, strict=True)))
        elif labels:
            make_room(axes, labels)
            label_curves(axes, labels)
        return figure


def layer_heatmap(analysis: SweepAnalysis) -> Figure:
    """Relative variance of every tensor (rows) with every configuration (columns), in logarithmic colour."""
    with styled():
        columns = [i for i in range(len(analysis.configurations)) if (analysis.per_tensor[i] > 0).any()]
        values = analysis.per_tensor[columns].T
        values = np.where(values > 0, values, np.nan)
        layers, configurations = max(len(analysis.tensors), 1), max(len(columns), 1)
        cell_height = float(np.clip(5.0 / layers, 0.15, 0.3))
        cell_width = float(np.clip(7.5 / configurations, 0.16, 0.6))
        longest = min(max((len(literal(name)) for name in analysis.tensors), default=1), _LAYER)
        figure = new_figure(1.9 + 0.075 * longest + cell_width * configurations, 1.9 + cell_height * layers)
        axes = figure.add_subplot()
        axes.grid(visible=False)
        if not np.isfinite(values).any():
            _empty(axes)
            return figure
        axes.set_facecolor(MISSING_CELL)
        low, high = float(np.nanmin(values)), float(np.nanmax(values))
        # One value alone has no range, and a logarithmic scale needs one.
        scale = LogNorm(low, high) if high > low * 1.0001 else LogNorm(low / 2, high * 2)
        image = axes.imshow(
            np.ma.masked_invalid(values), cmap="viridis_r", norm=scale, aspect="auto", interpolation="none"
        )
        names = shorten_all([literal(configuration_name(analysis.configurations[i])) for i in columns], _NAME)
        axes.set_xticks(range(len(columns)), names, rotation=90, fontsize=7)
        axes.set_yticks(
            range(len(analysis.tensors)),
            shorten_all([literal(name) for name in analysis.tensors], _LAYER),
            fontsize=7,
        )
        # Where one has to scroll, the columns are named at both ends.
        axes.tick_params(length=0, labeltop=layers > _TALL)
        for spine in axes.spines.values():
            spine.set_visible(False)
        families = [analysis.configurations[i].family for i in columns]
        for k in range(1, len(families)):
            if families[k] != families[k - 1]:
                axes.axvline(k - 0.5, color=PAPER, linewidth=2)
        if values.size <= 260 and cell_width >= 0.3:
            _write_values(axes, values, scale)
        bar = figure.colorbar(
            image,
            ax=axes,
            shrink=min(1.0, 3.2 / (cell_height * layers)),
            aspect=18,
            pad=0.02,
            anchor=(0, 1) if layers > _TALL else (0, 0.5),
        )
        bar.set_label(VARIANCE)
        log_ticks(bar.ax.yaxis)
        bar.outline.set_visible(False)
        axes.set_ylabel("tensor")
        return figure


def family_looks(analysis: SweepAnalysis) -> dict[str, Look]:
    """Look of each family: that of its method, further families of the same method told apart."""
    seen: dict[str, int] = {}
    looks = {}
    for family in analysis.families:
        looks[family.label] = look(family.method, seen.get(family.method, 0))
        seen[family.method] = seen.get(family.method, 0) + 1
    return looks


def drawn_families(analysis: SweepAnalysis) -> list[Family]:
    """The families that have at least one point to draw."""
    return [
        family
        for family in analysis.families
        if any(
            _drawable(analysis.configurations[i].bits) and _drawable(analysis.configurations[i].relative_variance)
            for i in family.members
        )
    ]


def _drawable(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _frame(axes: Axes, *, empty: bool) -> None:
    if empty:
        _empty(axes)
        return
    axes.set_yscale("log")
    axes.margins(y=0.12)
    axes.autoscale_view()
    log_ticks(axes.yaxis)


def _bits_axis(axes: Axes, bits: NDArray[np.float64], targets: Sequence[float]) -> None:
    """Bits are linear, unless sparse codes of a hundredth of a bit, or half precision, would squeeze the rest."""
    low, high = float(bits.min(initial=math.inf)), float(bits.max(initial=0))
    if len(bits) and (high > 100 * low or high > 3 * max(targets, default=high)):
        axes.set_xscale("log")
        axes.set_xlim(low / 1.3, high * 1.6)
        log_ticks(axes.xaxis)
    else:
        axes.set_xlim(0, 1.16 * (high or 1.0))


def _empty(axes: Axes) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.text(0.5, 0.5, "nothing to draw", transform=axes.transAxes, ha="center", va="center", color=MUTED)


def step_axis(axes: Axes, steps: NDArray[np.int64]) -> None:
    """Steps are linear, unless they were recorded in bursts that thin out, as a capture's default does."""
    if len(steps) > 4 and steps[-1] > 20 * max(float(np.median(steps)), 1.0):
        axes.set_xscale("symlog", linthresh=max(float(np.median(steps)), 1.0))
        axes.xaxis.set_major_formatter(FuncFormatter(plain_number))
        axes.set_xlabel("training step (logarithmic beyond the first)")
    elif len(steps) == 1:
        axes.set_xticks([int(steps[0])], [f"{int(steps[0])}"])
    elif len(steps):
        ticks = MaxNLocator(nbins=8, integer=True, steps=[1, 2, 5, 10]).tick_values(steps[0], steps[-1])
        axes.set_xticks([t for t in ticks if steps[0] <= t <= steps[-1]])


def _short(value: float) -> str:
    """At most five characters, which is what a cell holds."""
    if 0.001 <= value < 9999.5:
        return number(value, 2 if value < 99.5 else 1 + int(math.log10(value)))
    mantissa, _, exponent = f"{value:.0e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def _write_values(axes: Axes, values: NDArray[np.float64], scale: LogNorm) -> None:
    for (row, column), value in np.ndenumerate(values):
        if math.isfinite(value):
            # These two are on a colour map, not on the page: they stay as they are in dark mode.
            shade = "#fefefe" if float(scale(value)) > 0.45 else "#111111"
            axes.text(column, row, _short(float(value)), ha="center", va="center", fontsize=6, color=shade)
