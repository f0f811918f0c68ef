"""Linear models trained end to end at low precision, as ZipML does: samples, model and gradients are quantized.

    study = gtrace_experiments.linear.train_linear("linear", ["naive:bits=5", "double:bits=5"], data="synthetic-100")
    for result in study.results:
        print(result.run, result.gap, result.ratio)

Importing this package imports nothing heavy, and nothing in it needs PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gtrace_experiments.linear.data import Data, load, split, synthetic
    from gtrace_experiments.linear.levels import column_levels, place
    from gtrace_experiments.linear.precision import FULL, Precision
    from gtrace_experiments.linear.problems import TASKS, Problem, Prox
    from gtrace_experiments.linear.study import LinearResult, LinearStudy, train_linear
    from gtrace_experiments.linear.training import Epoch, Traffic, Training

#: tasks of linear models, with one line about each
LINEAR_TASKS = {
    "linear": "linear regression at low precision, end to end",
    "lssvm": "least-squares support vector machine, labels of -1 and 1, ridge term",
    "logistic": "logistic regression",
    "svm": "support vector machine with the hinge loss",
}

_HOMES = {
    "Data": "data",
    "Epoch": "training",
    "FULL": "precision",
    "LinearResult": "study",
    "LinearStudy": "study",
    "Precision": "precision",
    "Problem": "problems",
    "Prox": "problems",
    "TASKS": "problems",
    "Traffic": "training",
    "Training": "training",
    "column_levels": "levels",
    "load": "data",
    "place": "levels",
    "split": "data",
    "synthetic": "data",
    "train_linear": "study",
}

__all__ = [
    "FULL",
    "LINEAR_TASKS",
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


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'gtrace_experiments.linear' has no attribute {name!r}")
    return getattr(importlib.import_module(f"gtrace_experiments.linear.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
