"""Training the built-in tasks in experiments, and what their numbers look like over seeds."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import gtrace.training
from gtrace.codecs import codec
from gtrace.errors import TraceError
from gtrace.report.files import put
from gtrace.runlog import read_runlog
from gtrace.training.tasks import require_torch
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
    require_torch()
    from gtrace.training.tasks.images import FashionResNet8, fashion_folder

    if context.full is not None:
        return context.full.load(), context.full.data
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


def seeded_task(context: Context, instead_of: str) -> tuple[Task, str]:
    """A task small enough to train with several seeds to the end, and what it replaces.

    Args:
        context: of the experiment.
        instead_of: what the paper trains on.

    Returns:
        Fashion-MNIST made small where it is installed, else and for a quick run the handwritten digits.
    """
    require_torch()
    if context.full is not None:
        return context.full.load(), context.full.data
    try:
        if not context.quick:
            from gtrace_experiments.reproduce.small import SmallFashion

            words = "6,000 images of Fashion-MNIST made small, 7 x 7 pixels, tested on 10,000; instead of "
            return SmallFashion(), words + instead_of
    except TraceError as missing:
        context.say(f"{missing}; going on with the digits")
    return gtrace.training.load_task("digits-cnn"), f"{DATA['digits-cnn']}, instead of {instead_of}"


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
    context: Context, task: Task, codecs: Mapping[str, str], *, seeds: int = 1, steps: int, **settings: Any
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
    found = studied(
        context, task, [spec for spec in codecs.values() if spec != "none"], steps=steps, seeds=seeds, **settings
    )
    runs = {}
    for label, spec in codecs.items():
        name = str(codec(spec))
        results = tuple(result for result in found.results if result.run == name)
        mean = tuple(
            float(np.mean(losses[-max(1, len(losses) // 10) :]))
            for losses in (found.losses[name, result.seed] for result in results)
        )
        runs[label] = Runs(results, mean)
    return runs


#: how often a training of full size is tested, and can go on from there
_PARTS = 200


@dataclass(frozen=True, slots=True)
class Studied:
    """What came of a study.

    Attributes:
        results: seed by seed.
        losses: training loss of each step, by run and seed.
        records: of its run log, the study's own first; empty if they were not asked for.
    """

    results: list[RunResult]
    losses: dict[tuple[str, int], list[float]]
    records: list[dict[str, Any]]


def studied(context: Context, task: Task, codecs: Sequence[str], *, records: bool = False, **settings: Any) -> Studied:
    """Train with each codec and without, at the size of the context.

    At full size a training is kept in the context's folder: what is finished is read, and what was interrupted goes on
    (of neural gradients, which have no checkpoints, with the seed that was interrupted).

    Args:
        context: its seed is the first.
        task: what is trained.
        codecs: specs; none of the uncompressed run.
        records: keep the log's records.
        settings: of :class:`gtrace.training.Study`.
    """
    if context.full is not None:
        settings |= {"steps": context.full.steps, **context.full.settings}
    if context.costs is not None:
        context.costs.append(_cost(task, codecs, settings))
    if context.full is not None and context.quick:
        settings |= _QUICK
    settings["seed"] = context.seed
    if context.folder is None or settings.get("kind") != "neural":
        return _trained(context, task, codecs, settings, records=records)
    found = Studied([], {}, [])
    for seed in range(context.seed, context.seed + settings.pop("seeds", 1)):
        one = _trained(context, task, codecs, {**settings, "seed": seed})
        found.results.extend(one.results)
        found.losses.update(one.losses)
    return found


def _cost(task: Task, codecs: Sequence[str], settings: Mapping[str, Any]) -> float:
    """Seconds of CPU that a study would take, by its second step and by testing an untrained model."""
    start = time.process_time()
    study = gtrace.training.Study(task, codecs, **{**settings, "seeds": 1})
    tested = time.process_time() - start
    seen: list[float] = []
    runs = len(study.results)
    for record in study.records():
        if record["type"] == "step":
            seen.append(time.process_time())
        if len(seen) == 2 * runs:
            break
    step = seen[-1] - seen[runs - 1]
    return float(settings.get("seeds", 1) * (step * settings["steps"] + tested * runs * _PARTS))


def _trained(
    context: Context, task: Task, codecs: Sequence[str], settings: dict[str, Any], *, records: bool = False
) -> Studied:
    steps = settings["steps"]
    place = context.kept(task.name, (codecs, settings))
    found = Studied([], {}, [])

    def follow(record: dict[str, Any]) -> None:
        if record["type"] == "step":
            loss = math.nan if record["loss"] is None else record["loss"]
            found.losses.setdefault((record["run"], record["seed"]), []).append(loss)
        if records and record["type"] != "checkpoint":
            # As a log that was written and read has it: no loss of a training that diverged.
            found.records.append({key: known(value) for key, value in record.items()})

    def progress(record: Mapping[str, Any]) -> None:
        if record["type"] == "step" and record["step"] % 10 == 0:
            context.say(f"{record['run']}: seed {record['seed']}, step {record['step']} of {steps}")

    if place is None:
        study = gtrace.training.Study(task, codecs, **{"eval_every": steps, **settings})
        follow({"type": "study", **study.describe()})
        for record in study.records():
            follow(record)
            progress(record)
        found.results.extend(study.results)
        return found
    log, done = place.with_suffix(".jsonl"), place.with_suffix(".json")
    if not done.exists():
        study = gtrace.training.Study(task, codecs, **{"eval_every": max(1, steps // _PARTS), **settings})
        study.run(log, force=not study.can_resume(log), on_record=progress)
        put(done, json.dumps([result.to_plain() for result in study.results]).encode())
    # The log has the steps before an interruption, too.
    for record in read_runlog(log):
        follow(record)
    try:
        found.results.extend(gtrace.training.RunResult.from_plain(one) for one in json.loads(done.read_bytes()))
    except (ValueError, TypeError, KeyError) as error:
        raise TraceError(f"{done}: not a finished training ({type(error).__name__}); remove it and {log}") from None
    return found


def known(value: Any) -> Any:
    """A number that is not finite as None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
    if context.full is not None:
        return context.full.load(), context.full.data
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
    if context.quick and context.full is None:
        settings |= _QUICK
    found = studied(context, task, codecs, **{"workers": 1, **settings})
    results: dict[str, list[RunResult]] = defaultdict(list)
    losses: dict[str, list[list[float]]] = defaultdict(list)
    for result in found.results:
        results[result.run].append(result)
        losses[result.run].append(found.losses[result.run, result.seed])
    return Trained(dict(results), {run: _padded(rows) for run, rows in losses.items()})


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
