"""Which figures a report has, in which order, and the words around each. A new figure is one entry here."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gtrace.report import figures, levels, shadows, training
from gtrace.report.fits import common_count
from gtrace.report.tables import VIEW_BITS

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.figure import Figure

    from gtrace.report.analysis import SweepAnalysis
    from gtrace.report.runs import RunLogAnalysis


@dataclass(frozen=True, slots=True)
class Plate:
    """One figure of a report.

    Attributes:
        name: of its file, without suffix.
        title: heading.
        caption: how to read it, one or two sentences.
        draw: makes the figure.
        folded: a page shows it when it is asked for.
    """

    name: str
    title: str
    caption: str
    draw: Callable[[], Figure]
    folded: bool = False


def sweep_plates(analysis: SweepAnalysis) -> list[Plate]:
    """The figures of a sweep that have something to show."""
    plates = []
    if figures.drawn_families(analysis):
        plates.append(
            Plate(
                "rate-distortion",
                "Error against measured bits",
                "Lower and further left is better. Each point is one configuration, summed over tensors and "
                "steps. Circled points are Pareto-optimal. What has no error at all, or no known bits, "
                "cannot be drawn.",
                lambda: figures.rate_distortion(analysis),
            )
        )
    if (analysis.per_step > 0).any():
        plates.append(
            Plate(
                "variance-over-steps",
                "Error over training",
                f"For each method the configuration with measured bits nearest to {VIEW_BITS:g}, which stand "
                "beside its name. Methods at different bits are not to be ranked here.",
                lambda: figures.variance_over_steps(analysis),
            )
        )
    if (analysis.per_tensor > 0).any():
        plates.append(
            Plate(
                "layers",
                "Error per layer",
                "Every tensor with every configuration, summed over steps. Darker is worse; grey has no value.",
                lambda: figures.layer_heatmap(analysis),
            )
        )
    return plates + _fit_plates(analysis)


def _fit_plates(analysis: SweepAnalysis) -> list[Plate]:
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
            Plate(
                "levels",
                "Levels over the density of the gradient",
                f"{how} The largest tensor, at step {drawn[0].step:,}.",
                lambda: levels.levels_over_density(analysis, drawn[:1]),
            )
        )
    if others:
        plates.append(
            Plate(
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
            Plate(
                "convergence",
                "Convergence of coordinate descent",
                "How far the objective is from the best one found, after each sweep over the levels, from uniform, "
                "exponential and companding starts. The dotted line is one part in a million: arrived. A curve that "
                "ends above it is caught in a local optimum.",
                lambda: levels.convergence(descents),
            )
        )
    return plates


def run_plates(analysis: RunLogAnalysis) -> list[Plate]:
    """The figures of a run log that have something to show."""
    neural = analysis.neural
    plates = []
    if any(len(run.steps) or len(run.eval_steps) for run in analysis.runs):
        plates += [
            Plate(
                "training-over-steps",
                "Training against steps",
                "Faint: every step. Does the codec cost steps?",
                lambda: training.training_over_steps(analysis),
            ),
            Plate(
                "training-over-bits",
                "Training against bytes encoded" if neural else "Training against bytes sent",
                f"The same curves against what one worker has {'encoded' if neural else 'sent up'}, "
                "payload and shared bytes: further left is cheaper.",
                lambda: training.training_over_bits(analysis),
            ),
        ]
    if any(np.isfinite(run.relative_variance).any() and (run.relative_variance > 0).any() for run in analysis.runs):
        plates.append(
            Plate(
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
            Plate(
                f"weight-gradients{f'-{k + 1}' if k else ''}",
                f"Weight gradients with {run.spec}",
                "Cosine to the exact weight gradient of the same batch. Left: only the gradients of this layer's own "
                "outputs are compressed. Right: those of all layers, as in training, so errors accumulate towards the "
                f"first layer.{shadows.left_out(run)}",
                functools.partial(shadows.weight_gradient_cosines, run),
            )
        )
    return plates
