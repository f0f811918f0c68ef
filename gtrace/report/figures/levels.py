"""Figures of fitted levels. Each function takes an analysis and the tensors to show and returns a Figure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from matplotlib.ticker import NullLocator

from gtrace.report.analysis.fits import common_count, levels_on
from gtrace.report.figures.style import (
    FRONT,
    GRID,
    MUTED,
    Look,
    new_figure,
    note,
    plain_number,
    styled,
)
from gtrace.report.figures.sweep import family_looks
from gtrace.report.names import count, literal, shorten
from gtrace.types import WHOLE_MODEL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from gtrace.report.analysis.fits import Density, TensorFit
    from gtrace.report.analysis.results import SweepAnalysis


_NAME, _TENSOR = 26, 40
#: The smallest values hold no energy and would squeeze the rest: the axis leaves out this part of the values,
#: and what lies more octaves than this below every level.
_LEFT_OUT, _BELOW_LEVELS = 0.05, 5
#: Octaves between the smallest value shown and the place of 0, which a logarithmic axis does not have.
_TO_ZERO = 1.5
_NORMS = {"l2": "l2 norm", "linf": "largest magnitude", "l1": "l1 norm"}


class _Row(NamedTuple):
    """The levels of one configuration."""

    name: str
    look: Look
    levels: NDArray[np.float64]


class _Panel(NamedTuple):
    """One law of one tensor with the levels that were fitted, or set, on it."""

    tensor: str
    density: Density
    rows: list[_Row]


def levels_over_density(analysis: SweepAnalysis, fits: Sequence[TensorFit]) -> Figure:
    """Levels of every configuration with the commonest number of them, below the density of r.

    One panel for each tensor and each scale that r is relative to, because levels of different scales lie on
    different axes. All panels show the same number of levels.
    """
    with styled():
        panels = _panels(analysis, fits, common_count(analysis.fits))
        if not panels:
            return _nothing()
        columns = min(len(panels), 2)
        lines = [panels[k : k + columns] for k in range(0, len(panels), columns)]
        most = [max(len(panel.rows) for panel in line) for line in lines]
        above = 1.5
        heights = [above + 0.19 * (n + 1) for n in most]
        figure = new_figure(5.2 * columns if columns > 1 else 7.2, sum(heights) + 0.75 * len(lines))
        grid = figure.add_gridspec(len(lines), columns, height_ratios=heights)
        for k, line in enumerate(lines):
            for j, panel in enumerate(line):
                cell = grid[k, j].subgridspec(2, 1, height_ratios=[above, heights[k] - above], hspace=0.0)
                top = figure.add_subplot(cell[0])
                _draw_panel(top, figure.add_subplot(cell[1], sharex=top), panel, most[k])
        return figure


def _panels(analysis: SweepAnalysis, fits: Sequence[TensorFit], n: int) -> list[_Panel]:
    looks = family_looks(analysis)
    place = {c.spec: k for k, c in enumerate(analysis.configurations)}
    panels = []
    for fit in fits:
        for density in fit.densities:
            sets = sorted(levels_on(fit, density, place, n), key=lambda own: place[own.spec])
            rows = []
            for own in sets:
                family = analysis.configurations[place[own.spec]].family
                rows.append(_Row(shorten(literal(family), _NAME), looks[family], own.levels))
            if rows:
                panels.append(_Panel(_tensor(fit.tensor), density, rows))
    return panels


def _draw_panel(top: Axes, bottom: Axes, panel: _Panel, most: int) -> None:
    density = panel.density
    smallest = min(float(own.levels[own.levels > 0].min()) for own in panel.rows)
    low = min(smallest / 2, max(density.quantile(_LEFT_OUT), smallest / 2**_BELOW_LEVELS))
    low = 2.0 ** math.floor(math.log2(low))
    zero = low / 2**_TO_ZERO
    shown = density.edges[:-1] >= low * (1 - 1e-9)
    edges = np.append(density.edges[:-1][shown], density.edges[-1])
    octaves = np.diff(np.log2(edges))
    for values, name, side in ((density.share, "values", -6), (density.energy, "squared norm", 8)):
        heights = values[shown] / octaves
        if name == "values":
            top.stairs(heights, edges, fill=True, color=FRONT, alpha=0.35, label=f"_{name}")
        top.stairs(heights, edges, color=MUTED, linestyle="-" if name == "values" else (0, (3, 1.5)), label=name)
        peak = int(heights.argmax())
        text = top.annotate(
            name,
            (math.sqrt(edges[peak] * edges[peak + 1]), heights[peak]),
            xytext=(side, 4),
            textcoords="offset points",
            ha="right",
            fontsize=7.5,
            color=MUTED,
        )
        text.set_in_layout(False)
    hidden = density.below + float(density.share[~shown].sum())
    notes = [
        f"{part:.1%} {words}"
        for part, words in ((density.zeros, "are 0"), (hidden, "are too small to show"))
        if part > 0
    ]
    note(top, 0.01, 0.97, "\n".join(notes), va="top")
    top.set_title(f"{panel.tensor}: r = |g| / {_scale(density.law)}", fontsize=9)
    top.set_ylabel("per octave")
    top.set_xscale("log")
    top.margins(y=0.18)
    top.set_ylim(bottom=0)
    top.tick_params(labelbottom=False, length=0)
    bottom.grid(visible=False, axis="y")
    for row, own in enumerate(panel.rows):
        bottom.plot([zero, 1], [row, row], color=GRID, linewidth=0.8, zorder=1, label=f"_{own.name}")
        x = np.where(own.levels > 0, own.levels, zero)
        y = np.full(len(x), float(row))
        bottom.plot(x, y, "|", color=own.look.line, markersize=9.5, markeredgewidth=2.0, label=own.name)
    bottom.set_yticks(range(len(panel.rows)), [own.name for own in panel.rows])
    for label, own in zip(bottom.get_yticklabels(), panel.rows, strict=True):
        label.set_color(own.look.text)
        label.set_fontweight("bold")
    bottom.tick_params(axis="y", length=0)
    bottom.set_ylim(most - 0.4, -0.7)
    bottom.spines["left"].set_visible(False)
    decades = 10.0 ** np.arange(math.ceil(math.log10(low)), 1)
    bottom.set_xticks([zero, *decades], ["0", *(plain_number(value) for value in decades)])
    bottom.xaxis.set_minor_locator(NullLocator())
    bottom.set_xlim(zero / 1.25, 1.12)
    bottom.axvline(math.sqrt(zero * low), color=MUTED, linewidth=0.8, linestyle=(0, (1, 3)), zorder=1)
    bottom.set_xlabel(f"r, and {count(len(panel.rows[0].levels), 'level')} of each method")


def _scale(law: str) -> str:
    """``l2:8192`` in words."""
    norm, _, bucket = law.partition(":")
    whose = "the tensor" if bucket == "none" else f"{bucket} values"
    return f"{_NORMS.get(norm, literal(norm))} of {literal(whose)}"


def _tensor(name: str) -> str:
    return "whole model" if name == WHOLE_MODEL else shorten(literal(name), _TENSOR)


def _nothing() -> Figure:
    figure = new_figure(6.4, 2.0)
    figure.text(0.5, 0.5, "nothing to draw", ha="center", va="center", color=MUTED)
    return figure
