"""Several precisions beside each other, on the same samples in the same order, with the full precision among them."""

from __future__ import annotations

import math
import platform
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace import __version__
from gtrace.errors import UsageError, suggest
from gtrace.runlog import RunLogWriter
from gtrace.schedule import DEFAULT_REFIT, RefitSchedule
from gtrace_experiments.linear.data import Data, load
from gtrace_experiments.linear.precision import Precision, precisions
from gtrace_experiments.linear.problems import TASKS, Problem, Prox
from gtrace_experiments.linear.training import Traffic, Training, columns_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from gtrace_experiments.linear.levels import Columns

EPOCHS = 30


@dataclass(slots=True)
class LinearResult:
    """How one run went, so far or in the end.

    Attributes:
        run: its precision's spec.
        seed: of the data, the order and the rounding.
        losses: objective of the training set after each epoch.
        optimum: the least objective; NaN without a closed form.
        loss: objective of the average of all models of the second half of the epochs (ZipML, Theorem 1).
        test_loss: of that average, on the test set.
        accuracy: of that average, on the test set; None without labels.
        traffic: what moved in all epochs.
        fetched: part of the samples that were fetched again in full.
        flipped: part of the samples whose hinge gradient was that of the other side; NaN under a polynomial.
        variance: squared error of one quantization of a sample's value, mean over all.
        seconds: CPU time of the epochs.
        codec_seconds: the part of it in the gradient's codec.
        diverged: in words; empty while all is well.
        finished: whether the run reached its end.
        model: float64[n], the average.
    """

    run: str
    seed: int
    losses: list[float] = field(default_factory=list)
    optimum: float = math.nan
    loss: float = math.nan
    test_loss: float = math.nan
    accuracy: float | None = None
    traffic: Traffic = field(default_factory=Traffic)
    fetched: float = 0.0
    flipped: float = 0.0
    variance: float = 0.0
    seconds: float = 0.0
    codec_seconds: float = 0.0
    diverged: str = ""
    finished: bool = False
    model: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))

    @property
    def gap(self) -> float:
        """Loss above the optimum; NaN where that is not known."""
        return self.loss - self.optimum

    @property
    def ratio(self) -> float:
        """Bits in float32 over the bits that moved."""
        return self.traffic.float32 / self.traffic.total if self.traffic.total else math.nan


