"""What the experiments on MQGrad share: the runs themselves, on the clock of the paper's cluster."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.costs import Network
from gtrace.errors import TraceError
from gtrace.report.analysis.runs import WINDOW, LoggedRun, analyze_runs, running_mean
from gtrace.training import ParameterServerClock, load_task
from gtrace.training.tasks import require_torch
from gtrace_experiments.reproduce._training import studied

if TYPE_CHECKING:
    from gtrace.training.tasks import Task
    from gtrace_experiments.reproduce.experiment import Context

PAPER = "Cui et al., MQGrad: Reinforcement Learning of Gradient Quantization in Parameter Server, 2018"
RECIPE = (
    "fashion-cnn: the paper's network with linear layers of 256 and 128 in the place of 2304 and 3840; 4 simulated "
    "workers with 4 samples each, SGD at the task's learning rate of 0.05, 150 steps, 10 seeds. (A run at 0.1 came "
    "first; there 2 bits ended at chance.) Tensors of 32,000 elements and more go through minmax up and down: 99.6 % "
    "of the parameters, 99.2 % in the paper. On the clock a bit of these takes 5 seconds and computing 5 seconds an "
    "iteration, as in the authors' table for 12 workers. The agent has the paper's settings and the reading of "
    "docs/bit-policies.md."
)
WORKERS = 4
#: seconds of computing, and of a bit: the authors' table for 12 workers is 5 + 5 K
SECONDS = 5.0
#: what the agent gets at every decision in the ablation, about the size of its first rewards
CONSTANT = 0.02

#: run -> what it is called
NAMES = {
    "minmax:bits=2,coder=fixed": "fixed 2 bits",
    "minmax:bits=3,coder=fixed": "fixed 3 bits",
    "minmax:bits=4,coder=fixed": "fixed 4 bits",
    "minmax:bits=8,coder=fixed": "fixed 8 bits",
    "minmax:coder=fixed@adaptive": "adaptive",
    "minmax:coder=fixed@mqgrad": "MQGrad",
    f"minmax:coder=fixed@mqgrad:constant_reward={CONSTANT}": "MQGrad, constant reward",
}
AGENTS = ("MQGrad", "MQGrad, constant reward")


@dataclass(frozen=True, slots=True)
class Measured:
    """All runs.

    Attributes:
        runs: name -> one run per seed.
        plain: uncompressed, one per seed.
        clock: in closed form.
        codec_share: name of a fixed width -> part of a step's time that coding takes over 10 MB/s, with measured CPU
            times.
        codec_seconds: the same part in seconds.
        records: name -> the step records of each seed.
        data: what was trained on.
    """

    runs: dict[str, tuple[LoggedRun, ...]]
    plain: tuple[LoggedRun, ...]
    clock: ParameterServerClock
    codec_share: dict[str, float]
    codec_seconds: dict[str, float]
    records: dict[str, tuple[list[dict[str, Any]], ...]]
    data: str

    def reached(self, name: str, loss: float) -> str:
        """How many seeds get to a loss, as ``2 of 3``."""
        found = [math.isfinite(run.seconds_to_loss(loss)) for run in self.runs[name]]
        return f"{sum(found)} of {len(found)}"

    def seconds(self, name: str, loss: float) -> float:
        """Mean over seeds of the simulated seconds to a loss; infinite where a seed does not get there."""
        found = [run.seconds_to_loss(loss) for run in self.runs[name]]
        return float(np.mean(np.where(np.isnan(found), np.inf, found)))

    def earlier(self, name: str, other: str, loss: float) -> int:
        """In how many seeds one run gets to a loss and takes less time than another, which may not get there."""
        pairs = (
            [run.seconds_to_loss(loss) for run in pair] for pair in zip(self.runs[name], self.runs[other], strict=True)
        )
        return sum(ours < theirs or (math.isfinite(ours) and math.isnan(theirs)) for ours, theirs in pairs)

    def final(self, name: str) -> float:
        """Mean over seeds of the training loss over the last tenth of the steps; infinite if one diverged."""
        return float(np.mean([math.inf if run.diverged else run.final_loss for run in self.runs[name]]))

    def tight_loss(self) -> float:
        """The loss that 8 bits end with, 5 percent higher: a target that a run on time must get to."""
        return 1.05 * self.final("fixed 8 bits")


def curve(run: LoggedRun) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Simulated hours and running mean of the training loss, from the first whole window on."""
    window = max(int(run.loss.size * WINDOW), 1)
    hours, loss = run.sim_seconds / 3600, running_mean(run.loss, window)
    return tuple(hours[window - 1 :].tolist()), tuple(loss[window - 1 :].tolist())


def measure(context: Context) -> Measured:
    """The runs of a context; those that were done in this process are not done again."""
    return _measure(context)


@functools.cache
def _measure(context: Context) -> Measured:
    require_torch()
    task, data = _task(context)
    from gtrace.training.run import simulated_step

    small = {"fashion-cnn": 32_000, "cifar-cnn": 100_000}.get(task.name, 5_000)
    sizes = [parameter.numel() for parameter in task.model().parameters()]
    quantized = sum(size for size in sizes if size >= small)
    bandwidth = 2 * WORKERS * quantized / SECONDS
    clock = ParameterServerClock(WORKERS, bandwidth, SECONDS, quantized, sum(sizes) - quantized)
    steps = 6 if context.quick else 150
    found = studied(
        context,
        task,
        [run for run in NAMES if "@" not in run],
        records=True,
        policies=["fixed", *(run.partition("@")[2] for run in NAMES if "@" in run)],
        workers=WORKERS,
        batch_size=4,
        steps=steps,
        seeds=1 if context.quick else 10,
        eval_every=max(1, steps // 10),
        min_size=small,
        down="same",
        network=Network(bandwidth, topology="ps", compute=SECONDS),
    )
    records = found.records
    runs = analyze_runs(records).runs
    local = Network(8e7, topology="ps")
    share, spent = {}, {}
    for run, name in NAMES.items():
        results = [result for result in found.results if result.run == run]
        coding, total = 0.0, 0.0
        for result in results:
            tally = result.tally
            coding += (tally.codec_seconds - tally.decode_seconds) / WORKERS + tally.decode_seconds
            total += simulated_step(local, WORKERS, tally, result.seconds, exact=False)
        share[name], spent[name] = coding / total, coding / sum(result.steps for result in results)
    return Measured(
        runs={name: tuple(one for one in runs if one.spec == run) for run, name in NAMES.items()},
        plain=tuple(one for one in runs if one.spec == "none"),
        clock=clock,
        codec_share=share,
        codec_seconds=spent,
        records={
            name: tuple(
                [r for r in records if r["type"] == "step" and r["run"] == run and r["seed"] == one.seed]
                for one in found.results
                if one.run == run
            )
            for run, name in NAMES.items()
        },
        data=data,
    )


def _task(context: Context) -> tuple[Task, str]:
    if context.full is not None:
        return context.full.load(), context.full.data
    if context.quick:
        return load_task("digits-cnn"), "the digits that ship with scikit-learn, as everything quick"
    try:
        from gtrace.training.tasks.images import FashionCNN

        return FashionCNN(test_images=600), "Fashion-MNIST in the place of CIFAR-10; accuracies are of 600 test images"
    except TraceError:
        return load_task("digits-cnn"), (
            "the digits that ship with scikit-learn and digits-cnn: Fashion-MNIST is not installed, so this is another "
            "and far smaller task than the recipe says"
        )
