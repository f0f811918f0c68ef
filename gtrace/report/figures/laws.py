"""Figures on the laws of gradients. Each function takes a section of a trace and returns a matplotlib Figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import MaxNLocator
from scipy.special import ndtri

from gtrace.fitting.floats import candidates, placed_error
from gtrace.fitting.magnitudes import LAWS
from gtrace.fitting.sparsity import RULES
from gtrace.report.analysis.traces import SCALE, LawSection, Picture, mean_over_layers
from gtrace.report.figures.charts import Label, label_curves, make_room, write_name
from gtrace.report.figures.style import FRONT, INK, MUTED, Look, hue, log_ticks, new_figure, note, styled
from gtrace.report.figures.sweep import step_axis
from gtrace.report.names import literal, shorten_all
from gtrace.sweep.laws import ASKED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_LOOKS = {
    "lognormal": hue("blue", "o", "-"),
    "normal": hue("vermillion", "s", "-"),
    "half-normal": hue("orange", "D", "--"),
    "laplace": hue("green", "^", "-"),
    "half-laplace": hue("purple", "v", "--"),
    "loglaplace": hue("sky", "P", "-."),
    "cauchy": hue("grey", "X", ":"),
    "uniform": hue("grey", "h", "--"),
}

_RULES = {
    "exact": hue("blue", "o", "-"),
    "lognormal": hue("green", "s", "-"),
    "normal": hue("vermillion", "^", "--"),
    "topk": hue("orange", "D", "-."),
}

_CYCLE = ("blue", "vermillion", "green", "orange", "purple", "sky", "grey")
#: Layers that are named in a figure; the others are drawn in grey.
_NAMED = 7
_NAME = 20
#: Points of a curve of error over sigma.
_POINTS = 31
#: Bits of the panels.
PANEL_BITS = (4, 6, 8)
#: Non-zero elements that scales are set for there.
_COUNT = 10_000


@styled()
def distribution(picture: Picture) -> Figure:
    """Histogram of one gradient's magnitudes on a linear and on a logarithmic axis, and two Q-Q plots."""
    figure = new_figure(9.2, 7.0)
    linear, logarithmic, normal, lognormal = figure.subplots(2, 2).flat
    _linear_histogram(linear, picture)
    _log_histogram(logarithmic, picture)
    _quantiles(normal, picture, "normal")
    _quantiles(lognormal, picture, "lognormal")
    return figure


def _linear_histogram(axes: Axes, picture: Picture) -> None:
    edges, fit = picture.linear_edges, picture.fit
    mean, width = fit.laws["half-laplace"].scale, float(edges[1])
    share = picture.linear_counts / fit.count
    axes.stairs(share, edges / mean, fill=True, color=FRONT, alpha=0.45)
    x = np.linspace(width / 50, edges[-1], 500)
    for place, name in enumerate(("lognormal", "half-normal", "normal")):
        own = _LOOKS[name]
        axes.plot(x / mean, fit.laws[name].density(x) * width, color=own.line, linestyle=own.dash)
        # All three curves end on the axis, where their names would lie upon each other.
        top = 0.95 - 0.08 * place
        note(axes, 0.97, top, name, ha="right", va="top", color=own.text, fontsize=8, fontweight="bold")
    axes.set_ylim(0, float(share.max()) * 1.08)
    axes.set_title("(a) linear axis: a spike and a long tail" if share[0] > 0.2 else "(a) linear axis")
    axes.set(xlabel="|g| over its mean, up to the 99.5 % quantile", ylabel="share of elements per bin")


def _log_histogram(axes: Axes, picture: Picture) -> None:
    edges, fit = picture.log2_edges, picture.fit
    density = picture.log2_counts / fit.count / np.diff(edges)
    axes.stairs(density, edges, fill=True, color=FRONT, alpha=0.45)
    t = np.linspace(edges[0], edges[-1], 400)
    labels = []
    shown = list(dict.fromkeys(["lognormal", "half-normal", fit.best]))
    for name in shown:
        own = _LOOKS[name]
        # The density per octave: |g| times that per unit of |g|, times ln 2.
        y = fit.laws[name].density(2.0**t) * 2.0**t * np.log(2)
        axes.plot(t, y, color=own.line, linestyle=own.dash)
        # Where a curve is highest, its name has room.
        peak = int(np.argmax(y))
        labels.append(Label(f"{name}, KS {fit.ks[name]:.2f}", own.text, t[: peak + 1], y[: peak + 1]))
    axes.set_ylim(0, None)
    axes.set(title="(b) logarithmic axis: a lognormal law is a bell", xlabel="log2 |g|", ylabel="density per octave")
    label_curves(axes, labels)


