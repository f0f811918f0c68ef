"""Figures as plain data, which a page draws itself and matplotlib draws into files."""

from __future__ import annotations

import math
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gtrace.report import figures
from gtrace.report.analysis.details import TensorFit, common_count, levels_on
from gtrace.report.analysis.families import method_of, short_spec
from gtrace.report.analysis.runs import BASELINE, WINDOW, LoggedRun, RunLogAnalysis, running_mean, worst_shadows
from gtrace.report.analysis.savings import HOW, PAYLOADS, Savings
from gtrace.report.names import count, natural_order, number
from gtrace.report.section import Chart, Curve, FigureSpec, HeatMap, Panel
from gtrace.types import WHOLE_MODEL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import ArrayLike, NDArray

    from gtrace.planning import Plan
    from gtrace.planning.plan import TensorPlan
    from gtrace.report.analysis.safety import Safety
    from gtrace.report.analysis.sweep import SweepAnalysis

#: Name of the curve through the Pareto-optimal configurations.
FRONT = "best measured"
#: Name of the points where levels and codes were fitted again.
FITTED = "fitted"
#: Bars, and curves, of the tensors of a plan with the most elements.
MOST_BARS, MOST_CURVES = 40, 8
#: Points of a long curve that a page draws.
_POINTS = 400
_BITS, _LOST, _STEP = "bits per value", "of gradient energy lost", "training step"
#: An objective this close to the best one has arrived.
_ARRIVED = 1e-6
#: Magnitudes further below the smallest level are left out of a density.
_BELOW_LEVELS = 2.0**-5


def charted(name: str, title: str, caption: str, chart: Callable[[], Chart], **rest: Any) -> FigureSpec:
    """A figure that is nothing but its chart; ``rest`` as of :class:`FigureSpec`."""
    return FigureSpec(name, title, caption, lambda: figures.charts.draw_chart(chart()), chart=chart, **rest)


