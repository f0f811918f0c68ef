"""Which figures a report has, in which order, and the words around each. A new figure is one entry here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gtrace.report import figures, training
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
    """

    name: str
    title: str
    caption: str
    draw: Callable[[], Figure]


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
    return plates


def run_plates(analysis: RunLogAnalysis) -> list[Plate]:
    """The figures of a run log that have something to show."""
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
                "Training against bytes sent",
                "The same curves against what one worker has sent up, payload and shared bytes: "
                "further left is cheaper.",
                lambda: training.training_over_bits(analysis),
            ),
        ]
    if any(np.isfinite(run.relative_variance).any() and (run.relative_variance > 0).any() for run in analysis.runs):
        plates.append(
            Plate(
                "averaged-gradient",
                "Error of the averaged gradient",
                "What is left of the codec's error after the workers' decoded gradients are averaged.",
                lambda: training.averaged_gradient_error(analysis),
            )
        )
    return plates
