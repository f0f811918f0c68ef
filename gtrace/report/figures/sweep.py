"""Figures of a sweep. Each function takes an analysis and returns a matplotlib Figure."""

from __future__ import annotations

import math
import re
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from gtrace.report.analysis.details import MOST_NAMED, Density, TensorFit, common_count, levels_on
from gtrace.report.figures import style
from gtrace.report.figures.charts import Label, label_curves, list_curves
from gtrace.report.names import count, literal, number, shorten, shorten_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gtrace.kernels import Floats, Ints
    from gtrace.report.analysis.families import Configuration
    from gtrace.report.analysis.sweep import SweepAnalysis

VARIANCE = "relative variance  ||Q(g) − g||² / ||g||²"
BITS = "measured bits per coordinate"
#: Longest names that fit beside a plot, in characters.
_NAME = 34
#: Names of more families than this collide beside their curves.
_FEW = 12
#: Inches that each of them adds to a figure.
_MORE = 0.09
#: Bits up to which an axis of them stays linear.
_MOST_BITS = 12.0
#: The middle part of the steps that an error bar spans, and the fewest steps that have a middle.
_MIDDLE, _FEWEST_STEPS = 0.8, 3
#: Lines of what is not a codec.
_DASHED = (0, (4, 2))


def _drawable(configuration: Configuration) -> bool:
    return 0 < configuration.bits < math.inf and 0 < configuration.error < math.inf


@style.styled()
def rate_distortion(analysis: SweepAnalysis) -> Figure:
    """Error against measured bits, one curve per method, with the Pareto front."""
    figure = style.new_figure(8.2, 4.8 + _MORE * min(max(len(analysis.families) - _FEW, 0), 24))
    axes = figure.add_subplot()
    looks = style.looks_of({family.label: family.method for family in analysis.families})
    labels, lines = [], []
    by_step = analysis.table.relative()
    for family in analysis.families:
        own = looks[family.label]
        members = [i for i in family.members if _drawable(analysis.configurations[i])]
        x = np.array([analysis.configurations[i].bits for i in members])
        y = np.array([analysis.configurations[i].error for i in members])
        lines += axes.plot(x, y, **own.curve(), label=family.label)
        labels.append(Label(shorten(literal(family.label), _NAME), own.text, x, y))
        low, high = middle_of_steps(by_step[members])
        axes.vlines(x, low, high, color=own.line, linewidth=1.0, alpha=0.45, zorder=1.5, label=f"_{family.label}")
    front = sorted((c.bits, c.error) for c in analysis.configurations if c.pareto and _drawable(c))
    if front:
        x, y = np.array(front).T
        # A staircase, not a line from point to point: between two points nothing better was measured.
        axes.plot(x, y, color=style.FRONT, linewidth=4, alpha=0.4, zorder=1, drawstyle="steps-post", label="front")
        axes.plot(x, y, "o", markersize=10, mfc="none", mec=style.MUTED, mew=0.9, zorder=4, label="pareto")
    for target in analysis.targets:
        axes.axvline(target, color=style.MUTED, linewidth=0.8, linestyle=(0, (1, 3)), zorder=1)
    safety = analysis.safety
    # What plain SGD has of noise, and several workers in full precision (the papers' SGD and SuperSGD).
    levels = {"SGD: gradient noise of one worker": 1, f"{safety.workers} workers in full precision": safety.workers}
    for name, workers in levels.items() if safety.known else ():
        value = safety.noise.estimate / workers
        axes.axhline(value, color=style.INK, linewidth=0.9, linestyle=_DASHED, zorder=1, label=name)
        box = {"facecolor": style.PAPER, "edgecolor": "none", "alpha": 0.7, "pad": 0.5}
        along = axes.get_yaxis_transform()
        style.note(axes, 0.995, value, name, transform=along, ha="right", va="bottom", color=style.INK, bbox=box)
    axes.set_xlabel(BITS)
    single = analysis.basis.window is None and analysis.basis.workers == 1
    axes.set_ylabel(VARIANCE if single else "error over the gradient's energy")
    if any(len(label.x) for label in labels):
        style.log_values(axes)
    else:
        style.say_empty(axes)
    _bits_axis(axes, np.concatenate([np.ones(0), *(label.x for label in labels)]))
    if front:
        notes = ["○ Pareto-optimal, grey: the front", "dotted: bits of the table"]
        if len(analysis.steps) >= _FEWEST_STEPS:
            notes.append("bars: the middle 80 % of the steps")
        box = {"facecolor": style.PAPER, "edgecolor": "none", "alpha": 0.85, "pad": 1.0}
        style.note(axes, 1, 1, "\n".join(notes), ha="right", va="top", bbox=box)
    if len(labels) > _FEW:
        list_curves(axes, list(zip(lines, labels, strict=True)))
    else:
        label_curves(axes, labels)
    return figure


