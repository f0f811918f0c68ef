"""MCGQ, Tables 1 and 2: against one-bit methods at the same compression, at best and at equal learning rates."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from gtrace_experiments.reproduce._mcgq import PAPER
from gtrace_experiments.reproduce._training import Trained, banded, first_task, spread, trained
from gtrace_experiments.reproduce.experiment import Chart, Check, Context, Experiment, Outcome, Panel, Table

if TYPE_CHECKING:
    import numpy as np

STEPS, BATCH, SEEDS = 200, 32, 5
MCGQ = "MCGQ"
RATES = 4
#: name -> optimizer, codec, learning rates of the search
METHODS = {
    "SGD with momentum": ("momentum", "none", (0.01, 0.03, 0.1, 0.3)),
    "SGD": ("sgd", "none", (0.03, 0.1, 0.3, 1.0)),
    MCGQ: ("sgd", "mcgq:amount=0.065,accumulate=true", (0.03, 0.1, 0.3, 1.0)),
    "ef-signSGD": ("sgd", "ef-signsgd", (0.03, 0.1, 0.3, 1.0)),
    "signSGD": ("sgd", "signsgd", (0.03, 0.1, 0.3, 1.0)),
    "signum": ("sgd", "signum:scale=none", (0.0003, 0.001, 0.003, 0.01)),
}
COMPRESSED = ("ef-signSGD", "signSGD", "signum")


class _Trainings:
    """Trainings by optimizer and learning rate, each with all the codecs that are wanted there."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.task, self.data = first_task(context, "digits-cnn")

    def __call__(self, wanted: dict[str, float], seed: int, seeds: int) -> dict[str, tuple[Trained, str]]:
        """What came of each method at its learning rate: a training, and the name of its run."""
        found: dict[str, tuple[Trained, str]] = {}
        for key in dict.fromkeys((METHODS[name][0], lr) for name, lr in wanted.items()):
            names = [name for name, lr in wanted.items() if (METHODS[name][0], lr) == key]
            specs = [METHODS[name][1] for name in names if METHODS[name][1] != "none"]
            context = dataclasses.replace(self._context, seed=self._context.seed + seed)
            result = trained(
                context, self.task, specs, steps=STEPS, batch_size=BATCH, seeds=seeds, optimizer=key[0], lr=key[1]
            )
            runs = iter(list(result.results)[1:])
            found |= {name: (result, "none" if METHODS[name][1] == "none" else next(runs)) for name in names}
        return found


