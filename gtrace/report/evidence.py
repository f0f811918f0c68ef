"""How sure the comparison of methods is: paired over steps, in thirds of training, and layer by layer.

Two methods are compared at equal bits on the same tensors and steps. The two configurations of each that bracket the
wanted bits are mixed as in the headline, in logarithms; the mix is the same in every step. The difference of the two
methods in one step is one value, and these values are averaged with the part of training that the step stands for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gtrace.report.comparison import at_bits
from gtrace.report.ranking import LEVEL, decisive, ranked
from gtrace.report.statistics import Interval, bootstrap, holm, thirds
from gtrace.types import Key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from gtrace.report.analysis import Family
    from gtrace.report.comparison import AtBits

#: Holm's p-value below which two methods are said to differ.
SIGNIFICANT = 0.05

#: Every resampling of a report draws the same blocks, so that all comparisons see the same steps.
KEY = Key.derive(0, tensor="report", role="sample")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two methods, or two configurations, on the same tensors and steps. Ratios are ``first / second``.

    Attributes:
        first: label of the family or spec of the configuration in the numerator.
        second: of the one in the denominator.
        bits: measured bits per coordinate of both, NaN where two configurations are compared as they are.
        total_ratio: of the relative variances of the headline (errors and energies summed over steps).
        by_elements: log of the ratio in the average step; in each step errors are summed over all elements.
        by_layers: log of the ratio in the average step; in each step the mean over layers of their logs.
        p_holm: p-value of ``by_elements`` corrected for all comparisons of the sweep, NaN where there is none.
        thirds: third of training -> ratio in its average step, by elements.
        better: part of training in which ``first`` makes less error, by elements; NaN where nothing is known.
    """

    first: str
    second: str
    bits: float
    total_ratio: float
    by_elements: Interval
    by_layers: Interval
    p_holm: float
    thirds: dict[str, float]
    better: float

    @property
    def differs(self) -> bool:
        """Whether the difference is beyond the noise of steps, corrected for the number of comparisons."""
        return self.p_holm < SIGNIFICANT

    @property
    def ratio(self) -> float:
        """Ratio of relative variances in the average step, by elements."""
        return math.exp(self.by_elements.estimate)


@dataclass(frozen=True, slots=True)
class Phase:
    """A third of training by step number.

    Attributes:
        name: ``early``, ``middle`` or ``late``.
        first: first captured step of it.
        last: last captured step of it.
        steps: captured steps.
        relative_variance: (configurations,) NaN where not measured.
        bits: (configurations,) measured bits per coordinate.
        at: (families, targets) relative variance at equal bits of this third, NaN where it cannot be compared.
    """

    name: str
    first: int
    last: int
    steps: int
    relative_variance: NDArray[np.float64]
    bits: NDArray[np.float64]
    at: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """A tensor where another method than the leader makes less error at equal bits of this tensor.

    Attributes:
        tensor: name.
        bits: measured bits per coordinate of this tensor.
        best: label of the method with the least error there.
        leader: label of the method that leads over all tensors.
        ratio: relative variance of ``best`` over that of ``leader``, summed over steps.
        interval: log of the ratio in the average step.
        p_holm: corrected for all tensors and methods that could have been best.
    """

    tensor: str
    bits: float
    best: str
    leader: str
    ratio: float
    interval: Interval
    p_holm: float

    @property
    def sure(self) -> bool:
        """Whether the difference is beyond the noise of steps."""
        return self.p_holm < SIGNIFICANT and self.interval.estimate < 0


@dataclass(frozen=True, slots=True)
class StepTable:
    """Logarithms of relative variances of a sweep, NaN for holes.

    Attributes:
        steps: (S,) ascending.
        weights: (S,) part of training of each.
        by_elements: (C, S) over all elements of a step.
        by_layer: (C, L, S) of each tensor alone.
        error: (C, L, S) squared errors themselves.
        energy: (C, L, S) squared norms of the gradients.
        variance: (C,) the headline's, over everything.
        bits: (C,) measured bits.
        layer_variance: (C, L) of each tensor over all steps.
        layer_bits: (C, L) measured bits of each tensor.
    """

    steps: NDArray[np.int64]
    weights: NDArray[np.float64]
    by_elements: NDArray[np.float64]
    by_layer: NDArray[np.float64]
    error: NDArray[np.float64]
    energy: NDArray[np.float64]
    variance: NDArray[np.float64]
    bits: NDArray[np.float64]
    layer_variance: NDArray[np.float64]
    layer_bits: NDArray[np.float64]

    def mix(self, at: AtBits, bits: NDArray[np.float64]) -> list[tuple[int, float]]:
        """Configurations that stand for a method at a target, with their parts; ``bits`` (C,) tell the parts."""
        if at.lower < 0:
            return []
        if at.lower == at.upper:
            return [(at.lower, 1.0)]
        share = float((at.target - bits[at.lower]) / (bits[at.upper] - bits[at.lower]))
        return [(at.lower, 1 - share), (at.upper, share)]

    def difference(self, first: Sequence[tuple[int, float]], second: Sequence[tuple[int, float]]) -> Pair:
        """Two mixes of configurations, step by step."""
        parts = [*first, *((c, -part) for c, part in second)]
        elements = np.sum([part * self.by_elements[c] for c, part in parts], axis=0)
        layers = np.sum([part * self.by_layer[c] for c, part in parts], axis=0)
        return Pair(elements, known_means(layers))


@dataclass(frozen=True, slots=True)
class Pair:
    """(S,) differences of logs in each step: over all elements, and the mean over layers."""

    elements: NDArray[np.float64]
    layers: NDArray[np.float64]


