"""Training the built-in tasks in experiments, and what their numbers look like over seeds."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import gtrace.training
from gtrace.codecs import codec
from gtrace.errors import TraceError
from gtrace_experiments.reproduce.experiment import Curve

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gtrace.training import RunResult, Task
    from gtrace_experiments.reproduce.experiment import Context

#: test images for many short trainings: half a point of accuracy is then noise
FEW = 4000


def small_task(context: Context, instead_of: str, test_images: int | None = None) -> tuple[Task, str]:
    """ResNet-8 on Fashion-MNIST where that is installed, else and for a quick run a network on handwritten digits.

    Args:
        context: of the experiment.
        instead_of: what the paper trains on.
        test_images: of Fashion-MNIST's 10,000, all by default; with many short trainings, testing takes
            half of the time.

    Returns:
        the task, with a description of it and of what it replaces.
    """
    from gtrace.training.tasks.images import FashionResNet8, fashion_folder

    if not context.quick:
        try:
            fashion_folder()
        except TraceError as missing:
            why = f"because of {missing}"
        else:
            tested = "" if test_images is None else f", tested on {test_images:,} of 10,000 images"
            return FashionResNet8(test_images), f"ResNet-8 on Fashion-MNIST{tested}, in place of {instead_of}"
    else:
        why = "because this is a quick run"
    words = (
        f"a small convolutional network on the UCI handwritten digits (1,797 images), in place of {instead_of}, {why}"
    )
    return gtrace.training.load_task("digits-cnn"), words


@dataclass(frozen=True, slots=True)
class Runs:
    """One codec's training runs, one per seed.

    Attributes:
        results: how each ended.
        losses: mean training loss of the last tenth of the steps, of each.
    """

    results: tuple[RunResult, ...]
    losses: tuple[float, ...]

    def of(self, measure: Callable[[RunResult], float | None]) -> Values:
        """A measure of the results, one value per seed."""
        found = [measure(result) for result in self.results]
        return Values(tuple(float("nan") if value is None else float(value) for value in found))

    @property
    def accuracy(self) -> Values:
        """Test accuracy at the end, in percent."""
        return self.of(lambda result: None if result.accuracy is None else 100.0 * result.accuracy)

    @property
    def loss(self) -> Values:
        """Training loss at the end."""
        return Values(self.losses)

    @property
    def variance(self) -> Values:
        """Relative variance of one worker's gradient, mean over the steps."""
        return self.of(lambda result: result.worker_variance)


@dataclass(frozen=True, slots=True)
class Values:
    """One number per seed."""

    each: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Their mean."""
        return float(np.mean(self.each))

    @property
    def low(self) -> float:
        """The least of them."""
        return min(self.each)

    @property
    def high(self) -> float:
        """The largest of them."""
        return max(self.each)

    def show(self, digits: int = 2) -> str:
        """Mean, and in brackets the range if there are several."""
        mean = f"{self.mean:.{digits}f}"
        return mean if len(self.each) == 1 else f"{mean} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def train_each(
    context: Context, task: Task | str, codecs: Mapping[str, str], *, seeds: int = 1, steps: int, **settings: Any
) -> dict[str, Runs]:
    """Train a task with each codec and uncompressed, from the same start on the same batches.

    Args:
        context: its seed is the first.
        task: what is trained.
        codecs: label -> spec; the uncompressed runs are ``none`` there, or are left out of what is returned.
        seeds: how many, one after the other.
        steps: of the optimizer.
        settings: further arguments of :class:`gtrace.training.Study`.

    Returns:
        label -> its runs.
    """
    specs = [spec for spec in codecs.values() if spec != "none"]
    study = gtrace.training.Study(
        task, specs, seed=context.seed, seeds=seeds, steps=steps, eval_every=steps, **settings
    )
    losses: dict[tuple[str, int], list[float]] = {}

    def follow(record: Mapping[str, Any]) -> None:
        if record["type"] == "step":
            losses.setdefault((record["run"], record["seed"]), []).append(record["loss"])
            if record["step"] % 10 == 0:
                context.say(f"seed {record['seed']}, step {record['step']} of {steps}")

    study.run(on_record=follow)
    last = max(1, steps // 10)
    runs = {}
    for label, spec in codecs.items():
        name = str(codec(spec))
        results = tuple(result for result in study.results if result.run == name)
        mean = tuple(float(np.mean(losses[name, result.seed][-last:])) for result in results)
        runs[label] = Runs(results, mean)
    return runs


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
            return gtrace.training.load_task(name), DATA[name]
        except TraceError as error:
            context.say(f"{error}; going on with {following}")
    return gtrace.training.load_task(names[-1]), DATA[names[-1]]


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
    study = gtrace.training.Study(
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
    """Steps and the mean loss around them, over all seeds: (pieces,) each, fewer with fewer steps."""
    means = np.array_split(losses.mean(axis=0), min(pieces, losses.shape[1]))
    ends = np.cumsum([piece.size for piece in means])
    places = ends - np.array([piece.size for piece in means]) / 2
    return tuple(places.tolist()), tuple(float(piece.mean()) for piece in means)
