"""One linear model in training: proximal SGD whose samples, model and gradients are quantized (ZipML, Eq. 2)."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gtrace.errors import UsageError
from gtrace.schedule import DEFAULT_REFIT
from gtrace.training.exchange import Exchange, Tally
from gtrace.types import Key
from gtrace_experiments.linear import kernels
from gtrace_experiments.linear.levels import Columns, column_levels, place
from gtrace_experiments.linear.precision import FLOAT_BITS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace_experiments.linear.data import Data
    from gtrace_experiments.linear.precision import Precision
    from gtrace_experiments.linear.problems import Problem, Prox

#: names of the streams of randomness, in the order of the kernels
_STREAMS = ("samples", "model", "gradient", "signs")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bits that moved; they add up. Targets are not counted.

    Attributes:
        samples: from where samples are stored, fetched again or sketched ones included.
        model: to where gradients are computed, one copy a step.
        gradients: back, one a step.
        shared: levels of columns and of the codec, sent when they change.
        float32: what all of it would have taken in float32.
    """

    samples: int = 0
    model: int = 0
    gradients: int = 0
    shared: int = 0
    float32: int = 0

    @property
    def total(self) -> int:
        """All bits."""
        return self.samples + self.model + self.gradients + self.shared

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.samples + other.samples,
            self.model + other.model,
            self.gradients + other.gradients,
            self.shared + other.shared,
            self.float32 + other.float32,
        )


@dataclass(frozen=True, slots=True)
class Epoch:
    """The result of one epoch.

    Attributes:
        loss: objective of the training set after it.
        rate: step size.
        traffic: what moved.
        steps: done; fewer than planned where the model stopped being finite.
        fetched: part of the samples that were fetched again in full.
        flipped: part of the samples whose hinge gradient was that of the other side; 0 for other losses, NaN under
            a polynomial, which has no sides.
        seconds: CPU time.
        codec_seconds: the part of it in the gradient's codec.
    """

    loss: float
    rate: float
    traffic: Traffic
    steps: int
    fetched: float
    flipped: float
    seconds: float
    codec_seconds: float


