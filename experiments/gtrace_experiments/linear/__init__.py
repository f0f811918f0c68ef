"""Linear models trained end to end at low precision, as ZipML does: samples, model and gradients are quantized.

    study = gtrace_experiments.linear.train_linear("linear", ["naive:bits=5", "double:bits=5"], data="synthetic-100")
    for result in study.results:
        print(result.run, result.gap, result.ratio)

Nothing in it needs PyTorch.
"""

from gtrace_experiments.linear.data import Data, load, split, synthetic
from gtrace_experiments.linear.levels import column_levels, place
from gtrace_experiments.linear.precision import FULL, Precision
from gtrace_experiments.linear.problems import TASKS, Problem, Prox
from gtrace_experiments.linear.study import LinearResult, LinearStudy, train_linear
from gtrace_experiments.linear.training import Epoch, Traffic, Training

__all__ = [
    "FULL",
    "TASKS",
    "Data",
    "Epoch",
    "LinearResult",
    "LinearStudy",
    "Precision",
    "Problem",
    "Prox",
    "Traffic",
    "Training",
    "column_levels",
    "load",
    "place",
    "split",
    "synthetic",
    "train_linear",
]
