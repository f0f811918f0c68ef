"""Makes a plan from rate-distortion points and a budget, estimates its stability, and proposes finer grids.

Stability: the same choice over resampled steps, and the plan's excess error there. Finer grids: a plan of whole
codecs misses the lower bound by the unused part of the budget, if no tensor has a step that small. The tensors with
most of the bits or of the error have the largest steps, so these get more grids and bucket sizes around the chosen
ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gtrace.codecs.spec import codec as build_codec
from gtrace.errors import UsageError
from gtrace.planning.plan import ExchangeRate, Firmness, Plan, PlanTotals, Point, TensorPlan, UniformChoice
from gtrace.planning.solve import Choice, minimize, uniform

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from gtrace.codecs import Codec
    from gtrace.planning.curves import Curves

#: number of budgets of the frontier
_POINTS = 12


@dataclass(frozen=True, slots=True)
class Budget:
    """The limit of a plan.

    Attributes:
        kind: ``bits``: mean measured bits per coordinate; ``error``: relative error of the whole gradient.
        value: the limit.
        text: the user's text.
    """

    kind: Literal["bits", "error"]
    value: float
    text: str


@dataclass(frozen=True, slots=True)
class _Problem:
    """The means of all steps. Units: bits of all tensors together, relative error of the whole gradient."""

    cost: NDArray[np.float64]
    error: NDArray[np.float64]
    elements: int

    def limited(self, budget: Budget) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
        """What is limited, what is minimized, and the limit."""
        if budget.kind == "bits":
            return self.cost, self.error, budget.value * self.elements
        return self.error, self.cost, budget.value

    def solve(self, budget: Budget, alone: int | None, *, search: bool = True) -> Choice | None:
        start = None if alone is None else self.everywhere(alone)
        return minimize(*self.limited(budget), start, search=search)

    def everywhere(self, option: int) -> NDArray[np.int64]:
        return np.full(len(self.cost), option)

    def of(self, options: NDArray[np.int64]) -> tuple[float, float]:
        """Bits per coordinate and relative error of a choice."""
        rows = np.arange(len(self.cost))
        return float(self.cost[rows, options].sum()) / self.elements, float(self.error[rows, options].sum())


def make_plan(
    curves: Curves,
    budget: Budget,
    *,
    name: str,
    provenance: Mapping[str, Any],
    objective: str = "error",
    groups: Mapping[str, str] | None = None,
    one_for_all: bool = False,
    seed: int = 0,
) -> Plan:
    """The plan with the least error within a budget of bits, or with the least bits within one of the error.

    It is never worse than the best uniform choice within the budget, from which the search may start.

    Args:
        curves: bits of every codec on every tensor, and what the objective adds up: errors, or costs in their place.
        budget: of bits or error.
        name: name of the plan.
        provenance: facts about its origin, plain values.
        objective: description of the error, for readers.
        groups: tensor -> group; tensors of a group have the same codec.
        one_for_all: choose the best uniform codec instead.
        seed: seed of the resampled steps.

    Raises:
        UsageError: nothing fits into the budget, or a tensor has no option.
    """
    units = curves.grouped(groups or {})
    problem = _Problem(*units.means(), units.elements)
    if not (math.isfinite(budget.value) and budget.value > 0):
        raise UsageError(f"{budget.text}: a budget is a positive number")
    lacking = [name for name, row in zip(units.tensors, problem.cost, strict=True) if not np.isfinite(row).any()]
    if lacking:
        raise UsageError(f"plan: no codec has numbers for {lacking[0]} at every step; choose other --steps or codecs")
    alone = uniform(*problem.limited(budget))
    if one_for_all and alone is None:
        raise UsageError(f"{budget.text}: no codec fits all tensors into it; leave out --uniform, or widen it")
    choice = problem.solve(budget, alone, search=not one_for_all)
    if choice is None:
        raise UsageError(_too_tight(problem, units, budget))
    options = problem.everywhere(alone) if one_for_all and alone is not None else choice.options
    bits, error = problem.of(options)
    bound = choice.bound / problem.elements if budget.kind == "error" else choice.bound
    totals = PlanTotals(
        elements=units.elements,
        bits=bits,
        ratio=32 / bits if bits else 0.0,
        error=error,
        bound=bound,
        gap=max(0.0, (bits if budget.kind == "error" else error) / bound - 1) if bound > 0 else 0.0,
        optimal=choice.proved and not one_for_all,
    )
    points, (sure, spread) = _frontier(problem), bootstrap(units, options, alone, seed=seed)
    known = np.isfinite(problem.cost).all(axis=0) & np.isfinite(problem.error).all(axis=0)
    each = np.flatnonzero(known).tolist()
    uniforms = [UniformChoice(curves.codecs[o], *problem.of(problem.everywhere(o))) for o in each]
    # A tensor that the plan does not know gets the best uniform codec with no more bits than the plan.
    default = uniform(problem.cost, problem.error, bits * problem.elements) if alone is None else alone
    return Plan(
        name=name,
        objective=objective,
        budget=budget.text,
        default=curves.codecs[-1 if default is None else default],
        totals=totals,
        uniform=None if alone is None else _against(problem, curves, alone),
        exchange=_exchange(problem, budget, bits, error, choice),
        confidence=sure,
        frontier=tuple(Point(*problem.of(one)) for one in points),
        uniforms=tuple(sorted(uniforms, key=lambda one: one.bits)),
        tensors=_tensors(curves, units, options, spread, points),
        provenance=dict(provenance),
    )


def choose(curves: Curves, budget: Budget, groups: Mapping[str, str] | None = None) -> tuple[Curves, Choice | None]:
    """The tensors or groups, and the choice of :func:`make_plan` alone."""
    units = curves.grouped(groups or {})
    problem = _Problem(*units.means(), units.elements)
    return units, problem.solve(budget, uniform(*problem.limited(budget)))


def _too_tight(problem: _Problem, curves: Curves, budget: Budget) -> str:
    values = problem.cost if budget.kind == "bits" else problem.error
    at = values.argmin(axis=1)
    least = float(values.min(axis=1).sum())
    if budget.kind == "error":
        return f"{budget.text}: the least error that these codecs reach is {least:.3g}; allow more bits or codecs"
    worst = int(values.min(axis=1).argmax())
    return (
        f"{budget.text}: these codecs take at least {least / problem.elements:.3g} bits per value, "
        f"{curves.tensors[worst]} with {curves.codecs[at[worst]]} among them; allow more, or give --bits or --methods "
        "that take fewer"
    )


def _against(problem: _Problem, curves: Curves, alone: int) -> UniformChoice:
    bits, error = problem.of(problem.everywhere(alone))
    planned = problem.solve(Budget("bits", bits, ""), alone)
    assert planned is not None, "the uniform choice itself fits"
    return UniformChoice(curves.codecs[alone], bits, error, planned.error)


def _exchange(problem: _Problem, budget: Budget, bits: float, error: float, choice: Choice) -> ExchangeRate:
    """The change of the error for one bit per coordinate more or less."""
    found = []
    for other in (bits + 1, bits - 1):
        solved = problem.solve(Budget("bits", other, ""), None, search=False) if other > 0 else None
        found.append(solved.error / error if solved is not None and error > 0 else None)
    price = choice.price if budget.kind == "bits" else 1 / choice.price if choice.price else 0.0
    return ExchangeRate(found[0], found[1], price * problem.elements)


def _frontier(problem: _Problem) -> list[NDArray[np.int64]]:
    """Choices from the cheapest to slightly above the most expensive uniform one that is not exact."""
    rows = np.arange(len(problem.cost))
    cheapest = problem.cost.argmin(axis=1)
    low = float(problem.cost[rows, cheapest].sum())
    totals = problem.cost.sum(axis=0)
    lossy = totals[np.isfinite(totals) & (problem.error.sum(axis=0) > 0)]
    high = float(lossy.max()) if len(lossy) else low
    if not 0 < low < high:
        return [cheapest]
    found = []
    for budget in np.geomspace(low, high, _POINTS).tolist():
        alone = uniform(problem.cost, problem.error, budget)
        start = None if alone is None else problem.everywhere(alone)
        choice = minimize(problem.cost, problem.error, budget, start, search=False)
        assert choice is not None, "the cheapest choice fits"
        found.append(choice.options)
    return found


def _tensors(
    curves: Curves,
    units: Curves,
    options: NDArray[np.int64],
    spread: NDArray[np.float64] | None,
    points: list[NDArray[np.int64]],
) -> tuple[TensorPlan, ...]:
    """Every tensor's codec; for a group, each member with its own bits and error."""
    cost, error = curves.means()
    unit_of = {member: u for u, members in enumerate(units.members) for member in members}
    rows = []
    for t, tensor in enumerate(curves.tensors):
        u, size = unit_of[tensor], max(1, int(curves.sizes[t]))
        stable, low, high = (None, None, None) if spread is None else spread[:, u].tolist()
        rows.append(
            TensorPlan(
                tensor=tensor,
                codec=curves.codecs[options[u]],
                elements=int(curves.sizes[t]),
                bits=float(cost[t, options[u]]) / size,
                error=float(error[t, options[u]]),
                stable=stable,
                bits_low=low,
                bits_high=high,
                group=units.tensors[u] if units.members[u] != (units.tensors[u],) else "",
                at_frontier=tuple(float(cost[t, one[u]]) / size for one in points),
            )
        )
    return tuple(rows)