def run(context: Context) -> Outcome:
    """A search with one seed, then other seeds at the best rates and at that of SGD with momentum."""
    train = _Trainings(context)
    tried: dict[str, dict[float, float]] = {name: {} for name in METHODS}
    for place in range(RATES):
        for name, (found, run) in train({n: rates[place] for n, (_, _, rates) in METHODS.items()}, 0, 1).items():
            tried[name][METHODS[name][2][place]] = float(found.accuracy(run)[0])
    best = {name: max(seen, key=seen.__getitem__) for name, seen in tried.items()}
    common = best["SGD with momentum"]
    # Fresh seeds: the search's own are biased upwards by the choice.
    at_best = train(best, 1, SEEDS)
    at_common = train(dict.fromkeys(METHODS, common), 1, SEEDS)
    tuned, equal = (
        {name: found.accuracy(run) for name, (found, run) in trainings.items()} for trainings in (at_best, at_common)
    )

    def margins(accuracy: dict[str, np.ndarray], others: tuple[str, ...]) -> str:
        return ", ".join(f"{name} {spread(accuracy[MCGQ] - accuracy[name], '+.2f')}" for name in others)

    def beats(accuracy: dict[str, np.ndarray], others: tuple[str, ...]) -> bool:
        return all(bool((accuracy[MCGQ] > accuracy[name]).all()) for name in others)

    signum = ("SGD with momentum", "SGD", MCGQ, "ef-signSGD", "signSGD")
    return Outcome(
        checks=(
            Check(
                "Table 1: at best learning rates MCGQ is more accurate than the one-bit methods",
                "test accuracy above each of the three in every seed",
                f"{margins(tuned, COMPRESSED)} points",
                beats(tuned, COMPRESSED),
            ),
            Check(
                "Table 1: and than 32-bit SGD",
                "test accuracy above it in every seed",
                f"{margins(tuned, ('SGD',))} points",
                beats(tuned, ("SGD",)),
            ),
            Check(
                "Table 2: at the best rate of SGD with momentum MCGQ is more accurate than the one-bit methods",
                "test accuracy above each of the three in every seed",
                f"{margins(equal, COMPRESSED)} points",
                beats(equal, COMPRESSED),
            ),
            Check(
                "Table 2: and than 32-bit SGD",
                "test accuracy above it in every seed",
                f"{margins(equal, ('SGD',))} points",
                beats(equal, ("SGD",)),
            ),
            Check(
                "Table 2: signum is the worst there",
                "its mean test accuracy is below all others'",
                f"{spread(equal['signum'])} %; the others from {min(equal[n].mean() for n in signum):.2f} %",
                all(bool(equal["signum"].mean() < equal[name].mean()) for name in signum),
            ),
        ),
        tables=(
            Table(
                "Best learning rates (Table 1), and that of SGD with momentum (Table 2)",
                ("method", "best rate", "accuracy there, %", f"accuracy at {common:g}, %", "smaller than float32"),
                tuple(
                    (
                        name,
                        best[name],
                        spread(tuned[name]),
                        spread(equal[name]),
                        f"{at_best[name][0].ratio(at_best[name][1]):.1f}x",
                    )
                    for name in METHODS
                ),
                note=f"mean and standard deviation of {SEEDS} seeds that the search did not see",
            ),
            Table(
                "The search, one seed",
                ("method", "learning rates", "accuracy, %"),
                tuple(
                    (name, ", ".join(f"{lr:g}" for lr in seen), ", ".join(f"{value:.1f}" for value in seen.values()))
                    for name, seen in tried.items()
                ),
            ),
        ),
        charts=(
            Chart(
                (
                    Panel(
                        tuple(
                            banded(title, tuple(METHODS), [accuracy[name] for name in METHODS])
                            for title, accuracy in (("best rate of each", tuned), (f"{common:g} for all", equal))
                        ),
                        "",
                        "",
                        "test accuracy, %",
                        bars=True,
                    ),
                ),
                "Test accuracy at the best learning rate of each method and at the best of SGD with momentum; "
                "whiskers are one standard deviation of the seeds.",
            ),
        ),
        data=f"{train.data}, in the place of CIFAR-100",
        notes=(
            "signSGD and ef-signSGD multiply signs by the mean magnitude, as in the code the paper follows; signum "
            "does not, so that its best rate is far smaller.",
            "The paper trains for 200 epochs; here it is four and a half. One of the 359 held-out digits is 0.28 "
            "points.",
        ),
    )


EXPERIMENT = Experiment(
    name="mcgq-tables1-2",
    title="MCGQ against one-bit methods at the same compression",
    paper=PAPER,
    where="Tables 1 and 2",
    claim="At 32x MCGQ is more accurate than signSGD, signum and ef-signSGD, and than 32-bit SGD, both at the best "
    "learning rates and at that of SGD with momentum.",
    recipe=f"The network of digits-cnn in the place of ResNet-18 on CIFAR-100, small enough for a search: four "
    f"learning rates per method with one seed, then {SEEDS} other seeds, {STEPS} steps of {BATCH}. MCGQ accumulates, "
    "at a sampling amount that compresses about 32x.",
    published=(
        Table(
            "ResNet-18, CIFAR-100",
            ("method", "accuracy, best rates", "rate", "accuracy at 1e-2"),
            (
                ("SGD with momentum", None, None, "75.20"),
                ("SGD", "74.02", "5.6e-2", "69.75"),
                ("MCGQ", "74.89", "5.6e-2", "72.57"),
                ("ef-signSGD", "74.43", "5.6e-2", "69.69"),
                ("signSGD", "73.14", "5.6e-2", "67.13"),
                ("signum", "72.20", "3.2e-4", "58.90"),
            ),
        ),
    ),
    run=run,
)
