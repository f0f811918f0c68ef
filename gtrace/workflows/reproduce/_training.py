"""Training the built-in tasks in experiments, and what their numbers look like over seeds."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import gtrace.online
from gtrace.errors import TraceError
from gtrace.workflows.reproduce.experiment import Curve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gtrace.online import RunResult, Task
    from gtrace.workflows.reproduce.experiment import Context

#: steps and seeds of a smoke test
_QUICK: dict[str, Any] = {"steps": 2, "batch_size": 4, "seeds": 1}


@dataclass(frozen=True, slots=True)
class Trained:
    """Runs of one task over seeds.

    Attributes:
        results: by the name of the run, one per seed in order.
        losses: training loss of each step, float64[seeds, steps], by the same names.
    """

    results: dict[str, list[RunResult]]
    losses: dict[str, np.ndarray]

    def accuracy(self, run: str) -> np.ndarray:
        """Test accuracy in percent, float64[seeds]."""
        return 100.0 * np.array([result.accuracy or 0.0 for result in self.results[run]])

    def test_loss(self, run: str) -> np.ndarray:
        """Test loss at the end, float64[seeds]."""
        return np.array([result.loss for result in self.results[run]])

    def bits(self, run: str) -> float:
        """Measured bits per value of a gradient, levels included."""
        return float(np.mean([result.tally.bits_per_element for result in self.results[run]]))

    def weight_error(self, run: str) -> float:
        """Relative squared error of quantized weights after the last step."""
        return float(np.mean([result.weight_error for result in self.results[run]]))

    def ratio(self, run: str) -> float:
        """Float32 bits over measured bits."""
        return float(np.mean([result.tally.ratio for result in self.results[run]]))


def first_task(context: Context, *names: str) -> tuple[Task, str]:
    """The first of the tasks whose data are at hand, and what these are in words; a smoke test takes the last.

    Raises:
        TraceError: none has its data.
    """
    for name, following in () if context.quick else itertools.pairwise(names):
        try:
            return gtrace.online.load_task(name), DATA[name]
        except TraceError as error:
            context.say(f"{error}; going on with {following}")
    return gtrace.online.load_task(names[-1]), DATA[names[-1]]


#: what tasks are trained on, in words
DATA = {
    "digits-mlp": "UCI handwritten digits, 8 x 8 pixels",
    "fashion-cnn": "Fashion-MNIST, in the place of CIFAR-10",
    "fashion-resnet8": "Fashion-MNIST, in the place of CIFAR",
    "digits-cnn": "UCI handwritten digits, 8 x 8 pixels",
    "word-lstm": "Shakespeare's sonnets in words, 20,000 of them: the Penn Treebank is not at hand. Numbers are not "
    "comparable with the paper's",
    "ptb-lstm": "Penn Treebank, the paper's own data",
    "char-lstm": "Shakespeare's sonnets, 95,000 characters",
}


def trained(context: Context, task: Task, codecs: Sequence[str], **settings: Any) -> Trained:
    """Train with each codec and without, tested once at the end."""
    if context.quick:
        settings |= _QUICK
    study = gtrace.online.Study(
        task, codecs, **{"workers": 1, "seed": context.seed, "eval_every": settings["steps"], **settings}
    )
    losses: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in study.records():
        if record["type"] == "step":
            losses[record["run"]][record["seed"]].append(record["loss"])
        elif record["type"] == "end":
            context.say(f"{record['run']}, seed {record['seed']}: test loss {record['loss']:.4f}")
    results: dict[str, list[RunResult]] = defaultdict(list)
    for result in study.results:
        results[result.run].append(result)
    return Trained(dict(results), {run: _padded(list(rows.values())) for run, rows in losses.items()})


def _padded(rows: list[list[float]]) -> np.ndarray:
    """float64[seeds, steps]; a run that stopped early has NaN from there on."""
    longest = max(map(len, rows))
    return np.array([row + [np.nan] * (longest - len(row)) for row in rows])


def deviation(values: np.ndarray) -> float:
    """Sample standard deviation; 0 of a single value."""
    return float(values.std(ddof=1)) if values.size > 1 else 0.0


def spread(values: np.ndarray, form: str = ".2f") -> str:
    """Mean and sample standard deviation in words."""
    if values.size < 2:
        return format(float(values.mean()), form)
    return f"{format(float(values.mean()), form)} ± {format(deviation(values), form.lstrip('+'))}"


def banded(label: str, x: Sequence[float | str], values: Sequence[np.ndarray], method: str = "") -> Curve:
    """The mean of the seeds at each x, with one standard deviation to both sides."""
    means, reach = [float(rows.mean()) for rows in values], [deviation(rows) for rows in values]
    low = tuple(mean - one for mean, one in zip(means, reach, strict=True))
    high = tuple(mean + one for mean, one in zip(means, reach, strict=True))
    return Curve(label, tuple(x), tuple(means), low, high, method)


def smoothed(losses: np.ndarray, pieces: int = 25) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Steps and the mean loss around them, over all seeds: (pieces,) each, fewer where there are fewer steps."""
    means = np.array_split(losses.mean(axis=0), min(pieces, losses.shape[1]))
    ends = np.cumsum([piece.size for piece in means])
    places = ends - np.array([piece.size for piece in means]) / 2
    return tuple(places.tolist()), tuple(float(piece.mean()) for piece in means)
