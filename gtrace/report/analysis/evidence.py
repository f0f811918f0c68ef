"""How sure the comparison of methods is: paired over steps, in thirds of training, and layer by layer.

Two methods are compared at equal bits on the same tensors and steps. The two configurations of each that bracket the
wanted bits are mixed as in the headline, in logarithms; the mix is the same in every step. The ratio is that of the
headline, of sums over all compared cells; how much each step adds to it is what its interval is made of.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gtrace.report.analysis.cells import divide
from gtrace.report.analysis.families import LEVEL, Family, Mix, all_at_bits, curves_of, decisive, ranked
from gtrace.report.statistics import Interval, bootstrap, holm, thirds
from gtrace.types import Key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gtrace.kernels import Flags, Floats, Ints


#: Holm's p-value below which two methods are said to differ.
SIGNIFICANT = 0.05
#: Every resampling of a report draws the same blocks, so that all comparisons see the same steps.
KEY = Key.derive(0, tensor="report", role="sample")


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """Two methods, or two configurations, on the same tensors and steps. Ratios are ``first / second``.

    Every ratio is one of sums over steps, of the errors that methods are ranked by.

    Attributes:
        first: label of the family or spec of the configuration in the numerator.
        second: of the one in the denominator.
        bits: measured bits per coordinate of both, NaN where two configurations are compared as they are.
        by_elements: the ratio of the headline: errors are summed over all elements and steps.
        by_layers: the ratio, layers equally weighted: the geometric mean over layers of their own ratios.
        p_holm: p-value of ``by_elements`` corrected for all comparisons of the sweep, NaN without one.
        thirds: third of training -> ratio in it, by elements.
        better: part of training in which ``first`` has less error, by elements; NaN where nothing is known.
    """

    first: str
    second: str
    bits: float
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
        """Ratio of errors, by elements."""
        return self.by_elements.estimate


@dataclass(frozen=True, slots=True)
class Phase:
    """A third of training by step number.

    Attributes:
        name: ``early``, ``middle`` or ``late``.
        steps: captured steps.
        relative_variance: (configurations,) the error that methods are ranked by, NaN where not measured.
        bits: (configurations,) measured bits per coordinate.
        at: (families, targets) that error at equal bits of this third, NaN if it cannot be compared.
    """

    name: str
    first: int
    last: int
    steps: int
    relative_variance: Floats
    bits: Floats
    at: Floats


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """A tensor where another method than the leader makes less error at equal bits of this tensor.

    Attributes:
        bits: measured bits per coordinate of this tensor.
        best: label of the method with the least error there.
        leader: label of the method that leads over all tensors.
        ratio: error of ``best`` over that of ``leader``, summed over steps.
        interval: of the ratio.
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
        return self.p_holm < SIGNIFICANT and self.interval.estimate < 1


@dataclass(frozen=True, slots=True)
class StepTable:
    """Errors of a sweep step by step, NaN for holes.

    Attributes:
        steps: (S,) ascending.
        weights: (S,) part of training of each.
        whole_error: (C, S) squared errors over all elements of a step, those of the whole model too.
        whole_energy: (C, S) squared norms of the gradients, likewise.
        error: (C, L, S) squared errors of each tensor.
        energy: (C, L, S) squared norms of the gradients.
        bits: (C,) measured bits.
        layer_variance: (C, L) of each tensor over all steps.
        layer_bits: (C, L) measured bits of each tensor.
        noun: what each of the S is: a step, or the window of steps that ends there.
    """

    steps: Ints
    weights: Floats
    whole_error: Floats
    whole_energy: Floats
    error: Floats
    energy: Floats
    bits: Floats
    layer_variance: Floats
    layer_bits: Floats
    noun: str = "step"

    def relative(self) -> Floats:
        """(C, S) relative variance of each step, over all elements."""
        return divide(self.whole_error, self.whole_energy, self.whole_energy > 0)

    def interval(self, logs: Floats) -> Interval:
        """The ratio that has this logarithm (S,), with its interval over steps."""
        return bootstrap(logs, self.weights, KEY, self.noun).exp()

    def alone(self, parts: Mix) -> Floats:
        """(S,) the log of each step's own ratio, over all elements."""
        with np.errstate(divide="ignore", invalid="ignore"):
            apart = np.sum([part * np.log(self.relative()[c]) for c, part in parts], axis=0)
        return np.where(np.isfinite(apart), apart, np.nan)

    def by_layers(self, parts: Mix) -> Floats:
        """(S,) the mean over layers of the logs of their own ratios."""
        layers = [self.log_ratio(parts, place) for place in range(self.error.shape[1])]
        known = [values for values in layers if np.isfinite(values).any()]
        return np.mean(known, axis=0) if known else np.full(len(self.steps), np.nan)

    def ratio(self, parts: Mix, within: Flags) -> float:
        """Ratio of two mixes over some of the steps (S,), by elements."""
        logs = self.log_ratio(parts, within=within)
        known = np.isfinite(logs)
        return math.exp(float(np.average(logs[known], weights=self.weights[known]))) if known.any() else math.nan

    def log_ratio(self, parts: Mix, place: int | None = None, within: Flags | bool = True) -> Floats:
        """(S,) the log of a ratio of sums over steps, and what each step adds to it: their mean is the log itself.

        ``parts`` are configurations and the powers of their relative variances in the ratio: of all elements or of the
        tensor at ``place``, ``within`` (S,) some of the steps.
        """
        error, energy = self.whole_error, self.whole_energy
        if place is not None:
            error, energy = self.error[:, place], self.energy[:, place]
        chosen = [(part, values) for c, part in parts for part, values in ((part, error[c]), (-part, energy[c]))]
        known = np.logical_and.reduce([np.isfinite(values) for _, values in chosen]) & (self.weights > 0) & within
        out = np.full(len(self.steps), np.nan)
        out[known] = sum(part * log_of_mean(values[known], self.weights[known]) for part, values in chosen)
        return out


