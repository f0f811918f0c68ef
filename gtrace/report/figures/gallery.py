"""Which figures a report has, in which order, and the words around each.

A new figure is an entry in :data:`FIGURES` and a :class:`FigureSpec`. :func:`draw` makes any of them
by its name.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gtrace.errors import UsageError, suggest
from gtrace.report.analysis.fits import common_count
from gtrace.report.figures import heatmap, laws, levels, training
from gtrace.report.figures import sweep as figures
from gtrace.report.figures import training as shadows
from gtrace.report.figures.charts import draw_chart
from gtrace.report.inputs import RUN_SUFFIX, SWEEP_SUFFIX
from gtrace.report.sections import plans as plan_figures
from gtrace.report.sections.savings import savings_chart
from gtrace.report.tables import VIEW_BITS

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.figure import Figure

    from gtrace.planning import Plan
    from gtrace.report.analysis.results import SweepAnalysis
    from gtrace.report.analysis.run_logs import RunLogAnalysis
    from gtrace.report.analysis.savings import Savings
    from gtrace.report.analysis.traces import LawSection
    from gtrace.report.inputs import Report


#: Titles of the tables that figures on laws belong to.
_LAWS = "Distance to each law, per layer"
_FORMATS = "Best float format per layer"
_GROUPED = " Rows are named by block, or every few."
_SPARSITY = "Required against achieved sparsity, per threshold rule"


@dataclass(frozen=True, slots=True)
class FigureSpec:
    """One figure of a report.

    Attributes:
        name: of its file, without suffix.
        title: heading.
        caption: how to read it, one or two sentences.
        draw: makes the figure.
        folded: a page shows it when it is asked for.
        beside: title of the table that it belongs to, where there are several.
    """

    name: str
    title: str
    caption: str
    draw: Callable[[], Figure]
    folded: bool = False
    beside: str = ""


def sweep_specs(analysis: SweepAnalysis) -> list[FigureSpec]:
    """The figures of a sweep that have something to show."""
    plates = []
    if figures.drawn_families(analysis):
        plates.append(
            FigureSpec(
                "rate-distortion",
                "Error against measured bits",
                "Lower and further left is better. Each point is one configuration, summed over tensors and "
                "steps; its bar spans the middle 80 % of the steps, each by itself. Circled points are "
                "Pareto-optimal. What has no error at all, or no known bits, cannot be drawn."
                + _noise_in_words(analysis),
                lambda: figures.rate_distortion(analysis),
            )
        )
    if (analysis.per_step > 0).any():
        plates.append(
            FigureSpec(
                "variance-over-steps",
                "Error over training",
                f"For each method the configuration with measured bits nearest to {VIEW_BITS:g}, which stand "
                "beside its name. Methods at different bits are not to be ranked here." + _noise_in_words(analysis),
                lambda: figures.variance_over_steps(analysis),
            )
        )
    if np.isfinite(analysis.safety.ratio_per_step).any():
        plates.append(
            FigureSpec(
                "equivalent-batch",
                "Equivalent batch size over training",
                "A prediction: the batch in full precision whose gradients are as noisy as the compressed ones, "
                "B / (1 + noise ratio), over a twentieth of the steps around each. The configurations of the figure "
                "before; codecs with a bias are left out.",
                lambda: figures.equivalent_batch_over_steps(analysis),
            )
        )
    if (analysis.per_tensor > 0).any():
        plates.append(
            FigureSpec(
                "layers",
                "Error per layer",
                "Every tensor with every configuration, summed over steps. Darker is worse; grey has no value."
                + (_GROUPED if len(analysis.tensors) > heatmap.MOST_NAMED else ""),
                lambda: heatmap.layer_heatmap(analysis),
            )
        )
    if len(analysis.steps) > 1 and (analysis.bits_per_step > 0).any():
        marked = "Ticks on the axis: levels and codes were fitted to that step." if figures.fitted_at(analysis) else ""
        plates.append(
            FigureSpec(
                "bits-over-steps",
                "Bits over training",
                "The configurations of the figure before, payload and shared bytes of all tensors. A method whose "
                f"bits grow needs more of them as the gradients change. {marked}".rstrip(),
                lambda: figures.bits_over_steps(analysis),
                folded=True,
            )
        )
    if any(c.relative_variance > 0 and c.w1_normalized > 0 for c in analysis.configurations):
        plates.append(
            FigureSpec(
                "wasserstein",
                "Wasserstein distance against variance",
                "Each point is one configuration. Lower and further left is better. The Wasserstein distance compares "
                "the values before and after as two heaps, whoever holds which; the variance compares them one by "
                "one. Points far below the others keep the distribution better than their error says.",
                lambda: figures.wasserstein(analysis),
                folded=True,
            )
        )
    return plates + _fit_figures(analysis)


def _noise_in_words(analysis: SweepAnalysis) -> str:
    if not analysis.safety.known:
        return ""
    return (
        " Dashed: the noise that gradients have without any codec, that of one worker, and that of the average over "
        f"{analysis.safety.workers} workers."
    )


def _fit_figures(analysis: SweepAnalysis) -> list[FigureSpec]:
    plates = []
    drawn = levels.tensors_with_levels(analysis)
    others = drawn[1 : 1 + levels.MOST_TENSORS]
    n = common_count(analysis.fits)
    how = (
        f"Above, how the magnitudes r of the gradient lie on a logarithmic axis, and the part of the squared norm "
        f"that they hold; below, the {n} levels of each method, 0 at the left end. Every method with {n} levels is "
        "shown, so that they can be compared; methods that scale differently have panels of their own."
    )
    if drawn:
        plates.append(
            FigureSpec(
                "levels",
                "Levels over the density of the gradient",
                f"{how} The largest tensor, at step {drawn[0].step:,}.",
                lambda: levels.levels_over_density(analysis, drawn[:1]),
            )
        )
    if others:
        plates.append(
            FigureSpec(
                "levels-of-other-tensors",
                "Levels over the density of other tensors",
                f"{how} The largest tensors after the first.",
                lambda: levels.levels_over_density(analysis, others),
                folded=True,
            )
        )
    descents = levels.tensors_with_convergence(analysis)[: levels.MOST_TENSORS]
    if descents:
        plates.append(
            FigureSpec(
                "convergence",
                "Convergence of coordinate descent",
                "How far the objective is from the best one found, after each sweep over the levels, from uniform, "
                "exponential and companding starts. The dotted line is one part in a million: arrived. A curve that "
                "ends above it is caught in a local optimum.",
                lambda: levels.convergence(descents),
            )
        )
    return plates


def law_specs(section: LawSection) -> list[FigureSpec]:
    """The figures of one kind of gradient in a trace that have something to show."""
    plates = []
    picture = section.picture
    if picture is not None:
        plates.append(
            FigureSpec(
                f"{section.kind}-distribution",
                f"One gradient as an example: {picture.tensor} at step {picture.step:,}",
                "The largest tensor at the last step looked at, its zeros left out. Grey: the data. On the Q-Q plots, "
                "points on the dashed line follow the law.",
                lambda: laws.distribution(picture),
                beside=_LAWS,
            )
        )
    if section.verdict.cells:
        plates += [
            FigureSpec(
                f"{section.kind}-distances-over-steps",
                "Distance to each law over training",
                "Lower is a better fit; the thick curve is the law that fits best on average.",
                lambda: laws.distances_over_steps(section),
                beside=_LAWS,
            ),
            FigureSpec(
                f"{section.kind}-mu-and-sigma",
                "Fitted mu and sigma over training",
                "One octave is a factor of two. sigma says how many exponent bits a float format needs, mu how its "
                "scale has to follow.",
                lambda: laws.spread_over_steps(section),
                beside=_LAWS,
            ),
            FigureSpec(
                f"{section.kind}-format-errors",
                "Expected error of each float format",
                "Lower is better. Thick and named: where a format is best under scale=max, the largest of 10,000 "
                "lognormal values just fitting. Dotted: the best that any format reaches when the scale is set for the "
                "least error instead, which clips the largest values. Ticks below: this trace's layers and steps.",
                lambda: laws.format_errors(section),
                beside=_FORMATS,
            ),
        ]
    if section.cells:
        plates.append(
            FigureSpec(
                f"{section.kind}-sparsity",
                "Sparsity: required, achieved, and what it costs",
                "Left: a rule on the dashed line prunes as much as it was told to; gradients that are half zero "
                "already are left out. Right: higher is better.",
                lambda: laws.sparsity(section),
                beside=_SPARSITY,
            )
        )
    return plates


def run_specs(analysis: RunLogAnalysis) -> list[FigureSpec]:
    """The figures of a run log that have something to show."""
    neural = analysis.neural
    plates = []
    if any(len(run.steps) or len(run.eval_steps) for run in analysis.runs):
        plates += [
            FigureSpec(
                "training-over-steps",
                "Training against steps",
                "Faint: every step. Does the codec cost steps?",
                lambda: training.training_over_steps(analysis),
            ),
            FigureSpec(
                "training-over-bits",
                "Training against bytes encoded" if neural else "Training against bytes sent",
                f"The same curves against what one worker has {'encoded' if neural else 'sent up'}, "
                "payload and shared bytes: further left is cheaper.",
                lambda: training.training_over_bits(analysis),
            ),
        ]
    if any(np.isfinite(run.sim_seconds).any() for run in analysis.runs):
        plates.append(
            FigureSpec(
                "training-over-time",
                "Training against simulated time",
                "The same curves against the time that steps would take with the simulated network: further left is "
                "sooner.",
                lambda: training.training_over_time(analysis),
            )
        )
    if any((run.bits > 0).any() for run in analysis.runs):
        plates.append(
            FigureSpec(
                "training-bits",
                "Bits over training",
                f"Bits per value that one worker {'encoded' if neural else 'sent up'} in each step, payload and shared "
                "bytes. Ticks on a curve: its levels or codes were fitted anew.",
                lambda: training.bits_over_steps(analysis),
            )
        )
    if any(np.isfinite(run.relative_variance).any() and (run.relative_variance > 0).any() for run in analysis.runs):
        plates.append(
            FigureSpec(
                "neural-gradients" if neural else "averaged-gradient",
                "Error of the neural gradients" if neural else "Error of the averaged gradient",
                "The codec's error on the gradients that enter the layers' backward passes, all layers together."
                if neural
                else "What is left of the codec's error after the workers' decoded gradients are averaged.",
                lambda: training.averaged_gradient_error(analysis),
            )
        )
    for k, run in enumerate(run for run in analysis.runs if run.shadow):
        plates.append(
            FigureSpec(
                f"weight-gradients{f'-{k + 1}' if k else ''}",
                f"Weight gradients with {run.spec}",
                "Cosine to the exact weight gradient of the same batch. Left: only the gradients of this layer's own "
                "outputs are compressed. Right: those of all layers, as in training, so errors accumulate towards the "
                f"first layer.{shadows.left_out(run)}",
                functools.partial(shadows.weight_gradient_cosines, run),
            )
        )
    return plates


def savings_specs(savings: Savings) -> list[FigureSpec]:
    """The figure of what codecs save between ranks, where their errors are known."""
    chart = savings_chart(savings)
    if not any(panel.curves for panel in chart.panels):
        return []
    return [FigureSpec("savings", "Error against the time of a step", chart.caption, lambda: draw_chart(chart))]


def plan_specs(plan: Plan) -> list[FigureSpec]:
    """The figures of a plan."""
    plates = [
        FigureSpec(
            "plan-frontier",
            "Plans against single codecs",
            "Lower and further left is better. The line is what a codec for each tensor makes at every budget, out of "
            "the same codecs; each point is one codec for all tensors.",
            lambda: plan_figures.frontier(plan),
        ),
        FigureSpec(
            "plan-bits",
            "Bits of every tensor",
            "Measured bits per value that each tensor gets; the line is the mean over all values. The thin bars span "
            "the middle 90 % of what the price of a bit picks on resampled steps."
            + (f" The {plan_figures.MOST_BARS} largest tensors." if len(plan.tensors) > plan_figures.MOST_BARS else ""),
            lambda: plan_figures.bits_per_tensor(plan),
        ),
    ]
    if len(plan.frontier) > 1 and any(row.at_frontier for row in plan.tensors):
        plates.append(
            FigureSpec(
                "plan-budgets",
                "What changes between budgets",
                "Bits of the largest tensors against the bits of the whole plan. Where a curve is flat, other tensors "
                "get what is added; 32 bits are exact.",
                lambda: plan_figures.bits_by_budget(plan),
            )
        )
    return plates


def figure_names(report: Report | None = None) -> list[str]:
    """Names of the figures that a report has something to draw for; without a report, of all there are."""
    return list(FIGURES) if report is None else list(report_specs(report))


def draw(report: Report, name: str) -> Figure:
    """One figure of a report, made by its name.

    Args:
        report: as ``load_report`` and ``make_report`` return it.
        name: one of :func:`figure_names`; what stands before the figure's own name there may be left out
            where one figure alone is meant (``distribution`` for ``weight-distribution``).

    Raises:
        UsageError: no figure has this name, this report has nothing to draw for it, or several are meant.
    """
    plates = report_specs(report)
    if name in plates:
        return plates[name].draw()
    found = [whole for whole in plates if whole.endswith(f"-{name}")] if name in FIGURES else []
    if len(found) == 1:
        return plates[found[0]].draw()
    if found:
        raise UsageError(f"figure '{name}': several of this report are called so; choose {', '.join(found)}")
    if not plates:
        raise UsageError(f"figure '{name}': these results have nothing to draw")
    if name == "savings" and not report.savings:
        raise UsageError("figure 'savings': needs --ranks, --network and --step-time, between which machines")
    if name in FIGURES:
        raise UsageError(f"figure '{name}': these results have nothing for it; they have {', '.join(plates)}")
    raise UsageError(f"figure '{name}': no such figure; {suggest(name, plates)}")


def report_specs(report: Report) -> dict[str, FigureSpec]:
    """Every figure of a report by its name; the input's name stands before it where there are several of a sort."""
    found = [(sweep.name, sweep_specs(sweep), len(report.sweeps)) for sweep in report.sweeps]
    found += [(run.name, run_specs(run), len(report.runs)) for run in report.runs]
    found += [(savings.name, savings_specs(savings), len(report.savings)) for savings in report.savings]
    for trace in report.traces:
        found.append((trace.name, [plate for laws in trace.laws for plate in law_specs(laws)], len(report.traces)))
    found += [(plan.name, plan_specs(plan), len(report.plans)) for plan in report.plans]
    named: dict[str, FigureSpec] = {}
    for section, plates, alike in found:
        for plate in plates:
            stem = f"{_slug(section)}-{plate.name}" if alike > 1 else plate.name
            name, again = stem, 2
            while name in named:
                name, again = f"{stem}-{again}", again + 1
            named[name] = plate
    return named