def known_means(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """(S,) means over the first axis of (L, S) of what is a number, NaN where nothing is."""
    known = np.isfinite(values)
    count = known.sum(axis=0)
    out = np.full(values.shape[1], np.nan)
    np.divide(np.where(known, values, 0.0).sum(axis=0), count, out=out, where=count > 0)
    return out


def compare_families(table: StepTable, families: Sequence[Family], targets: Sequence[float]) -> tuple[Comparison, ...]:
    """The leader at each target against every other family there, Holm's correction over all of them."""
    found = []
    for k, target in enumerate(targets):
        order = ranked(families, k)
        for other in order[1:]:
            mixes = [table.mix(family.at[k], table.bits) for family in (order[0], other)]
            if other.at[k].variance > 0:
                ratio = order[0].at[k].variance / other.at[k].variance
                found.append((order[0].label, other.label, target, ratio, table.difference(*mixes)))
    return _judged(table, found)


def compare_configurations(
    table: StepTable, specs: Sequence[str], pairs: Sequence[tuple[int, int]]
) -> tuple[Comparison, ...]:
    """Pairs of configurations (indices) as they are, at the bits that each takes."""
    found = []
    for a, b in pairs:
        ratio = float(table.variance[a] / table.variance[b]) if table.variance[b] > 0 else math.nan
        found.append((specs[a], specs[b], math.nan, ratio, table.difference([(a, 1.0)], [(b, 1.0)])))
    return _judged(table, found)


def _judged(table: StepTable, found: Sequence[tuple[str, str, float, float, Pair]]) -> tuple[Comparison, ...]:
    intervals = [bootstrap(pair.elements, table.weights, KEY) for *_, pair in found]
    corrected = holm([interval.p for interval in intervals])
    masks = thirds(table.steps)
    return tuple(
        Comparison(
            first=first,
            second=second,
            bits=bits,
            total_ratio=ratio,
            by_elements=interval,
            by_layers=bootstrap(pair.layers, table.weights, KEY),
            p_holm=float(p),
            thirds={name: _mean_ratio(pair.elements[mask], table.weights[mask]) for name, mask in masks},
            better=_part(pair.elements, table.weights),
        )
        for (first, second, bits, ratio, pair), interval, p in zip(found, intervals, corrected, strict=True)
    )


def _mean_ratio(logs: NDArray[np.float64], weights: NDArray[np.float64]) -> float:
    known = np.isfinite(logs)
    total = float(weights[known].sum())
    return math.exp(float(logs[known] @ weights[known]) / total) if total > 0 else math.nan


def _part(logs: NDArray[np.float64], weights: NDArray[np.float64]) -> float:
    total = float(weights[np.isfinite(logs)].sum())
    return float(weights[logs < 0].sum()) / total if total > 0 else math.nan


def layer_choices(
    table: StepTable, families: Sequence[Family], targets: Sequence[float], tensors: Sequence[str]
) -> tuple[tuple[str, ...], tuple[LayerChoice, ...]]:
    """The best method of each tensor at the decisive target, at equal bits of the tensor itself.

    Returns:
        its label for each tensor, empty where fewer than two methods can be compared, and the tensors where it is
        another one than the leader over all tensors, by more than :data:`LEVEL`.
    """
    k = decisive(families, targets)
    order = ranked(families, k) if k >= 0 else []
    if len(order) < 2:
        return ("",) * len(tensors), ()
    leader, tested = order[0], 0
    labels = []
    found: list[tuple[str, str, float, Interval]] = []
    for place, tensor in enumerate(tensors):
        own = _layer_mixes(table, order, targets[k], place)
        best = min(own, key=lambda label: own[label][0]) if len(own) > 1 else ""
        labels.append(best)
        tested += max(len(own) - 1, 0)
        if leader.label not in own or len(own) < 2:
            continue
        ratio = own[best][0] / own[leader.label][0]
        if best == leader.label or ratio > 1 / (1 + LEVEL):
            continue
        logs = table.by_layer[:, place]
        parts = [*own[best][1], *((c, -part) for c, part in own[leader.label][1])]
        differences = np.sum([part * logs[c] for c, part in parts], axis=0)
        found.append((tensor, best, ratio, bootstrap(differences, table.weights, KEY)))
    # Every method of every tensor could have been the best one, so all of them count.
    unused = np.ones(max(tested - len(found), 0))
    corrected = holm(np.concatenate([[interval.p for *_, interval in found], unused]))
    choices = tuple(
        LayerChoice(tensor, float(targets[k]), best, leader.label, ratio, interval, float(p))
        for (tensor, best, ratio, interval), p in zip(found, corrected, strict=False)
    )
    return tuple(labels), choices


def _layer_mixes(
    table: StepTable, families: Sequence[Family], target: float, place: int
) -> dict[str, tuple[float, list[tuple[int, float]]]]:
    """label -> relative variance of one tensor at equal bits of this tensor, and the mix that makes it."""
    found = {}
    bits = table.layer_bits[:, place]
    for family in families:
        members = list(family.members)
        local = at_bits(bits[members].tolist(), table.layer_variance[members, place].tolist(), target)
        if math.isfinite(local.variance) and local.variance > 0:
            lower, upper = members[local.lower], members[local.upper]
            share = 0.0 if lower == upper else float((target - bits[lower]) / (bits[upper] - bits[lower]))
            mix = [(lower, 1 - share)] + ([(upper, share)] if lower != upper else [])
            found[family.label] = (local.variance, mix)
    return found
