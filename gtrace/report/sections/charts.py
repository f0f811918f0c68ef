"""The figures of a sweep, and what all charts are made with: plain data that a page and matplotlib draw."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.report import figures
from gtrace.report.analysis.details import MOST_NAMED, MOST_TENSORS, TensorFit, common_count, levels_on
from gtrace.report.analysis.families import PREFERRED_BITS
from gtrace.report.names import number
from gtrace.report.section import Chart, Curve, FigureSpec, HeatMap, Panel

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import ArrayLike

    from gtrace.kernels import Floats
    from gtrace.report.analysis.safety import Safety
    from gtrace.report.analysis.sweep import SweepAnalysis

#: Name of the curve through the Pareto-optimal configurations.
FRONT = "best measured"
#: Name of the points where levels and codes were fitted again.
FITTED = "fitted"
BITS, LOST, STEP = "bits per value", "of gradient energy lost", "training step"
#: Points of a long curve that a page draws.
_POINTS = 400
#: An objective this close to the best one has arrived.
_ARRIVED = 1e-6
#: Magnitudes further below the smallest level are left out of a density.
_BELOW_LEVELS = 2.0**-5


def charted(name: str, title: str, caption: str, chart: Chart, **rest: Any) -> FigureSpec:
    """A figure that is nothing but its chart; ``rest`` as of :class:`FigureSpec`."""
    return FigureSpec(name, title, caption, lambda: figures.charts.draw_chart(chart), chart, **rest)


def one_panel(curves: Iterable[Curve], *how: Any, **more: Any) -> Chart:
    """A chart of one panel; ``how`` and ``more`` as of :class:`Panel`."""
    return Chart((Panel(tuple(curves), *how, **more),))


def thinned(
    label: str, x: ArrayLike, y: ArrayLike, names: Sequence[str] = (), *, positive: bool = True, **how: str
) -> Iterable[Curve]:
    """The points of a curve that can be drawn, fewer if it is long; ``names`` has one for each, or one for all."""
    xs, ys = np.asarray(x, np.float64), np.asarray(y, np.float64)
    known = np.flatnonzero(np.isfinite(xs) & np.isfinite(ys) & ((ys > 0) | (not positive)))
    if len(known) > _POINTS:
        known = known[np.linspace(0, len(known) - 1, _POINTS).round().astype(np.int64)]
    if len(known):
        named = tuple(names[k if len(names) > 1 else 0] for k in known.tolist()) if names else ()
        yield Curve(label, tuple(xs[known].tolist()), tuple(ys[known].tolist()), names=named, **how)  # type: ignore[arg-type]


def sweep_figures(analysis: SweepAnalysis) -> Iterator[FigureSpec]:
    """The figures of a sweep that have something to show."""
    safety, beside = analysis.safety, ""
    if safety.known:
        average = f"the average over {safety.workers} workers"
        beside = f" Beside them: the noise that gradients have without any codec, of one worker and of {average}."
    if any(c.bits > 0 and c.relative_variance > 0 and not c.partial for c in analysis.configurations):
        yield FigureSpec(
            "rate-distortion",
            "Error against measured bits",
            "Lower and further left is better. Each point is one configuration, summed over tensors and "
            "steps; its bar spans the middle 80 % of the steps, each by itself. Circled points are "
            f"Pareto-optimal. What has no error at all, or no known bits, cannot be drawn.{beside}",
            lambda: figures.sweep.rate_distortion(analysis),
            _rate_distortion(analysis),
            place="first",
        )
    if (analysis.per_step > 0).any():
        noise: list[Curve] = []
        for (name, _), workers in zip(_noise(safety), (1, safety.workers), strict=False):
            noise += thinned(name, analysis.steps, safety.noise_per_step / workers, form="plain")
        yield charted(
            "variance-over-steps",
            "Error over training",
            f"For each method the configuration with measured bits nearest to {PREFERRED_BITS:g}. Their bits differ: "
            "point at one to see them, and rank no methods here. Each step by itself, without what a memory sends "
            f"later.{beside}",
            _over_steps(analysis, analysis.per_step, LOST, *noise, percent=True),
            place="training",
        )
    if (analysis.per_tensor > 0).any() and len(analysis.tensors) > 1:
        yield FigureSpec(
            "layers",
            "Error per layer",
            "Every tensor with every configuration, summed over steps. Darker is worse; grey has no value."
            + (" Rows are named by block, or every few." if len(analysis.tensors) > MOST_NAMED else ""),
            lambda: figures.sweep.layer_heatmap(analysis),
            _layers(analysis),
            place="layers",
        )
    if len(analysis.steps) > 1 and (analysis.bits_per_step > 0).any():
        # Below the curves, the steps at which levels and codes were fitted.
        lowest = analysis.bits_per_step[np.isfinite(analysis.bits_per_step)].min(initial=np.inf)
        fitted = np.intersect1d(analysis.fitted_at, analysis.steps)
        points = thinned(FITTED, fitted, np.full(len(fitted), 0.9 * lowest), form="points")
        marked = "Points below: levels and codes were fitted to that step." if analysis.fitted_at else ""
        yield charted(
            "bits-over-steps",
            "Bits over training",
            "The configurations of the figure before, payload and shared bytes of all tensors. A method whose "
            f"bits grow needs more of them as the gradients change. {marked}".rstrip(),
            _over_steps(analysis, analysis.bits_per_step, BITS, *points),
            folded=True,
            place="training",
        )
    if any(c.relative_variance > 0 and c.w1_normalized > 0 for c in analysis.configurations):
        labels = ("", "relative variance", "Wasserstein-1 distance / mean |g|")
        curves = _of_families(analysis, "relative_variance", "w1_normalized")
        yield charted(
            "wasserstein",
            "Wasserstein distance against variance",
            "Each point is one configuration. Lower and further left is better. The Wasserstein distance compares "
            "the values before and after as two heaps, whoever holds which; the variance compares them one by "
            "one. Points far below the others keep the distribution better than their error says.",
            one_panel(curves, *labels, log_x=True, log_y=True, marks=_noise(safety)),
            folded=True,
            place="details",
        )
    yield from _fit_figures(analysis)


def _rate_distortion(analysis: SweepAnalysis) -> Chart:
    curves = _of_families(analysis, "bits", "error")
    front = sorted((c for c in analysis.configurations if c.pareto and c.bits > 0), key=lambda c: c.bits)
    curves += thinned(FRONT, [c.bits for c in front], [c.error for c in front], [c.spec for c in front])
    lines = _noise(analysis.safety)
    panel = Panel(tuple(curves), "", BITS, LOST, log_x=True, log_y=True, lines=lines, percent=True, most=1.0)
    return Chart((panel,), "Share of gradient energy lost, at measured bits per value. The gray line is the best here.")


def _of_families(analysis: SweepAnalysis, x: str, y: str) -> list[Curve]:
    """A curve for each family: two fields of its configurations, the first positive and rising."""
    curves: list[Curve] = []
    for family in analysis.families:
        points = sorted((analysis.configurations[k] for k in family.members), key=attrgetter(x))
        points = [c for c in points if getattr(c, x) > 0]
        xs, ys = [getattr(c, x) for c in points], [getattr(c, y) for c in points]
        curves += thinned(family.label, xs, ys, [c.spec for c in points], method=family.method)
    return curves


def _noise(safety: Safety) -> tuple[tuple[str, float], ...]:
    if not safety.known:
        return ()
    noise = float(safety.noise.estimate)
    return ("noise of one worker", noise), (f"noise of {safety.workers} workers", noise / safety.workers)


def _over_steps(analysis: SweepAnalysis, values: Floats, y_label: str, *others: Curve, percent: bool = False) -> Chart:
    """``values`` (configurations, steps) of each family's configuration nearest to three bits, and other curves."""
    curves: list[Curve] = []
    for family in analysis.families:
        k = analysis.nearest(family)
        if k >= 0:
            c = analysis.configurations[k]
            name = f"{c.name}, {number(c.bits, 2)} bits"
            curves += thinned(family.label, analysis.steps, values[k], [name], method=family.method)
    return one_panel((*curves, *others), "", STEP, y_label, log_y=True, percent=percent)