class LinearStudy:
    """Trainings that differ in their precision and seed alone; the full precision is always the first of a seed.

    Args:
        task: one of TASKS.
        items: precisions or their specs, see :class:`Precision`.
        data: a name as :func:`gtrace_experiments.linear.load` takes it, or a data set, which all seeds then share.
        target: column of a CSV file that holds the target.
        epochs: passes over the training set.
        batch_size: samples of a step.
        rate: step size of the first epoch; epoch e takes a part 1 / e of it. None for what is usual for the first
            seed's data.
        prox: the term beside the loss; None for the task's own.
        seed: the first; it also makes synthetic data.
        seeds: how many, one after the other.
        refit: steps at which gradient codecs are fitted, as :meth:`RefitSchedule.parse` reads it.

    Raises:
        UsageError: an unknown name, parts that do not fit together, or a number out of range.
        TraceError: a data file is missing or damaged.
    """

    def __init__(
        self,
        task: str,
        items: Sequence[str | Precision],
        *,
        data: str | Data = "synthetic-100",
        target: str | None = None,
        epochs: int = EPOCHS,
        batch_size: int = 1,
        rate: float | None = None,
        prox: Prox | None = None,
        seed: int = 0,
        seeds: int = 1,
        refit: str = DEFAULT_REFIT,
    ) -> None:
        if task not in TASKS:
            raise UsageError(f"no linear task '{task}'; {suggest(task, TASKS)}")
        for name, value, least in (("epochs", epochs, 1), ("seeds", seeds, 1), ("seed", seed, 0)):
            if value < least:
                raise UsageError(f"{name}: {value} is below {least}")
        self.problem: Problem = TASKS[task]
        self.precisions = precisions(items)
        for item in self.precisions:
            item.check(self.problem)
        self.epochs, self.batch_size, self.prox = epochs, batch_size, self.problem.prox if prox is None else prox
        self.seeds = tuple(range(seed, seed + seeds))
        self._given, self._target, self._rate = data, target, rate
        self._refit = str(RefitSchedule.parse(refit))
        self._runs: list[tuple[Training, LinearResult]] = self._begin(seed)
        # The step that suits the first seed's data is that of all seeds.
        self._rate = self.rate
        self._done: list[LinearResult] = []
        self.warnings: list[str] = []

    def _begin(self, seed: int) -> list[tuple[Training, LinearResult]]:
        given = self._given
        if isinstance(given, Data):
            data = given
        else:
            data = load(given, labels=self.problem.labels, seed=seed, target=self._target)
        optimum = self.problem.optimum(data.a, data.b, self.prox)
        runs = []
        placed: dict[tuple[Any, ...], Columns] = {}
        for precision in self.precisions:
            grid = (precision.bits, precision.levels, precision.sampling == "nearest", precision.draws > 0)
            if grid not in placed:
                placed[grid] = columns_of(data, precision)
            training = Training(
                self.problem,
                data,
                precision,
                prox=self.prox,
                batch_size=self.batch_size,
                rate=self._rate,
                seed=seed,
                refit=self._refit,
                columns=placed[grid],
            )
            runs.append((training, LinearResult(str(precision), seed, optimum=optimum, variance=training.variance)))
        return runs

    @property
    def data(self) -> Data:
        """The data set of the current seed."""
        return self._runs[0][0].data

    @property
    def rate(self) -> float:
        """Step size of the first epoch."""
        return self._runs[0][0].rate

    def bits_per_value(self, result: LinearResult) -> tuple[float, float, float]:
        """Bits that a value of a sample, of the model and of the gradient took on average; 0s before an epoch."""
        (count, n), steps = self.data.a.shape, -(-len(self.data.b) // self.batch_size)
        epochs, traffic = max(1, len(result.losses)), result.traffic
        return (
            traffic.samples / (epochs * count * n),
            traffic.model / (epochs * steps * n),
            traffic.gradients / (epochs * steps * n),
        )

    @property
    def results(self) -> list[LinearResult]:
        """How the runs went so far, seed by seed, the full precision first."""
        return [*self._done, *(result for _, result in self._runs)]

    def run(
        self,
        log: Path | None = None,
        *,
        force: bool = False,
        on_record: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """Train to the end.

        Args:
            log: where the run log goes; None for nowhere.
            force: replace an existing log.
            on_record: called with every record after it was written.

        Raises:
            OutputExistsError: the log exists and ``force`` is off.
        """
        writer = None if log is None else RunLogWriter(log, self.describe(), force=force)
        try:
            for record in self.records():
                if writer is not None:
                    writer.write(record["type"], **{name: value for name, value in record.items() if name != "type"})
                if on_record is not None:
                    on_record(record)
        finally:
            if writer is not None:
                writer.close()

    def records(self) -> Iterator[dict[str, Any]]:
        """Train, and yield the records of the run log as they come; their steps are epochs."""
        for seed in self.seeds:
            if seed != self.seeds[0]:
                self._done += [result for _, result in self._runs]
                self._runs = self._begin(seed)
            first = [training.loss(training.x) for training, _ in self._runs]
            for epoch in range(self.epochs):
                for (training, result), loss in zip(self._runs, first, strict=True):
                    if not result.finished:
                        yield from self._advance(training, result, epoch, loss)

    def _advance(self, training: Training, result: LinearResult, epoch: int, first: float) -> Iterator[dict[str, Any]]:
        label = {"run": result.run, "seed": result.seed}
        if epoch == self.epochs // 2:
            training.restart_average()
        done = training.epoch()
        result.losses.append(done.loss)
        result.traffic += done.traffic
        result.fetched += (done.fetched - result.fetched) / (epoch + 1)
        result.flipped += (done.flipped - result.flipped) / (epoch + 1)
        result.seconds += done.seconds
        result.codec_seconds += done.codec_seconds
        x, test = training.x, training.data
        yield {
            "type": "step",
            **label,
            "step": epoch,
            "loss": done.loss,
            "lr": done.rate,
            "bits": done.traffic.total,
            "bits_float32": done.traffic.float32,
            "sample_bits": done.traffic.samples,
            "model_bits": done.traffic.model,
            "gradient_bits": done.traffic.gradients,
            "shared_bits": done.traffic.shared,
            "fetched": done.fetched,
            "flipped": done.flipped,
            "seconds": done.seconds,
            "codec_seconds": done.codec_seconds,
        }
        if not math.isfinite(done.loss):
            result.diverged = f"{result.run}: diverged; the model is not finite after epoch {epoch + 1}"
        last = bool(result.diverged) or epoch == self.epochs - 1
        if last:
            x = training.average
            result.model, result.loss = x, training.loss(x)
            if not result.diverged and not result.loss <= first:
                result.diverged = (
                    f"{result.run}: learned nothing; the loss ends at {result.loss:.4g}, above the {first:.4g} "
                    "it began with"
                )
        if len(test.test_b):
            test_loss = self.problem.objective(test.test_a, test.test_b, x, training.prox)
            accuracy = self.problem.accuracy(test.test_a, test.test_b, x)
            yield {"type": "eval", **label, "step": epoch, "loss": test_loss, "accuracy": accuracy}
            result.test_loss, result.accuracy = test_loss, accuracy
        if not last:
            return
        result.finished = True
        if result.diverged:
            result.diverged += f". Try {self._remedy(training)}"
            self.warnings.append(result.diverged)
            yield {"type": "warning", "text": result.diverged}
        yield {
            "type": "end",
            **label,
            "steps": epoch + 1,
            "loss": result.test_loss,
            "accuracy": result.accuracy,
            "train_loss": result.loss,
            "optimum": result.optimum,
            "bits": result.traffic.total,
            "ratio": result.ratio,
            "diverged": bool(result.diverged),
            "seconds": result.seconds,
        }

    def _remedy(self, training: Training) -> str:
        remedy = f"a lower --lr than {training.rate:.3g}"
        if training.precision.quantize:
            remedy += ", or more bits"
        if training.precision.chebyshev:
            remedy += f", or a larger --radius than {training.precision.radius:g}"
        return remedy

    @property
    def command(self) -> str:
        """The command line that repeats this study; empty where its data came from Python."""
        if isinstance(self._given, Data):
            return ""
        named = [str(item) for item in self.precisions[1:]] or ["none"]
        options = {
            "--task": self.problem.name,
            "--data": self._given,
            **({} if self._target is None else {"--target": self._target}),
            "--compare": ",".join(named),
            "--epochs": self.epochs,
            "--batch-size": self.batch_size,
            "--lr": repr(self.rate),
            "--prox": str(self.prox),
            "--seed": self.seeds[0],
            "--seeds": len(self.seeds),
        }
        if any(item.codec is not None for item in self.precisions):
            options["--refit"] = self._refit
        return shlex.join(["gtrace", "linear", *(str(word) for pair in options.items() for word in pair)])

    def describe(self) -> dict[str, Any]:
        """The fields of the run log's study record."""
        count, n = self.data.a.shape
        return {
            "command": self.command,
            # Runs on different data are different tasks to whoever puts logs together.
            "task": f"{self.problem.name} on {self.data.name}",
            "kind": "linear",
            "workers": 1,
            "seed": self.seeds[0],
            "seeds": list(self.seeds),
            "runs": [str(item) for item in self.precisions],
            "steps": self.epochs,
            "samples": count,
            "batch_size": self.batch_size,
            "lr": self.rate,
            "prox": str(self.prox),
            "parameters": n,
            "tensors": {"model": n},
            "versions": {"gtrace": __version__, "numpy": np.__version__, "python": platform.python_version()},
        }


def train_linear(task: str, items: Sequence[str | Precision], **settings: Any) -> LinearStudy:
    """Train a linear model at each precision and in full, and return the study with its results.

    A gradient codec is a precision of its own: ``train_linear("logistic", ["mcgq:amount=0.1"])`` keeps samples and
    model exact, and sends every step's gradient through the codec.

    Args:
        task: ``linear``, ``lssvm``, ``logistic`` or ``svm``.
        items: precisions or their specs.
        settings: see :class:`LinearStudy`.

    Raises:
        UsageError, TraceError: see :class:`LinearStudy`.
    """
    study = LinearStudy(task, items, **settings)
    study.run()
    return study