def log_of_mean(values: Floats, weights: Floats) -> Floats:
    """(S,) the log of a weighted mean, and to first order what each value adds to it; NaN without a positive mean.

    >>> log_of_mean(np.array([1.0, 3.0]), np.array([0.5, 0.5])).round(4).tolist()  # log(2) - 0.5 and + 0.5
    [0.1931, 1.1931]
    """
    mean = float(values @ weights) / float(weights.sum()) if len(values) else 0.0
    return math.log(mean) + values / mean - 1 if mean > 0 else np.full(len(values), np.nan)


def compare_families(
    table: StepTable, families: Sequence[Family], targets: Sequence[float]
) -> tuple[PairedComparison, ...]:
    """The leader at each target against every other family there, Holm's correction over all of them."""
    found = []
    for k, target in enumerate(targets):
        order = ranked(families, k)
        for other in order[1:]:
            if other.at[k].variance > 0:
                first, second = (family.at[k].mix(table.bits) for family in (order[0], other))
                found.append((order[0].label, other.label, target, first, second))
    return compare_mixes(table, found)


def compare_mixes(table: StepTable, found: Sequence[tuple[str, str, float, Mix, Mix]]) -> tuple[PairedComparison, ...]:
    """Pairs of labels, with the bits at which they are compared and the mix that stands for each."""
    ratios = [over(one, other) for _, _, _, one, other in found]
    intervals = [table.interval(table.log_ratio(parts)) for parts in ratios]
    corrected = holm([interval.p for interval in intervals]).tolist()
    masks = thirds(table.steps)
    judged = []
    for (first, second, bits, _, _), parts, interval, p in zip(found, ratios, intervals, corrected, strict=True):
        by_layers = table.interval(table.by_layers(parts))
        by_third = {name: table.ratio(parts, mask) for name, mask in masks}
        logs = table.alone(parts)
        total = float(table.weights[np.isfinite(logs)].sum())
        better = float(table.weights[logs < 0].sum()) / total if total > 0 else math.nan
        judged.append(PairedComparison(first, second, bits, interval, by_layers, p, by_third, better))
    return tuple(judged)


def over(first: Mix, second: Mix) -> Mix:
    """The ratio of two mixes."""
    return [*first, *((c, -part) for c, part in second)]


def compare_layers(
    table: StepTable, families: Sequence[Family], targets: Sequence[float], tensors: Sequence[str]
) -> tuple[dict[str, Floats], tuple[str, ...], tuple[LayerChoice, ...]]:
    """The methods that can be compared at the decisive target, tensor by tensor, at equal bits of the tensor itself.

    Returns:
        label -> (tensors,) error, NaN where the method cannot be compared, empty for fewer than two methods; (tensors,)
        label of the method with the least error, empty where fewer than two can be compared; and the tensors where it
        is another one than the leader over all tensors, by more than :data:`LEVEL`.
    """
    k = decisive(families, targets)
    order = ranked(families, k) if k >= 0 else []
    if len(order) < 2:
        return {}, ("",) * len(tensors), ()
    leader, tested = order[0].label, 0
    at = {family.label: np.full(len(tensors), np.nan) for family in order}
    labels = []
    found: list[tuple[str, str, float, Interval]] = []
    for place, tensor in enumerate(tensors):
        # label -> error on this tensor at equal bits of it, and the mix that makes it
        own: dict[str, tuple[float, Mix]] = {}
        bits, errors = table.layer_bits[:, place], table.layer_variance[:, place]
        for family, here in zip(order, all_at_bits(curves_of(order, bits, errors), targets[k]), strict=True):
            if here.variance > 0:
                own[family.label] = (here.variance, here.among(family.members).mix(bits))
                at[family.label][place] = here.variance
        best = min(own, key=lambda label: own[label][0]) if len(own) > 1 else ""
        labels.append(best)
        tested += max(len(own) - 1, 0)
        ratio = own[best][0] / own[leader][0] if best and leader in own else 1.0
        if ratio <= 1 / (1 + LEVEL):
            logs = table.log_ratio(over(own[best][1], own[leader][1]), place)
            found.append((tensor, best, ratio, table.interval(logs)))
    # Every method of every tensor could have been the best one, so all of them count.
    unused = np.ones(max(tested - len(found), 0))
    corrected = holm(np.concatenate([[interval.p for *_, interval in found], unused]))
    choices = tuple(
        LayerChoice(tensor, float(targets[k]), best, leader, ratio, interval, float(p))
        for (tensor, best, ratio, interval), p in zip(found, corrected, strict=False)
    )
    return at, tuple(labels), choices