def _layers(analysis: SweepAnalysis) -> HeatMap:
    """Error of every tensor with every configuration that has any, and the gradient noise if it is known."""
    columns = [k for k in range(len(analysis.configurations)) if (analysis.per_tensor[k] > 0).any()]
    values, names = analysis.per_tensor[columns].T, [analysis.configurations[k].name for k in columns]
    if columns and analysis.safety.known:
        values, names = np.column_stack([values, analysis.safety.noise_per_tensor]), [*names, "gradient noise"]
    return HeatMap(analysis.tensors, tuple(names), tuple(map(tuple, np.where(values > 0, values, np.nan).tolist())))


def _fit_figures(analysis: SweepAnalysis) -> Iterator[FigureSpec]:
    n, specs = common_count(analysis.fits), {c.spec for c in analysis.configurations}
    drawn = [fit for fit in analysis.fits if levels_on(fit, specs, n)]
    others = drawn[1 : 1 + MOST_TENSORS]
    how = (
        f"Above, how the magnitudes r of the gradient lie on a logarithmic axis, and the part of the squared norm "
        f"that they hold; below, the {n} levels of each method, 0 at the left end. Every method with {n} levels is "
        "shown, so that they can be compared; methods that scale differently have panels of their own."
    )

    def levels(name: str, whose: str, which: str, fits: list[TensorFit]) -> FigureSpec:
        return FigureSpec(
            name,
            f"Levels over the density of {whose}",
            f"{how} The largest {which}.",
            lambda: figures.sweep.levels_over_density(analysis, fits),
            _levels_over_density(analysis, fits, n),
            folded=fits is others,
            place="details",
        )

    if drawn:
        yield levels("levels", "the gradient", f"tensor, at step {drawn[0].step:,}", drawn[:1])
    if others:
        yield levels("levels-of-other-tensors", "other tensors", "tensors after the first", others)
    panels = []
    for fit, found in [(fit, fit.convergence) for fit in analysis.fits if fit.convergence is not None][:MOST_TENSORS]:
        curves: list[Curve] = []
        for start, objective in found.objective.items():
            y = np.maximum(objective / found.best - 1, _ARRIVED)
            curves += thinned(start, np.arange(len(y)), y)
        labels = (f"{fit.label}, {found.spec}", "sweep (0: the start)", "objective / best − 1")
        panels.append(Panel(tuple(curves), *labels, log_y=True, lines=(("arrived", _ARRIVED),)))
    if panels:
        yield charted(
            "convergence",
            "Convergence of coordinate descent",
            "How far the objective is from the best one found, after each sweep over the levels, from uniform, "
            "exponential and companding starts. The dotted line is one part in a million: arrived. A curve that "
            "ends above it is caught in a local optimum.",
            Chart(tuple(panels)),
            place="details",
        )


