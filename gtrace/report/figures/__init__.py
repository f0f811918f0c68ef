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

#: Every figure there is: name -> what it shows. In a trace's report the kind of gradient stands before the name,
#: and with several inputs of one sort the input's name does.
FIGURES = {
    "rate-distortion": "sweep: relative variance against measured bits, with the Pareto front",
    "variance-over-steps": "sweep: relative variance over training",
    "layers": "sweep: relative variance of every tensor with every configuration",
    "bits-over-steps": "sweep: measured bits over training, and when levels and codes were fitted again",
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
    "training-bits": "run log: bits per value over training, and when levels and codes were fitted again",
    "averaged-gradient": "run log: error of the averaged gradient over training",
    "neural-gradients": "run log: error of the neural gradients over training",
    "plan-frontier": "plan: error against bits of plans of every budget, and of every single codec",
    "plan-bits": "plan: bits of every tensor",
    "plan-budgets": "plan: bits of the largest tensors at other budgets",
    "weight-gradients": "run log: cosine of the weight gradients under compressed neural gradients",
}

_MODULES = ("charts", "laws", "style", "sweep")


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