def _quantiles(axes: Axes, picture: Picture, name: str) -> None:
    law = picture.fit.laws[name]
    z = ndtri(picture.probabilities)
    own = _LOOKS[name]
    values, straight = picture.quantiles, law.quantile(picture.probabilities)
    if law.logarithmic:
        values, straight = np.log2(values), np.log2(straight)
    else:
        mean = picture.fit.laws["half-laplace"].scale
        values, straight = values / mean, straight / mean
    axes.plot(z, straight, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.plot(z, values, "o", color=own.line, markersize=3.2)
    distance = picture.fit.ks[name]
    verdict = "nearly straight" if distance < 0.07 else "bent" if distance < 0.2 else "strongly bent"
    axes.set_title(f"({'d' if law.logarithmic else 'c'}) Q-Q {name}: {verdict}")
    axes.set_xlabel("quantile of a standard normal law")
    axes.set_ylabel("quantile of log2 |g|" if law.logarithmic else "quantile of |g| over its mean")
    said = f"KS distance {distance:.3f}\ndashed: the fitted law"
    note(axes, 0.03, 0.96, said, va="top", fontsize=8, color=own.text)


@styled()
def distances_over_steps(section: LawSection) -> Figure:
    """Mean KS distance over layers against training steps, one curve per law."""
    figure = new_figure(8.2, 4.4)
    axes = figure.add_subplot()
    steps, means = mean_over_layers(section)
    labels = []
    for k, name in enumerate(LAWS):
        own = _LOOKS[name]
        thick = 2.2 if name == section.verdict.best else 1.3
        axes.plot(steps, means[:, k], **own.curve(), linewidth=thick)
        labels.append(Label(name, own.text, steps.astype(np.float64), means[:, k]))
    axes.set(xlabel="training step", ylabel="KS distance, mean over layers (0 is perfect)", yscale="log")
    log_ticks(axes.yaxis)
    step_axis(axes, steps)
    label_curves(axes, labels, room=True)
    return figure


@styled()
def spread_over_steps(section: LawSection) -> Figure:
    """Fitted mu and sigma of log2 |g| of each layer against training steps."""
    figure = new_figure(9.2, 4.4)
    location, spread = figure.subplots(1, 2)
    # Those with enough elements at any step, the most elements first.
    layers = [layer for layer in section.layers if layer.judged.any()]
    layers.sort(key=lambda layer: -int(layer.counts.max()))
    names = shorten_all([literal(layer.info.name) for layer in layers], _NAME)
    for axes, what, title in (
        (location, "mu_log2", "mu: mean of log2 |g| (octaves)"),
        (spread, "sigma_log2", "sigma: deviation of log2 |g| (octaves)"),
    ):
        labels = []
        for place, layer in enumerate(layers):
            known = layer.judged
            x, y = layer.steps[known].astype(np.float64), getattr(layer, what)[known]
            if place >= _NAMED:
                axes.plot(x, y, color=FRONT, linewidth=0.8, zorder=1)
                continue
            own = hue(_CYCLE[place], "osD^vPX"[place], "-")
            axes.plot(x, y, **own.curve(), linewidth=1.4)
            labels.append(Label(names[place], own.text, x, y))
        axes.set(title=title, xlabel="training step")
        step_axis(axes, np.array(section.steps))
        label_curves(axes, labels, room=True)
    return figure


@styled()
def format_errors(section: LawSection) -> Figure:
    """Expected relative error of every float format against sigma, with the layers' own sigmas below."""
    figure = new_figure(9.6, 4.6)
    own = np.concatenate([np.empty(0), *(layer.sigma_log2[layer.judged] for layer in section.layers)])
    sigmas = np.linspace(0.5, min(max(float(own.max(initial=0)), 6.0), 11.0) + 0.3, _POINTS)
    for axes, bits in zip(figure.subplots(1, len(PANEL_BITS)), PANEL_BITS, strict=True):
        forms = candidates(bits)
        curves = np.array([[placed_error(f, float(s), SCALE, count=_COUNT) for s in sigmas] for f in forms])
        ideal = np.array([min(placed_error(f, float(s), "error") for f in forms) for s in sigmas[::3]])
        best = np.argmin(curves, axis=0)
        axes.plot(sigmas[::3], ideal, color=MUTED, linestyle=(0, (2, 2)), linewidth=1.3)
        axes.set(yscale="log", xlim=(0, sigmas[-1] + 0.2), ylim=(ideal.min() / 1.6, 1.4))
        for place, form in enumerate(forms):
            look = hue(_CYCLE[place], "", "-")
            where = np.flatnonzero(best == place)
            axes.plot(sigmas, curves[place], color=look.line if where.size else FRONT, linewidth=1.0, alpha=0.7)
            if not where.size:
                continue
            axes.plot(sigmas[where], curves[place, where], color=look.line, linewidth=3.2)
            at = int(where[where.size // 2])
            # To the side on which there is room.
            side = "right" if sigmas[at] > 0.8 * axes.get_xlim()[1] else "left"
            end = (sigmas[at], curves[place, at])
            write_name(axes, str(form), look.text, end, (2, -4), pad=0.4, ha=side, va="top")
        inside = own[own <= sigmas[-1]]
        tick = {"color": INK, "alpha": 0.45, "markersize": 9, "markeredgewidth": 0.8, "clip_on": False}
        axes.plot(inside, np.zeros(inside.size), "|", transform=axes.get_xaxis_transform(), **tick)
        axes.set(title=f"FP{bits}", xlabel="sigma of log2 |g|")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        log_ticks(axes.yaxis)
        if axes is figure.axes[0]:
            end = (sigmas[-1], ideal[-1] * 1.04)
            axes.text(*end, "least with scale=error", ha="right", va="bottom", fontsize=8, color=MUTED)
    figure.axes[0].set_ylabel("expected relative error  E |Q(x) − x| / |x|")
    return figure


@styled()
def sparsity(section: LawSection) -> Figure:
    """Left: sparsity achieved against required, per threshold rule. Right: cosine against sparsity per allocation."""
    figure = new_figure(9.2, 4.6)
    rules, allocation = figure.subplots(1, 2)
    _achieved(rules, section)
    _cosines(allocation, section)
    return figure


def _achieved(axes: Axes, section: LawSection) -> None:
    """Means over the gradients that have fewer zeros than the least that is asked for: the others tell nothing."""
    cells = [cell for cell in section.cells if cell.zeros < ASKED[0] and cell.size * (1 - cell.zeros) >= 100]
    asked = np.array(ASKED)
    axes.plot([0.4, 1], [0.4, 1], color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    axes.set_title(f"achieved sparsity, mean of {len(cells)} gradients")
    axes.set(xlabel="required sparsity", ylabel="fraction of zeros after pruning")
    if not cells:
        note(axes, 0.5, 0.5, "every gradient has half of it zero already", ha="center", fontsize=None)
        return
    labels = []
    for place, rule in enumerate(RULES):
        own: Look = _RULES[rule]
        expected = np.mean([cell.expected[place] for cell in cells], axis=0)
        realized = np.mean([cell.realized[place] for cell in cells], axis=0)
        error = np.sqrt(np.sum([cell.standard_error[place] ** 2 for cell in cells], axis=0)) / len(cells)
        axes.plot(asked, expected, color=own.line, linestyle=own.dash)
        axes.errorbar(
            asked, realized, 2 * error, fmt=own.marker, color=own.line, markersize=4.5, capsize=2.5, elinewidth=1
        )
        labels.append(Label(rule, own.text, asked, expected))
    said = "dashed: as required\nlines: expected; points: one draw ± 2 standard errors"
    note(axes, 0.98, 0.03, said, ha="right", va="bottom")
    axes.set_xlim(0.46, 1.0)
    make_room(axes, labels)
    axes.set_xticks(ASKED)
    label_curves(axes, labels)


def _cosines(axes: Axes, section: LawSection) -> None:
    labels = []
    asked = np.array(ASKED)
    for place, found in enumerate(section.cosines):
        own = hue(_CYCLE[place], "osD"[place % 3], "-")
        axes.plot(asked, found.homogeneous, color=own.line, linestyle=":", marker=own.marker, markersize=3.5)
        axes.plot(asked, found.heterogeneous, color=own.line, linestyle="-", marker=own.marker, markersize=4.5)
        labels.append(Label(f"step {found.step:,}", own.text, asked, found.heterogeneous))
    axes.set_title("cosine of pruned and whole gradient")
    axes.set(xlabel="mean sparsity", ylabel="mean over layers, weighted by size")
    note(axes, 0.03, 0.03, "solid: shared out by data\ndotted: the same in every layer", va="bottom")
    if labels:
        make_room(axes, labels)
        axes.set_xticks(ASKED)
        label_curves(axes, labels)
