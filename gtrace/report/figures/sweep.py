"""Figures of a sweep. Each function takes an analysis and returns a matplotlib Figure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator

from gtrace.report.figures.labels import Label, label_curves, list_curves
from gtrace.report.figures.style import (
    FRONT,
    INK,
    MUTED,
    PAPER,
    Look,
    log_ticks,
    look,
    new_figure,
    note,
    plain_number,
    say_empty,
    styled,
)
from gtrace.report.names import literal, shorten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from numpy.typing import NDArray

    from gtrace.report.analysis.results import SweepAnalysis
    from gtrace.report.analysis.safety import Safety


VARIANCE = "relative variance  ||Q(g) − g||² / ||g||²"
BITS = "measured bits per coordinate"
#: Longest names that fit beside a plot, in characters.
_NAME = 34
#: Names of more families than this collide beside their curves.
_FEW = 12
#: Inches that each of them adds to a figure.
_MORE = 0.09
#: Factor that a logarithmic axis spans at least.
_LEAST_SPAN = 3.0
#: Bits up to which an axis of them stays linear.
_MOST_BITS = 12.0
#: The middle part of the steps that an error bar spans, and the fewest steps that have a middle.
_MIDDLE, _FEWEST_STEPS = 0.8, 3
#: Lines of what is not a codec.
_DASHED = (0, (4, 2))


def _drawable(value: float) -> bool:
    """Whether a logarithmic axis can show it."""
    return math.isfinite(value) and value > 0


def rate_distortion(analysis: SweepAnalysis) -> Figure:
    """Error against measured bits, one curve per method, with the Pareto front."""
    with styled():
        figure = new_figure(8.2, 4.8 + _MORE * min(max(len(analysis.families) - _FEW, 0), 24))
        axes = figure.add_subplot()
        looks = family_looks(analysis)
        labels, lines = [], []
        by_step = analysis.per_step if analysis.table is None else analysis.table.relative()
        for family in analysis.families:
            own = looks[family.label]
            points = [analysis.configurations[i] for i in family.members if _drawable(analysis.configurations[i].bits)]
            points = [c for c in points if _drawable(c.error)]
            x = np.array([c.bits for c in points])
            y = np.array([c.error for c in points])
            lines += axes.plot(x, y, **own.curve(), label=family.label)
            labels.append(Label(shorten(literal(family.label), _NAME), own.text, x, y))
            members = [i for i in family.members if analysis.configurations[i] in points]
            low, high = middle_of_steps(by_step[members])
            axes.vlines(x, low, high, color=own.line, linewidth=1.0, alpha=0.45, zorder=1.5, label=f"_{family.label}")
        front = sorted(
            (c.bits, c.error) for c in analysis.configurations if c.pareto and _drawable(c.bits) and _drawable(c.error)
        )
        if front:
            x, y = np.array(front).T
            # A staircase, not a line from point to point: between two points nothing better was measured.
            axes.plot(x, y, color=FRONT, linewidth=4, alpha=0.4, zorder=1, drawstyle="steps-post", label="front")
            axes.plot(x, y, "o", markersize=10, mfc="none", mec=MUTED, mew=0.9, zorder=4, label="pareto")
        for target in analysis.targets:
            axes.axvline(target, color=MUTED, linewidth=0.8, linestyle=(0, (1, 3)), zorder=1)
        for name, value in _noise_levels(analysis.safety.noise.estimate, analysis.safety):
            axes.axhline(value, color=INK, linewidth=0.9, linestyle=_DASHED, zorder=1, label=name)
            box = {"facecolor": PAPER, "edgecolor": "none", "alpha": 0.7, "pad": 0.5}
            along = axes.get_yaxis_transform()
            note(axes, 0.995, value, name, transform=along, ha="right", va="bottom", color=INK, bbox=box)
        axes.set_xlabel(BITS)
        single = analysis.basis.window is None and analysis.basis.workers == 1
        axes.set_ylabel(VARIANCE if single else "error over the gradient's energy")
        _frame(axes, empty=not any(len(label.x) for label in labels))
        _bits_axis(axes, np.concatenate([np.ones(0), *(label.x for label in labels)]))
        if front:
            notes = ["○ Pareto-optimal, grey: the front", "dotted: bits of the table"]
            if len(analysis.steps) >= _FEWEST_STEPS:
                notes.append("bars: the middle 80 % of the steps")
            box = {"facecolor": PAPER, "edgecolor": "none", "alpha": 0.85, "pad": 1.0}
            note(axes, 1, 1, "\n".join(notes), ha="right", va="top", bbox=box)
        _name_curves(axes, lines, labels)
        return figure


def _noise_levels(value: float, safety: Safety) -> list[tuple[str, float]]:
    """What plain SGD has of noise, and several workers in full precision (the papers' SGD and SuperSGD)."""
    if not safety.known:
        return []
    return [
        ("SGD: gradient noise of one worker", value),
        (f"{safety.workers} workers in full precision", value / safety.workers),
    ]


def _name_curves(axes: Axes, lines: Sequence[Line2D], labels: Sequence[Label]) -> None:
    """Names at the ends of a few curves, and beside the axes of many."""
    if len(labels) > _FEW:
        list_curves(axes, list(zip(lines, labels, strict=True)))
    else:
        label_curves(axes, labels, room=False)


def middle_of_steps(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Between which values the middle 80 % of the steps lie.

    Args:
        values: (configurations, steps), NaN where not measured.

    Returns:
        (configurations,) lower and (configurations,) upper ends, NaN for a configuration of fewer than three steps.
    """
    low, high = np.full(len(values), np.nan), np.full(len(values), np.nan)
    for k, row in enumerate(values):
        known = row[np.isfinite(row) & (row > 0)]
        if len(known) >= _FEWEST_STEPS:
            low[k], high[k] = np.quantile(known, [(1 - _MIDDLE) / 2, (1 + _MIDDLE) / 2])
    return low, high


def family_looks(analysis: SweepAnalysis) -> dict[str, Look]:
    """Look of each family: that of its method, further families of the same method told apart."""
    seen: dict[str, int] = {}
    looks = {}
    for family in analysis.families:
        looks[family.label] = look(family.method, seen.get(family.method, 0))
        seen[family.method] = seen.get(family.method, 0) + 1
    return looks


def _frame(axes: Axes, *, empty: bool) -> None:
    if empty:
        say_empty(axes)
        return
    log_values(axes)


def log_values(axes: Axes) -> None:
    """A logarithmic vertical axis of at least a factor of three, so that a wobble of a percent looks like one."""
    axes.set_yscale("log")
    axes.margins(y=0.12)
    axes.autoscale_view()
    low, high = axes.get_ylim()
    if high < _LEAST_SPAN * low:
        middle = math.sqrt(low * high)
        axes.set_ylim(middle / math.sqrt(_LEAST_SPAN), middle * math.sqrt(_LEAST_SPAN))
    log_ticks(axes.yaxis)


def _bits_axis(axes: Axes, bits: NDArray[np.float64]) -> None:
    """Bits are linear, unless sparse codes of a hundredth of a bit, or half precision, would squeeze the rest."""
    low, high = float(bits.min(initial=math.inf)), float(bits.max(initial=0))
    if len(bits) and (high > 100 * low or high > _MOST_BITS):
        axes.set_xscale("log")
        axes.set_xlim(low / 1.3, high * 1.6)
        log_ticks(axes.xaxis)
    else:
        axes.set_xlim(0, 1.16 * (high or 1.0))


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
