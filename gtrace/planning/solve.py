"""One codec for every tensor: the least error under a budget of bits, or the least bits under a bound on the error.

Both are the multiple-choice knapsack problem. Along the lower convex hull of each tensor's points one Lagrange
multiplier, the price of a bit, chooses for all tensors at once (Shoham and Gersho, 1988); filling the budget with a
fraction of the one step that no longer fits gives the continuous lower bound (Sinha and Zoltners, 1979). The rounding
to whole options is then repaired: two tensors at a time change their options while that helps; then options with a
reduced cost above the gap cannot be in a better plan and are dropped, and the few that remain are searched through
their Pareto front.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: limit of the search on partial plans times tensors; below it the search is exact
MOST_STATES = 100_000
#: relative gap below which no search is needed
ENOUGH = 1e-4
#: relative slack for sums in another order
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class Choice:
    """An option for each tensor.

    Attributes:
        options: int64[T].
        cost: sum of the costs.
        error: sum of the errors.
        bound: no choice within the budget has less error, even with fractions of options.
        price: error that one more unit of cost saves, at the margin of the bound.
        proved: whether it is proved that no choice within the budget has less error.
    """

    options: NDArray[np.int64]
    cost: float
    error: float
    bound: float
    price: float
    proved: bool

    @property
    def gap(self) -> float:
        """Distance of the error from the bound, relative to the bound; 0 if both are 0."""
        if self.error <= self.bound:
            return 0.0
        return self.error / self.bound - 1 if self.bound > 0 else float("inf")


def hulls(cost: NDArray[np.float64], error: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The lower convex hulls of points float64[T, O], from the least cost to the least error; infinite ones are out.

    The next vertex is the point that saves the most error for its cost; all tensors advance together.

    Returns:
        int64[T, K], the options at the vertices, -1 after the last, and float64[T, K-1], the error that a unit of cost
        saves from a vertex to the next, descending, 0 after the last.
    """
    rows = np.arange(len(cost))
    # The cheapest option; of equal ones the one with the least error.
    cheapest = np.where(cost == cost.min(axis=1, keepdims=True), error, np.inf)
    at = cheapest.argmin(axis=1)
    vertices, slopes = [at], []
    while True:
        with np.errstate(invalid="ignore", divide="ignore"):
            more, saved = cost - cost[rows, at][:, None], error[rows, at][:, None] - error
            rate = np.where((more > 0) & (saved > 0) & np.isfinite(more), saved / more, 0.0)
        best = rate.max(axis=1)
        if not best.any():
            break
        # Of several on one line take the farthest.
        on_line = rate >= best[:, None] * (1 - _ROUNDING)
        nearest = np.where(on_line, more, -np.inf).argmax(axis=1)
        at = np.where(best > 0, nearest, at)
        vertices.append(np.where(best > 0, at, -1))
        slopes.append(best)
    return np.stack(vertices, axis=1), np.stack(slopes, axis=1) if slopes else np.empty((len(cost), 0))


def minimize(
    cost: NDArray[np.float64],
    error: NDArray[np.float64],
    budget: float,
    start: NDArray[np.int64] | None = None,
    *,
    search: bool = True,
) -> Choice | None:
    """The choice with the least error within a budget; None if nothing fits.

    Args:
        cost: float64[T, O], not negative; infinite if a tensor does not have the option.
        error: float64[T, O], not negative.
        budget: limit on the summed costs.
        start: int64[T], a choice within the budget; the result is never worse.
        search: also search for better choices that differ in more than two tensors.
    """
    rows = np.arange(len(cost))
    budget = budget * (1 + _ROUNDING)
    greedy, bound, price = _relaxed(cost, error, budget)
    if greedy is None:
        return None
    best = _swapped(cost, error, budget, greedy)
    if start is not None and error[rows, start].sum() < error[rows, best].sum():
        best = _swapped(cost, error, budget, np.asarray(start, np.int64))
    least = float(error[rows, best].sum())
    proved = least <= bound * (1 + _ROUNDING)
    if search and least > bound * (1 + ENOUGH):
        found, proved = _searched(cost, error, budget, price, bound, least)
        best = best if found is None else found
    total = float(error[rows, best].sum())
    return Choice(best, float(cost[rows, best].sum()), total, min(bound, total), price, proved)


def uniform(cost: NDArray[np.float64], error: NDArray[np.float64], budget: float) -> int | None:
    """The one option for all tensors with the least error within the budget; None if none fits."""
    costs, errors = cost.sum(axis=0), error.sum(axis=0)
    fits = costs <= budget * (1 + _ROUNDING)
    return int(np.where(fits, errors, np.inf).argmin()) if fits.any() else None