def _curve(
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


def rate_distortion(analysis: SweepAnalysis) -> Chart:
    """Error against measured bits, a curve for each family, and the Pareto front."""
    curves = _of_families(analysis, "bits", "error")
    front = sorted((c for c in analysis.configurations if c.pareto and c.bits > 0), key=lambda c: c.bits)
    curves += _curve(FRONT, [c.bits for c in front], [c.error for c in front], [c.spec for c in front])
    lines = _noise(analysis.safety)
    panel = Panel(tuple(curves), "", _BITS, _LOST, log_x=True, log_y=True, lines=lines, percent=True, most=1.0)
    return Chart((panel,), "Share of gradient energy lost, at measured bits per value. The gray line is the best here.")


def _of_families(analysis: SweepAnalysis, x: str, y: str) -> list[Curve]:
    """A curve for each family: two fields of its configurations, the first positive and rising."""
    curves: list[Curve] = []
    for family in analysis.families:
        points = sorted((analysis.configurations[k] for k in family.members), key=attrgetter(x))
        points = [c for c in points if getattr(c, x) > 0]
        xs, ys = [getattr(c, x) for c in points], [getattr(c, y) for c in points]
        curves += _curve(family.label, xs, ys, [c.spec for c in points], method=family.method)
    return curves


def _noise(safety: Safety) -> tuple[tuple[str, float], ...]:
    if not safety.known:
        return ()
    noise = float(safety.noise.estimate)
    return ("noise of one worker", noise), (f"noise of {safety.workers} workers", noise / safety.workers)


def _over_steps(
    analysis: SweepAnalysis, values: NDArray[np.float64], y_label: str, *others: Curve, percent: bool = False
) -> Chart:
    """``values`` (configurations, steps) of each family's configuration nearest to three bits, and other curves."""
    curves: list[Curve] = []
    for family in analysis.families:
        k = analysis.nearest(family)
        if k >= 0:
            c = analysis.configurations[k]
            name = f"{c.name}, {number(c.bits, 2)} bits"
            curves += _curve(family.label, analysis.steps, values[k], [name], method=family.method)
    curves += others
    return Chart((Panel(tuple(curves), x_label=_STEP, y_label=y_label, log_y=True, percent=percent),), "")


def error_over_steps(analysis: SweepAnalysis) -> Chart:
    """Error over training, of each family's configuration nearest to three bits."""
    safety = analysis.safety
    noise: list[Curve] = []
    if safety.known:
        for (name, _), workers in zip(_noise(safety), (1, safety.workers), strict=True):
            noise += _curve(name, analysis.steps, safety.noise_per_step / workers, form="plain")
    return _over_steps(analysis, analysis.per_step, _LOST, *noise, percent=True)


def bits_over_steps(analysis: SweepAnalysis) -> Chart:
    """Measured bits over training, and below them the steps at which levels and codes were fitted."""
    known = analysis.bits_per_step[np.isfinite(analysis.bits_per_step)]
    fitted = np.intersect1d(analysis.fitted_at, analysis.steps)
    below = np.full(len(fitted), 0.9 * known.min(initial=math.inf))
    return _over_steps(analysis, analysis.bits_per_step, _BITS, *_curve(FITTED, fitted, below, form="points"))


def layers(analysis: SweepAnalysis) -> HeatMap:
    """Error of every tensor with every configuration that has any, and the gradient noise if it is known."""
    columns = [k for k in range(len(analysis.configurations)) if (analysis.per_tensor[k] > 0).any()]
    values, names = analysis.per_tensor[columns].T, [analysis.configurations[k].name for k in columns]
    if columns and analysis.safety.known:
        values, names = np.column_stack([values, analysis.safety.noise_per_tensor]), [*names, "gradient noise"]
    return HeatMap(analysis.tensors, tuple(names), tuple(map(tuple, np.where(values > 0, values, np.nan).tolist())))


def wasserstein(analysis: SweepAnalysis) -> Chart:
    """Wasserstein-1 distance of the values against relative variance."""
    curves = _of_families(analysis, "relative_variance", "w1_normalized")
    y_label = "Wasserstein-1 distance / mean |g|"
    marks, x_label = _noise(analysis.safety), "relative variance"
    panel = Panel(tuple(curves), x_label=x_label, y_label=y_label, log_x=True, log_y=True, marks=marks)
    return Chart((panel,), "")


def convergence(fits: Sequence[TensorFit]) -> Chart:
    """How far the objective is from the best one after each sweep of coordinate descent, from every start."""
    panels = []
    for fit in fits:
        if fit.convergence is not None:
            curves: list[Curve] = []
            for start in fit.convergence.objective:
                y = np.maximum(fit.convergence.excess(start), _ARRIVED)
                curves += _curve(start, np.arange(len(y)), y)
            title = f"{_tensor(fit)}, {fit.convergence.spec}"
            lines = (("arrived", _ARRIVED),)
            y_label = "objective / best − 1"
            panels.append(Panel(tuple(curves), title, "sweep (0: the start)", y_label, log_y=True, lines=lines))
    return Chart(tuple(panels), "")


def levels_over_density(analysis: SweepAnalysis, fits: Sequence[TensorFit]) -> Chart:
    """Densities of the magnitudes, and below each the levels of every configuration with the commonest number."""
    families = {c.spec: c.family for c in analysis.configurations}
    n = common_count(analysis.fits)
    panels = []
    for fit in fits:
        for density, sets in levels_on(fit, families, n):
            least = min(float(own.levels[own.levels > 0].min()) for own in sets)
            there = np.flatnonzero(density.edges[:-1] >= least * _BELOW_LEVELS)
            middle = np.sqrt(density.edges[there] * density.edges[there + 1])
            octaves = np.log2(density.edges[there + 1] / density.edges[there])
            law = f"r = |g| / {density.law}"
            shown = [
                *_curve("values", middle, density.share[there] / octaves, form="plain"),
                *_curve("squared norm", middle, density.energy[there] / octaves, form="plain"),
            ]
            panels.append(Panel(tuple(shown), f"{_tensor(fit)}: {law}", "r", "share per octave", log_x=True))
            rows = [families[own.spec] for own in sets]
            curves: list[Curve] = []
            for row, (name, own) in enumerate(zip(rows, sets, strict=True)):
                x = own.levels[own.levels > 0]
                curves += _curve(name, x, np.full(len(x), row), positive=False, form="points")
            panels.append(Panel(tuple(curves), x_label=f"r, {n} levels; 0 is not drawn", log_x=True, rows=tuple(rows)))
    return Chart(tuple(panels), "", columns=1)


def _tensor(fit: TensorFit) -> str:
    return "whole model" if fit.tensor == WHOLE_MODEL else fit.tensor


def training_curves(log: RunLogAnalysis, against: Literal["steps", "bits", "time"]) -> Chart:
    """Running mean of the training loss, and the tests, against steps, bytes that one worker has sent, or seconds."""
    losses: list[Curve] = []
    tests: list[Curve] = []
    accuracy = any(np.isfinite(run.accuracy).any() for run in log.runs)
    for run, name, point in _named(log):
        x = {"steps": run.steps, "bits": run.sent / 8, "time": run.sim_seconds}[against]
        at = {"steps": run.eval_steps, "bits": run.eval_sent / 8, "time": run.eval_sim_seconds}[against]
        losses += _curve(name, x, _smooth(run.loss), point, form="plain", method=method_of(run.spec))
        tests += _curve(name, at, run.accuracy if accuracy else run.eval_loss, point, method=method_of(run.spec))
    what = "encoded" if log.neural else "sent"
    x_label = {"steps": log.step_name, "bits": f"bytes {what} by one worker", "time": "simulated seconds"}[against]
    log_x, tested = against == "bits", "accuracy" if accuracy else "loss"
    panels = [
        Panel(tuple(losses), "Training loss, running mean", x_label, "loss", log_x=log_x, log_y=True),
        Panel(tuple(tests), f"Test {tested}", x_label, tested, log_x=log_x, percent=accuracy),
    ]
    return Chart(tuple(panel for panel in panels if panel.curves), "")


def bits_of_runs(log: RunLogAnalysis) -> Chart:
    """Bits per value that one worker sent in each step, and where its codec was fitted."""
    curves: list[Curve] = []
    for run, name, point in _named(log):
        curves += _curve(name, run.steps, run.bits, point, form="plain", method=method_of(run.spec))
        fitted = np.isin(run.steps, run.updates)
        curves += _curve(f"{name}, {FITTED}", run.steps[fitted], run.bits[fitted], point, form="points")
    return Chart((Panel(tuple(curves), x_label=log.step_name, y_label=_BITS, log_y=True),), "")


def error_of_runs(log: RunLogAnalysis) -> Chart:
    """Running mean of the error of the averaged or the neural gradients."""
    curves: list[Curve] = []
    for run, name, point in _named(log):
        error = _smooth(run.relative_variance)
        curves += _curve(name, run.steps, error, point, form="plain", method=method_of(run.spec))
    panel = Panel(tuple(curves), x_label=log.step_name, y_label=_LOST, log_y=True, percent=True)
    return Chart((panel,), "")


def weight_gradient_cosines(run: LoggedRun) -> Chart:
    """Cosine of each weight gradient to the exact one: its layer compressed alone, and all layers."""
    panels = []
    for part, title in (("cosine_alone", "this layer alone"), ("cosine", "all layers")):
        curves: list[Curve] = []
        for shadow in worst_shadows(run):
            curves += _curve(shadow.tensor, shadow.steps, getattr(shadow, part), positive=False)
        panels.append(Panel(tuple(curves), title, _STEP, "cosine to the exact gradient"))
    return Chart(tuple(panels), "")


def _named(log: RunLogAnalysis) -> list[tuple[LoggedRun, str, list[str]]]:
    """Each run with the name that all runs of its codec share, and what its points are called if there are seeds."""
    short = {run.spec: "uncompressed" if run.spec == BASELINE else short_spec(run.spec) for run in log.runs}
    names = {spec: name if list(short.values()).count(name) == 1 else spec for spec, name in short.items()}
    seeds = len({run.seed for run in log.runs}) > 1
    return [
        (run, name, [f"{name}, seed {run.seed}"] if seeds else []) for run in log.runs for name in [names[run.spec]]
    ]


def _smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    smooth = np.full(len(values), math.nan)
    known = np.isfinite(values)
    smooth[known] = running_mean(values[known], max(int(known.sum() * WINDOW), 1))
    return smooth


def savings_chart(savings: Savings) -> Chart:
    """Error against the time of a step, by all-gather and in two shots."""
    methods = {row.family: row.method for row in savings.rows}
    times = {"computing alone": savings.cluster.computing, "bf16": savings.plain[1].step.seconds}
    times["float32"] = savings.plain[0].step.seconds
    marks = tuple((name, 1e3 * seconds) for name, seconds in times.items())
    panels = []
    for exchange in PAYLOADS:
        curves: list[Curve] = []
        for family, method in methods.items():
            rows = [row for row in savings.rows if (row.exchange, row.family) == (exchange, family)]
            points = sorted(
                (1e3 * row.step.seconds, row.relative_variance) for row in rows if row.relative_variance > 0
            )
            curves += _curve(family, [x for x, _ in points], [y for _, y in points], method=method)
        labels = (HOW[exchange], "ms of a step", "relative variance")
        panels.append(Panel(tuple(curves), *labels, log_y=True, marks=marks))
    caption = (
        "Lower and further left is better: each point is one codec, its steps timed by the model of the table. Dotted: "
        "the step without any exchange, and those with plain all-reduces; a codec right of bf16 makes steps longer."
    )
    return Chart(tuple(panels), caption)


def plan_frontier(plan: Plan) -> Chart:
    """Error against bits: plans of every budget, every single codec, and this plan."""
    curves: list[Curve] = []
    for method in dict.fromkeys(one.codec.partition(":")[0] for one in plan.uniforms):
        of = [one for one in plan.uniforms if one.codec.partition(":")[0] == method]
        x, y = [one.bits for one in of], [one.error for one in of]
        curves += _curve(f"{method} for all", x, y, method=method, form="points")
    curves += _curve("a codec for each", [p.bits for p in plan.frontier], [p.error for p in plan.frontier])
    curves += _curve("this plan", [plan.totals.bits], [plan.totals.error], form="points")
    y_label = "relative error" if plan.horizon is None else f"noise ratio at {count(plan.horizon.steps, 'step')}"
    return Chart((Panel(tuple(curves), "", "measured bits per value", y_label, log_x=True, log_y=True),), "")


def _largest(plan: Plan, most: int) -> list[TensorPlan]:
    by_name = {row.tensor: row for row in sorted(plan.tensors, key=lambda row: -row.elements)[:most]}
    return [by_name[name] for name in natural_order(by_name)]


def plan_bits(plan: Plan) -> Chart:
    """Bits of every tensor, one bar each, with their spread over resampled steps."""
    rows = _largest(plan, MOST_BARS)
    bits = tuple(row.bits for row in rows)
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    if plan.confidence is not None:
        low = tuple(row.bits if row.bits_low is None else row.bits_low for row in rows)
        high = tuple(row.bits if row.bits_high is None else row.bits_high for row in rows)
    curve = Curve("this plan", tuple(row.tensor for row in rows), bits, low, high)
    lines, y_label = (("all tensors", plan.totals.bits),), "measured bits per value"
    return Chart((Panel((curve,), y_label=y_label, log_y=max(bits) > 16, bars=True, lines=lines),), "")


def plan_budgets(plan: Plan) -> Chart:
    """Bits of the largest tensors against those of the whole plan."""
    x = tuple(point.bits for point in plan.frontier)
    curves = tuple(Curve(row.tensor, x, row.at_frontier) for row in _largest(plan, MOST_CURVES) if row.at_frontier)
    labels, marks = ("", "measured bits per value of the plan", "of the tensor"), (("this plan", plan.totals.bits),)
    return Chart((Panel(curves, *labels, log_x=True, log_y=True, marks=marks),), "")
