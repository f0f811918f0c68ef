"""Adaptive levels, Figure 1: how the variance of normalized gradient coordinates moves during training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gtrace_experiments.reproduce._alq import PAPER, Path, plain_path
from gtrace_experiments.reproduce.experiment import Chart, Check, Context, Curve, Experiment, Outcome, Panel, Table

if TYPE_CHECKING:
    from numpy.typing import NDArray

BUCKET = 8192
#: share of the training that stands for the paper's first epoch, and windows around a drop of the learning rate
EARLY, WINDOW = 0.05, 0.15
#: the mean of these first steps is where a training begins
FIRST = 4
SEEDS = 3


def variances(gradients: NDArray[np.float32], bucket: int = BUCKET) -> tuple[float, float]:
    """Mean variance of normalized coordinates, in two readings, of float32[batches, n].

    Returns:
        over the batches, each bucket divided by its l2 norm, times the bucket size: 0 where all batches agree, 1 where
        they have nothing in common; and over the coordinates of a bucket divided by its largest.
    """
    batches, n = gradients.shape
    whole = np.asarray(gradients[:, : n - n % bucket], np.float64).reshape(batches, -1, bucket)
    units = whole / np.linalg.norm(whole, axis=2, keepdims=True)
    peaks = whole / np.abs(whole).max(axis=2, keepdims=True)
    return float(units.var(axis=0, ddof=1).mean() * bucket), float(peaks.var(axis=2).mean())


def changes(path: Path, values: NDArray[np.float64]) -> tuple[float, float, list[float]]:
    """How far the mean log2 of a curve moves: in the early part, from there to the first drop, and at each drop.

    Means are over the first few steps, and over windows after the early part, before and after each drop.
    """
    at, y = np.array(path.at), np.log2(values)
    early, width = EARLY * path.steps, WINDOW * path.steps

    def mean(low: float, high: float) -> float:
        return float(y[(at >= low) & (at < high)].mean())

    start, middle = mean(0, FIRST), mean(early, early + width)
    jumps = [mean(drop, drop + width) - mean(drop - width, drop) for drop in path.drops]
    return middle - start, mean(path.drops[0] - width, path.drops[0]) - middle, jumps


def run(context: Context) -> Outcome:
    """Three trainings; both readings."""
    seeds = range(context.seed, context.seed + (1 if context.quick or context.full else SEEDS))
    readings = ("over mini-batches", "over coordinates")
    panels: list[list[Curve]] = [[], []]
    rows: list[tuple[str | float, ...]] = []
    moves: dict[str, list[tuple[float, float, list[float]]]] = {reading: [] for reading in readings}
    data = ""
    for seed in seeds:
        context.say(f"training with seed {seed}")
        path = plain_path(context, seed)
        data = path.data
        found = np.array([variances(path.gradients(step)) for step in path.at])
        for k, reading in enumerate(readings):
            moved = changes(path, found[:, k])
            moves[reading].append(moved)
            rows.append((reading, seed, moved[0], moved[1], *moved[2]))
            panels[k].append(Curve(f"seed {seed}", path.at, tuple(found[:, k].tolist()), form="plain"))
    checks = []
    for reading in readings:
        seen = moves[reading]
        checks.append(
            Check(
                f"variance {reading} changes rapidly at first",
                f"in every run its mean log2 moves further in the first {EARLY:.0%} of the steps than from there "
                "to the first drop of the learning rate",
                "; ".join(f"{early:+.2f} against {rest:+.2f}" for early, rest, _ in seen),
                all(abs(early) > abs(rest) for early, rest, _ in seen),
            )
        )
        for k, ordinal in enumerate(("first", "second")):
            jumps = [jump[k] for _, _, jump in seen]
            checks.append(
                Check(
                    f"variance {reading} changes after the {ordinal} drop",
                    "the mean of log2 before and after differs by 0.1 or more in every run, in the same direction",
                    ", ".join(f"{jump:+.2f}" for jump in jumps),
                    min(jumps) >= 0.1 or max(jumps) <= -0.1,
                )
            )
    drops = ", ".join(str(drop) for drop in path.drops)
    return Outcome(
        checks=tuple(checks),
        tables=(
            Table(
                "How far the variance moves, in octaves",
                ("variance", "seed", f"first {EARLY:.0%}", "rest up to the first drop", "first drop", "second drop"),
                tuple(rows),
                f"Changes of the mean log2; windows are {WINDOW:.0%} of the steps long.",
            ),
        ),
        charts=(
            Chart(
                tuple(
                    Panel(
                        tuple(curves),
                        f"Variance {reading}",
                        "step",
                        ("bucket size times " if not k else "") + "mean variance",
                        log_y=True,
                        marks=tuple(("lr / 10", float(drop)) for drop in path.drops),
                    )
                    for k, (reading, curves) in enumerate(zip(readings, panels, strict=True))
                ),
                f"Variance of normalized gradient coordinates; the learning rate falls to a tenth at steps {drops}.",
            ),
        ),
        data=data,
        notes=(
            "The paper does not say over what the variance is taken. Both readings are shown: of a coordinate over "
            "mini-batches (buckets divided by their l2 norm), and of the coordinates in a bucket (divided by the "
            "largest of them).",
            f"{path.steps} steps stand for 80,000: a few percent of them for the paper's first epoch.",
        ),
    )


EXPERIMENT = Experiment(
    name="alq-fig1",
    title="gradients change their law during training",
    paper=PAPER,
    where="Figure 1",
    claim=(
        "The average variance of normalized gradient coordinates changes rapidly in the first epoch, and then only "
        "after each drop of the learning rate. So no fixed set of levels suits a whole training."
    ),
    recipe=(
        "ResNet-8, one worker with 32 images a step, uncompressed, three seeds, drops at 50 and 75 % of the steps. "
        "At some forty steps the gradients of four mini-batches are kept. The paper trains ResNet-32 on CIFAR-10."
    ),
    run=run,
)
