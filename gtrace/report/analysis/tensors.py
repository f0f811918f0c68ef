"""Results by tensor: what each codec makes of groups of them, and which ones to give more bits.

A group is a part of the rows of a sweep and is summed up as the whole is by
:func:`~gtrace.report.analysis.sweep.analyze`: relative variance is ``sum squared_error / sum energy`` and bits are
``sum bits n / sum n`` over the tensors and steps of the group, so tensors count by their elements and energies.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gtrace.errors import UsageError, suggest
from gtrace.planning.curves import EXACT, Curves
from gtrace.planning.make import Budget, choose
from gtrace.report.analysis.families import PREFERRED_BITS
from gtrace.report.analysis.sweep import SweepAnalysis, analyze
from gtrace.report.names import number
from gtrace.types import WHOLE_MODEL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gtrace.report.analysis.cells import Coder
    from gtrace.sweep import SweepResult


#: ``--group`` without globs: a group for every layer, or for every tensor
BY_LAYER, BY_TENSOR = "layer", "tensor"
#: what is in no group
OTHERS = "(others)"


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Some tensors of a sweep.

    Attributes:
        tensors: their names, in the sweep's order.
        elements: of all of them together, at one step.
        energy_share: their part of ||g||^2 over all tensors and steps.
        analysis: of their rows alone.
    """

    name: str
    tensors: tuple[str, ...]
    elements: int
    energy_share: float
    analysis: SweepAnalysis


def group_tensors(
    result: SweepResult, groups: Sequence[str], *, workers: int | None = None, coder: Coder = "huffman"
) -> list[TensorGroup]:
    """Sum a sweep up group by group; ``workers`` and ``coder`` as of :func:`~gtrace.report.analysis.sweep.analyze`.

    A group is ``NAME=GLOB`` or ``NAME=GLOB,GLOB``; or ``groups`` is the one word ``layer`` (tensors whose names differ
    in the last part alone: ``conv1.weight`` and ``conv1.bias``) or ``tensor``. The first group that matches a tensor
    has it; what no group has goes to a last one, ``(others)``. Rows of the whole model are in no group.

    Raises:
        UsageError: no such form, a name given twice, a glob that matches no tensor, or no rows of single tensors.
    """
    column = result["tensor"]
    tensors = [name for name in dict.fromkeys(column.tolist()) if name != WHOLE_MODEL]
    if not tensors:
        raise UsageError("--group: the sweep has no rows of single tensors, only of the whole model")
    of_tensor = assign(tensors, groups)
    # Each row of a tensor has its ||g||^2 at one step.
    energies = {}
    for name in tensors:
        mask = column == name
        _, first = np.unique(result["step"][mask], return_index=True)
        energies[name] = float(np.nansum(result["energy"][mask][first]))
    total = sum(energies.values())
    found = []
    for group in dict.fromkeys(of_tensor.values()):
        members = tuple(name for name in tensors if of_tensor[name] == group)
        mask = np.isin(column, members)
        part = dataclasses.replace(result, columns={name: values[mask] for name, values in result.columns.items()})
        part = dataclasses.replace(part, warnings=(), times=None, details={})
        analysis = analyze(part, group, workers=workers, coder=coder)
        share = sum(energies[name] for name in members) / total if total else float("nan")
        found.append(TensorGroup(group, members, int(analysis.elements.sum()), share, analysis))
    return found