def _relaxed(
    cost: NDArray[np.float64], error: NDArray[np.float64], budget: float
) -> tuple[NDArray[np.int64] | None, float, float]:
    """A first choice of whole options, the bound that fractions of them reach, and the price of a bit there."""
    vertices, slopes = hulls(cost, error)
    rows = np.arange(len(cost))
    options = vertices[:, 0].copy()
    spent, lost = float(cost[rows, options].sum()), float(error[rows, options].sum())
    if not spent <= budget:
        return None, lost, 0.0
    tensor, step = np.nonzero(slopes)
    # The order of the steps of a tensor is kept among equal slopes.
    order = np.lexsort((step, -slopes[tensor, step]))
    tensor, step = tensor[order], step[order]
    after, before = vertices[tensor, step + 1], vertices[tensor, step]
    extra = cost[tensor, after] - cost[tensor, before]
    saved = error[tensor, before] - error[tensor, after]
    reached = spent + np.cumsum(extra)
    whole = int(np.searchsorted(reached, budget, side="right"))
    bound, price = lost - float(saved[:whole].sum()), 0.0
    if whole < len(tensor):
        price = float(saved[whole] / extra[whole])
        left = budget - (float(reached[whole - 1]) if whole else spent)
        bound -= price * left
    # Take the steps that fit as a whole, then whatever still fits of other tensors.
    left = budget - spent
    stopped = np.zeros(len(cost), np.bool_)
    for t, option, more in zip(tensor.tolist(), after.tolist(), extra.tolist(), strict=True):
        if not stopped[t] and more <= left:
            options[t] = option
            left -= more
        else:
            stopped[t] = True
    return options, max(bound, 0.0), price


def _swapped(
    cost: NDArray[np.float64], error: NDArray[np.float64], budget: float, options: NDArray[np.int64]
) -> NDArray[np.int64]:
    """A choice that no change of one tensor's option, or of two, improves."""
    rows = np.arange(len(cost))
    options = options.copy()
    while True:
        left = budget - cost[rows, options].sum()
        with np.errstate(invalid="ignore"):
            extra = cost - cost[rows, options][:, None]
            change = error - error[rows, options][:, None]
        up, down = (np.nonzero(np.isfinite(extra) & sign) for sign in (change < 0, extra < 0))
        # Keeping an option is a change that costs and frees nothing.
        freed = np.append(-extra[down], 0.0)
        tensors, lost = np.append(down[0], -1), np.append(change[down], 0.0)
        order = np.argsort(-freed, kind="stable")
        # The index of the minimum of each prefix.
        lowest = np.minimum.accumulate(lost[order])
        new = np.append(True, lowest[1:] < lowest[:-1])
        best_so_far = np.maximum.accumulate(np.where(new, np.arange(len(lowest)), 0))
        fits = np.searchsorted(-freed[order], left - extra[up], side="right") - 1
        partner = order[best_so_far[fits]]
        total = np.where((fits >= 0) & (tensors[partner] != up[0]), change[up] + lost[partner], 0.0)
        if not len(total) or total.min() >= -_ROUNDING * error[rows, options].sum():
            return options
        k = int(total.argmin())
        options[up[0][k]] = up[1][k]
        if partner[k] < len(down[0]):
            options[tensors[partner[k]]] = down[1][partner[k]]


def _searched(
    cost: NDArray[np.float64],
    error: NDArray[np.float64],
    budget: float,
    price: float,
    bound: float,
    least: float,
) -> tuple[NDArray[np.int64] | None, bool]:
    """A choice with less error than ``least`` if there is one, and whether no other has less.

    With prices the error of a choice is bound + its reduced costs + price * unused budget, so a choice
    with reduced costs above the gap is not better.
    """
    priced = error + price * cost
    reduced = priced - priced.min(axis=1, keepdims=True)
    gap = (least - bound) * (1 + 1e-9)
    kept = [np.flatnonzero(row <= gap) for row in reduced]
    # Tensors with one option add the same to every choice; the widest ranges come first, so that fronts are short.
    order = sorted(range(len(cost)), key=lambda t: len(kept[t]))
    cheapest = np.array([cost[t, kept[t]].min() for t in order])
    rest = np.append(np.cumsum(cheapest[::-1])[::-1], 0.0)
    costs, errors, surplus = np.zeros(1), np.zeros(1), np.zeros(1)
    trail: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    proved, most = True, max(50, MOST_STATES // len(cost))
    for place, t in enumerate(order):
        options = kept[t]
        sums = [
            (have[:, None] + values[t, options]).ravel()
            for have, values in ((costs, cost), (errors, error), (surplus, reduced))
        ]
        fits = np.flatnonzero((sums[0] + rest[place + 1] <= budget) & (sums[2] <= gap))
        if not len(fits):
            return None, proved
        fits = fits[np.lexsort((sums[1][fits], sums[0][fits]))]
        # Keep more expensive partial plans only if they have less error than all cheaper ones.
        lowest = np.minimum.accumulate(sums[1][fits])
        fits = fits[np.append(True, lowest[1:] < lowest[:-1])]
        if len(fits) > most:
            # Keep half of the best so far, and half spread over the costs, for the tensors to come.
            best = np.argsort(sums[2][fits], kind="stable")[: most // 2]
            fits = fits[np.union1d(best, np.linspace(0, len(fits) - 1, most // 2).astype(np.int64))]
            proved = False
        costs, errors, surplus = (values[fits] for values in sums)
        trail.append((fits // len(options), options[fits % len(options)]))
    at = int(errors.argmin())
    if errors[at] >= least:
        return None, proved
    chosen = np.empty(len(cost), np.int64)
    for t, (parents, options) in zip(reversed(order), reversed(trail), strict=True):
        chosen[t] = options[at]
        at = int(parents[at])
    return chosen, proved
