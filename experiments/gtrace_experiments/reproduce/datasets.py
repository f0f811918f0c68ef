"""Real data for ZipML's linear models, by packages: scikit-learn's sets, the digits and Fashion-MNIST."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import numpy as np

from gtrace.errors import UsageError
from gtrace_experiments.linear.data import split

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace_experiments.linear import Data

    Rows = tuple[NDArray[np.float64], NDArray[np.float64]]

#: number of features -> what it is
REAL = {
    10: "scikit-learn's diabetes, 442 samples",
    30: "scikit-learn's breast cancer, 569 samples",
    64: "4 against 9 of the UCI digits, 361 samples",
    784: "T-shirts against shirts of Fashion-MNIST, 12,000 samples",
}


def real(features: int, *, labels: bool) -> Data:
    """A set of :data:`REAL`; a regression has classes as its targets, if there are no others.

    Raises:
        UsageError: scikit-learn is not installed.
        TraceError: Fashion-MNIST is not there.
    """
    samples, targets = {10: _diabetes, 30: _breast_cancer, 64: _digits, 784: _shirts}[features]()
    if labels and features == 10:
        targets = np.where(targets > np.median(targets), 1.0, -1.0)
    # Every fifth row is held out, so classes must not come one after the other.
    order = np.random.default_rng(0).permutation(len(targets))
    return split(REAL[features].partition(",")[0], samples[order], targets[order], labels=labels)


def _scikit(name: str) -> Rows:
    try:
        sets = importlib.import_module("sklearn.datasets")
    except ImportError:
        raise UsageError("--full: scikit-learn's data are needed: pip install scikit-learn") from None
    samples, targets = getattr(sets, f"load_{name}")(return_X_y=True)
    return np.asarray(samples, np.float64), np.asarray(targets, np.float64)


def _diabetes() -> Rows:
    return _scikit("diabetes")


def _breast_cancer() -> Rows:
    return _scikit("breast_cancer")


def _digits() -> Rows:
    from gtrace.training.tasks import sample_file

    table = np.loadtxt(sample_file("digits.csv.gz"), delimiter=",")
    return _pair(table[:, :-1], table[:, -1], 4, 9)


def _shirts() -> Rows:
    from gtrace.training.tasks.images import IMAGES, LABELS, fashion_folder, read_idx

    folder = fashion_folder()
    images = read_idx(folder / "train-images-idx3-ubyte.gz", IMAGES)
    classes = read_idx(folder / "train-labels-idx1-ubyte.gz", LABELS)
    return _pair(images.reshape(len(images), -1).astype(np.float64), classes.astype(np.float64), 0, 6)


def _pair(samples: NDArray[np.float64], classes: NDArray[np.float64], low: int, high: int) -> Rows:
    """Two of the classes; pixels that are always the same are left out."""
    chosen = (classes == low) | (classes == high)
    kept = samples[chosen]
    return kept[:, kept.std(axis=0) > 0], np.where(classes[chosen] == high, 1.0, -1.0)
