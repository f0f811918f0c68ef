"""Results by group of tensors: what each codec makes of the convolutions, the embedding, each layer.

A group is a part of the rows of a sweep and is summed up as the whole is by
:func:`~gtrace.report.analysis.sweep.analyze`: relative variance is ``sum squared_error / sum energy`` and bits are
``sum bits n / sum n`` over the tensors and steps of the group, so tensors count by their elements and energies.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.errors import UsageError, suggest
from gtrace.report.analysis.sweep import analyze
from gtrace.types import WHOLE_MODEL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gtrace.report.analysis.cells import Coder
    from gtrace.report.analysis.results import SweepAnalysis
    from gtrace.sweep import SweepResult


#: ``--group`` without globs: a group for every layer, or for every tensor
BY_LAYER, BY_TENSOR = "layer", "tensor"
#: what is in no group
OTHERS = "(others)"


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Some tensors of a sweep.

    Attributes:
        name: of the group.
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
    """Sum a sweep up group by group.

    Args:
        result: the sweep; rows of the whole model are in no group.
        groups: ``NAME=GLOB`` or ``NAME=GLOB,GLOB`` each; or the one word ``layer`` (tensors whose names differ in the
            last part alone: ``conv1.weight`` and ``conv1.bias``) or ``tensor``. The first group that matches a tensor
            has it; what no group has goes to a last one, ``(others)``.
        workers: as of :func:`~gtrace.report.analysis.sweep.analyze`.
        coder: likewise.

    Raises:
        UsageError: no such form, a name given twice, a glob that matches no tensor, or no rows of single tensors.
    """
    column = result["tensor"]
    tensors = [name for name in dict.fromkeys(column.tolist()) if name != WHOLE_MODEL]
    if not tensors:
        raise UsageError("--group: the sweep has no rows of single tensors, only of the whole model")
    of_tensor = assign(tensors, groups)
    energies = {name: _energy(result, column == name) for name in tensors}
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
    last = [group for group in found if group.name == OTHERS]
    return [group for group in found if group.name != OTHERS] + last


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
            raise UsageError(
                f"--group: '{text}' needs NAME=GLOB, e.g. conv='conv*', or {BY_LAYER} or {BY_TENSOR} alone"
            )
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
    return {
        tensor: of_tensor[tensor] for tensor in sorted(tensors, key=lambda t: [*parsed, OTHERS].index(of_tensor[t]))
    }


def _energy(result: SweepResult, mask: np.ndarray[Any, np.dtype[np.bool_]]) -> float:
    """||g||^2 of a tensor over its steps; each of its rows tells that of one step."""
    steps, first = np.unique(result["step"][mask], return_index=True)
    return float(np.nansum(result["energy"][mask][first])) if steps.size else 0.0