RESAMPLES = 100
#: the middle 90 % of the resamples
_ENDS = (0.05, 0.95)
#: halvings of the logarithm of the price, from 2^60 on either side
_HALVINGS = 30


def resampled(steps: int, resamples: int, seed: int) -> tuple[NDArray[np.float64], int]:
    """How often each step is drawn, float64[R, S], and the length of the drawn blocks of neighbors."""
    block = max(1, round(steps ** (1 / 3)))
    starts = np.random.default_rng(seed).integers(0, steps, (resamples, -(-steps // block)))
    drawn = ((starts[:, :, None] + np.arange(block)) % steps).reshape(resamples, -1)[:, :steps]
    counts = np.zeros((resamples, steps))
    np.add.at(counts, (np.arange(resamples)[:, None], drawn), 1.0)
    return counts, block


def bootstrap(
    curves: Curves, options: NDArray[np.int64], uniform: int | None, *, seed: int = 0
) -> tuple[Firmness | None, NDArray[np.float64] | None]:
    """Plan again on resampled steps, drawn with replacement in blocks of neighbors (Künsch, 1989).

    Args:
        curves: curves of the tensors or groups.
        options: int64[T], the plan.
        uniform: the option for comparison.

    Returns:
        The plan over the resamples, and float64[3, T]: the share of them in which the price of a bit picks the same
        codec as with all steps, and the 5th and the 95th percentile of the bits per coordinate that it picks. None
        if there is only one step.
    """
    if len(curves.steps) < 2:
        return None, None
    counts, block = resampled(len(curves.steps), RESAMPLES, seed)
    rows = np.arange(len(curves.tensors))
    all_cost, all_error = curves.means()
    usual = _priced(all_cost[None], all_error[None], all_cost[rows, options].sum()[None])[0][0]
    cost, error = curves.means(counts)
    spent, lost = (values[:, rows, options].sum(axis=1) for values in (cost, error))
    picked, bound = _priced(cost, error, spent)
    bits = np.take_along_axis(cost, picked[:, :, None], axis=2)[:, :, 0] / np.maximum(1, curves.sizes)
    gain = None
    if uniform is not None:
        other = error[:, :, uniform].sum(axis=1)
        gain = _quantiles(1 - np.divide(lost, other, out=np.ones_like(lost), where=other > 0))
    regret = np.divide(lost, bound, out=np.ones_like(lost), where=bound > 0) - 1
    spread = np.stack([(picked == usual).mean(axis=0), *np.quantile(bits, _ENDS, axis=0)])
    return Firmness(RESAMPLES, block, _quantiles(regret), gain), spread


def _priced(
    cost: NDArray[np.float64], error: NDArray[np.float64], budget: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The choice by the price of a bit for budgets float64[R], int64[R, T], and lower bounds of the error, float64[R].

    The price is bisected: a higher price buys fewer bits.
    """
    # Scale both axes to order one, so that the price is of order one too.
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


#: gap above which finer options are worth their time
WORTH_REFINING = 0.005
#: limit on the number of new choices
ROUNDS = 4
#: number of tensors or groups that get finer grids, and of grids for each
_MOST_UNITS, _MOST_GRIDS = 4, 12
#: distance from the chosen grid
_SPAN = 1.3
_BUCKETS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, None)


def finer(units: Curves, options: NDArray[np.int64]) -> dict[tuple[str, ...], list[Codec]]:
    """Tensors or groups -> codecs to measure on them, around those that were chosen."""
    rows = np.arange(len(options))
    spent, lost = (values[rows, options] for values in units.means())
    share = spent / spent.sum() + lost / max(lost.sum(), np.finfo(np.float64).tiny)
    found = {}
    for u in np.argsort(-share, kind="stable")[:_MOST_UNITS].tolist():
        known = {spec for spec, has in zip(units.codecs, np.isfinite(units.error[u]).any(axis=0), strict=True) if has}
        near = [one for one in _around(build_codec(units.codecs[options[u]])) if str(one) not in known]
        if near:
            found[units.members[u]] = near
    return found


def _around(chosen: Codec) -> list[Codec]:
    """Uniform grids around a codec with a uniform grid; empty for others."""
    given = chosen.parameters
    if not {"bits", "steps", "zero", "bucket_size"} <= set(given) or not given["zero"]:
        return []
    steps = given["steps"] or (1 << given["bits"] - 1) - 1
    counts = np.unique(np.geomspace(max(1, steps / _SPAN), steps * _SPAN + 1, _MOST_GRIDS).round().astype(int))
    found = []
    for count in counts.tolist():
        size = count.bit_length()
        # No steps where the bits imply them. The codec's other settings stay: norm, coder, tail.
        grid: dict[str, Any] = {"bits": max(2, size + 1), "steps": None if count + 1 == 1 << size else count}
        found += [replace(chosen, **grid | {"bucket_size": one}) for one in _BUCKETS if size < 15]
    return found