def _slug(name: str) -> str:
    stem = name.removesuffix(SWEEP_SUFFIX).removesuffix(RUN_SUFFIX)
    return re.sub(r"[^A-Za-z0-9._-]+", "_", stem).strip("._-") or "results"


#: Every figure there is: name -> what it shows. In a trace's report the kind of gradient stands before the name,
#: and with several inputs of one sort the input's name does.
FIGURES = {
    "rate-distortion": "sweep: relative variance against measured bits, with the Pareto front",
    "variance-over-steps": "sweep: relative variance over training",
    "equivalent-batch": "sweep: predicted equivalent batch size over training",
    "layers": "sweep: relative variance of every tensor with every configuration",
    "bits-over-steps": "sweep: measured bits over training, and when levels and codes were fitted anew",
    "wasserstein": "sweep: Wasserstein-1 distance of the values against relative variance",
    "levels": "sweep: levels of each method over the density of the gradient's magnitudes",
    "levels-of-other-tensors": "sweep: the same for the largest tensors after the first",
    "convergence": "sweep: objective of coordinate descent from every start",
    "savings": "sweep or run log: error of each codec against the time of a step between ranks",
    "distribution": "trace: histograms of one gradient and Q-Q plots against two laws",
    "distances-over-steps": "trace: distance to each law over training",
    "mu-and-sigma": "trace: mu and sigma of log2 |g| over training",
    "format-errors": "trace: expected error of each float format",
    "sparsity": "trace: sparsity achieved against sparsity required, and the cosine it costs",
    "training-over-steps": "run log: loss and accuracy against steps",
    "training-over-bits": "run log: loss and accuracy against the bytes one worker has sent",
    "training-over-time": "run log: loss and accuracy against simulated time",
    "training-bits": "run log: bits per value over training, and when levels and codes were fitted anew",
    "averaged-gradient": "run log: error of the averaged gradient over training",
    "neural-gradients": "run log: error of the neural gradients over training",
    "plan-frontier": "plan: error against bits of plans of every budget, and of every single codec",
    "plan-bits": "plan: bits of every tensor",
    "plan-budgets": "plan: bits of the largest tensors at other budgets",
    "weight-gradients": "run log: cosine of the weight gradients under compressed neural gradients",
}
