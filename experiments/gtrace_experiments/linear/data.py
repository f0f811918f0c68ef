"""Training sets of linear models: made, or read from CSV, libsvm and npz files."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from gtrace.errors import TraceError, UsageError
from gtrace.types import Key

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Matrix: TypeAlias = NDArray[np.float64]

#: samples for training, and as many for the test, where the name says nothing else
ROWS = 10_000
NOISE = 0.1
#: standard deviation of the logits that made labels are drawn by
LOGITS = 3.0
#: in files, one row in this many is kept for the test
HELD_OUT = 5
#: most values that a sparse file may have when it is written out
MOST = 1 << 28

_MADE = re.compile(r"(synthetic|heavy)-(\d+)(?:x(\d+))?")
_INPUTS, _TARGETS = ("X", "x", "data", "features"), ("y", "target", "targets", "labels", "label")


@dataclass(frozen=True, slots=True)
class Data:
    """A training set with its test set.

    Attributes:
        name: what was asked for.
        a: float32[K, n], samples.
        b: float64[K], targets.
        test_a: float32[T, n].
        test_b: float64[T].
    """

    name: str
    a: NDArray[np.float32]
    b: NDArray[np.float64]
    test_a: NDArray[np.float32]
    test_b: NDArray[np.float64]


def load(name: str, *, labels: bool, seed: int = 0, target: str | None = None) -> Data:
    """Make or read a training set.

    Args:
        name: ``synthetic-N`` or ``synthetic-NxK`` for K samples of N standard normal features (10,000 by default),
            ``heavy-N`` for lognormal ones of growing tails; or a file ``.csv``, ``.libsvm`` (``.svm``) or ``.npz``.
        labels: targets are -1 and 1.
        seed: of made data.
        target: column of a CSV file that holds the target; None for the last one.

    Raises:
        UsageError: an unknown name, a missing column, or targets that are not two labels.
        TraceError: a file that is missing, damaged or empty.
    """
    made = _MADE.fullmatch(name)
    if made is not None:
        if target is not None:
            raise UsageError(f"target: {name} has no columns with names; leave it out")
        rows = ROWS if made[3] is None else int(made[3])
        return synthetic(int(made[2]), rows, labels=labels, seed=seed, heavy=made[1] == "heavy", name=name)
    path = Path(name)
    reader = {".csv": _csv, ".libsvm": _libsvm, ".svm": _libsvm, ".npz": _npz}.get(path.suffix.lower())
    if reader is None:
        raise UsageError(f"data: '{name}' is unknown; write synthetic-100, heavy-8, or a .csv, .libsvm or .npz file")
    if target is not None and reader is not _csv:
        raise UsageError(f"target: only a CSV file has columns with names; leave it out for {path.name}")
    if not path.is_file():
        raise TraceError(f"{path}: there is no such file")
    samples, targets = _csv(path, target) if reader is _csv else reader(path)
    return split(name, samples, targets, labels=labels)


def synthetic(
    features: int, rows: int = ROWS, *, labels: bool, seed: int = 0, heavy: bool = False, name: str = "synthetic"
) -> Data:
    """Samples with a model behind them, and as many for the test.

    Targets are a'x + 0.1 noise with x standard normal. Labels are 1 with the probability sigma(a'x), with x such
    that these logits have a deviation of 3.

    Args:
        features: of each sample.
        rows: of the training set.
        labels: targets are -1 and 1.
        seed: of all of it.
        heavy: features are standardised lognormals, the deviations of whose logarithms go from 0.5 to 1.5.
        name: of the set.

    Raises:
        UsageError: no features, or too few samples.
    """
    if features < 1 or rows < 2:
        raise UsageError(f"data: {name} has no samples to learn from; give features and at least 2 samples")
    random = np.random.default_rng(Key.derive(seed, tensor=f"data {features} {rows} {heavy}", role="sample"))
    a = random.standard_normal((2 * rows, features))
    if heavy:
        a, _, _ = standardized(np.exp(a * np.linspace(0.5, 1.5, features)))
    x = random.standard_normal(features)
    if labels:
        z = a @ (x * LOGITS / np.linalg.norm(x))
        b = np.where(random.random(2 * rows) < 1 / (1 + np.exp(-z)), 1.0, -1.0)
    else:
        b = a @ x + NOISE * random.standard_normal(2 * rows)
    small = a.astype(np.float32)
    return Data(name, small[:rows], b[:rows], small[rows:], b[rows:])


def split(name: str, samples: ArrayLike, targets: ArrayLike, *, labels: bool) -> Data:
    """A data set of one's own: standardised, and every fifth row kept for the test.

    Args:
        name: of the set.
        samples: real[K, n], finite. Every feature gets the mean 0 and the deviation 1 of the training rows.
        targets: real[K]; standardised too, or two different labels, the larger of which becomes 1.
        labels: targets become -1 and 1.

    Raises:
        UsageError: wrong shapes, values that are not finite, fewer than 10 rows, or not two labels.
    """
    a, b = np.asarray(samples, np.float64), np.asarray(targets, np.float64).reshape(-1)
    if a.ndim != 2 or len(a) != len(b) or a.shape[1] == 0:
        raise UsageError(f"{name}: samples of shape {a.shape} and {len(b)} targets do not fit together")
    if len(b) < 2 * HELD_OUT:
        raise UsageError(f"{name}: {len(b)} rows are too few; give at least {2 * HELD_OUT}")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        row = int(np.flatnonzero(~(np.isfinite(a).all(axis=1) & np.isfinite(b)))[0])
        raise UsageError(f"{name}: row {row + 1} holds a value that is not finite; fill it in or drop the row")
    if labels:
        kinds = np.unique(b)
        if len(kinds) != 2:
            raise UsageError(f"{name}: {len(kinds)} different targets where two labels are needed; choose task linear")
        b = np.where(b == kinds[1], 1.0, -1.0)
    test = np.arange(len(b)) % HELD_OUT == HELD_OUT - 1
    train_a, mean, scale = standardized(a[~test])
    test_a = (a[test] - mean) / scale
    train_b, test_b = b[~test], b[test]
    if not labels:
        train_b, mean, scale = standardized(train_b)
        test_b = (test_b - mean) / scale
    return Data(name, train_a.astype(np.float32), train_b, test_a.astype(np.float32), test_b)


def standardized(values: Matrix) -> tuple[Matrix, Matrix, Matrix]:
    """Columns of mean 0 and deviation 1, and the means and deviations they had; constant ones become 0."""
    mean, scale = values.mean(axis=0), values.std(axis=0)
    # The mean of equal numbers is off by rounding, and so is their deviation.
    scale = np.where(scale > 1e-12 * np.abs(mean), scale, np.inf)
    return (values - mean) / scale, mean, scale


def _csv(path: Path, target: str | None = None) -> tuple[Matrix, Matrix]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: cannot be read as CSV ({error})") from None
    if not rows:
        raise TraceError(f"{path}: there are no rows in it")
    header = None if _numeric(rows[0]) else [name.strip() for name in rows.pop(0)]
    column = -1
    if target is not None:
        if header is None or target not in header:
            raise UsageError(
                f"target: {path} has no column '{target}'" + (f" among {', '.join(header[:12])}" if header else "")
            )
        column = header.index(target)
    width = len(header or rows[0])
    for number, row in enumerate(rows, 1 if header is None else 2):
        if len(row) != width or not _numeric(row):
            raise TraceError(f"{path}: row {number} does not hold {width} numbers")
    if width < 2 or not rows:
        raise TraceError(f"{path}: needs rows with a feature and a target")
    table = np.array(rows, np.float64)
    return np.delete(table, column, axis=1), table[:, column]


def _numeric(row: list[str]) -> bool:
    try:
        [float(cell) for cell in row]
    except ValueError:
        return False
    return True


def _libsvm(path: Path) -> tuple[Matrix, Matrix]:
    """Lines ``target index:value ...`` with indices from 1."""
    targets: list[float] = []
    places: list[tuple[int, int, float]] = []
    number = 0
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            number += 1
            words = line.partition("#")[0].split()
            if not words:
                continue
            for word in words[1:]:
                index, value = word.split(":")
                if int(index) < 1:
                    raise ValueError(word)
                places.append((len(targets), int(index) - 1, float(value)))
            targets.append(float(words[0]))
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read ({error})") from None
    except ValueError:
        raise TraceError(f"{path}: line {number} is not of the form 'target index:value ...', indices from 1") from None
    width = 1 + max((column for _, column, _ in places), default=-1)
    if not width:
        raise TraceError(f"{path}: there are no samples in it")
    if len(targets) * width > MOST:
        raise UsageError(f"{path}: {len(targets)} samples of {width} features are too many to be written out")
    samples = np.zeros((len(targets), width))
    rows, columns, values = zip(*places, strict=True)
    samples[rows, columns] = values
    return samples, np.array(targets)


def _npz(path: Path) -> tuple[Matrix, Matrix]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            found = [next((arrays[name] for name in names if name in arrays), None) for names in (_INPUTS, _TARGETS)]
    except (OSError, ValueError, EOFError) as error:
        raise TraceError(f"{path}: cannot be read as npz ({error})") from None
    samples, targets = found
    if samples is None or targets is None:
        raise TraceError(f"{path}: holds no arrays X and y")
    return np.asarray(samples, np.float64), np.asarray(targets, np.float64)