def middle_of_steps(values: Floats) -> tuple[Floats, Floats]:
    """Lower and upper ends (configurations,) of the middle 80 % of the steps of ``values`` (configurations, steps).

    NaN for a configuration that was measured at fewer than three steps.
    """
    low, high = np.full(len(values), np.nan), np.full(len(values), np.nan)
    for k, row in enumerate(values):
        known = row[np.isfinite(row) & (row > 0)]
        if len(known) >= _FEWEST_STEPS:
            low[k], high[k] = np.quantile(known, [(1 - _MIDDLE) / 2, (1 + _MIDDLE) / 2])
    return low, high


def _bits_axis(axes: Axes, bits: Floats) -> None:
    """Bits are linear, unless sparse codes of a hundredth of a bit, or half precision, would squeeze the rest."""
    low, high = float(bits.min(initial=math.inf)), float(bits.max(initial=0))
    if len(bits) and (high > 100 * low or high > _MOST_BITS):
        axes.set(xscale="log", xlim=(low / 1.3, high * 1.6))
        style.log_ticks(axes.xaxis)
    else:
        axes.set_xlim(0, 1.16 * (high or 1.0))


def step_axis(axes: Axes, steps: Ints) -> None:
    """Steps are linear, unless they were recorded in bursts that thin out, as a capture's default does."""
    if len(steps) > 4 and steps[-1] > 20 * max(float(np.median(steps)), 1.0):
        axes.set_xscale("symlog", linthresh=max(float(np.median(steps)), 1.0))
        axes.xaxis.set_major_formatter(FuncFormatter(style.plain_number))
        axes.set_xlabel("training step (logarithmic beyond the first)")
    elif len(steps) == 1:
        axes.set_xticks([int(steps[0])], [f"{int(steps[0])}"])
    elif len(steps):
        ticks = MaxNLocator(nbins=8, integer=True, steps=[1, 2, 5, 10]).tick_values(steps[0], steps[-1])
        axes.set_xticks([t for t in ticks if steps[0] <= t <= steps[-1]])


#: Longest names of rows, in characters.
_LAYER = 40
#: Inches that all rows share, what one row takes at least and at most, and a line of text.
_ROWS, _THINNEST, _THICKEST, _TEXT = 11.0, 0.04, 0.3, 0.15
#: Inches that fit on a screen, that the rows of a map take at least, and that the formula beside it needs.
_SCREEN, _SHORTEST, _FORMULA = 6.5, 0.6, 2.2
_NUMBER = re.compile(r"\d+")