def assign(tensors: Sequence[str], groups: Sequence[str]) -> dict[str, str]:
    """Each tensor's group, as :func:`group_tensors` reads ``groups``; ``(others)`` for what is in none.

    Raises:
        UsageError: no such form, a name given twice, or a glob that matches no tensor.
    """
    if list(groups) == [BY_TENSOR]:
        return {name: name for name in tensors}
    if list(groups) == [BY_LAYER]:
        return {name: name.rpartition(".")[0] or name for name in tensors}
    parsed: dict[str, list[str]] = {}
    for text in groups:
        name, equals, globs = text.partition("=")
        patterns = [glob.strip() for glob in globs.split(",") if glob.strip()]
        if not equals or not name.strip() or not patterns:
            alone = f"{BY_LAYER} or {BY_TENSOR} alone"
            raise UsageError(f"--group: '{text}' needs NAME=GLOB, e.g. conv='conv*', or {alone}")
        if name.strip() in parsed:
            raise UsageError(f"--group: '{name.strip()}' is given twice; put its globs into one, with commas")
        for glob in patterns:
            if not any(fnmatch.fnmatchcase(tensor, glob) for tensor in tensors):
                raise UsageError(f"--group: no tensor matches '{glob}'; {suggest(glob, tensors)}")
        parsed[name.strip()] = patterns
    of_tensor = dict.fromkeys(tensors, OTHERS)
    for name, patterns in reversed(parsed.items()):
        for tensor in tensors:
            if any(fnmatch.fnmatchcase(tensor, glob) for glob in patterns):
                of_tensor[tensor] = name
    order = [*parsed, OTHERS]
    return dict(sorted(of_tensor.items(), key=lambda item: order.index(item[1])))


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
        rest: mean bits per value of all others in the plan.
        codec: spec that all tensors share in the comparison.
        bits: measured bits per value of that, which the plan does not exceed.
        gain: error of the one codec over the error of the plan, more than 1.
        shares: the tensors with the most energy, and the others as one.
    """

    rest: float
    codec: str
    bits: float
    gain: float
    shares: tuple[TensorShare, ...]

    @property
    def sentences(self) -> tuple[str, str]:
        """Which tensor matters, and what to do about it."""
        own = self.shares[0]
        drops = f"drops {number(self.gain, 2)} times" if self.gain >= 2 else f"drops by {1 - 1 / self.gain:.0%}"
        parts = [f"{part:.0%}" if part >= 0.005 else "less than 1%" for part in (own.elements, own.energy)]
        fact = f"{own.name} is {parts[0]} of parameters and {parts[1]} of gradient energy."
        advice = (
            f"Give it {number(own.bits[0], 2)} bits and the others {number(self.rest, 2)} on average, and the error "
            f"{drops} at the same {number(self.bits)} bits per value."
        )
        return fact, advice


def layer_insight(analysis: SweepAnalysis, recommended: str | None = None) -> LayerInsight | None:
    """Plan a sweep at the bits of one configuration; None if that gains too little, or nothing can be planned.

    Options are the unbiased configurations of the sweep, since errors of others do not average out. The one to start
    from has the spec ``recommended``; it is another one if that is biased, exact or None.
    """
    place = {
        c.spec: k for k, c in enumerate(analysis.configurations) if c.averages_out and not c.partial and c.bits > 0
    }
    # Without a recommended one, that with the least error among those of about three bits.
    front = [analysis.configurations[k] for k in place.values() if analysis.configurations[k].pareto]
    if recommended not in place and front:
        recommended = min(front, key=lambda c: abs(c.bits - PREFERRED_BITS)).spec
    if recommended not in place or len(analysis.tensors) < 2:
        return None
    options = list(place.values())
    sizes = analysis.elements
    cost = analysis.single.layer_bits[options].T * sizes[:, None]
    error = analysis.per_tensor[options].T * analysis.energy_share[:, None]
    curves = Curves(
        tensors=analysis.tensors,
        members=tuple((name,) for name in analysis.tensors),
        codecs=(*place, EXACT),
        steps=(0,),
        sizes=sizes,
        bits=np.column_stack([cost, 32.0 * sizes])[:, None, :],
        error=np.column_stack([error, np.zeros(len(sizes))])[:, None, :],
        energy=analysis.energy_share[:, None],
    )
    means, errors = curves.means()
    alone = list(place).index(recommended)
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
    most = len(order) if len(order) <= MOST_BARS else MOST_BARS - 1
    shares = [_shown(analysis, spent, which) for which in (*np.split(order[:most], most), order[most:]) if len(which)]
    return LayerInsight(
        rest=float(spent[order[1:]].sum() / sizes[order[1:]].sum()),
        codec=recommended,
        bits=bits,
        gain=before / after,
        shares=tuple(shares),
    )


def _shown(analysis: SweepAnalysis, spent: np.ndarray, which: np.ndarray) -> TensorShare:
    per_value = spent[which] / np.maximum(1, analysis.elements[which])
    name = analysis.tensors[which[0]] if len(which) == 1 else f"{len(which)} others"
    elements = float(analysis.elements[which].sum() / analysis.elements.sum())
    bits = (float(per_value.min()), float(per_value.max()))
    return TensorShare(name, elements, float(analysis.energy_share[which].sum()), bits)
