"""What ZipML's experiments on linear models have in common: trainings, their tables and curves, and made data."""

from __future__ import annotations

import math
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace_experiments.linear import LinearStudy, train_linear
from gtrace_experiments.reproduce.experiment import Curve, Table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from gtrace_experiments.linear import Data, LinearResult

PAPER = "Zhang et al., ZipML, ICML 2017"
#: part by which a loss may lie above that of the full precision and count as the same solution
CLOSE = 0.05
#: losses above this are not drawn
_BLOWN_UP = 1000.0
#: a part from which on percentages mislead
_MANY = 5
#: results of a spec, one a seed; ``none`` is the full precision
Runs = dict[str, list["LinearResult"]]


def trained(task: str, items: Sequence[str], **settings: Any) -> Runs:
    """Results of every spec over the seeds, the full precision among them."""
    return by_spec(train_linear(task, items, **settings))


def by_spec(study: LinearStudy) -> Runs:
    """A study's results, by spec."""
    return {str(item): [r for r in study.results if r.run == str(item)] for item in study.precisions}


def loss(results: Sequence[LinearResult]) -> float:
    """Mean over seeds of the final loss; infinite if one diverged, so that it is above every bound."""
    found = [result.loss if not result.diverged else math.inf for result in results]
    return fmean(found)


def excess(runs: Runs, spec: str) -> float:
    """By which part the loss lies above that of the full precision."""
    return loss(runs[spec]) / loss(runs["none"]) - 1


def curve(results: Sequence[LinearResult], label: str) -> Curve:
    """Training loss after each epoch, mean over seeds; it ends when a run stopped, and has gaps if it diverged."""
    length = min(len(result.losses) for result in results)
    losses = np.array([result.losses[:length] for result in results]).mean(axis=0)
    losses[losses > _BLOWN_UP] = np.nan
    return Curve(label, tuple(range(1, length + 1)), tuple(losses.tolist()))


def runs_table(title: str, groups: Mapping[str, Runs], *, labels: bool = False, note: str = "") -> Table:
    """Final losses of every group and spec, means over seeds."""
    rows = []
    for group, runs in groups.items():
        for spec, results in runs.items():
            accuracy = [100 * result.accuracy for result in results if result.accuracy is not None]
            rows.append(
                (
                    group,
                    "full precision" if spec == "none" else spec,
                    "diverged" if any(result.diverged for result in results) else loss(results),
                    None if spec == "none" else percent(excess(runs, spec)),
                    *([fmean(accuracy)] if labels else []),
                    f"{fmean(result.ratio for result in results):.2f}x",
                )
            )
    head = ("data", "precision", "final loss", "above full precision")
    return Table(
        title, (*head, *(["test accuracy (%)"] if labels else []), "all that moves, smaller"), tuple(rows), note
    )


def losses_table(
    title: str, groups: Mapping[str, Runs], bits: Sequence[int], kinds: Mapping[str, str], note: str = ""
) -> Table:
    """A row for each group and number of bits, a column for each kind: the final loss, and how far it is above.

    Args:
        title: of the table.
        groups: results by name of what they were measured on.
        bits: of the specs.
        kinds: heading to a spec, with {} for the bits.
        note: below the table.
    """
    rows: list[tuple[str | int | None, ...]] = []
    for group, runs in groups.items():
        rows.append((group, None, f"{loss(runs['none']):.4g}", *[None] * len(kinds)))
        for b in bits:
            specs = [form.format(b) for form in kinds.values()]
            cells = [
                "diverged"
                if math.isinf(loss(runs[spec]))
                else f"{loss(runs[spec]):.4g} ({percent(excess(runs, spec))})"
                for spec in specs
            ]
            rows.append((group, b, None, *cells))
    head = ("data", "bits", "full precision", *kinds)
    return Table(title, head, tuple(rows), note or "In brackets: above the full precision.")


def percent(part: float) -> str:
    """The relative excess as text: a percentage or a factor; words if it is not finite."""
    if not math.isfinite(part):
        return "diverged"
    if part >= _MANY:
        return f"{1 + part:.0f} times"
    return f"{100 * part:.0f} %" if abs(part) >= 0.1 else f"{100 * part:.2g} %"


def tuned(task: str, data: Data, batch_size: int, *, seed: int, epochs: int = 6) -> float:
    """First step of the full precision with the least loss, out of powers of two around the usual one.

    The paper tunes the step for the full precision and takes the same one at low precision.
    """
    usual = LinearStudy(task, [], data=data).rate
    found = {}
    for power in range(-10, 7):
        rate = usual * 2.0**power
        found[rate] = loss(
            trained(task, [], data=data, rate=rate, batch_size=batch_size, seed=seed, epochs=epochs)["none"]
        )
    return min(found, key=lambda rate: found[rate] if math.isfinite(found[rate]) else math.inf)


def rna_like(rows: int, random: np.random.Generator) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Samples with the eight features of cod-rna, made: a folding energy, a length, and frequencies of three bases.

    Two sequences of a length from 50 to 200 have bases of their own frequencies; related ones (a third) share theirs
    and fold with less energy for their length.

    Args:
        rows: how many.
        random: source of it.

    Returns:
        float64[rows, 8] and the labels -1 and 1.
    """
    related = random.random(rows) < 1 / 3
    length = random.integers(50, 201, rows)
    first = random.dirichlet(np.full(4, 20.0), rows)
    second = np.where(related[:, None], first, random.dirichlet(np.full(4, 20.0), rows))
    bases = [random.multinomial(length, p)[:, :3] / length[:, None] for p in (first, second)]
    energy = -length * (2.0 + 1.5 * related) + 40.0 * random.standard_normal(rows)
    return np.column_stack([energy, length, *bases]), np.where(related, 1.0, -1.0)
