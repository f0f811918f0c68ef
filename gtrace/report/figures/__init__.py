"""Figures of a report, drawn by matplotlib.

matplotlib takes half a second to load, and tables do without. So a module of this package is imported when it is first
used: ``from gtrace.report import figures``, then ``figures.sweep.rate_distortion(analysis)`` where a figure is drawn.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gtrace.report.figures import charts as charts
    from gtrace.report.figures import laws as laws
    from gtrace.report.figures import style as style
    from gtrace.report.figures import sweep as sweep

#: Every figure there is. In a trace's report the kind of gradient comes before the name, and with several inputs of
#: one sort the input's name does.
FIGURES = (
    # of a sweep
    *("rate-distortion", "variance-over-steps", "layers", "bits-over-steps", "wasserstein"),
    *("levels", "levels-of-other-tensors", "convergence", "savings"),
    # of a trace
    *("distribution", "distances-over-steps", "mu-and-sigma", "format-errors", "sparsity"),
    # of a run log, which has savings, too
    *("training-over-steps", "training-over-bits", "training-over-time", "training-bits"),
    *("averaged-gradient", "neural-gradients", "weight-gradients"),
    # of a plan
    *("plan-frontier", "plan-bits", "plan-budgets"),
)


def __getattr__(name: str) -> object:
    if name in ("charts", "laws", "style", "sweep"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
