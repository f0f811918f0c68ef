"""Real data for ZipML's linear models, by packages: scikit-learn's sets, mlbench's, the digits and Fashion-MNIST.

Shuttle and Letter are read from Debian's package ``r-cran-mlbench``, or from the folder that the environment variable
``GTRACE_MLBENCH`` names, with the Python package ``rdata``.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.errors import TraceError, UsageError
from gtrace_experiments.linear.data import split

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace_experiments.linear import Data

    Rows = tuple[NDArray[np.float64], NDArray[np.float64]]

VARIABLE = "GTRACE_MLBENCH"
_INSTALLED = Path("/usr/lib/R/site-library/mlbench/data")
#: samples that are drawn from a larger set
MOST = 12_000
#: number of features -> what it is
REAL = {
    9: "radiator flow against all else of Shuttle, 12,000 of 58,000 samples",
    10: "scikit-learn's diabetes, 442 samples",
    16: "the first half of the alphabet against the second of Letter, 12,000 of 20,000 samples",
    30: "scikit-learn's breast cancer, 569 samples",
    64: "4 against 9 of the UCI digits, 361 samples",
    784: "T-shirts against shirts of Fashion-MNIST, 12,000 samples",
}


def real(features: int, *, labels: bool) -> Data:
    """A set of :data:`REAL`; a regression has classes as its targets, if there are no others.

    Raises:
        UsageError: scikit-learn or rdata is not installed.
        TraceError: Fashion-MNIST or mlbench's data are not there.
    """
    readers = {9: _shuttle, 10: _diabetes, 16: _letter, 30: _breast_cancer, 64: _digits, 784: _shirts}
    samples, targets = readers[features]()
    if labels and features == 10:
        targets = np.where(targets > np.median(targets), 1.0, -1.0)
    # Every fifth row is held out, so classes must not come one after the other.
    order = np.random.default_rng(0).permutation(len(targets))[:MOST]
    return split(REAL[features].partition(",")[0], samples[order], targets[order], labels=labels)


def _needed(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UsageError(f"--full: the package {package} is needed: pip install {package}") from None


def _mlbench(name: str, target: str, ones: tuple[str, ...]) -> Rows:
    """A data frame of mlbench: all columns but one are features, and that one's names in ``ones`` become 1."""
    path = Path(os.environ.get(VARIABLE) or _INSTALLED) / f"{name}.rda"
    if not path.is_file():
        raise TraceError(f"{path}: not found; install Debian's r-cran-mlbench, or set {VARIABLE} to its folder data")
    frame = _needed("rdata", "rdata").read_rda(path, default_encoding="ascii")[name]
    return frame.drop(columns=target).to_numpy(np.float64), np.where(frame[target].isin(ones), 1.0, -1.0)


def _shuttle() -> Rows:
    return _mlbench("Shuttle", "Class", ("Rad.Flow",))


def _letter() -> Rows:
    return _mlbench("LetterRecognition", "lettr", tuple("ABCDEFGHIJKLM"))


def _scikit(name: str) -> Rows:
    sets = _needed("sklearn.datasets", "scikit-learn")
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
