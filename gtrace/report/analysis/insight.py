"""Where the error is: which tensor to give more bits, and how much that gains at the same bits in all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gtrace.planning.curves import EXACT, Curves
from gtrace.planning.make import Budget, choose
from gtrace.report.analysis.equal_bits import PREFERRED_BITS
from gtrace.report.names import number

if TYPE_CHECKING:
    from gtrace.report.analysis.families import Configuration
    from gtrace.report.analysis.results import SweepAnalysis

#: A plan that takes away a smaller part of the error than this is not worth a sentence.
WORTH_SAYING = 0.05
#: Tensors that have a bar of their own.
MOST_BARS = 6


@dataclass(frozen=True, slots=True)
class TensorShare:
    """A tensor, or several that are shown as one.

    Attributes:
        name: of the tensor, or how many others there are.
        elements: share of all elements.
        energy: share of the gradient's energy.
        bits: measured bits per value in the plan, the least and the most of the tensors.
    """

    name: str
    elements: float
    energy: float
    bits: tuple[float, float]


@dataclass(frozen=True, slots=True)
class LayerInsight:
    """What a codec for each tensor gains over one codec for all, at the same bits.

    Attributes:
        tensor: the one with the most energy.
        rest: mean bits per value of all others in the plan.
        codec: spec that all tensors share in the comparison.
        bits: measured bits per value of that, which the plan does not exceed.
        gain: error of the one codec over the error of the plan, more than 1.
        shares: the tensors with the most energy, and the others as one.
    """

    tensor: TensorShare
    rest: float
    codec: str
    bits: float
    gain: float
    shares: tuple[TensorShare, ...]

    @property
    def sentences(self) -> tuple[str, str]:
        """Which tensor matters, and what to do about it."""
        own = self.tensor
        drops = f"drops {number(self.gain, 2)} times" if self.gain >= 2 else f"drops by {1 - 1 / self.gain:.0%}"
        fact = f"{own.name} is {_share(own.elements)} of parameters and {_share(own.energy)} of gradient energy."
        advice = (
            f"Give it {number(own.bits[0], 2)} bits and the others {number(self.rest, 2)} on average, and the error "
            f"{drops} at the same {number(self.bits)} bits per value."
        )
        return fact, advice


def layer_insight(analysis: SweepAnalysis, recommended: str | None = None) -> LayerInsight | None:
    """Plan a sweep at the bits of one configuration; None if that gains too little, or nothing can be planned.

    Options are the unbiased configurations of the sweep, since errors of others do not average out.

    Args:
        analysis: of a sweep of single tensors.
        recommended: spec of the configuration to start from; another one if it is biased, exact or None.
    """
    place = {c.spec: k for k, c in enumerate(analysis.configurations) if _option(c)}
    reference = _reference(analysis, place, recommended)
    if reference is None or len(analysis.tensors) < 2:
        return None
    options = list(place.values())
    sizes = analysis.elements
    cost = analysis.per_tensor_bits[options].T * sizes[:, None]
    error = analysis.per_tensor[options].T * analysis.energy_share[:, None]
    exact = np.stack([32.0 * sizes, np.zeros(len(sizes))])
    curves = Curves(
        tensors=analysis.tensors,
        members=tuple((name,) for name in analysis.tensors),
        codecs=(*place, EXACT),
        steps=(0,),
        sizes=sizes,
        bits=np.column_stack([cost, exact[0]])[:, None, :],
        error=np.column_stack([error, exact[1]])[:, None, :],
        energy=analysis.energy_share[:, None],
    )
    means, errors = curves.means()
    alone = list(place).index(reference)
    before = float(errors[:, alone].sum())
    bits = float(means[:, alone].sum()) / curves.elements
    if not (math.isfinite(before) and math.isfinite(bits)):
        return None
    _, choice = choose(curves, Budget("bits", bits, f"{bits:g} bits"))
    if choice is None:
        return None
    rows = np.arange(len(sizes))
    after = float(errors[rows, choice.options].sum())
    if not 0 < after <= (1 - WORTH_SAYING) * before:
        return None
    spent = means[rows, choice.options]
    order = np.argsort(-analysis.energy_share, kind="stable")
    first, others = int(order[0]), order[1:]
    return LayerInsight(
        tensor=_shown(analysis, spent, order[:1], analysis.tensors[first]),
        rest=float(spent[others].sum() / sizes[others].sum()),
        codec=reference,
        bits=bits,
        gain=before / after,
        shares=tuple(_shares(analysis, spent, order)),
    )


def _option(c: Configuration) -> bool:
    return not c.partial and c.bias_known and c.bias == 0 and 0 < c.relative_variance < math.inf and c.bits > 0


def _reference(analysis: SweepAnalysis, place: dict[str, int], recommended: str | None) -> str | None:
    """The recommended configuration, or the one with the least error among those of about three bits."""
    if recommended in place:
        return recommended
    front = [analysis.configurations[k] for k in place.values() if analysis.configurations[k].pareto]
    return min(front, key=lambda c: abs(c.bits - PREFERRED_BITS)).spec if front else None


def _shares(analysis: SweepAnalysis, spent: np.ndarray, order: np.ndarray) -> list[TensorShare]:
    most = len(order) if len(order) <= MOST_BARS else MOST_BARS - 1
    names = [analysis.tensors[k] for k in order[:most]]
    found = [_shown(analysis, spent, order[k : k + 1], name) for k, name in enumerate(names)]
    rest = order[most:]
    return [*found, _shown(analysis, spent, rest, f"{len(rest)} others")] if len(rest) else found


def _shown(analysis: SweepAnalysis, spent: np.ndarray, which: np.ndarray, name: str) -> TensorShare:
    per_value = spent[which] / np.maximum(1, analysis.elements[which])
    return TensorShare(
        name,
        float(analysis.elements[which].sum() / analysis.elements.sum()),
        float(analysis.energy_share[which].sum()),
        (float(per_value.min()), float(per_value.max())),
    )


def _share(part: float) -> str:
    return f"{part:.0%}" if part >= 0.005 else "less than 1%"