def _levels_over_density(analysis: SweepAnalysis, fits: Sequence[TensorFit], n: int) -> Chart:
    """Densities of the magnitudes, and below each the levels of every configuration that has ``n``."""
    families = {c.spec: c.family for c in analysis.configurations}
    panels = []
    for fit in fits:
        for density, sets in levels_on(fit, families, n):
            least = min(float(own.levels[own.levels > 0].min()) for own in sets)
            there = np.flatnonzero(density.edges[:-1] >= least * _BELOW_LEVELS)
            middle = np.sqrt(density.edges[there] * density.edges[there + 1])
            octaves = np.log2(density.edges[there + 1] / density.edges[there])
            shown: list[Curve] = []
            for name, values in (("values", density.share), ("squared norm", density.energy)):
                shown += thinned(name, middle, values[there] / octaves, form="plain")
            title = f"{fit.label}: r = |g| / {density.law}"
            panels.append(Panel(tuple(shown), title, "r", "share per octave", log_x=True))
            rows = [families[own.spec] for own in sets]
            curves: list[Curve] = []
            for row, (name, own) in enumerate(zip(rows, sets, strict=True)):
                x = own.levels[own.levels > 0]
                curves += thinned(name, x, np.full(len(x), row), positive=False, form="points")
            panels.append(Panel(tuple(curves), x_label=f"r, {n} levels; 0 is not drawn", log_x=True, rows=tuple(rows)))
    return Chart(tuple(panels), columns=1)