@style.styled()
def layer_heatmap(analysis: SweepAnalysis) -> Figure:
    """Relative variance of every tensor (rows) with every configuration (columns), in logarithmic colour."""
    columns = [i for i in range(len(analysis.configurations)) if (analysis.per_tensor[i] > 0).any()]
    values = analysis.per_tensor[columns].T
    names = [literal(analysis.configurations[i].name) for i in columns]
    families = [analysis.configurations[i].family for i in columns]
    if columns and analysis.safety.known:
        values = np.column_stack([values, analysis.safety.noise_per_tensor])
        names, families = [*names, "SGD: gradient noise"], [*families, ""]
    values = np.where(values > 0, values, np.nan)
    layers, configurations = max(len(analysis.tensors), 1), max(len(names), 1)
    # A line of text while every row has a name, then whatever there is room for.
    named = float(np.clip(5.0 / layers, _TEXT, _THICKEST))
    cell_height = named if layers <= MOST_NAMED else max(_ROWS / layers, _THINNEST)
    cell_width = float(np.clip(7.5 / configurations, 0.16, 0.6))
    rows = row_names(analysis.tensors)
    longest = max((len(name) for _, name in rows), default=1)
    figure = style.new_figure(
        1.9 + 0.075 * longest + cell_width * configurations, 1.9 + max(cell_height * layers, _SHORTEST)
    )
    axes = figure.add_subplot()
    axes.grid(visible=False)
    if not np.isfinite(values).any():
        style.say_empty(axes)
        return figure
    axes.set_facecolor(style.MISSING_CELL)
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    # One value alone has no range, and a logarithmic scale needs one.
    scale = LogNorm(low, high) if high > low * 1.0001 else LogNorm(low / 2, high * 2)
    image = axes.imshow(np.ma.masked_invalid(values), cmap="viridis_r", norm=scale, aspect="auto", interpolation="none")
    axes.set_xticks(range(len(names)), shorten_all(names, _NAME), rotation=90, fontsize=7)
    axes.set_yticks([place for place, _ in rows], [name for _, name in rows], fontsize=7)
    tall = cell_height * layers > _SCREEN
    # Where one has to scroll, the columns are named at both ends.
    axes.tick_params(length=0, labeltop=tall)
    if len(rows) < layers:
        axes.tick_params(axis="y", length=3)
    axes.spines[:].set_visible(False)
    for k in range(1, len(families)):
        if families[k] != families[k - 1]:
            axes.axvline(k - 0.5, color=style.PAPER, linewidth=2)
    for (row, column), value in np.ndenumerate(values):
        if values.size <= 260 and cell_width >= 0.3 and math.isfinite(value):
            # These two are on a colour map, not on the page: they stay as they are in dark mode.
            shade = "#fefefe" if float(scale(value)) > 0.45 else "#111111"
            axes.text(column, row, _short(float(value)), ha="center", va="center", fontsize=6, color=shade)
    bar = figure.colorbar(
        image,
        ax=axes,
        shrink=min(1.0, 3.2 / (cell_height * layers)),
        aspect=18,
        pad=0.02,
        anchor=(0, 1) if tall else (0, 0.5),
    )
    bar.set_label(VARIANCE if cell_height * layers > _FORMULA else "relative variance")
    style.log_ticks(bar.ax.yaxis)
    bar.outline.set_visible(False)
    axes.set_ylabel("tensor" if len(rows) == len(analysis.tensors) else f"{layers} tensors, some of them named")
    return figure


