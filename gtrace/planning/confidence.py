"""How firm a plan is: the same choice over resampled steps, and what the plan would have lost there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.planning.curves import Curves

RESAMPLES = 100
#: the middle 90 % of the resamples
_ENDS = (0.05, 0.95)
#: halvings of the logarithm of the price, from 2^60 on either side
_HALVINGS = 30


@dataclass(frozen=True, slots=True)
class Confidence:
    """What resampling the steps says, with replacement and in blocks of neighbours (Künsch, 1989).

    Attributes:
        resamples: how many.
        block: steps in a block.
        stable: float64[T], share of the resamples in which the price of a bit picks the same codec as with all steps.
        bits_low: float64[T], 5th percentile of the bits per coordinate that it picks.
        bits_high: float64[T], 95th.
        regret: 5th, 50th and 95th percentile of the plan's error over the least that any plan of its bits could have
            had on the resampled steps, minus 1.
        gain: the same of 1 - plan's error over that of the best uniform choice; None without one.
    """

    resamples: int
    block: int
    stable: NDArray[np.float64]
    bits_low: NDArray[np.float64]
    bits_high: NDArray[np.float64]
    regret: tuple[float, float, float]
    gain: tuple[float, float, float] | None


def resampled(steps: int, resamples: int, seed: int) -> tuple[NDArray[np.float64], int]:
    """How often each step is drawn, float64[R, S], and the length of the blocks of neighbours that are drawn."""
    block = max(1, round(steps ** (1 / 3)))
    starts = np.random.default_rng(seed).integers(0, steps, (resamples, -(-steps // block)))
    drawn = ((starts[:, :, None] + np.arange(block)) % steps).reshape(resamples, -1)[:, :steps]
    counts = np.zeros((resamples, steps))
    np.add.at(counts, (np.arange(resamples)[:, None], drawn), 1.0)
    return counts, block


def bootstrap(
    curves: Curves,
    options: NDArray[np.int64],
    uniform: int | None,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Confidence | None:
    """Plan again on resampled steps; None where there is only one step.

    Args:
        curves: of the tensors or groups.
        options: int64[T], the plan.
        uniform: the option that it is compared with.
        resamples: how many.
        seed: of the resampling.
    """
    if len(curves.steps) < 2:
        return None
    counts, block = resampled(len(curves.steps), resamples, seed)
    rows = np.arange(len(curves.tensors))
    all_cost, all_error = curves.means()
    usual = _priced(all_cost[None], all_error[None], all_cost[rows, options].sum()[None])[0][0]
    cost, error = curves.means(counts)
    spent, lost = (values[:, rows, options].sum(axis=1) for values in (cost, error))
    picked, bound = _priced(cost, error, spent)
    bits = np.take_along_axis(cost, picked[:, :, None], axis=2)[:, :, 0] / np.maximum(1, curves.sizes)
    low, high = np.quantile(bits, _ENDS, axis=0)
    gain = None
    if uniform is not None:
        other = error[:, :, uniform].sum(axis=1)
        gain = _quantiles(1 - np.divide(lost, other, out=np.ones_like(lost), where=other > 0))
    regret = np.divide(lost, bound, out=np.ones_like(lost), where=bound > 0) - 1
    return Confidence(resamples, block, (picked == usual).mean(axis=0), low, high, _quantiles(regret), gain)


def _priced(
    cost: NDArray[np.float64], error: NDArray[np.float64], budget: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """What the price of a bit picks within budgets float64[R], int64[R, T], and lower bounds of the error, float64[R].

    The price is bisected: the dearer a bit, the fewer are bought.
    """
    # In units in which both axes are of order one, the price is too.
    scale = np.where(np.isfinite(error), error, 0.0).max() / max(float(budget.max()), 1e-300)
    low, high = np.full(len(cost), -60.0), np.full(len(cost), 60.0)
    finite = np.where(np.isfinite(cost), cost, 0.0)
    bound = np.zeros(len(cost))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        price = scale * np.exp2(middle)
        priced = error + price[:, None, None] * finite
        picked = priced.argmin(axis=2)
        spent = np.take_along_axis(finite, picked[:, :, None], axis=2).sum(axis=(1, 2))
        # Every price gives a lower bound; the best is at the margin.
        bound = np.maximum(bound, priced.min(axis=2).sum(axis=1) - price * budget)
        affordable = spent <= budget * (1 + 1e-12)
        high, low = np.where(affordable, middle, high), np.where(affordable, low, middle)
    priced = error + (scale * np.exp2(high))[:, None, None] * finite
    return priced.argmin(axis=2), bound


def _quantiles(values: NDArray[np.float64]) -> tuple[float, float, float]:
    low, middle, high = np.quantile(values, (_ENDS[0], 0.5, _ENDS[1])).tolist()
    return low, middle, high
