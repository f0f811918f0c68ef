"""Heat map of a sweep: every tensor with every configuration, legible with hundreds of tensors."""

from __future__ import annotations

import math
import re
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.colors import LogNorm

from gtrace.report.analysis.results import MOST_NAMED
from gtrace.report.figures.style import MISSING_CELL, PAPER, log_ticks, new_figure, say_empty, styled
from gtrace.report.figures.sweep import VARIANCE
from gtrace.report.names import literal, number, shorten_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from gtrace.report.analysis.results import SweepAnalysis


#: Longest names of columns and of rows, in characters.
_NAME, _LAYER = 34, 40
#: Inches that all rows share, what one row takes at least and at most, and a line of text.
_ROWS, _THINNEST, _THICKEST, _TEXT = 11.0, 0.04, 0.3, 0.15
#: Inches that fit on a screen, that the rows of a map take at least, and that the formula beside it needs.
_SCREEN, _SHORTEST, _FORMULA = 6.5, 0.6, 2.2
_NUMBER = re.compile(r"\d+")


def layer_heatmap(analysis: SweepAnalysis) -> Figure:
    """Relative variance of every tensor (rows) with every configuration (columns), in logarithmic colour."""
    with styled():
        columns = [i for i in range(len(analysis.configurations)) if (analysis.per_tensor[i] > 0).any()]
        values = analysis.per_tensor[columns].T
        names = [literal(analysis.configurations[i].name) for i in columns]
        families = [analysis.configurations[i].family for i in columns]
        if columns and analysis.safety.known:
            values = np.column_stack([values, analysis.safety.noise_per_tensor])
            names, families = [*names, "SGD: gradient noise"], [*families, ""]
        values = np.where(values > 0, values, np.nan)
        layers, configurations = max(len(analysis.tensors), 1), max(len(names), 1)
        cell_height = _row_height(layers)
        cell_width = float(np.clip(7.5 / configurations, 0.16, 0.6))
        rows = row_names(analysis.tensors)
        longest = max((len(name) for _, name in rows), default=1)
        figure = new_figure(
            1.9 + 0.075 * longest + cell_width * configurations, 1.9 + max(cell_height * layers, _SHORTEST)
        )
        axes = figure.add_subplot()
        axes.grid(visible=False)
        if not np.isfinite(values).any():
            say_empty(axes)
            return figure
        axes.set_facecolor(MISSING_CELL)
        low, high = float(np.nanmin(values)), float(np.nanmax(values))
        # One value alone has no range, and a logarithmic scale needs one.
        scale = LogNorm(low, high) if high > low * 1.0001 else LogNorm(low / 2, high * 2)
        image = axes.imshow(
            np.ma.masked_invalid(values), cmap="viridis_r", norm=scale, aspect="auto", interpolation="none"
        )
        axes.set_xticks(range(len(names)), shorten_all(names, _NAME), rotation=90, fontsize=7)
        axes.set_yticks([place for place, _ in rows], [name for _, name in rows], fontsize=7)
        tall = cell_height * layers > _SCREEN
        # Where one has to scroll, the columns are named at both ends.
        axes.tick_params(length=0, labeltop=tall)
        if len(rows) < layers:
            axes.tick_params(axis="y", length=3)
        for spine in axes.spines.values():
            spine.set_visible(False)
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
            anchor=(0, 1) if tall else (0, 0.5),
        )
        bar.set_label(VARIANCE if cell_height * layers > _FORMULA else "relative variance")
        log_ticks(bar.ax.yaxis)
        bar.outline.set_visible(False)
        axes.set_ylabel("tensor" if len(rows) == len(analysis.tensors) else f"{layers} tensors, some of them named")
        return figure


def row_names(tensors: Sequence[str]) -> list[tuple[float, str]]:
    """Where names of rows stand and what they say, at most :data:`MOST_NAMED` or so.

    Many tensors are named by the block that they stand in a row of (``layers.3`` for all between
    ``layers.3.norm.bias`` and ``layers.3.fc.weight``); where blocks are no fewer, every few tensors have a name.

    Args:
        tensors: names in the order of rows.

    Returns:
        Centre of what is named, in rows, and the name, in the order of rows.
    """
    shown = [literal(name) for name in tensors]
    if len(shown) <= MOST_NAMED:
        return list(zip(map(float, range(len(shown))), shorten_all(shown, _LAYER), strict=True))
    depth = max(len(_NUMBER.findall(name)) for name in shown)
    named = next((found for k in range(depth, 0, -1) if len(found := _blocks(shown, k)) <= MOST_NAMED), None)
    if named is None:
        every = math.ceil(len(shown) / MOST_NAMED)
        named = [(float(k), name) for k, name in enumerate(shown) if k % every == 0]
    names = shorten_all([name for _, name in named], _LAYER)
    return [(place, name) for (place, _), name in zip(named, names, strict=True)]


def _blocks(names: Sequence[str], depth: int) -> list[tuple[float, str]]:
    """Centre and name of each run of names that are alike up to their ``depth``-th number."""
    found, start = [], 0
    for block, members in groupby(names, lambda name: _block(name, depth)):
        size = len(list(members))
        found.append((start + (size - 1) / 2, block))
        start += size
    return found


def _block(name: str, depth: int) -> str:
    numbers = list(_NUMBER.finditer(name))[:depth]
    return name[: numbers[-1].end()] if numbers else name.partition(".")[0]


def _row_height(layers: int) -> float:
    """Inches: a line of text while every row has a name, then whatever there is room for."""
    if layers <= MOST_NAMED:
        return float(np.clip(5.0 / layers, _TEXT, _THICKEST))
    return max(_ROWS / layers, _THINNEST)


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