def row_names(tensors: Sequence[str]) -> list[tuple[float, str]]:
    """Centre of what is named, in rows, and the name, at most :data:`MOST_NAMED` or so, in the order of rows.

    Many tensors are named by the block that they are in (``layers.3`` for all between
    ``layers.3.norm.bias`` and ``layers.3.fc.weight``); where blocks are no fewer, every few tensors have a name.
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
    """Centre and name of each run of names that are the same up to their ``depth``-th number."""
    found, start = [], 0
    for block, members in groupby(names, lambda name: _block(name, depth)):
        size = len(list(members))
        found.append((start + (size - 1) / 2, block))
        start += size
    return found


def _block(name: str, depth: int) -> str:
    numbers = list(_NUMBER.finditer(name))[:depth]
    return name[: numbers[-1].end()] if numbers else name.partition(".")[0]


def _short(value: float) -> str:
    """At most five characters, which is what a cell holds."""
    if 0.001 <= value < 9999.5:
        return number(value, 2 if value < 99.5 else 1 + int(math.log10(value)))
    mantissa, _, exponent = f"{value:.0e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


#: Longest names of methods and tensors beside levels, in characters.
_METHOD, _TENSOR = 26, 40
#: The smallest values hold no energy and would squeeze the rest: the axis leaves out this part of the values,
#: and what lies more octaves than this below every level.
_LEFT_OUT, _BELOW_LEVELS = 0.05, 5
#: Octaves between the smallest value shown and the place of 0, which a logarithmic axis does not have.
_TO_ZERO = 1.5
_NORMS = {"l2": "l2 norm", "linf": "largest magnitude", "l1": "l1 norm"}


@style.styled()
def levels_over_density(analysis: SweepAnalysis, fits: Sequence[TensorFit]) -> Figure:
    """Levels of every configuration with the commonest number of them, below the density of r.

    One panel for each tensor and each scale that r is relative to, because levels of different scales lie on
    different axes. All panels show the same number of levels.
    """
    looks = style.looks_of({family.label: family.method for family in analysis.families})
    families = {c.spec: c.family for c in analysis.configurations}
    panels = []
    for fit in fits:
        tensor = shorten(literal(fit.label), _TENSOR)
        for density, sets in levels_on(fit, families, common_count(analysis.fits)):
            named = [(families[own.spec], own.levels) for own in sets]
            rows = [(shorten(literal(label), _METHOD), looks[label], levels) for label, levels in named]
            panels.append((tensor, density, rows))
    columns = min(len(panels), 2)
    lines = [panels[k : k + columns] for k in range(0, len(panels), columns)]
    most = [max(len(rows) for *_, rows in line) for line in lines]
    above = 1.5
    heights = [above + 0.19 * (n + 1) for n in most]
    figure = style.new_figure(5.2 * columns if columns > 1 else 7.2, sum(heights) + 0.75 * len(lines))
    grid = figure.add_gridspec(len(lines), columns, height_ratios=heights)
    for k, line in enumerate(lines):
        for j, panel in enumerate(line):
            cell = grid[k, j].subgridspec(2, 1, height_ratios=[above, heights[k] - above], hspace=0.0)
            top = figure.add_subplot(cell[0])
            _draw_panel(top, figure.add_subplot(cell[1], sharex=top), *panel, most[k])
    return figure


def _draw_panel(
    top: Axes, bottom: Axes, tensor: str, density: Density, rows: list[tuple[str, style.Look, Floats]], most: int
) -> None:
    smallest = min(float(levels[levels > 0].min()) for *_, levels in rows)
    low = min(smallest / 2, max(density.quantile(_LEFT_OUT), smallest / 2**_BELOW_LEVELS))
    low = 2.0 ** math.floor(math.log2(low))
    zero = low / 2**_TO_ZERO
    shown = density.edges[:-1] >= low * (1 - 1e-9)
    edges = np.append(density.edges[:-1][shown], density.edges[-1])
    octaves = np.diff(np.log2(edges))
    for values, name, side in ((density.share, "values", -6), (density.energy, "squared norm", 8)):
        heights = values[shown] / octaves
        if name == "values":
            top.stairs(heights, edges, fill=True, color=style.FRONT, alpha=0.35, label=f"_{name}")
        top.stairs(heights, edges, color=style.MUTED, linestyle="-" if name == "values" else (0, (3, 1.5)), label=name)
        peak = int(heights.argmax())
        text = top.annotate(
            name,
            (math.sqrt(edges[peak] * edges[peak + 1]), heights[peak]),
            xytext=(side, 4),
            textcoords="offset points",
            ha="right",
            fontsize=7.5,
            color=style.MUTED,
        )
        text.set_in_layout(False)
    hidden = density.below + float(density.share[~shown].sum())
    notes = [
        f"{part:.1%} {words}"
        for part, words in ((density.zeros, "are 0"), (hidden, "are too small to show"))
        if part > 0
    ]
    style.note(top, 0.01, 0.97, "\n".join(notes), va="top")
    norm, _, bucket = density.law.partition(":")
    whose = "the tensor" if bucket == "none" else literal(f"{bucket} values")
    top.set_title(f"{tensor}: r = |g| / {_NORMS.get(norm, literal(norm))} of {whose}", fontsize=9)
    top.set_ylabel("per octave")
    top.set_xscale("log")
    top.margins(y=0.18)
    top.set_ylim(bottom=0)
    top.tick_params(labelbottom=False, length=0)
    bottom.grid(visible=False, axis="y")
    for row, (name, own, levels) in enumerate(rows):
        bottom.plot([zero, 1], [row, row], color=style.GRID, linewidth=0.8, zorder=1, label=f"_{name}")
        x = np.where(levels > 0, levels, zero)
        y = np.full(len(x), float(row))
        bottom.plot(x, y, "|", color=own.line, markersize=9.5, markeredgewidth=2.0, label=name)
    bottom.set_yticks(range(len(rows)), [name for name, *_ in rows])
    for label, (_, own, _) in zip(bottom.get_yticklabels(), rows, strict=True):
        label.set(color=own.text, fontweight="bold")
    bottom.tick_params(axis="y", length=0)
    bottom.set_ylim(most - 0.4, -0.7)
    bottom.spines["left"].set_visible(False)
    decades = 10.0 ** np.arange(math.ceil(math.log10(low)), 1)
    bottom.set_xticks([zero, *decades], ["0", *(style.plain_number(value) for value in decades)])
    bottom.xaxis.set_minor_locator(NullLocator())
    bottom.set_xlim(zero / 1.25, 1.12)
    bottom.axvline(math.sqrt(zero * low), color=style.MUTED, linewidth=0.8, linestyle=(0, (1, 3)), zorder=1)
    bottom.set_xlabel(f"r, and {count(len(rows[0][2]), 'level')} of each method")