class Training:
    """SGD over a training set at one precision. The step of epoch e is rate / e.

    Every epoch goes through all samples in an order that the seed alone decides, so trainings with the same seed and
    different precisions see the same batches.

    Args:
        problem: what is minimized.
        data: training and test set.
        precision: what is quantized.
        prox: the term beside the loss; None for the problem's own.
        batch_size: samples of a step, whose gradients are averaged.
        rate: step size of the first epoch; None for 0.5 / (mean squared norm of a sample), which is 0.005 for 100
            standardised features.
        seed: of the order and the rounding.
        refit: steps at which a gradient codec is fitted, as :meth:`RefitSchedule.parse` reads it.
        columns: of :func:`columns_of`, where another training has them already.

    Attributes:
        x: float64[n], the model.
        average: float64[n], mean of the models after all steps since :meth:`restart_average` (ZipML, Theorem 1).
        variance: squared error of one quantization of a sample's value, mean over all; 0 if they stay exact.

    Raises:
        UsageError: the problem has no use for the precision, or a number out of range.
    """

    def __init__(
        self,
        problem: Problem,
        data: Data,
        precision: Precision,
        *,
        prox: Prox | None = None,
        batch_size: int = 1,
        rate: float | None = None,
        seed: int = 0,
        refit: str = DEFAULT_REFIT,
        columns: Columns | None = None,
    ) -> None:
        precision.check(problem)
        if batch_size < 1:
            raise UsageError(f"batch size: {batch_size} is below 1")
        if rate is not None and not (math.isfinite(rate) and rate > 0):
            raise UsageError(f"lr: must be a positive number, not {rate:g}")
        self.problem, self.data, self.precision = problem, data, precision
        self.prox = problem.prox if prox is None else prox
        self.rate = usual_rate(data) if rate is None else rate
        self._batch, self._seed, self._epoch = min(batch_size, len(data.b)), seed, 0
        self._rule = precision.rule(problem, self.prox)
        self.x = np.zeros(data.a.shape[1])
        self._total, self._summed = np.zeros_like(self.x), 0
        if columns is None:
            columns = columns_of(data, precision)
        # The levels of a column of uniform ones are all known from its scale.
        sent = columns.count if precision.levels == "optimal" else len(columns.levels)
        self.variance, self._shared = columns.variance, FLOAT_BITS * sent
        self._samples = kernels.Samples(data.a, data.b, columns.index, columns.part, columns.levels, columns.reach)
        self._exchange = (
            None if precision.codec is None else Exchange(precision.codec, seed=seed, refit=refit, nonfinite="error")
        )

    @property
    def average(self) -> NDArray[np.float64]:
        """Mean of the models since :meth:`restart_average`; the model itself before a step was done."""
        return self._total / self._summed if self._summed else self.x

    def restart_average(self) -> None:
        """Begin a new mean of models."""
        self._total[:], self._summed = 0.0, 0

    def loss(self, x: NDArray[np.float64]) -> float:
        """Objective of a model on the training set."""
        return self.problem.objective(self.data.a, self.data.b, x, self.prox)

    def epoch(self) -> Epoch:
        """Go through all samples once."""
        start = time.process_time()
        self._epoch += 1
        rate = self.rate / self._epoch
        count = len(self.data.b)
        order = np.random.default_rng(self._key("order")).permutation(count)
        keys = [self._key(name) for name in _STREAMS]
        streams = kernels.Streams(
            np.array([key.high for key in keys], np.uint64), np.array([key.low for key in keys], np.uint64)
        )
        counts = np.zeros(2, np.int64)
        steps = -(-count // self._batch)
        tally = Tally()
        if self._exchange is None:
            kernels.epoch(self._samples, self._rule, streams, order, self._batch, rate, self.x, self._total, counts)
        else:
            steps = self._coded(self._exchange, streams, order, rate, counts, tally)
        self._summed += steps
        seconds = time.process_time() - start
        fetched, flipped = map(int, counts)
        traffic = self._traffic(steps, fetched, tally)
        self._shared = 0
        return Epoch(
            loss=self.loss(self.x),
            rate=rate,
            traffic=traffic,
            steps=steps,
            fetched=fetched / count,
            flipped=math.nan if self.precision.chebyshev else flipped / count,
            seconds=seconds,
            codec_seconds=tally.codec_seconds,
        )

    def _coded(
        self,
        exchange: Exchange,
        streams: kernels.Streams,
        order: NDArray[np.int64],
        rate: float,
        counts: NDArray[np.int64],
        tally: Tally,
    ) -> int:
        """An epoch whose gradients travel through a codec; how many steps it has."""
        gradient = np.empty_like(self.x)
        planned = -(-len(order) // self._batch)
        for step in range(planned):
            chosen = order[step * self._batch : (step + 1) * self._batch]
            kernels.batch_gradient(self._samples, self._rule, streams, chosen, step, self.x, gradient, counts)
            with np.errstate(over="ignore"):
                sent = gradient.astype(np.float32)
            if not np.isfinite(sent).all():
                self.x[:] = np.nan
                return step
            found = exchange.step((self._epoch - 1) * planned + step, [{"gradient": sent}])
            tally.add(found.tally)
            arrived = np.asarray(found.gradients["gradient"], np.float64)
            kernels.descend(self.x, arrived, rate, self._rule.prox, self._rule.strength)
            self._total += self.x
        return planned

    def _traffic(self, steps: int, fetched: int, tally: Tally) -> Traffic:
        precision, (count, n) = self.precision, self.data.a.shape
        samples = count * n * precision.sample_bits + fetched * n * FLOAT_BITS
        model = steps * self._row_bits("model")
        if precision.refetch == "jl":
            sketch = FLOAT_BITS * (precision.rows + 1)
            samples, model = samples + count * sketch, model + steps * sketch
        return Traffic(
            samples=samples,
            model=model,
            gradients=tally.payload_bits if precision.codec is not None else steps * self._row_bits("gradients"),
            shared=self._shared + tally.shared_bits,
            float32=FLOAT_BITS * n * (count + 2 * steps),
        )

    def _row_bits(self, part: str) -> int:
        """Bits of a vector of the model's size, with its norm if it is quantized."""
        n = len(self.x)
        return n * self.precision.bits + FLOAT_BITS if part in self.precision.quantize else n * FLOAT_BITS

    def _key(self, stream: str) -> Key:
        return Key.derive(self._seed, tensor=stream, step=self._epoch, role="sample")


def columns_of(data: Data, precision: Precision) -> Columns:
    """The training set on the levels of a precision; empty where samples stay exact."""
    if not precision.draws:
        return Columns(
            np.zeros((0, 0), np.uint16), np.zeros((0, 0), np.float32), np.zeros((0, 0)), np.zeros((0, 0)), 0, 0.0
        )
    levels = column_levels(data.a, precision.bits, precision.levels)
    return place(data.a, levels, nearest=precision.sampling == "nearest")


def usual_rate(data: Data) -> float:
    """Half of the step that is the best for a sample of mean norm: 0.5 / mean ||a||^2."""
    energy = float(np.einsum("ij,ij->", data.a, data.a, dtype=np.float64)) / len(data.b)
    return 0.5 / energy if energy else 1.0
