"""Training runs that several experiments look at, with and without codecs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gtrace.online import RunResult, Task
    from gtrace.workflows.reproduce.experiment import Context


#: test images where there are many short trainings: half a point of accuracy is noise then
FEW = 4000


def small_task(context: Context, instead_of: str, test_images: int | None = None) -> tuple[Task, str]:
    """ResNet-8 on Fashion-MNIST where that is installed, else and for a quick run a network on handwritten digits.

    Args:
        context: of the experiment.
        instead_of: what the paper trains on.
        test_images: of Fashion-MNIST's 10,000, all by default; where there are many short trainings, testing takes
            half of the time.

    Returns:
        the task, and in words what it is and what it stands for.
    """
    from gtrace.errors import TraceError
    from gtrace.online import load_task
    from gtrace.online.tasks.fashion import FashionResNet8, fashion_folder

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
    return load_task("digits-cnn"), words


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
        """Mean, and in brackets the range where there are several."""
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
        settings: further arguments of :class:`gtrace.online.Study`.

    Returns:
        label -> its runs.
    """
    from gtrace.online import Study

    specs = [spec for spec in codecs.values() if spec != "none"]
    study = Study(task, specs, seed=context.seed, seeds=seeds, steps=steps, eval_every=steps, **settings)
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
        name = _canonical(spec)
        results = tuple(result for result in study.results if result.run == name)
        mean = tuple(float(np.mean(losses[name, result.seed][-last:])) for result in results)
        runs[label] = Runs(results, mean)
    return runs


def _canonical(spec: str) -> str:
    from gtrace.codecs import codec

    return str(codec(spec))
